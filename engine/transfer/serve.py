"""Serving of prefills: other engines pull the KV of prompts, layer by layer while this engine computes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

from engine.compute.kv_arrivals import Arrivals
from engine.memory.arena import runs
from engine.memory.compression import Lossy
from engine.memory.staging import Stagings
from engine.model.piece import Bytes, LocalData, Piece, checksum_of
from engine.pool.work import Work
from engine.state import events as ev
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable

PIECE_BYTES = 1 << 20
BEAT_S = 1.0  # how often a waiting puller gets a sign of life


@dataclass
class _Prefill:
    work: Work
    pulls: int = 0  # the number of pulls that are reading its frames
    released: bool = False  # True once no pull may begin
    closed: bool = False  # True once the engine's state has ended it


class Prefills:
    """The prompts that this engine computes for other engines.

    Life of a prefill: ``add`` -> any number of pulls -> ``release`` or ``close``: no pull may begin -> after ``close``
    and the last pull, ``PullsEnded`` is posted.

    Threads of the service call ``pull`` and ``release``. The engine's thread calls ``close``.
    """

    def __init__(
        self, stagings: Stagings, codecs: Mapping[str, Lossy | None], post: Callable[[ev.Event], None]
    ) -> None:
        self._stagings = stagings
        self._codecs = codecs
        self._post = post
        self._lock = threading.Lock()
        self._prefills: dict[str, _Prefill] = {}

    def __len__(self) -> int:
        return len(self._prefills)

    def add(self, work: Work) -> None:
        """Add a prefill. Its id must be unique."""
        work.progress = Arrivals(self._stagings.layers)
        with self._lock:
            self._prefills[work.id] = _Prefill(work)

    def release(self, request_id: str) -> Work | None:
        """End a prefill because the other engine no longer needs it. Returns None if there is none with this id.

        After this, no pull may begin. Any thread may call this.
        """
        with self._lock:
            prefill = self._prefills.get(request_id)
            if prefill is None:
                return None
            prefill.released = True
            return prefill.work

    def close(self, work: Work) -> None:
        """End a prefill. ``PullsEnded`` follows after the last pull.

        Pulls that wait for a layer fail, because no further layer will be computed.
        """
        assert work.progress is not None
        work.progress.fail(NodeUnavailable("the prefill was cancelled, or its time was over"))
        with self._lock:
            prefill = self._prefills[work.id]
            prefill.released = prefill.closed = True
        self._drop_if_ended(prefill)

    def _drop_if_ended(self, prefill: _Prefill) -> None:
        with self._lock:
            has_ended = prefill.closed and not prefill.pulls and self._prefills.pop(prefill.work.id, None) is not None
        if has_ended:
            self._post(ev.PullsEnded(time.monotonic(), prefill.work.number))

    # --- pulling: threads of the service ------------------------------------------------------------------------------

    def pull(
        self, request_id: str, token_start: int, codec: str, timeout_s: float, beat: Callable[[], None] = lambda: None
    ) -> Generator[Piece, None, None]:
        """Yield the KV, starting at ``token_start``, as it is computed: chunk by chunk, and each chunk layer by layer.

        For a layer with a ring of frames, it yields only KV that is needed to continue after the prompt. A piece may be
        a view of the frames, so it is valid only until the next piece is requested.

        Args:
            beat: called every ``BEAT_S`` while this waits for a layer.

        Raises:
            InvalidRequest: there is no prefill with this id; the start is inside a page, beyond the prompt, or before
                the window; or the codec is unknown.
            NodeUnavailable: the prefill failed or was cancelled.
            DeadlineExceeded: a layer was not computed within ``timeout_s``.
        """
        if codec not in self._codecs:
            raise InvalidRequest("codec", f"must be one of {', '.join(self._codecs)} (got {codec!r})")
        with self._lock:
            prefill = self._prefills.get(request_id)
            if prefill is None or prefill.released:
                raise InvalidRequest("request_id", f"this engine has no prefill {request_id!r}")
            work = prefill.work
            if token_start % work.page_tokens or not 0 <= token_start < work.prompt:
                raise InvalidRequest("token_start", f"must be the start of a page of this prompt (got {token_start})")
            if token_start < min(work.needed_from(work.prompt, group) for group in range(len(work.windows))):
                raise InvalidRequest("token_start", f"{token_start} is before the window: later tokens overwrite it")
            prefill.pulls += 1
        try:
            yield from self._pieces(work, token_start, self._codecs[codec], time.monotonic() + timeout_s, beat)
        finally:
            with self._lock:
                prefill.pulls -= 1
            self._drop_if_ended(prefill)

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
                raise NodeUnavailable(f"prefill {work.id} failed: {progress.failure}")
            if time.monotonic() >= deadline_s:
                raise DeadlineExceeded(f"layer {layer} of {tokens} tokens of {work.id} was not computed in time")
            beat()

    def _layer(self, work: Work, layer: int, start: int, stop: int, codec: Lossy | None) -> Iterator[Piece]:
        assert work.frames is not None
        page_tokens = work.page_tokens
        group, staging, number = self._stagings.at(layer)
        start, table = max(start, work.needed_from(work.prompt, group)), work.frames[group]
        if start >= stop:
            return
        first, last = start // page_tokens, stop // page_tokens
        step = max(1, PIECE_BYTES // staging.arena.layout.layer_bytes)
        for index, frame, count in runs(table[first:last]):
            for offset in range(0, count, step):
                pages = min(step, count - offset)
                rows = staging.send_layer(frame + offset, pages, number)
                yield _piece(layer, (first + index + offset) * page_tokens, pages * page_tokens, rows, codec)
        if tail_tokens := stop - last * page_tokens:
            rows = staging.send_tail(int(table[last]), number, tail_tokens)
            yield _piece(layer, last * page_tokens, tail_tokens, rows, codec)


def _piece(layer: int, token_start: int, tokens: int, rows: Bytes, codec: Lossy | None) -> Piece:
    data = rows if codec is None else codec.encode(rows)
    return Piece(layer, token_start, tokens, LocalData(data), checksum_of([data]))
