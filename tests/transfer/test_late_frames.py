"""Frames of our own node in which bytes of another one may still land: nobody gets them before that is over."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.client.local import peer_caching
from kvstore.client.local.cache import LocalCache
from kvstore.client.local.peer_caching import ArrivingPages, FrameReservation
from kvstore.model.replica import FrameClass
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.processes import Machine, frames, wait_until

PAGES, CAME = 12, 3
SHAPE = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)


@pytest.mark.parametrize("killed", [False, True])
def test_frames_that_were_left_are_nobodys_until_they_are_landed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Also past the reservation's deadline, and when the daemon was killed and started again meanwhile."""
    monkeypatch.setattr(peer_caching, "TTL_S", 0.5)
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    cache = store.cache(SMALL)
    assert isinstance(cache, LocalCache)
    mapped, keys = cache.node.writable(), chain(1, PAGES)
    with mapped.channel.copies:
        arrival = ArrivingPages(cache.node, mapped, mapped.in_pool(keys), SHAPE, 10.0)
        assert arrival.reserve() is FrameReservation.OURS
        for row, data in zip(arrival.rows, contents(keys)[:CAME], strict=False):
            row[:] = data
        places = list(arrival.rows)
        landed = arrival.leave()
        arrival.seal(CAME)
    assert cache.lookup(keys).pages == CAME
    wait_until("the deadline has passed", lambda: frames(store).get("quarantined", 0) == PAGES - CAME)
    if killed:
        daemon.kill()
        machine.serve("n")
        assert frames(store)["quarantined"] == PAGES - CAME
    other = chain(2, 1000)
    cache.put(other, contents(other), wait=True)  # far more than there are frames
    for place in places[CAME:]:
        place[:] = 0xEE  # late bytes
    found = cache.get(other)
    assert found.data is not None
    assert np.array_equal(found.data[: found.pages], contents(other)[: found.pages]) and found.pages
    landed()
    wait_until("they are free again", lambda: frames(store).get("quarantined", 0) == 0)
