"""A plan for a cluster: which design serves a workload best, how large its tiers should be, and why.

Formulas answer what depends on one request: the bytes of its KV, the time to compute it, and the time to move it. The
simulation of ``serve`` answers what depends on queues: the *goodput* of a design is the highest rate at which at least
``SHARE`` of the requests meet both limits (Zhong et al., "DistServe", OSDI 2024, section 2). A refused request misses
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from engine.conductor.state.conductor_state import ConductorRules
from engine.simulator.cluster import ClusterSpec
from engine.simulator.hardware import ASSUMED, LINKS, Efficiency, LinkSpeed, Roofline
from engine.simulator.serve import ServeReport, ServeSimulation, report
from engine.simulator.trace import TraceRequest
from kvstore.errors import InvalidRequest

SHARE: Final = 0.9
STEPS: Final = 7  # of the bisection for a rate: the result is within two percent
RATE_RANGE: Final = 0.125, 1.5  # the search begins between these multiples of the estimate
CURVE: Final = (0.6, 0.8, 0.9, 0.95)  # shares of the possible hits
CONTEXT_MAX: Final = 1 << 20
DRAM_PRICE: Final = 4.0  # of a GB, in the currency of the budget; assumed
NVME_PRICE: Final = 0.12
DRAM_SIZES: Final = tuple(64 << 30 << step for step in range(6))
NVME_SIZES: Final = (0, *(1 << 40 << step for step in range(5)))


class Slo(NamedTuple):
    """Limits for the time to the first token, and for the mean time of each later one, in seconds."""

    first_token_s: float
    token_s: float


class Design(NamedTuple):
    """A way to use the GPUs."""

    name: str
    spec: ClusterSpec
    policy: str
    split: str


@dataclass(frozen=True, slots=True)
class Workload:
    """What requests look like: the means of a trace, and how its blocks are used again.

    Attributes:
        curve: for each share in ``CURVE``, the least number of pages with which a cache that drops the page that was
            used least recently reaches this share of the possible hits.
        hit_ratio: the share of the tokens of prompts that a cache without limit has.
        distances: sorted numbers of other pages between two uses of a page.
    """

    requests: int
    rate: float
    input_tokens: float
    output_tokens: float
    hit_ratio: float
    pages: int
    curve: dict[float, int]
    distances: np.ndarray[tuple[int], np.dtype[np.int64]] = field(repr=False)

    def hit_ratio_of(self, pages: int) -> float:
        """Return the share of the tokens that a cache of this many pages has."""
        return int(np.searchsorted(self.distances, pages)) / max(1, self.pages)


def workload(trace: Sequence[TraceRequest]) -> Workload:
    """Measure a trace.

    Raises:
        InvalidRequest: it is empty.
    """
    if not trace:
        raise InvalidRequest("trace", "must have requests")
    distances = np.sort(np.array(reuse_distances(each.block_ids for each in trace), np.int64))
    total = sum(len(each.block_ids) for each in trace)
    seconds = max(1e-3, (trace[-1].timestamp_ms - trace[0].timestamp_ms) / 1e3)
    curve = {share: _least_pages(distances, share) for share in CURVE}
    return Workload(
        requests=len(trace),
        rate=len(trace) / seconds,
        input_tokens=float(np.mean([each.input_tokens for each in trace])),
        output_tokens=float(np.mean([each.output_tokens for each in trace])),
        hit_ratio=len(distances) / max(1, total),
        pages=total,
        curve=curve,
        distances=distances,
    )


def _least_pages(distances: np.ndarray[tuple[int], np.dtype[np.int64]], share: float) -> int:
    if not len(distances):
        return 0
    return int(distances[min(len(distances), math.ceil(share * len(distances))) - 1]) + 1


def reuse_distances(requests: Iterator[Sequence[int]] | Sequence[Sequence[int]]) -> list[int]:
    """Return, for each use of a block after its first, how many other blocks were used since its last use.

    A cache of ``n`` blocks that drops the block that was used least recently has a block again if this number is below
    ``n`` (Mattson et al., "Evaluation techniques for storage hierarchies", 1970). Requests use their blocks from the
    last to the first, so that a prefix leaves from its end. A Fenwick tree counts the blocks, in ``O(n log n)``.
    """
    uses = [block for request in requests for block in reversed(request)]
    tree, result = [0] * (len(uses) + 1), []
    last: dict[int, int] = {}

    def add(at: int, what: int) -> None:
        while at <= len(uses):
            tree[at] += what
            at += at & -at

    def before(at: int) -> int:
        total = 0
        while at:
            total += tree[at]
            at &= at - 1
        return total

    for now, block in enumerate(uses, start=1):
        previous = last.get(block)
        if previous is not None:
            result.append(before(now - 1) - before(previous))
            add(previous, -1)
        add(now, 1)
        last[block] = now
    return result


# --- one request --------------------------------------------------------------------------------------------------


def move_s(link: LinkSpeed, size: float, count: int = 1) -> float:
    """Return the seconds to move ``size`` bytes over ``count`` such links."""
    return link.latency_s + size / (link.bytes_per_s * count)


def break_even_tokens(roofline: Roofline, link: LinkSpeed, count: int = 1) -> int | None:
    """Return the shortest prompt that is loaded sooner than it is computed; None if there is none.

    Its last token is always computed.
    """

    def pays(tokens: int) -> bool:
        computed_s = roofline.prompt_s(tokens, 0) - roofline.prompt_s(1, tokens - 1)
        return move_s(link, tokens * roofline.model.kv_bytes, count) < computed_s

    if not pays(CONTEXT_MAX):
        return None
    low, high = 1, CONTEXT_MAX  # attention makes long prompts dearer, so one that pays is followed by others that do
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def exposed_s(roofline: Roofline, link: LinkSpeed, tokens: int, *, layerwise: bool, count: int = 1) -> float:
    """Return by how much a hand-off of a prompt delays its first token."""
    moves_s = move_s(link, tokens * roofline.model.kv_bytes, count)
    if not layerwise:
        return moves_s
    return max(moves_s - roofline.prompt_s(tokens, 0), moves_s / roofline.model.layers)


# --- designs ------------------------------------------------------------------------------------------------------


def prefill_engines(spec: ClusterSpec, load: Workload, hit_ratio: float) -> int:
    """Estimate how many engines should only compute prompts, so that both kinds are equally busy."""
    roofline = spec.roofline()
    cached = hit_ratio * load.input_tokens
    prompt_s = roofline.prompt_s(load.input_tokens - cached, cached)
    batch = 32
    alone_s, each_s = roofline.step_terms(batch)
    context = load.input_tokens + load.output_tokens / 2
    answer_s = load.output_tokens * (alone_s + each_s * batch * context) / batch
    share = prompt_s / (prompt_s + answer_s)
    return min(spec.engines - 1, max(1, round(share * spec.engines)))


def designs(spec: ClusterSpec, load: Workload) -> list[Design]:
    """Return the designs to compare, on equal GPUs. Those with two kinds of engines come with several ratios."""
    alone = replace(spec, prefill=0, pool=False)
    found = [
        Design("co-located", replace(alone, chunk_tokens=0), "own-cache", "never"),
        Design("chunked", replace(alone, chunk_tokens=spec.chunk_tokens or 2048), "own-cache", "never"),
        Design(
            "chunked, pool", replace(alone, chunk_tokens=spec.chunk_tokens or 2048, pool=True), "kv-centric", "never"
        ),
    ]
    for pool, name in ((False, "disaggregated"), (True, "disaggregated, pool")):
        if spec.engines < 2:
            continue
        middle = prefill_engines(spec, load, load.hit_ratio if pool else load.hit_ratio / 2)
        for count in sorted({max(1, middle - 1), middle, min(spec.engines - 1, middle + 1)}):
            split = replace(spec, prefill=count, pool=pool, chunk_tokens=spec.chunk_tokens or 2048)
            policy = ("kv-centric", "cost") if pool else ("own-cache", "always")
            found.append(Design(name, split, *policy))
    return found


def at_rate(trace: Sequence[TraceRequest], rate: float) -> list[TraceRequest]:
    """Return the trace, faster or slower, so that ``rate`` requests arrive per second."""
    start_ms, end_ms = trace[0].timestamp_ms, trace[-1].timestamp_ms
    factor = len(trace) / rate * 1e3 / max(1, end_ms - start_ms)
    return [replace(each, timestamp_ms=int((each.timestamp_ms - start_ms) * factor)) for each in trace]


def run_design(
    design: Design, trace: Sequence[TraceRequest], slo: Slo, efficiency: Efficiency = ASSUMED
) -> ServeReport:
    """Simulate one design. The conductor knows the limits, and refuses requests that would miss them."""
    rules = ConductorRules(
        policy=design.policy, split=design.split, first_token_s=slo.first_token_s, token_s=slo.token_s
    )
    simulation = ServeSimulation(design.spec, rules, efficiency)
    simulation.run(trace)
    return report(simulation, design.policy, slo.first_token_s, slo.token_s)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The goodput of a design: requests per second, and what a run at this rate brought."""

    design: Design
    rate: float
    run: ServeReport


