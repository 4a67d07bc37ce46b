"""`kvstore simulate cache`: hit ratios of policies over one trace, as a table, as JSON, and as a picture."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.simulator.cache import CacheAccess, CacheSimulation, accesses
from engine.simulator.hints import LIAR, TENTHS, dealt, hinted
from engine.simulator.optimum import Belady, belady_hits, infinite_hits, lru_hits
from engine.simulator.policies import POLICIES, make_policy
from engine.simulator.trace import TraceRequest
from kvstore.errors import InvalidRequest

CAPACITY_MAX = 1 << 24  # pages; a simulated one takes some hundred bytes

# Yardsticks beside the policies, by the name they are shown with.
LRU_BLOCKS = "lru of single blocks"
BELADY = "belady"
BELADY_BLOCKS = "belady of single blocks"


class Half(StrEnum):
    """Which requests are run, and of which the hits are counted."""

    FIRST = "first"  # the first half of the requests, and nothing else is run: to tune on
    SECOND = "second"  # all are run, the second half is counted: to report
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Line:
    """One policy, or yardstick, at one capacity."""

    policy: str
    capacity: int
    block_hit_ratio: float
    evictions: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was run, and how it did."""

    source: str
    half: Half
    requests: int  # counted ones
    blocks: int
    infinite: float  # block hit ratio of a cache that never evicts
    capacities: tuple[int, ...]
    lines: tuple[Line, ...]

    def ratio(self, policy: str, capacity: int) -> float:
        """The hit ratio of that line."""
        return next(line.block_hit_ratio for line in self.lines if (line.policy, line.capacity) == (policy, capacity))

    def policies(self) -> list[str]:
        """Policies and yardsticks, in the order they were run."""
        return list(dict.fromkeys(line.policy for line in self.lines))


def compare(
    source: str,
    requests: Iterable[TraceRequest],
    capacities: Sequence[int],
    policies: Sequence[str],
    half: Half = Half.ALL,
) -> Comparison:
    """Run every policy at every capacity (pages), and the yardsticks beside them.

    Raises:
        InvalidRequest: a capacity is out of range, a policy is not known, or the trace is empty.
    """
    trace, count_from, blocks = _counted(requests, capacities, policies, half)
    return Comparison(
        source,
        half,
        len(trace) - count_from,
        blocks,
        infinite_hits(trace, count_from) / blocks,
        tuple(capacities),
        tuple(line for capacity in capacities for line in _lines(trace, capacity, policies, count_from, blocks)),
    )


