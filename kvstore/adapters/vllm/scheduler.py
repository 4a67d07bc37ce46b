"""The scheduler side: what each request finds in the store, and which blocks are loaded and saved in a step.

A lookup reads the node's index, which is mapped into this process: it sends no message and has no side effect. The keys
of a request are computed once, and extended while it generates.

Decides whether one more request may take blocks before it runs.

A request whose pages are loaded holds blocks, and frees none until it has run. vLLM admits a request if the earlier
ones still find the blocks that they need. For windows it counts blocks behind the window as if they were held, so it
admits too many: two requests may hold blocks that each other needs, and neither ever runs. So for models with windows
this module counts the blocks.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvstore.adapters.vllm.blocks import NO_BLOCK, BlockMove, GroupMove, RootCaches
from kvstore.adapters.vllm.layouts import LoraDigests, adapter_of, media_of
from kvstore.adapters.vllm.stats import MoveStats
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvstore.adapters.vllm.blocks import PagedGroup, PagedModel
    from kvstore.adapters.vllm.kv_events import StoredBlocks
    from kvstore.client.grouped_cache import GroupedCache
    from kvstore.client.store import Store
    from kvstore.model.groups import GroupedKeys
    from kvstore.model.prefix import Keys


class HeldBlocks:
    """Requests that hold blocks and do not run yet. Used by the scheduler's thread only."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._held: dict[str, Request] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Set the manager that owns the blocks."""
        self._manager = manager

    def add(self, request: Request) -> None:
        """Add a request that has got blocks to load into."""
        self._held[request.request_id] = request

    def remove(self, name: str) -> None:
        """Remove a request that runs, or that has ended."""
        self._held.pop(name, None)

    def any(self) -> bool:
        """True if there are such requests."""
        return bool(self._held)

    def has_room(self, request: Request) -> bool:
        """Return whether this request may hold blocks as well: whether there are enough free blocks for it and the
        others. A single request always may, since vLLM's cache is large enough for any one."""
        others = {name: other for name, other in self._held.items() if name != request.request_id}
        if not others or self._manager is None:
            return True
        missing = self._needed(request)
        for name, other in others.items():
            tables = self._manager.get_block_ids(name)
            missing += self._needed(other) - sum(len(table) - table.count(0) for table in tables)
        return missing <= int(self._manager.block_pool.get_num_free_blocks())

    def _needed(self, request: Request) -> int:
        """Return the most blocks that a request needs until its first token."""
        assert self._manager is not None
        total = 0
        for table in self._manager.coordinator.single_type_managers:
            blocks = request.num_tokens // table.block_size + 1
            most = table.max_admission_blocks_per_request
            total += blocks if most is None else min(blocks, most)
        return total


_log = logging.getLogger(__name__)

LOADS_MAX = 2  # of one request, which asks again after a failed load or a preemption; else it could load for ever


@dataclass
class StepMoves(KVConnectorMetadata):
    """The workers' moves in one step. ``idle``: the step computes nothing."""

    loads: list[BlockMove] = field(default_factory=list)
    saves: list[BlockMove] = field(default_factory=list)
    idle: bool = False


@dataclass
class _Tracked:
    """A running request."""

    request: Request
    cache: GroupedCache
    adapter: str
    keys: GroupedKeys | None = None  # of the full pages at the time of the last call
    stored: int = 0  # leading pages that are stored, being stored, or need not be
    loads: int = 0


