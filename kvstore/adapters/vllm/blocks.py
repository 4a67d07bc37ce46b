"""Copies of pages between the store and the blocks in a worker's cache, for one group of layers at a time.

``PagedModel`` and ``PagedGroup`` describe a model's cache. ``BlockMove`` names the pages and blocks of one copy: the
scheduler makes it, a worker's ``BlockGroup`` carries it out.

A copy goes through a buffer in the memory of the cache. A load reads pages from the store into the buffer, and then
copies them into their blocks in a stream of its own. A save copies pages out of their blocks into a buffer, in the
stream in which the model computes. So later steps may overwrite the blocks: their work in that stream comes after the
copy. The pages are stored from the buffer.

``Tensors`` hides the difference between host and device memory. Work on host tensors is done at once. A GPU does it
later, in the order of a stream. Streams are independent: work in one comes after work in another only if the stream
waits for an event.
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
    from kvstore.model.layout import Layout
    from kvstore.model.prefix import Keys
    from kvstore.model.shard import Shard

_log = logging.getLogger(__name__)

NO_BLOCK = 0  # vLLM's null block: stands for blocks behind a window
ROOTS_MAX = 1024  # salts and adapters whose caches are kept for reuse
BUFFER_BYTES: Final = 8 << 20  # size of one buffer; buffers are reused, since new memory is slow
SAVING_BYTES: Final = 64 << 20  # total size of a worker's buffers for saves; a step that needs more waits
BUFFER_WAIT_S: Final = 10.0  # longest wait of a step for a free buffer
COMPUTE_S: Final = 60.0  # longest time that a device may take for a step

Work = Callable[[], None]
Ids = npt.NDArray[np.int64]


# --- Tensors and streams ----------------------------------------------------------------------------------------------


class Tensors(Protocol):
    """The memory of a worker's cache: allocates tensors in it, orders work on them, and gives the store access to them.

    Attributes:
        is_deferred: True if work runs after ``run`` has returned, as on a GPU.
    """

    @property
    def is_deferred(self) -> bool:
        """True if work runs after ``run`` has returned, as on a GPU."""
        ...

    def current(self) -> DeviceStream:
        """Return the stream in which the calling thread computes."""
        ...

    def stream(self) -> DeviceStream:
        """Return a new stream. Its work is not ordered with the work of other streams."""
        ...

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        """Queue work on tensors in ``stream``; with None, in the stream in which the calling thread computes."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in this memory."""
        ...

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> Any:
        """Return pages as a buffer for the store, one page per row. The store uses the buffer after the work that is
        now queued in ``stream``; with None it waits for no work."""
        ...


def tensors_of(tensor: torch.Tensor) -> Tensors:
    """Return the ``Tensors`` of a worker whose cache is in the same memory as ``tensor``.

    Raises:
        ValueError: this process cannot access that device memory.
    """
    if tensor.device.type == "cpu":
        return _HostTensors()
    device = device_of(tensor.data_ptr())
    if device is None:
        reason = missing() or "its driver does not know that memory"
        raise ValueError(f"KVStoreConnector: the cache is on {tensor.device}, which the store cannot use: {reason}")
    return _CudaTensors(device, tensor.device)


class _HostTensors:
    """``Tensors`` in host memory."""

    is_deferred = False

    def current(self) -> DeviceStream:
        return _HOST_STREAM

    def stream(self) -> DeviceStream:
        return _HOST_STREAM

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        work()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> torch.Tensor:
        return pages.flatten(1)


class _CudaTensors:
    """``Tensors`` on a GPU. Streams and events are the store's own, not torch's, so that each wait has a deadline."""

    is_deferred = True

    def __init__(self, device: Device, torch_device: torch.device) -> None:
        self._device = device
        self._torch_device = torch_device

    def current(self) -> DeviceStream:
        return self._device.stream_of(torch.cuda.current_stream(self._torch_device).cuda_stream)

    def stream(self) -> DeviceStream:
        return self._device.stream()

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        if stream is None:
            work()
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, self._torch_device)):
            work()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._torch_device)

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> DeviceRows:
        return device_rows(self._device, pages, stream)


