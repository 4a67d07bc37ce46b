"""``StoredBlocks`` reports the store's blocks as KV events, which vLLM publishes with the events of its own cache.

vLLM identifies blocks by hashes of its own. The events contain these hashes, so a router that follows vLLM's events
recognises the store's blocks.

Only the node's index, which is mapped into this process, shows which pages are stored. So a page that a request matched
or saved is reported once the index contains it. Each later step checks a few of the reported pages, and reports those
that are no longer in the index as removed.
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
RUN_PAGES = 32  # most pages in a run
REPORTED_MAX = 32_768  # pages reported as stored; beyond that the run with the oldest check is reported as removed
PENDING_MAX = 4096  # runs that are not in the index yet; one more run drops the oldest
CHECKED_RUNS = 8  # runs of each kind that a step checks
CHECKS_MAX = 64  # checks of a pending run; after the last one only its stored pages are reported


@dataclass(slots=True)
class _Run:
    """Consecutive pages of a request that are checked and reported together.

    Attributes:
        hashes: vLLM's hashes of the blocks, ``page_blocks`` for each page.
        extra_keys: vLLM's extra keys of each block.
        fields: the other fields of the run's event.
        checks_left: how often the run is still checked before it is reported.
    """

    cache: PrefixCache
    keys: Keys
    hashes: list[BlockHash]
    extra_keys: list[tuple[Any, ...] | None]
    fields: dict[str, Any]
    checks_left: int = CHECKS_MAX


class StoredBlocks:
    """The store's blocks of one model, as runs that are pending or reported. Used by the scheduler's thread only.

    A run begins as pending. Once the index contains its pages, the run is reported. It ends when the index no longer
    has its pages, or when there are too many runs.
    """

    def __init__(self, group: PagedGroup) -> None:
        self._group = group
        self._place_fields = {"medium": MEDIUM_CPU, "group_idx": group.tables[0], "ownership": OWNER}
        self._hashes: set[BlockHash] = set()  # blocks of all pending and reported runs
        self._pending: deque[_Run] = deque()
        self._reported: deque[_Run] = deque()  # the run with the oldest check is the first
        self._pages = 0  # pages of all reported runs

    @classmethod
    def for_model(cls, model: PagedModel) -> StoredBlocks | None:
        """Return an instance for a model. Return None unless the model has one group, of full attention, with one
        table: an event names blocks of a single table."""
        groups = model.groups
        is_plain = len(groups) == 1 and len(set(groups[0].tables)) == 1 and groups[0].layout.attention == "full"
        return cls(groups[0]) if is_plain else None

    def __len__(self) -> int:
        """Return the number of pages reported as stored."""
        return self._pages

    def add(self, request: Request, cache: PrefixCache, keys: GroupedKeys, pages: range) -> None:
        """Add pages that a request matched or is saving, unless they are pending or reported already."""
        page_blocks, hashes = self._group.page_blocks, request.block_hashes
        run: list[int] = []
        for page in range(pages.start, min(pages.stop, len(hashes) // page_blocks)):
            is_present = hashes[page * page_blocks] in self._hashes
            if run and (is_present or len(run) == RUN_PAGES):
                self._add_run(request, cache, keys, run)
                run = []
            if not is_present:
                run.append(page)
        if run:
            self._add_run(request, cache, keys, run)

    def take_events(self) -> list[KVCacheEvent]:
        """Check some runs, and return the events of pages that have entered or left the index."""
        events: list[KVCacheEvent] = []
        for _ in range(min(CHECKED_RUNS, len(self._pending))):
            run = self._pending.popleft()
            pages, run.checks_left = _stored_pages(run), run.checks_left - 1
            if pages < len(run.keys) and run.checks_left:
                self._pending.append(run)
                continue
            self._shorten(run, pages)
            if pages:
                events.append(self._stored_event(run))
                self._reported.append(run)
                self._pages += pages
        for _ in range(min(CHECKED_RUNS, len(self._reported))):
            run = self._reported.popleft()
            self._report_removed(run, _stored_pages(run), events)
            if run.keys:
                self._reported.append(run)
        while self._pages > REPORTED_MAX:
            self._report_removed(self._reported.popleft(), 0, events)
        return events

    def clear(self) -> list[KVCacheEvent]:
        """Remove all runs, and return the events that report their pages as removed."""
        events: list[KVCacheEvent] = []
        while self._reported:
            self._report_removed(self._reported.popleft(), 0, events)
        self._pending.clear()
        self._hashes.clear()
        return events

    def _add_run(self, request: Request, cache: PrefixCache, keys: GroupedKeys, pages: Sequence[int]) -> None:
        (part,) = keys.parts(0, range(pages[0], pages[-1] + 1))
        first, end = pages[0] * self._group.page_blocks, (pages[-1] + 1) * self._group.page_blocks
        hashes, lora = request.block_hashes, request.lora_request
        extra_keys, media_index, block_size = list[Any](), 0, self._group.block_size
        for block in range(first, end):  # media_index is the first of the request's media that can be in the block
            block_keys, media_index = generate_block_hash_extra_keys(
                request, block * block_size, (block + 1) * block_size, media_index
            )
            extra_keys.append(block_keys)
        fields = {
            "parent_block_hash": maybe_convert_block_hash(hashes[first - 1]) if first else None,
            "lora_id": lora.adapter_id if lora else None,
            "lora_name": lora.lora_name if lora else None,
            "session_id": request.session_id,
        }
        tokens = part.tokens.copy()  # a view would keep all tokens of the request in memory
        own_keys = Keys(part.page_tokens, part.root, part.before, part.links, tokens, part.extras, part.media, part.tag)
        if len(self._pending) >= PENDING_MAX:
            self._shorten(self._pending.popleft(), 0)
        self._pending.append(_Run(cache, own_keys, list(hashes[first:end]), extra_keys, fields))
        self._hashes.update(hashes[first:end])

    def _stored_event(self, run: _Run) -> BlockStored:
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block) for block in run.hashes],
            token_ids=run.keys.tokens.tolist(),
            block_size=self._group.block_size,
            extra_keys=to_event_extra_keys(run.extra_keys),
            **run.fields,
            **self._place_fields,
        )

    def _report_removed(self, run: _Run, pages: int, events: list[KVCacheEvent]) -> None:
        """Shorten a reported run to its first ``pages``, and add an event that reports the others as removed."""
        self._pages -= len(run.keys) - pages
        if removed := self._shorten(run, pages):
            names = [maybe_convert_block_hash(block) for block in removed]
            events.append(BlockRemoved(block_hashes=names, **self._place_fields))

    def _shorten(self, run: _Run, pages: int) -> list[BlockHash]:
        """Shorten a run to its first ``pages``, and return the hashes of the removed blocks."""
        blocks = pages * self._group.page_blocks
        removed = run.hashes[blocks:]
        self._hashes.difference_update(removed)
        if removed:
            run.keys, run.hashes, run.extra_keys = run.keys[:pages], run.hashes[:blocks], run.extra_keys[:blocks]
        return removed


def _stored_pages(run: _Run) -> int:
    """Return how many leading pages of a run are stored."""
    try:
        return run.cache.lookup(run.keys).pages
    except KVStoreError:
        return 0
