"""Moves pages of one group of layers between the blocks in a worker's tensors and the store, some at a time.

Buffers in the tensors' memory are between the two. Loaded pages go into a buffer, and from there into their blocks, in
the loading stream. Saved pages go from their blocks into a buffer in the computing stream: later steps may write into
the blocks, since their work comes after the copy.

A worker's tensors: the order of work on them, and the store's access to their bytes.

Work on host tensors is done at once. A GPU does it later, in the order of a stream, and streams are independent: work
of one thread comes after that of another only if a stream waits for an event.

Types of both sides: the pages of a model, and moves of pages between the store and blocks.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvstore.client.buffers import DeviceRows
from kvstore.device.base import Addresses, Device, DeviceEvent, DeviceStream
from kvstore.device.cuda import device_of, missing
from kvstore.errors import DeadlineExceeded

if TYPE_CHECKING:
    from kvstore.client.grouped_cache import GroupedCache
    from kvstore.client.match import Match
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.client.store import Store
    from kvstore.device.base import DeviceEvent, DeviceStream
    from kvstore.model.layout import Layout
    from kvstore.model.prefix import Keys
    from kvstore.model.shard import Shard

Work = Callable[[], None]


class Tensors(Protocol):
    """See the module.

    Attributes:
        late: work is done later, so the bytes of a save are not there at once.
    """

    @property
    def late(self) -> bool:
        """See the class."""
        ...

    def current(self) -> DeviceStream:
        """Return the stream in which the calling thread computes."""
        ...

    def stream(self) -> DeviceStream:
        """Return a new stream, which is not ordered with any other."""
        ...

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        """Queue work on tensors in one of our own streams, or in the one in which the calling thread computes."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in the same memory."""
        ...

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> Any:
        """Return pages, one per row, as a buffer for the store, which uses it after the work queued in ``stream`` so
        far. With None it does not wait for any work."""
        ...


def tensors_of(tensor: torch.Tensor) -> Tensors:
    """Return the ``Tensors`` for a worker with such a cache.

    Raises:
        ValueError: they are in device memory that this process cannot access.
    """
    if tensor.device.type == "cpu":
        return HostTensors()
    device = device_of(tensor.data_ptr())
    if device is None:
        why = missing() or "its driver does not know that memory"
        raise ValueError(f"KVStoreConnector: the cache is on {tensor.device}, which the store cannot use: {why}")
    return CudaTensors(device, tensor.device)


class HostTensors:
    """See ``Tensors``."""

    late = False

    def current(self) -> DeviceStream:
        """See ``Tensors``."""
        return _DONE

    def stream(self) -> DeviceStream:
        """See ``Tensors``."""
        return _DONE

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        """See ``Tensors``."""
        work()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``Tensors``."""
        return torch.empty(shape, dtype=dtype)

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> torch.Tensor:
        """See ``Tensors``."""
        return pages.flatten(1)


class CudaTensors:
    """See ``Tensors``. Streams and events are the store's own, so that each wait has a deadline."""

    late = True

    def __init__(self, device: Device, place: torch.device) -> None:
        self._device = device
        self._place = place

    def current(self) -> DeviceStream:
        """See ``Tensors``."""
        return self._device.stream_of(torch.cuda.current_stream(self._place).cuda_stream)

    def stream(self) -> DeviceStream:
        """See ``Tensors``."""
        return self._device.stream()

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        """See ``Tensors``."""
        if stream is None:
            work()
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, self._place)):
            work()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``Tensors``."""
        return torch.empty(shape, dtype=dtype, device=self._place)

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> DeviceRows:
        """See ``Tensors``."""
        return device_rows(self._device, pages, stream)


def device_rows(device: Device, pages: torch.Tensor, stream: DeviceStream | None) -> DeviceRows:
    """Return contiguous pages in device memory, one per row."""
    assert pages.is_contiguous()
    row_bytes = pages[:1].nbytes
    handle = None if stream is None else stream.handle
    return DeviceRows(device, pages.data_ptr(), len(pages), row_bytes, row_bytes, handle, pages)


class _DoneStream:
    """The stream of work that is done at once."""

    handle = 0

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """See ``DeviceStream``. Not used: the host copies its own bytes."""
        raise AssertionError("nothing is copied in a stream of the host")

    def wait(self, event: DeviceEvent) -> None:
        """See ``DeviceStream``."""

    def record(self) -> DeviceEvent:
        """See ``DeviceStream``."""
        return _OVER


class _OverEvent:
    """An event of a ``_DoneStream``."""

    def over(self) -> bool:
        """See ``DeviceEvent``."""
        return True

    def wait(self, deadline_s: float) -> None:
        """See ``DeviceEvent``."""


_DONE = _DoneStream()
_OVER = _OverEvent()


NO_BLOCK = 0  # vLLM's null block, for pages behind a window
ROOTS_MAX = 1024  # salts and adapters whose caches are kept


@dataclass(frozen=True)
class PagedGroup:
    """Layers that keep the same tokens.

    Attributes:
        layers: the names of the layers whose cache this process has, in the model's order.
        tables: for each layer the number of vLLM's table with its blocks.
        shard: this process's part of a page.
        block_size: tokens of a block. ``page_blocks``: blocks of a page.
    """

    layout: Layout
    layers: tuple[str, ...]
    tables: tuple[int, ...]
    block_size: int
    page_blocks: int
    shard: Shard


@dataclass(frozen=True)
class PagedModel:
    """The cache groups of the model that one engine serves.

    Attributes:
        page_tokens: tokens of a page, in every group.
        by_blocks: whether failed loads are reported by blocks; otherwise by whole requests, since with several tables
            or a window a partial load is useless.
        media_have_names: see ``layouts``.
    """

    groups: tuple[PagedGroup, ...]
    page_tokens: int
    by_blocks: bool
    media_have_names: bool

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the groups."""
        return [group.layout for group in self.groups]


