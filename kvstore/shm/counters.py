"""SessionCounters: a client counts its operations in a page of words that its node reads, without sending a message.

A client's session file (``sessions/<id>``, see ``shm.sessions``) is one page of 8-byte words: a magic number, missed
pages by reason, the duration of each operation, the time since the last use of pages that were hit, and one row per
page geometry with its gets and the pages hit and put. Only the client writes these words; the node reads them at any
time. Threads of one client share them without a lock, because CPython runs no other thread between the read and the
write of a word.

Worked example: a get asks for 32 pages of 64 KiB and 64 tokens. It finds 20 in DRAM and 8 more on NVMe, the next one
fails its checksum, and all of that takes 300 us. It counts one get, 20 pages hit in DRAM and 8 on NVMe in the row of
that geometry, and adds 4 to ``missed_checksum``. If this get is timed and 9 before it were not, it adds 10 to the
bucket from 262.144 us to 393.216 us. Derived numbers are not stored: ``pages_asked`` are those hit and missed,
``read_dram_bytes`` is 20 * 65536.

A get of one page takes 8 us, and counting may take no more than 0.16 of them. So a get that finds all its pages in DRAM
adds to one word (``ONE_GET`` and the pages), and is usually not timed. The first get after ``TIMED_NS`` (up to twice
that, by chance) is timed, and represents all gets of its geometry since the last timed one. So a client with few gets
has each of them timed. Other operations are always timed.

A lookup reads no page. It counts only as a lookup; otherwise the get that follows it would count the pages twice.
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
TIMED_NS: Final = 10_000_000  # shortest time between timed gets
REUSE_SAMPLED: Final = 4  # one timed get in this many records the time since the last use of its pages

# Two buckets per octave of nanoseconds: [1024, 1536), [1536, 2048), [2048, 3072) ..; one for less, one for more.
_OCTAVE_MIN, _OCTAVE_MAX = 10, 37
_FAST_NS, _SLOW_NS = 1 << _OCTAVE_MIN, 1 << _OCTAVE_MAX
LATENCY_BOUNDS_S: Final = (
    *(step * (1 << octave) / 2e9 for octave in range(_OCTAVE_MIN, _OCTAVE_MAX) for step in (2, 3)),
    _SLOW_NS / 1e9,
)
"""Upper bounds of all buckets of ``Histogram.counts`` except the last, which has none: 1.024 us to 137 s."""
_BUCKETS = len(LATENCY_BOUNDS_S) + 1
REUSE_BOUNDS_S: Final = tuple((1 << bits) / 1000 for bits in range(32))
"""The same for the time between uses: 1 ms to 25 days."""

# --- The page ------------------------------------------------------------------------------------------------------

_MAGIC: Final = int.from_bytes(b"KVCOUNT3", "little")
_MISSED = {reason: 1 + i for i, reason in enumerate(MISS_REASONS)}
_LATENCY = 1 + len(MISS_REASONS)  # per operation: sum in nanoseconds, then the buckets
_REUSE = _LATENCY + len(OPERATIONS) * (1 + _BUCKETS)  # sum in milliseconds, then the buckets
_ROWS = _REUSE + 1 + len(REUSE_BOUNDS_S) + 1
# A row: gets and pages hit in DRAM, in one word; a page's bytes and tokens; gets and pages that were carried out of the
# first word; pages hit on NVMe, put, and missed.
_ROW_GOT, _ROW_BYTES, _ROW_TOKENS, _ROW_GETS, _ROW_DRAM, _ROW_NVME, _ROW_PUT, _ROW_MISSED, _ROW_WORDS = range(9)
ONE_GET: Final = 1 << 40
CARRY: Final = 1 << 63  # from this value on, a row's first word is carried: 2^23 gets, with less than 2^40 pages
ROWS_MAX: Final = 23  # rows of one client; all further page geometries share the last row, which has no size
_ROWS_END: Final = _ROWS + ROWS_MAX * _ROW_WORDS
# Pages hit in memory that engines have mounted, and their bytes, across all geometries.
_HBM_PAGES, _HBM_BYTES = _ROWS_END, _ROWS_END + 1
_WORDS: Final = _ROWS_END + 2
assert 8 * _WORDS <= COUNTERS_BYTES
COUNT_MAX: Final = 1 << 58  # of one session: clients may write anything into their files, ...
SUM_MAX: Final = 1 << 62  # ... and sums of such counts must fit a word

_FIRST = {name: _LATENCY + i * (1 + _BUCKETS) for i, name in enumerate(OPERATIONS)}
GET, PUT, PUT_ASYNC, LOOKUP, LEASE = (_FIRST[name] for name in OPERATIONS)
"""Operations, as arguments of ``SessionCounters.took``."""
_HALF_OCTAVES = 2 - 2 * (_OCTAVE_MIN + 1)  # offset from an operation's first word to the place of 2 * bit length

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
    *(f"missed_{reason}" for reason in MISS_REASONS),  # pages after the match, by the reason why it ended
    "read_dram_bytes",  # copied or leased
    "read_nvme_bytes",
    "hit_hbm",
    "read_hbm_bytes",
    "pages_put",  # new pages, acknowledged
    "put_bytes",
)


class SessionCounters:
    """The counters of one session. Made in plain memory; ``attach`` moves them into the session's file.

    They end with their process. The words in the file stay for the node, which adds them up when the session has ended.

    Attributes:
        words: the page; word 0 is the magic number.
        rows: place of each geometry's row, by ``page_bytes << 32 | page_tokens``; see ``row``.
    """

    __slots__ = ("words", "rows", "_timed", "_attached", "_lock")

    def __init__(self) -> None:
        self.words: memoryview[int] = memoryview(bytearray(8 * _WORDS)).cast("Q")
        self.rows: dict[int, int] = {}
        self._timed: dict[int, int] = {}  # row -> number of its gets when one was last timed
        self._attached = False
        self._lock = threading.Lock()

    def attach(self, path: Path) -> None:
        """Start counting in this file, including everything counted in memory so far.

        If another file was attached earlier, its counts stay there, because the node reads it.

        Raises:
            OutOfSpace, OSError: no memory for the page, or no file. Counting continues where it was.
        """
        # A separate descriptor: a map keeps a copy of its descriptor, which would keep a lock taken through it.
        fd = open_plain(path, os.O_RDWR)
        try:
            allocate(fd, 0, COUNTERS_BYTES, str(path))  # a store into a hole of a full tmpfs would kill us
            words: memoryview[int] = memoryview(mmap.mmap(fd, COUNTERS_BYTES)).cast("Q")
        finally:
            os.close(fd)
        with self._lock:
            before = self.words
            if words[0] != _MAGIC:
                for place in range(1, _WORDS):
                    words[place] = 0
                for row in self.rows.values():
                    for place in (row + _ROW_BYTES, row + _ROW_TOKENS):
                        words[place] = before[place]
                words[0] = _MAGIC
            self.words = words
            if not self._attached:
                self._attached = True
                for place in range(1, _WORDS):
                    if not _ROWS <= place < _ROWS_END or (place - _ROWS) % _ROW_WORDS not in (_ROW_BYTES, _ROW_TOKENS):
                        words[place] += before[place]

    def row(self, page_bytes: int, page_tokens: int) -> int:
        """Return the place of the row in which pages of this geometry are counted."""
        geometry = page_bytes << 32 | page_tokens
        row = self.rows.get(geometry)
        if row is None:
            with self._lock:
                row = self.rows.get(geometry)
                if row is None:
                    row = _ROWS + len(self.rows) * _ROW_WORDS
                    if len(self.rows) < ROWS_MAX - 1:  # the last row is shared, and belongs to no geometry
                        self.words[row + _ROW_BYTES], self.words[row + _ROW_TOKENS] = page_bytes, page_tokens
                        self.rows[geometry] = row
        return row

    def got(self, row: int, asked: int, dram: int, nvme: int, reason: str, hbm: int = 0) -> None:
        """Count a get of ``asked`` pages. It found ``dram + nvme + hbm`` pages, and its match ended because of
        ``reason``.

        If all were in DRAM, ``PrefixCache.get`` does this itself, and also calls ``carry``.
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
        """Move gets and pages out of a row's first word, whose new value would be ``word`` (at least ``CARRY``)."""
        words = self.words
        words[row] = 0
        words[row + _ROW_GETS] += word // ONE_GET
        words[row + _ROW_DRAM] += word % ONE_GET

    def timed(self, row: int, start_ns: int) -> None:
        """Record the duration of a timed get that started at ``start_ns``, for all gets that it represents."""
        gets = self.words[row + _ROW_GETS] + self.words[row] // ONE_GET
        self.took(GET, start_ns, max(1, gets - self._timed.get(row, 0)))
        self._timed[row] = gets

    def took(self, operation: int, start_ns: int, weight: int = 1) -> None:
        """Record the duration since ``start_ns`` for ``weight`` operations of this kind (``GET`` .. ``LEASE``)."""
        words, ns = self.words, time.monotonic_ns() - start_ns
        words[operation] += ns * weight
        if _FAST_NS <= ns < _SLOW_NS:
            bits = ns.bit_length()
            place = _HALF_OCTAVES + 2 * bits + (ns >> bits - 2 & 1)
        else:
            place = 1 if ns < _FAST_NS else _BUCKETS
        words[operation + place] += weight

    def leased(self, row: int, asked: int, pages: int, reason: str, start_ns: int) -> None:
        """Count a lease of ``asked`` pages. It covers ``pages`` pages, and its match ended because of ``reason``."""
        self.words[row + _ROW_DRAM] += pages
        if pages != asked:
            self.words[row + _ROW_MISSED] += asked - pages
            self.words[_MISSED.get(reason, 1)] += asked - pages
        self.took(LEASE, start_ns)

    def put(self, row: int, pages: int) -> None:
        """Count new pages that were acknowledged as sealed."""
        self.words[row + _ROW_PUT] += pages

    def reused(self, gap_ns: int, pages: int) -> None:
        """Count hit pages whose last use was ``gap_ns`` ago. Call this for one timed get in ``REUSE_SAMPLED``."""
        gap_ms = max(0, gap_ns) // 1_000_000
        self.words[_REUSE] += gap_ms * pages
        self.words[_REUSE + 1 + min(gap_ms.bit_length(), len(REUSE_BOUNDS_S))] += pages

    def tally(self) -> Tally:
        """Return all counts."""
        return Tally.of([_vector(np.frombuffer(self.words, np.uint64, _WORDS))])

    def vector(self) -> Vector:
        """Return the counts for ``Tally.of``."""
        return _vector(np.frombuffer(self.words, np.uint64, _WORDS))


