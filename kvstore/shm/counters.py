"""SessionCounters: what one client did, counted in a page of words that its node reads. No message is sent for it.

A client's session file (``sessions/<id>``, see ``shm.sessions``) is one page of 8-byte words: a magic number, pages
missed by reason, how long each operation took, how long ago it was that pages which were hit had been used before, and
one row per page geometry with its gets and the pages hit and put. Each word has one writing party, the client; the node
reads them whenever it likes. Threads of one client share its words without a lock: between the read and the write of
one word no other thread of CPython gets a turn.

Worked example: a get asks for 32 pages of 64 KiB and 64 tokens, finds 20 in DRAM and 8 more in NVMe, and the next one
fails its checksum, all of which takes 300 us: in the row of that geometry one get, 20 pages hit in DRAM and 8 in NVMe;
``missed_checksum`` +4; and where this get is timed and 9 before it were not, 10 more in the bucket from 262.144 us to
393.216 us. What follows from that is not counted again: ``pages_asked`` are those hit and missed,
``read_dram_bytes`` 20 * 65536.

A get of one page takes 8 us, and counting it may not take 0.16. So a get that finds everything in DRAM adds to one word
(``ONE_GET`` and the pages) and is usually not timed. The first one after ``TIMED_NS`` (up to twice that, by chance) is,
and counts for all gets of its geometry since the last one that was: who asks seldom has every get timed. Other
operations are timed always.

A lookup reads no page: it counts as a lookup and as nothing else, or the get that follows it would count twice.
Layer-wise readers wait for their pages, and are not counted.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.safe_files import open_plain
from kvstore.shm.folder import allocate

COUNTERS_BYTES: Final = 4096
MISS_REASONS: Final = ("absent", "generation", "identity", "checksum", "extent", "io")
OPERATIONS: Final = ("get", "put", "put_async", "lookup", "lease")
TIMED_NS: Final = 1_000_000  # between gets that are timed
REUSE_SAMPLED: Final = 4  # one timed get in this many records how long ago its pages were last used

# Two buckets per octave of nanoseconds: [1024, 1536), [1536, 2048), [2048, 3072) ..; one below, one above.
_OCTAVE_MIN, _OCTAVE_MAX = 10, 37
_FAST_NS, _SLOW_NS = 1 << _OCTAVE_MIN, 1 << _OCTAVE_MAX
LATENCY_BOUNDS_S: Final = (
    *(step * (1 << octave) / 2e9 for octave in range(_OCTAVE_MIN, _OCTAVE_MAX) for step in (2, 3)),
    _SLOW_NS / 1e9,
)
"""Upper ends of all buckets of ``Histogram.counts`` but the last, which has none: 1.024 us to 137 s."""
_BUCKETS = len(LATENCY_BOUNDS_S) + 1
REUSE_BOUNDS_S: Final = tuple((1 << bits) / 1000 for bits in range(32))
"""The same for gaps between uses: 1 ms to 25 days."""

# --- The page ------------------------------------------------------------------------------------------------------

_MAGIC: Final = int.from_bytes(b"KVCOUNT3", "little")
_MISSED = {reason: 1 + i for i, reason in enumerate(MISS_REASONS)}
_LATENCY = 1 + len(MISS_REASONS)  # per operation: nanoseconds in all, then the buckets
_REUSE = _LATENCY + len(OPERATIONS) * (1 + _BUCKETS)  # milliseconds in all, then the buckets
_ROWS = _REUSE + 1 + len(REUSE_BOUNDS_S) + 1
# A row: gets and pages hit in DRAM in one word; a page's bytes and tokens; gets and pages carried out of the first
# word; pages hit in NVMe, put, and missed.
_ROW_GOT, _ROW_BYTES, _ROW_TOKENS, _ROW_GETS, _ROW_DRAM, _ROW_NVME, _ROW_PUT, _ROW_MISSED, _ROW_WORDS = range(9)
ONE_GET: Final = 1 << 40
CARRY: Final = 1 << 63  # the first word of a row is carried from there on: 2^23 gets, with pages below 2^40
ROWS_MAX: Final = 23  # page geometries of one client but for one: those beyond share the last row, without a size
_ROWS_END: Final = _ROWS + ROWS_MAX * _ROW_WORDS
# Pages hit in memory that engines have mounted, and their bytes, of all geometries.
_HBM_PAGES, _HBM_BYTES = _ROWS_END, _ROWS_END + 1
_WORDS: Final = _ROWS_END + 2
assert 8 * _WORDS <= COUNTERS_BYTES
COUNT_MAX: Final = 1 << 58  # of one session: clients write what they like into their files, ...
SUM_MAX: Final = 1 << 62  # ... and sums of such must hold

_FIRST = {name: _LATENCY + i * (1 + _BUCKETS) for i, name in enumerate(OPERATIONS)}
GET, PUT, PUT_ASYNC, LOOKUP, LEASE = (_FIRST[name] for name in OPERATIONS)
"""Operations, as ``SessionCounters.took`` takes them."""
_HALF_OCTAVES = 2 - 2 * (_OCTAVE_MIN + 1)  # from an operation's first word to what bucket 2 * bit length counts from

NAMES: Final = (
    "lookups",
    "gets",
    "leases",
    "puts",
    "puts_async",
    "pages_asked",  # by gets and leases
    "hit_dram",
    "hit_nvme",
    "hit_dram_tokens",
    "hit_nvme_tokens",
    "missed_tokens",
    *(f"missed_{reason}" for reason in MISS_REASONS),  # pages after the match, by why it ended
    "read_dram_bytes",  # copied or lent
    "read_nvme_bytes",
    "hit_hbm",
    "read_hbm_bytes",
    "pages_put",  # new ones, acknowledged
    "put_bytes",
)


class SessionCounters:
    """One session's words. Made in plain memory; ``attach`` moves them into the session's file.

    Ends with the process that holds it: the words of the file stay for the node, which adds them up when the session is
    over.

    Attributes:
        words: the page, word 0 the magic number.
        rows: where a geometry is counted, by ``page_bytes << 32 | page_tokens``; see ``row``.
    """

    __slots__ = ("words", "rows", "_timed", "_attached", "_lock")

    def __init__(self) -> None:
        self.words: memoryview[int] = memoryview(bytearray(8 * _WORDS)).cast("Q")
        self.rows: dict[int, int] = {}
        self._timed: dict[int, int] = {}  # row -> its gets when one was last timed
        self._attached = False
        self._lock = threading.Lock()

    def attach(self, path: Path) -> None:
        """Count in this file from now on. What was counted in memory so far goes with it; what an earlier file holds
        stays there, for the node has it.

        Raises:
            OutOfSpace, OSError: no memory for the page, or no file; counting goes on where it was.
        """
        # Opened for this alone: a map keeps a copy of its descriptor, which would keep a lock taken through it.
        fd = open_plain(path, os.O_RDWR)
        try:
            allocate(fd, 0, COUNTERS_BYTES, str(path))  # a store into a hole of a full tmpfs would kill us
            words: memoryview[int] = memoryview(mmap.mmap(fd, COUNTERS_BYTES)).cast("Q")
        finally:
            os.close(fd)
        with self._lock:
            counted = self.words
            if words[0] != _MAGIC:
                for place in range(1, _WORDS):
                    words[place] = 0
                for row in self.rows.values():
                    for place in (row + _ROW_BYTES, row + _ROW_TOKENS):
                        words[place] = counted[place]
                words[0] = _MAGIC
            self.words = words
            if not self._attached:
                self._attached = True
                for place in range(1, _WORDS):
                    if not _ROWS <= place < _ROWS_END or (place - _ROWS) % _ROW_WORDS not in (_ROW_BYTES, _ROW_TOKENS):
                        words[place] += counted[place]

    def row(self, page_bytes: int, page_tokens: int) -> int:
        """Where pages of this geometry are counted."""
        geometry = page_bytes << 32 | page_tokens
        row = self.rows.get(geometry)
        if row is None:
            with self._lock:
                row = self.rows.get(geometry)
                if row is None:
                    row = _ROWS + len(self.rows) * _ROW_WORDS
                    if len(self.rows) < ROWS_MAX - 1:  # beyond, none is remembered: whose the row is has no end
                        self.words[row + _ROW_BYTES], self.words[row + _ROW_TOKENS] = page_bytes, page_tokens
                        self.rows[geometry] = row
        return row

    def got(self, row: int, asked: int, dram: int, nvme: int, reason: str, hbm: int = 0) -> None:
        """A get of ``asked`` pages found ``dram + nvme + hbm`` of them, and no more for ``reason``.

        Where all were in DRAM, ``PrefixCache.get`` does itself what this would, and calls ``carry`` as well.
        """
        words = self.words
        word = words[row] + ONE_GET + dram
        if word < CARRY:
            words[row] = word
        else:
            self.carry(row, word)
        if dram != asked:
            words[row + _ROW_NVME] += nvme
            missed = asked - dram - nvme - hbm
            words[row + _ROW_MISSED] += missed
            words[_MISSED.get(reason, 1)] += missed
            if hbm:
                words[_HBM_PAGES] += hbm
                words[_HBM_BYTES] += hbm * words[row + _ROW_BYTES]

    def carry(self, row: int, word: int) -> None:
        """What the row's first word would be, ``CARRY`` or more: its gets and pages go to words of their own."""
        words = self.words
        words[row] = 0
        words[row + _ROW_GETS] += word // ONE_GET
        words[row + _ROW_DRAM] += word % ONE_GET

    def timed(self, row: int, start_ns: int) -> None:
        """A get that is timed is done, since ``start_ns``. It was counted before, as those were that it stands for."""
        gets = self.words[row + _ROW_GETS] + self.words[row] // ONE_GET
        self.took(GET, start_ns, max(1, gets - self._timed.get(row, 0)))
        self._timed[row] = gets

    def took(self, operation: int, start_ns: int, weight: int = 1) -> None:
        """One of ``GET`` .. ``LEASE`` was done, since ``start_ns``; it counts for ``weight`` of them."""
        words, ns = self.words, time.monotonic_ns() - start_ns
        words[operation] += ns * weight
        if _FAST_NS <= ns < _SLOW_NS:
            bits = ns.bit_length()
            place = _HALF_OCTAVES + 2 * bits + (ns >> bits - 2 & 1)
        else:
            place = 1 if ns < _FAST_NS else _BUCKETS
        words[operation + place] += weight

    def leased(self, row: int, asked: int, pages: int, reason: str, start_ns: int) -> None:
        """A lease of ``asked`` pages lends ``pages`` of them, and no more for ``reason``."""
        self.words[row + _ROW_DRAM] += pages
        if pages != asked:
            self.words[row + _ROW_MISSED] += asked - pages
            self.words[_MISSED.get(reason, 1)] += asked - pages
        self.took(LEASE, start_ns)

    def put(self, row: int, pages: int) -> None:
        """Count new pages that were acknowledged as sealed."""
        self.words[row + _ROW_PUT] += pages

    def reused(self, gap_ns: int, pages: int) -> None:
        """Count hit pages that had last been used ``gap_ns`` ago. For one timed get in ``REUSE_SAMPLED``."""
        gap_ms = max(0, gap_ns) // 1_000_000
        self.words[_REUSE] += gap_ms * pages
        self.words[_REUSE + 1 + min(gap_ms.bit_length(), len(REUSE_BOUNDS_S))] += pages

    def tally(self) -> Tally:
        """All counts."""
        return Tally.of([_vector(np.frombuffer(self.words, np.uint64, _WORDS))])

    def vector(self) -> Vector:
        """The counts for ``Tally.of``."""
        return _vector(np.frombuffer(self.words, np.uint64, _WORDS))


