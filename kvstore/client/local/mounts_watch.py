"""MountsWatch: has readers let go of memory that an engine had mounted, soon after the engine has ended.

A device's memory stays taken as long as anybody has it mapped. So a process that has read an engine's pages once, and
reads nothing any more, would keep the next engine from its memory.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Final, Protocol

LOOK_S: Final = 1.0


class MountsReader(Protocol):
    """Who has memory of others mapped."""

    def drop_ended(self) -> None:
        """Let go of what has ended. Called by another thread."""
        ...


class MountsWatch:
    """One per process. Its thread runs while there is a reader."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: weakref.WeakSet[MountsReader] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, reader: MountsReader) -> None:
        """Look after it as long as it is there. May be repeated."""
        with self._lock:
            self._readers.add(reader)
            if self._thread is None or not self._thread.is_alive():  # a forked child has no thread
                self._thread = threading.Thread(target=self._look, name="kvstore-mounts", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                readers = list(self._readers)
                if not readers:
                    self._thread = None
                    return
            while readers:
                readers.pop().drop_ended()


WATCH: Final = MountsWatch()
