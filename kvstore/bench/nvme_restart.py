"""Row about the ends of a node with NVMe: killed, rebooted in good order, and rebooted out of the middle of its work.

A reboot is played by removing the node's folder in memory between two daemons; its NVMe file stays. After kill -9 the
tables in memory are the truth. After a reboot in good order the directories on NVMe are. After one without warning
every frame of extents written to since the last checkpoint is read and proven, while the node serves already.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore.bench.content import Content
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.nvme import NEVER, SavedPages, saved
from kvstore.bench.nvme_disk import LIMITS, MIB, RawFile, frame_class_of
from kvstore.bench.stage import Stage, settle, wait_for
from kvstore.client.connect import connect
from kvstore.tier import nvme_geometry

TURNS = 3  # of each end, at most
CHECKPOINT_S = 86_400.0  # only at a stop
CHAINS_READ = 16  # after every start, byte for byte
LIMIT_BATCH_BYTES = 32 * MIB
SCAN_S = 300.0


@dataclass
class Restarts:
    """Seconds and speeds, one per turn."""

    killed_s: list[float] = field(default_factory=list)
    rebooted_s: list[float] = field(default_factory=list)
    unclean_s: list[float] = field(default_factory=list)  # to the ready line; the scan goes on
    scan_s: list[float] = field(default_factory=list)
    limits: dict[str, list[float]] = field(default_factory=lambda: {how: [] for how in LIMITS})  # bytes/s


def restart(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """kill -9 to ready; start to ready after a reboot; and the speed of the scan after one without warning.

    After every start all pages are counted and some read byte for byte; at the end the node verifies its laws.
    """
    turns = min(TURNS, stage.settings.rounds)
    ends = Restarts()
    with ExitStack() as scene:
        settings = {"promote_after": NEVER, "checkpoint_s": CHECKPOINT_S, "demote_at": 0}
        node = Endangered(saved(stage, scene, "256k", 41, settings))
        raw = scene.enter_context(RawFile(node.held.scratch.path / "pages", LIMIT_BATCH_BYTES))
        for _ in range(turns):
            ends.killed_s.append(node.kill())
        for _ in range(turns):
            node.crash(ends)
            for how, speeds in ends.limits.items():
                speeds.append(_read_speed(raw, node.stored_bytes, how))
        for _ in range(turns):
            ends.rebooted_s.append(node.reboot())
        with connect(node.held.daemon.name) as store:
            settle(store)
    best = max(LIMITS, key=lambda how: float(np.median(ends.limits[how])))
    about: dict[str, Any] = {"pages": node.pages, "page_bytes": node.held.work.layout.page_bytes}
    scan = {**about, "scanned_bytes": node.stored_bytes, "scan_s": ends.scan_s, "start_to_ready_s": ends.unclean_s}
    scans = [node.stored_bytes / seconds for seconds in ends.scan_s]
    limit_is = f"O_DIRECT reads of as much, 4 threads, {best}"
    return [
        result(name, Kind.TIME, ends.killed_s, bar=bar, details={**about, "dram_pages": node.dram_pages}),
        result(f"{name}.reboot", Kind.TIME, ends.rebooted_s, details=about),
        result(f"{name}.scan", Kind.SPEED, scans, ends.limits[best], limit_is=limit_is, details=scan),
    ]


class Endangered:
    """A node with every page on NVMe, and DRAM full of some of them, whose daemon is ended and started again."""

    def __init__(self, held: SavedPages) -> None:
        self.held = held
        self.pages = held.work.chains * held.work.pages
        self.stored_bytes = self.pages * nvme_geometry.stride_bytes(frame_class_of(held.work.layout))
        wait_for(lambda: self._counts()[1] == self.pages, "not every page is on NVMe")
        self.dram_pages = self._counts()[0]

    def kill(self) -> float:
        """kill -9: seconds until the next daemon's ready line. Nothing is lost."""
        began = time.monotonic()
        self.held.daemon.kill()
        self.held.daemon.start()
        took = time.monotonic() - began
        self._expect((self.dram_pages, self.pages), "kill -9")
        return took

    def reboot(self) -> float:
        """SIGTERM, memory gone: seconds from start to ready line. Nothing on NVMe is lost."""
        self.held.daemon.stop()
        self.held.daemon.forget()
        took = self.held.daemon.start()
        self._expect((0, self.pages), "a reboot")
        return took

    def crash(self, ends: Restarts) -> None:
        """kill -9, memory gone, no checkpoint: everything is scanned. Nothing on NVMe is lost."""
        self.held.daemon.kill()
        self.held.daemon.forget()
        ends.unclean_s.append(self.held.daemon.start())
        began = time.monotonic()
        wait_for(lambda: self._counts()[1] == self.pages, "the scan has not found every page", SCAN_S)
        ends.scan_s.append(time.monotonic() - began)
        self._expect((0, self.pages), "a scan")

    def _counts(self) -> tuple[int, int]:
        """Pages in DRAM and on NVMe."""
        with connect(self.held.daemon.name) as store:
            tiers = store.stats()["tiers"]
        return tiers["dram"]["pages"], tiers["nvme"]["pages"]

    def _expect(self, counts: tuple[int, int], after: str) -> None:
        """All pages are there, and some of them read byte for byte. Raises BenchFailed."""
        work = self.held.work
        if (found := self._counts()) != counts:
            raise BenchFailed(f"after {after} there are {found} pages in DRAM and on NVMe, not {counts}")
        content, out = Content(work.layout.page_bytes), np.zeros((work.pages, work.layout.page_bytes), np.uint8)
        with connect(self.held.daemon.name) as store:
            cache = store.cache(work.layout)
            for chain in range(0, work.chains, -(-work.chains // CHAINS_READ)):
                keys = work.keys(cache, chain)
                match = cache.get(keys, out)
                if match.pages != work.pages:
                    raise BenchFailed(f"chain {chain} has {match.pages} of {work.pages} pages after {after}")
                content.check(out, keys.hashes, f"chain {chain} after {after}")


def _read_speed(raw: RawFile, nbytes: int, how: str) -> float:
    """Bytes per second of plain reads of so much of the file, whatever is there."""
    began = time.perf_counter()
    for at in range(0, nbytes, LIMIT_BATCH_BYTES):
        raw.run(raw.reads([(at, min(LIMIT_BATCH_BYTES, nbytes - at))], how))
    return nbytes / (time.perf_counter() - began)
