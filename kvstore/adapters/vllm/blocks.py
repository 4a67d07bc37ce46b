"""Blocks of one group of layers in a worker's tensors, and pages of the store: moved some at a time.

Between the two are buffers in the tensors' memory. What is loaded comes into a buffer, and from there into its blocks
in the stream that loads. What is saved goes from its blocks into a buffer in the stream that computes: later steps may
write into the blocks, since their work is behind it.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from kvstore.adapters.vllm.paged import NO_BLOCK
from kvstore.errors import DeadlineExceeded

if TYPE_CHECKING:
    from kvstore.adapters.vllm.paged import GroupMove, PagedGroup
    from kvstore.adapters.vllm.tensors import Tensors
    from kvstore.client.match import Match
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.model.prefix import Keys
    from kvstore.tier.device import DeviceEvent, DeviceStream

_log = logging.getLogger(__name__)

BUFFER_BYTES: Final = 8 << 20  # that are between the store and blocks at a time; kept, since fresh memory is slow
SAVING_BYTES: Final = 64 << 20  # of a worker's buffers for saves that a device has not done yet; a step waits for more
ROOM_S: Final = 10.0  # that a step waits for one of them
COMPUTE_S: Final = 60.0  # that a device takes over a step at most

Ids = npt.NDArray[np.int64]


class _Buffer:
    """Pages of a shard on their way.

    Attributes:
        rows: ``[pages, layers, heads, page_tokens, content]``, where the cache is.
        layers: each layer of them, seen as ``[pages, page_blocks, heads, block_size, content]``.
    """

    def __init__(self, served: PagedGroup, first: torch.Tensor, layers: int, tensors: Tensors) -> None:
        pages = max(1, BUFFER_BYTES // served.layout.page_bytes)
        shape = pages, layers, first.shape[1], served.layout.page_tokens, first.shape[3]
        self.rows = tensors.empty(shape, first.dtype)
        split = self.rows.unflatten(3, (served.page_blocks, served.block_size)).transpose(2, 3)
        self.layers = [_indexable(split[:, layer]) for layer in range(layers)]


class Gathered:
    """Pages that are to be saved, in a buffer once its stream has come to them. Ends with ``drop``: the
    buffer may be used again."""

    def __init__(self, group: BlockGroup, buffer: _Buffer, batch: list[Keys], event: DeviceEvent) -> None:
        self._group = group
        self._buffer = buffer
        self._batch = batch
        self._event = event
        self.pages = sum(map(len, batch))

    def wait(self) -> None:
        """Return when they are there. Raises DeadlineExceeded, DeviceLost."""
        event = self._event
        event.wait(time.monotonic() + COMPUTE_S)

    def put(self, cache: PrefixCache, request: str) -> None:
        """Store them, as far as the store takes them. Raises as ``PrefixCache.put``."""
        row = 0
        for keys in self._batch:
            self._group.put(cache, keys, self._buffer.rows[row : row + len(keys)], request)
            row += len(keys)

    def drop(self) -> None:
        """Nothing more is done with them."""
        self._group.give_back(self._buffer)


class BlockGroup:
    """Made when the worker knows its tensors.

    Args:
        layers: of the group, ``[blocks, kv_heads, block_size, content]``, of any strides.
        saving_bytes: of buffers for saves.

    Raises:
        ValueError: a tensor is not what the layout says.
    """

    def __init__(
        self, served: PagedGroup, layers: list[torch.Tensor], tensors: Tensors, saving_bytes: int = SAVING_BYTES
    ) -> None:
        self._served = served
        self._layers = [_indexable(tensor) for tensor in layers]
        self._first = layers[0]
        self._tensors = tensors
        self.loaded_bytes = served.shard.nbytes  # of a page, that this worker loads
        self.saved_bytes = self.loaded_bytes if served.shard.writes else 0  # and saves, if no other one has its heads
        start, stop = served.shard.heads
        wanted = [stop - start, served.block_size, served.layout.shape[-1]]
        for name, tensor in zip(served.layers, layers, strict=True):
            if list(tensor.shape[1:]) != wanted:
                found = list(tensor.shape)
                raise ValueError(f"KVStoreConnector: the cache of {name} is {found}, pages need [blocks, *{wanted}]")
        self._loading = self._buffer()
        count = max(2, saving_bytes // self._loading.rows.nbytes) if tensors.late else 1
        self._spare = queue.SimpleQueue[_Buffer]()
        for _ in range(count):
            self._spare.put(self._buffer())

    def load(self, cache: PrefixCache, move: GroupMove, stream: DeviceStream, event: DeviceEvent) -> Iterator[int]:
        """Bring these pages into their blocks; yields how many came, several times. Ends at one that is missing.

        The blocks are written in ``stream``, behind ``event``: until then a step may write into them that computed
        their former owner. They hold the pages once ``stream`` has come to its end.
        """
        buffer, page = self._loading, 0
        for batch in self._batches(move.parts):
            got, reason = 0, ""
            for keys in batch:
                found = self._get(cache, keys, self._tensors.rows(buffer.rows[got : got + len(keys)], stream))
                got += found.pages
                if found.pages < len(keys):
                    reason = found.reason
                    break
            if got:
                stream.wait(event)
                self._tensors.run(partial(self._scatter, buffer, self._ids(move, page, got)), stream)
                page += got
            yield got
            if reason:
                _log.warning("kvstore: pages were not loaded: %s", reason)
                return

    def gather(self, move: GroupMove) -> Iterator[Gathered]:
        """Copy these pages out of their blocks, in the stream in which the calling thread computes.

        Raises:
            DeadlineExceeded: the pages that were given before are not stored yet; the rest is not saved.
        """
        page = 0
        for batch in self._batches(move.parts):
            count = sum(map(len, batch))
            try:
                buffer = self._spare.get(timeout=ROOM_S)
            except queue.Empty:
                raise DeadlineExceeded(f"pages of {ROOM_S:g} s ago are not stored yet") from None
            self._tensors.run(partial(self._gather, buffer, self._ids(move, page, count)))
            page += count
            yield Gathered(self, buffer, batch, self._tensors.current().record())

    def put(self, cache: PrefixCache, keys: Keys, pages: torch.Tensor, request: str) -> None:
        """Store pages of a buffer that are there."""
        shard, rows = self._served.shard, self._tensors.rows(pages)
        if shard.count == 1:
            cache.put(keys, rows)
            return
        with cache.writer(  # ranks whose heads others write as well: a page is whole when each has come
            keys, group=request, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages
        ) as writer:
            write = writer.prepared(rows)
            for layer in range(*shard.layers):
                write(layer)

    def give_back(self, buffer: _Buffer) -> None:
        """A buffer for saves has nothing in it that is needed."""
        self._spare.put(buffer)

    def _buffer(self) -> _Buffer:
        return _Buffer(self._served, self._first, len(self._layers), self._tensors)

    def _batches(self, parts: list[Keys]) -> Iterator[list[Keys]]:
        """These pages, as many at a time as a buffer has."""
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

    def _scatter(self, buffer: _Buffer, tables: dict[int, Ids]) -> None:
        """Write the first pages of a buffer into their blocks."""
        for table, ids in tables.items():
            page, at = np.nonzero(ids != NO_BLOCK)
            whole = len(page) == ids.size
            index = self._index(ids if whole else ids[page, at])
            chosen = slice(len(ids)) if whole else (self._index(page), self._index(at))
            for layer in self._of(table):
                self._layers[layer][index] = buffer.layers[layer][chosen]

    def _gather(self, buffer: _Buffer, tables: dict[int, Ids]) -> None:
        for table, ids in tables.items():
            index = self._index(ids)
            for layer in self._of(table):
                buffer.layers[layer][: len(ids)] = self._layers[layer][index]

    def _ids(self, move: GroupMove, page: int, pages: int) -> dict[int, Ids]:
        """Blocks of these pages, by table ``[pages, page_blocks]``."""
        size = self._served.page_blocks
        return {
            table: np.array(blocks[page * size : (page + pages) * size], np.int64).reshape(pages, size)
            for table, blocks in move.blocks.items()
        }

    def _index(self, ids: Ids) -> Any:
        """An index into layers. From pinned memory, or the copy would wait for all that its stream has been given."""
        place = self._first.device
        return ids if place.type == "cpu" else torch.from_numpy(ids).pin_memory().to(place, non_blocking=True)

    def _of(self, table: int) -> list[int]:
        """The layers whose blocks that table has, by their place in a page."""
        return [layer for layer, each in enumerate(self._served.tables) if each == table]

    def _get(self, cache: PrefixCache, keys: Keys, rows: Any) -> Match:
        shard = self._served.shard
        if shard.count == 1:
            return cache.get(keys, rows)
        return cache.get_shard(keys, rows, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages)


def _indexable(tensor: torch.Tensor) -> Any:
    """The same memory, to be indexed by block; of a host as an array of NumPy. PyTorch would have each of our threads
    start threads of its own, which then compete with those of the model."""
    if tensor.device.type != "cpu":
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
