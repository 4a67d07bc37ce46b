"""Scraping a daemon's /metrics, as Prometheus would."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.processes import Daemon, Machine

SCRAPE_S = 30.0

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name, and its labels in order."""


def serve_http(machine: Machine, name: str = "m", **flags: str) -> tuple[Daemon, str]:
    """A daemon with HTTP on a free port of loopback; and where."""
    daemon = machine.spawn(name, **{"dram": "16MiB", "http": "127.0.0.1:0", **flags})
    return daemon, http_of(daemon.wait_ready())


def http_of(ready_line: str) -> str:
    """The HTTP address in a ready line."""
    return ready_line.split("http on ")[1].split(",")[0].strip()


def fetch(address: str, path: str = "/metrics") -> tuple[int, str, str]:
    """Status, content type and body of a GET."""
    connection = http.client.HTTPConnection(address, timeout=SCRAPE_S)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type", ""), answer.read().decode()
    finally:
        connection.close()


def families(address: str) -> list[Metric]:
    """All metric families of one scrape."""
    status, kind, text = fetch(address)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8"), (status, kind, text[:200])
    return list(text_string_to_metric_families(text))


def samples(found: list[Metric]) -> Iterator[tuple[Series, float]]:
    """Every sample, by its name and labels."""
    for family in found:
        for sample in family.samples:
            yield (sample.name, tuple(sorted(sample.labels.items()))), sample.value


class Scrape:
    """One scrape's values: ``scrape("kvstore_hit_pages_total", tier="dram")``; 0 where there is no such series."""

    def __init__(self, address: str) -> None:
        self.families = families(address)
        self.values = dict(samples(self.families))

    def __call__(self, name: str, **labels: str) -> float:
        return self.values.get((name, tuple(sorted(labels.items()))), 0.0)

    def labels(self, name: str, label: str) -> set[str]:
        """The values that a label has in the series of this name."""
        return {dict(labels)[label] for (found, labels) in self.values if found == name}

    def counters(self) -> dict[Series, float]:
        """The series that never go down."""
        ends = ("_total", "_bucket", "_count", "_sum")
        return {series: value for series, value in self.values.items() if series[0].endswith(ends)}


class Growth:
    """What counters grew by since it was made: ``growth("kvstore_put_pages_total")``."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._before = Scrape(address)
        self._now = self._before

    def look(self) -> None:
        """Scrape again."""
        self._now = Scrape(self._address)

    def __call__(self, name: str, **labels: str) -> float:
        return self._now(name, **labels) - self._before(name, **labels)


def calls_under_way(daemon: Daemon) -> float:
    """gRPC calls that a node with HTTP says are under way."""
    return Scrape(http_of(daemon.output()))("kvstore_queue_length", queue="rpcs")
