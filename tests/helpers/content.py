"""What the processes of these tests store: prompts from a seed, page bytes from (key, offset).

Every 8-byte word of a page is a function of the page's key and of its own place in the page. So a byte of another page,
of another layer or of an earlier use of the frame is seen wherever it turns up, by any process, without sharing data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore import Keys, Layout
from kvstore.model.prefix import as_tokens, root_key

Pages = npt.NDArray[np.uint8]

# Pages of 16 KiB with four heads, so that up to four ranks write one; and of 512 KiB, 32 times larger.
SMALL = Layout(model="process-test", layers=4, kv_heads=4, head_dim=32, dtype="uint8", page_tokens=16)
LARGE = Layout(model="process-test-large", layers=8, kv_heads=8, head_dim=64, dtype="bfloat16", page_tokens=32)
# Layers that do not divide evenly; one head that all ranks hold; fewer heads than ranks.
MLA = Layout(model="process-test-mla", layers=5, mla_latent=64, mla_rope=16, page_tokens=16)
FEW = Layout(model="process-test-few", layers=5, kv_heads=2, head_dim=32, dtype="uint8", page_tokens=16)
LAYOUTS = {"small": SMALL, "large": LARGE, "mla": MLA, "few": FEW}
assert (SMALL.page_bytes, LARGE.page_bytes) == (16 << 10, 512 << 10)

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def prompt(seed: int, pages: int, layout: Layout = SMALL) -> npt.NDArray[np.uint32]:
    """Tokens of ``pages`` full pages and one more. A longer prompt of the same seed begins with the shorter ones."""
    places = np.arange(pages * layout.page_tokens + 1, dtype=np.uint64) + (np.uint64(seed) << np.uint64(32))
    mixed = (places * _MIX) ^ (places * _STEP >> np.uint64(29))
    return (mixed >> np.uint64(17)).astype(np.uint32)


def chain(seed: int, pages: int, layout: Layout = SMALL, salt: str = "") -> Keys:
    """Keys of the ``pages`` pages of ``prompt(seed, pages)``."""
    tokens = as_tokens(prompt(seed, pages, layout)[:-1])
    return Keys.of(tokens, layout.page_tokens, root_key(layout, salt))


def contents(keys: Keys, layout: Layout = SMALL) -> Pages:
    """The bytes of these pages, ``[pages, page_bytes]``."""
    halves = np.frombuffer(b"".join(keys.links), np.uint64).reshape(-1, 2)
    places = np.arange(layout.page_bytes // 8, dtype=np.uint64) * _STEP
    words = (halves[:, :1] + places) ^ halves[:, 1:]
    return np.ascontiguousarray(words).view(np.uint8)


def layer_of(pages: Pages, layer: int, layout: Layout = SMALL, heads: tuple[int, int] | None = None) -> Pages:
    """One layer (or these heads of it) of every page, ``[pages, bytes]``, contiguous."""
    start, stop = layout.byte_range(layer, *(heads or (0, None)))
    return np.ascontiguousarray(pages[:, start:stop])


def first_wrong(found: Pages, expected: Pages) -> str:
    """Where ``found`` differs, for a message; "" where it does not."""
    if np.array_equal(found, expected):
        return ""
    page, byte = (int(i) for i in np.argwhere(found != expected)[0])
    wrong = int((found != expected).sum())
    return f"{wrong} wrong bytes, the first at byte {byte} of page {page} of {len(expected)}"


def mismatch(match: Any, keys: Keys, layout: Layout = SMALL) -> str:
    """Where the data of a match of ``keys`` is wrong; "" where every byte of every matched page is right."""
    return first_wrong(match.data, contents(keys[: match.pages], layout)) if match.pages else ""
