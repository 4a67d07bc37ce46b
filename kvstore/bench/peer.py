"""Peer: the second process of a benchmark, ``python -m kvstore.bench.peer NODE``.

It reads one JSON request per line, answers each with one line of JSON, and exits when its input ends.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.addresses import connect
from kvstore.bench.content import BenchWork, Content
from kvstore.bench.get import Reading
from kvstore.client.store import Store
from kvstore.errors import KVStoreError, NodeUnavailable


class PeerVerbs:
    """The requests that a peer serves. Each method takes the request's arguments and returns the answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reading: Reading | None = None

    def write(self, work: dict[str, Any]) -> dict[str, Any]:
        """Put every chain. Return the number of new pages (``pages``) and the time of the puts (``seconds``)."""
        job = BenchWork(**work)
        cache, content = self._store.cache(job.layout), Content(job.layout.page_bytes)
        rows = np.zeros((job.pages, job.layout.page_bytes), np.uint8)
        pages, seconds = 0, 0.0
        for chain in range(job.chains):
            keys = job.keys(cache, chain)
            content.fill(rows, keys.hashes)
            before = time.perf_counter()
            pages += cache.put(keys, rows)
            seconds += time.perf_counter() - before
        return {"pages": pages, "seconds": seconds}

    def locate(self, work: dict[str, Any]) -> dict[str, Any]:
        """Map, verify and touch the pages of these chains, for later reads."""
        self._reading = Reading(self._store, BenchWork(**work))
        self._reading.verify()
        return {}

    def read(self, variant: str, start_ns: int, duration_s: float, first: int) -> dict[str, Any]:
        """Read chains into the warm buffer for ``duration_s``, starting at ``start_ns`` (monotonic clock)."""
        reading = self._reading
        assert reading is not None, "locate first"
        call: Callable[[Any], object] = reading.variants()[variant]
        chain, batches = first, 0
        while (wait_ns := start_ns - time.monotonic_ns()) > 0:
            if wait_ns > 2_000_000:
                time.sleep(wait_ns / 2e9)
        start_s = time.monotonic()
        read_s = 0.0  # without the time to compute keys
        while time.monotonic() - start_s < duration_s:
            arguments = reading.prepare(chain % reading.work.chains)
            before = time.perf_counter()
            value = call(arguments)
            read_s += time.perf_counter() - before
            reading.check(variant, value)
            chain += 1
            batches += 1
        return {"bytes": batches * reading.work.chain_bytes, "seconds": read_s}

    def read_on(self, work: dict[str, Any]) -> dict[str, Any]:
        """Get and check random chains until the next request. Return the number of reads, misses and errors, the
        longest get, and the last reason for a miss or an error."""
        job = BenchWork(**work)
        cache, content = self._store.cache(job.layout), Content(job.layout.page_bytes)
        out = np.zeros((job.pages, job.layout.page_bytes), np.uint8)
        random = np.random.default_rng(len(work))
        answer: dict[str, Any] = {"reads": 0, "pages_missed": 0, "errors": 0, "longest_s": 0.0, "last_reason": ""}
        while not select.select([sys.stdin], [], [], 0)[0]:
            keys = job.keys(cache, int(random.integers(job.chains)))
            before = time.perf_counter()
            try:
                match = cache.get(keys, out)
            except NodeUnavailable as error:
                answer["errors"] += 1
                answer["last_reason"] = str(error)
                continue
            answer["longest_s"] = max(answer["longest_s"], time.perf_counter() - before)
            content.check(out[: match.pages], keys.hashes[: match.pages], "a read during the restart")
            answer["reads"] += 1
            answer["pages_missed"] += job.pages - match.pages
            answer["last_reason"] = match.reason or answer["last_reason"]
        return answer


def main() -> None:
    """Serve requests from standard input until it ends."""
    with connect(sys.argv[1]) as store:
        verbs = PeerVerbs(store)
        for line in iter(sys.stdin.readline, ""):
            request = json.loads(line)
            verb: Callable[..., dict[str, Any]] | None = getattr(verbs, request.pop("do"), None)
            if verb is None:  # the request that ends ``read_on``
                continue
            try:
                answer = verb(**request)
            except KVStoreError as error:
                answer = {"failed": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