# --- Reading -------------------------------------------------------------------------------------------------------

Vector = npt.NDArray[np.uint64]
"""The counts of ``NAMES``, then the page's words of latency and reuse: what can be added up over sessions."""


@dataclass(frozen=True)
class Histogram:
    """Counts per bucket, as many as the bounds and one more, and the sum of all that was counted, in seconds."""

    counts: tuple[int, ...]
    sum_s: float

    def minus(self, other: Histogram) -> Histogram:
        """What came since ``other``."""
        pairs = zip(self.counts, other.counts, strict=True)
        return Histogram(tuple(max(0, a - b) for a, b in pairs), max(0.0, self.sum_s - other.sum_s))


@dataclass(frozen=True)
class Tally:
    """What some sessions counted together.

    Attributes:
        counts: by the names of ``NAMES``.
        latency: of each of ``OPERATIONS``.
        reuse: pages by the time since their last use, of one timed get in ``REUSE_SAMPLED``.
    """

    counts: dict[str, int]
    latency: dict[str, Histogram]
    reuse: Histogram

    @classmethod
    def of(cls, vectors: Iterable[Vector]) -> Tally:
        """The sum."""
        total: list[int] = sum(vectors, start=NOTHING).tolist()
        words = total[len(NAMES) :]
        latency = {}
        for name, first in _FIRST.items():
            at = first - _LATENCY
            latency[name] = Histogram(tuple(words[at + 1 : at + 1 + _BUCKETS]), words[at] / 1e9)
        reuse = words[_REUSE - _LATENCY :]
        counts = dict(zip(NAMES, total, strict=False))
        return cls(counts, latency, Histogram(tuple(reuse[1:]), reuse[0] / 1e3))

    def minus(self, other: Tally) -> Tally:
        """What came since ``other`` was taken."""
        return Tally(
            {name: max(0, count - other.counts[name]) for name, count in self.counts.items()},
            {name: latency.minus(other.latency[name]) for name, latency in self.latency.items()},
            self.reuse.minus(other.reuse),
        )


