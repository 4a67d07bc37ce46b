"""A storage back end for SGLang's HiCache::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvstore", "module_path": "kvstore.adapters.sglang", "class_name": "KVStoreHiCache",
      "interface_v1": 1, "node": "pool"}'

SGLang identifies its pages by hashes of its own, so the store keeps each page of each pool as an opaque object. The
node verifies each object on every read, saves it to NVMe and evicts it like a page. An object's name contains SGLang's
hash, the model, the rank, and everything that determines the byte layout of a page. So engines with different layouts
never read each other's pages.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
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

from kvstore.adapters.values import Values, connect_for
from kvstore.adapters.weights import folder_digest, required_digest

HOST_SETTINGS = ("backend_name", "module_path", "class_name", "interface_v1")  # settings that SGLang reads
SETTINGS = ("node", "salt", "model", "groups")
LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
RATES_MAX = 4096  # unread measurements of one kind; further ones are dropped


class HostPages:
    """The pages of one of SGLang's pools in host memory: their addresses, and the names of their objects.

    Args:
        ranks: how many ranks have a page under each of SGLang's keys, if these pages form a group; otherwise 0.
    """

    def __init__(self, pool: Any, name: str, rank: str, model: str, ranks: int) -> None:
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
            raise ValueError(f"kvstore for SGLang: pool {name!r} has no page addresses: {error}") from error
        self.page_bytes = sum(sizes)
        layout_facts = [type(pool).__name__, layout, str(getattr(pool, "dtype", "")), self.page_size, sizes]
        # Pages of other pipeline stages have other layers, and so other sizes.
        shared_facts = [type(pool).__name__, layout, str(getattr(pool, "dtype", "")), self.page_size]
        for attribute in ("head_num", "head_dim", "layer_num", "start_layer", "end_layer", "kv_cache_dim"):
            layout_facts.append(getattr(pool, attribute, None))
        self.ranks = ranks
        self._prefix = f"{model}@{rank}@{name}@{_digest(layout_facts)}@" + ("group@" if ranks else "")
        self._group_prefix = f"{model}@{name}@{_digest(shared_facts)}@"

    def names(self, keys: Sequence[str]) -> list[str]:
        """Return the names of the pages' objects."""
        return [self._prefix + key for key in keys]

    def groups(self, keys: Sequence[str]) -> list[str] | None:
        """Return the names of the groups of the pages of all ranks; None if the pages have no groups."""
        return [self._group_prefix + key for key in keys] if self.ranks else None

    def buffers(self, pages: int, rows: torch.Tensor | None) -> list[list[Any]] | None:
        """Return the memory of each page, as a list of buffers. ``rows`` are the pool's rows, ``page_size`` for each
        page. Return None if their number does not fit."""
        if rows is None or rows.numel() != pages * self.page_size:
            return None
        addresses, sizes = self._pool.get_page_buffer_meta(rows)
        views = [_view(address, size) for address, size in zip(addresses, sizes, strict=True)]
        page_views = len(views) // max(pages, 1)
        return [views[page * page_views : (page + 1) * page_views] for page in range(pages)]


