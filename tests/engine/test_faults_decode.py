"""Decode engines that are killed, drained and told to move their requests; and everything at once, at random."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from engine.client import EngineClient
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable, Unavailable
from tests.helpers.engines.cluster import END_S, NODE, Cluster, Running, made, right
from tests.helpers.engines.processes import prompt
from tests.helpers.processes import wait_until

HOLD_S = 3.0
ENGINES = {
    "one": {"role": "both", "link": "4MB/s", "drain_s": "1"},
    "two": {"role": "decode", "prefill": "prefill", "node": "{cluster.remote_node}"},
    "prefill": {"role": "prefill", "chunk_tokens": "32", "hold_s": str(HOLD_S)},
}
RANDOM_S = 12.0
CLIENTS = 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from made(ENGINES, tmp_path_factory.mktemp("decode"))


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    shared.ready(*ENGINES)
    yield shared
    for name in ENGINES:
        shared[name].resume()
    shared.ready(*ENGINES)
    shared.idle_all()


# --- decode engines that die ----------------------------------------------------------------------------------------


def test_an_answer_goes_on_elsewhere_from_its_pages(cluster: Cluster) -> None:
    one, _ = cluster.ready("one", "two")
    how: dict[str, Any] = {"temperature": 0.7, "seed": 3}
    tokens = prompt(300, 1)
    whole = cluster.reference("two", tokens, 1200, **how)
    prefill = [cluster.address("prefill")]
    goes_on = Running(one, tokens, max_tokens=1200, resume=[cluster.address("two")], prefill=prefill, **how)
    ends = Running(one, prompt(301, 2), max_tokens=4000, prefill=[])
    goes_on.drawn(400), ends.drawn(10)
    held = Running(one, prompt(4001, 3), max_tokens=200, prefill=prefill, handoff="lazy")
    cluster.computed("prefill", held)
    cluster.kill("one")
    for run in (ends, held):
        run.ended()
        assert isinstance(run.error, NodeUnavailable), run.error
    goes_on.ended()
    assert goes_on.error is None and goes_on.tokens == whole
    usage = goes_on.usage
    assert usage is not None and usage.completion_tokens == 1200
    assert usage.cached_tokens.get("dram", 0) > 300 + 300, f"the dead engine's own pages were not used: {usage}"
    cluster.idle("prefill", HOLD_S + 60.0)


def test_a_caller_that_goes_away_frees_both_engines(cluster: Cluster) -> None:
    (one,) = cluster.ready("one")
    prefill = [cluster.address("prefill")]
    answering = one.stream(prompt(3001, 4), max_tokens=4000, prefill=prefill, ignore_eos=True)
    next(answering)  # the KV is still on its way
    gone = threading.Event()

    def ask(handoff: str, seed: int) -> None:
        with EngineClient(cluster.address("one")) as client, pytest.raises(KVStoreError):
            stream = client.stream(prompt(6001, seed), max_tokens=8, prefill=prefill, handoff=handoff)
            threading.Thread(target=lambda: (gone.wait(END_S), client.close())).start()
            next(stream)

    asking = [threading.Thread(target=ask, args=how) for how in (("eager", 5), ("lazy", 6))]
    for thread in asking:
        thread.start()
    cluster.state("prefill", lambda status: sum(status["requests"].values()) == 2)
    gone.set()
    answering.close()
    for thread in asking:
        thread.join(END_S)
    cluster.idle("one", HOLD_S + 60.0)
    cluster.idle("prefill", HOLD_S + 60.0)


# --- migration, drain, roles ----------------------------------------------------------------------------------------


def test_drain_and_roles_under_load(cluster: Cluster) -> None:
    _, two = cluster.ready("one", "two")
    runs = [Running(two, prompt(100 + i, 10 + i), max_tokens=500, resume=[cluster.address("one")]) for i in range(4)]
    for run in runs:
        run.drawn(20)
    assert two.drain(cluster.address("one")) == 0
    with pytest.raises(NodeUnavailable, match="drain"):
        two.generate("late", max_tokens=2)
    right(cluster, "one", *runs)
    two.set_role("both")  # which ends the drain
    runs = [Running(two, prompt(110 + i, 20 + i), max_tokens=500) for i in range(2)]
    refused: list[KVStoreError] = []
    for i, role in enumerate(("both", "prefill", "both", "decode")):
        runs[0].drawn(40 * i + 20)
        two.set_role(role)
        run = Running(two, prompt(300 + i, 30 + i), max_tokens=20)
        if role == "prefill":
            refused += filter(None, [run.ended().error])
        else:
            runs.append(run)
    right(cluster, "two", *runs)
    assert len(refused) == 1 and isinstance(refused[0], InvalidRequest) and refused[0].field == "role"


def test_sigterm_ends_what_does_not_end_in_time(cluster: Cluster) -> None:
    """Also where a hand-off is on its way, and a token waits for its layers."""
    (one,) = cluster.ready("one")
    prefill = [cluster.address("prefill")]
    runs = [Running(one, prompt(40, 40), max_tokens=50)]
    runs += [
        Running(one, prompt(7001, 41), max_tokens=500, prefill=prefill, handoff="lazy"),
        Running(one, prompt(7002, 42), max_tokens=500, prefill=prefill, source="dram"),
        Running(one, prompt(41, 43), max_tokens=8000),
    ]
    runs[-1].drawn(10)
    cluster.state("prefill", lambda status: status["prefills_held"])
    assert cluster["one"].terminate() == 0
    right(cluster, "two", runs[0])
    for run in runs[1:]:
        run.ended()
        assert isinstance(run.error, NodeUnavailable), run.error
    cluster.spawn("one")


# --- everything -----------------------------------------------------------------------------------------------------


class Asker(threading.Thread):
    """A client that asks, one prompt after the other, and compares what it gets."""

    def __init__(self, cluster: Cluster, seed: int, until_s: float) -> None:
        super().__init__(daemon=True)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._cluster = cluster
        self._random = random.Random(seed)
        self._until_s = until_s

    def run(self) -> None:
        draw = self._random
        while time.monotonic() < self._until_s:
            first, other = draw.sample(["one", "two"], 2)
            case = draw.choice(CASES)
            tokens = prompt(*case)
            how = {
                "handoff": draw.choice(["eager", "lazy"]),
                "source": draw.choice(["arena", "dram"]),
                "grain": draw.choice(["layer", "whole"]),
                "prefill": draw.choice([None, [self._cluster.address("prefill")]]),
                "resume": draw.choice([(), (self._cluster.address(other),)]),
                "deadline_s": draw.choice([2.0, 20.0]),
            }
            try:
                with EngineClient(self._cluster.address(first)) as client:
                    answer = client.generate(tokens, max_tokens=COUNT, ignore_eos=True, **how)
            except Unavailable as error:
                self.outcomes[type(error).__name__] += 1
                time.sleep(0.05)
            except InvalidRequest as error:
                self.wrong.append(f"{case} {how}: {error}")
            else:
                self.outcomes["answered"] += 1
                if list(answer.tokens) != self._cluster.reference("two", tokens, COUNT):
                    self.wrong.append(f"{case} {how}: {answer.usage}")


CASES = [(length, 100 + seed) for length in (20, 150, 700, 2500) for seed in (0, 1, 2)]
COUNT = 40


@pytest.mark.parametrize("seed", [1])
def test_random_kills_under_load(cluster: Cluster, seed: int) -> None:
    for case in CASES:
        cluster.reference("two", prompt(*case), COUNT)
    draw, done = random.Random(seed), Counter[str]()
    until_s = time.monotonic() + RANDOM_S
    askers = [Asker(cluster, 1000 * seed + i, until_s) for i in range(CLIENTS)]
    for asker in askers:
        asker.start()
    while time.monotonic() < until_s - 1.0:
        time.sleep(draw.uniform(0.3, 1.2))
        what, name = draw.choice(["kill", "stop", "node", "pause node", "migrate"]), draw.choice(list(ENGINES))
        if what == "kill" and cluster.is_ready(name) and done["kill"] < 4:
            cluster.kill(name)
        elif what == "stop" and cluster.is_ready(name):
            cluster[name].stop()
            time.sleep(draw.uniform(0.1, 1.0))
            cluster[name].resume()
        elif what == "node":
            cluster.node.kill()
            time.sleep(draw.uniform(0.0, 0.5))
            cluster.restart_node()
        elif what == "pause node":
            cluster.node.stop()
            time.sleep(draw.uniform(0.1, 1.5))
            cluster.node.resume()
        else:
            continue
        done[what] += 1
    for asker in askers:
        asker.join(END_S)
    outcomes = sum((asker.outcomes for asker in askers), Counter[str]())
    wrong = [line for asker in askers for line in asker.wrong]
    assert not wrong, wrong
    assert outcomes["answered"] >= 10, (outcomes, done)
    cluster.ready(*ENGINES)
    cluster.idle_all()
    cluster.settled()
    said = cluster.machine.run("verify", "--node", NODE)
    assert said.returncode == 0, said.stdout + said.stderr
    wait_until("answers come", lambda: cluster.client("one").generate("fine?", max_tokens=2).tokens)
