"""Gittins: evict the page that is worth least per millisecond of the room it would still take.

What a page is worth follows from how pages like it were used before: see below. Leaves fall into eight
classes: *fresh* (the end of a request, nothing was trimmed off it) or trimmed, and used 0, 1, 2 or more times.

*What counts as a use.* Readers store the time of a use into the page's mark and say nothing, so uses are noticed when
the page is about to be evicted or is offered again. Inner pages are not offered, yet how often they were used follows
from their last child, when that leaves: every use of a child is a use of its parent, a child that was stored by a later
request means one more, and so does a mark younger than the child's. Pages that were evicted are remembered by some bits
of their key and how often they had been used, and one that comes back goes on from there (*ghosts*). Every fourth page
of a chain is enough: what is known of a page holds for all before it. Few bits would not be: one page in the middle of
a chain that is taken for another, much used, keeps all those before it.

*Hints* (``kvstore.model.retention``) decide which pages of an owner leave, and never spare it any. The sixteen lowest
without hints say how many pages each owner is to lose; it loses those that are lowest with them. What it keeps by that
counts again the next time. So an owner pays for what its hints keep with other pages of its own, and lies harm itself.

*Work.* The index of a page changes with time, so no queue stays in order. Instead every sixteenth eviction looks at
1,024 leaves, evenly spread over all (up to that many: at all of them); the sixteen lowest are the next to go, each if
its mark has not moved since. Every 512 choices the table of indices is recomputed. None of it depends on how many
pages there are. Deterministic: no randomness, and no time but what callers say.

*Memory.* Per page 9 bytes (``use`` 4, ``word`` 2, ghosts 3), and 4 in ``order`` per leaf; from the first hint on 5 more
(``hint`` 1, ``owner`` 4). Pages that are no longer leaves stay in ``order`` until they are half of it.

What a page is worth, learnt from what became of others: chances of a use by class and age, and the Gittins index.

The index of a page of some class and age is the most uses per millisecond of room that can be had by keeping it for
some time and then giving it up::

    index(class, age) = max over t of  P(used before t) / E(time kept until used or t)

The room is best spent where the index is highest (Gittins 1979 for choices of this kind; Beckmann and Sanchez, HPCA
2017, derive the same measure for caches and call it economic value added). It looks ahead, so it may rise with age: a
turn of a conversation is not followed by the next one at once, and a page that was kept through most of the pause is
worth more than one whose pause begins. No order by time can say that. Learnt from a recorded trace of conversations,
in uses per hour of room:

==============  ======  ======  ======  ======  ======
class           1 s     30 s    60 s    200 s   500 s
==============  ======  ======  ======  ======  ======
never used      4.7     5.7     6.5     1.9     0.6
used 3 times    16      20      22      8.3     2.5
==============  ======  ======  ======  ======  ======
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
NOTHING: Bins = np.empty(0, np.int64)

# Prior: what is believed of every class before anything was seen, and what each belief weighs.
PRIOR_USED_AGAIN = 0.4  # the share of requests that are followed by another turn, in published traces
PRIOR_PAUSE_MS = 114_000  # and within how long half of them are
SHAPE_USES = 3.0  # the prior's shape over age, per bin
SCALE_USES = 5.0  # that classes are used equally often
CLASS_LEAVES = 300.0  # that a class has the shape of all
CHANCE_MAX = 0.95
_KERNEL = np.array([0.3, 0.7, 1.0, 0.7, 0.3])  # neighbouring bins have much in common


def bin_of(age_ms: int) -> int:
    """Bins are half octaves: 0, 1, 2, 3, 4-5, 6-7, 8-11, 12-15, ... milliseconds."""
    if age_ms < 2:
        return max(age_ms, 0)
    bits = age_ms.bit_length()
    return min(2 * bits - 2 + (age_ms >> (bits - 2) & 1), BINS - 1)


def bins_of(ages_ms: npt.NDArray[np.int64]) -> Bins:
    """``bin_of`` of many: sign, exponent and first bit of the mantissa of a float say sign, octave and half."""
    return _BIN_OF_HALF.take(ages_ms.astype(np.float32).view(np.int32) >> _HALF, mode="wrap")


_HALF = np.int32(22)
_HALF_OF_1 = int(np.float32(1).view(np.int32)) >> 22
_BIN_OF_HALF = np.zeros(1024, np.int64)  # from the middle on: of what is negative
_BIN_OF_HALF[_HALF_OF_1:512] = np.minimum(np.arange(512 - _HALF_OF_1), BINS - 1)
_BIN_OF_HALF[_HALF_OF_1] = 1


_EDGES_MS = [0, 1] + [edge for octave in range(1, 33) for edge in (2**octave, 3 * 2 ** (octave - 1))]
_WIDTHS_MS = [float(_EDGES_MS[b + 1] - _EDGES_MS[b]) for b in range(BINS)]


def _prior() -> npt.NDArray[np.float64]:
    """P(used in this bin | not before), the less likely the older: so without experience the oldest page is evicted."""
    edges = np.array(_EDGES_MS[: BINS + 1], float)
    used_before = PRIOR_USED_AGAIN * edges / (edges + PRIOR_PAUSE_MS)
    return np.asarray(np.diff(used_before) / (1 - used_before[:-1]))


PRIOR = _prior()


def gittins(chances: list[float]) -> list[float]:
    """The index per bin, given the chance of a use in each bin for a page that reached it.

    From the oldest bin to the youngest: looking further ahead than this bin pays as long as what follows has the
    higher ratio of uses to time. So bins are merged into stretches (uses, time, chance to survive them) whose ratios
    fall with age; the index of a bin is that of the stretch it begins.
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
    """The age at which a page without experience is worth ``worth``, in steps of bins from ``age_ms``."""
    here, there = bin_of(age_ms), bisect_left(_INDEX_PRIOR, -worth, key=lambda index: -index)
    if here == there or not age_ms:
        return age_ms
    return age_ms * _EDGES_MS[min(there, BINS - 1)] // _EDGES_MS[here]


