"""Serve: lets other engines pull prompts that are computed for them, layer by layer while that goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

from engine.compute.kv_arrivals import Arrivals
from engine.memory.arena import runs
from engine.memory.compression import Lossy
from engine.memory.staging import Stagings
from engine.model.piece import Bytes, HeldData, Piece, checksum_of
from engine.pool.work import Work
from engine.state import events as ev
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable

PIECE_BYTES = 1 << 20
BEAT_S = 1.0  # how often a puller hears from us while a layer is being computed


@dataclass
class _Prefill:
    work: Work
    pulls: int = 0  # transfers out of its frames under way
    released: bool = False
    closed: bool = False


class Prefills:
    """Prompts computed for other engines: from their admission until ``PullsEnded``.

    Threads of the service pull and release; the engine's thread does the rest.
    """

    def __init__(
        self, stagings: Stagings, codecs: Mapping[str, Lossy | None], post: Callable[[ev.Event], None]
    ) -> None:
        self._stagings = stagings
        self._codecs = codecs
        self._post = post
        self._lock = threading.Lock()
        self._known: dict[str, _Prefill] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, work: Work) -> None:
        """Add a prefill; its id is unique."""
        work.progress = Arrivals(self._stagings.layers)
        with self._lock:
            self._known[work.id] = _Prefill(work)

    def release(self, request_id: str) -> Work | None:
        """End a prefill at the request of the engine that asked: no pull may begin. Any thread. None: unknown."""
        with self._lock:
            prefill = self._known.get(request_id)
            if prefill is None:
                return None
            prefill.released = True
            return prefill.work

    def close(self, work: Work) -> None:
        """End a prefill. ``PullsEnded`` follows when no engine pulls any more; a puller that waits for a layer that is
        not there is told that it will not come.
        """
        assert work.progress is not None
        work.progress.fail(NodeUnavailable("it was cancelled, or too late"))
        with self._lock:
            prefill = self._known[work.id]
            prefill.released = prefill.closed = True
        self._look(prefill)

    def _look(self, prefill: _Prefill) -> None:
        with self._lock:
            over = prefill.closed and not prefill.pulls and self._known.pop(prefill.work.id, None) is not None
        if over:
            self._post(ev.PullsEnded(time.monotonic(), prefill.work.number))

    # --- pulling: threads of the service ------------------------------------------------------------------------------

    def pull(
        self, request_id: str, token_start: int, codec: str, timeout_s: float, beat: Callable[[], None] = lambda: None
    ) -> Generator[Piece, None, None]:
        """Everything from ``token_start`` on, chunk by chunk and layer by layer as it is computed; for layers with a
        ring of frames only what their window needs behind the prompt.

        The data is in the frames themselves if possible: it is valid until the next piece is requested.

        Args:
            beat: called every ``BEAT_S`` while waiting for a layer.

        Raises:
            InvalidRequest: no such prefill, a start inside a page or beyond the prompt, or before what the window
                needs, an unknown codec.
            NodeUnavailable: the prefill failed or was given up.
            DeadlineExceeded: a layer was not ready within ``timeout_s``.
        """
        if codec not in self._codecs:
            raise InvalidRequest("codec", f"{codec!r} is not one of {', '.join(self._codecs)}")
        with self._lock:
            prefill = self._known.get(request_id)
            if prefill is None or prefill.released:
                raise InvalidRequest("request_id", f"no prefill {request_id!r} is held here")
            work = prefill.work
            if token_start % work.page_tokens or not 0 <= token_start < work.prompt:
                raise InvalidRequest("token_start", f"{token_start} is not the start of a page of this prompt")
            if token_start < min(work.needed(work.prompt, group) for group in range(len(work.windows))):
                raise InvalidRequest("token_start", f"{token_start} is out of the window: it may be overwritten")
            prefill.pulls += 1
        try:
            yield from self._pieces(work, token_start, self._codecs[codec], time.monotonic() + timeout_s, beat)
        finally:
            with self._lock:
                prefill.pulls -= 1
            self._look(prefill)

    def _pieces(
        self, work: Work, position: int, codec: Lossy | None, deadline_s: float, beat: Callable[[], None]
    ) -> Iterator[Piece]:
        progress = work.progress
        assert progress is not None
        layers = self._stagings.layers
        while position < work.prompt:
            self._await(work, 0, position + 1, deadline_s, beat)
            stop = min(progress.tokens(0), work.prompt)
            for layer in range(layers):
                self._await(work, layer, stop, deadline_s, beat)
                yield from self._layer(work, layer, position, stop, codec)
            position = stop

    def _await(self, work: Work, layer: int, tokens: int, deadline_s: float, beat: Callable[[], None]) -> None:
        progress = work.progress
        assert progress is not None
        while not progress.wait(layer, tokens, min(deadline_s, time.monotonic() + BEAT_S)):
            if progress.failure is not None:
                raise NodeUnavailable(f"prefill {work.id} was given up: {progress.failure}")
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"layer {layer} of {tokens} tokens of {work.id} was not computed in time")
            beat()

    def _layer(self, work: Work, layer: int, start: int, stop: int, codec: Lossy | None) -> Iterator[Piece]:
        assert work.frames is not None
        page_tokens = work.page_tokens
        group, staging, number = self._stagings.at(layer)
        start, table = max(start, work.needed(work.prompt, group)), work.frames[group]
        if start >= stop:
            return
        first, last = start // page_tokens, stop // page_tokens
        step = max(1, PIECE_BYTES // staging.arena.layout.layer_bytes)
        for index, frame, count in runs(table[first:last]):
            for done in range(0, count, step):
                some = min(step, count - done)
                rows = staging.send_layer(frame + done, some, number)
                yield _piece(layer, (first + index + done) * page_tokens, some * page_tokens, rows, codec)
        if rest := stop - last * page_tokens:
            rows = staging.send_tail(int(table[last]), number, rest)
            yield _piece(layer, last * page_tokens, rest, rows, codec)


def _piece(layer: int, token_start: int, tokens: int, rows: Bytes, codec: Lossy | None) -> Piece:
    coded = rows if codec is None else codec.encode(rows)
    return Piece(layer, token_start, tokens, HeldData(coded), checksum_of([coded]))
