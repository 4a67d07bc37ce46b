"""Rows about metrics: what counting costs a get, and how long a scrape of a large node takes."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvstore.bench.content import BenchWork
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, Seconds, medians, result
from kvstore.bench.processes import PeerProcess
from kvstore.bench.reading import Reading
from kvstore.bench.stage import Stage
from kvstore.client.connect import connect
from kvstore.client.local.cache import LocalCache
from kvstore.model.prefix import Keys

GETS = 40_000  # of one page per round; a sixteenth as many of 32 pages
BLOCK = 50  # gets that are timed together: one clock costs as much as what is measured here
PAGES, PAGES_QUICK = 1 << 20, 1 << 13
CHAIN_PAGES = 512
SCRAPES = 20
SCRAPE_S = 10.0


def cost(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """get with its counting, over get with counting switched off: one page, and batches of 32."""
    stored = stage.stored(geometry)
    reading = Reading(stored.store, stored.work)
    reading.verify()
    chains = [reading.keys(chain) for chain in range(stored.work.chains)]
    ones = [keys[page : page + 1] for keys in chains for page in range(len(keys))]
    gets = 32 * BLOCK if stage.settings.quick else GETS
    return [
        _cost(stage, f"{name}.1", bar, reading, ones, gets),
        _cost(stage, f"{name}.32", bar, reading, chains, gets // 16),
    ]


def _cost(stage: Stage, name: str, bar: Bar, reading: Reading, prompts: list[Keys], gets: int) -> Result:
    assert isinstance(reading.cache, LocalCache)
    mapped = reading.cache._node.mapped()
    if mapped is None:
        raise BenchFailed("the node is gone")
    get, out = reading.cache.get, reading.out
    seconds: dict[bool, Seconds] = {True: [], False: []}
    for turn in range(stage.settings.rounds):
        times: dict[bool, list[float]] = {True: [], False: []}
        for block in range(gets // BLOCK):
            some = [prompts[(block * BLOCK + i) * 7919 % len(prompts)] for i in range(BLOCK)]
            for counting in (True, False) if (block + turn) % 2 else (False, True):
                mapped.counting = counting
                times[counting].append(_timed(get, some, out))
        for counting, steps in times.items():
            seconds[counting].append(steps)
    mapped.counting = True
    ours, limit = medians(seconds[True]), medians(seconds[False])
    details = {"pages": len(prompts[0]), "page_bytes": reading.work.layout.page_bytes, "gets_per_round": gets}
    return result(name, Kind.TIME, ours, limit, bar=bar, limit_is="get, not counted", details=details)


def _timed(get: Callable[..., Any], prompts: list[Keys], out: Any) -> float:
    """Seconds of one get."""
    pages = 0
    start = time.perf_counter_ns()
    for keys in prompts:
        pages += get(keys, out).pages
    stop = time.perf_counter_ns()
    if pages != len(prompts) * len(prompts[0]):
        raise BenchFailed(f"get found {pages} of {len(prompts) * len(prompts[0])} pages")
    return (stop - start) / len(prompts) / 1e9


def scrape(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """GET /metrics of a node of a million pages, and what ``stats`` alone takes there."""
    stage.clear()
    settings = stage.settings
    work = BenchWork("4k", seed=9, chains=1, pages=CHAIN_PAGES)
    room = settings.bounded((PAGES_QUICK if settings.quick else PAGES) * work.layout.page_bytes)
    pool_bytes = room // settings.extent_bytes * settings.extent_bytes
    work = BenchWork("4k", seed=9, chains=pool_bytes // work.chain_bytes - 1, pages=CHAIN_PAGES)
    with ExitStack() as scene:
        daemon = stage.daemon(scene, pool_bytes, settings={"http": "127.0.0.1:0"})
        with PeerProcess(daemon.name, settings.shm_dir) as writer:
            pages = int(writer.ask("write", work=work.to_json())["pages"])
        store = scene.enter_context(connect(daemon.name))
        if (stored := store.stats()["tiers"]["dram"]["pages"]) != pages or pages != work.chains * work.pages:
            raise BenchFailed(f"the node has {stored} of {work.chains * work.pages} pages")
        scrapes = [_scrape(daemon.http) for _ in range(SCRAPES)]
        asked = [_timed_once(store.stats) for _ in range(SCRAPES)]
    details = {"pages": pages, "bytes": scrapes[-1][1], "scrapes": SCRAPES}
    ours = [seconds for seconds, _ in scrapes]
    return [
        result(name, Kind.TIME, ours, bar=bar, details=details),
        # All that a frame of `kvstore top` asks of a node; drawing it takes half a millisecond more.
        result(f"{name}.stats", Kind.TIME, asked, bar=bar, details={"pages": pages}),
    ]


def _scrape(address: str) -> tuple[float, int]:
    """Seconds and bytes of one GET."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection(address, timeout=SCRAPE_S)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    body = answer.read()
    seconds = time.perf_counter() - start
    connection.close()
    if answer.status != 200 or b"kvstore_pages" not in body:
        raise BenchFailed(f"/metrics answered {answer.status} with {len(body)} bytes")
    return seconds, len(body)


def _timed_once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
