"""Hints in a simulation: the hints and tenants of requests.

A trace names no tenants and no kinds of prompts, so a stated rule makes them. Its requests are dealt to ten tenants,
whole sessions at a time, and tenants share no pages. A *system prompt* is the run of leading blocks that more than one
request in a hundred, and more than ten, open with. The rules:

``type``      what a program knows of its own requests: system prompts have priority 2; a prompt that opens with none is
              a document read once, with priority -2.
``sessions``  a program that knows of nine prompts in ten whether a later one goes on from them, which in a trace is
              looked up ahead: new pages of requests that no later request continues have priority -2. System prompts as
                  above.

A *liar* says that every page is worth the most. A tenth of the tenants, one, hints like the others, is silent, or lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from engine.simulator.cache import CacheAccess, key_of
from kvstore.errors import InvalidRequest
from kvstore.model.retention import PRIORITY_MAX, Retention

RULES = ("type", "sessions")
TENTHS = ("hints", "is silent", "lies")
TENANTS = 10
LIAR = 0
SHARED_RATIO, SHARED_LEAST = 0.01, 10
KNOWN_OF_TEN = 9
_HIGH, _LOW = Retention(2).hint, Retention(-2).hint
_LIE = Retention(PRIORITY_MAX).hint


def dealt(trace: Sequence[CacheAccess]) -> list[CacheAccess]:
    """The requests, each assigned to a tenant. Blocks are renumbered, so that tenants share none."""
    openings = _openings(trace)
    found = []
    for access in trace:
        shared = _shared(access, openings)
        first = access.blocks[min(shared, len(access.blocks) - 1)]
        owner = key_of(first) % TENANTS
        found.append(replace(access, blocks=tuple(TENANTS * block + owner for block in access.blocks), owner=owner))
    return found


def hinted(trace: Sequence[CacheAccess], rule: str, tenth: str = "hints") -> list[CacheAccess]:
    """The requests of ``dealt`` with the hints of a rule. ``tenth``: what one of the tenants does (see ``TENTHS``).

    Raises:
        InvalidRequest: there is no such rule.
    """
    if rule not in RULES:
        raise InvalidRequest("hints", f"there is no rule {rule!r}; there are {', '.join(RULES)}")
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
    """Blocks of system prompts: those that enough requests have."""
    uses = Counter(block for access in trace for block in access.blocks)
    return {block for block, count in uses.items() if count > max(SHARED_LEAST, SHARED_RATIO * len(trace))}


def _shared(access: CacheAccess, openings: set[int]) -> int:
    return sum(1 for _ in takewhile(openings.__contains__, access.blocks))


def _goes_on(access: CacheAccess, shared: int, number: int, last: dict[int, int]) -> bool:
    """Whether a later request has blocks of this one, beside its system prompt; wrong of one in ten."""
    truth = any(last[block] > number for block in access.blocks[shared:])
    return truth == (key_of(number) % 10 < KNOWN_OF_TEN)
