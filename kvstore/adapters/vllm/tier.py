"""A secondary tier for vLLM's own offloading. vLLM finds it by ``secondary_tiers[].module_path``::

    {"type": "KVStoreTier", "module_path": "kvstore.adapters.vllm.tier", "node": "pool"}

vLLM identifies its chunks by hashes of its own, so the store keeps them as opaque objects. An object's name contains
the chunk's hash and size, and a digest of the model's folder. It also contains everything that distinguishes folders of
vLLM's file tier (model, dtype, groups, ranks, format). Lookups read the node's mapped index in the scheduler's thread.
Two threads copy chunks, one for loads and one for stores.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import Locality, LookupResult, OffloadKey, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.adapters.values import Values, connect_for
from kvstore.adapters.weights import folder_digest

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

FAILED_MAX = 65536  # chunks whose load failed, which are misses until they are stored again
DRAIN_S = 30.0  # longest wait for all jobs; then waiting jobs are dropped, and running ones get this time again

Copy = Callable[[Sequence[str], Sequence[Any], str], list[bool]]


class KVStoreTier(SecondaryTierManager):
    """A tier of vLLM's offloading in a node. vLLM's factory creates it from an entry in ``secondary_tiers``.

    The node evicts chunks. vLLM pins the chunks of each job, which bounds the number of waiting jobs.

    Args:
        node: as in ``kvstore.connect``; default: the only node on this machine.
        salt: the tenant.

    Raises:
        ValueError: the node does not exist, or is on another machine, so that each lookup would delay the scheduler.
        OSError: the model's folder cannot be read.
    """

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        node: str | None = None,
        salt: str = "vllm-offload",
        locality: str | None = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        store = connect_for("vLLM's offloading", node)
        if not store.reads_without_node:
            store.close()
            raise ValueError("kvstore for vLLM's offloading: node: must be on this machine; start one here")
        self._values = Values(store)
        self._salt = salt
        self._chunks = np.asarray(primary_kv_view).view(np.uint8)
        files = FileMapper.from_offloading_spec("", offloading_spec, offloading_spec.blocks_per_chunk, True)
        format_text = f"{files.base_path}@{self.block_size_bytes}@{folder_digest(offloading_spec.config.model.name)}"
        self._name_prefix = f"{hashlib.blake2b(format_text.encode(), digest_size=16).hexdigest()}@{files.rank}"
        self._loads = ThreadPoolExecutor(1, "kvstore-tier-load")
        self._stores = ThreadPoolExecutor(1, "kvstore-tier-store")
        self._jobs: list[tuple[TransferJob, Future[JobResult]]] = []
        self._failed_loads: dict[OffloadKey, None] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk is stored. A chunk whose last load failed is a miss."""
        is_hit = key not in self._failed_loads and self._values.contains([self._name(key)], self._salt)[0]
        return LookupResult.HIT if is_hit else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Start storing a job's chunks."""
        self._jobs.append((job_metadata, self._stores.submit(self._run, job_metadata, self._values.put)))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Start loading a job's chunks."""
        self._jobs.append((job_metadata, self._loads.submit(self._run, job_metadata, self._values.get)))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Remove jobs that have ended and return their results. A dropped job has failed."""
        ended = [(job, future) for job, future in self._jobs if future.done()]
        ended_ids = {job.job_id for job, _ in ended}
        self._jobs = [entry for entry in self._jobs if entry[0].job_id not in ended_ids]
        return [
            JobResult(job_id=job.job_id, success=False, successful_keys=[]) if future.cancelled() else future.result()
            for job, future in ended
        ]

    def has_pending_work(self) -> bool:
        """Return whether there are jobs whose results vLLM has not taken. vLLM polls as long as there are, and a
        request that waits for a load continues when a poll returns the load's result."""
        return bool(self._jobs)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Return an empty context: the tier keeps nothing for a request."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until all jobs have ended, and drop waiting jobs after ``DRAIN_S``. Calls to a node that is not
        responding end early, so a job takes little longer than its copies.

        Raises:
            TimeoutError: a job still runs, so vLLM must not reuse the memory of its chunks yet.
        """
        if wait([future for _, future in self._jobs], DRAIN_S).not_done:
            self._drop_waiting_jobs()

    def shutdown(self) -> None:
        """Drop waiting jobs, wait for running ones, and close the connection. Stored chunks stay in the node.

        Raises:
            TimeoutError: as for ``drain_jobs``.
        """
        self._drop_waiting_jobs()
        for pool in (self._loads, self._stores):
            pool.shutdown()
        self._values.close()

    def _drop_waiting_jobs(self) -> None:
        """Drop jobs that have not started, and wait for running ones."""
        running = [future for _, future in self._jobs if not future.cancel()]
        if wait(running, DRAIN_S).not_done:
            raise TimeoutError(f"kvstore for vLLM's offloading: chunks are still being copied after {DRAIN_S:g} s")

    def _run(self, job: TransferJob, copy: Copy) -> JobResult:
        """Copy a job's chunks and return the job's result."""
        start_s, keys = time.monotonic(), list(job.keys)
        rows = [self._chunks[int(chunk)] for chunk in job.chunk_ids]
        results = copy([self._name(key) for key in keys], rows, self._salt)
        for key, is_copied in zip(keys, results, strict=True):
            if job.is_promotion and not is_copied:
                if len(self._failed_loads) >= FAILED_MAX:
                    self._failed_loads.clear()
                self._failed_loads[key] = None
            elif not job.is_promotion and is_copied:
                self._failed_loads.pop(key, None)  # the chunk is stored again: it had been evicted before its load
        return JobResult(
            job_id=job.job_id,
            success=all(results),
            successful_keys=[key for key, is_copied in zip(keys, results, strict=True) if is_copied],
            transfer_time=time.monotonic() - start_s,
            transfer_bytes=sum(results) * self.block_size_bytes,
        )

    def _name(self, key: OffloadKey) -> str:
        return f"{self._name_prefix}@{key.hex()}"
