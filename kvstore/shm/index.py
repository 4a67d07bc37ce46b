"""Index: page key -> address, in LMDB under ``index-<epoch>/``. The daemon writes, every client maps and reads.

It is a hint that can always be rebuilt from the records: it is never made durable, and a damaged one is not repaired
but replaced, under a new epoch that clients compare. Its size is fixed when an epoch is made; growing is a rebuild.

A table of key -> address (16 bytes) per tier, and one of the reserved frames that are being written (``pending``). A
page that is in two tiers has an entry in both. Each tier is prefix-closed on its own: for a chain of 10 pages, DRAM may
hold the first 4 and NVMe the first 7; then 7 are stored. A lookup in a tier that the node does not have misses.

WriteTxn: a write transaction of the daemon's index, and the memory that it may dirty.

LMDB writes through the map of a sparse file: a store to a page that a full tmpfs cannot give would kill the process.
So before a transaction dirties pages, ``Room`` makes sure that the file has memory for them, and some to spare. Worked
example: 4 keys in a fresh transaction may dirty 32 + 4 * 6 = 56 pages; if the file has memory up to page 700 and LMDB
uses 600, 100 are spare, and nothing is allocated.
"""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn

import lmdb

from kvstore.model.replica import ADDRESS, ADDRESS_DTYPE, Address, Tier
from kvstore.safe_files import remove
from kvstore.shm import lmdb_environment as env
from kvstore.shm.folder import NodeFolder
from kvstore.shm.lmdb_environment import (
    PAGE_BYTES,
    PAGES_AHEAD,
    IndexCrowded,
    IndexDamaged,
    IndexFull,
    allocate_map,
    translate,
)

# Pages that one changed key may dirty: the path from the root (4 levels: 40 M keys) and splits. And what every
# transaction dirties besides: roots of the tables, the list of free pages.
PAGES_PER_KEY: Final = 6
PAGES_PER_TXN: Final = 32
# A page of a table holds 96 entries of 42 bytes, one that was just split half as many. Measured, of random keys: 66 on
# average, 51 after all of them were replaced thirty times. Pages that a transaction frees are reused by the second one
# after it, unless a reader is active.
ENTRIES_PER_PAGE: Final = 47
STEPS_IN_FLIGHT: Final = 2


class Tables(NamedTuple):
    """Handles of the index's tables: one per tier, and that of pages being written."""

    tiers: Mapping[Tier, Any]
    pending: Any


class Room:
    """The allocated memory of the index's map file at ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._allocated_pages = 0
        self.spare_pages = 0
        """Pages that have memory and that no transaction since the last ``make`` may have dirtied."""

    def make(self, pages: int, info: dict[str, Any]) -> None:
        """Allocate memory for the ``pages`` that the transaction in progress may have dirtied, and some to spare.

        Args:
            info: LMDB's current information about the environment.

        Raises:
            IndexFull: there is no memory. (LMDB itself detects the end of the map.)
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


__all__ = ["Index", "IndexCrowded", "IndexDamaged", "IndexFull", "WriteTxn"]

SCAN_BATCH: Final = 4096  # entries read per transaction, so that a slow consumer holds no old version alive

_ADDRESS = struct.Struct("<IIQ")  # ADDRESS_DTYPE
assert _ADDRESS.size == ADDRESS_DTYPE.itemsize
_unpack = _ADDRESS.unpack_from
_address = Address._make