def goodput(
    design: Design, trace: Sequence[TraceRequest], load: Workload, slo: Slo, efficiency: Efficiency = ASSUMED
) -> Goodput:
    """Search the highest rate at which ``SHARE`` of the requests meet the limits; 0 if none does."""
    roofline = design.spec.roofline(efficiency)
    prompt_s = roofline.prompt_s(load.input_tokens * (1 - load.hit_ratio), load.input_tokens * load.hit_ratio)
    estimate = design.spec.engines / prompt_s
    low, high, best = estimate * RATE_RANGE[0], estimate * RATE_RANGE[1], None
    for _ in range(STEPS):
        rate = math.sqrt(low * high)
        run = run_design(design, at_rate(trace, rate), slo, efficiency)
        if run.good >= SHARE * run.requests:
            low, best = rate, Goodput(design, rate, run)
        else:
            high = rate
    if best is None:
        return Goodput(design, 0.0, run_design(design, at_rate(trace, low), slo, efficiency))
    return best


# --- tiers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Sizes for each host, with what they cost and bring.

    Attributes:
        saved_s: seconds of one engine that each request saves, on average.
    """

    dram: int
    nvme: int
    price: float
    hit_ratio: float
    saved_s: float


def tier_sizes(spec: ClusterSpec, load: Workload, budget: float) -> list[TierSizes]:
    """Return the sizes of DRAM and NVMe that save the most time for at most ``budget`` per host, best first.

    A hit saves the time to compute its tokens, less the time to load them, if that is shorter.
    """
    roofline, tokens = spec.roofline(), load.input_tokens
    token_s = (roofline.prompt_s(tokens, 0) - roofline.efficiency.prompt_s) / tokens
    upper_s = spec.shape.kv_bytes / (LINKS[spec.host_link].bytes_per_s * spec.gpus_of_engine)
    lower_s = upper_s + spec.shape.kv_bytes / (LINKS[spec.drive].bytes_per_s * spec.drives)
    found = []
    for dram in DRAM_SIZES:
        for nvme in NVME_SIZES:
            price = dram / 1e9 * DRAM_PRICE + nvme / 1e9 * NVME_PRICE
            if price > budget:
                continue
            upper = load.hit_ratio_of(dram * spec.hosts // spec.page_bytes)
            both = max(upper, load.hit_ratio_of((dram + nvme) * spec.hosts // spec.page_bytes))
            saved_s = tokens * (upper * max(0.0, token_s - upper_s) + (both - upper) * max(0.0, token_s - lower_s))
            found.append(TierSizes(dram, nvme, price, both, saved_s))
    return sorted(found, key=lambda each: (-round(each.saved_s, 6), each.price))


# --- the plan -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The answer. Times are in seconds, sizes in bytes.

    Attributes:
        kv_bytes_per_token: of the model.
        prompt_s: the time to compute a prompt of the mean length, without any reuse.
        links: for each link, the time to move that prompt's KV, the exposed time of a hand-off, and the break-even
            length.
        best: the best goodput of each design, the best design first.
        tiers: see ``tier_sizes``; empty without a budget.
        because: sentences that explain the recommendation. ``unknown``: what the plan does not know.
    """

    spec: ClusterSpec
    slo: Slo
    load: Workload
    kv_bytes_per_token: int
    prompt_s: float
    links: dict[str, dict[str, float | None]]
    best: list[Goodput]
    tiers: list[TierSizes]
    recommended: str
    because: list[str]
    unknown: list[str]