@dataclass
class GroupMove:
    """A move of pages of one group.

    Attributes:
        parts: their keys, as ``GroupedKeys.parts`` gives them.
        blocks: the pages' blocks, ``[pages * page_blocks]``, by the number of vLLM's table; ``NO_BLOCK`` for blocks
            that do not exist or must not be written.
    """

    parts: list[Keys]
    blocks: dict[int, list[int]]


@dataclass
class BlockMove:
    """A move of pages of one request between the store and blocks.

    Attributes:
        groups: the moves of each group of the model.
        adapter: the adapter part of the pages' roots.
    """

    request: str
    adapter: str
    groups: list[GroupMove]


class RootCaches:
    """The caches of one tenant, by the adapter part of their roots. Used by one thread."""

    def __init__(self, store: Store, layouts: list[Layout], salt: str) -> None:
        self._store = store
        self._layouts = layouts
        self._salt = salt
        self._caches: dict[str, GroupedCache] = {}

    def of(self, adapter: str) -> GroupedCache:
        """Return the cache of an adapter, made at first use."""
        found = self._caches.get(adapter)
        if found is None:
            if len(self._caches) >= ROOTS_MAX:
                self._caches.clear()
            found = self._caches[adapter] = self._store.cache(self._layouts, self._salt, adapter)
        return found


_log = logging.getLogger(__name__)

BUFFER_BYTES: Final = 8 << 20  # of a buffer between store and blocks; buffers are kept, since new memory is slow
SAVING_BYTES: Final = 64 << 20  # of a worker's buffers for unfinished saves; a step waits for more
ROOM_S: Final = 10.0  # how long a step waits for a buffer
COMPUTE_S: Final = 60.0  # the longest that a device takes for a step

Ids = npt.NDArray[np.int64]


