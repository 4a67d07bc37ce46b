"""Index: page key -> address, in LMDB under ``index-<epoch>/``. The daemon writes, every client maps and reads.

It is a hint that can always be rebuilt from the records: it is never made durable, and a damaged one is not repaired
but replaced, under a new epoch that clients compare. Its size is fixed when an epoch is made; growing is a rebuild.

Two tables: ``sealed`` (key -> addresses, 16 bytes each, for now exactly one) and ``pending`` (key -> address of the
reserved frame that is being written).
"""

from __future__ import annotations

import os
import shutil
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

import lmdb

from kvstore.model.replica import ADDRESS_DTYPE, Address
from kvstore.tier import environment as env
from kvstore.tier.environment import PAGE_BYTES, PAGES_AHEAD, IndexCrowded, IndexDamaged, IndexFull, translate
from kvstore.tier.folder import NodeFolder

__all__ = ["Index", "IndexCrowded", "IndexDamaged", "IndexFull", "WriteTxn"]

SCAN_BATCH: Final = 4096  # entries read per transaction, so that a slow consumer holds no old version alive
# Pages that one changed key may dirty: the path from the root (4 levels: 40 M keys) and splits. And what every
# transaction dirties besides: roots of the tables, the list of free pages.
PAGES_PER_KEY: Final = 6
PAGES_PER_TXN: Final = 32

_ADDRESS = struct.Struct("<IIQ")  # ADDRESS_DTYPE
assert _ADDRESS.size == ADDRESS_DTYPE.itemsize
_unpack = _ADDRESS.unpack_from
_address = Address._make


