"""The interface between a client and its node: ``Channel`` for requests, and the node's log for publications.

``Channel`` has two implementations: ``client.local.channel.SocketChannel`` for a daemon on this machine, over its unix
socket, and ``node.dispatch.InProcessChannel`` for a node in this process. One contract suite runs over both.

``Publisher`` writes into a session's slot of the log in shared memory. A put publishes its pages there instead of
sending a request. The node takes them in later. ``Copies`` counts the copies into granted frames that are in flight, so
that a session does not end during a copy.

``PutLogReader`` reads the log. A reader that does not find a key in the index looks for it in the log. If the key is
there, the reader asks the node to take in the published pages, and reads the index again. It also waits for a page that
the node saves to NVMe because its parent is there. While the node is down, published pages are misses. The log is a
hint and proves no page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.shm.counters import SessionCounters
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.put_log import PutLog
from kvstore.wire.control import Message, Op


class Copies:
    """The copies in flight into frames that the node has granted to one session. Thread-safe.

    Every store into such a frame is inside ``with copies:``. After ``close`` no copy can begin. When the last copy in
    flight has ended, the callbacks of ``close`` are called, which end the session for its node: they free its lock or
    return its frames. No caller waits for that. If the process dies first, its copies end with it.
    """

    __slots__ = ("_callbacks", "_in_flight", "_lock", "_refusal")

    def __init__(self) -> None:
        # Reentrant, because a signal handler or a finalizer may close the store in a thread that holds the lock.
        self._lock = threading.RLock()
        self._in_flight = 0
        self._refusal: Callable[[], KVStoreError] | None = None
        self._callbacks: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        """Begin a copy. After ``close``, raise its refusal: nothing may be stored."""
        with self._lock:
            self._in_flight += 1
        # Read after this copy is counted: either ``close`` waits for this copy, or this copy sees the refusal.
        if self._refusal is not None:
            self.__exit__()
            raise self._refusal()

    def check(self) -> None:
        """Raise the refusal after ``close``. Call this during a copy, before anything else is stored."""
        if self._refusal is not None:
            raise self._refusal()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._in_flight -= 1
            callbacks = self._take_callbacks() if self._refusal is not None else ()
        for callback in callbacks:
            callback()

    def keep_open(self) -> None:
        """Count a copy that never ends: a device may still write into its frames, so the session lasts as long as the
        process. Called within ``with copies:``, also after ``close``."""
        with self._lock:
            self._in_flight += 1

    def close(self, refusal: Callable[[], KVStoreError], callback: Callable[[], None]) -> None:
        """Refuse further copies with the error ``refusal()``. Call ``callback`` when no copy is in flight: now, or in
        the thread that ends the last copy. If ``close`` is called again, the first refusal stays, and each callback is
        called."""
        with self._lock:
            self._refusal = self._refusal or refusal
            self._callbacks.append(callback)
            callbacks = self._take_callbacks()
        for call in callbacks:
            call()

    def after_fork(self, refusal: Callable[[], KVStoreError]) -> None:
        """Refuse all copies in a forked child. The copies in flight and the callbacks belong to the parent."""
        self.__init__()  # type: ignore[misc]  # another thread may have held the lock during the fork
        self._refusal = refusal

    def _take_callbacks(self) -> Iterable[Callable[[], None]]:
        """Return the callbacks to call now. The caller holds ``_lock``."""
        if self._in_flight or self._refusal is None:
            return ()
        callbacks, self._callbacks = self._callbacks, []
        return callbacks


_PUTS_ID, _PID = Header.puts_id.position, Header.pid.position
WAITING_MAX: Final = 8192  # keys of published pages that are remembered; a slot has space for fewer pages
NEWEST_MAX: Final = 64  # publications whose keys are not in the table of keys yet


class Publisher:
    """Publishes requests of one session in its slot of the node's log. Thread-safe.

    A new publisher has no slot and publishes nothing. Each HELLO assigns it to a slot or to none. ``Copies.close`` ends
    it. The node reuses the slot once the lock of the session's file is free.

    Attributes:
        slot: the number of its slot; -1 without one.
    """

    def __init__(self, folder: Path, session: int, copies: Copies) -> None:
        self._folder = folder
        self._session = session
        self._copies = copies
        self._lock = threading.Lock()
        self._log: PutLog | None = None
        self._waiting: dict[bytes, int] = {}  # where the record of each key ends; the node may have taken some in
        self._newest: list[tuple[int, list[bytes]]] = []  # the same for the newest records, by record
        self.slot = -1
        self._daemon_pid = 0  # the daemon that has assigned the slot

    def assign(self, reply: Any) -> list[bytes]:
        """Use the slot that the daemon assigns in its reply to HELLO: ``{"id", "slot", "pid"}``, or None for no slot.

        If it is another slot, or one of another log, the daemon does not take in the requests that are published in the
        old slot. Return these requests, which the caller must send.
        """
        old_log, old_slot = self._log, self.slot
        self._daemon_pid = int(reply["pid"]) if reply else 0
        log_id, slot = (int(reply["id"], 16), int(reply["slot"])) if reply else (0, -1)
        if old_log is not None and (old_log.id, old_slot) == (log_id, slot):
            return []
        with self._lock:
            self._log = PutLog.open(NodeFolder.at(self._folder), log_id) if log_id else None
            self._waiting, self._newest = {}, []
            self.slot = slot
        return old_log.undrained(old_slot, self._session) if old_log is not None else []

    def publish(self, request: bytes, keys: list[bytes], header: Header) -> int:
        """Publish a request. Return the position in the slot where its record ends, or 0 if it cannot be published now:
        there is no slot, the slot is full, or the node has been restarted. Call it within ``Channel.copies``.

        Args:
            keys: the keys of the pages that the request stores. The list must not change afterwards.
            header: the node's header.

        Raises:
            KVStoreError: the refusal of ``Copies.close``, after the session has ended.
        """
        self._copies.check()
        with self._lock:
            log, words = self._log, header.words
            if log is None or log.id != words[_PUTS_ID] or self._daemon_pid != words[_PID]:
                return 0
            position = log.append(self.slot, self._session, request)
            if position and keys:
                self._newest.append((position, keys))
                if len(self._newest) >= NEWEST_MAX:
                    self._remember()
            return position

    def _remember(self) -> None:
        """Move the keys of ``_newest`` to ``_waiting``. The caller holds ``_lock``."""
        newest, self._newest = self._newest, []
        if len(self._waiting) > WAITING_MAX:
            drained = self.drained
            self._waiting = {key: end for key, end in self._waiting.items() if end > drained}
        for position, keys in newest:
            self._waiting.update(dict.fromkeys(keys, position))

    def _ends(self) -> dict[bytes, int]:
        """Return where the record of each key ends."""
        if self._newest:
            with self._lock:
                self._remember()
        return self._waiting

    @property
    def drained(self) -> int:
        """The position up to which the node has taken in this slot."""
        log = self._log
        return log.drained_position(self.slot) if log is not None else 0

    @property
    def published(self) -> int:
        """The position up to which this slot is written."""
        log = self._log
        return log.published(self.slot) if log is not None else 0

    def holds(self, key: bytes) -> bool:
        """Return whether this session has published the page with this key and the node has not taken it in yet."""
        return self._ends().get(key, 0) > self.drained

    def leading(self, keys: list[bytes], start: int) -> int:
        """Return for how many consecutive keys starting at ``start`` ``holds`` is true."""
        waiting, page = self._ends(), start
        if keys[start] not in waiting:
            return 0
        drained = self.drained
        while page < len(keys) and waiting.get(keys[page], 0) > drained:
            page += 1
        return page - start

    @property
    def deciding(self) -> bool:
        """True while the node decides about requests that it may have read before the last publication."""
        log = self._log
        return log is None or log.deciding


class PendingReply(Protocol):
    """A request that was sent. Replies arrive in the order of the requests."""

    def result(self) -> Message:
        """Wait for the reply, and return it. The caller owns its body.

        Raises:
            DeadlineExceeded: no reply arrived within the request's deadline. The request may still be carried out.
            NodeUnavailable: the daemon is down. The request may have been carried out.
            InvalidRequest, Unavailable: the node refused the request. Nothing was changed.
        """
        ...


class Channel(Protocol):
    """A session with one node, for requests to it."""

    @property
    def session(self) -> int:
        """The session's id, a random number."""
        ...

    @property
    def counters(self) -> SessionCounters:
        """The counters of this session, which the node reads."""
        ...

    @property
    def copies(self) -> Copies:
        """The context to enter for every store into a frame granted to this session."""
        ...

    @property
    def publisher(self) -> Publisher | None:
        """The publisher of this session's puts; None if puts must be sent."""
        ...

    @property
    def ended(self) -> bool:
        """True once requests can no longer succeed, because the channel was closed or the node was recreated."""
        ...

    def request(
        self,
        op: Op,
        *,
        count: int = 0,
        a: int = 0,
        b: int = 0,
        flags: int = 0,
        body: Iterable[bytes] = (),
        timeout_s: float | None = None,
    ) -> PendingReply:
        """Send a request, without waiting for its reply. A request with the flag ``NO_REPLY`` gets no reply.

        Raises:
            NodeUnavailable: the daemon could not be reached. Nothing was sent.
        """
        ...

    def close(self) -> None:
        """End the session. Its reserved frames return to the node, and its leases end. The call does not wait for a
        copy of another thread; the node gets the frames back when that copy has ended."""
        ...


