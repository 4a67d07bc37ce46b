"""NodeFolder: the files of one node of this machine, and the lock that makes one daemon their owner.

::

    <shm_dir>/kvstore-<name>/          mode 0700, or 0770 where the node is shared with its group
        lock                           flock: its holder owns the folder; text: pid
        control                        unix socket of the daemon
        header                         one page of words (header.Header)
        segment                        the data (dram.SegmentFile)
        records-<extent>  uses-<extent>    tables of each carved extent (records.ExtentTable)
        index-<epoch>/                 LMDB: key -> address (index.Index)
        puts                           what clients put and the daemon has not taken in (put_log.PutLog); may be absent
        secret                         keeps the keys of its roots apart (pool_secret)
        nvme                           where its NVMe files are (nvme_map.NvmeMap); absent without NVMe
        data                           which data server sends its pages, locked while that lives (data_file)
        brought                        pages of other nodes that were read here recently (client.local.brought)
        member                         what its daemon published in a catalog last; absent: nothing
        mounted-<n>  -data  -pass      records of memory that an engine mounted; that memory, a socket to it (mounted)
        quarantine                     positions that may not be used yet (quarantine); absent if empty
        sessions/<16 hex digits>       one file per client, locked while it lives; what it counted (counters)
        .tmp-*                         a file being made; removed when the next owner starts

All processes that can open these files are one trust domain: clients write the pages themselves.

Purging: a node's folder is removed with everything in it, and nothing beyond it is touched.

The folder is opened once, as a directory that is not a link, and worked on by that descriptor: its creator may
exchange what is in it in the meantime, and still no link is followed.

The file ``secret`` of a node's folder: the secret of its pool, for the programs that map the node.

It names the incarnation of the memory that it belongs to, and is there before the header says that incarnation. Where
it is absent or damaged, the keys of that memory cannot be made: its pages are lost, and the next start recreates it.
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
# `kvstore status` probes locks with a shared lock for microseconds; a daemon that starts just then tries again.
LOCK_TRIES = 50
LOCK_RETRY_S = 0.01


class NodeFolder:
    """Paths of one node's folder, and its lock. The constructor touches nothing.

    Lifecycle of the lock: ``lock()`` takes it (making the folder if absent); it ends with ``close()`` or with the
    process, however that dies. A forked child never keeps it.

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
        """The folder at ``path`` (``.../kvstore-<name>``); shared with its group where the directory's mode says so.

        Raises:
            InvalidRequest: the last part of ``path`` is not a node folder's name.
        """
        where = Path(path)
        if not where.name.startswith(PREFIX):
            raise InvalidRequest("path", f"{where} is not a node's folder (its name starts with {PREFIX!r})")
        shared = False
        with contextlib.suppress(OSError):
            shared = bool(where.lstat().st_mode & stat.S_IRGRP)
        return cls(where.parent, where.name.removeprefix(PREFIX), shared)

    @property
    def lock_file(self) -> Path:
        """The file whose flock makes its holder the owner."""
        return self.path / "lock"

    @property
    def control(self) -> Path:
        """The daemon's unix socket."""
        return self.path / "control"

    @property
    def header(self) -> Path:
        """The page of words that clients look at before every operation."""
        return self.path / "header"

    @property
    def segment(self) -> Path:
        """The data."""
        return self.path / "segment"

    @property
    def sessions(self) -> Path:
        """The folder of the clients' session files."""
        return self.path / "sessions"

    def session(self, session_id: int) -> Path:
        """The file that the client of ``session_id`` keeps locked while it lives."""
        return self.sessions / f"{session_id:016x}"

    def records(self, extent: int) -> Path:
        """The record table of ``extent``."""
        return self.path / f"records-{extent}"

    def uses(self, extent: int) -> Path:
        """The uses table of ``extent``."""
        return self.path / f"uses-{extent}"

    @property
    def nvme(self) -> Path:
        """What clients need to read the node's NVMe (nvme_map.NvmeMap); absent where it has none."""
        return self.path / "nvme"

    @property
    def puts(self) -> Path:
        """Where clients publish what they have put (put_log.PutLog)."""
        return self.path / "puts"

    @property
    def secret(self) -> Path:
        """The secret of its pool (pool_secret)."""
        return self.path / "secret"

    @property
    def data_server(self) -> Path:
        """Which data server sends its pages (data_file); absent: none ever did."""
        return self.path / "data"

    def index(self, epoch: int) -> Path:
        """The LMDB environment of ``epoch``."""
        return self.path / f"index-{epoch}"

    def extents(self) -> list[int]:
        """Numbers of the extents that have a record table here, ascending; sound or not."""
        return self._numbers("records-")

    def epochs(self) -> list[int]:
        """Epochs of the indexes here, ascending; sound or not."""
        return self._numbers("index-")

    def _numbers(self, prefix: str) -> list[int]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        tails = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        return sorted(int(tail) for tail in tails if tail.isdecimal())

    def create(self) -> None:
        """Make the folder and ``sessions/`` where absent. What is there stays.

        Raises:
            InvalidRequest: ``shm_dir`` is absent, or something of another user (or no directory) has that name.
            FileNotFoundError: it was purged in the same moment.
        """
        made = self._make()
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
            if made:
                os.fchmod(fd, self.dir_mode)  # whatever the umask
            self._make_sessions(fd)
        finally:
            os.close(fd)

    def _make(self) -> bool:
        """Whether the folder was made just now."""
        try:
            os.mkdir(self.path, self.dir_mode)
            return True
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise InvalidRequest("shm_dir", f"{self.path.parent} does not exist") from None

    def _make_sessions(self, here: int) -> None:
        name = self.sessions.name
        made = True
        try:
            os.mkdir(name, self.dir_mode, dir_fd=here)
        except FileExistsError:
            made = False
        try:
            fd = open_folder(name, dir_fd=here)
        except NotPlain:
            raise InvalidRequest("name", f"{self.sessions} is not a folder, or is a link; purge the node") from None
        if made:
            os.fchmod(fd, self.dir_mode)
        os.close(fd)

    def trusted(self) -> bool:
        """True where the folder is there and was made by this user, by root, or by one of a group shared with it.

        Anyone may create a name in /dev/shm: a client maps no folder that a stranger made.
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
        """Become the owner: make the folder where absent, lock it, remove files that a dead owner left half made, or
        half removed.

        Raises:
            NodeBusy: another process (or another NodeFolder of this one) holds it; names the node and the pid.
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
    def kept_from_starting(self) -> Iterator[None]:
        """While this lasts no daemon owns the folder, and none can begin to. Nothing is changed, and others may do the
        same at the same time.

        Raises:
            NodeBusy: its daemon runs, or is just starting.
            FileNotFoundError: it was just being purged.
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

    def owned(self) -> bool:
        """Whether anybody holds the lock: its node lives."""
        try:
            return is_locked(self.lock_file)
        except OSError:
            return False

    def close(self) -> None:
        """Give the lock back. The files stay, for the next owner and for readers."""
        if self.locked:  # a child that another thread is just starting has it open, too
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
        """Where a file lies that the next owner removes."""
        return self.path / f"{_TEMPORARY}{name}"

    def new_file(self, path: Path, size_bytes: int, head: bytes, sparse: bool = False) -> None:
        """Put a whole new file at ``path``, zeros after ``head``: readers see the old one or all of the new one.

        Maps of an old file of that name keep the old bytes. ``sparse`` leaves its memory unallocated.

        Raises:
            OutOfSpace: its memory could not be allocated; nothing changed.
        """
        temporary = path.with_name(f"{_TEMPORARY}{path.name}")
        remove(temporary)
        fd = open_plain(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, self.file_mode)
        try:
            os.fchmod(fd, self.file_mode)  # whatever the umask
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
    """Give ``[start, start + size_bytes)`` of a file its memory now, so that no later store dies of SIGBUS.

    Raises:
        OutOfSpace: there is not enough; nothing that was allocated before is lost.
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
    """``(name, alive)`` of every node folder here that this user may trust, by name; alive = its lock is held."""
    nodes = []
    for name in folder_names(shm_dir, PREFIX):
        folder = NodeFolder.at(Path(shm_dir) / name)
        if folder.trusted():
            nodes.append((folder.name, folder.owned()))
    return nodes


