"""vLLM's own tiered offloading as a process of its own, in vLLM's environment: told line by line what to do.

Its manager and its memory of the processor are vLLM's; only the GPU is missing, so chunks are filled and read here. A
line is JSON: ``do`` is a method below, ``first`` and ``count`` name chunks. The answer is a line with
``done``: of each chunk whether it is stored or found, and has its content; or of each reset whether it worked. A load
begins with an empty first tier.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import wait
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, OffloadingSpec, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

import kvstore.adapters.vllm.tier

CHUNKS, CHUNK_BYTES = 16, 192 << 10
ANSWER_S = 30.0


class Spec(OffloadingSpec):
    """What vLLM tells a tier. It has no manager and no worker of a GPU."""

    def get_manager(self) -> Any:
        """Not asked for."""
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        """Not asked for."""
        raise NotImplementedError


class Region:
    """Memory of the first tier."""

    def __init__(self) -> None:
        self.memory = np.zeros((CHUNKS, CHUNK_BYTES), np.uint8)

    def create_kv_memoryview(self) -> memoryview:
        """As of vLLM's shared region."""
        return memoryview(self.memory)  # type: ignore[arg-type]

    def cleanup(self) -> None:
        """As of vLLM's shared region: the last thing a manager does at its end."""


def spec_of(model: str, dtype: str) -> Spec:
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)
    groups = (OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),)
    cache, named = OffloadingCacheConfig(16, 4), OffloadingModelConfig(model, dtype)
    return Spec(OffloadingConfig(groups, CHUNK_BYTES // 4, False, {}, "engine", named, cache, parallel))


def content(number: int) -> Any:
    """Of a chunk."""
    return np.random.default_rng(number).integers(0, 256, CHUNK_BYTES, np.uint8)


class Offloading:
    """vLLM's manager over one tier."""

    def __init__(self, entry: dict[str, Any], spec: Spec) -> None:
        self._region, self._requests = Region(), 0
        primary = CPUPrimaryTierOffloadingManager(CHUNKS, self._region)  # type: ignore[arg-type]
        tier = SecondaryTierFactory.create_secondary_tier(entry, primary.get_kv_memoryview(), spec)
        self._tier, self._manager = tier, TieringOffloadingManager(primary, [tier])

    def store(self, numbers: list[int]) -> list[bool]:
        """From the GPU, as it were, into the first tier, and from there into ours."""
        keys, context = self._begin(numbers)
        prepared = self._manager.prepare_store(keys, context)
        assert prepared is not None and prepared.keys_to_store == keys
        for number, place in zip(numbers, prepared.store_spec.block_ids, strict=True):  # type: ignore[attr-defined]
            self._region.memory[place] = content(number)
        self._manager.complete_store(keys, context)
        self._settle()
        self._manager.on_request_finished(context)
        self._settle()
        return [True] * len(keys)

    def load(self, numbers: list[int]) -> list[bool]:
        """Out of our tier, as far as it has them."""
        self._manager.reset_cache()
        self._region.memory[:] = 0
        keys, context = self._begin(numbers)
        found: list[bool] = []
        for key, number in zip(keys, numbers, strict=True):
            deadline_s = time.monotonic() + ANSWER_S
            while (result := self._manager.lookup(key, context)) in (LookupResult.RETRY, LookupResult.HIT_PENDING):
                self._step()
                assert time.monotonic() < deadline_s
            found.append(result == LookupResult.HIT)
            if found[-1]:
                (place,) = self._manager.prepare_load([key], context).block_ids  # type: ignore[attr-defined]
                assert np.array_equal(self._region.memory[place], content(number)), "a hit has its content"
                self._manager.complete_load([key], context)
        self._manager.on_request_finished(context)
        self._settle()
        return found

    def lookup(self, numbers: list[int]) -> list[bool]:
        """Whether our tier says that it has them."""
        keys, context = self._begin(numbers)
        found = [self._tier.lookup(key, context) == LookupResult.HIT for key in keys]
        self._manager.on_request_finished(context)
        return found

    def reset_stuck(self, numbers: list[int]) -> list[bool]:
        """Whether vLLM's reset fails while a chunk is stuck on its way, and works when it has come. Chunks that wait
        behind it are given up."""
        tier: Any = self._tier
        get, come = tier._values.get, threading.Event()

        def get_late(*told: Any) -> Any:
            assert come.wait(ANSWER_S)
            return get(*told)

        tier._values.get, kvstore.adapters.vllm.tier.DRAIN_S = get_late, 0.1
        for number in numbers:  # a job each
            keys, context = self._begin([number])
            assert self._manager.lookup(keys[0], context) == LookupResult.HIT_PENDING
            self._manager.on_schedule_end(ScheduleEndContext((), ()))
        outcomes = []
        for _ in range(2):
            try:
                self._manager.reset_cache()
                outcomes.append(True)
            except TimeoutError:
                outcomes.append(False)
            come.set()
            wait([future for _, future in tier._jobs], ANSWER_S)
        tier._values.get = get
        return outcomes

    def close(self) -> None:
        """End it."""
        self._manager.shutdown()

    def _begin(self, numbers: list[int]) -> tuple[list[Any], ReqContext]:
        self._requests += 1
        context = ReqContext(f"request-{self._requests}")
        self._manager.on_new_request(context)
        return [make_offload_key(b"%032d" % number, 0) for number in numbers], context

    def _settle(self) -> None:
        deadline_s = time.monotonic() + ANSWER_S
        self._step()
        while self._manager.has_pending_work():
            assert time.monotonic() < deadline_s
            self._step()

    def _step(self) -> None:
        self._manager.on_schedule_end(ScheduleEndContext((), ()))
        self._manager._maybe_process_finished_jobs()
        time.sleep(0.002)


def main(told: str) -> None:
    """Until its input ends. ``told``: JSON of the tier's ``entry``, ``model`` and ``dtype``."""
    about = json.loads(told)
    try:
        offloading = Offloading(about["entry"], spec_of(about["model"], about["dtype"]))
    except (ValueError, TypeError) as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        raise SystemExit(3) from None
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        numbers = list(range(order["first"], order["first"] + order["count"]))
        print(json.dumps({"done": getattr(offloading, order["do"])(numbers)}), flush=True)
    offloading.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
