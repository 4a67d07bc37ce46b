"""Match: what a lookup, a get or a lease found."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Tier

ABSENT, GENERATION, IDENTITY = "absent", "generation", "identity"
CHECKSUM, EXTENT, IO = "checksum", "extent", "io"
ELSEWHERE: Final = (ABSENT, GENERATION, EXTENT)  # what a page may say that is in another tier (now)

NONE_BELOW: Final[Mapping[Tier, int]] = MappingProxyType({})
HERE_ALONE: Final[Mapping[str, int]] = MappingProxyType({})


class Match:
    """How much of a prompt was found. A value: it does not change.

    Attributes:
        tokens: prompt tokens covered, a multiple of the layout's ``page_tokens``.
        pages: pages covered, from the first one on.
        reason: why no more pages: "" where all asked for were found, else "absent", "generation" (it changed while it
            was read), "identity" (another page has that key), "checksum", "extent" (its frames are gone), or "io" (the
            device it is on cannot be read, or did not answer in time).
        data: uint8 ``[pages, page_bytes]`` where ``get`` was given no buffer, else None.
        nodes: pages by the other node of the pool that they were found on, or came from; those of the node that was
            asked are not among them.
    """

    __slots__ = ("tokens", "pages", "reason", "data", "nodes", "_below")

    def __init__(
        self,
        tokens: int,
        pages: int,
        reason: str,
        data: npt.NDArray[np.uint8] | None = None,
        below: Mapping[Tier, int] = NONE_BELOW,
        nodes: Mapping[str, int] = HERE_ALONE,
    ) -> None:
        self.tokens: Final = tokens
        self.pages: Final = pages
        self.reason: Final = reason
        self.data: Final = data
        self.nodes: Final = nodes
        self._below: Final = below

    @property
    def tiers(self) -> dict[Tier, int]:
        """Pages by the tier they were found in; of a page that is in several the fastest counts."""
        found = {Tier.DRAM: self.pages - sum(self._below.values()), **self._below}
        return {tier: pages for tier, pages in found.items() if pages}

    def __bool__(self) -> bool:
        return self.pages > 0

    def __repr__(self) -> str:
        return f"Match(tokens={self.tokens}, pages={self.pages}, reason={self.reason!r})"
