"""Parts of the object verbs: heads as they are found, pieces and heads as they are put."""

from __future__ import annotations

import secrets
import time
from typing import NamedTuple

import numpy as np

from kvstore import failpoint
from kvstore.client.buffers import Rows
from kvstore.client.device_rows import DeviceRows
from kvstore.client.local.frame_copies import frames_of
from kvstore.client.local.mapped_extent import MappedExtent
from kvstore.client.local.node import Mapped
from kvstore.client.local.put import LocalPut, SealBatch
from kvstore.client.scattered import Scattered
from kvstore.errors import QuotaExceeded
from kvstore.model.objects import NONCE_BYTES, About, class_for, key_hash, pieces_of, read_row
from kvstore.model.prefix import Keys
from kvstore.model.replica import KEY, Address, FrameClass, Status
from kvstore.rpc.control import OBJECT, Op, pack_addresses
from kvstore.tier.index import IndexDamaged


class Found(NamedTuple):
    """An object's head, proven. ``extent`` None: it is not in memory."""

    about: About
    frame_class: FrameClass
    address: bytes
    extent: MappedExtent | None
    frame: int
    word: int

    def copy_to(self, into: Scattered, start: int) -> bool:
        """Copy what the head holds of the value, from DRAM; False where it changed meanwhile."""
        assert self.extent is not None
        into.write(start, self.extent.pages[self.frame, : self.about.value_bytes - start])
        self.extent.last_use[self.frame] = time.monotonic_ns()
        return int(self.extent.words[self.frame]) == self.word


def find_head(mapped: Mapped, root: bytes, name: bytes) -> Found | None:
    """The head of the object of that name, wherever it is; None where there is none, or another string's."""
    key = key_hash(root, name)
    try:
        for reader in mapped.tiers:
            raw = mapped.index.find_many(reader.tier, [key])[0]
            head = reader.object_head(raw) if raw is not None else None
            if raw is not None and head is not None:
                about = read_row(head.row)
                if about is None or about[0] != root or about[1].name != name or head.row[KEY] != key:
                    return None
                return Found(about[1], head.frame_class, raw, head.extent, head.frame, head.word)
    except IndexDamaged:
        pass  # the daemon will rebuild it under a new epoch
    return None


def planned(mapped: Mapped, name: bytes, value_bytes: int) -> tuple[FrameClass, About]:
    """An object that is to be put, in pages of which class."""
    frame_class = class_for(name, value_bytes, int(mapped.header.extent_bytes))
    pieces = pieces_of(value_bytes, frame_class.page_bytes)
    return frame_class, About(name, value_bytes, pieces, secrets.token_bytes(NONCE_BYTES))


def copy_from(source: Scattered, start: int, mapped: Mapped, addresses: list[Address]) -> None:
    """Copy a value, from ``start`` on, into these frames. Raises NodeUnavailable where they are gone."""
    for extent, frame, i, j in frames_of(mapped, addresses):
        for place in range(i, j):
            source.read(start + place * extent.page_bytes, extent.pages[frame + place - i])
        extent.last_use[frame : frame + j - i] = time.monotonic_ns()


class _FromSource(LocalPut):
    """Pages whose bytes come from a value in several buffers; see ``LocalPut``."""

    _source: Scattered
    _start = 0

    def settled(self) -> int:
        """``result``, but that it is 0 where the tenant may have no more; see ``refused``."""
        try:
            return self.result()
        except QuotaExceeded:
            return 0

    @property
    def refused(self) -> bool:
        """Its tenant may have no more."""
        return self._refused

    def _copy(self, rows: Rows | DeviceRows, page: int, addresses: list[Address]) -> None:
        copy_from(self._source, self._start + page * self._pool.frame_class.page_bytes, self._mapped, addresses)


class PiecesPut(_FromSource):
    """The pieces of an object, on their way in."""

    pieces = 0

    def send_from(self, source: Scattered, pieces: int) -> None:
        """Copy them and send their seals."""
        self._source, self.pieces = source, pieces
        self.send(np.empty((pieces, 0), np.uint8), 0)

    def last_address(self) -> bytes | None:
        """Where the last piece that is stored is."""
        try:
            found = [
                raw
                for raw in self._mapped.index.find_many(self._mapped.dram.tier, self._keys.hashes)
                if raw is not None
            ]
        except IndexDamaged:
            return None
        return found[-1] if found else None


class HeadPut(_FromSource):
    """The head of an object, on its way in. ``busy``, ``present``: why it is not stored, after ``result``."""

    def __init__(self, mapped: Mapped, keys: Keys, frame_class: FrameClass, replaces: bytes) -> None:
        super().__init__(mapped, keys, frame_class)
        self._replaces = replaces
        self.busy = self.present = False

    def send_from(self, source: Scattered, start: int) -> None:
        """Copy it and send its seal."""
        self._source, self._start = source, start
        self.send(np.empty((1, 0), np.uint8), 0)

    def _seal(self, rows: Rows | DeviceRows | None, page: int, addresses: list[Address]) -> None:
        body = (self._keys.parent, pack_addresses(addresses), self._keys.identity_bytes, self._replaces)
        batch = SealBatch(page, addresses, body)
        self._batches.append(batch)
        self._request(batch)

    def _request(self, batch: SealBatch) -> None:
        number = self._pool.class_number
        batch.reply = self._mapped.channel.request(Op.SEAL_GRANTED, count=1, a=number, flags=OBJECT, body=batch.body)
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")

    def _sort_out(self, batch: SealBatch, statuses: bytes) -> list[int]:
        self.busy, self.present = Status.BUSY in statuses, Status.PRESENT in statuses
        return super()._sort_out(batch, statuses)
