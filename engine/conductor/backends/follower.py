"""BackendFollower: follows a back end as one of a conductor's engines: its availability, pages and speed.

It is asked for its models once a second. A back end that refuses twice, or does not answer for ``DEAD_S``, counts as
gone: its running answers continue on other engines if possible, and the index forgets its cache.
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
AGAIN_S: Final = 0.2  # after the first failed poll
STATUS_S: Final = 3.0  # deadline of an answer
DEAD_S: Final = 10.0
REFUSALS: Final = 2

_ASKING = boundary.RequestGuard("task/ask")

log = logging.getLogger("kvstore.conductor")


class BackendFollower:
    """Follows one back end while ``follow`` runs. On one event loop.

    Args:
        engines: the map that contains it while it is available.
        counts: outcomes of its KV events.

    Raises:
        InvalidRequest: its key or its certificate authorities cannot be read.
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
        self._intake = KvIntake(settings, layout_of(settings), counts, self._told)
        self._events: asyncio.Task[None] | None = None
        self._refused = 0
        self._heard_s = time.monotonic()

    async def follow(self, heard: Callable[[], None]) -> None:
        """Run until cancelled. ``heard`` is called after an answer or a failure."""
        name = self._settings.name
        try:
            while True:
                if name in self._engines:
                    self._handle(ev.ReportRequested(time.monotonic(), name))
                try:
                    with _ASKING:
                        self._answered(await self._link.models(STATUS_S))
                except KVStoreError as error:
                    await self._failed(error)
                heard()
                await asyncio.sleep(AGAIN_S if self._refused == 1 else POLL_S)
        finally:
            await self._lose()
            await self._link.retire()

    def tell_anew(self) -> None:
        """Report all its pages again."""
        self._intake.anew = True

    def _told(self, batch: AnnounceBatch) -> None:
        self._handle(ev.PagesReported(time.monotonic(), batch))

    def _answered(self, models: list[dict[str, Any]]) -> None:
        about = self._about(models)
        now_s, name, speeds = time.monotonic(), self._settings.name, self._link.speeds
        self._refused, self._heard_s = 0, now_s
        known = self._engines.get(name)
        if known is None or known.about != about:
            self._link.model = about.model
            path = None if self._settings.tokenizer == BYTES else self._settings.tokenizer
            self._engines[name] = KnownEngine(about, self._link, None, path, speeds)
            self._handle(ev.EngineFound(now_s, about, Role.BOTH))
        if known is None:
            log.info("%s is available, with %s", name, about.model)
            if self._settings.events:
                follow = boundary.task_loop("task/kv events", self._intake.run)
                self._events = asyncio.create_task(follow, name=f"kv events of {name}")
        report = LoadReport(
            role=Role.BOTH,
            running=self._link.running,
            prefill_tokens_per_s=speeds.tokens_per_s,
            step_s=speeds.step_s,
        )
        self._handle(ev.LoadReported(now_s, name, report))

    def _about(self, models: list[dict[str, Any]]) -> EngineAbout:
        """The back end's description of itself. Raises NodeUnavailable if it lacks the model, or does not report its
        context size.
        """
        settings = self._settings
        fit = [each for each in models if settings.model in ("", each["id"])]
        if not fit:
            raise NodeUnavailable(f"{settings.name} does not list {settings.model or 'a model'}")
        said = fit[0].get("max_model_len")
        context = settings.context or (said if type(said) is int else 0)
        if context < 1:
            raise NodeUnavailable(f"{settings.name} does not say how many tokens fit: give context=N")
        return EngineAbout(
            name=settings.name,
            address=settings.url,
            model=fit[0]["id"],
            layout=layout_of(settings),
            page_tokens=settings.page_tokens,
            kv_bytes=0,
            node=settings.name,
            batch_max=settings.batch,
            context_max=context,
            foreign=True,
        )

    async def _failed(self, error: KVStoreError) -> None:
        now_s, name = time.monotonic(), self._settings.name
        silent = isinstance(error, DeadlineExceeded)
        self._refused += not silent
        if name not in self._engines:
            (log.warning if self._refused == 1 else log.debug)("%s is not available: %s", name, error)
        elif self._refused >= REFUSALS or now_s - self._heard_s > DEAD_S:
            log.warning("%s does not answer any more: %s", name, error)
            await self._lose()
        else:
            self._handle(ev.EngineSilent(now_s, name))

    async def _lose(self) -> None:
        name = self._settings.name
        events, self._events = self._events, None
        if events is not None:
            events.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await events
        if self._engines.pop(name, None) is not None:
            now_s = time.monotonic()
            self._handle(ev.EngineLost(now_s, name))
            self._handle(ev.NodeLost(now_s, name))
            self._link.cut()


def layout_of(settings: BackendSettings) -> str:
    """A placeholder for the unknown layout: foreign engines share keys, and hand over no pages."""
    said = b"foreign" + settings.page_tokens.to_bytes(4, "little")
    return hashlib.blake2b(said, digest_size=16, person=b"kvstore.foreign").hexdigest()
