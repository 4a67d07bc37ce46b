"""Shard: the part of every page that one of several devices has: some heads of some layers.

A model is cut by KV heads over ``ranks`` (tensor parallel) and by layers over ``stages`` (pipeline parallel).

Worked example: 10 layers of 8 heads over 2 ranks and 4 stages. The stages have 3, 3, 2 and 2 layers; rank 1 of stage 2
is shard 5 of 8 and has heads 4..7 of layers 6 and 7. With 16 ranks each head is held by two; the lower one writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout


@dataclass(frozen=True)
class Shard:
    """What rank ``rank`` of ``ranks`` in stage ``stage`` of ``stages`` has of pages of ``layout``; by default all.

    Its bytes of a page are ordered as in the page, ``[layer][head][token][content]``, of its own layers and heads.

    Raises:
        InvalidRequest: a value is not an integer or out of range, or heads or layers do not divide by it; the error
            names it.
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
                raise InvalidRequest(name, f"must be an integer, not {value!r}")
        for name in ("ranks", "stages"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"must be at least 1, not {getattr(self, name)}")
        assert self.heads and self.layers  # raises where there are none such

    @property
    def number(self) -> int:
        """Which of the ``count`` shards it is."""
        return self.stage * self.ranks + self.rank

    @property
    def count(self) -> int:
        """Shards that make a page."""
        return self.stages * self.ranks

    @property
    def cut(self) -> dict[str, int]:
        """Its four numbers by name."""
        return {"rank": self.rank, "ranks": self.ranks, "stage": self.stage, "stages": self.stages}

    @cached_property
    def heads(self) -> tuple[int, int]:
        """Its heads ``[start, stop)``, also where another rank writes them."""
        return self.layout.held_heads(self.rank, self.ranks)

    @cached_property
    def layers(self) -> tuple[int, int]:
        """Its layers ``[start, stop)``."""
        return self.layout.shard_layers(self.stage, self.stages)

    @cached_property
    def writes(self) -> bool:
        """Whether its heads are its own to write."""
        return self.layout.shard_heads(self.rank, self.ranks) is not None

    @cached_property
    def offset(self) -> int:
        """Where in each layer of a page its heads begin, in bytes."""
        return self.heads[0] * self.layout.head_bytes

    @cached_property
    def width(self) -> int:
        """Bytes of its heads in one layer of a page."""
        return (self.heads[1] - self.heads[0]) * self.layout.head_bytes

    @cached_property
    def nbytes(self) -> int:
        """Bytes of its part of a page."""
        return (self.layers[1] - self.layers[0]) * self.width

    def part(self, pages: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A view of its bytes ``[n, layers, width]`` in pages ``[n, page_bytes]``, each contiguous."""
        first, last = self.layers
        layers = pages.reshape(len(pages), self.layout.layers, self.layout.layer_bytes)
        return layers[:, first:last, self.offset : self.offset + self.width]

    def unpacked(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A view of ``rows`` ``[n, nbytes]``, each contiguous, in the shape of the shard."""
        return rows.reshape(len(rows), self.layers[1] - self.layers[0], self.width)
