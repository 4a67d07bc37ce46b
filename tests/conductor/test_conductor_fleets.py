"""What a conductor makes of a whole fleet: work that goes to another cluster, and roles that follow the mix of work."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from engine.conductor.state.candidates import EGRESS_BURST_S, Priors
from engine.model.request import Role
from tests.helpers.fleet import KV_BYTES, LAYOUT, PAGE, STEP_S, TOKENS_PER_S, World, arrival, pages_of, world

LINEAR = Priors(prefill_tokens_per_s=TOKENS_PER_S, prefill_fixed_s=0.0, context_even=1e12, step_each=0.0)


@dataclass
class Load:
    """Requests at a rate, each by chance ``long`` or ``short`` pages long."""

    per_s: float
    short: int
    long: int
    share: float
    answer: int
    wanted_s: float = 0.0

    def run(self, made: World, seconds: float, seed: int = 1) -> list[int]:
        """So many seconds of it; the requests' numbers."""
        draw, end_s, numbers = random.Random(seed), made.now_s + seconds, []
        while made.now_s < end_s:
            number, pages = len(made.arrivals), self.long if draw.random() < self.share else self.short
            numbers.append(number)
            self.came[number] = made.now_s
            prompt = pages_of(*range(10_000 * number, 10_000 * number + pages))
            made.arrive(arrival(number, prompt, answer=self.answer, first_token_s=self.wanted_s))
            made.run(made.now_s + draw.expovariate(self.per_s))
        return numbers

    def __post_init__(self) -> None:
        self.came: dict[int, float] = {}

    def waits_s(self, made: World, numbers: list[int], never_s: float) -> list[float]:
        """Until their first tokens; ``never_s`` for those that have none yet."""
        return [made.first[number] - self.came[number] if number in made.first else never_s for number in numbers]


# --- Another cluster (PrfaaS) ----------------------------------------------------------------------------------------

SECONDS, LANES, EGRESS = 90.0, 2, 4e9
SHORT, LONG, SHARE = 60, 600, 0.3  # pages: 0.5 s and 5 s of an engine; this part of the requests is long


def _offloaded(remote: bool, seed: int) -> tuple[float, float, World]:
    """Requests answered per second, P90 of the first token's wait, and the world they were answered in."""
    made = world(roles="ppdd", priors=LINEAR, split="always")
    if remote:
        made.add("far", Role.PREFILL, node="", zone="other", lanes=LANES, egress_bytes_per_s=EGRESS)
    load = Load(per_s=1.8, short=SHORT, long=LONG, share=SHARE, answer=50)
    numbers = load.run(made, SECONDS, seed)
    answered = sum(1 for number in numbers if number in made.done)
    return answered / SECONDS, float(np.percentile(load.waits_s(made, numbers, SECONDS), 90)), made


@pytest.mark.parametrize("seed", [1, 2])
def test_long_prompts_go_to_another_cluster(seed: int) -> None:
    """More is answered, and sooner, in the shape of the paper's table: +54 % and 3.5 s instead of 9.7 s. With two
    local engines and ``p`` the part that is long, ``min(remote / p, local / (1 - p))`` leaves room for 1.8 per second.
    """
    here_per_s, here_s, _ = _offloaded(False, seed)
    both_per_s, both_s, made = _offloaded(True, seed)
    assert both_per_s >= 1.4 * here_per_s, (both_per_s, here_per_s)
    assert both_s <= 0.4 * here_s, (both_s, here_s)
    away = {send.number for _, send in made.sends if send.route.computing.engine.about.name == "far"}
    shares = []
    for pages in (SHORT, LONG):
        those = {number for number, one in made.arrivals.items() if len(one.pages[LAYOUT]) == pages}
        shares.append(len(those & away) / len(those))
    assert shares[1] >= 0.5 and shares[0] <= 0.2, shares
    far = made.engines["far"]
    assert far.left <= EGRESS * (made.now_s + EGRESS_BURST_S) + LONG * PAGE * KV_BYTES, "what leaves it has a limit"
    assert all(send.route.local or send.route.answering.engine.about.name != "far" for _, send in made.sends)


# --- Roles ------------------------------------------------------------------------------------------------------------

SPLIT_S, WANTED_S = 20.0, 2.0
ENGINES, BATCH = 5, 16
ANSWERS = Load(
    per_s=6.5, short=15, long=15, share=0, answer=400, wanted_s=WANTED_S
)  # 0.12 s of prompt, 0.5 s of answer
PROMPTS = Load(
    per_s=6.5, short=62, long=62, share=0, answer=100, wanted_s=WANTED_S
)  # 0.5 s of prompt, 0.125 s of answer


def _goodput(made: World, load: Load, seed: int) -> float:
    """Of the requests of some seconds, the part whose first token came in time."""
    numbers = load.run(made, SPLIT_S, seed)
    made.run(made.now_s + WANTED_S)
    return sum(wait_s <= WANTED_S for wait_s in load.waits_s(made, numbers, 1e9)) / len(numbers)


def _split(prompts: int, **rules: object) -> World:
    made = world(priors=LINEAR, split="always", **rules)
    for number in range(ENGINES):
        made.add(f"e{number}", Role.PREFILL if number < prompts else Role.DECODE, batch_max=BATCH)
    return made


def test_goodput_follows_the_mix() -> None:
    """From answers to prompts, 20 : 80 to 80 : 20 of the work: after 30 s as good as the best split that is fixed."""
    assert pytest.approx(800) == BATCH / STEP_S, "tokens per second of an engine, for the loads above"
    best = 0.0
    for prompts in range(1, ENGINES):
        fixed = _split(prompts)
        PROMPTS.run(fixed, 5.0)
        best = max(best, _goodput(fixed, PROMPTS, 7))
    made = _split(1, roles_floor=1)
    made.lead()
    ANSWERS.run(made, 20.0)
    PROMPTS.run(made, 30.0)
    adapted = _goodput(made, PROMPTS, 7)
    assert best > 0.8 and adapted >= 0.9 * best, (adapted, best, made.roles)
    assert len(made.roles) <= 6, "engines do not change to and fro"
