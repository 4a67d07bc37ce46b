"""Estimates of a design by formulas, in well under a millisecond: for pages whose sliders move.

Queues follow an approximation for several servers (Sakasegawa, "An approximation formula Lq = a b^c / (1 - b)",
1977). With ``c`` servers, utilization ``r``, mean service ``S`` and squared coefficients of variation of 1 for arrivals
and ``v`` for service::

    wait = S (1 + v) / 2 * r^(sqrt(2 (c + 1)) - 1) / (c (1 - r))

Waiting times are assumed to be exponential where their percentiles are needed, and lengths of prompts log-normal.
A decode batch is the fixed point of Little's law: sequences = arrivals * tokens of an answer * time of a token.
``docs/scheduling.md`` says how far these estimates are from the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, pvariance
from typing import Final

from engine.simulator.cluster import HBM_CACHE_SHARE, ClusterSpec
from engine.simulator.hardware import ASSUMED, LINKS, Efficiency
from engine.simulator.plan import Slo, Workload, exposed_s, move_s

QUANTILES: Final = tuple(NormalDist().inv_cdf((number + 0.5) / 20) for number in range(20))
Z90: Final = NormalDist().inv_cdf(0.9)
LN10: Final = math.log(10)
ROUNDS: Final = 60  # of a fixed point, or of a bisection
SPREAD: Final = 1.0  # the squared coefficient of variation of lengths, if no trace says it


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What requests look like: mean tokens of prompts and answers, the spread of the former, and repeated prefixes.

    Attributes:
        spread: the squared coefficient of variation of the length of a prompt.
        hit_ratio: the share of the tokens of prompts that a cache without limit has.
        load: the trace that says which share a cache of a certain size has; None to assume that half of the possible
            hits need ``half_bytes`` of memory.
    """

    input_tokens: float
    output_tokens: float
    spread: float = SPREAD
    hit_ratio: float = 0.5
    half_bytes: float = 256 << 30
    load: Workload | None = None

    def hits(self, size: float, page_bytes: int) -> float:
        """Return the share of the tokens of prompts that a cache of ``size`` bytes has."""
        if self.load is not None:
            return self.load.hit_ratio_of(int(size / page_bytes))
        return self.hit_ratio * size / (size + self.half_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a design does at one rate. Times are in seconds; they are infinite above its capacity.

    Attributes:
        hit_ratio: the share of the tokens of prompts that are not computed.
        parts: where the mean time of a request goes: it waits, loads a prefix, is computed, is handed over, decodes.
        limit: what is used up first: "prefill", "decode", "memory", "link" or "".
        busy: utilization of the engines that compute prompts.
        batch: sequences that an engine decodes together.
    """

    ttft_mean: float
    ttft_p90: float
    tpot: float
    gap_max: float
    hit_ratio: float
    parts: dict[str, float]
    limit: str
    busy: float
    batch: float


def estimate(spec: ClusterSpec, traffic: Traffic, rate: float, efficiency: Efficiency = ASSUMED) -> Estimate:
    """Estimate a design at ``rate`` requests per second."""
    roofline, tokens = spec.roofline(efficiency), traffic.input_tokens
    hit_ratio = traffic.hits(_cache_bytes(spec), spec.page_bytes)
    cached = hit_ratio * tokens
    sigma = math.sqrt(math.log1p(traffic.spread))
    lengths = [tokens * math.exp(sigma * z - sigma * sigma / 2) for z in QUANTILES]
    times_s = [roofline.prompt_s(max(1.0, each * (1 - hit_ratio)), each * hit_ratio) for each in lengths]
    compute_s = fmean(times_s)
    load_s = move_s(LINKS[spec.host_link], cached * spec.shape.kv_bytes, spec.gpus_of_engine) if spec.pool else 0.0
    answering = spec.engines - spec.prefill if spec.prefill else spec.engines
    computing = spec.prefill or spec.engines
    share = 0.0 if spec.prefill else min(0.999, rate / computing * compute_s)
    batch, step_s, limit = _decode(spec, traffic, rate / answering, share, efficiency)
    chunks = math.ceil(max(1.0, tokens - cached) / spec.chunk_tokens) if spec.chunk_tokens and not spec.prefill else 0
    service_s = compute_s + (chunks * step_s if batch >= 1 else chunks * step_s * batch)
    busy = rate / computing * service_s
    spread = pvariance(times_s) / compute_s**2
    wait_s = _wait_s(service_s, spread, computing, busy)
    exposed = 0.0
    if spec.prefill:
        near = spec.hosts == 1
        link, count = (LINKS[spec.local], spec.gpus_of_engine) if near else (LINKS[spec.fabric], spec.adapters)
        exposed = exposed_s(roofline, link, max(1, round(tokens)), layerwise=spec.layerwise, count=count)
        moved = rate * tokens * spec.shape.kv_bytes / (computing if near else max(1, spec.hosts // 2))
        if moved > link.bytes_per_s * count:
            limit = limit or "link"
            exposed = math.inf
    if busy >= 1:
        limit = limit or "prefill"
    tpot = step_s / max(1e-3, 1 - share)
    p90_tokens = tokens * math.exp(sigma * Z90 - sigma * sigma / 2)
    p90_s = roofline.prompt_s(p90_tokens * (1 - hit_ratio), p90_tokens * hit_ratio) * service_s / compute_s
    parts = {
        "wait": wait_s, "load": load_s, "compute": service_s, "hand-off": exposed,
        "decode": traffic.output_tokens * tpot,
    }  # fmt: skip
    ttft = wait_s + load_s + service_s + exposed
    return Estimate(
        ttft_mean=ttft, ttft_p90=max(p90_s + wait_s, wait_s * LN10 + service_s) + load_s + exposed, tpot=tpot,
        gap_max=step_s + (0.0 if spec.prefill else compute_s / chunks if chunks else compute_s),
        hit_ratio=hit_ratio, parts=parts, limit=limit, busy=busy, batch=batch,
    )  # fmt: skip


def _cache_bytes(spec: ClusterSpec) -> float:
    own = spec.engines * HBM_CACHE_SHARE * spec.roofline().kv_tokens_max * spec.shape.kv_bytes
    if spec.prefill:
        own *= spec.prefill / spec.engines
    return own + (spec.hosts * (spec.dram + spec.nvme) if spec.pool else 0.0)


def _wait_s(service_s: float, spread: float, servers: int, busy: float) -> float:
    if busy >= 1:
        return math.inf
    power = math.sqrt(2 * (servers + 1)) - 1
    return service_s * (1 + spread) / 2 * float(busy**power) / (servers * (1 - busy))


def _decode(
    spec: ClusterSpec, traffic: Traffic, rate: float, share: float, efficiency: Efficiency
) -> tuple[float, float, str]:
    """Return the batch of one engine, the seconds of its step, and what is used up. ``share``: of time for prompts."""
    roofline = spec.roofline(efficiency)
    context = traffic.input_tokens + traffic.output_tokens / 2
    batch_max = min(float(spec.batch_max), roofline.kv_tokens_max / (traffic.input_tokens + traffic.output_tokens))
    batch, step_s = 0.0, 0.0
    for _ in range(ROUNDS):
        alone_s, each_s = roofline.step_terms(max(1, round(batch)))
        step_s = alone_s + each_s * max(1.0, batch) * context
        needed = rate * traffic.output_tokens * step_s / max(1e-3, 1 - share)
        if needed > batch_max:
            is_memory = batch_max < spec.batch_max
            alone_s, each_s = roofline.step_terms(max(1, round(batch_max)))
            return batch_max, alone_s + each_s * batch_max * context, "memory" if is_memory else "decode"
        if abs(needed - batch) < 1e-3 * batch:
            break
        batch = needed
    return batch, step_s, ""


def meets(made: Estimate, slo: Slo) -> bool:
    """Return whether the 90th percentile of first tokens and the mean of later ones meet the limits."""
    return not made.limit and made.ttft_p90 <= slo.first_token_s and made.tpot <= slo.token_s


def estimated_goodput(spec: ClusterSpec, traffic: Traffic, slo: Slo, efficiency: Efficiency = ASSUMED) -> float:
    """Return the highest rate at which the design meets the limits; 0 if there is none."""
    low, high = 0.0, 1.0
    while meets(estimate(spec, traffic, high, efficiency), slo):
        low, high = high, 2 * high
    for _ in range(ROUNDS // 2):
        middle = (low + high) / 2
        low, high = (middle, high) if meets(estimate(spec, traffic, middle, efficiency), slo) else (low, middle)
    return low


def variants(spec: ClusterSpec, traffic: Traffic, slo: Slo, efficiency: Efficiency = ASSUMED) -> dict[str, ClusterSpec]:
    """Return the designs that ``plan`` compares, each with the number of prefill engines that serves most."""
    chunk_tokens = spec.chunk_tokens or 2048
    alone = replace(spec, prefill=0, pool=False, chunk_tokens=chunk_tokens)
    found = {
        "co-located": replace(alone, chunk_tokens=0),
        "chunked": alone,
        "chunked, pool": replace(alone, pool=True),
    }
    if spec.engines >= 2:
        for name, pool in (("disaggregated", False), ("disaggregated, pool", True)):
            counts = _counts(spec.engines)
            ratios = [replace(alone, prefill=count, pool=pool) for count in counts]
            found[name] = max(ratios, key=lambda each: estimated_goodput(each, traffic, slo, efficiency))
    return found


def _counts(engines: int) -> Sequence[int]:
    """Return at most sixteen numbers of prefill engines to try."""
    step = max(1, engines // 16)
    return range(1, engines, step)


def traffic_of(load: Workload, spread: float = SPREAD) -> Traffic:
    """Return the traffic of a trace."""
    return Traffic(
        input_tokens=load.input_tokens, output_tokens=load.output_tokens, spread=spread, hit_ratio=load.hit_ratio,
        load=load,
    )  # fmt: skip
