"""Loading: copies the stored part of a prompt from the pool into frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from engine.memory.arena import runs, runs_upto
from engine.pool.store import Pool
from engine.pool.work import Work
from kvstore.client.grouped_cache import GroupedCache
from kvstore.client.match import Match
from kvstore.client.prefix_cache import PrefixCache
from kvstore.model.groups import GroupedKeys
from kvstore.model.prefix import Keys
from kvstore.model.replica import Tier

if TYPE_CHECKING:
    import torch

WINDOW_TRIES: Final = 3


class Loading:
    """Loads from one pool. Several threads may load, each for a request of its own."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def load(self, work: Work) -> int:
        """Copy the longest stored prefix of the prompt into the frames, except for pages that it shares; returns its
        tokens including those, at most all.

        Called in a thread of its own. A pool that cannot be read has nothing. Into a ring only
        what the window needs is copied.
        """
        page_tokens = work.page_tokens
        wanted, pages = work.prompt // page_tokens, work.shared_pages
        if wanted == pages or work.cache is None or not self._pool.readable:
            return pages * page_tokens
        tokens, codec = work.tokens[: wanted * page_tokens], self._pool.codec
        lossy = (
            self._pool.cache(work.request.page_salt, work.request.adapter, True) if work.request.allow_lossy else None
        )
        kind = f"-{codec.name}" if codec is not None else ""
        keys = work.cache.keys(tokens)
        if work.has_ring:  # nothing is shared, and it is useful only if all of the window is there
            exact = self._boundary(work.cache, keys) if lossy is not None else wanted
            if lossy is None or exact == wanted or self._boundary(lossy, lossy.keys(tokens)) <= exact:
                return self._get_window(work, work.cache, keys, "") * page_tokens
            work.lossy = True
            return self._get_window(work, lossy, lossy.keys(tokens), kind) * page_tokens
        pages = self._get_all(work, work.cache, keys, pages, "")
        if lossy is not None and pages < wanted:
            found = self._get_all(work, lossy, lossy.keys(tokens), pages, kind)
            work.lossy = work.lossy or found > pages
            pages = found
        return pages * page_tokens

    def _get_all(self, work: Work, cache: GroupedCache, keys: GroupedKeys, first: int, kind: str) -> int:
        """Load pages of all groups from number ``first`` on; returns how many leading ones are there then. The first
        group comes last, and no further than the others: pages that no boundary needs may be missing in those."""
        pages = keys.pages(0)
        for group in reversed(range(len(cache.groups))):
            pages = first + self._get(work, cache, keys, group, range(first, pages), kind)
        return pages

    def _get_window(self, work: Work, cache: GroupedCache, keys: GroupedKeys, kind: str) -> int:
        """Load what the longest stored prefix needs; returns how many pages it has. If pages are evicted in the
        meantime, a shorter one is tried."""
        step = work.page_tokens
        for _ in range(WINDOW_TRIES):
            pages = self._boundary(cache, keys)
            missing = self._get_needed(work, cache, keys, pages, kind) if pages else None
            if missing is None:
                if pages and (first := work.needed(pages * step, 0)):
                    tier = next(iter(work.spent.cached))
                    work.spent.cached[tier] += first  # they count as read: they need not be computed
                work.brought(pages * step)
                return pages
            work.spent.cached.clear()
            keys = keys.upto(missing * step)
        return 0

    def _get_needed(self, work: Work, cache: GroupedCache, keys: GroupedKeys, pages: int, kind: str) -> int | None:
        """Load what this many leading pages need; returns the first page that could not be loaded, or None."""
        for group in reversed(range(len(cache.groups))):
            needed = range(work.needed(pages * work.page_tokens, group) // work.page_tokens, pages)
            loaded = self._get(work, cache, keys, group, needed, kind)
            if loaded < len(needed):
                return needed.start + loaded
        return None

    def _get(self, work: Work, cache: GroupedCache, keys: GroupedKeys, group: int, pages: range, kind: str) -> int:
        """Load these pages of a group, up to the first one that is not there; returns how many were."""
        assert work.frames is not None
        table, start = work.frames[group], pages.start
        for part in keys.parts(group, pages):
            loaded = self._get_part(work, cache.groups[group], group, part, table[start : start + len(part)], kind)
            start += loaded
            if loaded < len(part):
                break
        return start - pages.start

    def _get_part(self, work: Work, cache: PrefixCache, group: int, keys: Keys, frames: torch.Tensor, kind: str) -> int:
        loaded = 0
        if len(runs(frames)) > 1 and not kind:
            there = self._there(cache, keys)  # one question to other nodes, instead of one for each run of frames
            keys, frames = keys[: there.pages], frames[: there.pages]
            if there.nodes:
                return self._get_scattered(work, cache, group, keys, frames)
        for index, frame, count in runs(frames):
            asked = keys[index : index + count]
            if not kind and (there := self._direct(cache, group, asked, frame, count)).pages == count:
                self._count(work, cache, group, there, kind)
                some = count
            else:
                some = self._get_run(work, cache, group, asked, frame, kind)
            loaded += some
            if some < count:
                break
        return loaded

    def _get_run(self, work: Work, cache: PrefixCache, group: int, keys: Keys, frame: int, kind: str) -> int:
        """Load pages whose frames are consecutive, through the host."""
        loaded, staging = 0, self._pool.stagings[group]
        while loaded < len(keys):
            asked, found = keys[loaded : loaded + staging.frames_max], Match(0, 0, "")
            with self._pool.forgiven(), staging.receive(frame + loaded, len(asked)) as rows:
                if kind and self._pool.codec is not None:
                    found = cache.get(asked)
                    if found.data is not None and found.pages:
                        self._pool.codec.decode(found.data, out=rows[: found.pages])
                else:
                    found = cache.get(asked, out=rows)
            self._count(work, cache, group, found, kind)
            loaded += found.pages
            if found.pages < len(asked):
                break
        return loaded

    def _direct(self, cache: PrefixCache, group: int, keys: Keys, frame: int, count: int) -> Match:
        """Load pages that only engines have, from device to device if possible. If it brings fewer than all of them it
        has brought none."""
        staging = self._pool.stagings[group]
        if staging.in_place or self._there(cache, keys).tiers != {Tier.HBM: count}:
            return Match(0, 0, "")
        found = Match(0, 0, "")
        with self._pool.forgiven(), staging.filling(frame, count) as rows:
            found = cache.get(keys, out=rows)
        return found

    def _boundary(self, cache: GroupedCache, keys: GroupedKeys) -> int:
        """Pages before the longest boundary that every group has."""
        tokens = 0
        with self._pool.forgiven():
            tokens = cache.lookup(keys).tokens
        return tokens // cache.boundary_tokens

    def _there(self, cache: PrefixCache, keys: Keys) -> Match:
        found = Match(0, 0, "")
        with self._pool.forgiven():
            found = cache.lookup(keys)
        return found

    def _get_scattered(self, work: Work, cache: PrefixCache, group: int, keys: Keys, frames: torch.Tensor) -> int:
        """Load pages through a buffer: they come from other nodes one by one, and the frames are scattered."""
        loaded, staging = 0, self._pool.stagings[group]
        with self._pool.forgiven():
            found = cache.get(keys)
            for index, frame, count in runs_upto(staging.frames_max, frames[: found.pages]):
                assert found.data is not None, "it was given no buffer"
                with staging.receive(frame, count) as rows:
                    rows[:] = found.data[index : index + count]
                loaded += count
            self._count(work, cache, group, found, "")
        return loaded

    def _count(self, work: Work, cache: PrefixCache, group: int, found: Match, kind: str) -> None:
        for tier, pages in found.tiers.items() if group == 0 else ():  # a token counts once
            name = f"{tier.name.lower()}{kind}"
            work.spent.cached[name] = work.spent.cached.get(name, 0) + pages * work.page_tokens
        work.from_arenas = work.from_arenas or Tier.HBM in found.tiers
        work.spent.loaded_bytes += found.pages * cache.page_bytes
