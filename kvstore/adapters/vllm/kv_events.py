"""StoredBlocks: reports the store's blocks as KV events, which vLLM publishes together with those of its own cache.

vLLM names blocks by its own hashes, so a router that follows its events finds the store's blocks under names that it
knows. Only the node's index, which is mapped into this process, shows for certain what is stored. Pages that were found
or saved are reported once they are in the index. From then on a few of them are checked in each step, and those that
have gone are reported too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from kvstore.errors import KVStoreError
from kvstore.model.prefix import Keys

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

    from kvstore.adapters.vllm.blocks import PagedGroup, PagedModel
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.model.groups import GroupedKeys

OWNER = "kvstore"
RUN_PAGES = 32  # pages that are checked together
TOLD_MAX = 32_768  # pages reported as stored; beyond that the oldest is reported as removed
COMING_MAX = 4096  # runs to be reported
LOOKS = 8  # runs of each kind that are checked in a step
TRIES = 64  # checks of pages that are not stored yet


@dataclass(slots=True)
class _Run:
    """Consecutive pages of a request.

    Attributes:
        blocks: their hashes, ``page_blocks`` for each page; ``extra_keys``: the extra keys of each block.
        about: the other fields of their events.
    """

    cache: PrefixCache
    keys: Keys
    blocks: list[BlockHash]
    extra_keys: list[tuple[Any, ...] | None]
    about: dict[str, Any]
    tries: int = TRIES


class StoredBlocks:
    """The stored blocks of a model with a single full-attention group (see ``for_model``). Used by the scheduler's
    thread only."""

    def __init__(self, group: PagedGroup) -> None:
        self._group = group
        self._where = {"medium": MEDIUM_CPU, "group_idx": group.tables[0], "ownership": OWNER}
        self._known: set[BlockHash] = set()  # blocks that were reported, or will be
        self._coming: deque[_Run] = deque()
        self._told: deque[_Run] = deque()  # reported runs, the one with the oldest check first
        self._pages = 0

    @classmethod
    def for_model(cls, served: PagedModel) -> StoredBlocks | None:
        """Make one for a model; None if the blocks of its pages have no names of their own."""
        groups = served.groups
        plain = len(groups) == 1 and len(set(groups[0].tables)) == 1 and groups[0].layout.attention == "full"
        return cls(groups[0]) if plain else None

    def __len__(self) -> int:
        """The number of pages reported as stored."""
        return self._pages

    def offer(self, request: Request, cache: PrefixCache, keys: GroupedKeys, pages: range) -> None:
        """Add pages of a request that were found, or that are being saved."""
        size, hashes = self._group.page_blocks, request.block_hashes
        run: list[int] = []
        for page in range(pages.start, min(pages.stop, len(hashes) // size)):
            known = hashes[page * size] in self._known
            if run and (known or len(run) == RUN_PAGES):
                self._offer(request, cache, keys, run)
                run = []
            if not known:
                run.append(page)
        if run:
            self._offer(request, cache, keys, run)

    def take(self) -> list[KVCacheEvent]:
        """Check some runs; return the events since the last call."""
        events: list[KVCacheEvent] = []
        for _ in range(min(LOOKS, len(self._coming))):
            run = self._coming.popleft()
            there, run.tries = _there(run), run.tries - 1
            if there < len(run.keys) and run.tries:
                self._coming.append(run)
                continue
            self._forget(run, there)
            if there:
                events.append(self._stored(run))
                self._told.append(run)
                self._pages += there
        for _ in range(min(LOOKS, len(self._told))):
            run = self._told.popleft()
            self._keep(run, _there(run), events)
            if run.keys:
                self._told.append(run)
        while self._pages > TOLD_MAX:
            self._keep(self._told.popleft(), 0, events)
        return events

    def clear(self) -> list[KVCacheEvent]:
        """Forget all blocks; return the event that says so."""
        events: list[KVCacheEvent] = []
        while self._told:
            self._keep(self._told.popleft(), 0, events)
        self._coming.clear()
        self._known.clear()
        return events

    def _offer(self, request: Request, cache: PrefixCache, keys: GroupedKeys, run: Sequence[int]) -> None:
        (part,) = keys.parts(0, range(run[0], run[-1] + 1))
        first, last = run[0] * self._group.page_blocks, (run[-1] + 1) * self._group.page_blocks
        hashes, lora = request.block_hashes, request.lora_request
        extra_keys, media, size = list[Any](), 0, self._group.block_size
        for block in range(first, last):  # media are in the order of their positions
            extra, media = generate_block_hash_extra_keys(request, block * size, (block + 1) * size, media)
            extra_keys.append(extra)
        about = {
            "parent_block_hash": maybe_convert_block_hash(hashes[first - 1]) if first else None,
            "lora_id": lora.adapter_id if lora else None,
            "lora_name": lora.lora_name if lora else None,
            "session_id": request.session_id,
        }
        tokens = part.tokens.copy()  # so that the rest of the request is not kept alive
        own = Keys(part.page_tokens, part.root, part.before, part.links, tokens, part.extras, part.media, part.tag)
        if len(self._coming) >= COMING_MAX:
            self._forget(self._coming.popleft(), 0)
        self._coming.append(_Run(cache, own, list(hashes[first:last]), extra_keys, about))
        self._known.update(hashes[first:last])

    def _stored(self, run: _Run) -> BlockStored:
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block) for block in run.blocks],
            token_ids=run.keys.tokens.tolist(),
            block_size=self._group.block_size,
            extra_keys=to_event_extra_keys(run.extra_keys),
            **run.about,
            **self._where,
        )

    def _keep(self, run: _Run, there: int, events: list[KVCacheEvent]) -> None:
        """Keep a run's first pages, and report that the others have gone."""
        self._pages -= len(run.keys) - there
        if gone := self._forget(run, there):
            names = [maybe_convert_block_hash(block) for block in gone]
            events.append(BlockRemoved(block_hashes=names, **self._where))

    def _forget(self, run: _Run, there: int) -> list[BlockHash]:
        """Reduce a run to its first pages; return the blocks of the others."""
        blocks = there * self._group.page_blocks
        gone = run.blocks[blocks:]
        self._known.difference_update(gone)
        if gone:
            run.keys, run.blocks, run.extra_keys = run.keys[:there], run.blocks[:blocks], run.extra_keys[:blocks]
        return gone


def _there(run: _Run) -> int:
    """Return how many leading pages are stored."""
    try:
        return run.cache.lookup(run.keys).pages
    except KVStoreError:
        return 0
