"""SocketChannel: requests to the daemon of a node on this machine, over its unix socket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from kvstore.client.local.publisher import Copies, Publisher
from kvstore.client.store import AFTER_FORK
from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    NodeUnavailable,
    OutOfSpace,
    Unavailable,
    VersionMismatch,
)
from kvstore.model.replica import Status
from kvstore.safe_files import open_plain
from kvstore.shm.counters import SessionCounters
from kvstore.shm.folder import NodeFolder
from kvstore.wire import control
from kvstore.wire.control import AHEAD, MESSAGE_BYTES_MAX, NO_REPLY, Message, Op

OUTSTANDING_MAX = 64  # unanswered requests; bounds what the daemon has to remember for this client
_POLL = struct.pack("ll", 0, 50_000)  # a blocked send or receive checks its deadline every 50 ms
_SUN_PATH_MAX = 100  # a unix socket's path has 108 bytes
_RETRY_MIN_S, _RETRY_MAX_S = 0.001, 0.05

_NEW, _DONE, _LOST = 0, 1, 2
_REFUSALS = (int(Status.INVALID), int(Status.FAILED))


class SocketReply:
    """A request that was sent. It ends with a reply or with the loss of the connection; ``result`` returns or raises
    that."""

    __slots__ = ("_channel", "_deadline", "_state", "_message", "request_id")

    def __init__(self, channel: SocketChannel, request_id: int, deadline: float) -> None:
        self._channel = channel
        self._deadline = deadline
        self._state = _NEW
        self._message: Message | None = None
        self.request_id = request_id

    def result(self) -> Message:
        """Return the reply, whose body the caller owns. Waits until the request's deadline.

        Raises:
            DeadlineExceeded: no reply in time. The request may still be carried out.
            NodeUnavailable: the connection was lost. The request may have been carried out.
            InvalidRequest, VersionMismatch, Unavailable: the node refused; nothing was changed.
        """
        if self._state == _NEW:
            self._channel._collect(self, self._deadline)
        if self._message is None:
            raise NodeUnavailable(f"{self._channel.folder.name}: the daemon ended before it answered")
        message = self._message
        if message.op in _REFUSALS:
            _refuse(message)
        return message


class SocketChannel:
    """One session with one node. Threads may share it.

    Life: made (nothing started) -> ``begin``, or the first request: session file locked -> first request: connected,
    HELLO -> requests; a lost connection fails the unanswered requests, and the next request reconnects under the same
    session, so callers do not notice a restart of the daemon in between. It ends with ``close``, once the last copy in
    flight has ended, or with the death of this process; either frees the session file's lock, which tells the daemon
    that this session can write nothing more. A forked child does not share the session: its copies of the descriptors
    are closed and every call is refused.

    A channel serves one incarnation of a node. If the folder was recreated, frames granted before are void; the channel
    then ends for good (``ended``), and its owner makes another. ``close`` also ends it.

    Args:
        folder: the node's folder.
        timeout_s: how long a request may take, including a reconnection.
        incarnation: of the segment, 16 hex digits: refuse any other. None takes the first one met.
    """

    def __init__(self, folder: Path, timeout_s: float = 5.0, *, incarnation: str | None = None) -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self.incarnation = incarnation
        self.ended = False
        self.copies = Copies()
        self._session = secrets.randbits(63) | 1
        self._file = SessionFile(folder, self._session)
        self.publisher = Publisher(folder, self._session, self.copies)
        self._refusal = ""
        self._renewed = False  # closed because another channel follows
        self._sending = threading.Lock()  # held while a request is encoded and sent, or a connection made
        self._changed = threading.Condition()  # guards the five below
        self._socket: socket.socket | None = None
        self._spent: list[socket.socket] = []  # lost connections, to be closed once no thread can be using them
        self._receiving = False
        self._waiting: deque[SocketReply] = deque()
        self._buffer = bytearray(MESSAGE_BYTES_MAX)
        self._request_id = 0
        self._pid = os.getpid()
        _channels.add(self)

    @property
    def session(self) -> int:
        """The session id, drawn at random when the channel was made."""
        return self._session

    @property
    def counters(self) -> SessionCounters:
        """The counters of this session, which its node can read."""
        return self._file.counters

    def begin(self) -> None:
        """Take the session's file now, so that a client that only reads is counted there too. If that fails, the first
        request tries again."""
        with self._sending, contextlib.suppress(OSError):
            self._file.lock()

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
    ) -> SocketReply:
        """Send one request, without waiting for its reply. With ``NO_REPLY`` in flags there will be no reply.

        Raises:
            NodeUnavailable: the daemon could not be reached within the deadline; nothing was sent.
            VersionMismatch: the daemon speaks another version.
            InvalidRequest: the channel is closed, or this is a forked child.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        if self._refusal:
            raise self._refused()
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NodeUnavailable(f"{self.folder.name}: other requests kept the connection busy until the deadline")
        try:
            self._request_id = request_id = self._request_id + 1 & 0xFFFFFFFF
            data = control.encode(op, request_id, count=count, a=a, b=b, flags=flags, body=body)
            reply = SocketReply(self, request_id, deadline)
            while True:
                if op is Op.GRANT and flags & AHEAD and self._socket is None:  # no need to wait for a daemon now
                    raise NodeUnavailable(f"{self.folder.name}: not connected, and the request is not urgent")
                # Telling the node that there is something to take in is a hint: it is worth one try.
                sock = self._socket or self._connect(deadline, once=op is Op.DRAIN)
                if len(self._waiting) >= OUTSTANDING_MAX:
                    self._collect_oldest(deadline)
                    continue
                if self._send(sock, data, None if flags & NO_REPLY else reply, deadline):
                    return reply
        finally:
            self._sending.release()

    def close(self) -> None:
        """End the session: its reservations are returned and its leases end. Unanswered requests fail."""
        if self._refusal:
            return
        self._renewed, self.ended, self._refusal = self.ended, True, "is closed"
        # Free the lock first, so that the daemon finds it free when it sees the connection end. While a copy is in
        # flight the daemon finds it locked, keeps the frames, and looks again.
        self.copies.close(self._refused, self._file.close)
        self._lose(self._socket)
        if self._sending.acquire(timeout=self.timeout_s):
            try:
                self._bury(time.monotonic() + self.timeout_s)
            finally:
                self._sending.release()

    def _refused(self) -> KVStoreError:
        if self._renewed:
            return NodeUnavailable(f"{self.folder.name}: the session was renewed in the meantime")
        return InvalidRequest("store", self._refusal)

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send(self, sock: socket.socket, data: bytes, reply: SocketReply | None, deadline: float) -> bool:
        """Returns False if the connection was lost, and nothing was sent."""
        if reply is not None:
            with self._changed:
                if self._socket is not sock:
                    return False
                self._waiting.append(reply)  # before the send: the receiver must know which request a reply answers
        while True:
            try:
                sock.send(data, socket.MSG_DONTWAIT)
                return True
            except BlockingIOError:
                # The daemon is slow. It may be waiting for this client to read replies.
                if time.monotonic() >= deadline:
                    if reply is not None:  # without a reply nothing is outstanding: other requests may wait longer
                        self._lose(sock)
                    raise NodeUnavailable(f"{self.folder.name}: the daemon took no request in time") from None
                if not self._collect_oldest(deadline, before=reply):
                    time.sleep(_RETRY_MIN_S)
            except OSError:
                self._withdraw(reply)
                self._lose(sock)
                return False

    def _withdraw(self, reply: SocketReply | None) -> None:
        if reply is not None:
            with self._changed:
                if reply in self._waiting:
                    self._waiting.remove(reply)
                reply._state = _NEW

    def _connect(self, deadline: float, once: bool) -> socket.socket:
        """Return a connection that has completed HELLO. Retries until the deadline, since the daemon may be restarting,
        but for less time than an answer may take. ``once``: do not retry if nothing listens."""
        pause_s, deadline = _RETRY_MIN_S, min(deadline, time.monotonic() + self.timeout_s)
        self._bury(deadline)
        while True:
            if self._refusal:
                raise InvalidRequest("store", self._refusal)
            if self.ended:
                raise NodeUnavailable(f"{self.folder.name}: the node was recreated after it was opened here")
            if not NodeFolder.at(self.folder).trusted():  # purged, and another user may have made a new one
                raise NodeUnavailable(f"{self.folder.name}: there is no such node on this machine")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            try:
                self._file.lock()
                _dial(sock, self.folder)
                self._hello(sock, deadline)
            except OSError as error:
                sock.close()
                nobody = isinstance(error, ConnectionRefusedError | FileNotFoundError)
                if (once and nobody) or time.monotonic() + pause_s >= deadline:
                    raise NodeUnavailable(f"{self.folder.name}: its daemon does not answer ({error})") from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _RETRY_MAX_S)
                continue
            except BaseException:
                sock.close()
                raise
            with self._changed:
                self._socket = sock
            return sock

    def _hello(self, sock: socket.socket, deadline: float) -> None:
        """Raises OSError if the daemon ends or does not answer in time."""
        body = control.pack_json({"protocol": control.PROTOCOL})
        sock.send(control.encode(Op.HELLO, 0, a=self._session, b=os.getpid(), body=(body,)))
        while True:
            try:
                data = sock.recv(MESSAGE_BYTES_MAX)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError("no answer to HELLO") from None
        if not data:
            raise ConnectionResetError("closed during HELLO")
        message = control.decode(memoryview(data))
        if message.op in _REFUSALS:
            _refuse(message)
        if message.op != Status.OK:
            raise NodeUnavailable(f"{self.folder.name}: too many sessions")
        about = control.unpack_json(message.body)
        incarnation = about.get("incarnation")
        if self.incarnation is None:
            self.incarnation = incarnation
        elif incarnation is not None and incarnation != self.incarnation:
            self.ended = True
            raise NodeUnavailable(f"{self.folder.name}: the node was recreated after it was opened here")
        for request in self.publisher.assigned(about.get("puts")):
            sock.send(request)

    # --- receiving: one thread at a time, for every waiting thread -------------------------------------------------

    def _collect(self, reply: SocketReply, deadline: float) -> None:
        """Receive until ``reply`` has its message or the connection is lost. Raises DeadlineExceeded."""
        changed = self._changed
        while True:
            with changed:
                while reply._state == _NEW and self._receiving:
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0 or not changed.wait(remaining_s):
                        raise DeadlineExceeded(f"{self.folder.name}: no answer in time")
                sock = self._socket
                if reply._state != _NEW or sock is None:
                    return
                self._receiving = True
            data = None
            try:
                data = self._receive(sock, deadline)
            finally:
                with changed:
                    self._receiving = False
                    if data is not None:
                        self._deliver(sock, data)
                    changed.notify_all()

    def _collect_oldest(self, deadline: float, before: SocketReply | None = None) -> bool:
        """Receive the reply that is due next. Returns False if there is none, or if the next one is ``before``."""
        with self._changed:
            oldest = self._waiting[0] if self._waiting else None
        if oldest is None or oldest is before:
            return False
        self._collect(oldest, deadline)
        return True

    def _receive(self, sock: socket.socket, deadline: float) -> bytearray:
        """Return one message; empty if the connection has ended."""
        while True:
            try:
                size = sock.recv_into(self._buffer)
                return self._buffer[:size]
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise DeadlineExceeded(f"{self.folder.name}: no answer in time") from None
            except OSError:
                return bytearray()

    def _deliver(self, sock: socket.socket, data: bytearray) -> None:
        """Give a message to its request. The caller holds ``_changed``."""
        if self._socket is sock and not self._answered(data):
            self._drop(sock)  # it ended, or the two ends disagree about the requests: start again

    def _answered(self, data: bytearray) -> bool:
        """Give a message to the request that is due next; return False if it is for another. The caller holds
        ``_changed``."""
        message = control.decode(memoryview(data)) if len(data) >= control.HEAD.size else None
        if message is None or not self._waiting or self._waiting[0].request_id != message.request_id:
            return False
        reply = self._waiting.popleft()
        reply._message = message
        reply._state = _DONE
        return True

    def _lose(self, sock: socket.socket | None) -> None:
        with self._changed:
            if sock is not None:
                self._drop(sock)
            self._changed.notify_all()

    def _drop(self, sock: socket.socket) -> None:
        """Fail the unanswered requests of a connection that is over. The caller holds ``_changed``."""
        if self._socket is not sock:
            return
        if not self._receiving:
            self._read_rest(sock)
        self._socket = None
        for reply in self._waiting:
            reply._state = _LOST
        self._waiting.clear()
        self._spent.append(sock)
        with contextlib.suppress(OSError):  # the other end may have closed it first
            sock.shutdown(socket.SHUT_RDWR)  # wakes the receiving thread

    def _read_rest(self, sock: socket.socket) -> None:
        """Read replies that arrived before the connection ended: granted frames belong to this session, and only it can
        return them. The caller holds ``_changed``, and no thread is receiving."""
        for _ in range(len(self._waiting) + 1):
            try:
                size = sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # the kernel reports the end once, and only then returns what came before it
                continue
            if not self._answered(self._buffer[:size]):
                return

    def _bury(self, deadline: float) -> None:
        """Close lost connections. The caller holds ``_sending``, so no thread sends; waits for the receiving thread."""
        with self._changed:
            while self._receiving and self._spent and self._changed.wait(max(0.0, deadline - time.monotonic())):
                pass
            if not self._receiving:
                for sock in self._spent:
                    sock.close()
                self._spent.clear()

    def _after_fork(self) -> None:
        """Close the descriptors in the child, without taking locks (other threads may have held them)."""
        self._refusal = AFTER_FORK.format(self._pid)
        self.copies.after_fork(self._refused)
        self._file.close()
        for sock in (self._socket, *self._spent):
            if sock is not None:
                sock.close()
        self._socket = None


