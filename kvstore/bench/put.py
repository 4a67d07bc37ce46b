"""Rows that write: put in batches and one page at a time, into free frames and into a full pool."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np

import kvstore
from kvstore.addresses import connect
from kvstore.bench.content import LAYOUTS, Content, Rows, tokens_of
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, Seconds, alternate, medians, quickest, result, speeds
from kvstore.bench.processes import Daemon
from kvstore.bench.stage import MIB, RunSettings, Stage
from kvstore.client.local.grants import AHEAD_BYTES_MAX, AHEAD_FRAMES_MAX
from kvstore.client.store import Store
from kvstore.model.prefix import Keys

BATCH_PAGES = 32
AHEAD_SHARE = 8  # a client may hold at most 1/8 of all frames in advance
STEPS_BATCH = 96  # steps per round, at most: 32 per variant
STEPS_ONE_PAGE = 1500
SEED = 5

PAGES_COUNTED, WARM, GEOMETRY_COUNTED = 12, 3, "4k"  # of ``put_calls``
PERCENTILES = (50, 99, 99.9)
BACK_TO_BACK_BYTES, BACK_TO_BACK_BYTES_QUICK = 1 << 29, 1 << 25  # bytes that ``back_to_back`` puts

LIMITS = ("memmove_per_page", "copy_whole")


class SharedArea:
    """Populated and mapped shared memory of the kind that nodes use: the target of a put's limit.

    The memory has no name, so the kernel frees it at the latest when the process ends. Leaving a ``with`` frees it.
    """

    def __init__(self, shm_dir: Path, size_bytes: int) -> None:
        fd, path = tempfile.mkstemp(prefix="kvstore-bench-", dir=shm_dir)
        try:
            os.unlink(path)
            os.posix_fallocate(fd, 0, size_bytes)
            self._map = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(fd)
        self.data: Rows = np.frombuffer(self._map, np.uint8)
        self.data[:] = 1

    def __enter__(self) -> SharedArea:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self.data
        with contextlib.suppress(BufferError):  # an array still uses the memory; it is unmapped with that array
            self._map.close()


class PutBench:
    """Puts of new chains of one page size, and copies of the same bytes into plain shared memory."""

    def __init__(self, store: Store, geometry: str, pages: int, area: SharedArea) -> None:
        self.store = store
        self.layout = LAYOUTS[geometry]
        self.cache = store.cache(self.layout)
        self.pages = pages
        self.content = Content(self.layout.page_bytes)
        self.source = np.zeros((pages, self.layout.page_bytes), np.uint8)
        step_bytes = pages * self.layout.page_bytes
        places = len(area.data) // step_bytes
        self._targets = area.data[: places * step_bytes].reshape(places, pages, self.layout.page_bytes)
        self._chain = 0
        self._last: Keys | None = None

    def prepare(self, _: int) -> tuple[Keys, Rows]:
        """Return new keys, with their pages in ``source``, and the next part of the area."""
        self._chain += 1
        keys = self.cache.keys(tokens_of(SEED, self._chain, self.pages * self.layout.page_tokens))
        self.content.fill(self.source, keys.hashes)
        return keys, self._targets[self._chain % len(self._targets)]

    def put(self, arguments: tuple[Keys, Rows]) -> int:
        """Put the pages; return when every page is published."""
        self._last = arguments[0]
        return self.cache.put(arguments[0], self.source)

    def back_to_back(self, daemon: Daemon, nbytes: int) -> tuple[float, dict[str, float]]:
        """Put chains without a pause. Return the seconds per page, and the CPU seconds per page of both processes.

        The kernel counts the daemon's CPU time in ticks of 10 ms.
        """
        puts = max(1, nbytes // self.source.nbytes)
        tokens = self.pages * self.layout.page_tokens
        chains = [self.cache.keys(tokens_of(SEED + 1, self._chain + i, tokens)) for i in range(puts)]
        self._chain += puts
        daemon_s, client_s, start_s = daemon.cpu_s(), time.process_time(), time.perf_counter()
        for keys in chains:
            self.check("put", self.cache.put(keys, self.source))
        elapsed_s = time.perf_counter() - start_s
        client_s, daemon_s = time.process_time() - client_s, daemon.cpu_s() - daemon_s
        pages = puts * self.pages
        return elapsed_s / pages, {"client": client_s / pages, "daemon": daemon_s / pages}

    def memmove_per_page(self, arguments: tuple[Keys, Rows]) -> None:
        """Copy the pages with one call per page: a limit."""
        memmove, size = ctypes.memmove, self.layout.page_bytes
        source, target = self.source.ctypes.data, arguments[1].ctypes.data
        for offset in range(0, self.pages * size, size):
            memmove(target + offset, source + offset, size)

    def copy_whole(self, arguments: tuple[Keys, Rows]) -> None:
        """Copy all pages at once: a limit."""
        arguments[1][:] = self.source

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if not every page was stored."""
        if variant == "put" and value != self.pages:
            raise BenchFailed(f"put stored {value} of {self.pages} new pages")

    def verify(self) -> None:
        """Read the pages of the last put, and check every byte. Raises BenchFailed."""
        assert self._last is not None, "nothing was put"
        out = np.zeros_like(self.source)
        pages = self.cache.get(self._last, out).pages
        if pages != self.pages:
            raise BenchFailed(f"get found {pages} of the {self.pages} pages just put")
        self.content.check(out, self._last.hashes, "put")

    def fill(self, pool_bytes: int) -> None:
        """Put pages until every frame of the pool was used once."""
        for _ in range(-(-pool_bytes // (self.pages * self.layout.page_bytes)) + 1):
            self.check("put", self.put(self.prepare(0)))

    def empty(self) -> None:
        """Evict every page, so that all frames are free and warm."""
        while self.store.evict(pages=1 << 20)["pages"]:
            pass


def ahead_pages(geometry: str) -> int:
    """Return the number of frames that a client may hold in advance."""
    return min(AHEAD_FRAMES_MAX, AHEAD_BYTES_MAX // LAYOUTS[geometry].page_bytes)


def put(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Measure puts of 32 new pages: into free frames; into a full pool (``.full``); and into a full pool without a
    pause, per page (``.back_to_back``)."""
    return _put(stage, name, bar, geometry, BATCH_PAGES, Kind.SPEED)


def put_one(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Measure puts of one new page until it is published, p50: into free frames, and as ``put`` does into a full
    pool."""
    return _put(stage, name, bar, geometry, 1, Kind.TIME)


def _put(stage: Stage, name: str, bar: Bar, geometry: str, pages: int, kind: Kind) -> list[Result]:
    stage.clear()
    settings = stage.settings
    lines = []
    with ExitStack() as scene:
        writing, daemon, pool_bytes = _writing(stage, scene, geometry, pages)
        writing.fill(pool_bytes)
        # A third of the steps are puts. Frames that were granted ahead stay free.
        frames = pool_bytes // writing.layout.page_bytes
        steps_that_fit = 3 * ((frames - min(ahead_pages(geometry), frames // AHEAD_SHARE)) // pages)
        steps_max = (6 if pages > 1 else 150) if settings.quick else (STEPS_BATCH if pages > 1 else STEPS_ONE_PAGE)
        steps = list(range(min(steps_that_fit, steps_max)))
        variants = {"put": writing.put, **{limit: getattr(writing, limit) for limit in LIMITS}}
        for full in (False, True):
            if full:
                writing.fill(pool_bytes)
            before = (lambda: None) if full else writing.empty
            seconds = alternate(variants, steps, settings.rounds, writing.prepare, writing.check, before)
            writing.verify()
            lines.append(_line(f"{name}.full" if full else name, kind, None if full else bar, writing, seconds))
        nbytes = BACK_TO_BACK_BYTES_QUICK if settings.quick else BACK_TO_BACK_BYTES
        pages_s, cpu_s = zip(*(writing.back_to_back(daemon, nbytes) for _ in range(settings.rounds)), strict=True)
    cpu_s_per_page = {process: float(np.median([each[process] for each in cpu_s])) for process in cpu_s[0]}
    lines.append(result(f"{name}.back_to_back", Kind.TIME, pages_s, details={"cpu_s_per_page": cpu_s_per_page}))
    return lines


def _line(name: str, kind: Kind, bar: Bar | None, writing: PutBench, seconds: dict[str, Seconds]) -> Result:
    best = quickest(seconds, LIMITS)
    step_bytes = writing.pages * writing.layout.page_bytes
    ours, limit = seconds["put"], seconds[best]
    details = {
        "batch_pages": writing.pages,
        "page_bytes": writing.layout.page_bytes,
        "frames": "free and warm" if bar is not None else "full pool: every put evicts as many pages as it stores",
        "batch_seconds": {variant: medians(times) for variant, times in seconds.items()},
        "put_seconds": {f"p{share:g}": float(np.percentile(np.concatenate(ours), share)) for share in PERCENTILES},
    }
    return result(
        name,
        kind,
        speeds(ours, step_bytes) if kind is Kind.SPEED else medians(ours),
        speeds(limit, step_bytes) if kind is Kind.SPEED else medians(limit),
        bar=bar,
        limit_is=f"memcpy into shared memory, {best}",
        details=details,
    )


def _writing(stage: Stage, scene: ExitStack, geometry: str, pages: int) -> tuple[PutBench, Daemon, int]:
    """Start a node for a row that writes. Return the puts, the node's daemon, and the size of its pool."""
    settings = stage.settings
    pool_bytes, area_bytes = _sizes(settings)
    daemon = stage.daemon(scene, pool_bytes)
    area = scene.enter_context(SharedArea(settings.shm_dir, area_bytes))
    store = scene.enter_context(connect(daemon.name))
    return PutBench(store, geometry, pages, area), daemon, pool_bytes


def _sizes(settings: RunSettings) -> tuple[int, int]:
    """Return the sizes of the pool and of the limit's memory. Together, these are the working set of a row. Both fit at
    least two batches of 2 MiB pages."""
    pool_bytes = max(settings.walk_bytes, 256 * MIB)
    return pool_bytes, pool_bytes // 2


def put_calls(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Count the calls of Python functions in the thread that puts, and the files that contain them (``.files``).

    The store is embedded, so the daemon's part counts too. The numbers are the same on every machine.
    """
    layout = LAYOUTS[GEOMETRY_COUNTED]
    counts, files = list[float](), list[float]()
    rows = np.ones((PAGES_COUNTED, layout.page_bytes), np.uint8)
    with kvstore.open(dram="16MiB", shm_dir=stage.settings.shm_dir) as store:
        cache = store.cache(layout)
        for turn in range(WARM + stage.settings.rounds):
            keys = cache.keys(tokens_of(SEED, turn, PAGES_COUNTED * layout.page_tokens))
            files_called: list[str] = []

            def note(frame: FrameType, event: str, argument: object, into: list[str] = files_called) -> None:
                if event == "call":
                    into.append(frame.f_code.co_filename)

            sys.setprofile(note)
            try:
                stored = cache.put(keys, rows, wait=True)
            finally:
                sys.setprofile(None)
            if stored != PAGES_COUNTED:
                raise BenchFailed(f"put stored {stored} of {PAGES_COUNTED} new pages")
            if turn >= WARM:
                counts.append(len(files_called))
                files.append(len(set(files_called)))
    details = {"pages": PAGES_COUNTED}
    return [
        result(name, Kind.TIMES, counts, bar=bar, details=details),
        result(f"{name}.files", Kind.TIMES, files, details=details),
    ]
