"""Migration: a running answer continues at another engine; its client keeps its stream.

What has to move is in the pool: full pages, which the other engine loads as for any prompt; the tokens of the last page
are computed again there, fewer than a page. The sampler has no state other than its position.
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
    """The other engine, as a migration uses it. ``EngineClient`` is one."""

    def submit(self, request: Request) -> Iterator[Event]:
        """Ask it to answer."""
        ...

    def cancel(self, request_id: str) -> bool:
        """End that."""
        ...

    def status(self) -> dict[str, Any]:
        """Its description of itself."""
        ...


class Targets(Protocol):
    """All other engines, by address. ``Peers`` is one."""

    def __getitem__(self, address: str) -> Any:
        """A ``Target``; raises KVStoreError if the address is not valid."""
        ...


def check_target(target: Target, address: str, layout: Layout) -> None:
    """Check that the other engine would continue answers.

    Raises:
        KVStoreError: it is not there, or would not.
    """
    status = target.status()
    if status["role"] == Role.PREFILL:
        raise InvalidRequest("target", f"{address} computes prompts for others, and answers no requests")
    if status["draining"]:
        raise NodeUnavailable(f"{address} takes no new requests: it is being drained")
    theirs, ours = status["layout"]["fingerprint"], layout.fingerprint.hex()
    if theirs != ours:
        raise VersionMismatch(f"{address} has pages of another layout: ours {ours}, theirs {theirs}")


class Migration:
    """One request on its way: ``start`` -> ``NotTaken``, or ``PassTaken`` and then ``PassedOn``."""

    def __init__(self, work: Work, targets: Targets, address: str, post: Callable[[ev.Event], None]) -> None:
        self._work = work
        self._targets = targets
        self._address = address
        self._post = post
        self._begun = False  # the other engine has it
        self._request = replace(
            work.request,
            id=uuid.uuid4().hex,
            tokens=work.tokens[: work.length].copy(),
            generated=work.generated,
            deadline_s=max(0.001, work.deadline_s - time.monotonic()),
        )

    def start(self) -> None:
        """Let it continue there. Returns at once."""
        try:
            threading.Thread(target=self._run, name="engine-migrated", daemon=True).start()
        except RuntimeError as error:  # the machine has no more threads
            failure = NodeUnavailable(f"no thread for a migration: {error}")
            self._post(ev.NotTaken(time.monotonic(), self._work.number, failure))

    def cancel(self) -> None:
        """End it there. Returns at once."""
        try:
            threading.Thread(target=self._cancel, name="engine-cancel", daemon=True).start()
        except RuntimeError as error:
            log.warning("an answer that continued elsewhere was not cancelled there: %s", error)

    def _cancel(self) -> None:
        try:
            with _MIGRATING:
                self._targets[self._address].cancel(self._request.id)
        except KVStoreError as error:
            log.warning("an answer that continued elsewhere was not cancelled there: %s", error)

    def _run(self) -> None:
        failure: KVStoreError | None = None
        try:
            with _MIGRATING:
                self._follow()
        except KVStoreError as error:
            failure = error
            if self._begun:
                self._work.fail(error)
        finally:
            now_s, number = time.monotonic(), self._work.number
            self._post(ev.PassedOn(now_s, number) if self._begun else ev.NotTaken(now_s, number, failure))

    def _follow(self) -> None:
        """Pass on the other engine's replies."""
        for event in self._targets[self._address].submit(self._request):
            if isinstance(event, Failed):
                raise event.error
            if not self._begun and isinstance(event, Finished) and event.reason == "cancelled":
                return
            if not self._begun:
                self._begun = True
                self._post(ev.PassTaken(time.monotonic(), self._work.number))
            if isinstance(event, Token):
                self._work.tell(event)
            else:
                self._work.tell(replace(event, usage=_joined(self._work.usage(), event.usage)))
                return
        raise NodeUnavailable(f"engine {self._address} closed the stream before the end of an answer")


def _joined(here: Usage, there: Usage) -> Usage:
    """The cost of an answer at both engines: the first token was made here, the last one there."""
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
