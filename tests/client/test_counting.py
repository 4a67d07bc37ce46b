"""Gets are counted without an end: a word that is nearly full is carried, however a client reads pages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvstore.client.local.cache import LocalCache
from kvstore.shm.counters import ONE_GET
from tests.helpers.content import SMALL, chain
from tests.helpers.processes import Machine, put

PAGES, TIMES = 5, 4
FULL = (1 << 64) - 2 * ONE_GET  # one more get fits, a second one does not
WAYS: dict[str, Callable[[LocalCache], int]] = {
    "get": lambda cache: cache.get(chain(1, PAGES)).pages,
    "get with a miss": lambda cache: cache.get(chain(1, PAGES + 1)).pages,
    "get_shard": lambda cache: cache.get_shard(chain(1, PAGES), rank=0, ranks=2).pages,
}


@pytest.mark.parametrize("get", WAYS.values(), ids=WAYS.keys())
def test_a_word_that_is_nearly_full_is_carried(machine: Machine, get: Callable[[LocalCache], int]) -> None:
    machine.serve("n", dram="16MiB")
    store = machine.connect("n")
    put(store, 1, PAGES)
    cache = store.cache(SMALL)
    assert isinstance(cache, LocalCache) and get(cache) == PAGES  # the row is there
    mapped = cache.node.mapped()
    assert mapped is not None
    counters, row = mapped.counters, mapped.counters.row(SMALL.page_bytes, SMALL.page_tokens)
    counters.words[row] = FULL
    for _ in range(TIMES):
        assert get(cache) == PAGES
    counts = counters.tally().counts
    assert counts["gets"] >= FULL // ONE_GET + TIMES and counts["hit_dram"] >= TIMES * PAGES
    assert not np.any(np.frombuffer(counters.words, np.int64) < 0), "the word is small again"
