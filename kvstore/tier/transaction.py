"""WriteTxn: a write transaction of the daemon's index, and the memory that it may dirty.

LMDB writes through the map of a sparse file: a store to a page that a full tmpfs cannot give would kill the process.
So before a transaction dirties pages, ``Room`` makes sure that the file has memory for as many, and some to spare.
Worked example: 4 keys in a fresh transaction may dirty 32 + 4 * 6 = 56 pages; if the file has memory up to page 700 and
LMDB uses 600, 100 are spare, and nothing is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import lmdb

from kvstore.model.replica import ADDRESS, Address, Tier
from kvstore.tier.environment import PAGE_BYTES, PAGES_AHEAD, IndexFull, allocate_map, translate

# Pages that one changed key may dirty: the path from the root (4 levels: 40 M keys) and splits. And what every
# transaction dirties besides: roots of the tables, the list of free pages.
PAGES_PER_KEY: Final = 6
PAGES_PER_TXN: Final = 32
# A page of a table holds 96 entries of 42 bytes, one that was just split half as many. Measured, of random keys: 66 on
# average, 51 after all of them were replaced thirty times. What a transaction leaves behind is used again by the second
# one after it, unless somebody is just reading.
ENTRIES_PER_PAGE: Final = 47
STEPS_IN_FLIGHT: Final = 2


class Tables(NamedTuple):
    """Handles of the index's tables: one per tier, and that of pages being written."""

    tiers: Mapping[Tier, Any]
    pending: Any


class Room:
    """Memory of the map file of the index at ``path``, as far as its writer made sure of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._allocated_pages = 0
        self.spare_pages = 0
        """Pages that have memory and that no transaction since the last ``make`` may have dirtied."""

    def make(self, pages: int, info: dict[str, Any]) -> None:
        """Have memory for the ``pages`` that the transaction in progress may have dirtied, and some to spare.

        Args:
            info: what LMDB says of the environment now.

        Raises:
            IndexFull: there is none. (The end of the map is LMDB's to notice.)
        """
        used, map_pages = int(info["last_pgno"]) + 1, int(info["map_size"]) // PAGE_BYTES
        if min(used + pages, map_pages) > self._allocated_pages:
            try:
                self._allocate(min(used + pages + PAGES_AHEAD, map_pages))
            except IndexFull:
                self._allocate(min(used + pages, map_pages))
        self.spare_pages = max(0, self._allocated_pages - used - pages)

    def reserve(self, entries: int, step_keys: int, info: dict[str, Any]) -> None:
        """Reserve memory for an index of ``entries`` entries and the transactions of ``step_keys`` that fill it.

        Raises:
            IndexFull: there is not enough.
        """
        step_pages = PAGES_PER_TXN + step_keys * PAGES_PER_KEY
        pages = max(int(info["last_pgno"]) + 1, entries // ENTRIES_PER_PAGE + STEPS_IN_FLIGHT * step_pages) + step_pages
        pages = min(pages, int(info["map_size"]) // PAGE_BYTES)
        if pages > self._allocated_pages:
            self._allocate(pages)

    def _allocate(self, pages: int) -> None:
        allocate_map(self._path, pages * PAGE_BYTES)
        self._allocated_pages = pages


class WriteTxn:
    """A write transaction of the daemon's index. Made by ``Index.begin``; used once, in one thread, as a context.

    Leaving commits: readers see all of it or nothing. Leaving by an exception drops all of it. Verbs and the commit
    raise IndexFull or IndexDamaged; then nothing of it is stored.
    """

    __slots__ = ("_begin", "_tables", "_room", "_info", "_transaction", "_dirty_pages")

    def __init__(self, begin: Any, tables: Tables, room: Room, info: Callable[[], dict[str, Any]]) -> None:
        self._begin = begin
        self._tables = tables
        self._room = room
        self._info = info
        self._transaction: Any = None
        self._dirty_pages = 0  # at most

    def __enter__(self) -> WriteTxn:
        try:
            self._transaction = self._begin(self._tables.pending, None, True)
        except lmdb.Error as error:
            translate(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        transaction, self._transaction = self._transaction, None
        try:
            if kind is None:
                transaction.commit()
            else:
                transaction.abort()
        except lmdb.Error as damage:
            translate(damage)

    def put(self, tier: Tier, keys: Sequence[bytes], raw_addresses: Sequence[bytes]) -> None:
        """Store or replace the address in that tier of each key (raw: 16 bytes, ``ADDRESS_DTYPE``)."""
        self._put(self._tables.tiers[tier], keys, raw_addresses)

    def put_pending(self, keys: Sequence[bytes], raw_addresses: Sequence[bytes]) -> None:
        """Store or replace the address of the frame in which each key's page is being written."""
        self._put(self._tables.pending, keys, raw_addresses)

    def delete(self, tier: Tier, keys: Sequence[bytes]) -> int:
        """Remove keys from a tier; those that are not there are skipped. Returns how many were."""
        return self._delete(self._tables.tiers[tier], keys)

    def delete_pending(self, keys: Sequence[bytes]) -> int:
        """Remove keys from the pending table; those that are not there are skipped. Returns how many were."""
        return self._delete(self._tables.pending, keys)

    def find(self, tier: Tier, key: bytes) -> Address | None:
        """As ``Index.find``, with what this transaction wrote."""
        return self._find(key, self._tables.tiers[tier])

    def find_pending(self, key: bytes) -> Address | None:
        """As ``Index.find_pending``, with what this transaction wrote."""
        return self._find(key, self._tables.pending)

    def _put(self, table: Any, keys: Sequence[bytes], raw_addresses: Sequence[bytes]) -> None:
        self._need(len(keys))
        try:
            with self._transaction.cursor(table) as cursor:
                cursor.putmulti(zip(keys, raw_addresses, strict=True))
        except lmdb.Error as error:
            translate(error)

    def _delete(self, table: Any, keys: Sequence[bytes]) -> int:
        self._need(len(keys))
        delete = self._transaction.delete
        try:
            return [delete(key, b"", table) for key in keys].count(True)
        except lmdb.Error as error:
            translate(error)

    def _find(self, key: bytes, table: Any) -> Address | None:
        try:
            raw = self._transaction.get(key, None, table)
            return None if raw is None else Address._make(ADDRESS.unpack_from(raw))
        except (lmdb.Error, struct.error) as error:
            translate(error)

    def _need(self, keys: int) -> None:
        room = self._room
        pages = keys * PAGES_PER_KEY if self._dirty_pages else PAGES_PER_TXN + keys * PAGES_PER_KEY
        self._dirty_pages += pages
        room.spare_pages -= pages
        if room.spare_pages < 0:
            room.make(self._dirty_pages, self._info())
