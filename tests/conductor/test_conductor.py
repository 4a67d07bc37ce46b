"""``kvstore conductor`` with real engines and nodes around it."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.conductors import client_of, serve_conductor
from tests.helpers.engines.processes import prompt, serve_engine, spawn_engine
from tests.helpers.processes import Machine, wait_until


def test_a_prompt_goes_where_its_pages_are(machine: Machine, tmp_path: Path) -> None:
    catalog = {"catalog": f"file:{tmp_path / 'catalog'}", "catalog_ttl_s": "2"}
    for name in ("n0", "n1"):
        machine.serve(name, dram="32MiB", listen="127.0.0.1:0", **catalog)
    engines = [spawn_engine(machine, node=name, role="both", **catalog) for name in ("n0", "n1")]
    alone = engines[0].wait_ready().client().generate(prompt(100), max_tokens=8, ignore_eos=True, use_pool=False)
    engines[1].wait_ready()
    conductor = serve_conductor(machine, **catalog)
    with client_of(conductor) as client:
        client.knows(2, 2)
        first = client.answer(prompt(100))
        assert first.tokens == list(alone.tokens) and first.indices == list(range(8))
        assert first.finished.reason == "length" and first.finished.usage.completion_tokens == 8
        wait_until("its pages are told of", lambda: client.status()["pages"])
        route = client.route(prompt(100))
        assert route["chosen"]["answers"] == first.routes[0]["answers"], route["why"]
        assert sorted(each["own_tokens"] for each in route["candidates"]) == [0, 96]
        again = client.answer(prompt(100), explain=True)
        assert again.routes[0]["cached_tokens"] == 96 and len(again.routes[0]["explained"]["candidates"]) == 2
        assert again.tokens == first.tokens and sum(again.finished.usage.cached_tokens.values()) >= 96
    assert conductor.terminate() == 0


def test_an_engine_that_is_given_by_its_address(machine: Machine) -> None:
    engine = serve_engine(machine)
    conductor = serve_conductor(machine, engine=engine.address)
    with client_of(conductor) as client:
        assert client.answer(prompt(40)).finished.reason == "length"
    assert conductor.terminate() == 0
