"""Fetch: one prompt computed by another engine and brought into the frames of a sequence here.

The engine that decodes leads: it asks a prefill engine to compute, and moves the KV itself, out of that engine's arena
or, full pages, out of the pool. What goes wrong there costs time only: the next engine is asked, or the prompt is
computed here.

Eager: both begin together, and layers arrive as they are computed. Lazy: the KV is fetched once the prompt is computed
and there are frames for it. Whole: the KV moves in one piece, after the last layer.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing, nullcontext

import numpy as np
import xxhash

from engine.memory import staging
from engine.memory.arena import Arena, runs
from engine.memory.lossy import Lossy
from engine.model.request import Admitted, Done, Failed, Grain, HandOff, Piece, Progress, Request, Source
from engine.moving.link import Link
from engine.moving.peers import Peer, Pieces
from engine.shell.sequence import Arrivals, Sequence
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable
from kvstore.model.layout import Layout

LOOK_S = 0.2  # how soon a thread that waits for a layer notices that it need not
CONNECT_S = 10.0  # for a prefill engine to begin

log = logging.getLogger("kvstore.engine.handoff")


class Fetch:
    """One attempt at one prefill engine.

    Life: made -> ``begin`` (it computes) -> ``move`` once the sequence has frames (at once, or when computed) -> the
    arrivals are complete, or failed. ``give_up`` ends it early. ``changed`` is called, from a thread of ours, when
    there is something new: ``handoff`` or ``failure``.
    """

    def __init__(
        self,
        sequence: Sequence,
        address: str,
        peer: Peer,
        arena: Arena,
        link: Link,
        codec: tuple[str, Lossy | None],
        source: Source,
        grain: Grain,
        chunk_tokens: int,
        vocab_size: int,
        changed: Callable[[], None],
    ) -> None:
        self.sequence = sequence
        self.address = address
        self.arrivals = Arrivals(arena.layout.layers)
        self.handoff: HandOff | None = None
        self.failure: KVStoreError | None = None
        self.moving = False
        self._peer = peer
        self._arena = arena
        self._link = link
        self._codec_name, self._codec = codec
        exact = sequence.cache is not None and codec[1] is None
        self._source = source if exact else Source.ARENA  # lossy pages are in the pool under another layout
        self._grain = grain
        self._chunk_tokens = chunk_tokens  # of a step here; the other engine is taken to be set up alike
        self._vocab_size = vocab_size
        self._changed = changed
        self._admitted = threading.Event()
        self._done = threading.Event()
        self._given_up = False
        self._mover: threading.Thread | None = None
        self._start = 0
        self._wire_id = uuid.uuid4().hex  # a second attempt is another prefill there

    # --- called by the engine's thread ------------------------------------------------------------------------------

    def begin(self, layout: Layout, hold_s: float) -> None:
        """Have it computed. Returns at once."""
        self._run(self._compute, layout, hold_s)

    def move(self) -> None:
        """Bring it into the sequence's frames, from what is cached there on. Returns at once."""
        self.moving = True
        self._start = self.sequence.cached
        self.arrivals.all_reached(self._start)
        self._mover = self._run(self._move)

    def give_up(self) -> None:
        """Nobody wants it any more."""
        self._given_up = True
        self._fail(NodeUnavailable("the hand-off was given up"))
        self._run(self._release)

    @property
    def complete(self) -> bool:
        """Whether everything is here."""
        return self.handoff is not None and self.arrivals.layers_with(self.sequence.prompt) == self._arena.layout.layers

    @property
    def idle(self) -> bool:
        """Whether no thread of ours can write into the frames any more."""
        return self._mover is None or not self._mover.is_alive()

    def _run(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name="engine-handoff", daemon=True)
        thread.start()
        return thread

    # --- threads ----------------------------------------------------------------------------------------------------

    def _compute(self, layout: Layout, hold_s: float) -> None:
        sequence = self.sequence
        request = _for_prefill(sequence, self._wire_id)
        try:
            timeout_s = sequence.deadline_s - time.monotonic()
            for event in self._peer.prefill(request, layout, hold_s, timeout_s=timeout_s):
                if self._stopped():  # given up before that engine knew of it
                    self._release()
                    return
                match event:
                    case Admitted():
                        sequence.lossy = sequence.lossy or event.lossy
                        sequence.spent.prefill_cached = dict(event.cached_tokens)
                        self._admitted.set()
                    case Progress():
                        pass
                    case Done():
                        self._check(event.handoff)
                        self.handoff = event.handoff
                        self._done.set()
                        self._changed()
                        return
                    case Failed():
                        raise event.error
            raise NodeUnavailable(f"engine {self.address} ended a prefill without a word")
        except KVStoreError as error:
            self._fail(error)
            self._release()  # it may have finished all the same, and its last word was lost

    def _move(self) -> None:
        try:
            if not self._admitted.wait(min(CONNECT_S, self._left_s())):
                raise DeadlineExceeded(f"engine {self.address} did not begin within {CONNECT_S:g} s")
            if self._grain is Grain.WHOLE:
                self._await(self._done)
                self._move_whole()
            elif self._source is Source.DRAM:
                self._move_from_pool()
            elif self._start < self.sequence.prompt:
                self._take(self._pull(self._start))
            if self.arrivals.layers_with(self.sequence.prompt) < self._arena.layout.layers:
                raise NodeUnavailable(f"engine {self.address} sent less than all of a prompt")
            self._await(self._done)  # released earlier, it would count as given up
            self._changed()
        except KVStoreError as error:
            self._fail(error)
        self._run(self._release)  # nobody waits for that

    def _check(self, handoff: HandOff) -> None:
        """Another engine's word is not taken for the tokens and pages of ours."""
        cache, sequence = self.sequence.cache, self.sequence
        if not 0 <= handoff.first_token < self._vocab_size:
            raise InvalidRequest("first_token", f"{handoff.first_token} is no token of this model")
        ours = cache.keys(sequence.tokens[: sequence.prompt]).links if cache is not None and handoff.pages else []
        if ours and list(handoff.pages) != ours:
            raise InvalidRequest("pages", f"engine {self.address} names other pages than this prompt has")
        if not 0 <= handoff.stored <= sequence.prompt // sequence.page_tokens:
            raise InvalidRequest("stored", f"{handoff.stored} pages are more than this prompt has")

    def _release(self) -> None:
        try:
            self._peer.release(self._wire_id)
        except KVStoreError as error:  # it lets go by itself, later
            log.debug("engine %s was not told to release: %s", self.address, error)

    def _fail(self, error: KVStoreError) -> None:
        self.failure = self.failure or error
        self._admitted.set()
        self._done.set()
        self.arrivals.fail(self.failure)
        self._changed()

    def _left_s(self) -> float:
        return max(0.0, self.sequence.deadline_s - time.monotonic())

    def _stopped(self) -> bool:
        return self._given_up or self.failure is not None

    def _await(self, event: threading.Event) -> None:
        if not event.wait(self._left_s()) or self.failure is not None:
            raise self.failure or DeadlineExceeded(f"engine {self.address} did not finish a prefill in time")

    # --- out of the other engine's arena ----------------------------------------------------------------------------

    def _pull(self, token_start: int) -> Pieces:
        pieces = self._peer.pull(self._wire_id, token_start, self._codec_name, timeout_s=self._left_s())
        try:
            for piece in pieces:
                if self._stopped():
                    raise self.failure or NodeUnavailable("the hand-off was given up")
                if piece.layer >= self._arena.layout.layers:
                    raise InvalidRequest("layer", f"{self.address} sent layer {piece.layer}, which there is not")
                if xxhash.xxh3_64_intdigest(piece.data) != piece.checksum:
                    raise NodeUnavailable(f"layer {piece.layer} of {self._wire_id} arrived damaged")
                yield piece
        finally:  # or the other engine would hold what is still being pulled until this is collected
            pieces.close()

    def _take(self, pieces: Pieces) -> None:
        with closing(pieces):
            for piece in pieces:
                self._store(piece, self.arrivals.tokens(piece.layer))
                self.arrivals.reached(piece.layer, piece.token_start + piece.tokens)

    def _store(self, piece: Piece, there: int) -> None:
        """Put a piece into the frames, where ``there`` tokens of its layer are."""
        frames, page_tokens = self.sequence.frames, self.sequence.page_tokens
        assert frames is not None
        first, rest = piece.token_start // page_tokens, piece.tokens % page_tokens
        count = piece.tokens // page_tokens
        layout = self._codec.layout if self._codec is not None else self._arena.layout
        inside = piece.token_start <= there and piece.token_start + piece.tokens <= self.sequence.prompt
        whole = piece.token_start % page_tokens == 0 and (not rest or not count) and piece.tokens > 0
        if (
            not inside
            or not whole
            or not 0 <= piece.layer < layout.layers
            or len(piece.data) != layout.kv_heads * piece.tokens * layout.token_bytes
        ):
            raise InvalidRequest("piece", f"engine {self.address} sent what is of no page of this prompt")
        self._link.carry(len(piece.data), self._stopped)
        self.sequence.spent.moved_bytes += len(piece.data)
        data = np.frombuffer(piece.data, np.uint8).reshape(max(1, count), -1)
        if self._codec is not None:
            data = self._codec.decode(data)
            self.sequence.lossy = True
        if rest:
            staging.receive_tail(self._arena, int(frames[first]), piece.layer, rest, data.copy())
            return
        for index, frame, some in runs(frames[first : first + count]):
            staging.receive_layer(self._arena, frame, piece.layer, data[index : index + some])

    # --- out of the pool ----------------------------------------------------------------------------------------------

    def _move_from_pool(self) -> None:
        """Full pages as they are written to the pool; what does not get there, and the tail, out of the arena.

        A chunk's pages at a time, all layers of them, then the next: in that order they are computed.
        """
        sequence = self.sequence
        page_tokens = sequence.page_tokens
        page, full = self._start // page_tokens, sequence.prompt // page_tokens
        group = max(1, self._chunk_tokens // page_tokens)
        while page < full:
            stop = min(page + group, full)
            tail = self._pull(full * page_tokens) if stop == full and sequence.prompt > full * page_tokens else None
            with closing(tail) if tail is not None else nullcontext():
                if not self._read_group(page, stop, tail):
                    self._take(self._pull(page * page_tokens))
                    return
                if tail is not None:  # what of it was computed in a later chunk
                    self._take(tail)
            page = stop
        if full * page_tokens <= self._start < sequence.prompt:
            self._take(self._pull(full * page_tokens))

    def _read_group(self, page: int, stop: int, tail: Pieces | None) -> bool:
        """Read pages layer by layer, with the tail's same layers. False where they are not in the pool."""
        sequence, layout = self.sequence, self._arena.layout
        assert sequence.cache is not None and sequence.frames is not None
        keys = sequence.cache.keys(sequence.tokens[: stop * sequence.page_tokens])[page:stop]
        readers = [
            (sequence.cache.reader(keys[index : index + count], timeout_s=LOOK_S), frame, count)
            for index, frame, count in runs(sequence.frames[page:stop])
        ]
        for layer in range(layout.layers):
            for reader, frame, count in readers:
                with_rows = staging.layer_target(self._arena, frame, count, layer)
                while True:
                    done = self.handoff is not None
                    try:
                        with with_rows() as rows:
                            reader.read_layer(layer, rows)
                        break
                    except DeadlineExceeded:
                        self._still_coming(stop)
                        if done:  # all is written that ever will be: this page had no room, or was evicted already
                            return False
                self._link.carry(count * layout.layer_bytes, self._stopped)
                sequence.spent.moved_bytes += count * layout.layer_bytes
            tokens = stop * sequence.page_tokens
            if tail is not None:
                piece = next(tail, None)
                if piece is None or piece.layer != layer:
                    raise NodeUnavailable(f"engine {self.address} sent layers of a tail out of order")
                self._store(piece, tokens)
                tokens = piece.token_start + piece.tokens
            self.arrivals.reached(layer, tokens)
        return True

    def _still_coming(self, stop: int) -> None:
        if self._stopped():
            raise self.failure or NodeUnavailable("the hand-off was given up")
        if not self._left_s():
            raise DeadlineExceeded(f"page {stop} did not arrive in time")

    def _move_whole(self) -> None:
        """Everything at once, when all of it is computed."""
        sequence = self.sequence
        page_tokens = sequence.page_tokens
        position, moved = self._start, 0
        handoff = self.handoff
        assert handoff is not None and sequence.frames is not None
        if self._source is Source.DRAM and sequence.cache is not None:
            first, full = position // page_tokens, min(handoff.stored, sequence.prompt // page_tokens)
            keys = sequence.cache.keys(sequence.tokens[: sequence.prompt])
            for index, frame, count in runs(sequence.frames[first : max(first, full)]):
                with staging.receive(self._arena, frame, count) as rows:
                    found = sequence.cache.get(keys[first + index : first + index + count], out=rows)
                position += found.tokens
                moved += found.pages * self._arena.layout.page_bytes
                if found.pages < count:
                    break
            self._link.carry(moved, self._stopped)
            sequence.spent.moved_bytes += moved
        arrived = [position] * self._arena.layout.layers
        if position < sequence.prompt:
            with closing(self._pull(position)) as pieces:
                for piece in pieces:
                    self._store(piece, arrived[piece.layer])
                    arrived[piece.layer] = piece.token_start + piece.tokens
        self.arrivals.all_reached(min(arrived))


def _for_prefill(sequence: Sequence, wire_id: str) -> Request:
    """What the prefill engine is asked: the same tokens and sampling, under an id of its own."""
    request = sequence.request
    return Request(
        id=wire_id,
        tokens=request.tokens,
        sampling=request.sampling,
        salt=request.salt,
        adapter=request.adapter,
        generated=request.generated,
        deadline_s=max(0.001, sequence.deadline_s - time.monotonic()),
        use_pool=request.use_pool,
        allow_lossy=request.allow_lossy,
    )
