"""Lifecycle: the process of a daemon, from its start until it is told to end.

::

    with lifecycle.running(config, log, "the daemon") as life:  # logs, signals and HTTP from here on
        life.at_end(node.stop)  # when HTTP has ended
        node.start()
        life.begun()  # "start" in the log
        life.serves(announce, took_s, pages=7)  # ready: in HTTP, to the parent process, "ready" in the log
        life.wait()  # until SIGTERM or SIGINT
        ...  # end in order; another signal sets ``life.hurried``

An unexpected error ends a connection, a request or one turn of a task, and the daemon goes on; in decided state it ends
the daemon with exit code 1. See ``kvstore.boundary``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvstore import about, boundary, logs
from kvstore.config.daemon import DaemonConfig
from kvstore.errors import KVStoreError
from kvstore.limits import raise_descriptors
from kvstore.server.http import HostNames, HttpServer, Readiness, routes

# A signal may be taken while this thread is on its way to sleep, or by another one; its handler only runs when this
# one wakes. Without a deadline one SIGTERM in a few hundred was noticed only with the next signal.
SIGNAL_LOOK_S: Final = 0.25
SWITCH_INTERVAL_S: Final = 0.0005  # a thread that holds the interpreter delays a client by no more than this


class Life:
    """A daemon that runs.

    Attributes:
        ready: it serves.
        http: what answers /healthz, /readyz and /metrics, where that is configured.
        hurried: the daemon was told to end once more: it should not take its time.
        failure: why it ends on its own.
    """

    def __init__(self, log: logging.Logger, http: HttpServer | None, ready: Readiness) -> None:
        self.http = http
        self.hurried = threading.Event()
        self.ends = contextlib.ExitStack()
        self._log = log
        self.ready = ready
        self._stopped = threading.Event()
        self.failure: KVStoreError | None = None
        self._began_s = time.monotonic()

    @property
    def took_s(self) -> float:
        """Since its begin."""
        return time.monotonic() - self._began_s

    def at_end(self, call: Callable[[], object]) -> None:
        """Call it when HTTP has ended; what was named last is called first."""
        self.ends.callback(call)

    def begun(self, **fields: Any) -> None:
        """Tell the log."""
        logs.event(self._log, logging.INFO, "start", version=about.version(), pid=os.getpid(), **fields)

    def serves(self, announce: Callable[[], None], took_s: float, **fields: Any) -> None:
        """Report that the daemon is ready: over HTTP, to the process that started it, and in the log."""
        self.ready.set()
        announce()
        logs.event(self._log, logging.INFO, "ready", took_s=round(took_s, 3), **fields)

    def on_hangup(self, call: Callable[[], None]) -> None:
        """What SIGHUP asks for."""
        signal.signal(signal.SIGHUP, lambda *_: call())

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Until it is told to end. Calls ``look`` a few times a second."""

        def turn() -> None:
            if not self._stopped.wait(SIGNAL_LOOK_S):
                look()

        boundary.kept("task/main", turn, self._stopped)()

    def wait_while(self, holds: Callable[[], bool]) -> None:
        """Wait as ``wait`` does, but no longer than ``holds`` returns True."""
        boundary.kept("task/main", lambda: not self.ending(SIGNAL_LOOK_S) and not holds(), self._stopped)()

    def ending(self, timeout_s: float) -> bool:
        """Whether the process was told to end; waits up to ``timeout_s`` for that."""
        return self._stopped.wait(timeout_s)

    def retires(self) -> None:
        """Say to those who ask that it is not ready any more."""
        self.ready.clear()

    def fail(self, failure: KVStoreError) -> None:
        """From any thread: end in order, as after a signal; ``running`` raises ``failure`` then."""
        self.failure = self.failure or failure
        self._stopped.set()

    def told_to_end(self) -> None:
        """A signal came."""
        (self.hurried if self._stopped.is_set() else self._stopped).set()


@contextlib.contextmanager
def running(config: DaemonConfig, log: logging.Logger, who: str) -> Iterator[Life]:
    """The process is a daemon from here on. ``who`` it is, in its log.

    Raises:
        InvalidRequest: HTTP cannot have its address.
        KVStoreError: what the daemon ended with, see ``Life.fail``.
    """
    logs.configure(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    boundary.ends_process(who)
    raise_descriptors()  # first: servers derive from it how many connections they may have
    ready = Readiness()
    http = HttpServer(config.http, routes(ready), HostNames.of(config)) if config.http else None
    life = Life(log, http, ready)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: life.told_to_end())
    life.on_hangup(lambda: None)  # there is nothing to read again yet
    with life.ends:
        if life.http is not None:
            life.http.start()
        try:
            yield life
        finally:
            if life.http is not None:
                life.http.stop()
    logs.event(log, logging.INFO, "stop", uptime_s=round(life.took_s, 3))
    if life.failure is not None:
        raise life.failure
