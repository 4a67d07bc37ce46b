"""Rows about simulated clusters (``engine.simulator.serve``): speed, orders that were published, errors of formulas."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import numpy as np

from bench.studies.fleet import say
from engine.conductor.state.conductor_state import ConductorRules
from engine.simulator.cluster import ClusterSpec
from engine.simulator.estimate import estimate, traffic_of, variants
from engine.simulator.generate import conversations
from engine.simulator.plan import Slo, at_rate, workload
from engine.simulator.serve import ServeReport, ServeSimulation, report
from engine.simulator.trace import TraceRequest
from kvstore.bench.harness import Bar, Kind, Result, result
from kvstore.bench.stage import Stage

REQUESTS, REQUESTS_QUICK = 12_031, 200
WINDOW, WINDOW_QUICK = 1_500, 100

# As in the evaluation of "Mooncake" (Qin et al., FAST'25): 8 prefill and 8 decode instances of 8 A800 each.
FAST25: Final = ClusterSpec(
    gpu="a800", model="70b-gqa", gpus=8, engines=16, prefill=8, engines_per_host=1, fabric="rdma-800", dram=1 << 40
)
RATES: Final = (3.0, 5.0)


def _run(spec: ClusterSpec, trace: list[TraceRequest], policy: str, split: str = "cost") -> ServeReport:
    simulation = ServeSimulation(spec, ConductorRules(policy=policy, split=split))
    simulation.run(trace)
    return report(simulation, policy)


def speed(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Measure the CPU seconds to serve a trace with 16 engines."""
    count = REQUESTS_QUICK if stage.settings.quick else REQUESTS
    trace, spec = list(conversations(count, seed=1)), ClusterSpec(engines=16)
    took_s = []
    for _ in range(stage.settings.rounds):
        start_s = time.process_time()
        _run(spec, trace, "kv-centric")
        took_s.append(time.process_time() - start_s)
    return [result(name, Kind.TIME, took_s, bar=bar, details={"requests": count, "engines": spec.engines})]


def policies(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Compare the mean time to the first token under four policies, of which one uses prefixes of other nodes.

    Each result is the ratio of the policy before it in the published order to this one.
    """
    count = WINDOW_QUICK if stage.settings.quick else WINDOW
    trace, lines = list(conversations(count, seed=1)), []
    say(f"{'rate':>5} {'policy':12} {'ttft':>8} {'p90':>8} {'hits':>6}")
    for rate in RATES:
        before_s = 0.0
        for policy in ("random", "least-load", "own-cache", "kv-centric"):
            made = _run(replace(FAST25, remote=policy == "kv-centric"), at_rate(trace, rate), policy)
            hits = sum(made.hits.values())
            mean_s = made.ttft["mean"]
            say(f"{rate:5.1f} {policy:12} {mean_s:8.2f} {made.ttft['p90']:8.2f} {hits / (hits + made.computed):6.2f}")
            if before_s:
                lines.append(result(f"{name}.{rate:g}.{policy}", Kind.TIMES, [before_s / mean_s], bar=bar))
            before_s = mean_s
    return lines


def formulas(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Compare the formulas of the what-if page with the simulation: the relative errors of two means."""
    count = WINDOW_QUICK if stage.settings.quick else 600
    trace, spec, lines = list(conversations(count, seed=0)), ClusterSpec(engines=8), []
    load = workload(trace)
    lengths = np.array([each.input_tokens for each in trace], float)
    traffic = traffic_of(load, float(lengths.var() / lengths.mean() ** 2))
    errors: dict[str, list[float]] = {"ttft": [], "tpot": []}
    for design, each in variants(spec, traffic, Slo(2.0, 0.05)).items():
        policy = "kv-centric" if each.pool else "own-cache"
        split = "cost" if each.pool else "always" if each.prefill else "never"
        for rate in (2.0, 6.0):
            said, made = estimate(each, traffic, rate), _run(each, at_rate(trace, rate), policy, split)
            pairs = {"ttft": (said.ttft_mean, made.ttft["mean"]), "tpot": (said.tpot, made.tpot["mean"])}
            for what, (formula_s, simulated_s) in pairs.items():
                errors[what].append(abs(formula_s / simulated_s - 1))
            say(f"{design:20} {rate:4.1f} /s " + " ".join(
                f"{what} {formula_s:.3f} {simulated_s:.3f}" for what, (formula_s, simulated_s) in pairs.items()
            ))  # fmt: skip
    for what, found in errors.items():
        details = {"largest": max(found)}
        lines.append(result(f"{name}.{what}", Kind.TIMES, [float(np.mean(found))], bar=bar, details=details))
    return lines
