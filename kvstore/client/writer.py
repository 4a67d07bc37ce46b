"""Writers of pages, layer by layer; other processes can read each layer while later ones are being written."""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import (
    DeviceRows,
    Rows,
    any_rows,
    check_seconds,
    device_rows_to_read,
    flat_bytes,
    on_device,
    rows_to_read,
)
from kvstore.client.device_link import host_rows
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import Keys
from kvstore.model.replica import SHARDS_MAX
from kvstore.model.shard import Shard

_U8 = np.dtype(np.uint8)
PIECES_MAX: Final = 256  # separate ranges of one page written by ``write_range``


class Writer(ABC):
    """A layer-wise put: ``with cache.writer(tokens) as w: w.write_layer(layer, data)`` for every layer, in any order.

    Entering the writer reserves frames. Readers in other processes can follow layer by layer. Leaving it seals the
    pages. All pages are revoked if it is left with an exception or before everything is written, if the deadline
    ``ttl_s`` passes, or if this process dies. A page that was not written whole is never found.

    Several shards of one write have the same ``group``; each has its ``rank`` of ``ranks`` (its heads) and its
    ``stage`` of ``stages`` (its layers). A page is sealed when every shard has sealed its part. A rank whose heads
    another rank writes (MLA, or more ranks than heads) makes the same calls, but its data is not used. Readers can
    follow once all shards have entered; until then it is unknown which shard writes which layers. Each shard of a group
    has one writer at a time: a second one, such as a retry, gets no frames (``OutOfSpace``) until the first has
    finished.

    Attributes (once entered):
        pages_new: indices of the pages to write, ascending. The other pages are stored already, or there was no space.
        sealed: after leaving, the number of pages that this shard sealed. They may still wait for other shards.
        waits: whether leaving waits until pages whose parent is only on NVMe are durable. They are stored in any case;
            without waiting, those that are not durable yet do not count as ``sealed``.
    """

    TAKES_DEVICE = False
    """Whether ``_store_layer`` accepts rows in device memory directly."""

    def __init__(self, shard: Shard, keys: Keys, ttl_s: float, group: str | int | None) -> None:
        if shard.count > SHARDS_MAX:
            field = "ranks" if shard.ranks > SHARDS_MAX or shard.stages == 1 else "stages"
            raise InvalidRequest(field, f"must give at most {SHARDS_MAX} shards of one page (got {shard.count})")
        self.pages_new: list[int] = []
        self.sealed = 0
        self.waits = True
        self._shard = shard
        self._layout = shard.layout
        self._keys = keys
        self._ttl_ms = max(1, int(check_seconds(ttl_s, "ttl_s") * 1000))
        self._group = _group_number(group, shard.stages)
        self._entered = False
        self._written = np.zeros((0, shard.layout.layers), np.bool_)  # [new page, layer]
        # If not None, exactly this many leading layers of all new pages are written, and ``_written`` is not kept up to
        # date. Between two layers of a forward pass CPU caches are cold, and each call of a Python function costs some
        # microseconds.
        self._even: int | None = None
        self._starts: dict[int, int] = {}  # layer -> offset of this shard's part in a page
        self._shape = len(keys), shard.width  # of a layer's data
        self._ranges: dict[int, Ranges] = {}  # page -> its bytes written by ``write_range``

    def __enter__(self) -> Self:
        """Reserve frames for the pages that are not stored.

        Raises:
            QuotaExceeded: the tenant's quota has no room for even one page.
            OutOfSpace: there is no space for even one page.
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """
        if self._entered:
            raise InvalidRequest("writer", "was entered already: make a new one")
        self._entered = True
        self._reserve()
        if self._even is None:
            self._written = self._unwritten()
        if self._shard.count > 1:
            with self._storing():
                self._show(None)
        return self

    def write_layer(self, layer: int, data: Any) -> None:
        """Write one layer of all pages. From then on, readers can read it.

        Args:
            data: ``[pages, bytes]`` for all pages of the keys, including pages that are stored already. A row has
                ``layer_bytes``, or this rank's share of them, and may have any dtype and further shape. Rows may be
                strided if each is contiguous: ``arena[first:last, layer]`` of a page-major arena is copied once. Device
                memory is copied after the work queued in its stream, without waiting. It must not change until the
                writer is left, and readers see the layer when its copy has ended.

        Raises:
            InvalidRequest: the layer is not in the layout or belongs to another stage, or data has the wrong size;
                nothing was written.
            LeaseBroken: over gRPC, the reservation has ended.
            NodeUnavailable, DeadlineExceeded: over gRPC, the node did not receive the layer in time.
            DeviceLost: the device of ``data`` has failed.
        """
        with self._open():
            start = self._starts.get(layer)
            if start is None:
                start = self._starts[layer] = self._start(layer)
            rows: Rows | DeviceRows = data
            is_plain = type(data) is np.ndarray and data.dtype is _U8 and data.shape == self._shape
            if not is_plain or data.strides[1] != 1:
                read = any_rows if self.TAKES_DEVICE else host_rows
                rows = read(data, self._shard.width, len(self._keys), "data", apart=True)
            if self._shard.writes and self.pages_new:
                self._store_layer(start, rows)
                if layer == self._even:
                    self._even += 1
                else:
                    self._track_layers()
                    self._written[:, layer] = True
                self._show(None)

    def prepared(self, pages: Any) -> Callable[[int], None]:
        """Return a function that writes layers of ``pages``: ``write = writer.prepared(pages)``, then ``write(layer)``
        when that layer of ``pages`` is complete.

        Arguments are checked now, so that ``write`` costs little more than its copy. It raises as ``write_layer``.

        Args:
            pages: as for ``PrefixCache.put``, ``[pages, page_bytes]`` for all pages of the keys, or a shard's part of
                each; or a list of such host arrays, which are concatenated. They must stay in place until the writer is
                left. Device memory is copied after the work queued in the current stream.

        Raises:
            InvalidRequest: pages have the wrong size, or are not contiguous.
        """
        if on_device(pages):
            shard = self._shard
            rows = device_rows_to_read(pages, shard.nbytes, len(self._keys), apart=True)
            return partial(self._write_columns, rows)
        return partial(self._write_prepared, self._parts(pages))

    def _write_columns(self, rows: DeviceRows, layer: int) -> None:
        self._start(layer)
        at = (layer - self._shard.layers[0]) * self._shard.width
        self.write_layer(layer, rows.columns(at, at + self._shard.width))

    def _parts(self, pages: Any) -> list[Rows]:
        """Return each array as ``[n, layers, width]``."""
        arrays = pages if isinstance(pages, list) else [pages]
        flat = [flat_bytes(each, "pages") for each in arrays]
        shard, size = self._shard, sum(each.size for each in flat)
        if size != len(self._keys) * shard.nbytes or any(each.size % shard.nbytes for each in flat):
            raise InvalidRequest(
                "pages", f"must have {len(self._keys)} pages of {shard.nbytes} bytes (got {size} bytes)"
            )
        return [shard.unpacked(each.reshape(-1, shard.nbytes)) for each in flat]

    def _write_prepared(self, parts: list[Rows], layer: int) -> None:
        self._start(layer)
        rows = [part[:, layer - self._shard.layers[0]] for part in parts]
        self.write_layer(layer, rows[0] if len(rows) == 1 else np.concatenate(rows))

    def write_page(self, page: int, data: Any) -> None:
        """Write all layers of one page: ``page_bytes``, or this shard's heads of each of its layers, in order.

        Raises as ``write_layer``.
        """
        with self._open():
            self._check_page(page)
            shard, (first, last) = self._shard, self._shard.layers
            rows = host_rows(data, shard.width, last - first, "data", apart=True)
            place = self._place(page)
            if shard.writes and place is not None:
                self._store_page(page, rows)
                self._track_layers()
                self._written[place] = True
                self._show(page)

    def write_range(self, page: int, offset: int, data: Any) -> None:
        """Write bytes of one page, from host memory, at their offset in the page. A layer counts as written when all
        its bytes are.

        Raises:
            InvalidRequest: the page is not among the keys, or the bytes are not in this shard's part of it: in its
                layers or, if it does not have all heads, in its heads of one layer. Nothing was written.
        """
        with self._open():
            self._check_page(page)
            row = rows_to_read(data, len(data), 1, "data")[0]
            first, last = self._layers_of(offset, offset + len(row))
            place = self._place(page)
            if not self._shard.writes or place is None or not len(row):
                return
            ranges = self._ranges.setdefault(page, Ranges())
            if len(ranges) >= PIECES_MAX:
                raise InvalidRequest("offset", f"must not leave page {page} in more than {PIECES_MAX} separate pieces")
            self._store_range(page, offset, row)
            ranges.add(offset, offset + len(row))
            self._track_layers()
            done = self._written[place]
            for layer in range(first, last + 1):
                start = layer * self._layout.layer_bytes + self._shard.offset
                done[layer] = done[layer] or ranges.covers(start, start + self._shard.width)
            if done[first] or done[last]:
                self._show(page)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Seal the pages, or revoke them after an exception.

        Raises:
            InvalidRequest: a layer was not written; all pages were revoked.
            LeaseBroken: over gRPC, the reservation had ended; nothing is stored.
            NodeUnavailable, DeadlineExceeded: the node did not answer; pages that were not sealed are revoked by their
                deadline.
            DeviceLost, DeadlineExceeded: a layer did not arrive from its device; nothing is stored.
        """
        if kind is None and self._even == self._layout.layers:
            self._seal()
            return
        self._track_layers()
        if kind is not None:
            self._revoke()
        elif not self._written.all():
            self._revoke()
            page, layer = (int(i) for i in np.argwhere(~self._written)[0])
            raise InvalidRequest("layer", f"layer {layer} of page {self.pages_new[page]} was not written")
        else:
            self._seal()

    # --- what each kind of store does in its own way ----------------------------------------------------------------

    @abstractmethod
    def _reserve(self) -> None:
        """Reserve frames, and set ``pages_new`` to their pages. Reserves nothing if it raises."""

    @abstractmethod
    def _storing(self) -> AbstractContextManager[None]:
        """Return a context to enter while data is stored. Raises if storing is not allowed."""

    @abstractmethod
    def _store_layer(self, start: int, rows: Any) -> None:
        """Store ``rows``, one per page of the keys, into the new pages, at byte ``start`` of each. The rows are in host
        memory, or in device memory if the class sets ``TAKES_DEVICE``."""

    @abstractmethod
    def _store_page(self, page: int, rows: Rows) -> None:
        """Store this shard's part of one new page: a row for each of its layers."""

    @abstractmethod
    def _store_range(self, page: int, offset: int, row: Rows) -> None:
        """Store bytes of one new page."""

    @abstractmethod
    def _show(self, page: int | None) -> None:
        """Make the layers marked in ``_written`` readable, for one new page or for all. Their bytes are stored
        already."""

    @abstractmethod
    def _seal(self) -> None:
        """Seal the reserved pages, all of which are written, and count them in ``sealed``. Called at most once, and
        never after ``_revoke``."""

    @abstractmethod
    def _revoke(self) -> None:
        """Return the reserved frames."""

    # --- checks, and the layers written so far ----------------------------------------------------------------------

    def _open(self) -> AbstractContextManager[None]:
        if not self._entered:
            raise InvalidRequest("writer", "is not entered: use it in a with statement")
        return self._storing()

    def _start(self, layer: int) -> int:
        """Return the offset of this shard's part of a layer in a page. Raises InvalidRequest for a layer of another
        stage."""
        start = self._layout.byte_range(layer)[0] + self._shard.offset
        first, last = self._shard.layers
        if not first <= layer < last:
            raise InvalidRequest("layer", f"must be in this stage's {first}..{last - 1} (got {layer})")
        return start

    def _layers_of(self, offset: int, stop: int) -> tuple[int, int]:
        """Return the first and the last layer with these bytes. Raises InvalidRequest if they are not this shard's."""
        shard, layer_bytes = self._shard, self._layout.layer_bytes
        first, last = offset // layer_bytes, max(0, stop - 1) // layer_bytes
        start = first * layer_bytes + shard.offset
        is_inside = shard.width == layer_bytes or start <= offset <= stop <= start + shard.width
        low, high = (layer * layer_bytes for layer in shard.layers)
        if not low <= offset <= stop <= high or not is_inside:
            raise InvalidRequest("offset", f"must be within this writer's part of a page (got bytes {offset}..{stop})")
        return first, last

    def _check_page(self, page: int) -> None:
        if not isinstance(page, int) or not 0 <= page < len(self._keys):
            raise InvalidRequest("page", f"must be in 0..{len(self._keys) - 1} (got {page!r})")

    def _track_layers(self) -> None:
        """From now on, keep ``_written`` up to date."""
        if self._even is not None:
            self._written = self._unwritten()
            self._written[:, : self._even] = True
            self._even = None

    def _unwritten(self) -> npt.NDArray[np.bool_]:
        """Return the first ``_written``. Layers that other shards write count as written."""
        written = np.ones((len(self.pages_new), self._layout.layers), np.bool_)
        if self._shard.writes:
            written[:, slice(*self._shard.layers)] = False
        return written

    def _place(self, page: int) -> int | None:
        """Return the index of a page among the new ones, or None if it is not new."""
        place = bisect_left(self.pages_new, page)
        return place if place < len(self.pages_new) and self.pages_new[place] == page else None

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("writer", "cannot be pickled: belongs to this process")


