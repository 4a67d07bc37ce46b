"""LoopServer: a gRPC server of a daemon, in a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.serving.gate import Gate
from kvstore.serving.identities import Identities
from kvstore.serving.watching import Calls

START_S: Final = 10.0
STOP_S: Final = 10.0


class LoopServer(ABC):
    """Serves from ``start`` to ``stop``. What it serves is said by ``_run``, which sets ``addresses`` and ``_started``
    when it listens, and ends when ``_stopping`` is set.
    """

    def __init__(self, name: str, identities: Identities) -> None:
        self.addresses: list[str] = []
        self.identities = identities
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._gate: Gate | None = None

    def start(self) -> None:
        """Listen and serve. ``addresses`` says where then. Raises InvalidRequest where an address cannot be had."""
        self._thread.start()
        if not self._started.wait(START_S):
            raise InvalidRequest("listen", f"did not begin within {START_S:g} s")
        if self._failure is not None:
            raise self._failure

    @property
    def calls(self) -> Calls | None:
        """What became of all calls; None before ``start``."""
        return self._gate.calls if self._gate is not None else None

    def reload(self) -> None:
        """Read the identities again. For a signal handler: it only asks the loop to."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self.identities.reload)

    def stop(self) -> None:
        """Take no more calls, and end those under way: by themselves within a grace, or cancelled."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def _serve(self) -> None:
        try:
            asyncio.run(self._begin())
        except InvalidRequest as error:
            if self._started.is_set():
                raise
            self._failure = error
            self._started.set()

    async def _begin(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        await self._run(self._stopping)

    @abstractmethod
    async def _run(self, stopping: asyncio.Event) -> None:
        """Serve until ``stopping`` is set."""