_channels: weakref.WeakSet[Any] = weakref.WeakSet()


def _forked() -> None:
    for channel in list(_channels):
        channel._after_fork()


os.register_at_fork(after_in_child=_forked)


class SessionFile:
    """One session's file, ``sessions/<id>``: it proves that the client is alive, and holds its counters.

    Locked from ``lock`` until ``close`` or the end of the process.

    A free lock tells the node that this session can write nothing more; the node then adds up its counters and removes
    the file. A forked child closes its copy, so that it does not hold the lock.

    Attributes:
        counters: in memory until the file is locked, and in the file from then on.
    """

    def __init__(self, folder: Path, session: int) -> None:
        self.counters = SessionCounters()
        self._path = folder / "sessions" / f"{session:016x}"
        self._fd = -1

    def lock(self) -> None:
        """Create and lock the file, or check that it still is the one in the folder.

        Raises:
            OSError: the file cannot be created, or the node was examining it; another try may succeed.
        """
        if self._fd >= 0:
            if os.fstat(self._fd).st_nlink:
                return
            self.close()
        fd = open_plain(self._path, os.O_RDWR | os.O_CREAT, 0o660)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:
                raise BlockingIOError("the session file was removed while it was being locked")
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        with contextlib.suppress(OSError, OutOfSpace):  # a session works without counters
            os.fchmod(fd, 0o660)  # regardless of the umask: users with access to the folder may read it
            self.counters.attach(self._path)

    def close(self) -> None:
        """Release the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _dial(sock: socket.socket, folder: Path) -> None:
    """Connect a socket to the daemon of a node's folder. Raises OSError if no daemon listens."""
    path = str(folder / "control")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _POLL)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _POLL)
    if len(path.encode()) <= _SUN_PATH_MAX:
        sock.connect(path)
        return
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{fd}/control")
    finally:
        os.close(fd)


def _refuse(message: Message) -> NoReturn:
    """Raise the exception that a refusal stands for."""
    text = bytes(message.body).decode(errors="replace")
    if message.op == Status.FAILED:
        raise Unavailable(text)
    field, _, reason = text.partition("\0")
    if field == "protocol":
        raise VersionMismatch(reason)
    raise InvalidRequest(field, reason)
