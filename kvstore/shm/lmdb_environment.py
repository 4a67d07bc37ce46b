"""LMDB environments of this process: opened once each, shared, dropped in a forked child, and never short of memory.

LMDB must not open an environment twice in one process, nor use one across a fork. So all writers and readers of a
process share an environment through a registry of weak references. The last ``Index`` that drops its reference closes
it; a thread that is inside a read has a reference of its own. A forked child drops its parent's environments without
closing them, because closing would free the parent's slots in the table of readers. The child may open its own.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import threading
import weakref
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import lmdb

from kvstore.errors import NodeBusy, OutOfSpace
from kvstore.model.replica import Tier
from kvstore.safe_files import check_plain, open_plain, remove
from kvstore.shm.folder import NodeFolder, allocate

READERS_MAX: Final = 1024  # read transactions at a time, across all processes of the node
PAGE_BYTES: Final = 4096
MAP_BYTES_MIN: Final = 64 * PAGE_BYTES
FILL_BATCH: Final = 65536  # entries per transaction: below LMDB's limit of dirty pages
# The map file's memory is allocated this far ahead of what a transaction may dirty. LMDB writes through the map, and a
# store to a page that a full tmpfs cannot give kills the process (SIGBUS).
PAGES_AHEAD: Final = 512

# A table of key -> address per tier, one for the pages that are being written, and one of complete groups of objects.
TIER_TABLES: Final = {Tier.DRAM: b"sealed", Tier.NVME: b"nvme", Tier.HBM: b"hbm"}
PENDING: Final = b"pending"
GROUPS: Final = b"groups"

_META = struct.Struct("<16xII8xQ")  # LMDB 0.9: page header; magic, data version, address; map size
_META_MAGIC: Final = 0xBEEFC0DE

# Transactions are not cached. A cached one keeps its slot in the shared table of readers; a forked child that closes
# would free that slot under its parent. This costs 0.1 us per read.
_COMMON: Final[dict[str, Any]] = {
    "subdir": True,
    "max_dbs": 2 + len(TIER_TABLES),
    "max_readers": READERS_MAX,
    "max_spare_txns": 0,
    "lock": True,
    "readahead": False,
}
_WRITER: Final = _COMMON | {"sync": False, "metasync": False, "writemap": True, "map_async": True, "meminit": False}
_READER: Final = _COMMON | {"readonly": True, "create": False, "map_size": 0}  # 0: the size that the writer chose

Entry = tuple[bytes, bytes]  # key, raw address


class IndexDamaged(Exception):
    """The index cannot be trusted, or is closed. A reader treats this as a miss; the daemon rebuilds the index."""


class IndexCrowded(IndexDamaged):
    """All ``READERS_MAX`` slots are taken. A reader treats this as a miss; the daemon clears dead readers each tick."""


class IndexFull(Exception):
    """There is no room in the map or in memory. Nothing of the transaction is stored; the daemon rebuilds the index."""


_DAMAGE: Final = (
    lmdb.BadDbiError,
    lmdb.BadTxnError,
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.MapResizedError,
    lmdb.NotFoundError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
)
_FULL: Final = (lmdb.MapFullError, lmdb.TxnFullError, lmdb.DiskError, lmdb.MemoryError)


def translate(error: Exception) -> NoReturn:
    """Translate an LMDB error and raise it. An error of the caller's own (a key that is too long) is raised
    unchanged."""
    if isinstance(error, _FULL):
        raise IndexFull(str(error)) from error
    if isinstance(error, lmdb.ReadersFullError):
        raise IndexCrowded(str(error)) from error
    # lmdb.Error itself, not a subclass: used after another thread closed it. struct.error: not an address.
    if isinstance(error, (*_DAMAGE, struct.error)) or type(error) is lmdb.Error:
        raise IndexDamaged(str(error) or type(error).__name__) from error
    raise error


class Tables(NamedTuple):
    """Handles of the index's tables: one per tier, one for pages that are being written, and one for groups."""

    tiers: Mapping[Tier, Any]
    pending: Any
    groups: Any


def open_shared(path: Path, map_bytes: int | None, file_mode: int) -> tuple[lmdb.Environment, Tables]:
    """Return this process's environment for ``path``, and its tables. It is opened on first use, for writing if
    ``map_bytes`` is set.

    Raises:
        NodeBusy: it is requested for writing, but this process has opened it for reading, as the index of another
            daemon.
        lmdb.Error, OSError: it cannot be opened, or a table is missing.
    """
    with _lock:
        status = os.stat(path / "data.mdb")
        identity = (status.st_dev, status.st_ino)
        environment = _environments.get(identity)
        if environment is None:
            options = _READER if map_bytes is None else _WRITER | {"map_size": map_bytes}
            environment = lmdb.open(str(path), mode=file_mode, **options)
            tables = _open_tables(environment, None)
            _environments[identity] = environment
            return environment, tables
        if map_bytes is not None and environment.flags()["readonly"]:
            raise NodeBusy(f"this process has {path} open for reading; close that store before serving the node")
        # LMDB's binding opens a table in a write transaction if it gets none, and keeps the interpreter locked while it
        # waits for the writer. The writer may be a thread of this process that waits for the interpreter.
        with environment.begin() as transaction:
            return environment, _open_tables(environment, transaction)


