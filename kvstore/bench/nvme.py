"""Rows that read from NVMe: batches that are no longer in DRAM, compared with O_DIRECT reads of the same ranges.

Another process puts several times as much as the node's DRAM holds; the node saves it, and then evicts the pages still
in DRAM. Nothing is promoted (``promote_after``), so every read of every round is cold.

Rows about demotion: how fast DRAM pages are saved to NVMe, and how that affects readers of DRAM.

A step's pages are put into a node that saves nothing on its own (``demote_at`` 1). Then ``evict`` is called for all of
them; none may leave before it is saved, so the node saves all, in batches of 32 MiB with one sync each. The step ends
when the index has every chain's last page on NVMe, which is when it is durable. The limit writes the same number of
bytes with O_DIRECT into a file of the same size on the same file system, with one fdatasync per 32 MiB: from a buffer
of large memory pages, or from shared memory like that of the node's pages; the faster way counts. Both files are
written for the first time.

Disk: the folder of a row's files, the disk's speed without a store, and where a node's pages are on it.

The limit of an NVMe row is O_DIRECT in the same process, with as many threads as the store has, into and out of
page-aligned buffers, in two ways of which the faster one counts: pieces of 1 MiB, which the threads take one by one, or
one piece per thread. The buffers are of large memory pages where the kernel has them: a request then has few segments,
which on some disks (virtual ones above all) makes it two to three times as fast.

Worked example: 32 pages of 256 KiB, each after its header, are in two runs of 20 and 12 frames: 5.1 and 3.0 MiB. That
is six pieces of 1 MiB or less and four such pieces, or two and two quarters: every way reads the same bytes.
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
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme import geometry as nvme_geometry
from kvstore.tier.nvme.disk import BLOCK_BYTES, IO_THREADS, IoThreads, aligned_buffer
from kvstore.tier.nvme.map import NvmeMap

MIB = 1 << 20
PIECE_BYTES = MIB
LIMITS = ("pieces_1m", "piece_per_thread")
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
TABLES_BYTES = MIB  # of a target, for what is not pages
SPARE_BYTES = 64 * MIB  # left for other programs on the file system

Range = tuple[int, int]  # offset, bytes
Task = Callable[[], int]


class Scratch:
    """A folder for one row, removed with its contents at the end of its ``with``.

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
                f"{folder} has {free_bytes >> 20} MiB free, this row's files take {needed_bytes + SPARE_BYTES >> 20} "
                "MiB; --dir names another folder"
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
    """Return the kind of a folder's file system, such as ``ext4``; "" if the kernel does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == wanted:
                return line.partition(" - ")[2].split()[0]
    return ""


def target_bytes(pages: int, layout: Layout, extent_bytes: int) -> int:
    """Return the size of an NVMe target for ``pages`` pages and one more extent."""
    frames = geometry.frames_in(extent_bytes, frame_class_of(layout))
    return (-(-pages // frames) + 1) * extent_bytes + TABLES_BYTES


def frame_class_of(layout: Layout) -> FrameClass:
    """Return the frame class of this layout's pages."""
    return FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)


def warm_buffer(nbytes: int) -> Rows:
    """Return memory in large pages (if the kernel has them) that was already written to."""
    rows = large_buffer(nbytes)[:nbytes]
    rows[:] = 1
    return rows


