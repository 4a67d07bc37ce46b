"""``SocketChannel`` sends requests to the daemon of a node on this machine, over the daemon's unix socket."""

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

import numpy as np

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
from kvstore.model.replica import ADDRESS_DTYPE, Status
from kvstore.safe_files import open_plain
from kvstore.shm.counters import SessionCounters
from kvstore.shm.folder import NodeFolder
from kvstore.wire import control
from kvstore.wire.control import AHEAD, MESSAGE_BYTES_MAX, NO_REPLY, Message, Op

OUTSTANDING_MAX = 64  # unanswered requests, which bounds the daemon's memory for this client
_POLL = struct.pack("ll", 0, 50_000)  # a blocked send or receive checks its deadline every 50 ms
_SUN_PATH_MAX = 100  # the path of a unix socket may have 108 bytes
_RETRY_MIN_S, _RETRY_MAX_S = 0.001, 0.05

_NEW, _DONE, _LOST = 0, 1, 2
_REFUSALS = (int(Status.INVALID), int(Status.FAILED))


class SocketReply:
    """A request that was sent, until the reply arrives or the connection is lost."""

    __slots__ = ("_channel", "_deadline", "_state", "_message", "op", "request_id")

    def __init__(self, channel: SocketChannel, op: Op, request_id: int, deadline: float) -> None:
        self._channel = channel
        self.op = op
        self._deadline = deadline
        self._state = _NEW
        self._message: Message | None = None
        self.request_id = request_id

    def result(self) -> Message:
        """Wait for the reply, until the request's deadline at most, and return it. The caller owns its body.

        Raises:
            DeadlineExceeded: no reply arrived in time. The request may still be carried out.
            NodeUnavailable: the connection was lost. The request may have been carried out.
            InvalidRequest, VersionMismatch, Unavailable: the node refused the request. Nothing was changed.
        """
        if self._state == _NEW:
            self._channel._receive_until(self, self._deadline)
        if self._message is None:
            raise NodeUnavailable(f"{self._channel.folder.name}: the daemon ended before it answered")
        message = self._message
        if message.op in _REFUSALS:
            _refuse(message)
        return message


