"""What is kept of other nodes' pages; and that whatever needs them in this machine's memory gets them there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Store
from kvstore.client.local.cache import LocalCache
from kvstore.client.local.peer_caching import ArrivingPages, FrameReservation
from kvstore.client.prefix_cache import PrefixCache
from tests.helpers.content import SMALL, chain, contents, first_wrong, layer_of, prompt
from tests.helpers.pool import PAGES, Pool, patient
from tests.helpers.processes import Machine, check_laws, put, wait_until

LATE_S = 30.0


@pytest.fixture
def pool(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    patient(monkeypatch)
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
    wait_until("they are kept", lambda: pool.get("c", 1, PAGES - 20).nodes == {})
    assert here(pool, 1) == PAGES - 20
    assert pool.get("c", 1).nodes == {"a": 20}
    wait_until("the rest is kept", lambda: pool.get("c", 1).nodes == {})
    assert here(pool, 1) == PAGES
    check_laws(pool.stores["c"])


def leased(cache: PrefixCache, seed: int) -> int:
    """How many pages a lease gets; on a slow machine it may be some of them."""
    with cache.lease(prompt(seed, PAGES)) as lease:
        return lease.match.pages


def test_a_lease_a_reader_and_a_shard_have_pages_of_other_nodes(pool: Pool) -> None:
    for seed in (1, 2, 3, 4):
        put(pool.stores["a"], seed, PAGES)
        put(pool.stores["c"], seed, 7)
        pool.known("c", seed)
    cache = pool.stores["c"].cache(SMALL)
    wait_until("a lease brings them here", lambda: leased(cache, 1) == PAGES)
    with cache.lease(prompt(1, PAGES)) as lease:
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


@pytest.mark.parametrize("sessions", [1, 3])
def test_programs_that_want_the_same_pages_bring_them_once(pool: Pool, sessions: int) -> None:
    """Threads of one session, and sessions as processes have. On a slow machine a lease may get them in parts."""
    put(pool.stores["a"], 1, PAGES)
    pool.known("c", 1)
    wrong: list[str] = []
    full: list[int] = []

    def lease(store: Store) -> None:
        late_s = time.monotonic() + LATE_S
        while time.monotonic() < late_s:
            with store.cache(SMALL).lease(prompt(1, PAGES)) as held:
                pages = held.match.pages
                if pages and (how := first_wrong(np.stack(held.pages), contents(chain(1, PAGES))[:pages])):
                    wrong.append(how)
            if pages == PAGES:
                full.append(pages)
                return

    stores = [pool.machine.connect("c") for _ in range(sessions)]
    threads = [threading.Thread(target=lease, args=(stores[i % sessions],)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LATE_S)
    assert not wrong and full == [PAGES] * 6
    # What its data server has sent. A page comes twice only where its first transfer was too slow to be waited for.
    assert PAGES <= pool.stores["a"].stats()["clients"]["hit_dram"] < 2 * PAGES


def test_a_program_that_stands_still_while_it_brings_pages(pool: Pool) -> None:
    """Others wait a moment for it, and then read them for themselves; once it is gone they get their place."""
    put(pool.stores["a"], 1, PAGES)
    pool.known("c", 1)
    still = pool.machine.connect("c")
    held, reader = still.cache(SMALL), pool.stores["c"].cache(SMALL)
    assert isinstance(held, LocalCache) and isinstance(reader, LocalCache)
    held.put(prompt(2, 1), contents(chain(2, 1)), wait=True)  # names the root
    mapped = held.node.writable()
    arrival = ArrivingPages(held.node, mapped, mapped.in_pool(chain(1, PAGES)), held.frame_class, LATE_S)
    assert arrival.reserve() is FrameReservation.OURS and len(arrival.rows) == PAGES
    assert pool.get("c", 1).nodes == {"a": PAGES}
    assert pool.get("c", 1).nodes == {"a": PAGES}, "worth keeping, but not ours to bring"
    assert here(pool, 1) == 0
    still.close()
    wait_until("they are kept", lambda: pool.get("c", 1).nodes == {} and here(pool, 1) == PAGES)
    check_laws(pool.stores["c"])


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
