"""EngineServer over an engine that computes nothing: one tenant's calls beside another's, and what is checked first."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.api.metrics import EngineTally
from engine.api.server import EngineServer
from engine.api.service import PULLS_MAX
from engine.api.wire import pieces_of
from engine.config import EngineConfig
from engine.model.request import Cancel, Done, Event, Failed, HandOff, Piece, PrefillEvent, Request
from engine.text.tokenizer import ByteTokenizer
from kvstore import Layout
from kvstore.errors import InvalidRequest
from kvstore.pb import engine_pb2 as pb
from kvstore.pb import engine_pb2_grpc
from kvstore.rpc.messages import layout_message
from tests.helpers import api
from tests.helpers.processes import wait_until

LAYOUT = Layout(model="none", layers=1, kv_heads=1, head_dim=8, page_tokens=16)
PULL_S = 60.0  # nothing below takes that long: who waits so long has not got its turn
SHORT_S = 0.5


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

    def layout(self, page_tokens: int) -> Layout:
        return LAYOUT

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Cancel:
        emit(Failed(InvalidRequest("tokens", "this engine answers nothing")))
        return lambda: None

    def prefill(self, request: Request, layout: Layout, hold_s: float, emit: Callable[[PrefillEvent], None]) -> Cancel:
        done = HandOff(request_id=request.id, pages=(), stored=0, tail_tokens=0, first_token=1, generated=1)
        emit(Done(done))
        return lambda: None

    def pull(self, request_id: str, token_start: int, codec: str, timeout_s: float) -> Iterator[Piece]:
        with self._mutex:
            self.pulling[request_id] += 1
            self.longest[request_id] = max(self.longest[request_id], self.pulling[request_id])
        try:
            assert not request_id.startswith("held") or self.go.wait(timeout_s)
            yield Piece(0, token_start, 1, b"piece", 7)
        finally:
            with self._mutex:
                self.pulling[request_id] -= 1


@pytest.fixture
def engine() -> Still:
    return Still()


@pytest.fixture
def stub(engine: Still, tmp_path: Path) -> Iterator[Any]:
    identities = Path(api.identities_file(tmp_path))
    config = EngineConfig(model="none", identities=identities, listen=("127.0.0.1:0",))
    server = EngineServer(config, engine, engine, EngineTally())  # type: ignore[arg-type]
    server.start()
    try:
        with grpc.insecure_channel(server.addresses[0]) as channel:
            yield engine_pb2_grpc.EngineStub(channel)
    finally:
        engine.go.set()
        server.stop()


def who(name: str) -> tuple[tuple[str, str], ...]:
    """This caller."""
    return (("authorization", f"Bearer {name}-token"),)


def prefill(stub: Any, name: str, request_id: str, salt: str | None = None, **prompt: Any) -> None:
    """Have a prompt computed that can be pulled then."""
    request = pb.SubmitRequest(request_id=request_id, salt=name if salt is None else salt, **prompt)
    list(stub.Prefill(pb.PrefillRequest(request=request, layout=layout_message(LAYOUT)), PULL_S, who(name)))


def pull(stub: Any, name: str, request_id: str, timeout_s: float = PULL_S) -> bytes | grpc.StatusCode:
    """The KV; or the code that the call failed with."""
    try:
        replies = stub.Pull(pb.PullRequest(request_id=request_id), timeout_s, who(name))
        return b"".join(bytes(piece.data) for piece in pieces_of(reply.SerializeToString() for reply in replies))
    except grpc.RpcError as error:
        return error.code()


def test_pulls_take_turns_and_one_tenant_leaves_threads_to_others(stub: Any, engine: Still) -> None:
    prefill(stub, "a", "held-a", tokens=b"abcd")
    prefill(stub, "b", "held-b", tokens=b"abcd")
    prefill(stub, "b", "b", tokens=b"abcd")
    with ThreadPoolExecutor(2 * PULLS_MAX) as callers:
        pulls = [callers.submit(pull, stub, "a", "held-a") for _ in range(PULLS_MAX)]
        try:
            wait_until("one tenant pulls as much as it may", lambda: engine.pulling["held-a"] >= PULLS_MAX // 2)
            short = callers.submit(pull, stub, "a", "held-a", SHORT_S)
            assert short.result(PULL_S) in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
            assert pull(stub, "b", "b") == b"piece", "one tenant has every thread"
            pulls += [callers.submit(pull, stub, "b", "held-b") for _ in range(4)]
            wait_until("another's pulls have threads", lambda: engine.pulling["held-b"] == 4)
            assert engine.longest["held-a"] == PULLS_MAX // 2 and not any(pull.done() for pull in pulls)
        finally:
            engine.go.set()
        assert [pull.result(PULL_S) for pull in pulls] == [b"piece"] * len(pulls), "a pull was refused"
    assert engine.longest["held-a"] <= 3 * PULLS_MAX // 4
    assert not engine.pulling.total()


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
