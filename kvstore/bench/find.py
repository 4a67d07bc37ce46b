"""Row about the directory: a lookup over three nodes, compared with one bare round trip."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack, closing
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
    """Connect to that node's data server."""
    found = find_data_server(NodeFolder.at(daemon.folder))
    if found is None:
        raise BenchFailed(f"{daemon.name} has no data server")
    return DataConnection.open(found.address, Hello(process=found.process), deadline_s=time.monotonic() + DEADLINE_S)


class Finding:
    """Lookups of chains that only another node has, by a node without them; no answers are cached."""

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

    def ping(self, keys: Keys) -> int:
        """Make one bare round trip: the limit."""
        deadline_s = time.monotonic() + DEADLINE_S
        return len(self._connection.call(FrameKind.PING, b"", reply=FrameKind.PONG, deadline_s=deadline_s))

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if not everything was found."""
        if value != (CHAIN_PAGES if variant == "ours" else 0):
            raise BenchFailed(f"{variant}: found {value} of {CHAIN_PAGES} pages")


def find(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """Look up chains of 512 pages on another of three nodes, compared with a bare round trip over the same
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
        cache = _without_memory(store, work, daemons[-1])
        finding = Finding(cache, work, connection)
        for chain in range(work.chains):
            keys = finding.prepare(chain)
            wait_for(lambda keys=keys: cache.lookup(keys).pages == CHAIN_PAGES, "the pages are not found")
        steps = list(range(40 if settings.quick else STEPS))
        variants = {"ours": finding.ours, "ping": finding.ping}
        seconds = alternate(variants, steps, settings.rounds, finding.prepare, finding.check)
    limit, details = medians(seconds["ping"]), {"pages": CHAIN_PAGES, "nodes": NODES}
    what = "one bare round trip"
    return [
        result(name, Kind.TIME, medians(seconds["ours"]), limit, bar=bar, limit_is=what, details=details),
        result(f"{name}.p99", Kind.TIME, _slow(seconds["ours"]), _slow(seconds["ping"]), limit_is=f"{what}, p99"),
    ]


def _without_memory(store: Store, work: BenchWork, daemon: Daemon) -> LocalCache:
    cache = store.cache(work.layout)
    assert isinstance(cache, LocalCache)
    cache.node.peer_reader = PeerReader(daemon.folder, cache_s=0.0)
    return cache


def _slow(seconds: Seconds) -> list[float]:
    """Return the 99th percentile of every round."""
    return [float(np.quantile(steps, 0.99)) for steps in seconds]
