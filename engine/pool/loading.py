"""PrefixLoader: copies the stored prefix of a prompt from the pool into frames."""

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

WINDOW_TRIES: Final = 3  # how many prefixes to try if needed pages are evicted in the meantime


class PrefixLoader:
    """Loads prefixes from one pool. Several threads may load at once, each for a different request."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def load(self, work: Work) -> int:
        """Copy the longest stored prefix of the prompt into the frames. Returns its length in tokens.

        Shared pages count, but are not copied. For a ring of frames, only the pages that the window needs are copied.
        If the pool cannot be read, the prefix ends with the shared pages.
        """
        page_tokens = work.page_tokens
        full_pages, pages = work.prompt // page_tokens, work.shared_pages
        if full_pages == pages or work.cache is None or not self._pool.is_readable:
            return pages * page_tokens
        tokens, codec = work.tokens[: full_pages * page_tokens], self._pool.codec
        lossy = (
            self._pool.cache(work.request.page_salt, work.request.adapter, True) if work.request.allow_lossy else None
        )
        suffix = f"-{codec.name}" if codec is not None else ""
        keys = work.cache.keys(tokens)
        if work.has_ring:  # shares no pages, and a prefix is useful only if its complete window is loaded
            exact = self._boundary(work.cache, keys) if lossy is not None else full_pages
            if lossy is None or exact == full_pages or self._boundary(lossy, lossy.keys(tokens)) <= exact:
                return self._get_window(work, work.cache, keys, "") * page_tokens
            work.lossy = True
            return self._get_window(work, lossy, lossy.keys(tokens), suffix) * page_tokens
        pages = self._get_all(work, work.cache, keys, pages, "")
        if lossy is not None and pages < full_pages:
            pages_with_lossy = self._get_all(work, lossy, lossy.keys(tokens), pages, suffix)
            work.lossy = work.lossy or pages_with_lossy > pages
            pages = pages_with_lossy
        return pages * page_tokens

    # In the methods below, ``suffix`` is "" for exact pages, and "-" with the codec's name for lossy ones. Usage counts
    # cached tokens under the tier's name with this suffix.

    def _get_all(self, work: Work, cache: GroupedCache, keys: GroupedKeys, first: int, suffix: str) -> int:
        """Load the pages of all groups, starting at page ``first``. Return how many leading pages are then loaded.

        The first group is loaded last, and only as far as the other groups, which may lack pages: a page of a window
        group that no boundary needs may never have been stored.
        """
        pages = keys.pages(0)
        for group in reversed(range(len(cache.groups))):
            pages = first + self._get(work, cache, keys, group, range(first, pages), suffix)
        return pages

    def _get_window(self, work: Work, cache: GroupedCache, keys: GroupedKeys, suffix: str) -> int:
        """Load the pages that are needed to continue after the longest stored prefix. Returns its number of pages.

        If a needed page is evicted before it is loaded, the next shorter prefix is tried.
        """
        page_tokens = work.page_tokens
        for _ in range(WINDOW_TRIES):
            pages = self._boundary(cache, keys)
            missing = self._get_needed(work, cache, keys, pages, suffix) if pages else None
            if missing is None:
                if pages and (first := work.needed_from(pages * page_tokens, 0)):
                    tier = next(iter(work.cost.cached))
                    work.cost.cached[tier] += first  # tokens before the window count as loaded: none is computed
                work.record_loaded(pages * page_tokens)
                return pages
            work.cost.cached.clear()
            keys = keys.upto(missing * page_tokens)
        return 0

    def _get_needed(self, work: Work, cache: GroupedCache, keys: GroupedKeys, pages: int, suffix: str) -> int | None:
        """Load the pages that are needed to continue after ``pages`` leading pages.

        Returns the first page that could not be loaded, or None.
        """
        for group in reversed(range(len(cache.groups))):
            needed = range(work.needed_from(pages * work.page_tokens, group) // work.page_tokens, pages)
            loaded = self._get(work, cache, keys, group, needed, suffix)
            if loaded < len(needed):
                return needed.start + loaded
        return None

    def _get(self, work: Work, cache: GroupedCache, keys: GroupedKeys, group: int, pages: range, suffix: str) -> int:
        """Load pages of a group until one is missing. Returns how many were loaded."""
        assert work.frames is not None
        table, start = work.frames[group], pages.start
        for part in keys.parts(group, pages):
            loaded = self._get_part(work, cache.groups[group], group, part, table[start : start + len(part)], suffix)
            start += loaded
            if loaded < len(part):
                break
        return start - pages.start

    def _get_part(
        self, work: Work, cache: PrefixCache, group: int, keys: Keys, frames: torch.Tensor, suffix: str
    ) -> int:
        loaded = 0
        if len(runs(frames)) > 1 and not suffix:
            match = self._lookup(cache, keys)  # one request to other nodes, instead of one for each run of frames
            keys, frames = keys[: match.pages], frames[: match.pages]
            if match.nodes:
                return self._get_scattered(work, cache, group, keys, frames)
        for index, frame, count in runs(frames):
            run = keys[index : index + count]
            if not suffix and (match := self._get_from_arenas(cache, group, run, frame, count)).pages == count:
                self._count(work, cache, group, match, suffix)
                pages = count
            else:
                pages = self._get_run(work, cache, group, run, frame, suffix)
            loaded += pages
            if pages < count:
                break
        return loaded

    def _get_run(self, work: Work, cache: PrefixCache, group: int, keys: Keys, frame: int, suffix: str) -> int:
        """Load pages into consecutive frames, through host memory."""
        loaded, staging = 0, self._pool.stagings[group]
        while loaded < len(keys):
            batch, match = keys[loaded : loaded + staging.frames_max], Match(0, 0, "")
            with self._pool.tolerate_failures(), staging.receive(frame + loaded, len(batch)) as rows:
                if suffix and self._pool.codec is not None:
                    match = cache.get(batch)
                    if match.data is not None and match.pages:
                        self._pool.codec.decode(match.data, out=rows[: match.pages])
                else:
                    match = cache.get(batch, out=rows)
            self._count(work, cache, group, match, suffix)
            loaded += match.pages
            if match.pages < len(batch):
                break
        return loaded

    def _get_from_arenas(self, cache: PrefixCache, group: int, keys: Keys, frame: int, count: int) -> Match:
        """Load pages into consecutive frames of a device, if all of them are in the arenas of other engines.

        The bytes are copied from device to device if possible. If the match has fewer than ``count`` pages, the caller
        loads all of them in another way.
        """
        staging = self._pool.stagings[group]
        if staging.in_place or self._lookup(cache, keys).tiers != {Tier.HBM: count}:
            return Match(0, 0, "")
        match = Match(0, 0, "")
        with self._pool.tolerate_failures(), staging.page_target(frame, count) as rows:
            match = cache.get(keys, out=rows)
        return match

    def _boundary(self, cache: GroupedCache, keys: GroupedKeys) -> int:
        """Return the length in pages of the longest prefix after which every group can continue."""
        tokens = 0
        with self._pool.tolerate_failures():
            tokens = cache.lookup(keys).tokens
        return tokens // cache.boundary_tokens

    def _lookup(self, cache: PrefixCache, keys: Keys) -> Match:
        match = Match(0, 0, "")
        with self._pool.tolerate_failures():
            match = cache.lookup(keys)
        return match

    def _get_scattered(self, work: Work, cache: PrefixCache, group: int, keys: Keys, frames: torch.Tensor) -> int:
        """Load pages of other nodes into scattered frames. One get reads all of them into a buffer."""
        loaded, staging = 0, self._pool.stagings[group]
        with self._pool.tolerate_failures():
            match = cache.get(keys)
            for index, frame, count in runs_upto(staging.frames_max, frames[: match.pages]):
                assert match.data is not None, "a get without a buffer returns data"
                with staging.receive(frame, count) as rows:
                    rows[:] = match.data[index : index + count]
                loaded += count
            self._count(work, cache, group, match, "")
        return loaded

    def _count(self, work: Work, cache: PrefixCache, group: int, match: Match, suffix: str) -> None:
        for tier, pages in match.tiers.items() if group == 0 else ():  # a token counts once, not once for each group
            name = f"{tier.name.lower()}{suffix}"
            work.cost.cached[name] = work.cost.cached.get(name, 0) + pages * work.page_tokens
        work.from_arenas = work.from_arenas or Tier.HBM in match.tiers
        work.cost.loaded_bytes += match.pages * cache.page_bytes
