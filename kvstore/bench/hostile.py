"""Rows about a tenant who wants much of the node: what it costs the node, and the client beside it.

Names: another process reads, over gRPC, prompts that are not stored, each under another adapter of a thousand bytes;
then it puts a page under as many others. Meanwhile this process puts one page after the other. What is reported is its
longest put beside the longest in quiet; and in the details what the node's private memory and its book grew by, and how
much it wrote for 100 unpins that found nothing.

Run as a program it is that other process: ``python -m kvstore.bench.hostile ADDRESS VERB COUNT``.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.bench.content import tokens_of
from kvstore.bench.grpc import connected, free_port
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.processes import Daemon
from kvstore.bench.stage import MIB, Stage
from kvstore.client.connect import connect
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout

COUNT, COUNT_QUICK = 18_500, 200
UNPINS = 100
# As large as what a client says of a layout may be.
WORDY: Final = Layout(
    model="m" * 1000, layers=1, kv_heads=1, head_dim=64, page_tokens=16, revision="r" * 1000, rope="o" * 1000
)
MINE: Final = Layout(model="bench-hostile", layers=1, kv_heads=1, head_dim=64, page_tokens=16)


def names(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """The longest put of one client while another says names, over the longest in quiet; reads first, then puts."""
    stage.clear()
    count = COUNT_QUICK if stage.settings.quick else COUNT
    with ExitStack() as scene:
        port = free_port()
        daemon = stage.daemon(scene, 512 * MIB, 16 * MIB, settings={"listen": f"127.0.0.1:{port}"})
        store = scene.enter_context(connect(daemon.name))
        puts = _Puts(store, "quiet")
        puts.until(lambda: puts.count >= 100)
        lines = []
        for verb in ("read", "put"):
            before = _held(daemon)
            command = [sys.executable, "-m", "kvstore.bench.hostile", f"kv://127.0.0.1:{port}", verb, str(count)]
            other = scene.enter_context(subprocess.Popen(command))
            longest_s, seconds = puts.until(lambda other=other: other.poll() is not None)
            if other.returncode:
                raise BenchFailed(f"the other process ended with {other.returncode}")
            grown = {what: size - before[what] for what, size in _held(daemon).items()}
            quiet_end = time.monotonic() + seconds
            quiet_s, _ = puts.until(lambda end=quiet_end: time.monotonic() > end)
            details = {"names": count, "grown_bytes": grown}
            if verb == "put":
                details["unpins_bytes"] = _unpins(daemon, store)
            limit_is = "the same in quiet"
            line = f"{name}.{verb}s"
            lines.append(result(line, Kind.TIME, [longest_s], [quiet_s], bar=bar, limit_is=limit_is, details=details))
        return lines


class _Puts:
    """Puts of one page each, all new."""

    def __init__(self, store: Store, salt: str) -> None:
        self._cache = store.cache(MINE, salt=salt)
        self._rows = np.zeros((1, MINE.page_bytes), np.uint8)
        self.count = 0

    def until(self, done: object) -> tuple[float, float]:
        """Put until ``done()``: the longest put, and all, in seconds."""
        assert callable(done)
        began_s, longest_s = time.monotonic(), 0.0
        while not done():
            keys = self._cache.keys(tokens_of(1, self.count, MINE.page_tokens))
            start_s = time.monotonic()
            stored = self._cache.put(keys, self._rows)
            longest_s = max(longest_s, time.monotonic() - start_s)
            if stored != 1:
                raise BenchFailed("a page was not stored")
            self.count += 1
            time.sleep(0.001)
        return longest_s, time.monotonic() - began_s

    def for_seconds(self, seconds: float) -> float:
        """Put for so long: the longest put, in seconds."""
        end = time.monotonic() + seconds
        return self.until(lambda: time.monotonic() > end)[0]


def _held(daemon: Daemon) -> dict[str, int]:
    """Private memory of the daemon, and what its book takes in shared memory."""
    files = [daemon.folder / name for name in ("names", "pins")]
    book = sum(path.stat().st_blocks * 512 for path in files if path.exists())
    return {"private": daemon.memory_bytes()["private"], "book": book}


def _unpins(daemon: Daemon, store: Store) -> int:
    """What the daemon writes to files for ``UNPINS`` calls that find nothing, beside a pin that was asked for much."""
    cache = store.cache(MINE, salt="pinned")
    tokens = tokens_of(2, 0, 60_000 * MINE.page_tokens)
    cache.put(tokens[: MINE.page_tokens], bytes(MINE.page_bytes))
    store.pin(cache.keys(tokens), 600)
    path = Path(f"/proc/{daemon.pid}/io")

    def written() -> int:
        return int(path.read_text().split("wchar: ")[1].split()[0])

    before = written()
    for number in range(UNPINS):
        with contextlib.suppress(InvalidRequest):
            store.unpin(keys=cache.keys(tokens_of(3, number, MINE.page_tokens)))
    return written() - before


def main(address: str, verb: str, count: int) -> None:
    """Say ``count`` names."""
    rows = bytes(WORDY.page_bytes)
    with connected(address) as store:
        for number in range(count):
            cache = store.cache(WORDY, salt="noisy", adapter=f"{verb}-{number}-{'x' * 1000}")
            tokens = tokens_of(4, number, 2 * WORDY.page_tokens)
            if verb == "read":
                cache.prefetch(tokens)
            else:
                cache.put(tokens[: WORDY.page_tokens], rows)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
