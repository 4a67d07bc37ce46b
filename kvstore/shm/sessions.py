"""Sessions: which clients of a node live, and what all of them counted. The node's side of the session files.

A client keeps a file ``sessions/<id>`` locked while it lives, and counts in it (``shm.counters``). A process that gets
the lock knows that the client is gone: its counts are added to those of all that ended, and the file is removed.
Clients that only read never speak to the node; their files are found by ``sweep``.

Counts of living clients survive the daemon, being theirs; so do those of clients that end while there is none. Once
added up, counts of clients that ended live in the daemon's memory, and start again with it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from typing import Final

import numpy as np

from kvstore.safe_files import is_locked, open_plain
from kvstore.shm.counters import NOTHING, SessionCounters, Tally, Vector, added, read_counters
from kvstore.shm.folder import NodeFolder

FILES_MAX: Final = 16384  # looked at in one go: clients make as many as they like


class Sessions:
    """The sessions of one node. Lives as long as the node; any thread may ask.

    Life of a session: its file is made and locked by the client, or it ``join``s from this process -> counted in every
    ``totals`` -> ends, which ``alive``, ``sweep`` or ``leave`` notices: its counts stay, its file goes.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._here: dict[int, SessionCounters] = {}  # clients in this process: they live as long as we do
        self._ended: Vector = NOTHING
        self._told: Vector = NOTHING
        self._lock = threading.Lock()  # held from adding a session's counts to removing its file: none counts twice

    def join(self, session: int, counters: SessionCounters) -> None:
        """A client in this process, which has no file."""
        with self._lock:
            self._here[session] = counters

    def leave(self, session: int) -> None:
        """The client in this process is done."""
        with self._lock:
            counters = self._here.pop(session, None)
            if counters is not None:
                self._ended = added(self._ended, counters.vector())

    def alive(self, session: int) -> bool:
        """Whether the process that holds the session's lock lives. A dead one's file is removed."""
        with self._lock:
            return session in self._here or self._living(session)[0]

    def sweep(self) -> None:
        """Remove the files of all that ended."""
        with self._lock:
            for session in self._files():
                self._look(session)

    def totals(self) -> Tally:
        """What all sessions counted together, living and ended. No count is lower than it was."""
        with self._lock:
            living = [self._look(session) for session in self._files()]  # first: it may find that some ended
            here = [counters.vector() for counters in self._here.values()]
            found = self._ended
            for counts in [*here, *(counts for counts in living if counts is not None)]:
                found = added(found, counts)
            self._told = np.maximum(self._told, found)  # a file may be removed before it was added up
            return Tally.of([self._told])

    def _files(self) -> list[int]:
        return session_ids(self._folder)[:FILES_MAX]

    def _look(self, session: int) -> Vector | None:
        """What a living session counted; None where it counted nothing, or has ended."""
        return self._living(session)[1]

    def _living(self, session: int) -> tuple[bool, Vector | None]:
        """Whether a session lives, and what it counted. The file of one that has ended goes. ``_lock`` is held."""
        path = self._folder.session(session)
        try:
            fd = open_plain(path, os.O_RDONLY)
        except FileNotFoundError:
            return False, None
        except OSError:  # of another user, who does not share it, or no descriptor is left: nothing tells that it ended
            return True, None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            counts = read_counters(fd)
            if counts is not None:
                self._ended = added(self._ended, counts)
            path.unlink(missing_ok=True)  # still locked by us: a process that is taking it sees that it is gone
        except BlockingIOError:
            return True, read_counters(fd)
        except OSError:  # it cannot be locked, read or removed now: the next look may tell
            return True, None
        finally:
            os.close(fd)
        return False, None


def session_ids(folder: NodeFolder) -> list[int]:
    """Sessions that have a file: all that live, and those that ended since the last check."""
    try:
        names = os.listdir(folder.sessions)
    except OSError:  # the folder was removed, or no descriptor is left: the next look may tell
        return []
    return [int(name, 16) for name in names if _is_session(name)]


def living_ids(folder: NodeFolder) -> set[int]:
    """Sessions that live now. Nothing is removed, and nothing counted."""
    return {session for session in session_ids(folder) if _is_locked(folder, session)}


def _is_locked(folder: NodeFolder, session: int) -> bool:
    try:
        return is_locked(folder.session(session))
    except FileNotFoundError:
        return False
    except OSError:  # of another user, who does not share it, or no descriptor is left: nothing tells that it ended
        return True


def _is_session(name: str) -> bool:
    return len(name) == 16 and all(digit in "0123456789abcdef" for digit in name)
