"""GroupedMatch: what a lookup, a get or a lease of a cache with several groups found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Tier


class GroupedMatch:
    """How much of a prompt was found in every group. A value: it does not change.

    Attributes:
        tokens: the boundary: prompt tokens covered.
        pages: of each group the pages that this boundary needs.
        reason: why it is no longer: "" where it is as long as what was asked for, else as ``Match.reason``.
        group: number of the group that lacks a page of the next longer boundary; None where ``reason`` is "".
        data: of each group uint8 ``[len(pages[group]), page_bytes]`` where ``get`` was given no buffers, else None.
        tiers: pages of all groups by the tier they were found in.
        nodes: pages by the other node of the pool that they were found on, or came from.
    """

    __slots__ = ("data", "group", "nodes", "pages", "reason", "tiers", "tokens")

    def __init__(
        self,
        tokens: int,
        pages: tuple[range, ...],
        reason: str,
        group: int | None,
        data: list[npt.NDArray[np.uint8]] | None,
        tiers: Mapping[Tier, int],
        nodes: Mapping[str, int],
    ) -> None:
        self.tokens: Final = tokens
        self.pages: Final = pages
        self.reason: Final = reason
        self.group: Final = group
        self.data: Final = data
        self.tiers: Final = dict(tiers)
        self.nodes: Final = dict(nodes)

    def read(
        self, data: list[npt.NDArray[np.uint8]] | None, tiers: Mapping[Tier, int], nodes: Mapping[str, int]
    ) -> GroupedMatch:
        """The same match, whose pages came from there."""
        return GroupedMatch(self.tokens, self.pages, self.reason, self.group, data, tiers, nodes)

    def because(self, reason: str, group: int | None) -> GroupedMatch:
        """The same match, which is no longer for another reason."""
        return GroupedMatch(self.tokens, self.pages, reason, group, self.data, self.tiers, self.nodes)

    def __bool__(self) -> bool:
        return self.tokens > 0

    def __repr__(self) -> str:
        return f"GroupedMatch(tokens={self.tokens}, pages={self.pages}, reason={self.reason!r})"
