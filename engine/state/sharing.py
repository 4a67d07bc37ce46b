"""Sharing: prompts that begin alike have one copy of their common full pages in the arena.

A page of a prompt has a name (``events.Submitted.names``) that stands for all tokens up to its end. Whoever gets frames
takes over the leading pages that another sequence has whole, and frames of its own for the rest: also for the page in
which its answer begins, so nobody ever writes into a frame that several have. A frame is free when none has it.

Worked example, pages of 16 tokens, three prompts that begin with the same 40 tokens and differ from there::

    first   pages a b 1 .      4 frames taken
    second  pages a b 2 .      waits until the first has b whole; 2 frames taken, a and b shared
    third   pages a b 3 .      2 frames taken: 8 frames where 12 were needed
    the first ends             2 frames free; a and b are still had by two
"""

from __future__ import annotations

from typing import Final

from engine.state.sequence import Phase, Sequence

WHOLE: Final = frozenset((Phase.COMPUTING, Phase.DECODING, Phase.HELD, Phase.LEFT))  # ``cached`` says what is there
COMING: Final = frozenset((Phase.LOADING, Phase.COMPUTING))


class Frames:
    """How many frames are free, and who has which pages in common.

    Attributes:
        free: frames that no sequence has.
    """

    def __init__(self, frames: int) -> None:
        self.free = frames
        self._numbers = 0
        self._users: dict[int, int] = {}  # of the pages that more than one sequence has
        self._holders: dict[bytes, dict[int, Sequence]] = {}  # by the name of their first page

    @property
    def shared(self) -> int:
        """Frames that more than one sequence has."""
        return len(self._users)

    def best(self, sequence: Sequence) -> tuple[Sequence | None, int, bool]:
        """Who has most of its leading pages whole, how many, and whether somebody is at more of them right now."""
        donor, whole, coming = None, 0, 0
        if sequence.names:
            for other in self._holders.get(sequence.names[0], {}).values():
                common = _common(sequence.names, other.names)
                there = min(common, self._whole(other))
                if there > whole:
                    donor, whole = other, there
                if other.phase in COMING:
                    coming = max(coming, common)
        return donor, whole, coming > whole

    def take(self, sequence: Sequence, donor: Sequence | None, shared: int) -> None:
        """It has its frames from now on, the first ``shared`` of them those of ``donor``."""
        first = self._numbers
        self._numbers += sequence.pages - shared
        sequence.table = [*(donor.table[:shared] if donor is not None else ()), *range(first, self._numbers)]
        for page in sequence.table[:shared]:
            self._users[page] = self._users.get(page, 1) + 1
        self.free -= sequence.pages - shared
        sequence.holds = True
        if sequence.names:
            self._holders.setdefault(sequence.names[0], {})[sequence.number] = sequence

    def give_back(self, sequence: Sequence) -> None:
        """It has none any more."""
        for page in sequence.table:
            users = self._users.pop(page, 1) - 1
            if users > 1:
                self._users[page] = users
            self.free += not users
        sequence.table, sequence.holds = [], False
        if sequence.names:
            holders = self._holders[sequence.names[0]]
            del holders[sequence.number]
            if not holders:
                del self._holders[sequence.names[0]]

    def check(self, sequences: list[Sequence], total: int) -> None:
        """Free frames and the different ones that these have are all there are."""
        users: dict[int, int] = {}
        for sequence in sequences:
            assert len(sequence.table) == (sequence.pages if sequence.holds else 0), sequence
            for page in sequence.table:
                users[page] = users.get(page, 0) + 1
        assert self.free >= 0 and self.free + len(users) == total, (self.free, len(users), total)
        assert self._users == {page: count for page, count in users.items() if count > 1}
        holders = {number for each in self._holders.values() for number in each}
        assert holders == {one.number for one in sequences if one.holds and one.names}

    @staticmethod
    def _whole(sequence: Sequence) -> int:
        """How many of its leading pages are complete, and stay as they are."""
        there = sequence.phase in WHOLE and sequence.attempt is None
        return min(sequence.cached // sequence.page_tokens, len(sequence.names)) if there else 0


def _common(one: tuple[bytes, ...], other: tuple[bytes, ...]) -> int:
    """How many leading pages have the same names: a page that has, has parents that have."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
