"""Control server: clients of this machine over a unix socket, one thread, tens of microseconds a request.

Bounded by construction: a request is one datagram of at most ``MESSAGE_BYTES_MAX``, a connection is served one datagram
per round, a client that does not read its replies is disconnected when its socket's buffer is full.

Admin calls that may take long, checksums of many pages, and deletions that wait for NVMe run in threads of their own
(``SLOW_THREADS``, ``DELETE_THREADS``): nobody else waits for them. Replies of a connection come in the order of its
requests, so it is not read on meanwhile, and no more calls than connections wait.
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

from kvstore.errors import InvalidRequest
from kvstore.rpc import control
from kvstore.rpc.control import Op
from kvstore.service.local.dispatch import Dispatcher
from kvstore.service.node.node import Node
from kvstore.state import events as ev
from kvstore.tier.plain_files import chmod_socket, open_folder, remove

log = logging.getLogger("kvstore.control")

POLL_S = 0.5
WATCH_S = 0.001  # between looks at the log of puts, ...
QUIET_S = 0.05  # ... until nobody published for so long
HELLO_S = 5.0  # a connection that says nothing within this is closed
BACKLOG = 128
CONNECTIONS_MAX = 1024
SLOW_THREADS = 4
DELETE_THREADS = 32  # a device that does not answer keeps every one for ``nvme_answer_s``, once
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
        self._done: deque[tuple[_Connection, bytes | None]] = deque()
        self._threads: list[threading.Thread] = []
        self._under_way = 0
        self._stopped = threading.Event()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # to be read from: something is done

    def ask(self, connection: _Connection, request: bytes) -> None:
        """Begin, as soon as a thread is free."""
        self._under_way += 1
        if self._under_way > len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._work, name="kvstore-slow-calls", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._asked.put((connection, request))

    def done(self) -> list[tuple[_Connection, bytes | None]]:
        """What has ended since the last time."""
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
            try:
                reply = self._carry_out(connection.session, request)
            except BaseException:
                if self._stopped.is_set():
                    return  # the node ended while it was being looked at
                raise
            self._done.append((connection, reply))
            os.eventfd_write(self.bell, 1)


class ControlServer:
    """Serves from ``start`` to ``stop``. Sessions outlive it: clients come back to the next daemon of the name."""

    def __init__(self, node: Node, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._connections: dict[int, _Connection] = {}
        self._buffer = bytearray(control.MESSAGE_BYTES_MAX)
        self._slow = _SlowCalls(self._carry_out, SLOW_THREADS)
        self._deletions = _SlowCalls(self._carry_out, DELETE_THREADS)
        self._stopped = False
        self._drained = 0
        self._quiet_at: float | None = None  # when nobody looks at the log of puts any more; None: nobody does
        self._thread = threading.Thread(target=self._serve, name="kvstore-control", daemon=True)
        self._listener: socket.socket | None = None

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
        self._listener = listener
        self._thread.start()

    def stop(self) -> None:
        """Hang up on everyone."""
        self._stopped = True
        os.eventfd_write(self._slow.bell, 1)  # it need not wait for the next look
        self._thread.join(2 * POLL_S + 1)
        self._slow.stop()
        self._deletions.stop()

    def _serve(self) -> None:
        assert self._listener is not None
        listening, bells = self._listener.fileno(), {calls.bell: calls for calls in (self._slow, self._deletions)}
        with select.epoll() as poll:
            poll.register(listening, select.EPOLLIN)
            for bell in bells:
                poll.register(bell, select.EPOLLIN)
            swept = time.monotonic()
            self._node.puts.watched(False)
            while not self._stopped:
                for fd, _ in poll.poll(self._watch_puts()):
                    if fd == listening:
                        self._accept(poll)
                    elif fd in bells:
                        self._answer_slow(poll, bells[fd])
                    else:
                        connection = self._connections.get(fd)
                        if connection is not None and not self._serve_one(connection):
                            self._hang_up(poll, fd, connection)
                        elif connection is not None and connection.waits:
                            poll.modify(fd, 0)  # all that is heard of it now is that it hangs up
                if time.monotonic() - swept > HELLO_S:
                    swept = time.monotonic()
                    for fd, connection in list(self._connections.items()):
                        if not connection.session and swept - connection.since > HELLO_S:
                            self._hang_up(poll, fd, connection)
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.close()

    def _watch_puts(self) -> float:
        """Take in what clients published; how long to wait for requests then. While they publish it is looked at all
        the time, so that they need not wake anybody; after ``QUIET_S`` they have to."""
        puts, now = self._node.puts, time.monotonic()
        puts.drain()
        if puts.times != self._drained:
            puts.watched(True)
            self._drained, self._quiet_at = puts.times, now + QUIET_S
        elif self._quiet_at is not None and now >= self._quiet_at:
            self._quiet_at = None
            puts.watched(False)
            return 0.0  # who published meanwhile did not tell: look once more
        return WATCH_S if self._quiet_at is not None else POLL_S

    def _accept(self, poll: select.epoll) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            sock.close()
            return
        sock.setblocking(False)
        self._connections[sock.fileno()] = _Connection(sock)
        poll.register(sock.fileno(), select.EPOLLIN)

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

    def _answer_slow(self, poll: select.epoll, calls: _SlowCalls) -> None:
        for connection, reply in calls.done():
            fd = connection.sock.fileno()
            if fd < 0:
                continue  # it hung up meanwhile
            connection.waits = False
            if self._send(connection, reply):
                poll.modify(fd, select.EPOLLIN)
            else:
                self._hang_up(poll, fd, connection)

    def _hang_up(self, poll: select.epoll, fd: int, connection: _Connection) -> None:
        poll.unregister(fd)
        del self._connections[fd]
        connection.sock.close()
        if connection.session:
            self._node.handle(ev.ConnectionLost(time.monotonic_ns(), connection.session))