class RawFile:
    """A file that ``IO_THREADS`` threads read or write without the page cache. Ends with ``with``.

    Args:
        create_bytes: create an unnamed file of this size, which is deleted with the process; 0 to open an existing one.

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
        """Return the tasks for ``run`` to read these ranges one after the other into ``buffer``."""
        return [partial(self._pieces, os.preadv, pieces) for pieces in self._cut(ranges, how)]

    def writes(self, ranges: Sequence[Range], how: str, source: Rows | None = None) -> list[Task]:
        """Return the tasks for ``run`` to write these ranges from the start of ``source``, or of ``buffer``."""
        return [partial(self._pieces, os.pwritev, pieces) for pieces in self._cut(ranges, how, source)]

    def run(self, tasks: Sequence[Task]) -> int:
        """Perform tasks; return the bytes moved. Raises BenchFailed."""
        total = 0
        for moved in self._io.run(tasks):
            if isinstance(moved, OSError | KVStoreError):
                raise BenchFailed(f"the disk failed: {moved}")
            total += moved
        return total

    def sync(self) -> None:
        """Make written data survive a power loss."""
        os.fdatasync(self._fd)

    def _cut(self, ranges: Sequence[Range], how: str, buffer: Rows | None = None) -> list[list[tuple[Rows, int]]]:
        """Return the pieces ``(part of the buffer, offset)`` of every task."""
        memory, total = self.buffer if buffer is None else buffer, sum(nbytes for _, nbytes in ranges)
        per_thread = -(-total // (IO_THREADS * BLOCK_BYTES)) * BLOCK_BYTES
        share = {"pieces_1m": PIECE_BYTES, "piece_per_thread": per_thread}[how]
        tasks: list[list[tuple[Rows, int]]] = []
        at, left = 0, 0  # in the buffer; of the task's share
        for offset, nbytes in ranges:
            while nbytes:
                if not left:
                    tasks.append([])
                    left = share
                step = min(nbytes, left)
                tasks[-1].append((memory[at : at + step], offset))
                at, offset, nbytes, left = at + step, offset + step, nbytes - step, left - step
                if how == "pieces_1m" and step < PIECE_BYTES:
                    left = 0  # a run's end: no task has two pieces
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
class Where:
    """Finds a node's NVMe pages from its files. For nodes with one target, while no pages move."""

    folder: NodeFolder
    index: Index
    frame_class: FrameClass

    @classmethod
    def of(cls, shm_dir: Path, node: str, layout: Layout) -> Where:
        """Open the files of a node. Raises BenchFailed if it does not exist."""
        folder = NodeFolder.at(shm_dir / f"{PREFIX}{node}")
        header = Header.open(folder)
        index = Index.open_reader(folder, header.epoch) if header is not None else None
        if index is None:
            raise BenchFailed(f"{node} has no index")
        return cls(folder, index, frame_class_of(layout))

    def saved(self, hashes: Sequence[bytes]) -> bool:
        """Return whether all of these are durable on NVMe."""
        try:
            return None not in self.index.find_many(Tier.NVME, hashes)
        except IndexDamaged as error:
            raise BenchFailed(f"the index was replaced: {error}") from None

    def ranges(self, chains: Sequence[Sequence[bytes]]) -> list[list[Range]]:
        """Return where each chain's pages are, including headers; consecutive frames are one range.

        Raises:
            BenchFailed: a page is not on NVMe, or its device cannot be read.
        """
        map_ = NvmeMap.open(self.folder)
        if map_ is None:
            raise BenchFailed(f"{self.folder.name} has no NVMe to read")
        tables: dict[int, ExtentTable] = {}
        found: list[list[Range]] = []
        try:
            for hashes in chains:
                found.append([])
                for raw in self.index.find_many(Tier.NVME, hashes):
                    if raw is None:
                        raise BenchFailed("a page is not on NVMe")
                    number, frame, _ = np.frombuffer(raw[:ADDRESS_BYTES], ADDRESS_DTYPE)[0].tolist()
                    table = tables.get(number) or ExtentTable.open(self.folder, number, map_.incarnation)
                    place = map_.place(table.position, self.frame_class, frame) if table is not None else None
                    if table is None or place is None:
                        raise BenchFailed(f"extent {number} cannot be read")
                    tables[number] = table
                    _append(found[-1], place.offset, geometry.stride_bytes(self.frame_class))
        finally:
            map_.close()
        return found

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
NEVER = 255  # reads after which a page is promoted: more than any round makes
VACATE_S = 60.0


