"""Metrics of a conductor: ``/metrics`` for Prometheus, all of them called ``kvstore_conductor_*``. ``METRICS`` is the
list. The number of series is bounded: labels are outcomes, phases, roles and gRPC methods.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from engine.conductor.state.kv_blocks import KV_OUTCOMES
from engine.model.request import Role
from kvstore.server.call_counts import Calls, Durations
from kvstore.server.metrics import INTERNAL_ERRORS, MEMBERSHIP, SHED_HELP, DaemonMetrics, Families, metric_info

PREFIX: Final = "kvstore_conductor"

_about = partial(metric_info, PREFIX)

OUTCOMES: Final = ("stop", "eos", "length", "cancelled", "refused", "failed")

_about = partial(metric_info, PREFIX)

HTTP_METRICS: Final = (
    _about("counter", "http_requests", "HTTP requests that ended; 499: the client had gone.", "path", "code"),
    _about("histogram", "http_first_token_seconds", "Time from a request's arrival to the first part of its answer."),
    _about("gauge", "http_requests_here", "HTTP requests under way."),
    _about("gauge", "http_connections", "HTTP connections that are open."),
    _about("counter", "http_sent_bytes", "Bytes of replies over HTTP."),
)
GONE: Final = 499

METRICS: Final = (
    _about("counter", "answers", f"Requests that ended: {', '.join(OUTCOMES)}.", "outcome"),
    _about("counter", "routed", "Requests sent to engines; one that goes on elsewhere counts again."),
    _about("counter", "broken", "Times that an engine failed on an answer, which went on elsewhere or was lost."),
    _about("counter", "role_refusals", "Times that an engine refused a request for its role, which was routed again."),
    _about("counter", "prompt_tokens", "Tokens of the prompts of requests that were answered."),
    _about("counter", "completion_tokens", "Tokens generated for them."),
    _about("counter", "kv_events", f"KV events of back ends: {', '.join(KV_OUTCOMES)}.", "outcome"),
    _about("histogram", "decision_seconds", "Time of a decision about a request that arrives."),
    _about("histogram", "ttft_seconds", "Time from a request's arrival to its first token."),
    _about("gauge", "requests_here", "Requests by phase: waiting, kept (for a prefix), sent, decoding.", "phase"),
    _about("gauge", "engines", "Engines that are known, by role.", "role"),
    _about("gauge", "engines_draining", "Engines among them that take nothing new."),
    _about("gauge", "nodes", "Nodes whose pages are followed."),
    _about("gauge", "index_pages", "Pages that nodes have reported."),
    _about("gauge", "leads", "1 where this conductor gives the orders of its pool."),
    *HTTP_METRICS,
    _about("counter", "grpc_calls", "gRPC calls that ended, by status code; refused ones as well.", "method", "code"),
    _about("counter", "grpc_shed_calls", SHED_HELP, "reason"),
    _about("histogram", "grpc_call_duration_seconds", "Time from a call's arrival to its end.", "method"),
    _about("counter", "grpc_bytes", "Bytes of messages over gRPC.", "direction"),
    *MEMBERSHIP,
    INTERNAL_ERRORS,
    _about("gauge", "uptime_seconds", "Time since this conductor started."),
    _about("gauge", "process_resident_bytes", "Memory of the process that is resident."),
    _about("counter", "process_cpu_seconds", "Processor time of the process."),
    _about("gauge", "build_info", "1; the labels say what runs.", "version", "python", "name", "policy"),
)


class ConductorTally:
    """Counts.

    Attributes:
        outcomes: ended answers, by outcome.
        routed: requests that were sent to engines; one that goes on elsewhere counts again.
        broken: times that an engine failed on an answer.
        role_refusals: times that an engine refused a request because of its role, which was then routed again.
        decided: time of the decision about an arriving request.
        ttft: from a request's arrival to its first token.
        kv_events: outcomes of KV events of foreign engines.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.routed = self.broken = self.role_refusals = self.prompt_tokens = self.completion_tokens = 0
        self.kv_events: Counter[str] = Counter(dict.fromkeys(KV_OUTCOMES, 0))
        self.decided, self.ttft = Durations(), Durations()


class HttpTally:
    """Written by the server's event loop, read by any thread. Paths are those that are served, and "other"."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, int]] = Counter()
        self.first_token = Durations()
        self.requests_here = 0
        self.connections = 0
        self.sent_bytes = 0

    def add_samples(self, add: Families) -> None:
        """Add a sample of each of ``HTTP_METRICS``."""
        for (path, code), count in dict(self.ended).items():
            add("http_requests", count, path, str(code))
        add.durations("http_first_token_seconds", self.first_token)
        add("http_requests_here", self.requests_here)
        add("http_connections", self.connections)
        add("http_sent_bytes", self.sent_bytes)


class ConductorMetrics(DaemonMetrics):
    """Samples the metrics of a conductor.

    Attributes:
        http: counts of its HTTP server, once that is open.
    """

    def __init__(
        self, name: str, tally: ConductorTally, status: Callable[[], Mapping[str, Any]], calls: Calls | None
    ) -> None:
        super().__init__(PREFIX, METRICS)
        self._name = name
        self._tally = tally
        self._status = status
        self._calls = calls
        self._began_s = time.monotonic()
        self.http: HttpTally | None = None

    def add_samples(self, add: Families) -> None:
        """See ``DaemonMetrics``."""
        tally, status = self._tally, self._status()
        for outcome in OUTCOMES:
            add("answers", tally.outcomes[outcome], outcome)
        for outcome in KV_OUTCOMES:
            add("kv_events", tally.kv_events[outcome], outcome)
        for name in ("routed", "broken", "role_refusals", "prompt_tokens", "completion_tokens"):
            add(name, getattr(tally, name))
        add.durations("decision_seconds", tally.decided)
        add.durations("ttft_seconds", tally.ttft)
        for phase, count in status["requests"].items():
            add("requests_here", count, phase)
        engines = status["engines"].values()
        roles = Counter(engine["role"] for engine in engines)
        for role in Role:
            add("engines", roles[role], role)
        add("engines_draining", sum(engine["draining"] for engine in engines))
        add("nodes", len(status["nodes"]))
        add("index_pages", status["pages"])
        add("leads", status["leads"])
        if self.http is not None:
            self.http.add_samples(add)
        if self._calls is not None:
            add.grpc(self._calls)
        add.process(time.monotonic() - self._began_s, self._name, str(status["policy"]))
