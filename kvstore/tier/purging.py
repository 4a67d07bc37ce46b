"""Purging: a node's folder is removed with everything in it, and nothing beyond it is touched.

The folder is opened once, as a directory that is not a link, and worked on by that descriptor: its creator may
exchange what is in it in the meantime, and still no link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path

from kvstore.errors import InvalidRequest, NodeBusy
from kvstore.tier.folder import EMBEDDED_PREFIX, LOCK_RETRY_S, LOCK_TRIES, PREFIX, NodeFolder, folder_names, holder
from kvstore.tier.plain_files import NotPlain, open_folder, open_plain, remove

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
    """Whether this user, and nobody else, made that folder."""
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
    except NotPlain:  # nobody can hold it: an owner opens it the same way
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
        # Last, under the lock: a daemon that opened the old lock file sees that it is gone and starts anew.
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
