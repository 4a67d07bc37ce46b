"""Stage: the settings of a run, and the daemons with stored pages that its rows share."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvstore.addresses import SHM_DIR, connect
from kvstore.bench.content import BenchWork
from kvstore.bench.harness import BenchFailed, l3_bytes
from kvstore.bench.processes import NO_SETTINGS, Daemon, PeerProcess
from kvstore.client.store import Store

MIB, GIB = 1 << 20, 1 << 30
EXTENT_BYTES = 128 * MIB  # the default of nodes of 2 GiB and more
EXTENT_BYTES_QUICK = 16 * MIB
SHARE_OF_FREE = 0.4  # the share of free memory that one node may use
SETTLE_S = 60.0
SCRATCH_DIR = Path("/var/tmp")  # on a disk; /tmp is in memory on many machines
WRITER_CHAIN_PAGES = (23, 5)  # pages per chain of the two writers in ``Stage._wear``

_numbers = itertools.count(1)


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    Attributes:
        rounds: rounds of every row; the ratio is their median.
        quick: use little data and take seconds; checks that every row works, but the numbers mean nothing.
        dir: a folder on a disk for the files of NVMe rows.
        device: the device of the rows' engines, ``cpu`` or ``cuda:N``.
    """

    rounds: int = 5
    quick: bool = False
    dir: Path = SCRATCH_DIR
    device: str = "cpu"

    @property
    def shm_dir(self) -> Path:
        """The folder of shared memory in which ``connect`` finds nodes."""
        return Path(os.environ.get("KVSTORE_SHM_DIR") or SHM_DIR)

    @property
    def extent_bytes(self) -> int:
        """The extent size of the nodes that rows start."""
        return EXTENT_BYTES_QUICK if self.quick else EXTENT_BYTES

    @property
    def walk_bytes(self) -> int:
        """Bytes of distinct pages that a row reads: more than the caches have, but less on a small machine."""
        target_bytes = 128 * MIB if self.quick else max(GIB, 3 * l3_bytes())
        return self.bounded(target_bytes) // self.extent_bytes * self.extent_bytes

    def bounded(self, requested_bytes: int) -> int:
        """Return ``requested_bytes``, or the share of this machine's free memory that one node may use, if that is
        less.

        Raises:
            BenchFailed: almost no memory is free.
        """
        free = free_bytes(self.shm_dir)
        allowed = int(free * SHARE_OF_FREE)
        if allowed < 128 * MIB:
            raise BenchFailed(f"{self.shm_dir} and memory have {free >> 20} MiB free; a benchmark needs 320 MiB")
        return min(requested_bytes, allowed)


def free_bytes(shm_dir: Path) -> int:
    """Return how many bytes are free in shared memory, or in the machine's memory if that is less."""
    status = os.statvfs(shm_dir)
    free = status.f_bavail * status.f_frsize
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = min(free, int(line.split()[1]) << 10)
    return free


@dataclass
class StoredChains:
    """A daemon with pages that another process wrote."""

    daemon: Daemon
    store: Store
    work: BenchWork


class Stage:
    """The nodes that the rows of one run share.

    At most one node with stored pages exists at a time; a row that needs another one replaces it. Leaving the ``with``
    ends all processes and removes all nodes.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self._stored_kind: tuple[str, bool] | None = None
        self._stored: StoredChains | None = None
        self._scene = ExitStack()

    def stored_chains(self, geometry: str, *, recycled: bool = False) -> StoredChains:
        """Return a node with ``walk_bytes`` of pages in chains of 32. The frames of each chain are contiguous.

        Args:
            recycled: let two writers first fill the node twice with chains of other lengths. Their pages are evicted,
                and the stored chains are fragmented as after long use.
        """
        if self._stored_kind == (geometry, recycled) and self._stored is not None:
            return self._stored
        self.clear()
        settings = self.settings
        chain_bytes = BenchWork(geometry, 0, 1).chain_bytes
        work = BenchWork(geometry, seed=1, chains=settings.walk_bytes // chain_bytes)
        # One extent in addition to the pages, for frames that are granted ahead. With lru the last pages put stay,
        # which the rows need.
        lru = {"eviction": "lru"}
        daemon = self.daemon(self._scene, settings.walk_bytes + settings.extent_bytes, settings=lru)
        if recycled:
            self._wear(daemon, work)
        self.write(daemon, work)
        store = self._scene.enter_context(connect(daemon.name))
        settle(store)
        self._stored_kind, self._stored = (geometry, recycled), StoredChains(daemon, store, work)
        return self._stored

    def _wear(self, daemon: Daemon, work: BenchWork) -> None:
        """Let two processes put twice as many pages as fit, both at the same time."""
        with ExitStack() as scene:
            writers = [scene.enter_context(PeerProcess(daemon.name, self.settings.shm_dir)) for _ in WRITER_CHAIN_PAGES]
            for seed, (writer, pages) in enumerate(zip(writers, WRITER_CHAIN_PAGES, strict=True), start=2):
                chains = work.chains * work.pages // pages
                writer.send("write", work=BenchWork(work.geometry, seed, chains, pages).to_json())
            for writer in writers:
                writer.answer()

    def daemon(
        self,
        scene: ExitStack,
        dram_bytes: int,
        extent_bytes: int = 0,
        settings: Mapping[str, object] = NO_SETTINGS,
    ) -> Daemon:
        """Start a daemon, and wait until all its memory is populated. It ends with ``scene``. ``settings`` replace
        defaults."""
        name = f"bench-{os.getpid()}-{next(_numbers)}"
        extent_bytes = extent_bytes or self.settings.extent_bytes
        size_bytes = -(-dram_bytes // extent_bytes) * extent_bytes
        daemon = scene.enter_context(Daemon(name, size_bytes, self.settings.shm_dir, extent_bytes, settings))
        daemon.start()
        with connect(name) as store:
            wait_for(lambda: _is_populated(store), f"{name}: memory is not populated")
        return daemon

    def write(self, daemon: Daemon, work: BenchWork) -> float:
        """Let another process put all pages of ``work``; return the seconds of its puts.

        Raises:
            BenchFailed: not all pages were stored as new pages.
        """
        with PeerProcess(daemon.name, self.settings.shm_dir) as writer:
            answer = writer.ask("write", work=work.to_json())
        if answer["pages"] != work.chains * work.pages:
            raise BenchFailed(f"the writer stored {answer['pages']} of {work.chains * work.pages} pages")
        return float(answer["seconds"])

    def clear(self) -> None:
        """End the node with stored pages, if there is one."""
        self._stored_kind = self._stored = None
        self._scene.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()


def _is_populated(store: Store) -> bool:
    dram = store.stats()["tiers"]["dram"]
    return bool(dram["populated_bytes"] + dram.get("failed_bytes", 0) >= dram["capacity_bytes"])


def settle(store: Store) -> None:
    """Let the daemon verify every page and so compute all checksums. Afterwards the daemon is idle.

    Raises:
        BenchFailed: a page is damaged, or a conservation law is broken.
    """
    report = store.verify()
    if report["pages_damaged"] or report["findings"]:
        raise BenchFailed(f"{store.name}: {report['pages_damaged']} pages damaged, findings {report['findings'][:3]}")


def wait_for(done: Callable[[], object], problem: str, timeout_s: float = SETTLE_S) -> None:
    """Poll ``done()`` until it is true. Raises BenchFailed with ``problem`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= deadline:
            raise BenchFailed(f"{problem} after {timeout_s:g} s")
        time.sleep(0.02)
