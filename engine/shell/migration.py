"""Migration: a running answer goes on at another engine; its client keeps its stream.

What has to move is in the pool: full pages, which the other engine loads as for any prompt; the tokens of the last page
are computed again there, fewer than a page. The sampler has no state beside its position.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from engine.model.request import Event, Failed, Finished, Request, Role, Token, Usage
from engine.moving.store_side import Pool
from engine.shell.sequence import Sequence, State
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, VersionMismatch

ASK_S = 10.0


class Target(Protocol):
    """The other engine, as far as a migration needs it. ``EngineClient`` is one."""

    def submit(self, request: Request) -> Iterator[Event]:
        """Have it answer."""
        ...

    def cancel(self, request_id: str) -> bool:
        """End that."""
        ...

    def status(self) -> dict[str, Any]:
        """What it is."""
        ...


class Migration:
    """One request on its way. Until the other engine has said its first word, its frames stay and it can come back."""

    def __init__(self, target: Any, address: str, pool: Pool) -> None:
        self._target: Target = target
        self._address = address
        self._pool = pool
        self._id = uuid.uuid4().hex

    def ask(
        self,
        sequence: Sequence,
        post: Callable[[Callable[[], None]], None],
        left: Callable[[Sequence], None],
        gone: Callable[[Sequence], None],
    ) -> bool:
        """Let it go on there. False where it does not run here (any more). ``left`` and ``gone`` are called by the
        engine's thread: when its frames are no longer needed, and when its client has been told the end.

        Raises:
            KVStoreError: the other engine is not there, or does not take it; it goes on here.
            DeadlineExceeded: it was not taken in time; it goes on here.
        """
        self._check()
        taken: Future[bool] = Future()

        def leave() -> None:
            if not taken.set_running_or_notify_cancel():
                return  # whoever asked has given up
            if sequence.state is not State.DECODING or sequence.arrivals is not None:
                taken.set_result(False)
                return
            self._pool.append(sequence)
            sequence.state = State.LEFT
            threading.Thread(target=pass_on, name="engine-migrated", daemon=True).start()

        def pass_on() -> None:
            try:
                if self._pass_on(sequence, lambda: post(lambda: left(sequence)), taken):
                    post(lambda: gone(sequence))
                else:
                    post(lambda: _back(sequence))
            finally:
                if not taken.done():  # cancelled it cannot be: it is running
                    taken.set_result(False)

        post(leave)
        try:
            return taken.result(ASK_S)
        except TimeoutError:
            taken.cancel()
            self._target.cancel(self._id)  # its stream ends then, and the request comes back
            raise DeadlineExceeded(f"{self._address} did not take request {sequence.id} within {ASK_S:g} s") from None

    def _check(self) -> None:
        """Whether the other engine is one that would take it."""
        status = self._target.status()
        if status["role"] == Role.PREFILL:
            raise InvalidRequest("target", f"{self._address} computes prompts for others, and answers none")
        if status["draining"]:
            raise NodeUnavailable(f"{self._address} takes no new requests: it is being drained")
        theirs, ours = status["layout"]["fingerprint"], self._pool.layout.fingerprint.hex()
        if theirs != ours:
            raise VersionMismatch(f"{self._address} has pages of another layout: ours {ours}, theirs {theirs}")

    def _pass_on(self, sequence: Sequence, left: Callable[[], None], taken: Future[bool]) -> bool:
        """Tokens that the other engine makes, as if they were ours. False where it did not begin."""
        request = replace(
            sequence.request,
            id=self._id,
            tokens=sequence.tokens[: sequence.length].copy(),
            generated=sequence.generated,
            deadline_s=max(0.001, sequence.deadline_s - time.monotonic()),
        )
        begun = False
        try:
            for event in self._target.submit(request):
                if isinstance(event, Failed):
                    raise event.error
                if not begun and isinstance(event, Finished) and event.reason == "cancelled":
                    return False
                if not begun:
                    begun = True
                    sequence.elsewhere = lambda: self._target.cancel(self._id)
                    if sequence.cancelled:  # while it was on its way
                        self._target.cancel(self._id)
                    left()
                    if not taken.done():
                        taken.set_result(True)
                if isinstance(event, Token):
                    sequence.generated = event.index + 1
                    sequence.tell(event)
                else:
                    sequence.tell(replace(event, usage=_joined(sequence.usage(), event.usage)))
                    sequence.state = State.ENDED
                    return True
            raise NodeUnavailable(f"engine {self._address} ended an answer without a word")
        except KVStoreError as error:
            if begun:
                sequence.fail(error)
            elif not taken.done():
                taken.set_exception(error)
            return begun


def _back(sequence: Sequence) -> None:
    """It was not taken: it goes on here."""
    if sequence.state is State.LEFT:
        sequence.state = State.DECODING


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
