"""Piece: KV of some tokens in one layer, as it travels from arena to arena."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]


class PieceData(Protocol):
    """The bytes of a piece, which may not have arrived yet."""

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        ...

    def read_into(self, rows: Sequence[Bytes]) -> None:
        """Fill these arrays, in order; their total size is the same. Once, before the next piece is requested.

        Raises:
            NodeUnavailable, DeadlineExceeded: they did not come; the arrays are undefined.
        """
        ...


class LocalData:
    """Bytes that are in memory: a whole array, or rows of one."""

    def __init__(self, rows: Bytes) -> None:
        self.rows = rows

    @property
    def nbytes(self) -> int:
        """See ``PieceData``."""
        return self.rows.nbytes

    def read_into(self, rows: Sequence[Bytes]) -> None:
        """See ``PieceData``."""
        whole = np.ascontiguousarray(self.rows).reshape(-1)
        start = 0
        for target in rows:
            target[...] = whole[start : start + target.nbytes].reshape(target.shape)
            start += target.nbytes


@dataclass(frozen=True)
class Piece:
    """KV of some tokens in one layer.

    Attributes:
        token_start: a multiple of the page's tokens.
        tokens: a multiple of them too, or fewer: then these are the tokens of a last page that is not full.
        data: ``[pages][kv_head][token][content]``, one layer of the page format, encoded by the requested codec.
        checksum: xxh3_64 of ``data``; the user compares it.
    """

    layer: int
    token_start: int
    tokens: int
    data: PieceData
    checksum: int


def checksum_of(rows: Iterable[Bytes]) -> int:
    """xxh3_64 over these arrays, in order; the rows of each may be strided."""
    digest = xxhash.xxh3_64()
    for part in rows:
        for row in (part,) if part.flags.c_contiguous else part:
            digest.update(row.data)
    return digest.intdigest()
