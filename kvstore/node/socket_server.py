"""Control server: clients of this machine over a unix socket, one thread, tens of microseconds a request.

Bounded by construction: a request is one datagram of at most ``MESSAGE_BYTES_MAX``, a connection is served one datagram
per round, a client that does not read its replies is disconnected when its socket's buffer is full.

Admin calls that may take long, checksums of many pages, and deletions that wait for NVMe run in threads of their own
(``SLOW_THREADS``, ``DELETE_THREADS``): no other call waits for them. Replies of a connection come in the order of its
requests, so it is not read further in the meantime, and no more calls than connections wait.
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
WATCH_S = 0.001  # between looks at the log of puts while clients publish, and ...
QUIET_S = 0.05  # ... for this long after the last record
WATCH_QUIET_S = 0.01  # between looks at other times, while there are connections: 0.1 % of a core
HELLO_S = 5.0  # a connection that says nothing within this is closed
BACKLOG = 128
CONNECTIONS_MAX = 1024
SLOW_THREADS = 4
DELETE_THREADS = 32  # a device that does not answer keeps every one for ``nvme_answer_s``, once
DEAF_S = 0.25  # where a connection could not be taken
JOIN_S = 5.0

_DELETES = frozenset(int(op) for op in (Op.DELETE, Op.SEAL_GRANTED, Op.SEAL_OBJECTS))
_MAY_BE_SLOW = frozenset(int(op) for op in (Op.ADMIN, Op.SCRUB)) | _DELETES


class _Connection:
    """One client: from accept to hang-up. ``session`` is 0 until it said hello."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.session = 0
        self.since = time.monotonic()
        self.waits = False  # for a slow call: it is not read until that one is answered