def _group_number(group: str | int | None, stages: int) -> int:
    """Return the group's number for the node. It depends on the number of stages, so that shards with different
    numbers of stages are never combined."""
    if group is None or group == 0 or group == "":
        return secrets.randbits(63) | 1
    if isinstance(group, str):
        number = _digest(group.encode())
    elif isinstance(group, bool) or not isinstance(group, int) or not 0 < group < 1 << 64:
        raise InvalidRequest("group", f"must be text or an integer in 1..2**64 - 1 (got {group!r})")
    else:
        number = group
    return number if stages == 1 else _digest(number.to_bytes(8, "little") + stages.to_bytes(8, "little"))


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"kvstore.group").digest()) | 1


class Ranges:
    """The set of bytes of a page that were written, in pieces of any size and order.

    It is stored as disjoint ranges ``[start, stop)`` in ascending order; adjacent ranges are merged. Example: after
    ``add(0, 4)``, ``add(8, 12)`` and ``add(4, 9)`` there is one range, 0..12.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, stop: int) -> None:
        """Add these bytes, some of which may be in the set already."""
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def covers(self, start: int, stop: int) -> bool:
        """Return whether all these bytes are in the set."""
        last = bisect_right(self._starts, start) - 1
        return last >= 0 and self._stops[last] >= stop