class SocketChannel:
    """A session with one node. Thread-safe.

    ``begin`` or the first request locks the session's file. The first request connects and sends HELLO. If the
    connection is lost, unanswered requests fail, and the next request reconnects under the same session. So callers do
    not notice a restart of the daemon between two requests.

    The session ends with ``close``, once the last copy in flight has ended, or with this process. Both free the lock of
    the session's file, which shows the daemon that this session can no longer write. A forked child does not share the
    session: its copies of the descriptors are closed, and every call is refused.

    A channel serves one incarnation of a node. If the node was recreated, the frames granted before are void. The
    channel is then ``ended``, as after ``close``, and its owner creates another one.

    Args:
        folder: the node's folder.
        timeout_s: how long a request may take, including a reconnection.
        incarnation: the only incarnation of the segment to accept, 16 hex digits. None accepts the first one.

    Attributes:
        ended: True once requests can no longer succeed.
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
        self._is_replaced = False  # closed because another channel follows
        self._sending = threading.Lock()  # taken to encode and send a request, and to connect
        self._changed = threading.Condition()  # guards the following six attributes
        self._socket: socket.socket | None = None
        self._lost_sockets: list[socket.socket] = []  # to be closed once no thread can use them
        self._is_receiving = False  # a thread is receiving for all waiting threads
        self._waiting: deque[SocketReply] = deque()  # unanswered requests, in their order
        self._generation_max = 0  # of all frames that this session was granted in a reply that arrived
        self._buffer = bytearray(MESSAGE_BYTES_MAX)
        self._request_id = 0
        self._pid = os.getpid()
        _channels.add(self)

    @property
    def session(self) -> int:
        """The session's id, a random number."""
        return self._session

    @property
    def counters(self) -> SessionCounters:
        """The counters of this session, which the node reads."""
        return self._file.counters

    def begin(self) -> None:
        """Create and lock the session's file now. Then the node also reads the counters of a client that only reads. If
        this fails, the first request tries again."""
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
        """Send a request, without waiting for its reply. A request with the flag ``NO_REPLY`` gets no reply.

        Raises:
            NodeUnavailable: the daemon could not be reached in time. Nothing was sent.
            VersionMismatch: the daemon has another version of the protocol.
            InvalidRequest: the channel is closed, or this is a forked child.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        if self._refusal:
            raise self._refusal_error()
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NodeUnavailable(f"{self.folder.name}: other requests kept the connection busy until the deadline")
        try:
            self._request_id = request_id = self._request_id + 1 & 0xFFFFFFFF
            data = control.encode(op, request_id, count=count, a=a, b=b, flags=flags, body=body)
            reply = SocketReply(self, op, request_id, deadline)
            while True:
                if op is Op.GRANT and flags & AHEAD and self._socket is None:  # frames ahead are not worth a connection
                    raise NodeUnavailable(f"{self.folder.name}: not connected, and the request is not urgent")
                # DRAIN is only a hint that pages are published, so one attempt to connect is enough.
                sock = self._socket or self._connect(deadline, once=op is Op.DRAIN)
                if len(self._waiting) >= OUTSTANDING_MAX:
                    self._receive_oldest(deadline)
                    continue
                if self._send(sock, data, None if flags & NO_REPLY else reply, deadline):
                    return reply
        finally:
            self._sending.release()

    def close(self) -> None:
        """End the session. Its reserved frames return to the node, its leases end, and unanswered requests fail."""
        if self._refusal:
            return
        self._is_replaced, self.ended, self._refusal = self.ended, True, "is closed"
        # Free the lock first: when the daemon sees the connection end, the lock should be free. While a copy is in
        # flight it is still locked, so the daemon keeps the frames and checks again later.
        self.copies.close(self._refusal_error, self._file.close)
        self._lose(self._socket)
        if self._sending.acquire(timeout=self.timeout_s):
            try:
                self._close_lost(time.monotonic() + self.timeout_s)
            finally:
                self._sending.release()

    def _refusal_error(self) -> KVStoreError:
        if self._is_replaced:
            return NodeUnavailable(f"{self.folder.name}: the session was renewed in the meantime")
        return InvalidRequest("store", self._refusal)

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send(self, sock: socket.socket, data: bytes, reply: SocketReply | None, deadline: float) -> bool:
        """Send an encoded request. Return False if the connection was lost and nothing was sent."""
        if reply is not None:
            with self._changed:
                if self._socket is not sock:
                    return False
                self._waiting.append(reply)  # before the send, because the reply may arrive at once
        while True:
            try:
                sock.send(data, socket.MSG_DONTWAIT)
                return True
            except BlockingIOError:
                # The daemon is slow, or waits until this client reads replies.
                if time.monotonic() >= deadline:
                    if reply is not None:  # a request without reply is not in the queue, so the connection stays valid
                        self._lose(sock)
                    raise NodeUnavailable(f"{self.folder.name}: the daemon took no request in time") from None
                if not self._receive_oldest(deadline, before=reply):
                    time.sleep(_RETRY_MIN_S)
            except OSError:
                self._withdraw(reply)
                self._lose(sock)
                return False

    def _withdraw(self, reply: SocketReply | None) -> None:
        """Remove a request that was not sent from the queue."""
        if reply is not None:
            with self._changed:
                if reply in self._waiting:
                    self._waiting.remove(reply)
                reply._state = _NEW

    def _connect(self, deadline: float, once: bool) -> socket.socket:
        """Connect to the daemon, complete HELLO, and return the connection. The daemon may be restarting, so attempts
        are repeated until the deadline, but for ``timeout_s`` at most.

        Args:
            once: do not repeat the attempt if no daemon listens.
        """
        pause_s, deadline = _RETRY_MIN_S, min(deadline, time.monotonic() + self.timeout_s)
        self._close_lost(deadline)
        while True:
            if self._refusal:
                raise InvalidRequest("store", self._refusal)
            if self.ended:
                raise NodeUnavailable(f"{self.folder.name}: the node was recreated after it was opened here")
            if not NodeFolder.at(self.folder).is_trusted():  # purged, and another user may have made a new one
                raise NodeUnavailable(f"{self.folder.name}: there is no such node on this machine")
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
            try:
                self._file.lock()
                _connect_socket(sock, self.folder)
                self._hello(sock, deadline)
            except OSError as error:
                sock.close()
                has_no_listener = isinstance(error, ConnectionRefusedError | FileNotFoundError)
                if (once and has_no_listener) or time.monotonic() + pause_s >= deadline:
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
        """Exchange HELLO with the daemon, check its incarnation, and send requests that are published in an old log.

        HELLO names the highest generation of a frame that this session was granted. Generations grow, so the node knows
        which of its grants were lost with an earlier connection, and frees those frames.

        Raises:
            OSError: the daemon ended, or did not answer in time.
            NodeUnavailable: the daemon has too many sessions, or the node was recreated.
            VersionMismatch, InvalidRequest, Unavailable: the daemon refused.
        """
        with self._changed:
            granted = self._generation_max
        body = control.pack_json({"protocol": control.PROTOCOL, "granted": granted})
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
        reply = control.unpack_json(message.body)
        incarnation = reply.get("incarnation")
        if self.incarnation is None:
            self.incarnation = incarnation
        elif incarnation is not None and incarnation != self.incarnation:
            self.ended = True
            raise NodeUnavailable(f"{self.folder.name}: the node was recreated after it was opened here")
        for request in self.publisher.assign(reply.get("puts")):
            sock.send(request)

    # --- receiving: one thread at a time, for all waiting threads ---------------------------------------------------

    def _receive_until(self, reply: SocketReply, deadline: float) -> None:
        """Receive messages until ``reply`` has its message, or until the connection is lost. Raises
        DeadlineExceeded."""
        changed = self._changed
        while True:
            with changed:
                while reply._state == _NEW and self._is_receiving:
                    remaining_s = deadline - time.monotonic()
                    if remaining_s <= 0 or not changed.wait(remaining_s):
                        raise DeadlineExceeded(f"{self.folder.name}: no answer in time")
                sock = self._socket
                if reply._state != _NEW or sock is None:
                    return
                self._is_receiving = True
            data = None
            try:
                data = self._receive(sock, deadline)
            finally:
                with changed:
                    self._is_receiving = False
                    if data is not None:
                        self._deliver(sock, data)
                    changed.notify_all()

    def _receive_oldest(self, deadline: float, before: SocketReply | None = None) -> bool:
        """Receive the reply to the oldest unanswered request. Return False if there is none, or if it is ``before``."""
        with self._changed:
            oldest = self._waiting[0] if self._waiting else None
        if oldest is None or oldest is before:
            return False
        self._receive_until(oldest, deadline)
        return True

    def _receive(self, sock: socket.socket, deadline: float) -> bytearray:
        """Receive and return one message; empty if the connection has ended."""
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
        """Pass a message to its request. If the connection has ended, or the message does not belong to the oldest
        request, drop the connection. The caller holds ``_changed``."""
        if self._socket is sock and not self._complete_oldest(data):
            self._drop(sock)

    def _complete_oldest(self, data: bytearray) -> bool:
        """Complete the oldest unanswered request with a message. Return False if the message does not answer it. The
        caller holds ``_changed``."""
        message = control.decode(memoryview(data)) if len(data) >= control.HEAD.size else None
        if message is None or not self._waiting or self._waiting[0].request_id != message.request_id:
            return False
        reply = self._waiting.popleft()
        if reply.op is Op.GRANT and message.op == Status.OK:
            granted = np.frombuffer(message.body, ADDRESS_DTYPE, message.entries)
            self._generation_max = max(self._generation_max, int(granted["generation"].max(initial=0)))
        reply._message = message
        reply._state = _DONE
        return True

    def _lose(self, sock: socket.socket | None) -> None:
        """Drop a connection, and wake all waiting threads."""
        with self._changed:
            if sock is not None:
                self._drop(sock)
            self._changed.notify_all()

    def _drop(self, sock: socket.socket) -> None:
        """Fail the unanswered requests of a lost connection. The caller holds ``_changed``."""
        if self._socket is not sock:
            return
        if not self._is_receiving:
            self._receive_rest(sock)
        self._socket = None
        for reply in self._waiting:
            reply._state = _LOST
        self._waiting.clear()
        self._lost_sockets.append(sock)
        with contextlib.suppress(OSError):  # the other end may have closed the connection first
            sock.shutdown(socket.SHUT_RDWR)  # wakes the receiving thread

    def _receive_rest(self, sock: socket.socket) -> None:
        """Receive the replies that arrived before the connection was lost. They may grant frames, which belong to this
        session and which only this session can return. The caller holds ``_changed``, and no thread is receiving."""
        for _ in range(len(self._waiting) + 1):
            try:
                size = sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # the kernel first reports the end, and then returns the messages before it
                continue
            if not self._complete_oldest(self._buffer[:size]):
                return

    def _close_lost(self, deadline: float) -> None:
        """Wait for the receiving thread, and close lost connections. The caller holds ``_sending``, so no thread is
        sending."""
        with self._changed:
            while self._is_receiving and self._lost_sockets:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    break
            if not self._is_receiving:
                for sock in self._lost_sockets:
                    sock.close()
                self._lost_sockets.clear()

    def _after_fork(self) -> None:
        """Close the descriptors in the child. Take no locks, because other threads of the parent may have held them."""
        self._refusal = AFTER_FORK.format(self._pid)
        self.copies.after_fork(self._refusal_error)
        self._file.close()
        for sock in (self._socket, *self._lost_sockets):
            if sock is not None:
                sock.close()
        self._socket = None


_channels: weakref.WeakSet[Any] = weakref.WeakSet()


def _end_in_child() -> None:
    for channel in list(_channels):
        channel._after_fork()


os.register_at_fork(after_in_child=_end_in_child)


class SessionFile:
    """The file of a session, ``sessions/<id>``, which shows that the client is alive and contains its counters.

    The file is locked from ``lock`` until ``close`` or the end of the process. A free lock shows the node that the
    session can no longer write. The node then adds up its counters and removes the file. A forked child closes its
    descriptor, so that it does not keep the lock.

    Attributes:
        counters: the client's counters. They are in memory until the file is locked, and then in the file.
    """

    def __init__(self, folder: Path, session: int) -> None:
        self.counters = SessionCounters()
        self._path = folder / "sessions" / f"{session:016x}"
        self._fd = -1

    def lock(self) -> None:
        """Create and lock the file. If it is locked already, check that it was not removed, and otherwise create it
        again.

        Raises:
            OSError: the file cannot be created, or the node is just examining it. Another attempt may succeed.
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
            os.fchmod(fd, 0o660)  # regardless of the umask, so that the folder's group can read it
            self.counters.attach(self._path)

    def close(self) -> None:
        """Close the file, which frees the lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _connect_socket(sock: socket.socket, folder: Path) -> None:
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
    """Raise the exception that a message with a refusal describes."""
    text = bytes(message.body).decode(errors="replace")
    if message.op == Status.FAILED:
        raise Unavailable(text)
    field, _, reason = text.partition("\0")
    if field == "protocol":
        raise VersionMismatch(reason)
    raise InvalidRequest(field, reason)
