"""Daemon: runs a node with its control socket, gRPC API and HTTP server until SIGTERM.

``Watch`` logs what the node refuses or drops.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore import about
from kvstore.cluster import peer_links
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.schema import NodeEntry
from kvstore.cluster.data_connection import credentials_of
from kvstore.cluster.membership import Membership, host, machine, reachable
from kvstore.cluster.peer_links import PeerLinks, PeersFile
from kvstore.config import NodeConfig, format_size
from kvstore.config.reading import networks_of
from kvstore.errors import InvalidRequest, NodeBusy, Unavailable
from kvstore.logs import event
from kvstore.node import on_stop
from kvstore.node.background import Background
from kvstore.node.cluster.announcer import LINKS_IDLE_S, Announcer
from kvstore.node.cluster.data_child import DataChild, has_data_server
from kvstore.node.cluster.directory_audit import DirectoryAudit
from kvstore.node.cluster.drain import NodeDrain
from kvstore.node.cluster.replicator import Replicator
from kvstore.node.dispatch import Dispatcher
from kvstore.node.node import Node
from kvstore.node.operator.admin import Call
from kvstore.node.operator.stats import node_stats, tenant_rows
from kvstore.node.scrubber import Scrubber
from kvstore.node.socket_server import ControlServer
from kvstore.safe_files import read_plain
from kvstore.server import lifecycle, tracing
from kvstore.server.http import Route, readyz
from kvstore.server.lifecycle import Life
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import DaemonState
from kvstore.shm.traffic import TrafficBucket

if TYPE_CHECKING:
    from kvstore.node.api.server import ApiServer

log = logging.getLogger("kvstore.daemon")
watch_log = logging.getLogger("kvstore.watch")

MEMBER = "member"  # a file in the node's folder: the entry that a daemon last published in a catalog
LOOK_S = 1.0
LOG_EVERY_S = 10.0  # at most one line per kind of refusal during this time

Kind = tuple[str, ...]
"""The name of a count: ("damage", reason), ("quota", tenant, tier) or ("grpc", status code)."""


def serve(config: NodeConfig, announce: Callable[[str], None]) -> None:
    """Run a node until SIGTERM or SIGINT. A second signal shortens the stop.

    Args:
        announce: called once, with a line of text, when the node is ready.

    Raises:
        NodeBusy, InvalidRequest: see ``Node.start``. Nothing is left running.
    """
    membership = Membership(config) if config.catalog else None
    data_server = DataChild(config, NodeFolder(config.shm_dir, config.name)) if has_data_server(config) else None
    with lifecycle.run(config, log, "the daemon") as life:
        if config.otlp_endpoint:
            tracing.configure(config.otlp_endpoint, config.name)
            life.at_end(tracing.shutdown)
        with tracing.span("kvstore.start", node=config.name):
            node = Node.start(config)
        life.at_end(node.stop)
        life.log_start()
        _run(node, config, membership, data_server, life, announce)


def _run(
    node: Node,
    config: NodeConfig,
    membership: Membership | None,
    data_server: DataChild | None,
    life: Life,
    announce: Callable[[str], None],
) -> None:
    scrubber = Scrubber(node, config.scrub_bytes_per_s)
    background = Background(node, scrubber)
    dispatcher = Dispatcher(node, scrubber, background.mover.wake)
    control = ControlServer(node, dispatcher)
    api = _api(config, node, dispatcher)
    if config.catalog not in ("", "memory"):
        node.performer.header.replicas = config.replicas
    node.populate_next()
    control.start()
    background.start()
    node.enter(DaemonState.READY)
    addresses, announcer, replicator = "", None, None
    folder = NodeFolder.at(node.folder)
    try:
        if api is not None:
            api.start()
            life.on_hangup(api.reload)
        if membership is not None:
            entry = _entry(config, node, api)
            _join(membership, entry, folder, life)
            life.at_end(membership.stop)
        else:
            peer_links.forget(folder)
        if data_server is not None:
            addresses = f", data on {data_server.start()}"
            life.at_end(data_server.stop)
        if membership is not None:
            announcer = _announce(config, node, membership, entry, life, dispatcher.admin.calls)
            if node.performer.header.replicas:
                replicator = _replicate(config, node, membership, entry, life, dispatcher.admin.calls)
                parts = announcer, replicator, data_server, membership
                drain = NodeDrain(
                    node, replicator, partial(_publish, membership, folder), partial(_leave, node, folder, *parts)
                )
                life.at_end(drain.stop)
                dispatcher.admin.calls |= {"drain": drain.call, "drain_status": drain.status}
    except (InvalidRequest, NodeBusy, Unavailable):
        _stop_serving(node, api, control, background, life)
        raise
    if life.http is not None:
        ages = partial(_ages, membership, announcer) if membership is not None and announcer is not None else None
        life.http.routes["/metrics"] = _metrics_route(
            node, scrubber, api, ages, replicator.status if replicator is not None else None
        )
    tiers = node_stats(node)["tiers"]
    addresses = f", http on {life.http.address}{addresses}" if life.http is not None else addresses
    addresses += f", grpc on {' '.join(api.addresses)}" if api is not None else ""
    took_s = life.took_s
    line = _ready_line(config.name, tiers, took_s, addresses)
    life.report_ready(lambda: announce(line), took_s, pages=sum(tier["pages"] for tier in tiers.values()))
    watch = Watch(node, api.calls.refused if api is not None and api.calls is not None else {})

    def look() -> None:
        watch.look()
        if data_server is not None:
            data_server.look()

    life.wait(look)
    _stop_serving(node, api, control, background, life)
    watch.look(last=True)


def _metrics_route(
    node: Node,
    scrubber: Scrubber,
    api: ApiServer | None,
    ages: Callable[[], list[tuple[str, float, int]]] | None,
    replicas: Callable[[], dict[str, Any]] | None,
) -> Route:
    """Return the HTTP route of ``/metrics``.

    Args:
        ages: of membership and announcements, if the node is in a pool.
        replicas: state of second copies, if the node is in a pool.
    """
    from kvstore.node.operator.metrics import NodeMetrics

    queues = {"rpcs": api.under_way} if api is not None else {}
    metrics = NodeMetrics(node, scrubber, queues, api.calls if api is not None else None)
    if ages is not None:
        metrics.membership = ages
    if replicas is not None:
        metrics.replicas = replicas
    return metrics.route


def _ready_line(name: str, tiers: Mapping[str, Mapping[str, Any]], took_s: float, addresses: str) -> str:
    sizes = " + ".join(f"{format_size(tier['capacity_bytes'])} {name.upper()}" for name, tier in tiers.items())
    pages = " + ".join(str(tier["pages"]) for tier in tiers.values())  # not a sum: a page may be in several tiers
    return f"kvstore node {name} ready: {sizes}, {pages} pages kept, {took_s:.2f} s{addresses}"


def _entry(config: NodeConfig, node: Node, api: ApiServer | None) -> NodeEntry:
    """Return the node's entry for the catalog."""
    tiers = node_stats(node)["tiers"]
    return NodeEntry(
        name=config.name,
        process=schema.new_process(),
        incarnation=f"{node.incarnation:016x}",
        addresses=reachable(api.addresses if api is not None else []),
        capacity_bytes={name.lower(): tier["capacity_bytes"] for name, tier in tiers.items()},
        host=host(),
        machine=machine(),
        zone=config.zone,
        version=about.version(),
    )


