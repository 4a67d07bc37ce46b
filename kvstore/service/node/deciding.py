"""Deciding: the mutex under which a node decides, which clients can see in its log of puts.

A client takes a lease without a message: it publishes what it would have asked, and looks whether the node is just
deciding. If it is not, every decision from now on takes that in before; so frames whose pages are still what they were
are kept. If it is, the node may have looked already, and the client asks::

    node                               client
    deciding = 1                       published = ... (its LEASE is there)
    fence                              fence
    take in what is published          deciding? yes: ask
    decide, perform                    no: do the pages' words still say what they said?
    deciding = 0
"""

from __future__ import annotations

import threading

from kvstore.tier.put_log import PutLog


class Deciding:
    """``with deciding:`` stands around every decision, and what is published is taken in first. A node that is killed
    in it leaves the word as it is: clients ask, and the next node sets it right with its first decision.
    """

    def __init__(self, puts: PutLog | None) -> None:
        self._puts = puts
        self._lock = threading.Lock()
        self._fence = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._puts is not None:
            self._puts.deciding = True
            with self._fence:  # any operation on a lock is a full fence: what is read from here on is read after it
                pass

    def __exit__(self, *_: object) -> None:
        if self._puts is not None:
            self._puts.deciding = False
        self._lock.release()
