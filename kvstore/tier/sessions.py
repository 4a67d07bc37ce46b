"""Sessions: which clients of a node live, and what all of them counted. The node's side of the session files.

A client keeps a file ``sessions/<id>`` locked while it lives, and counts in it (``tier.counters``). Whoever gets the
lock knows that the client is gone: its counts are added to those of all that ended, and the file is removed. Clients
that only read never speak to the node; their files are found by ``sweep``.

Counts of living clients survive the daemon, being theirs; so do those of clients that end while there is none. Once
added up, counts of clients that ended live in the daemon's memory, and start anew with it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter

from kvstore.tier.counters import NAMES, SessionCounters, read_counters
from kvstore.tier.folder import NodeFolder


class Sessions:
    """The sessions of one node. Lives as long as the node; any thread may ask.

    Life of a session: its file is made and locked by the client, or it ``join``s from this process -> counted in every
    ``totals`` -> ends, which ``alive``, ``sweep`` or ``leave`` notices: its counts stay, its file goes.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._here: dict[int, SessionCounters] = {}  # clients in this process: they live as long as we do
        self._ended: Counter[str] = Counter()
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
                self._ended.update(counters.values())

    def alive(self, session: int) -> bool:
        """Whether the process that holds the session's lock lives. A dead one's file is removed."""
        with self._lock:
            return session in self._here or self._look(session) is not None

    def sweep(self) -> None:
        """Remove the files of all that ended."""
        with self._lock:
            for session in self._files():
                self._look(session)

    def totals(self) -> dict[str, int]:
        """What all sessions counted together, living and ended, by the names of ``tier.counters``."""
        with self._lock:
            living = [self._look(session) or {} for session in self._files()]  # first: it may find that some ended
            sums = self._ended.copy()
            for counts in [*living, *(counters.values() for counters in self._here.values())]:
                sums.update(counts)
        return {name: sums[name] for name in NAMES}

    def _files(self) -> list[int]:
        try:
            names = os.listdir(self._folder.sessions)
        except FileNotFoundError:  # somebody removed the folder under us
            return []
        return [int(name, 16) for name in names if _is_session(name)]

    def _look(self, session: int) -> dict[str, int] | None:
        """What a living session counted; None for one that has ended, whose file is removed. ``_lock`` is held."""
        path = self._folder.session(session)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except PermissionError:  # of another user, who does not share it: nothing tells that it ended
            return {}
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._ended.update(read_counters(fd) or {})
            path.unlink(missing_ok=True)  # still locked by us: whoever is just taking it sees that it is gone
        except BlockingIOError:
            return read_counters(fd) or {}
        finally:
            os.close(fd)
        return None


def _is_session(name: str) -> bool:
    return len(name) == 16 and all(digit in "0123456789abcdef" for digit in name)
