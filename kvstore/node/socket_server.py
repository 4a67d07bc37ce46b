"""Control server: serves the clients on this machine over a unix socket, in one thread.

A request takes tens of microseconds. It is one datagram of at most ``MESSAGE_BYTES_MAX``. The server takes one datagram
per connection and round. It disconnects a client that does not read its replies when the socket's buffer is full.

Long admin calls, checksums of many pages, and deletions that wait for NVMe run in other threads (``SLOW_THREADS``,
``DELETE_THREADS``), so that no other call waits for them. Replies of a connection are in the order of its requests. So
a connection with such a call is not read until the call ends, and each connection has at most one such call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from kvstore import boundary
from kvstore.errors import InternalError, InvalidRequest, KVStoreError
from kvstore.limits import LOCAL_PART, connections_max
from kvstore.node.dispatch import Dispatcher
from kvstore.node.node import Node
from kvstore.safe_files import chmod_socket, open_folder, remove
from kvstore.state import events as ev
from kvstore.wire import control
from kvstore.wire.control import Op

log = logging.getLogger("kvstore.control")

POLL_S = 0.5
PUTS_POLL_S = 0.001  # between polls of the log of puts while clients publish, and ...
PUTS_BUSY_S = 0.05  # ... for this time after the last record
PUTS_QUIET_POLL_S = 0.01  # between polls at other times, if there are connections: 0.1 % of a core
HELLO_S = 5.0  # a connection without a HELLO is closed after this time
BACKLOG = 128
CONNECTIONS_MAX = 1024
SLOW_THREADS = 4
DELETE_THREADS = 32  # a device that is not responding blocks each thread once, for ``nvme_answer_s``
ACCEPT_PAUSE_S = 0.25  # after a connection could not be accepted
JOIN_S = 5.0

_DELETES = frozenset(int(op) for op in (Op.DELETE, Op.SEAL_GRANTED, Op.SEAL_OBJECTS))
_MAY_BE_SLOW = frozenset(int(op) for op in (Op.ADMIN, Op.SCRUB)) | _DELETES


class _Connection:
    """The connection of a client.

    Attributes:
        session: 0 until the client has sent HELLO.
        since_s: time at which the connection was accepted.
        has_slow_call: a call runs in another thread. The connection is not read until it ends.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.session = 0
        self.since_s = time.monotonic()
        self.has_slow_call = False


