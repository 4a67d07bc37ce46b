"""Comparison of eviction policies for ``kvstore simulate cache``: hit ratios as a table, as JSON, or as a picture.

The policies are compared with three references: a cache that never evicts, LRU, and the optimum (Belady), which no
policy can exceed.

A *cache of single blocks* ignores that a block is useless without the blocks before it. Each block of a request, from
the front, is a hit or a miss on its own. Published hit ratios of traces count in this way.

``Belady`` is the optimum as a policy under the rules of a node: it evicts the leaf whose next use is farthest. A page
is used whenever its child is used, so the page with the farthest next use is always a leaf. Prefix closure therefore
costs the optimum almost nothing.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from engine.simulator.cache import (
    LIAR,
    TENTHS,
    CacheAccess,
    CacheSimulation,
    accesses,
    assign_tenants,
    key_of,
    with_hints,
)
from engine.simulator.policies import POLICIES, make_policy
from engine.simulator.trace import TraceRequest
from kvstore.errors import InvalidRequest
from kvstore.state.eviction import Page
from kvstore.state.eviction.base import Tail, UsedMs

NEVER = 1 << 62


def infinite_hits(trace: Sequence[CacheAccess], count_from: int = 0) -> int:
    """Return the number of hits of a cache that never evicts. Counts requests starting at number ``count_from``."""
    seen: set[int] = set()
    hits = 0
    for number, access in enumerate(trace):
        if number >= count_from:
            hits += sum(block in seen for block in access.blocks)
        seen.update(access.blocks)
    return hits


def lru_hits(trace: Sequence[CacheAccess], capacity: int, count_from: int = 0) -> int:
    """Return the number of hits of an LRU cache of single blocks. Counts requests starting at number ``count_from``."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, access in enumerate(trace):
        for block in access.blocks:
            if block in cached:
                cached.move_to_end(block)
                hits += number >= count_from
            else:
                if len(cached) >= capacity:
                    cached.popitem(last=False)
                cached[block] = None
    return hits


def belady_hits(trace: Sequence[CacheAccess], capacity: int, count_from: int = 0) -> int:
    """Return the hits of a cache of single blocks that always evicts the block whose next use is farthest.

    Only the requests from number ``count_from`` on are counted.
    """
    blocks = [block for access in trace for block in access.blocks]
    next_uses = [NEVER] * len(blocks)  # for each index, the index of the next use of the same block
    later: dict[int, int] = {}
    for index in range(len(blocks) - 1, -1, -1):
        next_uses[index] = later.get(blocks[index], NEVER)
        later[blocks[index]] = index
    cached: dict[int, int] = {}  # by block, the index of its next use
    farthest: list[tuple[int, int]] = []  # a heap of (-next use, block), in which outdated entries are skipped
    hits = index = 0
    for number, access in enumerate(trace):
        for block in access.blocks:
            if block in cached:
                hits += number >= count_from
            elif len(cached) >= capacity:
                while True:
                    use, candidate = heapq.heappop(farthest)
                    if cached.get(candidate) == -use:
                        del cached[candidate]
                        break
            cached[block] = next_uses[index]
            heapq.heappush(farthest, (-next_uses[index], block))
            index += 1
    return hits


