"""Rows about NVMe: reads of pages that are no longer in DRAM, and saves of pages from DRAM (demotion).

**Reads.** Another process puts several times as many pages as the node's DRAM holds. The node saves all of them, and
then evicts the pages that are still in DRAM. Nothing is promoted (``promote_after``), so every read of every round is
cold. The limit reads the same ranges of the same file.

**Saves.** A step's pages are put into a node that saves nothing on its own (``demote_at`` 1). Then ``evict`` requests
the eviction of all of them. No page may leave DRAM before it is saved, so the node saves all, in batches of 32 MiB with
one sync each. The step ends when the index has the last page of every chain on NVMe, and the pages are durable then.
The limit writes the same number of bytes into a file of the same size on the same file system, with one fdatasync per
32 MiB, from large memory pages or from shared memory, whichever is faster. Both files are written for the first time.

**The limit** uses O_DIRECT in this process, with the store's number of threads and page-aligned buffers. It is measured
in two ways, and the faster one counts: pieces of 1 MiB, which the threads take one by one, or one piece per thread. The
buffers are in large memory pages if the kernel has them. A request then has few segments, which makes some disks
(mainly virtual ones) two to three times as fast.

Worked example: 32 pages of 256 KiB with their headers are in two runs of 20 and 12 frames, 5.1 and 3.0 MiB. These are
six and four pieces of at most 1 MiB, or two and two quarters. All ways read the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from kvstore.addresses import connect
from kvstore.bench.content import LAYOUTS, BenchWork, Content, Rows
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, quickest, result, speeds
from kvstore.bench.processes import Daemon
from kvstore.bench.put import SharedArea, ahead_pages
from kvstore.bench.stage import Stage, wait_for
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.device.host_memory import large_buffer
from kvstore.errors import KVStoreError
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, FrameClass, Tier
from kvstore.shm.folder import PREFIX, NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.index import Index, IndexDamaged
from kvstore.shm.records import ExtentTable
from kvstore.tier.nvme import geometry as nvme_geometry
from kvstore.tier.nvme.disk import BLOCK_BYTES, IO_THREADS, IoThreads, aligned_buffer
from kvstore.tier.nvme.map import NvmeMap

MIB = 1 << 20
PIECE_BYTES = MIB
LIMITS = ("pieces_1m", "piece_per_thread")
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
TABLES_BYTES = MIB  # part of a target without pages
SPARE_BYTES = 64 * MIB  # remains free on the file system for other programs

Range = tuple[int, int]  # offset, bytes
Task = Callable[[], int]


class Scratch:
    """A folder for the files of one row. Leaving the ``with`` removes it with its contents.

    Raises:
        BenchFailed: the folder does not exist, is not on a disk, or has less than ``needed_bytes`` free.
    """

    def __init__(self, folder: Path, needed_bytes: int, *, quick: bool = False) -> None:
        try:
            free = os.statvfs(folder)
        except OSError as error:
            raise BenchFailed(f"{folder}: {error.strerror}; --dir names another folder") from None
        free_bytes = free.f_bavail * free.f_frsize
        if free_bytes < needed_bytes + SPARE_BYTES:
            raise BenchFailed(
                f"{folder} has {free_bytes >> 20} MiB free, and this row needs {needed_bytes + SPARE_BYTES >> 20} MiB; "
                "--dir names another folder"
            )
        kind = file_system(folder)
        if kind in IN_MEMORY and not quick:
            raise BenchFailed(f"{folder} is in memory ({kind}); --dir names a folder on a disk")
        try:
            self.path = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=folder)).absolute()
        except OSError as error:
            raise BenchFailed(f"{folder}: {error.strerror}; --dir names another folder") from None

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system, such as ``ext4``; "" if the kernel does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == number:
                return line.partition(" - ")[2].split()[0]
    return ""


def target_bytes(pages: int, layout: Layout, extent_bytes: int) -> int:
    """Return the size of an NVMe target for ``pages`` pages and one spare extent."""
    frames = nvme_geometry.frames_in(extent_bytes, frame_class_of(layout))
    return (-(-pages // frames) + 1) * extent_bytes + TABLES_BYTES


def frame_class_of(layout: Layout) -> FrameClass:
    """Return the frame class of this layout's pages."""
    return FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)


