"""How a client hands work to its node: the channel, the log of puts, and copies that are under way.

The seam between a client and the node that decides for it: one verb.

Two peers implement it: ``client.local.channel.SocketChannel`` (a daemon on this machine, over its unix socket) and
``node.dispatch.InProcessChannel`` (a node in this process). One contract suite runs over both.

Publisher: where one session publishes its puts, instead of sending them: its slot in the node's log of puts.

Copies: the stores into granted frames that are under way in this process, so that no session ends beneath one.

Pages that were put, and that the node has not taken in yet. The log is a hint and proves no page.

A reader that misses a key in the index looks for it in the log. If it is there, the reader asks the node to take in
what was published, and reads the index again. It waits for a page that follows its parent to NVMe. While the node is
down, such a page is a miss.
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
    """Copies in flight into frames that a node granted to one session. Threads may share it.

    ``with copies:`` stands around every store into such a frame. Life: open -> ``close``: no other copy begins, and
    what ends the session for its node (its lock, its frames) is called when the last copy in flight has ended; at once
    where there is none. No caller waits for that. A process that dies first ends its copies with it.
    """

    __slots__ = ("_lock", "_in_flight", "_refusal", "_then")

    def __init__(self) -> None:
        # Reentrant: a signal handler, or a finalizer, may close the store in a thread that is just here.
        self._lock = threading.RLock()
        self._in_flight = 0
        self._refusal: Callable[[], KVStoreError] | None = None
        self._then: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        """A copy begins. Raises what ``close`` was given, once closed: nothing may be stored."""
        with self._lock:
            self._in_flight += 1
        if self._refusal is not None:  # looked at when we count already: ``close`` waits for us, or we see it
            self.__exit__()
            raise self._refusal()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._in_flight -= 1
            then = self._ended() if self._refusal is not None else ()
        for call in then:
            call()

    def close(self, refusal: Callable[[], KVStoreError], then: Callable[[], None]) -> None:
        """Let no other copy begin: it raises ``refusal()``. Call ``then`` when none is in flight any more, in the
        thread of the last. May be called again: the first refusal stays, every ``then`` is called."""
        with self._lock:
            self._refusal = self._refusal or refusal
            self._then.append(then)
            calls = self._ended()
        for call in calls:
            call()

    def after_fork(self, refusal: Callable[[], KVStoreError]) -> None:
        """In a forked child: the copies are its parent's, and so is what they end."""
        self.__init__()  # type: ignore[misc]  # another thread may have held the lock during the fork
        self._refusal = refusal

    def _ended(self) -> Iterable[Callable[[], None]]:
        """What is to be called now. ``_lock`` is held."""
        if self._in_flight or self._refusal is None:
            return ()
        then, self._then = self._then, []
        return then


_PUTS_ID, _PID = Header.puts_id.position, Header.pid.position
WAITING_MAX: Final = 8192  # keys remembered; a ring has room for fewer


class Publisher:
    """Threads may share it. Life: made (publishes nothing) -> ``assigned`` by each HELLO, to a slot or to none -> its
    session ends: ``Copies.close`` lets nothing be published any more, and the slot is free when the session's lock is.

    Attributes:
        slot: -1 where it has none.
    """

    def __init__(self, folder: Path, session: int, copies: Copies) -> None:
        self._folder = folder
        self._session = session
        self._copies = copies
        self._lock = threading.Lock()
        self._log: PutLog | None = None
        self._waiting: dict[bytes, int] = {}  # key -> where its record ends; some may be taken in
        self.slot = -1
        self._pid = 0  # of the daemon that gave the slot

    def assigned(self, said: Any) -> list[bytes]:
        """What HELLO was answered: ``{"id", "slot", "pid"}``, or None. Returns requests that were published and that
        this node will not take in, since it has another log, or none: they are to be sent.
        """
        log, slot = self._log, self.slot
        self._pid = int(said["pid"]) if said else 0
        id_, now = (int(said["id"], 16), int(said["slot"])) if said else (0, -1)
        if log is not None and (log.id, slot) == (id_, now):
            return []
        with self._lock:
            self._log = PutLog.open(NodeFolder.at(self._folder), id_) if id_ else None
            self._waiting = {}
            self.slot = now
        return log.undrained(slot, self._session) if log is not None else []

    def publish(self, request: bytes, keys: list[bytes], header: Header) -> int:
        """Publish a request, about pages of these keys; its position in the slot. 0: not now, or not here; ``header``:
        the node's.

        Raises what the session's ``Copies`` do, once that is closed.
        """
        with self._copies, self._lock:
            log, words = self._log, header.words
            if log is None or log.id != words[_PUTS_ID] or self._pid != words[_PID]:
                return 0
            position = log.append(self.slot, self._session, request)
            if position:
                if len(self._waiting) > WAITING_MAX:
                    marked = self.marked
                    self._waiting = {key: at for key, at in self._waiting.items() if at > marked}
                self._waiting.update(dict.fromkeys(keys, position))
            return position

    @property
    def marked(self) -> int:
        """Up to which position the node is through with what we published."""
        log = self._log
        return log.drained_position(self.slot) if log is not None else 0

    @property
    def published(self) -> int:
        """Up to which position we have published."""
        log = self._log
        return log.published(self.slot) if log is not None else 0

    def holds(self, key: bytes) -> bool:
        """Whether we published the page of that key, and the node has not taken it in."""
        return self._waiting.get(key, 0) > self.marked

    def leading(self, keys: list[bytes], start: int) -> int:
        """How many from ``start`` on of these keys we published, and the node has not taken in."""
        waiting, page = self._waiting, start
        if keys[start] not in waiting:
            return 0
        marked = self.marked
        while page < len(keys) and waiting.get(keys[page], 0) > marked:
            page += 1
        return page - start

    @property
    def deciding(self) -> bool:
        """The node may have looked before we published last: what it decides now knows nothing of that."""
        log = self._log
        return log is None or log.deciding


