"""What an engine says of itself is read with bounds: nonsense is refused with its name, and conductors go on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct

from engine.api.wire import SERVICE
from engine.conductor.shell.reports import engine_about, layout_of, load_report, model_path
from kvstore.errors import VersionMismatch
from tests.helpers.conductors import client_of, serve_conductor
from tests.helpers.processes import Machine, wait_until

STATUS: dict[str, Any] = {
    "role": "both",
    "draining": False,
    "model": "tiny",
    "model_path": None,
    "layout": {
        "fingerprint": "0123456789abcdef" * 2,
        "page_tokens": 16,
        "page_bytes": 4096,
        "fields": {"model": "tiny", "layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "float32", "page_tokens": 16},
    },
    "context_tokens_max": 2048,
    "frames": {"total": 100, "tokens_max": 0, "kv_tokens_max": 1600, "kv_tokens": 0},
    "requests": {"waiting": 0, "loading": 0, "computing": 0, "decoding": 0},
    "batch_max": 8,
    "chunk_tokens": 64,
    "speeds": {"step_ms": 1.5, "prefill_tokens_per_s": 1000.0},
    "role_order": {"revision": 0, "number": 0},
    "pool": {"node": None},
}
NUMBERS = [
    ("layout", "page_tokens"),
    ("layout", "page_bytes"),
    ("frames", "tokens_max"),
    ("frames", "kv_tokens_max"),
    ("frames", "kv_tokens"),
    ("requests", "waiting"),
    ("requests", "decoding"),
    ("speeds", "step_ms"),
    ("speeds", "prefill_tokens_per_s"),
    ("batch_max",),
    ("chunk_tokens",),
    ("context_tokens_max",),
]
TEXTS = [("role",), ("model",), ("model_path",), ("layout", "fingerprint"), ("pool", "node")]
PARTS = [("layout",), ("frames",), ("requests",), ("speeds",), ("pool",), ("layout", "fields")]
NO_NUMBERS = [-1, 1e300, float("nan"), float("inf"), "7", True, [], {}]
NO_TEXTS = [7, True, [], {}, "x" * 10_000]
NO_PARTS = [0, "x", [], None]
NONSENSE = [
    *((where, value) for where in NUMBERS for value in NO_NUMBERS),
    *((where, value) for where in TEXTS for value in NO_TEXTS),
    *((where, value) for where in PARTS for value in NO_PARTS),
    *(((*where,), 0.5) for where in NUMBERS if where[0] != "speeds"),
    *((where, 0) for where in (("layout", "page_tokens"), ("layout", "page_bytes"), ("batch_max",))),
    (("draining",), "no"),
    (("layout", "fingerprint"), "xy" * 16),
    (("layout", "fields", "page_tokens"), 17),
    (("layout", "fields", "page_tokens"), -1),
    (("layout", "fields", "layers"), "many"),
    (("layout", "fields", "unknown" * 100), 1),
]


def said(where: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The status with another value there."""
    status = copy.deepcopy(STATUS)
    part = status
    for name in where[:-1]:
        part = part[name]
    part[where[-1]] = value
    return status


def read(status: Any) -> None:
    """All that a conductor reads."""
    engine_about("e", "there:1", status, "", "")
    load_report("there:1", status)
    layout_of("there:1", status)
    model_path("there:1", status)


def test_a_status_that_makes_sense_is_taken() -> None:
    read(STATUS)
    about, report = engine_about("e", "there:1", STATUS, "n", "h"), load_report("there:1", STATUS)
    assert (about.kv_bytes, about.page_tokens, about.node, report.step_s) == (256, 16, "n", 0.0015)


@pytest.mark.parametrize(("where", "value"), NONSENSE, ids=str)
def test_a_value_that_makes_no_sense_is_named(where: tuple[str, ...], value: Any) -> None:
    with pytest.raises(VersionMismatch) as refused:
        read(said(where, value))
    assert str(refused.value).startswith("there:1: ") and any(name in str(refused.value) for name in where)
    assert len(str(refused.value)) < 300


@contextmanager
def engine_that_says(status: dict[str, Any]) -> Iterator[str]:
    """A gRPC server of an engine's service, of which a conductor asks for its status alone; its address."""
    struct = Struct()
    struct.update(status)
    answer = grpc.unary_unary_rpc_method_handler(lambda message, context: struct.SerializeToString())
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Status": answer}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def test_a_conductor_refuses_an_engine_whose_status_makes_no_sense_and_goes_on(machine: Machine) -> None:
    with (
        engine_that_says(STATUS) as good,
        engine_that_says(said(("layout", "page_tokens"), 0)) as empty,
        engine_that_says(said(("speeds",), "x")) as text,
    ):
        conductor = serve_conductor(machine, listen="127.0.0.1:0", engine=f"{good} {empty} {text}")
        with client_of(conductor) as client:
            refused = wait_until("both are refused", lambda: len(found := client.status()["refused"]) == 2 and found)
            assert "page_tokens" in refused[empty] and "speeds" in refused[text]
            assert list(client.knows(1)["engines"]) == [good]
    assert conductor.alive
    assert f"{empty} is refused" in Path(conductor.errors).read_text()
