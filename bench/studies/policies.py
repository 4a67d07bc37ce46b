"""Rows about the conductor, live: paced engines, real nodes and a real conductor (see ``bench.studies.fleet``).

``conductor_policies``: the same arrivals for every policy, at three loads. Each cell has a salt of its own, so that it
finds nothing of the one before. The table is printed as it is measured; lines are ``<name>.<load>.<policy>``.

``conductor_burst``: a thousand equal prompts at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from bench.studies.fleet import PAGE_TOKENS, FleetAnswer, FleetAsk, PacedFleet, check, conversation, say
from engine.conductor.state.policies import POLICIES
from engine.model.request import Role
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage

LOADS: Final = (0.5, 0.8, 1.1)
ROUND_S, ROUND_QUICK_S = 20.0, 3.0
FIRST_TOKEN_S, TOKEN_S = 2.0, 0.15  # that requests want to meet: of a large model's, 10 s and 23 ms
ENGINES, NODES = 8, 4

BURST, BURST_QUICK = 1000, 60
BURST_PAGES: Final = 40
BURST_ENGINES: Final = Bar(0.5, at_least=False, of_ratio=False)


def policies(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Time to the first token, reuse, refusals and goodput of every policy at every load."""
    quick = stage.settings.quick
    chosen, loads, engines = (["kv-centric"], [0.5], 2) if quick else (list(POLICIES), LOADS, ENGINES)
    wanted = {} if quick else {"first_token_s": FIRST_TOKEN_S, "token_s": TOKEN_S}  # a busy machine may meet none
    lines: list[Result] = []
    with ExitStack() as scene:
        fleet = PacedFleet(stage, scene, [Role.BOTH] * engines, engines // 2)
        fleet.warm_up()
        say(f"{'load':>5} {'policy':15} {'ttft':>7} {'p99':>7} {'reuse':>6} {'refused':>8} {'goodput':>8} {'cpu':>5}")
        for load in loads:
            asked = conversation(ROUND_QUICK_S if quick else ROUND_S, load, engines, seed=1)
            for policy in chosen:
                found = _cell(fleet, asked, wanted, policy=policy, salt=f"{load}-{policy}")
                say(
                    f"{load:5.1f} {policy:15} {found['ttft_s']:7.3f} {found['ttft_p99_s']:7.3f} {found['reuse']:6.3f} "
                    f"{found['refused']:8.3f} {found['goodput']:8.3f} {found['engine_cpu']:5.2f}"
                )
                lines.append(result(f"{name}.{load}.{policy}", Kind.TIME, [found["ttft_s"]], bar=bar, details=found))
    return lines


def _cell(fleet: PacedFleet, asked: Sequence[FleetAsk], wanted: dict[str, float], **settings: str) -> dict[str, Any]:
    before = fleet.cpu_s()
    with fleet.conductor(**settings, **wanted) as conductor:
        answers = conductor.ask(asked)
    check(answers)
    seconds = max(each.asking.at_s + each.last_s for each in answers)
    shares = [(after - used) / seconds for after, used in zip(fleet.cpu_s(), before, strict=True)]
    return {**settings, "requests": len(asked), "engine_cpu": max(shares), **measures(answers)}


def measures(answers: Sequence[FleetAnswer]) -> dict[str, float]:
    """Summarise answers: times to the first token, the part of the prompts' tokens that was found, the part of the
    requests that was refused, and goodput: the part that met both limits. Raises BenchFailed where none was
    answered."""
    answered = [each for each in answers if not each.refused]
    if not answered:
        raise BenchFailed("every request was refused")
    first_s = [each.first_s for each in answered]
    good = sum(each.first_s <= FIRST_TOKEN_S and each.token_s <= TOKEN_S for each in answered)
    return {
        "ttft_s": float(np.mean(first_s)),
        "ttft_p99_s": float(np.percentile(first_s, 99)),
        "reuse": sum(each.found for each in answered) / sum(len(each.asking.tokens) for each in answered),
        "refused": 1 - len(answered) / len(answers),
        "goodput": good / len(answers),
        "token_s": float(np.mean([each.token_s for each in answered])),
    }


def burst(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Send equal prompts at once: ``<name>`` is how often the prefix was computed, in prefixes; ``<name>.one`` the part
    of the requests that the busiest engine computed."""
    quick = stage.settings.quick
    count, engines = (BURST_QUICK, 2) if quick else (BURST, ENGINES)
    tokens = np.random.default_rng(9).integers(0, 256, BURST_PAGES * PAGE_TOKENS + 4).astype(np.uint32)
    with ExitStack() as scene:
        fleet = PacedFleet(stage, scene, [Role.BOTH] * engines, engines // 2)
        fleet.warm_up()
        with fleet.conductor(salt="burst") as conductor:
            answers = conductor.ask([FleetAsk(0.0, tokens, 2)] * count)
    check(answers)
    if any(each.refused for each in answers):
        raise BenchFailed("a request was refused")
    pages = sum(each.computed // PAGE_TOKENS for each in answers)
    went = Counter(each.route["computes"] for each in answers)
    details = {"requests": count, "engines": engines, "went": dict(went), "computed_pages": pages}
    say(f"{count} equal prompts: computed {pages / BURST_PAGES:.2f} times, by engine {sorted(went.values())}")
    return [
        result(name, Kind.TIMES, [pages / BURST_PAGES], bar=bar, details=details),
        result(f"{name}.one", Kind.TIMES, [max(went.values()) / count], bar=BURST_ENGINES, details=details),
    ]
