"""Decisions of a conductor, over a simulated fleet."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from engine.conductor.state import events as ev
from engine.conductor.state.conductor_state import ATTEMPTS_MAX
from engine.conductor.state.engine_table import AVOID_S, EngineWork, LoadReport
from engine.conductor.state.policies import POLICIES
from engine.model.request import Role
from tests.helpers.fleet import PAGE, arrival, engines_of, pages_of, world


def test_a_prompt_goes_where_most_of_it_is() -> None:
    made = world(4)
    pages = pages_of(*range(40))
    made.arrive(arrival(1, pages))
    made.settle()
    made.arrive(arrival(2, np.concatenate([pages, pages_of(99)])))
    assert made.sends[1][1].route.computing.engine is made.sends[0][1].route.computing.engine
    assert made.sends[1][1].route.computing.cached == 40 * PAGE
    made.settle()


def test_a_busy_engine_gives_its_prefix_to_an_idle_one() -> None:
    made = world(2)
    pages = pages_of(*range(100))
    made.arrive(arrival(1, pages))
    made.settle()
    (warm,) = engines_of(made)
    for number in range(2, 30):  # what has nothing in common, until the warm one is busy
        made.arrive(arrival(number, pages_of(*range(1000 * number, 1000 * number + 100))))
    made.arrive(arrival(50, np.concatenate([pages, pages_of(7)])))
    made.settle()
    route = next(send.route for _, send in made.sends if send.number == 50)
    assert route.computing.engine.about.name == warm or route.computing.donor == f"node-{warm}"
    assert route.computing.cached == 100 * PAGE


def test_a_burst_of_equal_prompts() -> None:
    """It neither goes to one engine, nor is the prefix computed everywhere."""
    made = world(8)
    pages = pages_of(*range(200))
    for number in range(1000):
        made.arrive(arrival(number, np.concatenate([pages, pages_of(number + 10_000)]), answer=100))
        made.run(made.now_s + 0.002)
    made.settle()
    share = Counter(engines_of(made))
    assert len(share) >= 4 and max(share.values()) < 500, share
    assert made.computed_pages < 3 * 200 + 1000, made.computed_pages


def test_a_prompt_is_handed_over_where_that_is_sooner() -> None:
    """Long prompts would hold up answers that run: another engine computes them. Short ones stay."""
    made = world(roles="pb")
    for number in range(20):
        made.arrive(arrival(number, pages_of(number), answer=400))
    made.run(made.now_s + 1.0)
    made.arrive(arrival(100, pages_of(*range(500, 600)), answer=400))
    made.arrive(arrival(101, pages_of(), answer=400, more=5))
    made.settle()
    by_number = {send.number: send.route for _, send in made.sends}
    assert not by_number[100].local and by_number[100].answering.engine.about.name == "e1"
    assert by_number[101].local


def test_refused_early_by_what_is_predicted() -> None:
    """An overloaded fleet says so at once, with the time after which it would do; room means that nobody is refused."""
    made = world(2, first_token_s=1.0)
    for number in range(40):
        made.arrive(arrival(number, pages_of(*range(100 * number, 100 * number + 60))))
    assert made.refused and all(one.retry_s and one.retry_s > 0 for one in made.refused.values())
    made.settle()
    late = [made.first[number] for number in made.done]
    assert max(late) < 2.0, "who was taken did not wait much longer than it wanted"
    made.arrive(arrival(100, pages_of(1, 2, 3)))
    assert 100 not in made.refused
    made.settle()


def test_nobody_can_answer() -> None:
    made = world()
    made.arrive(arrival(1, pages_of(1)))
    assert made.refused[1].retry_s == 1.0 and "no engine" in made.refused[1].why
    made.add("e0", context_max=100)
    made.arrive(arrival(2, pages_of(1, 2)))
    assert made.refused[2].retry_s is None and "holds" in made.refused[2].why
    made.arrive(arrival(3, pages_of(1), model="other"))  # type: ignore[arg-type]
    assert made.refused[3].retry_s is None and "'other'" in made.refused[3].why


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"kv-centric"}))
def test_nobody_waits_while_an_engine_has_room(policy: str) -> None:
    """A policy that looks at no load draws an engine, and goes on to another one where that has no room."""
    made = world(3, policy=policy, window_s=0.5)
    for number in range(24):
        made.arrive(arrival(number, pages_of(*range(1000 * number, 1000 * number + 10 + 7 * (number % 5)))))
        if any(len(queue) for queue in made.state.queues.values()):
            waits_s = [
                engine.first_done_s + engine.queued_s - made.now_s for engine in made.state.fleet.engines.values()
            ]
            assert min(waits_s) > 0.5, f"{waits_s}: there is room"
    assert any(len(queue) for queue in made.state.queues.values()), "all were full at the end"
    made.settle()


def test_a_flood_of_one_tenant() -> None:
    """Costs another one what is under way, not what waits."""
    alone = world(2)
    alone.arrive(arrival(0, pages_of(*range(30)), tenant="quiet"))
    alone.settle()
    made = world(2, window_s=0.5)
    for number in range(1, 200):
        made.arrive(arrival(number, pages_of(*range(100 * number, 100 * number + 30)), tenant="flood", priority=9))  # type: ignore[arg-type]
    came_s = made.now_s
    made.arrive(arrival(0, pages_of(*range(30)), tenant="quiet"))
    made.settle()
    waited_s = made.first[0] - came_s - alone.first[0]
    assert waited_s < 1.5, waited_s
    assert sum(1 for number, at_s in made.first.items() if at_s > made.first[0]) > 150


def test_priorities_order_a_tenants_own() -> None:
    made = world(1, window_s=0.1)
    for number in range(20):
        made.arrive(arrival(number, pages_of(*range(100 * number, 100 * number + 30)), priority=number % 2))  # type: ignore[arg-type]
    made.settle()
    order = [send.number for _, send in made.sends]
    first = [number for number in order[3:] if number % 2]
    assert order[3 : 3 + len(first)] == first, order


def test_what_waits_is_bounded() -> None:
    made = world(1, window_s=0.1, queue_bytes=4 * 64 * 40 * 20)
    for number in range(40):
        made.arrive(arrival(number, pages_of(*range(100 * number, 100 * number + 40)), tenant="flood"))
    assert len(made.refused) > 10 and all("bytes" in one.why for one in made.refused.values())
    made.arrive(arrival(100, pages_of(1, 2), tenant="quiet"))
    assert 100 not in made.refused, "half of the room is nobody's alone"
    made.settle()
    assert len(made.done) + len(made.refused) == 41


def test_an_engine_that_died_gets_no_second_request() -> None:
    made = world(3)
    made.engines["e1"].up = False
    for number in range(12):
        made.arrive(arrival(number, pages_of(*range(100 * number, 100 * number + 20))))
        made.run(made.now_s + 1.2)
    made.settle()
    assert len(made.done) == 12 and not made.given_up
    at = [at_s for at_s, send in made.sends if send.route.computing.engine.about.name == "e1"]
    assert all(later - sooner > AVOID_S for sooner, later in pairwise(at)), at


def test_a_request_that_breaks_every_engine_is_given_up() -> None:
    made = world(8)
    for sim in made.engines.values():
        sim.up = False
    made.arrive(arrival(1, pages_of(1)))
    made.settle()
    assert made.given_up == [1] and len(set(engines_of(made))) == ATTEMPTS_MAX


def test_a_late_report_hides_nothing() -> None:
    """Ten seconds late: what was decided since counts all the same, and nothing is counted twice."""
    made = world(2)
    made.ask(late_s=10.0)
    for number in range(20):
        made.arrive(arrival(number, pages_of(*range(100 * number, 100 * number + 20)), answer=2000))
    assert abs(Counter(engines_of(made))["e0"] - 10) <= 1
    made.run(11.0)
    assert all(not engine.others_running for engine in made.state.fleet.engines.values())
    made.tell(ev.ReportRequested(made.now_s, "e0"))
    running = len(made.state.fleet.engines["e0"].ends)
    made.tell(ev.LoadReported(made.now_s, "e0", LoadReport(role=Role.BOTH, running=running + 5)))
    assert made.state.fleet.engines["e0"].others_running == 5
    made.settle()


def test_a_draining_engine_gets_nothing_new() -> None:
    made = world(2)
    made.tell(ev.ReportRequested(0.0, "e0"))
    made.tell(ev.LoadReported(0.0, "e0", LoadReport(role=Role.BOTH, draining=True)))
    for number in range(6):
        made.arrive(arrival(number, pages_of(number)))
    assert set(engines_of(made)) == {"e1"}
    made.settle()


def test_roles_follow_the_work() -> None:
    """From many answers and short prompts to the opposite: engines change one by one, and not to and fro."""
    made = world(roles="pddddddd", roles_floor=1)
    made.lead()

    def load(seconds: float, pages: int, answer: int) -> int:
        end_s, number = made.now_s + seconds, len(made.arrivals)
        while made.now_s < end_s:
            number += 1
            made.arrive(arrival(number, pages_of(*range(1000 * number, 1000 * number + pages)), answer=answer))
            made.run(made.now_s + 0.25)
        return sum(sim.role is Role.PREFILL for sim in made.engines.values())

    assert load(30, pages=4, answer=256) <= 2
    changed = len(made.roles)
    assert load(30, pages=200, answer=20) >= 6
    assert load(20, pages=200, answer=20) <= 7, "one engine goes on answering"
    settled = len(made.roles)
    load(30, pages=200, answer=20)
    assert len(made.roles) - settled <= 1 and settled - changed <= 8
    made.settle()


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_lost_whatever_engines_do(policy: str, seed: int) -> None:
    """Engines die, hang, come back, join and leave at random moments; every request ends, and once."""
    draw = random.Random(seed)
    made = world(roles="ppbbd", policy=policy, window_s=draw.choice([0.2, 4.0]), seed=seed)
    texts = [list(range(100 * each, 100 * each + draw.randrange(1, 60))) for each in range(12)]
    for number in range(150):
        text = draw.choice(texts)
        pages = pages_of(*text[: draw.randrange(len(text) + 1)], 5000 + number)
        made.arrive(arrival(number, pages, tenant=draw.choice("abc"), answer=draw.randrange(1, 200)))
        match draw.randrange(12):
            case 0:
                sim = draw.choice([*made.engines.values()])
                sim.up = not sim.up
            case 1:
                made.ask(late_s=draw.choice([0.0, 0.5, 10.0]))
            case 2:
                made.tell(ev.RequestCancelled(made.now_s, draw.randrange(number + 1)))
            case 3:
                made.add(f"e{len(made.engines)}-{number}", draw.choice([*Role]))
            case 4 if len(made.engines) > 4:
                name = draw.choice(sorted(made.engines))
                del made.engines[name]
                made.tell(ev.EngineLost(made.now_s, name))
                made.tell(ev.NodeLost(made.now_s, f"node-{name}"))
        made.run(made.now_s + draw.expovariate(20))
    for sim in made.engines.values():
        sim.up = True
    made.add("last")
    made.settle()
    assert not any(map(len, made.state.queues.values()))
    assert not set(made.done) & (set(made.refused) | set(made.given_up))
    for engine in made.state.fleet.engines.values():
        assert not engine.works and not engine.ends and not engine.waiting and not engine.tokens


def test_answers_that_are_late_still_take_room() -> None:
    """Nobody is sent more because its answers should have ended: it is slower than was predicted."""
    made = world(roles="pdd")
    engines = made.state.fleet.engines
    name = next(each for each in sorted(engines) if engines[each].role is Role.DECODE)
    for number in range(5):
        made.state.fleet.add(name, EngineWork(1000 + number, 0.0, 100, 0.0, True, ends_s=1.0))
    for now_s in (0.5, 5.0):
        candidates = made.candidates(arrival(7, pages_of(1, 2)), now_s)
        assert candidates is not None
        batches = dict(zip((each.about.name for each in candidates.engines), candidates.batch.tolist(), strict=True))
        assert batches[name] == 6, batches
