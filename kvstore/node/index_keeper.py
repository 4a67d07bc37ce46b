"""IndexKeeper: writes the daemon's index after each decision, and rebuilds it from the records if it is damaged."""

from __future__ import annotations

import logging
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from kvstore import failpoint
from kvstore.model.objects import ObjectGroup
from kvstore.model.replica import ADDRESS, ADDRESS_DTYPE, Address, FrameState, RecordFormat, Tier, in_state
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.index import GROUP_ENTRY, Index, IndexDamaged, IndexFull
from kvstore.shm.records import ExtentTable
from kvstore.state import prefix_links
from kvstore.state.interfaces import Rows, Snapshot

log = logging.getLogger("kvstore.node")

SEALED, RESERVED = FrameState.SEALED, FrameState.RESERVED
STEP_KEYS = 16  # keys per small transaction
TRANSACTION_KEYS_MAX = 64  # bounds the file's growth: LMDB reuses freed file pages only two transactions later
GROUPS: Final = "groups"
IndexOp = tuple[Tier | Literal["groups"] | None, list[bytes], list[bytes]]
"""``(table, keys, entries)``. The table is that of a tier, of reserved pages (None) or of complete groups.

An empty list of entries removes the keys."""


class IndexKeeper:
    """The writer of a node's index.

    Attributes:
        rebuild_due: the reason for a rebuild that failed for lack of memory and must be retried; "" if none is due.
            Until the retry succeeds, ``find`` reads the records. Clients use the old index, where a stale entry is a
            miss.
        mounted: returns the pages in memory that engines have mounted, which have no records here.
        groups: returns the complete groups.
        rebuilds: number of rebuilds by reason.
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
        self.rebuild_due = ""
        self._folder = folder
        self._header = header
        self._index = index
        self._tables = tables
        self.mounted: Callable[[], Iterable[tuple[bytes, Address]]] = list
        self.groups: Callable[[], Iterable[ObjectGroup]] = list

    def find(self, tier: Tier, key: bytes) -> Address | None:
        """Return the address of a sealed page; None if there is none. Rebuilds the index first if it is damaged."""
        if self.rebuild_due:
            return self._find_in_records(tier, key)
        try:
            return self._index.find(tier, key)
        except IndexDamaged:
            self.rebuild("damaged")
            return self.find(tier, key)

    def _find_in_records(self, tier: Tier, key: bytes) -> Address | None:
        """Search all records, which is slow but needs no index."""
        key_bytes = np.frombuffer(key, np.uint8)
        for number, table in self._tables.items():
            if table.tier != tier:
                continue
            sealed = in_state(table.words, SEALED)
            frames = np.flatnonzero(sealed & (table.rows[:, RecordFormat.key] == key_bytes).all(axis=1))
            if len(frames):
                return Address(number, int(frames[0]), int(table.words[frames[0]]) >> 8)
        return None

    def find_pending(self, key: bytes) -> Address | None:
        """Return the address that the index has for a reserved page; None if it has none, or is damaged."""
        try:
            return self._index.find_pending(key)
        except IndexDamaged:
            return None

    def absent(self, tier: Tier, keys: Sequence[bytes]) -> int:
        """Return how many leading keys have no entry."""
        addresses = self.look(tier, keys)
        if addresses is None:
            return next((i for i, key in enumerate(keys) if self.find(tier, key) is not None), len(keys))
        return next((i for i, address in enumerate(addresses) if address is not None), len(addresses))

    def look(self, tier: Tier, keys: Sequence[bytes]) -> list[Address | None] | None:
        """Return each key's address, or None for a key without an entry. Return None instead of a list if the index
        cannot be read now. Any thread may call."""
        if self.rebuild_due:
            return None
        try:
            raws = self._index.find_many(tier, keys)
        except IndexDamaged:
            return None
        return [Address(*ADDRESS.unpack(raw)) if raw is not None else None for raw in raws]

    def commit(self, ops: list[IndexOp]) -> None:
        """Apply the changes of a decision, in transactions of bounded size, so that the file grows little.

        If there is no memory for a transaction, the changes are applied in small transactions. ``reserve`` set aside
        memory for these before the pool got its frames. If that fails too, the index is rebuilt from the records.
        """
        if failpoint.ACTIVE:
            failpoint.hit("node.commit")
        try:
            for transaction in _transactions(ops):
                try:
                    self._commit(transaction)
                except IndexFull:
                    for op in _split(transaction, STEP_KEYS):
                        self._commit([op])
        except (IndexDamaged, IndexFull) as error:
            self.rebuild("full" if isinstance(error, IndexFull) else "damaged")

    def _commit(self, ops: list[IndexOp]) -> None:
        with self._index.begin() as txn:
            for table, keys, raws in ops:
                if table is None:
                    txn.put_pending(keys, raws) if raws else txn.delete_pending(keys)
                elif table == GROUPS:
                    txn.put_groups(keys, raws) if raws else txn.delete_groups(keys)
                elif raws:
                    txn.put(table, keys, raws)
                else:
                    txn.delete(table, keys)

    def unlist_groups(self) -> None:
        """At startup, remove groups that are no longer complete, before any page is dropped."""
        complete = {group.hash: group.members for group in self.groups()}
        gone = [hash_ for hash_, members in self._listed_groups() if complete.get(hash_) != members]
        if gone:
            self.commit([(GROUPS, gone, [])])

    def list_groups(self, now_ns: int) -> None:
        """At startup, list the complete groups that the index does not list yet."""
        listed = {hash_ for hash_, _ in self._listed_groups()}
        missing = [group for group in self.groups() if group.hash not in listed]
        if missing:
            entries = [GROUP_ENTRY.pack(group.members, now_ns) for group in missing]
            self.commit([(GROUPS, [group.hash for group in missing], entries)])

    def _listed_groups(self) -> list[tuple[bytes, int]]:
        """Return the hash and the number of members of each group that the index lists."""
        try:
            return [(hash_, GROUP_ENTRY.unpack(raw)[0]) for hash_, raw in self._index.scan_groups()]
        except (IndexDamaged, struct.error):
            self.rebuild("damaged")
            return []

    def group_hashes(self) -> Iterator[bytes]:
        """Iterate over the hashes of the complete groups."""
        return (hash_ for hash_, _ in self._index.scan_groups())

    def reserve(self, frames: int) -> bool:
        """Reserve memory for all changes of a pool with ``frames`` frames; return False if there is not enough."""
        try:
            self._index.reserve(frames, STEP_KEYS)
        except (IndexDamaged, IndexFull):
            return False
        return True

    def tidy(self) -> None:
        """Remove dead readers. Rebuild the index if that is due, or if a stopped reader has made the file grow."""
        self._index.clear_dead_readers()
        if self.rebuild_due:
            self.rebuild(self.rebuild_due)
        elif self.used_bytes() > self.map_bytes // 2:
            self.rebuild("grown")

    def used_bytes(self) -> int:
        """Return how many bytes of the index file are in use."""
        return self._index.used_bytes()

    def close(self) -> None:
        """Close the file, which stays."""
        self._index.close()

    def agrees(self) -> bool:
        """Return True if the index has exactly one entry per sealed record, and there are no reserved pages.

        Reserved pages are few and short-lived, so they are not compared.
        """
        try:
            stored = {tier: list(self._index.scan(tier)) for tier in self.tiers}
            pending = self._index.count_pending()
        except IndexDamaged:
            return False
        for tier, entries in stored.items():
            keys, addresses = self._sealed_entries(tier)
            if b"".join(key for key, _ in entries) != keys or b"".join(raw for _, raw in entries) != addresses:
                return False
        return pending == len(self._pending_entries()) == 0

    def addresses(self, tier: Tier) -> Iterator[tuple[bytes, Address]]:
        """Iterate over the entries of a tier, in key order."""
        return ((key, Address(*ADDRESS.unpack(raw))) for key, raw in self._index.scan(tier))

    def pending(self) -> Iterator[tuple[bytes, Address]]:
        """Iterate over the entries of reserved pages, in key order."""
        return ((key, Address(*ADDRESS.unpack(raw))) for key, raw in self._index.scan_pending())

    def hold(self) -> dict[Tier, Iterator[tuple[bytes, bytes]]]:
        """Return a snapshot of all entries (key, raw address) that can be read at any time; see ``Index.snapshot``."""
        return self._index.snapshot()

    def _sealed_entries(self, tier: Tier) -> tuple[bytes, bytes]:
        """Return the keys of all sealed records, concatenated in key order, and their raw addresses in the same order.
        Duplicates are left out."""
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
        """Return the keys and raw addresses of reserved pages: the earliest reservation of each key."""
        first: dict[bytes, Address] = {}
        for number, table in self._tables.items():
            if not table.fmt.tail:  # clients do not reserve frames in this tier
                continue
            reserved = in_state(table.words, RESERVED)
            for frame in np.flatnonzero(reserved & (table.column(table.fmt.group) != 0)).tolist():
                key = table.key(frame)
                address = Address(number, frame, int(table.words[frame]) >> 8)
                if key not in first or address.generation < first[key].generation:
                    first[key] = address
        return sorted((key, ADDRESS.pack(*address)) for key, address in first.items())

    def rebuild(self, reason: str) -> None:
        """Replace the index with a new one that is made from the records alone. Clients switch to its new epoch.

        If there is no memory for it, the old index stays, and ``rebuild_due`` is set. A stale entry is only a miss.
        """
        old = self._header.epoch
        try:
            pages = {tier: self._items(tier) for tier in self.tiers}
            now_ns = time.monotonic_ns()
            groups = [(group.hash, GROUP_ENTRY.pack(group.members, now_ns)) for group in self.groups()]
            Index.rebuild(self._folder, old, old + 1, pages, self.map_bytes, self._pending_entries(), groups)
            if failpoint.ACTIVE:
                failpoint.hit("node.rebuild")
            index = Index.open_writer(self._folder, old + 1, self.map_bytes, fresh=False)
        except (IndexFull, IndexDamaged) as error:
            log.error("the index could not be rebuilt: %s", error)
            self.rebuild_due = reason
            return
        self._index.close()
        self._index, self.rebuild_due = index, ""
        self._header.epoch = old + 1
        Index.remove(self._folder, old)
        self.rebuilds[reason] += 1


def _split(ops: list[IndexOp], keys_max: int) -> Iterator[IndexOp]:
    """Split the changes, in order, into changes of at most ``keys_max`` keys."""
    for table, keys, entries in ops:
        for at in range(0, len(keys), keys_max):
            yield table, keys[at : at + keys_max], entries[at : at + keys_max]


def _transactions(ops: list[IndexOp]) -> Iterator[list[IndexOp]]:
    """Group the changes, in order, into lists of at most ``TRANSACTION_KEYS_MAX`` keys."""
    transaction: list[IndexOp] = []
    keys_left = TRANSACTION_KEYS_MAX
    for op in _split(ops, TRANSACTION_KEYS_MAX):
        if len(op[1]) > keys_left:
            yield transaction
            transaction, keys_left = [], TRANSACTION_KEYS_MAX
        transaction.append(op)
        keys_left -= len(op[1])
    yield transaction


def snapshot(table: ExtentTable) -> Snapshot:
    """Copy the columns that recovery and integrity checks read."""
    fmt = table.fmt
    columns = (names_in(table.rows, slice(None), where) for where in (fmt.key, fmt.parent, fmt.root))
    return Snapshot(table.extent, table.words.copy(), *columns)


def names_in(rows: Rows, frames: Any, where: slice) -> Any:
    """Return one column (keys, parents or roots) of the rows ``frames``, as an array like those in ``Snapshot``."""
    return np.ascontiguousarray(rows[frames, where]).view("S16").reshape(-1)
