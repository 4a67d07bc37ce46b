"""Metrics of an engine for Prometheus, at ``/metrics``. ``METRICS`` is the list; all names begin ``kvstore_engine_``.

``EngineTally`` counts the reports of the engine's thread, from the start of the process. Gauges are read from the
engine's status on every scrape. The number of series is bounded, because labels are only tiers, outcomes, states and
gRPC methods.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from engine.model.observer import Observer
from engine.model.request import Role, Usage
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.server.call_counts import Calls, Durations
from kvstore.server.metrics import INTERNAL_ERRORS, MEMBERSHIP, SHED_HELP, DaemonMetrics, Families, metric_info

PREFIX: Final = "kvstore_engine"
OUTCOMES: Final = ("stop", "eos", "length", "cancelled", "prefilled", "migrated", "failed", "invalid", "refused")
STEPS: Final = ("decode", "prefill", "mixed")


_metric = partial(metric_info, PREFIX)

METRICS: Final = (
    _metric("counter", "requests", f"Requests that ended: {', '.join(OUTCOMES)}.", "outcome"),
    _metric("counter", "prompt_tokens", "Tokens of the prompts of requests that ended."),
    _metric("counter", "completion_tokens", "Tokens generated for requests that ended."),
    _metric("counter", "cached_tokens", "Prompt tokens whose KV was in the pool or in the arena (hbm).", "tier"),
    _metric("counter", "computed_tokens", "Prompt tokens whose KV was computed here."),
    _metric("counter", "step_tokens", "Tokens that steps computed: prefill, decode.", "kind"),
    _metric("counter", "pool_bytes", "Bytes of KV that were loaded from the pool or written to it.", "direction"),
    _metric("histogram", "ttft_seconds", "Time from submission to the first token."),
    _metric("histogram", "gap_seconds", "Time from the first token to the second, which a hand-off can delay."),
    _metric("histogram", "tpot_seconds", "Mean time per token after the second, one sample per request."),
    _metric("histogram", "step_seconds", "Time of a step of the engine, by the kind of its tokens.", "kind"),
    _metric("histogram", "handoff_seconds", "Time from the first token to the end of a hand-off to this engine."),
    _metric("counter", "handoff_bytes", "Bytes of KV that hand-offs moved to this engine."),
    _metric("counter", "stalled_seconds", "Time that steps waited for layers of hand-offs."),
    _metric("counter", "stalls", "Steps that waited for layers of hand-offs."),
    _metric("gauge", "batch_size", "Sequences that the last step decoded."),
    _metric("gauge", "chunk_tokens", "Prompt tokens in the last step."),
    _metric(
        "gauge",
        "requests_here",
        "Requests that have not ended, by state, from waiting (for frames) to decoding.",
        "state",
    ),
    _metric("gauge", "prefills_held", "Prefills for other engines that have not ended."),
    _metric(
        "gauge",
        "frames",
        "Frames of the arena: free, used by requests, kept (free, with a page), shared (used by several).",
        "state",
    ),
    _metric(
        "counter",
        "kept_pages",
        "Kept pages of requests that had ended: found, evicted, or demoted to the pool.",
        "event",
    ),
    _metric("gauge", "prefill_tokens_per_second", "Measured speed of steps without decoding, smoothed."),
    _metric("gauge", "decode_step_seconds", "Measured time of a step without prefill, smoothed."),
    _metric(
        "gauge", "hook_seconds_per_layer", "Mean time that a forward pass waits while one layer is written to the pool."
    ),
    _metric("gauge", "draining", "1 if the engine takes no new requests."),
    _metric("gauge", "role", "1 for the role that the engine has.", "role"),
    _metric(
        "counter", "grpc_calls", "gRPC calls that ended, including refused ones, by status code.", "method", "code"
    ),
    _metric("counter", "grpc_shed_calls", SHED_HELP, "reason"),
    _metric("histogram", "grpc_call_duration_seconds", "Time from a call's arrival to its end.", "method"),
    _metric("counter", "grpc_bytes", "Bytes of messages over gRPC.", "direction"),
    *MEMBERSHIP,
    INTERNAL_ERRORS,
    _metric("gauge", "uptime_seconds", "Time since this engine started."),
    _metric("gauge", "process_resident_bytes", "Resident memory of the process, including shared memory."),
    _metric("counter", "process_cpu_seconds", "Processor time of the process."),
    _metric(
        "gauge",
        "build_info",
        "Always 1. The labels describe the process.",
        "version",
        "python",
        "name",
        "model",
        "device",
    ),
)


class EngineTally(Observer):
    """Counters since the start of the process. Only the engine's thread counts, except for ``refused``.

    Any thread may read them.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.cached: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.ttft, self.gap, self.tpot, self.handoff = Durations(), Durations(), Durations(), Durations()
        self.steps = {kind: Durations() for kind in STEPS}
        self.batch_size = self.step_chunk_tokens = self.stalls = 0
        self.stalled_s = 0.0
        self._refusals = threading.Lock()

    def refused(self, error: KVStoreError) -> None:
        """Count a refused request. Any thread may call this."""
        with self._refusals:
            self.outcomes["invalid" if isinstance(error, InvalidRequest) else "refused"] += 1

    def ended(self, outcome: str, usage: Usage) -> None:
        """Count a request that has ended."""
        self.outcomes[outcome if outcome in OUTCOMES else "failed"] += 1
        for name in ("prompt_tokens", "completion_tokens", "computed_tokens", "loaded_bytes", "written_bytes"):
            self.totals[name] += getattr(usage, name)
        self.cached.update(usage.cached_tokens)
        if usage.completion_tokens and outcome != "prefilled":
            self.ttft.add(usage.ttft_ms / 1e3)
            if usage.gap_ms:
                self.gap.add(usage.gap_ms / 1e3)
            if usage.tpot_ms:
                self.tpot.add(usage.tpot_ms / 1e3)

    def stepped(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """Count a forward pass."""
        self.batch_size, self.step_chunk_tokens = decoding, chunk_tokens
        self.totals["decode_tokens"] += decoding
        self.totals["prefill_tokens"] += chunk_tokens
        self.steps["decode" if not chunk_tokens else "mixed" if decoding else "prefill"].add(seconds)

    @property
    def done(self) -> dict[str, Any]:
        """The tokens since the start, for ``Status``. Any thread may read this."""
        return {
            "prefill_tokens": self.totals["prefill_tokens"],
            "decode_tokens": self.totals["decode_tokens"],
            "cached_tokens": self.cached_by_tier(),
        }

    def cached_by_tier(self) -> dict[str, int]:
        """Return how many prompt tokens of requests that have ended were cached, by tier."""
        return dict(sorted({"hbm": 0, "dram": 0, "nvme": 0, **self.cached}.items()))

    def handed_off(self, moved_bytes: int, seconds: float) -> None:
        """Count a hand-off to this engine."""
        self.totals["moved_bytes"] += moved_bytes
        self.handoff.add(max(0.0, seconds))

    def stalled(self, seconds: float) -> None:
        """Count a step that waited for layers."""
        self.stalls += 1
        self.stalled_s += seconds


class EngineMetrics(DaemonMetrics):
    """Samples the metrics of an engine."""

    def __init__(
        self, name: str, tally: EngineTally, status: Callable[[], Mapping[str, Any]], calls: Calls | None
    ) -> None:
        super().__init__(PREFIX, METRICS)
        self._name = name
        self._tally = tally
        self._status = status
        self._calls = calls
        self._started_s = time.monotonic()

    def add_samples(self, add: Families) -> None:
        """Add the samples of all metrics."""
        self._add_counters(add)
        self._add_gauges(add, self._status())
        if self._calls is not None:
            add.grpc(self._calls)

    def _add_counters(self, add: Families) -> None:
        tally = self._tally
        for outcome in OUTCOMES:
            add("requests", tally.outcomes[outcome], outcome)
        for name in ("prompt_tokens", "completion_tokens", "computed_tokens"):
            add(name, tally.totals[name])
        for tier, tokens in tally.cached_by_tier().items():
            add("cached_tokens", tokens, tier)
        for kind in ("prefill", "decode"):
            add("step_tokens", tally.totals[f"{kind}_tokens"], kind)
        add("pool_bytes", tally.totals["loaded_bytes"], "loaded")
        add("pool_bytes", tally.totals["written_bytes"], "written")
        for name in ("ttft", "gap", "tpot", "handoff"):
            add.durations(f"{name}_seconds", getattr(tally, name))
        for kind, durations in tally.steps.items():
            add.durations("step_seconds", durations, kind)
        add("handoff_bytes", tally.totals["moved_bytes"])
        add("stalled_seconds", tally.stalled_s)
        add("stalls", tally.stalls)
        add("batch_size", tally.batch_size)
        add("chunk_tokens", tally.step_chunk_tokens)

    def _add_gauges(self, add: Families, status: Mapping[str, Any]) -> None:
        frames, speeds = status["frames"], status["speeds"]
        for state, count in status["requests"].items():
            add("requests_here", count, state)
        add("prefills_held", status["prefills_held"])
        add("frames", frames["free"], "free")
        add("frames", frames["total"] - frames["free"], "used")
        add("frames", frames["shared"], "shared")
        add("frames", frames["kept"], "kept")
        for event, pages in status["kept_pages"].items():
            add("kept_pages", pages, event)
        add("prefill_tokens_per_second", speeds["prefill_tokens_per_s"])
        add("decode_step_seconds", speeds["step_ms"] / 1e3)
        add("hook_seconds_per_layer", speeds["hook_us_per_layer"] / 1e6)
        for role in Role:
            add("role", role == status["role"], role)
        add("draining", status["draining"])
        add.process(time.monotonic() - self._started_s, self._name, str(status["model"]), str(status["device"]))
