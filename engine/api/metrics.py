"""Metrics of an engine: ``/metrics`` for Prometheus, all of them called ``kvstore_engine_*``. ``METRICS`` is the list.

What ends or happens is counted here, told by the engine's thread; what is so at the moment is asked of it on every
scrape. Everything counts from the start of the process. The number of series is bounded: labels are tiers, outcomes,
states and gRPC methods.
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


_about = partial(metric_info, PREFIX)

METRICS: Final = (
    _about("counter", "requests", f"Requests that ended: {', '.join(OUTCOMES)}.", "outcome"),
    _about("counter", "prompt_tokens", "Tokens of the prompts of requests that ended."),
    _about("counter", "completion_tokens", "Tokens generated for them."),
    _about("counter", "cached_tokens", "Prompt tokens whose KV was in the pool, or in the arena (hbm).", "tier"),
    _about("counter", "computed_tokens", "Prompt tokens whose KV was computed here."),
    _about("counter", "step_tokens", "Tokens that steps worked on, by what for: prefill, decode.", "kind"),
    _about("counter", "pool_bytes", "KV loaded from the pool, or written to it.", "direction"),
    _about("histogram", "ttft_seconds", "Time from submission to the first token."),
    _about("histogram", "gap_seconds", "Time from the first token to the second, where a hand-off may show."),
    _about("histogram", "tpot_seconds", "Mean time per token after the second, one sample per request."),
    _about("histogram", "step_seconds", "Time of a step of the engine, by what was in it.", "kind"),
    _about("histogram", "handoff_seconds", "Time from the first token to the last layer of KV brought here."),
    _about("counter", "handoff_bytes", "KV that hand-offs brought here."),
    _about("counter", "stalled_seconds", "Time that steps waited for layers on their way."),
    _about("counter", "stalls", "Steps that had to."),
    _about("gauge", "batch_size", "Sequences that the last step decoded."),
    _about("gauge", "chunk_tokens", "Prompt tokens in the last step."),
    _about("gauge", "requests_here", "Requests by state, from waiting (for frames) to decoding.", "state"),
    _about("gauge", "prefills_held", "Prefills for other engines, computed or being so, whose frames are not back."),
    _about("gauge", "frames", "Frames of the arena: free (kept: with a page), used (shared: by several).", "state"),
    _about("counter", "kept_pages", "Pages of requests that had ended: found, evicted, demoted to the pool.", "event"),
    _about("gauge", "prefill_tokens_per_second", "Measured speed of steps that only prefill, smoothed."),
    _about("gauge", "decode_step_seconds", "Measured time of a step that only decodes, smoothed."),
    _about(
        "gauge", "hook_seconds_per_layer", "Mean time that writing one layer of a chunk to the pool takes the engine."
    ),
    _about("gauge", "draining", "1 where no new requests are taken."),
    _about("gauge", "role", "1 for the role that the engine has.", "role"),
    _about("counter", "grpc_calls", "gRPC calls that ended, by status code; refused ones as well.", "method", "code"),
    _about("counter", "grpc_shed_calls", SHED_HELP, "reason"),
    _about("histogram", "grpc_call_duration_seconds", "Time from a call's arrival to its end.", "method"),
    _about("counter", "grpc_bytes", "Bytes of messages over gRPC.", "direction"),
    *MEMBERSHIP,
    INTERNAL_ERRORS,
    _about("gauge", "uptime_seconds", "Time since this engine started."),
    _about("gauge", "process_resident_bytes", "Memory of the process that is resident, shared pages included."),
    _about("counter", "process_cpu_seconds", "Processor time of the process."),
    _about("gauge", "build_info", "1; the labels say what runs.", "version", "python", "name", "model", "device"),
)


class EngineTally(Observer):
    """Counts since the start. The engine's thread writes all but ``refused``; any thread reads."""

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
        """Count a refused request. Any thread."""
        with self._refusals:
            self.outcomes["invalid" if isinstance(error, InvalidRequest) else "refused"] += 1

    def ended(self, outcome: str, usage: Usage) -> None:
        """Count a request with this end and this cost."""
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
        """One forward."""
        self.batch_size, self.step_chunk_tokens = decoding, chunk_tokens
        self.totals["decode_tokens"] += decoding
        self.totals["prefill_tokens"] += chunk_tokens
        self.steps["decode" if not chunk_tokens else "mixed" if decoding else "prefill"].add(seconds)

    @property
    def done(self) -> dict[str, Any]:
        """Tokens since the start, for ``Status``. Any thread."""
        return {
            "prefill_tokens": self.totals["prefill_tokens"],
            "decode_tokens": self.totals["decode_tokens"],
            "cached_tokens": self.cached_by_tier(),
        }

    def cached_by_tier(self) -> dict[str, int]:
        """Prompt tokens of requests that ended, that were found in the arena or in the pool."""
        return dict(sorted({"hbm": 0, "dram": 0, "nvme": 0, **self.cached}.items()))

    def handed_off(self, moved_bytes: int, seconds: float) -> None:
        """Count a hand-off that arrived."""
        self.totals["moved_bytes"] += moved_bytes
        self.handoff.add(max(0.0, seconds))

    def stalled(self, seconds: float) -> None:
        """Count a step that waited."""
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
        self._began_s = time.monotonic()

    def add_samples(self, add: Families) -> None:
        """See ``DaemonMetrics``."""
        self._counted(add)
        self._now(add, self._status())
        if self._calls is not None:
            add.grpc(self._calls)

    def _counted(self, add: Families) -> None:
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
        for name, took in (("ttft", tally.ttft), ("gap", tally.gap), ("tpot", tally.tpot), ("handoff", tally.handoff)):
            add.durations(f"{name}_seconds", took)
        for kind, took in tally.steps.items():
            add.durations("step_seconds", took, kind)
        add("handoff_bytes", tally.totals["moved_bytes"])
        add("stalled_seconds", tally.stalled_s)
        add("stalls", tally.stalls)
        add("batch_size", tally.batch_size)
        add("chunk_tokens", tally.step_chunk_tokens)

    def _now(self, add: Families, status: Mapping[str, Any]) -> None:
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
        add.process(time.monotonic() - self._began_s, self._name, str(status["model"]), str(status["device"]))
