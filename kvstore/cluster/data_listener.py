"""Server: listens for data connections, and gives each request to the handler of its kind.

Each connection has a thread. Its work is to send large pieces of memory, which the kernel does without holding the
interpreter lock. A connection holds one request at a time and no reply, so memory is bounded by the number of
connections. ``limits.Connections`` shares the connections between callers. The server waits for a peer that reads
slowly, and disconnects a peer that reads nothing for a while.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvstore import boundary
from kvstore.cluster.data_connection import Admit, Buffer, Caller, Exchange, Handler, Stream
from kvstore.errors import InternalError, InvalidRequest, KVStoreError, Unavailable, VersionMismatch
from kvstore.limits import DATA_PART, UNKNOWN_PART, Connections, Guest, connections_max
from kvstore.shm.unix_sockets import short, socket_file
from kvstore.wire.data import (
    BODY_MAX,
    REQUESTS,
    FrameKind,
    Hello,
    Welcome,
    WireError,
    pack_error,
    pack_hello,
    unpack_hello,
)

STOP_S: Final = 5.0
FAREWELL_S: Final = 0.5  # to send the last message to a client that is being disconnected
ACCEPT_LOOK_S: Final = 0.25
ROOM_S: Final = 1.0  # how long to wait for a disconnected client to make room

log = logging.getLogger("kvstore.data")


@dataclass(frozen=True)
class ServerLimits:
    """The limits of one server.

    Attributes:
        connections_max: limit of open connections of all callers. The limit is lower if ``part`` of the process's
            descriptors is less.
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
        admit: identifies a caller.
        tls: the TLS context; None if connections are plain.
        process: the number of this server; "" for a random number.
    """

    def __init__(
        self,
        node: str,
        handlers: Mapping[FrameKind, Handler],
        admit: Admit,
        limits: ServerLimits | None = None,
        tls: ssl.SSLContext | None = None,
        process: str = "",
    ) -> None:
        assert set(handlers) <= REQUESTS
        self.node = node
        self.process = process or secrets.token_hex(8)
        self.limits = limits or ServerLimits()
        self.tls = tls
        self._handlers = handlers
        self.boundaries = {kind: boundary.RequestGuard(f"data/{kind.name}") for kind in REQUESTS}
        self._admit = admit
        self._listener: socket.socket | None = None
        self._unix: Path | None = None
        self._guests = Connections(max(UNKNOWN_PART, connections_max(self.limits.part, self.limits.connections_max)))
        self._lock = threading.Lock()
        self._open: dict[_Connection, threading.Thread] = {}
        self._stopping = threading.Event()
        accept = boundary.thread_loop("task/data accept", self._accept, self._stopping)
        self._accept_thread = threading.Thread(target=accept, name="data accept", daemon=True)

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
        sock.settimeout(ACCEPT_LOOK_S)
        self._listener = sock
        self._accept_thread.start()

    def stop(self) -> None:
        """Close all connections. Replies that are being sent are cut off."""
        self._stopping.set()
        if self._listener is None:
            return
        self._accept_thread.join(STOP_S)
        self._listener.close()
        if self._unix is not None:
            self._unix.unlink(missing_ok=True)
        with self._lock:
            connections = list(self._open.items())
        for connection, _ in connections:
            connection.abort()
        deadline_s = time.monotonic() + STOP_S
        for _, thread in connections:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._open)

    def answer(self, kind: FrameKind) -> Handler | None:
        """Return the handler for requests of this kind, or None."""
        return _pong if kind is FrameKind.PING else self._handlers.get(kind)

    def identify(self, connection: _Connection) -> None:
        """Count the connection for its caller, who is now known. Raises TooManyCalls if the caller already has its
        share of connections."""
        self._guests.identify(connection.guest, connection.caller)

    def admit(self, hello: Hello, names: list[str]) -> Caller:
        """Return the caller that sent this hello. Raises as ``Admit``."""
        return self._admit(hello, names)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, peer = self._listener.accept()
        except TimeoutError:
            return
        except OSError as error:  # no more descriptors, or the caller has gone already
            log.warning("a connection could not be taken: %s", error)
            self._stopping.wait(ACCEPT_LOOK_S)
            return
        connection = _Connection(self, sock, peer)
        guest = self._guests.accept(connection.address, connection.abort, ROOM_S)
        if guest is None:
            sock.close()
            return
        connection.guest = guest
        thread = threading.Thread(target=self._serve, args=(connection,), name="data", daemon=True)
        with self._lock:
            self._open[connection] = thread
        self._begin(connection, thread)

    def _begin(self, connection: _Connection, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:  # the machine, or our group of processes, has no more threads
            log.warning("a connection could not be taken: %s", error)
            self._remove(connection)
            connection.close()
            self._stopping.wait(ACCEPT_LOOK_S)

    def _serve(self, connection: _Connection) -> None:
        try:
            with boundary.RequestGuard("data/connection"):
                connection.run()
        except InternalError:
            pass  # the connection is gone, so the error cannot be sent
        finally:
            self._remove(connection)

    def _remove(self, connection: _Connection) -> None:
        with self._lock:
            del self._open[connection]
        self._guests.remove(connection.guest)


class _Connection:
    """One connection, in its thread. Also the ``Exchange`` of its current request."""

    guest: Guest

    def __init__(self, server: Server, sock: socket.socket, peer: tuple[str, int] | str) -> None:
        self.address = peer[0] if peer else ""  # "" for a unix socket
        self._server = server
        self._sock = sock
        self._peer = f"{peer[0]}:{peer[1]}" if peer else "a process of this machine"
        self._stream: Stream | None = None
        self._caller: Caller | None = None
        self._request = 0
        self._deadline_s = 0.0
        self._aborted = False
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
        self._aborted = True
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def run(self) -> None:
        """Serve the connection until it ends."""
        try:
            self._serve()
        except (Unavailable, VersionMismatch) as error:
            log.debug("%s: %s", self._peer, error)
        finally:
            self.close()

    def close(self) -> None:
        """Close the stream and the socket."""
        if self._stream is not None:
            self._stream.close()
        self._sock.close()

    def _serve(self) -> None:
        server, limits = self._server, self._server.limits
        deadline_s = time.monotonic() + limits.hello_s
        names = self._secure(limits.hello_s)
        self._stream = stream = Stream(self._sock, limits.silence_s, self._peer)
        try:
            head, body = stream.receive_frame(FrameKind.HELLO, BODY_MAX[FrameKind.HELLO], deadline_s)
            self._request = head.request
            hello = unpack_hello(body)
            self._caller = server.admit(hello, names)
            self._peer += f" ({hello.caller[:80]!r})"
            server.identify(self)
            welcome = pack_hello(Welcome(node=server.node, process=server.process))
            stream.send_frame(FrameKind.WELCOME, head.request, [welcome], deadline_s)
            while True:
                self._one(stream, limits, hello, names)
        except KVStoreError as error:
            self._farewell(stream, error)
            if not isinstance(error, Unavailable):
                log.warning("%s: %s", self._peer, error)
                return
            raise

    def _secure(self, hello_s: float) -> list[str]:
        """Encrypt the connection if the server uses TLS. Returns the names in the caller's certificate."""
        context = self._server.tls
        if context is None:
            return []
        self._sock.settimeout(hello_s)
        try:
            self._sock = tls_socket = context.wrap_socket(self._sock, server_side=True, do_handshake_on_connect=False)
            if self._aborted:  # ``abort`` has shut the socket that was there before
                raise WireError(f"{self._peer}: dropped")
            tls_socket.do_handshake()
        except (OSError, ValueError) as error:
            raise WireError(f"{self._peer}: no TLS ({error})") from None
        return names_of(tls_socket.getpeercert())

    def _one(self, stream: Stream, limits: ServerLimits, hello: Hello, names: list[str]) -> None:
        """Wait for a request and answer it, if the caller is still admitted when the request arrives."""
        head = stream.receive_head(time.monotonic() + limits.idle_s, limits.idle_s)
        self._request = head.request
        handler = self._server.answer(head.kind)
        if handler is None:
            raise WireError(f"kind: must be a request that {self._server.node} answers (got {head.kind.name})")
        self._caller = self._server.admit(hello, names)
        self._deadline_s = time.monotonic() + limits.reply_s
        body = stream.receive(head.body_bytes, self._deadline_s)
        try:
            with self._server.boundaries[head.kind]:
                handler(self, memoryview(body))
        except WireError:
            raise
        except KVStoreError as error:
            if self._broken:
                raise
            self.reply(FrameKind.ERROR, pack_error(error))

    def _farewell(self, stream: Stream, error: KVStoreError) -> None:
        if self._broken:
            return
        with contextlib.suppress(Unavailable):
            stream.send_frame(FrameKind.ERROR, self._request, [pack_error(error)], time.monotonic() + FAREWELL_S)


def _pong(exchange: Exchange, body: memoryview) -> None:
    exchange.reply(FrameKind.PONG, body)


def names_of(certificate: Mapping[str, Any] | None) -> list[str]:
    """Return the common name and the alternative names in a verified certificate."""
    fields = certificate or {}
    names = [value for part in fields.get("subject", ()) for name, value in part if name == "commonName"]
    return names + [value for _, value in fields.get("subjectAltName", ())]