class Planner:
    """Plans loads and saves. Used by the scheduler's thread only.

    Args:
        boundary_tokens: windows are stored so that a prompt can be resumed at every multiple of this, and at its end.
        stored: reports stored blocks as events; None to report nothing.
    """

    def __init__(
        self,
        store: Store,
        served: PagedModel,
        salt: str,
        *,
        loads: bool,
        saves: bool,
        boundary_tokens: int,
        stored: StoredBlocks | None = None,
    ) -> None:
        self._served = served
        self._every = max(1, -(-boundary_tokens // served.page_tokens)) * served.page_tokens
        self._caches = RootCaches(store, served.layouts, salt)
        self._loads = loads
        self._saves = saves
        self._tracked: dict[str, _Tracked] = {}
        self._moves = StepMoves()
        self._told: set[str] = set()
        self._era = ""
        self._loras = LoraDigests()
        self._stats = MoveStats()
        self._stored = stored
        self._events: list[KVCacheEvent] = []
        self.held = HeldBlocks()

    # --- before a request runs --------------------------------------------------------------------------------------

    def found(self, request: Request, computed: int) -> int | None:
        """Return how many tokens beyond ``computed`` the store has; never the last one, which must be computed. None
        means that vLLM should ask again in a later step."""
        tracked = self._track(request)
        # vLLM skips its own cache for prompts whose logits are needed (`prompt_logprobs`), and on request.
        if tracked is None or not self._loads or request.skip_reading_prefix_cache:
            return 0
        if tracked.loads == LOADS_MAX:
            tracked.stored = 0  # the stored pages are unusable: save them again
            return 0
        page_tokens = self._served.page_tokens
        asked = (request.num_tokens - 1) // page_tokens
        try:
            pages = tracked.cache.lookup(self._keys(tracked, asked)).tokens // page_tokens if asked else 0
        except KVStoreError as error:
            self._tell_once(f"the pool does not answer: {error}")
            return 0
        tracked.stored = pages
        self._offer(tracked, range(pages))
        if pages * page_tokens <= computed:
            return 0
        if not self._served.by_blocks and not self.held.has_room(request):
            return None
        return pages * page_tokens - computed

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """Note a request's blocks; their last ``external`` tokens are loaded from the store."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not external:
            return
        page_tokens, pages = self._served.page_tokens, tracked.stored
        computed, tables = pages * page_tokens - external, blocks.get_block_ids()
        keys = self._keys(tracked, pages)
        groups = []
        for number, (group, needed) in enumerate(
            zip(self._served.groups, keys.needed(pages * page_tokens), strict=True)
        ):
            which = range(max(needed.start, computed // page_tokens), pages)
            there = computed // group.block_size  # blocks that need no load
            blocks_of = _blocks(group, which, tables)
            for table, its in blocks_of.items():
                before = max(0, there - which.start * group.page_blocks)
                blocks_of[table] = [NO_BLOCK] * min(before, len(its)) + its[before:]
            groups.append(GroupMove(keys.parts(number, which), blocks_of))
        self._moves.loads.append(BlockMove(request.request_id, tracked.adapter, groups))
        self._stats.add(found_tokens=external)
        tracked.loads += 1
        self.held.add(request)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMoves:
        """Return the moves of this step."""
        for name in output.num_scheduled_tokens:
            self.held.remove(name)
        if self._saves:
            for new in output.scheduled_new_reqs:
                self._runs(new.req_id, new.num_computed_tokens, output)
            cached = output.scheduled_cached_reqs
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._runs(name, computed, output)
        moves, self._moves = self._moves, StepMoves()
        moves.idle = not output.num_scheduled_tokens
        return moves

    def finished(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._tracked.pop(request.request_id, None)
        self.held.remove(request.request_id)

    def reset(self) -> bool:
        """Stop using all stored pages, since weights may have been changed in place: from now on this engine's pages
        have new roots, and running requests are not saved. Returns whether no load was in progress."""
        self._era = uuid.uuid4().hex
        self._tracked.clear()
        if self._stored is not None:
            self._events += self._stored.clear()
        return not self.held.any()

    def take_stats(self) -> MoveStats | None:
        """Return counts of found tokens since the last call; None if there are none."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, MoveStats()
        return taken

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events of stored and removed blocks since the last call."""
        if self._stored is None:
            return []
        events, self._events = self._events, []
        return events + self._stored.take()

    def _offer(self, tracked: _Tracked, pages: range) -> None:
        if self._stored is not None and pages:
            keys = self._keys(tracked, pages.stop)
            self._stored.offer(tracked.request, tracked.cache.groups[0], keys, pages)

    def _runs(self, name: str, computed: int, output: SchedulerOutput) -> None:
        tracked = self._tracked.get(name)
        if tracked is None:
            return
        # Draft tokens may be rejected: only tokens that the request has are stored.
        tokens = min(computed + output.num_scheduled_tokens[name], tracked.request.num_tokens)
        pages = tokens // self._served.page_tokens
        if pages <= tracked.stored:
            return
        assert output.kv_connector_block_state is not None
        tables = output.kv_connector_block_state.get_block_ids(name)
        assert tables is not None, "it is scheduled"
        keys, prompt_tokens = self._keys(tracked, pages), tracked.request.num_prompt_tokens
        groups = []
        for number, group in enumerate(self._served.groups):
            which = [page for page in range(tracked.stored, pages) if self._wanted(group, page, prompt_tokens)]
            groups.append(_kept(keys, number, group, which, tables))
        if any(group.parts for group in groups):
            self._moves.saves.append(BlockMove(name, tracked.adapter, groups))
            self._offer(tracked, range(tracked.stored, pages))
        tracked.stored = pages

    def _wanted(self, group: PagedGroup, page: int, prompt_tokens: int) -> bool:
        """Return whether a page is to be stored. For a window these are the pages needed at the end of the prompt,
        those needed at every boundary, and all pages of the answer, whose end is unknown."""
        window, page_tokens = group.layout.window, self._served.page_tokens
        first = (page + 1) * page_tokens  # the first and the last boundary that need the page
        last = first + window - 2
        if not window or first > prompt_tokens or last // self._every * self._every >= first:
            return True
        ends = (prompt_tokens // page_tokens * page_tokens, (prompt_tokens - 1) // page_tokens * page_tokens)
        return any(first <= end <= last for end in ends)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _track(self, request: Request) -> _Tracked | None:
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            return tracked
        if request.prompt_embeds is not None or request.prompt_token_ids is None or request.pooling_params is not None:
            self._tell_once("requests with embeddings or pooling are not stored")
            return None
        if request.mm_features and not self._served.media_have_names:
            self._tell_once("requests with media are not stored without vLLM's prefix cache or its processor cache")
            return None
        try:
            adapter = adapter_of(request, self._loras, self._era)
        except OSError as error:
            self._tell_once(f"requests with a LoRA whose files cannot be read are not stored: {error}")
            return None
        tracked = _Tracked(request, self._caches.of(adapter), adapter)
        self._tracked[request.request_id] = tracked
        return tracked

    def _keys(self, tracked: _Tracked, pages: int) -> GroupedKeys:
        """Return the keys of the first pages."""
        keys, tokens = tracked.keys, pages * self._served.page_tokens
        if keys is None or keys.tokens < tokens:
            known: Any = tracked.request.all_token_ids
            media = media_of(tracked.request, self._served.page_tokens)
            extras = [media] * len(self._served.groups) if media is not None else None
            keys = tracked.keys = tracked.cache.keys(np.array(known, np.uint32), extras)
        return keys.upto(tokens)

    def _tell_once(self, what: str) -> None:
        if what not in self._told and len(self._told) < 16:
            self._told.add(what)
            _log.warning("kvstore: %s", what)


def _blocks(group: PagedGroup, pages: Sequence[int], tables: tuple[list[int], ...]) -> dict[int, list[int]]:
    """Return the blocks of these pages in each of the group's tables."""
    size = group.page_blocks
    return {
        table: [block for page in pages for block in tables[table][page * size : (page + 1) * size]]
        for table in sorted(set(group.tables))
    }


def _kept(
    keys: GroupedKeys, number: int, group: PagedGroup, pages: list[int], tables: tuple[list[int], ...]
) -> GroupMove:
    """Return these pages of a group without those behind a window, whose blocks are already reused."""
    there = [page for page in pages if not any(NO_BLOCK in its for its in _blocks(group, [page], tables).values())]
    parts: list[Keys] = []
    for at, page in enumerate(there):
        if not at or there[at - 1] != page - 1:  # a run begins
            run = next((end for end in range(at, len(there) - 1) if there[end + 1] != there[end] + 1), len(there) - 1)
            parts += keys.parts(number, range(page, there[run] + 1))
    return GroupMove(parts, _blocks(group, there, tables))
