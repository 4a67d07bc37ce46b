"""Daemon: a node with its control socket and HTTP, from start to SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from kvstore.config import NodeConfig, format_size
from kvstore.service.background import Background
from kvstore.service.control import ControlServer
from kvstore.service.dispatch import Dispatcher
from kvstore.service.http import HttpServer
from kvstore.service.node import Node
from kvstore.service.scrubber import Scrubber
from kvstore.tier.header import DaemonState

log = logging.getLogger("kvstore.daemon")

# A signal may be taken while this thread is on its way to sleep, or by another one; its handler only runs when this
# one wakes. Without a deadline one SIGTERM in a few hundred was noticed only with the next signal.
SIGNAL_LOOK_S = 0.25
SWITCH_INTERVAL_S = 0.0005  # a background thread that holds the interpreter delays a client by no more than this


def serve(config: NodeConfig, announce: Callable[[str], None]) -> None:
    """Run a node until SIGTERM or SIGINT. ``announce`` is called once, with one line, when it serves.

    Raises:
        NodeBusy, InvalidRequest: see ``Node.start``; nothing was left running.
    """
    logging.basicConfig(level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.excepthook = _end
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    started = time.monotonic()
    node = Node(config)
    ready = threading.Event()
    http = HttpServer(config.http, _routes(ready)) if config.http else None
    try:
        if http is not None:
            http.start()
        node.start()
        _run(node, config, http, ready, stopped, announce, started)
    finally:
        if http is not None:
            http.stop()
        node.stop()


def _end(failed: threading.ExceptHookArgs) -> None:
    """A daemon that has lost a thread would hold its name and serve nobody. The next one repairs what it leaves."""
    log.critical("a thread failed, the daemon ends", exc_info=failed.exc_value)
    logging.shutdown()
    os._exit(1)


def _run(
    node: Node,
    config: NodeConfig,
    http: HttpServer | None,
    ready: threading.Event,
    stopped: threading.Event,
    announce: Callable[[str], None],
    started: float,
) -> None:
    scrubber = Scrubber(node, config.scrub_bytes_per_s)
    background = Background(node, scrubber)
    control = ControlServer(node, Dispatcher(node, scrubber, background.mover.wake))
    node.populate_next()
    control.start()
    background.start()
    node.performer.header.state = DaemonState.READY
    ready.set()
    tiers = node.stats()["tiers"]
    sizes = " + ".join(f"{format_size(tier['capacity_bytes'])} {name.upper()}" for name, tier in tiers.items())
    pages = " + ".join(str(tier["pages"]) for tier in tiers.values())  # a page may be in both
    where = f", http on {http.address}" if http is not None else ""
    took = f"{time.monotonic() - started:.2f} s"
    announce(f"kvstore node {config.name} ready: {sizes}, {pages} pages kept, {took}{where}")
    while not stopped.wait(SIGNAL_LOOK_S):
        pass
    control.stop()
    background.stop()


def _routes(ready: threading.Event) -> dict[str, Callable[[], tuple[int, str, str]]]:
    def readyz() -> tuple[int, str, str]:
        return (200, "text/plain", "ready\n") if ready.is_set() else (503, "text/plain", "starting\n")

    return {"/healthz": lambda: (200, "text/plain", "ok\n"), "/readyz": readyz}
