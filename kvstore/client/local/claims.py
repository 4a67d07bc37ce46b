"""Claims: which writer of a session writes which pages, so that no two of them get the same frames."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence


class Claims:
    """What the writers of one session write now. Threads may share it.

    The node knows sessions, not writers: a shard that asks again for its group's pages is given the frames that its
    session has for them, because a request may have been lost with the daemon. All writers of a session are of one
    process, so that it is decided here who asks: a page of a shard and group is one writer's until that one has sealed
    or revoked it, whatever becomes of the daemon and of deadlines meanwhile. A writer that is dropped claims nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._writers: weakref.WeakKeyDictionary[object, tuple[int, int, set[bytes]]] = weakref.WeakKeyDictionary()

    def claim(self, writer: object, group: int, shard: int, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` this writer may ask for as that shard; the next one is another writer's."""
        with self._lock:
            theirs = [claim[2] for claim in self._writers.values() if claim[:2] == (group, shard)]
            count = next((i for i, key in enumerate(keys) if any(key in pages for pages in theirs)), len(keys))
            self._writers[writer] = group, shard, set(keys[:count])
        return count

    def release(self, writer: object) -> None:
        """This writer has said its last word about its pages, and stores nothing more."""
        with self._lock:
            self._writers.pop(writer, None)
