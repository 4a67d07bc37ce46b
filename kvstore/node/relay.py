"""Relay: copies pages one by one to and from tiers that the mover does not serve.

The relay needs only a ``TierStore``. It reads a page, verifies it with its header, and writes it with a new header for
its new address. The state decides what to copy, as for the mover (``tier_mover``).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvstore import boundary
from kvstore.errors import InternalError
from kvstore.model.replica import LEAN_IDENTITY_BYTES, Address, FrameClass
from kvstore.node.node import Node
from kvstore.node.nvme_pages import DATA, IO, MOVED, CopyResult, identity_row
from kvstore.shm.records import ExtentTable
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.interfaces import Rows
from kvstore.tier.base import TierStore
from kvstore.tier.nvme import frame_header
from kvstore.tier.nvme.disk import aligned_buffer
from kvstore.tier.nvme.frame_header import FrameHeader

BATCH_BYTES = 8 << 20  # bytes per decision

_COPYING = boundary.RequestGuard("task/relay copy")


class Relay:
    """The relay of one node. One thread calls ``step`` repeatedly."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def step(self) -> bool:
        """Let the state decide, and perform all decided copies; return False if there were none."""
        relays = self._node.waiting.relays
        for tier in self._node.relayed:
            self._node.demote(BATCH_BYTES, tier)
        busy = bool(relays)
        while relays:
            copy = relays.popleft()
            if isinstance(copy, do.Erase):
                self._erase(copy)
            else:
                self._copy(copy)
        return busy

    def _copy(self, copy: do.Save | do.Load | do.Carry) -> None:
        contents, now_ns = self._node.contents, time.monotonic_ns
        first = copy.pages[0]
        source, target = contents.store_of(first.source.extent), contents.store_of(first.target.extent)
        try:
            with _COPYING:
                result = relay(copy.pages, contents.extents, source, target)
        except InternalError:  # counts as a failed copy: the pages stay in their source
            result = CopyResult.empty(contents.extents[first.target.extent].frame_class, len(copy.pages))
            result.failed = dict.fromkeys(range(len(copy.pages)), IO)
        if isinstance(copy, do.Save):
            heads = result.rows[:, :LEAN_IDENTITY_BYTES].copy()
            self._node.handle(ev.Saved(now_ns(), copy.number, heads, result.failed))
        elif isinstance(copy, do.Load):
            self._node.handle(ev.Loaded(now_ns(), copy.number, result.rows, result.checksums, result.failed))
        else:
            self._node.handle(ev.Carried(now_ns(), copy.number, result.failed))
        target.close_for_writing(result.open_positions)
        for position in result.broken:
            self._node.handle(ev.TierFailed(now_ns(), target.tier, [position]))
        for address, reason in result.damaged:
            self._node.drop_damaged(address, reason)

    def _erase(self, erasure: do.Erase) -> None:
        """Overwrite these frames with zeros, so that no later start finds their pages."""
        contents = self._node.contents
        failed: set[int] = set()
        for place, (_, address) in enumerate(erasure.pages):
            table, store = contents.extents[address.extent], contents.store_of(address.extent)
            frame_class = table.frame_class
            header, page = _buffers(store, frame_class)
            try:
                store.open_for_writing([table.position])
                store.write_page(table.position, address.frame, frame_class, header, page)
                store.sync()
                store.close_for_writing([table.position])
            except OSError:
                failed.add(place)
        self._node.handle(ev.Erased(time.monotonic_ns(), erasure.number, failed))


def relay(
    pages: list[do.Copying], tables: Mapping[int, ExtentTable], source: TierStore, target: TierStore
) -> CopyResult:
    """Copy these pages of one class from tier to tier. Pages that changed or are damaged are in ``failed``.

    Their extents stay open for writing. The caller stores the records and then closes them.
    """
    frame_class = tables[pages[0].source.extent].frame_class
    result = CopyResult.empty(frame_class, len(pages))
    positions = {tables[page.target.extent].position for page in pages}
    try:
        target.open_for_writing(positions)
        result.open_positions = positions
        for i, page in enumerate(pages):
            _relay_page(i, page, tables, source, target, result)
        target.sync()
    except OSError as error:  # all pages count as failed
        result.failed |= dict.fromkeys(range(len(pages)), IO)
        result.broken = dict.fromkeys(positions, error)
    return result


def _relay_page(
    i: int,
    page: do.Copying,
    tables: Mapping[int, ExtentTable],
    source: TierStore,
    target: TierStore,
    result: CopyResult,
) -> None:
    source_table, target_table = tables[page.source.extent], tables[page.target.extent]
    frame_class = target_table.frame_class
    source_header, payload = _buffers(source, frame_class)
    try:
        source.read_page(source_table.position, page.source.frame, frame_class, source_header, payload)
    except OSError:
        result.failed[i] = IO
        return
    incarnation = source.header_incarnation(source_table.position)
    header = frame_header.unpack(source_header, frame_class, incarnation, page.source.extent, page.source.frame)
    word = page.source.generation << 8 | page.state
    if int(source_table.words[page.source.frame]) != word:  # read after the copy
        result.failed[i] = MOVED
        return
    if not isinstance(header, FrameHeader) or not _is_page(header, page.source, page.key, payload, frame_class):
        result.failed[i] = DATA
        result.damaged.append((page.source, DATA))
        return
    target_header = aligned_buffer(target.header_bytes(frame_class))
    identity = identity_row(header)
    if len(target_header):
        place = frame_class, target.header_incarnation(target_table.position), page.target
        sums = header.checksums, header.payload_sum
        frame_header.pack(target_header, *place, identity, header.parent, header.info, *sums)
    target.write_page(target_table.position, page.target.frame, frame_class, target_header, payload)
    result.rows[i], result.checksums[i] = identity, header.checksums


def _is_page(header: FrameHeader, address: Address, key: bytes, payload: Rows, frame_class: FrameClass) -> bool:
    """Return True if this is the page with that key and address, with a valid payload."""
    is_expected = header.address == address and header.key == key
    return is_expected and frame_header.is_payload_sound(payload, frame_class, header.payload_sum)


def _buffers(store: TierStore, frame_class: FrameClass) -> tuple[Rows, Rows]:
    return aligned_buffer(store.header_bytes(frame_class)), aligned_buffer(frame_class.frame_bytes)
