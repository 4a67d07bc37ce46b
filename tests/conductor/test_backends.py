"""Servers that speak OpenAI's API as engines of a conductor: how they answer, and all that they can do wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.conductor.backends.link import BackendLink
from engine.conductor.backends.settings import parse_backends
from engine.conductor.links import EngineLink
from engine.conductor.shell.conductor import Conductor
from engine.model.request import AnswerTokens, Request, Sampling
from kvstore.errors import InvalidRequest, NodeUnavailable, Unavailable
from tests.helpers.api import Certificates
from tests.helpers.backend import MODEL, BackendProcess, continued, spawn_backend
from tests.helpers.conducting import answered, asking, conducting, until
from tests.helpers.processes import Machine

PROMPT = list(range(1, 101))  # six pages and a part of one
CALL_S = 30.0


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def engines(conductor: Conductor) -> dict[str, Any]:
    found: dict[str, Any] = conductor.status()["engines"]
    return found


def test_unknown_parameters_go_to_engines_of_others_and_not_to_ours(machine: Machine) -> None:
    async def test() -> None:
        backend = spawn_backend(machine)
        async with conducting([backend.words()]) as conductor:
            assert [each.foreign for each in conductor.models()] == [True]
            extra = {"top_k": 5, "max_tokens": 99, "prompt": "of another"}
            assert (await answered(conductor, asking(PROMPT, MODEL, extra=extra))).ids == continued(PROMPT, 8)
            (body,) = backend.seen()["asked"]
            assert body["top_k"] == 5 and body["max_tokens"] == 8 and body["prompt"] == PROMPT
            refused = EngineLink("127.0.0.1:1").refusal(asking(PROMPT, MODEL, extra=extra), is_started=False)
            assert refused is not None and refused.field == "top_k"

    run(test())


async def told_of(conductor: Conductor, backend: BackendProcess, **ask: Any) -> dict[str, Any]:
    """What that engine would do with the prompt."""
    told = await conductor.explain(asking(PROMPT, MODEL, **ask))
    return next(each for each in told["candidates"] if each["engine"] == backend.url)


async def own_tokens(conductor: Conductor, backend: BackendProcess, **ask: Any) -> int:
    """Of the prompt, what that engine has as far as the conductor knows."""
    return int((await told_of(conductor, backend, **ask))["own_tokens"])


async def knows(conductor: Conductor, backend: BackendProcess, count: int, **ask: Any) -> None:
    """Wait until it knows that the engine has so many tokens of the prompt."""
    while await own_tokens(conductor, backend, **ask) != count:
        await asyncio.sleep(0.01)


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("maps", [True, False])
def test_an_answer_with_its_tokens_and_what_was_cached(machine: Machine, maps: bool) -> None:
    """And its events, as maps or arrays, tell the conductor what the engine has."""

    async def test() -> None:
        backend = spawn_backend(machine, maps=maps, block=32)
        async with conducting([backend.words()]) as conductor:
            assert [(each.name, each.path, each.context_tokens) for each in conductor.models()] == [(MODEL, None, 4096)]
            first = await answered(conductor, asking(PROMPT, MODEL))
            assert first.ids == continued(PROMPT, 8) and first.text == "".join(f" {each}" for each in first.ids)
            assert first.end is not None and first.end.reason == "length" and first.cached == 0
            assert first.end.usage.prompt_tokens == 100 and first.end.usage.completion_tokens == 8
            await knows(conductor, backend, 96)
            again = await answered(conductor, asking(PROMPT, MODEL))
            assert again.ids == first.ids and again.cached == 96 and again.routes[0]["cached_tokens"] == 96
            assert engines(conductor)[backend.url]["foreign"]
            body = backend.seen()["asked"][0]
            assert body["prompt"] == PROMPT and body["max_tokens"] == 8 and body["stream"] is True
            assert "seed" not in body and "cache_salt" not in body
            backend.tell(clear=True)
            await knows(conductor, backend, 0)

    run(test())


def test_a_server_that_speaks_nothing_but_openai(machine: Machine) -> None:
    """It answers who wants no token ids; without events, what was decided lately stands for what it has."""

    async def test() -> None:
        backend = spawn_backend(machine, ids=False, details=False)
        async with conducting([backend.words(dialect="openai", events="", replay="")]) as conductor:
            first = await answered(conductor, asking(PROMPT, MODEL, needs_ids=False))
            assert first.ids == [] and first.text == "".join(f" {each}" for each in continued(PROMPT, 8))
            assert first.end is not None and first.end.usage.completion_tokens == 8 and first.cached == 0
            async with asyncio.timeout(CALL_S):  # from when its prompt should be computed on
                while (await told_of(conductor, backend, needs_ids=False))["cached_tokens"] != 96:
                    await asyncio.sleep(0.01)
            assert (await told_of(conductor, backend, needs_ids=False))["own_tokens"] == 0
            for field, ask in (
                ("tokens", asking(PROMPT, MODEL)),
                ("salt", asking(PROMPT, MODEL, needs_ids=False, salt="mine")),
                ("adapter", asking(PROMPT, MODEL, needs_ids=False, adapter="a")),
                ("ignore_eos", asking(PROMPT, MODEL, needs_ids=False, sampling={"ignore_eos": True})),
            ):
                with pytest.raises(InvalidRequest) as refused:
                    await answered(conductor, ask)
                assert refused.value.field == field
            assert len(backend.seen()["asked"]) == 1

    run(test())


def test_salts_are_kept_apart_where_the_server_does(machine: Machine) -> None:
    async def test() -> None:
        backend = spawn_backend(machine)
        async with conducting([backend.words()]) as conductor:
            sampling = {"temperature": 0.5, "seed": 7, "stop": ("x",), "ignore_eos": True}
            await answered(conductor, asking(PROMPT, MODEL, salt="mine", sampling=sampling))
            body = backend.seen()["asked"][0]
            assert (body["cache_salt"], body["seed"], body["stop"], body["ignore_eos"]) == ("mine", 7, ["x"], True)
            await knows(conductor, backend, 96, salt="mine")
            assert await own_tokens(conductor, backend) == await own_tokens(conductor, backend, salt="other") == 0

    run(test())


# --- what can go wrong -----------------------------------------------------------------------------------------------


async def interrupted(
    conductor: Conductor, tokens: int, after: int, fault: Callable[[str], object]
) -> tuple[list[int], list[str]]:
    """An answer of so many tokens, and who gave it; the first one has its fault after so many of them."""
    ids: list[int] = []
    routes: list[str] = []
    async for part in conductor.answer(asking(PROMPT, MODEL, max_tokens=tokens)):
        ids += getattr(part, "ids", ())
        if hasattr(part, "document"):
            routes.append(part.document["answers"])
        if len(ids) == after and len(routes) == 1:
            fault(routes[0])
    return ids, routes


def test_an_answer_goes_on_elsewhere_without_a_repeated_token(machine: Machine) -> None:
    """One server dies in the middle of an answer; where it told token ids, another one goes on."""

    async def test() -> None:
        backends = {each.url: each for each in (spawn_backend(machine, stop_after=3) for _ in range(2))}
        async with conducting([each.words() for each in backends.values()]) as conductor:
            ids, routes = await interrupted(conductor, 6, 3, lambda name: backends[name].kill())
            assert ids == continued(PROMPT, 6) and len(set(routes)) == 2
            await until("the dead one is forgotten", lambda: list(engines(conductor)) == routes[1:])
            assert backends[routes[1]].seen()["asked"][0]["prompt"] == PROMPT + ids[:3]
            assert (await answered(conductor, asking(PROMPT, MODEL, max_tokens=3))).routes[0]["answers"] == routes[1]
            backends[routes[1]].kill()
            await until("nobody is there", lambda: not engines(conductor))
            with pytest.raises(NodeUnavailable, match="there is no engine"):
                await answered(conductor, asking(PROMPT, MODEL))

    run(test())


def test_an_answer_without_token_ids_goes_on_elsewhere_only_before_its_first_token(machine: Machine) -> None:
    async def test() -> None:
        backends = {each.url: each for each in (spawn_backend(machine, ids=False, stop_after=0) for _ in range(2))}
        words = [each.words(dialect="openai", events="", replay="") for each in backends.values()]
        async with conducting(words) as conductor:
            answer = asyncio.create_task(answered(conductor, asking(PROMPT, MODEL, needs_ids=False, max_tokens=4)))
            (first,) = await until("one is asked", lambda: [x for x in backends.values() if x.seen()["open"]])
            (other,) = (each for each in backends.values() if each is not first)
            other.tell(traits={"stop_after": -1})
            first.kill()
            found = await answer
            assert found.text == "".join(f" {each}" for each in continued(PROMPT, 4)) and len(found.routes) == 2
            other.tell(traits={"stop_after": 2})
            parts = conductor.answer(asking(PROMPT, MODEL, needs_ids=False))
            texts = []
            with pytest.raises(NodeUnavailable, match="no engine can continue: it reported no token ids"):
                async for part in parts:
                    texts.append(getattr(part, "text", ""))
                    if len([text for text in texts if text]) == 2:
                        other.kill()
            assert len([text for text in texts if text]) == 2

    run(test())


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"status": 500}, "answers 500: it is not to its taste"),
    ({"status": 429}, "answers 429"),
    ({"status": 307}, "answers 307"),
    ({"raw": "x" * 4096}, "more than"),
    ({"raw": "data: {\n\n"}, "invalid JSON"),
    ({"raw": "data: [7]\n\n"}, "not an object"),
    ({"raw": "data: " + "[" * 5000 + "\n\n"}, "invalid JSON"),
    ({"raw": 'data: {"choices":[{"text":"a"}]}\n\n'}, "no token ids"),
    ({"raw": 'data: {"choices":[{"text":"a","token_ids":[-1]}]}\n\n'}, "invalid token ids"),
    ({"raw": 'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\n'}, "more tokens than requested"),
    ({"raw": 'data: {"error":{"message":"boom"}}\n\n'}, "it failed: boom"),
    ({"raw": "data: {}\n\ndata: [DONE]\n\n"}, "before the end"),
    ({"raw": ": nothing\n\n"}, "before the end"),
]


def test_a_server_that_talks_nonsense_is_as_one_that_fails(machine: Machine) -> None:
    async def test() -> None:
        backend = spawn_backend(machine)
        link = BackendLink(*parse_backends(backend.words()))
        link.model = MODEL
        request = Request(
            id="r", tokens=np.array(PROMPT, np.uint32), sampling=Sampling(max_tokens=4), deadline_s=CALL_S
        )
        for traits, why in NONSENSE:
            backend.tell(traits={"status": 200, "raw": ""} | traits)
            with pytest.raises(Unavailable, match=why):
                async for part in link.answer(request):
                    assert isinstance(part, AnswerTokens)
        backend.tell(traits={"status": 200, "raw": ""})
        assert len([part async for part in link.answer(request)]) == 5
        await link.retire()
        await until("it is left alone", lambda: backend.seen()["open"] == 0)

    run(test())


def test_one_that_reads_slowly_holds_up_its_own_answer_alone(machine: Machine) -> None:
    """No more of an answer comes than is taken."""
    flood = "data: " + json.dumps({"choices": [{"text": "x" * 4000}]}) + "\n\n"

    async def test() -> None:
        backend = spawn_backend(machine, ids=False, raw=flood)
        words = backend.words(dialect="openai", events="", replay="")
        async with conducting([words]) as conductor:
            slow = conductor.answer(asking(PROMPT, MODEL, needs_ids=False, max_tokens=3000))
            parts = [await anext(slow) for _ in range(3)]
            assert getattr(parts[2], "text", "") == "x" * 4000
            other = conductor.answer(asking(PROMPT, MODEL, needs_ids=False, max_tokens=3000))
            assert len([await anext(other) for _ in range(50)]) == 50
            assert backend.seen()["open"] == 2, "16 MiB each do not fit between here and there"
            await other.aclose()
            await slow.aclose()

    run(test())


def test_over_tls_with_a_key(machine: Machine, tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    key, wrong = tmp_path / "key", tmp_path / "wrong"
    for path, text in ((key, "sesame\n"), (wrong, "other\n")):
        path.write_text(text)
        path.chmod(0o600)

    async def test() -> None:
        backend = spawn_backend(
            machine, key="sesame", cert=certificates.path("server.pem"), cert_key=certificates.path("server.key")
        )
        url = backend.url.replace("http:", "https:")
        words = f"{url} tokenizer=bytes dialect=vllm ca={certificates.path('ca.pem')}"
        async with conducting([f"{words} key_file={key}"]) as conductor:
            assert (await answered(conductor, asking(PROMPT, MODEL))).ids == continued(PROMPT, 8)
        for less in (f"{words} key_file={wrong}", words, f"{url} tokenizer=bytes key_file={key}"):
            async with conducting([less]) as conductor:
                assert not engines(conductor) and not conductor.models()
        wrong.chmod(0o644)
        with pytest.raises(InvalidRequest, match="can be read by other users"):
            async with conducting([f"{words} key_file={wrong}"]):
                pass

    run(test())


def test_one_that_is_not_there_yet_is_found_when_it_is(machine: Machine) -> None:
    """And one that comes back has forgotten what it had."""

    async def test() -> None:
        backend = spawn_backend(machine)
        async with conducting([backend.words(model="other"), "http://127.0.0.1:9 tokenizer=bytes"]) as conductor:
            assert not engines(conductor), "it has not that model; nobody is there"
            with contextlib.suppress(NodeUnavailable):
                await answered(conductor, asking(PROMPT, MODEL))
            backend.tell(traits={"context": 0})
        async with conducting([backend.words()]) as conductor:
            assert not engines(conductor), "it does not say its context"
            backend.tell(traits={"context": 512})
            await until("it is there", lambda: engines(conductor))
            with pytest.raises(InvalidRequest, match="512 fit"):
                await answered(conductor, asking(PROMPT * 6, MODEL))

    run(test())


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "must begin with http"),
        ("h:8000 tokenizer=bytes", "must begin with http"),
        ("http://user:word@h:1 tokenizer=bytes", "must begin with http"),
        ("http://h:1", "tokenizer=FOLDER is missing"),
        ("http://h:1 tokenizer=bytes colour=red", "'colour=red' is not one of"),
        ("http://h:1 tokenizer=bytes tokenizer=bytes", "each once"),
        ("http://h:1 tokenizer=bytes dialect=latin", "must be one of openai, vllm .got 'latin'"),
        ("http://h:1 tokenizer=bytes events=h:5557", "must be tcp://HOST:PORT"),
        ("http://h:1 tokenizer=bytes replay=tcp://h:1", "needs events="),
        ("http://h:1 tokenizer=bytes page_tokens=0", "page_tokens must be"),
        ("http://h:1 tokenizer=bytes batch=0", "batch must be"),
    ],
)
def test_settings_that_make_no_sense_are_refused(words: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as refused:
        parse_backends([words] if words else [7])
    assert refused.value.field.startswith("backend")