# --- Reading -------------------------------------------------------------------------------------------------------

Vector = npt.NDArray[np.uint64]
"""The numbers that are summed across sessions: the counts of ``NAMES``, then the page's words of latency and reuse."""


@dataclass(frozen=True)
class Histogram:
    """Counts per bucket, one more than there are bounds, and the sum of all recorded values, in seconds."""

    counts: tuple[int, ...]
    sum_s: float

    def minus(self, other: Histogram) -> Histogram:
        """Return what was recorded since ``other``."""
        pairs = zip(self.counts, other.counts, strict=True)
        return Histogram(tuple(max(0, a - b) for a, b in pairs), max(0.0, self.sum_s - other.sum_s))


@dataclass(frozen=True)
class Tally:
    """The sum of the counts of some sessions.

    Attributes:
        counts: name of ``NAMES`` -> count.
        latency: durations of each of ``OPERATIONS``.
        reuse: pages by the time since their last use, for one timed get in ``REUSE_SAMPLED``.
    """

    counts: dict[str, int]
    latency: dict[str, Histogram]
    reuse: Histogram

    @classmethod
    def of(cls, vectors: Iterable[Vector]) -> Tally:
        """Return the sum of these vectors."""
        total: list[int] = sum(vectors, start=NO_COUNTS).tolist()
        words = total[len(NAMES) :]
        latency = {}
        for name, first in _FIRST.items():
            at = first - _LATENCY
            latency[name] = Histogram(tuple(words[at + 1 : at + 1 + _BUCKETS]), words[at] / 1e9)
        reuse = words[_REUSE - _LATENCY :]
        counts = dict(zip(NAMES, total, strict=False))
        return cls(counts, latency, Histogram(tuple(reuse[1:]), reuse[0] / 1e3))

    def minus(self, other: Tally) -> Tally:
        """Return what was counted since ``other``."""
        return Tally(
            {name: max(0, count - other.counts[name]) for name, count in self.counts.items()},
            {name: latency.minus(other.latency[name]) for name, latency in self.latency.items()},
            self.reuse.minus(other.reuse),
        )


_VECTOR_WORDS = len(NAMES) + _ROWS - _LATENCY
NO_COUNTS: Final = np.zeros(_VECTOR_WORDS, np.uint64)


def add_counts(sum_: Vector, counts: Vector) -> Vector:
    """Add another session's counts. A sum that would not fit its word stays at ``SUM_MAX``."""
    total: Vector = np.minimum(sum_ + counts, np.uint64(SUM_MAX))
    return total


def _vector(words: Vector) -> Vector:
    # Computed as floats, because integer products and sums could wrap.
    rows = words[_ROWS:_ROWS_END].reshape(ROWS_MAX, _ROW_WORDS).astype(np.float64)
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
    """Return the counts in a session's file; None if it has none yet, or if they are from another version."""
    page = os.pread(fd, 8 * _WORDS, 0)
    if len(page) < 8 * _WORDS:
        return None
    words = np.frombuffer(page, np.uint64)
    return _vector(words) if int(words[0]) == _MAGIC else None
