"""Rows about full nodes and about a crash.

``evict`` shows that the cost of a put into a full node does not grow with the node. One node has 10 thousand pages and
another one a million, both in chains of 32 pages. New chains are put into the two nodes alternately. Each put evicts as
many pages as it stores, and waits until its pages are sealed. The node grants frames, and evicts pages for them, for a
few puts at once, so the row reports the mean. The measurement begins after the client has mapped all extents, because
it must not include the mapping of the large node.

``restart`` kills the daemon and starts it again while another process continues to read.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from statistics import fmean

import numpy as np

from kvstore.addresses import connect
from kvstore.bench.content import LAYOUTS, BenchWork, Content, Rows, tokens_of
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, result
from kvstore.bench.processes import Daemon, PeerProcess
from kvstore.bench.stage import GIB, MIB, Stage, settle
from kvstore.client.local.grants import AHEAD_BYTES_MAX
from kvstore.client.store import Store
from kvstore.model.prefix import Keys
from kvstore.state.eviction import POLICY_DEFAULT

FEW, MANY = 10_000, 1_000_000
FEW_QUICK, MANY_QUICK = 4_096, 8_192
GEOMETRY = "4k"
CHAIN_PAGES = 32
WARM_STEPS = 600
STEPS = 200  # steps per round
EXTENT_BYTES = 16 * MIB
SEED = 6


def evict(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """Measure a put of 32 pages that evicts 32, per page, in a node of a million pages, compared with ten thousand."""
    stage.clear()
    few, many = (FEW_QUICK, MANY_QUICK) if stage.settings.quick else (FEW, MANY)
    with ExitStack() as scene:
        full = {"few": _Full(stage, scene, few), "many": _Full(stage, scene, many)}
        steps = list(range(8 if stage.settings.quick else STEPS))
        for node in [*full.values()] * (8 if stage.settings.quick else WARM_STEPS):
            _check(node.put(node.prepare()))
        seconds = alternate(
            {size: node.put for size, node in full.items()},
            steps,
            stage.settings.rounds,
            lambda _: {size: node.prepare() for size, node in full.items()},
            lambda _, stored: _check(stored),
        )
        pages = {size: node.pages for size, node in full.items()}
        for node in full.values():
            node.verify()
    per_page = {size: [fmean(steps) / CHAIN_PAGES for steps in times] for size, times in seconds.items()}
    details = {"pages": pages, "batch_pages": CHAIN_PAGES, "policy": POLICY_DEFAULT}
    limit_is = f"the same in a node of {few:,} pages"
    ours, limit = per_page["many"], per_page["few"]
    return [result(name, Kind.TIME, ours, limit, bar=bar, limit_is=limit_is, details=details)]


class _Full:
    """A full node, and a client that puts new chains into it."""

    def __init__(self, stage: Stage, scene: ExitStack, pages: int) -> None:
        settings, layout = stage.settings, LAYOUTS[GEOMETRY]
        pool_bytes = settings.bounded(pages * layout.page_bytes) // EXTENT_BYTES * EXTENT_BYTES
        self.pages = pool_bytes // layout.page_bytes
        daemon = stage.daemon(scene, pool_bytes, EXTENT_BYTES)
        work = BenchWork(GEOMETRY, SEED, chains=self.pages // CHAIN_PAGES + 1, pages=CHAIN_PAGES)
        stage.write(daemon, work)
        self.store: Store = scene.enter_context(connect(daemon.name))
        self.cache = self.store.cache(layout)
        self._content = Content(layout.page_bytes)
        self._rows: Rows = np.zeros((CHAIN_PAGES, layout.page_bytes), np.uint8)
        self._chain = 0
        self._last: Keys | None = None

    def prepare(self) -> Keys:
        """Return the keys of a new chain, whose pages ``put`` stores next."""
        self._chain += 1
        self._last = self.cache.keys(tokens_of(SEED + 1, self._chain, CHAIN_PAGES * LAYOUTS[GEOMETRY].page_tokens))
        self._content.fill(self._rows, self._last.hashes)
        return self._last

    def put(self, keys: object) -> int:
        """Store the pages that ``prepare`` made."""
        assert self._last is not None and keys
        return self.cache.put(self._last, self._rows, wait=True)

    def verify(self) -> None:
        """Raise BenchFailed if nothing was evicted."""
        evicted = self.store.stats()["counters"].get("evicted_space", 0)
        if evicted < CHAIN_PAGES:
            raise BenchFailed(f"the node is not full: only {evicted} pages were evicted")


def _check(stored: object) -> None:
    if stored != CHAIN_PAGES:
        raise BenchFailed(f"put stored {stored} of {CHAIN_PAGES} new pages")


POOL_BYTES = 8 * GIB
CRASHES = 3
READ_ON_S = 0.5  # reads before each kill and after each restart


def restart(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """Kill -9 and restart a daemon with 8 GiB of pages; measure the seconds until its ready line.

    A reader checks every byte that it gets, and counts misses. Afterwards the node verifies all pages and its
    conservation laws, and every page is read and checked once more.
    """
    stage.clear()
    settings = stage.settings
    pages_bytes = settings.bounded(256 * MIB if settings.quick else POOL_BYTES)
    chain_bytes = BenchWork("256k", 0, 1).chain_bytes
    work = BenchWork("256k", seed=10, chains=pages_bytes // chain_bytes)
    crashes = 1 if settings.quick else min(CRASHES, settings.rounds)
    with ExitStack() as scene:
        # In addition to the pages: one extent, and the frames that the client of the probe pages requests ahead. So
        # nothing is evicted.
        daemon = stage.daemon(scene, work.total_bytes + settings.extent_bytes + AHEAD_BYTES_MAX)
        stage.write(daemon, work)
        store = scene.enter_context(connect(daemon.name))
        settle(store)
        reader = scene.enter_context(PeerProcess(daemon.name, settings.shm_dir))
        crash = [_crash(daemon, reader, store, work, turn) for turn in range(crashes)]
        retained = store.stats()["tiers"]["dram"]["pages"] - crashes  # each crash adds a probe page
        settle(store)
        _read_all(store, work)
    stored = work.chains * work.pages
    misses, errors = (sum(int(c[what]) for c in crash) for what in ("pages_missed", "errors"))
    details = {
        "pages_bytes": work.total_bytes,
        "page_bytes": work.layout.page_bytes,
        "pages_lost": stored - retained,
        "reads": sum(int(c["reads"]) for c in crash),
        "pages_missed": misses,
        "read_errors": errors,
        "longest_read_s": max(c["longest_s"] for c in crash),
        "kill_to_ready_s": [c["kill_to_ready_s"] for c in crash],
        "kill_to_put_s": [c["kill_to_put_s"] for c in crash],
    }
    sound = stored == retained and not misses and not errors
    return [result(name, Kind.TIME, [c["kill_to_ready_s"] for c in crash], bar=bar, details=details, sound=sound)]


def _crash(daemon: Daemon, reader: PeerProcess, store: Store, work: BenchWork, turn: int) -> dict[str, float]:
    """Kill and restart the daemon once during reads. Return the reader's counts, the seconds until the ready line, and
    the seconds until a put is acknowledged."""
    cache = store.cache(work.layout)
    probe = BenchWork("256k", seed=11 + turn, chains=1, pages=1)
    page = np.zeros((1, work.layout.page_bytes), np.uint8)
    reader.send("read_on", work=work.to_json())
    time.sleep(READ_ON_S)
    killed_s = time.monotonic()
    daemon.kill()
    daemon.start()
    ready_s = time.monotonic()
    keys = probe.keys(cache, 0)
    Content(work.layout.page_bytes).fill(page, keys.hashes)
    if cache.put(keys, page) != 1:
        raise BenchFailed("the restarted daemon did not store a page")
    put_s = time.monotonic()
    time.sleep(READ_ON_S)
    reader.send("stop")
    return {**reader.answer(), "kill_to_ready_s": ready_s - killed_s, "kill_to_put_s": put_s - killed_s}


def _read_all(store: Store, work: BenchWork) -> None:
    """Read every page of every chain, and check every byte."""
    cache, content = store.cache(work.layout), Content(work.layout.page_bytes)
    out = np.zeros((work.pages, work.layout.page_bytes), np.uint8)
    for chain in range(work.chains):
        keys = work.keys(cache, chain)
        pages = cache.get(keys, out).pages
        if pages != work.pages:
            raise BenchFailed(f"chain {chain} has {pages} of {work.pages} pages after the restarts")
        content.check(out, keys.hashes, f"chain {chain} after the restarts")
