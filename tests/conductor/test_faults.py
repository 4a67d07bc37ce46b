"""What engines and conductors can suffer while answers are under way, and what must hold."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.conductors import ANSWER_S, ConductorAnswer, ConductorClient, client_of, serve_conductor
from tests.helpers.engines.processes import EngineProcess, prompt, spawn_engine
from tests.helpers.processes import Machine, wait_until

LONG = 1000  # tokens: some seconds of an answer
EQUAL = 100  # prompts at a time


@pytest.fixture
def engines(machine: Machine, tmp_path: Path) -> list[EngineProcess]:
    """Two of them, without a pool."""
    spawned = [spawn_engine(machine, role="both", arena="32MiB", **catalog(tmp_path)) for _ in range(2)]
    return [engine.wait_ready() for engine in spawned]


def catalog(tmp_path: Path) -> dict[str, str]:
    return {"catalog": f"file:{tmp_path / 'catalog'}", "catalog_ttl_s": "10"}  # of a file the dead leave at once


def test_an_answer_goes_on_elsewhere_without_a_repeated_token(
    engines: list[EngineProcess], machine: Machine, tmp_path: Path
) -> None:
    """One engine stands still in the middle of an answer, then another one dies in the middle of the next."""
    with engines[0].client() as one:
        alone = one.generate(prompt(60), max_tokens=LONG, ignore_eos=True)
    conductor = serve_conductor(machine, **catalog(tmp_path))
    with client_of(conductor) as client:
        found = client.knows(2)["engines"]
        named = {name: next(e for e in engines if e.address == found[name]["address"]) for name in found}
        for fault in ("stop", "kill"):
            stream = client.submit(prompt(60), max_tokens=LONG)
            replies = [next(stream), next(stream)]  # where it goes, and some tokens
            lost = named[ConductorAnswer(replies[:1]).routes[0]["answers"]]
            lost.stop() if fault == "stop" else lost.kill()
            answer = ConductorAnswer([*replies, *stream])
            assert answer.tokens == list(alone.tokens) and answer.indices == list(range(LONG)), fault
            assert len({route["answers"] for route in answer.routes}) == 2, fault
            assert answer.finished.usage.completion_tokens == LONG
            if fault == "stop":
                lost.resume()
                wait_until("it is heard of again", lambda: heard(client, 2))
        dead = answer.routes[0]["answers"]
        assert dead not in {client.answer(prompt(20, seed)).routes[0]["answers"] for seed in range(4)}
    assert conductor.terminate() == 0


def heard(client: ConductorClient, engines: int) -> bool:
    """So many engines have just said how busy they are."""
    return sum(each["heard_ago_s"] < 1.0 for each in client.status()["engines"].values()) == engines


def test_callers_that_go_away_free_their_work(engines: list[EngineProcess], machine: Machine, tmp_path: Path) -> None:
    conductor = serve_conductor(machine, **catalog(tmp_path))
    with client_of(conductor) as client:
        client.knows(2)
        for _ in range(4):
            stream = client.submit(prompt(60), max_tokens=LONG)
            next(stream)
            stream.cancel()
        wait_until("nothing is under way", lambda: not any(client.status()["requests"].values()))
        for engine in engines:
            with engine.client() as one:
                wait_until("no engine works", lambda one=one: not any(one.status()["requests"].values()))  # type: ignore[misc]
        assert client.status()["answers"]["cancelled"] == 4


def test_engines_go_on_without_their_conductor_and_the_next_one_is_right(
    engines: list[EngineProcess], machine: Machine, tmp_path: Path
) -> None:
    flags = {**catalog(tmp_path), "roles_floor": "1"}
    first, second = (serve_conductor(machine, **flags) for _ in range(2))
    with client_of(first) as one, client_of(second) as two:
        wait_until("one leads", lambda: one.status()["leads"] or two.status()["leads"])
        dies, stays, client = (first, second, two) if one.status()["leads"] else (second, first, one)
        assert not client.status()["leads"], "the other does not"
        dies.kill()
        assert client.answer(prompt(30)).finished.reason == "length"
        wait_until("the other leads", lambda: client.status()["leads"])
        assert stays.terminate() == 0
    with engines[0].client() as engine:
        assert len(engine.generate(prompt(30), max_tokens=4, ignore_eos=True).tokens) == 4
    again = serve_conductor(machine, **flags)
    with client_of(again) as client:
        client.knows(2)
        assert client.answer(prompt(30)).finished.reason == "length"


def test_equal_prompts_go_to_both_and_all_are_answered(
    engines: list[EngineProcess], machine: Machine, tmp_path: Path
) -> None:
    conductor = serve_conductor(machine, **catalog(tmp_path))
    with client_of(conductor) as client:
        client.knows(2)
        streams = [client.submit(prompt(48), max_tokens=8) for _ in range(EQUAL)]
        answers: list[ConductorAnswer] = []

        def read() -> None:
            answers.extend(ConductorAnswer(list(stream)) for stream in streams)

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(ANSWER_S)
        assert len(answers) == EQUAL and len({tuple(answer.tokens) for answer in answers}) == 1
        went = Counter(answer.routes[-1]["answers"] for answer in answers)
        assert len(went) == 2, went


def test_an_engine_that_drains_gets_nothing_more(
    engines: list[EngineProcess], machine: Machine, tmp_path: Path
) -> None:
    conductor = serve_conductor(machine, **catalog(tmp_path))
    with client_of(conductor) as client:
        client.knows(2)
        with engines[0].client() as one:
            one.drain()

        def draining() -> set[str]:
            return {name for name, engine in client.status()["engines"].items() if engine["draining"]}

        (drained,) = wait_until("it is known to drain", draining)
        assert drained not in {client.answer(prompt(20, seed)).routes[0]["answers"] for seed in range(4)}
