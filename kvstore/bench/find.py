"""Row about the directory: a lookup over three nodes, compared with one bare round trip."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np

from kvstore.addresses import connect
from kvstore.bench.content import BenchWork
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, Seconds, alternate, medians, result
from kvstore.bench.processes import Daemon
from kvstore.bench.stage import Stage, settle, wait_for
from kvstore.client.local.cache import LocalCache
from kvstore.client.local.peer_reads import PeerReader
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.cluster.data_connection import DataConnection
from kvstore.model.prefix import Keys
from kvstore.shm.data_server_file import find_data_server
from kvstore.shm.folder import NodeFolder
from kvstore.wire.data import FrameKind, Hello

NODES, CHAIN_PAGES, CHAINS = 3, 512, 16
STEPS = 480
DEADLINE_S = 30.0


def catalog(stage: Stage, scene: ExitStack) -> str:
    """Make a catalog in a file, removed with ``scene``."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-catalog-", dir=stage.settings.dir))
    scene.callback(shutil.rmtree, folder, ignore_errors=True)
    return f"file:{folder / 'catalog'}"


def data_connection(daemon: Daemon) -> DataConnection:
    """Connect to the data server of a node."""
    server = find_data_server(NodeFolder.at(daemon.folder))
    if server is None:
        raise BenchFailed(f"{daemon.name} has no data server")
    return DataConnection.open(server.address, Hello(process=server.process), deadline_s=time.monotonic() + DEADLINE_S)


class RemoteLookups:
    """Lookups, by a client of one node, of chains that only another node has. No answers are cached."""

    def __init__(self, cache: PrefixCache, work: BenchWork, connection: DataConnection) -> None:
        self._cache = cache
        self._work = work
        self._connection = connection

    def prepare(self, step: int) -> Keys:
        """Return a chain's keys."""
        return self._work.keys(self._cache, step % self._work.chains)

    def ours(self, keys: Keys) -> int:
        """Look the chain up."""
        return self._cache.lookup(keys).pages

    def finds(self, chain: int) -> bool:
        """Return True if a lookup finds the whole chain."""
        return self.ours(self.prepare(chain)) == CHAIN_PAGES

    def ping(self, keys: Keys) -> int:
        """Make one bare round trip: the limit."""
        deadline_s = time.monotonic() + DEADLINE_S
        return len(self._connection.call(FrameKind.PING, b"", reply=FrameKind.PONG, deadline_s=deadline_s))

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if a lookup did not find the whole chain."""
        if value != (CHAIN_PAGES if variant == "ours" else 0):
            raise BenchFailed(f"{variant}: found {value} of {CHAIN_PAGES} pages")


def find(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """Measure the lookup of 512 pages on another of three nodes, compared with a bare round trip over the same
    transport."""
    stage.clear()
    settings = stage.settings
    work = BenchWork("4k", seed=9, chains=4 if settings.quick else CHAINS, pages=CHAIN_PAGES)
    room = settings.extent_bytes
    with ExitStack() as scene:
        catalogs = {"catalog": catalog(stage, scene)}
        sizes = (work.total_bytes + 2 * room, room, room)
        daemons = [stage.daemon(scene, size, settings=catalogs) for size in sizes]
        stage.write(daemons[0], work)
        settle(scene.enter_context(connect(daemons[0].name)))
        store = scene.enter_context(connect(daemons[-1].name))
        connection = scene.enter_context(closing(data_connection(daemons[1])))
        cache = _uncached(store, work, daemons[-1])
        lookups = RemoteLookups(cache, work, connection)
        for chain in range(work.chains):
            wait_for(partial(lookups.finds, chain), "the directory does not list the pages")
        steps = list(range(40 if settings.quick else STEPS))
        variants = {"ours": lookups.ours, "ping": lookups.ping}
        seconds = alternate(variants, steps, settings.rounds, lookups.prepare, lookups.check)
    limit, details = medians(seconds["ping"]), {"pages": CHAIN_PAGES, "nodes": NODES}
    limit_is = "one bare round trip"
    return [
        result(name, Kind.TIME, medians(seconds["ours"]), limit, bar=bar, limit_is=limit_is, details=details),
        result(f"{name}.p99", Kind.TIME, _p99(seconds["ours"]), _p99(seconds["ping"]), limit_is=f"{limit_is}, p99"),
    ]


def _uncached(store: Store, work: BenchWork, daemon: Daemon) -> LocalCache:
    """Return a cache that does not remember which node has which pages."""
    cache = store.cache(work.layout)
    assert isinstance(cache, LocalCache)
    cache.node.peer_reader = PeerReader(daemon.folder, cache_s=0.0)
    return cache


def _p99(seconds: Seconds) -> list[float]:
    """Return the 99th percentile of every round."""
    return [float(np.quantile(steps, 0.99)) for steps in seconds]
