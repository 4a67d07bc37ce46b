"""Counters of the tokens and pages that the connector finds, loads and saves, for vLLM's log and ``/metrics``."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Descriptions of the counters, by name. Only the first worker counts loaded and saved pages, so that a page counts
# once. All workers count everything else.
DESCRIPTIONS = {
    "found_tokens": "Tokens found in the store in addition to those in vLLM's own cache.",
    "loaded_pages": "Pages loaded.",
    "failed_pages": "Pages found but not loaded, counted by each worker that missed them.",
    "saved_pages": "Pages saved to the store.",
    "loaded_bytes": "Bytes loaded, by all workers.",
    "saved_bytes": "Bytes saved to the store, by all workers.",
    "load_seconds": "Seconds that workers spent loading, in parallel with steps.",
    "save_seconds": "Seconds that workers spent saving, at the end of steps.",
    "failed_saves": "Steps after which not all pages could be saved.",
}


class MoveStats(KVConnectorStats):
    """Counts of one interval, by name. ``data`` omits counts of 0, so that messages stay small."""

    def add(self, **counts: float) -> None:
        """Add to the counts."""
        for name, count in counts.items():
            assert name in DESCRIPTIONS
            if count:
                self.data[name] = self.data.get(name, 0) + count

    def reset(self) -> None:
        """Set all counts to 0."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counts of ``other`` and return ``self``."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log, in the order of ``DESCRIPTIONS``."""
        return {name: round(self.data[name], 6) for name in DESCRIPTIONS if name in self.data}

    def is_empty(self) -> bool:
        """Return whether all counts are 0."""
        return not self.data


class PromMoveStats(KVConnectorPromMetrics):
    """Prometheus counters named ``vllm:kvstore_NAME``, with a series for each engine of this server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for name, description in DESCRIPTIONS.items():
            counter = self._counter_cls(name=f"vllm:kvstore_{name}", documentation=description, labelnames=labelnames)
            for engine, labels in per_engine_labelvalues.items():
                self._counters[engine][name] = counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one engine to its counters."""
        for name, count in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(count)
