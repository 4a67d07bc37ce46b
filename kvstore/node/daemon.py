"""Daemon: a node with its control socket, gRPC API and HTTP, from start to SIGTERM.

Watch: the daemon's log tells what its node refuses or drops, in a line now and then.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from kvstore import about
from kvstore.cluster import peer_links
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.schema import NodeEntry
from kvstore.cluster.data_connection import credentials_of
from kvstore.cluster.membership import Membership, host, reachable
from kvstore.cluster.peer_links import PeerLinks, PeersFile
from kvstore.config import NodeConfig, format_size
from kvstore.errors import InvalidRequest, NodeBusy, Unavailable
from kvstore.logs import event
from kvstore.node import on_stop
from kvstore.node.background import Background
from kvstore.node.cluster.announcer import Announcer
from kvstore.node.cluster.data_child import DataChild, has_data_server
from kvstore.node.cluster.directory_audit import DirectoryAudit
from kvstore.node.dispatch import Dispatcher
from kvstore.node.node import Node
from kvstore.node.operator.admin import Call
from kvstore.node.operator.stats import node_stats, tenant_rows
from kvstore.node.scrubber import Scrubber
from kvstore.node.socket_server import ControlServer
from kvstore.safe_files import read_plain
from kvstore.server import lifecycle, tracing
from kvstore.server.http import readyz
from kvstore.server.lifecycle import Life
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import DaemonState

if TYPE_CHECKING:
    from kvstore.node.api.server import ApiServer

watch_log = logging.getLogger("kvstore.watch")

LOOK_S = 1.0
SILENT_S = 10.0  # at most one line per kind of refusal in this time


class Watch:
    """Logs what a node refuses or drops, summed over a while: a flood of it is a line now and then.

    Lives with a daemon; one thread calls ``look`` again and again, and at the end ``look(last=True)``.

    Args:
        refused: where gRPC calls are counted that were refused: status code -> (calls, address of the last caller).
    """

    def __init__(self, node: Node, refused: Mapping[str, tuple[int, str]]) -> None:
        self._node = node
        self._refused = refused
        self._due_s = 0.0
        self._told: dict[tuple[str, ...], tuple[int, float]] = {}  # what -> how many, when that was said
        self._news(float("inf"), self._counts())  # what was before is not news

    def look(self, *, last: bool = False) -> None:
        """Log what has come since it was last said, where that is long enough ago, or this is the ``last`` look."""
        now_s = time.monotonic()
        if now_s < self._due_s and not last:
            return
        self._due_s = now_s + LOOK_S
        for what, count in self._news(now_s if not last else float("inf"), self._counts()):
            match what:
                case ("damage", reason):
                    event(watch_log, logging.ERROR, "damage found, the pages were dropped", reason=reason, pages=count)
                case ("quota", tenant, tier):
                    event(watch_log, logging.WARNING, "quota refused", tenant=tenant, tier=tier, pages=count)
                case ("grpc", code):
                    last_from = self._refused[code][1]
                    event(watch_log, logging.WARNING, "gRPC calls refused", code=code, calls=count, last_from=last_from)

    def _news(self, now_s: float, counts: dict[tuple[str, ...], int]) -> list[tuple[tuple[str, ...], int]]:
        news = []
        for what, count in counts.items():
            before, said_s = self._told.get(what, (0, -SILENT_S))
            if count > before and now_s >= said_s + (0 if what[0] == "damage" else SILENT_S):
                news.append((what, count - before))
                self._told[what] = count, min(now_s, time.monotonic())
        for what in self._told.keys() - counts.keys():  # a tenant that the node has forgotten starts again
            del self._told[what]
        return news

    def _counts(self) -> dict[tuple[str, ...], int]:
        found: dict[tuple[str, ...], int] = {}
        counters, rows = self._node.look(lambda _, state: (dict(state.counters), tenant_rows(state)))
        for name, count in counters.items():
            if name.startswith("damaged_"):
                found["damage", name.removeprefix("damaged_")] = count
        for salt, tier, _, _, refused, _ in rows:
            if refused:
                found["quota", salt, tier] = refused
        for code, (count, _) in dict(self._refused).items():
            found["grpc", code] = count
        return found


MEMBER = "member"  # in the node's folder: what its daemon published in a catalog last

log = logging.getLogger("kvstore.daemon")


def serve(config: NodeConfig, announce: Callable[[str], None]) -> None:
    """Run a node until SIGTERM or SIGINT; another one cuts its end short. ``announce`` is called once, with one line,
    when it serves.

    Raises:
        NodeBusy, InvalidRequest: see ``Node.start``; nothing was left running.
    """
    membership = Membership(config) if config.catalog else None
    sender = DataChild(config, NodeFolder(config.shm_dir, config.name)) if has_data_server(config) else None
    with lifecycle.run(config, log, "the daemon") as life:
        if config.otlp_endpoint:
            tracing.configure(config.otlp_endpoint, config.name)
            life.at_end(tracing.shutdown)
        with tracing.span("kvstore.start", node=config.name):
            node = Node.start(config)
        life.at_end(node.stop)
        life.log_start()
        _run(node, config, membership, sender, life, announce)


def _run(
    node: Node,
    config: NodeConfig,
    membership: Membership | None,
    sender: DataChild | None,
    life: Life,
    announce: Callable[[str], None],
) -> None:
    scrubber = Scrubber(node, config.scrub_bytes_per_s)
    background = Background(node, scrubber)
    dispatcher = Dispatcher(node, scrubber, background.mover.wake)
    control = ControlServer(node, dispatcher)
    api = _api(config, node, dispatcher)
    node.populate_next()
    control.start()
    background.start()
    node.enter(DaemonState.READY)
    where, announcer = "", None
    try:
        if api is not None:
            api.start()
            life.on_hangup(api.reload)
        if membership is not None:
            mine = _entry(config, node, api)
            _join(membership, mine, NodeFolder.at(node.folder), life)
            life.at_end(membership.stop)
        else:
            peer_links.forget(NodeFolder.at(node.folder))
        if sender is not None:
            where = f", data on {sender.start()}"
            life.at_end(sender.stop)
        if membership is not None:
            announcer = _announce(config, node, membership, mine, life, dispatcher.admin.calls)
    except (InvalidRequest, NodeBusy, Unavailable):
        _end_serving(node, api, control, background, life)
        raise
    if life.http is not None:
        from kvstore.node.operator.metrics import NodeMetrics

        queues = {"rpcs": api.under_way} if api is not None else {}
        metrics = NodeMetrics(node, scrubber, queues, api.calls if api is not None else None)
        if membership is not None and announcer is not None:
            metrics.membership = partial(_ages, membership, announcer)
        life.http.routes["/metrics"] = metrics.route
    tiers = node_stats(node)["tiers"]
    sizes = " + ".join(f"{format_size(tier['capacity_bytes'])} {name.upper()}" for name, tier in tiers.items())
    pages = " + ".join(str(tier["pages"]) for tier in tiers.values())  # a page may be in both
    where = f", http on {life.http.address}{where}" if life.http is not None else where
    where += f", grpc on {' '.join(api.addresses)}" if api is not None else ""
    took_s = life.took_s
    line = f"kvstore node {config.name} ready: {sizes}, {pages} pages kept, {took_s:.2f} s{where}"
    life.report_ready(lambda: announce(line), took_s, pages=sum(tier["pages"] for tier in tiers.values()))
    watch = Watch(node, api.calls.refused if api is not None and api.calls is not None else {})

    def look() -> None:
        watch.look()
        if sender is not None:
            sender.look()

    life.wait(look)
    _end_serving(node, api, control, background, life)
    watch.look(last=True)


def _entry(config: NodeConfig, node: Node, api: ApiServer | None) -> NodeEntry:
    tiers = node_stats(node)["tiers"]
    return NodeEntry(
        name=config.name,
        process=schema.new_process(),
        incarnation=f"{node.incarnation:016x}",
        addresses=reachable(api.addresses if api is not None else []),
        capacity_bytes={name.lower(): tier["capacity_bytes"] for name, tier in tiers.items()},
        host=host(),
        version=about.version(),
    )


def _announce(
    config: NodeConfig, node: Node, membership: Membership, mine: NodeEntry, life: Life, calls: dict[str, Call]
) -> Announcer:
    """Tell the pool from now on which pages the node has. Admin calls say how that goes, and whether the pool knows."""
    links, peers_file = PeerLinks(config.pool, config.name, credentials_of(os.environ)), PeersFile(node.folder)
    announcer = Announcer(
        *(node, config.name, mine.process, membership, peers_file, links, config.catalog_ttl_s),
        has_data_server=has_data_server(config),
    )
    announcer.start()
    if life.http is not None:
        faults = membership.fault, announcer.fault
        life.http.routes["/readyz"] = readyz(life.ready, lambda: "; ".join(filter(None, (each() for each in faults))))
    life.at_end(links.close)
    life.at_end(announcer.stop)
    stats = calls["stats"]
    calls["stats"] = lambda request: {
        **stats(request),
        "announcing": announcer.status(),
        "membership": membership.status(),
    }
    calls["heard"] = DirectoryAudit(node, config.name, membership, peers_file, links).run
    return announcer


def _ages(membership: Membership, announcer: Announcer) -> list[tuple[str, float, int]]:
    return membership.ages() + announcer.ages()


def _join(membership: Membership, mine: NodeEntry, folder: NodeFolder, life: Life) -> None:
    """Publish the node. What the daemon before us published is ours to replace: the folder's lock says it is dead."""
    kept = folder.path / MEMBER
    try:
        former = read_plain(kept)
    except OSError:
        former = b""
    membership.start(mine, former=former, on_final=life.fail)
    told = schema.encode(mine)
    folder.new_file(kept, len(told), told)


def _api(config: NodeConfig, node: Node, dispatcher: Dispatcher) -> ApiServer | None:
    if not config.listen:
        return None
    from kvstore.node.api.server import ApiServer  # only here: it loads gRPC

    return ApiServer(config, node, dispatcher)


def _end_serving(node: Node, api: ApiServer | None, control: ControlServer, background: Background, life: Life) -> None:
    """End in order. Where memory goes, what is only there is saved first, until another signal comes: readers continue
    in the meantime, writers are told."""
    node.ending = True  # before anything waits: calls that take long break off
    save_s, why = on_stop.save_s(node.config, node.folder.name)
    if api is not None:
        api.stop()
    if not save_s:
        control.stop()
    background.stop(save_s, why, life.hurry.is_set)
    if save_s:
        control.stop()
