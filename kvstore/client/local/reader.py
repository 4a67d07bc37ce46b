"""LocalReader: reads layers of this machine's memory, sealed or still being written."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import DeviceRows, Rows
from kvstore.client.device_link import link_of
from kvstore.client.local.frame_copies import to_device
from kvstore.client.local.hints import wish, wish_shown
from kvstore.client.local.index_lookup import known_below, locate
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.client.local.verify_hit import Run, address_runs, equal_rows
from kvstore.client.reader import Reader
from kvstore.device.host_memory import copy, empty
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, FrameClass, FrameState
from kvstore.shm.index import IndexDamaged

WISH_S = 0.05

_RESERVED, _SEALED = int(FrameState.RESERVED), int(FrameState.SEALED)
_8, _32, _FF = np.uint64(8), np.uint64(32), np.uint64(0xFF)

Words = npt.NDArray[np.uint64]


class LayerRun(NamedTuple):
    """Pages ``page ..`` in frames ``frame ..`` whose identity was proven under these generations, sealed or not."""

    extent: MappedExtent
    frame: int
    page: int
    generations: Words

    @property
    def stop(self) -> int:
        """The page after the last one."""
        return self.page + len(self.generations)


class LocalReader(Reader):
    """A reader that finds pages in the index, including those that are being written. The generation of a page must be
    the same before and after the copy.
    """

    PAUSES_S = (20e-6, 1e-3)

    def __init__(
        self, node: LocalNode, layout: Layout, keys: Keys, timeout_s: float, name: Callable[[Mapped, bool], None]
    ) -> None:
        super().__init__(layout, keys, timeout_s)
        self._node = node
        self._name = name  # tells the node whose pages these are
        self._class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
        self._mapped: Mapped | None = None
        self._spans: list[LayerRun] = []
        self._wish_s = 0.0  # when to tell the node next which page this reader waits for
        self._looked = b""  # up to where the log was searched for it

    def _follow_to_device(self, layer: int, start: int, stop: int, rows: DeviceRows) -> None:
        self._follow(layer, start, stop, rows)

    def _read(self, page: int, layer: int, start: int, stop: int, target: Rows | DeviceRows) -> int:
        """Read to the end of the span that contains ``page``; if DRAM does not have it, as far as engines have
        pages."""
        span = self._span(page)
        if span is None:
            return self._from_engines(page, layer, slice(start, stop), target)
        extent, skip = span.extent, page - span.page
        frame, generations = span.frame + skip, span.generations[skip:]
        count = _ready(extent, frame, generations, layer)
        if count:
            if isinstance(target, DeviceRows):
                self._to_device(Run(extent, frame, page, count, b""), slice(start, stop), target)
            else:
                copy(target[page : page + count], extent.pages[frame : frame + count, start:stop])
            extent.last_use[frame : frame + count] = time.monotonic_ns()
            same = _same(extent, frame, generations[:count])
        else:
            same = _same(extent, frame, generations[:1])
        if same < max(count, 1):
            self._forget(page + same)
            count = min(same, count)
        return count

    def _from_engines(self, page: int, layer: int, part: slice, target: Rows | DeviceRows) -> int:
        """Read pages directly from memory that engines of this machine have mounted."""
        mapped, (begin, end) = self._mapped, self._layout.byte_range(layer)
        if mapped is None or not mapped.hbm.readable():
            return 0
        keys = self._keys[page:]
        located = locate(mapped, mapped.hbm, keys, self._layout.attention == "full")
        if not located:
            return 0
        self._name(mapped, True)
        whole = (part.start, part.stop) == (begin, end)
        if whole and isinstance(target, DeviceRows):
            there = target[page : page + len(located)]
            count, _ = mapped.hbm.start_direct(located, keys, self._class, there, layer).result()
            if count:
                return count
        wanted = whole and not isinstance(target, DeviceRows)
        rows: Any = target[page : page + len(located)] if wanted else empty((len(located), end - begin))
        count, _ = mapped.hbm.start_layer(located, keys, self._class, layer, rows).result(mapped.timeout_s)
        found = rows[:count, part.start - begin : part.stop - begin]
        if isinstance(target, DeviceRows):
            link_of(target.device).upload(found, target[page : page + count])
        elif not wanted:
            copy(target[page : page + count], found)
        return count

    def _to_device(self, run: Run, part: slice, target: DeviceRows) -> None:
        """Copy a run to a device. Sealed pages are leased during the copy; pages that are being written cannot be
        evicted."""
        assert self._mapped is not None
        words = run.extent.words[run.frame : run.frame + run.length].tobytes()
        sealed = words[::8] == bytes([_SEALED]) * run.length
        to_device(self._mapped, [run._replace(words=words)], target, time.monotonic_ns(), part, leased=sealed)

    def _span(self, page: int) -> LayerRun | None:
        mapped = self._node.mapped()
        if mapped is not self._mapped:
            if mapped is None or self._mapped is None or mapped.incarnation != self._mapped.incarnation:
                self._spans = []
            self._mapped = mapped
            self._keys = mapped.in_pool(self._keys) if mapped is not None else self._keys
        for span in self._spans:
            if span.page <= page < span.stop:
                return span
        if mapped is not None:
            self._locate(mapped, page)
        return self._spans[-1] if self._spans and self._spans[-1].page == page else None

    def _locate(self, mapped: Mapped, page: int) -> None:
        """Find and prove the run of frames that starts with ``page``."""
        keys = self._keys.hashes
        try:
            found = mapped.index.find_many(mapped.dram.tier, keys[page:])
            raw = []
            for i, value in enumerate(found):
                if value is None:
                    address = mapped.index.find_pending(keys[page + i])
                    value = np.array([address], ADDRESS_DTYPE).tobytes() if address is not None else None
                if value is None:
                    break
                raw.append(value[:ADDRESS_BYTES])
        except IndexDamaged:
            return  # the index will be rebuilt under another epoch
        runs = address_runs(np.frombuffer(b"".join(raw), ADDRESS_DTYPE))
        if not runs:
            self._looked = wish_shown(mapped, keys[page], self._looked)
            return
        number, frame, _, words = runs[0]
        extent = mapped.dram.extent(number)
        if extent is None or extent.page_bytes != self._layout.page_bytes:
            return
        generations = words >> _8
        count = _same(extent, frame, generations)
        width = len(self._keys.identity_bytes) // len(keys)
        theirs = extent.identity[frame : frame + count].tobytes()
        ours = self._keys.identity_bytes[page * width : (page + count) * width]
        if len(theirs) != len(ours):
            return  # it has another page_tokens
        if theirs != ours:
            count = equal_rows(theirs, ours, width)
        count = min(count, _same(extent, frame, generations[:count]))
        if count:
            self._spans.append(LayerRun(extent, frame, page, generations[:count]))

    def _waits_for(self, page: int) -> None:
        """Ask the node to bring a page to DRAM if only a lower tier has it: layers are read from memory only."""
        now_s = time.monotonic()
        if now_s < self._wish_s:
            return
        self._wish_s = now_s + WISH_S
        if self._mapped is not None and self._span(page) is None:
            closed = self._layout.attention == "full"
            if known_below(self._mapped, self._keys, page, closed):
                self._name(self._mapped, True)
            wish(self._mapped, self._keys[page:], closed)

    def _forget(self, page: int) -> None:
        self._spans = [span for span in self._spans if span.stop <= page]


def _same(extent: MappedExtent, frame: int, generations: Words) -> int:
    """Return how many leading frames still have these generations, reserved or sealed."""
    words = extent.words[frame : frame + len(generations)]
    if len(words) < len(generations):
        return 0
    state = words & _FF
    same = (words >> _8 == generations) & ((state == _SEALED) | (state == _RESERVED))
    return len(same) if same.all() else int(same.argmin())


def _ready(extent: MappedExtent, frame: int, generations: Words, layer: int) -> int:
    """Return in how many leading frames every shard has written this layer."""
    stop = frame + len(generations)
    words = extent.words[frame:stop].copy()
    if (words == (generations << _8 | np.uint64(_SEALED))).all():
        return len(generations)
    shards = (extent.info[frame:stop] >> _32) & _FF
    mine = extent.uses.leading(slice(frame, stop), generations) > layer
    mine |= np.arange(mine.shape[1]) >= shards[:, None]
    ready = (words & _FF == _SEALED) | ((words & _FF == _RESERVED) & mine.all(axis=1))
    return len(ready) if ready.all() else int(ready.argmin())
