"""Metrics: ``/metrics`` of a daemon, for Prometheus. ``metric_table`` says what there is.

Everything counts from the start of this daemon. Clients count for themselves and longer than that (``tier.counters``);
what they had counted when the daemon got ready is taken off. No counter goes down while a daemon lives.

A scrape looks at extents, sessions, tenants and devices, never at pages; and there is a bound on every label's values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvstore.service.node.node import Node
from kvstore.service.operator.metric_table import METRICS, TENANTS_MAX, TENANTS_REST
from kvstore.service.operator.stats import node_stats, pins_stats, tenant_rows
from kvstore.service.upkeep.scrubber import Scrubber
from kvstore.serving.metric_table import INTERNAL_ERRORS
from kvstore.serving.metrics import DaemonMetrics, Families
from kvstore.tier.counters import LATENCY_BOUNDS_S, MISS_REASONS, OPERATIONS, REUSE_BOUNDS_S
from kvstore.tier.data_file import find_errors
from kvstore.tier.frame_header import REASONS

if TYPE_CHECKING:
    from kvstore.serving.watching import Calls

SALT_CHARS_MAX = 100  # of a label; salts that begin alike are summed
AGE_BOUNDS_S = tuple(float(1 << bits) for bits in range(32))
EVICTION_REASONS = ("space", "reclaim", "request", "quota")  # shown before any page left for it
SAVED = "saved"
DAMAGE_REASONS = ("data", "record", "io", *REASONS)
REBUILD_REASONS = ("start", "damaged", "full", "grown")
TOLD_ELSEWHERE = ("demoted", "extents_reclaimed")


class NodeMetrics(DaemonMetrics):
    """The metrics of a node. A scrape holds the node's mutex for a moment, and the sessions' while it reads.

    Args:
        queues: further queue lengths by name.
        calls: what became of gRPC calls, where there is an API.
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
        self._before = node.sessions.totals()
        self._tenants = _Tenants(quota.salt for quota in node.config.quotas)

    def add_samples(self, add: Families) -> None:
        """See ``DaemonMetrics``."""
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
        for reason in DAMAGE_REASONS:  # a series that begins with its first event would hide that one from increase()
            node.setdefault(f"damaged_{reason}", 0)
        for name, count in node.items():
            if name.startswith("damaged_"):
                add("damaged_pages", count, name.removeprefix("damaged_"))
            elif not name.startswith("evicted_") and name not in TOLD_ELSEWHERE:
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
        for place, count in find_errors(self._node.folder).items():
            label = place if place.startswith("data/") else f"data/{place}"
            add.families[INTERNAL_ERRORS.name].add_metric((label,), count)
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
    """Tenants by name as far as there is room, the others summed: label values cost memory in the scraper.

    A tenant that has a name of its own keeps it. The node forgets tenants that have nothing any more, and what it
    counted about them; what was seen of that is kept here, so that no counter goes down.
    """

    def __init__(self, quotas: Iterable[str]) -> None:
        self._labels = {salt: _label(salt) for salt in quotas if salt != "*"}
        self._room = TENANTS_MAX
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}
        self._counted: Counter[tuple[str, ...]] = Counter()

    def collect(
        self, add: Families, rows: Iterable[tuple[str, str, int, int | None, int, int]], pins: Mapping[str, int]
    ) -> None:
        """Add the samples of what the node has now: ``rows`` as ``stats.tenant_rows`` has them, pins by salt."""
        gauges: Counter[tuple[str, ...]] = Counter()
        seen, salts = {}, set()
        for salt, tier, size, quota, refused, evicted in rows:
            label = self._named(salt)
            gauges["tenant_used_bytes", label, tier] += size
            if quota is not None:
                gauges["tenant_quota_bytes", label, tier] += quota
            before = 0, 0
            if refused or evicted:
                before = self._seen.get((salt, tier), before)
                seen[salt, tier] = refused, evicted
            if refused < before[0] or evicted < before[1]:  # it was forgotten, and came back
                before = 0, 0
            self._counted["tenant_refused_pages", label, tier] += refused - before[0]
            self._counted["tenant_evicted_pages", label, tier] += evicted - before[1]
            salts.add(salt)
        self._seen = seen
        for salt in salts | pins.keys():
            gauges["tenant_pins", self._named(salt)] += pins.get(salt, 0)
        add("tenants", len(salts))
        for (name, *labels), value in (*gauges.items(), *self._counted.items()):
            add(name, value, *labels)

    def _named(self, salt: str) -> str:
        label = self._labels.get(salt)
        if label is None:
            if not self._room:
                return TENANTS_REST
            self._room -= 1
            label = self._labels[salt] = _label(salt)
        return label


def _label(salt: str) -> str:
    """A salt as a label's value: text that is UTF-8 and not endless."""
    return salt[:SALT_CHARS_MAX].encode("utf-8", "replace").decode()
