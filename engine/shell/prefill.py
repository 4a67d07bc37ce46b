"""Prefill: prompts computed chunk by chunk, and what other engines fetch of them while that goes on.

A chunk ends where a page does, unless it is the last one. Its pages are written to the pool layer by layer from the
forward's own hook, so that readers in other processes are at most one layer behind the computation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Mapping

import xxhash

from engine.compute.paged_cache import Slice
from engine.memory import staging
from engine.memory.arena import Arena, runs
from engine.memory.lossy import Lossy
from engine.model.request import Admitted, Done, HandOff, Piece, Progress
from engine.moving.store_side import ChunkWriter, Pool
from engine.shell.sequence import Arrivals, Sequence, State
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable

PIECE_BYTES = 1 << 20


class Chunk:
    """The next tokens of a sequence in one forward.

    Life: made -> ``before`` the forward -> ``layer`` per layer from its hook -> ``after``, which moves the sequence on.
    """

    def __init__(self, sequence: Sequence, budget: int, pool: Pool) -> None:
        assert sequence.frames is not None
        self.sequence = sequence
        self.start = sequence.cached
        self.stop = min(sequence.length, self.start + max(1, budget))
        page_tokens = sequence.page_tokens
        if self.stop < sequence.length and self.stop - self.stop % page_tokens > self.start:
            self.stop -= self.stop % page_tokens
        self.slice = Slice(sequence.frames, self.start, sequence.tokens[self.start : self.stop])
        self._writer: ChunkWriter | None = None
        self._pool = pool

    @property
    def tokens(self) -> int:
        """How many it computes."""
        return self.stop - self.start

    def before(self) -> None:
        """Reserve frames in the pool."""
        self._writer = self._pool.chunk(self.sequence, self.stop // self.sequence.page_tokens)
        if self._writer is not None:
            self._writer.before()

    def layer(self, layer: int) -> None:
        """The layer's KV of this chunk is in the frames."""
        if self._writer is not None:
            self._writer.layer(layer)
        if self.sequence.progress is not None:
            self.sequence.progress.reached(layer, self.stop)

    def after(self, succeeded: bool = True) -> None:
        """The forward is over."""
        if self._writer is not None:
            self._writer.after(succeeded)
        if succeeded:
            self.sequence.cached = self.stop
            prompt = self.sequence.prompt
            self.sequence.spent.computed += min(self.stop, prompt) - min(self.start, prompt)


