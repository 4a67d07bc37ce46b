"""Lifecycle: the process of a daemon, from its start until it receives a signal to end.

::

    with lifecycle.run(config, log, "the daemon") as life:  # logs, signals and HTTP from here on
        life.at_end(node.stop)  # called after HTTP has ended
        node.start()
        life.log_start()  # "start" in the log
        life.report_ready(announce, took_s, pages=7)  # ready: in HTTP, to the parent process, "ready" in the log
        life.wait()  # until SIGTERM or SIGINT
        ...  # end in order; another signal sets ``life.hurry``

An unexpected error ends a connection, a request or one turn of a task, and the daemon continues. An unexpected error
while state is decided ends the daemon with exit code 1. See ``kvstore.boundary``.
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

# A signal may arrive while this thread is about to sleep, or in another thread. Its handler runs only when this thread
# wakes. Without a deadline, one SIGTERM in a few hundred was noticed only with the next signal.
SIGNAL_LOOK_S: Final = 0.25
SWITCH_INTERVAL_S: Final = 0.0005  # the longest time for which a thread keeps the interpreter from a client's request


class Life:
    """A running daemon.

    Attributes:
        ready: set while the daemon serves.
        http: the server of /healthz, /readyz and /metrics, if configured.
        hurry: set by a second signal, after which the daemon should end quickly.
        failure: why the daemon ends without a signal.
    """

    def __init__(self, log: logging.Logger, http: HttpServer | None, ready: Readiness) -> None:
        self.http = http
        self.hurry = threading.Event()
        self.ends = contextlib.ExitStack()
        self._log = log
        self.ready = ready
        self._stop = threading.Event()
        self.failure: KVStoreError | None = None
        self._began_s = time.monotonic()

    @property
    def took_s(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._began_s

    def at_end(self, call: Callable[[], object]) -> None:
        """Register ``call`` to run when HTTP has ended. The last registered call runs first."""
        self.ends.callback(call)

    def log_start(self, **fields: Any) -> None:
        """Log "start"."""
        logs.event(self._log, logging.INFO, "start", version=about.version(), pid=os.getpid(), **fields)

    def report_ready(self, announce: Callable[[], None], took_s: float, **fields: Any) -> None:
        """Report that the daemon is ready: over HTTP, to the process that started it, and in the log."""
        self.ready.set()
        announce()
        logs.event(self._log, logging.INFO, "ready", took_s=round(took_s, 3), **fields)

    def on_hangup(self, call: Callable[[], None]) -> None:
        """Call ``call`` at SIGHUP."""
        signal.signal(signal.SIGHUP, lambda *_: call())

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Wait for the signal to end. Calls ``look`` a few times a second."""

        def turn() -> None:
            if not self._stop.wait(SIGNAL_LOOK_S):
                look()

        boundary.thread_loop("task/main", turn, self._stop)()

    def wait_while(self, holds: Callable[[], bool]) -> None:
        """Wait as ``wait`` does, but only while ``holds`` returns True."""
        boundary.thread_loop("task/main", lambda: not self.wait_for_end(SIGNAL_LOOK_S) and not holds(), self._stop)()

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the signal to end. Returns whether it has come."""
        return self._stop.wait(timeout_s)

    def retire(self) -> None:
        """Report over HTTP that the daemon is no longer ready."""
        self.ready.clear()

    def fail(self, failure: KVStoreError) -> None:
        """End the daemon in order, as after a signal. ``run`` then raises ``failure``. Any thread may call this."""
        self.failure = self.failure or failure
        self._stop.set()

    def on_signal(self) -> None:
        """Handle a termination signal. The first signal ends the daemon; the second sets ``hurry``."""
        (self.hurry if self._stop.is_set() else self._stop).set()


@contextlib.contextmanager
def run(config: DaemonConfig, log: logging.Logger, name: str) -> Iterator[Life]:
    """Make this process a daemon. ``name``: in the log.

    Raises:
        InvalidRequest: HTTP cannot listen at its address.
        KVStoreError: the error that ended the daemon, see ``Life.fail``.
    """
    logs.configure(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    boundary.become_daemon(name)
    raise_descriptors()  # first: servers derive from it how many connections they may have
    ready = Readiness()
    http = HttpServer(config.http, routes(ready), HostNames.of(config)) if config.http else None
    life = Life(log, http, ready)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: life.on_signal())
    life.on_hangup(lambda: None)  # nothing to reload yet
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
