"""Rows that read from NVMe: batches that DRAM does not have any more, against O_DIRECT reads of the same ranges.

Another process puts several times as much as the node's DRAM holds, the node saves it, and then evicts what DRAM still
has. Nothing is promoted (``promote_after``), so that every read of every round is a cold one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvstore.bench.content import LAYOUTS, BenchWork, Content, Rows
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, quickest, result, speeds
from kvstore.bench.nvme_disk import LIMITS, MIB, RawFile, Scratch, Task, Where, target_bytes, warm_buffer
from kvstore.bench.processes import Daemon
from kvstore.bench.stage import Stage, wait_for
from kvstore.client.connect import connect
from kvstore.client.store import Store
from kvstore.model.prefix import Keys
from kvstore.tier import nvme_geometry

SAVED_BYTES = {"2m": 2048 * MIB, "256k": 1024 * MIB, "64k": 512 * MIB}
DRAM_BYTES = 256 * MIB
DRAM_EXTENT_BYTES = 32 * MIB
NVME_EXTENT_BYTES = 256 * MIB
SAVED_BYTES_QUICK, DRAM_BYTES_QUICK, EXTENT_BYTES_QUICK = 96 * MIB, 48 * MIB, 16 * MIB
BATCH_PAGES, BATCH_PAGES_QUICK = 32, 8
NEVER = 255  # reads after which a page is promoted: more than any round makes
VACATE_S = 60.0


def plan(geometry: str, quick: bool, seed: int) -> BenchWork:
    """The pages that a row about NVMe has there."""
    pages = BATCH_PAGES_QUICK if quick else BATCH_PAGES
    wanted = SAVED_BYTES_QUICK if quick else SAVED_BYTES[geometry]
    return BenchWork(geometry, seed, chains=wanted // (pages * LAYOUTS[geometry].page_bytes), pages=pages)


def target(
    stage: Stage, scene: ExitStack, work: BenchWork, settings: Mapping[str, object], more_bytes: int = 0
) -> tuple[Scratch, dict[str, object]]:
    """A folder of the row's own, and the settings of a node with an NVMe file in it that has room for ``work``.

    ``more_bytes`` of the folder's file system are needed beside it.
    """
    quick = stage.settings.quick
    extent_bytes = EXTENT_BYTES_QUICK if quick else NVME_EXTENT_BYTES
    size_bytes = target_bytes(work.chains * work.pages, work.layout, extent_bytes)
    scratch = scene.enter_context(Scratch(stage.settings.dir, size_bytes + more_bytes, quick=quick))
    given = {"nvme": f"{scratch.path / 'pages'}:{size_bytes}", "nvme_extent": extent_bytes}
    return scratch, {**given, "eviction": "lru", **settings}  # what was put last stays, as rows count on it


@dataclass
class SavedPages:
    """A daemon and its pages, put by another process, every one of them on NVMe."""

    daemon: Daemon
    store: Store
    work: BenchWork
    scratch: Scratch
    fill_s: float  # that putting and saving them took


def saved(stage: Stage, scene: ExitStack, geometry: str, seed: int, settings: Mapping[str, object]) -> SavedPages:
    """Such a node, ended with ``scene``. DRAM still has what it had room for."""
    stage.clear()
    work = plan(geometry, stage.settings.quick, seed)
    dram_bytes = DRAM_BYTES_QUICK if stage.settings.quick else DRAM_BYTES
    extent_bytes = EXTENT_BYTES_QUICK if stage.settings.quick else DRAM_EXTENT_BYTES
    scratch, given = target(stage, scene, work, settings)
    daemon = stage.daemon(scene, stage.settings.bounded(dram_bytes), extent_bytes, given)
    store = scene.enter_context(connect(daemon.name))
    return SavedPages(daemon, store, work, scratch, stage.write(daemon, work))


def vacate(store: Store, pages: int = 0) -> None:
    """Evict until DRAM has no more than so many pages; what is not on NVMe yet is saved there first."""

    def gone() -> bool:
        left = int(store.stats()["tiers"]["dram"]["pages"]) - pages
        if left > 0:
            store.evict(pages=left)
        return left <= 0

    wait_for(gone, f"{store.name}: pages do not leave DRAM", VACATE_S)


class Chain(NamedTuple):
    """One batch: its tokens, and what each limit does to read it."""

    tokens: Any
    tasks: dict[str, list[Task]]
    runs: int  # of frames that follow each other in the file


Given = tuple[Chain, Keys]


class ColdReading:
    """All chains of a ``SavedPages``, none of them in DRAM, as this process reads them."""

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
        """What the variants are given: keys are new, no verb has prepared anything in them."""
        found = self.chains[chain]
        return found, self.cache.keys(found.tokens)

    def variants(self) -> dict[str, Callable[[Given], int]]:
        """The verbs: ours, and the limit in either way."""
        get, out, run = self.cache.get, self.out, self.raw.run
        return {
            "get": lambda given: get(given[1], out).pages,
            "pieces_1m": lambda given: run(given[0].tasks["pieces_1m"]),
            "piece_per_thread": lambda given: run(given[0].tasks["piece_per_thread"]),
        }

    def check(self, variant: str, value: object) -> None:
        """Raises BenchFailed where less than the whole chain was read."""
        wanted = self.work.pages if variant == "get" else self.work.pages * self.stride
        if value != wanted:
            raise BenchFailed(f"{variant} brought {value} of {wanted}")

    def verify(self) -> None:
        """Every chain, each by the next variant and by ours, byte for byte. Raises BenchFailed."""
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
