"""The worker side: moves pages between the store and the blocks of a worker's cache.

Loads run in their own thread and stream, after work that is already in the computing stream: a running step may still
write into blocks of a request that has just ended. A load is done when its stream is done. Blocks that could not be
loaded are reported, and vLLM recomputes them.

Pages to be saved are copied out of their blocks before the step ends, since another request may own the blocks in the
next step. On a GPU the copy runs in the computing stream, without a wait; a thread stores the pages once it is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TYPE_CHECKING

from kvstore.adapters.vllm.blocks import COMPUTE_S, NO_BLOCK, SAVING_BYTES, BlockGroup, Gathered, RootCaches, tensors_of
from kvstore.device.base import DeviceLost
from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable

if TYPE_CHECKING:
    import torch

    from kvstore.adapters.vllm.blocks import BlockMove, PagedModel, Tensors
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.client.store import Store
    from kvstore.device.base import DeviceEvent

_log = logging.getLogger(__name__)

YIELD_S = 0.001  # how long a step that computes nothing waits for loads
AWAY_S = 5.0  # how long nothing is saved after the node did not answer: else every step would wait for it


class _Saving:
    """The saves of one step. ``failed``: the remaining ones are not tried."""

    failed = False


class BlockMover:
    """Moves pages of all groups. Made when the worker knows its tensors.

    Args:
        caches: the cache of each layer, ``[blocks, kv_heads, block_size, content]``, of any strides.
        tensors: how work on them is ordered. None decides by their device.

    Raises:
        ValueError: the caches do not fit the layouts, or the store cannot access their memory.
    """

    def __init__(
        self,
        store: Store,
        served: PagedModel,
        salt: str,
        caches: dict[str, torch.Tensor],
        tensors: Tensors | None = None,
    ) -> None:
        self._served = served
        self._tensors = tensors = tensors or tensors_of(next(iter(caches.values())))
        share = SAVING_BYTES // len(served.groups)
        self._groups = [
            BlockGroup(group, [caches[name] for name in group.layers], tensors, share) for group in served.groups
        ]
        self._loads_from = RootCaches(store, served.layouts, salt)  # used by the loading thread
        self._saves_to = RootCaches(store, served.layouts, salt)
        self._stream = tensors.stream()  # used by the loading thread
        self._pool = ThreadPoolExecutor(1, "kvstore-load")
        self._saves = ThreadPoolExecutor(1, "kvstore-save")
        self._lock = threading.Lock()
        self._loading: dict[str, Future[None]] = {}
        self._failed: set[int] = set()
        self._failed_requests: set[str] = set()
        self._away_until_s = 0.0
        self._counts = Counter[str]()
        shard = served.groups[0].shard
        self._counts_pages = not shard.rank and not shard.stage

    def load(self, move: BlockMove) -> None:
        """Begin a load, ordered after the work in the calling thread's stream; see ``loaded`` and ``failed``."""
        event = self._tensors.current().record()
        self._loading[move.request] = self._pool.submit(self._load, move, event)

    def loaded(self, idle: bool) -> set[str]:
        """Return requests whose loads have ended, successfully or not, since the last call. An ``idle`` step lets the
        loading thread run first: steps without a pause between them would keep the interpreter from it for milliseconds
        each time.

        Raises:
            DeviceLost: the device did not finish a load in time, and may still write into the blocks.
        """
        if idle and self._loading:
            wait(self._loading.values(), YIELD_S, FIRST_COMPLETED)
        done = {name for name, future in self._loading.items() if future.done()}
        for name in done:
            self._loading.pop(name).result()
        return done

    def failed(self) -> set[int]:
        """Return blocks whose load failed, and whose contents are undefined."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def failed_of(self, loaded: set[str]) -> set[str]:
        """Return those of these requests, whose loads have ended, of which nothing usable was loaded."""
        with self._lock:
            failed = self._failed_requests & loaded
            self._failed_requests -= failed
        return failed

    def save(self, moves: list[BlockMove]) -> None:
        """Store these pages, as far as the store accepts them. A node that does not answer is not called for a while.

        Work that is queued in the calling thread's stream after this may write into the blocks again.
        """
        if not moves or time.monotonic() < self._away_until_s:
            return
        saving = _Saving()
        start_s = time.monotonic()
        try:
            for move in moves:
                caches = self._saves_to.of(move.adapter).groups
                for group, cache, pages in zip(self._groups, caches, move.groups, strict=True):
                    for gathered in group.gather(pages):
                        self._give(partial(self._store, saving, group, cache, gathered, move.request))
                        if saving.failed:
                            return
        except KVStoreError as error:
            self._not_saved(saving, error)
        finally:
            self._add(save_seconds=time.monotonic() - start_s)

    def take_counts(self) -> dict[str, float]:
        """Return what was moved since the last call, by the names of ``stats.COUNTED``."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)

    def close(self) -> None:
        """End all loads. Pages that were copied out of their blocks are still stored."""
        self._pool.shutdown(cancel_futures=True)
        self._saves.shutdown()

    # --- pages ------------------------------------------------------------------------------------------------------

    def _load(self, move: BlockMove, event: DeviceEvent) -> None:
        start_s = time.monotonic()
        left = [sum(map(len, pages.parts)) for pages in move.groups]  # pages that are not loaded yet
        try:
            caches = self._loads_from.of(move.adapter).groups
            for number, (group, cache, pages) in enumerate(zip(self._groups, caches, move.groups, strict=True)):
                for count in group.load(cache, pages, self._stream, event):
                    left[number] -= count
                    self._count("loaded", count, count * group.loaded_bytes)
        except KVStoreError as error:
            _log.warning("kvstore: pages were not loaded: %s", error)
        finally:
            self._land()
            self._add(load_seconds=time.monotonic() - start_s, failed_pages=sum(left))
            if any(left):
                self._fail(move, left[0])

    def _land(self) -> None:
        """Wait until the work in the loading thread's stream has ended, successfully or not.

        Raises:
            DeviceLost: it has not ended within ``COMPUTE_S``.
        """
        event = self._stream.record()
        try:
            event.wait(time.monotonic() + COMPUTE_S)
        except DeadlineExceeded as error:
            raise DeviceLost(f"blocks were not loaded within {COMPUTE_S:g} s: {error}") from None

    def _give(self, store: Callable[[], None]) -> None:
        """Store pages now, or, if they are copied later, in the saving thread."""
        if self._tensors.late:
            self._saves.submit(store)
        else:
            store()

    def _store(self, saving: _Saving, group: BlockGroup, cache: PrefixCache, gathered: Gathered, request: str) -> None:
        start_s = None
        try:
            if saving.failed or time.monotonic() < self._away_until_s:
                return
            gathered.wait()
            start_s = time.monotonic()
            gathered.put(cache, request)
            self._count("saved", gathered.pages, gathered.pages * group.saved_bytes)
        except KVStoreError as error:
            self._not_saved(saving, error)
        finally:
            gathered.drop()
            if self._tensors.late and start_s is not None:
                self._add(save_seconds=time.monotonic() - start_s)

    def _not_saved(self, saving: _Saving, error: KVStoreError) -> None:
        self._add(failed_saves=not saving.failed)
        saving.failed = True
        if isinstance(error, Unavailable):
            self._away_until_s = time.monotonic() + AWAY_S
            _log.warning("kvstore: nothing is saved for %g s: %s", AWAY_S, error)
        else:
            _log.warning("kvstore: pages are not saved: %s", error)

    def _count(self, what: str, pages: int, part_bytes: int) -> None:
        self._add(**{f"{what}_bytes": part_bytes, f"{what}_pages": pages if self._counts_pages else 0})

    def _add(self, **counts: float) -> None:
        """Add these counts; zeros are left out."""
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._counts[name] += count  # type: ignore[assignment]

    def _fail(self, move: BlockMove, left: int) -> None:
        """Record a failed load: the last ``left`` pages of the first group are missing, or some pages of other
        groups."""
        with self._lock:
            if not self._served.by_blocks:
                self._failed_requests.add(move.request)
                return
            (blocks,) = move.groups[0].blocks.values()
            missing = blocks[len(blocks) - left * self._served.groups[0].page_blocks :]
            self._failed.update(block for block in missing if block != NO_BLOCK)
