"""Migration: a running answer goes on at another engine; its client keeps its stream.

What has to move is in the pool: full pages, which the other engine loads as for any prompt; the tokens of the last page
are computed again there, fewer than a page. The sampler has no state beside its position.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from engine.pool import Pool
from engine.request import Event, Failed, Finished, Request, Role, Token, Usage
from engine.sequence import Sequence, State
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, VersionMismatch

ASK_S = 10.0


class Target(Protocol):
    """The other engine, as far as a migration needs it. ``EngineClient`` is one."""

    def submit(self, request: Request) -> Iterator[Event]:
        """Have it answer."""
        ...

    def status(self) -> dict[str, Any]:
        """What it is."""
        ...


class Migration:
    """One request on its way. ``ask`` returns as soon as the request has left, or is known not to."""

    def __init__(self, target: Any, address: str, pool: Pool) -> None:
        self._target: Target = target
        self._address = address
        self._pool = pool

    def ask(
        self,
        sequence: Sequence,
        post: Callable[[Callable[[], None]], None],
        left: Callable[[Sequence], None],
        gone: Callable[[Sequence], None],
    ) -> bool:
        """Let it leave between two steps. False where it does not run (any more). ``left`` and ``gone`` are called by
        the engine's thread: when its frames are free, and when its client has been told the end.

        Raises:
            NodeUnavailable, VersionMismatch, InvalidRequest: the other engine is not there, or not for this; the
                request stays.
            DeadlineExceeded: the engine's thread did not come to it.
        """
        self._check()
        return self._leave(sequence, post, left, gone)

    def _check(self) -> None:
        """Whether the other engine would take it: what has left does not come back."""
        status = self._target.status()
        if status["role"] == Role.PREFILL:
            raise InvalidRequest("target", f"{self._address} computes prompts for others, and answers none")
        if status["draining"]:
            raise NodeUnavailable(f"{self._address} takes no new requests: it is being drained")
        theirs, ours = status["layout"]["fingerprint"], self._pool.layout.fingerprint.hex()
        if theirs != ours:
            raise VersionMismatch(f"{self._address} has pages of another layout: ours {ours}, theirs {theirs}")

    def _leave(
        self,
        sequence: Sequence,
        post: Callable[[Callable[[], None]], None],
        left: Callable[[Sequence], None],
        gone: Callable[[Sequence], None],
    ) -> bool:
        answer: Future[bool] = Future()

        def leave() -> None:
            if sequence.state is not State.DECODING or sequence.arrivals is not None:
                answer.set_result(False)
                return
            self._pool.append(sequence)
            sequence.state = State.LEFT
            left(sequence)

            def pass_on() -> None:
                self._pass_on(sequence)
                post(lambda: gone(sequence))

            threading.Thread(target=pass_on, name="engine-migrated", daemon=True).start()
            answer.set_result(True)

        post(leave)
        try:
            return answer.result(ASK_S)
        except TimeoutError:
            raise DeadlineExceeded(f"request {sequence.id} did not leave within {ASK_S:g} s") from None

    def _pass_on(self, sequence: Sequence) -> None:
        """Tokens that the other engine makes, as if they were ours."""
        left_s = max(0.001, sequence.deadline_s - time.monotonic())
        request = replace(
            sequence.request,
            id=f"{sequence.id}.{time.monotonic_ns():x}",
            tokens=sequence.tokens[: sequence.length].copy(),
            generated=sequence.generated,
            deadline_s=left_s,
        )
        try:
            for event in self._target.submit(request):
                if sequence.cancelled:
                    sequence.finish("cancelled")
                    return
                match event:
                    case Token():
                        sequence.generated = event.index + 1
                        sequence.tell(event)
                    case Finished():
                        sequence.state = State.ENDED
                        sequence.tell(replace(event, usage=_joined(sequence.usage(), event.usage)))
                        return
                    case Failed():
                        raise event.error
            raise NodeUnavailable(f"engine {self._address} ended an answer without a word")
        except KVStoreError as error:
            sequence.fail(error)


def _joined(here: Usage, there: Usage) -> Usage:
    """What an answer cost both engines: the first token was made here, the last one there."""
    return replace(
        here,
        completion_tokens=there.completion_tokens,
        computed_tokens=here.computed_tokens + there.computed_tokens,
        loaded_bytes=here.loaded_bytes + there.loaded_bytes,
        moved_bytes=here.moved_bytes + there.moved_bytes,
        written_bytes=here.written_bytes + there.written_bytes,
        tpot_ms=there.tpot_ms,
    )
