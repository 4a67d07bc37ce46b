"""Rows of the directory: a lookup over three nodes against one bare round trip, and what it costs to know."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from kvstore.bench.content import BenchWork
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, Seconds, alternate, medians, result
from kvstore.bench.processes import Daemon, PeerProcess
from kvstore.bench.stage import Stage, settle, wait_for
from kvstore.catalog import schema
from kvstore.catalog.schema import NodeEntry
from kvstore.client.connect import connect
from kvstore.client.local.cache import LocalCache
from kvstore.client.local.elsewhere import Elsewhere
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.config.daemon import ClusterConfig
from kvstore.model.prefix import Keys
from kvstore.serving.membership import Membership
from kvstore.state.directory import Directory, Told
from kvstore.tier.data_file import find_data_server
from kvstore.tier.folder import NodeFolder
from kvstore.transfer.find_messages import pack_announce, unpack_announce, unpack_announced
from kvstore.transfer.state_pages import read_state
from kvstore.transfer.tcp import DataConnection
from kvstore.transfer.wire import FrameKind, Hello

NODES, CHAIN_PAGES, CHAINS = 3, 512, 16
STEPS = 480
BATCH = 4096
DEADLINE_S = 30.0
PAIRS = 20  # of a node in a cluster and one that is in none


def catalog(stage: Stage, scene: ExitStack) -> str:
    """A catalog in a file, gone with ``scene``."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-catalog-", dir=stage.settings.dir))
    scene.callback(shutil.rmtree, folder, ignore_errors=True)
    return f"file:{folder / 'catalog'}"


@contextmanager
def pool(stage: Stage, scene: ExitStack, dram_bytes: Sequence[int], url: str = "") -> Iterator[list[Daemon]]:
    """Nodes of one pool, whose catalog is a file; each with as much memory."""
    settings = {"catalog": url or catalog(stage, scene)}
    yield [stage.daemon(scene, size, settings=settings) for size in dram_bytes]


def data_connection(daemon: Daemon) -> DataConnection:
    """A connection to that node's data server."""
    found = find_data_server(NodeFolder.at(daemon.folder))
    if found is None:
        raise BenchFailed(f"{daemon.name} has no data server")
    return DataConnection.open(found.address, Hello(process=found.process), deadline_s=time.monotonic() + DEADLINE_S)


class Finding:
    """Lookups of chains that another node has, by who has none of them; nothing that was told is kept."""

    def __init__(self, cache: PrefixCache, work: BenchWork, connection: DataConnection) -> None:
        self._cache = cache
        self._work = work
        self._connection = connection

    def prepare(self, step: int) -> Keys:
        """A chain's keys."""
        return self._work.keys(self._cache, step % self._work.chains)

    def ours(self, keys: Keys) -> int:
        """A lookup."""
        return self._cache.lookup(keys).pages

    def ping(self, keys: Keys) -> int:
        """Limit: one bare round trip."""
        deadline_s = time.monotonic() + DEADLINE_S
        return len(self._connection.call(FrameKind.PING, b"", reply=FrameKind.PONG, deadline_s=deadline_s))

    def check(self, variant: str, value: object) -> None:
        """Raises BenchFailed where not all was found."""
        if value != (CHAIN_PAGES if variant == "ours" else 0):
            raise BenchFailed(f"{variant}: found {value} of {CHAIN_PAGES} pages")


