"""Gets are counted without an end: a word that is nearly full is carried, on every way by which pages are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest

from kvstore.client.local.cache import LocalCache
from kvstore.client.local.node import LocalNode
from kvstore.tier.counters import ONE_GET, SessionCounters
from tests.helpers.content import SMALL, chain
from tests.helpers.processes import Machine, put
from tests.transfer.test_reading import Reading

PAGES, TIMES = 5, 4
FULL = (1 << 64) - 2 * ONE_GET  # one more get fits, a second one does not


@dataclass
class Way:
    """A way to read the pages, and where it is counted."""

    get: Callable[[], int]
    counters: Callable[[], SessionCounters]


@pytest.fixture(params=["get", "get with a miss", "get_shard", "READ"])
def way(request: pytest.FixtureRequest, machine: Machine) -> Iterator[Way]:
    machine.serve("n", dram="16MiB")
    store = machine.connect("n")
    put(store, 1, PAGES)
    cache = store.cache(SMALL)
    assert isinstance(cache, LocalCache)
    node, keys = cache.node, chain(1, PAGES)
    if request.param == "READ":
        remote = Reading(machine, "n")
        with closing(remote):
            yield Way(lambda: remote.pull(keys)[0].pages, lambda: mapped_counters(remote.node))
        return
    ways = {
        "get": lambda: cache.get(keys).pages,
        "get with a miss": lambda: cache.get(chain(1, PAGES + 1)).pages,
        "get_shard": lambda: cache.get_shard(keys, rank=0, ranks=2).pages,
    }
    yield Way(ways[request.param], lambda: mapped_counters(node))


def mapped_counters(node: LocalNode) -> SessionCounters:
    mapped = node.mapped()
    assert mapped is not None
    return mapped.counters


def test_a_word_that_is_nearly_full_is_carried(way: Way) -> None:
    assert way.get() == PAGES  # the row is there
    counters = way.counters()
    row = counters.row(SMALL.page_bytes, SMALL.page_tokens)
    counters.words[row] = FULL
    for _ in range(TIMES):
        assert way.get() == PAGES
    counts = counters.tally().counts
    assert counts["gets"] >= FULL // ONE_GET + TIMES and counts["hit_dram"] >= TIMES * PAGES
    assert counters.words[row] < 1 << 63 and not np.any(np.frombuffer(counters.words, np.int64) < 0)
