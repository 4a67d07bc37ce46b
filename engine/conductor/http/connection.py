"""Connections of the HTTP server: accepts them, limits how long clients may take, and sends replies.

The HTTP protocol itself comes from aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from engine.conductor.http.openai_errors import INVALID, Refusal, internal
from engine.conductor.shell.metrics import HttpTally
from kvstore import boundary
from kvstore.errors import TooManyCalls
from kvstore.limits import OPENAI_PART, Connections, Guest, connections_max
from kvstore.server.http import SERVER
from kvstore.server.identities import Identity

LINE_BYTES_MAX: Final = 8190  # of a request line, and of a header
HEADERS_MAX: Final = 64
CONNECTIONS_MAX: Final = 4096
BACKLOG: Final = 1024  # connections that wait to be accepted
ACCEPTS: Final = 8  # connections accepted in one turn of the event loop
PAUSE_S: Final = 0.1  # without descriptors, the wait before the next accept
SHUTDOWN_S: Final = 2.0  # a client has this long to confirm the end of a TLS connection
LINGER_S: Final = 1.0  # the rest of a refused body is read for this long, so that its client can read the refusal
STALL_CHECKS: Final = 4  # how often a write is checked during ``stall_s``
JSON: Final = "application/json"
# Longer than load balancers keep a connection, usually 60 s. Otherwise they would send requests on closed connections.
KEEPALIVE_S: Final = 75.0
HEADERS_S: Final = 20.0
BODY_S: Final = 30.0
STALL_S: Final = 20.0

log = logging.getLogger("kvstore.conductor")


@dataclass(frozen=True)
class HttpPatience:
    """How long a client may take, in seconds.

    Attributes:
        headers_s: until a new connection has its first request, and for the headers of each request.
        keepalive_s: the longest pause between two requests on one connection.
        body_s: for the body of a request.
        stall_s: until it reads more of a reply.
    """

    headers_s: float = HEADERS_S
    keepalive_s: float = KEEPALIVE_S
    body_s: float = BODY_S
    stall_s: float = STALL_S


PATIENCE: Final = HttpPatience()


class HttpReply:
    """Sends the reply to one request; an ``EventSink``. Call ``close`` at the end.

    The connection closes after the reply if ``is_last`` is set, or if the request has not been read to its end. A
    client that reads nothing for ``stall_s`` is disconnected, and buffered data is dropped. One timer watches all
    writes: a timeout around each write would cost a stream a third of its speed.

    Attributes:
        headers: headers that are sent with the reply.
        is_last: True if the connection must close after the reply.
        check: is called before each event is sent, and may raise.
        on_start: is called when the reply starts.
    """

    def __init__(self, request: web.BaseRequest, stall_s: float, tally: HttpTally) -> None:
        self.headers: dict[str, str] = {}
        self.is_last = False
        self.check: Callable[[], None] = lambda: None
        self.on_start: Callable[[], None] = lambda: None
        self._request = request
        self._stall_s = stall_s
        self._tally = tally
        self._stream: web.StreamResponse | None = None
        self._loop = asyncio.get_running_loop()
        self._writing_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_started(self) -> bool:
        """True if the client may have received something."""
        return self._stream is not None

    async def send(self, events: bytes) -> None:
        """Send these events, and wait until the connection has room. Raises the errors of ``check``."""
        self.check()
        if self._stream is None:
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            self._stream = web.StreamResponse(headers=headers | {"X-Accel-Buffering": "no"} | self.headers)
            self._start(self._stream)
            await self._stream.prepare(self._request)
        self._writing_since_s = self._loop.time()
        await self._stream.write(events)
        self._writing_since_s = None
        self._tally.sent_bytes += len(events)

    async def end(self) -> web.StreamResponse:
        """Send the end of a complete stream."""
        assert self._stream is not None, "events were sent"
        self._writing_since_s = self._loop.time()
        await self._stream.write_eof()
        return self._stream

    async def whole(
        self, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """Send a complete reply."""
        all_headers = {"Content-Type": kind, **self.headers, **(headers or {})}
        response = web.Response(body=body, status=status, headers=all_headers)
        self._start(response)
        self._writing_since_s = self._loop.time()
        await response.prepare(self._request)
        await response.write_eof()
        self._tally.sent_bytes += len(body)
        return response

    def close(self) -> None:
        """Stop watching the writes, because the reply is complete or abandoned."""
        if self._timer is not None:
            self._timer.cancel()

    def _start(self, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER
        if self.is_last or not self._request.content.is_eof():
            response.force_close()
        self.on_start()
        self._check_stall()

    def _check_stall(self) -> None:
        since_s, now_s = self._writing_since_s, self._loop.time()
        if since_s is not None and now_s - since_s >= self._stall_s and self._request.transport is not None:
            self._request.transport.abort()  # aiohttp cancels the request
        self._timer = self._loop.call_later(self._stall_s / STALL_CHECKS, self._check_stall)


class ConnectionServer(web.Server):
    """Accepts connections from ``listen`` to ``close``, and makes a handler for each. Belongs to one event loop.

    A connection counts from the moment it is accepted, also during its TLS handshake. If there are too many, the oldest
    connection without an identified caller is dropped (see ``Connections``).

    Args:
        serve: answers a request.
        tls: None if connections are not encrypted.
    """

    def __init__(
        self,
        serve: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        tally: HttpTally,
        patience: HttpPatience,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(self._serve, handler_cancellation=True)
        self._serve_request = serve
        self._tally = tally
        self._tls = tls
        self.patience = patience
        self._loop = asyncio.get_running_loop()
        self._guests = Connections(connections_max(OPENAI_PART, CONNECTIONS_MAX))
        self._listener: socket.socket | None = None
        self._handshakes: set[asyncio.Task[None]] = set()
        self._options: dict[str, Any] = {
            "keepalive_timeout": patience.keepalive_s,  # from the last reply to the end of the next request's headers
            "max_line_size": LINE_BYTES_MAX,
            "max_field_size": LINE_BYTES_MAX,
            "max_headers": HEADERS_MAX,
            "lingering_time": LINGER_S,
            "auto_decompress": False,
            "access_log": None,
        }

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Start accepting connections. Returns the address. Raises OSError if the address cannot be used."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._resume()
        address, number = self._listener.getsockname()[:2]
        return str(address), int(number)

    def close(self) -> None:
        """Accept no more connections. Open connections continue. A second call does nothing."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()
        for task in self._handshakes:
            task.cancel()

    def _resume(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept a few waiting connections. The number is limited so that other work is not delayed."""
        for _ in range(ACCEPTS):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the client has gone already
                continue
            except OSError as error:  # the process or the machine has no descriptors left
                log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(listener)
                self._loop.call_later(PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            handler = _Handler(self, sock, loop=self._loop, **self._options)
            handler.guest = self._guests.accept(str(peer[0]), handler.drop)
            if handler.guest is None:
                sock.close()
                continue
            self._tally.connections = len(self._guests)
            task = self._loop.create_task(self._open(handler, sock))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _open(self, handler: _Handler, sock: socket.socket) -> None:
        """Do the TLS handshake, if there is one. The handler then serves the connection."""
        handshake_s, shutdown_s = (self.patience.headers_s, SHUTDOWN_S) if self._tls is not None else (None, None)
        try:
            await self._loop.connect_accepted_socket(
                lambda: handler,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=shutdown_s,
            )
        except OSError:  # not TLS, or the handshake took too long, or the client has gone
            self.forget(handler)
        except asyncio.CancelledError:
            handler.drop()
            self.forget(handler)
            raise

    def identify(self, request: web.BaseRequest, caller: Identity) -> None:
        """Record the caller that has identified itself on the connection of this request.

        A connection beyond the caller's share may still be dropped, like a connection without a caller.
        """
        guest = request.protocol.guest if isinstance(request.protocol, _Handler) else None
        if guest is not None:
            with contextlib.suppress(TooManyCalls):
                self._guests.identify(guest, caller)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection that has ended."""
        super().connection_lost(handler, exc)
        assert isinstance(handler, _Handler), "made by this server"
        self.forget(handler)

    def forget(self, handler: _Handler) -> None:
        """Record that the connection of this handler has ended."""
        if handler.guest is not None:
            self._guests.remove(handler.guest)
        self._tally.connections = len(self._guests)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        assert isinstance(handler, _Handler), "made by this server"
        handler.stop_header_timer()
        try:
            return await self._serve_request(request)
        finally:
            handler.end_request()


class _Handler(web.RequestHandler):
    """Handles one connection. Headers must arrive in time, and error replies have OpenAI's form.

    A client has ``headers_s`` for the headers of a request, from the start of the connection or, later, from their
    first byte on. A reply counts as sent when the kernel has all of it.

    Attributes:
        guest: the connection's entry among the counted connections of the server.
    """

    guest: Guest | None = None

    def __init__(self, server: ConnectionServer, sock: socket.socket, **options: Any) -> None:
        super().__init__(server, **options)
        self._headers_s = server.patience.headers_s
        self._sock = sock
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_serving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer for the first headers."""
        super().connection_made(transport)
        if self.transport is not None:
            # With ``high=0``, asyncio pauses a TLS writer with an empty buffer until the client sends something.
            self.transport.set_write_buffer_limits(high=1, low=0)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Start the timer for the headers of the next request."""
        super().data_received(data)
        if self._header_timer is None and not self._is_serving:
            self._start_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the timer."""
        super().connection_lost(exc)
        self.stop_header_timer()

    def stop_header_timer(self) -> None:
        """Record that the headers of a request have come, or that the connection has ended."""
        self._is_serving = True
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def end_request(self) -> None:
        """Record that the reply is complete, and the next request may come."""
        self._is_serving = False

    def drop(self) -> None:
        """End the connection in any state. Closing it instead would wait for the client."""
        if self.transport is not None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _start_header_timer(self) -> None:
        self._header_timer = self._loop.call_later(self._headers_s, self.drop)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the reply to input that is not HTTP, or to an internal error.

        Raises:
            ConnectionError: no reply can be sent.
        """
        if isinstance(exc, ConnectionError):  # the client has gone, or was dropped, during the reply
            raise exc
        if isinstance(exc, HttpProcessingError):
            refusal = Refusal(431 if isinstance(exc, LineTooLong) else 400, INVALID, "not a supported HTTP request")
        else:
            boundary.report_error("http/connection", exc or AssertionError(message))
            refusal = internal()
        if request.writer.output_size > 0:
            raise ConnectionError("the reply has already started")
        headers = {"Content-Type": JSON, "Server": SERVER, **refusal.headers}
        response = web.Response(body=refusal.body, status=refusal.status, headers=headers)
        response.force_close()
        return response
