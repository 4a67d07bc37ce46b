"""Metrics for Prometheus: the tools with which every daemon makes its ``/metrics``.

Each daemon has a table of ``MetricInfo``, the list of all metrics that it exports.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvstore import about, boundary
from kvstore.server.call_counts import BOUNDS_S, Calls, Durations


class MetricInfo(NamedTuple):
    """One metric: ``kind`` is counter, gauge or histogram; counters are exported as ``name + "_total"``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def exported(self) -> str:
        """The name in Prometheus. A histogram's name is without ``_bucket``."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def metric_info(prefix: str, kind: str, name: str, help: str, *labels: str) -> MetricInfo:
    """Return the metric ``<prefix>_<name>``."""
    return MetricInfo(f"{prefix}_{name}", kind, labels, help)


def table_text(metrics: Sequence[MetricInfo]) -> str:
    """Return the metrics as a table for the docs."""
    rows = [f"| `{info.exported}` | {info.kind} | {', '.join(info.labels)} | {info.help} |" for info in metrics]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])


SHED_HELP: Final = (
    "Calls that were refused or ended because a resource was used up, by resource. late: time; calls: rpcs_max;"
    " share: a tenant's part of rpcs_max; buffers; quick, read, wait: threads of this kind; other: reservations."
    " half_open: calls whose request had not arrived, ended to make room for another call."
)

INTERNAL_ERRORS: Final = metric_info(
    "kvstore",
    "counter",
    "internal_errors",
    "Unexpected errors, by the place that caught them (kvstore/boundary.py): a request, a connection, a turn of a"
    " task. The log has each error with its stack. Places in the node's data server begin with data.",
    "place",
)
"""Every daemon has this one, under this name."""

MEMBERSHIP_AGE: Final = metric_info(
    "kvstore",
    "gauge",
    "membership_success_age_seconds",
    "Time since a task that keeps the daemon in its pool last succeeded: watch, session, presence, election,"
    " election_watch, announcing. Normally it is at most a few seconds.",
    "task",
)
MEMBERSHIP_FAILURES: Final = metric_info(
    "kvstore",
    "counter",
    "membership_failures",
    "Failed attempts of the tasks that keep the daemon in its pool. Each is retried.",
    "task",
)
MEMBERSHIP: Final = (MEMBERSHIP_AGE, MEMBERSHIP_FAILURES)
"""Every daemon in a pool has these, under these names."""


CONTENT_TYPE: Final = "text/plain; version=0.0.4"
_KINDS: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Families:
    """All metric families of one scrape, in the order of their table. A call of the object adds one sample."""

    def __init__(self, prefix: str, metrics: Sequence[MetricInfo]) -> None:
        self._prefix = prefix
        self.families: dict[str, Any] = {
            about.name: _KINDS[about.kind](about.name, about.help, labels=about.labels) for about in metrics
        }

    def __call__(self, name: str, value: float, *labels: str) -> None:
        """Add one sample to ``<prefix>_<name>``."""
        self.families[f"{self._prefix}_{name}"].add_metric(labels, value)

    def buckets(
        self, name: str, bounds_s: Sequence[float], counts: Sequence[int], sum_s: float | None, *labels: str
    ) -> None:
        """Add one histogram. ``counts`` has one count per bucket; the last bucket has no bound."""
        total, rows = 0, []
        for bound, count in zip((*bounds_s, float("inf")), counts, strict=True):
            total += count
            rows.append((floatToGoString(bound), total))
        self.families[f"{self._prefix}_{name}"].add_metric(labels, rows, sum_s)

    def durations(self, name: str, took: Durations, *labels: str) -> None:
        """Add one histogram."""
        self.buckets(name, BOUNDS_S, list(took.counts), took.sum_s, *labels)

    def grpc(self, calls: Calls) -> None:
        """Add the counts of gRPC calls."""
        for (method, code), count in dict(calls.ended).items():
            self("grpc_calls", count, method, code)
        for reason, count in dict(calls.shed).items():
            self("grpc_shed_calls", count, reason)
        for method, took in dict(calls.durations).items():
            self.durations("grpc_call_duration_seconds", took, method)
        self("grpc_bytes", calls.received_bytes, "in")
        self("grpc_bytes", calls.sent_bytes, "out")

    def process(self, uptime_s: float, *labels: str) -> None:
        """Add the description of the process. ``labels``: values of labels in addition to the versions."""
        for place, count in boundary.counts().items():
            self.families[INTERNAL_ERRORS.name].add_metric((place,), count)
        self("uptime_seconds", uptime_s)
        self("process_resident_bytes", _resident_bytes())
        self("process_cpu_seconds", time.process_time())
        self("build_info", 1, about.version(), platform.python_version(), *labels)


class DaemonMetrics(Collector):
    """``/metrics`` of a daemon. Collects on every scrape, one scrape at a time.

    Attributes:
        membership: returns each membership task's name, the seconds since it last succeeded, and its failures.
    """

    def __init__(self, prefix: str, metrics: Sequence[MetricInfo]) -> None:
        self.membership: Callable[[], Iterable[tuple[str, float, int]]] = tuple
        self._prefix = prefix
        self._metrics = metrics
        self._turn = threading.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def route(self) -> tuple[int, str, str]:
        """Answer a scrape."""
        with self._turn:
            return 200, CONTENT_TYPE, generate_latest(self._registry).decode()

    def describe(self) -> list[Metric]:
        """Return nothing, because this is the only collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``: all metrics, in the order of their table."""
        add = Families(self._prefix, self._metrics)
        self.add_samples(add)
        for task, age_s, failures in self.membership():
            add.families[MEMBERSHIP_AGE.name].add_metric((task,), age_s)
            add.families[MEMBERSHIP_FAILURES.name].add_metric((task,), failures)
        return iter(add.families.values())

    @abstractmethod
    def add_samples(self, add: Families) -> None:
        """Add samples of all other metrics."""


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
