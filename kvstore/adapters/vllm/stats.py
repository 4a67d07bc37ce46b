"""Counters of what the connector has found, loaded and saved, for vLLM's log and ``/metrics``."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# Counters since the start, by name. The first worker counts pages; each worker counts everything else.
COUNTED = {
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
    """Sums since they were last taken. ``data`` has only those that are not 0, so it stays small."""

    def add(self, **counts: float) -> None:
        """Add to the counts."""
        for name, count in counts.items():
            assert name in COUNTED
            if count:
                self.data[name] = self.data.get(name, 0) + count

    def reset(self) -> None:
        """See the base class."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """See the base class."""
        self.add(**other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """See the base class."""
        return {name: round(self.data[name], 6) for name in COUNTED if name in self.data}

    def is_empty(self) -> bool:
        """See the base class."""
        return not self.data


class PromMoveStats(KVConnectorPromMetrics):
    """Counters ``vllm:kvstore_NAME``, one of each for each engine of this server."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        for name, what in COUNTED.items():
            counter = self._counter_cls(name=f"vllm:kvstore_{name}", documentation=what, labelnames=labelnames)
            for engine, labels in per_engine_labelvalues.items():
                self._counters[engine][name] = counter.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """See the base class."""
        for name, count in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(count)
