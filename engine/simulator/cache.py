"""Simulation of a node's cache over a trace: the node's eviction policies under the node's rules, without a node.

Each block of the trace is one page. A request looks up its longest stored prefix. These pages are hits, and are marked
as used. The other pages are put, as in ``kvstore.state.space``: their parent is held, and while too few frames are
free, a leaf is evicted, with as many pages before it as the policy decides. If too few pages can be evicted, only the
first new pages are stored. Then the last page of the chain is a new leaf.

A trace has coarse timestamps. Here, every request gets a millisecond of its own, as in a node.

Worked example, three frames, least recently used::

    request [1, 2]     misses 1 and 2, which are stored; leaf 2
    request [1, 3]     hits 1, misses 3, which is stored; leaves 2 and 3
    request [1, 3, 4]  hits 1 and 3, misses 4; leaf 2 is evicted, and 4 is stored; leaf 4

A trace has no tenants and no hints, so rules define them. Sessions are assigned to ten tenants, which share no pages. A
*system prompt* is a run of leading blocks that more than ten requests, and more than 1% of all, begin with.

- Rule ``type``: a program that knows the kind of each request. System prompts have priority 2. A prompt without one is
  a document that is read once: priority -2.
- Rule ``sessions``: a program that knows whether a later request will continue a request, and is right for nine in ten.
  Pages that no later request continues have priority -2. System prompts have priority 2.

One of the ten tenants gives hints like the others, gives none, or lies: all its pages have the highest priority.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from engine.simulator.trace import TraceRequest
from kvstore.errors import InvalidRequest
from kvstore.model.replica import standing
from kvstore.model.retention import PRIORITY_MAX, Retention
from kvstore.state.departures import RUN_MAX
from kvstore.state.eviction import EvictionPolicy, Page
from kvstore.state.eviction.base import Tail

_NONE = -1
OnEvict = Callable[[int, list[int], list[int]], None]


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """One request to a cache. ``hints``: one for each block, or empty."""

    now_ms: int
    blocks: tuple[int, ...]
    owner: int = 0
    hints: bytes = b""


def accesses(requests: Iterable[TraceRequest]) -> list[CacheAccess]:
    """Return the requests of a trace with distinct times, in order."""
    trace: list[CacheAccess] = []
    last_ms = -1
    for request in requests:
        last_ms = max(request.timestamp_ms, last_ms + 1)
        trace.append(CacheAccess(last_ms, request.block_ids))
    return trace


class CacheSimulation:
    """A prefix-closed cache of ``capacity`` pages with one policy. Equal inputs give equal results.

    Attributes:
        slots: for each stored block, the slot of its page.
        free: slots without a page.
        used_ms, parent, children, pages, blocks: by slot: the last use of the page, its parent's slot, the number of
            its stored children and holds, the page as it was added, and its block.
        evicted: the number of evicted pages.
        hits_of, blocks_of: by owner, the hits and the blocks of the requests that ``run`` counted.

    Args:
        on_evict: is called with the time, the blocks before the first evicted page, and the blocks of evicted pages.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy, on_evict: OnEvict | None = None) -> None:
        self.policy = policy
        self.on_evict = on_evict
        self.slots: dict[int, int] = {}
        self.free = list(range(capacity - 1, -1, -1))
        self.used_ms = array("q", bytes(8 * capacity))
        self.parent = array("q", bytes(8 * capacity))
        self.children = array("q", bytes(8 * capacity))
        self.pages = [Page(0)] * capacity
        self.blocks = array("q", bytes(8 * capacity))
        self.evicted = 0
        self.hits_of: Counter[int] = Counter()
        self.blocks_of: Counter[int] = Counter()

    def run(self, trace: Sequence[CacheAccess], count_from: int = 0) -> tuple[int, int]:
        """Run a trace. Returns how many hits and blocks the requests have, starting at number ``count_from``."""
        hits = blocks = 0
        for number, access in enumerate(trace):
            request_hits = self.request(access.now_ms, access.blocks, access.owner, access.hints)
            if number >= count_from:
                hits += request_hits
                blocks += len(access.blocks)
                self.hits_of[access.owner] += request_hits
                self.blocks_of[access.owner] += len(access.blocks)
        return hits, blocks

    def request(self, now_ms: int, blocks: Sequence[int], owner: int = 0, hints: bytes = b"") -> int:
        """Look up one request, and store its other pages. Returns the number of hits."""
        hits = self.match(now_ms, blocks)
        if hits < len(blocks):
            self._put(now_ms, blocks, hits, self.slots[blocks[hits - 1]] if hits else _NONE, owner, hints)
        return hits

    def match(self, now_ms: int, blocks: Sequence[int]) -> int:
        """Return how many leading blocks are stored, and mark them as used."""
        slots, used_ms = self.slots, self.used_ms
        hits = 0
        for block in blocks:
            slot = slots.get(block, _NONE)
            if slot == _NONE:
                break
            used_ms[slot] = now_ms
            hits += 1
        return hits

    def _put(self, now_ms: int, blocks: Sequence[int], stored: int, anchor: int, owner: int, hints: bytes) -> None:
        turns = min(self.pages[anchor].turns + 1, 255) if anchor != _NONE else 0
        self._hold(anchor)
        self._free_slots(len(blocks) - stored, now_ms)
        self._unhold(anchor)
        parent = anchor
        for position in range(stored, len(blocks)):
            if not self.free:
                break
            slot = self.free.pop()
            self.slots[blocks[position]] = slot
            self.used_ms[slot] = now_ms
            self.parent[slot] = parent
            self.children[slot] = 0
            hint, self.blocks[slot] = hints[position] if hints else 0, blocks[position]
            self.pages[slot] = Page(now_ms, key_of(blocks[position]), position, turns, hint, owner)
            if position == stored:
                self._hold(parent)
            else:
                self.children[parent] = 1
            parent = slot
        if parent != anchor:
            self._offer(parent)

    def _free_slots(self, pages: int, now_ms: int) -> None:
        """Evict leaves until ``pages`` slots are free, or no page can be evicted."""
        while len(self.free) < pages:
            slot = self.policy.victim(self.used_ms.__getitem__, now_ms)
            if slot is None:
                return
            assert not self.children[slot], "only leaves are evicted"
            chain = self._tail(slot, min(pages - len(self.free), RUN_MAX))
            tail_pages = [self.pages[member] for member in chain]
            tail = Tail(
                chain,
                [page.key for page in tail_pages],
                [self.used_ms[member] for member in chain],
                [standing(page.position, page.turns, page.hint) for page in tail_pages],
            )
            victims = chain[-1 - self.policy.forget_tail(tail) :]
            if self.on_evict is not None:
                self.on_evict(now_ms, self._chain_to(victims[0]), [self.blocks[victim] for victim in victims])
            for victim in reversed(victims):
                del self.slots[self.blocks[victim]]
                self.free.append(victim)
            self.evicted += len(victims)
            self._unhold(self.parent[victims[0]])

    def _chain_to(self, slot: int) -> list[int]:
        """Return the blocks before a page of its chain, the first one first."""
        before = []
        while (slot := self.parent[slot]) != _NONE:
            before.append(self.blocks[slot])
        return before[::-1]

    def _tail(self, leaf: int, pages_max: int) -> list[int]:
        """Return the slots of a leaf and of pages before it, in the order of the chain; at most ``pages_max``.

        Each of these pages has only one child, and was not used after the leaf.
        """
        chain, slot = [leaf], self.parent[leaf]
        while len(chain) < pages_max and slot != _NONE:
            if self.children[slot] != 1 or self.used_ms[slot] > self.used_ms[leaf]:
                break
            chain.append(slot)
            slot = self.parent[slot]
        return chain[::-1]

    def _hold(self, slot: int) -> None:
        if slot != _NONE:
            if not self.children[slot]:
                self.policy.remove(slot)
            self.children[slot] += 1

    def _unhold(self, slot: int) -> None:
        if slot != _NONE:
            self.children[slot] -= 1
            if not self.children[slot]:
                self._offer(slot)

    def _offer(self, slot: int) -> None:
        self.policy.add(slot, self.pages[slot]._replace(used_ms=self.used_ms[slot]))


