"""Piece: the KV of some tokens in one layer, the unit in which a hand-off moves KV between arenas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]


class PieceData(Protocol):
    """The bytes of a piece. They might not have arrived yet."""

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        ...

    def read_into(self, rows: Sequence[Bytes]) -> None:
        """Fill these arrays, in order. Their total size must be ``nbytes``.

        Must be called once, before the next piece is requested.

        Raises:
            NodeUnavailable, DeadlineExceeded: not all bytes have arrived. The contents of the arrays are undefined.
        """
        ...


class LocalData:
    """The bytes of a piece in memory: an array, or strided rows of one."""

    def __init__(self, rows: Bytes) -> None:
        self.rows = rows

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.rows.nbytes

    def read_into(self, rows: Sequence[Bytes]) -> None:
        """Copy the bytes into these arrays, in order."""
        source = np.ascontiguousarray(self.rows).reshape(-1)
        start = 0
        for target in rows:
            target[...] = source[start : start + target.nbytes].reshape(target.shape)
            start += target.nbytes


@dataclass(frozen=True)
class Piece:
    """The KV of some tokens in one layer.

    Attributes:
        layer: the layer of the model.
        token_start: the first token, a multiple of ``page_tokens``.
        tokens: a multiple of ``page_tokens``, or fewer than one page: the tokens of a last page that is not full.
        data: ``[pages][kv_head][token][content]``, one layer of the page format, encoded by the requested codec.
        checksum: xxh3_64 of ``data``, for the receiver to verify.
    """

    layer: int
    token_start: int
    tokens: int
    data: PieceData
    checksum: int


def checksum_of(rows: Iterable[Bytes]) -> int:
    """Return xxh3_64 over these arrays, in order. The rows of an array may be strided."""
    digest = xxhash.xxh3_64()
    for part in rows:
        for row in (part,) if part.flags.c_contiguous else part:
            digest.update(row.data)
    return digest.intdigest()
