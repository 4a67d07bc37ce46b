"""Remote prefill: another engine computes a prompt, and its KV moves into frames of this engine.

The engine that decodes is in control. It asks a prefill engine to compute the prompt, and moves the KV itself: from the
arena of that engine or, for full pages, from the pool. A failure costs only time: the next engine is asked, or this
engine computes the prompt.

In an eager hand-off, both begin together, and each layer moves once it is computed. In a lazy one, the KV moves after
the prompt is computed and frames for it are free. With grain ``whole``, all KV moves after the last layer.

``Fetch`` is one attempt at one prefill engine. ``Peers`` has the clients of other engines.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, nullcontext
from typing import Protocol

import kvstore
from engine.compute.kv_arrivals import Arrivals
from engine.memory.arena import runs
from engine.memory.compression import Lossy
from engine.memory.staging import Stagings
from engine.model.piece import Bytes, Piece, checksum_of
from engine.model.request import Admitted, Done, Failed, Grain, HandOff, PrefillEvent, Progress, Request, Source
from engine.pool.keys import key_runs, links_of
from engine.pool.work import Work
from engine.state import events as ev
from engine.state.events import device_failed
from engine.state.prefill_source import BEGIN_S
from engine.transfer.link import Link
from kvstore import boundary
from kvstore.client.grouped_cache import GroupedCache
from kvstore.client.reader import Reader
from kvstore.device.base import DeviceLost
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable
from kvstore.model.layout import Layout

PEERS_MAX = 64

Pieces = Generator[Piece, None, None]


class Peer(Protocol):
    """The calls to another engine that a hand-off needs. ``EngineClient`` implements them."""

    def prefill(
        self, request: Request, layout: Layout, hold_s: float | None = None, *, timeout_s: float | None = None
    ) -> Iterator[PrefillEvent]:
        """Ask the engine to compute a prompt, and hold its KV for ``hold_s`` seconds."""
        ...

    def pull(
        self, request_id: str, token_start: int = 0, codec: str = "none", *, timeout_s: float | None = None
    ) -> Pieces:
        """Return the KV of a prefill, in pieces. The caller verifies the checksum of each piece."""
        ...

    def release(self, request_id: str) -> bool:
        """Drop the KV of a prefill that is no longer needed. Returns False if there is none with this id."""
        ...


class Peers:
    """Clients of other engines, by address.

    A client is made when it is first needed. The ``PEERS_MAX`` clients that were used last are retained.
    """

    def __init__(self, connect: Callable[[str], Peer]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}  # the one used last is at the end

    def __getitem__(self, address: str) -> Peer:
        with self._lock:
            peer = self._peers.pop(address, None) or self._connect(address)
            self._peers[address] = peer
            while len(self._peers) > PEERS_MAX:
                del self._peers[next(iter(self._peers))]
            return peer


LOOK_S = 0.2  # how often a thread that waits for a layer checks whether the attempt has failed

_HANDING_OFF = boundary.RequestGuard("task/handoff")

log = logging.getLogger("kvstore.engine.handoff")


class Fetch:
    """One attempt to get the KV of a prompt from one prefill engine.

    Life: made -> ``begin`` asks the engine, followed by ``Computed`` or ``AskFailed`` -> ``move`` once the sequence has
    frames, followed by ``Moved``. ``give_up`` ends the attempt early.

    Threads of the attempt post the events. ``Moved`` is the last action of the thread that moves: from then on, the
    attempt does not write to the frames.

    Attributes:
        arrivals: how many tokens of each layer are in the frames.
        admitted, handoff: the replies of the other engine, once received.
        failure: the first error of the attempt.
        moving: True once ``move`` was called.
    """

    def __init__(
        self,
        work: Work,
        attempt: int,
        address: str,
        peers: Peers,
        stagings: Stagings,
        link: Link,
        codec: tuple[str, Lossy | None],
        source: Source,
        grain: Grain,
        chunk_tokens: int,
        vocab_size: int,
        post: Callable[[ev.Event], None],
    ) -> None:
        self.address = address
        self.arrivals = Arrivals(stagings.layers)
        self.handoff: HandOff | None = None
        self.admitted: Admitted | None = None
        self.failure: KVStoreError | None = None
        self._work = work
        self._attempt = attempt
        self._peers = peers
        self._stagings = stagings
        self._layout = stagings.arenas.groups[0].layout  # a token has the same form in all groups
        self._link = link
        self._codec_name, self._codec = codec
        can_use_pool = work.cache is not None and codec[1] is None  # lossy pages have another layout in the pool
        self._source = source if can_use_pool else Source.ARENA
        self._grain = grain
        self._chunk_tokens = chunk_tokens  # this engine's setting; the other engine is assumed to have the same
        self._vocab_size = vocab_size
        self._post = post
        self._admitted = threading.Event()
        self._done = threading.Event()
        self._given_up = False
        self.moving = False
        self._start, self._starts = 0, [0] * stagings.layers  # the first token to move: overall, and of each layer
        self._wire_id = uuid.uuid4().hex  # each attempt is a separate prefill at the other engine

    # --- called by the engine's thread ------------------------------------------------------------------------------

    def begin(self, layout: Layout, hold_s: float) -> None:
        """Ask the other engine to compute the prompt. Returns at once."""
        if not self._run(self._request, layout, hold_s) and self.failure is not None:
            self._post(ev.AskFailed(time.monotonic(), self._work.number, self._attempt, self.failure))

    def move(self, start: int) -> None:
        """Move the KV from token ``start`` on into the frames. Returns at once.

        For a layer with a ring, only the KV that is needed to continue after the prompt moves.
        """
        self._start, self.moving = start, True
        work, groups = self._work, [group for group, _ in self._stagings.arenas.places]
        self._starts = [max(start, work.needed_from(work.prompt, group)) for group in groups]
        self.arrivals.begin(self._starts)
        if not self._run(self._move):
            self._report_moved()

    def give_up(self) -> None:
        """End the attempt, and release the prefill at the other engine. Returns at once."""
        self._given_up = True
        self._fail(NodeUnavailable("the hand-off was given up"))
        self._run(self._release)

    @property
    def lossy(self) -> bool:
        """True if the other engine began with KV from a lossy replica."""
        return self.admitted is not None and self.admitted.lossy

    def _run(self, target: Callable[..., None], *arguments: object) -> bool:
        """Run ``target`` in a new thread. Returns False, and fails the attempt, if the thread cannot be started."""
        try:
            threading.Thread(target=target, args=arguments, name="engine-handoff", daemon=True).start()
            return True
        except RuntimeError as error:
            self._fail(NodeUnavailable(f"no thread for a hand-off: {error}"))
            return False

    # --- threads ----------------------------------------------------------------------------------------------------

    def _request(self, layout: Layout, hold_s: float) -> None:
        try:
            with _HANDING_OFF:
                self._ask(layout, hold_s)
        except KVStoreError as error:
            self._fail(error)
            self._post(ev.AskFailed(time.monotonic(), self._work.number, self._attempt, error))
            self._release()  # the other engine may have finished, and only its last message was lost

    def _ask(self, layout: Layout, hold_s: float) -> None:
        work = self._work
        request, timeout_s = work.for_prefill(self._wire_id), work.deadline_s - time.monotonic()
        for event in self._peers[self.address].prefill(request, layout, hold_s, timeout_s=timeout_s):
            if self._has_stopped():  # the release may have come before the request
                self._release()
                return
            match event:
                case Admitted():
                    self.admitted = event
                    self._admitted.set()
                case Progress():
                    pass
                case Done():
                    self._check(event.handoff)
                    self.handoff = event.handoff
                    self._done.set()
                    now_s, first = time.monotonic(), event.handoff.first_token
                    self._post(ev.Computed(now_s, work.number, self._attempt, first))
                    return
                case Failed():
                    raise event.error
        raise NodeUnavailable(f"engine {self.address} ended a prefill without a result")

    def _move(self) -> None:
        try:
            with _HANDING_OFF:
                self._move_kv()
        except KVStoreError as error:
            self._fail(error)
        finally:
            self._settle()
            self._run(self._release)  # in another thread, so that this one does not wait
            self._report_moved()

    def _move_kv(self) -> None:
        if not self._admitted.wait(min(BEGIN_S, self._remaining_s())):
            raise DeadlineExceeded(f"engine {self.address} did not begin within {BEGIN_S:g} s")
        if self._grain is Grain.WHOLE:
            self._await(self._done)
            self._move_whole()
        elif self._source is Source.DRAM:
            self._move_from_pool()
        elif self._start < self._work.prompt:
            self._receive(self._pull(self._start))
        self._await(self._done)  # a release before that would cancel the prefill

    def _report_moved(self) -> None:
        """Post ``Moved``. From now on, the attempt does not write to the frames."""
        arrived = self.arrivals.tokens_min()
        if arrived < self._work.prompt:
            self._fail(NodeUnavailable(f"engine {self.address} sent only {arrived} of {self._work.prompt} tokens"))
        self._post(ev.Moved(time.monotonic(), self._work.number, self._attempt, arrived, self.failure))

    def _settle(self) -> None:
        """Wait until all received data is in the frames."""
        try:
            self._stagings.settle()
        except KVStoreError as error:
            self._fail(error)
        if isinstance(self.failure, DeviceLost):
            self._post(ev.DeviceFailed(time.monotonic(), device_failed(self.failure)))

    def _check(self, handoff: HandOff) -> None:
        """Check the other engine's reply against the tokens and pages of the prompt."""
        cache, work = self._work.cache, self._work
        if not 0 <= handoff.first_token < self._vocab_size:
            raise InvalidRequest("first_token", f"must be in 0..{self._vocab_size - 1} (got {handoff.first_token})")
        links = links_of(cache, work.tokens[: work.prompt]) if cache is not None and handoff.pages else []
        if links and list(handoff.pages) != links:
            raise InvalidRequest("pages", f"engine {self.address} sent keys that are not those of this prompt")
        pages = work.prompt // work.page_tokens
        if not 0 <= handoff.stored <= pages:
            raise InvalidRequest("stored", f"must be in 0..{pages} (got {handoff.stored})")

    def _release(self) -> None:
        try:
            with _HANDING_OFF:
                self._peers[self.address].release(self._wire_id)
        except KVStoreError as error:  # the other engine drops the prefill after its hold time
            log.debug("cannot release a prefill at engine %s: %s", self.address, error)

    def _fail(self, error: KVStoreError) -> None:
        self.failure = self.failure or error
        self._admitted.set()
        self._done.set()
        self.arrivals.fail(self.failure)

    def _remaining_s(self) -> float:
        return max(0.0, self._work.deadline_s - time.monotonic())

    def _has_stopped(self) -> bool:
        return self._given_up or self.failure is not None

    def _await(self, event: threading.Event) -> None:
        if not event.wait(self._remaining_s()) or self.failure is not None:
            raise self.failure or DeadlineExceeded(f"engine {self.address} did not finish a prefill in time")

    # --- from the other engine's arena ------------------------------------------------------------------------------

    def _pull(self, token_start: int) -> Pieces:
        peer, timeout_s = self._peers[self.address], self._remaining_s()
        pieces = peer.pull(self._wire_id, token_start, self._codec_name, timeout_s=timeout_s)
        try:
            for piece in pieces:
                if self._has_stopped():
                    raise self.failure or NodeUnavailable("the hand-off was given up")
                if not 0 <= piece.layer < self._stagings.layers:
                    raise InvalidRequest("layer", f"{self.address} sent layer {piece.layer}, which does not exist")
                yield piece
        finally:  # ends the pull now; else the other engine would keep its frames until garbage collection
            pieces.close()

    def _receive(self, pieces: Pieces) -> None:
        with closing(pieces):
            for piece in pieces:
                self._store(piece, self.arrivals.tokens(piece.layer))
                self.arrivals.reached(piece.layer, piece.token_start + piece.tokens, self._arrival_gate(piece.layer))

    def _store(self, piece: Piece, arrived: int) -> None:
        """Receive a piece into the frames. The first ``arrived`` tokens of its layer are there already."""
        group, staging, number = self._stagings.at(piece.layer)
        assert self._work.frames is not None
        frames, page_tokens = self._work.frames[group], self._work.page_tokens
        first, tail_tokens = piece.token_start // page_tokens, piece.tokens % page_tokens
        pages, size = piece.tokens // page_tokens, piece.data.nbytes
        layout = self._codec.layout if self._codec is not None else self._layout
        is_inside = (
            self._work.shared_pages * page_tokens <= piece.token_start <= arrived
            and piece.token_start + piece.tokens <= self._work.prompt
        )
        is_whole = piece.token_start % page_tokens == 0 and (not tail_tokens or not pages) and piece.tokens > 0
        if not is_inside or not is_whole or size != layout.kv_heads * piece.tokens * layout.token_bytes:
            raise InvalidRequest("piece", f"engine {self.address} sent a piece outside this prompt's pages")
        self._link.carry(size, self._has_stopped)
        parts = runs(frames[first : first + pages])
        # A piece is read into a buffer first if its frames already have this layer, because a step may be reading them
        # and the piece is not verified yet. It is also read into a buffer if it needs several parts of pinned memory: a
        # mover that holds one part while it waits for another could block other movers.
        if tail_tokens:
            staging.receive_tail(int(frames[first]), number, tail_tokens, self._read_to_buffer(piece, (1, size)))
        elif self._codec is not None or piece.token_start < arrived or (len(parts) > 1 and not self._stagings.in_place):
            data = self._read_to_buffer(piece, (pages, size // pages))
            for index, frame, count in parts:
                staging.receive_layer(frame, number, data[index : index + count])
        else:
            with ExitStack() as stack:
                rows = [staging.layer_target(frame, count, number) for _, frame, count in parts]
                self._read(piece, [stack.enter_context(each) for each in rows])
        self._work.cost.moved_bytes += size

    def _read_to_buffer(self, piece: Piece, shape: tuple[int, int]) -> Bytes:
        """Return the verified and decoded piece in a new buffer."""
        data = kvstore.empty(shape)
        self._read(piece, [data])
        if self._codec is None:
            return data
        self._work.lossy = True
        return self._codec.decode(data)

    def _read(self, piece: Piece, rows: list[Bytes]) -> None:
        piece.data.read_into(rows)
        if checksum_of(rows) != piece.checksum:
            raise NodeUnavailable(f"layer {piece.layer} of {self._wire_id} arrived with a wrong checksum")

    # --- from the pool ------------------------------------------------------------------------------------------------

    def _move_from_pool(self) -> None:
        """Move full pages from the pool as they are written there, and the tail from the other engine's arena.

        Pages move in the order in which they are computed: all layers of one chunk, then the next chunk. If the pool
        lacks a page, this page and all later ones move from the arena.
        """
        work = self._work
        page_tokens = work.page_tokens
        page, full_pages = self._start // page_tokens, work.prompt // page_tokens
        chunk_pages = max(1, self._chunk_tokens // page_tokens)
        tail_start = full_pages * page_tokens
        while page < full_pages:
            stop = min(page + chunk_pages, full_pages)
            tail = self._pull(tail_start) if stop == full_pages and work.prompt > tail_start else None
            with closing(tail) if tail is not None else nullcontext():
                if not self._read_chunk(page, stop, tail):
                    self._receive(self._pull(page * page_tokens))
                    return
                if tail is not None:  # the part of the tail that a later chunk computes
                    self._receive(tail)
            page = stop
        if tail_start <= self._start < work.prompt:
            self._receive(self._pull(tail_start))

    def _read_chunk(self, page: int, stop: int, tail: Pieces | None) -> bool:
        """Read pages from the pool layer by layer, each together with the same layer of the tail.

        Returns False if the pool lacks a page and will not get it.
        """
        work = self._work
        readers = self._readers(page, stop)
        for layer in range(self._stagings.layers):
            group, staging, number = self._stagings.at(layer)
            for reader, frame, count in readers[group]:
                while True:
                    is_computed = self.handoff is not None
                    try:
                        with staging.layer_target(frame, count, number) as rows:
                            reader.read_layer(number, rows)
                        break
                    except DeadlineExceeded:
                        self._check_waiting(stop)
                        if is_computed:  # all writes are over: the page found no space, or was evicted
                            return False
                self._link.carry(count * self._layout.layer_bytes, self._has_stopped)
                work.cost.moved_bytes += count * self._layout.layer_bytes
            tokens = stop * work.page_tokens
            if tail is not None:
                piece = next(tail, None)
                if piece is None or piece.layer != layer:
                    raise NodeUnavailable(f"engine {self.address} sent layers of a tail out of order")
                self._store(piece, tokens)
                tokens = piece.token_start + piece.tokens
            self.arrivals.reached(layer, tokens, self._arrival_gate(layer))
        return True

    def _readers(self, page: int, stop: int) -> list[list[tuple[Reader, int, int]]]:
        """Return readers of the needed pages, by cache group, each with its first frame and its number of pages."""
        cache, frames = self._work.cache, self._work.frames
        assert cache is not None and frames is not None
        keys = cache.keys(self._work.tokens[: stop * self._work.page_tokens])
        readers = []
        for group, (group_cache, staging) in enumerate(zip(cache.groups, self._stagings.groups, strict=True)):
            pages = range(self._first_needed(page, group), stop)
            parts = key_runs(keys, group, pages, frames[group], staging.frames_max)
            readers.append([(group_cache.reader(run, timeout_s=LOOK_S), frame, count) for run, frame, count in parts])
        return readers

    def _first_needed(self, page: int, group: int) -> int:
        """Return the first page, starting at ``page``, that a cache group needs to continue after the prompt."""
        return max(page, self._work.needed_from(self._work.prompt, group) // self._work.page_tokens)

    def _arrival_gate(self, layer: int) -> Callable[[], None] | None:
        return self._stagings.at(layer)[1].arrival_gate()

    def _check_waiting(self, stop: int) -> None:
        """Raise if there is no reason to wait longer for the pages before ``stop``."""
        if self._has_stopped():
            raise self.failure or NodeUnavailable("the hand-off was given up")
        if not self._remaining_s():
            raise DeadlineExceeded(f"page {stop} did not arrive in time")

    def _move_whole(self) -> None:
        """Move all KV in one piece after it is computed: full pages from the pool if possible, the rest by a pull."""
        work = self._work
        page_tokens = work.page_tokens
        position, pool_bytes = self._start, 0
        handoff = self.handoff
        assert handoff is not None and work.frames is not None
        if self._source is Source.DRAM and work.cache is not None:
            stop = min(handoff.stored, work.prompt // page_tokens)
            for group in reversed(range(len(work.cache.groups))):
                stop, group_bytes = self._get_stored(work.cache, group, self._start // page_tokens, stop)
                pool_bytes += group_bytes
            position = max(position, stop * page_tokens)
            self._link.carry(pool_bytes, self._has_stopped)
            work.cost.moved_bytes += pool_bytes
        arrived = [max(position, start) for start in self._starts]
        if position < work.prompt:
            with closing(self._pull(position)) as pieces:
                for piece in pieces:
                    self._store(piece, arrived[piece.layer])
                    arrived[piece.layer] = piece.token_start + piece.tokens
        self._stagings.settle()
        self.arrivals.begin(arrived)

    def _get_stored(self, cache: GroupedCache, group: int, page: int, stop: int) -> tuple[int, int]:
        """Get the pages from ``page`` to ``stop`` that a cache group needs, until one is missing.

        Returns the first page that was not loaded, and the number of bytes loaded.
        """
        work, group_cache = self._work, cache.groups[group]
        assert work.frames is not None
        first = page = self._first_needed(page, group)
        keys, pages = cache.keys(work.tokens[: work.prompt]), range(first, max(first, stop))
        staging = self._stagings.groups[group]
        for run, frame, count in key_runs(keys, group, pages, work.frames[group], staging.frames_max):
            with staging.receive(frame, count) as rows:
                match = group_cache.get(run, out=rows)
            page += match.pages
            if match.pages < count:
                break
        return page, (page - first) * group_cache.page_bytes
