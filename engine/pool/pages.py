"""Pages: the frames of the pages that ``engine.state`` has numbered.

Once a sequence has left a page in the arena, its tokens are no longer known elsewhere. They are kept here, so that a
page that the pool lost, or never had, can be written to it before the frame is reused. From then on other processes of
the machine find the page here (``memory.mounting``) until its frame is unused; the frame is not written to before that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from engine.memory.arena import Arenas, runs
from engine.memory.mounting import MountedArena
from engine.pool.keys import keys_to_store
from engine.pool.store import Pool
from engine.pool.work import Work
from kvstore.client.prefix_cache import PrefixCache
from kvstore.device.base import DeviceLost
from kvstore.model.prefix import Keys


class LeftPage(NamedTuple):
    """The identity of a page in the pool, kept after its sequence has ended."""

    cache: PrefixCache
    root: bytes
    tag: bytes | None
    before: bytes
    link: bytes
    tokens: bytes
    hint: bytes


@dataclass(slots=True)
class PlacedPage:
    """A page in its frames, by cache group. ``left``: set once a sequence left it here, if there is a pool. ``shown``:
    other processes find it."""

    frames: dict[int, int] = field(default_factory=dict)
    left: LeftPage | None = None
    shown: bool = False

    @property
    def frame(self) -> int:
        """Its frame in the first group."""
        return self.frames[0]


class ArenaPages:
    """The pages of one engine. Only used by the engine's thread.

    A page is placed (``take``) -> it may outlive its sequence (``give_back``) -> its frame is unused: its sequence did
    not leave it here, or it was evicted. A page number is used once.

    Args:
        finish: returns when the device has computed everything that it was given.

    Attributes:
        demoted: pages that the pool lacked, and was given before their frames were reused.
    """

    def __init__(self, arenas: Arenas, pool: Pool, mounted: MountedArena, finish: Callable[[], None]) -> None:
        self._arenas = arenas.groups
        self._pool = pool
        self._mounted = mounted
        self._finish = finish
        self.demoted = 0
        self._placed: dict[int, PlacedPage] = {}

    def take(self, work: Work, tables: list[list[int]], shared: int) -> None:
        """Place a request's pages, listed for each cache group, the first ``shared`` of which are here. The pool is
        assumed to have those too, which the write of the next page shows. In a ring each page is listed several
        times."""
        placed, found, rings = self._placed, [], []
        for group, (arena, table) in enumerate(zip(self._arenas, tables, strict=True)):
            numbers = list(dict.fromkeys(table))
            own = arena.take(len(numbers) - shared)
            assert own is not None, "the arena has fewer frames than the state thinks"
            for number, frame in zip(numbers[shared:], own.tolist(), strict=True):
                placed.setdefault(number, PlacedPage()).frames[group] = frame
            found.append([placed[number].frames[group] for number in table])
            rings.append(len(numbers))
        work.frames, work.rings = torch.tensor(found, dtype=torch.int64), tuple(rings)
        work.shared_pages = shared
        work.brought(0)
        work.all_stored(shared)
        if shared:
            work.spent.cached["hbm"] = shared * work.page_tokens

    def give_back(self, work: Work, freed: list[int], stay: list[int]) -> None:
        """Take back a request's pages: some are gone, and those of its leading tokens may stay."""
        self.evict(freed)
        work.frames = None
        self._remember(work, stay)
        self._show(work, stay)

    def _remember(self, work: Work, stay: list[int]) -> None:
        cache = self._pool.written_to(work)
        if cache is None or len(cache.groups) > 1:  # several groups: refused pages are not offered again
            return
        if all(self._placed[number].left is not None for number in stay):
            return
        (keys,) = keys_to_store(cache, work, 0, range(len(stay)))
        before, step = keys.before, work.page_tokens
        for index, (number, link) in enumerate(zip(stay, keys.links, strict=True)):
            page = self._placed[number]
            if page.left is None:
                tokens = keys.tokens[index * step : (index + 1) * step].tobytes()
                hint = keys.hints[index : index + 1]
                page.left = LeftPage(cache.groups[0], keys.root, keys.tag, before, link, tokens, hint)
            before = link

    def _show(self, work: Work, stay: list[int]) -> None:
        """Show these leading pages of a request to other processes. All at once, and at its end: not step by step."""
        fresh = [index for index, number in enumerate(stay) if not self._placed[number].shown]
        if not fresh or work.cache is None or not self._pool.up or self._mounted.why:
            return
        try:
            self._finish()
        except DeviceLost as error:  # the next step reports it too
            self._mounted.end(str(error))
            return
        # Pages here are exact, even if the pool gets lossy replicas.
        (keys,) = keys_to_store(work.cache, work, 0, range(len(stay)))
        for _, first, count in runs(fresh):
            pages = [self._placed[number] for number in stay[first : first + count]]
            shown = self._mounted.show(keys[first : first + count], [page.frame for page in pages])
            for page in pages:
                page.shown = shown

    def hide(self, why: str) -> None:
        """Stop showing pages to other processes."""
        self._mounted.end(why)

    def evict(self, pages: list[int]) -> None:
        """Forget pages: their frames are unused."""
        if pages:
            placed = [self._placed.pop(number) for number in pages]
            shown = [page.frame for page in placed if page.shown]
            if shown:
                self._mounted.hide(shown)
            for group, arena in enumerate(self._arenas):
                arena.give_back(torch.tensor([page.frames[group] for page in placed if group in page.frames]).long())

    def clear(self, work: Work) -> None:
        """Return when its frames may be written to: other processes may still read their previous contents. Called by
        any thread that loads, before it begins."""
        assert work.frames is not None
        self._mounted.clear(work.frames[0, work.shared_pages :].tolist())

    def offer(self, pages: list[int]) -> None:
        """Write the pages among these that the pool lacks; they are consecutive pages of a chain."""
        placed = [self._placed[number] for number in pages]
        left = [page.left for page in placed if page.left is not None]
        if len(left) < len(placed) or not self._pool.takes:
            return  # there is no pool, or it is away
        first = left[0]
        tokens = np.frombuffer(b"".join(page.tokens for page in left), np.uint32)
        hints = b"".join(page.hint for page in left)
        keys = Keys(
            len(first.tokens) // tokens.itemsize,
            first.root,
            first.before,
            [page.link for page in left],
            tokens,
            None,
            tag=first.tag,
            hints=hints if len(hints) == len(left) else b"",
        )
        with self._pool.forgiven():
            self.demoted += self._pool.put_missing(first.cache, keys, torch.tensor([page.frame for page in placed]))
