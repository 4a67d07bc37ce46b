"""What a caller says of itself, and of requests of other callers, changes nothing that is not its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import numpy as np
import pytest

from engine.api.wire import tokens_bytes
from engine.client import EngineClient
from engine.conductor.grpc_api import NAME_MAX
from engine.model.request import PRIORITY_MAX, Admitted, Done, Request, Sampling
from kvstore.client.remote.admin import document
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied
from kvstore.model.layout import Layout
from kvstore.pb import conductor_pb2 as pb
from kvstore.pb import conductor_pb2_grpc, engine_pb2, store_pb2
from tests.helpers.api import TENANTS, identities_file
from tests.helpers.conductors import ANSWER_S, ConductorProcess
from tests.helpers.engines.processes import EngineProcess, prompt, spawn_engine
from tests.helpers.nursery import of_engines
from tests.helpers.processes import CLI, Machine, wait_until

DENIED, INVALID = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT


class Caller:
    """Calls a conductor with the token of one identity."""

    def __init__(self, address: str, name: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = conductor_pb2_grpc.ConductorStub(self._channel)
        self._metadata = (("authorization", f"Bearer {name}-token"),)

    def close(self) -> None:
        self._channel.close()

    def route(self, salt: str, **how: Any) -> dict[str, Any]:
        return document(self._stub.Route(self._request(salt, **how), timeout=ANSWER_S, metadata=self._metadata))

    def submit(self, salt: str, **how: Any) -> list[pb.RouteReply]:
        return list(self._stub.Submit(self._request(salt, **how), timeout=ANSWER_S, metadata=self._metadata))

    def status(self) -> dict[str, Any]:
        return document(self._stub.Status(store_pb2.Empty(), timeout=ANSWER_S, metadata=self._metadata))

    def _request(self, salt: str, request_id: str = "", **how: Any) -> pb.RouteRequest:
        sampling = engine_pb2.Sampling(max_tokens=2, ignore_eos=True)
        tokens = tokens_bytes(prompt(20))
        request = engine_pb2.SubmitRequest(request_id=request_id, tokens=tokens, sampling=sampling, salt=salt)
        return pb.RouteRequest(request=request, **how)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, ConductorProcess]]:
    """An engine and a conductor that ask callers who they are. Tenants a and b, and op, an operator."""
    machine = Machine(tmp_path_factory.mktemp("trust"))
    try:
        identities = identities_file(machine.logs, TENANTS)
        engine = spawn_engine(machine, identities=identities, role="both").wait_ready()
        command = [*CLI, "conductor", "--engine", engine.address, "--identities", identities]
        conductor = machine.start(ConductorProcess, "conductor", command, of_engines(), KVSTORE_TOKEN="op-token")
        conductor.wait_ready()
        with closing(Caller(conductor.address, "op")) as op:
            wait_until("the engine is known", lambda: len(op.status()["engines"]) == 1)
        yield engine, conductor
    finally:
        machine.close()


def refused(call: Any, *args: Any, **how: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call(*args, **how)
    return error.value.code(), error.value.details()


def test_a_tenant_counts_as_itself_whatever_it_says(served: tuple[EngineProcess, ConductorProcess]) -> None:
    _, conductor = served
    with closing(Caller(conductor.address, "a")) as a, closing(Caller(conductor.address, "op")) as op:
        for named in ("b", "made-up", "A", "a ", "op", "x" * 2 * NAME_MAX):
            for call in (a.route, a.submit):
                assert refused(call, "a", tenant=named)[0] is DENIED, named
        assert [a.route("a", **how)["request"]["tenant"] for how in ({}, {"tenant": "a"})] == ["a", "a"]
        routed = op.status()["routed"]
        assert a.submit("a", tenant="a")[-1].HasField("finished")
        assert op.status()["routed"] == routed + 1, "what was refused was sent to no engine"


def test_an_operator_speaks_for_any_tenant(served: tuple[EngineProcess, ConductorProcess]) -> None:
    _, conductor = served
    with closing(Caller(conductor.address, "op")) as op:
        assert [op.route("a", **how)["request"]["tenant"] for how in ({}, {"tenant": "a"})] == ["op", "a"]
        assert op.submit("a", tenant="a")[-1].HasField("finished")
        code, said = refused(op.route, "a", tenant="x" * (NAME_MAX + 1))
        assert code is INVALID and said.startswith("tenant: "), said


def test_salts_priorities_and_ids_are_checked(served: tuple[EngineProcess, ConductorProcess]) -> None:
    _, conductor = served
    with closing(Caller(conductor.address, "a")) as a:
        for call in (a.route, a.submit):
            assert refused(call, "b")[0] is DENIED, "the salt is another tenant's"
            for priority in (PRIORITY_MAX + 1, -PRIORITY_MAX - 1, 2**31 - 1, -(2**31)):
                code, said = refused(call, "a", priority=priority)
                assert code is INVALID and said.startswith("priority: "), said
        for request_id in ("same", "same", "é" * 64, "\U0001f600" * 32):  # an engine's limit is in bytes
            assert a.submit("a", request_id=request_id, priority=PRIORITY_MAX)[-1].HasField("finished")


def test_an_id_gives_no_access_to_requests_of_another_caller(
    served: tuple[EngineProcess, ConductorProcess],
) -> None:
    """An engine denies everything about a request of another caller, and in the same words where there is none."""
    engine, _ = served
    with (
        EngineClient(engine.address, token="a-token") as a,
        EngineClient(engine.address, token="b-token") as b,
        EngineClient(engine.address, token="op-token") as op,
    ):
        layout, sampling = Layout(**op.status()["layout"]["fields"]), Sampling(max_tokens=1)
        request = Request(id="of-a", tokens=prompt(40), salt="a", sampling=sampling)
        events = list(a.prefill(request, layout, hold_s=60.0))
        assert isinstance(events[0], Admitted)
        b._data_port = a._data_port  # a stranger finds the port without the call that tells it
        for name in ("of-a", "of-nobody"):
            said = set()
            for ask in (b.cancel, b.release, lambda name: list(b.pull(name))):
                with pytest.raises(PermissionDenied) as denied:
                    ask(name)
                said.add(str(denied.value).replace(name, "ID"))
            assert len(said) == 1 and "of-" not in said.pop()
        with pytest.raises(PermissionDenied):
            list(b.prefill(Request(id="of-b", tokens=request.tokens, salt="a"), layout))
        for order in (lambda: b.set_role("prefill"), lambda: b.drain(), lambda: b.migrate("of-a", "127.0.0.1:1")):
            with pytest.raises(PermissionDenied):
                order()
        assert op.status()["prefills_held"] == 1, "what b asked for has changed nothing"
        assert a.release("of-a")
        with pytest.raises(KVStoreError):
            a.release("of-a")


def test_callers_may_choose_the_same_ids(served: tuple[EngineProcess, ConductorProcess]) -> None:
    """An id of one caller tells nothing to another one, which may use the same."""
    engine, _ = served
    with (
        EngineClient(engine.address, token="a-token") as a,
        EngineClient(engine.address, token="b-token") as b,
        EngineClient(engine.address, token="op-token") as op,
    ):
        long = {"max_tokens": 2000, "ignore_eos": True}
        salts = {a: "a", b: "b"}
        running = {each: each.stream(prompt(20), id="job", salt=salt, **long) for each, salt in salts.items()}
        for stream in running.values():
            next(stream)
        with pytest.raises(InvalidRequest, match="^request_id: job is in use"):
            a.generate(prompt(20), id="job", salt="a", max_tokens=2)
        assert a.cancel("job")
        assert list(running[a])[-1].reason == "cancelled"  # type: ignore[union-attr]
        with pytest.raises(PermissionDenied):
            a.cancel("job")
        next(running[b])  # it goes on
        assert op.cancel("job") and not op.cancel("never")
        assert list(running[b])[-1].reason == "cancelled"  # type: ignore[union-attr]
        layout = Layout(**op.status()["layout"]["fields"])
        for caller, salt, tokens in ((a, "a", 40), (b, "b", 70)):
            request = Request(id="kv", tokens=prompt(tokens), salt=salt, sampling=Sampling(max_tokens=1))
            done = list(caller.prefill(request, layout, hold_s=60.0))[-1]
            assert isinstance(done, Done) and done.handoff.request_id == "kv"
        assert (taken(a), taken(b)) == (40, 70), "each its own"
        assert a.release("kv")
        wait_until("the engine's thread has ended the first", lambda: op.status()["prefills_held"] == 1)
        assert taken(b) == 70
        with pytest.raises(KVStoreError):
            taken(a)
        assert op.release("kv")
        wait_until("the engine's thread has ended both", lambda: op.status()["prefills_held"] == 0)


def taken(caller: EngineClient) -> int:
    """The tokens of its prefill, all of which it pulls."""
    tokens = 0
    for piece in caller.pull("kv"):
        piece.data.read_into([np.empty(piece.data.nbytes, np.uint8)])
        tokens += piece.tokens * (piece.layer == 0)
    return tokens
