"""Conductors as real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np

from engine.api.wire import tokens_bytes
from kvstore.client.remote.admin import document
from kvstore.pb import conductor_pb2 as pb
from kvstore.pb import conductor_pb2_grpc, engine_pb2, store_pb2
from tests.helpers.engines.processes import EngineProcess
from tests.helpers.nursery import of_engines
from tests.helpers.processes import CLI, Machine, wait_until

ANSWER_S = 60.0


class ConductorProcess(EngineProcess):
    """``kvstore conductor``. It says where it listens as an engine does."""


def serve_conductor(machine: Machine, env: dict[str, str] | None = None, **flags: str) -> ConductorProcess:
    """Start one, and wait until it is ready."""
    command = [*CLI, "conductor"]
    for flag, value in flags.items():
        for one in value.split(" "):
            command += [f"--{flag.replace('_', '-')}", one]
    process = machine.start(ConductorProcess, "conductor", command, of_engines(), **(env or {}))
    process.wait_ready()
    return process


class ConductorClient:
    """Stubs of one connection."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self.stub = conductor_pb2_grpc.ConductorStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        return document(self.stub.Status(store_pb2.Empty(), timeout=ANSWER_S))

    def knows(self, engines: int, nodes: int = 0) -> dict[str, Any]:
        """Wait until it knows so many."""

        def known() -> dict[str, Any] | None:
            status = self.status()
            return status if (len(status["engines"]), len(status["nodes"])) == (engines, nodes) else None

        found = wait_until(f"{engines} engines and {nodes} nodes are known", known)
        assert isinstance(found, dict)
        return found

    def route(self, tokens: np.ndarray, **how: Any) -> dict[str, Any]:
        """Where it would go."""
        return document(self.stub.Route(_request(tokens, **how), timeout=ANSWER_S))

    def submit(self, tokens: np.ndarray, **how: Any) -> Any:
        """The stream of an answer."""
        return self.stub.Submit(_request(tokens, **how), timeout=ANSWER_S)

    def answer(self, tokens: np.ndarray, **how: Any) -> ConductorAnswer:
        """A whole answer."""
        return ConductorAnswer(list(self.submit(tokens, **how)))


class ConductorAnswer:
    """What came."""

    def __init__(self, replies: list[pb.RouteReply]) -> None:
        self.routes = [document(each.route) for each in replies if each.HasField("route")]
        self.tokens = [token.id for each in replies for token in each.tokens.tokens]
        self.indices = [token.index for each in replies for token in each.tokens.tokens]
        self.finished = replies[-1].finished


def _request(tokens: np.ndarray, max_tokens: int = 8, **how: Any) -> pb.RouteRequest:
    sampling = engine_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True)
    request = engine_pb2.SubmitRequest(tokens=tokens_bytes(tokens), sampling=sampling)
    return pb.RouteRequest(request=request, **how)


@contextmanager
def client_of(conductor: ConductorProcess) -> Iterator[ConductorClient]:
    """A connection to it."""
    client = ConductorClient(conductor.address)
    try:
        yield client
    finally:
        client.close()
