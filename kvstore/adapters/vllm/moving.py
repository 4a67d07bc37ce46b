"""A worker's side: pages between the store and the blocks of its cache.

Loads run in a thread beside the forwards: their blocks belong to nobody else meanwhile. What could not be loaded is
reported by its blocks, and computed. Saves are done before the step ends, since its blocks may be another's in the
next one.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from kvstore.adapters.vllm.blocks import BlockGroup
from kvstore.adapters.vllm.planning import NO_BLOCK
from kvstore.adapters.vllm.served import RootCaches
from kvstore.adapters.vllm.stats import MoveStats
from kvstore.errors import KVStoreError, Unavailable

if TYPE_CHECKING:
    import torch

    from kvstore.adapters.vllm.planning import BlockMove
    from kvstore.adapters.vllm.served import PagedModel
    from kvstore.client.store import Store

_log = logging.getLogger(__name__)

YIELD_S = 0.001  # that a step waits for loads when it computes nothing
AWAY_S = 5.0  # that nothing is saved after the node did not answer: a step would wait for it each time


class BlockMover:
    """Made when the worker knows its tensors.

    Args:
        tensors: by layer, ``[blocks, kv_heads, block_size, content]``, of any strides.
    """

    def __init__(self, store: Store, served: PagedModel, salt: str, tensors: dict[str, torch.Tensor]) -> None:
        self._served = served
        self._groups = [BlockGroup(group, [tensors[name] for name in group.layers]) for group in served.groups]
        self._loads_from = RootCaches(store, served.layouts, salt)  # of the loading thread
        self._saves_to = RootCaches(store, served.layouts, salt)
        self._pool = ThreadPoolExecutor(1, "kvstore-load")
        self._lock = threading.Lock()
        self._loading: dict[str, Future[None]] = {}
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._away_until_s = 0.0
        self._stats = MoveStats()
        shard = served.groups[0].shard
        self._counts_pages = not shard.rank and not shard.stage

    def load(self, move: BlockMove) -> None:
        """Begin to load; see ``loaded`` and ``failed``."""
        self._loading[move.request] = self._pool.submit(self._load, move)

    def loaded(self, idle: bool) -> set[str]:
        """Requests whose loads have ended, well or not, since this was asked last. In an ``idle`` step the loading
        thread goes first: steps that follow each other without a pause would keep the interpreter from it for
        milliseconds each time that it asks."""
        if idle and self._loading:
            wait(self._loading.values(), YIELD_S, FIRST_COMPLETED)
        done = {name for name, future in self._loading.items() if future.done()}
        for name in done:
            self._loading.pop(name).result()
        return done

    def failed(self) -> set[int]:
        """Blocks that were to be loaded, and hold anything."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def failed_of(self, loaded: set[str]) -> set[str]:
        """Which of these requests, whose loads have ended, hold nothing of use."""
        with self._lock:
            failed = self._failed_requests & loaded
            self._failed_requests -= failed
        return failed

    def save(self, moves: list[BlockMove]) -> None:
        """Store these pages, as far as the store takes them. A node that does not answer is left alone for a while."""
        if not moves or time.monotonic() < self._away_until_s:
            return
        start_s, failed = time.monotonic(), True
        try:
            for move in moves:
                caches = self._saves_to.of(move.adapter).groups
                for group, cache, pages in zip(self._groups, caches, move.groups, strict=True):
                    count = group.save(cache, pages, move.request)
                    self._count("saved", count, count * group.saved_bytes)
            failed = False
        except Unavailable as error:
            self._away_until_s = time.monotonic() + AWAY_S
            _log.warning("kvstore: nothing is saved for %g s: %s", AWAY_S, error)
        except KVStoreError as error:
            _log.warning("kvstore: pages are not saved: %s", error)
        with self._lock:
            self._stats.add(save_seconds=time.monotonic() - start_s, failed_saves=failed)

    def take_stats(self) -> MoveStats | None:
        """What was moved since this was asked last; None: nothing."""
        with self._lock:
            if self._stats.is_empty():
                return None
            taken, self._stats = self._stats, MoveStats()
        return taken

    def close(self) -> None:
        """Nothing is moved any more."""
        self._pool.shutdown(cancel_futures=True)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _load(self, move: BlockMove) -> None:
        start_s = time.monotonic()
        left = [sum(map(len, pages.parts)) for pages in move.groups]  # pages that have not come
        try:
            caches = self._loads_from.of(move.adapter).groups
            for number, (group, cache, pages) in enumerate(zip(self._groups, caches, move.groups, strict=True)):
                for count in group.load(cache, pages):
                    left[number] -= count
                    self._count("loaded", count, count * group.loaded_bytes)
        except KVStoreError as error:
            _log.warning("kvstore: pages were not loaded: %s", error)
        finally:
            with self._lock:
                self._stats.add(load_seconds=time.monotonic() - start_s, failed_pages=sum(left))
            if any(left):
                self._fail(move, left[0])

    def _count(self, what: str, pages: int, part_bytes: int) -> None:
        counts = {f"{what}_bytes": part_bytes}
        if self._counts_pages:
            counts[f"{what}_pages"] = pages
        with self._lock:
            self._stats.add(**counts)

    def _fail(self, move: BlockMove, left: int) -> None:
        """So many pages of the first group are missing, or some of others."""
        with self._lock:
            if not self._served.by_blocks:
                self._failed_requests.add(move.request)
                return
            (blocks,) = move.groups[0].blocks.values()
            missing = blocks[len(blocks) - left * self._served.groups[0].page_blocks :]
            self._failed.update(block for block in missing if block != NO_BLOCK)
