"""Pool: an engine's side of the store. Loads prefixes into frames, writes pages out of them.

The store is there to save work, never to stop it: while the node is away nothing is written, what can still be read
through shared memory is read, and the engine computes the rest. A thread looks whether the node is there, so that the
computing one need not find out by waiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.memory.arena import runs
from engine.memory.lossy import Lossy
from engine.memory.staging import Staging
from engine.moving.stored import keys_to_store, stored
from engine.moving.work import Work
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.client.writer import Writer
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable, OutOfSpace, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.tier.device import DeviceLost

LOOK_S = 0.25
LOOK_TIMEOUT_S = 0.05
REMOTE_LOOK_TIMEOUT_S = 1.0
CACHES_MAX = 1024  # of tenants and adapters, kept ready
WRITE_TTL_S = 30.0  # of a chunk's pages; what takes longer is written with the next chunk

log = logging.getLogger("kvstore.engine.pool")
clock = time.perf_counter

Rows = npt.NDArray[np.uint8]


class Pool:
    """All threads of an engine share it. Without a store it holds nothing and takes nothing.

    Attributes:
        layout: of the exact pages.
        codec: how pages are written: None as they are, else as lossy replicas under a layout of their own.
        outgoing: waits for layers that a device sends, and writes them.
        hook_s, hook_layers: spent in writing layers while a forward waits for it, since the start.
    """

    def __init__(self, store: Store | None, layout: Layout, staging: Staging, compress: str = "none") -> None:
        self.store = store
        self.layout = layout
        self.codec: Lossy | None = Lossy.of(layout, compress)
        self.hook_s, self.hook_layers = 0.0, 0
        self.failures = 0
        self.up = store is not None  # whether the node takes pages, as far as we know
        self._mapped = store is not None and store.reads_without_node
        self._failed_s = 0.0
        self._in_doubt = False  # the node may hold frames for us that we know nothing of
        self._staging = staging
        self.outgoing = None if staging.in_place else ThreadPoolExecutor(1, "engine-out")
        self._caches: dict[tuple[str, str, bool], PrefixCache] = {}
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._look, name="engine-pool", daemon=True)

    def start(self) -> None:
        """Watch the node from now on."""
        if self.store is not None:
            self._watch.start()

    def stop(self) -> None:
        """Watch no more. The store stays open; it is its maker's."""
        self._stopped.set()
        if self._watch.ident is not None:
            self._watch.join()
        if self.outgoing is not None:
            self.outgoing.shutdown(wait=True)

    def _look(self) -> None:
        assert self.store is not None
        while not self._stopped.wait(LOOK_S):
            try:
                began_s = time.monotonic()
                self.store.wait_ready(LOOK_TIMEOUT_S if self._mapped else REMOTE_LOOK_TIMEOUT_S)
                self.up = self.up or began_s > self._failed_s  # a failure meanwhile is newer than this look
            except KVStoreError:
                self._in_doubt = self._in_doubt or self.up
                self.up = False

    def between_steps(self) -> None:
        """Called by the thread that writes, while it writes nothing: after a failure, have the node let go of what it
        granted to us and we never heard of. It cannot tell by itself as long as this process lives.
        """
        if self._in_doubt and self.up and self.store is not None:
            self._in_doubt = False
            with self.forgiven():
                self.store.renew_session()

    def cache(self, salt: str, adapter: str, lossy: bool = False) -> PrefixCache | None:
        """Pages of a tenant and adapter, exact or lossy ones; None without a store."""
        if self.store is None or (lossy and self.codec is None):
            return None
        name = salt, adapter, lossy
        found = self._caches.get(name)
        if found is None:
            if len(self._caches) >= CACHES_MAX:
                self._caches.clear()
            layout = self.codec.layout if lossy and self.codec is not None else self.layout
            found = self._caches[name] = self.store.cache(layout, salt, adapter)
        return found

    def check(self) -> None:
        """Whether the node takes our pages at all. Raises InvalidRequest where they do not fit its extents."""
        if self.store is not None:
            self.cache("", "")
            self.cache("", "", True)

    # --- writing ----------------------------------------------------------------------------------------------------

    def chunk(self, work: Work, start_page: int, stop_page: int) -> ChunkWriter | None:
        """A writer of the pages up to ``stop_page``, of which those from ``start_page`` on are being computed; None
        where nothing is to be written.
        """
        cache = self.written_to(work) if self.up else None
        if cache is None or stop_page <= work.stored_pages:
            return None
        return ChunkWriter(self, cache, work, start_page, stop_page, self._staging)

    def append(self, work: Work, pages: int) -> None:
        """Write those of the first ``pages`` pages that are not stored yet, without waiting for the acknowledgement."""
        cache = self.written_to(work) if self.up else None
        if cache is None or pages <= work.stored_pages:
            return
        with self.forgiven():
            work.stored_pages = self._put(cache, work, pages)

    def written(self, work: Work, pages: int, arenas: bool = False) -> int:
        """How many of the first ``pages`` pages are in the pool as exact pages; 0 where it does not say. ``arenas``:
        those count that only an engine has."""
        if work.cache is None or not pages or not self.readable:
            return 0
        found = 0
        with self.forgiven():
            found = stored(work.cache, work.cache.keys(work.tokens[: pages * work.page_tokens]), arenas)
        return found

    @property
    def readable(self) -> bool:
        """Whether pages can be read, as far as we know."""
        return self.up or self._mapped

    def written_to(self, work: Work) -> PrefixCache | None:
        """Where its pages are written, while the node is there; None: nowhere."""
        if work.cache is None:
            return None
        if self.codec is not None:
            return self.cache(work.request.salt, work.request.adapter, True)
        return work.cache if not work.lossy else None

    def _put(self, cache: PrefixCache, work: Work, stop: int) -> int:
        """Put pages up to ``stop`` that are not stored; returns up to where they are on their way: less than ``stop``
        where one is missing that a ring has overwritten."""
        assert work.frames is not None
        keys, oldest = keys_to_store(cache, work, 0, stop), work.oldest(stop)
        if oldest and (there := stored(cache, keys[:oldest])) < oldest:
            return there  # what follows a page that the pool never got is found by nobody
        pages = self.put_missing(cache, keys[oldest:], work.frames[oldest:stop])
        work.spent.written_bytes += pages * cache.page_bytes
        return stop

    def put_missing(self, cache: PrefixCache, keys: Keys, frames: torch.Tensor) -> int:
        """Put those that are not stored: what was put before, without waiting, may have had no room. How many."""
        first = stored(cache, keys)
        for index, frame, count in runs(frames[first:]):
            start = first + index
            cache.put_async(keys[start : start + count], self.encoded(self._staging.send(frame, count)))
        return len(keys) - first

    def encoded(self, rows: Rows) -> Rows:
        """Pages as they are written."""
        return rows if self.codec is None else self.codec.encode(rows)

    @contextmanager
    def forgiven(self) -> Iterator[None]:
        """The pool may fail: it is left alone until it is seen again, and nothing is lost but time."""
        try:
            yield
        except DeviceLost:  # not the pool's failure
            raise
        except OutOfSpace:  # also: the tenant's quota
            self.failures += 1
        except KVStoreError as error:
            self.failures += 1
            log.warning("the pool cannot be used: %s", error)
            if isinstance(error, Unavailable):
                self.up, self._failed_s, self._in_doubt = False, time.monotonic(), True


