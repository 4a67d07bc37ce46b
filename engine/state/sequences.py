"""The sequences of an engine: which have frames, which share frames, and how each of them ends.

A ``Sequence`` is what decisions need to know about one request. ``Roster`` has all of them. ``Frames`` counts frames
and lets sequences share pages: the arena has one copy of the full pages with which several prompts begin, even if the
prompts come one after the other.

A full page has a name (``events.Submitted.names``) that identifies all tokens up to its end, and their owner. A page is
listed under its name once it is complete. A sequence that gets frames shares the leading pages that are listed, and
gets frames of its own for the rest. The page in which its answer begins is never shared, so no sequence writes to a
shared frame.

A listed page is kept after the last sequence that uses it has ended. Its frame counts as free. When a sequence needs
the frame, the page is evicted, the least recently used page first. A sequence uses the parents of each of its pages,
and at its end its pages are kept from the last one to the first. So a page is always evicted before its parent, and no
eviction leaves an unusable tail.

A sequence with a ring of frames (``Rules.frames_for``) has no names: it overwrites its pages, so they are not shared.

If the model has several cache groups, a page has a frame in each. A ring in one of them has frames only for the first
pages of the sequence's table: later pages use those frames again, and have no numbers of their own.

Worked example, pages of 16 tokens, three prompts that begin with the same 40 tokens and differ from there::

    first   pages a b 1 .      takes 4 frames
    second  pages a b 2 .      waits until the first has completed b; takes 2 frames, shares a and b
    the first ends             its last page is not full: 2 frames are free, one of which keeps page 1
    the second ends            all frames are free, 4 of them keep pages; the order of eviction is 1 2 b a
    third   pages a b 3 .      takes 2 frames, shares a and b; evicts 1 and 2 if no other frames are free
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
                        `---> MOVING -> DECODING      DECODING <-> RELAYED -> ENDED
                                                      DECODING -> ANSWERED -> ENDED   before its KV had arrived
                                                      COMPUTING -> HELD -> ENDED      computed for another engine
    """

    WAITING = auto()  # until it gets frames
    LOADING = auto()  # a thread reads its prefix from the pool
    MOVING = auto()  # another engine computes its prompt; threads bring the KV
    COMPUTING = auto()  # chunk by chunk
    DECODING = auto()
    HELD = auto()  # computed for another engine, which has not fetched everything yet
    RELAYED = auto()  # another engine continues it, and this one passes its tokens on
    ANSWERED = auto()  # the client has the answer, but the KV is still arriving, and is stored at the end
    ENDED = auto()


@dataclass(slots=True)
class Attempt:
    """A request to one other engine to compute a prompt.

    Life: asked -> computed, moved (in any order) -> settled. If it ends with ``error``, the next engine is asked.
    """

    number: int
    engine: str
    first_token: int | None = None  # set once the prompt is computed
    frames_used: bool = False  # True once frames may have been written to
    tokens: int = 0  # tokens of the prompt in the frames, once the mover has ended
    moved: bool = False  # True once the KV of the complete prompt is in the frames
    error: KVStoreError | None = None


