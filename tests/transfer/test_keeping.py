"""What is kept of other nodes' pages; and that whatever needs them in this machine's memory gets them there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.local.elsewhere import BroughtBefore
from tests.helpers.content import SMALL, chain, contents, first_wrong, layer_of, prompt
from tests.helpers.pool import PAGES, Pool
from tests.helpers.processes import Machine, check_laws, put, wait_until

LATE_S = 30.0


@pytest.fixture
def pool(machine: Machine, tmp_path: Path) -> Iterator[Pool]:
    yield Pool(machine, f"file:{tmp_path / 'catalog'}")


def here(pool: Pool, seed: int) -> int:
    """How many pages of that chain node c has itself."""
    match = pool.lookup("c", seed)
    return match.pages - sum(match.nodes.values())


def test_pages_that_are_brought_twice_stay(pool: Pool) -> None:
    put(pool.stores["a"], 1, PAGES)
    pool.known("c", 1)
    assert pool.get("c", 1).nodes == {"a": PAGES}
    assert here(pool, 1) == 0, "once is not enough"
    assert pool.get("c", 1, PAGES - 20).nodes == {"a": PAGES - 20}
    wait_until("they are kept", lambda: here(pool, 1) == PAGES - 20)
    assert pool.get("c", 1).nodes == {"a": 20}
    wait_until("the rest is kept", lambda: here(pool, 1) == PAGES)
    assert pool.get("c", 1).nodes == {}
    check_laws(pool.stores["c"])


def test_a_lease_a_reader_and_a_shard_have_pages_of_other_nodes(pool: Pool) -> None:
    for seed in (1, 2, 3, 4):
        put(pool.stores["a"], seed, PAGES)
        put(pool.stores["c"], seed, 7)
        pool.known("c", seed)
    cache = pool.stores["c"].cache(SMALL)
    with cache.lease(prompt(1, PAGES)) as lease:
        assert lease.match.pages == PAGES
        assert first_wrong(np.stack(lease.pages), contents(chain(1, PAGES))) == ""
    reader = cache.reader(prompt(2, PAGES))
    for layer in range(SMALL.layers):
        found = np.zeros((PAGES, SMALL.layer_bytes), np.uint8)
        reader.read_layer(layer, found)
        assert first_wrong(found, layer_of(contents(chain(2, PAGES)), layer)) == ""
    match = cache.get_shard(prompt(3, PAGES), rank=1, ranks=2)
    assert match.pages == PAGES
    assert cache.prefetch(prompt(4, PAGES)).pages == PAGES
    assert [here(pool, seed) for seed in (1, 2, 3, 4)] == [PAGES] * 4
    check_laws(pool.stores["c"])


def test_several_threads_that_want_the_same_pages_bring_them_once(pool: Pool) -> None:
    put(pool.stores["a"], 1, PAGES)
    pool.known("c", 1)
    cache, found = pool.stores["c"].cache(SMALL), []

    def lease() -> None:
        with cache.lease(prompt(1, PAGES)) as held:
            found.append((held.match.pages, first_wrong(np.stack(held.pages), contents(chain(1, PAGES)))))

    threads = [threading.Thread(target=lease) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LATE_S)
    assert found == [(PAGES, "")] * 6
    assert pool.stores["a"].stats()["clients"]["hit_dram"] == PAGES, "what its data server has sent"


def test_a_full_node_keeps_what_it_has(pool: Pool) -> None:
    """Copies take no place from pages that are leased; what is brought comes all the same."""
    room = 32 * 1024 * 1024 // SMALL.page_bytes
    put(pool.stores["c"], 9, room)
    held = pool.stores["c"].cache(SMALL).lease(prompt(9, room))
    with held as lease:
        put(pool.stores["a"], 1, PAGES)
        pool.known("c", 1)
        for _ in range(3):
            assert pool.get("c", 1).pages == PAGES
        assert len(lease.pages) > room // 2
        lease.check()
    check_laws(pool.stores["c"])


def test_what_was_brought_before_is_a_prefix() -> None:
    seen = BroughtBefore()
    a, b, c, d = (bytes([i]) * 16 for i in range(4))
    assert seen.leading([a, b]) == 0
    assert seen.leading([a, b, c]) == 2
    assert seen.leading([d, a]) == 0
    assert seen.leading([d, a, c]) == 3
