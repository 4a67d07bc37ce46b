"""Sessions: which clients of a node are alive, and the sum of their counters. The node's side of the session files.

A client keeps a file ``sessions/<id>`` locked while it is alive, and counts in it (``shm.counters``). A process that
gets the lock knows that the client has ended. It adds the client's counts to those of all ended clients, and removes
the file. Clients that only read never send a message to the node; their files are found by ``sweep``.

Counts of living clients survive a restart of the daemon, and so do those of clients that end while no daemon is
running. The sum across ended clients is in the daemon's memory, and restarts at zero with the daemon.
"""

from __future__ import annotations

import fcntl
import os
import threading
from typing import Final

import numpy as np

from kvstore.safe_files import is_locked, open_plain
from kvstore.shm.counters import NO_COUNTS, SessionCounters, Tally, Vector, add_counts, read_counters
from kvstore.shm.folder import NodeFolder

FILES_MAX: Final = 16384  # files to look at per call: clients may make any number


class Sessions:
    """The sessions of one node. Exists as long as the node; any thread may call it.

    Life of a session: its client makes and locks a file, or it joins from this process -> it counts in ``totals`` -> it
    ends. ``alive``, ``sweep`` or ``leave`` notices the end: its counts are kept, and its file is removed.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._here: dict[int, SessionCounters] = {}  # clients in this process, which are alive as long as it is
        self._ended: Vector = NO_COUNTS
        self._highest: Vector = NO_COUNTS  # the highest totals so far
        self._lock = threading.Lock()  # held from adding a session's counts to removing its file: counted only once

    def join(self, session: int, counters: SessionCounters) -> None:
        """Add a client in this process, which has no file."""
        with self._lock:
            self._here[session] = counters

    def leave(self, session: int) -> None:
        """End a client in this process."""
        with self._lock:
            counters = self._here.pop(session, None)
            if counters is not None:
                self._ended = add_counts(self._ended, counters.vector())

    def alive(self, session: int) -> bool:
        """Return True if the session's process is alive. The file of an ended session is removed."""
        with self._lock:
            return session in self._here or self._living(session)[0]

    def sweep(self) -> None:
        """Remove the files of all ended clients."""
        with self._lock:
            for session in self._files():
                self._look(session)

    def totals(self) -> Tally:
        """Return the sum across all sessions, living and ended. No count is lower than in an earlier call."""
        with self._lock:
            living = [self._look(session) for session in self._files()]  # first: it may find that some have ended
            here = [counters.vector() for counters in self._here.values()]
            total = self._ended
            for counts in [*here, *(counts for counts in living if counts is not None)]:
                total = add_counts(total, counts)
            self._highest = np.maximum(self._highest, total)  # a file may be removed before it was added
            return Tally.of([self._highest])

    def _files(self) -> list[int]:
        return session_ids(self._folder)[:FILES_MAX]

    def _look(self, session: int) -> Vector | None:
        """Return the counts of a living session; None if it has no counts or has ended."""
        return self._living(session)[1]

    def _living(self, session: int) -> tuple[bool, Vector | None]:
        """Return whether a session is alive, and its counts. Remove the file if the session has ended. The caller holds
        ``_lock``."""
        path = self._folder.session(session)
        try:
            fd = open_plain(path, os.O_RDONLY)
        except FileNotFoundError:
            return False, None
        except OSError:  # another user's unshared file, or no descriptor is free: it may be alive
            return True, None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            counts = read_counters(fd)
            if counts is not None:
                self._ended = add_counts(self._ended, counts)
            path.unlink(missing_ok=True)  # still locked by us: a process that is taking it notices that it is gone
        except BlockingIOError:
            return True, read_counters(fd)
        except OSError:  # it cannot be locked, read or removed now: the next call may succeed
            return True, None
        finally:
            os.close(fd)
        return False, None


def session_ids(folder: NodeFolder) -> list[int]:
    """Return the sessions that have a file: living ones, and those that ended since the last check."""
    try:
        names = os.listdir(folder.sessions)
    except OSError:  # the folder was removed, or no descriptor is free: the next call may succeed
        return []
    return [int(name, 16) for name in names if _is_session(name)]


def living_ids(folder: NodeFolder) -> set[int]:
    """Return the sessions that are alive now. Nothing is removed or counted."""
    return {session for session in session_ids(folder) if _is_locked(folder, session)}


def _is_locked(folder: NodeFolder, session: int) -> bool:
    try:
        return is_locked(folder.session(session))
    except FileNotFoundError:
        return False
    except OSError:  # another user's unshared file, or no descriptor is free: it may be alive
        return True


def _is_session(name: str) -> bool:
    return len(name) == 16 and all(digit in "0123456789abcdef" for digit in name)
