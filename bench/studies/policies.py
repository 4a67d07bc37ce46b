"""Rows about the conductor: paced engines, real nodes and a real conductor (see ``bench.studies.fleet``).

``conductor_policies`` sends the same requests under every policy, at three loads. Each cell uses its own salt, so it
finds no pages of an earlier cell. The table is printed row by row; result lines are named ``<name>.<load>.<policy>``.

``conductor_burst`` sends a thousand equal prompts at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from bench.studies.fleet import PAGE_TOKENS, FleetAnswer, FleetRequest, PacedFleet, check, conversation, say
from engine.conductor.state.policies import POLICIES
from engine.model.request import Role
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage

LOADS: Final = (0.5, 0.8, 1.1)
ROUND_S, ROUND_QUICK_S = 20.0, 3.0
FIRST_TOKEN_S, TOKEN_S = 2.0, 0.15  # deadlines of requests; 10 s and 23 ms for the large model
ENGINES, NODES = 8, 4

BURST, BURST_QUICK = 1000, 60
BURST_PAGES: Final = 40
BURST_ENGINES: Final = Bar(0.5, at_least=False, of_ratio=False)


def policies(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Measure the time to the first token, reuse, refusals and goodput of every policy at every load."""
    quick = stage.settings.quick
    chosen, loads, engines = (["kv-centric"], [0.5], 2) if quick else (list(POLICIES), LOADS, ENGINES)
    deadlines = (
        {} if quick else {"first_token_s": FIRST_TOKEN_S, "token_s": TOKEN_S}
    )  # a busy machine may miss all deadlines
    lines: list[Result] = []
    with ExitStack() as scene:
        fleet = PacedFleet(stage, scene, [Role.BOTH] * engines, engines // 2)
        fleet.warm_up()
        say(f"{'load':>5} {'policy':15} {'ttft':>7} {'p99':>7} {'reuse':>6} {'refused':>8} {'goodput':>8} {'cpu':>5}")
        for load in loads:
            requests = conversation(ROUND_QUICK_S if quick else ROUND_S, load, engines, seed=1)
            for policy in chosen:
                cell = _cell(fleet, requests, deadlines, policy=policy, salt=f"{load}-{policy}")
                say(
                    f"{load:5.1f} {policy:15} {cell['ttft_s']:7.3f} {cell['ttft_p99_s']:7.3f} {cell['reuse']:6.3f} "
                    f"{cell['refused']:8.3f} {cell['goodput']:8.3f} {cell['engine_cpu']:5.2f}"
                )
                lines.append(result(f"{name}.{load}.{policy}", Kind.TIME, [cell["ttft_s"]], bar=bar, details=cell))
    return lines


def _cell(
    fleet: PacedFleet, requests: Sequence[FleetRequest], deadlines: dict[str, float], **settings: str
) -> dict[str, Any]:
    before = fleet.cpu_s()
    with fleet.conductor(**settings, **deadlines) as conductor:
        answers = conductor.ask(requests)
    check(answers)
    seconds = max(each.request.at_s + each.last_s for each in answers)
    shares = [(after - used) / seconds for after, used in zip(fleet.cpu_s(), before, strict=True)]
    return {**settings, "requests": len(requests), "engine_cpu": max(shares), **measures(answers)}


def measures(answers: Sequence[FleetAnswer]) -> dict[str, float]:
    """Summarise answers: times to the first token, the share of prompt tokens that were found, the share of refused
    requests, and goodput, which is the share of requests that met both deadlines. Raises BenchFailed if every request
    was refused."""
    answered = [each for each in answers if not each.refused]
    if not answered:
        raise BenchFailed("every request was refused")
    first_s = [each.first_s for each in answered]
    good = sum(each.first_s <= FIRST_TOKEN_S and each.token_s <= TOKEN_S for each in answered)
    return {
        "ttft_s": float(np.mean(first_s)),
        "ttft_p99_s": float(np.percentile(first_s, 99)),
        "reuse": sum(each.found_tokens for each in answered) / sum(len(each.request.tokens) for each in answered),
        "refused": 1 - len(answered) / len(answers),
        "goodput": good / len(answers),
        "token_s": float(np.mean([each.token_s for each in answered])),
    }


def burst(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Send equal prompts at once. ``<name>`` is the number of times that the prefix was computed; ``<name>.one`` is the
    share of the requests that the busiest engine computed."""
    quick = stage.settings.quick
    count, engines = (BURST_QUICK, 2) if quick else (BURST, ENGINES)
    tokens = np.random.default_rng(9).integers(0, 256, BURST_PAGES * PAGE_TOKENS + 4).astype(np.uint32)
    with ExitStack() as scene:
        fleet = PacedFleet(stage, scene, [Role.BOTH] * engines, engines // 2)
        fleet.warm_up()
        with fleet.conductor(salt="burst") as conductor:
            answers = conductor.ask([FleetRequest(0.0, tokens, 2)] * count)
    check(answers)
    if any(each.refused for each in answers):
        raise BenchFailed("a request was refused")
    pages = sum(each.computed_tokens // PAGE_TOKENS for each in answers)
    requests_by_engine = Counter(each.route["computes"] for each in answers)
    details = {"requests": count, "engines": engines, "went": dict(requests_by_engine), "computed_pages": pages}
    by_engine = sorted(requests_by_engine.values())
    say(f"{count} equal prompts: computed {pages / BURST_PAGES:.2f} times, by engine {by_engine}")
    return [
        result(name, Kind.TIMES, [pages / BURST_PAGES], bar=bar, details=details),
        result(
            f"{name}.one", Kind.TIMES, [max(requests_by_engine.values()) / count], bar=BURST_ENGINES, details=details
        ),
    ]
