"""Index: page key -> address, in LMDB under ``index-<epoch>/``. The daemon writes it; clients map and read it.

The index is a hint that can always be rebuilt from the records. It is never made durable. A damaged index is not
repaired but replaced, under a new epoch that clients compare. Its size is fixed when an epoch is made; to grow, it is
rebuilt.

It has a table of key -> address (16 bytes) per tier, one of the reserved frames that are being written (``pending``),
and one of the complete groups of objects (``groups``).
A page in two tiers has an entry in both. Each tier is prefix-closed on its own: DRAM may hold the first 4 pages of a
chain of 10 and NVMe the first 7; then 7 are stored. A lookup in a tier that the node does not have misses.

LMDB writes through the map of a sparse file. If a full tmpfs cannot give a page its memory, the store kills the
process. So before a transaction (``WriteTxn``) dirties pages, ``MapMemory`` makes sure that the file has memory for
them, and some to spare. Worked example: 4 keys in a new transaction may dirty 32 + 4 * 6 = 56 pages. If the file has
memory up to page 700 and LMDB uses 600, 100 are spare, and nothing is allocated.
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
from typing import Any, Final, NoReturn

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
    Tables,
    allocate_map,
    translate,
)

# Upper bound of the pages that one changed key dirties: the path from the root (4 levels: 40 M keys) and splits. Each
# transaction dirties some more pages: roots of the tables, and the list of free pages.
PAGES_PER_KEY: Final = 6
PAGES_PER_TXN: Final = 32
# A page of a table holds 96 entries of 42 bytes, and half as many after a split. Measured with random keys: 66 on
# average, and 51 after all of them were replaced thirty times. Pages that a transaction frees are reused by the second
# transaction after it, unless a reader is active.
ENTRIES_PER_PAGE: Final = 47
STEPS_IN_FLIGHT: Final = 2


GROUP_ENTRY: Final = struct.Struct("<QQ")  # entry of a complete group: its members, and when it was listed


class MapMemory:
    """The allocated memory of the index's map file at ``path``.

    Attributes:
        spare_pages: number of pages with memory that no transaction can have dirtied since the last ``ensure``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._allocated_pages = 0
        self.spare_pages = 0

    def ensure(self, pages: int, info: dict[str, Any]) -> None:
        """Allocate memory for ``pages`` pages that the current transaction may have dirtied, and some to spare.

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
        """Allocate memory for an index of ``entries`` entries, and for the transactions of ``step_keys`` that fill it.

        Raises:
            IndexFull: there is not enough memory.
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

    Leaving the context commits: readers see all of it or nothing. Leaving it by an exception drops all of it. If a call
    or the commit raises IndexFull or IndexDamaged, nothing is stored.
    """

    __slots__ = ("_begin", "_tables", "_memory", "_info", "_transaction", "_dirty_pages")

    def __init__(self, begin: Any, tables: Tables, memory: MapMemory, info: Callable[[], dict[str, Any]]) -> None:
        self._begin = begin
        self._tables = tables
        self._memory = memory
        self._info = info
        self._transaction: Any = None
        self._dirty_pages = 0  # upper bound

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
        """Store or replace the address of each key in that tier (raw: 16 bytes, ``ADDRESS_DTYPE``)."""
        self._put(self._tables.tiers[tier], keys, raw_addresses)

    def put_pending(self, keys: Sequence[bytes], raw_addresses: Sequence[bytes]) -> None:
        """Store or replace the address of the frame in which the page of each key is being written."""
        self._put(self._tables.pending, keys, raw_addresses)

    def delete(self, tier: Tier, keys: Sequence[bytes]) -> int:
        """Remove keys from a tier, and return how many had an entry."""
        return self._delete(self._tables.tiers[tier], keys)

    def delete_pending(self, keys: Sequence[bytes]) -> int:
        """Remove keys from the pending table, and return how many had an entry."""
        return self._delete(self._tables.pending, keys)

    def put_groups(self, hashes: Sequence[bytes], entries: Sequence[bytes]) -> None:
        """List complete groups, each with its ``GROUP_ENTRY``."""
        self._put(self._tables.groups, hashes, entries)

    def delete_groups(self, hashes: Sequence[bytes]) -> int:
        """Remove groups from the list, and return how many were listed."""
        return self._delete(self._tables.groups, hashes)

    def find(self, tier: Tier, key: bytes) -> Address | None:
        """Do the same as ``Index.find``, including what this transaction has written."""
        return self._find(key, self._tables.tiers[tier])

    def find_pending(self, key: bytes) -> Address | None:
        """Do the same as ``Index.find_pending``, including what this transaction has written."""
        return self._find(key, self._tables.pending)

    def _put(self, table: Any, keys: Sequence[bytes], raw_addresses: Sequence[bytes]) -> None:
        self._ensure_memory(len(keys))
        try:
            with self._transaction.cursor(table) as cursor:
                cursor.putmulti(zip(keys, raw_addresses, strict=True))
        except lmdb.Error as error:
            translate(error)

    def _delete(self, table: Any, keys: Sequence[bytes]) -> int:
        self._ensure_memory(len(keys))
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

    def _ensure_memory(self, keys: int) -> None:
        memory = self._memory
        pages = keys * PAGES_PER_KEY if self._dirty_pages else PAGES_PER_TXN + keys * PAGES_PER_KEY
        self._dirty_pages += pages
        memory.spare_pages -= pages
        if memory.spare_pages < 0:
            memory.ensure(self._dirty_pages, self._info())


__all__ = ["Index", "IndexCrowded", "IndexDamaged", "IndexFull", "WriteTxn"]

SCAN_BATCH: Final = 4096  # entries to read per transaction, so that a slow consumer does not keep an old version in use

_ADDRESS = struct.Struct("<IIQ")  # ADDRESS_DTYPE
assert _ADDRESS.size == ADDRESS_DTYPE.itemsize
_unpack = _ADDRESS.unpack_from
_address = Address._make


class Index:
    """The index of one epoch. Made by ``open_writer`` (the daemon) or ``open_reader``; ends with ``close()``.

    Any thread may call it; write transactions wait for each other. Every call raises IndexDamaged if the index is
    damaged, after ``close``, and in a forked child (which may open an index of its own).
    """

    def __init__(self, path: Path, epoch: int, environment: lmdb.Environment, tables: Tables) -> None:
        self.path = path
        self.epoch = epoch
        self._environment: lmdb.Environment | None = environment
        self._tables = tables
        self._begin: Any = environment.begin  # bound once, because every get calls it
        self._memory = MapMemory(path)
        _indexes.add(self)

    @classmethod
    def open_writer(
        cls, folder: NodeFolder, epoch: int, map_bytes: int, fresh: bool, tiers: Iterable[Tier] = ()
    ) -> Index:
        """Open the daemon's index of ``epoch``: a new, empty one if ``fresh``, else the existing one.

        Make a new one only under an epoch that no client has seen: clients that have opened an epoch keep its files.

        Args:
            map_bytes: size of a new index: about 70 bytes per page, and as much again for pages that readers hold. An
                existing index keeps its size.
            tiers: tiers of the node, in addition to those that every index has a table for.

        Raises:
            IndexDamaged: not ``fresh``, and the index is absent, cut short, in another format or unreadable.
            IndexFull: there is no memory for a new one.
            NodeBusy: readers in this process have opened it as the index of another daemon; close them first.
        """
        path = folder.index(epoch)
        if fresh:
            env.make(path, folder, map_bytes, dict.fromkeys(tiers, ()), ())
        stored = env.stored_map_bytes(path)
        if stored is None:
            raise IndexDamaged(f"{path} is absent, cut short or of another format")
        try:
            return cls(path, epoch, *env.open_shared(path, stored, folder.file_mode))
        except (lmdb.Error, OSError) as error:
            raise IndexDamaged(f"{path} cannot be opened ({error})") from error

    @classmethod
    def open_reader(cls, folder: NodeFolder, epoch: int) -> Index | None:
        """Open a client's index of ``epoch``. Return None if it is absent or damaged."""
        path = folder.index(epoch)
        if env.stored_map_bytes(path) is None:
            return None
        try:
            return cls(path, epoch, *env.open_shared(path, None, folder.file_mode))
        except (lmdb.Error, OSError):  # OSError: it was removed in the meantime
            return None

    @staticmethod
    def rebuild(
        folder: NodeFolder,
        old_epoch: int | None,
        new_epoch: int,
        pages: Mapping[Tier, Iterable[tuple[bytes, bytes]]],
        map_bytes: int,
        pending: Iterable[tuple[bytes, bytes]] = (),
        groups: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Make the index of ``new_epoch`` from the ``(key, raw address)`` pairs of each tier and of ``pending``.

        ``groups`` are pairs of a complete group's hash and its ``GROUP_ENTRY``.

        The pairs of a tier are sorted and have no equal keys. Among equal keys in ``pending`` the first counts. The
        index appears as a whole at the end; a crash leaves the old one. The old epoch stays until ``remove``, and
        readers use it until they see the new one. Call ``open_writer`` afterwards.

        Raises:
            IndexFull: it does not fit into ``map_bytes`` or the available memory; nothing has changed.
        """
        assert old_epoch is None or old_epoch < new_epoch, (old_epoch, new_epoch)
        env.make(folder.index(new_epoch), folder, map_bytes, pages, pending, groups)

    @staticmethod
    def remove(folder: NodeFolder, epoch: int) -> None:
        """Remove an epoch's files, if there are any. Readers that have opened it keep what they see."""
        with contextlib.suppress(OSError):
            remove(folder.index(epoch))

    # --- reading: nothing is changed, results are copies ------------------------------------------------------------

    def find(self, tier: Tier, key: bytes) -> Address | None:
        """Return the last known address of the sealed page with key ``key`` in this tier."""
        return self._find(self._tables.tiers[tier], key)

    def find_pending(self, key: bytes) -> Address | None:
        """Return the frame in which the page with key ``key`` is being written."""
        return self._find(self._tables.pending, key)

    def _find(self, table: Any, key: bytes) -> Address | None:
        try:
            raw = self._begin(table).get(key)
            return None if raw is None else _address(_unpack(raw))
        except (lmdb.Error, struct.error) as error:
            translate(error)

    def find_many(self, tier: Tier, keys: Iterable[bytes]) -> list[bytes | None]:
        """Return the raw addresses (``ADDRESS_DTYPE``) of pages in this tier, all read at one moment; None for absent
        pages."""
        table = self._tables.tiers[tier]
        if table is None:
            return [None for _ in keys]
        try:
            return list(map(self._begin(table).get, keys))
        except lmdb.Error as error:
            translate(error)

    def find_groups(self, hashes: Iterable[bytes]) -> list[bytes | None]:
        """Return the ``GROUP_ENTRY`` of each listed group, all read at one moment; None for a group that is not
        complete."""
        try:
            return list(map(self._begin(self._tables.groups).get, hashes))
        except lmdb.Error as error:
            translate(error)

    def longest(self, tier: Tier, keys: Sequence[bytes], mostly_new: bool = False) -> tuple[int, bytes | None]:
        """Return how many leading ``keys`` of a chain are in this tier, and the raw address of the last such page. A
        hint.

        The last key is looked up first (a full hit costs one look), then the first one (a full miss costs two). Then
        the search halves the range, because no page is stored without the pages before it. ``keys`` may start anywhere
        in a chain. With ``mostly_new`` the first key is looked up before the last one (a full miss costs one look).
        """
        table = self._tables.tiers[tier]
        if not keys or table is None:
            return 0, None
        try:
            get = self._begin(table).get
            if mostly_new and get(keys[0]) is None:
                return 0, None
            raw: bytes | None = get(keys[-1])
            return (len(keys), raw) if raw is not None else _leading(get, keys)
        except lmdb.Error as error:
            translate(error)

    def count(self, tier: Tier) -> int:
        """Return how many pages are in that tier."""
        return self._entries(self._tables.tiers[tier])

    def count_pending(self) -> int:
        """Return how many pages are being written."""
        return self._entries(self._tables.pending)

    def scan(self, tier: Tier) -> Iterator[tuple[bytes, bytes]]:
        """Yield ``(key, raw address)`` of every page in this tier, in key order.

        The scan reads ``SCAN_BATCH`` entries at a time. It may or may not see changes that are made in the meantime.
        """
        return self._scan(self._tables.tiers[tier])

    def scan_pending(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield ``(key, raw address)`` of every page that is being written, in key order."""
        return self._scan(self._tables.pending)

    def scan_groups(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the hash and the ``GROUP_ENTRY`` of every complete group."""
        return self._scan(self._tables.groups)

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
            start = batch[-1][0] + b"\0"  # the smallest larger key

    def snapshot(self) -> dict[Tier, Iterator[tuple[bytes, bytes]]]:
        """Return, by tier, ``(key, raw address)`` of every page as of now, even if the iterators are read later.

        Read the iterators soon and in this thread, or drop them: until then, no page of the file is reused.
        """
        try:
            transaction = self._begin()
        except lmdb.Error as error:
            translate(error)
        return {tier: _entries_of(transaction, table) for tier, table in self._tables.tiers.items()}

    def _entries(self, table: Any) -> int:
        try:
            return int(self._begin(table).stat(table)["entries"])
        except lmdb.Error as error:
            translate(error)

    # --- writing ----------------------------------------------------------------------------------------------------

    def begin(self) -> WriteTxn:
        """Return a write transaction, to be used as a context: ``with index.begin() as txn``."""
        return WriteTxn(self._begin, self._tables, self._memory, self._info)

    def reserve(self, entries: int, step_keys: int) -> None:
        """Allocate memory for ``entries`` entries, and for transactions of ``step_keys`` that change them.

        Raises:
            IndexFull: there is not enough memory. Everything that was possible before still is.
        """
        self._memory.reserve(entries, step_keys, self._info())

    def clear_dead_readers(self) -> int:
        """Free the slots of readers that died inside a read, and return how many. Such slots keep old pages from being
        reused."""
        try:
            return int(self._live().reader_check())
        except lmdb.Error as error:
            translate(error)

    @property
    def map_bytes(self) -> int:
        """Size of the map, fixed when the epoch was made."""
        return int(self._info()["map_size"])

    def used_bytes(self) -> int:
        """Return how many bytes of the map were ever used, including pages that are free for reuse."""
        return (int(self._info()["last_pgno"]) + 1) * PAGE_BYTES

    def close(self) -> None:
        """Close the index. From now on, every call raises IndexDamaged. The files stay."""
        _indexes.discard(self)
        self._drop()

    def _drop(self) -> None:
        # Only references are dropped; LMDB closes with the last one. A thread inside a read has its own reference.
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


def _entries_of(transaction: Any, table: Any) -> Iterator[tuple[bytes, bytes]]:
    try:
        with transaction.cursor(table) as cursor:
            yield from cursor
    except lmdb.Error as error:
        translate(error)


def _leading(get: Any, keys: Sequence[bytes]) -> tuple[int, bytes | None]:
    """Return how many leading keys ``get`` finds, and the value of the last of these. The caller knows that the last of
    ``keys`` misses."""
    last = get(keys[0]) if len(keys) > 1 else None
    if last is None:
        return 0, None
    low, high = 1, len(keys) - 1
    while low < high:  # keys[:low] are present, keys[high] is absent
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
