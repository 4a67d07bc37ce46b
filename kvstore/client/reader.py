"""Readers of pages, layer by layer, while other processes are still writing them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Final, NoReturn

from kvstore.client.buffers import DeviceRows, Rows, check_seconds, device_rows_to_fill, on_device, rows_to_fill
from kvstore.client.device_link import link_of
from kvstore.device.host_memory import empty
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys


class Reader(ABC):
    """A reader of one prompt's pages: ``reader.read_layer(0, out)``, layer 1, and so on, in any order.

    A reader holds no lease. If a sealed page is evicted between two layers, the reader waits for it as for an unwritten
    one. If a writer gives up, the reader waits for another writer, until the deadline of the call. A layer is returned
    only if its page is proven to be the requested one. One thread may use a reader at a time.

    Attributes:
        pages: the number of pages to read: those that a prompt can match, or all of the keys.
    """

    PAUSES_S: tuple[float, float] = (1e-3, 0.05)
    """Pause between two checks for missing pages: the first, and the longest."""

    def __init__(self, layout: Layout, keys: Keys, timeout_s: float) -> None:
        self.pages: Final = len(keys)
        self._layout = layout
        self._keys = keys
        self._timeout_s = check_seconds(timeout_s, "timeout_s")

    def read_layer(self, layer: int, out: Any, heads: tuple[int, int] | None = None) -> None:
        """Copy one layer of every page into ``out`` as soon as all its writers have written it.

        Args:
            out: ``[pages, layer_bytes]``, any C-contiguous writable buffer as for ``PrefixCache.get``; or a strided
                array or tensor with contiguous rows, such as ``arena[first:last, layer]`` of a page-major arena. Device
                memory is written after the work queued in its stream; the data is there when this returns.
            heads: copy only the heads ``[start, stop)``, as from ``Layout.held_heads``; ``out`` then has only these.

        Raises:
            DeadlineExceeded: a page did not arrive; the message names the layer and the first such page. Earlier pages
                are in ``out`` (in device memory, they may be). Or the device did not copy in time, and may still write.
            DeviceLost: the device of ``out`` has failed.
            InvalidRequest: layer or heads are not in the layout; ``out`` is too small, read-only or not contiguous.
        """
        start, stop = _layer_range(self._layout, layer, heads)
        if on_device(out):
            rows = device_rows_to_fill(out, stop - start, self.pages, apart=True)
            self._follow_to_device(layer, start, stop, rows)
        else:
            self._follow(layer, start, stop, rows_to_fill(out, stop - start, self.pages, apart=True))

    def _follow_to_device(self, layer: int, start: int, stop: int, rows: DeviceRows) -> None:
        """Read the pages into host memory, then copy them to the device."""
        host: Rows = empty((self.pages, stop - start))
        self._follow(layer, start, stop, host)
        link_of(rows.device).upload(host, rows[: self.pages])

    def _follow(self, layer: int, start: int, stop: int, target: Any) -> None:
        """Read page after page as they arrive."""
        deadline = time.monotonic() + self._timeout_s
        page, (pause_s, pause_max_s) = 0, self.PAUSES_S
        while page < self.pages:
            copied = self._read(page, layer, start, stop, target)
            page += copied
            if copied:
                pause_s = self.PAUSES_S[0]
                continue
            self._waits_for(page)
            if time.monotonic() + pause_s > deadline:
                raise DeadlineExceeded(f"layer {layer} of page {page} did not arrive within {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, pause_max_s)

    @abstractmethod
    def _read(self, page: int, layer: int, start: int, stop: int, target: Any) -> int:
        """Copy bytes ``start`` to ``stop`` of each page into its row of ``target``, starting at ``page``, as far as
        pages are ready. Return the number of pages copied, without waiting."""

    def _waits_for(self, page: int) -> None:
        """Note that the reader waits for this page. Subclasses may ask for it."""
        return

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("reader", "cannot be pickled: belongs to this process")


def _layer_range(layout: Layout, layer: int, heads: tuple[int, int] | None) -> tuple[int, int]:
    """Return ``[start, stop)`` of a layer, or of some of its heads, in a page. Raises InvalidRequest if they do not
    exist."""
    if heads is None:
        return layout.byte_range(layer)
    pair = tuple(heads) if isinstance(heads, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(head, int) for head in pair):
        raise InvalidRequest(
            "heads", f"must be two integers, the first head and the one after the last (got {heads!r})"
        )
    return layout.byte_range(layer, *pair)
