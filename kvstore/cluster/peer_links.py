"""The nodes of a pool as one node knows them, and open connections to their data servers.

**PeersFile** reads the list of nodes from a small file in the node's folder. The node's data server writes it
(``node.cluster.data_server``). The daemon and its clients read it, and never ask the catalog. While the catalog is not
reachable, the last view stays; ``heard_s`` says how old it is. The time is in a second file, so that in a large pool at
rest no process reads the list again.

**PeerLinks** keeps connections open between requests for a few seconds, so that a machine at rest has only those of its
daemon, however many processes it has. It remembers data servers that are not responding. After one failure a data
server counts as dead, and no request waits for it. A thread probes dead data servers from time to time, and clears the
mark when one answers. A restarted data server is a new process without a mark. If a connection that was kept open has
ended, its data server may still be well: it gets one more try over a new connection, and counts as dead only if that
fails. A data server that has no free connection for this caller is tried again after pauses that grow.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from kvstore.cluster.data_connection import SILENCE_S, DataConnection, DialCredentials
from kvstore.errors import KVStoreError, NodeUnavailable, TooManyCalls, Unauthenticated, Unavailable
from kvstore.safe_files import NotPlain, read_plain
from kvstore.shm.folder import NodeFolder
from kvstore.wire.data import Hello, WireError

NAME: Final = "peers"
HEARD_NAME: Final = "peers-heard"  # seconds since the machine's start, in text
LOOK_NS: Final = 100_000_000  # between two looks at the file, so that not every miss looks at it


@dataclass(frozen=True)
class PoolNode:
    """A node with a live data server.

    Attributes:
        name: name of the node.
        process: a random number of its data server's process.
        incarnation: incarnation of the node's memory, 16 hex digits.
        addresses: HOST:PORT of its data server, best first.
        tls: whether connections to it are encrypted.
        transports: the transports that its pages may be sent over.
        tls_name: the name in the data server's certificate; "" if that is the address.
        private_networks: networks from which it accepts plain connections as well.
    """

    name: str
    process: str
    incarnation: str
    addresses: tuple[str, ...] = ()
    tls: bool = False
    transports: tuple[str, ...] = ("tcp",)
    tls_name: str = ""
    private_networks: tuple[str, ...] = ()


@dataclass(frozen=True)
class PoolView:
    """One node's view of its pool.

    Attributes:
        pool: the pool's name.
        node: the node whose view it is.
        heard_s: when the catalog last gave a sign of life, in seconds since the machine's start.
        peers: name -> node, including the node itself.
        private_networks: networks to which the node's processes may connect without encryption.
    """

    pool: str
    node: str
    heard_s: float
    peers: dict[str, PoolNode]
    private_networks: tuple[str, ...] = ()

    def lists(self, incarnation: int) -> bool:
        """Return whether the view has this node with this incarnation, and not another node that took over the name."""
        mine = self.peers.get(self.node)
        return mine is not None and mine.incarnation in ("", f"{incarnation:016x}")


def write(folder: NodeFolder, view: PoolView) -> None:
    """Replace both files. A reader sees either the old or the new view. Raises OSError if the folder is gone."""
    write_heard(folder, view.heard_s)
    peers = [vars(peer) for peer in view.peers.values()]
    _replace(folder, NAME, json.dumps({**vars(view), "peers": peers}, separators=(",", ":")))


def write_heard(folder: NodeFolder, heard_s: float) -> None:
    """Replace only the time of the catalog's last sign of life. Raises OSError if the folder is gone."""
    _replace(folder, HEARD_NAME, f"{heard_s:.3f}")


def _replace(folder: NodeFolder, name: str, text: str) -> None:
    temporary = folder.temporary(name)
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, folder.file_mode)
    with open(fd, "wb") as file:
        file.write(text.encode())
    temporary.replace(folder.path / name)


def forget(folder: NodeFolder) -> None:
    """Remove the files, because the node has left its cluster."""
    for name in (NAME, HEARD_NAME):
        (folder.path / name).unlink(missing_ok=True)


