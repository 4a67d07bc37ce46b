"""Eviction: which unused page leaves first. The policies by name; what a policy is stands in ``eviction.base``.

Only pages without stored children are offered to a policy, so no tail is orphaned. Work per eviction grows with the
logarithm of the pages offered, nothing else. ``docs/eviction.md`` has how they compare, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvstore.state.eviction.base import STALE_MAX, EvictionPolicy, Lru, Page
from kvstore.state.eviction.gittins import Gittins

__all__ = ["POLICIES", "POLICY_DEFAULT", "STALE_MAX", "EvictionPolicy", "Lru", "Page"]

# By name: made with the pages the class holds, as far as known (see ``EvictionPolicy.resize``).
POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType({"lru": Lru, "gittins": Gittins})
POLICY_DEFAULT = "gittins"
