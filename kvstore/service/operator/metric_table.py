"""The table of all metrics a node exports: names, kinds, labels, and what they say. docs/metrics.md is made of it."""

from __future__ import annotations

from functools import partial

from kvstore.serving.metric_table import INTERNAL_ERRORS, MEMBERSHIP, SHED_HELP, about
from kvstore.tier.counters import REUSE_SAMPLED, TIMED_NS

TENANTS_MAX = 100
TENANTS_REST = "(others)"


_counter = partial(about, "kvstore", "counter")
_gauge = partial(about, "kvstore", "gauge")
_histogram = partial(about, "kvstore", "histogram")

METRICS = (
    _counter("operations", "Calls of clients: get, put, put_async, lookup, lease.", "operation"),
    _histogram(
        "operation_duration_seconds",
        f"Time from a client's call to its return. One get per {TIMED_NS / 1e6:g} ms is timed, "
        "and counts for all since.",
        "operation",
    ),
    _counter("asked_pages", "Pages that gets and leases asked for: those hit and those missed."),
    _counter("hit_pages", "Pages that gets and leases found, by the tier they were read from.", "tier"),
    _counter("hit_tokens", "Tokens of those pages.", "tier"),
    _counter("missed_pages", "Pages that gets and leases did not find, by why the match ended.", "reason"),
    _counter("missed_tokens", "Tokens of those pages."),
    _counter("put_pages", "New pages that clients put: published in shared memory, or acknowledged by the node."),
    _counter("read_bytes", "Bytes that clients copied or were lent, by tier.", "tier"),
    _counter(
        "tier_bytes", "Bytes that crossed a tier's border, clients and the other tier alike.", "tier", "direction"
    ),
    _histogram(
        "reuse_gap_seconds",
        f"Time since the last use of pages hit in DRAM, of one timed get in {REUSE_SAMPLED}, counted in pages.",
    ),
    _counter("sealed_pages", "Pages sealed in DRAM, by all writers."),
    _counter("moved_pages", "Pages copied between DRAM and NVMe: demoted or promoted.", "direction"),
    _counter("moved_bytes", "Bytes of those pages.", "direction"),
    _counter(
        "evicted_pages",
        "Pages that left a tier. Reason saved: NVMe has them. Otherwise no lower tier has them: space was needed, "
        "reclaim (an extent went to pages of another geometry), request (an operator's), quota (the tenant's).",
        "tier",
        "reason",
    ),
    _histogram("eviction_age_seconds", "Whole seconds since their last use, of pages that left a tier.", "tier"),
    _counter("reclaimed_extents", "Extents that went to pages of another geometry.", "tier"),
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
    _gauge(
        "tenant_used_bytes",
        "Bytes of frames with pages. "
        f"Tenants with quotas and the first {TENANTS_MAX} others by name, the rest as {TENANTS_REST}.",
        "tenant",
        "tier",
    ),
    _gauge("tenant_quota_bytes", "What a tenant may have; absent where there is no quota.", "tenant", "tier"),
    _counter("tenant_refused_pages", "Pages refused because the tenant's quota was full.", "tenant", "tier"),
    _counter("tenant_evicted_pages", "Pages that left to keep the tenant within its quota.", "tenant", "tier"),
    _gauge("tenant_pins", "Pins of a tenant.", "tenant"),
    _gauge("tenants", "Tenants that have or had pages."),
    _gauge("pinned_bytes", "Bytes that pins keep from being evicted.", "tier"),
    _counter("grpc_calls", "gRPC calls that ended, by status code; refused ones as well.", "method", "code"),
    _counter("grpc_shed_calls", SHED_HELP, "reason"),
    _histogram("grpc_call_duration_seconds", "Time from a call's arrival at the gate to its end.", "method"),
    _counter("grpc_bytes", "Bytes of messages over gRPC.", "direction"),
    _counter("event_log_entries", "Entries of the log of page events; one may be of many pages."),
    _counter(
        "event_log_overwritten", "Entries that gave their place to newer ones: who had not read them yet lost them."
    ),
    _gauge("device_up", "1 where an NVMe target is read and written, 0 where it failed.", "path"),
    _gauge("device_direct", "1 where it is read and written past the page cache (O_DIRECT).", "path"),
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
    *MEMBERSHIP,
    INTERNAL_ERRORS,
    _gauge("uptime_seconds", "Time since this daemon started."),
    _gauge("process_resident_bytes", "Memory of the daemon that is resident, shared pages included."),
    _counter("process_cpu_seconds", "Processor time of the daemon."),
    _gauge("build_info", "1; the labels say what runs.", "version", "python", "node"),
)
