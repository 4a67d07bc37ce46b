"""Control server: clients of this machine over a unix socket, one thread, tens of microseconds a request.

Bounded by construction: a request is one datagram of at most ``MESSAGE_BYTES_MAX``, a connection is served one datagram
per round, a client that does not read its replies is disconnected when its socket's buffer is full.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time

from kvstore.errors import InvalidRequest
from kvstore.service.dispatch import Dispatcher
from kvstore.service.node import Node
from kvstore.state import events as ev
from kvstore.transfer import control

log = logging.getLogger("kvstore.control")

POLL_S = 0.5
HELLO_S = 5.0  # a connection that says nothing within this is closed
BACKLOG = 128
CONNECTIONS_MAX = 1024


class _Connection:
    """One client: from accept to hang-up. ``session`` is 0 until it said hello."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.session = 0
        self.since = time.monotonic()


class ControlServer:
    """Serves from ``start`` to ``stop``. Sessions outlive it: clients come back to the next daemon of the name."""

    def __init__(self, node: Node, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._connections: dict[int, _Connection] = {}
        self._buffer = bytearray(control.MESSAGE_BYTES_MAX)
        self._stopped = False
        self._thread = threading.Thread(target=self._serve, name="kvstore-control", daemon=True)
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listen on the node's socket. The file of a dead daemon is replaced: we hold the name's lock."""
        path = self._node.performer.folder.control
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        here = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
        try:
            listener.bind(
                f"/proc/self/fd/{here}/{path.name}"
            )  # a socket's path is at most 107 bytes, a folder's is not
        finally:
            os.close(here)
        os.chmod(path, self._node.config.file_mode)
        listener.listen(BACKLOG)
        self._listener = listener
        self._thread.start()

    def stop(self) -> None:
        """Hang up on everyone."""
        self._stopped = True
        self._thread.join(2 * POLL_S + 1)

    def _serve(self) -> None:
        assert self._listener is not None
        listening = self._listener.fileno()
        with select.epoll() as poll:
            poll.register(listening, select.EPOLLIN)
            swept = time.monotonic()
            while not self._stopped:
                for fd, _ in poll.poll(POLL_S):
                    if fd == listening:
                        self._accept(poll)
                    else:
                        connection = self._connections.get(fd)
                        if connection is not None and not self._serve_one(connection):
                            self._hang_up(poll, fd, connection)
                if time.monotonic() - swept > HELLO_S:
                    swept = time.monotonic()
                    for fd, connection in list(self._connections.items()):
                        if not connection.session and swept - connection.since > HELLO_S:
                            self._hang_up(poll, fd, connection)
        for connection in self._connections.values():
            connection.sock.close()
        self._listener.close()

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
        try:
            size = connection.sock.recv_into(self._buffer)
            if size == 0:
                return False
            message = control.decode(memoryview(self._buffer)[:size])
            if connection.session:
                reply = self._dispatcher.exchange(connection.session, message)
            else:
                connection.session, reply = self._dispatcher.hello(message)
            if reply is not None:
                connection.sock.send(reply)
        except BlockingIOError:
            log.warning("session %016x does not read its replies: disconnected", connection.session)
            return False
        except (ConnectionError, InvalidRequest) as error:
            log.info("session %016x: %s", connection.session, error)
            return False
        return True

    def _hang_up(self, poll: select.epoll, fd: int, connection: _Connection) -> None:
        poll.unregister(fd)
        del self._connections[fd]
        connection.sock.close()
        if connection.session:
            self._node.handle(ev.SessionLost(time.monotonic_ns(), connection.session))