def plan(geometry: str, quick: bool, seed: int) -> BenchWork:
    """Return the pages of a row about NVMe."""
    pages = BATCH_PAGES_QUICK if quick else BATCH_PAGES
    wanted = SAVED_BYTES_QUICK if quick else SAVED_BYTES[geometry]
    return BenchWork(geometry, seed, chains=wanted // (pages * LAYOUTS[geometry].page_bytes), pages=pages)


def target(
    stage: Stage, scene: ExitStack, work: BenchWork, settings: Mapping[str, object], more_bytes: int = 0
) -> tuple[Scratch, dict[str, object]]:
    """Return a folder for the row, and the settings of a node with an NVMe file in it that is large enough for
    ``work``.

    The folder's file system needs ``more_bytes`` in addition.
    """
    quick = stage.settings.quick
    extent_bytes = EXTENT_BYTES_QUICK if quick else NVME_EXTENT_BYTES
    size_bytes = target_bytes(work.chains * work.pages, work.layout, extent_bytes)
    scratch = scene.enter_context(Scratch(stage.settings.dir, size_bytes + more_bytes, quick=quick))
    given = {"nvme": f"{scratch.path / 'pages'}:{size_bytes}", "nvme_extent": extent_bytes}
    return scratch, {**given, "eviction": "lru", **settings}  # the last pages put stay, which rows rely on


@dataclass
class SavedPages:
    """A daemon whose pages were put by another process and are all on NVMe."""

    daemon: Daemon
    store: Store
    work: BenchWork
    scratch: Scratch
    fill_s: float  # time to put and save them


def saved(stage: Stage, scene: ExitStack, geometry: str, seed: int, settings: Mapping[str, object]) -> SavedPages:
    """Start such a node, ended with ``scene``. DRAM still holds as many pages as fit."""
    stage.clear()
    work = plan(geometry, stage.settings.quick, seed)
    dram_bytes = DRAM_BYTES_QUICK if stage.settings.quick else DRAM_BYTES
    extent_bytes = EXTENT_BYTES_QUICK if stage.settings.quick else DRAM_EXTENT_BYTES
    scratch, given = target(stage, scene, work, settings)
    daemon = stage.daemon(scene, stage.settings.bounded(dram_bytes), extent_bytes, given)
    store = scene.enter_context(connect(daemon.name))
    return SavedPages(daemon, store, work, scratch, stage.write(daemon, work))


def vacate(store: Store, pages: int = 0) -> None:
    """Evict until DRAM has at most ``pages`` pages; those that are not on NVMe yet are saved first."""

    def gone() -> bool:
        left = int(store.stats()["tiers"]["dram"]["pages"]) - pages
        if left > 0:
            store.evict(pages=left)
        return left <= 0

    wait_for(gone, f"{store.name}: pages do not leave DRAM", VACATE_S)


class Chain(NamedTuple):
    """One batch: its tokens, and the reads of each limit."""

    tokens: Any
    tasks: dict[str, list[Task]]
    runs: int  # runs of consecutive frames in the file


Given = tuple[Chain, Keys]


class ColdReading:
    """Reads all chains of a ``SavedPages``, none of which are in DRAM."""

    def __init__(self, cold: SavedPages, where: Where, raw: RawFile) -> None:
        work = cold.work
        self.work = work
        self.raw = raw
        self.stride = nvme_geometry.stride_bytes(where.frame_class)
        self.header_bytes = nvme_geometry.header_bytes(where.frame_class)
        self.cache = cold.store.cache(work.layout)
        self.content = Content(work.layout.page_bytes)
        shape = work.pages, work.layout.page_bytes
        self.out: Rows = warm_buffer(work.chain_bytes).reshape(shape)
        tokens = [work.tokens(chain) for chain in range(work.chains)]
        ranges = where.ranges([self.cache.keys(each).hashes for each in tokens])
        self.chains = [
            Chain(each, {how: raw.reads(lies, how) for how in LIMITS}, len(lies))
            for each, lies in zip(tokens, ranges, strict=True)
        ]

    def prepare(self, chain: int) -> Given:
        """Return the arguments of the variants, with new keys that no verb has used."""
        found = self.chains[chain]
        return found, self.cache.keys(found.tokens)

    def variants(self) -> dict[str, Callable[[Given], int]]:
        """Return the variants: ours, and the two ways of the limit."""
        get, out, run = self.cache.get, self.out, self.raw.run
        return {
            "get": lambda given: get(given[1], out).pages,
            "pieces_1m": lambda given: run(given[0].tasks["pieces_1m"]),
            "piece_per_thread": lambda given: run(given[0].tasks["piece_per_thread"]),
        }

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if less than the whole chain was read."""
        wanted = self.work.pages if variant == "get" else self.work.pages * self.stride
        if value != wanted:
            raise BenchFailed(f"{variant} brought {value} of {wanted}")

    def verify(self) -> None:
        """Check every byte of every chain, read by ours and by one other variant each. Raises BenchFailed."""
        variants = self.variants()
        names = list(variants)
        frames = self.raw.buffer[: self.work.pages * self.stride].reshape(self.work.pages, self.stride)
        payloads = frames[:, self.header_bytes : self.header_bytes + self.work.layout.page_bytes]
        rows = {"get": self.out, **dict.fromkeys(LIMITS, payloads)}
        for chain in range(self.work.chains):
            for name in dict.fromkeys(("get", names[chain % len(names)])):
                rows[name][:, ::4096] = 0
                given = self.prepare(chain)
                self.check(name, variants[name](given))
                self.content.check(rows[name], given[1].hashes, f"{name} of chain {chain}")


def get(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Batches of 32 pages that are on NVMe only, keys given, all checks on, into a page-aligned warm buffer."""
    with ExitStack() as scene:
        cold = saved(stage, scene, geometry, 21, {"promote_after": NEVER})
        vacate(cold.store)
        if (found := cold.store.stats()["tiers"]["nvme"]["pages"]) != cold.work.chains * cold.work.pages:
            raise BenchFailed(f"NVMe has {found} of {cold.work.chains * cold.work.pages} pages")
        where = Where.of(stage.settings.shm_dir, cold.daemon.name, cold.work.layout)
        scene.callback(where.close)
        raw = RawFile(cold.scratch.path / "pages", cold.work.pages * nvme_geometry.stride_bytes(where.frame_class))
        scene.enter_context(raw)
        reading = ColdReading(cold, where, raw)
        reading.verify()
        line = _batches(stage, name, bar, reading)
        tiers = cold.store.stats()["tiers"]
        if tiers["dram"]["pages"] or tiers["nvme"]["promoted_pages"]:
            raise BenchFailed(f"{tiers['nvme']['promoted_pages']} pages came back to DRAM: not every read was cold")
        line.details["fill_bytes_per_s"] = cold.work.total_bytes / cold.fill_s
    return [line]


def _batches(stage: Stage, name: str, bar: Bar, reading: ColdReading) -> Result:
    work, random = reading.work, np.random.default_rng(22)
    variants = reading.variants()
    passes = -(-len(variants) // work.chains)  # normally every chain once per round
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
    text = f"O_DIRECT reads of the same ranges, 4 threads, {best}"
    return result(name, Kind.SPEED, ours, limit, bar=bar, limit_is=text, details=details)


STEP_BYTES, STEP_BYTES_QUICK = 384 * MIB, 64 * MIB  # saved in one go
SYNC_BYTES = 32 * MIB  # how much the node makes durable at a time
HOT_BYTES, HOT_BYTES_QUICK = 512 * MIB, 32 * MIB  # read by readers in the meantime
QUIET_S, QUIET_S_QUICK = 0.3, 0.05
LEASE_S = 600.0
WRITES = (*LIMITS, "out_of_shared_memory")
SAVE_S = 60.0
POLL_S = 0.001
SEED, HOT_SEED = 31, 32


class Saving:
    """Chains that are put into DRAM, and saved on request. There are free frames for puts of ``step_bytes``.

    Args:
        hot: pages that stay in DRAM because they are leased.
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
        """Put new pages into DRAM, unless it still has unsaved ones."""
        if self.loaded:
            return
        vacate(self.store, self._hot)
        self._step += 1
        self._tails = []
        for chain in self._chains():
            keys = self.work.keys(self.cache, chain)
            self._content.fill(self._rows, keys.hashes)
            # Compute checksums here, so that the node does not do it during the measurement.
            if (new := self.cache.put(keys, self._rows, checksum=True)) != self.work.pages:
                raise BenchFailed(f"put stored {new} of {self.work.pages} new pages")
            self._tails.append(keys.hashes[-1])
        if any(self._where.saved([tail]) for tail in self._tails):
            raise BenchFailed("pages were saved before the request")
        self.loaded = True

    def start(self) -> None:
        """Start saving the pages."""
        self.loaded = False
        self.store.evict(pages=self.work.chains * self.work.pages)

    def done(self) -> bool:
        """Return whether all pages are durable. Usually checks only one unfinished chain, since a check takes CPU time
        too."""
        while self._tails and self._where.saved(self._tails[-1:]):
            self._tails.pop()
        return not self._tails

    def save(self) -> int:
        """Save all pages; return their bytes."""
        deadline = time.monotonic() + SAVE_S
        self.start()
        while not self.done():
            if time.monotonic() >= deadline:
                raise BenchFailed(f"pages were not saved after {SAVE_S:g} s: {self.store.stats()['counters']}")
            time.sleep(POLL_S)
        return self.work.total_bytes

    def verify(self) -> None:
        """Check every byte of the last saved pages on NVMe, after saving pages put since."""
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
    """The limit: writes the same number of bytes, continuing in the file after the last step, and wrapping at its
    end."""

    def __init__(self, raw: RawFile, shared: SharedArea, step_bytes: int, file_bytes: int) -> None:
        self._raw = raw
        self._shared = shared.data
        self._step_bytes = step_bytes
        places = range(0, file_bytes, step_bytes)
        self._batches = {variant: [self._plan(at, variant) for at in places] for variant in WRITES}
        self._next = 0

    def _plan(self, start: int, variant: str) -> list[list[Task]]:
        """Return the tasks for ``RawFile.run``, per 32 MiB."""
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
    """One reader's gets from DRAM while the node saves other pages, compared with an idle node."""
    quick, step_bytes = stage.settings.quick, _step_bytes(stage)
    pages = BATCH_PAGES_QUICK if quick else BATCH_PAGES
    hot_bytes = stage.settings.bounded(HOT_BYTES_QUICK if quick else HOT_BYTES)
    hot = BenchWork(geometry, HOT_SEED, hot_bytes // (pages * LAYOUTS[geometry].page_bytes), pages)
    quiet: list[float] = []
    busy: list[float] = []
    seconds: list[float] = []  # duration of saves during reads

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
        saving.save()  # this time together with the hot pages
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
    """Gets of chains that stay in DRAM, because they are put and leased here until the end of ``scene``."""

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
        """Return the bytes per second of ``get`` until ``done``."""
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
    """Start a node with DRAM for a step in addition to ``hot``, and NVMe for ``saved_bytes``."""
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
