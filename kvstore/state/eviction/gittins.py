"""Gittins: evict the page with the least worth per millisecond of the room that it would still take.

The worth of a leaf is estimated from how similar leaves were used. Leaves fall into eight classes: *fresh* (the end of
a request: no page after it was evicted) or *trimmed*, and used 0, 1, 2 or more times. A ledger counts uses for each
class and age. The Gittins index of a class and age is the most uses per millisecond of room that can be had by keeping
the page for some time and then giving it up::

    index(class, age) = max over t of  P(used before t) / E(time kept until used or t)

Room is used best where the index is highest (Gittins 1979 for choices of this kind; Beckmann and Sanchez, HPCA 2017,
derive the same measure for caches and call it economic value added). The index looks ahead, so it may rise with age. A
turn of a conversation is not followed by the next one at once, so a page that was kept through most of the pause is
worth more than one whose pause begins. No order by time can express that. From a recorded trace of conversations, in
uses per hour of room:

==============  ======  ======  ======  ======  ======
class           1 s     30 s    60 s    200 s   500 s
==============  ======  ======  ======  ======  ======
never used      4.7     5.7     6.5     1.9     0.6
used 3 times    16      20      22      8.3     2.5
==============  ======  ======  ======  ======  ======

The class ``Gittins`` says how uses are noticed, how hints count, and how much work and memory the policy takes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import POSITION_MAX, position_of
from kvstore.state.eviction.base import (
    GROW_SLOTS,
    HINT_MS,
    HINT_WEIGHTS,
    MS_MAX,
    STALE_MAX,
    Page,
    Tail,
    UsedMs,
)

Bins = npt.NDArray[np.int64]

BINS = 64
CLASSES = 8
NO_LEAVES: Bins = np.empty(0, np.int64)

# The prior: what is assumed about every class before any observation, and the weight of each assumption.
PRIOR_USED_AGAIN = 0.4  # the share of requests that are followed by another turn, in published traces
PRIOR_PAUSE_MS = 114_000  # half of those turns follow within this time
SHAPE_USES = 3.0  # weight of the prior's shape over age, in uses per bin
SCALE_USES = 5.0  # weight of the assumption that all classes are used equally often
CLASS_LEAVES = 300.0  # weight of the assumption that a class has the shape of all classes
CHANCE_MAX = 0.95
_KERNEL = np.array([0.3, 0.7, 1.0, 0.7, 0.3])  # neighbouring bins are similar


def bin_of(age_ms: int) -> int:
    """Return the bin of an age. Bins are half octaves: 0, 1, 2, 3, 4-5, 6-7, 8-11, 12-15, ... milliseconds."""
    if age_ms < 2:
        return max(age_ms, 0)
    bits = age_ms.bit_length()
    return min(2 * bits - 2 + (age_ms >> (bits - 2) & 1), BINS - 1)


def bins_of(ages_ms: npt.NDArray[np.int64]) -> Bins:
    """Return ``bin_of`` of many ages. Sign, exponent and first mantissa bit of a float give sign, octave and half."""
    return _BIN_OF_HALF.take(ages_ms.astype(np.float32).view(np.int32) >> _HALF, mode="wrap")


_HALF = np.int32(22)
_HALF_OF_1 = int(np.float32(1).view(np.int32)) >> 22
_BIN_OF_HALF = np.zeros(1024, np.int64)  # the second half is for negative numbers
_BIN_OF_HALF[_HALF_OF_1:512] = np.minimum(np.arange(512 - _HALF_OF_1), BINS - 1)
_BIN_OF_HALF[_HALF_OF_1] = 1


_EDGES_MS = [0, 1] + [edge for octave in range(1, 33) for edge in (2**octave, 3 * 2 ** (octave - 1))]
_WIDTHS_MS = [float(_EDGES_MS[b + 1] - _EDGES_MS[b]) for b in range(BINS)]


def _prior() -> npt.NDArray[np.float64]:
    """Return P(used in this bin | not before). It falls with age, so that without experience the oldest page leaves."""
    edges = np.array(_EDGES_MS[: BINS + 1], float)
    used_before = PRIOR_USED_AGAIN * edges / (edges + PRIOR_PAUSE_MS)
    return np.asarray(np.diff(used_before) / (1 - used_before[:-1]))


PRIOR = _prior()


def gittins(chances: list[float]) -> list[float]:
    """Return the index of each bin, given the chance of a use in each bin for a page that reached it.

    The bins are processed from the oldest to the youngest. Looking beyond a bin pays as long as the bins after it have
    a higher ratio of uses to time. So bins are merged into stretches (uses, time, chance to survive them) whose ratios
    fall with age. The index of a bin is that of the stretch that begins with it.
    """
    indices = [0.0] * BINS
    stretches: list[tuple[float, float, float]] = []
    for b in range(BINS - 1, -1, -1):
        uses, survives = chances[b], 1 - chances[b]
        time_ms = _WIDTHS_MS[b] * (1 - uses / 2)
        while stretches and stretches[-1][0] * time_ms > uses * stretches[-1][1]:
            later_uses, later_ms, later_survives = stretches.pop()
            uses += survives * later_uses
            time_ms += survives * later_ms
            survives *= later_survives
        stretches.append((uses, time_ms, survives))
        indices[b] = uses / time_ms
    return indices


_INDEX_PRIOR = gittins(PRIOR.tolist())  # falls with age


def age_worth(worth: float, age_ms: int) -> int:
    """Return the age at which a page without experience has this worth, in steps of bins from ``age_ms``."""
    current, target = bin_of(age_ms), bisect_left(_INDEX_PRIOR, -worth, key=lambda index: -index)
    if current == target or not age_ms:
        return age_ms
    return age_ms * _EDGES_MS[min(target, BINS - 1)] // _EDGES_MS[current]


class WorthLedger:
    """Observations: per class and age bin, how many leaves were watched, and how many of them were used.

    A leaf that is watched from one age to another counts in the bins between. It counts half in the first bin if
    watching does not begin with a use, and half in the last one if it does not end with a use. So leaves that are
    evicted, or become leaves late, do not bias the chances.
    """

    def __init__(self) -> None:
        self._used = [[0.0] * BINS for _ in range(CLASSES)]
        self._steps = [[0.0] * (BINS + 2) for _ in range(CLASSES)]  # their sum up to bin b is the number watched in b

    def watched(self, kind: int, entry: int, end: int, *, used: bool) -> None:
        """Count a leaf that was watched from bin ``entry`` (0: since its last use) until it was used or evicted."""
        steps, entry = self._steps[kind], min(entry, end)
        if entry:
            steps[entry] += 0.5
            steps[entry + 1] += 0.5
        else:
            steps[0] += 1
        if used:
            self._used[kind][end] += 1
            steps[end + 1] -= 1
        else:
            steps[end] -= 0.5
            steps[end + 1] -= 0.5

    def fade(self, factor: float) -> None:
        """Reduce the weight of all observations by this factor."""
        for counts in (*self._used, *self._steps):
            counts[:] = [factor * count for count in counts]

    def chances(
        self, kinds: Bins = NO_LEAVES, entries: Bins = NO_LEAVES, ends: Bins = NO_LEAVES, weight: float = 1
    ) -> npt.NDArray[np.float64]:
        """Return P(used in this bin | reached it unused), ``[CLASSES, BINS]``.

        The arguments are leaves that are still watched: their classes, the bins from ``entries`` to ``ends`` in which
        they were watched, and the weight of each of them.
        """
        used, steps = np.array(self._used), np.array(self._steps)
        np.add.at(steps, (kinds, np.minimum(entries, ends)), weight)
        np.add.at(steps, (kinds, ends), -weight)
        watched = np.maximum(steps.cumsum(axis=1)[:, :BINS], used)
        chances = np.empty((CLASSES, BINS))
        for first in (0, 1):  # fresh, trimmed
            chances[first::2] = _pooled(used[first::2], watched[first::2])
        return chances


def _pooled(used: npt.NDArray[np.float64], watched: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the chances of classes that differ much in how often they are used, and less in when.

    A class has too few uses to estimate the chance in every bin. So all classes share one shape over age (the prior,
    corrected by all their uses), and each has a scale. A class's own bins count by how much they were watched.
    """
    all_uses = np.convolve(used.sum(axis=0), _KERNEL, "same")
    scale = np.ones(len(used))
    for _ in range(2):
        expected = np.convolve(PRIOR * (scale @ watched), _KERNEL, "same")
        shape = PRIOR * (all_uses + SHAPE_USES) / (expected + SHAPE_USES)
        scale = (used.sum(axis=1) + SCALE_USES) / (watched @ shape + SCALE_USES)
    assumed = np.minimum(np.outer(scale, shape), CHANCE_MAX)
    return np.minimum((used + CLASS_LEAVES * assumed) / (watched + CLASS_LEAVES), CHANCE_MAX)