class Prefills:
    """Prompts computed for other engines: from their admission until fetched, released, or held for too long.

    Threads of the service pull and release; the engine's thread does the rest. A prefill is over when it has failed, or
    is done and released or held for too long; its frames return when nobody pulls any more.
    """

    def __init__(self, arena: Arena, pool: Pool, codecs: Mapping[str, Lossy | None]) -> None:
        self._arena = arena
        self._pool = pool
        self._codecs = codecs
        self._lock = threading.Lock()
        self._known: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._known)

    def sequences(self) -> list[Sequence]:
        """All that are known."""
        with self._lock:
            return list(self._known.values())

    def admit(self, sequence: Sequence, hold_s: float) -> None:
        """Know it from now on; its id is no other's."""
        sequence.progress = Arrivals(self._pool.layout.layers)
        sequence.hold_s = hold_s
        with self._lock:
            self._known[sequence.id] = sequence

    def loaded(self, sequence: Sequence) -> None:
        """Its stored prefix is in the frames: tell who asked."""
        assert sequence.progress is not None
        sequence.progress.all_reached(sequence.cached // sequence.page_tokens * sequence.page_tokens)  # pages, whole
        sequence.tell(Admitted(sequence.prompt, dict(sequence.spent.cached), sequence.lossy))

    def advanced(self, sequence: Sequence, tokens_per_s: float) -> None:
        """A chunk of it is computed."""
        sequence.tell(Progress(sequence.cached, tokens_per_s))

    def complete(self, sequence: Sequence, first_token: int) -> None:
        """Tell who asked what to go on with, and hold the frames."""
        page_tokens = sequence.page_tokens
        pages = sequence.prompt // page_tokens
        keys = sequence.cache.keys(sequence.tokens[: sequence.prompt]).links if sequence.cache and pages else []
        handoff = HandOff(
            request_id=sequence.id,
            pages=tuple(keys),
            stored=self._pool.written(sequence, pages),
            tail_tokens=sequence.prompt - pages * page_tokens,
            first_token=first_token,
            generated=sequence.generated + 1,
            cached_tokens=dict(sequence.spent.cached),
            computed_tokens=sequence.spent.computed,
            prefill_ms=1e3 * (time.monotonic() - sequence.begun_s),
        )
        with self._lock:
            sequence.state = State.HELD
            sequence.held_until_s = time.monotonic() + sequence.hold_s
        sequence.tell(Done(handoff))

    def release(self, request_id: str) -> bool:
        """Whoever asked has everything, or wants no more of it. Any thread."""
        with self._lock:
            sequence = self._known.get(request_id)
            if sequence is not None:
                sequence.cancelled = True
            return sequence is not None

    def failed(self, sequence: Sequence) -> None:
        """It has ended and will not be completed: wake who pulls."""
        assert sequence.progress is not None and sequence.state is State.ENDED
        sequence.progress.fail(NodeUnavailable("it was cancelled, or too late"))

    def over(self, now_s: float) -> list[Sequence]:
        """Those whose frames may return. Each is told once."""
        with self._lock:
            over = [one for one in self._known.values() if one.pulls == 0 and _is_over(one, now_s)]
            for sequence in over:
                del self._known[sequence.id]
            return over

    # --- pulling: threads of the service ------------------------------------------------------------------------------

    def pull(self, request_id: str, token_start: int, codec: str, timeout_s: float) -> Generator[Piece, None, None]:
        """Everything from ``token_start`` on, chunk by chunk and layer by layer as it is computed.

        Raises:
            InvalidRequest: no such prefill, a start inside a page or beyond the prompt, an unknown codec.
            NodeUnavailable: the prefill failed or was given up.
            DeadlineExceeded: a layer was not ready within ``timeout_s``.
        """
        if codec not in self._codecs:
            raise InvalidRequest("codec", f"{codec!r} is not one of {', '.join(self._codecs)}")
        with self._lock:
            sequence = self._known.get(request_id)
            if sequence is None or sequence.cancelled:
                raise InvalidRequest("request_id", f"no prefill {request_id!r} is held here")
            if token_start % sequence.page_tokens or not 0 <= token_start < sequence.prompt:
                raise InvalidRequest("token_start", f"{token_start} begins no page of this prompt")
            sequence.pulls += 1
        try:
            yield from self._pieces(sequence, token_start, self._codecs[codec], time.monotonic() + timeout_s)
        finally:
            with self._lock:
                sequence.pulls -= 1

    def _pieces(self, sequence: Sequence, position: int, codec: Lossy | None, deadline_s: float) -> Iterator[Piece]:
        progress = sequence.progress
        assert progress is not None
        layers = self._pool.layout.layers
        while position < sequence.prompt:
            self._await(sequence, 0, position + 1, deadline_s)
            stop = min(progress.tokens(0), sequence.prompt)
            for layer in range(layers):
                self._await(sequence, layer, stop, deadline_s)
                yield from self._layer(sequence, layer, position, stop, codec)
            position = stop

    def _await(self, sequence: Sequence, layer: int, tokens: int, deadline_s: float) -> None:
        progress = sequence.progress
        assert progress is not None
        if not progress.wait(layer, tokens, deadline_s):
            if progress.failure is not None:
                raise NodeUnavailable(f"prefill {sequence.id} was given up: {progress.failure}")
            raise DeadlineExceeded(f"layer {layer} of {tokens} tokens of {sequence.id} was not computed in time")

    def _layer(self, sequence: Sequence, layer: int, start: int, stop: int, codec: Lossy | None) -> Iterator[Piece]:
        assert sequence.frames is not None
        page_tokens = sequence.page_tokens
        first, last = start // page_tokens, stop // page_tokens
        step = max(1, PIECE_BYTES // self._pool.layout.layer_bytes)
        for index, frame, count in runs(sequence.frames[first:last]):
            for done in range(0, count, step):
                some = min(step, count - done)
                rows = staging.send_layer(self._arena, frame + done, some, layer)
                data = (rows if codec is None else codec.encode(rows)).tobytes()
                token_start = (first + index + done) * page_tokens
                yield Piece(layer, token_start, some * page_tokens, data, xxhash.xxh3_64_intdigest(data))
        if rest := stop - last * page_tokens:
            rows = staging.send_tail(self._arena, int(sequence.frames[last]), layer, rest)
            data = (rows if codec is None else codec.encode(rows)).tobytes()
            yield Piece(layer, last * page_tokens, rest, data, xxhash.xxh3_64_intdigest(data))


def _is_over(sequence: Sequence, now_s: float) -> bool:
    held = sequence.state is State.HELD
    return sequence.state is State.ENDED or (held and (sequence.cancelled or sequence.held_until_s <= now_s))
