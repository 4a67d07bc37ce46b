"""Simulates a node's cache on a trace: the product's policy objects under the product's rules, without a node.

One page per block of the trace. A request looks up its longest stored prefix: those pages are hits and are marked as
used now. The rest is put, as `kvstore.state.space` does it: the parent of the new pages is held. While frames are
short, a leaf is evicted, with as many pages before it as the policy says. Then the last page of the chain is the new
leaf. If not enough can be evicted, only the first new pages are stored. A worked example, three frames, least recently
used::

    request [1, 2]     misses 2; stored 1-2, leaf 2
    request [1, 3]     hits 1, misses 1; stored 1-2 and 1-3, leaves 2 and 3
    request [1, 3, 4]  hits 1, 3; leaf 2 is evicted for 4; leaf 4

A trace stamps arrivals in coarse ticks; here every request gets its own millisecond, as it would in a node.

Hints: the hints and tenants of simulated requests.

A trace has no tenants and no kinds of prompts, so rules define them. Its sessions are assigned to ten tenants, which
share no pages. A *system prompt* is the run of leading blocks that more than one request in a hundred, and more than
ten, open with. The rules:

``type``      what a program knows of its own requests: system prompts have priority 2; a prompt that opens with none is
              a document read once, with priority -2.
``sessions``  a program that knows of nine prompts in ten whether a later one goes on from them, which in a trace is
              looked up ahead: new pages of requests that no later request continues have priority -2. System prompts as
                  above.

A *liar* gives every page the highest priority. One of the ten tenants hints like the others, is silent, or lies.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, slots=True)
class CacheAccess:
    """One request as a cache sees it."""

    now_ms: int
    blocks: tuple[int, ...]
    owner: int = 0
    hints: bytes = b""  # a hint per block, or empty


def accesses(requests: Iterable[TraceRequest]) -> list[CacheAccess]:
    """Return the requests at distinct times, in order."""
    clocked: list[CacheAccess] = []
    last_ms = -1
    for request in requests:
        last_ms = max(request.timestamp_ms, last_ms + 1)
        clocked.append(CacheAccess(last_ms, request.block_ids))
    return clocked


class CacheSimulation:
    """A prefix-closed cache of ``capacity`` pages under one policy. Deterministic."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.slots: dict[int, int] = {}  # block -> slot of the stored page
        self.free = list(range(capacity - 1, -1, -1))
        self.used_ms = array("q", bytes(8 * capacity))
        self.parent = array("q", bytes(8 * capacity))
        self.children = array("q", bytes(8 * capacity))
        self.pages = [Page(0)] * capacity  # as stored; ``used_ms`` has the last uses
        self.blocks = array("q", bytes(8 * capacity))
        self.evicted = 0
        self.hits_of: Counter[int] = Counter()  # by owner, of the requests that ``run`` counted
        self.blocks_of: Counter[int] = Counter()

    def run(self, trace: Sequence[CacheAccess], count_from: int = 0) -> tuple[int, int]:
        """Return (hits, blocks) of the requests from ``count_from`` on; the earlier ones only fill the cache."""
        hits = blocks = 0
        for number, access in enumerate(trace):
            found = self.request(access.now_ms, access.blocks, access.owner, access.hints)
            if number >= count_from:
                hits += found
                blocks += len(access.blocks)
                self.hits_of[access.owner] += found
                self.blocks_of[access.owner] += len(access.blocks)
        return hits, blocks

    def request(self, now_ms: int, blocks: Sequence[int], owner: int = 0, hints: bytes = b"") -> int:
        """Run one request: return its hits, and store its other pages."""
        slots, used_ms = self.slots, self.used_ms
        hits, anchor = 0, _NONE
        for block in blocks:
            slot = slots.get(block, _NONE)
            if slot == _NONE:
                break
            used_ms[slot] = now_ms
            hits, anchor = hits + 1, slot
        if hits < len(blocks):
            self._put(now_ms, blocks, hits, anchor, owner, hints)
        return hits

    def _put(self, now_ms: int, blocks: Sequence[int], stored: int, anchor: int, owner: int, hints: bytes) -> None:
        turns = min(self.pages[anchor].turns + 1, 255) if anchor != _NONE else 0
        self._hold(anchor)
        self._make_room(len(blocks) - stored, now_ms)
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

    def _make_room(self, pages: int, now_ms: int) -> None:
        while len(self.free) < pages:
            slot = self.policy.victim(self.used_ms.__getitem__, now_ms)
            if slot is None:
                return
            assert not self.children[slot], "only leaves leave"
            chain = self._chain(slot, min(pages - len(self.free), RUN_MAX))
            stored = [self.pages[inner] for inner in chain]
            tail = Tail(
                chain,
                [page.key for page in stored],
                [self.used_ms[inner] for inner in chain],
                [standing(page.position, page.turns, page.hint) for page in stored],
            )
            gone = chain[-1 - self.policy.forget_tail(tail) :]
            for inner in reversed(gone):
                del self.slots[self.blocks[inner]]
                self.free.append(inner)
            self.evicted += len(gone)
            self._unhold(self.parent[gone[0]])

    def _chain(self, leaf: int, most: int) -> list[int]:
        """Return the slots of a leaf and of up to ``most`` - 1 pages before it that nothing else follows, which were
        used no later, in the order of the chain."""
        chain, slot = [leaf], self.parent[leaf]
        while len(chain) < most and slot != _NONE:
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
    """Return 64 bits that represent a page key: a bijection that spreads the small numbers of a trace (SplitMix64)."""
    word = (block + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


RULES = ("type", "sessions")
TENTHS = ("hints", "is silent", "lies")
TENANTS = 10
LIAR = 0
SHARED_RATIO, SHARED_LEAST = 0.01, 10
KNOWN_OF_TEN = 9
_HIGH, _LOW = Retention(2).hint, Retention(-2).hint
_LIE = Retention(PRIORITY_MAX).hint


def dealt(trace: Sequence[CacheAccess]) -> list[CacheAccess]:
    """Return the requests, each assigned to a tenant. Blocks are renumbered, so that tenants share none."""
    openings = _openings(trace)
    found = []
    for access in trace:
        shared = _shared(access, openings)
        first = access.blocks[min(shared, len(access.blocks) - 1)]
        owner = key_of(first) % TENANTS
        found.append(replace(access, blocks=tuple(TENANTS * block + owner for block in access.blocks), owner=owner))
    return found


def hinted(trace: Sequence[CacheAccess], rule: str, tenth: str = "hints") -> list[CacheAccess]:
    """Return the requests of ``dealt`` with the hints of a rule. ``tenth``: the behaviour of one of the tenants (see
    ``TENTHS``).

    Raises:
        InvalidRequest: there is no such rule.
    """
    if rule not in RULES:
        raise InvalidRequest("hints", f"must be one of {', '.join(RULES)} (got {rule!r})")
    openings = _openings(trace)
    last = {block: number for number, access in enumerate(trace) for block in access.blocks}
    found = []
    for number, access in enumerate(trace):
        count, shared = len(access.blocks), _shared(access, openings)
        if tenth != "hints" and access.owner == LIAR:
            hints = bytes([_LIE]) * count if tenth == "lies" else b""
        else:
            low = not shared if rule == "type" else not _goes_on(access, shared, number, last)
            hints = bytes([_HIGH]) * shared + bytes([_LOW if low else 0]) * (count - shared)
        found.append(replace(access, hints=hints))
    return found


def _openings(trace: Sequence[CacheAccess]) -> set[int]:
    """Return the blocks of system prompts: those that enough requests have."""
    uses = Counter(block for access in trace for block in access.blocks)
    return {block for block, count in uses.items() if count > max(SHARED_LEAST, SHARED_RATIO * len(trace))}


def _shared(access: CacheAccess, openings: set[int]) -> int:
    return sum(1 for _ in takewhile(openings.__contains__, access.blocks))


def _goes_on(access: CacheAccess, shared: int, number: int, last: dict[int, int]) -> bool:
    """Whether a later request has blocks of this one in addition to its system prompt; wrong for one in ten."""
    truth = any(last[block] > number for block in access.blocks[shared:])
    return truth == (key_of(number) % 10 < KNOWN_OF_TEN)
