"""Blocks of one group of layers in a worker's tensors, and pages of the store: moved some at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore.adapters.vllm.planning import NO_BLOCK

if TYPE_CHECKING:
    from kvstore.adapters.vllm.planning import GroupMove
    from kvstore.adapters.vllm.served import PagedGroup
    from kvstore.client.match import Match
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.model.prefix import Keys

_log = logging.getLogger(__name__)

BUFFER_BYTES = 8 << 20  # that are between the store and blocks at a time; kept, since fresh memory is slow to touch


class _Buffer:
    """Pages of a shard on their way.

    Attributes:
        rows: ``[pages, layers, heads, page_tokens, content]``, where the cache is.
        layers: each layer of them, seen as ``[pages, page_blocks, heads, block_size, content]``.
    """

    def __init__(self, served: PagedGroup, first: torch.Tensor, layers: int) -> None:
        pages = max(1, BUFFER_BYTES // served.layout.page_bytes)
        shape = pages, layers, first.shape[1], served.layout.page_tokens, first.shape[3]
        self.rows = torch.empty(shape, dtype=first.dtype, device=first.device)
        split = self.rows.unflatten(3, (served.page_blocks, served.block_size)).transpose(2, 3)
        self.layers = [_indexable(split[:, layer]) for layer in range(layers)]


class BlockGroup:
    """Made when the worker knows its tensors.

    Args:
        layers: of the group, ``[blocks, kv_heads, block_size, content]``, of any strides.

    Raises:
        ValueError: a tensor is not what the layout says.
    """

    def __init__(self, served: PagedGroup, layers: list[torch.Tensor]) -> None:
        self._served = served
        self._layers = [_indexable(tensor) for tensor in layers]
        self._device = layers[0].device
        self.loaded_bytes = served.shard.nbytes  # of a page, that this worker loads
        self.saved_bytes = self.loaded_bytes if served.shard.writes else 0  # and saves: heads that others have, too
        start, stop = served.shard.heads
        wanted = [stop - start, served.block_size, served.layout.shape[-1]]
        for name, tensor in zip(served.layers, layers, strict=True):
            if list(tensor.shape[1:]) != wanted:
                found = list(tensor.shape)
                raise ValueError(f"KVStoreConnector: the cache of {name} is {found}, pages need [blocks, *{wanted}]")
        self._loading = _Buffer(served, layers[0], len(layers))  # of the thread that loads
        self._saving = _Buffer(served, layers[0], len(layers))  # and of the one that saves

    def load(self, cache: PrefixCache, move: GroupMove) -> Iterator[int]:
        """Bring these pages into their blocks; yields how many came, time and again. Ends at one that is missing."""
        buffer, page = self._loading, 0
        for batch in self._batches(move.parts):
            got, reason = 0, ""
            for keys in batch:
                found = self._get(cache, keys, buffer.rows[got : got + len(keys)].flatten(1))
                got += found.pages
                if found.pages < len(keys):
                    reason = found.reason
                    break
            self._scatter(buffer, got, move, page)
            page += got
            yield got
            if reason:
                _log.warning("kvstore: pages were not loaded: %s", reason)
                return

    def save(self, cache: PrefixCache, move: GroupMove, request: str) -> int:
        """Store these pages, as far as the store takes them; how many were given to it."""
        buffer, page = self._saving, 0
        for batch in self._batches(move.parts):
            count, row = sum(map(len, batch)), 0
            self._gather(buffer, count, move, page)
            for keys in batch:
                self._put(cache, keys, buffer.rows[row : row + len(keys)], request)
                row += len(keys)
            page += count
        return page

    def _batches(self, parts: list[Keys]) -> Iterator[list[Keys]]:
        """These pages, so many at a time as the buffer has."""
        batch: list[Keys] = []
        room = len(self._loading.rows)
        for keys in parts:
            while len(keys):
                batch.append(keys[:room])
                keys, room = keys[room:], room - len(batch[-1])
                if not room:
                    yield batch
                    batch, room = [], len(self._loading.rows)
        if batch:
            yield batch

    def _scatter(self, buffer: _Buffer, count: int, move: GroupMove, page: int) -> None:
        """Write so many pages into the blocks from that page on."""
        for table, ids in self._ids(move, page, count).items():
            whole = NO_BLOCK not in ids
            wanted = ids != NO_BLOCK
            index = self._index(ids)
            for layer in self._of(table):
                blocks = buffer.layers[layer][:count]
                if whole:
                    self._layers[layer][index] = blocks
                else:
                    self._layers[layer][index[wanted]] = blocks[wanted]

    def _gather(self, buffer: _Buffer, count: int, move: GroupMove, page: int) -> None:
        for table, ids in self._ids(move, page, count).items():
            index = self._index(ids)
            for layer in self._of(table):
                buffer.layers[layer][:count] = self._layers[layer][index]

    def _ids(self, move: GroupMove, page: int, pages: int) -> dict[int, npt.NDArray[np.int64]]:
        """Of each table ``[pages, page_blocks]``."""
        size = self._served.page_blocks
        return {
            table: np.array(blocks[page * size : (page + pages) * size], np.int64).reshape(pages, size)
            for table, blocks in move.blocks.items()
        }

    def _index(self, ids: npt.NDArray[np.int64]) -> Any:
        return ids if self._device.type == "cpu" else torch.from_numpy(ids).to(self._device)

    def _of(self, table: int) -> list[int]:
        """The layers whose blocks that table has, by their place in a page."""
        return [layer for layer, each in enumerate(self._served.tables) if each == table]

    def _get(self, cache: PrefixCache, keys: Keys, rows: torch.Tensor) -> Match:
        shard = self._served.shard
        if shard.count == 1:
            return cache.get(keys, rows)
        return cache.get_shard(keys, rows, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages)

    def _put(self, cache: PrefixCache, keys: Keys, rows: torch.Tensor, request: str) -> None:
        shard = self._served.shard
        if shard.count == 1:
            cache.put(keys, rows)
        else:  # ranks whose heads others write as well: a page is whole when each has come
            with cache.writer(
                keys, group=request, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages
            ) as writer:
                for layer in range(len(self._layers)):
                    writer.write_layer(shard.layers[0] + layer, rows[:, layer].contiguous())


def _indexable(tensor: torch.Tensor) -> Any:
    """The same memory, to be indexed by block; of a host as an array of NumPy. PyTorch would have each of our threads
    start threads of its own, which then spin beside those of the model."""
    if tensor.device.type != "cpu":
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
