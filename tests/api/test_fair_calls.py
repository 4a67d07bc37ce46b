"""Two tenants at full load over gRPC: each has from 40 % to 60 % of the running requests, and of their bytes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.pb import store_pb2 as pb
from tests.helpers import api
from tests.helpers.api import Client
from tests.helpers.processes import Machine, wait_until

CALLS = 24  # of each tenant: more than there is room for


class Streams:
    """PutObject of one tenant, many times: each says what it will send, and sends nothing of it."""

    def __init__(self, address: str, tenant: str) -> None:
        self.over = threading.Event()
        self.clients = [Client(address, f"{tenant}-token") for _ in range(CALLS // 8)]
        self.calls: list[Any] = [
            client.stub.PutObject.future(self._messages(tenant, number), timeout=60, metadata=client.metadata)
            for client in self.clients
            for number in range(8)
        ]

    def _messages(self, tenant: str, number: int) -> Iterator[pb.PutObjectRequest]:
        begin = pb.PutObjectBegin(key=f"k{number}", salt=tenant, size_bytes=1000)
        yield pb.PutObjectRequest(begin=begin)
        self.over.wait(60)

    @property
    def refused(self) -> int:
        return sum(each.done() and each.code() is grpc.StatusCode.RESOURCE_EXHAUSTED for each in self.calls)

    @property
    def running(self) -> int:
        return sum(not each.done() for each in self.calls)

    def close(self) -> None:
        self.over.set()
        for client in self.clients:
            client.close()


@contextmanager
def streams(address: str, tenant: str, most: int) -> Iterator[Streams]:
    """Once all but ``most`` at least were refused."""
    made = Streams(address, tenant)
    try:
        wait_until("the rest is refused", lambda: made.running <= most and made.refused == CALLS - made.running)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        pytest.param("rpcs_max = 16\nrpc_buffers = 134217728", 8, id="requests"),
        pytest.param("rpcs_max = 128\nrpc_buffers = 50331648", 6, id="bytes"),  # of which each call takes 4 MiB
    ],
)
def test_two_tenants_have_equal_parts_of_what_calls_hold(
    machine: Machine, tmp_path: Path, limits: str, most: int
) -> None:
    _, address = api.serve_with(machine, limits, identities=api.identities_file(tmp_path), dram="16MiB")
    with streams(address, "a", most) as a, streams(address, "b", most) as b:
        counts = Counter({"a": a.running, "b": b.running})
        assert 0.4 <= counts["a"] / counts.total() <= 0.6, counts
        assert counts.total() > most
