"""An engine as a process: what it answers, what it refuses, and that it goes on serving."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from engine.api.metrics import METRICS
from engine.api.wire import SERVICE
from engine.client import EngineClient
from engine.model.request import Finished, RoleOrder, Token
from kvstore import Layout
from kvstore.errors import (
    InvalidRequest,
    NodeUnavailable,
    PermissionDenied,
    TooManyCalls,
    Unauthenticated,
)
from kvstore.pb import engine_pb2 as pb
from kvstore.pb import engine_pb2_grpc
from tests.helpers import api
from tests.helpers.engines.processes import EngineProcess, prompt, serve_engine, spawn_engine, wait_idle
from tests.helpers.processes import Machine
from tests.helpers.scraping import Scrape, fetch

REQUESTS_MAX = 4
LONG = {"max_tokens": 4000, "ignore_eos": True}  # some seconds


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine of role both, for tests that leave it as it was."""
    here = Machine(tmp_path_factory.mktemp("engine"))
    try:
        yield serve_engine(here, http="127.0.0.1:0", requests_max=str(REQUESTS_MAX))
    finally:
        here.close()


@pytest.fixture
def engine(shared: EngineProcess) -> Iterator[EngineClient]:
    with shared.client() as client:
        yield client
        wait_idle(client)


@pytest.fixture
def stub(shared: EngineProcess) -> Iterator[Any]:
    with grpc.insecure_channel(shared.address) as channel:
        yield engine_pb2_grpc.EngineStub(channel)


def layout_of(model: str = "tiny-llama", page_tokens: int = 16) -> Layout:
    from engine.compute.models import load_model

    return load_model(model).layout(page_tokens)


# --- answers --------------------------------------------------------------------------------------------------------


def test_an_answer_is_what_transformers_gives(engine: EngineClient) -> None:
    import torch

    from engine.compute.models import load_model

    torch.set_num_threads(1)
    model = load_model("tiny-llama")
    tokens = prompt(70)
    ids = torch.tensor(tokens.astype(np.int64))[None]
    whole = {"attention_mask": torch.ones_like(ids)}  # or it is guessed, from where the padding's id is
    plain = model.net.generate(ids, **whole, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    answer = engine.generate(tokens, max_tokens=24, ignore_eos=True)
    assert list(answer.tokens) == plain[0, 70:].tolist()
    assert answer.reason == "length"


def test_text_and_tokens_are_the_same_prompt(engine: EngineClient, stub: Any) -> None:
    text = "Once upon a time, na\u00efvely"
    answer = engine.generate(text, max_tokens=12, ignore_eos=True)
    by_tokens = engine.generate(list(text.encode()), max_tokens=12, ignore_eos=True)
    assert (by_tokens.tokens, by_tokens.text) == (answer.tokens, answer.text)
    assert answer.usage.prompt_tokens == len(text.encode()) and answer.usage.completion_tokens == 12
    assert answer.usage.ttft_ms > 0 and answer.usage.tpot_ms > 0
    request = pb.SubmitRequest(token_ids=text.encode(), sampling=pb.Sampling(max_tokens=12, ignore_eos=True))
    replies = list(stub.Submit(request, timeout=60))
    assert [reply.WhichOneof("event") for reply in replies[:1] + replies[-1:]] == ["accepted", "finished"]
    assert replies[0].accepted.prompt_tokens == len(text.encode()) and not replies[0].accepted.tokens
    found = [token.id for reply in replies for token in reply.tokens.tokens]
    assert tuple(found) == answer.tokens


def test_a_stream_comes_token_by_token(engine: EngineClient) -> None:
    stream = engine.stream(prompt(20), max_tokens=1500, ignore_eos=True)
    events = [next(stream)]
    assert any(engine.status()["requests"].values()), "the first token waited for the others"
    events += stream
    assert [event.index for event in events[:-1] if isinstance(event, Token)] == list(range(1500))
    end = events[-1]
    assert isinstance(end, Finished) and end.reason == "length" and end.usage.completion_tokens == 1500


# --- ends -----------------------------------------------------------------------------------------------------------


def test_cancelling_by_id_ends_the_stream(shared: EngineProcess, engine: EngineClient) -> None:
    stream = engine.stream(prompt(20), id="to-be-cancelled", **LONG)
    next(stream)
    with shared.client() as other:
        assert other.cancel("to-be-cancelled")
    *_, last = stream
    assert isinstance(last, Finished) and last.reason == "cancelled"
    assert 0 < last.usage.completion_tokens < 4000
    assert not engine.cancel("to-be-cancelled")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "tokens"),
    ({"prompt": ""}, "tokens"),
    ({"prompt": [1, 300]}, "tokens"),
    ({"prompt": [1, -1]}, "tokens"),
    ({"prompt": [0.5]}, "tokens"),
    ({"prompt": [1] * 9000}, "tokens"),
    ({"prompt": [1] * 8000, "max_tokens": 500}, "tokens"),
    ({"max_tokens": 0}, "sampling.max_tokens"),
    ({"temperature": -1.0}, "sampling.temperature"),
    ({"temperature": float("nan")}, "sampling.temperature"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"stop": ("",)}, "sampling.stop"),
    ({"handoff": "soon"}, "handoff"),
    ({"salt": "s" * 2000}, "salt"),
    ({"id": "i" * 200}, "request_id"),
    ({"wishes": 3}, "wishes"),
]


