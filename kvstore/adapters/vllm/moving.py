"""A worker's side: pages between the store and the blocks of its cache.

Loads run in a thread beside the forwards: their blocks belong to nobody else meanwhile. What could not be loaded is
reported by its blocks, and computed. Saves are done before the step ends, since its blocks may be another's in the
next one.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from kvstore.adapters.vllm.served import RootCaches
from kvstore.errors import KVStoreError, Unavailable

if TYPE_CHECKING:
    from kvstore.adapters.vllm.planning import BlockMove
    from kvstore.adapters.vllm.served import PagedModel
    from kvstore.client.match import Match
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.client.store import Store
    from kvstore.model.prefix import Keys

_log = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20  # that are between the store and blocks at a time
AWAY_S = 5.0  # that nothing is saved after the node did not answer: a step would wait for it each time


class BlockMover:
    """Made when the worker knows its tensors.

    Args:
        tensors: by layer, ``[blocks, kv_heads, block_size, content]``, of any strides.
    """

    def __init__(self, store: Store, served: PagedModel, salt: str, tensors: dict[str, torch.Tensor]) -> None:
        self._served = served
        self._layers = [tensors[name] for name in served.layers]
        _check(served, self._layers)
        self._loads_from = RootCaches(store, served.layout, salt)  # of the loading thread
        self._saves_to = RootCaches(store, served.layout, salt)
        self._pool = ThreadPoolExecutor(1, "kvstore-load")
        self._lock = threading.Lock()
        self._loading: dict[str, Future[None]] = {}
        self._failed: set[int] = set()
        self._away_until_s = 0.0

    def load(self, move: BlockMove) -> None:
        """Begin to load; see ``loaded`` and ``failed``."""
        self._loading[move.request] = self._pool.submit(self._load, move)

    def loaded(self) -> set[str]:
        """Requests whose loads have ended, well or not, since this was asked last."""
        done = {name for name, future in self._loading.items() if future.done()}
        for name in done:
            self._loading.pop(name).result()
        return done

    def failed(self) -> set[int]:
        """Blocks that were to be loaded, and hold anything."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def save(self, moves: list[BlockMove]) -> None:
        """Store these pages, as far as the store takes them. A node that does not answer is left alone for a while."""
        if not moves or time.monotonic() < self._away_until_s:
            return
        try:
            for move in moves:
                self._save(move)
        except Unavailable as error:
            self._away_until_s = time.monotonic() + AWAY_S
            _log.warning("kvstore: nothing is saved for %g s: %s", AWAY_S, error)
        except KVStoreError as error:
            _log.warning("kvstore: pages are not saved: %s", error)

    def close(self) -> None:
        """Nothing is moved any more."""
        self._pool.shutdown(cancel_futures=True)

    # --- pages ------------------------------------------------------------------------------------------------------

    def _load(self, move: BlockMove) -> None:
        page_blocks, done = self._served.page_blocks, 0
        try:
            step = self._step()
            rows = self._rows(min(step, len(move.keys)))
            for start in range(0, len(move.keys), step):
                keys = move.keys[start : start + step]
                found = self._get(self._loads_from.of(move.adapter), keys, rows[: len(keys)].flatten(1))
                self._scatter(rows[: found.pages], move.blocks[start * page_blocks :], move.first - start * page_blocks)
                done += found.pages
                if found.pages < len(keys):
                    _log.warning("kvstore: %d pages were not loaded: %s", len(move.keys) - done, found.reason)
                    break
        except KVStoreError as error:
            _log.warning("kvstore: %d pages were not loaded: %s", len(move.keys) - done, error)
        finally:
            missing = move.blocks[max(move.first, done * page_blocks) :]
            with self._lock:
                self._failed.update(missing)

    def _scatter(self, rows: torch.Tensor, blocks: list[int], first: int) -> None:
        """Write ``[pages, layers, heads, page_tokens, content]`` into blocks from number ``first`` on."""
        pages, first = len(rows), max(first, 0)
        if not pages:
            return
        ids = torch.tensor(blocks[first : pages * self._served.page_blocks], device=rows.device)
        for layer, tensor in enumerate(self._layers):
            tensor[ids] = self._in_blocks(rows[:, layer]).flatten(0, 1)[first:]

    def _save(self, move: BlockMove) -> None:
        step, page_blocks, cache = self._step(), self._served.page_blocks, self._saves_to.of(move.adapter)
        rows = self._rows(min(step, len(move.keys)))
        for start in range(0, len(move.keys), step):
            keys = move.keys[start : start + step]
            some = rows[: len(keys)]
            ids = torch.tensor(move.blocks[start * page_blocks :][: len(keys) * page_blocks], device=rows.device)
            for layer, tensor in enumerate(self._layers):
                self._in_blocks(some[:, layer]).copy_(tensor[ids].unflatten(0, (len(keys), page_blocks)))
            self._put(cache, keys, some, move.request)

    def _get(self, cache: PrefixCache, keys: Keys, rows: torch.Tensor) -> Match:
        shard = self._served.shard
        if shard.count == 1:
            return cache.get(keys, rows)
        return cache.get_shard(keys, rows, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages)

    def _put(self, cache: PrefixCache, keys: Keys, rows: torch.Tensor, request: str) -> None:
        shard = self._served.shard
        if shard.count == 1:
            cache.put(keys, rows)
        elif shard.writes:
            with cache.writer(
                keys, group=request, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages
            ) as writer:
                for layer in range(len(self._layers)):
                    writer.write_layer(shard.layers[0] + layer, rows[:, layer].contiguous())

    def _in_blocks(self, layer: torch.Tensor) -> torch.Tensor:
        """One layer of pages ``[pages, heads, page_tokens, content]``, seen as ``[pages, page_blocks, heads,
        block_size, content]``."""
        return layer.unflatten(2, (self._served.page_blocks, self._served.block_size)).transpose(1, 2)

    def _rows(self, pages: int) -> torch.Tensor:
        """A buffer for so many pages of this shard, where the cache is."""
        heads, content = self._layers[0].shape[1], self._layers[0].shape[3]
        shape = pages, len(self._layers), heads, self._served.layout.page_tokens, content
        return torch.empty(shape, dtype=self._layers[0].dtype, device=self._layers[0].device)

    def _step(self) -> int:
        return max(1, BUFFER_BYTES // self._served.layout.page_bytes)


def _check(served: PagedModel, layers: list[torch.Tensor]) -> None:
    """Raises ValueError where a tensor is not what the layout says."""
    start, stop = served.shard.heads
    wanted = [stop - start, served.block_size, served.layout.shape[-1]]
    for name, tensor in zip(served.layers, layers, strict=True):
        if list(tensor.shape[1:]) != wanted:
            found = list(tensor.shape)
            raise ValueError(f"KVStoreConnector: the cache of {name} is {found}, pages need [blocks, *{wanted}]")