def key_of(block: int) -> int:
    """Return 64 bits in place of a page key. SplitMix64 maps each small number of a trace to a different one."""
    word = (block + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


RULES = ("type", "sessions")
TENTHS = ("hints", "is silent", "lies")  # what the tenant ``LIAR``, a tenth of all tenants, does
TENANTS = 10
LIAR = 0
SHARED_RATIO, SHARED_LEAST = 0.01, 10  # more requests than both begin with a system prompt
KNOWN_OF_TEN = 9
_HIGH, _LOW = Retention(2).hint, Retention(-2).hint
_LIE = Retention(PRIORITY_MAX).hint


def assign_tenants(trace: Sequence[CacheAccess]) -> list[CacheAccess]:
    """Return the requests, each with a tenant as its owner. Blocks are renumbered, so that tenants share none."""
    system_blocks = _system_blocks(trace)
    requests = []
    for access in trace:
        shared = _shared(access, system_blocks)
        first = access.blocks[min(shared, len(access.blocks) - 1)]
        owner = key_of(first) % TENANTS
        requests.append(replace(access, blocks=tuple(TENANTS * block + owner for block in access.blocks), owner=owner))
    return requests


def with_hints(trace: Sequence[CacheAccess], rule: str, tenth: str = "hints") -> list[CacheAccess]:
    """Return the requests of ``assign_tenants`` with the hints of a rule.

    Args:
        tenth: one of ``TENTHS``: what the tenant ``LIAR`` does.

    Raises:
        InvalidRequest: there is no such rule.
    """
    if rule not in RULES:
        raise InvalidRequest("hints", f"must be one of {', '.join(RULES)} (got {rule!r})")
    system_blocks = _system_blocks(trace)
    last_uses = {block: number for number, access in enumerate(trace) for block in access.blocks}
    requests = []
    for number, access in enumerate(trace):
        count, shared = len(access.blocks), _shared(access, system_blocks)
        if tenth != "hints" and access.owner == LIAR:
            hints = bytes([_LIE]) * count if tenth == "lies" else b""
        else:
            is_low = not shared if rule == "type" else not _is_continued(access, shared, number, last_uses)
            hints = bytes([_HIGH]) * shared + bytes([_LOW if is_low else 0]) * (count - shared)
        requests.append(replace(access, hints=hints))
    return requests


def _system_blocks(trace: Sequence[CacheAccess]) -> set[int]:
    """Return the blocks of system prompts. Many requests have these blocks."""
    uses = Counter(block for access in trace for block in access.blocks)
    return {block for block, count in uses.items() if count > max(SHARED_LEAST, SHARED_RATIO * len(trace))}


def _shared(access: CacheAccess, system_blocks: set[int]) -> int:
    """Return the number of leading blocks that belong to a system prompt."""
    return sum(1 for _ in takewhile(system_blocks.__contains__, access.blocks))


def _is_continued(access: CacheAccess, shared: int, number: int, last_uses: dict[int, int]) -> bool:
    """Return whether a later request has blocks of this one after the system prompt. Wrong for one request in ten."""
    is_continued = any(last_uses[block] > number for block in access.blocks[shared:])
    return is_continued == (key_of(number) % 10 < KNOWN_OF_TEN)
