"""IndexKeeper: the daemon's index, kept in step with the records and rebuilt from them where it cannot be."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvstore import failpoint
from kvstore.model.replica import ADDRESS, ADDRESS_DTYPE, Address, FrameState, RecordFormat, Tier
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.index import Index, IndexDamaged, IndexFull
from kvstore.shm.records import ExtentTable
from kvstore.state import prefix_links
from kvstore.state.interfaces import Rows, Snapshot

log = logging.getLogger("kvstore.node")

SEALED, RESERVED = FrameState.SEALED, FrameState.RESERVED
STEP_KEYS = 16  # of a small transaction
TOGETHER_KEYS = 64  # of any: pages of the file that one has dirtied are used again by the second one after it
IndexOp = tuple[Tier | None, list[bytes], list[Address]]
"""The tier whose table changes (None: that of pages being written), keys, and their addresses (none: they leave)."""


class IndexKeeper:
    """The writer of a node's index. Lives with its ``Performer``, whose record tables it reads.

    Where there is no memory for a rebuild, ``wanted`` says why one is to be tried again; until then finds read the
    records, and clients see an old index, in which a stale entry is a miss.
    """

    def __init__(
        self,
        folder: NodeFolder,
        header: Header,
        index: Index,
        map_bytes: int,
        tables: Mapping[int, ExtentTable],
        tiers: Sequence[Tier],
    ) -> None:
        self.tiers = tuple(tiers)
        self.map_bytes = map_bytes
        self.rebuilds: Counter[str] = Counter()
        self.wanted = ""
        self._folder = folder
        self._header = header
        self._index = index
        self._tables = tables
        self.mounted: Callable[[], Iterable[tuple[bytes, Address]]] = list  # what is listed of engines' own memory

    def find(self, tier: Tier, key: bytes) -> Address | None:
        """See ``PageIndex``. A damaged index is rebuilt from the records on the spot."""
        if self.wanted:
            return self._find_in_records(tier, key)
        try:
            return self._index.find(tier, key)
        except IndexDamaged:
            self.rebuild("damaged")
            return self.find(tier, key)

    def _find_in_records(self, tier: Tier, key: bytes) -> Address | None:
        """Slow and always right: while there is no memory for an index."""
        wanted = np.frombuffer(key, np.uint8)
        for number, table in self._tables.items():
            if table.tier != tier:
                continue
            sealed = (table.words & np.uint64(0xFF)) == SEALED
            frames = np.flatnonzero(sealed & (table.rows[:, RecordFormat.key] == wanted).all(axis=1))
            if len(frames):
                return Address(number, int(frames[0]), int(table.words[frames[0]]) >> 8)
        return None

    def find_pending(self, key: bytes) -> Address | None:
        """The frame readers are shown for a page that is being written."""
        try:
            return self._index.find_pending(key)
        except IndexDamaged:
            return None

    def absent(self, tier: Tier, keys: Sequence[bytes]) -> int:
        """See ``PageIndex``."""
        found = self.look(tier, keys)
        if found is None:
            return next((i for i, key in enumerate(keys) if self.find(tier, key) is not None), len(keys))
        return next((i for i, address in enumerate(found) if address is not None), len(found))

    def look(self, tier: Tier, keys: Sequence[bytes]) -> list[Address | None] | None:
        """Where these pages were last known to be; None where the index cannot tell now. For any thread."""
        if self.wanted:
            return None
        try:
            raws = self._index.find_many(tier, keys)
        except IndexDamaged:
            return None
        return [Address(*ADDRESS.unpack(raw)) if raw is not None else None for raw in raws]

    def commit(self, ops: list[IndexOp]) -> None:
        """Follow the records, in transactions by which the file grows little. Where there is no memory for one, in
        small ones, whose memory was reserved before the frames (``reserve``). Where that fails, the index is rebuilt
        from the records."""
        if failpoint.ACTIVE:
            failpoint.hit("node.commit")
        try:
            for some in _bounded(ops):
                try:
                    self._commit(some)
                except IndexFull:
                    for op in _steps(some, STEP_KEYS):
                        self._commit([op])
        except (IndexDamaged, IndexFull) as error:
            self.rebuild("full" if isinstance(error, IndexFull) else "damaged")

    def _commit(self, ops: list[IndexOp]) -> None:
        with self._index.begin() as txn:
            for tier, keys, named in ops:
                raws = [ADDRESS.pack(*address) for address in named]
                if tier is None:
                    txn.put_pending(keys, raws) if raws else txn.delete_pending(keys)
                elif raws:
                    txn.put(tier, keys, raws)
                else:
                    txn.delete(tier, keys)

    def reserve(self, frames: int) -> bool:
        """Reserve the memory to follow every change of a pool of ``frames`` frames. False: there is not enough."""
        try:
            self._index.reserve(frames, STEP_KEYS)
        except (IndexDamaged, IndexFull):
            return False
        return True

    def tidy(self) -> None:
        """Free the places of dead readers; write a new file where a stopped one keeps the old from being reused."""
        self._index.clear_dead_readers()
        if self.wanted:
            self.rebuild(self.wanted)
        elif self.used_bytes() > self.map_bytes // 2:
            self.rebuild("grown")

    def used_bytes(self) -> int:
        """Bytes of the index file in use."""
        return self._index.used_bytes()

    def close(self) -> None:
        """Let go of the file."""
        self._index.close()

    def agrees(self) -> bool:
        """Every entry names a sealed record of that key, and every sealed record has its entry."""
        try:
            stored = {tier: list(self._index.scan(tier)) for tier in self.tiers}
            pending = self._index.count_pending()
        except IndexDamaged:
            return False
        for tier, entries in stored.items():
            keys, addresses = self._sealed_entries(tier)
            if b"".join(key for key, _ in entries) != keys or b"".join(raw for _, raw in entries) != addresses:
                return False
        return pending == len(self._pending_entries()) == 0  # few and short-lived: not worth comparing

    def addresses(self, tier: Tier) -> Iterator[tuple[bytes, Address]]:
        """All entries of the index about one tier, by key."""
        return ((key, Address(*ADDRESS.unpack(raw))) for key, raw in self._index.scan(tier))

    def pending(self) -> Iterator[tuple[bytes, Address]]:
        """All entries about pages that are being written, by key."""
        return ((key, Address(*ADDRESS.unpack(raw))) for key, raw in self._index.scan_pending())

    def hold(self) -> dict[Tier, Iterator[tuple[bytes, bytes]]]:
        """All entries, key and raw address, as they are now, however late they are read; see ``Index.hold``."""
        return self._index.hold()

    def _sealed_entries(self, tier: Tier) -> tuple[bytes, bytes]:
        """Keys and raw addresses that the records call for, end to end, by key; the first of duplicates."""
        if tier == Tier.HBM and (mounted := list(self.mounted())):
            return b"".join(key for key, _ in mounted), b"".join(ADDRESS.pack(*address) for _, address in mounted)
        links = prefix_links.link([snapshot(table) for table in self._tables.values() if table.tier == tier])
        keep = ~links.duplicate
        addresses = np.zeros(int(keep.sum()), ADDRESS_DTYPE)
        addresses["extent"], addresses["frame"] = links.extents[keep], links.frames[keep]
        addresses["generation"] = links.generations[keep]
        return links.keys[keep].tobytes(), addresses.tobytes()

    def _items(self, tier: Tier) -> Iterator[tuple[bytes, bytes]]:
        keys, addresses = self._sealed_entries(tier)
        return ((keys[i : i + 16], addresses[i : i + 16]) for i in range(0, len(keys), 16))

    def _pending_entries(self) -> list[tuple[bytes, bytes]]:
        """Keys and raw addresses of reserved pages; the earliest of several reservations of one key."""
        first: dict[bytes, Address] = {}
        for number, table in self._tables.items():
            if not table.fmt.tail:  # only the node writes there
                continue
            reserved = (table.words & np.uint64(0xFF)) == RESERVED
            for frame in np.flatnonzero(reserved & (table.column(table.fmt.group) != 0)).tolist():
                key = table.key(frame)
                address = Address(number, frame, int(table.words[frame]) >> 8)
                if key not in first or address.generation < first[key].generation:
                    first[key] = address
        return sorted((key, ADDRESS.pack(*address)) for key, address in first.items())

    def rebuild(self, reason: str) -> None:
        """A new index from the records alone, under a new epoch that clients follow.

        Where there is no memory for it the old one stays, wrong as it may be (a stale entry is a miss), and
        ``wanted`` asks for another try.
        """
        old = self._header.epoch
        try:
            pages = {tier: self._items(tier) for tier in self.tiers}
            Index.rebuild(self._folder, old, old + 1, pages, self.map_bytes, self._pending_entries())
            if failpoint.ACTIVE:
                failpoint.hit("node.rebuild")
            index = Index.open_writer(self._folder, old + 1, self.map_bytes, fresh=False)
        except (IndexFull, IndexDamaged) as error:
            log.error("the index could not be rebuilt: %s", error)
            self.wanted = reason
            return
        self._index.close()
        self._index, self.wanted = index, ""
        self._header.epoch = old + 1
        Index.remove(self._folder, old)
        self.rebuilds[reason] += 1


def _steps(ops: list[IndexOp], step: int) -> Iterator[IndexOp]:
    """Split the changes into steps of a few keys, in order."""
    for tier, keys, named in ops:
        for at in range(0, len(keys), step):
            yield tier, keys[at : at + step], named[at : at + step]


def _bounded(ops: list[IndexOp]) -> Iterator[list[IndexOp]]:
    """Group the changes into lists of at most ``TOGETHER_KEYS`` keys, in order."""
    some: list[IndexOp] = []
    left = TOGETHER_KEYS
    for op in _steps(ops, TOGETHER_KEYS):
        if len(op[1]) > left:
            yield some
            some, left = [], TOGETHER_KEYS
        some.append(op)
        left -= len(op[1])
    yield some


def snapshot(table: ExtentTable) -> Snapshot:
    """Copies of the columns that recovery and integrity look at."""
    fmt = table.fmt
    columns = (names_in(table.rows, slice(None), where) for where in (fmt.key, fmt.parent, fmt.root))
    return Snapshot(table.extent, table.words.copy(), *columns)


def names_in(rows: Rows, frames: Any, where: slice) -> Any:
    """A column of keys, parents or roots ``[frames]`` of record rows, as ``Snapshot`` has them."""
    return np.ascontiguousarray(rows[frames, where]).view("S16").reshape(-1)
