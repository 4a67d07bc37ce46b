"""Rows about demotion: pages of DRAM saved to NVMe as fast as it goes, and what readers of DRAM feel of it.

A step's pages are put into a node that saves nothing of its own accord (``demote_at`` 1). Then all of them are wished
away (``evict``): none may leave before it is saved, so the node saves all, 32 MiB and one sync at a time. The step ends
when the index has every chain's last page on NVMe: it is durable then. The limit writes as many bytes by O_DIRECT into
a file with as much space, allocated alike on the same file system, with one fdatasync per 32 MiB: out of a buffer of
large memory pages, or out of shared memory such as the node's pages lie in; the faster way counts.
Both files are written for the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from kvstore.bench.content import LAYOUTS, BenchWork, Content, Rows
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, quickest, result, speeds
from kvstore.bench.nvme import BATCH_PAGES, BATCH_PAGES_QUICK, DRAM_EXTENT_BYTES, EXTENT_BYTES_QUICK, target, vacate
from kvstore.bench.nvme_disk import LIMITS, MIB, RawFile, Scratch, Task, Where
from kvstore.bench.put import SharedArea, ahead_pages
from kvstore.bench.stage import Stage
from kvstore.client.connect import connect
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.model.replica import Tier
from kvstore.tier.disk import aligned_buffer

STEP_BYTES, STEP_BYTES_QUICK = 384 * MIB, 64 * MIB  # saved in one go
SYNC_BYTES = 32 * MIB  # what the node makes durable at a time
HOT_BYTES, HOT_BYTES_QUICK = 512 * MIB, 32 * MIB  # that readers read meanwhile
QUIET_S, QUIET_S_QUICK = 0.3, 0.05
LEASE_S = 600.0
WRITES = (*LIMITS, "out_of_shared_memory")
SAVE_S = 60.0
POLL_S = 0.001
SEED, HOT_SEED = 31, 32


class Saving:
    """Chains put into DRAM, and saved when told to. Puts of ``step_bytes`` find free frames.

    Args:
        hot: pages that stay in DRAM: leased by somebody.
    """

    def __init__(self, store: Store, where: Where, geometry: str, pages: int, step_bytes: int, hot: int = 0) -> None:
        layout = LAYOUTS[geometry]
        self.store = store
        self.cache = store.cache(layout)
        self.work = BenchWork(geometry, SEED, step_bytes // (pages * layout.page_bytes), pages)  # of one step
        self._where = where
        self._content = Content(layout.page_bytes)
        self._rows: Rows = np.zeros((pages, layout.page_bytes), np.uint8)
        self._hot = hot
        self._step = 0
        self._tails: list[bytes] = []
        self.loaded = False

    def load(self) -> None:
        """DRAM gets new pages, unless it has those that were not saved yet."""
        if self.loaded:
            return
        vacate(self.store, self._hot)
        self._step += 1
        self._tails = []
        for chain in self._chains():
            keys = self.work.keys(self.cache, chain)
            self._content.fill(self._rows, keys.hashes)
            # Checksums from here: the node does not have to make them while something else is measured.
            if (new := self.cache.put(keys, self._rows, checksum=True)) != self.work.pages:
                raise BenchFailed(f"put stored {new} of {self.work.pages} new pages")
            self._tails.append(keys.hashes[-1])
        if any(self._where.saved([tail]) for tail in self._tails):
            raise BenchFailed("pages were saved before they were told to")
        self.loaded = True

    def start(self) -> None:
        """Now they are saved."""
        self.loaded = False
        self.store.evict(pages=self.work.chains * self.work.pages)

    def done(self) -> bool:
        """Whether all of them are, durably. Looks at one chain that was not, mostly: asking takes a processor, too."""
        while self._tails and self._where.saved(self._tails[-1:]):
            self._tails.pop()
        return not self._tails

    def save(self) -> int:
        """From the first to the last of them; returns their bytes."""
        deadline = time.monotonic() + SAVE_S
        self.start()
        while not self.done():
            if time.monotonic() >= deadline:
                raise BenchFailed(f"pages were not saved after {SAVE_S:g} s: {self.store.stats()['counters']}")
            time.sleep(POLL_S)
        return self.work.total_bytes

    def verify(self) -> None:
        """What was saved last, byte for byte, from NVMe. What was put since is saved, too."""
        if self.loaded:
            self.save()
        vacate(self.store, self._hot)
        for chain in self._chains():
            keys = self.work.keys(self.cache, chain)
            match = self.cache.get(keys, self._rows)
            if match.pages != self.work.pages or match.tiers.get(Tier.NVME) != self.work.pages:
                raise BenchFailed(f"{match} of {self.work.pages} saved pages")
            self._content.check(self._rows, keys.hashes, "a saved page")

    def _chains(self) -> range:
        return range(self._step * self.work.chains, (self._step + 1) * self.work.chains)


class RawWrites:
    """The limit: as many bytes, from where in the file the last step ended; around at its end."""

    def __init__(self, raw: RawFile, shared: SharedArea, step_bytes: int, file_bytes: int) -> None:
        self._raw = raw
        self._shared = shared.data
        self._step_bytes = step_bytes
        places = range(0, file_bytes, step_bytes)
        self._batches = {variant: [self._plan(at, variant) for at in places] for variant in WRITES}
        self._next = 0

    def _plan(self, start: int, variant: str) -> list[list[Task]]:
        """Per 32 MiB what ``RawFile.run`` needs."""
        how, source = (variant, None) if variant in LIMITS else ("pieces_1m", self._shared)
        cuts = range(start, start + self._step_bytes, SYNC_BYTES)
        return [self._raw.writes([(at, min(SYNC_BYTES, start + self._step_bytes - at))], how, source) for at in cuts]

    def write(self, variant: str, _: None) -> int:
        """Write one step; returns the bytes."""
        places = self._batches[variant]
        batches = places[self._next % len(places)]
        self._next += 1
        total = 0
        for tasks in batches:
            total += self._raw.run(tasks)
            self._raw.sync()
        return total


def demotion(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Bytes per second saved to NVMe."""
    rounds, step_bytes = stage.settings.rounds, _step_bytes(stage)
    limit_bytes = len(WRITES) * rounds * step_bytes
    with ExitStack() as scene:
        saving, scratch = _saving(stage, scene, geometry, (rounds + 1) * step_bytes, more_bytes=limit_bytes)
        raw = scene.enter_context(RawFile(scratch.path / "limit", SYNC_BYTES, create_bytes=limit_bytes))
        shared = scene.enter_context(SharedArea(stage.settings.shm_dir, SYNC_BYTES))
        limit = RawWrites(raw, shared, step_bytes, limit_bytes)

        def check(variant: str, value: object) -> None:
            if value != saving.work.total_bytes:
                raise BenchFailed(f"{variant} wrote {value} of {saving.work.total_bytes} bytes")

        variants: dict[str, Callable[[None], int]] = {
            "save": lambda _: saving.save(),
            **{variant: partial(limit.write, variant) for variant in WRITES},
        }
        seconds = alternate(variants, range(len(variants)), rounds, lambda _: saving.load(), check)
        saving.verify()
    best = quickest(seconds, WRITES)
    details = {
        "page_bytes": saving.work.layout.page_bytes,
        "chain_pages": saving.work.pages,
        "step_bytes": step_bytes,
        "sync_bytes": SYNC_BYTES,
        "step_seconds": {variant: medians(times) for variant, times in seconds.items()},
    }
    ours, limits = speeds(seconds["save"], step_bytes), speeds(seconds[best], step_bytes)
    limit_is = f"O_DIRECT writes, 4 threads, fdatasync per 32 MiB, {best}"
    return [result(name, Kind.SPEED, ours, limits, bar=bar, limit_is=limit_is, details=details)]


