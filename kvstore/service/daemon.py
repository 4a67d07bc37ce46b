"""Daemon: a node with its control socket and HTTP, from start to SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING

from kvstore.config import NodeConfig, format_size
from kvstore.errors import InvalidRequest
from kvstore.service.local.control import ControlServer
from kvstore.service.local.dispatch import Dispatcher
from kvstore.service.node import on_stop
from kvstore.service.node.node import Node
from kvstore.service.operator.stats import node_stats
from kvstore.service.operator.watch import Watch
from kvstore.service.upkeep.background import Background
from kvstore.service.upkeep.scrubber import Scrubber
from kvstore.serving import logs, tracing
from kvstore.serving.http import HttpServer, routes
from kvstore.tier.header import DaemonState

if TYPE_CHECKING:
    from kvstore.service.api.server import ApiServer

log = logging.getLogger("kvstore.daemon")

# A signal may be taken while this thread is on its way to sleep, or by another one; its handler only runs when this
# one wakes. Without a deadline one SIGTERM in a few hundred was noticed only with the next signal.
SIGNAL_LOOK_S = 0.25
SWITCH_INTERVAL_S = 0.0005  # a background thread that holds the interpreter delays a client by no more than this


def serve(config: NodeConfig, announce: Callable[[str], None]) -> None:
    """Run a node until SIGTERM or SIGINT; another one cuts its end short. ``announce`` is called once, with one line,
    when it serves.

    Raises:
        NodeBusy, InvalidRequest: see ``Node.start``; nothing was left running.
    """
    logs.configure(config)
    if config.otlp_endpoint:
        tracing.configure(config.otlp_endpoint, config.name)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    threading.excepthook = _end
    stopped, hurried = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: (hurried if stopped.is_set() else stopped).set())
    signal.signal(signal.SIGHUP, lambda *_: None)  # there is nothing to read again, unless there is an API
    started = time.monotonic()
    node = Node(config)
    ready = threading.Event()
    http = HttpServer(config.http, routes(ready)) if config.http else None
    try:
        if http is not None:
            http.start()
        with tracing.span("kvstore.start", node=config.name):
            node.start()
        logs.event(log, logging.INFO, "start", version=metadata.version("kvstore"), pid=os.getpid())
        _run(node, config, http, ready, stopped, hurried, announce, started)
    finally:
        if http is not None:
            http.stop()
        node.stop()
        tracing.shutdown()
    logs.event(log, logging.INFO, "stop", uptime_s=round(time.monotonic() - started, 3))


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
    hurried: threading.Event,
    announce: Callable[[str], None],
    started: float,
) -> None:
    scrubber = Scrubber(node, config.scrub_bytes_per_s)
    background = Background(node, scrubber)
    dispatcher = Dispatcher(node, scrubber, background.mover.wake)
    control = ControlServer(node, dispatcher)
    api = _api(config, node, dispatcher)
    node.populate_next()
    control.start()
    background.start()
    node.performer.header.state = DaemonState.READY
    if api is not None:
        try:
            api.start()
        except InvalidRequest:
            _end_serving(node, api, control, background, hurried)
            raise
        signal.signal(signal.SIGHUP, lambda *_: api.reload())
    if http is not None:
        from kvstore.service.operator.metrics import (
            Metrics,  # only here: a daemon without HTTP needs no prometheus_client
        )

        queues = {"rpcs": api.under_way} if api is not None else {}
        http.routes["/metrics"] = Metrics(node, scrubber, queues, api.calls if api is not None else None).route
    ready.set()
    tiers = node_stats(node)["tiers"]
    sizes = " + ".join(f"{format_size(tier['capacity_bytes'])} {name.upper()}" for name, tier in tiers.items())
    pages = " + ".join(str(tier["pages"]) for tier in tiers.values())  # a page may be in both
    where = f", http on {http.address}" if http is not None else ""
    where += f", grpc on {' '.join(api.addresses)}" if api is not None else ""
    took_s = time.monotonic() - started
    announce(f"kvstore node {config.name} ready: {sizes}, {pages} pages kept, {took_s:.2f} s{where}")
    logs.event(log, logging.INFO, "ready", took_s=round(took_s, 3), pages=sum(tier["pages"] for tier in tiers.values()))
    watch = Watch(node, api.calls if api is not None else None)
    while not stopped.wait(SIGNAL_LOOK_S):
        watch.look()
    _end_serving(node, api, control, background, hurried)
    watch.look(last=True)


def _api(config: NodeConfig, node: Node, dispatcher: Dispatcher) -> ApiServer | None:
    if not config.listen:
        return None
    from kvstore.service.api.server import ApiServer  # only here: it loads gRPC

    return ApiServer(config, node, dispatcher)


def _end_serving(
    node: Node, api: ApiServer | None, control: ControlServer, background: Background, hurried: threading.Event
) -> None:
    """End in order. Where memory goes, what is only there is saved first, until another signal ``hurried``: readers go
    on meanwhile, writers are told."""
    node.ending = True  # before anything waits: calls that take long break off
    save_s, why = on_stop.save_s(node.config, node.folder.name)
    if api is not None:
        api.stop()
    if not save_s:
        control.stop()
    background.stop(save_s, why, hurried.is_set)
    if save_s:
        control.stop()
