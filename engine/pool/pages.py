"""The pages in an engine's arena: which frames they are in, and what identifies them in the pool.

``engine.state`` decides about pages by their numbers. A page may stay in the arena after its sequence has ended. This
module then keeps the page's tokens and keys, so that a page that the pool lacks can still be written to it before the
frame is reused. A page that stays is also shown to other processes on the machine (``memory.mounting``) until its frame
is unused. The frame is not written to as long as another process may read it.
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


class PoolIdentity(NamedTuple):
    """The identity of a page in the pool: the cache to write it to, and the parts of its ``Keys``."""

    cache: PrefixCache
    root: bytes
    tag: bytes | None
    before: bytes
    link: bytes
    tokens: bytes
    hint: bytes


@dataclass(slots=True)
class PlacedPage:
    """A page and its frames.

    Attributes:
        frames: cache group -> frame.
        identity: set when the page stays after its sequence has ended, if there is a pool.
        is_shown: True while other processes can find the page.
    """

    frames: dict[int, int] = field(default_factory=dict)
    identity: PoolIdentity | None = None
    is_shown: bool = False

    @property
    def frame(self) -> int:
        """The page's frame in the first group."""
        return self.frames[0]


class ArenaPages:
    """The pages of one engine. Only the engine's thread uses this, except for ``clear``.

    Life of a page: it gets frames (``take``) -> it may stay when its sequence ends (``give_back``) -> its frames are
    unused (``give_back`` or ``evict``). A page number is used only once.

    Args:
        finish: waits until the device has done all work that was submitted to it.

    Attributes:
        demoted: the number of pages that were written to the pool shortly before their eviction.
    """

    def __init__(self, arenas: Arenas, pool: Pool, mounted: MountedArena, finish: Callable[[], None]) -> None:
        self._arenas = arenas.groups
        self._pool = pool
        self._mounted = mounted
        self._finish = finish
        self.demoted = 0
        self._placed: dict[int, PlacedPage] = {}

    def take(self, work: Work, tables: list[list[int]], shared: int) -> None:
        """Give a request frames for its pages.

        Args:
            tables: for each cache group, the number of each page of the request. In a ring, a number appears again
                for every page that uses the same frame.
            shared: the number of leading pages that are in the arena already. They are assumed to be in the pool, too;
                if they are not, writing the next page to the pool shows it.
        """
        placed, frame_tables, rings = self._placed, [], []
        for group, (arena, table) in enumerate(zip(self._arenas, tables, strict=True)):
            numbers = list(dict.fromkeys(table))
            new_frames = arena.take(len(numbers) - shared)
            assert new_frames is not None, "the arena has fewer free frames than the state has counted"
            for number, frame in zip(numbers[shared:], new_frames.tolist(), strict=True):
                placed.setdefault(number, PlacedPage()).frames[group] = frame
            frame_tables.append([placed[number].frames[group] for number in table])
            rings.append(len(numbers))
        work.frames, work.rings = torch.tensor(frame_tables, dtype=torch.int64), tuple(rings)
        work.shared_pages = shared
        work.record_loaded(0)
        work.record_stored(shared)
        if shared:
            work.cost.cached["hbm"] = shared * work.page_tokens

    def give_back(self, work: Work, freed: list[int], stay: list[int]) -> None:
        """Take back the frames of a request.

        The pages in ``freed`` are dropped. Those in ``stay``, its leading pages, remain in the arena.
        """
        self.evict(freed)
        work.frames = None
        self._set_identities(work, stay)
        self._show(work, stay)

    def _set_identities(self, work: Work, stay: list[int]) -> None:
        cache = self._pool.target_cache(work)
        if cache is None or len(cache.groups) > 1:  # pages in several groups are not offered to the pool again
            return
        if all(self._placed[number].identity is not None for number in stay):
            return
        (keys,) = keys_to_store(cache, work, 0, range(len(stay)))
        before, step = keys.before, work.page_tokens
        for index, (number, link) in enumerate(zip(stay, keys.links, strict=True)):
            page = self._placed[number]
            if page.identity is None:
                tokens = keys.tokens[index * step : (index + 1) * step].tobytes()
                hint = keys.hints[index : index + 1]
                page.identity = PoolIdentity(cache.groups[0], keys.root, keys.tag, before, link, tokens, hint)
            before = link

    def _show(self, work: Work, stay: list[int]) -> None:
        """Show leading pages of a request to other processes.

        This is done once, at the end of the request, because doing it in each step would take time.
        """
        hidden = [index for index, number in enumerate(stay) if not self._placed[number].is_shown]
        if not hidden or work.cache is None or not self._pool.up or self._mounted.why:
            return
        try:
            self._finish()
        except DeviceLost as error:  # the next step fails with the same error
            self._mounted.end(str(error))
            return
        # Pages in the arena are exact, even if the pool gets lossy replicas.
        (keys,) = keys_to_store(work.cache, work, 0, range(len(stay)))
        for _, first, count in runs(hidden):
            pages = [self._placed[number] for number in stay[first : first + count]]
            is_shown = self._mounted.show(keys[first : first + count], [page.frame for page in pages])
            for page in pages:
                page.is_shown = is_shown

    def hide(self, why: str) -> None:
        """Stop showing pages to other processes. ``why`` is the reason."""
        self._mounted.end(why)

    def evict(self, pages: list[int]) -> None:
        """Drop pages, and return their frames to the arenas."""
        if pages:
            placed = [self._placed.pop(number) for number in pages]
            shown = [page.frame for page in placed if page.is_shown]
            if shown:
                self._mounted.hide(shown)
            for group, arena in enumerate(self._arenas):
                arena.give_back(torch.tensor([page.frames[group] for page in placed if group in page.frames]).long())

    def clear(self, work: Work) -> None:
        """Wait until no other process reads the previous contents of the request's frames.

        A thread that loads pages calls this before it writes to the frames.
        """
        assert work.frames is not None
        self._mounted.clear(work.frames[0, work.shared_pages :].tolist())

    def offer(self, pages: list[int]) -> None:
        """Write the pages that the pool lacks. ``pages`` are consecutive pages of a chain."""
        placed = [self._placed[number] for number in pages]
        identities = [page.identity for page in placed if page.identity is not None]
        if len(identities) < len(placed) or not self._pool.can_write():
            return  # there is no pool, or its node is away
        first = identities[0]
        tokens = np.frombuffer(b"".join(page.tokens for page in identities), np.uint32)
        hints = b"".join(page.hint for page in identities)
        keys = Keys(
            len(first.tokens) // tokens.itemsize,
            first.root,
            first.before,
            [page.link for page in identities],
            tokens,
            None,
            tag=first.tag,
            hints=hints if len(hints) == len(identities) else b"",
        )
        with self._pool.tolerate_failures():
            self.demoted += self._pool.put_missing(first.cache, keys, torch.tensor([page.frame for page in placed]))