SAMPLE = 1024  # leaves to look at per choice
BATCH = 16  # this many pages of a sample leave next ...
SMALL_SHARE = 16  # ... and one in this many of a small sample
NEAR = 8  # with hints, each owner's pages are first looked for among this many times as many lowest pages
YOUNG_SHARE = 8  # one leaf in this many, those used last, stays whatever is known about similar pages
CHOICES_PER_TABLE = 512  # choices before the table of indices is computed again
LEARN_SAMPLE = 256  # listed leaves to look at when the table is computed
HALF_LIFE_EVICTIONS = 1 << 14  # an observation this many evictions ago counts half ...
HALF_LIFE_TURNOVERS = 1  # ... or this many times all pages ago, if that is longer
GHOSTS_PER_2_PAGES = 3
_PRINTS = (1 << 14) - 1  # number of different fingerprints of a ghost's key

_WEIGHTS, _WEIGH_MS = np.array(HINT_WEIGHTS), np.array(HINT_MS)

Slots = npt.NDArray[np.uint32]
Worths = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]  # places in such an array

# The bits of a slot's word. The number of uses saturates; of the turns only the low bits are kept.
_LISTED = 1
_TRIMMED = 1 << 1
_USES_SHIFT, _USES_MAX = 2, 3
_TURNS_SHIFT, _TURNS_MASK = 4, 3
_STEP_SHIFT, _STEP_MASK = 6, 7  # ``step_of`` plus 1; 0 if nothing is known about the page
_KNOWN = _STEP_MASK << _STEP_SHIFT
_ORDERED = 1 << 9  # the slot is in ``_order``, listed or not
_ENTRY_SHIFT = 10  # the age bin in which the page was offered: it was not watched before
_LASTING = (1 << _ENTRY_SHIFT) - 1
# Numbers of numpy's own types, and ``take``: plain numbers and indexing take two to four times as long.
_0, _1, _CLASS, _BINS = np.int64(0), np.uint16(_LISTED), np.uint16(CLASSES - 1), np.uint16(BINS)
_NOT_POSITION = ~(POSITION_MAX << 32)
_ONE, _LESS = np.float64(1), np.float64(-1e-13)
_ALL = (1 << 16) - 1


