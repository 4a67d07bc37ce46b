"""Daemon: runs a conductor, with its gRPC API and its HTTP server, from the start until SIGTERM."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.conductor.config import ConductorConfig
from engine.conductor.grpc_api import ConductorServer
from engine.conductor.shell.metrics import ConductorMetrics, ConductorTally
from kvstore import about, logs
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.schema import ClusterEntry, ConductorEntry
from kvstore.cluster.membership import Membership, host, reachable
from kvstore.server import lifecycle, listening
from kvstore.server.http import Readiness, readyz, routes
from kvstore.server.identities import Identities
from kvstore.server.lifecycle import Life

log = logging.getLogger("kvstore.conductor")


@dataclass(frozen=True)
class ConductorReady:
    """The report of a conductor that has begun to serve."""

    policy: str
    split: str
    engines: int
    nodes: int
    grpc: tuple[str, ...]
    http: str | None
    took_s: float
    pid: int

    @property
    def line(self) -> str:
        """The report as one line of text. It begins with ``kvstore conductor ready``."""
        addresses = f"grpc on {' '.join(self.grpc)}" + (f", http on {self.http}" if self.http else "")
        fleet = f"policy {self.policy}, {self.engines} engines, {self.nodes} nodes"
        return f"kvstore conductor ready: {fleet}, {self.took_s:.2f} s, {addresses}"

    @property
    def document(self) -> dict[str, Any]:
        """The report as ``--json`` prints it."""
        return {"ready": True, **vars(self), "line": self.line}


def serve(config: ConductorConfig, announce: Callable[[ConductorReady], None]) -> None:
    """Run a conductor until SIGTERM or SIGINT. ``announce`` is called once, when the conductor serves.

    Raises:
        InvalidRequest: an address cannot be used, or the catalog is not valid. The error names the setting.
        Unavailable: the catalog is not responding.
    """
    membership = Membership(config) if config.catalog else None
    offer = Membership(config.offer) if config.offer_catalog else None
    without_http = replace(config, http=None)  # the conductor has an HTTP server of its own
    with lifecycle.run(without_http, log, "the conductor") as life:
        listening.plan(config, Identities(config.identities))
        life.log_start(policy=config.policy)
        _run(config, membership, offer, life, announce)


def _run(
    config: ConductorConfig,
    membership: Membership | None,
    offer: Membership | None,
    life: Life,
    announce: Callable[[ConductorReady], None],
) -> None:
    tally = ConductorTally()
    server = ConductorServer(config, tally, lambda: 0 if membership is None else membership.leading)
    ready, http = Readiness(), None
    try:
        server.start()
        life.on_hangup(server.reload)
        conductor = server.conductor
        if config.http is not None:
            metrics = ConductorMetrics(config.name, tally, conductor.status, server.calls)
            if membership is not None:
                metrics.membership = membership.ages
            fault = membership.fault if membership is not None else str
            http = server.open_http({**routes(ready), "/readyz": readyz(ready, fault), "/metrics": metrics.route})
            metrics.http = http.tally
        if membership is not None:
            _join(membership, config, server, http.address if http is not None else "", life)
            conductor.membership = membership.status
        server.settle()
        if offer is not None:
            offer.start(_cluster_entry(config, server), on_final=life.fail)
        report = ConductorReady(
            policy=config.policy,
            split=config.split,
            engines=len(conductor.members.engines),
            nodes=len(conductor.members.nodes),
            grpc=tuple(server.addresses),
            http=http.address if http is not None else None,
            took_s=round(life.took_s, 3),
            pid=os.getpid(),
        )
        ready.set()
        life.report_ready(lambda: announce(report), report.took_s, engines=report.engines)
        life.wait()
        ready.clear()
        server.refuse(http)
        for each in (offer, membership):
            if each is not None:
                each.stop()
        unfinished = server.drain(config.drain_s, life.hurry, http)
        if http is not None:
            server.close_http(http)
        if unfinished:
            logs.event(log, logging.WARNING, "answers did not end in time", answers=unfinished)
    finally:
        for each in (offer, membership):
            if each is not None:
                each.stop()
        server.stop()


def _join(membership: Membership, config: ConductorConfig, server: ConductorServer, http: str, life: Life) -> None:
    """Enter the conductor in the catalog of its pool, follow the members, and stand for election as leader."""
    process = schema.new_process()
    entry = ConductorEntry(
        name=f"{config.name}-{process[:8]}",
        process=process,
        addresses=reachable(server.addresses),
        http=http,
        policy=config.policy,
        host=host(),
        version=about.version(),
    )

    def update() -> None:
        server.conductor.update_members(membership.engines(), membership.nodes(), membership.clusters())

    membership.start(entry, update, on_final=life.fail)
    update()
    membership.lead(entry.name)


def _cluster_entry(config: ConductorConfig, server: ConductorServer) -> ClusterEntry:
    """Return the entry that offers the engines of this pool in the catalog of another pool."""
    process = schema.new_process()
    return ClusterEntry(
        name=f"{config.name}-{process[:8]}",
        process=process,
        offered=config.pool,
        addresses=reachable(server.addresses),
        egress_bytes_per_s=config.offer_egress,
        host=host(),
        version=about.version(),
    )