class ChunkWriter:
    """The pages of one chunk, layer by layer while it is computed: ``before`` the forward, ``layer`` from its hook,
    ``after`` it, which seals. Where anything fails the pages are written later, or not at all.

    Between two layers of a forward caches are cold, and a call takes ten times as long: what can be done before is.
    """

    __slots__ = (
        *("_pool", "_cache", "_work", "_staging", "_behind", "_stop", "_count", "_frames"),
        *("_writer", "_write", "_sent", "_layers", "_spent_s"),
    )

    def __init__(
        self, pool: Pool, cache: PrefixCache, work: Work, start_page: int, stop_page: int, staging: Staging
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._work = work
        self._staging = staging
        self._behind = start_page  # pages before the chunk
        self._stop = stop_page
        self._count = 0  # pages to be written
        self._frames: list[tuple[int, int, int]] = []  # theirs, as ``runs`` has them
        self._writer: Writer | None = None
        self._write: Callable[[int], None] | None = None  # a layer, while there is a writer
        self._sent: list[Future[None]] = []  # layers that another thread writes
        self._layers, self._spent_s = 0, 0.0  # in ``layer``

    def before(self) -> None:
        """Reserve frames; write first what an earlier failure left out, since no page is stored without its parent."""
        work = self._work
        try:
            if self._behind > work.stored_pages:
                work.stored_pages = self._stored()
            if self._behind > work.stored_pages:
                work.stored_pages = self._pool._put(self._cache, work, self._behind)
            first = max(self._behind, work.stored_pages)
            if first >= self._stop or work.stored_pages < self._behind:
                return
            assert work.frames is not None
            self._frames = runs(work.frames[first : self._stop])
            self._count = self._stop - first
            keys = keys_to_store(self._cache, work, first, self._stop)
            writer = self._cache.writer(keys, ttl_s=WRITE_TTL_S)
            writer.waits = False  # for pages that go to NVMe at once: the next chunk is not to wait for a disk
            self._writer = writer.__enter__()
            if self._staging.in_place and self._pool.codec is None:
                self._write = writer.prepared([self._staging.send(frame, count) for _, frame, count in self._frames])
            else:
                self._write = self._send
        except KVStoreError as error:
            self._failed(error)

    def layer(self, layer: int) -> None:
        """One layer is in the frames: write it."""
        if (write := self._write) is None:
            return
        start_s = clock()
        try:
            write(layer)
        except KVStoreError as error:
            self._failed(error)
        self._spent_s += clock() - start_s
        self._layers += 1

    def _send(self, layer: int) -> None:
        write = partial(self._write_rows, layer, self._staging.sending(self._frames, layer))
        if self._pool.outgoing is None:
            write()
        else:
            self._sent.append(self._pool.outgoing.submit(write))

    def _write_rows(self, layer: int, rows: Callable[[], Rows]) -> None:
        data, writer = rows(), self._writer
        # One layer failed: who tries the others waits as long for each.
        if writer is not None and not any(each.done() and each.exception() for each in self._sent):
            writer.write_layer(layer, self._pool.encoded(data))

    def _all_sent(self) -> None:
        """Return when no other thread writes any more. Raises what it met."""
        late = wait(self._sent, WRITE_TTL_S).not_done  # each has a deadline of its own, which is shorter
        sent, self._sent = self._sent, []
        if late:
            raise NodeUnavailable("layers were not written in time")
        for each in sent:
            each.result()

    def after(self, succeeded: bool) -> None:
        """Seal, or revoke where the forward failed."""
        self._pool.hook_s += self._spent_s
        self._pool.hook_layers += self._layers
        self._write = None
        if self._writer is None:
            return
        if not succeeded:
            self._abandon()
            return
        work = self._work
        try:
            self._all_sent()
            writer, self._writer = self._writer, None
            writer.__exit__(None, None, None)
            # What was not new is stored, or had no room: the index knows.
            whole = writer.sealed == self._count
            work.stored_pages = self._stop if whole else self._stored()
            work.spent.written_bytes += len(writer.pages_new) * self._cache.page_bytes
        except KVStoreError as error:
            self._failed(error)

    def _stored(self) -> int:
        """How many pages up to the chunk's end are in the pool."""
        return stored(self._cache, keys_to_store(self._cache, self._work, 0, self._stop))

    def _abandon(self) -> None:
        writer, self._writer, self._write = self._writer, None, None
        if writer is not None:
            wait(self._sent, WRITE_TTL_S)
            writer.__exit__(InvalidRequest, None, None)

    def _failed(self, error: KVStoreError) -> None:
        self._abandon()
        with self._pool.forgiven():
            raise error
