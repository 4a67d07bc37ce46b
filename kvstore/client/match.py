"""Match: what a lookup, a get or a lease found."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Tier


class Match:
    """How much of a prompt was found. A value: it does not change.

    Attributes:
        tokens: prompt tokens covered, a multiple of the layout's ``page_tokens``.
        pages: pages covered, from the first one on.
        reason: why no more pages: "" where all asked for were found, else "absent", "generation" (it changed while it
            was read), "identity" (another page has that key), "checksum", or "extent" (its frames are gone).
        data: uint8 ``[pages, page_bytes]`` where ``get`` was given no buffer, else None.
    """

    __slots__ = ("tokens", "pages", "reason", "data")

    def __init__(self, tokens: int, pages: int, reason: str, data: npt.NDArray[np.uint8] | None = None) -> None:
        self.tokens: Final = tokens
        self.pages: Final = pages
        self.reason: Final = reason
        self.data: Final = data

    @property
    def tiers(self) -> dict[Tier, int]:
        """Pages by the tier they were found in."""
        return {Tier.DRAM: self.pages} if self.pages else {}

    def __bool__(self) -> bool:
        return self.pages > 0

    def __repr__(self) -> str:
        return f"Match(tokens={self.tokens}, pages={self.pages}, reason={self.reason!r})"