_VECTOR_WORDS = len(NAMES) + _ROWS - _LATENCY
NOTHING: Final = np.zeros(_VECTOR_WORDS, np.uint64)


def added(sum_: Vector, counts: Vector) -> Vector:
    """Add another session's counts; a sum stops where it would not fit its word any more."""
    total: Vector = np.minimum(sum_ + counts, np.uint64(SUM_MAX))
    return total


def _vector(words: Vector) -> Vector:
    rows = (
        words[_ROWS:_ROWS_END].reshape(ROWS_MAX, _ROW_WORDS).astype(np.float64)
    )  # whose products and sums do not wrap
    got = words[_ROWS:_ROWS_END].reshape(ROWS_MAX, _ROW_WORDS)[:, _ROW_GOT]
    gets = (rows[:, _ROW_GETS] + got // np.uint64(ONE_GET)).sum()
    pages = rows[:, _ROW_DRAM:]
    pages[:, 0] += got % np.uint64(ONE_GET)
    dram, nvme, put, _ = pages.sum(axis=0)
    dram_tokens, nvme_tokens, _, missed_tokens = (pages * rows[:, _ROW_TOKENS, None]).sum(axis=0)
    dram_bytes, nvme_bytes, put_bytes, _ = (pages * rows[:, _ROW_BYTES, None]).sum(axis=0)
    rest = words[:_ROWS].astype(np.float64)
    missed = rest[1:_LATENCY]
    times = {name: rest[first + 1 : first + 1 + _BUCKETS].sum() for name, first in _FIRST.items()}
    hbm, hbm_bytes = words[_HBM_PAGES], words[_HBM_BYTES]
    asked = dram + nvme + hbm + missed.sum()
    head = [times["lookup"], gets, times["lease"], times["put"], times["put_async"]]
    head += [asked, dram, nvme, dram_tokens, nvme_tokens, missed_tokens]
    counts = np.array([*head, *missed, dram_bytes, nvme_bytes, hbm, hbm_bytes, put, put_bytes, *rest[_LATENCY:]])
    limited: Vector = np.minimum(counts, COUNT_MAX).astype(np.uint64)
    return limited


def read_counters(fd: int) -> Vector | None:
    """The counts in a session's file; None where there are none (yet), or those of another version."""
    page = os.pread(fd, 8 * _WORDS, 0)
    if len(page) < 8 * _WORDS:
        return None
    words = np.frombuffer(page, np.uint64)
    return _vector(words) if int(words[0]) == _MAGIC else None
