"""Parts of a page: the shard of one device of a model, and the strides of pages in another engine's memory.

**Shard.** A model is cut by KV heads over ``ranks`` (tensor parallel) and by layers over ``stages`` (pipeline
parallel). Worked example: 10 layers of 8 heads over 2 ranks and 4 stages. The stages have 3, 3, 2 and 2 layers. Rank 1
of stage 2 is shard 5 of 8 and has heads 4..7 of layers 6 and 7. With 16 ranks, two ranks hold each head, and the lower
one writes it.

**Strides.** A page's bytes are ordered ``[layer][kv_head][token][content]``. In kvstore's own memory a page is
contiguous. In another engine's memory a page is one block of each layer's tensor, and heads and tokens may be in any
order inside the block. All numbers are bytes, offsets from the start of the memory. Examples for B blocks, L layers, H
heads, N tokens, C bytes of content::

    contiguous, S bytes apart          layers [0]           block S       dims []                      piece L*H*N*C
    a tensor [B, H, N, C] per layer    layers [0, B*H*N*C]  block H*N*C   dims []                      piece H*N*C
    a tensor [B, N, H, C] per layer    layers as above      block H*N*C   dims [(H, C), (N, H*C)]      piece C
    K and V apart, each [B, N, H, C/2] layers as above      block H*N*C/2 dims [(H, C/2), (N, H*C/2),  piece C/2
                                                                                (2, B*H*N*C/2)]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout


@dataclass(frozen=True)
class Shard:
    """The part of every page of ``layout`` in rank ``rank`` of ``ranks`` and stage ``stage`` of ``stages``; by default
    the whole page.

    Its bytes are ordered as in a page, ``[layer][head][token][content]``, with only the layers and heads of the shard.

    Raises:
        InvalidRequest: a value is not an integer, is out of range, or does not divide the heads or layers. The error
            names the field.
    """

    layout: Layout
    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: int = 1

    def __post_init__(self) -> None:
        for name in ("rank", "ranks", "stage", "stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidRequest(name, f"must be an integer (got {value!r})")
        for name in ("ranks", "stages"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"must be at least 1 (got {getattr(self, name)})")
        assert self.heads and self.layers  # raises InvalidRequest if the numbers do not fit the layout

    @property
    def number(self) -> int:
        """This shard's number, from 0 to ``count`` - 1."""
        return self.stage * self.ranks + self.rank

    @property
    def count(self) -> int:
        """The number of shards of a page."""
        return self.stages * self.ranks

    @property
    def cut(self) -> dict[str, int]:
        """Rank, ranks, stage and stages by name."""
        return {"rank": self.rank, "ranks": self.ranks, "stage": self.stage, "stages": self.stages}

    @cached_property
    def heads(self) -> tuple[int, int]:
        """The heads ``[start, stop)`` of this shard, including heads that another rank writes."""
        return self.layout.held_heads(self.rank, self.ranks)

    @cached_property
    def layers(self) -> tuple[int, int]:
        """The layers ``[start, stop)`` of this shard."""
        return self.layout.shard_layers(self.stage, self.stages)

    @cached_property
    def writes(self) -> bool:
        """True if this shard writes its heads. If several ranks have the same heads, the lowest one writes them."""
        return self.layout.shard_heads(self.rank, self.ranks) is not None

    @cached_property
    def offset(self) -> int:
        """The offset of this shard's heads in each layer of a page, in bytes."""
        return self.heads[0] * self.layout.head_bytes

    @cached_property
    def width(self) -> int:
        """The size in bytes of this shard's heads in one layer of a page."""
        return (self.heads[1] - self.heads[0]) * self.layout.head_bytes

    @cached_property
    def nbytes(self) -> int:
        """The size in bytes of this shard's part of a page."""
        return (self.layers[1] - self.layers[0]) * self.width

    def part(self, pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return a view ``[n, layers, width]`` of this shard's bytes in ``pages`` ``[n, page_bytes]``. Each page must
        be contiguous."""
        first, last = self.layers
        layers = pages.reshape(len(pages), self.layout.layers, self.layout.layer_bytes)
        return layers[:, first:last, self.offset : self.offset + self.width]

    def unpacked(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return a view ``[n, layers, width]`` of ``rows`` ``[n, nbytes]``. Each row must be contiguous."""
        return rows.reshape(len(rows), self.layers[1] - self.layers[0], self.width)


LAYERS_MAX: Final = 256
DIMS_MAX: Final = 4
NUMBER_MAX: Final = 1 << 56  # the largest offset, stride, count or length

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Strides:
    """The places of a page's bytes in the memory of another engine; see the module. All values are bytes.

    This class does not check that pages do not overlap; a writer has to.

    Attributes:
        layers: offset of the first block of each layer.
        block: distance between two consecutive blocks of a layer.
        dims: count and stride of each dimension between layer and piece, in the order of the page's bytes.
        piece: number of contiguous bytes.

    Raises:
        InvalidRequest: there are no layers, or too many layers or dimensions, or a number is out of range.
    """

    layers: Sequence[int]
    block: int
    dims: Sequence[tuple[int, int]]
    piece: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "dims", tuple((count, stride) for count, stride in self.dims))
        if not 1 <= len(self.layers) <= LAYERS_MAX or len(self.dims) > DIMS_MAX:
            raise InvalidRequest("strides", f"must have 1 to {LAYERS_MAX} layers and at most {DIMS_MAX} dimensions")
        counts = [self.piece, *(count for count, _ in self.dims)]
        if min(counts) < 1 or not all(0 <= number < NUMBER_MAX for number in self.numbers()):
            raise InvalidRequest("strides", f"must be positive lengths and offsets, all below {NUMBER_MAX}")

    @classmethod
    def whole(cls, page_bytes: int, stride: int) -> Strides:
        """Return the strides of contiguous pages that begin ``stride`` bytes apart."""
        return cls((0,), stride, (), page_bytes)

    def numbers(self) -> list[int]:
        """Return all numbers: piece, block, layers, dimensions."""
        return [self.piece, self.block, *self.layers, *(number for dim in self.dims for number in dim)]

    @property
    def page_bytes(self) -> int:
        """The size in bytes of all pieces of a page."""
        return len(self.layers) * self.piece * math.prod(count for count, _ in self.dims)

    def nbytes(self, frames: int) -> int:
        """Return the smallest size of memory that contains ``frames`` pages, in bytes."""
        inside = sum((count - 1) * stride for count, stride in self.dims)
        return max(self.layers) + (frames - 1) * self.block + inside + self.piece

    def part(self, number: int, parts: int) -> Strides | None:
        """Return the strides of part ``number`` of ``parts`` equal parts of a page, for example of a layer. None if
        strides cannot describe the part."""
        layers = len(self.layers)
        if layers % parts == 0:
            each = layers // parts
            return replace(self, layers=self.layers[number * each : (number + 1) * each])
        if parts % layers:
            return None
        parts //= layers
        first, number = self.layers[number // parts], number % parts
        for at, (count, stride) in enumerate(self.dims):
            if count % parts == 0:
                each = count // parts
                dims = [(each, stride), *self.dims[at + 1 :]]
                return Strides((first + number * each * stride,), self.block, dims, self.piece)
            if parts % count:
                return None
            parts //= count
            first, number = first + number // parts * stride, number % parts
        if self.piece % parts:
            return None
        piece = self.piece // parts
        return Strides((first + number * piece,), self.block, (), piece)

    def pieces(self) -> tuple[Addresses, Addresses]:
        """Return the offsets and lengths of the pieces of the first page, in the order of its bytes. Adjacent pieces
        are merged."""
        places = np.asarray(self.layers, np.uint64)
        for count, stride in self.dims:
            places = (places[:, None] + np.arange(count, dtype=np.uint64) * np.uint64(stride)).reshape(-1)
        starts = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1] + np.uint64(self.piece)]))
        counts = np.diff(np.append(starts, len(places)))
        return places[starts], (counts * self.piece).astype(np.uint64)

    def views(self, memory: npt.NDArray[np.uint8], frames: int) -> list[npt.NDArray[np.uint8]]:
        """Return a view ``[frames, *counts of dims, piece]`` of each layer in ``memory``, which must have at least
        ``nbytes(frames)`` bytes."""
        assert memory.flags.c_contiguous and memory.nbytes >= self.nbytes(frames), memory.nbytes
        shape = (frames, *(count for count, _ in self.dims), self.piece)
        strides = (self.block, *(stride for _, stride in self.dims), 1)
        flat = memory.reshape(-1)
        return [np.lib.stride_tricks.as_strided(flat[first:], shape, strides) for first in self.layers]