def _announce(
    config: NodeConfig, node: Node, membership: Membership, entry: NodeEntry, life: Life, calls: dict[str, Call]
) -> Announcer:
    """Start announcing the node's pages to the pool. Adds admin calls that report what was announced and received."""
    networks = networks_of(config.data_private_networks)
    credentials = replace(credentials_of(os.environ), private_networks=networks)
    links, peers_file = PeerLinks(config.pool, config.name, credentials, LINKS_IDLE_S), PeersFile(node.folder)
    announcer = Announcer(
        *(node, config.name, entry.process, membership, peers_file, links, config.catalog_ttl_s),
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


def _replicate(
    config: NodeConfig, node: Node, membership: Membership, entry: NodeEntry, life: Life, calls: dict[str, Call]
) -> Replicator:
    """Start storing second copies on other nodes. Adds what is owed to the statistics."""
    links = PeerLinks(config.pool, f"replicator of {config.name}", credentials_of(os.environ))
    bucket = TrafficBucket(NodeFolder.at(node.folder), config.background_bytes_per_s)
    peers_file = PeersFile(node.folder)
    replicator = Replicator(
        *(node, entry, membership, peers_file, links, bucket, config.replicas_same_machine),
    )
    replicator.start()
    life.at_end(links.close)
    life.at_end(replicator.stop)
    stats = calls["stats"]
    calls["stats"] = lambda request: {**stats(request), "replicas": replicator.status()}
    return replicator


def _publish(membership: Membership, folder: NodeFolder, entry: NodeEntry) -> None:
    """Publish another value of the node's entry, and note it for the next daemon."""
    membership.update(entry)
    encoded = schema.encode(entry)
    folder.new_file(folder.path / MEMBER, len(encoded), encoded)


def _leave(
    node: Node,
    folder: NodeFolder,
    announcer: Announcer,
    replicator: Replicator,
    data_server: DataChild | None,
    membership: Membership,
) -> None:
    """Take the node out of its pool. Programs of this machine continue to use it."""
    replicator.stop()
    announcer.stop()
    if data_server is not None:
        data_server.stop()
    membership.stop()
    node.performer.header.replicas = 0
    peer_links.forget(folder)


def _ages(membership: Membership, announcer: Announcer) -> list[tuple[str, float, int]]:
    return membership.ages() + announcer.ages()


def _join(membership: Membership, entry: NodeEntry, folder: NodeFolder, life: Life) -> None:
    """Publish the node in the catalog, in place of the entry of an earlier daemon.

    This daemon has the folder's lock, so the earlier daemon is dead.
    """
    member_file = folder.path / MEMBER
    try:
        former = read_plain(member_file)
    except OSError:
        former = b""
    membership.start(entry, former=former, on_final=life.fail)
    encoded = schema.encode(entry)
    folder.new_file(member_file, len(encoded), encoded)


def _api(config: NodeConfig, node: Node, dispatcher: Dispatcher) -> ApiServer | None:
    if not config.listen:
        return None
    from kvstore.node.api.server import ApiServer  # imported only here, because it loads gRPC

    return ApiServer(config, node, dispatcher)


def _stop_serving(
    node: Node, api: ApiServer | None, control: ControlServer, background: Background, life: Life
) -> None:
    """Stop the servers and the background threads.

    If DRAM will be lost, the pages that only DRAM has are saved first, until another signal comes. Clients can read in
    the meantime, and writes are refused.
    """
    node.ending = True  # first, so that long calls stop early
    save_s, why = on_stop.save_s(node.config, node.folder.name)
    if api is not None:
        api.stop()
    if not save_s:
        control.stop()
    background.stop(save_s, why, life.hurry.is_set)
    if save_s:
        control.stop()


class Watch:
    """Logs what a node refuses or drops, summed up, so that many refusals make few lines.

    One thread calls ``look`` repeatedly, and at the end ``look(last=True)``.

    Args:
        refused: the refused gRPC calls: status code -> (number of calls, address of the last caller).
    """

    def __init__(self, node: Node, refused: Mapping[str, tuple[int, str]]) -> None:
        self._node = node
        self._refused = refused
        self._due_s = 0.0
        self._logged: dict[Kind, tuple[int, float]] = {}  # the last logged count, and when it was logged
        self._increases(float("inf"), self._counts())  # earlier counts are not logged

    def look(self, *, last: bool = False) -> None:
        """Log the counts that have increased. ``last``: include counts that were logged less than ``LOG_EVERY_S``
        ago."""
        now_s = time.monotonic()
        if now_s < self._due_s and not last:
            return
        self._due_s = now_s + LOOK_S
        for kind, count in self._increases(now_s if not last else float("inf"), self._counts()):
            match kind:
                case ("damage", reason):
                    event(watch_log, logging.ERROR, "damage found, the pages were dropped", reason=reason, pages=count)
                case ("quota", tenant, tier):
                    event(watch_log, logging.WARNING, "quota refused", tenant=tenant, tier=tier, pages=count)
                case ("grpc", code):
                    last_from = self._refused[code][1]
                    event(watch_log, logging.WARNING, "gRPC calls refused", code=code, calls=count, last_from=last_from)

    def _increases(self, now_s: float, counts: dict[Kind, int]) -> list[tuple[Kind, int]]:
        """Return by how much each count has increased since it was last logged, and record it as logged."""
        increases = []
        for kind, count in counts.items():
            before, logged_s = self._logged.get(kind, (0, -LOG_EVERY_S))
            if count > before and now_s >= logged_s + (0 if kind[0] == "damage" else LOG_EVERY_S):
                increases.append((kind, count - before))
                self._logged[kind] = count, min(now_s, time.monotonic())
        for kind in self._logged.keys() - counts.keys():  # the node has dropped this tenant's counts
            del self._logged[kind]
        return increases

    def _counts(self) -> dict[Kind, int]:
        counts: dict[Kind, int] = {}
        counters, rows = self._node.look(lambda _, state: (dict(state.counters), tenant_rows(state)))
        for name, count in counters.items():
            if name.startswith("damaged_"):
                counts["damage", name.removeprefix("damaged_")] = count
        for salt, tier, _, _, refused, _ in rows:
            if refused:
                counts["quota", salt, tier] = refused
        for code, (count, _) in dict(self._refused).items():
            counts["grpc", code] = count
        return counts