def folder_names(shm_dir: str | os.PathLike[str], prefix: str) -> list[str]:
    """Names in ``shm_dir`` that a node's folder may have; their owner and kind are not checked."""
    try:
        names = os.listdir(shm_dir)
    except FileNotFoundError:
        return []
    return sorted(n for n in names if n.startswith(prefix) and _NAME.fullmatch(n.removeprefix(PREFIX)))


def holder(fd: int) -> str:
    """The holder of the lock file behind ``fd``, for a message."""
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return f"process {text}" if text else "another process"


# Locks belong to the open file, which a forked child shares: without this a child would keep a dead daemon's lock.
_locked: weakref.WeakSet[NodeFolder] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for folder in list(_locked):
        folder._close_fd()


os.register_at_fork(after_in_child=_after_fork_in_child)


_HEAD_BYTES = 32  # of the header: magic, version, incarnation, epoch


def purge(path: str | os.PathLike[str]) -> None:
    """Remove a node's folder with everything in it. Absent: nothing happens.

    Clients that still map it see incarnation 0 (the node is gone); their memory is freed when they unmap it. Only its
    owner may, and root, who names what goes: a stranger's links lead nowhere.

    Raises:
        NodeBusy: its daemon lives; nothing was removed.
        InvalidRequest: ``path`` is not a node's folder, or another user's.
    """
    folder = NodeFolder.at(path)
    with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
        above, here = _opened(folder, stack)
        _check_owner(folder, here, root_may=True)
        _purge(folder, above, here)