def step_of(position: int) -> int:
    """Return 0 for the first page of a chain, then 1, 2, 3, 4, 1, 2, 3, 4, ..."""
    return (position - 1) % 4 + 1 if position else 0


def _lowest(worth: Worths, count: int) -> Places:
    return worth.argpartition(count - 1)[:count]


def _of_owners(owners: Slots, worth: Worths, losses: Counter[int], most: int) -> Places:
    """Choose, for each owner, the number of pages that it has to lose: its lowest pages among the ``most`` lowest.

    The result has fewer pages if an owner has too few.
    """
    near = _lowest(worth, most)
    near = near[worth[near].argsort()]
    remaining, chosen, count = dict(losses), list[int](), losses.total()
    for place, owner in zip(near.tolist(), owners[near].tolist(), strict=True):
        if remaining.get(owner, 0):
            remaining[owner] -= 1
            chosen.append(place)
            if len(chosen) == count:
                break
    return np.array(chosen, np.intp)


def _step_in(word: int) -> int:
    return (word >> _STEP_SHIFT & _STEP_MASK) - 1


class Ghosts:
    """Recently evicted pages, and how often they had been used: two bytes per place, with 14 bits of the key.

    A later page overwrites an earlier one in its place. One key in 16,383 is taken for another one.
    """

    def __init__(self, pages: int) -> None:
        self._pages = 0
        self._places = array("H")
        self.resize(pages)

    def resize(self, pages: int) -> None:
        """Start over, empty, if ``pages`` has doubled or halved."""
        if not self._places or pages > 2 * self._pages or pages < self._pages // 2:
            self._pages = pages
            self._places = array("H", bytes(2 * max(pages * GHOSTS_PER_2_PAGES // 2, SAMPLE)))

    def remember(self, key: int, uses: int) -> None:
        """Remember the evicted page with that key."""
        self._places[key % len(self._places)] = 1 + (key >> 48) % _PRINTS << 2 | uses

    def recall(self, key: int) -> int | None:
        """Return how often the page had been used when it was evicted; None if the ghosts do not have it."""
        place = self._places[key % len(self._places)]
        return place & 3 if place >> 2 == 1 + (key >> 48) % _PRINTS else None


class Gittins:
    """The policy of this module. A page's word says what is known about it, from its first offer until it leaves.

    *Uses.* Readers store the time of a use into the page's mark without a message. So a use is noticed when the page is
    about to be evicted, or is offered again. Inner pages are not offered. Their uses follow from their last child when
    it leaves: each use of a child is a use of its parent, a child that a later request has stored means one more, and
    so does a mark later than the child's. Evicted pages are remembered by some bits of their key and their number of
    uses, and a page that returns continues from there (*ghosts*). Every fourth page of a chain is remembered, because
    what is known of a page holds for all pages before it. There must be enough bits: one inner page that is taken for a
    much used one would keep all pages before it.

    *Hints* (``kvstore.model.retention``) decide which pages of an owner leave, but never how many. The sixteen lowest
    pages without hints say how many pages each owner loses; it then loses those that are lowest with hints. A page that
    stays because of this counts again the next time. So an owner pays for its hints with other pages of its own, and
    wrong hints harm only their owner.

    *Work.* A page's index changes with time, so no queue stays in order. Instead every sixteenth eviction looks at
    1,024 leaves, evenly spread over all leaves (or at all of them, if there are fewer). The sixteen lowest leave next,
    each if its mark has not changed in the meantime. Every 512 choices the table of indices is computed again. None of
    this depends on the number of pages. The policy is deterministic: it uses no randomness and no clock of its own.

    *Memory.* 9 bytes per page (``_use`` 4, ``_word`` 2, ghosts 3), and 4 per leaf in ``_order``. After the first hint,
    5 more per page (``_hint`` 1, ``_owner`` 4). Pages that are no longer leaves stay in ``_order`` until they make up
    half of it.
    """

    hinted = True

    def __init__(self, pages: int = 0) -> None:
        self._pages = pages
        self._use = array("I")  # by slot: last noticed use, in ms since the base
        self._word = array("H")  # by slot
        self._hint, self._owner = array("B"), array("I")  # by slot, as offered last; empty until the first hint
        self._order = array("I")  # the listed slots, and some that were listed before
        self._listed = 0
        self._base_ms: int | None = None
        self._now = 0  # ms since the base
        self._ghosts = Ghosts(pages)
        self._ledger = WorthLedger()
        self._table = np.array([gittins(of_class) for of_class in self._ledger.chances().tolist()])
        self._evicted = self._chosen = 0  # pages that left since the last table, and those that ``victim`` named
        self._phase = 0.0  # where the next sample begins, as a share of its stride
        self._next: list[tuple[int, int]] = []  # (slot, use) of the pages that leave next, the first one last
        self._worth_max = 0.0  # the highest worth among them when they were chosen ...
        self._young_ms = 0  # ... and the age below which no leaf was chosen
        self._child: tuple[int, int] | None = None  # (word, use) of the page that left last, unless something followed

    def resize(self, pages: int) -> None:
        """Adapt the number of ghosts."""
        self._pages = pages
        self._ghosts.resize(pages)

    def add(self, slot: int, page: Page) -> None:
        """List a page. A use since its last offer is noticed."""
        if slot >= len(self._word):
            self._grow(slot)
        child, self._child = self._child, None
        if self._base_ms is None or page.used_ms - self._base_ms < 2 * MS_MAX:  # a damaged mark must not move the base
            self._advance(page.used_ms)
        word, use = self._word[slot], self._since_base(page.used_ms)
        assert not word & _LISTED, slot
        if not word & _ORDERED:
            self._order.append(slot)
        if not word & _KNOWN:
            word = self._new(page, use, child)
            self._use[slot] = use
        elif use > self._use[slot]:
            word = self._used(slot, word, use)
        entry = bin_of(self._now - self._use[slot])
        self._word[slot] = word & _LASTING | _LISTED | _ORDERED | entry << _ENTRY_SHIFT
        self._listed += 1
        if self._hint:
            self._hint[slot], self._owner[slot] = page.hint, page.owner
        elif page.hint:
            self._begin_hints(slot, page)

    def remove(self, slot: int) -> None:
        """Stop listing a page. It is still watched, because what removed it may have used it."""
        if slot not in self:
            return
        self._word[slot] &= ~_LISTED
        self._listed -= 1
        self._child = None
        if len(self._order) > 2 * self._listed + STALE_MAX:
            self._tidy()

    def forget(self, slot: int, key: int | None) -> None:
        """Forget a page. If it was evicted for room, count it as unused, and remember it as a ghost."""
        self._child = None
        word = self._word[slot] if slot < len(self._word) else 0
        if word & _LISTED:
            self.remove(slot)
            word = self._word[slot]
        if not word & _KNOWN:
            return
        self._word[slot] = word & _ORDERED
        if key is not None:
            use = self._use[slot]
            self._watched(word, self._now - use, used=False)
            if _step_in(word) < 2:
                self._ghosts.remember(key, word >> _USES_SHIFT & _USES_MAX)
            self._child = word, use
            self._evicted += 1
            self._chosen += 1

    def forget_tail(self, tail: Tail, together: int = 0) -> int:
        """Forget the leaf and cheap pages before it.

        A page without facts of its own shares those of the leaf. It leaves with the leaf if it is worth no more than
        the best page that was chosen together with the leaf.
        """
        slots, keys, used_ms, standings = tail
        word = self._word[slots[-1]]
        self.forget(slots[-1], keys[-1])
        assert self._child is not None and self._base_ms is not None
        words, ghosts, base_ms, count = self._word, self._ghosts, self._base_ms, 0
        alike, use = standings[-1] & _NOT_POSITION, self._child[1]
        of_class, cheap, worth_of = self._table[word >> 1 & CLASSES - 1 | _TRIMMED >> 1], True, -1
        uses = word >> _USES_SHIFT & _USES_MAX
        for place in range(len(slots) - 2, -1, -1):
            standing, before = standings[place], used_ms[place] - base_ms
            if before > use or standing & _NOT_POSITION != alike or words[slots[place]] & _KNOWN:
                break
            if before != worth_of:
                worth_of, age = before, self._now - before
                cheap = age >= self._young_ms and float(of_class[bin_of(age)]) * (1 - 1e-13 * age) <= self._worth_max
            if not cheap and count >= together:
                break
            if step_of(position_of(standing)) < 2:
                if ghosts.recall(keys[place]) is not None:
                    break
                ghosts.remember(keys[place], uses)
            count += 1
        if count:
            front = len(slots) - 1 - count
            step = step_of(position_of(standings[front])) + 1
            lasting = word & (_USES_MAX << _USES_SHIFT | _TURNS_MASK << _TURNS_SHIFT)
            self._child = lasting | _TRIMMED | step << _STEP_SHIFT, max(0, used_ms[front] - base_ms)
            self._evicted += count
        return count

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """Return the next page of the last choice whose mark has not changed. Make a new choice if there is none."""
        self._advance(now_ms)
        self._now = max(self._now, self._since_base(now_ms))
        self._child = None
        while self._listed:
            if self._chosen >= CHOICES_PER_TABLE:
                self._learn(used_ms)
            if not self._next:
                self._choose()
            slot, use = self._next[-1]
            if slot not in self or self._use[slot] != use:
                self._next.pop()
                continue
            mark = self._since_base(used_ms(slot))
            if mark <= use:
                return slot
            self._next.pop()
            self._word[slot] = self._used(slot, self._word[slot], mark)
        return None

    def coldest_ms(self) -> int | None:
        """Return the time of last use at which a page without experience would be worth as little as the coldest page.

        The coldest page is the one that leaves next. So the ages of two frame classes compare by worth: if the page
        that leaves next is still useful, it does not count as cold, even if its last use was long ago.
        """
        while self._listed:
            if not self._next:
                self._choose()
            slot, use = self._next[-1]
            if slot in self and self._use[slot] == use:
                age = max(0, self._now - use)
                worth = self._table[self._word[slot] >> 1 & CLASSES - 1, bin_of(age)]
                return (self._base_ms or 0) + self._now - age_worth(worth, age)
            self._next.pop()
        return None

    def __contains__(self, slot: int) -> bool:
        """Return True if the page is listed."""
        return slot < len(self._word) and self._word[slot] & _LISTED == _LISTED

    def __len__(self) -> int:
        """Return the number of listed pages."""
        return self._listed

    def _new(self, page: Page, use: int, child: tuple[int, int] | None) -> int:
        """Return the word of a page that was never offered before. ``child`` was just evicted, and may be its last
        child."""
        turns, step, uses = page.turns & _TURNS_MASK, step_of(page.position), 0
        trimmed = child is not None and _step_in(child[0]) == step_of(page.position + 1)
        if child is not None and trimmed:
            word, child_use = child
            later = (word >> _TURNS_SHIFT) - turns & _TURNS_MASK  # a child is never older than its parent
            uses = (word >> _USES_SHIFT & _USES_MAX) + later + (use > child_use)
        before = self._ghosts.recall(page.key) if step < 2 else None
        if before is not None:
            uses = max(uses, before + 1)
        return (
            (_TRIMMED if trimmed else 0)
            | min(uses, _USES_MAX) << _USES_SHIFT
            | turns << _TURNS_SHIFT
            | step + 1 << _STEP_SHIFT
        )

    def _used(self, slot: int, word: int, use: int) -> int:
        """Count a use that was noticed. Return the page's new word; watching it starts again."""
        self._watched(word, use - self._use[slot], used=True)
        self._use[slot] = use
        uses = min((word >> _USES_SHIFT & _USES_MAX) + 1, _USES_MAX)
        return word & _LASTING & ~(_USES_MAX << _USES_SHIFT) | uses << _USES_SHIFT

    def _watched(self, word: int, age_ms: int, *, used: bool) -> None:
        self._ledger.watched(word >> 1 & CLASSES - 1, word >> _ENTRY_SHIFT, bin_of(age_ms), used=used)

    def _learn(self, used_ms: UsedMs) -> None:
        """Compute the table of indices again.

        An unused leaf is counted only when it leaves, and the best leaves stay for long. So the leaves that are listed
        now are counted too, up to the age at which they were watched. An even sample of them is looked at.
        """
        slots = self._sample(LEARN_SAMPLE)
        for slot in slots.tolist():
            mark = self._since_base(used_ms(slot))
            if mark > self._use[slot]:
                self._word[slot] = self._used(slot, self._word[slot], mark)
        words = np.frombuffer(self._word, np.uint16)[slots].astype(np.int64)
        ages = bins_of(np.maximum(self._now - np.frombuffer(self._use, np.uint32)[slots].astype(np.int64), 0))
        weight = self._listed / len(slots)
        chances = self._ledger.chances(words >> 1 & CLASSES - 1, words >> _ENTRY_SHIFT, ages, weight)
        self._table = np.array([gittins(of_class) for of_class in chances.tolist()])
        half_life = max(HALF_LIFE_EVICTIONS, HALF_LIFE_TURNOVERS * self._pages)
        self._ledger.fade(0.5 ** (self._evicted / half_life))
        self._evicted = self._chosen = 0

    def _sample(self, most: int) -> Slots:
        """Return leaves evenly spread over all. Each sample begins at another place, so that all get a turn."""
        order, words = np.frombuffer(self._order, np.uint32), np.frombuffer(self._word, np.uint16)
        if self._listed > most:
            self._phase = (self._phase + 0.6180339887498949) % 1  # golden ratio: spreads the beginnings evenly
            places = most * len(order) // self._listed
            slots = order[((np.arange(places) + self._phase) * (len(order) / places)).astype(np.int64)]
            if len(listed := slots[(words.take(slots) & _1).astype(bool)]):
                return listed
        return order[(words.take(order) & _1).astype(bool)]

    def _tidy(self) -> None:
        """Drop the slots from ``_order`` that are not listed."""
        order, words = np.frombuffer(self._order, np.uint32), np.frombuffer(self._word, np.uint16)
        listed = (words[order] & _LISTED).astype(bool)
        words[order[~listed]] &= _ALL ^ _ORDERED
        self._order = array("I", order[listed].tobytes())

    def _choose(self) -> None:
        """Fill ``_next`` with the lowest pages of a sample."""
        slots = self._sample(SAMPLE)
        uses = np.frombuffer(self._use, np.uint32).take(slots)
        classes = np.frombuffer(self._word, np.uint16).take(slots) >> _1 & _CLASS
        ages = np.maximum(np.subtract(np.int64(self._now), uses, dtype=np.int64), _0)
        worth = self._table.take(classes * _BINS + bins_of(ages))
        worth *= ages * _LESS + _ONE  # among pages of equal worth the oldest leaves first
        self._young_ms = 0
        if young := len(slots) // YOUNG_SHARE:
            self._young_ms = int(np.partition(ages, young)[young])
            worth[ages < self._young_ms] = np.inf
        count = max(1, min(BATCH, len(slots) // SMALL_SHARE))
        lowest = _lowest(worth, count)
        self._worth_max = float(worth.take(lowest).max())
        if self._hint:
            lowest = self._as_hinted(slots, ages, worth, lowest)
        lowest = lowest.take((-worth.take(lowest)).argsort())
        self._next = list(zip(slots.take(lowest).tolist(), uses.take(lowest).tolist(), strict=True))

    def _grow(self, slot: int) -> None:
        more = (slot // GROW_SLOTS + 1) * GROW_SLOTS - len(self._word)
        for table in (self._use, self._word, *((self._hint, self._owner) if self._hint else ())):
            table.extend([0] * more)

    def _begin_hints(self, slot: int, page: Page) -> None:
        self._hint, self._owner = array("B", bytes(len(self._word))), array("I", bytes(4 * len(self._word)))
        self._hint[slot], self._owner[slot] = page.hint, page.owner

    def _as_hinted(self, slots: Slots, ages: Bins, worth: Worths, lowest: Places) -> Places:
        """Choose, for each owner, as many pages as it has in ``lowest``: the pages that are lowest once its hints
        count."""
        hints, count = np.frombuffer(self._hint, np.uint8)[slots], len(lowest)
        if not hints.any():
            return lowest
        owners = np.frombuffer(self._owner, np.uint32)[slots]
        weighed = worth * _WEIGHTS.take(np.where(ages <= _WEIGH_MS.take(hints), hints, 0))
        if (owners == owners[0]).all():
            return _lowest(weighed, count)
        losses = Counter(owners[lowest].tolist())
        near = _of_owners(owners, weighed, losses, min(NEAR * count, len(slots)))
        return near if len(near) == count else _of_owners(owners, weighed, losses, len(slots))

    def _since_base(self, time_ms: int) -> int:
        """Return milliseconds since the base, limited to 32 bits."""
        assert self._base_ms is not None
        return min(max(0, time_ms - self._base_ms), MS_MAX - 1)

    def _advance(self, time_ms: int) -> None:
        """Move the base up when 49 days have passed since."""
        if self._base_ms is None:
            self._base_ms = max(0, time_ms - MS_MAX // 4)  # pages from before a restart have earlier uses
        if time_ms - self._base_ms < MS_MAX:
            return
        shift = time_ms - self._base_ms - MS_MAX // 2
        self._base_ms += shift
        self._now = max(0, self._now - shift)
        uses = np.frombuffer(self._use, np.uint32).astype(np.int64)
        self._use = array("I", np.maximum(uses - shift, 0).astype(np.uint32).tobytes())
        self._next.clear()
