"""SGLang: a back end for HiCache's storage::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvstore", "module_path": "kvstore.adapters.sglang", "class_name": "KVStoreHiCache",
      "interface_v1": 1, "node": "pool"}'

SGLang names its pages by hashes of its own, so they are opaque objects here, one for each page of each pool: proven on
every read, checksummed, evicted by the node, on NVMe. A name also has the model, the rank, and all that tells how the
bytes of a page are laid out, so that engines with other layouts never read them.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvstore.adapters.values import Values, connected
from kvstore.adapters.weights import folder_digest, given_digest

HOST_SETTINGS = ("backend_name", "module_path", "class_name", "interface_v1")  # SGLang's own
SETTINGS = ("node", "salt", "model")
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
RATES_MAX = 4096  # of one kind that are kept until somebody asks


class HostPages:
    """The pages of a pool in host memory: where they lie, and what their values are called."""

    def __init__(self, pool: Any, name: str, rank: str, model: str) -> None:
        layout = getattr(pool, "layout", None)
        if layout not in LAYOUTS:
            raise ValueError(
                f"kvstore for SGLang: pool {name!r} has layout {layout!r}, not one of {', '.join(LAYOUTS)}: "
                "see --hicache-mem-layout"
            )
        self._pool = pool
        self.page_size = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise ValueError(f"kvstore for SGLang: pages of pool {name!r} have no addresses: {error}") from error
        self.page_bytes = sum(sizes)
        facts = [type(pool).__name__, layout, str(getattr(pool, "dtype", "")), self.page_size, sizes]
        for what in ("head_num", "head_dim", "layer_num", "start_layer", "end_layer", "kv_cache_dim"):
            facts.append(getattr(pool, what, None))
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
        self._prefix = f"{model}@{rank}@{name}@{digest}@"

    def names(self, keys: Sequence[str]) -> list[str]:
        """Of their values."""
        return [self._prefix + key for key in keys]

    def buffers(self, count: int, indices: torch.Tensor | None) -> list[list[Any]] | None:
        """For each of ``count`` pages at these rows the memory it lies in; None: so many pages have other rows."""
        if indices is None or indices.numel() != count * self.page_size:
            return None
        places, sizes = self._pool.get_page_buffer_meta(indices)
        views = [_view(place, size) for place, size in zip(places, sizes, strict=True)]
        each = len(views) // max(count, 1)
        return [views[i * each : (i + 1) * each] for i in range(count)]


class KVStoreHiCache(HiCacheStorage):
    """Made by SGLang, one in each rank. Settings beside SGLang's own: ``node``, as ``kvstore.connect`` takes it (none:
    the only one on this machine), ``salt``, the tenant, and ``model``, the folder whose weights tell pages apart (none:
    the one that SGLang serves, where that is a folder). Threads may share it.

    The node evicts on its own. What is gone, damaged or cannot be reached is a miss; nothing is raised after the start.

    Raises:
        ValueError: a setting is unknown, there is no such node or folder, or a pool's layout is not served.
        OSError: the folder that SGLang serves cannot be read.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        unknown = sorted(set(extra) - set(HOST_SETTINGS) - set(SETTINGS))
        if unknown:
            raise ValueError(f"kvstore for SGLang: there is no setting {unknown[0]!r}, only {', '.join(SETTINGS)}")
        if storage_config.should_split_heads:
            raise ValueError("kvstore for SGLang: ranks of other sizes do not share pages: leave out 'tp_lcm_size'")
        self._config = storage_config
        self._zero_copy = bool(extra.get("interface_v1", 0))
        self._salt = str(extra.get("salt", "sglang"))
        model, folder = storage_config.model_name or "", str(extra.get("model", ""))
        digest = given_digest("SGLang", folder) if folder else folder_digest(model)
        # Lengths of its parts go into a name, so that no model's name makes another's.
        self._model = f"{len(model)}:{model}" + (f"@{digest}" if digest else "")
        self._pools: dict[str, HostPages | None] = {}
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()
        self._values = Values(connected("SGLang", extra.get("node")))

    # --- pools ------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """See the base class."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """See the base class."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV or PoolName.KV not in self._pools:
            self._add(host_pool, host_pool_name)

    def _add(self, pool: Any, name: str) -> None:
        if name == PoolName.KV and getattr(pool, "kv_buffer", None) is None:
            self._pools[name] = None  # rows are counted there, but other pools have all the bytes
        else:
            self._pools[name] = HostPages(pool, str(name), self._rank_of(pool, name), self._model)

    def _rank_of(self, pool: Any, name: str) -> str:
        """Whose pages these are. What all ranks have alike (MLA) one of them writes, and all read."""
        config = self._config
        shared = config.is_mla_model and name != PoolName.MAMBA and not isinstance(pool, MHATokenToKVPoolHost)
        tp = "all" if shared else f"{config.tp_rank}of{config.tp_size}"
        cp, dcp = (config.attn_cp_rank, config.attn_cp_size), (config.dcp_rank, config.dcp_size)
        parts = ((config.pp_rank, config.pp_size), cp, dcp)
        return ".".join([tp, *(f"{rank}of{size}" for rank, size in parts)])

    # --- pages where they lie -----------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many from the first are there without a gap."""
        return _leading(self._contains(PoolName.KV, keys) if self._zero_copy else self._contains_flat(keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """See the base class."""
        return self._move(PoolName.KV, keys, host_indices, write=False)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """See the base class."""
        return self._move(PoolName.KV, keys, host_indices, write=True)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """See the base class: the prefixes of which every pool has what it needs."""
        pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: pages} if pages else {}
        ends = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            there = self._contains(transfer.name, keys[:pages])
            # Of a block group no pages are counted, which is no hit. Nothing is claimed of what is not understood.
            needed = {PoolHitPolicy.ALL_PAGES: pages, PoolHitPolicy.TRAILING_PAGES: max(1, len(transfer.keys or []))}
            last = needed.get(transfer.hit_policy)
            if last is None:
                continue
            usable = [end for end in range(1, pages + 1) if all(there[max(0, end - last) : end])]
            if usable:
                hits[transfer.name] = usable[-1]
            ends = [end for end in ends if end in set(usable)]
        return PoolTransferResult(ends[-1] if ends else 0, hits, ends)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """See the base class."""
        return {each.name: self._move(each.name, each.keys or [], each.host_indices, write=False) for each in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """See the base class."""
        return {each.name: self._move(each.name, each.keys or [], each.host_indices, write=True) for each in transfers}

    # --- pages that were copied (without "interface_v1") --------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """See the base class."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """The page in ``target_location``, whose length it must have; None: a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        """See ``get``."""
        outs = list(target_locations or [None] * len(keys))
        if any(out is None or not out.is_contiguous() for out in outs):
            return [None] * len(keys)
        buffers = [_bytes_of(out) for out in outs if out is not None]
        done = self._values.get(self._flat(keys), buffers, self._salt)
        return [out if one else None for out, one in zip(outs, done, strict=True)]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: object = None, target_sizes: object = None
    ) -> bool:
        """Whether the page is stored now."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Whether all are stored now."""
        if values is None or len(values) != len(keys):
            return False
        pages = [value.contiguous() for value in values]  # kept until they are stored
        return all(self._values.put(self._flat(keys), [_bytes_of(page) for page in pages], self._salt))

    # --- the rest -----------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Delete all pages of this model, those of its other ranks too; whether that was done."""
        return self._values.clear(self._salt, f"{self._model}@")

    def get_stats(self) -> StorageMetrics | None:
        """Pages and GB/s of the calls since it was last asked."""
        if not self._config.enable_storage_metrics:
            return None
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def close(self) -> None:
        """Let go of the node. Pages stay."""
        self._values.close()

    def _contains(self, pool: str, keys: list[str]) -> list[bool]:
        pages = self._pools.get(pool)
        if pages is None:
            return [pool in self._pools] * len(keys)
        return self._values.contains(pages.names(keys), self._salt)

    def _contains_flat(self, keys: list[str]) -> list[bool]:
        return self._values.contains(self._flat(keys), self._salt)

    def _flat(self, keys: Sequence[str]) -> list[str]:
        """Names of pages in the order of ``get_data_page``, which is not always that of their places."""
        pages = self._pools.get(PoolName.KV)
        names = pages.names(keys) if pages is not None else [f"{self._model}@@@@{key}" for key in keys]
        return [f"{name}@flat" for name in names]

    def _move(self, pool: str, keys: list[str], indices: torch.Tensor | None, *, write: bool) -> list[bool]:
        """Which pages are stored, or read, now."""
        if pool not in self._pools:
            return [False] * len(keys)
        pages = self._pools[pool]
        if pages is None:
            return [True] * len(keys)
        buffers = pages.buffers(len(keys), indices)
        if buffers is None:
            return [False] * len(keys)
        start = time.monotonic()
        done = (self._values.put if write else self._values.get)(pages.names(keys), buffers, self._salt)
        self._count(sum(done), pages.page_bytes, time.monotonic() - start, write=write)
        return done

    def _count(self, pages: int, page_bytes: int, seconds: float, *, write: bool) -> None:
        if not pages or not self._config.enable_storage_metrics:
            return
        with self._lock:
            kept = self._metrics
            counts, rates = (
                (kept.backup_pgs, kept.backup_bandwidth) if write else (kept.prefetch_pgs, kept.prefetch_bandwidth)
            )
            if len(counts) < RATES_MAX:
                counts.append(pages)
                rates.append(pages * page_bytes / (1 << 30) / max(seconds, 1e-9))


def _leading(there: Sequence[bool]) -> int:
    return next((i for i, one in enumerate(there) if not one), len(there))


def _view(place: int, size: int) -> Any:
    """The memory there, as a buffer."""
    return (ctypes.c_ubyte * size).from_address(place)


def _bytes_of(tensor: torch.Tensor) -> Any:
    """A contiguous tensor, as a buffer."""
    return _view(tensor.data_ptr(), tensor.nbytes)