class Belady:
    """The optimum as an ``EvictionPolicy`` that has read the trace. It identifies pages by their keys.

    A node cannot use this policy, because it does not have the trace.
    """

    hinted = False

    def __init__(self, trace: Sequence[CacheAccess]) -> None:
        self._uses: dict[int, list[int]] = {}  # key -> times of use
        for access in trace:
            for block in access.blocks:
                self._uses.setdefault(key_of(block), []).append(access.now_ms)
        self._pages: dict[int, Page] = {}
        self._next_ms: dict[int, int] = {}  # by slot, the next use of each listed page
        self._farthest: list[tuple[int, int, int]] = []  # a heap of (-next use, -position, slot)
        self._soonest: list[tuple[int, int]] = []  # a heap of (next use, slot)

    def resize(self, pages: int) -> None:
        """Do nothing: the order does not depend on the number of pages."""

    def add(self, slot: int, page: Page) -> None:
        """List a page, with its next use after ``page.used_ms``."""
        uses = self._uses[page.key]
        index = bisect_right(uses, page.used_ms)
        next_ms = uses[index] if index < len(uses) else NEVER
        self._pages[slot], self._next_ms[slot] = page, next_ms
        heapq.heappush(self._farthest, (-next_ms, -page.position, slot))
        if next_ms != NEVER:
            heapq.heappush(self._soonest, (next_ms, slot))

    def remove(self, slot: int) -> None:
        """Stop listing a page that cannot be evicted now."""
        self._next_ms.pop(slot, None)

    def forget(self, slot: int, key: int | None) -> None:
        """Stop listing a page that is no longer stored."""
        self.remove(slot)

    def forget_tail(self, tail: Tail, together: int = 0) -> int:
        """Evict only the leaf."""
        self.remove(tail.slots[-1])
        return 0

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """Return the slot of the listed page whose next use is farthest."""
        while self._soonest and self._soonest[0][0] <= now_ms:  # the page was used then, so it has another next use
            last_ms, slot = heapq.heappop(self._soonest)
            if self._next_ms.get(slot) == last_ms:
                self.add(slot, self._pages[slot]._replace(used_ms=last_ms))
        while self._farthest:
            negative_ms, _, slot = self._farthest[0]
            if self._next_ms.get(slot) == -negative_ms:
                return slot
            heapq.heappop(self._farthest)
        return None

    def coldest_ms(self) -> int | None:
        """Return the earliest last use of the listed pages."""
        return min((self._pages[slot].used_ms for slot in self._next_ms), default=None)

    def __contains__(self, slot: int) -> bool:
        """Return True if the page in the slot is listed."""
        return slot in self._next_ms


CAPACITY_MAX = 1 << 24  # pages; the simulation uses several hundred bytes for each

# The references with which policies are compared, by the names of their rows.
LRU_BLOCKS = "lru of single blocks"
BELADY = "belady"
BELADY_BLOCKS = "belady of single blocks"