class _SlowCalls:
    """Threads that handle slow requests. They start with the first requests, and end with ``stop``.

    One thread calls the methods.

    Args:
        handle: returns the reply to a session's request, or None if the client wants none. Called in these threads.
        threads_max: number of threads.

    Attributes:
        eventfd: readable when ``done`` has calls to return.
    """

    def __init__(self, handle: Callable[[int, bytes], bytes | None], threads_max: int) -> None:
        self._handle = handle
        self._threads_max = threads_max
        self._requests: SimpleQueue[tuple[_Connection, bytes] | None] = SimpleQueue()
        self._done: deque[tuple[_Connection, bytes | None, bool]] = deque()
        self._threads: list[threading.Thread] = []
        self._under_way = 0
        self._stopped = threading.Event()
        self.eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def submit(self, connection: _Connection, request: bytes) -> None:
        """Handle a request as soon as a thread is free.

        Raises:
            RuntimeError: there is no thread, and none can be started.
        """
        if self._under_way >= len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._work, name="kvstore-slow-calls", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:
                if not self._threads:
                    raise
        self._under_way += 1
        self._requests.put((connection, request))

    def done(self) -> list[tuple[_Connection, bytes | None, bool]]:
        """Return the calls that have ended since the last time: connection, reply, and False if the call failed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.eventfd)
        calls = [self._done.popleft() for _ in range(len(self._done))]
        self._under_way -= len(calls)
        return calls

    def stop(self) -> None:
        """End the threads. Waits at most ``JOIN_S`` for calls under way; a longer one ends with the process."""
        self._stopped.set()
        for _ in self._threads:
            self._requests.put(None)
        deadline_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self.eventfd)

    def _work(self) -> None:
        while (call := self._requests.get()) is not None and not self._stopped.is_set():
            connection, request = call
            reply, succeeded = None, False
            try:
                with boundary.RequestGuard("control/slow"):
                    reply, succeeded = self._handle(connection.session, request), True
            except KVStoreError as error:
                log.info("session %016x: %s", connection.session, error)
            if self._stopped.is_set():
                return  # no thread reads the result
            self._done.append((connection, reply, succeeded))
            os.eventfd_write(self.eventfd, 1)


class ControlServer:
    """The control server of a node, from ``start`` to ``stop``.

    Sessions continue after ``stop``: clients connect again to the next daemon with the node's name.
    """

    def __init__(self, node: Node, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._connections: dict[int, _Connection] = {}
        self._connections_max = connections_max(LOCAL_PART, CONNECTIONS_MAX)
        self._buffer = bytearray(control.MESSAGE_BYTES_MAX)
        self._slow = _SlowCalls(self._handle, SLOW_THREADS)
        self._deletions = _SlowCalls(self._handle, DELETE_THREADS)
        self._stopped = threading.Event()
        self._swept_s = time.monotonic()  # when connections without a HELLO were last closed
        self._accept_at_s = 0.0  # no connection is accepted before this time; 0: connections are accepted
        self._records_drained = 0
        self._busy_until_s = 0.0  # until then the log of puts is polled every ``PUTS_POLL_S``
        self._thread = threading.Thread(target=self._serve, name="kvstore-control", daemon=True)
        self._listener: socket.socket
        self._poll: select.epoll

    def start(self) -> None:
        """Listen on the node's socket. This daemon has the name's lock, so it may replace an old socket file."""
        path = self._node.control
        remove(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        folder_fd = open_folder(path.parent)
        try:
            # A socket's path has at most 107 bytes, but the folder's path may be longer.
            listener.bind(f"/proc/self/fd/{folder_fd}/{path.name}")
        finally:
            os.close(folder_fd)
        chmod_socket(path, self._node.config.file_mode)
        listener.listen(BACKLOG)
        self._listener, self._poll = listener, select.epoll()
        for source in (listener, self._slow.eventfd, self._deletions.eventfd):
            self._poll.register(source, select.EPOLLIN)
        self._thread.start()

    def stop(self) -> None:
        """Close all connections and end the threads."""
        self._stopped.set()
        os.eventfd_write(self._slow.eventfd, 1)  # ends the poll
        self._thread.join(2 * POLL_S + 1)
        self._slow.stop()
        self._deletions.stop()

    def _serve(self) -> None:
        boundary.thread_loop("task/control", self._turn, self._stopped)()
        self._poll.close()
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.close()

    def _turn(self) -> None:
        """Wait for events, and handle all of them."""
        for fd, _ in self._poll.poll(self._drain_puts()):
            self._handle_event(fd)
        now_s = time.monotonic()
        if self._accept_at_s and now_s > self._accept_at_s:
            self._set_accepting(True)
        if now_s - self._swept_s > HELLO_S:
            self._swept_s = now_s
            for fd, connection in list(self._connections.items()):
                if not connection.session and now_s - connection.since_s > HELLO_S:
                    self._disconnect(fd, connection)

    def _handle_event(self, fd: int) -> None:
        """Handle a new connection, the end of a slow call, or a request."""
        if fd == self._listener.fileno():
            self._accept()
        elif fd in (self._slow.eventfd, self._deletions.eventfd):
            self._answer_slow(self._slow if fd == self._slow.eventfd else self._deletions)
        elif (connection := self._connections.get(fd)) is not None:
            stays = False
            try:
                with boundary.RequestGuard("control/connection"):
                    stays = self._serve_one(connection)
            except InternalError:
                pass  # the connection is closed
            if not stays:
                self._disconnect(fd, connection)
            elif connection.has_slow_call:
                self._poll.modify(fd, 0)  # only a hang-up is an event of this connection now

    def _drain_puts(self) -> float:
        """Take in published puts. Returns how many seconds to wait for requests before the next call.

        Clients that publish do not wake this thread.
        """
        puts, now_s = self._node.puts, time.monotonic()
        puts.drain()
        if puts.records != self._records_drained:
            self._records_drained, self._busy_until_s = puts.records, now_s + PUTS_BUSY_S
        if not self._connections:
            return POLL_S
        return PUTS_POLL_S if now_s < self._busy_until_s else PUTS_QUIET_POLL_S

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left
            log.warning("a connection could not be taken: %s", error)
            self._set_accepting(False)
            return
        if len(self._connections) >= self._connections_max:
            sock.close()
            return
        sock.setblocking(False)
        self._poll.register(sock.fileno(), select.EPOLLIN)
        self._connections[sock.fileno()] = _Connection(sock)

    def _set_accepting(self, is_accepting: bool) -> None:
        """Accept new connections, or pause for ``ACCEPT_PAUSE_S``."""
        self._accept_at_s = 0.0 if is_accepting else time.monotonic() + ACCEPT_PAUSE_S
        self._poll.modify(self._listener.fileno(), select.EPOLLIN if is_accepting else 0)

    def _serve_one(self, connection: _Connection) -> bool:
        """Answer one datagram; return False if the connection must be closed."""
        if connection.has_slow_call:
            return False  # the client has hung up
        try:
            size = self._receive(connection.sock)
            if size == 0:
                return False
            message = control.decode(memoryview(self._buffer)[:size])
            reply: bytes | None
            if not connection.session:
                connection.session, reply = self._dispatcher.hello(message)
            elif message.op in _MAY_BE_SLOW and self._dispatcher.may_take_long(message):
                connection.has_slow_call = True
                calls = self._deletions if message.op in _DELETES else self._slow
                calls.submit(connection, bytes(self._buffer[:size]))
                return True
            else:
                reply = self._dispatcher.exchange(connection.session, message)
        except BlockingIOError:
            return True  # the event was of an earlier connection with this descriptor
        except (ConnectionError, InvalidRequest) as error:
            log.info("session %016x: %s", connection.session, error)
            return False
        return self._send(connection, reply)

    def _receive(self, sock: socket.socket) -> int:
        try:
            return sock.recv_into(self._buffer)
        except ConnectionResetError:  # raised once if a client died with unread replies; its last requests follow
            return sock.recv_into(self._buffer)

    def _send(self, connection: _Connection, reply: bytes | None) -> bool:
        """Send a reply; return False if the connection must be closed."""
        try:
            if reply is not None:
                connection.sock.send(reply)
        except BlockingIOError:
            log.warning("session %016x does not read its replies: disconnected", connection.session)
            return False
        except ConnectionError as error:
            log.info("session %016x: %s", connection.session, error)
            return False
        return True

    def _handle(self, session: int, request: bytes) -> bytes | None:
        return self._dispatcher.exchange(session, control.decode(memoryview(request)))

    def _answer_slow(self, calls: _SlowCalls) -> None:
        for connection, reply, succeeded in calls.done():
            fd = connection.sock.fileno()
            if fd < 0:
                continue  # the connection is closed
            connection.has_slow_call = False
            if succeeded and self._send(connection, reply):
                self._poll.modify(fd, select.EPOLLIN)
            else:
                self._disconnect(fd, connection)

    def _disconnect(self, fd: int, connection: _Connection) -> None:
        self._poll.unregister(fd)
        del self._connections[fd]
        connection.sock.close()
        if connection.session:
            self._node.handle(ev.ConnectionLost(time.monotonic_ns(), connection.session))
