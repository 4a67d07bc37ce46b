"""Server: listens for data connections, and gives each request to the handler of its kind.

One thread per server runs an event loop: it accepts connections, identifies their callers, and receives requests. It
never blocks, so an idle connection costs no CPU time and no thread. A complete request goes to a worker thread, which
answers it. Its work is to send large pieces of memory, which the kernel does without holding the interpreter lock. A
worker waits for a peer that reads slowly, and disconnects a peer that reads nothing for a while; other requests have
other workers.

::

    accepted -> (TLS handshake) -> HELLO -> idle -> a request arrives -> a worker answers it -> idle -> ... -> closed
    `------------------------ event loop ------------------------'     `---- worker ------'

A connection holds one request at a time and no reply, so memory is bounded by the number of connections.
``limits.Connections`` shares the connections between callers. If a caller has all connections that it may have, its
connection that was idle for longest is closed for a new one. So the limit is one of connections in use: a client
repeats a request whose idle connection has ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvstore import boundary
from kvstore.cluster.data_connection import Admit, Buffer, Caller, Exchange, Handler, Stream, is_in, is_loopback
from kvstore.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVStoreError,
    TooManyCalls,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from kvstore.limits import DATA_PART, UNKNOWN_PART, Connections, Guest, connections_max
from kvstore.shm.unix_sockets import short, socket_file
from kvstore.wire.data import (
    HEAD,
    REQUESTS,
    FrameKind,
    Head,
    Hello,
    Welcome,
    WireError,
    pack_error,
    pack_hello,
    unpack_head,
    unpack_hello,
)

STOP_S: Final = 5.0
FAREWELL_S: Final = 0.5  # for a worker to send the last message to a client that is being disconnected
LOOK_S: Final = 1.0  # the longest wait of the event loop
SWEEP_S: Final = 0.1  # the shortest interval between two looks for connections that are late
ACCEPTS_MAX: Final = 64  # connections accepted in one turn of the event loop
ACCEPT_PAUSE_S: Final = 0.25  # after a failed accept
LINGERING_MAX: Final = 32  # workers that wait for the next request on their connection
WORKER_IDLE_S: Final = 10.0  # a worker without work ends after this time
RECYCLE_S: Final = 3.0  # a connection that was idle for this long is closed if its caller needs another one

TLS_HANDSHAKE: Final = b"\x16"  # the first byte of a TLS connection; a plain one begins with the magic of HELLO

log = logging.getLogger("kvstore.data")


@dataclass(frozen=True)
class ServerLimits:
    """The limits of one server.

    Attributes:
        connections_max: limit of open connections of all callers, and of threads. The limit is lower if ``part`` of the
            process's descriptors is less.
        part: see ``limits.connections_max``.
        hello_s: how long a client may take to identify itself.
        silence_s: how long a client may read nothing of a reply, or pause in the middle of a request.
        reply_s: how long one reply may take.
        idle_s: a connection without requests is closed after this time.
    """

    connections_max: int = 384
    part: float = DATA_PART
    hello_s: float = 2.0
    silence_s: float = 5.0
    reply_s: float = 120.0
    idle_s: float = 300.0


class Server:
    """Serves data connections at one address, from ``start`` to ``stop``.

    Args:
        node: name of the node whose pages it serves.
        handlers: kind of request -> handler. The server answers PING itself.
        admit: identifies a caller. Called in the event loop, and by workers.
        tls: the TLS context; None if connections are plain.
        process: the number of this server; "" for a random number.
        private_networks: networks in CIDR notation. Without any, all connections are plain, or with ``tls`` none is.
            With some, connections from there and from loopback may be plain, and others have to use TLS.
    """

    def __init__(
        self,
        node: str,
        handlers: Mapping[FrameKind, Handler],
        admit: Admit,
        limits: ServerLimits | None = None,
        tls: ssl.SSLContext | None = None,
        process: str = "",
        private_networks: Sequence[str] = (),
    ) -> None:
        assert set(handlers) <= REQUESTS
        self.node = node
        self.process = process or secrets.token_hex(8)
        self.limits = limits or ServerLimits()
        self.tls = tls
        self.admit = admit
        self.private_networks = private_networks
        self._handlers = handlers
        self.boundaries = {kind: boundary.RequestGuard(f"data/{kind.name}") for kind in REQUESTS}
        self._guard = boundary.RequestGuard("data/connection")
        most = max(UNKNOWN_PART, connections_max(self.limits.part, self.limits.connections_max))
        self._guests = Connections(most)
        self._workers = _Workers(most, self._work)
        self._lingering = threading.Semaphore(LINGERING_MAX)
        self._listener: socket.socket | None = None
        self._unix: Path | None = None
        self._lock = threading.Lock()
        self._open: dict[int, _Connection] = {}  # by descriptor
        self._sweep_s = 0.0  # when to look for late connections next; ``_park`` may make it earlier
        self._accept_s: float | None = None  # when to accept again after a failure
        self._stopping = threading.Event()
        turn = boundary.thread_loop("task/data accept", self._turn, self._stopping)
        self._loop_thread = threading.Thread(target=turn, name="data loop", daemon=True)

    def start(self, host: str, port: int) -> str:
        """Listen. Returns HOST:PORT, with the port that was chosen if ``port`` is 0.

        Raises:
            InvalidRequest: the server cannot listen at this address.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        shown = f"[{host}]" if ":" in host else host
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listen(sock, (host, port), f"{shown}:{port}")
        return f"{shown}:{sock.getsockname()[1]}"

    def start_unix(self, path: Path, mode: int) -> None:
        """Listen at a unix socket. Its permission bits decide who may connect. Raises InvalidRequest as ``start``."""
        with socket_file(path, mode), short(path) as name:
            self._listen(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), name, str(path))
        self._unix = path

    def _listen(self, sock: socket.socket, address: tuple[str, int] | str, shown: str) -> None:
        try:
            sock.bind(address)
            sock.listen(128)
        except (OSError, OverflowError) as error:
            sock.close()
            raise InvalidRequest("listen", f"cannot listen on {shown} ({error})") from None
        sock.setblocking(False)
        self._listener = sock
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.epoll()
        self._poll.register(self._bell, select.EPOLLIN)
        self._poll.register(sock, select.EPOLLIN)
        self._workers.start_first()
        self._loop_thread.start()

    def stop(self) -> None:
        """Close all connections. Replies that are being sent are cut off."""
        self._stopping.set()
        listener, self._listener = self._listener, None
        if listener is None:
            return
        os.eventfd_write(self._bell, 1)
        self._loop_thread.join(STOP_S)
        listener.close()
        if self._unix is not None:
            self._unix.unlink(missing_ok=True)
        with self._lock:
            connections = list(self._open.values())
            idle = [each for each in connections if each.parked]
        for connection in connections:
            connection.abort()
        for connection in idle:  # of no worker; the event loop has ended
            self._close(connection)
        self._workers.stop(time.monotonic() + STOP_S)
        self._poll.close()
        os.close(self._bell)

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._open)

    def answer(self, kind: FrameKind) -> Handler | None:
        """Return the handler for requests of this kind, or None."""
        return _pong if kind is FrameKind.PING else self._handlers.get(kind)

    def identify(self, connection: _Connection) -> None:
        """Count the connection for its caller, who is now known.

        Raises:
            TooManyCalls: the caller already has its share of connections, and all of them are in use.
        """
        try:
            self._guests.identify(connection.guest, connection.caller)
        except TooManyCalls:
            if not self._recycle(connection.caller):
                raise
            self._guests.identify(connection.guest, connection.caller)

    # --- the event loop ---

    def _turn(self) -> None:
        now_s = time.monotonic()
        wait_s = max(0.0, min(LOOK_S, self._sweep_s - now_s))
        for descriptor, _ in self._poll.poll(wait_s):
            connection = self._open.get(descriptor)
            if connection is not None:
                self._advance(connection)
            elif self._listener is not None and descriptor == self._listener.fileno():
                self._accept(self._listener)
        now_s = time.monotonic()
        if now_s >= self._sweep_s:
            self._sweep(now_s)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no more descriptors, or the caller has gone already
                log.warning("a connection could not be taken: %s", error)
                self._poll.modify(listener, 0)
                self._accept_s = time.monotonic() + ACCEPT_PAUSE_S
                self._sweep_s = min(self._sweep_s, self._accept_s)
                return
            connection = _Connection(self, sock, peer)
            guest = self._guests.accept(connection.address, partial(self._close, connection))
            if guest is None:
                sock.close()
                continue
            connection.guest = guest
            with self._lock:
                self._open[connection.descriptor] = connection
            self._sweep_s = min(self._sweep_s, connection.until_s)
            self._poll.register(sock, select.EPOLLIN | select.EPOLLONESHOT)

    def _advance(self, connection: _Connection) -> None:
        """Receive what has arrived. Pass a complete request to a worker."""
        with self._lock:
            if not connection.parked:
                return  # an event of an earlier connection with this descriptor
            connection.parked = False
        try:
            with self._guard:
                is_complete = connection.receive_request()
        except KVStoreError as error:
            self._end(connection, error, wait_s=0.0)
            return
        if is_complete:
            self._workers.submit(connection)
        else:
            self._park(connection)

    def _park(self, connection: _Connection) -> None:
        """Leave a connection to the event loop. The calling thread must not use it any more."""
        with self._lock:
            if not self._stopping.is_set():
                connection.parked = True
                self._sweep_s = min(self._sweep_s, connection.until_s)
                self._poll.modify(connection.descriptor, connection.events | select.EPOLLONESHOT)
                return
        self._close(connection)

    def _sweep(self, now_s: float) -> None:
        """End connections that are late. The next look is when the next one may be."""
        with self._lock:
            parked = [each for each in self._open.values() if each.parked]
            late = [each for each in parked if each.until_s <= now_s]
            next_s = min((each.until_s for each in parked if each.until_s > now_s), default=now_s + LOOK_S)
            self._sweep_s = max(now_s + SWEEP_S, min(next_s, now_s + LOOK_S))
        for each in late:
            if each.is_idle:
                self._close(each)
            else:
                self._end(each, each.lateness(), wait_s=0.0)
        if self._accept_s is not None and now_s >= self._accept_s and self._listener is not None:
            self._accept_s = None
            self._poll.modify(self._listener, select.EPOLLIN)

    def _recycle(self, caller: Caller) -> bool:
        """Close the caller's connection that has been idle for longest. Return False if all are in use."""
        before_s = time.monotonic() - RECYCLE_S
        with self._lock:
            theirs = [each for each in self._open.values() if each.is_idle and each.caller.name == caller.name]
            oldest = min(theirs, key=lambda each: each.idle_since_s, default=None)
            if oldest is None or oldest.idle_since_s > before_s:
                return False
            oldest.parked = False
        self._close(oldest)
        return True

    # --- workers ---

    def _work(self, connection: _Connection) -> None:
        """Answer the request that has arrived, and those that follow at once."""
        try:
            with self._guard:
                while True:
                    connection.answer_request()
                    if not self._follows(connection):
                        break
        except KVStoreError as error:
            self._end(connection, error, FAREWELL_S)
        else:
            self._park(connection)

    def _follows(self, connection: _Connection) -> bool:
        """Return whether another request has arrived. The worker waits for it for a moment, so that a client with many
        requests does not wait for a thread each time."""
        if not self._lingering.acquire(blocking=False):
            return connection.receive_request()
        try:
            return connection.receive_request(wait=True)
        finally:
            self._lingering.release()

    def _end(self, connection: _Connection, error: KVStoreError, wait_s: float) -> None:
        """Tell the client why its connection ends, and close it."""
        if not isinstance(error, InternalError):  # it is logged already
            log.log(logging.DEBUG if isinstance(error, _USUAL) else logging.WARNING, "%s: %s", connection.peer, error)
            connection.farewell(error, wait_s)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        with self._lock:
            connection.parked = False
            self._open.pop(connection.descriptor, None)
        connection.close()
        self._guests.remove(connection.guest)


