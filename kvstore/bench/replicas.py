"""Row about second copies: a put that waits for two nodes, compared with one that waits for its own node."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from kvstore.addresses import connect
from kvstore.bench.content import BenchWork, Content, Rows
from kvstore.bench.find import catalog
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, result
from kvstore.bench.stage import Stage, wait_for
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.model.prefix import Keys

STEPS = 12


class Puts:
    """Puts of new chains, each of them once in a cache with two replicas and once in another cache with one."""

    def __init__(self, store: Store, work: BenchWork) -> None:
        self._work = work
        self._caches = {
            "twice": store.cache(work.layout, salt="twice", replicas=2),
            "plain": store.cache(work.layout, salt="plain"),
        }
        self._content = Content(work.layout.page_bytes)
        self._rows: Rows = np.zeros((work.pages, work.layout.page_bytes), np.uint8)

    def prepare(self, step: int) -> dict[str, Keys]:
        """Return the keys of a chain in both caches, and fill the rows."""
        keys = {name: self._work.keys(cache, step) for name, cache in self._caches.items()}
        self._content.fill(self._rows, keys["twice"].hashes)
        return keys

    def put(self, name: str) -> Callable[[dict[str, Keys]], int]:
        """Return the function that puts a chain in one of the caches, and waits."""
        cache: PrefixCache = self._caches[name]
        return lambda keys: cache.put(keys[name], self._rows, wait=True)

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if a put did not store the whole chain."""
        if value != self._work.pages:
            raise BenchFailed(f"{variant}: stored {value} of {self._work.pages} pages")


def put_twice(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """Measure puts of 32 pages that wait until another node of this machine has stored them, too."""
    stage.clear()
    settings = stage.settings
    steps = list(range(3 if settings.quick else STEPS))
    work = BenchWork(geometry, seed=11, chains=len(steps) * settings.rounds, pages=8 if settings.quick else 32)
    room = settings.extent_bytes
    with ExitStack() as scene:
        options = {"catalog": catalog(stage, scene), "replicas_same_machine": "true", "background_bytes_per_s": 0}
        source = stage.daemon(scene, work.total_bytes + 2 * room, settings=options)
        stage.daemon(scene, work.total_bytes + 2 * room, settings=options)
        store = scene.enter_context(connect(source.name))
        wait_for(lambda: store.stats()["replicas"]["surveys"] and store.stats()["peers"] is not None, "no pool")
        puts, chains = Puts(store, work), iter(range(work.chains))
        variants = {each: puts.put(each) for each in ("twice", "plain")}
        seconds = alternate(variants, steps, settings.rounds, lambda _: puts.prepare(next(chains)), puts.check)
    details = {"pages": work.pages, "page_bytes": work.layout.page_bytes}
    limit_is = "the same put with one replica"
    return [
        result(
            *(name, Kind.TIME, medians(seconds["twice"]), medians(seconds["plain"])),
            bar=bar,
            limit_is=limit_is,
            details=details,
        )
    ]
