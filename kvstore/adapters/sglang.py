"""SGLang: a back end for HiCache's storage::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvstore", "module_path": "kvstore.adapters.sglang", "class_name": "KVStoreHiCache",
      "interface_v1": 1, "node": "pool"}'

SGLang names its pages by its own hashes, so they are opaque objects here, one for each page of each pool: proven on
every read, checksummed, saved to NVMe and evicted by the node. A name also contains the model, the rank, and everything
that determines the layout of a page's bytes, so that engines with other layouts never read them.
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
RATES_MAX = 4096  # measurements of one kind kept until they are read


class HostPages:
    """The pages of a pool in host memory: their addresses, and the names of their values."""

    def __init__(self, pool: Any, name: str, rank: str, model: str) -> None:
        layout = getattr(pool, "layout", None)
        if layout not in LAYOUTS:
            raise ValueError(
                f"kvstore for SGLang: --hicache-mem-layout: must be one of {', '.join(LAYOUTS)} "
                f"(got {layout!r} of pool {name!r})"
            )
        self._pool = pool
        self.page_size = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        try:
            _, sizes = pool.get_page_buffer_meta(torch.arange(self.page_size))
        except (AttributeError, NotImplementedError, ValueError) as error:
            raise ValueError(f"kvstore for SGLang: pool {name!r} gives no page addresses: {error}") from error
        self.page_bytes = sum(sizes)
        facts = [type(pool).__name__, layout, str(getattr(pool, "dtype", "")), self.page_size, sizes]
        for what in ("head_num", "head_dim", "layer_num", "start_layer", "end_layer", "kv_cache_dim"):
            facts.append(getattr(pool, what, None))
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
        self._prefix = f"{model}@{rank}@{name}@{digest}@"

    def names(self, keys: Sequence[str]) -> list[str]:
        """Return the names of the pages' values."""
        return [self._prefix + key for key in keys]

    def buffers(self, count: int, indices: torch.Tensor | None) -> list[list[Any]] | None:
        """Return the memory of each of ``count`` pages at these rows; None if the number of rows does not fit."""
        if indices is None or indices.numel() != count * self.page_size:
            return None
        places, sizes = self._pool.get_page_buffer_meta(indices)
        views = [_view(place, size) for place, size in zip(places, sizes, strict=True)]
        each = len(views) // max(count, 1)
        return [views[i * each : (i + 1) * each] for i in range(count)]


class KVStoreHiCache(HiCacheStorage):
    """SGLang makes one in each rank. Settings in addition to SGLang's own: ``node``, as ``kvstore.connect`` takes it
    (default: the only one on this machine), ``salt``, the tenant, and ``model``, the folder whose weights distinguish
    pages (default: the model that SGLang serves, if that is a folder). Threads may share it.

    The node does the eviction. Pages that are gone, damaged or unreachable are misses; nothing is raised after the
    start.

    Raises:
        ValueError: a setting is unknown, there is no such node or folder, or a pool's layout is not served.
        OSError: the folder that SGLang serves cannot be read.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        extra = dict(storage_config.extra_config or {})
        unknown = sorted(set(extra) - set(HOST_SETTINGS) - set(SETTINGS))
        if unknown:
            raise ValueError(f"kvstore for SGLang: unknown setting {unknown[0]!r}; known are {', '.join(SETTINGS)}")
        if storage_config.should_split_heads:
            raise ValueError("kvstore for SGLang: tp_lcm_size: is not supported")
        self._config = storage_config
        self._zero_copy = bool(extra.get("interface_v1", 0))
        self._salt = str(extra.get("salt", "sglang"))
        model, folder = storage_config.model_name or "", str(extra.get("model", ""))
        digest = given_digest("SGLang", folder) if folder else folder_digest(model)
        # A name contains the lengths of its parts, so that two models never get the same name.
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
            self._pools[name] = None  # it only counts rows; other pools have all the bytes
        else:
            self._pools[name] = HostPages(pool, str(name), self._rank_of(pool, name), self._model)

    def _rank_of(self, pool: Any, name: str) -> str:
        """Return the rank part of a pool's names. Pages that are equal in all ranks (MLA) are written by one rank and
        read by all."""
        config = self._config
        shared = config.is_mla_model and name != PoolName.MAMBA and not isinstance(pool, MHATokenToKVPoolHost)
        tp = "all" if shared else f"{config.tp_rank}of{config.tp_size}"
        cp, dcp = (config.attn_cp_rank, config.attn_cp_size), (config.dcp_rank, config.dcp_size)
        parts = ((config.pp_rank, config.pp_size), cp, dcp)
        return ".".join([tp, *(f"{rank}of{size}" for rank, size in parts)])

    # --- pages where they lie -----------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many pages are stored from the first on, without a gap."""
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
        """See the base class. Returns the prefixes for which every pool has what it needs."""
        pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: pages} if pages else {}
        ends = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            there = self._contains(transfer.name, keys[:pages])
            # Pages of a block group are not counted, so it is a miss: unknown kinds of pools never hit.
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
        """Read a page into ``target_location``, which must have its length; None for a miss."""
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
        """Return whether the page is stored now."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Return whether all pages are stored now."""
        if values is None or len(values) != len(keys):
            return False
        pages = [value.contiguous() for value in values]  # kept until they are stored
        return all(self._values.put(self._flat(keys), [_bytes_of(page) for page in pages], self._salt))

    # --- the rest -----------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Delete all pages of this model in all ranks; return whether that was done."""
        return self._values.clear(self._salt, f"{self._model}@")

    def get_stats(self) -> StorageMetrics | None:
        """Return pages and GB/s of the calls since the last call of this."""
        if not self._config.enable_storage_metrics:
            return None
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def close(self) -> None:
        """Close the connection to the node. Pages stay."""
        self._values.close()

    def _contains(self, pool: str, keys: list[str]) -> list[bool]:
        pages = self._pools.get(pool)
        if pages is None:
            return [pool in self._pools] * len(keys)
        return self._values.contains(pages.names(keys), self._salt)

    def _contains_flat(self, keys: list[str]) -> list[bool]:
        return self._values.contains(self._flat(keys), self._salt)

    def _flat(self, keys: Sequence[str]) -> list[str]:
        """Return names of pages in the order of ``get_data_page``, which is not always the order in memory."""
        pages = self._pools.get(PoolName.KV)
        names = pages.names(keys) if pages is not None else [f"{self._model}@@@@{key}" for key in keys]
        return [f"{name}@flat" for name in names]

    def _move(self, pool: str, keys: list[str], indices: torch.Tensor | None, *, write: bool) -> list[bool]:
        """Store or read pages; return for each whether that was done."""
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
    """Return the memory at an address as a buffer."""
    return (ctypes.c_ubyte * size).from_address(place)


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return a contiguous tensor as a buffer."""
    return _view(tensor.data_ptr(), tensor.nbytes)
