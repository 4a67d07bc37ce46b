"""`kvstore simulate cache`: hit ratios of policies over one trace, as a table, as JSON, and as a picture.

Yardsticks: what a cache of single blocks would hit under LRU, and what no policy can exceed (Belady).

A *cache of single blocks* ignores that a block is of no use without those before it: each block of a request, front
first, is a hit or a miss on its own. It is what published hit ratios of traces count. `Belady` is the same optimum as a
policy object, under the rules of a node: it evicts the leaf whose next use is farthest. (A page is used whenever its
child is, so among all pages the farthest next use is a leaf's: closure costs the optimum next to nothing.)
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

from engine.simulator.cache import LIAR, TENTHS, CacheAccess, CacheSimulation, accesses, dealt, hinted, key_of
from engine.simulator.policies import POLICIES, make_policy
from engine.simulator.trace import TraceRequest
from kvstore.errors import InvalidRequest
from kvstore.state.eviction import Page
from kvstore.state.eviction.base import Tail, UsedMs

NEVER = 1 << 62


def infinite_hits(trace: Sequence[CacheAccess], count_from: int = 0) -> int:
    """Hits of a cache that never evicts, from that request on."""
    seen: set[int] = set()
    hits = 0
    for number, access in enumerate(trace):
        if number >= count_from:
            hits += sum(block in seen for block in access.blocks)
        seen.update(access.blocks)
    return hits


def lru_hits(trace: Sequence[CacheAccess], capacity: int, count_from: int = 0) -> int:
    """Hits of single blocks under least recently used, from that request on."""
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
    """Hits of single blocks if the block whose next use is farthest is always evicted, from that request on."""
    blocks = [block for access in trace for block in access.blocks]
    following = [NEVER] * len(blocks)  # place of the next use of the same block
    last: dict[int, int] = {}
    for place in range(len(blocks) - 1, -1, -1):
        following[place] = last.get(blocks[place], NEVER)
        last[blocks[place]] = place
    cached: dict[int, int] = {}  # block -> its next use
    farthest: list[tuple[int, int]] = []  # heap of (-next use, block); entries that no longer hold are skipped
    hits = place = 0
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
            cached[block] = following[place]
            heapq.heappush(farthest, (-following[place], block))
            place += 1
    return hits


class Belady:
    """The optimum as an `EvictionPolicy` that has read the trace. Pages are told apart by key; not for a node."""

    hinted = False

    def __init__(self, trace: Sequence[CacheAccess]) -> None:
        self._uses: dict[int, list[int]] = {}  # key -> times of use
        for access in trace:
            for block in access.blocks:
                self._uses.setdefault(key_of(block), []).append(access.now_ms)
        self._pages: dict[int, Page] = {}
        self._next: dict[int, int] = {}  # of the listed ones
        self._farthest: list[tuple[int, int, int]] = []  # heap of (-next use, -position, slot)
        self._soonest: list[tuple[int, int]] = []  # heap of (next use, slot)

    def resize(self, pages: int) -> None:
        """See ``EvictionPolicy.resize``."""

    def add(self, slot: int, page: Page) -> None:
        """See ``EvictionPolicy.add``."""
        uses = self._uses[page.key]
        place = bisect_right(uses, page.used_ms)
        following = uses[place] if place < len(uses) else NEVER
        self._pages[slot], self._next[slot] = page, following
        heapq.heappush(self._farthest, (-following, -page.position, slot))
        if following != NEVER:
            heapq.heappush(self._soonest, (following, slot))

    def remove(self, slot: int) -> None:
        """See ``EvictionPolicy.remove``."""
        self._next.pop(slot, None)

    def forget(self, slot: int, key: int | None) -> None:
        """See ``EvictionPolicy.forget``."""
        self.remove(slot)

    def forget_tail(self, tail: Tail, together: int = 0) -> int:
        """See ``EvictionPolicy.forget_tail``."""
        self.remove(tail.slots[-1])
        return 0

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """See ``EvictionPolicy.victim``."""
        while self._soonest and self._soonest[0][0] <= now_ms:  # what was due was used: it is due later now
            due, slot = heapq.heappop(self._soonest)
            if self._next.get(slot) == due:
                self.add(slot, self._pages[slot]._replace(used_ms=due))
        while self._farthest:
            following, _, slot = self._farthest[0]
            if self._next.get(slot) == -following:
                return slot
            heapq.heappop(self._farthest)
        return None

    def coldest_ms(self) -> int | None:
        """See ``EvictionPolicy.coldest_ms``."""
        return min((self._pages[slot].used_ms for slot in self._next), default=None)

    def __contains__(self, slot: int) -> bool:
        """See ``EvictionPolicy.__contains__``."""
        return slot in self._next


CAPACITY_MAX = 1 << 24  # pages; a simulated one takes some hundred bytes

# Yardsticks for the policies, by the name they are shown with.
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
    """Run every policy at every capacity (pages), and the yardsticks.

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

    In addition LRU, and the hit ratios of the tenth and of its neighbours.

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
