"""EngineServer over an engine that computes nothing: one tenant's calls beside another's, and what is checked first."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from engine.api import pulling
from engine.api.metrics import EngineTally
from engine.api.service import EngineServer
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.model.piece import LocalData, Piece, checksum_of
from engine.model.request import Admitted, Cancel, Done, Event, Failed, HandOff, PrefillEvent, Request
from engine.text.tokenizer import ByteTokenizer
from kvstore import Layout
from kvstore.cluster.data_connection import DataConnection
from kvstore.errors import InvalidRequest, PermissionDenied, TooManyCalls, Unauthenticated
from kvstore.limits import NEWCOMERS_PART, UNKNOWN_PART
from kvstore.pb import engine_pb2 as pb
from kvstore.pb import engine_pb2_grpc
from kvstore.wire.data import FrameKind, Hello
from kvstore.wire.grpc import layout_message
from tests.helpers import api
from tests.helpers.processes import wait_until

LAYOUT = Layout(model="none", layers=1, kv_heads=1, head_dim=8, page_tokens=16)
KV = np.frombuffer(b"piece", np.uint8)
PULLS_MAX = 16
PULL_S = 60.0  # nothing below takes that long: who waits so long has not got its turn


class Counted(ByteTokenizer):
    """Says how often it was asked to encode."""

    encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        return super().encode(text)


class Still:
    """A model and an engine in one. Prefills are done at once; a pull of ``held-...`` waits until it is let go."""

    def __init__(self) -> None:
        self.tokenizer = Counted()
        self.go = threading.Event()
        self.pulling: Counter[str] = Counter()
        self.longest: Counter[str] = Counter()
        self._mutex = threading.Lock()

    def layouts(self, page_tokens: int) -> tuple[Layout, ...]:
        return (LAYOUT,)

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Cancel:
        emit(Failed(InvalidRequest("tokens", "this engine answers nothing")))
        return lambda: None

    def prefill(self, request: Request, layout: Layout, hold_s: float, emit: Callable[[PrefillEvent], None]) -> Cancel:
        done = HandOff(request_id=request.id, pages=(), stored=0, tail_tokens=0, first_token=1, generated=1)
        emit(Admitted(prompt_tokens=1, cached_tokens={}, lossy=False))
        emit(Done(done))
        return lambda: None

    def pull(
        self, request_id: str, token_start: int, codec: str, timeout_s: float, beat: Callable[[], None]
    ) -> Generator[Piece, None, None]:
        request_id = request_id.partition("~")[0]  # as its caller names it
        with self._mutex:
            self.pulling[request_id] += 1
            self.longest[request_id] = max(self.longest[request_id], self.pulling[request_id])
        try:
            assert not request_id.startswith("held") or self.go.wait(timeout_s)
            yield Piece(0, token_start, 1, LocalData(KV), checksum_of([KV]))
        finally:
            with self._mutex:
                self.pulling[request_id] -= 1


@pytest.fixture
def engine() -> Still:
    return Still()


@pytest.fixture
def address(engine: Still, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(pulling, "PULLS_MAX", PULLS_MAX)
    identities = Path(api.identities_file(tmp_path))
    config = EngineConfig(model="none", identities=identities, listen=("127.0.0.1:0",))
    server = EngineServer(config, engine, engine, EngineTally())  # type: ignore[arg-type]
    server.start()
    try:
        yield server.addresses[0]
    finally:
        engine.go.set()
        server.stop()


@pytest.fixture
def stub(address: str) -> Iterator[Any]:
    with grpc.insecure_channel(address) as channel:
        yield engine_pb2_grpc.EngineStub(channel)


def who(name: str) -> tuple[tuple[str, str], ...]:
    """This caller."""
    return (("authorization", f"Bearer {name}-token"),)


def prefill(stub: Any, name: str, request_id: str, salt: str | None = None, **prompt: Any) -> None:
    """Have a prompt computed that can be pulled then."""
    request = pb.SubmitRequest(request_id=request_id, salt=name if salt is None else salt, **prompt)
    message = pb.PrefillRequest(request=request, layout=layout_message(LAYOUT))
    list(stub.Prefill(message, PULL_S, who(name)))


def pull(client: EngineClient, request_id: str) -> bytes:
    """The KV."""
    data = np.empty(len(KV), np.uint8)
    for piece in client.pull(request_id, timeout_s=PULL_S):
        piece.data.read_into([data])
        assert checksum_of([data]) == piece.checksum
    return data.tobytes()


@pytest.fixture
def clients(address: str) -> Iterator[dict[str, EngineClient]]:
    with EngineClient(address, token="a-token") as a, EngineClient(address, token="b-token") as b:
        yield {"a": a, "b": b}


def computed(client: EngineClient, request_id: str, salt: str) -> None:
    list(client.prefill(Request(id=request_id, tokens=np.ones(1, np.uint32), salt=salt), LAYOUT))


def test_one_tenant_s_pulls_leave_connections_to_others(clients: dict[str, EngineClient], engine: Still) -> None:
    known = PULLS_MAX - PULLS_MAX // UNKNOWN_PART
    share = (known - known // NEWCOMERS_PART) // 2
    for name, request_id in (("a", "held-a"), ("b", "held-b"), ("b", "b")):
        computed(clients[name], request_id, name)
    with ThreadPoolExecutor(PULLS_MAX) as callers:
        pulls = [callers.submit(pull, clients["a"], "held-a") for _ in range(share)]
        try:
            wait_until("one tenant pulls as much as it may", lambda: engine.pulling["held-a"] == share)
            with pytest.raises(TooManyCalls):
                pull(clients["a"], "held-a")
            assert pull(clients["b"], "b") == KV.tobytes()
            pulls += [callers.submit(pull, clients["b"], "held-b") for _ in range(3)]
            wait_until("another's pulls go on", lambda: engine.pulling["held-b"] == 3)
            assert engine.longest["held-a"] == share and not any(pull.done() for pull in pulls)
        finally:
            engine.go.set()
        assert [pull.result(PULL_S) for pull in pulls] == [KV.tobytes()] * len(pulls)
    wait_until("all have ended", lambda: not engine.pulling.total())


def test_nobody_pulls_the_prefill_of_another(clients: dict[str, EngineClient], engine: Still, address: str) -> None:
    computed(clients["b"], "theirs", "b")
    computed(clients["a"], "own", "a")
    for request_id in ("theirs", "unknown"):
        with pytest.raises(PermissionDenied):
            pull(clients["a"], request_id)
    with EngineClient(address, token="nobody") as stranger:
        stranger._data_port = clients["a"]._data_port
        with pytest.raises(Unauthenticated):
            pull(stranger, "own")
    assert not engine.pulling and pull(clients["a"], "own") == KV.tobytes()


@pytest.mark.parametrize("timeout_s", ["NaN", "-1", "0", "true", '"1"'])
def test_a_pull_without_a_time_out_is_refused(clients: dict[str, EngineClient], engine: Still, timeout_s: str) -> None:
    computed(clients["a"], "own", "a")
    host, deadline_s = "127.0.0.1", time.monotonic() + PULL_S
    address = f"{host}:{clients['a']._data_port}"
    body = f'{{"request_id": "own", "token_start": 0, "codec": "", "timeout_s": {timeout_s}}}'.encode()
    opened = DataConnection.open(address, Hello(token="a-token"), deadline_s=deadline_s)
    with closing(opened) as connection, pytest.raises(InvalidRequest, match="timeout_s|pull"):
        connection.call(FrameKind.PULL, body, reply=FrameKind.PIECE, deadline_s=deadline_s)
    assert not engine.pulling


def test_nobody_has_a_prompt_tokenised_under_the_salt_of_another(stub: Any, engine: Still) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        prefill(stub, "a", "theirs", "b", text="a prompt")
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Submit(pb.SubmitRequest(text="a prompt", salt="b"), PULL_S, who("a")))
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert engine.tokenizer.encoded == 0
    prefill(stub, "a", "own", text="a prompt")
    with pytest.raises(grpc.RpcError) as failed:
        list(stub.Submit(pb.SubmitRequest(text="a prompt", salt="a"), PULL_S, who("a")))
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.tokenizer.encoded == 2