class _SlowCalls:
    """Threads that carry out requests, from the first request to ``stop``. Made, asked and emptied by one thread.

    Args:
        carry_out: session and request to a reply, None where none is wanted; any thread may call it.
        threads: at most.
    """

    def __init__(self, carry_out: Callable[[int, bytes], bytes | None], threads: int) -> None:
        self._carry_out = carry_out
        self._threads_max = threads
        self._asked: SimpleQueue[tuple[_Connection, bytes] | None] = SimpleQueue()
        self._done: deque[tuple[_Connection, bytes | None, bool]] = deque()
        self._threads: list[threading.Thread] = []
        self._under_way = 0
        self._stopped = threading.Event()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # to be read from: something is done

    def ask(self, connection: _Connection, request: bytes) -> None:
        """Begin, as soon as a thread is free. Raises RuntimeError where there is none, and none can be started."""
        if self._under_way >= len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._work, name="kvstore-slow-calls", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:
                if not self._threads:
                    raise
        self._under_way += 1
        self._asked.put((connection, request))

    def done(self) -> list[tuple[_Connection, bytes | None, bool]]:
        """Connections, replies and whether they could be made, of what has ended since the last time."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        found = [self._done.popleft() for _ in range(len(self._done))]
        self._under_way -= len(found)
        return found

    def stop(self) -> None:
        """End the threads. A call that is under way gets ``JOIN_S``, then it is left behind."""
        self._stopped.set()
        for _ in self._threads:
            self._asked.put(None)
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self.bell)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None and not self._stopped.is_set():
            connection, request = asked
            reply, made = None, False
            try:
                with boundary.RequestGuard("control/slow"):
                    reply, made = self._carry_out(connection.session, request), True
            except KVStoreError as error:
                log.info("session %016x: %s", connection.session, error)
            if self._stopped.is_set():
                return  # the caller has gone
            self._done.append((connection, reply, made))
            os.eventfd_write(self.bell, 1)


class ControlServer:
    """Serves from ``start`` to ``stop``. Sessions outlive it: clients come back to the next daemon of the name."""

    def __init__(self, node: Node, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._connections: dict[int, _Connection] = {}
        self._most = connections_max(LOCAL_PART, CONNECTIONS_MAX)
        self._buffer = bytearray(control.MESSAGE_BYTES_MAX)
        self._slow = _SlowCalls(self._carry_out, SLOW_THREADS)
        self._deletions = _SlowCalls(self._carry_out, DELETE_THREADS)
        self._stopped = threading.Event()
        self._swept_s = time.monotonic()
        self._deaf_until_s = 0.0  # no new connection is taken until then; 0: they are
        self._drained = 0
        self._quiet_at = 0.0  # until then the log of puts is looked at every ``WATCH_S``
        self._thread = threading.Thread(target=self._serve, name="kvstore-control", daemon=True)
        self._listener: socket.socket
        self._poll: select.epoll

    def start(self) -> None:
        """Listen on the node's socket. The file of a dead daemon is replaced: we hold the name's lock."""
        path = self._node.control
        remove(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        here = open_folder(path.parent)
        try:
            listener.bind(
                f"/proc/self/fd/{here}/{path.name}"
            )  # a socket's path is at most 107 bytes, a folder's is not
        finally:
            os.close(here)
        chmod_socket(path, self._node.config.file_mode)
        listener.listen(BACKLOG)
        self._listener, self._poll = listener, select.epoll()
        for heard in (listener, self._slow.bell, self._deletions.bell):
            self._poll.register(heard, select.EPOLLIN)
        self._thread.start()

    def stop(self) -> None:
        """Hang up on everyone."""
        self._stopped.set()
        os.eventfd_write(self._slow.bell, 1)  # it need not wait for the next look
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
        """Wait for something to do, and do all that there is."""
        for fd, _ in self._poll.poll(self._watch_puts()):
            self._heard(fd)
        now_s = time.monotonic()
        if self._deaf_until_s and now_s > self._deaf_until_s:
            self._listens(True)
        if now_s - self._swept_s > HELLO_S:
            self._swept_s = now_s
            for fd, connection in list(self._connections.items()):
                if not connection.session and now_s - connection.since > HELLO_S:
                    self._hang_up(fd, connection)

    def _heard(self, fd: int) -> None:
        """A new connection, a slow call that is done, or a request."""
        if fd == self._listener.fileno():
            self._accept()
        elif fd in (self._slow.bell, self._deletions.bell):
            self._answer_slow(self._slow if fd == self._slow.bell else self._deletions)
        elif (connection := self._connections.get(fd)) is not None:
            goes_on = False
            try:
                with boundary.RequestGuard("control/connection"):
                    goes_on = self._serve_one(connection)
            except InternalError:
                pass  # it is hung up on
            if not goes_on:
                self._hang_up(fd, connection)
            elif connection.waits:
                self._poll.modify(fd, 0)  # all that is heard of it now is that it hangs up

    def _watch_puts(self) -> float:
        """Drain the log of puts. Return how long to wait for requests before the next look, in seconds: clients that
        publish do not wake this thread."""
        puts, now = self._node.puts, time.monotonic()
        puts.drain()
        if puts.times != self._drained:
            self._drained, self._quiet_at = puts.times, now + QUIET_S
        if not self._connections:
            return POLL_S
        return WATCH_S if now < self._quiet_at else WATCH_QUIET_S

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left: others go on
            log.warning("a connection could not be taken: %s", error)
            self._listens(False)
            return
        if len(self._connections) >= self._most:
            sock.close()
            return
        sock.setblocking(False)
        self._poll.register(sock.fileno(), select.EPOLLIN)
        self._connections[sock.fileno()] = _Connection(sock)

    def _listens(self, listens: bool) -> None:
        """Whether new connections are taken from now on; where they are not, for ``DEAF_S``."""
        self._deaf_until_s = 0.0 if listens else time.monotonic() + DEAF_S
        self._poll.modify(self._listener.fileno(), select.EPOLLIN if listens else 0)

    def _serve_one(self, connection: _Connection) -> bool:
        """Answer one datagram; False where the connection is over."""
        if connection.waits:
            return False  # it hung up
        try:
            size = self._receive(connection.sock)
            if size == 0:
                return False
            message = control.decode(memoryview(self._buffer)[:size])
            reply: bytes | None
            if not connection.session:
                connection.session, reply = self._dispatcher.hello(message)
            elif message.op in _MAY_BE_SLOW and self._dispatcher.may_take_long(message):
                connection.waits = True
                calls = self._deletions if message.op in _DELETES else self._slow
                calls.ask(connection, bytes(self._buffer[:size]))
                return True
            else:
                reply = self._dispatcher.exchange(connection.session, message)
        except BlockingIOError:
            return True  # what was heard was of an older connection, whose descriptor this one has
        except (ConnectionError, InvalidRequest) as error:
            log.info("session %016x: %s", connection.session, error)
            return False
        return self._send(connection, reply)

    def _receive(self, sock: socket.socket) -> int:
        try:
            return sock.recv_into(self._buffer)
        except ConnectionResetError:  # it died with replies unread: said once, and then comes what it had sent before
            return sock.recv_into(self._buffer)

    def _send(self, connection: _Connection, reply: bytes | None) -> bool:
        """False where the connection is over."""
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

    def _carry_out(self, session: int, request: bytes) -> bytes | None:
        return self._dispatcher.exchange(session, control.decode(memoryview(request)))

    def _answer_slow(self, calls: _SlowCalls) -> None:
        for connection, reply, made in calls.done():
            fd = connection.sock.fileno()
            if fd < 0:
                continue  # it has hung up
            connection.waits = False
            if made and self._send(connection, reply):
                self._poll.modify(fd, select.EPOLLIN)
            else:
                self._hang_up(fd, connection)

    def _hang_up(self, fd: int, connection: _Connection) -> None:
        self._poll.unregister(fd)
        del self._connections[fd]
        connection.sock.close()
        if connection.session:
            self._node.handle(ev.ConnectionLost(time.monotonic_ns(), connection.session))
