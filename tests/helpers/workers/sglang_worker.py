"""SGLang's storage as a process of its own, in SGLang's environment: told line by line what to do with pages.

Its first argument is JSON: ``backend`` and ``extra`` as SGLang's flags have them, ``layout``, ``mla``, ``tp_rank``,
``tp_size``, ``dtype``, ``model``. Pages lie in host pools of SGLang. A line is JSON: ``do`` says what to do, ``first``
and ``count`` name pages. The answer is a line with ``done`` and ``right``: of each page whether it has its content.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

LAYERS, PAGE, PAGES, DIM = 3, 4, 32, 16
CPU = torch.device("cpu")


def host_pool(told: dict[str, Any], *, mla: bool) -> Any:
    """One of SGLang's, with room for ``PAGES`` pages."""
    dtype = getattr(torch, told["dtype"])
    width = DIM * 2 if mla else DIM
    layers = [torch.zeros(PAGE, 1 if mla else 2, width, dtype=dtype) for _ in range(LAYERS * 2)]
    pointers = torch.tensor([each.data_ptr() for each in layers], dtype=torch.uint64)
    room = {"device_capacity_tokens": PAGE, "start_layer": 0, "end_layer": LAYERS, "host_token_capacity": PAGES * PAGE}
    if mla:
        info = MLABufferInfo(
            buffers=tuple(layers[:LAYERS]), data_ptrs=pointers[:LAYERS], layer_indices=tuple(range(LAYERS)),
            device_layer_num=LAYERS, page_size=PAGE, kv_lora_rank=DIM, qk_rope_head_dim=DIM, kv_cache_dim=width,
            dtype=dtype, device=CPU,
        )  # fmt: skip
        return MLATokenToKVPoolHost(info, 1.0, 0, PAGE, told["layout"], False, target_layer_num=LAYERS, **room)
    buffers = KVBuffers(
        k=tuple(layers[:LAYERS]), v=tuple(layers[LAYERS:]), k_data_ptrs=pointers[:LAYERS],
        v_data_ptrs=pointers[LAYERS:], layout=KVBufferLayout(told.get("buffers", "nhd")),
    )  # fmt: skip
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=2, head_dim=DIM, v_head_dim=DIM, dtype=dtype, device=CPU
    )
    return MHATokenToKVPoolHost(info, 1.0, 0, PAGE, told["layout"], False, **room)


def content(pool: Any, number: int) -> torch.Tensor:
    """Of a page, flat."""
    like = pool.get_dummy_flat_data_page()
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(number)).to(like.dtype)


class Driver:
    """A back end with its pools: the main one, and one of a sliding window."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.pool = host_pool(told, mla=told["mla"])
        self.config = HiCacheStorageConfig(
            tp_rank=told["tp_rank"], tp_size=told["tp_size"], pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=told["mla"], enable_storage_metrics=True, is_page_first_layout=told["layout"] == "page_first",
            model_name=told["model"], extra_config=told["extra"],
        )  # fmt: skip
        self.backend = StorageBackendFactory.create_backend(told["backend"], self.config, self.pool)
        self.backend.register_mem_pool_host(self.pool)
        self.window = host_pool(told, mla=told["mla"])
        self.backend.register_mem_host_pool_v2(self.window, PoolName.SWA)
        self.backend.on_host_pools_registered()

    def fill(self, numbers: range, *, real: bool) -> torch.Tensor:
        """Give pages of both pools their content, or zeros; their rows."""
        for pool in (self.pool, self.window):
            for place, number in enumerate(numbers):
                page = content(pool, number)
                pool.set_from_flat_data_page(place * PAGE, page if real else torch.zeros_like(page))
        return torch.arange(len(numbers) * PAGE)

    def right(self, pool: Any, numbers: range) -> list[bool]:
        """Which pages have their content."""
        return [
            torch.equal(pool.get_data_page(place * PAGE, flat=True), content(pool, number))
            for place, number in enumerate(numbers)
        ]

    def do(self, what: str, numbers: range) -> dict[str, Any]:
        """What came of it."""
        keys = [f"{number:064x}" for number in numbers]
        rows = self.fill(numbers, real=what in ("set", "set2", "set_flat"))
        transfer = PoolTransfer(PoolName.SWA, rows, keys=keys)
        pool = self.window if what.endswith("2") else self.pool
        done: Any = None
        if what == "set":
            done = self.backend.batch_set_v1(keys, rows)
        elif what == "get":
            done = self.backend.batch_get_v1(keys, rows)
        elif what == "exists":
            done = self.backend.batch_exists(keys)
        elif what == "set2":
            done = self.backend.batch_set_v2([transfer])[PoolName.SWA]
        elif what == "get2":
            done = self.backend.batch_get_v2([transfer])[PoolName.SWA]
        elif what == "exists2":
            tail = PoolTransfer(PoolName.SWA, keys=keys[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)
            done = [
                self.backend.batch_exists_v2(keys, [each]).kv_hit_pages for each in (PoolTransfer(PoolName.SWA), tail)
            ]
        elif what == "set_flat":
            pages = [self.pool.get_data_page(place * PAGE) for place in range(len(keys))]
            done = self.backend.batch_set(keys, pages)
        elif what == "get_flat":
            found = self.backend.batch_get(keys, [self.pool.get_dummy_flat_data_page() for _ in keys])
            done = [page is not None for page in found]
            for place, page in enumerate(found):
                if page is not None:
                    self.pool.set_from_flat_data_page(place * PAGE, page)
        elif what == "clear":
            done = self.backend.clear()
        elif what == "stats":
            stats = self.backend.get_stats()
            done = [sum(stats.backup_pgs), sum(stats.prefetch_pgs)]
        return {"done": done, "right": self.right(pool, numbers)}


def main(spec: str) -> None:
    """Until its input ends."""
    driver = Driver(json.loads(spec))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        print(json.dumps(driver.do(told["do"], range(told["first"], told["first"] + told["count"]))), flush=True)
    driver.backend.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