def device_rows(device: Device, pages: torch.Tensor, stream: DeviceStream | None) -> DeviceRows:
    """Return contiguous pages in device memory as a buffer for the store, one page per row."""
    assert pages.is_contiguous()
    row_bytes = pages[:1].nbytes
    handle = None if stream is None else stream.handle
    return DeviceRows(device, pages.data_ptr(), len(pages), row_bytes, row_bytes, handle, pages)


class _HostStream:
    """The stream of host memory. Its work is done as soon as it is queued."""

    handle = 0

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        raise AssertionError("a host stream copies nothing")

    def wait(self, event: DeviceEvent) -> None:
        """Return at once: all work is done."""

    def record(self) -> DeviceEvent:
        return _HOST_EVENT


class _HostEvent:
    """An event of a ``_HostStream``. It is over as soon as it is recorded."""

    def over(self) -> bool:
        return True

    def wait(self, deadline_s: float) -> None:
        """Return at once: the event is over."""


_HOST_STREAM = _HostStream()
_HOST_EVENT = _HostEvent()


# --- A model's cache, and moves of its pages --------------------------------------------------------------------------


@dataclass(frozen=True)
class PagedGroup:
    """Layers that keep the same tokens, and the pages that hold their cache.

    Attributes:
        layers: the names of the layers whose cache this process has, in the model's order.
        tables: for each layer, the number of vLLM's table that lists its blocks.
        block_size: tokens of a block.
        page_blocks: blocks of a page.
        shard: this process's part of a page.
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
        reports_blocks: True if a failed load is reported by its blocks. Otherwise it is reported by its request: with
            several tables or a window, a part of a load is useless.
        has_media_names: see ``layouts.has_media_names``.
    """

    groups: tuple[PagedGroup, ...]
    page_tokens: int
    reports_blocks: bool
    has_media_names: bool

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the groups."""
        return [group.layout for group in self.groups]


@dataclass
class GroupMove:
    """Pages of one group to load or save.

    Attributes:
        parts: the keys of the pages, as ``GroupedKeys.parts`` returns them.
        blocks: the blocks of the pages, ``[pages * page_blocks]``, by the number of vLLM's table. ``NO_BLOCK`` stands
            for a block that does not exist or must not be written.
    """

    parts: list[Keys]
    blocks: dict[int, list[int]]


@dataclass
class BlockMove:
    """Pages of one request to load or save.

    Attributes:
        request: the request's id.
        adapter: the adapter part of the pages' roots.
        groups: the pages of each group of the model.
    """

    request: str
    adapter: str
    groups: list[GroupMove]


class RootCaches:
    """The caches of one tenant, one for each adapter part of a root. Used by one thread."""

    def __init__(self, store: Store, layouts: list[Layout], salt: str) -> None:
        self._store = store
        self._layouts = layouts
        self._salt = salt
        self._caches: dict[str, GroupedCache] = {}

    def of(self, adapter: str) -> GroupedCache:
        """Return the cache of an adapter. The first call for an adapter creates the cache."""
        cache = self._caches.get(adapter)
        if cache is None:
            if len(self._caches) >= ROOTS_MAX:
                self._caches.clear()
            cache = self._caches[adapter] = self._store.cache(self._layouts, self._salt, adapter)
        return cache


# --- Copies -----------------------------------------------------------------------------------------------------------


class _Buffer:
    """Memory for pages of a shard on their way between store and blocks.

    Attributes:
        rows: ``[pages, layers, heads, page_tokens, content]``, in the memory of the cache.
        layers: a view for each layer, ``[pages, page_blocks, heads, block_size, content]``.
    """

    def __init__(self, group: PagedGroup, first: torch.Tensor, layers: int, tensors: Tensors) -> None:
        pages = max(1, BUFFER_BYTES // group.layout.page_bytes)
        shape = pages, layers, first.shape[1], group.layout.page_tokens, first.shape[3]
        self.rows = tensors.empty(shape, first.dtype)
        split = self.rows.unflatten(3, (group.page_blocks, group.block_size)).transpose(2, 3)
        self.layers = [_indexable(split[:, layer]) for layer in range(layers)]


class BufferedSave:
    """Pages that are copied from their blocks into a buffer, to be stored from there. ``free`` ends it and makes the
    buffer free for other saves."""

    def __init__(self, group: BlockGroup, buffer: _Buffer, batch: list[Keys], event: DeviceEvent) -> None:
        self._group = group
        self._buffer = buffer
        self._batch = batch
        self._copied_event = event
        self.pages = sum(map(len, batch))

    def wait(self) -> None:
        """Wait until the pages are in the buffer.

        Raises:
            DeadlineExceeded: they are not in the buffer within ``COMPUTE_S``.
            DeviceLost: the device has failed.
        """
        self._copied_event.wait(time.monotonic() + COMPUTE_S)

    def put(self, cache: PrefixCache, request: str) -> None:
        """Store the pages that the store accepts. Raises the errors of ``PrefixCache.put``."""
        row = 0
        for keys in self._batch:
            self._group.put(cache, keys, self._buffer.rows[row : row + len(keys)], request)
            row += len(keys)

    def free(self) -> None:
        """Make the buffer free for other saves."""
        self._group.free_buffer(self._buffer)


class BlockGroup:
    """Loads and saves pages of one group of layers, from and to the blocks in a worker's cache.

    One thread loads, another one saves.

    Args:
        layers: the caches of the group's layers, ``[blocks, kv_heads, block_size, content]``, of any strides.
        saving_bytes: the total size of the buffers for saves.

    Raises:
        ValueError: a cache does not fit the layout.
    """

    def __init__(
        self, group: PagedGroup, layers: list[torch.Tensor], tensors: Tensors, saving_bytes: int = SAVING_BYTES
    ) -> None:
        self._group = group
        self._layers = [_indexable(tensor) for tensor in layers]
        self._first = layers[0]
        self._tensors = tensors
        self.loaded_bytes = group.shard.nbytes  # bytes of a page that this worker loads
        self.saved_bytes = self.loaded_bytes if group.shard.writes else 0  # 0 if another rank saves these bytes
        start, stop = group.shard.heads
        block_shape = [stop - start, group.block_size, group.layout.shape[-1]]
        for name, tensor in zip(group.layers, layers, strict=True):
            if list(tensor.shape[1:]) != block_shape:
                shape = list(tensor.shape)
                raise ValueError(
                    f"KVStoreConnector: the cache of {name} must be [blocks, *{block_shape}] (got {shape})"
                )
        self._load_buffer = self._new_buffer()
        count = max(2, saving_bytes // self._load_buffer.rows.nbytes) if tensors.is_deferred else 1
        self._free_buffers = queue.SimpleQueue[_Buffer]()
        for _ in range(count):
            self._free_buffers.put(self._new_buffer())

    def load(self, cache: PrefixCache, move: GroupMove, stream: DeviceStream, event: DeviceEvent) -> Iterator[int]:
        """Load pages into their blocks. Yields the number of pages of each batch, and ends at the first missing page.

        The work in ``stream`` writes the blocks after ``event``, because until then a step of the blocks' previous
        owner may still write into them. The blocks contain the pages once the work in ``stream`` is done.
        """
        buffer, page = self._load_buffer, 0
        for batch in self._batches(move.parts):
            loaded, miss_reason = 0, ""
            for keys in batch:
                match = self._get(cache, keys, self._tensors.rows(buffer.rows[loaded : loaded + len(keys)], stream))
                loaded += match.pages
                if match.pages < len(keys):
                    miss_reason = match.reason
                    break
            if loaded:
                stream.wait(event)
                self._tensors.run(partial(self._copy_in, buffer, self._block_ids(move, page, loaded)), stream)
                page += loaded
            yield loaded
            if miss_reason:
                _log.warning("kvstore: pages were not loaded: %s", miss_reason)
                return

    def gather(self, move: GroupMove) -> Iterator[BufferedSave]:
        """Copy pages out of their blocks into buffers, in the stream in which the calling thread computes.

        Raises:
            DeadlineExceeded: no buffer became free within ``BUFFER_WAIT_S``, because earlier pages are not stored yet.
                The remaining pages are not saved.
        """
        page = 0
        for batch in self._batches(move.parts):
            count = sum(map(len, batch))
            try:
                buffer = self._free_buffers.get(timeout=BUFFER_WAIT_S)
            except queue.Empty:
                raise DeadlineExceeded(f"pages of {BUFFER_WAIT_S:g} s ago are not stored yet") from None
            self._tensors.run(partial(self._copy_out, buffer, self._block_ids(move, page, count)))
            page += count
            yield BufferedSave(self, buffer, batch, self._tensors.current().record())

    def put(self, cache: PrefixCache, keys: Keys, pages: torch.Tensor, request: str) -> None:
        """Store pages from a buffer. ``request`` is the write group of the ranks that write the same pages."""
        shard, rows = self._group.shard, self._tensors.rows(pages)
        if shard.count == 1:
            cache.put(keys, rows)
            return
        # Ranks whose heads other ranks write do this too: a page is complete when every rank has sealed it.
        with cache.writer(
            keys, group=request, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages
        ) as writer:
            write = writer.prepared(rows)
            for layer in range(*shard.layers):
                write(layer)

    def free_buffer(self, buffer: _Buffer) -> None:
        """Make a buffer free for saves."""
        self._free_buffers.put(buffer)

    def _new_buffer(self) -> _Buffer:
        return _Buffer(self._group, self._first, len(self._layers), self._tensors)

    def _batches(self, parts: list[Keys]) -> Iterator[list[Keys]]:
        """Yield the pages in batches that fit a buffer."""
        batch: list[Keys] = []
        rows_free = len(self._load_buffer.rows)
        for keys in parts:
            while len(keys):
                batch.append(keys[:rows_free])
                keys, rows_free = keys[rows_free:], rows_free - len(batch[-1])
                if not rows_free:
                    yield batch
                    batch, rows_free = [], len(self._load_buffer.rows)
        if batch:
            yield batch

    def _copy_in(self, buffer: _Buffer, ids_by_table: dict[int, Ids]) -> None:
        """Copy the first pages of a buffer into their blocks, except ``NO_BLOCK``."""
        for table, ids in ids_by_table.items():
            pages, positions = np.nonzero(ids != NO_BLOCK)
            is_whole = len(pages) == ids.size
            targets = self._index(ids if is_whole else ids[pages, positions])
            sources = slice(len(ids)) if is_whole else (self._index(pages), self._index(positions))
            for layer in self._table_layers(table):
                self._layers[layer][targets] = buffer.layers[layer][sources]

    def _copy_out(self, buffer: _Buffer, ids_by_table: dict[int, Ids]) -> None:
        """Copy blocks into the first pages of a buffer."""
        for table, ids in ids_by_table.items():
            sources = self._index(ids)
            for layer in self._table_layers(table):
                buffer.layers[layer][: len(ids)] = self._layers[layer][sources]

    def _block_ids(self, move: GroupMove, page: int, pages: int) -> dict[int, Ids]:
        """Return table -> blocks ``[pages, page_blocks]`` of ``pages`` pages, starting at ``page``."""
        size = self._group.page_blocks
        return {
            table: np.array(blocks[page * size : (page + pages) * size], np.int64).reshape(pages, size)
            for table, blocks in move.blocks.items()
        }

    def _index(self, ids: Ids) -> Any:
        """Return an index into a layer's cache. For a GPU the ids are copied from pinned memory, since a copy from
        other memory would wait for all work in its stream."""
        device = self._first.device
        return ids if device.type == "cpu" else torch.from_numpy(ids).pin_memory().to(device, non_blocking=True)

    def _table_layers(self, table: int) -> list[int]:
        """Return the positions in a page of the layers whose blocks are in this table."""
        return [layer for layer, layer_table in enumerate(self._group.tables) if layer_table == table]

    def _get(self, cache: PrefixCache, keys: Keys, rows: Any) -> Match:
        shard = self._group.shard
        if shard.count == 1:
            return cache.get(keys, rows)
        return cache.get_shard(keys, rows, rank=shard.rank, ranks=shard.ranks, stage=shard.stage, stages=shard.stages)


def _indexable(tensor: torch.Tensor) -> Any:
    """Return a tensor in the form in which its blocks are indexed: host memory as a NumPy array.

    If our threads indexed host memory with PyTorch, each would start more threads, which compete with the model's.
    """
    if tensor.device.type != "cpu":
        return tensor
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]).numpy()
