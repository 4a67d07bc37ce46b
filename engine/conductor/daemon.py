"""Daemon: runs a conductor with its gRPC API and HTTP, from start to SIGTERM."""

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
    """What a conductor reports when it begins to serve."""

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
        """The report as one line for people; begins with ``kvstore conductor ready``."""
        where = f"grpc on {' '.join(self.grpc)}" + (f", http on {self.http}" if self.http else "")
        what = f"policy {self.policy}, {self.engines} engines, {self.nodes} nodes"
        return f"kvstore conductor ready: {what}, {self.took_s:.2f} s, {where}"


def serve(config: ConductorConfig, announce: Callable[[ConductorReady], None]) -> None:
    """Run a conductor until SIGTERM or SIGINT. ``announce`` is called once, when it serves.

    Raises:
        InvalidRequest: an address that cannot be used, or a catalog that is not valid; names the setting.
        Unavailable: the catalog does not answer.
    """
    membership = Membership(config) if config.catalog else None
    offer = Membership(config.offer) if config.offer_catalog else None
    with lifecycle.run(replace(config, http=None), log, "the conductor") as life:  # the HTTP server is separate
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
            offer.start(_offered(config, server), on_final=life.fail)
        said = ConductorReady(
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
        life.report_ready(lambda: announce(said), said.took_s, engines=said.engines)
        life.wait()
        ready.clear()
        server.refuse(http)
        for each in (offer, membership):
            if each is not None:
                each.stop()
        left = server.drain(config.drain_s, life.hurry, http)
        if http is not None:
            server.close_http(http)
        if left:
            logs.event(log, logging.WARNING, "answers did not end in time", answers=left)
    finally:
        for each in (offer, membership):
            if each is not None:
                each.stop()
        server.stop()


def _join(membership: Membership, config: ConductorConfig, server: ConductorServer, http: str, life: Life) -> None:
    process = schema.new_process()
    mine = ConductorEntry(
        name=f"{config.name}-{process[:8]}",
        process=process,
        addresses=reachable(server.addresses),
        http=http,
        policy=config.policy,
        host=host(),
        version=about.version(),
    )

    def changed() -> None:
        server.conductor.update_members(membership.engines(), membership.nodes(), membership.clusters())

    membership.start(mine, changed, on_final=life.fail)
    changed()
    membership.lead(mine.name)


def _offered(config: ConductorConfig, server: ConductorServer) -> ClusterEntry:
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


def described(said: ConductorReady) -> dict[str, Any]:
    """What ``--json`` prints."""
    return {"ready": True, **vars(said), "line": said.line}