@pytest.mark.parametrize(("how", "field"), BAD)
def test_bad_input_is_refused_by_name(engine: EngineClient, how: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.generate(**{"prompt": "fine", **how})
    assert refused.value.field == field, refused.value
    assert engine.generate("fine", max_tokens=2, ignore_eos=True).usage.completion_tokens == 2


@pytest.mark.parametrize("name", [method.name for method in pb.DESCRIPTOR.services_by_name["Engine"].methods])
def test_garbage_is_the_caller_s_mistake(shared: EngineProcess, engine: EngineClient, name: str) -> None:
    method = pb.DESCRIPTOR.services_by_name["Engine"].methods_by_name[name]
    chance = random.Random(name)
    request = message_factory.GetMessageClass(method.input_type)
    with grpc.insecure_channel(shared.address) as channel:
        make = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = make(f"/{SERVICE}/{name}")
        for attempt in range(30):
            message = chance.randbytes(chance.randrange(1, 60))
            if attempt % 2:  # right in its form, wrong in what it says
                filled = request()
                for field in request.DESCRIPTOR.fields:
                    if field.type == field.TYPE_STRING and not field.is_repeated and chance.random() < 0.5:
                        setattr(filled, field.name, chance.choice(["", "x", "\0", "\U0001f600" * 50]))
                    elif field.type in (field.TYPE_UINT32, field.TYPE_UINT64) and not field.is_repeated:
                        setattr(filled, field.name, chance.choice([0, 1, 7, (1 << 32) - 1]))
                message = filled.SerializeToString()
            if name == "Drain":
                message = b"\xff" + message  # a good one would drain the engine for the other tests
            try:
                found = call(message, timeout=60)
                list(found) if method.server_streaming else found
            except grpc.RpcError as error:
                assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), (message, error)
    engine.set_role("both")


# --- the engine -----------------------------------------------------------------------------------------------------


def test_status_health_and_reflection(shared: EngineProcess, engine: EngineClient) -> None:
    status = engine.status()
    assert (status["role"], status["model"], status["device"]) == ("both", "tiny-llama", "cpu")
    layout = layout_of()
    told = {"fingerprint": layout.fingerprint.hex(), "page_tokens": 16, "page_bytes": layout.page_bytes}
    assert status["layout"] == {**told, "fields": asdict(layout)}
    with grpc.insecure_channel(shared.address) as channel:
        asked = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60)
        assert asked.status == health_pb2.HealthCheckResponse.SERVING
        assert SERVICE in ProtoReflectionDescriptorDatabase(channel).get_services()
    assert fetch(shared.http, "/healthz")[0] == fetch(shared.http, "/readyz")[0] == 200


def test_metrics_count_what_happens(shared: EngineProcess, engine: EngineClient) -> None:
    before = Scrape(shared.http)
    tokens = prompt(40, seed=40)
    engine.generate(tokens, max_tokens=8, ignore_eos=True)
    with pytest.raises(InvalidRequest):
        engine.generate([], max_tokens=8)
    with pytest.raises(InvalidRequest):
        engine.generate([999], max_tokens=8)
    now = Scrape(shared.http)

    def grew(name: str, **labels: str) -> float:
        return now(f"kvstore_engine_{name}", **labels) - before(f"kvstore_engine_{name}", **labels)

    assert grew("requests_total", outcome="length") == 1
    assert grew("requests_total", outcome="invalid") == 2
    assert (grew("prompt_tokens_total"), grew("completion_tokens_total"), grew("computed_tokens_total")) == (40, 8, 40)
    engine.generate(tokens, max_tokens=1, ignore_eos=True)
    found = Scrape(shared.http)("kvstore_engine_cached_tokens_total", tier="hbm")
    assert found - before("kvstore_engine_cached_tokens_total", tier="hbm") == 32
    assert (
        now("kvstore_engine_frames", state="kept") >= 2 and now("kvstore_engine_kept_pages_total", event="evicted") == 0
    )
    assert grew("ttft_seconds_count") == grew("gap_seconds_count") == grew("tpot_seconds_count") == 1
    assert grew("step_seconds_count", kind="decode") == 7 and grew("step_seconds_count", kind="prefill") >= 1
    assert grew("grpc_calls_total", method="Submit", code="OK") == 1
    assert now("kvstore_engine_frames", state="free") > 0 == now("kvstore_engine_frames", state="used")
    assert now("kvstore_engine_role", role="both") == 1
    names = {family.name for family in now.families}
    assert names == {about.name for about in METRICS}


