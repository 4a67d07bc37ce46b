"""Write groups over gRPC: all callers are one session to the node; none may write into a frame that is another's."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.pb import store_pb2 as pb
from kvstore.wire.grpc import digest_of
from tests.helpers.api import Client, identities_file, pages_message, serve_api
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.processes import Machine, check_laws, put, wait_until

PAGES = 8
KEYS = chain(1, PAGES, SMALL, "a")


def reserve(rank: int, ranks: int, ttl_ms: int = 60_000) -> Any:
    pages = pages_message(KEYS, salt="a")
    return pb.ReserveRequest(pages=pages, write_group="g", rank=rank, ranks=ranks, ttl_ms=ttl_ms)


def write(reservation: bytes, rank: int, ranks: int, data: np.ndarray[Any, Any]) -> list[Any]:
    """A rank's heads of every layer of all pages."""
    width = SMALL.kv_heads // ranks * SMALL.head_bytes
    sent = [pb.WriteRequest(begin=pb.WriteBegin(reservation=reservation))]
    for page in range(PAGES):
        for layer in range(SMALL.layers):
            offset = layer * SMALL.layer_bytes + rank * width
            part = data[page, offset : offset + width].tobytes()
            sent.append(pb.WriteRequest(data=part, data_xxh3=digest_of(memoryview(part)), page=page, offset=offset))
    return sent


def test_a_rank_that_gives_up_leaves_nobody_a_frame_that_others_get(machine: Machine) -> None:
    _, address = serve_api(machine, dram="4MiB", identities=identities_file(machine.logs))
    a, store = Client(address, "a-token"), machine.connect("api")
    for give_up in ("revoke", "deadline"):
        short = 60_000 if give_up == "revoke" else 200
        first = a.call("Reserve", reserve(0, 2, short)).reservation
        second = a.call("Reserve", reserve(1, 2)).reservation
        if give_up == "revoke":
            a.call("Revoke", pb.ReservationRequest(reservation=first))
        wait_until("frames are kept from others", lambda: frames(store)["quarantined"] == PAGES)
        victims = {seed: put(store, seed, PAGES, salt="victim") for seed in range(100, 180)}  # all of DRAM, and more
        a.call("Write", write(second, 1, 2, np.full((PAGES, SMALL.page_bytes), 0xEE, np.uint8)))
        for seed in victims:
            keys = chain(seed, PAGES, SMALL, "victim")
            found = store.cache(SMALL, salt="victim").get(keys)
            assert found.data is not None and np.array_equal(found.data, contents(keys)[: found.pages])
        assert a.call("Seal", pb.ReservationRequest(reservation=second)).new_pages == 0
        wait_until("all frames are back", lambda: frames(store)["quarantined"] == 0)
    check_laws(store)
    a.close()


def frames(store: Any) -> dict[str, int]:
    return dict(store.stats()["tiers"]["dram"]["frames"])