class PendingReply(Protocol):
    """A request on its way. Replies arrive in the order of the requests."""

    def result(self) -> Message:
        """The reply, its body owned by the caller.

        Raises:
            DeadlineExceeded: no reply within the request's deadline. The request may still be carried out.
            NodeUnavailable: the daemon is down. The request may have been carried out.
            InvalidRequest, Unavailable: the node refused; nothing was changed.
        """
        ...


class Channel(Protocol):
    """Requests to one node in the name of one session."""

    @property
    def session(self) -> int:
        """The session id, drawn at random when the channel was made."""
        ...

    @property
    def counters(self) -> SessionCounters:
        """What this session counts for its node to see."""
        ...

    @property
    def copies(self) -> Copies:
        """Entered around every store into a frame granted to this session."""
        ...

    @property
    def publisher(self) -> Publisher | None:
        """Where puts are published instead of being sent; None: nowhere."""
        ...

    @property
    def ended(self) -> bool:
        """No request can succeed any more: it was closed, or its node was recreated."""
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
        """Send one request; does not wait for its reply. With ``NO_REPLY`` in flags there will be none.

        Raises:
            NodeUnavailable: the daemon could not be reached; nothing was sent.
        """
        ...

    def close(self) -> None:
        """End the session: what it had reserved is given back, its leases end. Waits for no copy of another thread.
        Where one is in flight, the node gets the frames back when that copy has ended."""
        ...


DRAIN_S: Final = 2.0  # a node that does not answer within this is not asked again before its next heartbeat
ARRIVAL_S: Final = 2.0  # a page that is not on NVMe within this is not waited for again before its slot advances
_LOOK_S: Final = 0.001


class Published:
    """The log of one mapped node, for its readers. Threads may share it.

    Args:
        timeout_s: how long a request to the node may take, if that is less than ``DRAIN_S``.

    Attributes:
        seen: up to which positions the node had taken in the log at some moment, twice. Positions only grow. So if they
            are unchanged after the index was read, nothing was taken in between: a page that is neither in the index
            nor pending in the log had not been put.
    """

    __slots__ = ("_folder", "_header", "_id", "_log", "_stuck", "_unanswered_ns", "_wait_s", "seen")

    def __init__(self, folder: NodeFolder, header: Header, timeout_s: float = DRAIN_S) -> None:
        self._wait_s = min(timeout_s, DRAIN_S)
        self._folder = folder
        self._header = header
        self._id: int = header.puts_id
        self._log = PutLog.open(folder, self._id)
        self._unanswered_ns = -1  # the node's last heartbeat when it did not answer
        self._stuck: dict[int, int] = {}  # slot -> its position when one of its pages did not arrive
        self.seen = b""

    @property
    def drained(self) -> bytes:
        """Return up to which positions the node has taken in the log."""
        log = self._log
        return log.drained() if log is not None else b""

    def rests(self, seen: bytes) -> bool:
        """Return whether nothing was taken in since then and nothing is pending, so that a miss in the index is
        final."""
        log = self._log
        return self._header.words[_PUTS_ID] == self._id and (log is None or log.positions() == seen)

    def elsewhere(self, key: bytes, slot: int) -> bool:
        """Return whether the page of that key is published in another slot and not taken in. A hint."""
        log = self._log
        return log is not None and not log.is_drained and log.holder(key, slot) >= 0

    def waits(self, key: bytes, looked: bytes) -> tuple[bool, bytes]:
        """Return whether the page of that key is published, or announced while it is written, and not taken in; and the
        new ``looked`` positions for the next call. False if nothing has moved since."""
        log = self._current()
        positions = log.positions() if log is not None else b""
        return log is not None and positions != looked and log.holder(key) >= 0, positions

    def look(self, missed: Callable[[], list[bytes]], seen: bytes, channel: Channel) -> bytes | None:
        """Decide after a miss in the index. Returns None if the miss is final; otherwise the caller should read the
        index again, with the returned positions as ``seen``. If one of the ``missed`` keys was published, the node is
        asked to take it in first.

        ``seen``: the positions before the index was read.
        """
        before, log = self._log, self._current()
        seen = seen if log is before else b""
        if log is None or log.positions() == seen:
            return None
        waiting = log.pending(missed())
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
        log = self._current()
        if log is not None and not log.is_drained:
            self._ask(channel)

    def _current(self) -> PutLog | None:
        """Return the node's log, reopened if the daemon has recreated it since this node was mapped."""
        if self._header.words[_PUTS_ID] != self._id:
            self._id = self._header.words[_PUTS_ID]
            self._log = PutLog.open(self._folder, self._id)
        return self._log

    def _ask(self, channel: Channel) -> bool:
        """Ask the node to take in what was published; return False if it does not."""
        sign_ns = self._header.heartbeat_ns
        if sign_ns == self._unanswered_ns:
            return False
        try:
            channel.request(Op.DRAIN, timeout_s=self._wait_s).result()
            return True
        except (Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
            self._unanswered_ns = sign_ns
        return False

    def _await_arrival(self, log: PutLog, key: bytes) -> None:
        """Wait for pages that are being saved to NVMe: those of a record that is still in the log after the node was
        asked to take it in."""
        deadline = time.monotonic() + min(self._wait_s, ARRIVAL_S)
        while (slot := log.holder(key)) >= 0:
            marked = log.drained_position(slot)
            if marked == self._stuck.get(slot):
                return
            if time.monotonic() > deadline:
                self._stuck[slot] = marked
                return
            time.sleep(_LOOK_S)