class Half(StrEnum):
    """Which requests are run and counted."""

    FIRST = "first"  # only the first half is run and counted, to tune a policy
    SECOND = "second"  # all requests are run, and the second half is counted, to report results
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Line:
    """The result of one policy or reference with one capacity."""

    policy: str
    capacity: int
    block_hit_ratio: float
    evictions: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of several policies over one trace.

    Attributes:
        source: the name of the trace.
        requests, blocks: the numbers of requests and blocks that were counted.
        infinite: the block hit ratio of a cache that never evicts.
    """

    source: str
    half: Half
    requests: int
    blocks: int
    infinite: float
    capacities: tuple[int, ...]
    lines: tuple[Line, ...]

    def ratio(self, policy: str, capacity: int) -> float:
        """Return the block hit ratio of a policy with a capacity."""
        return next(line.block_hit_ratio for line in self.lines if (line.policy, line.capacity) == (policy, capacity))

    def policies(self) -> list[str]:
        """Return the names of the policies and references, in the order in which they were run."""
        return list(dict.fromkeys(line.policy for line in self.lines))


def compare(
    source: str,
    requests: Iterable[TraceRequest],
    capacities: Sequence[int],
    policies: Sequence[str],
    half: Half = Half.ALL,
) -> Comparison:
    """Run every policy, and the references, with every capacity (in pages).

    Raises:
        InvalidRequest: a capacity is out of range, a policy is unknown, or the trace is empty.
    """
    trace, count_from, blocks = _prepare(requests, capacities, policies, half)
    return Comparison(
        source,
        half,
        len(trace) - count_from,
        blocks,
        infinite_hits(trace, count_from) / blocks,
        tuple(capacities),
        tuple(line for capacity in capacities for line in _lines(trace, capacity, policies, count_from, blocks)),
    )


def _prepare(
    requests: Iterable[TraceRequest], capacities: Sequence[int], policies: Sequence[str], half: Half
) -> tuple[list[CacheAccess], int, int]:
    """Check the arguments. Returns the requests to run, the first one to count, and the number of blocks to count."""
    for capacity in capacities:
        if not 1 <= capacity <= CAPACITY_MAX:
            raise InvalidRequest("capacity", f"must be 1 to {CAPACITY_MAX} pages (got {capacity})")
    for name in policies:
        make_policy(name, 1)
    trace = accesses(requests)
    if not trace:
        raise InvalidRequest("trace", "must have at least one request")
    if half is Half.FIRST:
        trace = trace[: len(trace) // 2]
    count_from = len(trace) // 2 if half is Half.SECOND else 0
    blocks = sum(len(access.blocks) for access in trace[count_from:])
    if not blocks:
        raise InvalidRequest("half", f"the {half} half of the trace is empty")
    return trace, count_from, blocks


def _lines(
    trace: Sequence[CacheAccess], capacity: int, policies: Sequence[str], count_from: int, blocks: int
) -> Iterator[Line]:
    yield Line(LRU_BLOCKS, capacity, lru_hits(trace, capacity, count_from) / blocks)
    for name in policies:
        simulation = CacheSimulation(capacity, make_policy(name, capacity))
        start_s = time.perf_counter()
        hits, _ = simulation.run(trace, count_from)
        yield Line(name, capacity, hits / blocks, simulation.evicted, time.perf_counter() - start_s)
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
    """Run a policy with every capacity: without hints, and with the hints of a rule, from all or nine of ten tenants.

    LRU is run for comparison. If one of the tenants does not follow the rule, its hit ratio and that of the other
    tenants are also reported.

    Raises:
        InvalidRequest: as for ``compare``, or there is no such rule.
    """
    trace, count_from, blocks = _prepare(requests, capacities, [policy], half)
    plain = assign_tenants(trace)
    runs = {
        f"{policy}, {'all hint' if tenth == TENTHS[0] else 'a tenth ' + tenth}": with_hints(plain, rule, tenth)
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
            tenth_hits, tenth_blocks = simulation.hits_of[LIAR], simulation.blocks_of[LIAR]
            others_ratio = (hits - tenth_hits) / max(1, blocks - tenth_blocks)
            lines.append(Line(name, capacity, hits / blocks))
            lines.append(Line(f"{name}: other tenants", capacity, others_ratio))
            lines.append(Line(f"{name}: that tenant", capacity, tenth_hits / max(1, tenth_blocks)))
    infinite = infinite_hits(plain, count_from) / blocks
    return Comparison(source, half, len(trace) - count_from, blocks, infinite, tuple(capacities), tuple(lines))


def table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return headers and rows, with a row for each policy and a column for each capacity."""
    headers = ["policy", *(f"{capacity:,}" for capacity in comparison.capacities)]
    rows = [
        [policy, *(f"{comparison.ratio(policy, capacity):.4f}" for capacity in comparison.capacities)]
        for policy in comparison.policies()
    ]
    return headers, [*rows, ["infinite cache", *(f"{comparison.infinite:.4f}" for _ in comparison.capacities)]]


def policy_names() -> tuple[str, ...]:
    """Return the names of all policies, in the order in which they are shown."""
    return tuple(POLICIES)


def require_plotting() -> None:
    """Check that pictures can be drawn, before anything is run.

    Raises:
        InvalidRequest: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidRequest("plot", "needs matplotlib: pip install 'kvstore[plot]'") from error


def plot(comparison: Comparison, path: Path) -> None:
    """Draw the hit ratio by capacity, with a line for each policy.

    Raises:
        InvalidRequest: matplotlib is not installed, the file cannot be written, or its format is not supported.
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
    except (OSError, ValueError) as error:
        raise InvalidRequest("plot", f"{path}: {error}") from error
