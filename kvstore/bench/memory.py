"""Row about memory: what a node uses in addition to its pages, measured in the files and processes of a real node."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

from kvstore.addresses import connect
from kvstore.bench.content import BenchWork
from kvstore.bench.harness import Bar, Kind, Result, result
from kvstore.bench.processes import Daemon
from kvstore.bench.stage import Stage, wait_for
from kvstore.client.store import Store

PAGES = 1 << 20
PAGES_QUICK = 1 << 13
CHAIN_PAGES = 512
TOKEN_BYTES = 4
SAMPLES, SAMPLE_S = 10, 0.1


def memory(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """A million pages of 32 layers and 64 tokens: index, records without token ids, uses, and the daemon's own memory.

    The last is the growth of its private memory while the pages were put: free frames, eviction order, generations and
    everything else that it keeps. Index and tables are counted by memory in use, not by file lengths.
    """
    stage.clear()
    settings = stage.settings
    work = BenchWork("4k", seed=9, chains=1, pages=CHAIN_PAGES)
    room = settings.bounded((PAGES_QUICK if settings.quick else PAGES) * work.layout.page_bytes)
    pool_bytes = room // settings.extent_bytes * settings.extent_bytes
    work = BenchWork(
        "4k", seed=9, chains=pool_bytes // work.chain_bytes - 1, pages=CHAIN_PAGES
    )  # one less, for frames granted ahead
    with ExitStack() as scene:
        daemon = stage.daemon(scene, pool_bytes)
        before = daemon.memory_bytes()
        stage.write(daemon, work)
        after = _at_work(daemon, scene.enter_context(connect(daemon.name)))
        files = _in_use(daemon.folder)
    pages = work.chains * work.pages
    parts = {
        "index": files["index"] / pages,
        "records": files["records"] / pages - TOKEN_BYTES * work.layout.page_tokens,
        "uses": files["uses"] / pages,
        "policy_and_heap": (after["private"] - before["private"]) / pages,
    }
    details = {
        "pages": pages,
        "layers": work.layout.layers,
        "bytes_per_page": {part: round(size, 1) for part, size in parts.items()},
        "token_ids_bytes_per_page": TOKEN_BYTES * work.layout.page_tokens,
        "daemon_memory_bytes": after,
        "daemon_rss_without_shared_bytes": after["resident"] - after["shared"],
    }
    return [result(name, Kind.COUNT, [sum(parts.values())], bar=bar, details=details)]


def _at_work(daemon: Daemon, store: Store) -> dict[str, int]:
    """Return the daemon's memory while its scrubber checks these pages, at its maximum over some time."""
    wait_for(lambda: store.stats()["scrubber"]["sweep_pages_left"] > 0, "the scrubber has not begun")
    samples = []
    for _ in range(SAMPLES):
        samples.append(daemon.memory_bytes())
        time.sleep(SAMPLE_S)
    return max(samples, key=lambda sample: sample["private"])


def _in_use(folder: Path) -> dict[str, int]:
    """Return the memory of the node's tables and index: for sparse files, the allocated bytes."""
    used = {"index": 0, "records": 0, "uses": 0}
    for path in folder.rglob("*"):
        kind = path.relative_to(folder).parts[0].partition("-")[0]
        if kind in used and path.is_file():
            used[kind] += os.stat(path).st_blocks * 512
    return used
