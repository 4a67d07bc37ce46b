"""Blocks of one group of layers in a worker's tensors, and pages of the store: moved some at a time.

Between the two are buffers in the tensors' memory. What is loaded comes into a buffer, and from there into its blocks
in the stream that loads. What is saved goes from its blocks into a buffer in the stream that computes: later steps may
write into the blocks, since their work is behind it.

Tensors of a worker: in which order work on them is done, and how the store gets at their bytes.

Work on tensors of the host is done when it is given. A GPU does it later, in the order of a stream, and streams know
nothing of each other: what one thread gives is behind another thread's work only where a stream waits for an event.

What both sides know: which pages a model has, and pages on their way between the store and blocks.
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

from kvstore.client.device_rows import DeviceRows
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
        late: work is done after it was given, so that the bytes of a save are there later.
    """

    @property
    def late(self) -> bool:
        """See the class."""
        ...

    def current(self) -> DeviceStream:
        """The stream in which the calling thread computes."""
        ...

    def stream(self) -> DeviceStream:
        """A stream of our own, ordered with no other."""
        ...

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        """Give work on tensors to one of our own streams, or to the one in which the calling thread computes."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the same memory that holds anything."""
        ...

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> Any:
        """Pages, one a row, as buffers of the store: it begins behind what ``stream`` has been given so far. None:
        nothing of that has to be waited for."""
        ...


def tensors_of(tensor: torch.Tensor) -> Tensors:
    """For a worker that has its cache in such tensors.

    Raises:
        ValueError: they are in memory of a device that this process cannot copy to and from.
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
    """Contiguous pages in memory of a device, one a row."""
    assert pages.is_contiguous()
    row_bytes = pages[:1].nbytes
    handle = None if stream is None else stream.handle
    return DeviceRows(device, pages.data_ptr(), len(pages), row_bytes, row_bytes, handle, pages)


class _DoneStream:
    """The stream of work that is done when it is given."""

    handle = 0

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """See ``DeviceStream``. Bytes of the host are copied by the host."""
        raise AssertionError("nothing is copied in a stream of the host")

    def wait(self, event: DeviceEvent) -> None:
        """See ``DeviceStream``."""

    def record(self) -> DeviceEvent:
        """See ``DeviceStream``."""
        return _OVER


class _OverEvent:
    """An event of such a stream."""

    def over(self) -> bool:
        """See ``DeviceEvent``."""
        return True

    def wait(self, deadline_s: float) -> None:
        """See ``DeviceEvent``."""


_DONE = _DoneStream()
_OVER = _OverEvent()


NO_BLOCK = 0  # vLLM's null block, where a window needs none
ROOTS_MAX = 1024  # of salts and adapters, whose caches are kept ready


@dataclass(frozen=True)
class PagedGroup:
    """Layers that keep the same tokens.

    Attributes:
        layers: their names, as far as this process has their cache, as the model runs them.
        tables: of each layer the number of vLLM's table that has its blocks.
        shard: the part of a page that this process has.
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
    """What one engine serves.

    Attributes:
        page_tokens: tokens of a page, in every group.
        by_blocks: whether what could not be loaded is told by blocks; else by whole requests, since of several tables,
            and of a window, no part is of use.
        media_have_names: see ``media``.
    """

    groups: tuple[PagedGroup, ...]
    page_tokens: int
    by_blocks: bool
    media_have_names: bool

    @property
    def layouts(self) -> list[Layout]:
        """Of the groups."""
        return [group.layout for group in self.groups]


@dataclass
class GroupMove:
    """Pages of one group.

    Attributes:
        parts: their keys, as ``GroupedKeys.parts`` gives them.
        blocks: of each of vLLM's tables that the group's layers have, ``[pages * page_blocks]``, where they are;
            ``NO_BLOCK``: nowhere, or nothing is to be written there.
    """

    parts: list[Keys]
    blocks: dict[int, list[int]]


@dataclass
class BlockMove:
    """Pages of one request on their way between the store and blocks.

    Attributes:
        groups: of each group of the model.
        adapter: part of the pages' roots.
    """

    request: str
    adapter: str
    groups: list[GroupMove]


class RootCaches:
    """The caches of one tenant, by the adapter part of their roots. For one thread."""

    def __init__(self, store: Store, layouts: list[Layout], salt: str) -> None:
        self._store = store
        self._layouts = layouts
        self._salt = salt
        self._caches: dict[str, GroupedCache] = {}

    def of(self, adapter: str) -> GroupedCache:
        """Made when it is asked for first."""
        found = self._caches.get(adapter)
        if found is None:
            if len(self._caches) >= ROOTS_MAX:
                self._caches.clear()
            found = self._caches[adapter] = self._store.cache(self._layouts, self._salt, adapter)
        return found


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
