"""Metrics of a conductor, which ``/metrics`` shows to Prometheus.

All names begin with ``kvstore_conductor_``, and ``METRICS`` lists them. The labels are outcomes, phases, roles, paths
and gRPC methods, so the number of series is bounded.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from engine.conductor.state.kv_blocks import KV_OUTCOMES
from engine.model.request import Role
from kvstore.server.call_counts import Calls, Durations
from kvstore.server.metrics import INTERNAL_ERRORS, MEMBERSHIP, SHED_HELP, DaemonMetrics, Families, metric_info

PREFIX: Final = "kvstore_conductor"

OUTCOMES: Final = ("stop", "eos", "length", "cancelled", "refused", "failed")

_about = partial(metric_info, PREFIX)

HTTP_METRICS: Final = (
    _about("counter", "http_requests", "HTTP requests that ended; 499: the client had gone.", "path", "code"),
    _about("histogram", "http_first_token_seconds", "Time from a request's arrival to the first part of its answer."),
    _about("gauge", "http_requests_here", "HTTP requests under way."),
    _about("gauge", "http_connections", "HTTP connections that are open."),
    _about("counter", "http_sent_bytes", "Bytes of replies over HTTP."),
)
RECENT_MAX: Final = 64
ERROR_SMOOTH: Final = 0.02
ERROR_MAX: Final = 10.0
GONE: Final = 499  # the status that counts a request whose client has gone

METRICS: Final = (
    _about("counter", "answers", f"Requests that ended: {', '.join(OUTCOMES)}.", "outcome"),
    _about("counter", "routed", "Requests sent to engines. A request that continues at another engine counts again."),
    _about(
        "counter",
        "broken",
        "How often an engine failed during an answer. The answer then continued at another engine, or was lost.",
    ),
    _about("counter", "role_refusals", "Requests that an engine refused because of its role. They were routed again."),
    _about("counter", "prompt_tokens", "Tokens of the prompts of requests that were answered."),
    _about("counter", "completion_tokens", "Tokens generated for them."),
    _about("counter", "kv_events", f"KV events of back ends: {', '.join(KV_OUTCOMES)}.", "outcome"),
    _about("histogram", "decision_seconds", "Time of a decision about a new request."),
    _about("histogram", "ttft_seconds", "Time from a request's arrival to its first token."),
    _about("gauge", "ttft_error_ratio", "Mean relative error of the predicted times to the first token."),
    _about("gauge", "requests_here", "Requests by phase: waiting, kept (for a prefix), sent, decoding.", "phase"),
    _about("gauge", "engines", "Engines that serve requests, by role.", "role"),
    _about("gauge", "engines_draining", "Engines that drain: they accept no new requests."),
    _about("gauge", "nodes", "Nodes whose pages are followed."),
    _about("gauge", "index_pages", "Pages that nodes have reported."),
    _about("gauge", "leads", "1 if this conductor leads its pool and gives the orders."),
    *HTTP_METRICS,
    _about("counter", "grpc_calls", "gRPC calls that ended, by status code, including refused ones.", "method", "code"),
    _about("counter", "grpc_shed_calls", SHED_HELP, "reason"),
    _about("histogram", "grpc_call_duration_seconds", "Time from a call's arrival to its end.", "method"),
    _about("counter", "grpc_bytes", "Bytes of messages over gRPC.", "direction"),
    *MEMBERSHIP,
    INTERNAL_ERRORS,
    _about("gauge", "uptime_seconds", "Time since this conductor started."),
    _about("gauge", "process_resident_bytes", "Resident memory of the process."),
    _about("counter", "process_cpu_seconds", "Processor time of the process."),
    _about("gauge", "build_info", "Always 1; its labels describe the process.", "version", "python", "name", "policy"),
)


class ConductorTally:
    """Counts since the start of a conductor.

    Attributes:
        outcomes: answers that ended, by outcome.
        routed: requests sent to engines. A request that continues at another engine counts again.
        broken: how many times an engine failed on an answer.
        role_refusals: how many times an engine refused a request because of its role.
        decided: the time of a decision about a new request.
        ttft: the time from a request's arrival to its first token.
        kv_events: KV events of foreign engines, by outcome.
        recent: the requests that ended last, as documents.
        ttft_error: how far predictions of the first token were off: a moving mean of ``|predicted / measured - 1|``,
            in which an error counts as at most ``ERROR_MAX``; None before the first one.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.routed = self.broken = self.role_refusals = self.prompt_tokens = self.completion_tokens = 0
        self.kv_events: Counter[str] = Counter(dict.fromkeys(KV_OUTCOMES, 0))
        self.decided, self.ttft = Durations(), Durations()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_MAX)
        self.ttft_error: float | None = None

    def recent_requests(self, now_s: float) -> list[dict[str, Any]]:
        """Return ``recent``, with the seconds since each end."""
        return [{**each, "ended_ago_s": round(now_s - each["ended_at_s"], 1)} for each in list(self.recent)]

    def add_first_token(self, measured_s: float, predicted_s: float) -> None:
        """Record the time to a first token, and the predicted one; 0 if there was no prediction."""
        self.ttft.add(measured_s)
        if predicted_s > 0 and measured_s > 0:
            error = min(ERROR_MAX, abs(predicted_s / measured_s - 1))
            before = error if self.ttft_error is None else self.ttft_error
            self.ttft_error = before + ERROR_SMOOTH * (error - before)


class HttpTally:
    """Counts of the HTTP server. Its event loop writes them, and any thread may read them.

    Attributes:
        ended: requests that ended, by path and status. Paths that are not served count as "other".
        first_token: the time from a request's arrival to the first part of its answer.
        requests_here: requests that have not ended.
        connections: open connections.
        sent_bytes: bytes of replies.
    """

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, int]] = Counter()
        self.first_token = Durations()
        self.requests_here = 0
        self.connections = 0
        self.sent_bytes = 0

    def add_samples(self, add: Families) -> None:
        """Add the samples of ``HTTP_METRICS``."""
        for (path, code), count in dict(self.ended).items():
            add("http_requests", count, path, str(code))
        add.durations("http_first_token_seconds", self.first_token)
        add("http_requests_here", self.requests_here)
        add("http_connections", self.connections)
        add("http_sent_bytes", self.sent_bytes)


class ConductorMetrics(DaemonMetrics):
    """Samples the metrics of a conductor.

    Args:
        status: returns ``Conductor.status``.
        calls: counts of gRPC calls.

    Attributes:
        http: counts of the HTTP server; None if it is not open.
    """

    def __init__(
        self, name: str, tally: ConductorTally, status: Callable[[], Mapping[str, Any]], calls: Calls | None
    ) -> None:
        super().__init__(PREFIX, METRICS)
        self._name = name
        self._tally = tally
        self._status = status
        self._calls = calls
        self._start_s = time.monotonic()
        self.http: HttpTally | None = None

    def add_samples(self, add: Families) -> None:
        """Add the samples of ``METRICS``."""
        tally, status = self._tally, self._status()
        for outcome in OUTCOMES:
            add("answers", tally.outcomes[outcome], outcome)
        for outcome in KV_OUTCOMES:
            add("kv_events", tally.kv_events[outcome], outcome)
        for name in ("routed", "broken", "role_refusals", "prompt_tokens", "completion_tokens"):
            add(name, getattr(tally, name))
        add.durations("decision_seconds", tally.decided)
        add.durations("ttft_seconds", tally.ttft)
        if tally.ttft_error is not None:
            add("ttft_error_ratio", tally.ttft_error)
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
        add.process(time.monotonic() - self._start_s, self._name, str(status["policy"]))
