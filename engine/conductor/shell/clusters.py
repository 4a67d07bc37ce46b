"""Clusters: other pools whose engines compute prompts for ours (PrfaaS: selective offload to a remote cluster).

A remote cluster appears here as one engine per model, which computes as many prompts at a time as the cluster has
engines for it. Its conductor reports what they are and how busy; when a prompt goes there, the conductor is asked again
which of its engines is to compute it. The answering engine then pulls the KV from that one, as from any other.
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
    Said,
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
ROUTE_S: Final = 1.0  # how long a prompt waits for this: after that another engine computes it sooner
MODELS_MAX: Final = 64

log = logging.getLogger("kvstore.conductor")


class ConductorLink(GrpcLink):
    """A connection to another conductor."""

    def __init__(self, address: str) -> None:
        super().__init__(CONDUCTORS, address)

    async def status(self) -> dict[str, Any]:
        """What it is, what it knows, what waits."""
        return document(await self._call("Status", store_pb2.Empty(), Struct, STATUS_S))

    async def route(self, request: Request, model: str) -> dict[str, Any]:
        """Where it would send this prompt, and why."""
        said = conductor_pb2.RouteRequest(request=submit_request(request), model=model)
        return document(await self._call("Route", said, Struct, ROUTE_S))


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a cluster has for one model: the engines of one layout."""

    about: EngineAbout
    report: LoadReport
    addresses: Mapping[str, str]  # by the engine's name in that cluster


class RemoteCluster:
    """One remote cluster, as its catalog entry describes it. Belongs to one event loop.

    Args:
        handle: receives the resulting events.
    """

    def __init__(self, entry: ClusterEntry, handle: Callable[[ev.ConductorEvent], None]) -> None:
        self.link = ConductorLink(entry.addresses[0])
        self._entry = entry
        self._handle = handle
        self._offers: dict[str, _Offer] = {}  # by their names here

    async def ask(self) -> None:
        """Ask what it has, and how busy that is.

        Raises:
            KVStoreError: it does not answer, or its answer is not valid.
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

    def silent(self) -> None:
        """Record that it did not answer."""
        for name in self._offers:
            self._handle(ev.EngineSilent(time.monotonic(), name))

    def lost(self) -> None:
        """Record that it has left the catalog."""
        for name in self._offers:
            self._handle(ev.EngineLost(time.monotonic(), name))
        self._offers.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._offers

    async def computes(self, name: str, request: Request) -> str:
        """The address of the engine that is to compute this prompt, among those that have this name here.

        Raises:
            KVStoreError: no engine there can, or it does not answer.
        """
        offer = self._offers[name]
        told = await self.link.route(replace(request, generated=0, prefill=None), offer.about.model)
        candidates = told.get("candidates")
        for candidate in candidates if isinstance(candidates, list) else ():  # the best one first
            engine = candidate.get("engine") if isinstance(candidate, dict) else None
            if isinstance(engine, str) and engine in offer.addresses and not candidate.get("silent"):
                return offer.addresses[engine]
        raise NodeUnavailable(f"{self._entry.offered}: {str(told.get('why', 'no engine computes it'))[:TEXT_MAX]}")


def _offers(entry: ClusterEntry, status: Mapping[str, Any]) -> dict[str, _Offer]:
    """By model, its engines that compute prompts; with several layouts the one that most engines have.

    Raises:
        VersionMismatch: its answer is not valid.
    """
    found: dict[tuple[str, str], dict[str, Said]] = {}
    for name, engine in sorted(Said(entry.addresses[0], status).part("engines").items(), key=lambda each: each[0]):
        not_its_own = engine.flag("foreign") or engine.number("egress_bytes_per_s", 0, EGRESS_MAX)
        if engine.role("role") != Role.DECODE and not engine.flag("draining") and not not_its_own:
            found.setdefault((engine.text("model"), engine.text("layout", FINGERPRINT)), {})[name] = engine
    most = sorted(found.items(), key=lambda each: (len(each[1]), each[0]))[-MODELS_MAX:]
    return {offer.about.name: offer for offer in (_offer(entry, *key, engines) for key, engines in most)}


def _offer(entry: ClusterEntry, model: str, layout: str, engines: Mapping[str, Said]) -> _Offer:
    one = next(iter(engines.values()))
    speeds = [each.number("prefill_tokens_per_s", 0, RATE_MAX) for each in engines.values()]
    about = EngineAbout(
        name=f"{entry.offered}/{model}",
        address=entry.addresses[0],
        model=model,
        layout=layout,
        page_tokens=one.whole("page_tokens", 1, PAGE_TOKENS_MAX),
        kv_bytes=one.whole("kv_bytes", 1, PAGE_BYTES_MAX),
        host=entry.host,
        zone=entry.offered,
        context_max=max(each.whole("context_max", 0, TOKENS_MAX) for each in engines.values()),
        lanes=len(engines),
        egress_bytes_per_s=float(entry.egress_bytes_per_s),
    )
    waiting = sum(each.whole("waiting", 0, REQUESTS_MAX) for each in engines.values())
    report = LoadReport(role=Role.PREFILL, waiting=waiting, prefill_tokens_per_s=sum(speeds) / len(speeds))
    return _Offer(about, report, {name: each.text("address") for name, each in engines.items()})