def links_of(spec: ClusterSpec, tokens: int, efficiency: Efficiency = ASSUMED) -> dict[str, dict[str, float | None]]:
    """Return what each link means for a prompt of this length; see ``ClusterPlan.links``."""
    roofline, size = spec.roofline(efficiency), tokens * spec.shape.kv_bytes
    return {
        name: {
            "move_s": move_s(link, size),
            "exposed_layerwise_s": exposed_s(roofline, link, tokens, layerwise=True),
            "exposed_whole_s": exposed_s(roofline, link, tokens, layerwise=False),
            "break_even_tokens": break_even_tokens(roofline, link),
        }
        for name, link in LINKS.items()
    }


def make_plan(
    spec: ClusterSpec,
    trace: Sequence[TraceRequest],
    slo: Slo,
    *,
    budget: float = 0.0,
    efficiency: Efficiency = ASSUMED,
    calibrated: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ClusterPlan:
    """Compare all designs, and recommend one.

    Args:
        budget: for the DRAM and NVMe of a host; 0 for no search.
        calibrated: the constants are measured, not assumed.
        progress: is called with the number of designs that are done, and of all.

    Raises:
        InvalidRequest: the trace is empty.
    """
    load = workload(trace)
    tokens = max(1, round(load.input_tokens))
    candidates, results = designs(spec, load), []
    for number, design in enumerate(candidates):
        if progress is not None:
            progress(number, len(candidates))
        results.append(goodput(design, trace, load, slo, efficiency))
    best: dict[str, Goodput] = {}
    for each in results:
        if each.design.name not in best or each.rate > best[each.design.name].rate:
            best[each.design.name] = each
    ranked = sorted(best.values(), key=lambda each: (-each.rate, each.run.ttft["p90"]))
    prompt_s = spec.roofline(efficiency).prompt_s(tokens, 0)
    links = links_of(spec, tokens, efficiency)
    return ClusterPlan(
        spec=spec, slo=slo, load=load, kv_bytes_per_token=spec.shape.kv_bytes, prompt_s=prompt_s, links=links,
        best=ranked, tiers=tier_sizes(spec, load, budget) if budget else [],
        recommended=ranked[0].design.name if ranked[0].rate else "none",
        because=_reasons(spec, load, slo, ranked, links, prompt_s),
        unknown=_unknown(calibrated, len(trace)),
    )  # fmt: skip


def _reasons(
    spec: ClusterSpec, load: Workload, slo: Slo, ranked: list[Goodput], links: dict[str, dict[str, float | None]],
    prompt_s: float,
) -> list[str]:  # fmt: skip
    first, rest = ranked[0], ranked[1:]
    if not first.rate:
        return [
            f"No design answers {SHARE:.0%} of the requests within {slo.first_token_s:g} s and {slo.token_s * 1e3:g} ms"
            f" per token: a prompt of {load.input_tokens:,.0f} tokens alone takes {prompt_s:.2f} s."
        ]
    others = [
        f"{each.design.name} serves {each.rate / first.rate:.0%} of that" if each.rate else f"{each.design.name} none"
        for each in rest
    ]
    reasons = [
        f"{first.design.name} serves {first.rate:.2f} requests/s within the limits"
        + "".join(f"; {other}" for other in others) + "."
    ]  # fmt: skip
    fabric = links[spec.fabric]
    exposed, even = fabric["exposed_layerwise_s"], fabric["break_even_tokens"]
    reasons.append(
        f"Over {spec.fabric}, a hand-off of {load.input_tokens:,.0f} tokens delays the first token by "
        f"{1e3 * (exposed or 0.0):.1f} ms; computing them takes {1e3 * prompt_s:.0f} ms."
    )
    if even is None:
        reasons.append(f"Loading a prefix over {spec.fabric} never pays: computing it is sooner.")
    else:
        reasons.append(f"Loading a prefix over {spec.fabric} pays from {even:,.0f} tokens on.")
    hits = first.run.hits
    found, total = sum(hits.values()), sum(hits.values()) + first.run.computed
    reasons.append(
        f"{load.hit_ratio:.0%} of the tokens of prompts are repeated; this design finds {found / max(1, total):.0%}."
    )
    return reasons


def _unknown(calibrated: bool, requests: int) -> list[str]:
    unknown = [] if calibrated else ["The speeds of engines and links are assumed, not measured: use --calibrate."]
    if requests < 1000:
        unknown.append(f"{requests} requests are few: the goodput has an error of several percent.")
    return [
        *unknown,
        "Failures, cold starts, and the time of tokenizers and networks of clients are left out.",
        "The simulation knows the length of each answer when it reserves memory; an engine does not.",
    ]
