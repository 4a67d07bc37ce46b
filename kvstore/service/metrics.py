"""Metrics: ``/metrics`` of a daemon, for Prometheus. ``METRICS`` says what there is; docs/metrics.md is made of it.

Everything counts from the start of this daemon. Clients count for themselves and longer than that (``tier.counters``);
what they had counted when the daemon got ready is taken off.
"""

from __future__ import annotations

import platform
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvstore.service.node import Node
from kvstore.service.scrubber import Scrubber
from kvstore.tier.counters import LATENCY_BOUNDS_S, MISS_REASONS, OPERATIONS, REUSE_BOUNDS_S, REUSE_SAMPLED

CONTENT_TYPE = "text/plain; version=0.0.4"
TENANTS_MAX = 100
TENANTS_REST = "other"
AGE_BOUNDS_S = tuple(float(1 << bits) for bits in range(32))
EVICTION_REASONS = ("space", "reclaim", "request", "quota")  # shown before any page left for it


class About(NamedTuple):
    """One metric: ``kind`` is counter, gauge or histogram; counters are exported as ``name + "_total"``."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def exported(self) -> str:
        """The name Prometheus knows; of a histogram the one without ``_bucket``."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _counter(name: str, help: str, *labels: str) -> About:
    return About(f"kvstore_{name}", "counter", labels, help)


def _gauge(name: str, help: str, *labels: str) -> About:
    return About(f"kvstore_{name}", "gauge", labels, help)


def _histogram(name: str, help: str, *labels: str) -> About:
    return About(f"kvstore_{name}", "histogram", labels, help)


METRICS = (
    _counter("operations", "Calls of clients: get, put, put_async, lookup, lease.", "operation"),
    _histogram(
        "operation_duration_seconds",
        "Time from a client's call to its return. Of gets one in 64 is timed and counts for 64.",
        "operation",
    ),
    _counter("asked_pages", "Pages that gets and leases asked for: those hit and those missed."),
    _counter("hit_pages", "Pages that gets and leases found, by the tier they were read from.", "tier"),
    _counter("hit_tokens", "Tokens of those pages.", "tier"),
    _counter("missed_pages", "Pages that gets and leases did not find, by why the match ended.", "reason"),
    _counter("put_pages", "New pages that clients put and the node acknowledged."),
    _counter("read_bytes", "Bytes that clients copied or were lent, by tier.", "tier"),
    _counter(
        "tier_bytes", "Bytes that crossed a tier's border, clients and the other tier alike.", "tier", "direction"
    ),
    _histogram(
        "reuse_gap_seconds",
        f"Time since the last use of pages hit in DRAM, of one get in {REUSE_SAMPLED}, counted in pages.",
    ),
    _counter("sealed_pages", "Pages sealed in DRAM, whoever wrote them."),
    _counter("moved_pages", "Pages copied between DRAM and NVMe: demoted or promoted.", "direction"),
    _counter("moved_bytes", "Bytes of those pages.", "direction"),
    _counter("evicted_pages", "Pages that left a tier and are in no lower one, by reason.", "tier", "reason"),
    _histogram("eviction_age_seconds", "Time since their last use of pages that left a tier; it has no sum.", "tier"),
    _counter("damaged_pages", "Pages that did not hold and were dropped, without their descendants.", "reason"),
    _counter("node_events", "Whatever else the node counts, by its name.", "event"),
    _gauge("tier_capacity_bytes", "Size of a tier.", "tier"),
    _gauge("tier_used_bytes", "Bytes of sealed pages.", "tier"),
    _gauge("tier_failed_bytes", "Bytes of a tier that could not be had or failed.", "tier"),
    _gauge("tier_populated_bytes", "Bytes of DRAM that memory is allocated for.", "tier"),
    _gauge("pages", "Sealed pages; one may be in both tiers.", "tier"),
    _gauge("frames", "Frames by state: free, reserved, sealed, retiring, quarantined.", "tier", "state"),
    _gauge("extents", "Extents: carved for pages of one geometry, or vacant.", "tier", "state"),
    _gauge(
        "queue_length",
        "What waits: copies (batches between tiers), unsaved (cold pages to be saved before they leave), ready (cold "
        "pages that may leave), checksums (pages to get theirs), scan (frames on NVMe to be read after a start), "
        "rpcs (gRPC calls under way).",
        "queue",
    ),
    _gauge("sessions", "Clients: connected, or known (also those that may come back).", "state"),
    _gauge("leases", "Leases held."),
    _gauge("reservations", "Pages that are being written under a key."),
    _gauge("tenant_used_bytes", f"Bytes of pages; beyond {TENANTS_MAX} tenants summed as other.", "tenant", "tier"),
    _gauge("tenant_quota_bytes", "What a tenant may have; absent where there is no quota.", "tenant", "tier"),
    _counter("tenant_refused_pages", "Pages refused because the tenant's quota was full.", "tenant", "tier"),
    _counter("tenant_evicted_pages", "Pages that left to keep the tenant within its quota.", "tenant", "tier"),
    _gauge("tenant_pins", "Pins of a tenant.", "tenant"),
    _gauge("device_up", "1 where an NVMe target is read and written, 0 where it failed.", "path"),
    _gauge("device_capacity_bytes", "Size of an NVMe target as it is used.", "path"),
    _gauge("device_used_bytes", "Bytes of pages on it.", "path"),
    _gauge("device_pages", "Pages on it.", "path"),
    _gauge("nvme_written_today_bytes", "Bytes written to NVMe today (UTC)."),
    _gauge("nvme_write_cap_bytes", "How many may be; 0: no cap."),
    _counter("scrubber_sweeps", "Sweeps of the scrubber over all pages that ended."),
    _counter("scrubber_pages", "Pages the scrubber verified, stamped with checksums, or found damaged.", "outcome"),
    _gauge("scrubber_sweep_pages_left", "Pages left in the sweep that is going on."),
    _gauge("index_used_bytes", "Bytes of the index in use."),
    _counter("index_rebuilds", "Rebuilds of the index from the records, by reason.", "reason"),
    _gauge("uptime_seconds", "Time since this daemon started."),
    _gauge("process_resident_bytes", "Most memory the daemon had resident, shared pages included."),
    _counter("process_cpu_seconds", "Processor time of the daemon."),
    _gauge("build_info", "1; the labels say what runs.", "version", "python", "node"),
)


