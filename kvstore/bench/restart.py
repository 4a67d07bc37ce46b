"""Row about a crash: the daemon is killed and started again while another process reads on."""

from __future__ import annotations

import time
from contextlib import ExitStack

import numpy as np

from kvstore.bench.content import BenchWork, Content
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.processes import Daemon, PeerProcess
from kvstore.bench.stage import GIB, MIB, Stage, settle
from kvstore.client.connect import connect
from kvstore.client.local.grants import AHEAD_BYTES_MAX
from kvstore.client.store import Store

POOL_BYTES = 8 * GIB
CRASHES = 3
READ_ON_S = 0.5  # before each kill and after each ready line


def restart(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """kill -9 of a daemon with 8 GiB of pages, and start: seconds until its ready line, readers' misses, pages kept.

    The reader checks every byte it gets. Afterwards the node verifies all pages and its conservation laws, and every
    page is read and checked once more.
    """
    stage.clear()
    settings = stage.settings
    wanted = settings.bounded(256 * MIB if settings.quick else POOL_BYTES)
    chain_bytes = BenchWork("256k", 0, 1).chain_bytes
    work = BenchWork("256k", seed=10, chains=wanted // chain_bytes)
    crashes = 1 if settings.quick else min(CRASHES, settings.rounds)
    with ExitStack() as scene:
        # Beside the pages: an extent, and what the client that puts the probes asks for ahead. Nothing is evicted.
        daemon = stage.daemon(scene, work.total_bytes + settings.extent_bytes + AHEAD_BYTES_MAX)
        stage.write(daemon, work)
        store = scene.enter_context(connect(daemon.name))
        settle(store)
        reader = scene.enter_context(PeerProcess(daemon.name, settings.shm_dir))
        crash = [_crash(daemon, reader, store, work, turn) for turn in range(crashes)]
        kept = store.stats()["tiers"]["dram"]["pages"] - crashes  # one probe page each
        settle(store)
        _read_all(store, work)
    stored = work.chains * work.pages
    misses, errors = (sum(int(c[what]) for c in crash) for what in ("pages_missed", "errors"))
    details = {
        "pages_bytes": work.total_bytes,
        "page_bytes": work.layout.page_bytes,
        "pages_lost": stored - kept,
        "reads": sum(int(c["reads"]) for c in crash),
        "pages_missed": misses,
        "read_errors": errors,
        "longest_read_s": max(c["longest_s"] for c in crash),
        "kill_to_ready_s": [c["kill_to_ready_s"] for c in crash],
        "kill_to_put_s": [c["kill_to_put_s"] for c in crash],
    }
    sound = stored == kept and not misses and not errors
    return [result(name, Kind.TIME, [c["kill_to_ready_s"] for c in crash], bar=bar, details=details, sound=sound)]


def _crash(daemon: Daemon, reader: PeerProcess, store: Store, work: BenchWork, turn: int) -> dict[str, float]:
    """One kill and start under reads; what the reader saw, and how long it took until puts were acknowledged again."""
    cache = store.cache(work.layout)
    probe = BenchWork("256k", seed=11 + turn, chains=1, pages=1)
    page = np.zeros((1, work.layout.page_bytes), np.uint8)
    reader.send("read_on", work=work.to_json())
    time.sleep(READ_ON_S)
    killed = time.monotonic()
    daemon.kill()
    daemon.start()
    ready = time.monotonic()
    keys = probe.keys(cache, 0)
    Content(work.layout.page_bytes).fill(page, keys.hashes)
    if cache.put(keys, page) != 1:
        raise BenchFailed("the restarted daemon did not store a page")
    put = time.monotonic()
    time.sleep(READ_ON_S)
    reader.send("stop")
    return {**reader.answer(), "kill_to_ready_s": ready - killed, "kill_to_put_s": put - killed}


def _read_all(store: Store, work: BenchWork) -> None:
    """Every page of every chain, byte for byte."""
    cache, content = store.cache(work.layout), Content(work.layout.page_bytes)
    out = np.zeros((work.pages, work.layout.page_bytes), np.uint8)
    for chain in range(work.chains):
        keys = work.keys(cache, chain)
        found = cache.get(keys, out).pages
        if found != work.pages:
            raise BenchFailed(f"chain {chain} has {found} of {work.pages} pages after the restarts")
        content.check(out, keys.hashes, f"chain {chain} after the restarts")