class KVStoreHiCache(HiCacheStorage):
    """HiCache's storage in a node. SGLang creates one in each rank. Thread-safe.

    The node evicts pages. After the start no call raises: a page that is evicted, damaged or unreachable is a miss.

    Settings in ``extra_config``, in addition to SGLang's own:
        node: as in ``kvstore.connect``; default: the only node on this machine.
        salt: the tenant.
        model: a folder, whose weights then identify the model of each page. Default: the model that SGLang serves, if
            that is a folder.
        groups: true if the pages of all ranks under one key are found only together, and evicted together. All ranks
            have to use the same node. Default: false.

    Raises:
        ValueError: a setting is unknown, the node or folder does not exist, or a pool's layout is not supported.
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
        self._has_groups = bool(extra.get("groups", False))
        self._salt = str(extra.get("salt", "sglang"))
        model, folder = storage_config.model_name or "", str(extra.get("model", ""))
        digest = required_digest("SGLang", folder) if folder else folder_digest(model)
        # The length of the model's name makes the text unambiguous, whatever characters the name contains.
        self._model = f"{len(model)}:{model}" + (f"@{digest}" if digest else "")
        self._pools: dict[str, HostPages | None] = {}  # None for a pool without bytes of its own
        self._lock = threading.Lock()
        self._metrics = StorageMetrics()
        self._values = Values(connect_for("SGLang", extra.get("node")))

    # --- pools ------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register SGLang's KV pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._add_pool(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Register one of several pools by its name."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV or PoolName.KV not in self._pools:
            self._add_pool(host_pool, host_pool_name)

    def _add_pool(self, pool: Any, name: str) -> None:
        if name == PoolName.KV and getattr(pool, "kv_buffer", None) is None:
            self._pools[name] = None  # this pool only counts rows; the other pools contain all bytes
        else:
            rank, ranks = self._rank_of(pool, name)
            self._pools[name] = HostPages(pool, str(name), rank, self._model, ranks if self._has_groups else 0)

    def _rank_of(self, pool: Any, name: str) -> tuple[str, int]:
        """Return the part of an object's name that distinguishes ranks, and how many ranks have different pages. MLA
        pages are equal in all tensor parallel ranks, so one rank writes them under a common name and all ranks read
        them."""
        config = self._config
        is_shared = config.is_mla_model and name != PoolName.MAMBA and not isinstance(pool, MHATokenToKVPoolHost)
        tp = "all" if is_shared else f"{config.tp_rank}of{config.tp_size}"
        cp, dcp = (config.attn_cp_rank, config.attn_cp_size), (config.dcp_rank, config.dcp_size)
        parts = ((config.pp_rank, config.pp_size), cp, dcp)
        ranks = math.prod([1 if is_shared else config.tp_size, *(size for _, size in parts)])
        return ".".join([tp, *(f"{rank}of{size}" for rank, size in parts)]), ranks

    # --- pages by their addresses in a pool ("interface_v1") ----------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages are stored without a gap."""
        return _leading_count(self._contains(PoolName.KV, keys) if self._zero_copy else self._contains_flat(keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into these rows of the KV pool and return, for each page, whether it was read."""
        return self._copy(PoolName.KV, keys, host_indices, is_write=False)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Store pages from these rows of the KV pool and return, for each page, whether it is stored now."""
        return self._copy(PoolName.KV, keys, host_indices, is_write=True)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the lengths of the prefixes for which every pool has the pages it needs, and the hits of each pool.

        A pool needs either all pages of a prefix or its last ones, as its transfer's policy says.
        """
        pages = self.batch_exists(keys, extra_info)
        hits = {PoolName.KV: pages} if pages else {}
        usable_lengths = list(range(1, pages + 1))
        for transfer in pool_transfers or []:
            is_stored = self._contains(transfer.name, keys[:pages])
            # How many trailing pages of a prefix the pool needs, by its policy. Other policies are not supported: their
            # pools never hit.
            pages_by_policy = {
                PoolHitPolicy.ALL_PAGES: pages,
                PoolHitPolicy.TRAILING_PAGES: max(1, len(transfer.keys or [])),
            }
            needed = pages_by_policy.get(transfer.hit_policy)
            if needed is None:
                continue
            pool_lengths = [end for end in range(1, pages + 1) if all(is_stored[max(0, end - needed) : end])]
            if pool_lengths:
                hits[transfer.name] = pool_lengths[-1]
            usable_lengths = [end for end in usable_lengths if end in set(pool_lengths)]
        return PoolTransferResult(usable_lengths[-1] if usable_lengths else 0, hits, usable_lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of several pools and return, by pool and page, whether the page was read."""
        return {
            transfer.name: self._copy(transfer.name, transfer.keys or [], transfer.host_indices, is_write=False)
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools and return, by pool and page, whether the page is stored now."""
        return {
            transfer.name: self._copy(transfer.name, transfer.keys or [], transfer.host_indices, is_write=True)
            for transfer in transfers
        }

    # --- pages in tensors (without "interface_v1"), which SGLang copies from and to its pools -------------------------

    def exists(self, key: str) -> bool:
        """Return whether a page is stored."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Read a page into ``target_location``, which must have the page's length. Return None for a miss."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor | None] | None = None,
        target_sizes: object = None,
    ) -> list[torch.Tensor | None]:
        """Read pages into tensors and return, for each page, its tensor, or None for a miss. If a tensor is missing or
        not contiguous, all pages are misses."""
        outs = list(target_locations or [None] * len(keys))
        if any(out is None or not out.is_contiguous() for out in outs):
            return [None] * len(keys)
        buffers = [_tensor_bytes(out) for out in outs if out is not None]
        hits = self._values.get(self._flat_names(keys), buffers, self._salt)
        return [out if is_hit else None for out, is_hit in zip(outs, hits, strict=True)]

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: object = None, target_sizes: object = None
    ) -> bool:
        """Store a page and return whether it is stored now."""
        return value is not None and self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Store pages and return whether all of them are stored now."""
        if values is None or len(values) != len(keys):
            return False
        pages = [value.contiguous() for value in values]  # the reference keeps a copy's memory until it is stored
        pool, buffers = self._pools.get(PoolName.KV), [_tensor_bytes(page) for page in pages]
        groups = [f"{group}@flat" for group in pool.groups(keys) or ()] if pool is not None else []
        names, count = self._flat_names(keys), pool.ranks if pool is not None else 0
        return all(self._values.put(names, buffers, self._salt, groups or None, count))

    # --- deletion, metrics and end ------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Delete all pages of this model, of all ranks. Return False if the node could not."""
        return self._values.clear(self._salt, f"{self._model}@")

    def get_stats(self) -> StorageMetrics | None:
        """Return the number of pages and the GB/s of each transfer since the last ``get_stats``; None if SGLang does
        not collect metrics."""
        if not self._config.enable_storage_metrics:
            return None
        with self._lock:
            metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def close(self) -> None:
        """Close the connection to the node. Stored pages stay in the node."""
        self._values.close()

    def _contains(self, pool_name: str, keys: list[str]) -> list[bool]:
        pool = self._pools.get(pool_name)
        if pool is None:
            return [pool_name in self._pools] * len(keys)  # a pool without bytes never misses
        return self._values.contains(pool.names(keys), self._salt)

    def _contains_flat(self, keys: list[str]) -> list[bool]:
        return self._values.contains(self._flat_names(keys), self._salt)

    def _flat_names(self, keys: Sequence[str]) -> list[str]:
        """Return the names of pages in tensors. They differ from the names of pages in pools, because SGLang's
        ``get_data_page`` may return a page's bytes in another order than a pool stores them."""
        pool = self._pools.get(PoolName.KV)
        names = pool.names(keys) if pool is not None else [f"{self._model}@@@@{key}" for key in keys]
        return [f"{name}@flat" for name in names]

    def _copy(self, pool_name: str, keys: list[str], rows: torch.Tensor | None, *, is_write: bool) -> list[bool]:
        """Store pages from a pool's rows, or read pages into them. Return, for each page, whether that succeeded."""
        if pool_name not in self._pools:
            return [False] * len(keys)
        pool = self._pools[pool_name]
        if pool is None:
            return [True] * len(keys)
        buffers = pool.buffers(len(keys), rows)
        if buffers is None:
            return [False] * len(keys)
        start_s = time.monotonic()
        names = pool.names(keys)
        if is_write:
            results = self._values.put(names, buffers, self._salt, pool.groups(keys), pool.ranks)
        else:
            results = self._values.get(names, buffers, self._salt)
        self._count(sum(results), pool.page_bytes, time.monotonic() - start_s, is_write=is_write)
        return results

    def _count(self, pages: int, page_bytes: int, seconds: float, *, is_write: bool) -> None:
        if not pages or not self._config.enable_storage_metrics:
            return
        with self._lock:
            metrics = self._metrics
            if is_write:
                counts, rates = metrics.backup_pgs, metrics.backup_bandwidth
            else:
                counts, rates = metrics.prefetch_pgs, metrics.prefetch_bandwidth
            if len(counts) < RATES_MAX:
                counts.append(pages)
                rates.append(pages * page_bytes / (1 << 30) / max(seconds, 1e-9))


def _digest(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _leading_count(flags: Sequence[bool]) -> int:
    """Return how many leading flags are true."""
    return next((position for position, flag in enumerate(flags) if not flag), len(flags))


def _view(address: int, size: int) -> Any:
    """Return the memory at an address as a buffer."""
    return (ctypes.c_ubyte * size).from_address(address)


def _tensor_bytes(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor as a buffer."""
    return _view(tensor.data_ptr(), tensor.nbytes)
