"""Eviction: which unused page leaves first. The policies by name; ``eviction.base`` says what a policy is.

Only pages without stored children are offered to a policy, so no page loses its parent. The work per eviction grows
with the logarithm of the offered pages, and with nothing else. ``docs/eviction.md`` compares the policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvstore.state.eviction.base import STALE_MAX, EvictionPolicy, Lru, Page
from kvstore.state.eviction.gittins import Gittins

__all__ = ["POLICIES", "POLICY_DEFAULT", "STALE_MAX", "EvictionPolicy", "Lru", "Page"]

# The argument of each is the number of pages that the class holds, as far as known (see ``EvictionPolicy.resize``).
POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType({"lru": Lru, "gittins": Gittins})
POLICY_DEFAULT = "gittins"
