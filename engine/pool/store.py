"""An engine's client of the pool: it writes pages out of frames, chunk by chunk, and watches the node.

The pool saves work, and a failure of the pool never stops the engine. While the node is away, the engine writes no
pages, reads the pages that are still readable through shared memory, and computes the rest. A thread checks regularly
whether the node responds, so that the computing thread does not wait for a node that is away.

``Chunk`` has the tokens of a prompt that one forward computes. Its pages are written layer by layer during the forward,
by one ``ChunkWriter`` for each cache group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.compute.paged_cache import Slice
from engine.memory.arena import runs, runs_upto
from engine.memory.compression import Lossy, lossy_layout
from engine.memory.staging import Staging, Stagings
from engine.pool.keys import count_stored, count_stored_in_groups, keys_to_store
from engine.pool.work import Work
from kvstore import boundary
from kvstore.client.grouped_cache import GroupedCache
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.client.writer import Writer
from kvstore.device.base import DeviceLost
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, OutOfSpace, Unavailable
from kvstore.model.groups import is_chained
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys

LOOK_S = 0.25  # the time between two checks of the node
LOOK_TIMEOUT_S = 0.05  # for a check of a node on this machine
REMOTE_LOOK_TIMEOUT_S = 1.0  # for a check of another node
CACHES_MAX = 1024  # caches of tenants and adapters that stay open
WRITE_TTL_S = 30.0  # for writing the pages of a chunk; pages that take longer are written with the next chunk

log = logging.getLogger("kvstore.engine.pool")
clock = time.perf_counter

Rows = npt.NDArray[np.uint8]


class Pool:
    """The pool, as one engine uses it. All threads of the engine share it.

    Without a store, every lookup is a miss, and no page is written.

    Attributes:
        layouts: the layouts of exact pages, one for each cache group of the model.
        codec: None if pages are written as they are, else the codec of the lossy replicas, which have other layouts.
        places: for each layer of the model, its cache group and its number in the group.
        outgoing: runs the writes that wait for copies from the device; None if frames are in host memory.
        up: True if the node accepts pages, according to the last check or failure.
        hook_s, hook_layers: how long forward passes have waited while layers were written, and the number of these
            layers.
        failures: the number of calls that failed.
    """

    def __init__(
        self, store: Store | None, layouts: Sequence[Layout], stagings: Stagings, compress: str = "none"
    ) -> None:
        self.store = store
        self.layouts = tuple(layouts)
        self.codec: Lossy | None = Lossy.of(layouts[0], compress)  # a token has the same form in all groups
        self.places = stagings.arenas.places
        self.hook_s, self.hook_layers = 0.0, 0
        self.failures = 0
        self.up = store is not None
        self._mapped = store is not None and store.reads_without_node
        self._failed_s = 0.0
        self._has_lost_replies = False  # True if the node may have granted frames to us in a reply that was lost
        self.stagings = stagings.groups
        self.outgoing = None if stagings.in_place else ThreadPoolExecutor(1, "engine-out")
        self._caches: dict[tuple[str, str, bool], GroupedCache] = {}
        self._stopped = threading.Event()
        loop = boundary.thread_loop("task/engine pool", self._check_node, self._stopped)
        self._watch = threading.Thread(target=loop, name="engine-pool", daemon=True)

    def start(self) -> None:
        """Start the thread that watches the node."""
        if self.store is not None:
            self._watch.start()

    def stop(self) -> None:
        """End the threads. The caller closes the store."""
        self._stopped.set()
        if self._watch.ident is not None:
            self._watch.join()
        if self.outgoing is not None:
            self.outgoing.shutdown(wait=True)

    def _check_node(self) -> None:
        assert self.store is not None
        if self._stopped.wait(LOOK_S):
            return
        try:
            started_s = time.monotonic()
            self.store.wait_ready(LOOK_TIMEOUT_S if self._mapped else REMOTE_LOOK_TIMEOUT_S)
            self.up = self.up or started_s > self._failed_s  # a failure during this check is newer than its result
        except KVStoreError:
            self._has_lost_replies = self._has_lost_replies or self.up
            self.up = False

    def can_write(self) -> bool:
        """Return whether the node takes pages. The writing thread asks just before it writes.

        A node of this machine is checked now. If its daemon has died since the last check, the write would wait until
        its deadline for another daemon.
        """
        if self.up and self._mapped and self.store is not None:
            with self.tolerate_failures():
                try:
                    self.store.wait_ready(0.0)
                except DeadlineExceeded as late:
                    raise NodeUnavailable(f"{self.store.name}: its daemon is away") from late
        return self.up

    def between_steps(self) -> None:
        """After lost replies, make the node release the frames that it granted to this process in them.

        The node does not release these frames on its own as long as this process is alive. The writing thread calls
        this while it writes no pages.
        """
        if self._has_lost_replies and self.up and self.store is not None:
            self._has_lost_replies = False
            with self.tolerate_failures():
                self.store.replace_session()

    def cache(self, salt: str, adapter: str, lossy: bool = False) -> GroupedCache | None:
        """Return the cache for the exact or lossy pages of a tenant and adapter; None if there is none."""
        if self.store is None or (lossy and self.codec is None):
            return None
        name = salt, adapter, lossy
        cache = self._caches.get(name)
        if cache is None:
            if len(self._caches) >= CACHES_MAX:
                self._caches.clear()
            layouts = list(self.layouts)
            if lossy and self.codec is not None:
                layouts = [lossy_layout(layout, self.codec.name) for layout in layouts]
            cache = self._caches[name] = self.store.cache(layouts, salt, adapter)
        return cache

    def check(self) -> None:
        """Check that the node takes pages of these layouts. Raises InvalidRequest if they do not fit its extents."""
        if self.store is not None:
            self.cache("", "")
            self.cache("", "", True)

    # --- writing ----------------------------------------------------------------------------------------------------

    def chunk_writers(self, work: Work, start_page: int, stop_page: int) -> dict[int, ChunkWriter]:
        """Return writers, by cache group, for the pages up to ``stop_page``; empty if there are no pages to write.

        The pages from ``start_page`` on are about to be computed.
        """
        cache = self.target_cache(work) if self.can_write() else None
        if cache is None:
            return {}
        return {
            group: ChunkWriter(self, cache, work, group, start_page, stop_page)
            for group, pages in enumerate(work.stored_pages)
            if stop_page > pages
        }

    def store_pages(self, work: Work, pages: int) -> None:
        """Write the missing ones among the first ``pages`` pages. Does not wait for the acknowledgement."""
        cache = self.target_cache(work) if self.can_write() else None
        if cache is None:
            return
        with self.tolerate_failures():
            for group, stored in enumerate(work.stored_pages):
                if pages > stored:
                    work.stored_pages[group] = self._put(cache, work, group, pages)

    def count_stored(self, work: Work, pages: int, arenas: bool = False) -> int:
        """Return after how many of the first ``pages`` pages a prompt can continue from the pool; 0 if unknown.

        Only exact pages count. ``arenas``: True to count pages that only the arena of an engine has, too.
        """
        if work.cache is None or not pages or not self.is_readable:
            return 0
        stored = 0
        with self.tolerate_failures():
            stored = count_stored_in_groups(work.cache, work.tokens[: pages * work.page_tokens], arenas)
        return stored

    @property
    def is_readable(self) -> bool:
        """True if pages can be read: the node is up, or its memory is mapped."""
        return self.up or self._mapped

    def target_cache(self, work: Work) -> GroupedCache | None:
        """Return the cache to which the pages of a request are written; None if they are not written."""
        if work.cache is None:
            return None
        if self.codec is not None:
            return self.cache(work.request.page_salt, work.request.adapter, True)
        return work.cache if not work.lossy else None

    def _put(self, cache: GroupedCache, work: Work, group: int, stop: int) -> int:
        """Put the pages of a group up to ``stop`` that are not stored. Returns how many leading pages are stored then.

        In a chain, the result is less than ``stop`` if the pool lacks a page that a ring has already overwritten.
        """
        assert work.frames is not None
        group_cache, start = cache.groups[group], work.first_page_in_frames(stop, group)
        if not is_chained(group_cache.layout):
            start = max(start, work.stored_pages[group])
        elif start:
            (earlier,) = keys_to_store(cache, work, group, range(start))
            if (stored := count_stored(group_cache, earlier)) < start:
                return stored  # pages after a missing one would never be found
        for keys in keys_to_store(cache, work, group, range(start, stop)):
            pages = self.put_missing(group_cache, keys, work.frames[group, start : start + len(keys)], group)
            work.cost.written_bytes += pages * group_cache.page_bytes
            start += len(keys)
        return stop

    def put_missing(self, cache: PrefixCache, keys: Keys, frames: torch.Tensor, group: int = 0) -> int:
        """Put the pages that are not stored, and return their number.

        The pool is asked, because earlier puts did not wait for the reply and may have found no space.
        """
        first, staging = count_stored(cache, keys), self.stagings[group]
        for index, frame, count in runs_upto(staging.frames_max, frames[first:]):
            start = first + index
            cache.put_async(keys[start : start + count], self.encode(staging.send(frame, count)))
        return len(keys) - first

    def encode(self, rows: Rows) -> Rows:
        """Return pages in the form that the pool stores."""
        return rows if self.codec is None else self.codec.encode(rows)

    @contextmanager
    def tolerate_failures(self) -> Iterator[None]:
        """Log and count errors of the pool instead of raising them.

        If the pool is unavailable, it is not used again until a check succeeds. A lost device still raises, because the
        pool did not cause it.
        """
        try:
            yield
        except DeviceLost:
            raise
        except OutOfSpace:  # includes the quota of a tenant
            self.failures += 1
        except KVStoreError as error:
            self.failures += 1
            log.warning("the pool cannot be used: %s", error)
            if isinstance(error, Unavailable):
                self.up, self._failed_s, self._has_lost_replies = False, time.monotonic(), True


class ChunkWriter:
    """Writes the pages of one chunk in one cache group, layer by layer during the forward pass.

    Life: ``before`` the forward -> ``layer`` from its hook, once per layer -> ``after`` the forward, which seals the
    pages. If a call to the pool fails, the pages are written later, or not at all.

    Between two layers of a forward pass, CPU caches are cold and a call takes ten times as long. So ``before``
    prepares as much as possible.
    """

    __slots__ = (
        *("_pool", "_cache", "_work", "_staging", "_group", "_start", "_stop", "_count"),
        *("_writers", "_writes", "_pending", "_layers", "_spent_s"),
    )

    def __init__(
        self, pool: Pool, cache: GroupedCache, work: Work, group: int, start_page: int, stop_page: int
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._work = work
        self._staging: Staging = pool.stagings[group]
        self._group = group
        self._start = start_page
        self._stop = stop_page
        self._count = 0  # number of pages to write
        self._writers: list[Writer] = []  # one for a chain, else one for each page
        self._writes: list[Callable[[int], None]] = []  # functions that write a layer, one for each writer
        self._pending: list[Future[None]] = []  # writes of layers in another thread
        self._layers, self._spent_s = 0, 0.0  # the number of calls of ``layer``, and their time

    def before(self) -> None:
        """Reserve frames in the pool.

        Earlier pages that the pool lacks after a failure are written first, because no page is stored without its
        parent.
        """
        group, stored_pages = self._group, self._work.stored_pages
        if not self._pool.up:  # a call for another group failed; waiting for one deadline is enough
            return
        try:
            if self._start > stored_pages[group]:
                stored_pages[group] = self._count_stored()
            if self._start > stored_pages[group]:
                stored_pages[group] = self._pool._put(self._cache, self._work, group, self._start)
            first = max(self._start, stored_pages[group])
            if first < self._stop and stored_pages[group] >= self._start:
                self._open(first)
        except KVStoreError as error:
            self._fail(error)

    def _open(self, first: int) -> None:
        """Open writers for the pages, starting at ``first``."""
        assert self._work.frames is not None
        self._count = self._stop - first
        table = self._work.frames[self._group]
        for keys in keys_to_store(self._cache, self._work, self._group, range(first, self._stop)):
            frames = runs(table[first : first + len(keys)])
            writer = self._cache.groups[self._group].writer(keys, ttl_s=WRITE_TTL_S)
            writer.waits = False  # pages may go to NVMe at once, and the next chunk must not wait for a disk
            self._writers.append(writer.__enter__())
            if self._staging.in_place and self._pool.codec is None:
                rows = [self._staging.send(frame, count) for _, frame, count in frames]
                self._writes.append(self._writers[-1].prepared(rows))
            else:
                self._writes.append(partial(self._send, self._writers[-1], frames))
            first += len(keys)

    def layer(self, layer: int) -> None:
        """Write one layer of the group. Its KV is in the frames."""
        if not self._writes:
            return
        start_s = clock()
        try:
            for write in self._writes:
                write(layer)
        except KVStoreError as error:
            self._fail(error)
        self._spent_s += clock() - start_s
        self._layers += 1

    def _send(self, writer: Writer, frames: list[tuple[int, int, int]], layer: int) -> None:
        write = partial(self._write_rows, writer, layer, self._staging.start_send_layer(frames, layer))
        if self._pool.outgoing is None:
            write()
        else:
            self._pending.append(self._pool.outgoing.submit(write))

    def _write_rows(self, writer: Writer, layer: int, rows: Callable[[], Rows]) -> None:
        data = rows()
        # After a failure the other layers are skipped: each would wait as long as the one that failed.
        if not any(each.done() and each.exception() for each in self._pending):
            writer.write_layer(layer, self._pool.encode(data))

    def _finish_pending(self) -> None:
        """Wait until no other thread writes. Raises the first error of these writes."""
        late = wait(self._pending, WRITE_TTL_S).not_done  # each write has a shorter deadline
        pending, self._pending = self._pending, []
        if late:
            raise NodeUnavailable("layers were not written in time")
        for each in pending:
            each.result()

    def after(self, succeeded: bool) -> None:
        """Seal the pages, or revoke them if the forward pass failed."""
        self._pool.hook_s += self._spent_s
        self._pool.hook_layers += self._layers
        self._writes = []
        if not self._writers:
            return
        if not succeeded:
            self._abandon()
            return
        work, sealed = self._work, 0
        try:
            self._finish_pending()
            while self._writers:
                writer = self._writers.pop(0)
                writer.__exit__(None, None, None)
                sealed += writer.sealed
                work.cost.written_bytes += len(writer.pages_new) * self._cache.groups[self._group].page_bytes
            # A page that was not sealed here was stored before, or found no space. A lookup shows which.
            work.stored_pages[self._group] = self._stop if sealed == self._count else self._count_stored()
        except KVStoreError as error:
            self._fail(error)

    def _count_stored(self) -> int:
        """Return how many leading pages, up to the chunk's end, are in the pool.

        For a group whose pages are not chained, return the number known before: each put checks its own page.
        """
        group_cache = self._cache.groups[self._group]
        if not is_chained(group_cache.layout):
            return self._work.stored_pages[self._group]
        (keys,) = keys_to_store(self._cache, self._work, self._group, range(self._stop))
        return count_stored(group_cache, keys)

    def _abandon(self) -> None:
        writers, self._writers, self._writes = self._writers, [], []
        if writers:
            wait(self._pending, WRITE_TTL_S)
        for writer in writers:
            writer.__exit__(InvalidRequest, None, None)

    def _fail(self, error: KVStoreError) -> None:
        self._abandon()
        with self._pool.tolerate_failures():
            raise error


class Chunk:
    """The tokens of a prompt that one forward pass computes.

    The hook of the forward pass writes each layer to the pool. Readers in other processes are at most one layer behind.

    Life: constructed -> ``before`` the forward -> ``layer`` from its hook, once per layer -> ``after``, which seals.
    """

    __slots__ = ("work", "start", "stop", "slice", "_writers", "_pool", "_progress")

    def __init__(self, work: Work, start: int, stop: int, pool: Pool) -> None:
        assert work.frames is not None
        self.work = work
        self.start = start
        self.stop = stop
        self.slice = Slice(work.frames, start, work.tokens[start:stop])
        self._writers: dict[int, ChunkWriter] = {}  # by cache group
        self._pool = pool
        self._progress = work.progress

    @property
    def tokens(self) -> int:
        """The number of tokens to compute."""
        return self.stop - self.start

    def before(self) -> None:
        """Reserve frames in the pool."""
        page_tokens = self.work.page_tokens
        self._writers = self._pool.chunk_writers(self.work, self.start // page_tokens, self.stop // page_tokens)
        for writer in self._writers.values():
            writer.before()

    def layer(self, layer: int) -> None:
        """Write one layer of the chunk. Its KV is in the frames."""
        group, number = self._pool.places[layer]
        if group in self._writers:
            self._writers[group].layer(number)
        if self._progress is not None:
            self._progress.reached(layer, self.stop)

    def after(self, succeeded: bool = True) -> None:
        """Seal the pages and count the tokens as computed, or revoke the pages if the forward pass failed."""
        for writer in self._writers.values():
            writer.after(succeeded)
        if succeeded:
            prompt = self.work.prompt
            self.work.cost.computed += min(self.stop, prompt) - min(self.start, prompt)
