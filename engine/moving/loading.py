"""Loading: the stored part of a prompt is copied out of the pool into frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from engine.memory.arena import runs
from engine.memory.staging import Staging
from engine.moving.store_side import Pool
from engine.moving.work import Work
from kvstore.client.match import Match
from kvstore.client.prefix_cache import PrefixCache
from kvstore.model.prefix import Keys
from kvstore.model.replica import Tier

if TYPE_CHECKING:
    import torch

WINDOW_TRIES: Final = 3


class Loading:
    """Of one pool. Several threads load, each for a request of its own."""

    def __init__(self, pool: Pool, staging: Staging) -> None:
        self._pool = pool
        self._staging = staging

    def load(self, work: Work) -> int:
        """Copy the longest stored prefix of the prompt into the frames, but for pages that it shares; returns its
        tokens with those, at most all.

        Called in a thread of its own. A pool that cannot be read has nothing. Into a ring only
        what the window needs is copied.
        """
        page_tokens = work.page_tokens
        wanted, pages = work.prompt // page_tokens, work.shared_pages
        if wanted == pages or work.cache is None or not self._pool.readable:
            return pages * page_tokens
        tokens = work.tokens[: wanted * page_tokens]
        if work.window:
            return self._load_window(work, work.cache, tokens)
        pages += self._get(work, work.cache, work.cache.keys(tokens), pages, "")
        if self._pool.codec is None or not work.request.allow_lossy or pages == wanted:
            return pages * page_tokens
        lossy = self._pool.cache(work.request.salt, work.request.adapter, True)
        if lossy is not None:
            more = self._get(work, lossy, lossy.keys(tokens), pages, f"-{self._pool.codec.name}")
            work.lossy = work.lossy or more > 0
            pages += more
        return pages * page_tokens

    def _load_window(self, work: Work, cache: PrefixCache, tokens: npt.NDArray[np.uint32]) -> int:
        """The same for a ring: nothing is shared, and nothing of it is worth anything unless all of the window is."""
        codec, request = self._pool.codec, work.request
        keys = cache.keys(tokens)
        pages = self._there(cache, keys).pages
        if codec is not None and request.allow_lossy and pages < len(keys):
            lossy = self._pool.cache(request.salt, request.adapter, True)
            if lossy is not None and self._there(lossy, lossy.keys(tokens)).pages > pages:
                work.lossy = True
                return self._get_window(work, lossy, lossy.keys(tokens), f"-{codec.name}")
        return self._get_window(work, cache, keys, "")

    def _get_window(self, work: Work, cache: PrefixCache, keys: Keys, kind: str) -> int:
        """Load the last pages of the longest stored prefix; tokens of that prefix. Pages may leave meanwhile: a shorter
        one is tried then."""
        step = work.page_tokens
        for _ in range(WINDOW_TRIES):
            pages = self._there(cache, keys).pages
            if not pages:
                return 0
            first = work.needed(pages * step) // step
            loaded = self._get(work, cache, keys[:pages], first, kind)
            if first + loaded == pages:
                tier = next(iter(work.spent.cached))
                work.spent.cached[tier] += first * step  # as if they were read: they need not be computed
                return pages * step
            work.spent.cached.clear()
            keys = keys[: first + loaded]
        return 0

    def _get(self, work: Work, cache: PrefixCache, keys: Keys, first: int, kind: str) -> int:
        """Load pages from number ``first`` on; how many that were."""
        assert work.frames is not None
        pages, loaded = len(keys), 0
        if len(runs(work.frames[first:pages])) > 1 and not kind:
            there = self._there(cache, keys[first:])  # one question to other nodes, and not one for each run of frames
            pages = first + there.pages
            if there.nodes:
                return self._get_scattered(work, cache, keys[first:pages], work.frames[first:pages])
        for index, frame, count in runs(work.frames[first:pages]):
            start = first + index
            asked = keys[start : start + count]
            found = Match(0, 0, "")
            with self._pool.forgiven(), self._staging.receive(frame, count) as rows:
                if kind and self._pool.codec is not None:
                    found = cache.get(asked)
                    if found.data is not None and found.pages:
                        self._pool.codec.decode(found.data, out=rows[: found.pages])
                else:
                    found = cache.get(asked, out=rows)
            self._count(work, cache, found, kind)
            loaded += found.pages
            if found.pages < count:
                break
        return loaded

    def _there(self, cache: PrefixCache, keys: Keys) -> Match:
        found = Match(0, 0, "")
        with self._pool.forgiven():
            found = cache.lookup(keys)
        return found

    def _get_scattered(self, work: Work, cache: PrefixCache, keys: Keys, frames: torch.Tensor) -> int:
        """The same by way of a buffer: pages come from other nodes one after the other, and the frames lie apart."""
        loaded = 0
        with self._pool.forgiven():
            found = cache.get(keys)
            for index, frame, count in runs(frames[: found.pages]):
                assert found.data is not None, "it was given no buffer"
                with self._staging.receive(frame, count) as rows:
                    rows[:] = found.data[index : index + count]
                loaded += count
            self._count(work, cache, found, "")
        return loaded

    def _count(self, work: Work, cache: PrefixCache, found: Match, kind: str) -> None:
        for tier, pages in found.tiers.items():
            name = f"{tier.name.lower()}{kind}"
            work.spent.cached[name] = work.spent.cached.get(name, 0) + pages * work.page_tokens
        work.from_arenas = work.from_arenas or Tier.HBM in found.tiers
        work.spent.loaded_bytes += found.pages * cache.page_bytes
