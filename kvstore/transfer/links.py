"""PeerLinks: connections to the data servers of a pool, kept open between requests; and which of them do not answer.

A data server that did not answer once is known to be dead: nobody waits for it again. A thread of our own asks it from
time to time, and clears that when it answers. One that is started anew is another process, of which nothing is known.
Where a connection that was kept open has ended, the server may be well all the same: it is asked once more, over a new
connection, and is dead only where that fails.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from kvstore.errors import KVStoreError, NodeUnavailable, TooManyCalls, Unauthenticated, Unavailable
from kvstore.transfer.base import DialCredentials
from kvstore.transfer.peers import PoolNode
from kvstore.transfer.tcp import SILENCE_S, DataConnection
from kvstore.transfer.wire import Hello, WireError

IDLE_MAX: Final = 4  # connections to one data server that nobody uses
IDLE_S: Final = 60.0
PROBE_MIN_S, PROBE_MAX_S = 0.5, 8.0  # between two looks whether a dead one answers, later and later
PROBE_ANSWER_S: Final = 1.0
FORGOTTEN_S: Final = 900.0  # after which a dead one is not asked any more, unless somebody needs it

log = logging.getLogger("kvstore.cluster")

T = TypeVar("T")


class StaleConnection(NodeUnavailable):
    """A connection that was kept open has ended. Its server is not known to be dead, and may be asked once more."""


@dataclass
class _Dead:
    """One that did not answer: since when, and when it is asked next."""

    peer: PoolNode
    since_s: float
    next_s: float
    pause_s: float = PROBE_MIN_S


class PeerLinks:
    """Threads may share it. A connection is lent to one of them at a time; one that broke is closed.

    Args:
        pool: that its peers belong to.
        caller: what we call ourselves.
    """

    def __init__(self, pool: str, caller: str, credentials: DialCredentials | None = None) -> None:
        self._hello = Hello(pool=pool, caller=caller)
        self._credentials = credentials or DialCredentials()
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, DataConnection]]] = {}  # by process of the server
        self._dead: dict[str, _Dead] = {}  # by process of the server
        self._probing = False
        self._closed = threading.Event()

    def dead(self, peer: PoolNode) -> bool:
        """Whether it did not answer, and has not since."""
        return peer.process in self._dead

    @contextlib.contextmanager
    def to(self, peer: PoolNode, deadline_s: float, silence_s: float = SILENCE_S) -> Iterator[DataConnection]:
        """A connection to that data server, closed when this ends where it is broken.

        Args:
            silence_s: how long it may bring nothing; of that what connecting took, but for a half.

        Raises:
            KVStoreError: as ``DataConnection.open``; NodeUnavailable at once where it is ``dead``; StaleConnection,
                see ``call``.
        """
        if self.dead(peer):
            raise NodeUnavailable(f"{peer.name}: did not answer, and has not since")
        connection, began_s = self._take(peer), time.monotonic()
        try:
            if connection is None:
                connection = self._open(peer, min(deadline_s, began_s + silence_s))
            connection.silence_s = max(silence_s / 2, silence_s - (time.monotonic() - began_s))
            yield connection
        except KVStoreError as error:
            if connection is not None and isinstance(error, WireError):
                connection.broken = True  # we are in the middle of something that makes no sense
            if connection is not None and isinstance(error, Unauthenticated):
                connection.broken = True  # our token was replaced: the next connection shows the new one
                self._drop(peer)
            elif connection is not None and self.stale(peer, connection, error):
                raise StaleConnection(str(error)) from error
            elif (connection is None or connection.broken) and not isinstance(error, TooManyCalls):
                self.lost(peer)
                # A peer that is away may be back soon; a peer that refuses us is configured differently.
                level = logging.DEBUG if isinstance(error, Unavailable) else logging.WARNING
                log.log(level, "%s: %s", peer.name, error)
            raise
        except BaseException:
            if connection is not None:
                connection.close()  # in the middle of a reply, perhaps
            raise
        finally:
            if connection is not None:
                self._give_back(peer, connection)

    def call(
        self, peer: PoolNode, deadline_s: float, use: Callable[[DataConnection], T], silence_s: float = SILENCE_S
    ) -> T:
        """What ``use`` makes of a connection to that data server; where that one is stale, of another one.

        Args:
            use: may be called twice.

        Raises:
            KVStoreError: as ``to``, and what ``use`` raises.
        """
        try:
            with self.to(peer, deadline_s, silence_s) as connection:
                return use(connection)
        except StaleConnection:
            with self.to(peer, deadline_s, silence_s) as connection:
                return use(connection)

    def stale(self, peer: PoolNode, connection: DataConnection, error: KVStoreError) -> bool:
        """Whether a connection that failed with this error was kept open for long, and has just ended. Then the others
        that are kept have ended as well, and are closed."""
        found = connection.broken and not connection.fresh and isinstance(error, NodeUnavailable)
        if found:
            self._drop(peer)
        return found

    def close(self) -> None:
        """Close what nobody uses; what is used is closed when it comes back."""
        with self._lock:
            self._closed.set()
            kept = [connection for idle in self._idle.values() for _, connection in idle]
            self._idle.clear()
        for connection in kept:
            connection.close()

    def _open(self, peer: PoolNode, deadline_s: float) -> DataConnection:
        if not peer.addresses:
            raise NodeUnavailable(f"{peer.name}: has no address")
        ours = self._credentials
        hello = replace(self._hello, node=peer.name, process=peer.process, token=ours.token_now)
        ours = replace(ours, server_name=peer.tls_name) if peer.tls and not ours.server_name else ours
        return DataConnection.open(peer.addresses[0], hello, ours, tls=peer.tls, deadline_s=deadline_s)

    def _take(self, peer: PoolNode) -> DataConnection | None:
        """One that is open; those that were idle for long, which the server may have closed, are closed."""
        now_s, old = time.monotonic(), list[DataConnection]()
        with self._lock:
            idle = self._idle.get(peer.process, [])
            taken = idle.pop()[1] if idle and idle[-1][0] > now_s - IDLE_S else None
            if taken is None:
                old = [connection for _, connection in idle]
                idle.clear()
        for connection in old:
            connection.close()
        return taken

    def _give_back(self, peer: PoolNode, connection: DataConnection) -> None:
        """Keep it for the next one. Those that nobody has used for long, of processes that are gone, are closed."""
        now_s, old = time.monotonic(), list[DataConnection]()
        with self._lock:
            for process in [name for name, idle in self._idle.items() if not idle or idle[-1][0] <= now_s - IDLE_S]:
                old += [each for _, each in self._idle.pop(process)]
            idle = self._idle.setdefault(peer.process, [])
            if not connection.broken and not self._closed.is_set() and len(idle) < IDLE_MAX:
                connection.fresh = False
                idle.append((now_s, connection))
            else:
                old.append(connection)
        for each in old:
            each.close()

    def lost(self, peer: PoolNode) -> None:
        """Nobody asks it until it answers again; its other connections are of no use either."""
        now_s = time.monotonic()
        with self._lock:
            self._dead.setdefault(peer.process, _Dead(peer, now_s, now_s + PROBE_MIN_S))
            start, self._probing = not self._probing and not self._closed.is_set(), True
        self._drop(peer)
        if start:
            threading.Thread(target=self._probe, name="kvstore-probe", daemon=True).start()

    def _drop(self, peer: PoolNode) -> None:
        """Close the connections to it that nobody uses."""
        with self._lock:
            idle = self._idle.pop(peer.process, [])
        for _, connection in idle:
            connection.close()

    def _probe(self) -> None:
        """Ask the dead from time to time, as long as there are any."""
        while not self._closed.wait(PROBE_MIN_S / 2):
            now_s = time.monotonic()
            for each in [each for each in list(self._dead.values()) if each.next_s <= now_s]:
                forgotten = now_s - each.since_s > FORGOTTEN_S
                if forgotten or self._answers(each.peer):
                    with self._lock:
                        del self._dead[each.peer.process]
                else:
                    each.pause_s = min(2 * each.pause_s, PROBE_MAX_S)
                    each.next_s = time.monotonic() + each.pause_s
            with self._lock:
                if not self._dead:
                    self._probing = False
                    return

    def _answers(self, peer: PoolNode) -> bool:
        try:
            connection = self._open(peer, time.monotonic() + PROBE_ANSWER_S)
        except TooManyCalls:
            return True  # it answers; who needs it is told what it lacks
        except KVStoreError:
            return False
        self._give_back(peer, connection)
        return True
