"""``kvstore conductor`` with real engines and nodes around it."""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.api import address_of
from tests.helpers.conductors import ConductorClient, client_of, serve_conductor
from tests.helpers.engines.processes import prompt, serve_engine, spawn_engine
from tests.helpers.processes import Machine, wait_until

ROUNDS, FACTOR = 7, 10  # between what is predicted of a prompt and what is measured, in most of the rounds


def test_a_prompt_goes_where_its_pages_are(machine: Machine, tmp_path: Path) -> None:
    catalog = {"catalog": f"file:{tmp_path / 'catalog'}", "catalog_ttl_s": "2"}
    nodes = [machine.serve(name, dram="32MiB", listen="127.0.0.1:0", **catalog) for name in ("n0", "n1")]
    over_grpc = f"kv://{address_of(nodes[1].output())}"
    engines = [spawn_engine(machine, node=node, role="both", **catalog) for node in ("n0", over_grpc)]
    alone = engines[0].wait_ready().client().generate(prompt(100), max_tokens=8, ignore_eos=True, use_pool=False)
    engines[1].wait_ready()
    conductor = serve_conductor(machine, policy="longest-prefix", split="never", **catalog)  # whatever speeds are
    with client_of(conductor) as client:
        known = client.knows(2, 2)
        assert sorted(each["node"] for each in known["engines"].values()) == ["n0", "n1"], "as the catalog names them"
        about = wait_until("it leads", lambda: client.status()["leads"] and client.status()["membership"])
        assert about.keys() >= {"watch", "session", "presence", "election", "election_watch"} and not about["fault"]
        engines[1].client().generate(prompt(100, 7), max_tokens=1)
        route = wait_until("what came over gRPC is told of", partial(cached_at, client, prompt(100, 7), "n1"))
        assert [each["own_tokens"] for each in route["candidates"] if not each["part"]] == [0]
        first = client.answer(prompt(100))
        assert first.tokens == list(alone.tokens) and first.indices == list(range(8))
        assert first.finished.reason == "length" and first.finished.usage.completion_tokens == 8
        answered = known["engines"][first.routes[0]["answers"]]["node"]
        route = wait_until("its pages are told of", partial(cached_at, client, prompt(100), answered))
        assert route["chosen"]["answers"] == first.routes[0]["answers"], route["why"]
        assert sorted(each["own_tokens"] for each in route["candidates"]) == [0, 96]
        again = client.answer(prompt(100), explain=True)
        assert again.routes[0]["cached_tokens"] == 96 and len(again.routes[0]["explained"]["candidates"]) == 2
        assert again.tokens == first.tokens and sum(again.finished.usage.cached_tokens.values()) >= 96
        ratios: dict[int, list[float]] = {0: [], 400: []}
        for seed in range(ROUNDS):
            for cached, found in ratios.items():  # a new prompt, and the same again
                tokens = prompt(410, 10 + seed)
                predicted_s = wait_until("its pages are told of", partial(foreseen, client, tokens, cached))
                found.append(predicted_s / client.answer(tokens).finished.usage.prefill_ms * 1e3)
        middle = {cached: statistics.median(found) for cached, found in ratios.items()}
        assert all(1 / FACTOR <= ratio <= FACTOR for ratio in middle.values()), ratios
    assert conductor.terminate() == 0


def cached_at(client: ConductorClient, tokens: np.ndarray, node: str) -> dict[str, Any] | None:
    """Where a prompt would go, once that is an engine of this node, which has all full pages of it."""
    engines, route = client.status()["engines"], client.route(tokens)
    (chosen,) = (each for each in route["candidates"] if each["part"])
    return route if chosen["own_tokens"] == 96 and engines[chosen["engine"]]["node"] == node else None


def foreseen(client: ConductorClient, tokens: np.ndarray, cached: int) -> float:
    """How long the engine that is chosen will compute a prompt of which it has so much; 0: it has not."""
    route = client.route(tokens)
    (chosen,) = (each for each in route["candidates"] if each["engine"] == route["chosen"]["computes"])
    return float(chosen["prefill_s"]) if chosen["own_tokens"] == cached else 0.0


def test_an_engine_that_is_given_by_its_address(machine: Machine) -> None:
    engine = serve_engine(machine)
    conductor = serve_conductor(machine, engine=engine.address)
    with client_of(conductor) as client:
        assert client.answer(prompt(40)).finished.reason == "length"
        (ended,) = client.status()["recent"]
        assert ended["outcome"] == "length" and ended["prompt_tokens"] == 40 and ended["cached_tokens"] == {}
        assert ended["route"]["computes"] == ended["route"]["answers"] == engine.address
        assert 0 < ended["ttft_s"] <= ended["took_s"] and ended["predicted_ttft_s"] > 0
        assert client.status()["ttft_error"] > 0
        by = ("--conductor", conductor.address)
        shown = machine.run("route", *by, "--explain", "Once upon a time")
        assert shown.returncode == 0 and "It is sent at once." in shown.stdout, shown.stderr
        told = json.loads(machine.run("route", *by, "--json", "--tokens", "1,2,3").stdout)
        assert told["chosen"]["answers"] == engine.address and told["request"]["tokens"] == 3
        wrong = machine.run("route", *by, "--model", "none", "text")
        assert wrong.returncode == 2 and wrong.stderr.startswith("kvstore: model:"), wrong.stderr
    assert conductor.terminate() == 0
