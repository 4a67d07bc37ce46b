"""Daemon: a node with its control socket, gRPC API and HTTP, from start to SIGTERM."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvstore import about
from kvstore.catalog import schema
from kvstore.catalog.schema import NodeEntry
from kvstore.config import NodeConfig, format_size
from kvstore.errors import InvalidRequest, NodeBusy, Unavailable
from kvstore.service.cluster import data_child
from kvstore.service.cluster.announcer import Announcer
from kvstore.service.cluster.data_child import DataChild
from kvstore.service.cluster.heard import Heard
from kvstore.service.local.control import ControlServer
from kvstore.service.local.dispatch import Dispatcher
from kvstore.service.node import on_stop
from kvstore.service.node.node import Node
from kvstore.service.operator.admin import Call
from kvstore.service.operator.stats import node_stats
from kvstore.service.operator.watch import Watch
from kvstore.service.upkeep.background import Background
from kvstore.service.upkeep.scrubber import Scrubber
from kvstore.serving import lifecycle, tracing
from kvstore.serving.http import readyz
from kvstore.serving.lifecycle import Life
from kvstore.serving.membership import Membership, host, reachable
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import DaemonState
from kvstore.tier.plain_files import read_plain
from kvstore.transfer import peers
from kvstore.transfer.credentials import credentials_of
from kvstore.transfer.links import PeerLinks
from kvstore.transfer.peers import PeersFile

if TYPE_CHECKING:
    from kvstore.service.api.server import ApiServer

MEMBER = "member"  # in the node's folder: what its daemon published in a catalog last

log = logging.getLogger("kvstore.daemon")


def serve(config: NodeConfig, announce: Callable[[str], None]) -> None:
    """Run a node until SIGTERM or SIGINT; another one cuts its end short. ``announce`` is called once, with one line,
    when it serves.

    Raises:
        NodeBusy, InvalidRequest: see ``Node.start``; nothing was left running.
    """
    membership = Membership(config) if config.catalog else None
    sender = DataChild(config, NodeFolder(config.shm_dir, config.name)) if data_child.wanted(config) else None
    with lifecycle.running(config, log, "the daemon") as life:
        if config.otlp_endpoint:
            tracing.configure(config.otlp_endpoint, config.name)
            life.at_end(tracing.shutdown)
        with tracing.span("kvstore.start", node=config.name):
            node = Node.start(config)
        life.at_end(node.stop)
        life.begun()
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
            peers.forget(NodeFolder.at(node.folder))
        if sender is not None:
            where = f", data on {sender.start()}"
            life.at_end(sender.stop)
        if membership is not None:
            announcer = _announce(config, node, membership, mine, life, dispatcher.admin.calls)
    except (InvalidRequest, NodeBusy, Unavailable):
        _end_serving(node, api, control, background, life)
        raise
    if life.http is not None:
        from kvstore.service.operator.metrics import (
            NodeMetrics,  # only here: a daemon without HTTP needs no prometheus_client
        )

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
    life.serves(lambda: announce(line), took_s, pages=sum(tier["pages"] for tier in tiers.values()))
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
    links, served = PeerLinks(config.pool, config.name, credentials_of(os.environ)), data_child.wanted(config)
    peers_file = PeersFile(node.folder)
    announcer = Announcer(node, config.name, mine.process, membership, peers_file, links, config.catalog_ttl_s, served)
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
    calls["heard"] = Heard(node, config.name, membership, peers_file, links).look
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
    from kvstore.service.api.server import ApiServer  # only here: it loads gRPC

    return ApiServer(config, node, dispatcher)


def _end_serving(node: Node, api: ApiServer | None, control: ControlServer, background: Background, life: Life) -> None:
    """End in order. Where memory goes, what is only there is saved first, until another signal comes: readers go
    on meanwhile, writers are told."""
    node.ending = True  # before anything waits: calls that take long break off
    save_s, why = on_stop.save_s(node.config, node.folder.name)
    if api is not None:
        api.stop()
    if not save_s:
        control.stop()
    background.stop(save_s, why, life.hurried.is_set)
    if save_s:
        control.stop()