def _counted(
    requests: Iterable[TraceRequest], capacities: Sequence[int], policies: Sequence[str], half: Half
) -> tuple[list[CacheAccess], int, int]:
    """The requests to run, from which one on they count, and how many blocks those have."""
    for capacity in capacities:
        if not 1 <= capacity <= CAPACITY_MAX:
            raise InvalidRequest("capacity", f"must be between 1 and {CAPACITY_MAX} pages, is {capacity}")
    for name in policies:
        make_policy(name, 1)
    trace = accesses(requests)
    if not trace:
        raise InvalidRequest("trace", "holds no requests")
    if half is Half.FIRST:
        trace = trace[: len(trace) // 2]
    count_from = len(trace) // 2 if half is Half.SECOND else 0
    blocks = sum(len(access.blocks) for access in trace[count_from:])
    if not blocks:
        raise InvalidRequest("half", f"the {half} half of one request is empty")
    return trace, count_from, blocks


def _lines(
    trace: Sequence[CacheAccess], capacity: int, policies: Sequence[str], count_from: int, blocks: int
) -> Iterator[Line]:
    yield Line(LRU_BLOCKS, capacity, lru_hits(trace, capacity, count_from) / blocks)
    for name in policies:
        simulation = CacheSimulation(capacity, make_policy(name, capacity))
        began = time.perf_counter()
        hits, _ = simulation.run(trace, count_from)
        yield Line(name, capacity, hits / blocks, simulation.evicted, time.perf_counter() - began)
    hits, _ = CacheSimulation(capacity, Belady(trace)).run(trace, count_from)
    yield Line(BELADY, capacity, hits / blocks)
    yield Line(BELADY_BLOCKS, capacity, belady_hits(trace, capacity, count_from) / blocks)


def compare_hints(
    source: str,
    requests: Iterable[TraceRequest],
    capacities: Sequence[int],
    policy: str,
    rule: str,
    half: Half = Half.ALL,
) -> Comparison:
    """Run a policy at every capacity without hints, and with those of a rule, by all tenants or by nine of ten.

    Beside them LRU, and the hit ratios of the tenth and of its neighbours.

    Raises:
        InvalidRequest: as ``compare``, or there is no such rule.
    """
    trace, count_from, blocks = _counted(requests, capacities, [policy], half)
    plain = dealt(trace)
    runs = {
        f"{policy}, {'all hint' if tenth == TENTHS[0] else 'a tenth ' + tenth}": hinted(plain, rule, tenth)
        for tenth in TENTHS
    }
    lines = []
    for capacity in capacities:
        for name, kind, run in (("lru", "lru", plain), (policy, policy, plain)):
            hits, _ = CacheSimulation(capacity, make_policy(kind, capacity)).run(run, count_from)
            lines.append(Line(name, capacity, hits / blocks))
        for name, run in runs.items():
            simulation = CacheSimulation(capacity, make_policy(policy, capacity))
            hits, _ = simulation.run(run, count_from)
            its, its_blocks = simulation.hits_of[LIAR], simulation.blocks_of[LIAR]
            lines.append(Line(name, capacity, hits / blocks))
            lines.append(Line(f"{name}: its neighbours", capacity, (hits - its) / max(1, blocks - its_blocks)))
            lines.append(Line(f"{name}: that tenth", capacity, its / max(1, its_blocks)))
    infinite = infinite_hits(plain, count_from) / blocks
    return Comparison(source, half, len(trace) - count_from, blocks, infinite, tuple(capacities), tuple(lines))


def table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: a row per policy, a column per capacity."""
    headers = ["policy", *(f"{capacity:,}" for capacity in comparison.capacities)]
    rows = [
        [policy, *(f"{comparison.ratio(policy, capacity):.4f}" for capacity in comparison.capacities)]
        for policy in comparison.policies()
    ]
    return headers, [*rows, ["infinite cache", *(f"{comparison.infinite:.4f}" for _ in comparison.capacities)]]


def known_policies() -> tuple[str, ...]:
    """Names of all policies, in the order they are shown."""
    return tuple(POLICIES)


def require_plotting() -> None:
    """Fail before anything is run where no picture could be drawn.

    Raises:
        InvalidRequest: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as absent:
        raise InvalidRequest("plot", "needs matplotlib: pip install 'kvstore[plot]'") from absent


def plot(comparison: Comparison, path: Path) -> None:
    """Draw hit ratio over capacity, a line per policy.

    Raises:
        InvalidRequest: matplotlib is not installed, or the path cannot be written or ends in no format it knows.
    """
    require_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    capacities = sorted(set(comparison.capacities))
    for policy in comparison.policies():
        style = "--" if policy in (LRU_BLOCKS, BELADY, BELADY_BLOCKS) else "-"
        ratios = [comparison.ratio(policy, capacity) for capacity in capacities]
        axes.plot(capacities, ratios, style, marker="o", markersize=3, label=policy)
    axes.axhline(comparison.infinite, color="grey", linewidth=1, label="infinite cache")
    axes.set(xscale="log", xlabel="capacity, pages", ylabel="block hit ratio", ylim=(0, None))
    axes.set_title(f"{comparison.source}, {comparison.half} requests counted: {comparison.requests:,}")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as failed:
        raise InvalidRequest("plot", f"{path}: {failed}") from failed