@dataclass(slots=True)
class Passing:
    """A move of a sequence to another engine. ``call``: the call to answer; 0 for a drain, or after the answer."""

    call: int
    until_s: float
    drained: bool
    taken: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. Only ``EngineState`` changes it.

    Attributes:
        prompt: the number of tokens to prefill.
        length: the number of known tokens: the prompt and the tokens drawn.
        cached: leading tokens whose KV is in the frames, or arriving there.
        pages: the number of frames that the sequence needs; it has all of them (``holds``) or none.
        other_pages: the number of frames that it needs in each other cache group, for its first pages; at most
            ``pages``.
        span: pages of all its tokens; more than ``pages`` if it has a ring of frames, see ``Rules.frames_for``.
        windows: for each cache group, how many tokens a token sees if the sequence has a ring there, else 0.
        table: numbers of the pages in its frames; other sequences may share the leading ones.
        names: names of its leading full pages whose tokens are known.
        whole: how many of these pages are complete in the frames.
        listed: how many leading ones of these pages other sequences can share.
        answers: False if the sequence is computed for another engine.
        engines: engines that may still be asked for the prompt.
        loading, moving, in_side_step, pulled: True while a loader, a mover, a side batch, or another engine uses its
            frames. The frames are free after the last of these uses.
    """

    number: int
    name: str
    prompt: int
    generated: int
    tokens_max: int
    pages: int
    answers: bool
    started_s: float
    deadline_s: float
    hold_s: float = 0.0
    page_tokens: int = 1
    other_pages: tuple[int, ...] = ()
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
    in_side_step: bool = False
    pulled: bool = False
    held_until_s: float = 0.0
    engines: list[str] = field(default_factory=list)
    attempts: int = 0
    attempt: Attempt | None = None
    passing: Passing | None = None

    def full_table(self) -> list[int]:
        """For each page of the sequence, the page whose frame it uses: ``table``, repeated if that is a ring."""
        return self._repeat(self.pages)

    def full_other_tables(self) -> list[list[int]]:
        """For each other cache group, a list like ``full_table``."""
        return [self._repeat(frames) for frames in self.other_pages]

    def _repeat(self, frames: int) -> list[int]:
        return [self.table[page % frames] for page in range(self.span)]

    @property
    def has_ring(self) -> bool:
        """True if later pages overwrite some of its pages."""
        return any(self.windows)

    def needed(self, tokens: int) -> int:
        """Return the first token of the first page that any cache group still needs after ``tokens`` tokens."""
        return min(needed_from(window, tokens, self.page_tokens) for window in self.windows)

    @property
    def touched(self) -> bool:
        """True while its frames may be read or written outside of a step."""
        return self.loading or self.moving or self.in_side_step or self.pulled


# Phases in which the KV of all ``cached`` tokens is in the frames.
WHOLE: Final = frozenset((Phase.COMPUTING, Phase.DECODING, Phase.HELD, Phase.RELAYED, Phase.ANSWERED))
COMING: Final = frozenset((Phase.LOADING, Phase.COMPUTING))
OFFER_SHARE: Final = 8  # pages are offered to the pool while less than 1/8 of all frames is unused
OFFER_AHEAD: Final = 64  # kept pages to consider, from the next one to be evicted
OFFER_MAX: Final = 32  # pages per offer


@dataclass(slots=True, eq=False)
class ListedPage:
    """A complete page in the arena.

    Life: listed by the sequence that computed it -> kept, when no sequence uses it -> in use again, or evicted.

    Attributes:
        offered: True if the page was offered to the pool since its last use.
    """

    number: int
    name: bytes
    parent: ListedPage | None
    users: int = 0
    offered: bool = False


class Frames:
    """How many frames are free, which pages are complete, and which sequences use them.

    Attributes:
        unused: the number of frames without a useful page; ``other_unused`` has this number for each other cache group.
        shared: the number of frames that more than one sequence uses.
        reused: kept pages that were used again, since the start.
        evicted: kept pages that were evicted, since the start.
    """

    def __init__(self, frames: int, kept_max: int = 0, other_frames: Iterable[int] = ()) -> None:
        self.unused, self.other_unused = frames, list(other_frames)
        self.shared = self.reused = self.evicted = 0
        self._kept_max = kept_max
        self._offers_below = max(1, frames // OFFER_SHARE) if kept_max and not self.other_unused else 0
        self._numbers = 0
        self._pages: dict[bytes, ListedPage] = {}
        self._kept: OrderedDict[bytes, ListedPage] = OrderedDict()  # the next one to be evicted comes first
        self._holders: dict[bytes, dict[int, Sequence]] = {}  # by the name of their first page

    @property
    def kept(self) -> int:
        """The number of kept pages."""
        return len(self._kept)

    @property
    def free(self) -> int:
        """The number of frames that no sequence uses, including the frames of kept pages."""
        return self.unused + len(self._kept)

    # --- sequences --------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> int:
        """Return how many leading pages are listed. The page with the prompt's last token does not count."""
        low, high = 0, min(len(sequence.names), (sequence.prompt - 1) // sequence.page_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            if sequence.names[middle - 1] in self._pages:
                low = middle
            else:
                high = middle - 1
        return low

    def find_shared(self, sequence: Sequence) -> tuple[int, bool]:
        """Return how many pages match, and whether another sequence is loading or computing more of them."""
        whole, coming = self.match(sequence), 0
        if sequence.names:
            for other in self._holders.get(sequence.names[0], {}).values():
                if other.phase in COMING:
                    coming = max(coming, _common(sequence.names, other.names))
        return whole, min(coming, (sequence.prompt - 1) // sequence.page_tokens) > whole

    def fits(self, sequence: Sequence, shared: int) -> bool:
        """Return True if enough frames are free for the sequence. It shares its first ``shared`` pages."""
        kept_shared = 0  # shared pages that are kept now, and so cannot be evicted for this sequence
        while kept_shared < shared and not self._pages[sequence.names[shared - 1 - kept_shared]].users:
            kept_shared += 1
        evictable = len(self._kept) - kept_shared
        others = zip(self.other_unused, sequence.other_pages, strict=True)
        return sequence.pages - shared <= self.unused + evictable and all(
            pages - shared <= unused + evictable for unused, pages in others
        )

    def take(self, sequence: Sequence, shared: int) -> list[int]:
        """Give the sequence its frames. Returns the pages that were evicted for it."""
        for name in sequence.names[:shared]:
            page = self._pages[name]
            if not page.users:
                del self._kept[name]
                self.reused += 1
            self.shared += page.users == 1
            page.users += 1
            page.offered = False
        evicted = []
        while not self._has(sequence, shared):
            evicted.append(self._evict())
        first = self._numbers
        self._numbers += sequence.pages - shared
        self.unused -= sequence.pages - shared
        self.other_unused = [n - own + shared for n, own in zip(self.other_unused, sequence.other_pages, strict=True)]
        sequence.table = [self._pages[name].number for name in sequence.names[:shared]]
        sequence.table += range(first, self._numbers)
        sequence.whole = sequence.listed = shared
        sequence.holds = True
        if sequence.names:
            self._holders.setdefault(sequence.names[0], {})[sequence.number] = sequence
        return evicted

    def reached(self, sequence: Sequence) -> None:
        """List the pages that became complete.

        If another sequence computed the same page at the same time and has listed it, this copy and all later pages of
        this sequence stay unlisted, because a listed page needs a listed parent that its users use, too.
        """
        if sequence.phase not in WHOLE or sequence.attempt is not None:
            return
        sequence.whole = min(sequence.cached // sequence.page_tokens, len(sequence.names))
        while sequence.listed < sequence.whole and sequence.names[sequence.listed] not in self._pages:
            self._list(sequence, sequence.listed, 1)
            sequence.listed += 1

    def give_back(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Take the frames back. Returns the pages that are freed, and the complete pages that stay, in order."""
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
        freed_numbers = set(freed)
        for group, pages in enumerate(sequence.other_pages):
            self.other_unused[group] += sum(number in freed_numbers for number in sequence.table[:pages])
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
        """Return consecutive pages of one chain that will be evicted soon, so that the pool can store them in time.

        Empty if no eviction is near. A page is returned once after each use.
        """
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
        """Return True if each cache group has enough unused frames for the sequence."""
        others = zip(self.other_unused, sequence.other_pages, strict=True)
        return self.unused >= sequence.pages - shared and all(n >= own - shared for n, own in others)

    def _evict(self) -> int:
        name, page = self._kept.popitem(last=False)
        del self._pages[name]
        self.unused += 1
        self.other_unused = [n + 1 for n in self.other_unused]
        self.evicted += self._kept_max > 0
        return page.number

    # --- what holds -------------------------------------------------------------------------------------------------

    def check(self, sequences: list[Sequence], total: int, other_totals: Iterable[int] = ()) -> None:
        """Check that unused, kept and used frames add up, and how pages relate to their parents.

        The parent of a listed page is listed, and every user of the page uses the parent, too. A kept page has no user,
        and is evicted before its parent.
        """
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
        for group, frames in enumerate(other_totals):
            taken = {page for one in sequences for page in one.table[: one.other_pages[group]]}
            assert (
                self.other_unused[group] >= 0 and self.other_unused[group] + len(self._kept) + len(taken) == frames
            ), counts
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
    """Return how many leading pages have the same names. Equal names have equal parents, so a binary search works."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


class Roster:
    """The sequences of an engine.

    Attributes:
        sequences: number -> sequence that has not ended, or whose frames a thread may still use.
        active: sequences that take part in steps, or soon will, in the order in which they got their frames.
        waiting: sequences that wait for frames: first come, first served, so that small ones cannot overtake a large
            one forever.
        frames: which frames are free, and which sequences use which pages.
        out: the instructions that follow from the current event, so far.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.sequences: dict[int, Sequence] = {}
        self.active: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.frames = Frames(rules.frames, rules.kept_max, [group.frames for group in rules.other_groups])
        self.out: list[Instruction] = []

    def admit(self) -> None:
        """Give frames to the next sequences, until too few frames are free for one.

        If another sequence is loading or computing some of the same pages, this one waits until they are complete, and
        later sequences may overtake it. Prefills for other engines do not wait in this way, and neither do prompts that
        another engine computes.
        """
        for sequence in list(islice(self.waiting, self.rules.batch_max)):
            if len(self.active) >= self.rules.batch_max:
                return
            shared, coming = self.frames.find_shared(sequence)
            if coming and sequence.answers and not sequence.engines and sequence.attempt is None:
                continue
            if not self.frames.fits(sequence, shared):
                return
            self.waiting.remove(sequence)
            if evicted := self.frames.take(sequence, shared):
                self.out.append(do.EvictPages(evicted))
            self.active[sequence.number] = sequence
            sequence.phase, sequence.loading = Phase.LOADING, True
            self.out.append(do.LoadPrefix(sequence.number, sequence.full_table(), shared, sequence.full_other_tables()))

    def offer(self) -> None:
        """Offer the pool the pages that will be evicted soon."""
        if pages := self.frames.to_offer():
            self.out.append(do.OfferPages(pages))

    def compute_rest(self, sequence: Sequence) -> None:
        """Compute the rest of the prompt in this engine.

        If the KV of all tokens is in the frames, the last token is computed again for its logits, into its own frame.
        """
        if sequence.cached == sequence.length:
            sequence.cached -= 1
            self.out.append(do.Recompute(sequence.number))
        sequence.phase = Phase.COMPUTING
        self.frames.reached(sequence)

    def store(self, sequence: Sequence) -> None:
        """Write the sequence's full pages to the pool, unless their KV is still arriving."""
        pages = sequence.cached // self.rules.page_tokens
        if pages and sequence.attempt is None and sequence.holds:
            self.out.append(do.StorePages(sequence.number, pages))

    # --- ends -------------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End an answer. If its KV is still arriving, its mover continues, for the next turn of the conversation."""
        attempt = sequence.attempt
        if reason != "cancelled" and sequence.moving and attempt is not None and attempt.error is None:
            del self.active[sequence.number]
            sequence.phase = Phase.ANSWERED
        else:
            self._end(sequence)
        self.out.append(do.Forget(sequence.number))  # first: its client may use the same id again
        self.out.append(do.Finish(sequence.number, reason))
        self.leave(sequence)

    def end_answered(self, sequence: Sequence) -> None:
        """End an answered sequence: its KV is stored, or is no longer expected."""
        assert sequence.phase is Phase.ANSWERED
        self._end(sequence)
        self.leave(sequence)

    def fail(self, sequence: Sequence, error: KVStoreError, cancelled: bool = False) -> None:
        """End a sequence whose answer or prefill is not complete."""
        self._end(sequence)
        if sequence.answers:
            self.out.append(do.Forget(sequence.number))
        self.out.append(do.Fail(sequence.number, error, cancelled))
        if not sequence.answers:
            self.out.append(do.Close(sequence.number))
        self.leave(sequence)

    def release(self, sequence: Sequence) -> None:
        """End a complete prefill that was fetched, or whose hold time is over."""
        assert sequence.phase is Phase.HELD
        sequence.phase = Phase.ENDED
        self.out.append(do.Close(sequence.number))

    def reply(self, sequence: Sequence, result: bool | KVStoreError) -> None:
        """Reply once to the caller that asked for the move. For a drain there is a reply only if it is an error."""
        passing = sequence.passing
        if passing is not None and (passing.call or isinstance(result, KVStoreError)):
            self.out.append(do.AnswerCall(passing.call, result))
            passing.call = 0

    def leave(self, sequence: Sequence) -> None:
        """Free the frames, and drop the sequence if it has ended. Does nothing while a thread may use the frames."""
        if sequence.touched:
            return
        if sequence.holds:
            self.out.append(do.GiveBack(sequence.number, *self.frames.give_back(sequence)))
        if sequence.phase is Phase.ENDED and sequence.passing is None:
            del self.sequences[sequence.number]
            self.out.append(do.EndSequence(sequence.number))

    def _end(self, sequence: Sequence) -> None:
        """Take a sequence out of all steps and queues, and give up what other engines do for it."""
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
