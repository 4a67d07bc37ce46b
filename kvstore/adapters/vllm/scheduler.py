"""``Planner``, the connector's side in the scheduler: looks up each request's prefix, and plans the loads and saves.

A lookup reads the node's index, which is mapped into this process. It sends no message and changes nothing. The keys of
a request are computed once, and extended while the request generates tokens.

For models with windows, ``LoadingRequests`` decides whether one more request may take blocks to load into. Such a
request frees no block until it has run. vLLM admits a request if the requests before it can still get the blocks that
they need. But it assumes that they already have the blocks behind their windows, so it admits too many requests: two of
them can wait for each other's blocks for ever. Therefore this module counts the needed blocks itself.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvstore.adapters.vllm.blocks import NO_BLOCK, BlockMove, GroupMove, RootCaches
from kvstore.adapters.vllm.layouts import LoraDigests, adapter_of, media_digests
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


_log = logging.getLogger(__name__)

LOADS_MAX = 2  # loads of one request. It loads again after a failed load or a preemption, and must not do so for ever.
WARNINGS_MAX = 16  # different warnings that are logged


class LoadingRequests:
    """Requests that have blocks to load into and do not run yet. Used by the scheduler's thread only."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._requests: dict[str, Request] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Set the manager that owns the blocks."""
        self._manager = manager

    def add(self, request: Request) -> None:
        """Add a request that has received blocks to load into."""
        self._requests[request.request_id] = request

    def remove(self, request_id: str) -> None:
        """Remove a request that runs, or that has ended."""
        self._requests.pop(request_id, None)

    def any(self) -> bool:
        """Return whether there are such requests."""
        return bool(self._requests)

    def has_room(self, request: Request) -> bool:
        """Return whether one more request may take blocks: whether enough blocks are free for it and all others until
        their first tokens. A single request always may, since vLLM's cache is large enough for any one request."""
        others = {name: other for name, other in self._requests.items() if name != request.request_id}
        if not others or self._manager is None:
            return True
        blocks_missing = self._blocks_needed(request)
        for name, other in others.items():
            tables = self._manager.get_block_ids(name)
            blocks_missing += self._blocks_needed(other) - sum(len(table) - table.count(NO_BLOCK) for table in tables)
        return blocks_missing <= int(self._manager.block_pool.get_num_free_blocks())

    def _blocks_needed(self, request: Request) -> int:
        """Return the largest number of blocks that a request needs until its first token."""
        assert self._manager is not None
        total = 0
        for table in self._manager.coordinator.single_type_managers:
            blocks = request.num_tokens // table.block_size + 1
            blocks_max = table.max_admission_blocks_per_request
            total += blocks if blocks_max is None else min(blocks, blocks_max)
        return total


@dataclass
class StepMoves(KVConnectorMetadata):
    """The loads and saves that workers start in one step. ``is_idle``: the step computes nothing."""

    loads: list[BlockMove] = field(default_factory=list)
    saves: list[BlockMove] = field(default_factory=list)
    is_idle: bool = False


@dataclass
class _Tracked:
    """A request that uses the store, from its first lookup until it ends.

    Attributes:
        keys: the keys of all pages that were full at the last extension.
        pages_done: leading pages that need no save: they are stored, are being saved, or are not to be stored.
        loads: number of loads so far.
    """

    request: Request
    cache: GroupedCache
    adapter: str
    keys: GroupedKeys | None = None
    pages_done: int = 0
    loads: int = 0


