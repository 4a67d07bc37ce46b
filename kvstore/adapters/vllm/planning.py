"""The scheduler's side: what each request finds in the store, and which blocks are loaded and saved in a step.

A lookup reads the node's index, which is mapped here: no message, and no side effect. Keys of a request are made once,
and extended while it is answered.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvstore.adapters.vllm.served import RootCaches, adapter_of
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from kvstore.adapters.vllm.served import PagedModel
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.client.store import Store
    from kvstore.model.prefix import Keys

_log = logging.getLogger(__name__)

LOADS_MAX = 2  # of one request: whose load failed, or who was preempted, asks again; and pages may be found for ever


@dataclass
class BlockMove:
    """Pages of one request on their way between the store and blocks.

    Attributes:
        keys: of consecutive pages.
        blocks: ``[pages * page_blocks]``, where they are.
        first: of these blocks that is to be written; those before it have what they need.
        adapter: part of the pages' root.
    """

    request: str
    keys: Keys
    blocks: list[int]
    adapter: str
    first: int = 0


@dataclass
class StepMoves(KVConnectorMetadata):
    """What workers do in one step."""

    loads: list[BlockMove] = field(default_factory=list)
    saves: list[BlockMove] = field(default_factory=list)


@dataclass
class _Tracked:
    """A request that is being answered."""

    request: Request
    cache: PrefixCache
    adapter: str
    keys: Keys | None = None  # of the full pages that were known when they were asked for
    blocks: list[int] = field(default_factory=list)
    stored: int = 0  # pages that are stored, or on their way
    loads: int = 0


class Planner:
    """Of the scheduler's thread alone."""

    def __init__(self, store: Store, served: PagedModel, salt: str, *, loads: bool, saves: bool) -> None:
        self._served = served
        self._caches = RootCaches(store, served.layout, salt)
        self._loads = loads
        self._saves = saves
        self._tracked: dict[str, _Tracked] = {}
        self._moves = StepMoves()
        self._told: set[str] = set()

    # --- before a request runs --------------------------------------------------------------------------------------

    def found(self, request: Request, computed: int) -> int:
        """Tokens beyond ``computed`` that the store has; never the last one, which has to be computed."""
        tracked = self._track(request)
        if tracked is None or not self._loads:
            return 0
        if tracked.loads == LOADS_MAX:
            tracked.stored = 0  # what was found is of no use: it is saved again
            return 0
        page_tokens = self._served.layout.page_tokens
        asked = (request.num_tokens - 1) // page_tokens
        try:
            pages = tracked.cache.lookup(self._keys(tracked, asked)).pages if asked else 0
        except KVStoreError as error:
            self._tell_once(f"the pool cannot be asked: {error}")
            return 0
        tracked.stored = pages
        return max(0, pages * page_tokens - computed)

    def allocated(self, request: Request, blocks: KVCacheBlocks, external: int) -> None:
        """These blocks are the request's; so many tokens, the last of those that are there, come from the store."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not external:
            return
        (table,) = blocks.get_block_ids()
        size, page_blocks = self._served.block_size, self._served.page_blocks
        pages = tracked.stored
        computed = pages * self._served.layout.page_tokens - external
        first = computed // self._served.layout.page_tokens
        move = BlockMove(
            request.request_id,
            self._keys(tracked, pages)[first:pages],
            list(table[first * page_blocks : pages * page_blocks]),
            tracked.adapter,
            computed // size - first * page_blocks,
        )
        self._moves.loads.append(move)
        tracked.loads += 1

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, output: SchedulerOutput) -> StepMoves:
        """What is to be moved in this step."""
        if self._saves:
            for new in output.scheduled_new_reqs:
                self._runs(new.req_id, new.num_computed_tokens, output, new.block_ids, afresh=True)
            cached = output.scheduled_cached_reqs
            for i, name in enumerate(cached.req_ids):
                resumed = name in cached.resumed_req_ids
                self._runs(name, cached.num_computed_tokens[i], output, cached.new_block_ids[i], afresh=resumed)
        moves, self._moves = self._moves, StepMoves()
        return moves

    def finished(self, request: Request) -> None:
        """It is over, however it ended."""
        self._tracked.pop(request.request_id, None)

    def _runs(
        self, name: str, computed: int, output: SchedulerOutput, blocks: tuple[list[int], ...] | None, *, afresh: bool
    ) -> None:
        tracked = self._tracked.get(name)
        if tracked is None:
            return
        if afresh:
            tracked.blocks.clear()
        if blocks:
            tracked.blocks += blocks[0]
        # Draft tokens may be refused: only those that the request has are behind a page.
        tokens = min(computed + output.num_scheduled_tokens[name], tracked.request.num_tokens)
        pages, page_blocks = tokens // self._served.layout.page_tokens, self._served.page_blocks
        if pages > tracked.stored:
            keys = self._keys(tracked, pages)[tracked.stored : pages]
            blocks_of = tracked.blocks[tracked.stored * page_blocks : pages * page_blocks]
            self._moves.saves.append(BlockMove(name, keys, blocks_of, tracked.adapter))
            tracked.stored = pages

    # --- requests ---------------------------------------------------------------------------------------------------

    def _track(self, request: Request) -> _Tracked | None:
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            return tracked
        if request.mm_features or request.prompt_token_ids is None or request.pooling_params is not None:
            self._tell_once("requests with media, embeddings or pooling are not stored")
            return None
        adapter = adapter_of(request)
        tracked = _Tracked(request, self._caches.of(adapter), adapter)
        self._tracked[request.request_id] = tracked
        return tracked

    def _keys(self, tracked: _Tracked, pages: int) -> Keys:
        """Of the first pages."""
        keys = tracked.keys
        if keys is None or len(keys) < pages:
            tokens: Any = tracked.request.all_token_ids
            keys = tracked.keys = tracked.cache.keys(np.array(tokens, np.uint32))
        return keys[:pages]

    def _tell_once(self, what: str) -> None:
        if what not in self._told and len(self._told) < 16:
            self._told.add(what)
            _log.warning("kvstore: %s", what)