class Index:
    """One epoch's index. Made by ``open_writer`` (the daemon) or ``open_reader``; ends with ``close()``.

    Verbs may be called from any thread; write transactions wait for one another. Every verb raises IndexDamaged where
    the index cannot be believed, after ``close``, and in a forked child (which may open its own).
    """

    def __init__(self, path: Path, epoch: int, environment: lmdb.Environment) -> None:
        self.path = path
        self.epoch = epoch
        self._environment: lmdb.Environment | None = environment
        self._sealed = environment.open_db(env.SEALED, create=False)
        self._pending = environment.open_db(env.PENDING, create=False)
        self._begin: Any = environment.begin  # bound once: it is on the path of every get
        # Of the map file, as far as this writer made sure: pages with memory, and those that no transaction since may
        # have dirtied.
        self._allocated_pages = 0
        self._spare_pages = 0
        _indexes.add(self)

    @classmethod
    def open_writer(cls, folder: NodeFolder, epoch: int, map_bytes: int, fresh: bool) -> Index:
        """The daemon's index of ``epoch``: a new, empty one, or (not ``fresh``) the one that is there.

        ``map_bytes`` is the size of a new one: about 70 bytes per page, and as much again for what readers hold; one
        that is there keeps its size. Make a new one only under an epoch that no client has seen: clients that have an
        epoch open stay with its files.

        Raises:
            IndexDamaged: not ``fresh``, and there is none, or it is cut short, of another format or unreadable.
            IndexFull: no memory for a new one.
            NodeBusy: this process reads it as another daemon's; close those readers first.
        """
        path = folder.index(epoch)
        if fresh:
            env.make(path, folder, map_bytes, (), ())
        stored = env.stored_map_bytes(path)
        if stored is None:
            raise IndexDamaged(f"{path} is absent, cut short or of another format")
        try:
            return cls(path, epoch, env.open_shared(path, stored, folder.file_mode))
        except (lmdb.Error, OSError) as error:
            raise IndexDamaged(f"{path} cannot be opened ({error})") from error

    @classmethod
    def open_reader(cls, folder: NodeFolder, epoch: int) -> Index | None:
        """A client's index of ``epoch``; None where it is absent or cannot be believed."""
        path = folder.index(epoch)
        if env.stored_map_bytes(path) is None:
            return None
        try:
            return cls(path, epoch, env.open_shared(path, None, folder.file_mode))
        except (lmdb.Error, OSError):  # OSError: removed meanwhile
            return None

    @staticmethod
    def rebuild(
        folder: NodeFolder,
        old_epoch: int | None,
        new_epoch: int,
        items: Iterable[tuple[bytes, bytes]],
        map_bytes: int,
        pending: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """Make the index of ``new_epoch`` out of ``(key, raw address)`` items, ``items`` sorted and without equal keys.

        Of equal keys in ``pending`` the first counts. It appears whole at the end: a crash leaves what was there. The
        old epoch stays until ``remove``; readers go on with it until they see the new one. Then ``open_writer`` it.

        Raises:
            IndexFull: it does not fit ``map_bytes`` or the memory there is; nothing has changed.
        """
        assert old_epoch is None or old_epoch < new_epoch, (old_epoch, new_epoch)
        env.make(folder.index(new_epoch), folder, map_bytes, items, pending)

    @staticmethod
    def remove(folder: NodeFolder, epoch: int) -> None:
        """Remove an epoch's files, if there are any. Readers that have it open keep what they see."""
        shutil.rmtree(folder.index(epoch), ignore_errors=True)

    # --- reading: nothing is changed, results are copies ------------------------------------------------------------

    def find(self, key: bytes) -> Address | None:
        """Where the sealed page of ``key`` was last known to be."""
        try:
            raw = self._begin(self._sealed).get(key)
            return None if raw is None else _address(_unpack(raw))
        except (lmdb.Error, struct.error) as error:
            translate(error)

    def find_pending(self, key: bytes) -> Address | None:
        """The frame in which the page of ``key`` is being written."""
        try:
            raw = self._begin(self._pending).get(key)
            return None if raw is None else _address(_unpack(raw))
        except (lmdb.Error, struct.error) as error:
            translate(error)

    def find_many(self, keys: Iterable[bytes]) -> list[bytes | None]:
        """Raw addresses (``ADDRESS_DTYPE``) of sealed pages, None where not stored; all of one moment."""
        try:
            return list(map(self._begin(self._sealed).get, keys))
        except lmdb.Error as error:
            translate(error)

    def longest(self, keys: Sequence[bytes]) -> tuple[int, bytes | None]:
        """How many leading ``keys`` of a chain are stored, and the raw address of the last of them. A hint.

        Looks at the last key first (a full hit costs one look), then halves: right because no page is stored without
        the pages before it.
        """
        high = len(keys)
        if high == 0:
            return 0, None
        try:
            get = self._begin(self._sealed).get
            raw: bytes | None = get(keys[-1])
            if raw is not None:
                return high, raw
            low, last = 0, None
            high -= 1
            while low < high:  # keys[:low] are stored, keys[high] is not
                middle = (low + high) // 2
                raw = get(keys[middle])
                if raw is None:
                    high = middle
                else:
                    low, last = middle + 1, raw
            return low, last
        except lmdb.Error as error:
            translate(error)

    def count(self) -> int:
        """How many pages are sealed."""
        return self._entries(self._sealed)

    def count_pending(self) -> int:
        """How many pages are being written."""
        return self._entries(self._pending)

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """``(key, raw address)`` of every sealed page, by key.

        Reads ``SCAN_BATCH`` entries at a time: what is written meanwhile may or may not be seen.
        """
        return self._scan(self._sealed)

    def scan_pending(self) -> Iterator[tuple[bytes, bytes]]:
        """The same of pages being written."""
        return self._scan(self._pending)

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

    def _entries(self, table: Any) -> int:
        try:
            return int(self._begin(table).stat(table)["entries"])
        except lmdb.Error as error:
            translate(error)

    # --- writing ----------------------------------------------------------------------------------------------------

    def begin(self) -> WriteTxn:
        """A write transaction: ``with index.begin() as txn``. Committed on exit, dropped whole on an exception."""
        return WriteTxn(self)

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

    def _make_room(self, pages: int) -> None:
        """Have memory for the ``pages`` that the transaction in progress may have dirtied, and some to spare.

        Raises:
            IndexFull: there is none. (The end of the map is LMDB's to notice.)
        """
        info = self._info()
        used, map_pages = int(info["last_pgno"]) + 1, int(info["map_size"]) // PAGE_BYTES
        if min(used + pages, map_pages) > self._allocated_pages:
            wanted = min(used + pages + PAGES_AHEAD, map_pages)
            env.allocate_map(self.path, wanted * PAGE_BYTES)
            self._allocated_pages = wanted
        self._spare_pages = max(0, self._allocated_pages - used - pages)


class WriteTxn:
    """A write transaction of the daemon's index. Made by ``Index.begin``; used once, in one thread, as a context.

    Leaving commits: readers see all of it or nothing. Leaving by an exception drops all of it. Verbs and the commit
    raise IndexFull or IndexDamaged; then nothing of it is stored.
    """

    __slots__ = ("_index", "_transaction", "_dirty_pages")

    def __init__(self, index: Index) -> None:
        self._index = index
        self._transaction: Any = None
        self._dirty_pages = 0  # at most

    def __enter__(self) -> WriteTxn:
        index = self._index
        try:
            self._transaction = index._begin(index._sealed, None, True)
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

    def put_sealed(self, keys: Sequence[bytes], raw_addresses: Sequence[bytes]) -> None:
        """Store or replace the address of each key (raw: 16 bytes, ``ADDRESS_DTYPE``)."""
        self._put(self._index._sealed, keys, raw_addresses)

    def put_pending(self, keys: Sequence[bytes], raw_addresses: Sequence[bytes]) -> None:
        """Store or replace the address of the frame in which each key's page is being written."""
        self._put(self._index._pending, keys, raw_addresses)

    def delete_sealed(self, keys: Sequence[bytes]) -> int:
        """Remove keys; those that are not there are skipped. Returns how many were."""
        return self._delete(self._index._sealed, keys)

    def delete_pending(self, keys: Sequence[bytes]) -> int:
        """Remove keys from the pending table; those that are not there are skipped. Returns how many were."""
        return self._delete(self._index._pending, keys)

    def find(self, key: bytes) -> Address | None:
        """As ``Index.find``, with what this transaction wrote."""
        return self._find(key, self._index._sealed)

    def find_pending(self, key: bytes) -> Address | None:
        """As ``Index.find_pending``, with what this transaction wrote."""
        return self._find(key, self._index._pending)

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
            return None if raw is None else _address(_unpack(raw))
        except (lmdb.Error, struct.error) as error:
            translate(error)

    def _need(self, keys: int) -> None:
        index = self._index
        pages = keys * PAGES_PER_KEY if self._dirty_pages else PAGES_PER_TXN + keys * PAGES_PER_KEY
        self._dirty_pages += pages
        index._spare_pages -= pages
        if index._spare_pages < 0:
            index._make_room(self._dirty_pages)


def _closed(*_: object) -> NoReturn:
    raise IndexDamaged("the index is closed, or was opened before a fork")


_indexes: weakref.WeakSet[Index] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """The parent's indexes are closed here: their environments must not be used across a fork."""
    for index in list(_indexes):
        index._drop()
    _indexes.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