def test_orders_of_leaders_set_a_role_in_their_order_alone(engine: EngineClient) -> None:
    """A later leader, or a later order of the same one. An operator may do so at any time."""
    try:
        engine.set_role("prefill", RoleOrder(5, 2))
        status = engine.status()
        told = status["role"], status["role_set_by"], status["role_order"]
        assert told == ("prefill", "leader", {"revision": 5, "number": 2})
        for order in (RoleOrder(5, 2), RoleOrder(5, 1), RoleOrder(4, 99)):
            with pytest.raises(InvalidRequest, match="^revision: order 2 of revision 5 was carried out before"):
                engine.set_role("both", order)
        with pytest.raises(InvalidRequest, match="^revision: "):
            engine.set_role("both", RoleOrder(1 << 60, 1))
        engine.set_role("decode", RoleOrder(6, 1))
        engine.set_role("both")
        status = engine.status()
        assert (status["role"], status["role_set_by"]) == ("both", "operator")
        assert status["role_order"] == {"revision": 6, "number": 1}, "no earlier order holds after that"
        engine.drain(timeout_s=0.1)
        with pytest.raises(NodeUnavailable, match="is being drained"):
            engine.set_role("prefill", RoleOrder(7, 1))
        assert engine.status()["draining"], "no leader ends a drain"
    finally:
        engine.set_role("both")


def test_too_many_requests_are_refused_with_a_hint(engine: EngineClient) -> None:
    streams = [engine.stream(prompt(20), **LONG) for _ in range(REQUESTS_MAX)]
    for stream in streams:
        next(stream)
    with pytest.raises(TooManyCalls) as refused:
        engine.generate("one more", max_tokens=2)
    assert refused.value.retry_after_s > 0
    for stream in streams:
        stream.close()


# --- starting -------------------------------------------------------------------------------------------------------


def test_identities_guard_salts_and_requests(machine: Machine, tmp_path: Path) -> None:
    certificates = api.Certificates(tmp_path)
    tls = {"tls_cert": certificates.path("server.pem"), "tls_key": certificates.path("server.key")}
    listen = {"KVSTORE_ENGINE_LISTEN": f"0.0.0.0:0,unix:{tmp_path}/engine.sock"}
    identities = api.identities_file(tmp_path)
    engine = spawn_engine(machine, env=listen, identities=identities, **tls).wait_ready()
    address = engine.address.replace("0.0.0.0", "127.0.0.1")

    def client(name: str) -> EngineClient:
        return EngineClient(address, token=f"{name}-token", tls_ca=certificates.path("ca.pem"))

    with client("nobody") as stranger, pytest.raises(Unauthenticated):
        stranger.generate("who?", max_tokens=2)
    with EngineClient(f"unix:{tmp_path}/engine.sock") as local:  # its permissions have let us in
        assert local.generate("here", salt="any", max_tokens=2, ignore_eos=True).reason == "length"
    with client("a") as a, client("b") as b, client("op") as op:
        assert a.generate("mine", salt="a", max_tokens=2, ignore_eos=True).reason == "length"
        with pytest.raises(PermissionDenied):
            a.generate("theirs", salt="b", max_tokens=2)
        with pytest.raises(PermissionDenied):
            a.generate("fetched", salt="a", max_tokens=2, prefill=["127.0.0.1:1"])
        with pytest.raises(PermissionDenied):
            a.set_role("prefill")
        running = a.stream(prompt(20), id="a-s", salt="a", **LONG)
        next(running)
        with pytest.raises(PermissionDenied):
            b.cancel("a-s")
        assert op.cancel("a-s")
        *_, last = running
        assert isinstance(last, Finished) and last.reason == "cancelled"