class _Buffer:
    """Pages of a shard between store and blocks.

    Attributes:
        rows: ``[pages, layers, heads, page_tokens, content]``, in the memory of the cache.
        layers: views of each layer, ``[pages, page_blocks, heads, block_size, content]``.
    """

    def __init__(self, served: PagedGroup, first: torch.Tensor, layers: int, tensors: Tensors) -> None:
        pages = max(1, BUFFER_BYTES // served.layout.page_bytes)
        shape = pages, layers, first.shape[1], served.layout.page_tokens, first.shape[3]
        self.rows = tensors.empty(shape, first.dtype)
        split = self.rows.unflatten(3, (served.page_blocks, served.block_size)).transpose(2, 3)
        self.layers = [_indexable(split[:, layer]) for layer in range(layers)]


class Gathered:
    """Pages to be saved, which are in a buffer once its stream has copied them. Ends with ``drop``, after which the
    buffer may be reused."""

    def __init__(self, group: BlockGroup, buffer: _Buffer, batch: list[Keys], event: DeviceEvent) -> None:
        self._group = group
        self._buffer = buffer
        self._batch = batch
        self._event = event
        self.pages = sum(map(len, batch))

    def wait(self) -> None:
        """Wait until the pages are in the buffer. Raises DeadlineExceeded, DeviceLost."""
        event = self._event
        event.wait(time.monotonic() + COMPUTE_S)

    def put(self, cache: PrefixCache, request: str) -> None:
        """Store the pages, as far as the store accepts them. Raises as ``PrefixCache.put``."""
        row = 0
        for keys in self._batch:
            self._group.put(cache, keys, self._buffer.rows[row : row + len(keys)], request)
            row += len(keys)

    def drop(self) -> None:
        """Release the buffer."""
        self._group.give_back(self._buffer)


class BlockGroup:
    """Moves pages of one group. Made when the worker knows its tensors.

    Args:
        layers: the group's caches, ``[blocks, kv_heads, block_size, content]``, of any strides.
        saving_bytes: the total size of buffers for saves.

    Raises:
        ValueError: a tensor does not fit the layout.
    """

    def __init__(
        self, served: PagedGroup, layers: list[torch.Tensor], tensors: Tensors, saving_bytes: int = SAVING_BYTES
    ) -> None:
        self._served = served
        self._layers = [_indexable(tensor) for tensor in layers]
        self._first = layers[0]
        self._tensors = tensors
        self.loaded_bytes = served.shard.nbytes  # bytes of a page that this worker loads
        self.saved_bytes = self.loaded_bytes if served.shard.writes else 0  # 0 if another rank saves them
        start, stop = served.shard.heads
        wanted = [stop - start, served.block_size, served.layout.shape[-1]]
        for name, tensor in zip(served.layers, layers, strict=True):
            if list(tensor.shape[1:]) != wanted:
                found = list(tensor.shape)
                raise ValueError(f"KVStoreConnector: the cache of {name} must be [blocks, *{wanted}] (got {found})")
        self._loading = self._buffer()
        count = max(2, saving_bytes // self._loading.rows.nbytes) if tensors.late else 1
        self._spare = queue.SimpleQueue[_Buffer]()
        for _ in range(count):
            self._spare.put(self._buffer())

    def load(self, cache: PrefixCache, move: GroupMove, stream: DeviceStream, event: DeviceEvent) -> Iterator[int]:
        """Load these pages into their blocks; yields several times how many were loaded. Ends at a missing page.

        The blocks are written in ``stream`` after ``event``: before that, a step of the blocks' former owner may still
        write into them. They hold the pages once the work in ``stream`` is done.
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
            DeadlineExceeded: earlier pages are not stored yet; the rest is not saved.
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
        """Store pages that are in a buffer."""
        shard, rows = self._served.shard, self._tensors.rows(pages)
        if shard.count == 1:
            cache.put(keys, rows)
            return
        with cache.writer(  # also ranks whose heads others write: a page is complete when every rank has sealed
            keys, group=request, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages
        ) as writer:
            write = writer.prepared(rows)
            for layer in range(*shard.layers):
                write(layer)

    def give_back(self, buffer: _Buffer) -> None:
        """Return a buffer for saves."""
        self._spare.put(buffer)

    def _buffer(self) -> _Buffer:
        return _Buffer(self._served, self._first, len(self._layers), self._tensors)

    def _batches(self, parts: list[Keys]) -> Iterator[list[Keys]]:
        """Yield these pages, as many at a time as fit a buffer."""
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
        """Return the blocks of these pages, by table, as ``[pages, page_blocks]``."""
        size = self._served.page_blocks
        return {
            table: np.array(blocks[page * size : (page + pages) * size], np.int64).reshape(pages, size)
            for table, blocks in move.blocks.items()
        }

    def _index(self, ids: Ids) -> Any:
        """Return an index into layers. It is in pinned memory, since otherwise the copy would wait for all work in its
        stream."""
        place = self._first.device
        return ids if place.type == "cpu" else torch.from_numpy(ids).pin_memory().to(place, non_blocking=True)

    def _of(self, table: int) -> list[int]:
        """Return the layers whose blocks are in that table, by their position in a page."""
        return [layer for layer, each in enumerate(self._served.tables) if each == table]

    def _get(self, cache: PrefixCache, keys: Keys, rows: Any) -> Match:
        shard = self._served.shard
        if shard.count == 1:
            return cache.get(keys, rows)
        return cache.get_shard(keys, rows, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages)


def _indexable(tensor: torch.Tensor) -> Any:
    """Return a tensor in a form to be indexed by block: host memory as a NumPy array. With PyTorch, each of our threads
    would start more threads, which then compete with those of the model."""
    if tensor.device.type != "cpu":
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
