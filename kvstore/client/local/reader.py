"""``LocalReader`` reads layers of pages in this machine's memory, sealed or still being written."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import DeviceRows, Rows
from kvstore.client.device_link import link_of
from kvstore.client.local.frame_copies import to_device
from kvstore.client.local.hints import hint_drain, hint_promote
from kvstore.client.local.index_lookup import locate, pages_below
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.client.local.verify_hit import Run, address_runs, equal_rows
from kvstore.client.reader import Reader
from kvstore.device.host_memory import copy, empty
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, FrameClass, FrameState
from kvstore.shm.index import IndexDamaged

PROMOTE_HINT_S = 0.05  # pause between two hints for the same waiting reader

_RESERVED, _SEALED = int(FrameState.RESERVED), int(FrameState.SEALED)
_8, _32, _FF = np.uint64(8), np.uint64(32), np.uint64(0xFF)

Words = npt.NDArray[np.uint64]


class LayerRun(NamedTuple):
    """Pages starting at ``page`` in consecutive frames starting at ``frame``, sealed or not, proven under these
    generations."""

    extent: MappedExtent
    frame: int
    page: int
    generations: Words

    @property
    def stop(self) -> int:
        """The number of the page after the last one."""
        return self.page + len(self.generations)


class LocalReader(Reader):
    """A reader that copies layers out of DRAM, or out of the memory of this machine's engines.

    The index also lists pages that are still being written. A copy is valid if the page's generation is the same before
    and after it.
    """

    PAUSES_S = (20e-6, 1e-3)

    def __init__(
        self, node: LocalNode, layout: Layout, keys: Keys, timeout_s: float, name: Callable[[MappedNode, bool], None]
    ) -> None:
        super().__init__(layout, keys, timeout_s)
        self._node = node
        self._name = name  # sends the node the tenant of these pages
        self._class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
        self._mapped: MappedNode | None = None
        self._runs: list[LayerRun] = []
        self._next_hint_s = 0.0
        self._log_positions = b""  # positions of the log when it was last searched, see `hint_drain`

    def _follow_to_device(self, layer: int, start: int, stop: int, rows: DeviceRows) -> None:
        self._follow(layer, start, stop, rows)

    def _read(self, page: int, layer: int, start: int, stop: int, target: Rows | DeviceRows) -> int:
        """Read pages starting at ``page``, to the end of their run in DRAM. If DRAM does not have the page, read as
        many pages as engines have. Return the number of pages."""
        run = self._run_of(page)
        if run is None:
            return self._from_engines(page, layer, slice(start, stop), target)
        extent, skip = run.extent, page - run.page
        frame, generations = run.frame + skip, run.generations[skip:]
        count = _ready(extent, frame, generations, layer)
        if count:
            if isinstance(target, DeviceRows):
                self._to_device(Run(extent, frame, page, count, b""), slice(start, stop), target)
            else:
                copy(target[page : page + count], extent.pages[frame : frame + count, start:stop])
            extent.last_use[frame : frame + count] = time.monotonic_ns()
            unchanged = _unchanged(extent, frame, generations[:count])
        else:
            unchanged = _unchanged(extent, frame, generations[:1])
        if unchanged < max(count, 1):
            self._forget(page + unchanged)
            count = min(unchanged, count)
        return count

    def _from_engines(self, page: int, layer: int, part: slice, target: Rows | DeviceRows) -> int:
        """Read pages from memory that engines on this machine have mounted. Return the number of pages.

        ``part`` is the range of bytes in a page to read, inside the layer. The reads of mounted memory return whole
        layers, so a smaller part is copied out of a whole layer.
        """
        mapped, (begin, end) = self._mapped, self._layout.byte_range(layer)
        if mapped is None or not mapped.hbm.readable():
            return 0
        keys = self._keys[page:]
        located = locate(mapped, mapped.hbm, keys, self._layout.attention == "full")
        if not located:
            return 0
        self._name(mapped, True)
        is_whole = (part.start, part.stop) == (begin, end)
        if is_whole and isinstance(target, DeviceRows):
            device_rows = target[page : page + len(located)]
            count, _ = mapped.hbm.start_direct(located, keys, self._class, device_rows, layer).result()
            if count:
                return count
        is_in_place = is_whole and not isinstance(target, DeviceRows)
        rows: Any = target[page : page + len(located)] if is_in_place else empty((len(located), end - begin))
        count, _ = mapped.hbm.start_layer(located, keys, self._class, layer, rows).result(mapped.timeout_s)
        parts = rows[:count, part.start - begin : part.stop - begin]
        if isinstance(target, DeviceRows):
            link_of(target.device).upload(parts, target[page : page + count])
        elif not is_in_place:
            copy(target[page : page + count], parts)
        return count

    def _to_device(self, run: Run, part: slice, target: DeviceRows) -> None:
        """Copy a run to a device. Sealed pages are leased during the copy. Pages that are still being written cannot be
        leased, but they cannot be evicted either."""
        assert self._mapped is not None
        words = run.extent.words[run.frame : run.frame + run.length].tobytes()
        is_sealed = words[::8] == bytes([_SEALED]) * run.length
        to_device(self._mapped, [run._replace(words=words)], target, time.monotonic_ns(), part, leased=is_sealed)

    def _run_of(self, page: int) -> LayerRun | None:
        """Return the proven run that contains ``page``. If there is none, look the page up."""
        mapped = self._node.mapped()
        if mapped is not self._mapped:
            if mapped is None or self._mapped is None or mapped.incarnation != self._mapped.incarnation:
                self._runs = []
            self._mapped = mapped
            self._keys = mapped.in_pool(self._keys) if mapped is not None else self._keys
        for run in self._runs:
            if run.page <= page < run.stop:
                return run
        if mapped is not None:
            self._add_run(mapped, page)
        return self._runs[-1] if self._runs and self._runs[-1].page == page else None

    def _add_run(self, mapped: MappedNode, page: int) -> None:
        """Look up and prove the run of frames that begins with ``page``."""
        keys = self._keys.hashes
        try:
            entries = mapped.index.find_many(mapped.dram.tier, keys[page:])
            raw = []
            for i, entry in enumerate(entries):
                if entry is None:
                    address = mapped.index.find_pending(keys[page + i])
                    entry = np.array([address], ADDRESS_DTYPE).tobytes() if address is not None else None
                if entry is None:
                    break
                raw.append(entry[:ADDRESS_BYTES])
        except IndexDamaged:
            return  # the daemon rebuilds the index under another epoch
        address_run = address_runs(np.frombuffer(b"".join(raw), ADDRESS_DTYPE))
        if not address_run:
            self._log_positions = hint_drain(mapped, keys[page], self._log_positions)
            return
        number, frame, _, words = address_run[0]
        extent = mapped.dram.extent(number)
        if extent is None or extent.page_bytes != self._layout.page_bytes:
            return
        generations = words >> _8
        count = _unchanged(extent, frame, generations)
        width = len(self._keys.identity_bytes) // len(keys)
        stored = extent.identity[frame : frame + count].tobytes()
        requested = self._keys.identity_bytes[page * width : (page + count) * width]
        if len(stored) != len(requested):
            return  # a page with another number of tokens
        if stored != requested:
            count = equal_rows(stored, requested, width)
        count = min(count, _unchanged(extent, frame, generations[:count]))
        if count:
            self._runs.append(LayerRun(extent, frame, page, generations[:count]))

    def _waits_for(self, page: int) -> None:
        """Send the hint to promote a page that only a lower tier has, because layers are read only from DRAM and
        mounted memory."""
        now_s = time.monotonic()
        if now_s < self._next_hint_s:
            return
        self._next_hint_s = now_s + PROMOTE_HINT_S
        if self._mapped is not None and self._run_of(page) is None:
            closed = self._layout.attention == "full"
            if pages_below(self._mapped, self._keys, page, closed):
                self._name(self._mapped, True)
            hint_promote(self._mapped, self._keys[page:], closed)

    def _forget(self, page: int) -> None:
        """Forget the runs that contain ``page`` or later pages."""
        self._runs = [run for run in self._runs if run.stop <= page]


def _unchanged(extent: MappedExtent, frame: int, generations: Words) -> int:
    """Return how many leading frames still have these generations, reserved or sealed."""
    words = extent.words[frame : frame + len(generations)]
    if len(words) < len(generations):
        return 0
    state = words & _FF
    unchanged = (words >> _8 == generations) & ((state == _SEALED) | (state == _RESERVED))
    return len(unchanged) if unchanged.all() else int(unchanged.argmin())


def _ready(extent: MappedExtent, frame: int, generations: Words, layer: int) -> int:
    """Return how many leading frames contain this layer of all shards."""
    stop = frame + len(generations)
    words = extent.words[frame:stop].copy()
    if (words == (generations << _8 | np.uint64(_SEALED))).all():
        return len(generations)
    shards = (extent.info[frame:stop] >> _32) & _FF
    written = extent.uses.leading(slice(frame, stop), generations) > layer  # [frames, shards]
    written |= np.arange(written.shape[1]) >= shards[:, None]
    ready = (words & _FF == _SEALED) | ((words & _FF == _RESERVED) & written.all(axis=1))
    return len(ready) if ready.all() else int(ready.argmin())