class PeersFile:
    """Reads the file. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._path, self._heard_path = folder / NAME, folder / HEARD_NAME
        self._last: tuple[tuple[int, ...], PoolView | None] = (), None
        self._look_ns = 0

    def look(self) -> PoolView | None:
        """Return the view, at most ``LOOK_NS`` old. None if the node is not in a cluster."""
        now_ns = time.monotonic_ns()
        if now_ns < self._look_ns:
            return self._last[1]
        self._look_ns = now_ns + LOOK_NS
        try:
            statuses = os.stat(self._path), os.stat(self._heard_path)
        except OSError:
            self._last = (), None
            return None
        identity = tuple(number for status in statuses for number in (status.st_ino, status.st_mtime_ns))
        last_identity, view = self._last
        if identity != last_identity:
            same_peers = view if identity[:2] == last_identity[:2] else None
            view = _read(self._path, self._heard_path, same_peers)
            self._last = identity, view
        return view


def _read(path: Path, heard_path: Path, view: PoolView | None) -> PoolView | None:
    """Return the view in two files; None if one of them is not a plain file, or is invalid. ``view``: the view with the
    peers of the first file, if it was read before."""
    try:
        heard_s = float(read_plain(heard_path))
        if view is not None:
            return replace(view, heard_s=heard_s)
        document = json.loads(read_plain(path))
        peers = [PoolNode(**_tuples(_known_fields(PoolNode, each))) for each in document["peers"]]
        fields_now = {**_tuples(_known_fields(PoolView, document)), "heard_s": heard_s}
        return PoolView(**{**fields_now, "peers": {peer.name: peer for peer in peers}})
    except (OSError, NotPlain, ValueError, TypeError, KeyError, AttributeError):
        return None


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _known_fields(kind: type[Any], values: dict[str, Any]) -> dict[str, Any]:
    return {each.name: values[each.name] for each in fields(kind) if each.name in values}


IDLE_MAX: Final = 4  # unused connections to one data server
IDLE_S: Final = 5.0  # an unused connection of a client is closed after this time
PROBE_MIN_S, PROBE_MAX_S = 0.5, 8.0  # pause between two probes of a dead data server; doubles each time
PROBE_ANSWER_S: Final = 1.0
FORGOTTEN_S: Final = 900.0  # a data server that is dead for longer is no longer probed
FULL_MIN_S, FULL_MAX_S = 0.25, 8.0  # pause after a data server had no free connection; doubles each time
FULL_MAX: Final = 1024  # data servers without a free connection to remember
KEEP_LOOK_S: Final = 1.0  # interval of looks for connections that were idle for too long

log = logging.getLogger("kvstore.cluster")

T = TypeVar("T")


class StaleConnection(NodeUnavailable):
    """A connection that was kept open has ended. Its server might be alive, and is asked once more."""


@dataclass
class _Dead:
    """A data server that is not responding: since when, and when it is probed next."""

    peer: PoolNode
    since_s: float
    next_s: float
    pause_s: float = PROBE_MIN_S


@dataclass
class _Full:
    """A data server that has no free connection for this caller: when it is tried next."""

    next_s: float
    pause_s: float


class PeerLinks:
    """Connections to data servers. Threads may share it. One thread at a time uses a connection; a broken one is
    closed.

    Args:
        pool: the pool of all peers.
        caller: this process' name for the servers.
    """

    def __init__(
        self, pool: str, caller: str, credentials: DialCredentials | None = None, idle_s: float | None = None
    ) -> None:
        self._hello = Hello(pool=pool, caller=caller)
        self._idle_max_s = idle_s
        self._credentials = credentials or DialCredentials()
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, DataConnection]]] = {}  # by process of the server
        self._dead: dict[str, _Dead] = {}  # by process of the server
        self._full: dict[str, _Full] = {}  # by process of the server
        self._has_keeper = False  # whether a thread runs ``_keep``
        self._closed = threading.Event()

    def dead(self, peer: PoolNode) -> bool:
        """Return whether the data server failed to answer, and has not answered since."""
        return peer.process in self._dead

    @contextlib.contextmanager
    def to(self, peer: PoolNode, deadline_s: float, silence_s: float = SILENCE_S) -> Iterator[DataConnection]:
        """Yield a connection to that data server. A broken connection is closed at the end, any other is kept open.

        Args:
            silence_s: how long the server may send nothing. The time to connect counts too, up to half of it.

        Raises:
            KVStoreError: as ``DataConnection.open``; NodeUnavailable at once if the server is ``dead``; TooManyCalls at
                once if it had no free connection a moment ago; StaleConnection, see ``call``.
        """
        if self.dead(peer):
            raise NodeUnavailable(f"{peer.name}: did not answer, and has not since")
        connection, began_s = self._take(peer), time.monotonic()
        try:
            if connection is None:
                self._check_full(peer, began_s)
                connection = self._open(peer, min(deadline_s, began_s + silence_s))
                self._full.pop(peer.process, None)
            connection.silence_s = max(silence_s / 2, silence_s - (time.monotonic() - began_s))
            yield connection
        except KVStoreError as error:
            if connection is not None and isinstance(error, WireError):
                connection.broken = True  # after an invalid frame the stream cannot be trusted
            if connection is not None and isinstance(error, Unauthenticated):
                connection.broken = True  # the token was replaced; the next connection sends the new one
                self._drop(peer)
            elif connection is not None and self.stale(peer, connection, error):
                raise StaleConnection(str(error)) from error
            elif connection is None and isinstance(error, TooManyCalls):
                self._note_full(peer, error)
            elif connection is None or connection.broken:
                self.mark_dead(peer)
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
        """Call ``use`` with a connection to that data server, and return its result. If the connection is stale, call
        it again with a new one.

        Args:
            use: may be called twice.

        Raises:
            KVStoreError: as for ``to``, and the errors that ``use`` raises.
        """
        try:
            with self.to(peer, deadline_s, silence_s) as connection:
                return use(connection)
        except StaleConnection:
            with self.to(peer, deadline_s, silence_s) as connection:
                return use(connection)

    def stale(self, peer: PoolNode, connection: DataConnection, error: KVStoreError) -> bool:
        """Return whether a connection that failed with this error was kept open since an earlier request, and has just
        ended. If so, the other idle connections to the server are closed too."""
        is_stale = connection.broken and not connection.fresh and isinstance(error, NodeUnavailable)
        if is_stale:
            self._drop(peer)
        return is_stale

    def close(self) -> None:
        """Close unused connections. Connections in use are closed when they are returned."""
        with self._lock:
            self._closed.set()
            connections = [connection for idle in self._idle.values() for _, connection in idle]
            self._idle.clear()
        for connection in connections:
            connection.close()

    def _open(self, peer: PoolNode, deadline_s: float) -> DataConnection:
        if not peer.addresses:
            raise NodeUnavailable(f"{peer.name}: has no address")
        ours = self._credentials
        hello = replace(self._hello, node=peer.name, process=peer.process, token=ours.token_now)
        ours = replace(ours, server_name=peer.tls_name) if peer.tls and not ours.server_name else ours
        plain_from = peer.private_networks
        return DataConnection.open(
            peer.addresses[0], hello, ours, tls=peer.tls, plain_from=plain_from, deadline_s=deadline_s
        )

    def _check_full(self, peer: PoolNode, now_s: float) -> None:
        """Raise TooManyCalls if the data server had no free connection, and is not to be tried yet."""
        full = self._full.get(peer.process)
        if full is not None and now_s < full.next_s:
            raise TooManyCalls(f"{peer.name}: has no free connection", full.next_s - now_s, "connections")

    def _note_full(self, peer: PoolNode, error: TooManyCalls) -> None:
        """Try the data server again after a pause, which doubles each time."""
        now_s, full = time.monotonic(), self._full.get(peer.process)
        if full is not None and now_s < full.next_s:
            return  # no new try was made
        if full is None:
            log.warning("%s: %s", peer.name, error)
        pause_s = max(error.retry_after_s, min(2 * full.pause_s, FULL_MAX_S) if full is not None else FULL_MIN_S)
        self._full[peer.process] = _Full(now_s + pause_s, pause_s)
        if len(self._full) > FULL_MAX:
            self._full.pop(next(iter(self._full)), None)

    def _take(self, peer: PoolNode) -> DataConnection | None:
        """Take the idle connection that was used last; None if there is none that the server surely keeps."""
        with self._lock:
            idle = self._idle.get(peer.process)
            return idle.pop()[1] if idle and idle[-1][0] > self._unused_since_s() else None

    def _give_back(self, peer: PoolNode, connection: DataConnection) -> None:
        """Keep the connection for the next request."""
        with self._lock:
            idle = self._idle.setdefault(peer.process, [])
            is_kept = not connection.broken and not self._closed.is_set() and len(idle) < IDLE_MAX
            if is_kept:
                connection.fresh = False
                idle.append((time.monotonic(), connection))
        if is_kept:
            self._start_keeper()
        else:
            connection.close()

    def mark_dead(self, peer: PoolNode) -> None:
        """Stop asking a data server until it answers again, and close its idle connections."""
        now_s = time.monotonic()
        with self._lock:
            self._dead.setdefault(peer.process, _Dead(peer, now_s, now_s + PROBE_MIN_S))
        self._drop(peer)
        self._start_keeper()

    def _drop(self, peer: PoolNode) -> None:
        """Close the unused connections to a data server."""
        with self._lock:
            idle = self._idle.pop(peer.process, [])
        for _, connection in idle:
            connection.close()

    def _start_keeper(self) -> None:
        """Start the thread that runs ``_keep``, unless it runs."""
        if self._has_keeper:
            return
        with self._lock:
            start, self._has_keeper = not self._has_keeper and not self._closed.is_set(), True
        if start:
            threading.Thread(target=self._keep, name="kvstore-links", daemon=True).start()

    def _keep(self) -> None:
        """Probe dead data servers, and close connections that were idle for too long, until there are neither."""
        while not self._closed.wait(PROBE_MIN_S / 2 if self._dead else min(KEEP_LOOK_S, IDLE_S)):
            self._close_idle()
            self._probe()
            with self._lock:
                self._idle = {process: idle for process, idle in self._idle.items() if idle}
                if not self._dead and not self._idle:
                    self._has_keeper = False
                    return

    def _unused_since_s(self) -> float:
        """Return the time before which an unused connection is too old, by ``time.monotonic()``."""
        return time.monotonic() - (IDLE_S if self._idle_max_s is None else self._idle_max_s)

    def _close_idle(self) -> None:
        before_s, to_close = self._unused_since_s(), list[DataConnection]()
        with self._lock:
            for idle in self._idle.values():
                while idle and idle[0][0] <= before_s:
                    to_close.append(idle.pop(0)[1])
        for each in to_close:
            each.close()

    def _probe(self) -> None:
        """Try to reach dead data servers whose turn it is."""
        now_s = time.monotonic()
        for each in [each for each in list(self._dead.values()) if each.next_s <= now_s]:
            if now_s - each.since_s > FORGOTTEN_S or self._answers(each.peer):
                with self._lock:
                    del self._dead[each.peer.process]
            else:
                each.pause_s = min(2 * each.pause_s, PROBE_MAX_S)
                each.next_s = time.monotonic() + each.pause_s

    def _answers(self, peer: PoolNode) -> bool:
        try:
            connection = self._open(peer, time.monotonic() + PROBE_ANSWER_S)
        except TooManyCalls:
            return True  # it is alive; a request that needs it gets this error
        except KVStoreError:
            return False
        self._give_back(peer, connection)
        return True