def warm_buffer(nbytes: int) -> Rows:
    """Return memory that was already written to, in large memory pages if the kernel has them."""
    rows = large_buffer(nbytes)[:nbytes]
    rows[:] = 1
    return rows


class RawFile:
    """A file that ``IO_THREADS`` threads read or write without the page cache. Leaving the ``with`` closes it.

    Args:
        create_bytes: create an unnamed file of this size, which the kernel deletes at the end. 0 opens an existing
        file.

    Attributes:
        buffer: the memory for reads and writes.
    """

    def __init__(self, path: Path, buffer_bytes: int, *, create_bytes: int = 0) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if create_bytes else os.O_RDONLY
        try:
            self._fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BenchFailed(f"{path}: {error.strerror} (O_DIRECT); --dir names another folder") from None
        try:
            if create_bytes:
                path.unlink()
                os.posix_fallocate(self._fd, 0, create_bytes)
                os.fsync(self._fd)
        except OSError as error:
            os.close(self._fd)
            raise BenchFailed(f"{path}: {error.strerror}") from None
        self._io = IoThreads(IO_THREADS)
        self.buffer = warm_buffer(buffer_bytes)

    def reads(self, ranges: Sequence[Range], how: str) -> list[Task]:
        """Return the tasks with which ``run`` reads these ranges into ``buffer``, one range after the other."""
        return [partial(self._pieces, os.preadv, pieces) for pieces in self._cut(ranges, how)]

    def writes(self, ranges: Sequence[Range], how: str, source: Rows | None = None) -> list[Task]:
        """Return the tasks with which ``run`` writes these ranges from ``source``, or from ``buffer``."""
        return [partial(self._pieces, os.pwritev, pieces) for pieces in self._cut(ranges, how, source)]

    def run(self, tasks: Sequence[Task]) -> int:
        """Run the tasks; return the number of bytes moved. Raises BenchFailed."""
        total = 0
        for moved in self._io.run(tasks):
            if isinstance(moved, OSError | KVStoreError):
                raise BenchFailed(f"the disk failed: {moved}")
            total += moved
        return total

    def sync(self) -> None:
        """Make the written data durable."""
        os.fdatasync(self._fd)

    def _cut(self, ranges: Sequence[Range], how: str, buffer: Rows | None = None) -> list[list[tuple[Rows, int]]]:
        """Return the pieces of every task, each a part of the buffer and an offset in the file."""
        memory, total = self.buffer if buffer is None else buffer, sum(nbytes for _, nbytes in ranges)
        per_thread = -(-total // (IO_THREADS * BLOCK_BYTES)) * BLOCK_BYTES
        share = {"pieces_1m": PIECE_BYTES, "piece_per_thread": per_thread}[how]
        tasks: list[list[tuple[Rows, int]]] = []
        at, remaining = 0, 0  # position in the buffer; bytes that the current task may still take
        for offset, nbytes in ranges:
            while nbytes:
                if not remaining:
                    tasks.append([])
                    remaining = share
                step = min(nbytes, remaining)
                tasks[-1].append((memory[at : at + step], offset))
                at, offset, nbytes, remaining = at + step, offset + step, nbytes - step, remaining - step
                if how == "pieces_1m" and step < PIECE_BYTES:
                    remaining = 0  # the end of a run: no task has two pieces
        return tasks

    def _pieces(self, call: Callable[[int, list[Any], int], int], pieces: list[tuple[Rows, int]]) -> int:
        total = 0
        for view, offset in pieces:
            moved = call(self._fd, [view], offset)
            if moved != view.nbytes:
                raise OSError(errno.EIO, f"moved {moved} of {view.nbytes} bytes")
            total += moved
        return total

    def __enter__(self) -> RawFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._io.close()
        os.close(self._fd)


@dataclass(frozen=True)
class PageFinder:
    """Finds the NVMe pages of a node in its files. For nodes with one target, while no pages move."""

    folder: NodeFolder
    index: Index
    frame_class: FrameClass

    @classmethod
    def of(cls, shm_dir: Path, node: str, layout: Layout) -> PageFinder:
        """Open the files of a node. Raises BenchFailed if the node has no index."""
        folder = NodeFolder.at(shm_dir / f"{PREFIX}{node}")
        header = Header.open(folder)
        index = Index.open_reader(folder, header.epoch) if header is not None else None
        if index is None:
            raise BenchFailed(f"{node} has no index")
        return cls(folder, index, frame_class_of(layout))

    def are_durable(self, hashes: Sequence[bytes]) -> bool:
        """Return True if all pages with these keys are durable on NVMe."""
        try:
            return None not in self.index.find_many(Tier.NVME, hashes)
        except IndexDamaged as error:
            raise BenchFailed(f"the index was replaced: {error}") from None

    def ranges(self, chains: Sequence[Sequence[bytes]]) -> list[list[Range]]:
        """Return the ranges of each chain's pages with their headers. Consecutive frames are one range.

        Raises:
            BenchFailed: a page is not on NVMe, or its device cannot be read.
        """
        map_ = NvmeMap.open(self.folder)
        if map_ is None:
            raise BenchFailed(f"{self.folder.name} has no NVMe to read")
        tables: dict[int, ExtentTable] = {}
        ranges: list[list[Range]] = []
        try:
            for hashes in chains:
                ranges.append([])
                for raw in self.index.find_many(Tier.NVME, hashes):
                    if raw is None:
                        raise BenchFailed("a page is not on NVMe")
                    number, frame, _ = np.frombuffer(raw[:ADDRESS_BYTES], ADDRESS_DTYPE)[0].tolist()
                    table = tables.get(number) or ExtentTable.open(self.folder, number, map_.incarnation)
                    place = map_.place(table.position, self.frame_class, frame) if table is not None else None
                    if table is None or place is None:
                        raise BenchFailed(f"extent {number} cannot be read")
                    tables[number] = table
                    _append(ranges[-1], place.offset, nvme_geometry.stride_bytes(self.frame_class))
        finally:
            map_.close()
        return ranges

    def close(self) -> None:
        """Close the index."""
        self.index.close()


def _append(ranges: list[Range], offset: int, nbytes: int) -> None:
    if ranges and sum(ranges[-1]) == offset:
        offset, nbytes = ranges[-1][0], ranges[-1][1] + nbytes
        ranges.pop()
    ranges.append((offset, nbytes))


SAVED_BYTES = {"2m": 2048 * MIB, "256k": 1024 * MIB, "64k": 512 * MIB}
DRAM_BYTES = 256 * MIB
DRAM_EXTENT_BYTES = 32 * MIB
NVME_EXTENT_BYTES = 256 * MIB
SAVED_BYTES_QUICK, DRAM_BYTES_QUICK, EXTENT_BYTES_QUICK = 96 * MIB, 48 * MIB, 16 * MIB
BATCH_PAGES, BATCH_PAGES_QUICK = 32, 8
NEVER = 255  # ``promote_after``: more reads of a page than all rounds make
VACATE_S = 60.0


def plan(geometry: str, quick: bool, seed: int) -> BenchWork:
    """Return the content of a row that measures NVMe."""
    pages = BATCH_PAGES_QUICK if quick else BATCH_PAGES
    saved_bytes = SAVED_BYTES_QUICK if quick else SAVED_BYTES[geometry]
    return BenchWork(geometry, seed, chains=saved_bytes // (pages * LAYOUTS[geometry].page_bytes), pages=pages)


def target(
    stage: Stage, scene: ExitStack, work: BenchWork, settings: Mapping[str, object], more_bytes: int = 0
) -> tuple[Scratch, dict[str, object]]:
    """Return a folder for the row, and the settings of a node with an NVMe file in it for ``work``.

    The folder also has space for ``more_bytes``.
    """
    quick = stage.settings.quick
    extent_bytes = EXTENT_BYTES_QUICK if quick else NVME_EXTENT_BYTES
    size_bytes = target_bytes(work.chains * work.pages, work.layout, extent_bytes)
    scratch = scene.enter_context(Scratch(stage.settings.dir, size_bytes + more_bytes, quick=quick))
    nvme_settings = {"nvme": f"{scratch.path / 'pages'}:{size_bytes}", "nvme_extent": extent_bytes}
    return scratch, {**nvme_settings, "eviction": "lru", **settings}  # with lru the last pages put stay


@dataclass
class SavedPages:
    """A daemon whose pages were put by another process and are all on NVMe."""

    daemon: Daemon
    store: Store
    work: BenchWork
    scratch: Scratch
    fill_s: float  # time to put and save the pages


def start_saved_node(
    stage: Stage, scene: ExitStack, geometry: str, seed: int, settings: Mapping[str, object]
) -> SavedPages:
    """Start a node with saved pages. The node ends with ``scene``. DRAM still has as many pages as fit."""
    stage.clear()
    work = plan(geometry, stage.settings.quick, seed)
    dram_bytes = DRAM_BYTES_QUICK if stage.settings.quick else DRAM_BYTES
    extent_bytes = EXTENT_BYTES_QUICK if stage.settings.quick else DRAM_EXTENT_BYTES
    scratch, node_settings = target(stage, scene, work, settings)
    daemon = stage.daemon(scene, stage.settings.bounded(dram_bytes), extent_bytes, node_settings)
    store = scene.enter_context(connect(daemon.name))
    return SavedPages(daemon, store, work, scratch, stage.write(daemon, work))


def vacate(store: Store, pages: int = 0) -> None:
    """Evict until DRAM has at most ``pages`` pages. The node saves pages that are not on NVMe yet."""

    def is_done() -> bool:
        excess = int(store.stats()["tiers"]["dram"]["pages"]) - pages
        if excess > 0:
            store.evict(pages=excess)
        return excess <= 0

    wait_for(is_done, f"{store.name}: pages do not leave DRAM", VACATE_S)


class Chain(NamedTuple):
    """A chain: its tokens, and the tasks with which each way of the limit reads it."""

    tokens: Any
    tasks: dict[str, list[Task]]
    runs: int  # runs of consecutive frames in the file


Batch = tuple[Chain, Keys]


class ColdReading:
    """Reads all chains of a ``SavedPages``, none of which is in DRAM."""

    def __init__(self, cold: SavedPages, finder: PageFinder, raw: RawFile) -> None:
        work = cold.work
        self.work = work
        self.raw = raw
        self.stride = nvme_geometry.stride_bytes(finder.frame_class)
        self.header_bytes = nvme_geometry.header_bytes(finder.frame_class)
        self.cache = cold.store.cache(work.layout)
        self.content = Content(work.layout.page_bytes)
        shape = work.pages, work.layout.page_bytes
        self.out: Rows = warm_buffer(work.chain_bytes).reshape(shape)
        tokens = [work.tokens(chain) for chain in range(work.chains)]
        ranges = finder.ranges([self.cache.keys(each).hashes for each in tokens])
        self.chains = [
            Chain(each, {how: raw.reads(runs, how) for how in LIMITS}, len(runs))
            for each, runs in zip(tokens, ranges, strict=True)
        ]

    def prepare(self, chain: int) -> Batch:
        """Return the arguments of the variants, with new keys that no call has used."""
        return self.chains[chain], self.cache.keys(self.chains[chain].tokens)

    def variants(self) -> dict[str, Callable[[Batch], int]]:
        """Return the variants by name: the store's get, and the two ways of the limit."""
        get, out, run = self.cache.get, self.out, self.raw.run
        return {
            "get": lambda batch: get(batch[1], out).pages,
            "pieces_1m": lambda batch: run(batch[0].tasks["pieces_1m"]),
            "piece_per_thread": lambda batch: run(batch[0].tasks["piece_per_thread"]),
        }

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if less than the whole chain was read."""
        expected, unit = (self.work.pages, "pages") if variant == "get" else (self.work.pages * self.stride, "bytes")
        if value != expected:
            raise BenchFailed(f"{variant} read {value} of {expected} {unit}")

    def verify(self) -> None:
        """Read every chain by ``get`` and by one more variant, and check every byte. Raises BenchFailed."""
        variants = self.variants()
        names = list(variants)
        frames = self.raw.buffer[: self.work.pages * self.stride].reshape(self.work.pages, self.stride)
        payloads = frames[:, self.header_bytes : self.header_bytes + self.work.layout.page_bytes]
        rows = {"get": self.out, **dict.fromkeys(LIMITS, payloads)}
        for chain in range(self.work.chains):
            for name in dict.fromkeys(("get", names[chain % len(names)])):
                rows[name][:, ::4096] = 0
                batch = self.prepare(chain)
                self.check(name, variants[name](batch))
                self.content.check(rows[name], batch[1].hashes, f"{name} of chain {chain}")


def get(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Measure gets of 32 pages that are only on NVMe, with all checks, into a page-aligned warm buffer."""
    with ExitStack() as scene:
        cold = start_saved_node(stage, scene, geometry, 21, {"promote_after": NEVER})
        vacate(cold.store)
        if (pages := cold.store.stats()["tiers"]["nvme"]["pages"]) != cold.work.chains * cold.work.pages:
            raise BenchFailed(f"NVMe has {pages} of {cold.work.chains * cold.work.pages} pages")
        finder = PageFinder.of(stage.settings.shm_dir, cold.daemon.name, cold.work.layout)
        scene.callback(finder.close)
        raw = RawFile(cold.scratch.path / "pages", cold.work.pages * nvme_geometry.stride_bytes(finder.frame_class))
        scene.enter_context(raw)
        reading = ColdReading(cold, finder, raw)
        reading.verify()
        line = _measure(stage, name, bar, reading)
        tiers = cold.store.stats()["tiers"]
        if tiers["dram"]["pages"] or tiers["nvme"]["promoted_pages"]:
            raise BenchFailed(f"{tiers['nvme']['promoted_pages']} pages were promoted to DRAM: not every read was cold")
        line.details["fill_bytes_per_s"] = cold.work.total_bytes / cold.fill_s
    return [line]


def _measure(stage: Stage, name: str, bar: Bar, reading: ColdReading) -> Result:
    work, random = reading.work, np.random.default_rng(22)
    variants = reading.variants()
    passes = -(-len(variants) // work.chains)  # usually every chain once per round
    steps = [int(chain) for _ in range(passes) for chain in random.permutation(work.chains)]
    seconds = alternate(variants, steps, stage.settings.rounds, reading.prepare, reading.check)
    best = quickest(seconds, LIMITS)
    details = {
        "batch_pages": work.pages,
        "page_bytes": work.layout.page_bytes,
        "saved_bytes": work.total_bytes,
        "runs_per_batch": sum(chain.runs for chain in reading.chains) / work.chains,
        "batch_seconds": {variant: medians(times) for variant, times in seconds.items()},
    }
    ours, limit = speeds(seconds["get"], work.chain_bytes), speeds(seconds[best], work.chain_bytes)
    limit_is = f"O_DIRECT reads of the same ranges, 4 threads, {best}"
    return result(name, Kind.SPEED, ours, limit, bar=bar, limit_is=limit_is, details=details)


STEP_BYTES, STEP_BYTES_QUICK = 384 * MIB, 64 * MIB  # saved in one step
SYNC_BYTES = 32 * MIB  # the bytes that the node makes durable with one sync
HOT_BYTES, HOT_BYTES_QUICK = 512 * MIB, 32 * MIB  # pages in DRAM that are read during a save
QUIET_S, QUIET_S_QUICK = 0.3, 0.05
LEASE_S = 600.0
WRITES = (*LIMITS, "out_of_shared_memory")
SAVE_S = 60.0
POLL_S = 0.001
SEED, HOT_SEED = 31, 32


class Saving:
    """Chains that are put into DRAM, and saved on request. DRAM has free frames for ``step_bytes`` of them.

    Args:
        hot: the number of leased pages. They stay in DRAM.
    """

    def __init__(
        self, store: Store, finder: PageFinder, geometry: str, pages: int, step_bytes: int, hot: int = 0
    ) -> None:
        layout = LAYOUTS[geometry]
        self.store = store
        self.cache = store.cache(layout)
        self.work = BenchWork(geometry, SEED, step_bytes // (pages * layout.page_bytes), pages)  # one step
        self._finder = finder
        self._content = Content(layout.page_bytes)
        self._rows: Rows = np.zeros((pages, layout.page_bytes), np.uint8)
        self._hot = hot
        self._step = 0
        self._tails: list[bytes] = []
        self.has_unsaved_pages = False

    def load(self) -> None:
        """Put the pages of the next step into DRAM, unless the last ones are not saved yet."""
        if self.has_unsaved_pages:
            return
        vacate(self.store, self._hot)
        self._step += 1
        self._tails = []
        for chain in self._chains():
            keys = self.work.keys(self.cache, chain)
            self._content.fill(self._rows, keys.hashes)
            # Compute the checksums here, so that the node does not compute them during the measurement.
            if (new := self.cache.put(keys, self._rows, checksum=True)) != self.work.pages:
                raise BenchFailed(f"put stored {new} of {self.work.pages} new pages")
            self._tails.append(keys.hashes[-1])
        if any(self._finder.are_durable([tail]) for tail in self._tails):
            raise BenchFailed("pages were saved before the request")
        self.has_unsaved_pages = True

    def start(self) -> None:
        """Request the eviction of all pages, so that the node saves them."""
        self.has_unsaved_pages = False
        self.store.evict(pages=self.work.chains * self.work.pages)

    def done(self) -> bool:
        """Return True if all pages are durable. Checks the chains one by one until one is not, because a check costs
        CPU time."""
        while self._tails and self._finder.are_durable(self._tails[-1:]):
            self._tails.pop()
        return not self._tails

    def save(self) -> int:
        """Save all pages, and return how many bytes they have. Raises BenchFailed after ``SAVE_S``."""
        deadline = time.monotonic() + SAVE_S
        self.start()
        while not self.done():
            if time.monotonic() >= deadline:
                raise BenchFailed(f"pages were not saved after {SAVE_S:g} s: {self.store.stats()['counters']}")
            time.sleep(POLL_S)
        return self.work.total_bytes

    def verify(self) -> None:
        """Save the pages of the last step, read them from NVMe, and check every byte. Raises BenchFailed."""
        if self.has_unsaved_pages:
            self.save()
        vacate(self.store, self._hot)
        for chain in self._chains():
            keys = self.work.keys(self.cache, chain)
            match = self.cache.get(keys, self._rows)
            if match.pages != self.work.pages or match.tiers.get(Tier.NVME) != self.work.pages:
                raise BenchFailed(f"a get found {match} of {self.work.pages} saved pages")
            self._content.check(self._rows, keys.hashes, "a saved page")

    def _chains(self) -> range:
        return range(self._step * self.work.chains, (self._step + 1) * self.work.chains)


class RawWrites:
    """The limit: writes the same number of bytes into a file. Each step continues after the last one, and the first one
    follows the end of the file."""

    def __init__(self, raw: RawFile, shared: SharedArea, step_bytes: int, file_bytes: int) -> None:
        self._raw = raw
        self._shared = shared.data
        self._step_bytes = step_bytes
        places = range(0, file_bytes, step_bytes)
        self._batches = {variant: [self._plan(at, variant) for at in places] for variant in WRITES}
        self._next = 0

    def _plan(self, start: int, variant: str) -> list[list[Task]]:
        """Return the tasks for ``RawFile.run``, a list per 32 MiB."""
        how, source = (variant, None) if variant in LIMITS else ("pieces_1m", self._shared)
        cuts = range(start, start + self._step_bytes, SYNC_BYTES)
        return [self._raw.writes([(at, min(SYNC_BYTES, start + self._step_bytes - at))], how, source) for at in cuts]

    def write(self, variant: str, _: None) -> int:
        """Write one step; return how many bytes it wrote."""
        places = self._batches[variant]
        batches = places[self._next % len(places)]
        self._next += 1
        total = 0
        for tasks in batches:
            total += self._raw.run(tasks)
            self._raw.sync()
        return total


def demotion(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Measure the bytes per second that the node saves to NVMe."""
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
    """Measure one reader's gets from DRAM while the node saves other pages, compared with an idle node."""
    quick, step_bytes = stage.settings.quick, _step_bytes(stage)
    pages = BATCH_PAGES_QUICK if quick else BATCH_PAGES
    hot_bytes = stage.settings.bounded(HOT_BYTES_QUICK if quick else HOT_BYTES)
    hot = BenchWork(geometry, HOT_SEED, hot_bytes // (pages * LAYOUTS[geometry].page_bytes), pages)
    quiet: list[float] = []
    busy: list[float] = []
    save_seconds: list[float] = []  # durations of the saves during reads

    def read_busy() -> None:
        start_s = time.monotonic()
        saving.start()
        busy.append(reader.read(saving.done))
        save_seconds.append(time.monotonic() - start_s)

    def read_quiet() -> None:
        deadline = time.monotonic() + (QUIET_S_QUICK if quick else QUIET_S)
        quiet.append(reader.read(lambda: time.monotonic() >= deadline))

    with ExitStack() as scene:
        saved_bytes = (stage.settings.rounds + 1) * step_bytes + hot.total_bytes
        saving, _ = _saving(stage, scene, geometry, saved_bytes, hot)
        reader = HotReader(scene, saving.cache, hot)
        saving.load()
        saving.save()  # the first save includes the hot pages
        for turn in range(stage.settings.rounds):
            saving.load()
            for part in (read_busy, read_quiet) if turn % 2 else (read_quiet, read_busy):
                part()
        saving.verify()
    details = {
        "page_bytes": hot.layout.page_bytes,
        "batch_pages": hot.pages,
        "hot_bytes": hot.total_bytes,
        "saved_bytes_per_s": [saving.work.total_bytes / save_s for save_s in save_seconds],
    }
    return [result(name, Kind.SPEED, busy, quiet, bar=bar, limit_is="get while nothing is saved", details=details)]


class HotReader:
    """Gets of chains that stay in DRAM: this class puts them and leases them until the end of ``scene``."""

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
                raise BenchFailed("the hot pages do not fit into DRAM")
            lease = scene.enter_context(cache.lease(keys, ttl_s=LEASE_S))
            if len(lease.pages) != hot.pages:
                raise BenchFailed(f"the lease has {len(lease.pages)} of {hot.pages} pages")

    def read(self, done: Callable[[], bool]) -> float:
        """Get random chains until ``done()``; return the bytes per second."""
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
    step_bytes = STEP_BYTES_QUICK if stage.settings.quick else STEP_BYTES
    return stage.settings.bounded(step_bytes) // STEP_BYTES_QUICK * STEP_BYTES_QUICK


def _saving(
    stage: Stage, scene: ExitStack, geometry: str, saved_bytes: int, hot: BenchWork | None = None, more_bytes: int = 0
) -> tuple[Saving, Scratch]:
    """Start a node with DRAM for one step and for ``hot``, and with NVMe for ``saved_bytes``."""
    stage.clear()
    quick, page_bytes = stage.settings.quick, LAYOUTS[geometry].page_bytes
    pages = BATCH_PAGES_QUICK if quick else BATCH_PAGES
    extent_bytes = EXTENT_BYTES_QUICK if quick else DRAM_EXTENT_BYTES
    step_bytes, hot_bytes = _step_bytes(stage), hot.total_bytes if hot is not None else 0
    saved_work = BenchWork(geometry, SEED, saved_bytes // (pages * page_bytes), pages)
    scratch, settings = target(stage, scene, saved_work, {"demote_at": 1}, more_bytes)
    ahead_bytes = ahead_pages(geometry) * page_bytes + 2 * extent_bytes
    daemon = stage.daemon(scene, step_bytes + hot_bytes + ahead_bytes, extent_bytes, settings)
    store = scene.enter_context(connect(daemon.name))
    finder = PageFinder.of(stage.settings.shm_dir, daemon.name, LAYOUTS[geometry])
    scene.callback(finder.close)
    return Saving(store, finder, geometry, pages, step_bytes, hot.chains * hot.pages if hot is not None else 0), scratch
