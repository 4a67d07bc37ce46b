"""Row about evictions: what it costs to make room for a page in a full node, and that a large node pays no more.

Two nodes are full, one of 10 thousand pages and one of a million, both of chains of 32 pages. Chains are put into them
in turn, so that each put evicts as many pages as it stores, and waits until they are sealed. Frames are granted, and
pages evicted for them, for a few puts at once: so the mean counts. It begins when the client knows all extents, or a
large node's would be mapped in what is timed.
"""

from __future__ import annotations

from contextlib import ExitStack
from statistics import fmean

import numpy as np

from kvstore.bench.content import LAYOUTS, BenchWork, Content, Rows, tokens_of
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, result
from kvstore.bench.stage import MIB, Stage
from kvstore.client.connect import connect
from kvstore.client.store import Store
from kvstore.model.prefix import Keys
from kvstore.state.eviction import POLICY_DEFAULT

FEW, MANY = 10_000, 1_000_000
FEW_QUICK, MANY_QUICK = 4_096, 8_192
GEOMETRY = "4k"
CHAIN_PAGES = 32
WARM_STEPS = 600
STEPS = 200  # per round
EXTENT_BYTES = 16 * MIB
SEED = 6


def evict(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """A put of 32 pages that evicts 32, per page: into a node of a million pages, over one of ten thousand."""
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
    """A node that is full, and puts into it."""

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
        """Keys of a new chain; its pages are what ``put`` will store next."""
        self._chain += 1
        self._last = self.cache.keys(tokens_of(SEED + 1, self._chain, CHAIN_PAGES * LAYOUTS[GEOMETRY].page_tokens))
        self._content.fill(self._rows, self._last.hashes)
        return self._last

    def put(self, given: object) -> int:
        """The pages that ``prepare`` made."""
        assert self._last is not None and given
        return self.cache.put(self._last, self._rows, wait=True)

    def verify(self) -> None:
        """Raises BenchFailed where nothing was evicted."""
        evicted = self.store.stats()["counters"].get("evicted_space", 0)
        if evicted < CHAIN_PAGES:
            raise BenchFailed(f"{evicted} pages were evicted from a node that should be full")


def _check(stored: object) -> None:
    if stored != CHAIN_PAGES:
        raise BenchFailed(f"put stored {stored} of {CHAIN_PAGES} new pages")
