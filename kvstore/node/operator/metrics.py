"""The metrics of a node: the table of all of them, and the daemon's answer to ``/metrics`` of Prometheus.

``METRICS`` has the name, kind, labels and meaning of each metric; the table in docs/metrics.md is generated from it.

Every counter begins at 0 with this daemon and never decreases while it runs. Clients count for themselves, across
restarts of the daemon (``shm.counters``); the values that they had at its start are subtracted.

A scrape reads extents, sessions, tenants and devices, but never pages. Every label has a limited number of values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore.node.node import Node
from kvstore.node.operator.stats import node_stats, pins_stats, tenant_rows
from kvstore.node.scrubber import Scrubber
from kvstore.server.metrics import INTERNAL_ERRORS, MEMBERSHIP, SHED_HELP, DaemonMetrics, Families, metric_info
from kvstore.shm.counters import LATENCY_BOUNDS_S, MISS_REASONS, OPERATIONS, REUSE_BOUNDS_S, REUSE_SAMPLED, TIMED_NS
from kvstore.shm.data_server_file import read_errors
from kvstore.tier.nvme.frame_header import REASONS

if TYPE_CHECKING:
    from kvstore.server.call_counts import Calls

TENANTS_MAX = 100
TENANTS_REST = "(others)"


_counter = partial(metric_info, "kvstore", "counter")
_gauge = partial(metric_info, "kvstore", "gauge")
_histogram = partial(metric_info, "kvstore", "histogram")

METRICS = (
    _counter("operations", "Client calls: get, put, put_async, lookup, lease.", "operation"),
    _histogram(
        "operation_duration_seconds",
        f"Time from a client's call to its return. One get per {TIMED_NS / 1e6:g} ms is timed, "
        "and stands for all gets since the last one.",
        "operation",
    ),
    _counter("asked_pages", "Pages requested by gets and leases: hits and misses."),
    _counter("hit_pages", "Pages hit by gets and leases, by the tier they were read from.", "tier"),
    _counter("hit_tokens", "Tokens of the pages hit.", "tier"),
    _counter("missed_pages", "Pages missed by gets and leases, by the reason why the match ended.", "reason"),
    _counter("missed_tokens", "Tokens of the pages missed."),
    _counter("put_pages", "New pages put by clients: published in shared memory, or acknowledged by the node."),
    _counter("read_bytes", "Bytes that clients copied or leased, by tier.", "tier"),
    _counter(
        "tier_bytes", "Bytes copied into or out of a tier, by clients or by moves between tiers.", "tier", "direction"
    ),
    _histogram(
        "reuse_gap_seconds",
        "Time since the last use of the pages that a get hits in DRAM. "
        f"Sampled: one in {REUSE_SAMPLED} timed gets. Counts pages.",
    ),
    _counter("sealed_pages", "Pages sealed in DRAM, by all writers."),
    _counter("moved_pages", "Pages copied between DRAM and NVMe: demoted or promoted.", "direction"),
    _counter("moved_bytes", "Bytes of the pages demoted or promoted.", "direction"),
    _counter(
        "evicted_pages",
        "Pages that left a tier, by reason. saved: NVMe still has them. All other reasons mean that no lower tier has "
        "them: space (needed for other pages), reclaim (the extent went to pages of another geometry), request (by an "
        "operator), quota (of the tenant), group (their group of objects has lost another member).",
        "tier",
        "reason",
    ),
    _histogram("eviction_age_seconds", "Time between the last use of a page and its eviction, in seconds.", "tier"),
    _counter("reclaimed_extents", "Extents that went to pages of another geometry.", "tier"),
    _counter(
        "damaged_pages",
        "Pages dropped because they failed verification. Their descendants, which are dropped too, are not counted.",
        "reason",
    ),
    _counter("node_events", "All other counters of the node, by name.", "event"),
    _gauge("tier_capacity_bytes", "Size of a tier.", "tier"),
    _gauge("tier_used_bytes", "Bytes of sealed pages.", "tier"),
    _gauge("tier_failed_bytes", "Bytes of a tier that failed or could not be allocated.", "tier"),
    _gauge("tier_populated_bytes", "Bytes of DRAM with allocated memory.", "tier"),
    _gauge("pages", "Sealed pages. A page may be in several tiers.", "tier"),
    _gauge("frames", "Frames by state: free, reserved, sealed, retiring, quarantined.", "tier", "state"),
    _gauge("extents", "Extents by state: carved for pages of one geometry, vacant, quarantined.", "tier", "state"),
    _gauge(
        "queue_length",
        "Waiting entries: copies (batches between tiers), unsaved (cold pages to save before they leave), ready (cold "
        "pages that may leave), checksums (pages without checksums), scan (NVMe frames to read after a start), "
        "rpcs (gRPC calls in progress).",
        "queue",
    ),
    _gauge("sessions", "Clients: connected, or known (includes clients that may return).", "state"),
    _gauge("leases", "Current leases."),
    _gauge("reservations", "Reserved pages that are not sealed yet."),
    _gauge(
        "tenant_used_bytes",
        "Bytes of frames with pages. "
        f"Tenants with quotas and the first {TENANTS_MAX} others have their own label; {TENANTS_REST} is the rest.",
        "tenant",
        "tier",
    ),
    _gauge("tenant_quota_bytes", "Quota of a tenant; absent if it has none.", "tenant", "tier"),
    _counter("tenant_refused_pages", "Pages refused because the tenant's quota was full.", "tenant", "tier"),
    _counter("tenant_evicted_pages", "Pages evicted to keep the tenant within its quota.", "tenant", "tier"),
    _gauge("tenant_pins", "Pins of a tenant.", "tenant"),
    _gauge("tenants", "Tenants that have pages, or had some."),
    _gauge("pinned_bytes", "Bytes that pins keep from eviction.", "tier"),
    _counter("grpc_calls", "gRPC calls that ended, refused ones included, by status code.", "method", "code"),
    _counter("grpc_shed_calls", SHED_HELP, "reason"),
    _histogram("grpc_call_duration_seconds", "Time from the arrival of a call to its end.", "method"),
    _counter("grpc_bytes", "Bytes of messages over gRPC.", "direction"),
    _counter("event_log_entries", "Entries of the log of page events. An entry may have many pages."),
    _counter("event_log_overwritten", "Entries overwritten by newer ones; readers that had not read them miss them."),
    _gauge("device_up", "1 while an NVMe target works, 0 after it failed.", "path"),
    _gauge("device_direct", "1 if the target is used without the page cache (O_DIRECT).", "path"),
    _gauge("device_capacity_bytes", "Usable size of an NVMe target.", "path"),
    _gauge("device_used_bytes", "Bytes of pages on an NVMe target.", "path"),
    _gauge("device_pages", "Pages on an NVMe target.", "path"),
    _gauge("nvme_written_today_bytes", "Bytes written to NVMe today (UTC)."),
    _gauge("nvme_write_cap_bytes", "The limit of bytes written per day; 0: no limit."),
    _gauge("owed_pages", "Pages that want a second copy on another node and have none yet."),
    _gauge("owed_bytes", "Bytes of these pages."),
    _counter("copied_pages", "Pages of which another node has stored a copy by order of this node."),
    _counter("background_bytes", "Bytes sent and received in the background: copies, pages that are ordered, drains."),
    _counter("scrubber_sweeps", "Finished sweeps of the scrubber over all pages."),
    _counter("scrubber_pages", "Pages that the scrubber examined: verified, given checksums, or damaged.", "outcome"),
    _gauge("scrubber_sweep_pages_left", "Pages left in the current sweep."),
    _gauge("index_used_bytes", "Bytes of the index in use."),
    _counter("index_rebuilds", "Rebuilds of the index from the records, by reason.", "reason"),
    *MEMBERSHIP,
    INTERNAL_ERRORS,
    _gauge("uptime_seconds", "Time since this daemon started."),
    _gauge("process_resident_bytes", "Resident memory of the daemon, shared pages included."),
    _counter("process_cpu_seconds", "Processor time of the daemon."),
    _gauge("build_info", "Always 1. The labels have the versions and the node's name.", "version", "python", "node"),
)


SALT_CHARS_MAX = 100  # characters of a salt in a label; salts with the same beginning are added up
AGE_BOUNDS_S = tuple(float(1 << bits) for bits in range(32))
EVICTION_REASONS = ("space", "reclaim", "request", "quota")  # exported from the start, with 0
SAVED = "saved"
DAMAGE_REASONS = ("data", "record", "io", *REASONS)
REBUILD_REASONS = ("start", "damaged", "full", "grown")
IN_OTHER_METRICS = ("demoted", "extents_reclaimed")


class NodeMetrics(DaemonMetrics):
    """The metrics of a node. A scrape holds the node's mutex, and that of the sessions, for a moment.

    Args:
        queues: further queue lengths by name.
        calls: the counters of gRPC calls, if the daemon serves gRPC.

    Attributes:
        replicas: returns the state of second copies; an empty dict if the node is in no pool.
    """

    def __init__(
        self,
        node: Node,
        scrubber: Scrubber,
        queues: Mapping[str, Callable[[], int]] | None = None,
        calls: Calls | None = None,
    ) -> None:
        super().__init__("kvstore", METRICS)
        self._node = node
        self._scrubber = scrubber
        self._queues = dict(queues or {})
        self._calls = calls
        self.replicas: Callable[[], Mapping[str, Any]] = dict
        self._totals_at_start = node.sessions.totals()
        self._tenants = _Tenants(quota.salt for quota in node.config.quotas)

    def add_samples(self, add: Families) -> None:
        """Add the samples of all metrics."""
        stats = node_stats(self._node)
        self._clients(add, stats)
        self._decisions(add, stats)
        _tiers(add, stats["tiers"])
        rows, pins = self._node.look(lambda _, state: (tenant_rows(state), pins_stats(state)))
        self._tenants.collect(add, rows, Counter(pin["salt"] for pin in pins["pins"]))
        for tier, size in pins["bytes"].items():
            add("pinned_bytes", size, tier)
        self._rest(add, stats)
        if self._calls is not None:
            add.grpc(self._calls)

    def _clients(self, add: Families, stats: dict[str, Any]) -> None:
        tally = self._node.sessions.totals().minus(self._totals_at_start)
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
        if "hbm" in stats["tiers"]:
            add("hit_pages", counts["hit_hbm"], "hbm")
            add("read_bytes", counts["read_hbm_bytes"], "hbm")
            add("tier_bytes", counts["read_hbm_bytes"], "hbm", "out")
        for reason in MISS_REASONS:
            add("missed_pages", counts[f"missed_{reason}"], reason)
        add("missed_tokens", counts["missed_tokens"])
        add("put_pages", counts["pages_put"])
        add.buckets("reuse_gap_seconds", REUSE_BOUNDS_S, tally.reuse.counts, tally.reuse.sum_s)
        saved, promoted = node.get("bytes_saved", 0), node.get("bytes_promoted", 0)
        add("tier_bytes", counts["put_bytes"] + promoted, "dram", "in")
        add("tier_bytes", counts["read_dram_bytes"] + saved, "dram", "out")
        if "nvme" in stats["tiers"]:
            add("tier_bytes", saved, "nvme", "in")
            add("tier_bytes", counts["read_nvme_bytes"] + promoted, "nvme", "out")

    @staticmethod
    def _decisions(add: Families, stats: dict[str, Any]) -> None:
        node = dict(stats["counters"])
        add("sealed_pages", node.pop("pages_sealed", 0))
        for direction, verb in (("demoted", "saved"), ("promoted", "promoted")):
            add("moved_pages", node.pop(f"pages_{verb}", 0), direction)
            add("moved_bytes", node.pop(f"bytes_{verb}", 0), direction)
        # ``increase()`` of Prometheus ignores the first value of a series, so each series begins with 0.
        for reason in DAMAGE_REASONS:
            node.setdefault(f"damaged_{reason}", 0)
        for name, count in node.items():
            if name.startswith("damaged_"):
                add("damaged_pages", count, name.removeprefix("damaged_"))
            elif not name.startswith("evicted_") and name not in IN_OTHER_METRICS:
                add("node_events", count, name)

    def _rest(self, add: Families, stats: dict[str, Any]) -> None:
        for queue, length in stats["queues"].items():
            add("queue_length", length, queue)
        for queue, ask in self._queues.items():
            add("queue_length", ask(), queue)
        add("sessions", stats["sessions"], "known")
        add("sessions", stats["sessions_connected"], "connected")
        add("event_log_entries", stats["event_log"]["entries"])
        add("event_log_overwritten", stats["event_log"]["overwritten"])
        add("leases", stats["leases"])
        add("reservations", stats["reservations"])
        for place, count in read_errors(self._node.folder).items():
            label = place if place.startswith("data/") else f"data/{place}"
            add.families[INTERNAL_ERRORS.name].add_metric((label,), count)
        replicas = self.replicas()
        for name in ("owed_pages", "owed_bytes", "copied_pages", "background_bytes"):
            add(name, replicas.get(name, 0))
        scrubber = self._scrubber.stats()
        add("scrubber_sweeps", scrubber["sweeps"])
        for outcome, name in (("verified", "scrubbed"), ("stamped", "stamped"), ("damaged", "damaged")):
            add("scrubber_pages", scrubber[f"pages_{name}"], outcome)
        add("scrubber_sweep_pages_left", scrubber["sweep_pages_left"])
        add("index_used_bytes", stats["index"]["used_bytes"])
        for reason, rebuilds in (dict.fromkeys(REBUILD_REASONS, 0) | stats["index"]["rebuilds"]).items():
            add("index_rebuilds", rebuilds, reason)
        add.process(stats["uptime_s"], stats["name"])


def _tiers(add: Families, tiers: Mapping[str, Any]) -> None:
    for tier, about in tiers.items():
        for name in ("capacity_bytes", "used_bytes", "failed_bytes", "populated_bytes"):
            if name in about:
                add(f"tier_{name}", about[name], tier)
        add("pages", about["pages"], tier)
        for state, frames in about["frames"].items():
            add("frames", frames, tier, state)
        add("extents", about["extents"], tier, "carved")
        add("extents", about["extents_vacant"], tier, "vacant")
        add("extents", about["extents_quarantined"], tier, "quarantined")
        for reason in dict.fromkeys((*EVICTION_REASONS, *about["evicted"])):
            add("evicted_pages", about["evicted"].get(reason, 0), tier, reason)
        if "demoted" in about:
            add("evicted_pages", about["demoted"], tier, SAVED)
        add("reclaimed_extents", about["extents_reclaimed"], tier)
        ages, sum_s = about["ages_at_eviction"], about["ages_at_eviction_sum_s"]
        counts = [ages.get(bits, 0) for bits in range(len(AGE_BOUNDS_S))]
        add.buckets("eviction_age_seconds", AGE_BOUNDS_S, [*counts, sum(ages.values()) - sum(counts)], sum_s, tier)
        for device in about.get("devices", ()):
            path = device["path"]
            add("device_up", not device["state"].startswith("failed"), path)
            add("device_direct", device["direct"], path)
            for name in ("capacity_bytes", "used_bytes", "pages"):
                add(f"device_{name}", device[name], path)
        if tier == "nvme":
            add("nvme_written_today_bytes", about["written_today_bytes"])
            add("nvme_write_cap_bytes", about["write_bytes_per_day"])


class _Tenants:
    """Label values of tenants, limited in number because each one costs memory in the scraper.

    Tenants with quotas and the first ``TENANTS_MAX`` others keep labels of their own; the rest is added up. The node
    drops a tenant that no longer stores anything, together with its counters. ``_counted`` keeps the sums, so that no
    counter decreases.
    """

    def __init__(self, quotas: Iterable[str]) -> None:
        self._labels = {salt: _label(salt) for salt in quotas if salt != "*"}
        self._labels_free = TENANTS_MAX
        self._last_counts: dict[tuple[str, str], tuple[int, int]] = {}  # salt, tier -> refused, evicted
        self._counted: Counter[tuple[str, ...]] = Counter()

    def collect(
        self, add: Families, rows: Iterable[tuple[str, str, int, int | None, int, int]], pins: Mapping[str, int]
    ) -> None:
        """Add the samples of all tenants: ``rows`` from ``stats.tenant_rows``, and the number of pins by salt."""
        gauges: Counter[tuple[str, ...]] = Counter()
        counts, salts = {}, set()
        for salt, tier, size, quota, refused, evicted in rows:
            label = self._label_of(salt)
            gauges["tenant_used_bytes", label, tier] += size
            if quota is not None:
                gauges["tenant_quota_bytes", label, tier] += quota
            before = 0, 0
            if refused or evicted:
                before = self._last_counts.get((salt, tier), before)
                counts[salt, tier] = refused, evicted
            if refused < before[0] or evicted < before[1]:  # the node dropped the tenant, and it came back
                before = 0, 0
            self._counted["tenant_refused_pages", label, tier] += refused - before[0]
            self._counted["tenant_evicted_pages", label, tier] += evicted - before[1]
            salts.add(salt)
        self._last_counts = counts
        for salt in salts | pins.keys():
            gauges["tenant_pins", self._label_of(salt)] += pins.get(salt, 0)
        add("tenants", len(salts))
        for (name, *labels), value in (*gauges.items(), *self._counted.items()):
            add(name, value, *labels)

    def _label_of(self, salt: str) -> str:
        label = self._labels.get(salt)
        if label is None:
            if not self._labels_free:
                return TENANTS_REST
            self._labels_free -= 1
            label = self._labels[salt] = _label(salt)
        return label


def _label(salt: str) -> str:
    """Return a salt as a label value: valid UTF-8 of limited length."""
    return salt[:SALT_CHARS_MAX].encode("utf-8", "replace").decode()
