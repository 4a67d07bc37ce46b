"""Stored: which pages of a request are in the pool, and under which keys they are written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engine.memory.arena import runs_upto
from engine.pool.work import Work
from kvstore.client.grouped_cache import GroupedCache
from kvstore.client.prefix_cache import PrefixCache
from kvstore.errors import NodeUnavailable
from kvstore.model.groups import GroupedKeys
from kvstore.model.prefix import Keys
from kvstore.model.replica import Tier
from kvstore.model.retention import hints_of

if TYPE_CHECKING:
    import torch

SILENT_S = 0.5  # a lookup that took longer waited for its node, probably without success


def stored(cache: PrefixCache, keys: Keys, arenas: bool = False) -> int:
    """How many leading pages of these are in the pool. Pages that only an engine's arena has may be gone in a moment:
    they and the pages behind them do not count, unless ``arenas`` are included.

    Raises NodeUnavailable if that took long: a lookup that misses does not say that its node is suspended. The next
    question would wait as long again, and the computing thread waits for only one deadline.
    """
    began_s = time.monotonic()
    found = cache.lookup(keys)
    pages = found.pages
    if Tier.HBM in found.tiers and not arenas:  # those of memory are the first ones, but for other nodes'
        pages = max(0, found.tiers.get(Tier.DRAM, 0) - sum(found.nodes.values()))
    if (took_s := time.monotonic() - began_s) > SILENT_S:
        raise NodeUnavailable(f"a lookup took {took_s:.2f} s")
    return pages


def stored_in_all(cache: GroupedCache, tokens: Any, arenas: bool = False) -> int:
    """How many leading pages of these tokens are in the pool, so that a prompt can continue behind them: all pages of
    the first group, and those of the others that are needed there. Raises like ``stored``."""
    keys = cache.keys(tokens)
    if not keys.pages(0):
        return 0
    (leading,) = keys.parts(0, range(keys.pages(0)))
    pages = stored(cache.groups[0], leading, arenas)
    if len(cache.groups) > 1 and pages:
        pages = cache.lookup(keys.upto(pages * cache.boundary_tokens)).tokens // cache.boundary_tokens
    return pages


def links_of(cache: GroupedCache, tokens: Any) -> list[bytes]:
    """Links of the full pages of these tokens in the first group, which has all of them."""
    keys = cache.keys(tokens)
    return [link for part in keys.parts(0, range(keys.pages(0))) for link in part.links]


def placed_parts(
    keys: GroupedKeys, group: int, pages: range, table: torch.Tensor, most: int
) -> Iterator[tuple[Keys, int, int]]:
    """Keys of these pages of a group, in parts whose frames are consecutive, as its verbs take them: with the first
    frame and the number of pages, at most ``most``. ``table`` has the frames of all pages."""
    start = pages.start
    for part in keys.parts(group, pages):
        for index, frame, count in runs_upto(most, table[start : start + len(part)]):
            yield part[index : index + count], frame, count
        start += len(part)


def keys_to_store(cache: GroupedCache, work: Work, group: int, pages: range) -> list[Keys]:
    """Keys of a request's pages in a group, with its caller's hints: see ``GroupedKeys.parts``. Made once
    for all pages that are known."""
    if work.keys is None or work.keys[0] is not cache or work.keys[1].pages(0) < pages.stop:
        count = work.length // work.page_tokens
        hints = hints_of(work.request.retention, count, work.page_tokens)
        work.keys = cache, cache.keys(work.tokens[: count * work.page_tokens]), hints
    _, keys, hints = work.keys
    found, start = [], pages.start
    for part in keys.parts(group, pages):
        found.append(part.hinted(hints[start : start + len(part)]))
        start += len(part)
    return found
