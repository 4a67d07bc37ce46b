"""Blocks of one group of layers in a worker's tensors, and pages of the store: moved some at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvstore.adapters.vllm.planning import NO_BLOCK

if TYPE_CHECKING:
    from kvstore.adapters.vllm.planning import GroupMove
    from kvstore.adapters.vllm.served import PagedGroup
    from kvstore.client.match import Match
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.model.prefix import Keys

_log = logging.getLogger(__name__)

BUFFER_BYTES = 64 << 20  # that are between the store and blocks at a time


class BlockGroup:
    """Made when the worker knows its tensors.

    Args:
        layers: of the group, ``[blocks, kv_heads, block_size, content]``, of any strides.

    Raises:
        ValueError: a tensor is not what the layout says.
    """

    def __init__(self, served: PagedGroup, layers: list[torch.Tensor]) -> None:
        self._served = served
        self._layers = layers
        self.loaded_bytes = served.shard.nbytes  # of a page, that this worker loads
        self.saved_bytes = self.loaded_bytes if served.shard.writes else 0  # and saves: heads that others have, too
        start, stop = served.shard.heads
        wanted = [stop - start, served.block_size, served.layout.shape[-1]]
        for name, tensor in zip(served.layers, layers, strict=True):
            if list(tensor.shape[1:]) != wanted:
                found = list(tensor.shape)
                raise ValueError(f"KVStoreConnector: the cache of {name} is {found}, pages need [blocks, *{wanted}]")

    def load(self, cache: PrefixCache, move: GroupMove) -> Iterator[int]:
        """Bring these pages into their blocks; yields how many came, time and again. Ends at one that is missing."""
        rows, page = self._rows(move), 0
        for batch in self._batches(move.parts):
            got, reason = 0, ""
            for keys in batch:
                found = self._get(cache, keys, rows[got : got + len(keys)].flatten(1))
                got += found.pages
                if found.pages < len(keys):
                    reason = found.reason
                    break
            self._scatter(rows[:got], move, page)
            page += got
            yield got
            if reason:
                _log.warning("kvstore: pages were not loaded: %s", reason)
                return

    def save(self, cache: PrefixCache, move: GroupMove, request: str) -> int:
        """Store these pages, as far as the store takes them; how many were given to it."""
        rows, page = self._rows(move), 0
        for batch in self._batches(move.parts):
            count, row = sum(map(len, batch)), 0
            self._gather(rows[:count], move, page)
            for keys in batch:
                self._put(cache, keys, rows[row : row + len(keys)], request)
                row += len(keys)
            page += count
        return page

    def _batches(self, parts: list[Keys]) -> Iterator[list[Keys]]:
        """These pages, so many at a time as the buffer has."""
        batch: list[Keys] = []
        room = self._step
        for keys in parts:
            while len(keys):
                batch.append(keys[:room])
                keys, room = keys[room:], room - len(batch[-1])
                if not room:
                    yield batch
                    batch, room = [], self._step
        if batch:
            yield batch

    @property
    def _step(self) -> int:
        return max(1, BUFFER_BYTES // self._served.layout.page_bytes)

    def _rows(self, move: GroupMove) -> torch.Tensor:
        """A buffer for as many pages of this shard as are moved at a time, where the cache is."""
        first, pages = self._layers[0], min(self._step, sum(map(len, move.parts)))
        shape = pages, len(self._layers), first.shape[1], self._served.layout.page_tokens, first.shape[3]
        return torch.empty(shape, dtype=first.dtype, device=first.device)

    def _scatter(self, rows: torch.Tensor, move: GroupMove, page: int) -> None:
        """Write ``[pages, layers, heads, page_tokens, content]`` into the blocks from that page on."""
        for table, ids in self._ids(move, page, len(rows)).items():
            wanted = ids != NO_BLOCK
            for layer, tensor in self._of(table):
                tensor[ids[wanted]] = self._in_blocks(rows[:, layer]).flatten(0, 1)[wanted]

    def _gather(self, rows: torch.Tensor, move: GroupMove, page: int) -> None:
        for table, ids in self._ids(move, page, len(rows)).items():
            for layer, tensor in self._of(table):
                self._in_blocks(rows[:, layer]).copy_(tensor[ids].unflatten(0, (len(rows), -1)))

    def _ids(self, move: GroupMove, page: int, pages: int) -> dict[int, torch.Tensor]:
        size, device = self._served.page_blocks, self._layers[0].device
        return {
            table: torch.tensor(blocks[page * size : (page + pages) * size], dtype=torch.int64, device=device)
            for table, blocks in move.blocks.items()
        }

    def _of(self, table: int) -> list[tuple[int, torch.Tensor]]:
        """The layers whose blocks that table has, by their place in a page."""
        tables = self._served.tables
        return [(layer, tensor) for layer, tensor in enumerate(self._layers) if tables[layer] == table]

    def _in_blocks(self, layer: torch.Tensor) -> torch.Tensor:
        """One layer of pages ``[pages, heads, page_tokens, content]``, seen as ``[pages, page_blocks, heads,
        block_size, content]``."""
        return layer.unflatten(2, (self._served.page_blocks, self._served.block_size)).transpose(1, 2)

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
