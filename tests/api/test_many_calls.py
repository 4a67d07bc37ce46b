"""Many calls on one connection: a client that keeps to the node's bound waits, and is never refused for it."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import grpc.aio

from kvstore.pb import store_pb2 as pb
from kvstore.pb import store_pb2_grpc
from tests.helpers import api
from tests.helpers.api import Client
from tests.helpers.half_open import HalfOpenCalls, call_headers
from tests.helpers.processes import Machine, wait_until

Code = grpc.StatusCode

CALLS_AT_ONCE, EACH = 200, 10
RPCS_MAX = 512
STREAMS = RPCS_MAX // 16
CALL_S = 60.0


async def call_often(address: str) -> Counter[Code]:
    """So many callers on one connection, each with one call after the other."""
    ended: Counter[Code] = Counter()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        stub = store_pb2_grpc.StoreStub(channel)

        async def caller() -> None:
            for _ in range(EACH):
                try:
                    await stub.ContainsObjects(pb.ObjectKeys(keys=["k"]), timeout=CALL_S)
                    ended[Code.OK] += 1
                except grpc.aio.AioRpcError as error:
                    ended[error.code()] += 1

        await asyncio.gather(*(caller() for _ in range(CALLS_AT_ONCE)))
    return ended


def test_calls_of_one_connection_wait_for_each_other(machine: Machine) -> None:
    daemon, address = api.serve_api(machine)
    assert asyncio.run(call_often(address)) == Counter({Code.OK: CALLS_AT_ONCE * EACH})
    assert daemon.terminate() == 0


def test_calls_of_a_connection_beyond_the_bound_take_no_place(machine: Machine) -> None:
    config = machine.logs / "node.toml"
    config.write_text(f"[node]\nrpcs_max = {RPCS_MAX}\n")
    daemon, address = api.serve_api(machine, config=str(config))
    host, _, port = address.rpartition(":")
    connection, ended = HalfOpenCalls(host, int(port)), Counter[str]()

    def ended_now() -> int:
        connection.flush()
        ended.update(connection.poll())
        return ended.total()

    wait_until("the node has said its bound", lambda: (ended_now(), connection.streams_max == STREAMS)[1])
    for _ in range(4 * STREAMS):
        connection.open(call_headers("/kvstore.v1.Store/Lookup", CALL_S))
    wait_until("what is too much is refused", lambda: ended_now() >= 3 * STREAMS)
    assert ended == Counter({"": 3 * STREAMS}), "reset before they were calls"
    client = Client(address)
    assert client.code("About", pb.AboutRequest()) is Code.OK
    client.close()
    connection.close()
    assert daemon.terminate() == 0