def _open_tables(environment: lmdb.Environment, transaction: lmdb.Transaction | None) -> Tables:
    def table(name: bytes) -> Any:
        return environment.open_db(name, transaction, create=False)

    return Tables({tier: table(name) for tier, name in TIER_TABLES.items()}, table(PENDING), table(GROUPS))


def make(
    path: Path,
    folder: NodeFolder,
    map_bytes: int,
    pages: Mapping[Tier, Iterable[Entry]],
    pending: Iterable[Entry],
    groups: Iterable[Entry] = (),
) -> None:
    """Make a new environment at ``path`` from the ``pages`` of each tier, ``pending`` and ``groups``.

    The pages are sorted by key. Among equal keys in ``pending`` the first counts. The environment appears as a whole
    at the end, and replaces an existing one.

    Raises:
        IndexFull: it does not fit into ``map_bytes`` or the available memory. Nothing has changed.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    remove(temporary)
    os.mkdir(temporary, folder.dir_mode)
    try:
        os.chmod(temporary, folder.dir_mode)  # independent of the umask
        tables = [(name, pages.get(tier, ()), True) for tier, name in TIER_TABLES.items()]
        _fill(temporary, folder, map_bytes, [*tables, (PENDING, pending, False), (GROUPS, groups, False)])
        remove(path)
        os.rename(temporary, path)
    except lmdb.Error as error:
        translate(error)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fill(
    path: Path, folder: NodeFolder, map_bytes: int, tables: Iterable[tuple[bytes, Iterable[Entry], bool]]
) -> None:
    map_size = max(MAP_BYTES_MIN, -(-map_bytes // PAGE_BYTES) * PAGE_BYTES)
    # Not in the registry, because no other thread can open it under this name.
    environment = lmdb.open(str(path), mode=folder.file_mode, **(_WRITER | {"map_size": map_size}))
    try:
        for name in ("data.mdb", "lock.mdb"):
            os.chmod(path / name, folder.file_mode)
        allocate_map(path, min(map_size, PAGES_AHEAD * PAGE_BYTES))
        for table_name, pairs, in_order in tables:
            table, entries = environment.open_db(table_name), iter(pairs)
            while batch := list(islice(entries, FILL_BATCH)):
                # Sorted entries fill pages: 42 bytes per entry, branches and a margin. Others fill them by half.
                pages = environment.info()["last_pgno"] + len(batch) // (64 if in_order else 24) + PAGES_AHEAD
                allocate_map(path, min(map_size, pages * PAGE_BYTES))
                with environment.begin(table, write=True) as transaction, transaction.cursor() as cursor:
                    cursor.putmulti(batch, overwrite=in_order, append=in_order)
    finally:
        environment.close()


def allocate_map(path: Path, size_bytes: int) -> None:
    """Allocate memory for the first ``size_bytes`` of a map file. Raises IndexFull if there is not enough."""
    # LMDB keeps its process locks on lock.mdb only, so opening and closing the data file here drops none of them.
    fd = open_plain(path / "data.mdb", os.O_RDWR)
    try:
        allocate(fd, 0, size_bytes, str(path))
    except OutOfSpace as error:
        raise IndexFull(str(error)) from None
    finally:
        os.close(fd)


def stored_map_bytes(path: Path) -> int | None:
    """Return the map size of an environment; None if it is absent, in another format, or shorter than when it was made.

    The length matters: a read beyond the end of a mapped file raises SIGBUS, not an error.
    """
    try:
        # LMDB follows links, so its files are checked before it opens them. The check does not open them: closing any
        # descriptor of the lock file would drop the locks that this process has on it.
        check_plain(path, stat.S_IFDIR)
        check_plain(path / "lock.mdb", stat.S_IFREG)
        with open(open_plain(path / "data.mdb", os.O_RDONLY), "rb") as file:
            head = file.read(_META.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return None
    if len(head) < _META.size:
        return None
    magic, _, map_bytes = _META.unpack(head)
    return map_bytes if magic == _META_MAGIC and 0 < map_bytes <= size else None


# Environments of this process by (device, inode) of their data file.
_environments: weakref.WeakValueDictionary[tuple[int, int], lmdb.Environment] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _environments, _lock
    _lock = threading.Lock()
    _environments = weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_after_fork_in_child)