_USUAL: Final = (Unavailable, VersionMismatch)


class _Workers:
    """Threads that answer requests, each one request at a time. They are started as they are needed, up to ``most``.
    Further requests wait for a thread. One thread always exists, so a machine that refuses more threads is served."""

    def __init__(self, most: int, work: Callable[[_Connection], None]) -> None:
        self._most = most
        self._work = work
        self._queue: queue.SimpleQueue[_Connection | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._spare = 0  # threads without work, less requests that wait for one

    def start_first(self) -> None:
        """Start the first thread. Raises RuntimeError if the machine has no threads."""
        with self._lock:
            self._start()

    def submit(self, connection: _Connection) -> None:
        """Give a connection with a complete request to a thread."""
        with self._lock:
            self._spare -= 1
            if self._spare < 0 and len(self._threads) < self._most:
                try:
                    self._start()
                except RuntimeError as error:  # the machine, or our group of processes, has no more threads
                    log.warning("no thread can be started: %s", error)
        self._queue.put(connection)

    def stop(self, until_s: float) -> None:
        """End the threads, which end their current request first."""
        with self._lock:
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="data", daemon=True)
        thread.start()
        self._threads.add(thread)
        self._spare += 1

    def _run(self) -> None:
        while True:
            try:
                connection = self._queue.get(timeout=WORKER_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._spare > 0 and len(self._threads) > 1:
                        self._spare -= 1
                        self._threads.discard(threading.current_thread())
                        return
                continue
            if connection is None:
                return
            self._work(connection)
            with self._lock:
                self._spare += 1


class _Connection:
    """One connection, and the ``Exchange`` of its current request. Either the event loop or one worker uses it.

    Attributes:
        parked: whether it waits in the event loop for its client.
        until_s: when it is late, while it is parked.
        events: what the event loop waits for.
        idle_since_s: when its last reply ended.
    """

    guest: Guest

    def __init__(self, server: Server, sock: socket.socket, peer: tuple[str, int] | str) -> None:
        self.address = peer[0] if peer else ""  # "" for a unix socket
        self.descriptor = sock.fileno()
        self.parked = True
        self.events = select.EPOLLIN
        self.peer = f"{peer[0]}:{peer[1]}" if peer else "a process of this machine"
        self.idle_since_s = time.monotonic()
        self.until_s = self.idle_since_s + server.limits.hello_s
        self._server = server
        self._sock = sock
        self._stream: Stream | None = None
        self._hello: Hello | None = None  # None until the caller has identified itself
        self._names: list[str] = []
        self._caller: Caller | None = None
        self._buffer = bytearray(HEAD.size)  # what is being received: the head or the body of a frame
        self._received = 0
        self._head: Head | None = None  # of the frame whose body is being received
        self._request = 0
        self._deadline_s = 0.0
        self._broken = False  # a frame was cut off, so nothing more can be sent

    @property
    def caller(self) -> Caller:
        """See ``Exchange``."""
        assert self._caller is not None
        return self._caller

    @property
    def connections(self) -> int:
        """See ``Exchange``."""
        return self._server.connections

    def reply(self, kind: FrameKind, *body: Buffer) -> None:
        """See ``Exchange``."""
        assert self._stream is not None
        try:
            self._stream.send_frame(kind, self._request, body, self._deadline_s)
        except Unavailable:
            self._broken = True
            raise

    @property
    def sent_bytes(self) -> int:
        """See ``Exchange``."""
        return self._stream.sent_bytes if self._stream is not None else 0

    def abort(self) -> None:
        """See ``Exchange``."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only for the thread that uses the connection."""
        if self._stream is not None:
            self._stream.close()
        self._sock.close()

    @property
    def is_idle(self) -> bool:
        """Whether its caller is known, and has sent no part of a request. The connection may end without a message: its
        client repeats a request that it is just sending."""
        return self.parked and self._hello is not None and self._head is None and not self._received

    def lateness(self) -> KVStoreError:
        """Return the error of a client that was late."""
        return DeadlineExceeded(f"{self.peer}: sent {self._received} of {len(self._buffer)} bytes in time")

    def receive_request(self, wait: bool = False) -> bool:
        """Receive what has arrived of the next request. Before the first request the caller identifies itself. Return
        whether a request is complete. Otherwise ``until_s`` is when its next bytes are late.

        Args:
            wait: wait for the first bytes, see ``Stream.receive_some``. Without it, this does not block.

        Raises:
            KVStoreError: the connection has ended, or must end.
        """
        if self._stream is None and not self._secure():
            return False
        assert self._stream is not None
        while self._fill(self._stream, wait):
            if self._head is None:
                self._take_head(unpack_head(self._buffer))
            elif self._hello is None:
                self._identify(self._stream)
            else:
                return True
        return False

    def answer_request(self) -> None:
        """Answer the request that is complete, if its caller is still admitted. Blocks. Raises as
        ``receive_request``."""
        server, head = self._server, self._head
        assert head is not None and self._hello is not None
        handler = server.answer(head.kind)
        assert handler is not None, "``_take_head`` has checked the kind"
        self._caller = server.admit(self._hello, self._names)
        try:
            with server.boundaries[head.kind]:
                handler(self, memoryview(self._buffer))
        except WireError:
            raise
        except KVStoreError as error:
            if self._broken:
                raise
            self.reply(FrameKind.ERROR, pack_error(error))
        self._expect_request()

    def farewell(self, error: KVStoreError, wait_s: float) -> None:
        """Send the error that ends the connection, if the client accepts it within ``wait_s``."""
        if self._broken or self._stream is None:
            return
        with contextlib.suppress(Unavailable):
            body = [pack_error(error)]
            if wait_s:
                self._stream.send_frame(FrameKind.ERROR, self._request, body, time.monotonic() + wait_s)
            else:
                self._stream.send_frame_now(FrameKind.ERROR, self._request, body)

    def _secure(self) -> bool:
        """Continue the TLS handshake if the connection uses TLS. Return whether requests can be received."""
        context, sock = self._server.tls, self._sock
        if self._server.private_networks and not isinstance(sock, ssl.SSLSocket):
            try:
                first = sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError as error:
                raise WireError(f"{self.peer}: the connection is lost ({error})") from None
            context = context if first == TLS_HANDSHAKE else None
        if context is not None:
            try:
                if not isinstance(sock, ssl.SSLSocket):
                    sock.setblocking(False)
                    self._sock = sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                sock.do_handshake()
            except ssl.SSLWantReadError:
                self.events = select.EPOLLIN
                return False
            except ssl.SSLWantWriteError:
                self.events = select.EPOLLOUT
                return False
            except (OSError, ValueError) as error:
                raise WireError(f"{self.peer}: no TLS ({error})") from None
            self.events = select.EPOLLIN
            self._names = names_of(sock.getpeercert())
        self._stream = Stream(sock, self._server.limits.silence_s, self.peer)
        if context is None and self._server.private_networks:
            self._check_private()
        return True

    def _check_private(self) -> None:
        """Raise Unauthenticated if a plain connection does not come from a private network."""
        if not self.address or is_loopback(self.address) or is_in(self.address, self._server.private_networks):
            return
        raise Unauthenticated(f"{self.address} is in no private network of {self._server.node}: connect with TLS")

    def _fill(self, stream: Stream, wait: bool) -> bool:
        """Receive what has arrived of the current head or body. Return whether it is complete."""
        while self._received < len(self._buffer):
            count = stream.receive_some(memoryview(self._buffer)[self._received :], wait)
            if not count:
                return False
            self._received += count
            if self._head is not None and self._hello is not None:
                self.until_s = min(self._deadline_s, time.monotonic() + stream.silence_s)
        return True

    def _take_head(self, head: Head) -> None:
        """Prepare to receive the body of a frame. Raises WireError if the frame is not expected."""
        self._request = head.request
        if self._hello is None:
            if head.kind is not FrameKind.HELLO:
                raise WireError(f"{self.peer}: sent {head.kind.name} of {head.body_bytes} bytes, not HELLO")
        else:
            if self._server.answer(head.kind) is None:
                raise WireError(f"kind: must be a request that {self._server.node} answers (got {head.kind.name})")
            now_s, limits = time.monotonic(), self._server.limits
            self._deadline_s = now_s + limits.reply_s
            self.until_s = min(self._deadline_s, now_s + limits.silence_s)
        self._head, self._buffer, self._received = head, bytearray(head.body_bytes), 0

    def _identify(self, stream: Stream) -> None:
        """Answer HELLO. Raises as ``Admit``, and TooManyCalls."""
        hello = unpack_hello(self._buffer)
        self._caller = self._server.admit(hello, self._names)
        self.peer += f" ({hello.caller[:80]!r})"
        self._server.identify(self)
        welcome = pack_hello(Welcome(node=self._server.node, process=self._server.process))
        stream.send_frame_now(FrameKind.WELCOME, self._request, [welcome])
        self._hello = hello
        self._expect_request()

    def _expect_request(self) -> None:
        self._head, self._buffer, self._received = None, bytearray(HEAD.size), 0
        self.idle_since_s = time.monotonic()
        self.until_s = self.idle_since_s + self._server.limits.idle_s


def _pong(exchange: Exchange, body: memoryview) -> None:
    exchange.reply(FrameKind.PONG, body)


def names_of(certificate: Mapping[str, Any] | None) -> list[str]:
    """Return the common name and the alternative names in a verified certificate."""
    fields = certificate or {}
    names = [value for part in fields.get("subject", ()) for name, value in part if name == "commonName"]
    return names + [value for _, value in fields.get("subjectAltName", ())]