def get_while_demoting(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """One reader's gets from DRAM while the node saves other pages, over the same with nothing else going on."""
    quick, step_bytes = stage.settings.quick, _step_bytes(stage)
    pages = BATCH_PAGES_QUICK if quick else BATCH_PAGES
    hot_bytes = stage.settings.bounded(HOT_BYTES_QUICK if quick else HOT_BYTES)
    hot = BenchWork(geometry, HOT_SEED, hot_bytes // (pages * LAYOUTS[geometry].page_bytes), pages)
    quiet: list[float] = []
    busy: list[float] = []
    seconds: list[float] = []  # that saving took, while reading

    def read_busy() -> None:
        started = time.monotonic()
        saving.start()
        busy.append(reader.read(saving.done))
        seconds.append(time.monotonic() - started)

    def read_quiet() -> None:
        deadline = time.monotonic() + (QUIET_S_QUICK if quick else QUIET_S)
        quiet.append(reader.read(lambda: time.monotonic() >= deadline))

    with ExitStack() as scene:
        saved_bytes = (stage.settings.rounds + 1) * step_bytes + hot.total_bytes
        saving, _ = _saving(stage, scene, geometry, saved_bytes, hot)
        reader = HotReader(scene, saving.cache, hot)
        saving.load()
        saving.save()  # for once together with the hot pages
        for turn in range(stage.settings.rounds):
            saving.load()
            for part in (read_busy, read_quiet) if turn % 2 else (read_quiet, read_busy):
                part()
        saving.verify()
    details = {
        "page_bytes": hot.layout.page_bytes,
        "batch_pages": hot.pages,
        "hot_bytes": hot.total_bytes,
        "saved_bytes_per_s": [saving.work.total_bytes / took for took in seconds],
    }
    return [result(name, Kind.SPEED, busy, quiet, bar=bar, limit_is="get while nothing is saved", details=details)]


class HotReader:
    """Gets of chains that stay in DRAM: put and leased here, until the end of ``scene``."""

    def __init__(self, scene: ExitStack, cache: PrefixCache, hot: BenchWork) -> None:
        self._cache = cache
        self._work = hot
        self._out: Rows = aligned_buffer(hot.chain_bytes).reshape(hot.pages, -1)
        self._order = np.random.default_rng(33)
        content = Content(hot.layout.page_bytes)
        for chain in range(hot.chains):
            keys = hot.keys(cache, chain)
            content.fill(self._out, keys.hashes)
            if cache.put(keys, self._out, checksum=True) != hot.pages:
                raise BenchFailed("the hot pages do not fit")
            lease = scene.enter_context(cache.lease(keys, ttl_s=LEASE_S))
            if len(lease.pages) != hot.pages:
                raise BenchFailed(f"the lease holds {len(lease.pages)} of {hot.pages} pages")

    def read(self, done: Callable[[], bool]) -> float:
        """Bytes per second inside ``get`` until ``done``."""
        deadline = time.monotonic() + SAVE_S
        chains, seconds = 0, 0.0
        while not chains or not done():
            if time.monotonic() >= deadline:
                raise BenchFailed(f"pages were not saved after {SAVE_S:g} s")
            keys = self._work.keys(self._cache, int(self._order.integers(self._work.chains)))
            before = time.perf_counter()
            match = self._cache.get(keys, self._out)
            seconds += time.perf_counter() - before
            if match.tiers != {Tier.DRAM: self._work.pages}:
                raise BenchFailed(f"a reader of DRAM got {match.tiers} ({match.reason})")
            chains += 1
        return chains * self._work.chain_bytes / seconds


def _step_bytes(stage: Stage) -> int:
    wanted = STEP_BYTES_QUICK if stage.settings.quick else STEP_BYTES
    return stage.settings.bounded(wanted) // STEP_BYTES_QUICK * STEP_BYTES_QUICK


def _saving(
    stage: Stage, scene: ExitStack, geometry: str, saved_bytes: int, hot: BenchWork | None = None, more_bytes: int = 0
) -> tuple[Saving, Scratch]:
    """A node with room in DRAM for a step beside ``hot``, and on NVMe for ``saved_bytes``."""
    stage.clear()
    quick, page_bytes = stage.settings.quick, LAYOUTS[geometry].page_bytes
    pages = BATCH_PAGES_QUICK if quick else BATCH_PAGES
    extent_bytes = EXTENT_BYTES_QUICK if quick else DRAM_EXTENT_BYTES
    step_bytes, hot_bytes = _step_bytes(stage), hot.total_bytes if hot is not None else 0
    room = BenchWork(geometry, SEED, saved_bytes // (pages * page_bytes), pages)
    scratch, given = target(stage, scene, room, {"demote_at": 1}, more_bytes)
    ahead_bytes = ahead_pages(geometry) * page_bytes + 2 * extent_bytes
    daemon = stage.daemon(scene, step_bytes + hot_bytes + ahead_bytes, extent_bytes, given)
    store = scene.enter_context(connect(daemon.name))
    where = Where.of(stage.settings.shm_dir, daemon.name, LAYOUTS[geometry])
    scene.callback(where.close)
    return Saving(store, where, geometry, pages, step_bytes, hot.chains * hot.pages if hot is not None else 0), scratch
