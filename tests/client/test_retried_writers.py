"""A writer that is tried again beside the one it stands for: same process, group and rank. They never share frames."""

from __future__ import annotations

import select

import numpy as np
import pytest

from kvstore import PrefixCache
from kvstore.client.writer import Writer
from kvstore.errors import OutOfSpace
from kvstore.wire.control import Op, pack_json
from tests.helpers.content import SMALL, Pages, chain, contents, layer_of
from tests.helpers.inside import node_of
from tests.helpers.processes import Machine, check_laws, check_right, evict_all, put, wait_settled, wait_until

PAGES = 16
POOL_PAGES = (4 << 20) // SMALL.page_bytes
KEYS = chain(1, PAGES)
GARBAGE = np.full((PAGES, SMALL.page_bytes), 0xEE, np.uint8)


def write(writer: Writer, pages: Pages) -> None:
    for layer in range(SMALL.layers):
        writer.write_layer(layer, layer_of(pages, layer))


def retried(cache: PrefixCache) -> Writer | None:
    """A second writer, entered; None where it got nothing to write into."""
    second = cache.writer(KEYS, group="request")
    try:
        second.__enter__()
    except OutOfSpace:
        return None
    return second


def test_what_a_client_sent_before_it_died_is_done(machine: Machine) -> None:
    """Also where it had not read a reply: the kernel tells the node of that first, and of its last request then."""
    daemon = machine.serve("n", dram="4MiB")
    store, other = machine.connect("n"), machine.connect("n")
    assert put(other, 1, PAGES) == PAGES
    channel = node_of(store).writable().channel
    channel.request(Op.ADMIN, body=(pack_json({"call": "stats"}),))
    assert select.select([channel._socket], [], [], 60.0)[0], "no reply"
    daemon.stop()
    channel.request(Op.ADMIN, body=(pack_json({"call": "evict", "pages": PAGES}),))
    channel._socket.close()  # as the kernel does for a process that is killed
    daemon.resume()
    wait_until("it is done", lambda: check_right(other, {1: PAGES}) == 0)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("end", ["seal", "revoke"])
def test_a_retry_gets_no_frame_of_the_first(end: str, restarted: bool, machine: Machine) -> None:
    """Nor what the first one sealed, nor what another tenant has in its place, is ever overwritten by it."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    cache = store.cache(SMALL)
    first = cache.writer(KEYS, group="request")
    first.__enter__()
    write(first, contents(KEYS))
    if restarted:  # the records name sessions, not writers
        daemon.kill()
        machine.serve("n")
    second = retried(cache)
    if end == "seal":
        first.__exit__(None, None, None)
    else:
        first.__exit__(KeyError, KeyError(), None)
    victims = {} if end == "seal" else dict.fromkeys(range(100, 100 + POOL_PAGES // PAGES), PAGES)
    stored = sum(put(store, seed, PAGES, salt="victim") for seed in victims)
    if second is not None:
        write(second, GARBAGE)
    if end == "seal":
        found = cache.get(KEYS)
        assert found.data is not None and np.array_equal(found.data, contents(KEYS)), "sealed, and written into"
    assert check_right(store, victims, salt="victim") >= stored // 2
    assert second is None, "it was given what the first one may still write into"
    evict_all(store)
    with cache.writer(KEYS, group="request") as third:  # the first one is done with
        write(third, contents(KEYS))
    assert third.sealed == PAGES
    wait_settled(store)
    check_laws(store)


def test_a_retry_takes_what_the_first_does_not_write(machine: Machine) -> None:
    """Pages before the first one's, other ranks and other groups are free; a writer that was dropped claims nothing."""
    machine.serve("n", dram="4MiB")
    cache = machine.connect("n").cache(SMALL)
    first = cache.writer(KEYS, group="request", ranks=2)
    first.__enter__()
    with pytest.raises(OutOfSpace, match="another writer of this process"):
        cache.writer(KEYS, group="request", ranks=2).__enter__()
    other_rank = cache.writer(KEYS, group="request", rank=1, ranks=2)
    assert other_rank.__enter__().pages_new == list(range(PAGES))
    other_group = cache.writer(KEYS, group="another", ranks=2)
    assert other_group.__enter__().pages_new == list(range(PAGES))
    first._give_back(first._raw)
    del first  # never left
    with pytest.raises(KeyError), cache.writer(KEYS, group="request", ranks=2) as again:
        assert again.pages_new == list(range(PAGES))
        raise KeyError
    for writer in (other_rank, other_group):
        writer.__exit__(KeyError, KeyError(), None)
