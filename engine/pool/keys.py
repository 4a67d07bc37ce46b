"""Keys of a request's pages: how many of them are in the pool, and under which keys pages are written."""

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

SILENT_S = 0.5  # a lookup that takes longer has probably waited for a node that does not respond


def count_stored(cache: PrefixCache, keys: Keys, arenas: bool = False) -> int:
    """Return how many leading pages are in the pool.

    A page that only the arena of an engine has may be evicted at any time. With ``arenas`` False, counting stops before
    the first such page.

    Raises:
        NodeUnavailable: the lookup took more than ``SILENT_S``. The node is probably suspended, which the match does
            not show. Every further lookup would wait as long, and the engine's thread can only afford one such wait.
    """
    started_s = time.monotonic()
    match = cache.lookup(keys)
    pages = match.pages
    if Tier.HBM in match.tiers and not arenas:  # this node's DRAM pages come first; other nodes' pages count as DRAM
        pages = max(0, match.tiers.get(Tier.DRAM, 0) - sum(match.nodes.values()))
    if (took_s := time.monotonic() - started_s) > SILENT_S:
        raise NodeUnavailable(f"a lookup took {took_s:.2f} s")
    return pages


def count_stored_in_groups(cache: GroupedCache, tokens: Any, arenas: bool = False) -> int:
    """Return after how many leading pages a prompt can continue from the pool.

    The pool has all these pages of the first group, and those pages of the other groups that are needed to continue.
    Raises the errors of ``count_stored``.
    """
    keys = cache.keys(tokens)
    if not keys.pages(0):
        return 0
    (leading,) = keys.parts(0, range(keys.pages(0)))
    pages = count_stored(cache.groups[0], leading, arenas)
    if len(cache.groups) > 1 and pages:
        pages = cache.lookup(keys.upto(pages * cache.boundary_tokens)).tokens // cache.boundary_tokens
    return pages


def links_of(cache: GroupedCache, tokens: Any) -> list[bytes]:
    """Return the keys of all full pages of ``tokens`` in the first group."""
    keys = cache.keys(tokens)
    return [link for part in keys.parts(0, range(keys.pages(0))) for link in part.links]


def key_runs(
    keys: GroupedKeys, group: int, pages: range, table: torch.Tensor, pages_max: int
) -> Iterator[tuple[Keys, int, int]]:
    """Divide ``pages`` of a group into runs of consecutive frames, each of at most ``pages_max`` pages.

    Yields the keys, the first frame and the number of pages of each run. ``table`` has the frame of every page of the
    group, starting at page 0.
    """
    start = pages.start
    for part in keys.parts(group, pages):
        for index, frame, count in runs_upto(pages_max, table[start : start + len(part)]):
            yield part[index : index + count], frame, count
        start += len(part)


def keys_to_store(cache: GroupedCache, work: Work, group: int, pages: range) -> list[Keys]:
    """Return the keys of a request's pages in a group, with the retention hints of its caller.

    The result has the form of ``GroupedKeys.parts``. ``work.keys`` caches the keys of all full pages so far.
    """
    if work.keys is None or work.keys[0] is not cache or work.keys[1].pages(0) < pages.stop:
        count = work.length // work.page_tokens
        hints = hints_of(work.request.retention, count, work.page_tokens)
        work.keys = cache, cache.keys(work.tokens[: count * work.page_tokens]), hints
    _, keys, hints = work.keys
    parts, start = [], pages.start
    for part in keys.parts(group, pages):
        parts.append(part.hinted(hints[start : start + len(part)]))
        start += len(part)
    return parts
