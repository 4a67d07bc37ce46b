"""Hints of a request go with its pages into the pool, whichever engine stores them, and eviction follows them."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

import kvstore
from engine.client import EngineClient
from kvstore import Retention, Store
from kvstore.errors import InvalidRequest
from kvstore.pb import engine_pb2 as pb
from kvstore.pb import engine_pb2_grpc, store_pb2
from kvstore.wire.grpc import from_rpc
from tests.helpers.engines.processes import serve_engine
from tests.helpers.engines.tokens import Lab, check_answer, prompt, within
from tests.helpers.processes import Machine

PAGE = 16
SYSTEM = 10 * PAGE
KEPT = (Retention(3, stop=SYSTEM), Retention(-2, start=SYSTEM))


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch) as here:
        yield here


def priorities(store: Store) -> list[int]:
    """Of the stored pages, from the front of their chain on; one chain is stored."""
    pages = store.pages()["pages"]
    return [page["priority"] for page in sorted(pages, key=lambda page: page["position"])]


@pytest.mark.parametrize("handed", [False, True])
def test_pages_keep_the_hints_of_their_request(lab: Lab, handed: bool) -> None:
    """Those that are computed here, or by a prefill engine for this one; those of the answer as well."""
    store = lab.store()
    one = lab.pair("tiny-llama", store)[1] if handed else lab.engine("tiny-llama", store)
    check_answer(lab.ask(one, prompt(1, SYSTEM + 40), 2 * PAGE, retention=KEPT))
    within("all full pages are stored", lambda: len(store.pages()["pages"]) == (SYSTEM + 40 + 2 * PAGE - 1) // PAGE)
    assert priorities(store) == [3] * 10 + [-2] * 4


def test_hints_come_over_grpc_and_from_the_command_line(machine: Machine) -> None:
    machine.serve("n", dram="16MiB")
    engine = serve_engine(machine, node="n")
    with kvstore.connect("n") as store, engine.client() as client:
        client.generate(prompt(1, 40), max_tokens=1, retention=Retention(2, ttl_s=300))
        within("its pages are stored", lambda: len(store.pages()["pages"]) == 2)
        assert [(page["priority"], page["ttl_s"]) for page in store.pages()["pages"]] == [(2, 512)] * 2
        store.evict(percent=100.0)
        words = "a prompt of some forty letters, or more."
        flags = ("--max-tokens", "1", "--priority", "-3", "--ttl", "8")
        asked = machine.run("engine", "ask", "--at", engine.address, words, *flags)
        assert asked.returncode == 0, asked.stderr
        within("its pages are stored", lambda: len(store.pages()["pages"]) == 2)
        assert [(page["priority"], page["ttl_s"]) for page in store.pages()["pages"]] == [(-3, 8)] * 2
        refuses(engine.address, client)


def refuses(address: str, client: EngineClient) -> None:
    """Hints that make no sense are refused by their field, before anything is computed."""
    with pytest.raises(InvalidRequest, match="retention"):
        client.generate("x", retention=3)
    with pytest.raises(InvalidRequest, match="retention"):
        client.generate("x", retention=[Retention(1)] * 65)
    with grpc.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        for field, hint in (
            ("priority", {"priority": 4}),
            ("ttl_s", {"ttl_s": 5.0}),
            ("stop", {"start": 5, "stop": 5}),
        ):
            wrong = pb.SubmitRequest(text="x", retention=[store_pb2.Retention(**hint)])
            with pytest.raises(grpc.RpcError) as refused:
                list(stub.Submit(wrong, timeout=60))
            found = from_rpc(refused.value)
            assert isinstance(found, InvalidRequest) and found.field == field
