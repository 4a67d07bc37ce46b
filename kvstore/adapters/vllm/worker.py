"""``BlockMover``, the connector's side in a worker: loads pages into the blocks of its cache, and saves them from
there.

Loads run in a thread and a stream of their own. Their writes come after the work that is already in the computing
stream: a running step may still write into the blocks of a request that has just ended. A load has ended when the work
in its stream is done. Blocks whose load failed are reported to vLLM, which recomputes them.

Saves copy pages out of their blocks before the step ends, because another request may own the blocks in the next step.
On a GPU the computing stream makes this copy and no thread waits for it. Once the copy is done, a thread stores the
pages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

from kvstore.adapters.vllm.blocks import (
    COMPUTE_S,
    NO_BLOCK,
    SAVING_BYTES,
    BlockGroup,
    BufferedSave,
    RootCaches,
    tensors_of,
)
from kvstore.device.base import DeviceLost
from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable

if TYPE_CHECKING:
    import torch

    from kvstore.adapters.vllm.blocks import BlockMove, PagedModel, Tensors
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.client.store import Store
    from kvstore.device.base import DeviceEvent

_log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.001  # how long a step that computes nothing waits for loads
AWAY_S = 5.0  # pause of all saves after the node did not answer, since otherwise each step would wait for the node


class _StepSaves:
    """The saves of one step. After the first failure ``has_failed`` is true, and the remaining saves are skipped."""

    has_failed = False


class BlockMover:
    """Loads and saves pages of all groups of a model, in one worker. Created when vLLM has allocated the worker's
    cache.

    Args:
        caches: the cache of each layer, ``[blocks, kv_heads, block_size, content]``, of any strides.
        tensors: how work on the caches is ordered; default: as their device requires.

    Raises:
        ValueError: the caches do not fit the layouts, or the store cannot access their memory.
    """

    def __init__(
        self,
        store: Store,
        model: PagedModel,
        salt: str,
        caches: dict[str, torch.Tensor],
        tensors: Tensors | None = None,
    ) -> None:
        self._model = model
        self._tensors = tensors = tensors or tensors_of(next(iter(caches.values())))
        group_saving_bytes = SAVING_BYTES // len(model.groups)
        self._groups = [
            BlockGroup(group, [caches[name] for name in group.layers], tensors, group_saving_bytes)
            for group in model.groups
        ]
        self._load_caches = RootCaches(store, model.layouts, salt)  # used by the loading thread
        self._save_caches = RootCaches(store, model.layouts, salt)  # used by vLLM's thread
        self._load_stream = tensors.stream()  # used by the loading thread
        self._load_thread = ThreadPoolExecutor(1, "kvstore-load")
        self._save_thread = ThreadPoolExecutor(1, "kvstore-save")
        self._lock = threading.Lock()
        self._loads: dict[str, Future[None]] = {}  # by request
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._no_saves_until_s = 0.0
        self._counts = Counter[str]()
        shard = model.groups[0].shard
        self._counts_pages = not shard.rank and not shard.stage

    def load(self, move: BlockMove) -> None:
        """Start a load, which writes into its blocks after the work that is now in the calling thread's stream.
        ``take_loaded`` reports its end."""
        event = self._tensors.current().record()
        self._loads[move.request] = self._load_thread.submit(self._load, move, event)

    def take_loaded(self, is_idle: bool) -> set[str]:
        """Return the requests whose loads have ended since the last call, successfully or not.

        In an idle step the call waits up to ``IDLE_WAIT_S`` for a load. Without this pause a sequence of idle steps
        would occupy the interpreter, and the loading thread would run only every few milliseconds.

        Raises:
            DeviceLost: the device did not finish a load in time, and may still write into the blocks.
        """
        if is_idle and self._loads:
            wait(self._loads.values(), IDLE_WAIT_S, FIRST_COMPLETED)
        ended = {request for request, future in self._loads.items() if future.done()}
        for request in ended:
            self._loads.pop(request).result()
        return ended

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks whose loads have failed since the last call. Their contents are undefined."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self, requests: set[str]) -> set[str]:
        """Return the requests in ``requests`` whose loads failed entirely, and forget that they failed."""
        with self._lock:
            failed = self._failed_requests & requests
            self._failed_requests -= failed
        return failed

    def save(self, moves: list[BlockMove]) -> None:
        """Copy pages out of their blocks and store them. Pages that the store does not accept are not saved, and a node
        that is not responding is not called for ``AWAY_S``.

        Work that the caller queues in its stream afterwards may overwrite the blocks.
        """
        if not moves or time.monotonic() < self._no_saves_until_s:
            return
        step = _StepSaves()
        start_s = time.monotonic()
        try:
            for move in moves:
                caches = self._save_caches.of(move.adapter).groups
                for group, cache, group_move in zip(self._groups, caches, move.groups, strict=True):
                    for save in group.gather(group_move):
                        store = partial(self._store, step, group, cache, save, move.request)
                        if self._tensors.is_deferred:
                            self._save_thread.submit(store)
                        else:
                            store()
                        if step.has_failed:
                            return
        except KVStoreError as error:
            self._handle_failed_save(step, error)
        finally:
            self._add_counts(save_seconds=time.monotonic() - start_s)

    def take_counts(self) -> dict[str, float]:
        """Return the counts since the last call, by the names in ``stats.DESCRIPTIONS``."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Drop waiting loads, finish the running one, and store the pages that are copied out of their blocks."""
        self._load_thread.shutdown(cancel_futures=True)
        self._save_thread.shutdown()

    # --- work of the threads ----------------------------------------------------------------------------------------

    def _load(self, move: BlockMove, event: DeviceEvent) -> None:
        start_s = time.monotonic()
        pages_missing = [sum(map(len, group_move.parts)) for group_move in move.groups]  # by group
        try:
            caches = self._load_caches.of(move.adapter).groups
            for number, (group, cache, group_move) in enumerate(zip(self._groups, caches, move.groups, strict=True)):
                for pages in group.load(cache, group_move, self._load_stream, event):
                    pages_missing[number] -= pages
                    self._count_pages("loaded", pages, pages * group.loaded_bytes)
        except KVStoreError as error:
            _log.warning("kvstore: pages were not loaded: %s", error)
        finally:
            self._wait_for_stream()
            self._add_counts(load_seconds=time.monotonic() - start_s, failed_pages=sum(pages_missing))
            if any(pages_missing):
                self._add_failed_load(move, pages_missing[0])

    def _wait_for_stream(self) -> None:
        """Wait until the work in the loading thread's stream has ended, successfully or not.

        Raises:
            DeviceLost: the work has not ended within ``COMPUTE_S``.
        """
        event = self._load_stream.record()
        try:
            event.wait(time.monotonic() + COMPUTE_S)
        except DeadlineExceeded as error:
            raise DeviceLost(f"blocks were not loaded within {COMPUTE_S:g} s: {error}") from None

    def _store(self, step: _StepSaves, group: BlockGroup, cache: PrefixCache, save: BufferedSave, request: str) -> None:
        """Store the pages of a buffer once they are in it, and free the buffer."""
        start_s = None
        try:
            if step.has_failed or time.monotonic() < self._no_saves_until_s:
                return
            save.wait()
            start_s = time.monotonic()
            save.put(cache, request)
            self._count_pages("saved", save.pages, save.pages * group.saved_bytes)
        except KVStoreError as error:
            self._handle_failed_save(step, error)
        finally:
            save.free()
            if self._tensors.is_deferred and start_s is not None:
                self._add_counts(save_seconds=time.monotonic() - start_s)

    # --- failures and counts ----------------------------------------------------------------------------------------

    def _handle_failed_save(self, step: _StepSaves, error: KVStoreError) -> None:
        """Log and count a failed save, skip the step's remaining saves, and suspend saves if the node did not
        answer."""
        self._add_counts(failed_saves=not step.has_failed)
        step.has_failed = True
        if isinstance(error, Unavailable):
            self._no_saves_until_s = time.monotonic() + AWAY_S
            _log.warning("kvstore: nothing is saved for %g s: %s", AWAY_S, error)
        else:
            _log.warning("kvstore: pages are not saved: %s", error)

    def _add_failed_load(self, move: BlockMove, pages_missing: int) -> None:
        """Record a failed load, as its request or as the blocks of the last ``pages_missing`` pages of its first
        group."""
        with self._lock:
            if not self._model.reports_blocks:
                self._failed_requests.add(move.request)
                return
            (blocks,) = move.groups[0].blocks.values()
            missing = blocks[len(blocks) - pages_missing * self._model.groups[0].page_blocks :]
            self._failed_blocks.update(block for block in missing if block != NO_BLOCK)

    def _count_pages(self, action: str, pages: int, nbytes: int) -> None:
        self._add_counts(**{f"{action}_bytes": nbytes, f"{action}_pages": pages if self._counts_pages else 0})

    def _add_counts(self, **counts: float) -> None:
        """Add to the counts, except zeros."""
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._counts[name] += count  # type: ignore[assignment]