class Index:
    """One epoch's index. Made by ``open_writer`` (the daemon) or ``open_reader``; ends with ``close()``.

    Verbs may be called from any thread; write transactions wait for one another. Every verb raises IndexDamaged if the
    index is damaged, after ``close``, and in a forked child (which may open its own).
    """

    def __init__(self, path: Path, epoch: int, environment: lmdb.Environment) -> None:
        self.path = path
        self.epoch = epoch
        self._environment: lmdb.Environment | None = environment
        self._tables = _open_tables(environment)
        self._begin: Any = environment.begin  # bound once: it is on the path of every get
        self._room = Room(path)
        _indexes.add(self)

    @classmethod
    def open_writer(
        cls, folder: NodeFolder, epoch: int, map_bytes: int, fresh: bool, tiers: Iterable[Tier] = ()
    ) -> Index:
        """Open the daemon's index of ``epoch``: a new, empty one, or (not ``fresh``) the existing one.

        ``map_bytes`` is the size of a new one: about 70 bytes per page, and the same again for what readers hold; an
        existing one keeps its size. Make a new one only under an epoch that no client has seen: clients that have an
        epoch open stay with its files. ``tiers``: of the node, in addition to those that every index has a table for.

        Raises:
            IndexDamaged: not ``fresh``, and there is none, or it is cut short, of another format or unreadable.
            IndexFull: no memory for a new one.
            NodeBusy: this process reads it as another daemon's; close those readers first.
        """
        path = folder.index(epoch)
        if fresh:
            env.make(path, folder, map_bytes, dict.fromkeys(tiers, ()), ())
        stored = env.stored_map_bytes(path)
        if stored is None:
            raise IndexDamaged(f"{path} is absent, cut short or of another format")
        try:
            return cls(path, epoch, env.open_shared(path, stored, folder.file_mode))
        except (lmdb.Error, OSError) as error:
            raise IndexDamaged(f"{path} cannot be opened ({error})") from error

    @classmethod
    def open_reader(cls, folder: NodeFolder, epoch: int) -> Index | None:
        """Open a client's index of ``epoch``; return None if it is absent or damaged."""
        path = folder.index(epoch)
        if env.stored_map_bytes(path) is None:
            return None
        try:
            return cls(path, epoch, env.open_shared(path, None, folder.file_mode))
        except (lmdb.Error, OSError):  # OSError: it was removed
            return None

    @staticmethod
    def rebuild(
        folder: NodeFolder,
        old_epoch: int | None,
        new_epoch: int,
        pages: Mapping[Tier, Iterable[tuple[bytes, bytes]]],
        map_bytes: int,
        pending: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Make the index of ``new_epoch`` out of ``(key, raw address)`` pairs, the ``pages`` of each tier.

        Those of a tier are sorted and without equal keys; of equal keys in ``pending`` the first counts. It appears
        whole at the end: a crash leaves the old one. The old epoch stays until ``remove``; readers use it until they
        see the new one. Then call ``open_writer``.

        Raises:
            IndexFull: it does not fit ``map_bytes`` or the available memory; nothing has changed.
        """
        assert old_epoch is None or old_epoch < new_epoch, (old_epoch, new_epoch)
        env.make(folder.index(new_epoch), folder, map_bytes, pages, pending)

    @staticmethod
    def remove(folder: NodeFolder, epoch: int) -> None:
        """Remove an epoch's files, if there are any. Readers that have it open keep what they see."""
        with contextlib.suppress(OSError):
            remove(folder.index(epoch))

    # --- reading: nothing is changed, results are copies ------------------------------------------------------------

    def find(self, tier: Tier, key: bytes) -> Address | None:
        """Return the last known address of the sealed page of ``key`` in that tier."""
        return self._find(self._tables.tiers[tier], key)

    def find_pending(self, key: bytes) -> Address | None:
        """Return the frame in which the page of ``key`` is being written."""
        return self._find(self._tables.pending, key)

    def _find(self, table: Any, key: bytes) -> Address | None:
        try:
            raw = self._begin(table).get(key)
            return None if raw is None else _address(_unpack(raw))
        except (lmdb.Error, struct.error) as error:
            translate(error)

    def find_many(self, tier: Tier, keys: Iterable[bytes]) -> list[bytes | None]:
        """Raw addresses (``ADDRESS_DTYPE``) of pages in that tier, None where not stored; all of one moment."""
        table = self._tables.tiers[tier]
        if table is None:
            return [None for _ in keys]
        try:
            return list(map(self._begin(table).get, keys))
        except lmdb.Error as error:
            translate(error)

    def longest(self, tier: Tier, keys: Sequence[bytes]) -> tuple[int, bytes | None]:
        """How many leading ``keys`` of a chain are in that tier, and the raw address of the last of them. A hint.

        Looks at the last key first (a full hit costs one look) and at the first one (a full miss costs two), then
        halves: right because no page is stored without the pages before it. ``keys`` may start anywhere in a chain.
        """
        table = self._tables.tiers[tier]
        if not keys or table is None:
            return 0, None
        try:
            get = self._begin(table).get
            raw: bytes | None = get(keys[-1])
            return (len(keys), raw) if raw is not None else _leading(get, keys)
        except lmdb.Error as error:
            translate(error)

    def count(self, tier: Tier) -> int:
        """How many pages are in that tier."""
        return self._entries(self._tables.tiers[tier])

    def count_pending(self) -> int:
        """How many pages are being written."""
        return self._entries(self._tables.pending)

    def scan(self, tier: Tier) -> Iterator[tuple[bytes, bytes]]:
        """``(key, raw address)`` of every page in that tier, by key.

        Reads ``SCAN_BATCH`` entries at a time: what is written in the meantime may or may not be seen.
        """
        return self._scan(self._tables.tiers[tier])

    def scan_pending(self) -> Iterator[tuple[bytes, bytes]]:
        """``(key, raw address)`` of every page that is being written, by key."""
        return self._scan(self._tables.pending)

    def _scan(self, table: Any) -> Iterator[tuple[bytes, bytes]]:
        start = b""
        while True:
            try:
                with self._begin(table) as transaction, transaction.cursor() as cursor:
                    batch = list(islice(cursor, SCAN_BATCH)) if cursor.set_range(start) else []
            except lmdb.Error as error:
                translate(error)
            yield from batch
            if len(batch) < SCAN_BATCH:
                return
            start = batch[-1][0] + b"\0"  # the least key above

    def hold(self) -> dict[Tier, Iterator[tuple[bytes, bytes]]]:
        """``(key, raw address)`` of every page, by tier, as they are now, however late they are read.

        Read them soon and in this thread, or drop them: until then no page of the file is used again.
        """
        try:
            transaction = self._begin()
        except lmdb.Error as error:
            translate(error)
        return {tier: _held(transaction, table) for tier, table in self._tables.tiers.items()}

    def _entries(self, table: Any) -> int:
        try:
            return int(self._begin(table).stat(table)["entries"])
        except lmdb.Error as error:
            translate(error)

    # --- writing ----------------------------------------------------------------------------------------------------

    def begin(self) -> WriteTxn:
        """A write transaction: ``with index.begin() as txn``. Committed on exit, dropped whole on an exception."""
        return WriteTxn(self._begin, self._tables, self._room, self._info)

    def reserve(self, entries: int, step_keys: int) -> None:
        """Reserve memory for ``entries`` entries, and for transactions of ``step_keys`` that change them.

        Raises:
            IndexFull: there is not enough memory; the existing memory suffices for as much as before.
        """
        self._room.reserve(entries, step_keys, self._info())

    def clear_dead_readers(self) -> int:
        """Free the places of readers that died inside a read, which keep old pages from reuse; returns how many."""
        try:
            return int(self._live().reader_check())
        except lmdb.Error as error:
            translate(error)

    @property
    def map_bytes(self) -> int:
        """Size of the map, fixed when this epoch was made."""
        return int(self._info()["map_size"])

    def used_bytes(self) -> int:
        """Bytes of the map that were ever used, pages that are free for reuse included."""
        return (int(self._info()["last_pgno"]) + 1) * PAGE_BYTES

    def close(self) -> None:
        """Every verb raises IndexDamaged from now on. The files stay; the last ``Index`` of this process unmaps."""
        _indexes.discard(self)
        self._drop()

    def _drop(self) -> None:
        # Only references go, LMDB closes with the last one: a thread that is inside a read keeps its own.
        self._environment = None
        self._begin = _closed

    def _live(self) -> lmdb.Environment:
        environment = self._environment
        if environment is None:
            _closed()
        return environment

    def _info(self) -> dict[str, Any]:
        try:
            info: dict[str, Any] = self._live().info()  # type: ignore[assignment]
            return info
        except lmdb.Error as error:
            translate(error)


def _open_tables(environment: lmdb.Environment) -> Tables:
    """Open the databases of an index. Raises lmdb.Error if one is missing."""
    tiers = {tier: environment.open_db(name, create=False) for tier, name in env.TIER_TABLES.items()}
    return Tables(tiers, environment.open_db(env.PENDING, create=False))


def _held(transaction: Any, table: Any) -> Iterator[tuple[bytes, bytes]]:
    try:
        with transaction.cursor(table) as cursor:
            yield from cursor
    except lmdb.Error as error:
        translate(error)


def _leading(get: Any, keys: Sequence[bytes]) -> tuple[int, bytes | None]:
    """How many leading keys ``get`` finds, and the last one's value, where it does not find the last of ``keys``."""
    last = get(keys[0]) if len(keys) > 1 else None
    if last is None:
        return 0, None
    low, high = 1, len(keys) - 1
    while low < high:  # keys[:low] are there, keys[high] is not
        middle = (low + high) // 2
        raw = get(keys[middle])
        if raw is None:
            high = middle
        else:
            low, last = middle + 1, raw
    return low, last


def _closed(*_: object) -> NoReturn:
    raise IndexDamaged("the index is closed, or was opened before a fork")


_indexes: weakref.WeakSet[Index] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Close the parent's indexes in the child, since their environments must not be used across a fork."""
    for index in list(_indexes):
        index._drop()
    _indexes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
