"""The sequences of an engine: what is known of each, which have frames, and which share them.

Roster: the sequences that are here, which of them have frames, and how each of them ends.

Sequence: what the decisions need to know of one request. The shell has its tokens, frames and client.

Sharing: prompts with a common beginning share one copy of their common full pages in the arena, also over time.

A full page has a name (``events.Submitted.names``) that stands for all tokens up to its end and for their owner. Once
it is complete it is listed under that name. A sequence that gets frames takes over the leading pages that are listed,
and frames of its own for the rest, including the page in which its answer begins, so a shared frame is never written
to.

A listed page that no sequence uses any more is kept: its frame counts as free, and is evicted when a sequence needs a
frame, the least recently used page first. A sequence that has a page has its parents. So, because the pages of a
sequence are kept from the last one to the first, a page always comes after its children in that order, and no eviction
leaves an unusable tail.

A sequence with a ring of frames (``Rules.frames_for``) has no names: its pages do not stay, so they are not shared.

If the model has several cache groups, a page has a frame in each. A sequence with a ring has frames in the ring's group
only for the first pages of its table, as many as the ring has: later pages there have no numbers.

Worked example, pages of 16 tokens, three prompts that begin with the same 40 tokens and differ from there::

    first   pages a b 1 .      4 frames taken
    second  pages a b 2 .      waits until the first has b whole; 2 frames taken, a and b shared
    the first ends             its last page is not full: 2 frames free, of which 1 is kept; the second has a and b
    the second ends            all frames are free, of which 4 are kept, in this order: 1 2 b a
    third   pages a b 3 .      2 frames taken, a and b shared; where no other frames are free, 1 and 2 are evicted
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import Final

from engine.state import instructions as do
from engine.state.instructions import Instruction
from engine.state.rules import Rules, needed_from
from kvstore.errors import KVStoreError


class Phase(Enum):
    """Where a sequence is.

    ::

        WAITING -> LOADING -> COMPUTING ------------> DECODING -> ENDED
                        `---> MOVING -> DECODING      DECODING <-> LEFT -> ENDED
                                                      DECODING -> TOLD -> ENDED     answered before its KV was here
                                                      COMPUTING -> HELD -> ENDED    computed for another engine
    """

    WAITING = auto()  # until it gets frames
    LOADING = auto()  # a thread reads its prefix from the pool
    MOVING = auto()  # another engine computes its prompt; threads bring the KV
    COMPUTING = auto()  # chunk by chunk
    DECODING = auto()
    HELD = auto()  # computed for another engine, which has not fetched everything yet
    LEFT = auto()  # another engine continues it, and this one passes its tokens on
    TOLD = auto()  # the answer was sent, while its mover is still running: the KV is stored at the end
    ENDED = auto()


@dataclass(slots=True)
class Attempt:
    """A prompt that one other engine was asked to compute.

    Life: asked -> computed, moved (either may be first) -> settled; or ``error``, and the next engine is asked.
    """

    number: int
    engine: str
    first_token: int | None = None  # set once it is computed
    begun: bool = False  # frames may have been written to
    tokens: int = 0  # tokens of the prompt in the frames, once the mover has ended
    moved: bool = False  # all of the prompt is there
    error: KVStoreError | None = None


@dataclass(slots=True)
class Passing:
    """A move to another engine; ``call`` is the call to answer, 0 for a drain, or once it was answered."""

    call: int
    until_s: float
    drained: bool
    taken: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. Only ``EngineState`` changes it.

    Attributes:
        prompt: number of tokens that it came with, to be prefilled.
        length: number of known tokens: the prompt, then the tokens drawn.
        cached: leading tokens whose KV is in the frames, or arriving there.
        pages: frames that it needs; it has all of them (``holds``) or none.
        beside: frames in the other cache groups, at most as many: its first pages have frames there, too.
        span: pages of all its tokens: more than ``pages`` if it has a ring of frames, see ``Rules.frames_for``.
        windows: for each group in which it has a ring, how many tokens its tokens see; else 0.
        table: numbers of the pages in its frames; other sequences may share the leading ones: see ``Frames``.
        names: names of its leading full pages, as far as its tokens are known.
        whole, listed: how many of these are complete in the frames; and how many leading ones of them can be shared.
        answers: False if it is computed for another engine.
        engines: those that may still be asked for the prompt.
        loading, moving, aside, pulled: users of its frames other than the step: a loader, a mover, a side batch, other
            engines that pull. The frames return when none is left.
    """

    number: int
    name: str
    prompt: int
    generated: int
    tokens_max: int
    pages: int
    answers: bool
    begun_s: float
    deadline_s: float
    hold_s: float = 0.0
    page_tokens: int = 1
    beside: tuple[int, ...] = ()
    span: int = 0
    windows: tuple[int, ...] = (0,)
    names: list[bytes] = field(default_factory=list)
    whole: int = 0
    listed: int = 0
    table: list[int] = field(default_factory=list)
    length: int = 0
    cached: int = 0
    phase: Phase = Phase.WAITING
    holds: bool = False
    loading: bool = False
    moving: bool = False
    aside: bool = False
    pulled: bool = False
    held_until_s: float = 0.0
    engines: list[str] = field(default_factory=list)
    attempts: int = 0
    attempt: Attempt | None = None
    passing: Passing | None = None

    def laid_out(self) -> list[int]:
        """The page whose frame each of its pages uses: ``table``, repeated if that is a ring."""
        return self._round(self.pages)

    def beside_out(self) -> list[list[int]]:
        """For each other cache group, the page whose frame each of its pages uses."""
        return [self._round(frames) for frames in self.beside]

    def _round(self, frames: int) -> list[int]:
        return [self.table[page % frames] for page in range(self.span)]

    @property
    def has_ring(self) -> bool:
        """True if some of its pages are overwritten by later ones."""
        return any(self.windows)

    def needed(self, tokens: int) -> int:
        """The start of the first page that some group needs, among its first ``tokens`` tokens."""
        return min(needed_from(window, tokens, self.page_tokens) for window in self.windows)

    @property
    def touched(self) -> bool:
        """True if its frames may be read or written outside of a step."""
        return self.loading or self.moving or self.aside or self.pulled


# Phases in which ``cached`` says what is there.
WHOLE: Final = frozenset((Phase.COMPUTING, Phase.DECODING, Phase.HELD, Phase.LEFT, Phase.TOLD))
COMING: Final = frozenset((Phase.LOADING, Phase.COMPUTING))
OFFER_SHARE: Final = 8  # pages are offered to the pool while less than 1/8 of all frames is unused
OFFER_AHEAD: Final = 64  # kept pages considered, those that are evicted next
OFFER_MAX: Final = 32  # pages at once


@dataclass(slots=True, eq=False)
class ListedPage:
    """A complete page in the arena. Life: listed, by the sequence that has it -> kept, when no sequence has it -> in
    use again, or evicted.

    Attributes:
        offered: the pool was offered it since its last use.
    """

    number: int
    name: bytes
    parent: ListedPage | None
    users: int = 0
    offered: bool = False


class Frames:
    """How many frames are free, which pages are complete, and which sequences have them.

    Attributes:
        unused: frames without a useful page; ``beside``: the same for each other cache group.
        shared: frames that more than one sequence has.
        found, evicted: kept pages that were used again, and pages that were evicted, since the start.
    """

    def __init__(self, frames: int, kept_max: int = 0, beside: Iterable[int] = ()) -> None:
        self.unused, self.beside = frames, list(beside)
        self.shared = self.found = self.evicted = 0
        self._kept_max = kept_max
        self._offers_below = max(1, frames // OFFER_SHARE) if kept_max and not self.beside else 0
        self._numbers = 0
        self._pages: dict[bytes, ListedPage] = {}
        self._kept: OrderedDict[bytes, ListedPage] = OrderedDict()  # the next one to be evicted comes first
        self._holders: dict[bytes, dict[int, Sequence]] = {}  # by the name of their first page

    @property
    def kept(self) -> int:
        """Frames with a page that is kept."""
        return len(self._kept)

    @property
    def free(self) -> int:
        """Frames that no sequence has, which are available to any."""
        return self.unused + len(self._kept)

    # --- sequences --------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> int:
        """How many of its leading pages are listed, except the one with its prompt's last token."""
        low, high = 0, min(len(sequence.names), (sequence.prompt - 1) // sequence.page_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if sequence.names[middle - 1] in self._pages:
                low = middle
            else:
                high = middle - 1
        return low

    def look(self, sequence: Sequence) -> tuple[int, bool]:
        """How many pages it matches, and whether more of them are being computed right now."""
        whole, coming = self.match(sequence), 0
        if sequence.names:
            for other in self._holders.get(sequence.names[0], {}).values():
                if other.phase in COMING:
                    coming = max(coming, _common(sequence.names, other.names))
        return whole, min(coming, (sequence.prompt - 1) // sequence.page_tokens) > whole

    def fits(self, sequence: Sequence, shared: int) -> bool:
        """True if it can have its frames now, the first ``shared`` of which are those of listed pages."""
        kept = 0
        while kept < shared and not self._pages[sequence.names[shared - 1 - kept]].users:
            kept += 1
        kept = len(self._kept) - kept
        others = zip(self.beside, sequence.beside, strict=True)
        return sequence.pages - shared <= self.unused + kept and all(own - shared <= n + kept for n, own in others)

    def take(self, sequence: Sequence, shared: int) -> list[int]:
        """Give it its frames. Returns the pages that were evicted for it."""
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
        """List the pages that became complete with more of its tokens, if they stay as they are.

        If another sequence, which computed the same page at the same time, has listed it, this copy and all that follow
        it stay
        unlisted: no sequence has a page without its parents.
        """
        if sequence.phase not in WHOLE or sequence.attempt is not None:
            return
        sequence.whole = min(sequence.cached // sequence.page_tokens, len(sequence.names))
        while sequence.listed < sequence.whole and sequence.names[sequence.listed] not in self._pages:
            self._list(sequence, sequence.listed, 1)
            sequence.listed += 1

    def give_back(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Take its frames back. Returns the pages that are gone; and of its complete pages, in order, those that
        stay.
        """
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
        """Consecutive pages of one chain that will be evicted soon, if there are any, for the pool to store in time.
        Each page is returned once for each time that it was used."""
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
        """True if this many frames of each group are unused."""
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
        """Check that unused, kept and taken frames add up. A listed page's parent is listed, and its users have the
        parent, too. A kept page has no user, and is evicted before its parent."""
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
    """How many leading pages have the same names: equal pages have equal parents."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class Roster:
    """The sequences of an engine, and the instructions (``out``) for the event that it is handling.

    Attributes:
        sequences: all that have not ended, or whose frames a thread may still use, by number.
        active: those that take part in steps, or soon will, in the order in which they got their frames.
        waiting: sequences that wait for frames: first come, first served, so that a large one is not overtaken for
            ever.
        frames: how many are free, and which sequences have which pages.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.sequences: dict[int, Sequence] = {}
        self.active: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.frames = Frames(rules.frames, rules.kept_max, [group.frames for group in rules.beside])
        self.out: list[Instruction] = []

    def admit(self) -> None:
        """Give the next sequences frames, as far as there are any.

        A sequence whose pages are being loaded or computed for another one waits until they are complete, as it would
        for its turn to compute them, and lets others pass. But not if another engine waits for it, or computes its
        prompt.
        """
        for sequence in list(islice(self.waiting, self.rules.batch_max)):
            if len(self.active) >= self.rules.batch_max:
                return
            shared, coming = self.frames.look(sequence)
            if coming and sequence.answers and not sequence.engines and sequence.attempt is None:
                continue
            if not self.frames.fits(sequence, shared):
                return
            self.waiting.remove(sequence)
            if evicted := self.frames.take(sequence, shared):
                self.out.append(do.EvictPages(evicted))
            self.active[sequence.number] = sequence
            sequence.phase, sequence.loading = Phase.LOADING, True
            self.out.append(do.LoadPrefix(sequence.number, sequence.laid_out(), shared, sequence.beside_out()))

    def offer(self) -> None:
        """Offer the pool the pages that will be evicted soon."""
        if pages := self.frames.to_offer():
            self.out.append(do.OfferPages(pages))

    def compute_rest(self, sequence: Sequence) -> None:
        """Compute here what is not in the frames. If all of it is there, the last token is computed again, into its own
        frame, because logits are not kept.
        """
        if sequence.cached == sequence.length:
            sequence.cached -= 1
            self.out.append(do.Recompute(sequence.number))
        sequence.phase = Phase.COMPUTING
        self.frames.reached(sequence)

    def store(self, sequence: Sequence) -> None:
        """Write its full pages to the pool, unless their KV is still arriving."""
        pages = sequence.cached // self.rules.page_tokens
        if pages and sequence.attempt is None and sequence.holds:
            self.out.append(do.StorePages(sequence.number, pages))

    # --- ends -------------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End an answer. If the end was sent before all of its KV is here, its mover stays: the next turn of a
        conversation is to find the KV."""
        attempt = sequence.attempt
        if reason != "cancelled" and sequence.moving and attempt is not None and attempt.error is None:
            del self.active[sequence.number]
            sequence.phase = Phase.TOLD
        else:
            self._end(sequence)
        self.out.append(do.Forget(sequence.number))  # first: its client may use the same id again
        self.out.append(do.Finish(sequence.number, reason))
        self.leave(sequence)

    def end_told(self, sequence: Sequence) -> None:
        """End a sequence after its answer was sent: its KV is stored, or no longer awaited."""
        assert sequence.phase is Phase.TOLD
        self._end(sequence)
        self.leave(sequence)

    def fail(self, sequence: Sequence, error: KVStoreError, cancelled: bool = False) -> None:
        """End a sequence without a (complete) answer, or prefill."""
        self._end(sequence)
        if sequence.answers:
            self.out.append(do.Forget(sequence.number))
        self.out.append(do.Fail(sequence.number, error, cancelled))
        if not sequence.answers:
            self.out.append(do.Close(sequence.number))
        self.leave(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """End a complete prefill: it was fetched, or its hold time is over."""
        assert sequence.phase is Phase.HELD
        sequence.phase = Phase.ENDED
        self.out.append(do.Close(sequence.number))

    def reply(self, sequence: Sequence, result: bool | KVStoreError) -> None:
        """Reply once to the caller that asked for it to be passed on. A drain's reply is only sent for errors."""
        passing = sequence.passing
        if passing is not None and (passing.call or isinstance(result, KVStoreError)):
            self.out.append(do.AnswerCall(passing.call, result))
            passing.call = 0

    def leave(self, sequence: Sequence) -> None:
        """Release its frames: they are free once no thread may use them."""
        if sequence.touched:
            return
        if sequence.holds:
            self.out.append(do.GiveBack(sequence.number, *self.frames.give_back(sequence)))
        if sequence.phase is Phase.ENDED and sequence.passing is None:
            del self.sequences[sequence.number]
            self.out.append(do.EndSequence(sequence.number))

    def _end(self, sequence: Sequence) -> None:
        """Remove a sequence that takes no more part in anything."""
        if self.active.pop(sequence.number, None) is None and sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.phase = Phase.ENDED
        sequence.engines = []
        if sequence.attempt is not None:
            sequence.attempt = None
            self.out.append(do.GiveUp(sequence.number))
        if sequence.passing is not None and not sequence.passing.taken:
            self.reply(sequence, False)
            self.out.append(do.CancelThere(sequence.number))