def find(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """Chains of 512 pages on another of three nodes, keys given, against a bare round trip over the same transport."""
    stage.clear()
    settings = stage.settings
    work = BenchWork("4k", seed=9, chains=4 if settings.quick else CHAINS, pages=CHAIN_PAGES)
    room = settings.extent_bytes
    with ExitStack() as scene:
        daemons = scene.enter_context(pool(stage, scene, [work.total_bytes + 2 * room, room, room]))
        with PeerProcess(daemons[0].name, settings.shm_dir) as writer:
            writer.ask("write", work=work.to_json())
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
    cache.node.elsewhere = Elsewhere(daemon.folder, kept_s=0.0)
    return cache


def _slow(seconds: Seconds) -> list[float]:
    """The 99th percentile of every round."""
    return [float(np.quantile(steps, 0.99)) for steps in seconds]


def directory(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """An owner that is told of a million pages: bytes per entry, and entries per second, messages unpacked."""
    pages = 100_000 if stage.settings.quick else 1_000_000
    keys = np.random.default_rng(1).integers(0, 1 << 63, pages).astype(np.uint64)
    sizes, rates = [], []
    for _ in range(stage.settings.rounds):
        owner, began_s = Directory(64 * pages), time.perf_counter()
        for number, start in enumerate(range(0, pages, BATCH)):
            part = keys[start : start + BATCH]
            told = Told("a", 1, number, part, np.ones(len(part), np.uint8))
            owner.told(unpack_announce(pack_announce(told, 0))[0])
        rates.append(pages / (time.perf_counter() - began_s))
        sizes.append(owner.nbytes / len(owner))
    return [
        result(name, Kind.COUNT, sizes, bar=bar, details={"entries": pages}),
        result(f"{name}.told_per_s", Kind.COUNT, rates),
    ]


def announce(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Entries per second that one owner takes in over its data connection, as its data server serves it."""
    stage.clear()
    pages = 100_000 if stage.settings.quick else 1_000_000
    keys = np.random.default_rng(2).integers(0, 1 << 63, pages).astype(np.uint64)
    rates = []
    with ExitStack() as scene:
        room = stage.settings.extent_bytes
        url, number = catalog(stage, scene), schema.new_process()
        daemon = scene.enter_context(pool(stage, scene, [room], url))[0]
        teller = Membership(ClusterConfig(catalog=url))  # owners take in what a node of the pool tells
        teller.start(NodeEntry(name="bench", process=number, incarnation=number))
        scene.callback(teller.stop)
        connection = scene.enter_context(closing(data_connection(daemon)))
        for turn in range(stage.settings.rounds):
            began_s = time.perf_counter()
            for batch, start in enumerate(range(0, pages, BATCH)):
                part = keys[start : start + BATCH]
                told = Told("bench", 1 + turn, batch, part, np.ones(len(part), np.uint8), batch == 0)
                body = pack_announce(told, int(number, 16))
                deadline_s = time.monotonic() + DEADLINE_S
                reply = connection.call(FrameKind.ANNOUNCE, body, reply=FrameKind.ANNOUNCED, deadline_s=deadline_s)
                if unpack_announced(reply) != batch + 1:
                    raise BenchFailed(f"batch {batch} was not taken in")
            rates.append(pages / (time.perf_counter() - began_s))
    return [result(name, Kind.RATE, rates, bar=bar, details={"entries": pages})]


def converge(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """A node of three dies: until every page of another, 100,000 of them, has two owners again."""
    stage.clear()
    settings = stage.settings
    work = BenchWork("4k", seed=10, chains=4 if settings.quick else 196, pages=CHAIN_PAGES)
    room, pages = settings.extent_bytes, work.chains * work.pages
    took_s = []
    for _ in range(max(1, settings.rounds // 2)):
        with ExitStack() as scene:
            daemons = scene.enter_context(pool(stage, scene, [work.total_bytes + 2 * room, room, room]))
            with PeerProcess(daemons[0].name, settings.shm_dir) as writer:
                writer.ask("write", work=work.to_json())
            connections = [scene.enter_context(closing(data_connection(daemon))) for daemon in daemons]
            wait_for(lambda those=connections: _entries(those) == 2 * pages, "not all is told")
            sender = find_data_server(NodeFolder.at(daemons[-1].folder))
            assert sender is not None
            began_s = time.perf_counter()
            daemons[-1].kill()
            os.kill(sender.pid, signal.SIGKILL)
            wait_for(lambda those=connections[:2]: _entries(those) == 2 * pages, "the owners do not know all")
            took_s.append(time.perf_counter() - began_s)
    return [result(name, Kind.TIME, took_s, bar=bar, details={"pages": pages})]


def join(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """An empty node joins two others, of which one has 100,000 pages: from its start until it finds them, and until it
    has its share of the directory."""
    stage.clear()
    settings = stage.settings
    work = BenchWork("4k", seed=12, chains=4 if settings.quick else 196, pages=CHAIN_PAGES)
    room, pages = settings.extent_bytes, work.chains * work.pages
    finds_s, shares_s = [], []
    for _ in range(max(1, settings.rounds // 2)):
        with ExitStack() as scene:
            url = catalog(stage, scene)
            daemons = scene.enter_context(pool(stage, scene, [work.total_bytes + 2 * room, room], url))
            with PeerProcess(daemons[0].name, settings.shm_dir) as writer:
                writer.ask("write", work=work.to_json())
            known = [scene.enter_context(closing(data_connection(daemon))) for daemon in daemons]
            wait_for(lambda those=known: _entries(those) == 2 * pages, "not all is told")
            began_s = time.perf_counter()
            daemons.append(stage.daemon(scene, room, settings={"catalog": url}))
            cache = _without_memory(scene.enter_context(connect(daemons[-1].name)), work, daemons[-1])
            keys = work.keys(cache, 0)
            wait_for(lambda its=cache, keys=keys: its.lookup(keys).pages == CHAIN_PAGES, "nothing is found")
            finds_s.append(time.perf_counter() - began_s)
            known.append(scene.enter_context(closing(data_connection(daemons[-1]))))
            wait_for(lambda those=known: _entries(those[-1:]) > 0 and _entries(those) == 2 * pages, "no share")
            shares_s.append(time.perf_counter() - began_s)
    details = {"pages": pages}
    return [
        result(name, Kind.TIME, finds_s, bar=bar, details=details),
        result(f"{name}.share", Kind.TIME, shares_s, details=details),
    ]


def _entries(connections: Sequence[DataConnection]) -> int:
    return sum(int(read_state(connection, DEADLINE_S)["entries"]) for connection in connections)


def cost(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """Local work on a node in a cluster of three, against the same on a node in none: get, put and lookup."""
    stage.clear()
    settings = stage.settings
    work = BenchWork("64k", seed=11, chains=8, pages=32)
    room = settings.extent_bytes
    lines: list[Result] = []
    with ExitStack() as scene:
        size = work.total_bytes + 4 * room
        inside = scene.enter_context(pool(stage, scene, [size, room, room]))[0]
        alone = stage.daemon(scene, size)
        caches: dict[str, PrefixCache] = {}
        for label, daemon in (("inside", inside), ("alone", alone)):
            with PeerProcess(daemon.name, settings.shm_dir) as writer:
                writer.ask("write", work=work.to_json())
            store = scene.enter_context(connect(daemon.name))
            settle(store)
            caches[label] = store.cache(work.layout)
        out = np.ones((work.pages, work.layout.page_bytes), np.uint8)
        keys = {cache: [work.keys(cache, chain) for chain in range(work.chains)] for cache in caches.values()}

        def got(cache: PrefixCache, step: int) -> object:
            return cache.get(keys[cache][step % work.chains], out).pages

        def looked(cache: PrefixCache, step: int) -> object:
            return cache.lookup(keys[cache][step % work.chains]).pages

        def stored(cache: PrefixCache, step: int) -> object:
            return cache.put(np.random.default_rng(1000 + step).integers(0, 1 << 30, tokens), out, wait=True)

        tokens = work.pages * work.layout.page_tokens
        for what, verb in (("get", got), ("lookup", looked), ("put", stored)):
            each = 5 if settings.quick or what == "put" else 200
            ratios: dict[str, list[float]] = {"inside": [], "alone": []}
            for pair in range(PAIRS):
                order = ("inside", "alone") if pair % 2 else ("alone", "inside")
                for label in order:
                    times = []
                    for step in range(pair * each, (pair + 1) * each):
                        began_s = time.perf_counter()
                        verb(caches[label], step)
                        times.append(time.perf_counter() - began_s)
                    ratios[label].append(median(times))
            line = name if what == "get" else f"{name}.{what}"
            lines.append(
                result(line, Kind.TIME, ratios["inside"], ratios["alone"], bar=bar, limit_is="the same in no cluster")
            )
    return lines
