"""Migration: another engine continues a running answer, and the client keeps its stream.

No KV is sent. The full pages are in the pool, and the other engine loads them as for any prompt. It computes the tokens
after the last full page again. The sampler has no state other than its position.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from engine.model.request import Event, Failed, Finished, Request, Role, Token, Usage
from engine.pool.work import Work
from engine.state import events as ev
from kvstore import boundary
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable, VersionMismatch
from kvstore.model.layout import Layout

_MIGRATING = boundary.RequestGuard("task/migration")

log = logging.getLogger("kvstore.engine.migration")


class Target(Protocol):
    """The calls to another engine that a migration needs. ``EngineClient`` implements them."""

    def submit(self, request: Request) -> Iterator[Event]:
        """Ask the engine to answer a request."""
        ...

    def cancel(self, request_id: str) -> bool:
        """Cancel a request. Returns True if the engine had one with this id."""
        ...

    def status(self) -> dict[str, Any]:
        """Return the document of ``Engine.status``."""
        ...


class Targets(Protocol):
    """The other engines, by address. ``Peers`` implements this."""

    def __getitem__(self, address: str) -> Any:
        """Return a ``Target``. Raises KVStoreError if the address is not valid."""
        ...


def check_target(target: Target, address: str, layout: Layout) -> None:
    """Check that the other engine takes requests and has the same page layout.

    Raises:
        KVStoreError: the engine is unreachable, or would refuse the answers of this engine.
    """
    status = target.status()
    if status["role"] == Role.PREFILL:
        raise InvalidRequest("target", f"must not have the role prefill (got {address})")
    if status["draining"]:
        raise NodeUnavailable(f"{address} takes no new requests: it is being drained")
    theirs, ours = status["layout"]["fingerprint"], layout.fingerprint.hex()
    if theirs != ours:
        raise VersionMismatch(f"{address} has pages of another layout: ours {ours}, theirs {theirs}")


class Migration:
    """One answer that moves to another engine.

    Life: ``start`` -> ``PassTaken`` once the other engine has sent its first event -> ``PassedOn`` at the end of the
    answer. If the other engine does not begin, ``NotTaken`` is the only event.
    """

    def __init__(self, work: Work, targets: Targets, address: str, post: Callable[[ev.Event], None]) -> None:
        self._work = work
        self._targets = targets
        self._address = address
        self._post = post
        self._taken = False  # True once the other engine has sent an event
        self._request = replace(
            work.request,
            id=uuid.uuid4().hex,
            tokens=work.tokens[: work.length].copy(),
            generated=work.generated,
            deadline_s=max(0.001, work.deadline_s - time.monotonic()),
        )

    def start(self) -> None:
        """Ask the other engine to continue the answer. Returns at once."""
        try:
            threading.Thread(target=self._run, name="engine-migrated", daemon=True).start()
        except RuntimeError as error:  # the machine has no more threads
            failure = NodeUnavailable(f"no thread for a migration: {error}")
            self._post(ev.NotTaken(time.monotonic(), self._work.number, failure))

    def cancel(self) -> None:
        """Cancel the answer at the other engine. Returns at once."""
        try:
            threading.Thread(target=self._cancel, name="engine-cancel", daemon=True).start()
        except RuntimeError as error:
            log.warning("cannot cancel an answer at %s: %s", self._address, error)

    def _cancel(self) -> None:
        try:
            with _MIGRATING:
                self._targets[self._address].cancel(self._request.id)
        except KVStoreError as error:
            log.warning("cannot cancel an answer at %s: %s", self._address, error)

    def _run(self) -> None:
        failure: KVStoreError | None = None
        try:
            with _MIGRATING:
                self._relay()
        except KVStoreError as error:
            failure = error
            if self._taken:
                self._work.fail(error)
        finally:
            now_s, number = time.monotonic(), self._work.number
            self._post(ev.PassedOn(now_s, number) if self._taken else ev.NotTaken(now_s, number, failure))

    def _relay(self) -> None:
        """Send the other engine's events to the client."""
        for event in self._targets[self._address].submit(self._request):
            if isinstance(event, Failed):
                raise event.error
            if not self._taken and isinstance(event, Finished) and event.reason == "cancelled":
                return
            if not self._taken:
                self._taken = True
                self._post(ev.PassTaken(time.monotonic(), self._work.number))
            if isinstance(event, Token):
                self._work.send(event)
            else:
                self._work.send(replace(event, usage=_total_usage(self._work.usage(), event.usage)))
                return
        raise NodeUnavailable(f"engine {self._address} closed the stream before the end of an answer")


def _total_usage(here: Usage, there: Usage) -> Usage:
    """Return the usage of both engines together. The first token was made here, and the last one there."""
    return replace(
        here,
        completion_tokens=there.completion_tokens,
        computed_tokens=here.computed_tokens + there.computed_tokens,
        loaded_bytes=here.loaded_bytes + there.loaded_bytes,
        moved_bytes=here.moved_bytes + there.moved_bytes,
        written_bytes=here.written_bytes + there.written_bytes,
        prefill_ms=here.prefill_ms + there.prefill_ms,
        tpot_ms=there.tpot_ms,
    )
