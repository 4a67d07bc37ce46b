"""Checksums of pages, as records have them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash


def checksums_of(rows: npt.NDArray[np.uint8], layers: int) -> npt.NDArray[np.uint32]:
    """Low 32 bits of xxh3_64 of each layer of each page ``[pages, page_bytes]``, as uint32 ``[pages, layers]``."""
    digest = xxhash.xxh3_64_intdigest
    parts = rows.reshape(rows.shape[0] * layers, -1)
    sums = [digest(part.data) & 0xFFFFFFFF for part in parts]
    return np.array(sums, "<u4").reshape(rows.shape[0], layers)
