"""Memory as another engine has it: for each layer keys, then values, each ``[block][token][head][content / 2]``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.model.layout import Layout
from kvstore.model.shard import Strides

Bytes = npt.NDArray[np.uint8]


def foreign_strides(layout: Layout, blocks: int) -> Strides:
    """Where pages of that layout lie in such memory of so many blocks."""
    tokens, heads, content = layout.page_tokens, layout.kv_heads, layout.token_bytes // 2
    half = blocks * tokens * heads * content
    dims = [(heads, content), (tokens, heads * content), (2, half)]
    return Strides([layer * 2 * half for layer in range(layout.layers)], tokens * heads * content, dims, content)


def write_foreign(memory: Bytes, layout: Layout, frames: list[int], pages: Bytes) -> None:
    """Put pages ``[n, page_bytes]`` into blocks of such memory, by numpy's own arithmetic."""
    tokens, heads, content = layout.page_tokens, layout.kv_heads, layout.token_bytes // 2
    theirs = memory.reshape(layout.layers, 2, -1, tokens, heads, content)
    ours = pages.reshape(-1, layout.layers, heads, tokens, 2, content)
    theirs[:, :, frames] = ours.transpose(1, 4, 0, 3, 2, 5)
