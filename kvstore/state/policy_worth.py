"""What a page is worth, learnt from what became of others: chances of a use by class and age, and the Gittins index.

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

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

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