DRAIN_S: Final = 2.0  # longest wait for the node; after that it is not asked again before its next heartbeat
ARRIVAL_S: Final = 2.0  # longest wait for a page's save to NVMe; then its slot is not waited for until it advances
_PAUSE_S: Final = 0.001  # between two checks whether a page has been saved


class PutLogReader:
    """The log of one mapped node, for its readers. Thread-safe.

    Args:
        timeout_s: how long a request to the node may take, if that is less than ``DRAIN_S``.

    Attributes:
        seen: the positions up to which the node had taken in all slots at some moment, written twice: as the positions
            taken in and as the positions published. If ``PutLog.positions`` still equals this value after the index was
            read, no page was pending and none was taken in between. A page that is not in the index was then not put.
    """

    __slots__ = ("_folder", "_header", "_id", "_log", "_stuck", "_unanswered_ns", "_wait_s", "seen")

    def __init__(self, folder: NodeFolder, header: Header, timeout_s: float = DRAIN_S) -> None:
        self._wait_s = min(timeout_s, DRAIN_S)
        self._folder = folder
        self._header = header
        self._id: int = header.puts_id
        self._log = PutLog.open(folder, self._id)
        self._unanswered_ns = -1  # the node's last heartbeat before a request that it did not answer
        self._stuck: dict[int, int] = {}  # the position of each slot with a page that was not saved in time
        self.seen = b""

    @property
    def drained(self) -> bytes:
        """The positions up to which the node has taken in each slot."""
        log = self._log
        return log.drained() if log is not None else b""

    def current(self) -> PutLog | None:
        """Return the node's log. Open it again if the daemon has recreated it."""
        if self._header.words[_PUTS_ID] != self._id:
            self._id = self._header.words[_PUTS_ID]
            self._log = PutLog.open(self._folder, self._id)
        return self._log

    def is_unchanged(self, seen: bytes) -> bool:
        """Return whether the log has not changed since its positions were ``seen``, so that a miss in the index is
        final."""
        log = self._log
        return self._header.words[_PUTS_ID] == self._id and (log is None or log.positions() == seen)

    def is_in_other_slot(self, key: bytes, slot: int) -> bool:
        """Return whether a slot other than ``slot`` has published the page with this key and it is not taken in. A
        hint."""
        log = self._log
        return log is not None and not log.is_drained and log.holder(key, slot) >= 0

    def check_pending(self, key: bytes, positions: bytes) -> tuple[bool, bytes]:
        """Return whether the node has not taken in the page of ``key`` that is published, or announced while it is
        written. Also return the log's positions for the next call.

        Args:
            positions: the positions of the last call. If the log has not changed since, the result is False.
        """
        log = self.current()
        current = log.positions() if log is not None else b""
        return log is not None and current != positions and log.holder(key) >= 0, current

    def look(self, missing_keys: Callable[[], list[bytes]], seen: bytes, channel: Channel) -> bytes | None:
        """Decide whether a miss in the index is final. If one of the missing keys is published, ask the node to take it
        in first.

        Args:
            missing_keys: returns the keys that the index does not list.
            seen: the positions before the index was read.

        Returns:
            None if the miss is final. Otherwise the caller reads the index again, with the result as ``seen``.
        """
        old_log, log = self._log, self.current()
        seen = seen if log is old_log else b""
        if log is None or log.positions() == seen:
            return None
        waiting = log.pending(missing_keys())
        if not waiting and 2 * log.drained() == seen:
            return None
        if waiting and not self._ask(channel):
            return None
        for key in waiting:
            self._await_arrival(log, key)
        self.seen = 2 * log.drained()
        return self.seen

    def take_in(self, channel: Channel) -> None:
        """Ask the node to take in everything that is published, before a scan of the index. Raises nothing."""
        log = self.current()
        if log is not None and not log.is_drained:
            self._ask(channel)

    def _ask(self, channel: Channel) -> bool:
        """Ask the node to take in all published pages. Return False if it is not responding, or has not had a heartbeat
        since it did not answer."""
        heartbeat_ns = self._header.heartbeat_ns
        if heartbeat_ns == self._unanswered_ns:
            return False
        try:
            channel.request(Op.DRAIN, timeout_s=self._wait_s).result()
            return True
        except (Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
            self._unanswered_ns = heartbeat_ns
        return False

    def _await_arrival(self, log: PutLog, key: bytes) -> None:
        """Wait until a published page is taken in. After the node was asked, only pages that it is saving to NVMe are
        still in the log."""
        deadline = time.monotonic() + min(self._wait_s, ARRIVAL_S)
        while (slot := log.holder(key)) >= 0:
            drained = log.drained_position(slot)
            if drained == self._stuck.get(slot):
                return
            if time.monotonic() > deadline:
                self._stuck[slot] = drained
                return
            time.sleep(_PAUSE_S)
