"""MemoryReader: how clients of this process read a tier that is a ``MemoryStore``: a class, as any other tier has."""

from __future__ import annotations

import numpy as np

from kvstore.client.local.tier_reader import ObjectHead
from kvstore.client.match import ABSENT, CHECKSUM, GENERATION, IDENTITY
from kvstore.model.objects import is_object_class
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS, Address, FrameClass, FrameState, word_of
from kvstore.shm.folder import NodeFolder
from kvstore.shm.records import ExtentTable
from kvstore.tier.base import Bytes
from kvstore.tier.nvme import frame_header
from kvstore.tier.nvme.disk import aligned_buffer
from kvstore.tier.nvme.frame_header import FrameHeader
from tests.helpers.memory_store import MemoryStore


class MemoryReader:
    """See ``LowerReader``."""

    closed = True

    def __init__(self, store: MemoryStore, folder: NodeFolder) -> None:
        self.tier = store.tier
        self._store = store
        self._folder = folder

    def readable(self) -> bool:
        return True

    def root_at(self, raw: bytes) -> bytes | None:
        number, frame, _ = ADDRESS.unpack(raw)
        table = self._table(number)
        return table.rows[frame, table.fmt.root].tobytes() if table is not None else None

    def class_at(self, raw: bytes) -> FrameClass | None:
        table = self._table(ADDRESS.unpack(raw)[0])
        return table.frame_class if table is not None else None

    def object_head(self, raw: bytes) -> ObjectHead | None:
        table = self._table(ADDRESS.unpack(raw)[0])
        found = self.page(raw, table.frame_class) if table is not None else None
        if table is None or found is None or not is_object_class(table.frame_class):
            return None
        return ObjectHead(table.frame_class, identity_of(found[0]))

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> MemoryRead:
        return MemoryRead(self, located, keys, frame_class, rows)

    def page(self, raw: bytes, frame_class: FrameClass) -> tuple[FrameHeader, Bytes] | None:
        """What lies at an address, with the header that names that address; None where nothing does."""
        address = ADDRESS.unpack(raw)
        table = self._table(address[0])
        if table is None or int(table.words[address[1]]) != word_of(address[2], FrameState.SEALED):
            return None
        header, page = aligned_buffer(self._store.header_bytes(frame_class)), aligned_buffer(frame_class.frame_bytes)
        self._store.read_page(table.position, address[1], frame_class, header, page)
        found = frame_header.unpack(header, frame_class, self._store.incarnation, *address)
        return None if isinstance(found, str) else (found, page)

    def flip(self, address: Address) -> None:
        """Damage the page there: one bit of it."""
        table = self._table(address.extent)
        assert table is not None
        self._store.pages[table.position, address.frame][1][0] ^= 1

    def _table(self, number: int) -> ExtentTable | None:
        table = ExtentTable.open(self._folder, number, self._store.incarnation)
        return table if table is not None and table.tier is self.tier else None


class MemoryRead:
    """See ``PendingRead``. Read when somebody asks for the result."""

    damaged = b""

    def __init__(
        self, reader: MemoryReader, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes
    ) -> None:
        self.addresses = b"".join(located)
        self._reader, self._located, self._rows = reader, located, rows
        self._frame_class = frame_class
        self._keys = keys

    def result(self, silence_s: float) -> tuple[int, str]:
        identities = np.frombuffer(self._keys.identity_bytes, np.uint8).reshape(len(self._keys), -1)
        for place, raw in enumerate(self._located):
            found = self._reader.page(raw, self._frame_class)
            if found is None:
                return place, GENERATION
            header, page = found
            if identity_of(header) != identities[place].tobytes():
                return place, IDENTITY
            if not frame_header.is_payload_sound(page, self._frame_class, header.payload_sum):
                self.damaged = raw
                return place, CHECKSUM
            self._rows[place] = page[: self._frame_class.page_bytes]
        return len(self._located), "" if len(self._located) == len(self._keys) else ABSENT


def identity_of(header: FrameHeader) -> bytes:
    """Key, root, extra and tokens, as keys give them."""
    return header.key + header.root + header.extra + header.tokens.tobytes()
