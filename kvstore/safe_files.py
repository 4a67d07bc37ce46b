"""Opens files and folders whose names another user may have made. A link, or anything but a plain file, counts as
absent.

Any user may make names in ``/dev/shm`` and ``/var/tmp``, and members of its group in a shared node's folder. Checks are
made through the open descriptor, so nothing can be exchanged between the check and the use:

- A file must be a regular file with one name. A symbolic link is not followed. A second (hard) name might belong to a
  file that its owner keeps elsewhere. Opening a pipe would block.
- A folder must be a directory, and not a link to one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path

_ABSENT = (errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.EISDIR)


class NotPlain(FileNotFoundError):
    """The name exists, but is not a plain file or folder. Counts as absent."""


def open_plain(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Open a plain file; closed on exec. ``flags`` must not have O_TRUNC, which would act before the check.

    Raises:
        NotPlain: it is a link, has a second name, or is not a regular file. Nothing was changed.
        OSError: as ``os.open``.
    """
    assert not flags & os.O_TRUNC
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _ABSENT:
            raise _not_plain(path) from None
        raise
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # 0: just removed
        return fd
    os.close(fd)
    raise _not_plain(path)


def open_folder(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """Open a directory, for ``dir_fd`` of other calls.

    Raises:
        NotPlain: it is a link, or not a directory.
        FileNotFoundError, OSError: as ``os.open``.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in _ABSENT:
            raise _not_plain(path) from None
        raise


def check_plain(path: str | os.PathLike[str], kind: int) -> None:
    """Check a name that a library will open: it must be a plain file (``stat.S_IFREG``), a directory (``S_IFDIR``), or
    absent.

    Raises:
        NotPlain: it is something else.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if stat.S_IFMT(status.st_mode) != kind or (kind == stat.S_IFREG and status.st_nlink > 1):
        raise _not_plain(path)


def read_plain(path: str | os.PathLike[str]) -> bytes:
    """The contents of a plain file. Raises as ``open_plain``."""
    with open(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether another process holds a plain file's lock. Takes a shared lock for a moment. Raises as ``open_plain``."""
    fd = open_plain(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def is_file_of(fd: int, path: Path) -> bool:
    """Whether ``fd`` still is the file at ``path``, which may have been replaced or removed."""
    try:
        current = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), current)


def remove(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> None:
    """Remove the file, link or directory of this name, with all its contents. Does nothing if there is none.

    Raises:
        OSError: it cannot be removed.
    """
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode):
            shutil.rmtree(path, dir_fd=dir_fd)  # by descriptors, all the way down
        else:
            os.unlink(path, dir_fd=dir_fd)


def chmod_socket(path: Path, mode: int) -> None:
    """Change the mode of a socket file that this process made, unless something else has taken its name."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.chmod(f"/proc/self/fd/{fd}", mode)
    finally:
        os.close(fd)


def check_placed(path: str, fd: int) -> None:
    """Check an open file at a path that a user named. In folders where any user may make names, the file must be ours
    and have only one name.

    In other folders, the users that may write there decide about the contents. The kernel's ``protected_symlinks``,
    ``protected_regular`` and ``protected_hardlinks`` enforce the same rule for all programs, if they are switched on.

    Raises:
        PermissionError: another user put it there. The message names the user.
    """
    status, folder, link = os.fstat(fd), os.stat(Path(path).parent), os.lstat(path)
    if not folder.st_mode & stat.S_IWOTH:
        return
    for owner in (link.st_uid, status.st_uid):
        if owner not in (os.geteuid(), folder.st_uid):
            raise PermissionError(errno.EPERM, f"was put there by user {owner}; remove it, or take another place", path)
    if status.st_nlink > 1 and not stat.S_ISLNK(link.st_mode):
        raise PermissionError(errno.EPERM, "has a second name; remove it, or take another place", path)


def _not_plain(path: str | os.PathLike[str]) -> NotPlain:
    return NotPlain(errno.ENOENT, "is not a plain file or folder", os.fspath(path))
