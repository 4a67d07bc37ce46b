"""Frames whose extent is gone: a put that is sent again after a restart is told so, and is no malformed request."""

from __future__ import annotations

import numpy as np

from kvstore.client.local.put import LocalPut
from kvstore.model.replica import Address, Status
from kvstore.wire.control import Op, pack_addresses
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.inside import node_of
from tests.helpers.processes import Machine


def test_two_frames_of_an_extent_that_is_gone_are_stale(machine: Machine) -> None:
    machine.serve("n", dram="8MiB")
    store = machine.connect("n")
    cache = store.cache(SMALL)
    keys = chain(1, 2)
    cache.put(keys, contents(keys))  # so that the node knows the session and the class
    mapped = node_of(cache).writable()
    put = LocalPut(mapped, chain(2, 2), cache.frame_class)
    gone = [Address(4711, 0, 9), Address(4711, 1, 10)]
    body = (bytes(16), pack_addresses(gone), *chain(2, 2).columns(0, 2))
    reply = mapped.exchange(Op.SEAL_GRANTED, count=2, a=put._pool.class_number, body=body)
    assert list(bytes(reply.body[:2])) == [int(Status.STALE)] * 2
    assert cache.get(keys, np.zeros((2, SMALL.page_bytes), np.uint8)).pages == 2
