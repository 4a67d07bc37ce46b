"""Relay: copies pages to and from tiers that the mover does not serve, one by one.

It needs only a ``TierStore``: a page that is read is proven by its header, and written with a new header for its new
address. The state decides what to copy, as for the mover; see ``tier_mover``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvstore import boundary
from kvstore.errors import InternalError
from kvstore.model.replica import IDENTITY_HEAD_BYTES, Address, FrameClass
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

BATCH_BYTES = 8 << 20  # of one decision

_COPYING = boundary.RequestGuard("task/relay copy")


class Relay:
    """Lives as long as its node. One thread calls ``step`` repeatedly."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def step(self) -> bool:
        """Perform the decided copies, and ask for more; return False if there was nothing to do."""
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
                done = relay(copy.pages, contents.extents, source, target)
        except InternalError:  # no result is reported: the pages stay where they are
            done = CopyResult.empty(contents.extents[first.target.extent].frame_class, len(copy.pages))
            done.failed = dict.fromkeys(range(len(copy.pages)), IO)
        if isinstance(copy, do.Save):
            heads = done.rows[:, :IDENTITY_HEAD_BYTES].copy()
            self._node.handle(ev.Saved(now_ns(), copy.number, heads, done.failed))
        elif isinstance(copy, do.Load):
            self._node.handle(ev.Loaded(now_ns(), copy.number, done.rows, done.checksums, done.failed))
        else:
            self._node.handle(ev.Carried(now_ns(), copy.number, done.failed))
        target.close_for_writing(done.open_positions)
        for position in done.broken:
            self._node.handle(ev.TierFailed(now_ns(), target.tier, [position]))
        for address, reason in done.damaged:
            self._node.drop_damaged(address, reason)

    def _erase(self, erasing: do.Erase) -> None:
        """Write zeros over these frames, so that their contents are not taken for a page."""
        contents = self._node.contents
        failed: set[int] = set()
        for place, (_, address) in enumerate(erasing.pages):
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
        self._node.handle(ev.Erased(time.monotonic_ns(), erasing.number, failed))


def relay(
    pages: list[do.Copying], tables: Mapping[int, ExtentTable], source: TierStore, target: TierStore
) -> CopyResult:
    """Copy these pages, of one class, from tier to tier. Pages that changed or are damaged are in ``failed``.

    Their extents stay open for writing until the caller closes them: when the records say what is there.
    """
    frame_class = tables[pages[0].source.extent].frame_class
    done = CopyResult.empty(frame_class, len(pages))
    where = {tables[page.target.extent].position for page in pages}
    try:
        target.open_for_writing(where)
        done.open_positions = where
        for i, page in enumerate(pages):
            _relay_one(i, page, tables, source, target, done)
        target.sync()
    except OSError as error:  # no result is reported
        done.failed |= dict.fromkeys(range(len(pages)), IO)
        done.broken = dict.fromkeys(where, error)
    return done


def _relay_one(
    i: int, page: do.Copying, tables: Mapping[int, ExtentTable], source: TierStore, target: TierStore, done: CopyResult
) -> None:
    here, there = tables[page.source.extent], tables[page.target.extent]
    frame_class = there.frame_class
    header, payload = _buffers(source, frame_class)
    try:
        source.read_page(here.position, page.source.frame, frame_class, header, payload)
    except OSError:
        done.failed[i] = IO
        return
    incarnation = source.header_incarnation(here.position)
    found = frame_header.unpack(header, frame_class, incarnation, page.source.extent, page.source.frame)
    if int(here.words[page.source.frame]) != page.source.generation << 8 | page.state:  # checked after the copy
        done.failed[i] = MOVED
        return
    if not isinstance(found, FrameHeader) or not _is_page(found, page.source, page.key, payload, frame_class):
        done.failed[i] = DATA
        done.damaged.append((page.source, DATA))
        return
    written = aligned_buffer(target.header_bytes(frame_class))
    identity = identity_row(found)
    if len(written):
        place = frame_class, target.header_incarnation(there.position), page.target
        frame_header.pack(written, *place, identity, found.parent, found.info, found.checksums, found.payload_sum)
    target.write_page(there.position, page.target.frame, frame_class, written, payload)
    done.rows[i], done.checksums[i] = identity, found.checksums


def _is_page(found: FrameHeader, address: Address, key: bytes, payload: Rows, frame_class: FrameClass) -> bool:
    same = found.address == address and found.key == key
    return same and frame_header.is_payload_sound(payload, frame_class, found.payload_sum)


def _buffers(store: TierStore, frame_class: FrameClass) -> tuple[Rows, Rows]:
    return aligned_buffer(store.header_bytes(frame_class)), aligned_buffer(frame_class.frame_bytes)
