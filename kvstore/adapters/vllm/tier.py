"""A secondary tier for vLLM's own offloading, found by ``secondary_tiers[].module_path``::

    {"type": "KVStoreTier", "module_path": "kvstore.adapters.vllm.tier", "node": "pool"}

vLLM names its chunks by its own hashes, so they are opaque objects here. Their names contain everything that
distinguishes the folders of vLLM's file tier (model, dtype, groups, ranks, format), a digest of the model's folder, and
the chunk's size. Lookups read the node's mapped index on the scheduler's thread; threads move chunks.
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

from kvstore.adapters.values import Values, connected
from kvstore.adapters.weights import folder_digest

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

FAILED_MAX = 65536  # chunks that could not be loaded, which are misses until they are stored again
DRAIN_S = 30.0  # wait for moving chunks, then, after dropping waiting ones, for the last one in transit

Move = Callable[[Sequence[str], Sequence[Any], str], list[bool]]


class KVStoreTier(SecondaryTierManager):
    """Made by vLLM's factory from its entry in ``secondary_tiers``: ``node``, as ``kvstore.connect`` takes it (default:
    the only one on this machine), and ``salt``, the tenant. The node does the eviction.

    The number of waiting jobs is bounded by the chunks that vLLM pins for them.

    Raises:
        ValueError: there is no such node, or it is on another machine, where each lookup would delay the scheduler.
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
        store = connected("vLLM's offloading", node)
        if not store.reads_without_node:
            store.close()
            raise ValueError("kvstore for vLLM's offloading: node: must be on this machine; start one here")
        self._values = Values(store)
        self._salt = salt
        self._chunks = np.asarray(primary_kv_view).view(np.uint8)
        where = FileMapper.from_offloading_spec("", offloading_spec, offloading_spec.blocks_per_chunk, True)
        about = f"{where.base_path}@{self.block_size_bytes}@{folder_digest(offloading_spec.config.model.name)}"
        self._about = f"{hashlib.blake2b(about.encode(), digest_size=16).hexdigest()}@{where.rank}"
        self._loads = ThreadPoolExecutor(1, "kvstore-tier-load")
        self._stores = ThreadPoolExecutor(1, "kvstore-tier-store")
        self._jobs: list[tuple[TransferJob, Future[JobResult]]] = []
        self._failed: dict[OffloadKey, None] = {}

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """See the base class."""
        there = key not in self._failed and self._values.contains([self._name(key)], self._salt)[0]
        return LookupResult.HIT if there else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """See the base class."""
        self._jobs.append((job_metadata, self._stores.submit(self._moved, job_metadata, self._values.put)))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """See the base class."""
        self._jobs.append((job_metadata, self._loads.submit(self._moved, job_metadata, self._values.get)))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """See the base class."""
        ended = [(job, future) for job, future in self._jobs if future.done()]
        over = {job.job_id for job, _ in ended}
        self._jobs = [each for each in self._jobs if each[0].job_id not in over]
        return [_given_up(job) if future.cancelled() else future.result() for job, future in ended]

    def has_pending_work(self) -> bool:
        """See the base class. A waiting load continues when its job is polled."""
        return bool(self._jobs)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See the base class."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """See the base class. A node that does not answer is given up, so this takes only as long as copies in memory.

        Raises:
            TimeoutError: a chunk is still in transit, so vLLM's memory must not be reused yet.
        """
        if wait([future for _, future in self._jobs], DRAIN_S).not_done:
            self._give_up()

    def shutdown(self) -> None:
        """See the base class. Waiting chunks are given up.

        Raises:
            TimeoutError: as for ``drain_jobs``.
        """
        self._give_up()
        for pool in (self._loads, self._stores):
            pool.shutdown()
        self._values.close()

    def _give_up(self) -> None:
        """Give up chunks that have not started, and wait for the others."""
        running = [future for _, future in self._jobs if not future.cancel()]
        if wait(running, DRAIN_S).not_done:
            raise TimeoutError(f"kvstore for vLLM's offloading: chunks still move after {DRAIN_S:g} s")

    def _moved(self, job: TransferJob, move: Move) -> JobResult:
        start_s, keys = time.monotonic(), list(job.keys)
        rows = [self._chunks[int(number)] for number in job.chunk_ids]
        done = move([self._name(key) for key in keys], rows, self._salt)
        for key, well in zip(keys, done, strict=True):
            if job.is_promotion and not well:
                if len(self._failed) >= FAILED_MAX:
                    self._failed.clear()
                self._failed[key] = None
            elif not job.is_promotion and well:
                self._failed.pop(key, None)  # it may have been evicted between lookup and load
        return JobResult(
            job_id=job.job_id,
            success=all(done),
            successful_keys=[key for key, well in zip(keys, done, strict=True) if well],
            transfer_time=time.monotonic() - start_s,
            transfer_bytes=sum(done) * self.block_size_bytes,
        )

    def _name(self, key: OffloadKey) -> str:
        return f"{self._about}@{key.hex()}"


def _given_up(job: TransferJob) -> JobResult:
    return JobResult(job_id=job.job_id, success=False, successful_keys=[])
