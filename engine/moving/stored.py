"""Stored: which pages of a request are in the pool, and under which keys they are written."""

from __future__ import annotations

import time

from engine.moving.work import Work
from kvstore.client.prefix_cache import PrefixCache
from kvstore.errors import NodeUnavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import Tier
from kvstore.model.retention import hints_of

SILENT_S = 0.5  # a lookup that took longer waited for its node, and in vain or nearly so


def stored(cache: PrefixCache, keys: Keys, arenas: bool = False) -> int:
    """How many leading pages of these are in the pool. Those that only an engine's arena has may be gone in a moment:
    they do not count, nor what is found behind them, unless ``arenas`` are asked for.

    Raises NodeUnavailable where that took long: a lookup does not say that its node stands still, and misses then. What
    is asked next would wait as long again, and the thread that computes waits for one deadline.
    """
    began_s = time.monotonic()
    found = cache.lookup(keys)
    pages = found.pages
    if Tier.HBM in found.tiers and not arenas:  # those of memory are the first ones, but for other nodes'
        pages = max(0, found.tiers.get(Tier.DRAM, 0) - sum(found.nodes.values()))
    if (took_s := time.monotonic() - began_s) > SILENT_S:
        raise NodeUnavailable(f"a lookup took {took_s:.2f} s")
    return pages


def keys_to_store(cache: PrefixCache, work: Work, start: int, stop: int) -> Keys:
    """Keys of a request's pages, with the hints that its caller gave. Made once for all pages that are known."""
    if work.keys is None or work.keys[0] is not cache or len(work.keys[1]) < stop:
        pages = work.length // work.page_tokens
        keys = cache.keys(work.tokens[: pages * work.page_tokens])
        work.keys = cache, keys.hinted(hints_of(work.request.retention, pages, work.page_tokens))
    return work.keys[1][start:stop]