class WorthLedger:
    """What was seen: per class and age bin, how many leaves were watched, and how many of them were used.

    A leaf that is watched from one age to another counts in the bins between, half in those where watching begins
    without a use or ends without one. So leaves that are evicted, or become leaves late, do not bias the chances.
    """

    def __init__(self) -> None:
        self._used = [[0.0] * BINS for _ in range(CLASSES)]
        self._steps = [[0.0] * (BINS + 2) for _ in range(CLASSES)]  # watched in bin b is their sum up to b

    def watched(self, kind: int, entry: int, end: int, *, used: bool) -> None:
        """A leaf of a class was watched from bin ``entry`` (0: from its last use on) until a use, or until it left."""
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
        """All that was seen so far counts less."""
        for counts in (*self._used, *self._steps):
            counts[:] = [factor * count for count in counts]

    def chances(
        self, kinds: Bins = NOTHING, entries: Bins = NOTHING, ends: Bins = NOTHING, weight: float = 1
    ) -> npt.NDArray[np.float64]:
        """P(used in this bin | reached it unused), ``[CLASSES, BINS]``.

        Leaves of these classes that are still watched, from bin ``entries`` to ``ends``, count this much each.
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
    """Chances of classes that differ much in how often they are used, and less in when.

    Each class alone has too few uses to tell the chance in every bin. So all share one shape over age (the prior,
    corrected by their uses together), each has a scale, and its own bins count as far as they were watched.
    """
    together = np.convolve(used.sum(axis=0), _KERNEL, "same")
    scale = np.ones(len(used))
    for _ in range(2):
        expected = np.convolve(PRIOR * (scale @ watched), _KERNEL, "same")
        shape = PRIOR * (together + SHAPE_USES) / (expected + SHAPE_USES)
        scale = (used.sum(axis=1) + SCALE_USES) / (watched @ shape + SCALE_USES)
    believed = np.minimum(np.outer(scale, shape), CHANCE_MAX)
    return np.minimum((used + CLASS_LEAVES * believed) / (watched + CLASS_LEAVES), CHANCE_MAX)


SAMPLE = 1024
BATCH = 16  # this many pages of a sample are the next to go ...
SMALL_SHARE = 16  # ... and one in this many of a small sample
NEAR = 8  # with hints: each owner's pages are looked for first among this many times as many lowest pages
YOUNG_SHARE = 8  # one leaf in this many, those used last, stays whatever is known of similar pages
CHOICES_PER_TABLE = 512
LEARN_SAMPLE = 256  # of the leaves that are listed when the table is made
HALF_LIFE_EVICTIONS = 1 << 14  # what was seen this many evictions ago counts half ...
HALF_LIFE_TURNOVERS = 1  # ... or this many times all pages ago, if that is longer
GHOSTS_PER_2_PAGES = 3
_PRINTS = (1 << 14) - 1

_WEIGHTS, _WEIGH_MS = np.array(HINT_WEIGHTS), np.array(HINT_MS)

Slots = npt.NDArray[np.uint32]
Worths = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]  # in such an array

# The word of a slot. Uses saturate, of the turns the low bits are kept.
_LISTED = 1
_TRIMMED = 1 << 1
_USES_SHIFT, _USES_MAX = 2, 3
_TURNS_SHIFT, _TURNS_MASK = 4, 3
_STEP_SHIFT, _STEP_MASK = 6, 7  # see ``step_of``, and 1 more: a page of which nothing is known has none
_KNOWN = _STEP_MASK << _STEP_SHIFT
_ORDERED = 1 << 9  # the slot stands in ``order``, listed or not
_ENTRY_SHIFT = 10  # the age bin in which it was offered: what happened before was not seen
_LASTING = (1 << _ENTRY_SHIFT) - 1
# Numbers of numpy's own, and ``take``: with plain ones, and by indexing, its calls take two to four times as long.
_0, _1, _CLASS, _BINS = np.int64(0), np.uint16(_LISTED), np.uint16(CLASSES - 1), np.uint16(BINS)
_NOT_POSITION = ~(POSITION_MAX << 32)
_ONE, _LESS = np.float64(1), np.float64(-1e-13)
_ALL = (1 << 16) - 1


def step_of(position: int) -> int:
    """0 at the front of a chain, then 1, 2, 3, 4, 1, 2, 3, 4, ..."""
    return (position - 1) % 4 + 1 if position else 0


def _lowest(worth: Worths, count: int) -> Places:
    return worth.argpartition(count - 1)[:count]


def _of_owners(owners: Slots, worth: Worths, losses: Counter[int], most: int) -> Places:
    """Choose, among the ``most`` lowest pages, as many of each owner as it is to lose, the lowest first; fewer where
    the owner has too few."""
    near = _lowest(worth, most)
    near = near[worth[near].argsort()]
    left, found, count = dict(losses), list[int](), losses.total()
    for place, owner in zip(near.tolist(), owners[near].tolist(), strict=True):
        if left.get(owner, 0):
            left[owner] -= 1
            found.append(place)
            if len(found) == count:
                break
    return np.array(found, np.intp)


def _step_in(word: int) -> int:
    return (word >> _STEP_SHIFT & _STEP_MASK) - 1


class Ghosts:
    """Which pages left lately, and how often they had been used: two bytes per place, 14 bits of them from the key.

    A later page takes the place of an earlier one. One key in 16,383 is taken for another that was there.
    """

    def __init__(self, pages: int) -> None:
        self._pages = 0
        self._places = array("H")
        self.resize(pages)

    def resize(self, pages: int) -> None:
        """Recreated, empty, when ``pages`` doubled or halved."""
        if not self._places or pages > 2 * self._pages or pages < self._pages // 2:
            self._pages = pages
            self._places = array("H", bytes(2 * max(pages * GHOSTS_PER_2_PAGES // 2, SAMPLE)))

    def remember(self, key: int, uses: int) -> None:
        """The page of that key left."""
        self._places[key % len(self._places)] = 1 + (key >> 48) % _PRINTS << 2 | uses

    def recall(self, key: int) -> int | None:
        """How often the page had been used when it left; None where it is not known."""
        place = self._places[key % len(self._places)]
        return place & 3 if place >> 2 == 1 + (key >> 48) % _PRINTS else None


class Gittins:
    """See the top of this file. A page's word says what is known of it, from when it is first offered until it goes."""

    hinted = True

    def __init__(self, pages: int = 0) -> None:
        self._pages = pages
        self._use = array("I")  # by slot: last use, as far as noticed, in ms since the base
        self._word = array("H")  # by slot
        self._hint, self._owner = array("B"), array("I")  # by slot, as offered last; empty until there is a hint
        self._order = array("I")  # the listed slots, and some that were
        self._listed = 0
        self._base_ms: int | None = None
        self._now = 0  # ms since the base
        self._ghosts = Ghosts(pages)
        self._ledger = WorthLedger()
        self._table = np.array([gittins(of_class) for of_class in self._ledger.chances().tolist()])
        self._evicted = self._chosen = (
            0  # pages that left since the table was made, and those of them that ``victim`` named
        )
        self._phase = 0.0  # where the next sample begins, as a share of its stride
        self._next: list[tuple[int, int]] = []  # (slot, use) of the next to go, the first one last
        self._worth_max = 0.0  # of the next to go, when they were chosen ...
        self._young_ms = 0  # ... and the age below which no leaf was
        self._child: tuple[int, int] | None = None  # (word, use) of the page that left last, if nothing came between

    def resize(self, pages: int) -> None:
        """See ``EvictionPolicy.resize``."""
        self._pages = pages
        self._ghosts.resize(pages)

    def add(self, slot: int, page: Page) -> None:
        """See ``EvictionPolicy.add``."""
        if slot >= len(self._word):
            self._grow(slot)
        child, self._child = self._child, None
        if self._base_ms is None or page.used_ms - self._base_ms < 2 * MS_MAX:  # no mark from nowhere moves the base
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
        """See ``EvictionPolicy.remove``. The page is watched on: what removed it may have used it."""
        if slot not in self:
            return
        self._word[slot] &= ~_LISTED
        self._listed -= 1
        self._child = None
        if len(self._order) > 2 * self._listed + STALE_MAX:
            self._tidy()

    def forget(self, slot: int, key: int | None) -> None:
        """See ``EvictionPolicy.forget``."""
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
        """See ``EvictionPolicy.forget_tail``.

        A page of which nothing is known but what the leaf says goes with it, if it is worth no more than the best of
        those that were chosen with the leaf.
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
        """See ``EvictionPolicy.victim``."""
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
        """See ``EvictionPolicy.coldest_ms``: the age at which a page without experience is worth as little.

        Taken from the page that is next to go. So the ages of two classes of pages compare by worth: where the next
        page to go is still of some use, it is not called cold even if its last use was long ago.
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
        """See ``EvictionPolicy.__contains__``."""
        return slot < len(self._word) and self._word[slot] & _LISTED == _LISTED

    def __len__(self) -> int:
        """Pages listed."""
        return self._listed

    def _new(self, page: Page, use: int, child: tuple[int, int] | None) -> int:
        """The word of a page never offered before. ``child`` left just now, and may have been its last."""
        turns, step, uses = page.turns & _TURNS_MASK, step_of(page.position), 0
        trimmed = child is not None and _step_in(child[0]) == step_of(page.position + 1)
        if child is not None and trimmed:
            word, child_use = child
            later = (word >> _TURNS_SHIFT) - turns & _TURNS_MASK  # a child is never older
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
        """A use was noticed. Returns the page's word from here on; it is watched again."""
        self._watched(word, use - self._use[slot], used=True)
        self._use[slot] = use
        uses = min((word >> _USES_SHIFT & _USES_MAX) + 1, _USES_MAX)
        return word & _LASTING & ~(_USES_MAX << _USES_SHIFT) | uses << _USES_SHIFT

    def _watched(self, word: int, age_ms: int, *, used: bool) -> None:
        self._ledger.watched(word >> 1 & CLASSES - 1, word >> _ENTRY_SHIFT, bin_of(age_ms), used=used)

    def _learn(self, used_ms: UsedMs) -> None:
        """Recompute the table of indices.

        Leaves that are not used are noticed only when they leave, which the best take long to do. So what is listed
        counts as well, for once and as far as it was watched by now; of that an even sample is looked at.
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
        """Leaves, evenly spread over all. Each sample begins at another place, so that in time all are in one."""
        order, words = np.frombuffer(self._order, np.uint32), np.frombuffer(self._word, np.uint16)
        if self._listed > most:
            self._phase = (self._phase + 0.6180339887498949) % 1  # golden ratio: never near an earlier one for long
            places = most * len(order) // self._listed
            some = order[((np.arange(places) + self._phase) * (len(order) / places)).astype(np.int64)]
            if len(found := some[(words.take(some) & _1).astype(bool)]):
                return found
        return order[(words.take(order) & _1).astype(bool)]

    def _tidy(self) -> None:
        """Only what is listed stands in ``order``."""
        order, words = np.frombuffer(self._order, np.uint32), np.frombuffer(self._word, np.uint16)
        listed = (words[order] & _LISTED).astype(bool)
        words[order[~listed]] &= _ALL ^ _ORDERED
        self._order = array("I", order[listed].tobytes())

    def _choose(self) -> None:
        """Fill ``next``: the lowest of a sample."""
        slots = self._sample(SAMPLE)
        uses = np.frombuffer(self._use, np.uint32).take(slots)
        classes = np.frombuffer(self._word, np.uint16).take(slots) >> _1 & _CLASS
        ages = np.maximum(np.subtract(np.int64(self._now), uses, dtype=np.int64), _0)
        worth = self._table.take(classes * _BINS + bins_of(ages))
        worth *= ages * _LESS + _ONE  # of equal worth the older goes first
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
        """As many pages of each owner as there are among the lowest: those lowest as its hints weigh them."""
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
        """Milliseconds since the base, as 32 bits hold them."""
        assert self._base_ms is not None
        return min(max(0, time_ms - self._base_ms), MS_MAX - 1)

    def _advance(self, time_ms: int) -> None:
        """Move the base up when 49 days have gone by since."""
        if self._base_ms is None:
            self._base_ms = max(0, time_ms - MS_MAX // 4)  # pages of before a restart come with their last use
        if time_ms - self._base_ms < MS_MAX:
            return
        shift = time_ms - self._base_ms - MS_MAX // 2
        self._base_ms += shift
        self._now = max(0, self._now - shift)
        uses = np.frombuffer(self._use, np.uint32).astype(np.int64)
        self._use = array("I", np.maximum(uses - shift, 0).astype(np.uint32).tobytes())
        self._next.clear()
