"""An engine's side of the store: writes pages out of its frames, chunk by chunk, and watches its node.

Pool: an engine's side of the store. Loads prefixes into frames, writes pages out of them.

The store is there to save work, never to stop it: while the node is away nothing is written, whatever is still readable
through shared memory is read, and the engine computes the rest. A separate thread checks whether the node is there, so
that the computing one need not find out by waiting.

Chunk: the next tokens of a prompt, computed in one forward and written to the pool while that goes on.
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
from engine.pool.keys import keys_to_store, stored, stored_in_all
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

LOOK_S = 0.25
LOOK_TIMEOUT_S = 0.05
REMOTE_LOOK_TIMEOUT_S = 1.0
CACHES_MAX = 1024  # of tenants and adapters, kept ready
WRITE_TTL_S = 30.0  # for a chunk's pages; what takes longer is written with the next chunk

log = logging.getLogger("kvstore.engine.pool")
clock = time.perf_counter

Rows = npt.NDArray[np.uint8]


class Pool:
    """Shared by all threads of an engine. Without a store it holds nothing and takes nothing.

    Attributes:
        layouts: of the exact pages, one per cache group of the model.
        codec: how pages are written: None as they are, else as lossy replicas under layouts of their own.
        places: the group of each layer of the model, and its number in there.
        outgoing: waits for layers that a device sends, and writes them.
        hook_s, hook_layers: time spent writing layers while a forward waits for it, and their number, since the start.
    """

    def __init__(
        self, store: Store | None, layouts: Sequence[Layout], stagings: Stagings, compress: str = "none"
    ) -> None:
        self.store = store
        self.layouts = tuple(layouts)
        self.codec: Lossy | None = Lossy.of(layouts[0], compress)  # for a token, which is the same in all groups
        self.places = stagings.arenas.places
        self.hook_s, self.hook_layers = 0.0, 0
        self.failures = 0
        self.up = store is not None  # whether the node takes pages, as far as we know
        self._mapped = store is not None and store.reads_without_node
        self._failed_s = 0.0
        self._in_doubt = False  # the node may hold frames for us that we do not know of
        self.stagings = stagings.groups
        self.outgoing = None if stagings.in_place else ThreadPoolExecutor(1, "engine-out")
        self._caches: dict[tuple[str, str, bool], GroupedCache] = {}
        self._stopped = threading.Event()
        look = boundary.thread_loop("task/engine pool", self._look, self._stopped)
        self._watch = threading.Thread(target=look, name="engine-pool", daemon=True)

    def start(self) -> None:
        """Begin to watch the node."""
        if self.store is not None:
            self._watch.start()

    def stop(self) -> None:
        """Stop watching. The store stays open; its maker closes it."""
        self._stopped.set()
        if self._watch.ident is not None:
            self._watch.join()
        if self.outgoing is not None:
            self.outgoing.shutdown(wait=True)

    def _look(self) -> None:
        assert self.store is not None
        if self._stopped.wait(LOOK_S):
            return
        try:
            began_s = time.monotonic()
            self.store.wait_ready(LOOK_TIMEOUT_S if self._mapped else REMOTE_LOOK_TIMEOUT_S)
            self.up = self.up or began_s > self._failed_s  # a failure in the meantime is newer than this look
        except KVStoreError:
            self._in_doubt = self._in_doubt or self.up
            self.up = False

    @property
    def takes(self) -> bool:
        """True if the node takes pages, for the thread that is about to write some. A node of this machine is checked
        now: if it has died since the last check, the write would wait for another one until its deadline."""
        if self.up and self._mapped and self.store is not None:
            with self.forgiven():
                try:
                    self.store.wait_ready(0.0)
                except DeadlineExceeded as late:
                    raise NodeUnavailable(f"{self.store.name}: its daemon is away") from late
        return self.up

    def between_steps(self) -> None:
        """Called by the writing thread while it writes nothing: after a failure, ask the node to release what it
        granted to us and we never learned of. It cannot tell on its own while this process lives.
        """
        if self._in_doubt and self.up and self.store is not None:
            self._in_doubt = False
            with self.forgiven():
                self.store.renew_session()

    def cache(self, salt: str, adapter: str, lossy: bool = False) -> GroupedCache | None:
        """Pages of a tenant and adapter, exact or lossy ones; None without a store."""
        if self.store is None or (lossy and self.codec is None):
            return None
        name = salt, adapter, lossy
        found = self._caches.get(name)
        if found is None:
            if len(self._caches) >= CACHES_MAX:
                self._caches.clear()
            layouts = list(self.layouts)
            if lossy and self.codec is not None:
                layouts = [lossy_layout(layout, self.codec.name) for layout in layouts]
            found = self._caches[name] = self.store.cache(layouts, salt, adapter)
        return found

    def check(self) -> None:
        """Check that the node takes our pages at all. Raises InvalidRequest if they do not fit its extents."""
        if self.store is not None:
            self.cache("", "")
            self.cache("", "", True)

    # --- writing ----------------------------------------------------------------------------------------------------

    def chunk(self, work: Work, start_page: int, stop_page: int) -> dict[int, ChunkWriter]:
        """Writers, by cache group, of the pages up to ``stop_page``, of which those from ``start_page`` on are being
        computed; empty if nothing is to be written.
        """
        cache = self.written_to(work) if self.takes else None
        if cache is None:
            return {}
        return {
            group: ChunkWriter(self, cache, work, group, start_page, stop_page)
            for group, pages in enumerate(work.stored_pages)
            if stop_page > pages
        }

    def append(self, work: Work, pages: int) -> None:
        """Write the pages among the first ``pages`` that are not stored yet, without waiting for the
        acknowledgement.
        """
        cache = self.written_to(work) if self.takes else None
        if cache is None:
            return
        with self.forgiven():
            for group, there in enumerate(work.stored_pages):
                if pages > there:
                    work.stored_pages[group] = self._put(cache, work, group, pages)

    def written(self, work: Work, pages: int, arenas: bool = False) -> int:
        """How many of the first ``pages`` pages are in the pool as exact pages, so that a prompt can continue behind
        them; 0 if unknown. ``arenas``: also count pages that only an engine has."""
        if work.cache is None or not pages or not self.readable:
            return 0
        found = 0
        with self.forgiven():
            found = stored_in_all(work.cache, work.tokens[: pages * work.page_tokens], arenas)
        return found

    @property
    def readable(self) -> bool:
        """True if pages can be read, as far as we know."""
        return self.up or self._mapped

    def written_to(self, work: Work) -> GroupedCache | None:
        """Where its pages are written, while the node is there; None: nowhere."""
        if work.cache is None:
            return None
        if self.codec is not None:
            return self.cache(work.request.page_salt, work.request.adapter, True)
        return work.cache if not work.lossy else None

    def _put(self, cache: GroupedCache, work: Work, group: int, stop: int) -> int:
        """Put pages of a group up to ``stop`` that are not stored; returns where the pages on their way end: in a chain
        before ``stop`` if one is missing that a ring has overwritten."""
        assert work.frames is not None
        one, start = cache.groups[group], work.oldest(stop, group)
        if not is_chained(one.layout):
            start = max(start, work.stored_pages[group])
        elif start:
            (before,) = keys_to_store(cache, work, group, range(start))
            if (there := stored(one, before)) < start:
                return there  # pages after a missing one cannot be found
        for keys in keys_to_store(cache, work, group, range(start, stop)):
            pages = self.put_missing(one, keys, work.frames[group, start : start + len(keys)], group)
            work.spent.written_bytes += pages * one.page_bytes
            start += len(keys)
        return stop

    def put_missing(self, cache: PrefixCache, keys: Keys, frames: torch.Tensor, group: int = 0) -> int:
        """Put pages that are not stored: earlier puts, without waiting, may have had no room. Returns how many."""
        first, staging = stored(cache, keys), self.stagings[group]
        for index, frame, count in runs_upto(staging.frames_max, frames[first:]):
            start = first + index
            cache.put_async(keys[start : start + count], self.encoded(staging.send(frame, count)))
        return len(keys) - first

    def encoded(self, rows: Rows) -> Rows:
        """Pages in the form in which they are written."""
        return rows if self.codec is None else self.codec.encode(rows)

    @contextmanager
    def forgiven(self) -> Iterator[None]:
        """Tolerates failures of the pool: it is left alone until it is seen again, which only costs time."""
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
    """Writes one chunk's pages in one cache group, layer by layer while it is computed: ``before`` the forward,
    ``layer`` from its hook, ``after`` it, which seals. If anything fails the pages are written later, or not at all.

    Between two layers of a forward caches are cold, and a call takes ten times as long: so work is done before if
    possible.
    """

    __slots__ = (
        *("_pool", "_cache", "_work", "_staging", "_group", "_behind", "_stop", "_count"),
        *("_writers", "_writes", "_sent", "_layers", "_spent_s"),
    )

    def __init__(
        self, pool: Pool, cache: GroupedCache, work: Work, group: int, start_page: int, stop_page: int
    ) -> None:
        self._pool = pool
        self._cache = cache
        self._work = work
        self._staging: Staging = pool.stagings[group]
        self._group = group
        self._behind = start_page  # pages before the chunk
        self._stop = stop_page
        self._count = 0  # number of pages to write
        self._writers: list[Writer] = []  # one for a chain; else one per page
        self._writes: list[Callable[[int], None]] = []  # each writes a layer, while there are writers
        self._sent: list[Future[None]] = []  # layers that another thread writes
        self._layers, self._spent_s = 0, 0.0  # calls of ``layer``, and time spent there

    def before(self) -> None:
        """Reserve frames; write first what an earlier failure left out, since no page is stored without its parent."""
        group, there = self._group, self._work.stored_pages
        if not self._pool.up:  # another group has found out: the computing thread waits for only one deadline
            return
        try:
            if self._behind > there[group]:
                there[group] = self._stored()
            if self._behind > there[group]:
                there[group] = self._pool._put(self._cache, self._work, group, self._behind)
            first = max(self._behind, there[group])
            if first < self._stop and there[group] >= self._behind:
                self._open(first)
        except KVStoreError as error:
            self._failed(error)

    def _open(self, first: int) -> None:
        """Open writers of the pages from ``first`` on."""
        assert self._work.frames is not None
        self._count = self._stop - first
        table = self._work.frames[self._group]
        for keys in keys_to_store(self._cache, self._work, self._group, range(first, self._stop)):
            frames = runs(table[first : first + len(keys)])
            writer = self._cache.groups[self._group].writer(keys, ttl_s=WRITE_TTL_S)
            writer.waits = False  # for pages that go to NVMe at once: the next chunk is not to wait for a disk
            self._writers.append(writer.__enter__())
            if self._staging.in_place and self._pool.codec is None:
                rows = [self._staging.send(frame, count) for _, frame, count in frames]
                self._writes.append(self._writers[-1].prepared(rows))
            else:
                self._writes.append(partial(self._send, self._writers[-1], frames))
            first += len(keys)

    def layer(self, layer: int) -> None:
        """Write one layer of the group, which is in the frames."""
        if not self._writes:
            return
        start_s = clock()
        try:
            for write in self._writes:
                write(layer)
        except KVStoreError as error:
            self._failed(error)
        self._spent_s += clock() - start_s
        self._layers += 1

    def _send(self, writer: Writer, frames: list[tuple[int, int, int]], layer: int) -> None:
        write = partial(self._write_rows, writer, layer, self._staging.sending(frames, layer))
        if self._pool.outgoing is None:
            write()
        else:
            self._sent.append(self._pool.outgoing.submit(write))

    def _write_rows(self, writer: Writer, layer: int, rows: Callable[[], Rows]) -> None:
        data = rows()
        # One layer failed: trying the others would wait as long for each.
        if not any(each.done() and each.exception() for each in self._sent):
            writer.write_layer(layer, self._pool.encoded(data))

    def _all_sent(self) -> None:
        """Return when no other thread writes any more. Raises their error."""
        late = wait(self._sent, WRITE_TTL_S).not_done  # each has a deadline of its own, which is shorter
        sent, self._sent = self._sent, []
        if late:
            raise NodeUnavailable("layers were not written in time")
        for each in sent:
            each.result()

    def after(self, succeeded: bool) -> None:
        """Seal, or revoke if the forward failed."""
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
            self._all_sent()
            while self._writers:
                writer = self._writers.pop(0)
                writer.__exit__(None, None, None)
                sealed += writer.sealed
                work.spent.written_bytes += len(writer.pages_new) * self._cache.groups[self._group].page_bytes
            # Pages that were not new are stored, or had no room: the index knows.
            work.stored_pages[self._group] = self._stop if sealed == self._count else self._stored()
        except KVStoreError as error:
            self._failed(error)

    def _stored(self) -> int:
        """How many pages up to the chunk's end are in the pool: leading ones of a chain; for pages that are stored
        alone, those
        that were there before: putting the others checks each."""
        one = self._cache.groups[self._group]
        if not is_chained(one.layout):
            return self._work.stored_pages[self._group]
        (keys,) = keys_to_store(self._cache, self._work, self._group, range(self._stop))
        return stored(one, keys)

    def _abandon(self) -> None:
        writers, self._writers, self._writes = self._writers, [], []
        if writers:
            wait(self._sent, WRITE_TTL_S)
        for writer in writers:
            writer.__exit__(InvalidRequest, None, None)

    def _failed(self, error: KVStoreError) -> None:
        self._abandon()
        with self._pool.forgiven():
            raise error


class Chunk:
    """Tokens of a prompt in one forward. Its pages are written to the pool layer by layer from the forward's own hook,
    so that readers in other processes are at most one layer behind the computation.

    Life: made -> ``before`` the forward -> ``layer`` per layer from its hook -> ``after``, which seals.
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
        """The number of tokens that it computes."""
        return self.stop - self.start

    def before(self) -> None:
        """Reserve frames in the pool."""
        page_tokens = self.work.page_tokens
        self._writers = self._pool.chunk(self.work, self.start // page_tokens, self.stop // page_tokens)
        for writer in self._writers.values():
            writer.before()

    def layer(self, layer: int) -> None:
        """Write one layer's KV of this chunk, which is in the frames."""
        group, number = self._pool.places[layer]
        if group in self._writers:
            self._writers[group].layer(number)
        if self._progress is not None:
            self._progress.reached(layer, self.stop)

    def after(self, succeeded: bool = True) -> None:
        """End the chunk: the forward is over."""
        for writer in self._writers.values():
            writer.after(succeeded)
        if succeeded:
            prompt = self.work.prompt
            self.work.spent.computed += min(self.stop, prompt) - min(self.start, prompt)
