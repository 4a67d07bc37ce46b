"""NodeFolder: the files of one node in shared memory, and the lock that makes one daemon their owner.

::

    <shm_dir>/kvstore-<name>/          mode 0700, or 0770 if the node is shared with its group
        lock                           flock: its holder owns the folder; text: pid
        control                        unix socket of the daemon
        header                         one page of words (header.Header)
        segment                        the data (dram.SegmentFile)
        records-<extent>  uses-<extent>    tables of each carved extent (records.ExtentTable)
        index-<epoch>/                 LMDB: key -> address (index.Index)
        puts                           published puts that are not applied yet (put_log.PutLog); may be absent
        secret                         secret of the node's pool (read_secret)
        nvme                           paths of its NVMe files (nvme_map.NvmeMap); absent without NVMe
        data                           the running data server, locked by it (data_server_file)
        brought                        pages of other nodes that were read here recently (client.local.brought)
        traffic                        token bucket of its background traffic (traffic.TrafficBucket)
        member                         what its daemon last published in a catalog; absent if nothing
        mounted-<n>  -data  -pass      memory that an engine mounted: its records, the memory, a socket (mounted)
        quarantine                     positions that must not be used yet (quarantine); absent if empty
        sessions/<16 hex digits>       one file per client, locked by it, with its counters (counters)
        .tmp-*                         a file that is being made; removed when the next owner starts

All processes that can open these files are one trust domain: clients write the pages themselves.

``purge`` removes a folder with all its files, and nothing else. It opens the folder once, as a directory that is not a
link, and works on that descriptor. The folder's creator may exchange files in the meantime; no link is followed.

The file ``secret`` names the incarnation of the memory that it belongs to, and is written before the header has that
incarnation. If it is absent or damaged, the keys of that memory cannot be computed: its pages are lost, and the next
start makes the memory again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.errors import InvalidRequest, NodeBusy, OutOfSpace
from kvstore.model.prefix import SECRET_BYTES
from kvstore.safe_files import NotPlain, is_file_of, is_locked, open_folder, open_plain, read_plain, remove

PREFIX: Final = "kvstore-"
EMBEDDED_PREFIX: Final = "kvstore-embedded-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TEMPORARY = ".tmp-"
# `kvstore status` takes a shared lock for microseconds. A daemon, on startup, therefore tries more than once.
LOCK_TRIES = 50
LOCK_RETRY_S = 0.01


class NodeFolder:
    """Paths in one node's folder, and its lock. The constructor changes nothing.

    Life of the lock: ``lock()`` takes it, and makes the folder if it is absent. It ends with ``close()`` or with the
    process. A forked child never keeps it.

    Raises:
        InvalidRequest: ``name`` cannot be a node's name.
    """

    def __init__(self, shm_dir: str | os.PathLike[str], name: str, group_shared: bool = False) -> None:
        if not _NAME.fullmatch(name):
            raise InvalidRequest("name", f"{name!r} must be 1..64 letters, digits, '.', '_' or '-', no '.' in front")
        self.name = name
        self.path = Path(shm_dir) / f"{PREFIX}{name}"
        self.group_shared = group_shared
        self.dir_mode = 0o770 if group_shared else 0o700
        self.file_mode = 0o660 if group_shared else 0o600
        self._lock_fd = -1

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> NodeFolder:
        """Return the folder at ``path`` (``.../kvstore-<name>``). It is shared if the directory's mode says so.

        Raises:
            InvalidRequest: the last part of ``path`` is not a node folder's name.
        """
        where = Path(path)
        if not where.name.startswith(PREFIX):
            raise InvalidRequest("path", f"{where} is not a node's folder: the name must start with {PREFIX!r}")
        group_shared = False
        with contextlib.suppress(OSError):
            group_shared = bool(where.lstat().st_mode & stat.S_IRGRP)
        return cls(where.parent, where.name.removeprefix(PREFIX), group_shared)

    @property
    def lock_file(self) -> Path:
        """The lock file. The holder of its flock owns the folder."""
        return self.path / "lock"

    @property
    def control(self) -> Path:
        """The daemon's unix socket."""
        return self.path / "control"

    @property
    def header(self) -> Path:
        """The page of words that clients read before every operation."""
        return self.path / "header"

    @property
    def segment(self) -> Path:
        """The segment's data."""
        return self.path / "segment"

    @property
    def sessions(self) -> Path:
        """The folder of session files."""
        return self.path / "sessions"

    def session(self, session_id: int) -> Path:
        """Return the file that the client of ``session_id`` keeps locked."""
        return self.sessions / f"{session_id:016x}"

    def records(self, extent: int) -> Path:
        """Return the record table of ``extent``."""
        return self.path / f"records-{extent}"

    def uses(self, extent: int) -> Path:
        """Return the uses table of ``extent``."""
        return self.path / f"uses-{extent}"

    @property
    def nvme(self) -> Path:
        """What clients need to read the node's NVMe (nvme_map.NvmeMap); absent without NVMe."""
        return self.path / "nvme"

    @property
    def puts(self) -> Path:
        """The published puts (put_log.PutLog)."""
        return self.path / "puts"

    @property
    def secret(self) -> Path:
        """The secret of the node's pool."""
        return self.path / "secret"

    @property
    def data_server(self) -> Path:
        """The data server's file (data_server_file); absent if no data server ever ran."""
        return self.path / "data"

    def index(self, epoch: int) -> Path:
        """Return the LMDB environment of ``epoch``."""
        return self.path / f"index-{epoch}"

    def extents(self) -> list[int]:
        """Return the numbers of the extents with a record table, ascending. The tables may be damaged."""
        return self._numbers("records-")

    def epochs(self) -> list[int]:
        """Return the epochs of the indexes, ascending. The indexes may be damaged."""
        return self._numbers("index-")

    def _numbers(self, prefix: str) -> list[int]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        tails = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return sorted(int(tail) for tail in tails if tail.isdecimal())

    def create(self) -> None:
        """Make the folder and ``sessions/`` if they are absent. Existing files stay.

        Raises:
            InvalidRequest: ``shm_dir`` is absent, or the name belongs to another user's folder or to a file.
            FileNotFoundError: the folder was purged at the same moment.
        """
        is_new = self._make()
        try:
            fd = open_folder(self.path)
        except NotPlain:
            raise InvalidRequest("name", f"{self.path} is not a folder, or is a link; take another name") from None
        except PermissionError:
            raise InvalidRequest("name", f"{self.path} belongs to another user; take another name") from None
        try:
            owner = os.fstat(fd).st_uid
            if owner != os.geteuid():
                raise InvalidRequest("name", f"{self.path} belongs to user {owner}; take another name")
            if is_new:
                os.fchmod(fd, self.dir_mode)  # independent of the umask
            self._make_sessions(fd)
        finally:
            os.close(fd)

    def _make(self) -> bool:
        """Make the folder; return False if it exists."""
        try:
            os.mkdir(self.path, self.dir_mode)
            return True
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise InvalidRequest("shm_dir", f"{self.path.parent} does not exist") from None

    def _make_sessions(self, folder_fd: int) -> None:
        name = self.sessions.name
        is_new = True
        try:
            os.mkdir(name, self.dir_mode, dir_fd=folder_fd)
        except FileExistsError:
            is_new = False
        try:
            fd = open_folder(name, dir_fd=folder_fd)
        except NotPlain:
            raise InvalidRequest("name", f"{self.sessions} is not a folder, or is a link; purge the node") from None
        if is_new:
            os.fchmod(fd, self.dir_mode)
        os.close(fd)

    def is_trusted(self) -> bool:
        """Return True if the folder exists and belongs to this user, to root, or to a group that shares it with us.

        Any user may create a name in /dev/shm, so a client maps no folder that a stranger made.
        """
        try:
            status = os.lstat(self.path)
        except OSError:
            return False
        if not stat.S_ISDIR(status.st_mode):
            return False
        in_group = bool(status.st_mode & stat.S_IRGRP) and status.st_gid in {os.getegid(), *os.getgroups()}
        return status.st_uid in (os.geteuid(), 0) or in_group

    def lock(self) -> None:
        """Become the owner: make the folder if it is absent, lock it, and remove a dead owner's unfinished files.

        Raises:
            NodeBusy: another process, or another NodeFolder of this process, holds the lock.
            InvalidRequest: as ``create``.
        """
        assert self._lock_fd < 0, "locked already"
        for attempt in range(LOCK_TRIES):
            try:
                self.create()
                fd = open_plain(self.lock_file, os.O_RDWR | os.O_CREAT, self.file_mode)
            except NotPlain:
                raise InvalidRequest("name", f"{self.lock_file} is not a plain file; purge the node") from None
            except FileNotFoundError:  # purged in the meantime
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                by = holder(fd)
                os.close(fd)
                if attempt + 1 == LOCK_TRIES:
                    raise NodeBusy(f"node {self.name!r} is held by {by} ({self.path})") from None
                time.sleep(LOCK_RETRY_S)
                continue
            if is_file_of(fd, self.lock_file):
                break
            os.close(fd)  # the locked file was purged
        else:
            raise NodeBusy(f"node {self.name!r} is being purged again and again ({self.path})")
        os.fchmod(fd, self.file_mode)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._lock_fd = fd
        _locked.add(self)
        self._remove_temporaries()

    @contextlib.contextmanager
    def block_starts(self) -> Iterator[None]:
        """Keep every daemon from owning the folder inside the context. Several processes may do so at the same time.

        Raises:
            NodeBusy: a daemon is running or starting.
            FileNotFoundError: the folder is being purged.
        """
        fd = open_plain(self.lock_file, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise NodeBusy(f"node {self.name!r} is held by {holder(fd)} ({self.path})") from None
        finally:
            os.close(fd)

    @property
    def locked(self) -> bool:
        """True while this object holds the lock."""
        return self._lock_fd >= 0

    def is_running(self) -> bool:
        """Return True if a process holds the lock: the node is running."""
        try:
            return is_locked(self.lock_file)
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock. The files stay, for the next owner and for readers."""
        if self.locked:  # explicitly: a child that another thread is just starting has the file open, too
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        _locked.discard(self)
        self._close_fd()

    def _close_fd(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_temporaries(self) -> None:
        for name in os.listdir(self.path):
            if name.startswith(_TEMPORARY) or (name.startswith("index-") and name.endswith(".tmp")):
                remove(self.path / name)
        for extent in set(self._numbers("uses-")).difference(self.extents()):  # a kill between two files of a table
            remove(self.uses(extent))

    def temporary(self, name: str) -> Path:
        """Return a path for a file that the next owner removes."""
        return self.path / f"{_TEMPORARY}{name}"

    def new_file(self, path: Path, size_bytes: int, head: bytes, sparse: bool = False) -> None:
        """Put a complete new file at ``path``, with zeros after ``head``. Readers see either the old or the new file.

        Maps of an old file at that path keep the old bytes. ``sparse`` leaves its memory unallocated.

        Raises:
            OutOfSpace: the file's memory could not be allocated; nothing has changed.
        """
        temporary = path.with_name(f"{_TEMPORARY}{path.name}")
        remove(temporary)
        fd = open_plain(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, self.file_mode)
        try:
            os.fchmod(fd, self.file_mode)  # independent of the umask
            if sparse:
                os.ftruncate(fd, size_bytes)
            else:
                allocate(fd, 0, size_bytes, str(path))
            os.pwrite(fd, head, 0)
            os.rename(temporary, path)
        except (OSError, OutOfSpace):
            os.unlink(temporary)
            raise
        finally:
            os.close(fd)


def allocate(fd: int, start: int, size_bytes: int, what: str) -> None:
    """Allocate the memory of ``[start, start + size_bytes)`` of a file now, so that no later store raises SIGBUS.

    Raises:
        OutOfSpace: there is not enough memory. Memory that was allocated before is kept.
    """
    try:
        os.posix_fallocate(fd, start, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        raise OutOfSpace(
            f"{what}: no memory for {size_bytes >> 10} KiB more ({error.strerror}); remedy: enlarge it with "
            "`mount -o remount,size=...` (docker: --shm-size), raise the memory limit, or give a smaller --dram"
        ) from None


def list_nodes(shm_dir: str | os.PathLike[str]) -> list[tuple[str, bool]]:
    """Return ``(name, is running)`` of every trusted node folder in ``shm_dir``, sorted by name."""
    nodes = []
    for name in folder_names(shm_dir, PREFIX):
        folder = NodeFolder.at(Path(shm_dir) / name)
        if folder.is_trusted():
            nodes.append((folder.name, folder.is_running()))
    return nodes


def folder_names(shm_dir: str | os.PathLike[str], prefix: str) -> list[str]:
    """Return the names in ``shm_dir`` that could be those of node folders. Owner and kind of the files are not
    checked."""
    try:
        names = os.listdir(shm_dir)
    except FileNotFoundError:
        return []
    return sorted(n for n in names if n.startswith(prefix) and _NAME.fullmatch(n.removeprefix(PREFIX)))


def holder(fd: int) -> str:
    """Describe the holder of the lock file ``fd``, for a message."""
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return f"process {text}" if text else "another process"


# A lock belongs to the open file, which a forked child shares: without this a child would keep a dead daemon's lock.
_locked: weakref.WeakSet[NodeFolder] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for folder in list(_locked):
        folder._close_fd()


os.register_at_fork(after_in_child=_after_fork_in_child)


_HEAD_BYTES = 32  # of the header: magic, version, incarnation, epoch


def purge(path: str | os.PathLike[str]) -> None:
    """Remove a node's folder with all its files. No-op if it is absent.

    Clients that still map it see incarnation 0 (the node is gone); their memory is freed when they unmap it. Only the
    owner of the folder and root may purge it. Links in it are not followed.

    Raises:
        NodeBusy: the daemon is running; nothing was removed.
        InvalidRequest: ``path`` is not a node's folder, or belongs to another user.
    """
    folder = NodeFolder.at(path)
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
        parent_fd, folder_fd = _open_both(folder, stack)
        _check_owner(folder, folder_fd, root_may=True)
        _purge(folder, parent_fd, folder_fd)


def check_purge(path: str | os.PathLike[str]) -> None:
    """Raise what ``purge`` would raise for ``path`` itself, and InvalidRequest if it is absent."""
    folder = NodeFolder.at(path)
    try:
        with contextlib.ExitStack() as stack:
            _check_owner(folder, _open_both(folder, stack)[1], root_may=True)
    except FileNotFoundError:
        raise InvalidRequest("names", f"there is no node {folder.name!r} on this machine") from None


def is_own_folder(path: str | os.PathLike[str]) -> bool:
    """Return True if the node folder at ``path`` belongs to this user."""
    with contextlib.suppress(InvalidRequest, OSError), contextlib.ExitStack() as stack:
        folder = NodeFolder.at(path)
        _check_owner(folder, _open_both(folder, stack)[1], root_may=False)
        return True
    return False


def reap_embedded(shm_dir: str | os.PathLike[str]) -> list[str]:
    """Purge the folders of this user's embedded stores whose process has ended. Return their names.

    It skips other users' folders (even if this user is root) and anything that is not a folder, because links could
    lead anywhere.
    """
    reaped = []
    for name in folder_names(shm_dir, EMBEDDED_PREFIX):
        if is_own_folder(Path(shm_dir) / name):
            with contextlib.suppress(NodeBusy, InvalidRequest, OSError):
                purge(Path(shm_dir) / name)
                reaped.append(name.removeprefix(PREFIX))
    return reaped


def _open_both(folder: NodeFolder, stack: contextlib.ExitStack) -> tuple[int, int]:
    """Open the directory above and the folder itself; return both descriptors."""
    parent_fd = os.open(folder.path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, parent_fd)
    try:
        folder_fd = open_folder(folder.path.name, dir_fd=parent_fd)
    except NotPlain:
        raise InvalidRequest("path", f"{folder.path} is not a folder, or is a link; remove it by hand") from None
    except PermissionError:
        raise InvalidRequest("path", f"{folder.path} belongs to another user") from None
    stack.callback(os.close, folder_fd)
    return parent_fd, folder_fd


def _check_owner(folder: NodeFolder, folder_fd: int, root_may: bool) -> None:
    owner = os.fstat(folder_fd).st_uid
    if owner != os.geteuid() and not (root_may and os.geteuid() == 0):
        raise InvalidRequest("path", f"{folder.path} belongs to user {owner}, who may purge it")


def _lock(fd: int) -> None:
    """Take the lock, or raise BlockingIOError if an owner holds it.

    A process that checks whether the node is running shares the lock for a moment. Then the lock is tried again.
    """
    for tries_left in reversed(range(LOCK_TRIES)):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not tries_left:
                raise
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises if an owner holds it
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(LOCK_RETRY_S)


def _purge(folder: NodeFolder, parent_fd: int, folder_fd: int) -> None:
    name = folder.lock_file.name
    try:
        fd = open_plain(name, os.O_RDWR | os.O_CREAT, folder.file_mode, dir_fd=folder_fd)
    except NotPlain:  # no process can hold such a lock: an owner opens the file the same way
        remove(name, dir_fd=folder_fd)
        fd = open_plain(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, folder.file_mode, dir_fd=folder_fd)
    try:
        _lock(fd)
        if not os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=folder_fd, follow_symlinks=False)):
            return  # another purge was faster
        _clear_header(folder, folder_fd)
        with os.scandir(folder_fd) as entries:
            names = [entry.name for entry in entries]
        for entry in names:
            if entry != name:
                remove(entry, dir_fd=folder_fd)
        # Last, under the lock: a daemon that has opened the old lock file notices that it is gone, and starts again.
        os.unlink(name, dir_fd=folder_fd)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder.path.name, dir_fd=parent_fd)
    except BlockingIOError:
        raise NodeBusy(f"node {folder.name!r} is held by {holder(fd)}; stop it before purging {folder.path}") from None
    finally:
        os.close(fd)


def _clear_header(folder: NodeFolder, folder_fd: int) -> None:
    """Clear the header, so that clients that map the node see that it is gone."""
    with contextlib.suppress(FileNotFoundError):
        fd = open_plain(folder.header.name, os.O_RDWR, dir_fd=folder_fd)
        try:
            if os.fstat(fd).st_uid == os.fstat(folder_fd).st_uid:
                os.pwrite(fd, bytes(_HEAD_BYTES), 0)
        finally:
            os.close(fd)


_FILE: Final = struct.Struct(f"<8sQ{SECRET_BYTES}s")
_MAGIC: Final = b"KVSECRT1"


def new_secret() -> bytes:
    """Draw a secret for a new pool."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(folder: NodeFolder, incarnation: int, secret: bytes) -> None:
    """Write the secret of a pool. Raises OutOfSpace if there is no memory for it."""
    folder.new_file(folder.secret, _FILE.size, _FILE.pack(_MAGIC, incarnation, secret))


def read_secret(folder: NodeFolder, incarnation: int) -> bytes | None:
    """Return the secret of this incarnation; None if there is none."""
    try:
        magic, owner, secret = _FILE.unpack(read_plain(folder.secret))
    except (OSError, struct.error):
        return None
    return bytes(secret) if (magic, owner) == (_MAGIC, incarnation) else None
