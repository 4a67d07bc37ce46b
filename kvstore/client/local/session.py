"""SessionFile: the proof that a client lives, and the page in which it counts."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from kvstore.errors import OutOfSpace
from kvstore.tier.counters import SessionCounters
from kvstore.tier.plain_files import open_plain


class SessionFile:
    """One session's file, ``sessions/<id>``: locked from ``lock`` until ``close`` or the end of the process.

    A free lock tells the node that this session can write nothing more; it then adds up what was counted, and removes
    the file. A forked child lets go of its copy, so that it keeps no lock.

    Attributes:
        counters: counts in memory until the file is locked, and in the file from then on.
    """

    def __init__(self, folder: Path, session: int) -> None:
        self.counters = SessionCounters()
        self._path = folder / "sessions" / f"{session:016x}"
        self._fd = -1

    def lock(self) -> None:
        """Create and lock the file, or make sure that it still is the one in the folder.

        Raises:
            OSError: it cannot be made, or the node was just looking at it; trying again may do.
        """
        if self._fd >= 0:
            if os.fstat(self._fd).st_nlink:
                return
            self.close()
        fd = open_plain(self._path, os.O_RDWR | os.O_CREAT, 0o660)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:
                raise BlockingIOError("the session file was removed while it was being locked")
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        with contextlib.suppress(OSError, OutOfSpace):  # counts are not worth a session
            os.fchmod(fd, 0o660)  # whatever the umask: who may be in the folder may look
            self.counters.attach(self._path)

    def close(self) -> None:
        """Give the lock back."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