def check_purge(path: str | os.PathLike[str]) -> None:
    """Raises what ``purge`` would raise for ``path`` itself, and InvalidRequest where it is absent."""
    folder = NodeFolder.at(path)
    try:
        with contextlib.ExitStack() as stack:
            _check_owner(folder, _opened(folder, stack)[1], root_may=True)
    except FileNotFoundError:
        raise InvalidRequest("names", f"there is no node {folder.name!r} on this machine") from None


def owned(path: str | os.PathLike[str]) -> bool:
    """Return whether this user made that folder."""
    with contextlib.suppress(InvalidRequest, OSError), contextlib.ExitStack() as stack:
        folder = NodeFolder.at(path)
        _check_owner(folder, _opened(folder, stack)[1], root_may=False)
        return True
    return False


def reap_embedded(shm_dir: str | os.PathLike[str]) -> list[str]:
    """Purge folders of this user's embedded stores whose process is gone. Returns their names.

    What is another user's, root or not, and what is not a folder is left alone: it may be made to lead anywhere.
    """
    reaped = []
    for name in folder_names(shm_dir, EMBEDDED_PREFIX):
        if owned(Path(shm_dir) / name):
            with contextlib.suppress(NodeBusy, InvalidRequest, OSError):
                purge(Path(shm_dir) / name)
                reaped.append(name.removeprefix(PREFIX))
    return reaped


def _opened(folder: NodeFolder, stack: contextlib.ExitStack) -> tuple[int, int]:
    """Descriptors of the directory above and of the folder itself."""
    above = os.open(folder.path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, above)
    try:
        here = open_folder(folder.path.name, dir_fd=above)
    except NotPlain:
        raise InvalidRequest("path", f"{folder.path} is not a folder, or is a link; remove it by hand") from None
    except PermissionError:
        raise InvalidRequest("path", f"{folder.path} belongs to another user") from None
    stack.callback(os.close, here)
    return above, here


def _check_owner(folder: NodeFolder, here: int, root_may: bool) -> None:
    owner = os.fstat(here).st_uid
    if owner != os.geteuid() and not (root_may and os.geteuid() == 0):
        raise InvalidRequest("path", f"{folder.path} belongs to user {owner}, who may purge it")


def _lock(fd: int) -> None:
    """Hold the lock. A process that checks whether a node lives shares it for a moment: then this is tried for longer.
    An owner does not share it, and is not waited for. Raises BlockingIOError."""
    for left in reversed(range(LOCK_TRIES)):
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises where an owner has it
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(LOCK_RETRY_S)


def _purge(folder: NodeFolder, above: int, here: int) -> None:
    name = folder.lock_file.name
    try:
        fd = open_plain(name, os.O_RDWR | os.O_CREAT, folder.file_mode, dir_fd=here)
    except NotPlain:  # no process can hold it: an owner opens it the same way
        remove(name, dir_fd=here)
        fd = open_plain(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, folder.file_mode, dir_fd=here)
    try:
        _lock(fd)
        if not os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=here, follow_symlinks=False)):
            return  # another purge was faster
        _end_header(folder, here)
        with os.scandir(here) as entries:
            names = [entry.name for entry in entries]
        for entry in names:
            if entry != name:
                remove(entry, dir_fd=here)
        # Last, under the lock: a daemon that opened the old lock file sees that it is gone and starts again.
        os.unlink(name, dir_fd=here)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(folder.path.name, dir_fd=above)
    except BlockingIOError:
        raise NodeBusy(f"node {folder.name!r} is held by {holder(fd)}; stop it before purging {folder.path}") from None
    finally:
        os.close(fd)


def _end_header(folder: NodeFolder, here: int) -> None:
    """Clients that map the node see that it is gone."""
    with contextlib.suppress(FileNotFoundError):
        fd = open_plain(folder.header.name, os.O_RDWR, dir_fd=here)
        try:
            if os.fstat(fd).st_uid == os.fstat(here).st_uid:
                os.pwrite(fd, bytes(_HEAD_BYTES), 0)
        finally:
            os.close(fd)


_FILE: Final = struct.Struct(f"<8sQ{SECRET_BYTES}s")
_MAGIC: Final = b"KVSECRT1"


def new_secret() -> bytes:
    """A secret for a pool that is just made."""
    return secrets.token_bytes(SECRET_BYTES)


def write_secret(folder: NodeFolder, incarnation: int, secret: bytes) -> None:
    """Put it there. Raises OutOfSpace where there is no memory for it."""
    folder.new_file(folder.secret, _FILE.size, _FILE.pack(_MAGIC, incarnation, secret))


def read_secret(folder: NodeFolder, incarnation: int) -> bytes | None:
    """Return the secret of this incarnation; None if there is none."""
    try:
        magic, owner, secret = _FILE.unpack(read_plain(folder.secret))
    except (OSError, struct.error):
        return None
    return bytes(secret) if (magic, owner) == (_MAGIC, incarnation) else None
