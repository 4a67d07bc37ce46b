"""Metrics for Prometheus: what every daemon's ``/metrics`` is made with. Each daemon says what it counts."""

from __future__ import annotations

import os
import platform
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvstore import about, boundary
from kvstore.serving.durations import BOUNDS_S, Durations
from kvstore.serving.metric_table import INTERNAL_ERRORS, MEMBERSHIP_AGE, MEMBERSHIP_FAILURES, MetricInfo

if TYPE_CHECKING:
    from kvstore.serving.watching import Calls  # it loads gRPC, which is loaded where there are calls

CONTENT_TYPE: Final = "text/plain; version=0.0.4"
_KINDS: Final = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


class Families:
    """All metric families of one scrape, in the order of their table; called to add a sample."""

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
        """Add one histogram: ``counts`` of each bucket, the last one without a bound."""
        total, rows = 0, []
        for bound, count in zip((*bounds_s, float("inf")), counts, strict=True):
            total += count
            rows.append((floatToGoString(bound), total))
        self.families[f"{self._prefix}_{name}"].add_metric(labels, rows, sum_s)

    def durations(self, name: str, took: Durations, *labels: str) -> None:
        """Add one histogram."""
        self.buckets(name, BOUNDS_S, list(took.counts), took.sum_s, *labels)

    def grpc(self, calls: Calls) -> None:
        """Add what became of gRPC calls."""
        for (method, code), count in dict(calls.ended).items():
            self("grpc_calls", count, method, code)
        for reason, count in dict(calls.shed).items():
            self("grpc_shed_calls", count, reason)
        for method, took in dict(calls.durations).items():
            self.durations("grpc_call_duration_seconds", took, method)
        self("grpc_bytes", calls.received_bytes, "in")
        self("grpc_bytes", calls.sent_bytes, "out")

    def process(self, uptime_s: float, *what: str) -> None:
        """Add what every process says of itself. ``what`` runs: labels in addition to the versions."""
        for place, count in boundary.counts().items():
            self.families[INTERNAL_ERRORS.name].add_metric((place,), count)
        self("uptime_seconds", uptime_s)
        self("process_resident_bytes", _resident_bytes())
        self("process_cpu_seconds", time.process_time())
        self("build_info", 1, about.version(), platform.python_version(), *what)


class DaemonMetrics(Collector):
    """``/metrics`` of a daemon. Collects on every scrape, one at a time.

    Attributes:
        membership: says of each task of membership its name, the seconds since it last succeeded, and its failures.
    """

    def __init__(self, prefix: str, metrics: Sequence[MetricInfo]) -> None:
        self.membership: Callable[[], Iterable[tuple[str, float, int]]] = tuple
        self._prefix = prefix
        self._metrics = metrics
        self._turn = threading.Lock()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def route(self) -> tuple[int, str, str]:
        """What a scrape gets."""
        with self._turn:
            return 200, CONTENT_TYPE, generate_latest(self._registry).decode()

    def describe(self) -> list[Metric]:
        """Nothing: there is one collector only."""
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
        """Add a sample of everything."""


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
