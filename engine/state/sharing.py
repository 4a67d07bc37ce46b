"""Sharing: prompts that begin alike have one copy of their common full pages in the arena, also one after the other.

A full page has a name (``events.Submitted.names``) that stands for all tokens up to its end and for who they belong to.
Once it is whole it is listed under that name. Whoever gets frames takes over the leading pages that are listed, and
frames of its own for the rest: also for the page in which its answer begins, so nobody ever writes into a frame that
several have.

A listed page that no sequence has any more is kept: its frame counts as free, and is evicted as soon as somebody needs
a frame, the least recently used page first. Whoever has a page has its parents. So when the pages of a sequence are
kept from the last one to the first, a page always stands behind its children, and no eviction leaves an unusable tail.

A sequence with a ring of frames (``Rules.frames_for``) has no names: its pages do not stay, so nobody shares them.

Where the model has several cache groups, a page has a frame in each. Of a sequence with a ring, the first pages of its
table alone have frames in the group with the ring, as many as the ring has: what is put there later has no number.

Worked example, pages of 16 tokens, three prompts that begin with the same 40 tokens and differ from there::

    first   pages a b 1 .      4 frames taken
    second  pages a b 2 .      waits until the first has b whole; 2 frames taken, a and b shared
    the first ends             its last page is not full: 2 frames free, of which 1 is kept; the second has a and b
    the second ends            all frames are free, of which 4 are kept, in this order: 1 2 b a
    third   pages a b 3 .      2 frames taken, a and b shared; where no other frames are free, 1 and 2 are evicted
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Final

from engine.state.sequence import Phase, Sequence

# Phases in which ``cached`` says what is there.
WHOLE: Final = frozenset((Phase.COMPUTING, Phase.DECODING, Phase.HELD, Phase.LEFT, Phase.TOLD))
COMING: Final = frozenset((Phase.LOADING, Phase.COMPUTING))
OFFER_SHARE: Final = 8  # pages are offered to the pool while less than this part of all frames is unused
OFFER_AHEAD: Final = 64  # kept pages; those that are evicted next
OFFER_MAX: Final = 32  # pages at once


@dataclass(slots=True, eq=False)
class ListedPage:
    """A whole page in the arena. Life: listed, by the sequence that has it -> kept, when nobody has it -> had again, or
    evicted.

    Attributes:
        offered: the pool was told of it since it was used last.
    """

    number: int
    name: bytes
    parent: ListedPage | None
    users: int = 0
    offered: bool = False


class Frames:
    """How many frames are free, which pages are whole, and who has which of them.

    Attributes:
        unused: frames with no page that is worth anything; ``beside``: the same of each other cache group.
        shared: frames that more than one sequence has.
        found, evicted: pages that were kept and had again, and those that left, since the start.
    """

    def __init__(self, frames: int, kept_max: int = 0, beside: Iterable[int] = ()) -> None:
        self.unused, self.beside = frames, list(beside)
        self.shared = self.found = self.evicted = 0
        self._kept_max = kept_max
        self._offers_below = max(1, frames // OFFER_SHARE) if kept_max and not self.beside else 0
        self._numbers = 0
        self._pages: dict[bytes, ListedPage] = {}
        self._kept: OrderedDict[bytes, ListedPage] = OrderedDict()  # the next one to be evicted first
        self._holders: dict[bytes, dict[int, Sequence]] = {}  # by the name of their first page

    @property
    def kept(self) -> int:
        """Frames with a page that is kept."""
        return len(self._kept)

    @property
    def free(self) -> int:
        """Frames that no sequence has: whoever comes may have them."""
        return self.unused + len(self._kept)

    # --- sequences --------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> int:
        """How many of its leading pages are listed, but for one that its prompt's last token is in."""
        low, high = 0, min(len(sequence.names), (sequence.prompt - 1) // sequence.page_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if sequence.names[middle - 1] in self._pages:
                low = middle
            else:
                high = middle - 1
        return low

    def look(self, sequence: Sequence) -> tuple[int, bool]:
        """How many pages it matches, and whether somebody is at more of them right now."""
        whole, coming = self.match(sequence), 0
        if sequence.names:
            for other in self._holders.get(sequence.names[0], {}).values():
                if other.phase in COMING:
                    coming = max(coming, _common(sequence.names, other.names))
        return whole, min(coming, (sequence.prompt - 1) // sequence.page_tokens) > whole

    def fits(self, sequence: Sequence, shared: int) -> bool:
        """Whether it can have its frames now, the first ``shared`` of them those of listed pages."""
        kept = 0
        while kept < shared and not self._pages[sequence.names[shared - 1 - kept]].users:
            kept += 1
        kept = len(self._kept) - kept
        others = zip(self.beside, sequence.beside, strict=True)
        return sequence.pages - shared <= self.unused + kept and all(own - shared <= n + kept for n, own in others)

    def take(self, sequence: Sequence, shared: int) -> list[int]:
        """It has its frames from now on. Returns the pages that were evicted for it."""
        for name in sequence.names[:shared]:
            page = self._pages[name]
            if not page.users:
                del self._kept[name]
                self.found += 1
            self.shared += page.users == 1
            page.users += 1
            page.offered = False
        evicted = []
        while not self._has(sequence, shared):
            evicted.append(self._evict())
        first = self._numbers
        self._numbers += sequence.pages - shared
        self.unused -= sequence.pages - shared
        self.beside = [n - own + shared for n, own in zip(self.beside, sequence.beside, strict=True)]
        sequence.table = [self._pages[name].number for name in sequence.names[:shared]]
        sequence.table += range(first, self._numbers)
        sequence.whole = sequence.listed = shared
        sequence.holds = True
        if sequence.names:
            self._holders.setdefault(sequence.names[0], {})[sequence.number] = sequence
        return evicted

    def reached(self, sequence: Sequence) -> None:
        """More of its tokens may be in its frames: the pages that are complete, and stay as they are, are listed.

        One that is listed for another sequence, which computed it at the same time, stays its own, and what follows it:
        nobody has a page without its parents.
        """
        if sequence.phase not in WHOLE or sequence.attempt is not None:
            return
        sequence.whole = min(sequence.cached // sequence.page_tokens, len(sequence.names))
        while sequence.listed < sequence.whole and sequence.names[sequence.listed] not in self._pages:
            self._list(sequence, sequence.listed, 1)
            sequence.listed += 1

    def give_back(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """It has none any more. Returns the pages that are gone; and of its whole pages, in order, those that stay."""
        names, freed = sequence.names, []
        for name in names[: sequence.listed]:
            page = self._pages[name]
            page.users -= 1
            self.shared -= page.users == 1
        for index in range(sequence.listed, len(sequence.table)):
            if index < sequence.whole and names[index] not in self._pages:
                self._list(sequence, index, 0)
            else:
                freed.append(sequence.table[index])
        self.unused += len(freed)
        gone = set(freed)
        for group, own in enumerate(sequence.beside):
            self.beside[group] += sum(number in gone for number in sequence.table[:own])
        for name in reversed(names[: sequence.whole]):
            page = self._pages[name]
            if not page.users:
                self._kept[name] = page
                self._kept.move_to_end(name)
        while len(self._kept) > self._kept_max:
            freed.append(self._evict())
        stay = [self._pages[name].number for name in names[: sequence.whole] if name in self._pages]
        if sequence.number in self._holders.get(names[0] if names else b"", ()):
            holders = self._holders[names[0]]
            del holders[sequence.number]
            if not holders:
                del self._holders[names[0]]
        sequence.table, sequence.holds, sequence.whole, sequence.listed = [], False, 0, 0
        return freed, stay

    def to_offer(self) -> list[int]:
        """Pages that will be evicted soon, consecutive ones of one chain, if there are any: the pool is to have them by
        then. Each is told once for each time that it was used."""
        if self.unused >= self._offers_below:
            return []
        for last in islice(self._kept.values(), OFFER_AHEAD):
            if not last.offered:
                chain: list[ListedPage] = []
                page: ListedPage | None = last
                while page is not None and not page.offered:
                    chain.append(page)
                    page = page.parent
                chain = chain[-OFFER_MAX:]
                for page in chain:
                    page.offered = True
                return [page.number for page in reversed(chain)]
        return []

    def _list(self, sequence: Sequence, index: int, users: int) -> None:
        name = sequence.names[index]
        parent = self._pages[sequence.names[index - 1]] if index else None
        self._pages[name] = ListedPage(sequence.table[index], name, parent, users)

    def _has(self, sequence: Sequence, shared: int) -> bool:
        """Whether so many frames of each group are unused."""
        others = zip(self.beside, sequence.beside, strict=True)
        return self.unused >= sequence.pages - shared and all(n >= own - shared for n, own in others)

    def _evict(self) -> int:
        name, page = self._kept.popitem(last=False)
        del self._pages[name]
        self.unused += 1
        self.beside = [n + 1 for n in self.beside]
        self.evicted += self._kept_max > 0
        return page.number

    # --- what holds -------------------------------------------------------------------------------------------------

    def check(self, sequences: list[Sequence], total: int, beside: Iterable[int] = ()) -> None:
        """Frames unused, kept and taken are all there are. A listed page has its parent, and who has it has that. A
        kept page is nobody's, and is evicted before its parent."""
        users: dict[int, int] = {}
        listed: dict[bytes, int] = {}
        for sequence in sequences:
            assert len(sequence.table) == (sequence.pages if sequence.holds else 0), sequence
            assert sequence.listed <= sequence.whole <= min(len(sequence.names), len(sequence.table)), sequence
            for page in sequence.table:
                users[page] = users.get(page, 0) + 1
            for name, page in zip(sequence.names[: sequence.listed], sequence.table, strict=False):
                assert self._pages[name].number == page, sequence
                listed[name] = listed.get(name, 0) + 1
        counts = self.unused, len(self._kept), len(users), total
        assert self.unused >= 0 and self.unused + len(self._kept) + len(users) == total, counts
        for group, frames in enumerate(beside):
            taken = {page for one in sequences for page in one.table[: one.beside[group]]}
            assert self.beside[group] >= 0 and self.beside[group] + len(self._kept) + len(taken) == frames, counts
        assert len(self._kept) <= self._kept_max, counts
        assert self.shared == sum(count > 1 for count in users.values())
        assert len({page.number for page in self._pages.values()}) == len(self._pages), "a frame with two names"
        places = {name: place for place, name in enumerate(self._kept)}
        for name, one in self._pages.items():
            assert one.name == name and one.users == listed.get(name, 0), one
            assert one.users == users.get(one.number, 0) and (one.users == 0) == (name in places), one
            if one.parent is not None:
                assert self._pages.get(one.parent.name) is one.parent and one.parent.users >= one.users, one
                assert one.users or one.parent.users or places[name] < places[one.parent.name], one
        holders = {number for each in self._holders.values() for number in each}
        assert holders == {one.number for one in sequences if one.holds and one.names and one.prompt >= one.page_tokens}


def _common(one: list[bytes], other: list[bytes]) -> int:
    """How many leading pages have the same names: a page that has, has parents that have."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
