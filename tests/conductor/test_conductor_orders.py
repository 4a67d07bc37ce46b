"""A conductor's decisions that hold when engines are in trouble, explain themselves, and are ahead of requests."""

from __future__ import annotations

import numpy as np
import pytest

from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state.engine_table import LoadReport
from engine.model.request import Role
from tests.helpers.fleet import NVME, PAGE, STEP_S, World, arrival, engines_of, pages_of, world


def test_engines_that_are_silent_are_better_than_none() -> None:
    """All reports fail, and tokens come all the same: nobody is refused, and nobody waits for nothing."""
    made = world(3, first_token_s=5.0)
    for number in range(30):
        for name in made.engines:
            made.tell(ev.ReportRequested(made.now_s, name))
            made.tell(ev.EngineSilent(made.now_s, name))
        made.arrive(arrival(number, pages_of(number)))
        made.run(made.now_s + 0.5)
    made.settle()
    assert len(made.done) == 30 and not made.refused


def test_an_engine_that_fails_again_is_avoided_longer() -> None:
    """It answers when it is asked for its load, and no request."""
    made = world(2)
    made.engines["e1"].up = False
    for number in range(100):
        for name in made.engines:
            report = LoadReport(role=Role.BOTH)
            made.tell(ev.ReportRequested(made.now_s, name))
            made.tell(ev.LoadReported(made.now_s, name, report))
        made.arrive(arrival(number, pages_of(*range(100 * number, 100 * number + 20))))
        made.run(made.now_s + 0.6)
    made.settle()
    assert len(made.done) == 100 and engines_of(made).count("e1") <= 8


def test_one_that_meets_what_is_wanted_goes_before_one_that_is_done_sooner() -> None:
    """A warm engine would have the whole answer sooner, and its first token too late."""
    made = world(1, split="never")
    for number in range(6):
        made.arrive(arrival(number, pages_of(*range(100 * number, 100 * number + 60)), answer=2000))
    made.add("e1")
    for name, step_s in (("e0", STEP_S), ("e1", 5 * STEP_S)):
        made.tell(ev.ReportRequested(0.0, name))
        made.tell(
            ev.LoadReported(0.0, name, LoadReport(role=Role.BOTH, running=6 if name == "e0" else 0, step_s=step_s))
        )
    slow = arrival(50, pages_of(*range(900, 930)), answer=2000)
    quick = arrival(51, pages_of(*range(900, 930)), answer=2000, first_token_s=1.0)
    chosen = [made.explain(each)["chosen"] for each in (slow, quick)]
    assert [each["answers"] for each in chosen] == ["e0", "e1"], chosen  # type: ignore[index]
    assert chosen[1]["first_token_s"] < 1.0 < chosen[0]["first_token_s"]  # type: ignore[index]


def test_a_decision_explains_itself() -> None:
    """All candidates, what was chosen and why; the same again, and nothing is changed by it."""
    made = world(roles="pbd")
    pages = pages_of(*range(40))
    made.holds("e1", pages)
    made.add("small", context_max=100)
    made.tell(ev.EngineFailed(made.now_s, 999, "e2", 0))
    asked = arrival(2, np.concatenate([pages, pages_of(99)]))
    first = made.explain(asked)
    assert first == made.explain(asked)
    rows = {row["engine"]: row for row in first["candidates"]}  # type: ignore[attr-defined]
    assert set(rows) == {"e0", "e1"} and rows["e1"]["own_tokens"] == 40 * PAGE
    assert {row["engine"]: row["why"] for row in first["left_out"]} == {  # type: ignore[attr-defined]
        "e2": "it failed on a request; it gets requests again in 5.0 s",
        "small": f"it never holds {41 * PAGE + 10 + 20} tokens",
    }
    assert str(
        first["outcome"]
    ) == "It is sent at once." and f"{40 * PAGE} of {len(asked.request.tokens)} tokens" in str(first["why"])
    made.arrive(asked)
    ((_, sent),) = made.sends
    route = sent.route
    chosen = first["chosen"]
    assert chosen["computes"] == route.computing.engine.about.name  # type: ignore[index]
    assert chosen["total_s"] == pytest.approx(route.total_s, abs=1e-5)  # type: ignore[index]
    nobody = made.explain(arrival(3, pages_of(1), model="other"))  # type: ignore[arg-type]
    assert "'other'" in str(nobody["outcome"]) and not nobody["candidates"]
    made.settle()


def _crowd(leads: bool, **rules: object) -> World:
    """Prompts with one beginning, more than the engine that has it can take, and nothing to pull it with."""
    made = world(3, **rules)
    made.tell(ev.LeadershipChanged(0.0, leads))
    shared = pages_of(*range(100))
    made.holds("e0", shared)
    for number in range(40):
        made.arrive(arrival(number, np.concatenate([shared, pages_of(*range(500 + 20 * number, 515 + 20 * number))])))
        made.run(made.now_s + 0.02)
    made.settle()
    assert len(made.done) == 40
    return made


def test_a_hot_prefix_is_copied_by_the_leader() -> None:
    made = _crowd(leads=True, policy="longest-prefix")
    assert {order.node for order in made.orders} == {"node-e1", "node-e2"} and len(made.orders) == 2
    for order in made.orders:
        assert isinstance(order, do.CopyPrefix) and order.source == "node-e0"
        assert order.pages == 100 and order.size == 100 * PAGE * (1 << 17)
    assert len(set(engines_of(made))) == 3
    assert not _crowd(leads=False, policy="longest-prefix").orders


def test_orders_keep_to_their_budget() -> None:
    size = 100 * PAGE * (1 << 17)
    assert len(_crowd(leads=True, policy="longest-prefix", orders_bytes_per_s=size / 100.0).orders) == 1
    made = world(1)
    given = made.state.orders._give
    assert [given("n", page, 1 << 29, 0.0) for page in range(3)] == [1, 2, None], "two fill what may be under way"
    made.tell(ev.PageOrderEnded(0.5, 1))
    assert given("n", 1, 1 << 20, 0.5) is None, "the same is under way"
    assert given("n", 9, 1 << 20, 0.5) == 3
    assert given("n", 8, 1 << 29, 40.0) == 4, "what was never told to have ended is forgotten"


def test_what_a_waiting_request_needs_comes_from_nvme_meanwhile() -> None:
    made = world(1, window_s=0.2)
    made.tell(ev.LeadershipChanged(0.0, True))
    pages = pages_of(*range(30))
    made.holds("e0", pages[:10])
    made.holds("e0", pages[10:], NVME)
    for number in range(3):
        made.arrive(arrival(number, pages_of(*range(100 * number + 1000, 100 * number + 1060))))
    made.arrive(arrival(9, pages))
    (order,) = made.orders
    assert isinstance(order, do.PrefetchPrefix) and (order.number, order.node, order.pages) == (9, "node-e0", 30)
    assert order.size == 20 * PAGE * (1 << 17)
    made.settle()