class Planner:
    """Plans the loads and saves of one engine. Used by the scheduler's thread only.

    Args:
        can_load: load stored pages.
        can_save: save computed pages.
        boundary_tokens: for windows. A prompt can be resumed at every multiple of this number, and at its end.
        stored_blocks: reports stored blocks as events; None to report nothing.
    """

    def __init__(
        self,
        store: Store,
        model: PagedModel,
        salt: str,
        *,
        can_load: bool,
        can_save: bool,
        boundary_tokens: int,
        stored_blocks: StoredBlocks | None = None,
    ) -> None:
        self._model = model
        self._boundary_tokens = max(1, -(-boundary_tokens // model.page_tokens)) * model.page_tokens
        self._caches = RootCaches(store, model.layouts, salt)
        self._can_load = can_load
        self._can_save = can_save
        self._tracked: dict[str, _Tracked] = {}
        self._moves = StepMoves()
        self._warnings: set[str] = set()
        self._era = ""
        self._loras = LoraDigests()
        self._stats = MoveStats()
        self._stored_blocks = stored_blocks
        self._events: list[KVCacheEvent] = []
        self.loading = LoadingRequests()

    # --- before a request runs --------------------------------------------------------------------------------------

    def match(self, request: Request, computed_tokens: int) -> int | None:
        """Return how many tokens after the computed ones the store has. The last token of a request is never counted,
        since vLLM must compute it. Return None if vLLM should ask again in a later step."""
        tracked = self._track(request)
        # The flag is set for prompts whose logits are needed (`prompt_logprobs`), or by the user.
        if tracked is None or not self._can_load or request.skip_reading_prefix_cache:
            return 0
        if tracked.loads == LOADS_MAX:
            tracked.pages_done = 0  # the stored pages cannot be loaded: save them again
            return 0
        page_tokens = self._model.page_tokens
        pages_max = (request.num_tokens - 1) // page_tokens
        try:
            pages = tracked.cache.lookup(self._keys(tracked, pages_max)).tokens // page_tokens if pages_max else 0
        except KVStoreError as error:
            self._warn_once(f"the pool is not responding: {error}")
            return 0
        tracked.pages_done = pages
        self._add_stored_blocks(tracked, range(pages))
        if pages * page_tokens <= computed_tokens:
            return 0
        if not self._model.reports_blocks and not self.loading.has_room(request):
            return None
        return pages * page_tokens - computed_tokens

    def plan_load(self, request: Request, blocks: KVCacheBlocks, tokens: int) -> None:
        """Plan to load the last ``tokens`` tokens of a request's stored prefix into its blocks."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tokens:
            return
        page_tokens, pages = self._model.page_tokens, tracked.pages_done
        computed_tokens, tables = pages * page_tokens - tokens, blocks.get_block_ids()
        keys = self._keys(tracked, pages)
        groups = []
        for number, (group, needed) in enumerate(
            zip(self._model.groups, keys.needed(pages * page_tokens), strict=True)
        ):
            group_pages = range(max(needed.start, computed_tokens // page_tokens), pages)
            computed_blocks = computed_tokens // group.block_size
            # The first page may begin with blocks that vLLM has already computed. They are not overwritten.
            skipped = max(0, computed_blocks - group_pages.start * group.page_blocks)
            blocks_by_table = {
                table: [NO_BLOCK] * min(skipped, len(page_blocks)) + page_blocks[skipped:]
                for table, page_blocks in _page_blocks(group, group_pages, tables).items()
            }
            groups.append(GroupMove(keys.parts(number, group_pages), blocks_by_table))
        self._moves.loads.append(BlockMove(request.request_id, tracked.adapter, groups))
        self._stats.add(found_tokens=tokens)
        tracked.loads += 1
        self.loading.add(request)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMoves:
        """Plan the saves of a step, and return its loads and saves."""
        for request_id in output.num_scheduled_tokens:
            self.loading.remove(request_id)
        if self._can_save:
            for new in output.scheduled_new_reqs:
                self._plan_saves(new.req_id, new.num_computed_tokens, output)
            cached = output.scheduled_cached_reqs
            for request_id, computed_tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                self._plan_saves(request_id, computed_tokens, output)
        moves, self._moves = self._moves, StepMoves()
        moves.is_idle = not output.num_scheduled_tokens
        return moves

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._tracked.pop(request.request_id, None)
        self.loading.remove(request.request_id)

    def reset(self) -> bool:
        """Stop using all pages stored so far, because weights may have been changed in place.

        From now on this engine's pages have new roots, and running requests are not saved. Return False if a load is in
        progress.
        """
        self._era = uuid.uuid4().hex
        self._tracked.clear()
        if self._stored_blocks is not None:
            self._events += self._stored_blocks.clear()
        return not self.loading.any()

    def take_stats(self) -> MoveStats | None:
        """Return the count of found tokens since the last call; None if there are none."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, MoveStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """Return the events of stored and removed blocks since the last call."""
        if self._stored_blocks is None:
            return []
        events, self._events = self._events, []
        return events + self._stored_blocks.take_events()

    def _add_stored_blocks(self, tracked: _Tracked, pages: range) -> None:
        if self._stored_blocks is not None and pages:
            keys = self._keys(tracked, pages.stop)
            self._stored_blocks.add(tracked.request, tracked.cache.groups[0], keys, pages)

    def _plan_saves(self, request_id: str, computed_tokens: int, output: SchedulerOutput) -> None:
        """Plan to save the pages of a request that this step fills."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        # The step may also compute draft tokens, which may be rejected. Only tokens that the request has are saved.
        tokens = min(computed_tokens + output.num_scheduled_tokens[request_id], tracked.request.num_tokens)
        pages = tokens // self._model.page_tokens
        if pages <= tracked.pages_done:
            return
        assert output.kv_connector_block_state is not None
        tables = output.kv_connector_block_state.get_block_ids(request_id)
        assert tables is not None, "a scheduled request has blocks"
        keys, prompt_tokens = self._keys(tracked, pages), tracked.request.num_prompt_tokens
        groups = []
        for number, group in enumerate(self._model.groups):
            saved = [page for page in range(tracked.pages_done, pages) if self._is_saved(group, page, prompt_tokens)]
            groups.append(_save_move(keys, number, group, saved, tables))
        if any(group.parts for group in groups):
            self._moves.saves.append(BlockMove(request_id, tracked.adapter, groups))
            self._add_stored_blocks(tracked, range(tracked.pages_done, pages))
        tracked.pages_done = pages

    def _is_saved(self, group: PagedGroup, page: int, prompt_tokens: int) -> bool:
        """Return whether a page is saved. Full attention saves all pages. A window saves the pages that are needed to
        resume at the end of the prompt or at a boundary, and all pages of the answer, whose end is unknown."""
        window, page_tokens, boundary = group.layout.window, self._model.page_tokens, self._boundary_tokens
        first = (page + 1) * page_tokens  # a prompt resumed from `first` to `last` tokens needs the page
        last = first + window - 2
        if not window or first > prompt_tokens or last // boundary * boundary >= first:
            return True
        ends = (prompt_tokens // page_tokens * page_tokens, (prompt_tokens - 1) // page_tokens * page_tokens)
        return any(first <= end <= last for end in ends)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _track(self, request: Request) -> _Tracked | None:
        """Return the state of a request, created at its first lookup. Return None for a request that does not use the
        store."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            return tracked
        if request.prompt_embeds is not None or request.prompt_token_ids is None or request.pooling_params is not None:
            self._warn_once("requests with embeddings or pooling are not stored")
            return None
        if request.mm_features and not self._model.has_media_names:
            self._warn_once("requests with media are not stored without vLLM's prefix cache or its processor cache")
            return None
        try:
            adapter = adapter_of(request, self._loras, self._era)
        except OSError as error:
            self._warn_once(f"requests with a LoRA whose files cannot be read are not stored: {error}")
            return None
        tracked = _Tracked(request, self._caches.of(adapter), adapter)
        self._tracked[request.request_id] = tracked
        return tracked

    def _keys(self, tracked: _Tracked, pages: int) -> GroupedKeys:
        """Return the keys of a request's first pages."""
        keys, tokens = tracked.keys, pages * self._model.page_tokens
        if keys is None or keys.tokens < tokens:
            token_ids: Any = tracked.request.all_token_ids
            media = media_digests(tracked.request, self._model.page_tokens)
            extras = [media] * len(self._model.groups) if media is not None else None
            keys = tracked.keys = tracked.cache.keys(np.array(token_ids, np.uint32), extras)
        return keys.upto(tokens)

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings and len(self._warnings) < WARNINGS_MAX:
            self._warnings.add(text)
            _log.warning("kvstore: %s", text)


def _page_blocks(group: PagedGroup, pages: Sequence[int], tables: tuple[list[int], ...]) -> dict[int, list[int]]:
    """Return table -> blocks of these pages, for each table of the group."""
    size = group.page_blocks
    return {
        table: [block for page in pages for block in tables[table][page * size : (page + 1) * size]]
        for table in sorted(set(group.tables))
    }


def _save_move(
    keys: GroupedKeys, number: int, group: PagedGroup, pages: list[int], tables: tuple[list[int], ...]
) -> GroupMove:
    """Return the move that saves these pages of a group. It omits pages behind a window, whose blocks vLLM has already
    freed."""
    present = [
        page for page in pages if not any(NO_BLOCK in blocks for blocks in _page_blocks(group, [page], tables).values())
    ]
    parts: list[Keys] = []
    for _, run in groupby(enumerate(present), lambda entry: entry[1] - entry[0]):  # runs of consecutive pages
        run_pages = [page for _, page in run]
        parts += keys.parts(number, range(run_pages[0], run_pages[-1] + 1))
    return GroupMove(parts, _page_blocks(group, present, tables))