class Metrics(Collector):
    """Collects on every scrape; holds the node's mutex while ``stats`` does, and keeps nothing but the beginning.

    Args:
        queues: further queue lengths by name.
    """

    def __init__(self, node: Node, scrubber: Scrubber, queues: Mapping[str, Callable[[], int]] | None = None) -> None:
        self._node = node
        self._scrubber = scrubber
        self._queues = dict(queues or {})
        self._before = node.sessions.totals()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def route(self) -> tuple[int, str, str]:
        """What a scrape gets."""
        return 200, CONTENT_TYPE, generate_latest(self._registry).decode()

    def describe(self) -> list[Metric]:
        """Nothing: there is one collector only."""
        return []

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``: all of ``METRICS``, in their order."""
        families = _Families()
        stats = self._node.stats()
        self._clients(families, stats)
        self._decisions(families, stats)
        _tiers(families, stats["tiers"])
        _tenants(families, stats.get("tenants", {}))
        self._rest(families, stats)
        return iter(families.families.values())

    def _clients(self, add: _Families, stats: dict[str, Any]) -> None:
        tally = self._node.sessions.totals().minus(self._before)
        counts, node = tally.counts, stats["counters"]
        for operation in OPERATIONS:
            name = operation if operation == "put_async" else f"{operation}s"
            add("operations", counts[{"put_async": "puts_async"}.get(operation, name)], operation)
            latency = tally.latency[operation]
            add.buckets("operation_duration_seconds", LATENCY_BOUNDS_S, latency.counts, latency.sum_s, operation)
        add("asked_pages", counts["pages_asked"])
        for tier in ("dram", "nvme"):
            add("hit_pages", counts[f"hit_{tier}"], tier)
            add("hit_tokens", counts[f"hit_{tier}_tokens"], tier)
            add("read_bytes", counts[f"read_{tier}_bytes"], tier)
        for reason in MISS_REASONS:
            add("missed_pages", counts[f"missed_{reason}"], reason)
        add("put_pages", counts["pages_put"])
        add.buckets("reuse_gap_seconds", REUSE_BOUNDS_S, tally.reuse.counts, tally.reuse.sum_s)
        saved, promoted = node.get("bytes_saved", 0), node.get("bytes_promoted", 0)
        add("tier_bytes", counts["put_bytes"] + promoted, "dram", "in")
        add("tier_bytes", counts["read_dram_bytes"] + saved, "dram", "out")
        if "nvme" in stats["tiers"]:
            add("tier_bytes", saved, "nvme", "in")
            add("tier_bytes", counts["read_nvme_bytes"] + promoted, "nvme", "out")

    @staticmethod
    def _decisions(add: _Families, stats: dict[str, Any]) -> None:
        node = dict(stats["counters"])
        add("sealed_pages", node.pop("pages_sealed", 0))
        for direction, verb in (("demoted", "saved"), ("promoted", "promoted")):
            add("moved_pages", node.pop(f"pages_{verb}", 0), direction)
            add("moved_bytes", node.pop(f"bytes_{verb}", 0), direction)
        for name, count in node.items():
            if name.startswith("damaged_"):
                add("damaged_pages", count, name.removeprefix("damaged_"))
            elif not name.startswith("evicted_"):
                add("node_events", count, name)

    def _rest(self, add: _Families, stats: dict[str, Any]) -> None:
        for queue, length in stats["queues"].items():
            add("queue_length", length, queue)
        for queue, ask in self._queues.items():
            add("queue_length", ask(), queue)
        add("sessions", stats["sessions"], "known")
        add("sessions", stats["sessions_connected"], "connected")
        add("leases", stats["leases"])
        add("reservations", stats["reservations"])
        scrubber = self._scrubber.stats()
        add("scrubber_sweeps", scrubber["sweeps"])
        for outcome, name in (("verified", "scrubbed"), ("stamped", "stamped"), ("damaged", "damaged")):
            add("scrubber_pages", scrubber[f"pages_{name}"], outcome)
        add("scrubber_sweep_pages_left", scrubber["sweep_pages_left"])
        add("index_used_bytes", stats["index"]["used_bytes"])
        for reason, rebuilds in stats["index"]["rebuilds"].items():
            add("index_rebuilds", rebuilds, reason)
        add("uptime_seconds", stats["uptime_s"])
        add("process_resident_bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        add("process_cpu_seconds", time.process_time())
        add("build_info", 1, metadata.version("kvstore"), platform.python_version(), stats["name"])


class _Families:
    """All metric families of one scrape; called to add a sample."""

    def __init__(self) -> None:
        self.families: dict[str, Any] = {about.name: _family(about) for about in METRICS}

    def __call__(self, name: str, value: float, *labels: str) -> None:
        """Add one sample to ``kvstore_<name>``."""
        self.families[f"kvstore_{name}"].add_metric(labels, value)

    def buckets(
        self, name: str, bounds_s: Sequence[float], counts: Sequence[int], sum_s: float | None, *labels: str
    ) -> None:
        """Add one histogram: ``counts`` of each bucket, the last one without a bound."""
        total, rows = 0, []
        for bound, count in zip((*bounds_s, float("inf")), counts, strict=True):
            total += count
            rows.append((floatToGoString(bound), total))
        self.families[f"kvstore_{name}"].add_metric(labels, rows, sum_s)


def _family(about: About) -> Metric:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    family: Metric = kinds[about.kind](about.name, about.help, labels=about.labels)
    return family


def _tiers(add: _Families, tiers: Mapping[str, Any]) -> None:
    for tier, about in tiers.items():
        for name in ("capacity_bytes", "used_bytes", "failed_bytes", "populated_bytes"):
            if name in about:
                add(f"tier_{name}", about[name], tier)
        add("pages", about["pages"], tier)
        for state, frames in about["frames"].items():
            add("frames", frames, tier, state)
        add("extents", about["extents"], tier, "carved")
        add("extents", about["extents_vacant"], tier, "vacant")
        for reason in {*EVICTION_REASONS, *about["evicted"]}:
            add("evicted_pages", about["evicted"].get(reason, 0), tier, reason)
        ages = about["ages_at_eviction"]
        counts = [ages.get(bits, 0) for bits in range(len(AGE_BOUNDS_S))]
        add.buckets("eviction_age_seconds", AGE_BOUNDS_S, [*counts, sum(ages.values()) - sum(counts)], None, tier)
        for device in about.get("devices", ()):
            path = device["path"]
            add("device_up", not device["state"].startswith("failed"), path)
            for name in ("capacity_bytes", "used_bytes", "pages"):
                add(f"device_{name}", device[name], path)
        if tier == "nvme":
            add("nvme_written_today_bytes", about["written_today_bytes"])
            add("nvme_write_cap_bytes", about["write_bytes_per_day"])


def _tenants(add: _Families, tenants: Mapping[str, Any]) -> None:
    """The first ``TENANTS_MAX`` by themselves, the others summed: label values are memory of whoever scrapes."""
    sums: dict[str, Counter[tuple[str, ...]]] = {}
    for i, (salt, about) in enumerate(tenants.items()):
        tenant = salt if i < TENANTS_MAX else TENANTS_REST
        for tier, share in about.items():
            if tier == "pins":
                sums.setdefault("tenant_pins", Counter())[tenant,] += share
                continue
            key = tenant, tier
            sums.setdefault("tenant_used_bytes", Counter())[key] += share["bytes"]
            sums.setdefault("tenant_refused_pages", Counter())[key] += share["refused"]
            sums.setdefault("tenant_evicted_pages", Counter())[key] += share["evicted_quota"]
            if share["quota_bytes"] is not None:
                sums.setdefault("tenant_quota_bytes", Counter())[key] += share["quota_bytes"]
    for name, values in sums.items():
        for labels, value in values.items():
            add(name, value, *labels)


def table() -> str:
    """``METRICS`` as the table of docs/metrics.md."""
    rows = [f"| `{about.exported}` | {about.kind} | {', '.join(about.labels)} | {about.help} |" for about in METRICS]
    return "\n".join(["| metric | type | labels | meaning |", "|---|---|---|---|", *rows])
