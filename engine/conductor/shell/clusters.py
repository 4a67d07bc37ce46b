"""Clusters: remote pools whose engines compute prompts for this pool (PrfaaS: selective offload to a remote cluster).

A remote cluster appears as one engine for each model. That engine computes as many prompts at a time as the cluster has
engines for the model. The conductor of the cluster reports these engines and how busy they are. When a prompt goes
there, that conductor chooses which of its engines computes the prompt. The answering engine pulls the KV from the
chosen engine, as it does within its own pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from google.protobuf.struct_pb2 import Struct

from engine.api.wire import submit_request
from engine.conductor.links import GrpcLink
from engine.conductor.shell.reports import (
    EGRESS_MAX,
    FINGERPRINT,
    PAGE_BYTES_MAX,
    PAGE_TOKENS_MAX,
    RATE_MAX,
    REQUESTS_MAX,
    TEXT_MAX,
    TOKENS_MAX,
    ReportReader,
)
from engine.conductor.state import events as ev
from engine.conductor.state.engine_table import EngineAbout, LoadReport
from engine.model.request import Request, Role
from kvstore.client.remote.admin import document
from kvstore.cluster.catalog.schema import ClusterEntry
from kvstore.errors import NodeUnavailable
from kvstore.pb import conductor_pb2, store_pb2

CONDUCTORS: Final = "kvstore.v1.Conductor"
STATUS_S: Final = 5.0
ROUTE_S: Final = 1.0  # how long a prompt waits for a route: after that, another engine computes it sooner
MODELS_MAX: Final = 64  # models of one cluster that are used

log = logging.getLogger("kvstore.conductor")


class ConductorLink(GrpcLink):
    """A connection to another conductor."""

    def __init__(self, address: str) -> None:
        super().__init__(CONDUCTORS, address)

    async def status(self) -> dict[str, Any]:
        """Return the state of the conductor: its engines, nodes and requests."""
        return document(await self._call("Status", store_pb2.Empty(), Struct, STATUS_S))

    async def route(self, request: Request, model: str) -> dict[str, Any]:
        """Return where the conductor would send this request, and why."""
        message = conductor_pb2.RouteRequest(request=submit_request(request), model=model)
        return document(await self._call("Route", message, Struct, ROUTE_S))


@dataclass(frozen=True, slots=True)
class _Offer:
    """The engines of a cluster that serve one model with one layout, described as a single engine."""

    about: EngineAbout
    report: LoadReport
    addresses: Mapping[str, str]  # addresses of the engines, by their names in that cluster


class RemoteCluster:
    """One remote cluster of the catalog. Belongs to one event loop.

    Args:
        handle: is called with each event that follows.
    """

    def __init__(self, entry: ClusterEntry, handle: Callable[[ev.ConductorEvent], None]) -> None:
        self.link = ConductorLink(entry.addresses[0])
        self._entry = entry
        self._handle = handle
        self._offers: dict[str, _Offer] = {}  # by the name of the engine that represents them here

    async def poll(self) -> None:
        """Ask the cluster for its engines and their load.

        Raises:
            KVStoreError: the cluster is not responding, or its answer is not valid.
        """
        for name in self._offers:
            self._handle(ev.ReportRequested(time.monotonic(), name))
        offers = _offers(self._entry, await self.link.status())
        now_s = time.monotonic()
        for name in self._offers.keys() - offers.keys():
            del self._offers[name]
            self._handle(ev.EngineLost(now_s, name))
        for name, offer in offers.items():
            known = self._offers.get(name)
            self._offers[name] = offer
            if known is None or known.about != offer.about:
                self._handle(ev.EngineFound(now_s, offer.about, Role.PREFILL))
            self._handle(ev.LoadReported(now_s, name, offer.report))

    def mark_silent(self) -> None:
        """Record that the cluster did not answer."""
        for name in self._offers:
            self._handle(ev.EngineSilent(time.monotonic(), name))

    def remove(self) -> None:
        """Record that the cluster is no longer in the catalog."""
        for name in self._offers:
            self._handle(ev.EngineLost(time.monotonic(), name))
        self._offers.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._offers

    async def choose_engine(self, name: str, request: Request) -> str:
        """Return the address of the engine that will compute this prompt.

        Args:
            name: the engine that represents the model of the cluster here.

        Raises:
            KVStoreError: no engine of the cluster can compute it, or the cluster is not responding.
        """
        offer = self._offers[name]
        reply = await self.link.route(replace(request, generated=0, prefill=None), offer.about.model)
        candidates = reply.get("candidates")
        for candidate in candidates if isinstance(candidates, list) else ():  # the best is first
            engine = candidate.get("engine") if isinstance(candidate, dict) else None
            if isinstance(engine, str) and engine in offer.addresses and not candidate.get("silent"):
                return offer.addresses[engine]
        raise NodeUnavailable(f"{self._entry.offered}: {str(reply.get('why', 'no engine can compute it'))[:TEXT_MAX]}")


def _offers(entry: ClusterEntry, status: Mapping[str, Any]) -> dict[str, _Offer]:
    """Return the offers of a cluster, by name. If a model has several layouts, the one with most engines is offered.

    Raises:
        VersionMismatch: the status is not valid.
    """
    groups: dict[tuple[str, str], dict[str, ReportReader]] = {}  # by model and layout: engines by name
    engines = ReportReader(entry.addresses[0], status).part("engines").items()
    for name, engine in sorted(engines, key=lambda each: each[0]):
        is_external = engine.flag("foreign") or engine.number("egress_bytes_per_s", 0, EGRESS_MAX)
        if engine.role("role") != Role.DECODE and not engine.flag("draining") and not is_external:
            groups.setdefault((engine.text("model"), engine.text("layout", FINGERPRINT)), {})[name] = engine
    largest_last = sorted(groups.items(), key=lambda each: (len(each[1]), each[0]))[-MODELS_MAX:]
    return {offer.about.name: offer for offer in (_offer(entry, *key, group) for key, group in largest_last)}


def _offer(entry: ClusterEntry, model: str, layout: str, engines: Mapping[str, ReportReader]) -> _Offer:
    first = next(iter(engines.values()))
    speeds = [each.number("prefill_tokens_per_s", 0, RATE_MAX) for each in engines.values()]
    about = EngineAbout(
        name=f"{entry.offered}/{model}",
        address=entry.addresses[0],
        model=model,
        layout=layout,
        page_tokens=first.whole("page_tokens", 1, PAGE_TOKENS_MAX),
        kv_bytes=first.whole("kv_bytes", 1, PAGE_BYTES_MAX),
        host=entry.host,
        zone=entry.offered,
        context_max=max(each.whole("context_max", 0, TOKENS_MAX) for each in engines.values()),
        lanes=len(engines),
        egress_bytes_per_s=float(entry.egress_bytes_per_s),
    )
    waiting = sum(each.whole("waiting", 0, REQUESTS_MAX) for each in engines.values())
    report = LoadReport(role=Role.PREFILL, waiting=waiting, prefill_tokens_per_s=sum(speeds) / len(speeds))
    return _Offer(about, report, {name: each.text("address") for name, each in engines.items()})
