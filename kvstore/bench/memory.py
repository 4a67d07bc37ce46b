"""Row about memory: the memory of a node in addition to its pages, measured in the files and the process of a real
node."""

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
    """Measure the bytes per page in a node with a million pages of 32 layers and 64 tokens.

    The sum has the index, records without token ids, uses, and the growth of the daemon's private memory while the
    pages were put (free frames, eviction order, generations and so on). Index and tables count with their memory in
    use, not with their file lengths.
    """
    stage.clear()
    settings = stage.settings
    work = BenchWork("4k", seed=9, chains=1, pages=CHAIN_PAGES)
    memory_bytes = settings.bounded((PAGES_QUICK if settings.quick else PAGES) * work.layout.page_bytes)
    pool_bytes = memory_bytes // settings.extent_bytes * settings.extent_bytes
    work = BenchWork(
        "4k", seed=9, chains=pool_bytes // work.chain_bytes - 1, pages=CHAIN_PAGES
    )  # one chain less, for frames that are granted ahead
    with ExitStack() as scene:
        daemon = stage.daemon(scene, pool_bytes)
        before = daemon.memory_bytes()
        stage.write(daemon, work)
        after = _memory_while_scrubbing(daemon, scene.enter_context(connect(daemon.name)))
        files = _table_bytes(daemon.folder)
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


def _memory_while_scrubbing(daemon: Daemon, store: Store) -> dict[str, int]:
    """Return the largest of several samples of the daemon's memory while its scrubber checks the pages."""
    wait_for(lambda: store.stats()["scrubber"]["sweep_pages_left"] > 0, "the scrubber has not started")
    samples = []
    for _ in range(SAMPLES):
        samples.append(daemon.memory_bytes())
        time.sleep(SAMPLE_S)
    return max(samples, key=lambda sample: sample["private"])


def _table_bytes(folder: Path) -> dict[str, int]:
    """Return the allocated bytes of the node's index and tables, whose files are sparse."""
    used = {"index": 0, "records": 0, "uses": 0}
    for path in folder.rglob("*"):
        kind = path.relative_to(folder).parts[0].partition("-")[0]
        if kind in used and path.is_file():
            used[kind] += os.stat(path).st_blocks * 512
    return used
