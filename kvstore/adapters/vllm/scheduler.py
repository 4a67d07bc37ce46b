"""The scheduler's side: what each request finds in the store, and which blocks are loaded and saved in a step.

A lookup reads the node's index, which is mapped here: no message, and no side effect. Keys of a request are made once,
and extended while it is answered.

Room: whether one more request may take blocks before it runs.

A request whose pages are loaded holds blocks, and gives them back to nobody until it has run. vLLM admits one where
those before it still find what they need. Of windows it counts blocks that were left behind as if they were held, so it
admits too many: two may hold what each of them needs, and neither ever runs. So with windows the count is taken here.
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
    """Requests that hold blocks and do not run yet. Of the scheduler's thread alone."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._held: dict[str, Request] = {}

    def bind(self, manager: KVCacheManager) -> None:
        """Who has the blocks."""
        self._manager = manager

    def add(self, request: Request) -> None:
        """It has been given blocks to load into."""
        self._held[request.request_id] = request

    def remove(self, name: str) -> None:
        """It runs, or is over."""
        self._held.pop(name, None)

    def any(self) -> bool:
        """Whether there are such requests."""
        return bool(self._held)

    def has_room(self, request: Request) -> bool:
        """Whether this one may hold blocks as well: there are free ones for all that it and the others will need. The
        only one always may, since vLLM's cache has room for any single request."""
        others = {name: other for name, other in self._held.items() if name != request.request_id}
        if not others or self._manager is None:
            return True
        missing = self._needed(request)
        for name, other in others.items():
            tables = self._manager.get_block_ids(name)
            missing += self._needed(other) - sum(len(table) - table.count(0) for table in tables)
        return missing <= self._manager.block_pool.get_num_free_blocks()

    def _needed(self, request: Request) -> int:
        """Blocks at most, until its first answer."""
        assert self._manager is not None
        total = 0
        for table in self._manager.coordinator.single_type_managers:
            blocks = request.num_tokens // table.block_size + 1
            most = table.max_admission_blocks_per_request
            total += blocks if most is None else min(blocks, most)
        return total


_log = logging.getLogger(__name__)

LOADS_MAX = 2  # of one request: whose load failed, or who was preempted, asks again; and pages may be found for ever


@dataclass
class StepMoves(KVConnectorMetadata):
    """What workers do in one step; ``idle``: nothing is computed in it."""

    loads: list[BlockMove] = field(default_factory=list)
    saves: list[BlockMove] = field(default_factory=list)
    idle: bool = False


@dataclass
class _Tracked:
    """A request that is being answered."""

    request: Request
    cache: GroupedCache
    adapter: str
    keys: GroupedKeys | None = None  # of the full pages that were known when they were asked for
    stored: int = 0  # pages that are stored, or on their way, as far as they are to be
    loads: int = 0


class Planner:
    """Of the scheduler's thread alone.

    Args:
        boundary_tokens: windows are stored so that a prompt can be resumed every so many tokens, beside its end.
        stored: who tells others what is stored, if anybody does.
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
        """Tokens beyond ``computed`` that the store has; never the last one, which has to be computed. None: this is to
        be asked again, when others run."""
        tracked = self._track(request)
        # vLLM does not ask its own cache for prompts whose logits are needed (`prompt_logprobs`), nor if told not to.
        if tracked is None or not self._loads or request.skip_reading_prefix_cache:
            return 0
        if tracked.loads == LOADS_MAX:
            tracked.stored = 0  # what was found is of no use: it is saved again
            return 0
        page_tokens = self._served.page_tokens
        asked = (request.num_tokens - 1) // page_tokens
        try:
            pages = tracked.cache.lookup(self._keys(tracked, asked)).tokens // page_tokens if asked else 0
        except KVStoreError as error:
            self._tell_once(f"the pool cannot be asked: {error}")
            return 0
        tracked.stored = pages
        self._offer(tracked, range(pages))
        if pages * page_tokens <= computed:
            return 0
        if not self._served.by_blocks and not self.held.has_room(request):
            return None
        return pages * page_tokens - computed

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """These blocks are the request's; so many tokens, the last of those that are there, come from the store."""
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
            there = computed // group.block_size  # blocks that have what they need
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
        """What is to be moved in this step."""
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
        """It is over, however it ended."""
        self._tracked.pop(request.request_id, None)
        self.held.remove(request.request_id)

    def reset(self) -> bool:
        """Nothing that was stored is found any more, since weights may have been changed in place: this engine's pages
        have roots of their own from now on, and what runs is not saved. Whether no load was under way."""
        self._era = uuid.uuid4().hex
        self._tracked.clear()
        if self._stored is not None:
            self._events += self._stored.clear()
        return not self.held.any()

    def take_stats(self) -> MoveStats | None:
        """What was found since this was asked last; None: nothing."""
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, MoveStats()
        return taken

    def take_events(self) -> list[KVCacheEvent]:
        """What is stored and what has gone, as far as that was found out since this was asked last."""
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
        # Draft tokens may be refused: only those that the request has are behind a page.
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
        """Whether a page is stored: of a window those that are needed at the end of the prompt, or at every so many
        tokens of it, and those of the answer, whose end nobody knows."""
        window, page_tokens = group.layout.window, self._served.page_tokens
        first = (page + 1) * page_tokens  # the first boundary that needs it, and the last one
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
        """Of the first pages."""
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
    """Of each of the group's tables the blocks of these pages."""
    size = group.page_blocks
    return {
        table: [block for page in pages for block in tables[table][page * size : (page + 1) * size]]
        for table in sorted(set(group.tables))
    }


def _kept(
    keys: GroupedKeys, number: int, group: PagedGroup, pages: list[int], tables: tuple[list[int], ...]
) -> GroupMove:
    """These pages of a group, without those that a window has left behind: their blocks are another's."""
    there = [page for page in pages if not any(NO_BLOCK in its for its in _blocks(group, [page], tables).values())]
    parts: list[Keys] = []
    for at, page in enumerate(there):
        if not at or there[at - 1] != page - 1:  # a run begins
            run = next((end for end in range(at, len(there) - 1) if there[end + 1] != there[end] + 1), len(there) - 1)
            parts += keys.parts(number, range(page, there[run] + 1))
    return GroupMove(parts, _blocks(group, there, tables))
