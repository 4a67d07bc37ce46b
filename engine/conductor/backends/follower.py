"""BackendFollower: presents a back end as one of a conductor's engines.

The follower asks the back end for its models once a second. A back end that refuses twice, or does not answer for
``DEAD_S``, counts as lost. Its running answers then continue on other engines if possible, and the index forgets its
pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from engine.conductor.backends.kv_intake import KvIntake
from engine.conductor.backends.link import BackendLink
from engine.conductor.backends.settings import BYTES, BackendSettings
from engine.conductor.links import KnownEngine
from engine.conductor.state import events as ev
from engine.conductor.state.engine_table import EngineAbout, LoadReport
from engine.model.request import Role
from kvstore import boundary
from kvstore.cluster.directory import AnnounceBatch
from kvstore.errors import DeadlineExceeded, KVStoreError, NodeUnavailable

POLL_S: Final = 1.0  # between two polls
RETRY_S: Final = 0.2  # between the first failed poll and the next one
STATUS_S: Final = 3.0  # deadline of a poll
DEAD_S: Final = 10.0  # a back end that is silent for longer counts as lost
REFUSALS_MAX: Final = 2  # polls in a row that a back end may refuse before it counts as lost

_POLL = boundary.RequestGuard("task/ask")

log = logging.getLogger("kvstore.conductor")


class BackendFollower:
    """Follows one back end while ``follow`` runs. Belongs to one event loop.

    Args:
        engines: the conductor's engines, by name. The back end is among them while it is available.
        counts: counts its KV events, by outcome.
        handle: is called with each event that follows.

    Raises:
        InvalidRequest: the file with its key or its certificate authorities cannot be read, or a package is missing.
    """

    def __init__(
        self,
        settings: BackendSettings,
        engines: dict[str, KnownEngine],
        counts: Counter[str],
        handle: Callable[[ev.ConductorEvent], None],
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._handle = handle
        self._link = BackendLink(settings)
        self._intake = KvIntake(settings, layout_of(settings), counts, self._report_pages)
        self._intake_task: asyncio.Task[None] | None = None
        self._refusals = 0  # refused polls since the last answer
        self._answered_s = time.monotonic()

    async def follow(self, on_poll: Callable[[], None]) -> None:
        """Follow the back end until cancelled. ``on_poll`` is called after every poll, answered or not."""
        name = self._settings.name
        try:
            while True:
                if name in self._engines:
                    self._handle(ev.ReportRequested(time.monotonic(), name))
                try:
                    with _POLL:
                        self._take_models(await self._link.models(STATUS_S))
                except KVStoreError as error:
                    await self._handle_failure(error)
                on_poll()
                await asyncio.sleep(RETRY_S if self._refusals == 1 else POLL_S)
        finally:
            await self._remove()
            await self._link.retire()

    def restart_stream(self) -> None:
        """Start a new stream of the back end's pages. It begins with all pages."""
        self._intake.restart_due = True

    def _report_pages(self, batch: AnnounceBatch) -> None:
        self._handle(ev.PagesReported(time.monotonic(), batch))

    def _take_models(self, models: list[dict[str, Any]]) -> None:
        """Handle an answered poll. Raises NodeUnavailable if the answer does not suffice."""
        about = self._about(models)
        now_s, name, speeds = time.monotonic(), self._settings.name, self._link.speeds
        self._refusals, self._answered_s = 0, now_s
        known = self._engines.get(name)
        if known is None or known.about != about:
            self._link.model = about.model
            path = None if self._settings.tokenizer == BYTES else self._settings.tokenizer
            self._engines[name] = KnownEngine(about, self._link, None, path, speeds)
            self._handle(ev.EngineFound(now_s, about, Role.BOTH))
        if known is None:
            log.info("%s is available, with %s", name, about.model)
            if self._settings.events:
                loop = boundary.task_loop("task/kv events", self._intake.run)
                self._intake_task = asyncio.create_task(loop, name=f"kv events of {name}")
        report = LoadReport(
            role=Role.BOTH,
            running=self._link.running,
            prefill_tokens_per_s=speeds.tokens_per_s,
            step_s=speeds.step_s,
        )
        self._handle(ev.LoadReported(now_s, name, report))

    def _about(self, models: list[dict[str, Any]]) -> EngineAbout:
        """Return the description of the back end.

        Raises:
            NodeUnavailable: it does not serve the model, or it does not report the size of its context.
        """
        settings = self._settings
        matches = [each for each in models if settings.model in ("", each["id"])]
        if not matches:
            raise NodeUnavailable(f"{settings.name} does not list {settings.model or 'a model'}")
        reported = matches[0].get("max_model_len")
        context = settings.context or (reported if type(reported) is int else 0)
        if context < 1:
            raise NodeUnavailable(f"{settings.name} does not report the size of its context: give context=N")
        return EngineAbout(
            name=settings.name,
            address=settings.url,
            model=matches[0]["id"],
            layout=layout_of(settings),
            page_tokens=settings.page_tokens,
            kv_bytes=0,
            node=settings.name,
            batch_max=settings.batch,
            context_max=context,
            foreign=True,
        )

    async def _handle_failure(self, error: KVStoreError) -> None:
        now_s, name = time.monotonic(), self._settings.name
        self._refusals += not isinstance(error, DeadlineExceeded)
        if name not in self._engines:
            (log.warning if self._refusals == 1 else log.debug)("%s is not available: %s", name, error)
        elif self._refusals >= REFUSALS_MAX or now_s - self._answered_s > DEAD_S:
            log.warning("%s no longer answers: %s", name, error)
            await self._remove()
        else:
            self._handle(ev.EngineSilent(now_s, name))

    async def _remove(self) -> None:
        name = self._settings.name
        task, self._intake_task = self._intake_task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._engines.pop(name, None) is not None:
            now_s = time.monotonic()
            self._handle(ev.EngineLost(now_s, name))
            self._handle(ev.NodeLost(now_s, name))
            self._link.cut()


def layout_of(settings: BackendSettings) -> str:
    """Return a placeholder for the unknown layout of a back end's pages.

    Back ends with one page size share keys. No pages are handed over between them, so their layouts do not matter.
    """
    data = b"foreign" + settings.page_tokens.to_bytes(4, "little")
    return hashlib.blake2b(data, digest_size=16, person=b"kvstore.foreign").hexdigest()
