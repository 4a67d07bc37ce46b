"""Reader: pages read layer by layer while another process is still writing them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import rows_to_fill
from kvstore.client.local.node import Extent, LocalNode, Mapped
from kvstore.client.local.prefetch import wish
from kvstore.client.local.proof import address_runs, equal_rows
from kvstore.client.local.stored import known_on_nvme
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, FrameState, Tier
from kvstore.tier.index import IndexDamaged

POLL_MIN_S, POLL_MAX_S = 20e-6, 1e-3
WISH_S = 0.05

_RESERVED, _SEALED = int(FrameState.RESERVED), int(FrameState.SEALED)
_8, _32, _FF = np.uint64(8), np.uint64(32), np.uint64(0xFF)
_LOW = np.uint64(0xFFFFFFFF)

Words = npt.NDArray[np.uint64]


class Span(NamedTuple):
    """Pages ``page ..`` in frames ``frame ..`` whose identity was proven under these generations, sealed or not."""

    extent: Extent
    frame: int
    page: int
    generations: Words

    @property
    def stop(self) -> int:
        """The page after the last one."""
        return self.page + len(self.generations)


class Reader:
    """Follows one prompt's pages: ``reader.read_layer(0, out)``, then layer 1, and so on, in any order.

    Life: made (nothing held) -> any number of ``read_layer`` calls -> dropped. It holds no lease: a sealed page may be
    evicted between two layers, and is then waited for like one that was not written yet. Where a writer gives up, the
    reader waits for another one, until the deadline of the call. A layer is handed out only where its page's identity
    was proven and its generation was the same before and after the copy. One thread at a time.

    Attributes:
        pages: how many pages it reads: those a prompt can match, or all of the given keys.
    """

    def __init__(
        self,
        node: LocalNode,
        layout: Layout,
        keys: Keys,
        timeout_s: float,
        name: Callable[[Mapped, bool], None] | None = None,
    ) -> None:
        if not 0 < timeout_s < 1e6:
            raise InvalidRequest("timeout_s", f"must be positive seconds, not {timeout_s!r}")
        self.pages = len(keys)
        self._node = node
        self._layout = layout
        self._keys = keys
        self._name = name  # tells the node whose pages these are
        self._timeout_s = timeout_s
        self._mapped: Mapped | None = None
        self._spans: list[Span] = []
        self._wish_s = 0.0  # when to tell the node next what we wait for

    def read_layer(self, layer: int, out: Any, heads: tuple[int, int] | None = None) -> None:
        """Copy one layer of every page into ``out`` as soon as all its writers have written it.

        Args:
            out: ``[pages, layer_bytes]``, any C-contiguous writable buffer as for ``PrefixCache.get``; or an array or
                tensor whose rows lie apart, each contiguous: ``arena[first:last, layer]`` of a page-major arena.
            heads: only these, ``[start, stop)``, as ``Layout.held_heads`` says; ``out`` has only them then.

        Raises:
            DeadlineExceeded: names the layer and the first page that did not come; pages before it are in ``out``.
            InvalidRequest: layer or heads are not in the layout; ``out`` is too small, read-only or not contiguous.
        """
        start, stop = layer_range(self._layout, layer, heads)
        target = rows_to_fill(out, stop - start, self.pages, apart=True)
        deadline = time.monotonic() + self._timeout_s
        page, pause_s = 0, POLL_MIN_S
        while page < self.pages:
            got = self._read(page, layer, start, stop, target)
            page += got
            if got:
                pause_s = POLL_MIN_S
                continue
            now = time.monotonic()
            if now >= self._wish_s:
                self._wish_s = now + WISH_S
                self._wish(page)
            if now + pause_s > deadline:
                raise DeadlineExceeded(f"layer {layer} of page {page} did not arrive within {self._timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_MAX_S)

    def _read(self, page: int, layer: int, start: int, stop: int, target: npt.NDArray[np.uint8]) -> int:
        """Copy what is ready from ``page`` on, as far as its span goes; returns the pages that were."""
        span = self._span(page)
        if span is None:
            return 0
        extent, skip = span.extent, page - span.page
        frame, generations = span.frame + skip, span.generations[skip:]
        count = _ready(extent, frame, generations, layer)
        if count:
            target[page : page + count] = extent.pages[frame : frame + count, start:stop]
            extent.last_use[frame : frame + count] = time.monotonic_ns()
            same = _same(extent, frame, generations[:count])
        else:
            same = _same(extent, frame, generations[:1])
        if same < max(count, 1):
            self._forget(page + same)
            count = min(same, count)
        return count

    def _span(self, page: int) -> Span | None:
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
            found = mapped.index.find_many(Tier.DRAM, keys[page:])
            raw = []
            for i, value in enumerate(found):
                if value is None:
                    address = mapped.index.find_pending(keys[page + i])
                    value = np.array([address], ADDRESS_DTYPE).tobytes() if address is not None else None
                if value is None:
                    break
                raw.append(value[:ADDRESS_BYTES])
        except IndexDamaged:
            return  # it will be rebuilt under another epoch
        runs = address_runs(np.frombuffer(b"".join(raw), ADDRESS_DTYPE))
        if not runs:
            return
        number, frame, _, words = runs[0]
        extent = mapped.extent(number)
        if extent is None or extent.page_bytes != self._layout.page_bytes:
            return
        generations = words >> _8
        count = _same(extent, frame, generations)
        width = len(self._keys.identity_bytes) // len(keys)
        theirs = extent.identity[frame : frame + count].tobytes()
        ours = self._keys.identity_bytes[page * width : (page + count) * width]
        if len(theirs) != len(ours):
            return  # of another page_tokens
        if theirs != ours:
            count = equal_rows(theirs, ours, width)
        count = min(count, _same(extent, frame, generations[:count]))
        if count:
            self._spans.append(Span(extent, frame, page, generations[:count]))

    def _wish(self, page: int) -> None:
        """Layers are read in DRAM: a page that is on NVMe only has to come there first."""
        if self._mapped is not None and self._span(page) is None:
            closed = self._layout.attention == "full"
            if self._name is not None and known_on_nvme(self._mapped, self._keys, page, closed):
                self._name(self._mapped, True)
            wish(self._mapped, self._keys[page:], closed)

    def _forget(self, page: int) -> None:
        self._spans = [span for span in self._spans if span.stop <= page]

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("reader", "cannot be pickled: it belongs to this process")


def layer_range(layout: Layout, layer: int, heads: tuple[int, int] | None) -> tuple[int, int]:
    """``[start, stop)`` of a layer, or of some of its heads, in a page. Raises InvalidRequest where there are none."""
    if heads is None:
        return layout.byte_range(layer)
    pair = tuple(heads) if isinstance(heads, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(head, int) for head in pair):
        raise InvalidRequest("heads", f"must be two integers, the first and the one after the last, not {heads!r}")
    return layout.byte_range(layer, *pair)


def _same(extent: Extent, frame: int, generations: Words) -> int:
    """How many leading frames still have these generations, reserved or sealed."""
    words = extent.words[frame : frame + len(generations)]
    if len(words) < len(generations):
        return 0
    state = words & _FF
    same = (words >> _8 == generations) & ((state == _SEALED) | (state == _RESERVED))
    return len(same) if same.all() else int(same.argmin())


def _ready(extent: Extent, frame: int, generations: Words, layer: int) -> int:
    """How many leading frames have this layer written by every shard."""
    stop = frame + len(generations)
    words = extent.words[frame:stop].copy()
    if (words == (generations << _8 | np.uint64(_SEALED))).all():
        return len(generations)
    shards = (extent.info[frame:stop] >> _32) & _FF
    progress = extent.progress[frame:stop]
    mine = (progress >> _32 == (generations & _LOW)[:, None]) & (progress & _LOW > layer)
    mine |= np.arange(progress.shape[1]) >= shards[:, None]
    ready = (words & _FF == _SEALED) | ((words & _FF == _RESERVED) & mine.all(axis=1))
    return len(ready) if ready.all() else int(ready.argmin())
