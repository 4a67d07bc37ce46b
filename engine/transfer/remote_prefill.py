"""Brings a prompt that another engine computed into frames of this one.

Fetch: one prompt computed by another engine and brought into frames here.

The engine that decodes leads: it asks a prefill engine to compute, and moves the KV itself, from that engine's arena
or, for full pages, from the pool. A failure only costs time: the next engine is asked, or the prompt is computed
here.

Eager: both begin together, and layers arrive as they are computed. Lazy: the KV is fetched once the prompt is computed
and there are frames for it. Whole: the KV moves in one piece, after the last layer.

Peers: other engines, as far as hand-offs and migrations need them.
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
from engine.pool.keys import links_of, placed_parts
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
    """Another engine, as a hand-off uses it. ``EngineClient`` is one."""

    def prefill(
        self, request: Request, layout: Layout, hold_s: float | None = None, *, timeout_s: float | None = None
    ) -> Iterator[PrefillEvent]:
        """Ask it to compute a prompt."""
        ...

    def pull(
        self, request_id: str, token_start: int = 0, codec: str = "none", *, timeout_s: float | None = None
    ) -> Pieces:
        """Fetch the KV. The user of a piece compares its checksum."""
        ...

    def release(self, request_id: str) -> bool:
        """Tell it that the KV is no longer needed."""
        ...


class Peers:
    """Clients of other engines, one per address, made when first needed; the ``PEERS_MAX`` used last are kept."""

    def __init__(self, connect: Callable[[str], Peer]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._known: dict[str, Peer] = {}

    def __getitem__(self, address: str) -> Peer:
        with self._lock:
            peer = self._known.pop(address, None) or self._connect(address)
            self._known[address] = peer  # the newest, at the end
            while len(self._known) > PEERS_MAX:
                forgotten = next(iter(self._known))
                del self._known[forgotten]
            return peer


LOOK_S = 0.2  # how soon a thread that waits for a layer notices that it need not

_HANDING_OFF = boundary.RequestGuard("task/handoff")

log = logging.getLogger("kvstore.engine.handoff")


class Fetch:
    """One attempt at one prefill engine.

    Life: made -> ``begin`` (it computes: ``Computed`` or ``AskFailed``) -> ``move`` once there are frames (at once, or
    when it is computed: ``Moved``). ``give_up`` ends it early. Our threads post events, ``Moved`` as the
    last thing its thread does: nothing writes to the frames then.
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
        self._layout = stagings.arenas.groups[0].layout  # for a token, which is the same in all groups
        self._link = link
        self._codec_name, self._codec = codec
        exact = work.cache is not None and codec[1] is None
        self._source = source if exact else Source.ARENA  # lossy pages are in the pool under another layout
        self._grain = grain
        self._chunk_tokens = chunk_tokens  # of a step here; the other engine is assumed to have the same setting
        self._vocab_size = vocab_size
        self._post = post
        self._admitted = threading.Event()
        self._done = threading.Event()
        self._given_up = False
        self.moving = False
        self._start, self._starts = 0, [0] * stagings.layers
        self._wire_id = uuid.uuid4().hex  # a second attempt is another prefill there

    # --- called by the engine's thread ------------------------------------------------------------------------------

    def begin(self, layout: Layout, hold_s: float) -> None:
        """Ask the engine to compute the prompt. Returns at once."""
        if not self._run(self._compute, layout, hold_s) and self.failure is not None:
            self._post(ev.AskFailed(time.monotonic(), self._work.number, self._attempt, self.failure))

    def move(self, start: int) -> None:
        """Bring the KV into the frames, from token ``start`` on; for layers with a ring, what their window needs.
        Returns at once."""
        self._start, self.moving = start, True
        work, groups = self._work, [group for group, _ in self._stagings.arenas.places]
        self._starts = [max(start, work.needed(work.prompt, group)) for group in groups]
        self.arrivals.begin(self._starts)
        if not self._run(self._move):
            self._moved()

    def give_up(self) -> None:
        """End an attempt that is no longer wanted."""
        self._given_up = True
        self._fail(NodeUnavailable("the hand-off was given up"))
        self._run(self._release)

    @property
    def lossy(self) -> bool:
        """True if the other engine computes from inexact KV."""
        return self.admitted is not None and self.admitted.lossy

    def _run(self, target: Callable[..., None], *arguments: object) -> bool:
        """Run ``target`` in a thread of its own. False if the machine has no more threads: this attempt fails."""
        try:
            threading.Thread(target=target, args=arguments, name="engine-handoff", daemon=True).start()
            return True
        except RuntimeError as error:
            self._fail(NodeUnavailable(f"no thread for a hand-off: {error}"))
            return False

    # --- threads ----------------------------------------------------------------------------------------------------

    def _compute(self, layout: Layout, hold_s: float) -> None:
        try:
            with _HANDING_OFF:
                self._ask(layout, hold_s)
        except KVStoreError as error:
            self._fail(error)
            self._post(ev.AskFailed(time.monotonic(), self._work.number, self._attempt, error))
            self._release()  # it may have finished nevertheless, and its last message was lost

    def _ask(self, layout: Layout, hold_s: float) -> None:
        work = self._work
        request, timeout_s = work.for_prefill(self._wire_id), work.deadline_s - time.monotonic()
        for event in self._peers[self.address].prefill(request, layout, hold_s, timeout_s=timeout_s):
            if self._stopped():  # given up before that engine knew of it
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
                self._bring()
        except KVStoreError as error:
            self._fail(error)
        finally:
            self._settle()
            self._run(self._release)  # nothing waits for that
            self._moved()

    def _bring(self) -> None:
        if not self._admitted.wait(min(BEGIN_S, self._left_s())):
            raise DeadlineExceeded(f"engine {self.address} did not begin within {BEGIN_S:g} s")
        if self._grain is Grain.WHOLE:
            self._await(self._done)
            self._move_whole()
        elif self._source is Source.DRAM:
            self._move_from_pool()
        elif self._start < self._work.prompt:
            self._take(self._pull(self._start))
        self._await(self._done)  # released earlier, it would count as given up

    def _moved(self) -> None:
        """Report how much came. The frames are no longer written to."""
        arrived = self.arrivals.tokens_min()
        if arrived < self._work.prompt:
            self._fail(NodeUnavailable(f"engine {self.address} sent less than all of a prompt"))
        self._post(ev.Moved(time.monotonic(), self._work.number, self._attempt, arrived, self.failure))

    def _settle(self) -> None:
        """Release the frames, which are no longer written to."""
        try:
            self._stagings.settle()
        except KVStoreError as error:
            self._fail(error)
        if isinstance(self.failure, DeviceLost):
            self._post(ev.DeviceFailed(time.monotonic(), device_failed(self.failure)))

    def _check(self, handoff: HandOff) -> None:
        """Check the other engine's reply against the tokens and pages of our prompt."""
        cache, work = self._work.cache, self._work
        if not 0 <= handoff.first_token < self._vocab_size:
            raise InvalidRequest("first_token", f"{handoff.first_token} is not a token of this model")
        ours = links_of(cache, work.tokens[: work.prompt]) if cache is not None and handoff.pages else []
        if ours and list(handoff.pages) != ours:
            raise InvalidRequest("pages", f"engine {self.address} names other pages than this prompt has")
        if not 0 <= handoff.stored <= work.prompt // work.page_tokens:
            raise InvalidRequest("stored", f"{handoff.stored} pages are more than this prompt has")

    def _release(self) -> None:
        try:
            with _HANDING_OFF:
                self._peers[self.address].release(self._wire_id)
        except KVStoreError as error:  # it lets go on its own, later
            log.debug("engine %s could not be asked to release: %s", self.address, error)

    def _fail(self, error: KVStoreError) -> None:
        self.failure = self.failure or error
        self._admitted.set()
        self._done.set()
        self.arrivals.fail(self.failure)

    def _left_s(self) -> float:
        return max(0.0, self._work.deadline_s - time.monotonic())

    def _stopped(self) -> bool:
        return self._given_up or self.failure is not None

    def _await(self, event: threading.Event) -> None:
        if not event.wait(self._left_s()) or self.failure is not None:
            raise self.failure or DeadlineExceeded(f"engine {self.address} did not finish a prefill in time")

    # --- out of the other engine's arena ----------------------------------------------------------------------------

    def _pull(self, token_start: int) -> Pieces:
        pieces = self._peers[self.address].pull(self._wire_id, token_start, self._codec_name, timeout_s=self._left_s())
        try:
            for piece in pieces:
                if self._stopped():
                    raise self.failure or NodeUnavailable("the hand-off was given up")
                if not 0 <= piece.layer < self._stagings.layers:
                    raise InvalidRequest("layer", f"{self.address} sent layer {piece.layer}, which does not exist")
                yield piece
        finally:  # or the other engine would hold what is still being pulled until this is collected
            pieces.close()

    def _take(self, pieces: Pieces) -> None:
        with closing(pieces):
            for piece in pieces:
                self._store(piece, self.arrivals.tokens(piece.layer))
                self.arrivals.reached(piece.layer, piece.token_start + piece.tokens, self._landing(piece.layer))

    def _store(self, piece: Piece, there: int) -> None:
        """Receive a piece into the frames, where ``there`` tokens of its layer are."""
        group, staging, number = self._stagings.at(piece.layer)
        assert self._work.frames is not None
        frames, page_tokens = self._work.frames[group], self._work.page_tokens
        first, rest = piece.token_start // page_tokens, piece.tokens % page_tokens
        count, size = piece.tokens // page_tokens, piece.data.nbytes
        layout = self._codec.layout if self._codec is not None else self._layout
        inside = (
            self._work.shared_pages * page_tokens <= piece.token_start <= there
            and piece.token_start + piece.tokens <= self._work.prompt
        )
        whole = piece.token_start % page_tokens == 0 and (not rest or not count) and piece.tokens > 0
        if not inside or not whole or size != layout.kv_heads * piece.tokens * layout.token_bytes:
            raise InvalidRequest("piece", f"engine {self.address} sent a piece outside this prompt's pages")
        self._link.carry(size, self._stopped)
        parts = runs(frames[first : first + count])
        if rest:
            staging.receive_tail(int(frames[first]), number, rest, self._aside(piece, (1, size)))
        # Frames that are there may be in use: the piece is verified first. And one part at a time has pinned memory, or
        # movers would wait for each other's.
        elif self._codec is not None or piece.token_start < there or (len(parts) > 1 and not self._stagings.in_place):
            data = self._aside(piece, (count, size // count))
            for index, frame, some in parts:
                staging.receive_layer(frame, number, data[index : index + some])
        else:
            with ExitStack() as stack:
                rows = [staging.layer_target(frame, some, number) for _, frame, some in parts]
                self._read(piece, [stack.enter_context(each) for each in rows])
        self._work.spent.moved_bytes += size

    def _aside(self, piece: Piece, shape: tuple[int, int]) -> Bytes:
        """The piece in memory of its own, decoded."""
        data = kvstore.empty(shape)
        self._read(piece, [data])
        if self._codec is None:
            return data
        self._work.lossy = True
        return self._codec.decode(data)

    def _read(self, piece: Piece, rows: list[Bytes]) -> None:
        piece.data.read_into(rows)
        if checksum_of(rows) != piece.checksum:
            raise NodeUnavailable(f"layer {piece.layer} of {self._wire_id} arrived damaged")

    # --- out of the pool ----------------------------------------------------------------------------------------------

    def _move_from_pool(self) -> None:
        """Move full pages as they are written to the pool; the rest of them, and the tail, from the arena.

        A chunk's pages at a time, all layers of them, then the next: in that order they are computed.
        """
        work = self._work
        page_tokens = work.page_tokens
        page, full = self._start // page_tokens, work.prompt // page_tokens
        group = max(1, self._chunk_tokens // page_tokens)
        while page < full:
            stop = min(page + group, full)
            tail = self._pull(full * page_tokens) if stop == full and work.prompt > full * page_tokens else None
            with closing(tail) if tail is not None else nullcontext():
                if not self._read_group(page, stop, tail):
                    self._take(self._pull(page * page_tokens))
                    return
                if tail is not None:  # the part of it that was computed in a later chunk
                    self._take(tail)
            page = stop
        if full * page_tokens <= self._start < work.prompt:
            self._take(self._pull(full * page_tokens))

    def _read_group(self, page: int, stop: int, tail: Pieces | None) -> bool:
        """Read pages layer by layer, with the same layers of the tail. False if they are not in the pool."""
        work = self._work
        readers = self._readers(page, stop)
        for layer in range(self._stagings.layers):
            group, staging, number = self._stagings.at(layer)
            for reader, frame, count in readers[group]:
                while True:
                    done = self.handoff is not None
                    try:
                        with staging.layer_target(frame, count, number) as rows:
                            reader.read_layer(number, rows)
                        break
                    except DeadlineExceeded:
                        self._still_coming(stop)
                        if done:  # no more will be written: this page had no room, or was evicted already
                            return False
                self._link.carry(count * self._layout.layer_bytes, self._stopped)
                work.spent.moved_bytes += count * self._layout.layer_bytes
            tokens = stop * work.page_tokens
            if tail is not None:
                piece = next(tail, None)
                if piece is None or piece.layer != layer:
                    raise NodeUnavailable(f"engine {self.address} sent layers of a tail out of order")
                self._store(piece, tokens)
                tokens = piece.token_start + piece.tokens
            self.arrivals.reached(layer, tokens, self._landing(layer))
        return True

    def _readers(self, page: int, stop: int) -> list[list[tuple[Reader, int, int]]]:
        """Readers of the needed pages, by cache group, each with the number of its frames."""
        cache, frames = self._work.cache, self._work.frames
        assert cache is not None and frames is not None
        keys = cache.keys(self._work.tokens[: stop * self._work.page_tokens])
        found = []
        for group, (one, staging) in enumerate(zip(cache.groups, self._stagings.groups, strict=True)):
            pages = range(self._first(page, group), stop)
            parts = placed_parts(keys, group, pages, frames[group], staging.frames_max)
            found.append([(one.reader(asked, timeout_s=LOOK_S), frame, count) for asked, frame, count in parts])
        return found

    def _first(self, page: int, group: int) -> int:
        """The first page from ``page`` on that a cache group needs behind the prompt."""
        return max(page, self._work.needed(self._work.prompt, group) // self._work.page_tokens)

    def _landing(self, layer: int) -> Callable[[], None] | None:
        return self._stagings.at(layer)[1].landing()

    def _still_coming(self, stop: int) -> None:
        if self._stopped():
            raise self.failure or NodeUnavailable("the hand-off was given up")
        if not self._left_s():
            raise DeadlineExceeded(f"page {stop} did not arrive in time")

    def _move_whole(self) -> None:
        """Move everything at once, when all of it is computed."""
        work = self._work
        page_tokens = work.page_tokens
        position, moved = self._start, 0
        handoff = self.handoff
        assert handoff is not None and work.frames is not None
        if self._source is Source.DRAM and work.cache is not None:
            full = min(handoff.stored, work.prompt // page_tokens)
            for group in reversed(range(len(work.cache.groups))):
                full, some = self._get_stored(work.cache, group, self._start // page_tokens, full)
                moved += some
            position = max(position, full * page_tokens)
            self._link.carry(moved, self._stopped)
            work.spent.moved_bytes += moved
        arrived = [max(position, start) for start in self._starts]
        if position < work.prompt:
            with closing(self._pull(position)) as pieces:
                for piece in pieces:
                    self._store(piece, arrived[piece.layer])
                    arrived[piece.layer] = piece.token_start + piece.tokens
        self._stagings.settle()
        self.arrivals.begin(arrived)

    def _get_stored(self, cache: GroupedCache, group: int, page: int, stop: int) -> tuple[int, int]:
        """Get the pages from ``page`` on that a cache group needs; returns where it stopped, and the bytes."""
        work, one = self._work, cache.groups[group]
        assert work.frames is not None
        first = page = self._first(page, group)
        keys, pages = cache.keys(work.tokens[: work.prompt]), range(first, max(first, stop))
        staging = self._stagings.groups[group]
        for asked, frame, count in placed_parts(keys, group, pages, work.frames[group], staging.frames_max):
            with staging.receive(frame, count) as rows:
                found = one.get(asked, out=rows)
            page += found.pages
            if found.pages < count:
                break
        return page, (page - first) * one.page_bytes
