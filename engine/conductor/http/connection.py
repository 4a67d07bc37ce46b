"""Connections of the HTTP server: how aiohttp is set up, and how a reply is sent."""

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

LINE_BYTES_MAX: Final = 8190  # for a request line, and for a header
HEADERS_MAX: Final = 64
CONNECTIONS_MAX: Final = 4096
BACKLOG: Final = 1024  # connections that wait to be accepted
ACCEPTS: Final = 8  # connections accepted in one turn of the event loop
PAUSE_S: Final = 0.1  # before accepting again when there are no descriptors
SHUTDOWN_S: Final = 2.0  # for the other end of a TLS connection to confirm its end
LINGER_S: Final = 1.0  # for the rest of a body that was refused: a client that is still sending it gets to read why
LOOKS: Final = 4  # checks during the time that a client may stall
JSON: Final = "application/json"
HEADERS_S: Final = 20.0  # for a request to begin on a new connection, and for its headers to come
KEEPALIVE_S: Final = 75.0  # longer than load balancers keep a connection, usually 60 s: they must not meet closed ones
BODY_S: Final = 30.0
STALL_S: Final = 20.0

log = logging.getLogger("kvstore.conductor")


@dataclass(frozen=True)
class HttpPatience:
    """How long a client may take, in seconds. ``keepalive_s``: between two requests on one connection."""

    headers_s: float = HEADERS_S
    keepalive_s: float = KEEPALIVE_S
    body_s: float = BODY_S
    stall_s: float = STALL_S


PATIENCE: Final = HttpPatience()


class HttpReply:
    """Sends one request's reply; an ``EventSink``. ``close`` it at the end.

    ``headers`` are sent with it. The connection closes after a reply that ``is_last``, and after a reply that precedes
    the end of its request. A client that takes nothing for ``stall_s`` is cut off, and what its connection has buffered
    is dropped. One timer watches all writes; a timeout around each would cost a stream a third of its speed.
    """

    def __init__(self, request: web.BaseRequest, stall_s: float, tally: HttpTally) -> None:
        self.headers: dict[str, str] = {}
        self.is_last = False
        self.check: Callable[[], None] = lambda: None
        self.on_begin: Callable[[], None] = lambda: None
        self._request = request
        self._stall_s = stall_s
        self._tally = tally
        self._stream: web.StreamResponse | None = None
        self._loop = asyncio.get_running_loop()
        self._writing_since_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def begun(self) -> bool:
        """See ``EventSink``."""
        return self._stream is not None

    async def send(self, events: bytes) -> None:
        """See ``EventSink``. The caller's key must hold still."""
        self.check()
        if self._stream is None:
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            self._stream = web.StreamResponse(headers=headers | {"X-Accel-Buffering": "no"} | self.headers)
            self._began(self._stream)
            await self._stream.prepare(self._request)
        self._writing_since_s = self._loop.time()
        await self._stream.write(events)
        self._writing_since_s = None
        self._tally.sent_bytes += len(events)

    async def end(self) -> web.StreamResponse:
        """End the stream: it is complete."""
        assert self._stream is not None, "something was sent"
        self._writing_since_s = self._loop.time()
        await self._stream.write_eof()
        return self._stream

    async def whole(
        self, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """Send a reply that is one piece."""
        given = {"Content-Type": kind, **self.headers, **(headers or {})}
        response = web.Response(body=body, status=status, headers=given)
        self._began(response)
        self._writing_since_s = self._loop.time()
        await response.prepare(self._request)
        await response.write_eof()
        self._tally.sent_bytes += len(body)
        return response

    def close(self) -> None:
        """End the reply: it is complete, or given up."""
        if self._timer is not None:
            self._timer.cancel()

    def _began(self, response: web.StreamResponse) -> None:
        response.headers["Server"] = SERVER
        if self.is_last or not self._request.content.is_eof():
            response.force_close()
        self.on_begin()
        self._look()

    def _look(self) -> None:
        since_s, now_s = self._writing_since_s, self._loop.time()
        if since_s is not None and now_s - since_s >= self._stall_s and self._request.transport is not None:
            self._request.transport.abort()  # aiohttp cancels the request
        self._timer = self._loop.call_later(self._stall_s / LOOKS, self._look)


class ConnectionServer(web.Server):
    """Accepts connections from ``listen`` to ``close``, and makes a handler for each of them.

    A connection counts from the moment it is accepted, including its TLS handshake. When there are too many, the oldest
    one without an identified caller is dropped (``Connections``). Belongs to one event loop.
    """

    def __init__(
        self,
        serve: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        tally: HttpTally,
        patience: HttpPatience,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(self._serve, handler_cancellation=True)
        self._serve_one = serve
        self._tally = tally
        self._tls = tls
        self.patience = patience
        self._loop = asyncio.get_running_loop()
        self._guests = Connections(connections_max(OPENAI_PART, CONNECTIONS_MAX))
        self._listener: socket.socket | None = None
        self._beginning: set[asyncio.Task[None]] = set()
        self._how: dict[str, Any] = {
            "keepalive_timeout": patience.keepalive_s,  # from the last reply to the end of the next request's headers
            "max_line_size": LINE_BYTES_MAX,
            "max_field_size": LINE_BYTES_MAX,
            "max_headers": HEADERS_MAX,
            "lingering_time": LINGER_S,
            "auto_decompress": False,
            "access_log": None,
        }

    def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept connections from now on; returns the address. Raises OSError if it cannot be used."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self._resume()
        address, number = self._listener.getsockname()[:2]
        return str(address), int(number)

    def close(self) -> None:
        """Accept no more connections; those that are open go on. Does nothing the second time."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._loop.remove_reader(listener)
            listener.close()
        for task in self._beginning:
            task.cancel()

    def _resume(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept a few of the waiting connections, so that a crowd of them delays nothing else."""
        for _ in range(ACCEPTS):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the caller has gone already
                continue
            except OSError as error:  # the process, or the machine, has no descriptors left
                log.warning("cannot accept a connection: %s", error)
                self._loop.remove_reader(listener)
                self._loop.call_later(PAUSE_S, self._resume)
                return
            sock.setblocking(False)
            handler = _Handler(self, sock, loop=self._loop, **self._how)
            handler.guest = self._guests.accept(str(peer[0]), handler.drop)
            if handler.guest is None:
                sock.close()
                continue
            self._tally.connections = len(self._guests)
            task = self._loop.create_task(self._begin(handler, sock))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)

    async def _begin(self, handler: _Handler, sock: socket.socket) -> None:
        """Shake hands if TLS is used. The handler serves from then on."""
        handshake_s, shutdown_s = (self.patience.headers_s, SHUTDOWN_S) if self._tls is not None else (None, None)
        try:
            await self._loop.connect_accepted_socket(
                lambda: handler,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=shutdown_s,
            )
        except OSError:  # not TLS, or it took too long, or the caller has gone
            self.gone(handler)
        except asyncio.CancelledError:
            handler.drop()
            self.gone(handler)
            raise

    def known(self, request: web.BaseRequest, caller: Identity) -> None:
        """Record that the caller of this connection has identified itself. Beyond the caller's share of connections it
        may still be dropped, like one without a caller."""
        guest = request.protocol.guest if isinstance(request.protocol, _Handler) else None
        if guest is not None:
            with contextlib.suppress(TooManyCalls):
                self._guests.identify(guest, caller)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """See ``web.Server``."""
        super().connection_lost(handler, exc)
        assert isinstance(handler, _Handler), "made here"
        self.gone(handler)

    def gone(self, handler: _Handler) -> None:
        """Record that the connection of this handler is closed."""
        if handler.guest is not None:
            self._guests.remove(handler.guest)
        self._tally.connections = len(self._guests)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        assert isinstance(handler, _Handler), "made here"
        handler.headers_came()
        try:
            return await self._serve_one(request)
        finally:
            handler.request_ended()


class _Handler(web.RequestHandler):
    """A connection whose headers must arrive in time, and whose errors have OpenAI's form.

    The headers of a request have ``headers_s``, from the start of the connection or from their first byte on. A reply
    counts as sent when the kernel has all of it.

    Attributes:
        guest: the connection, as the server counts it.
    """

    guest: Guest | None = None

    def __init__(self, server: ConnectionServer, sock: socket.socket, **how: Any) -> None:
        super().__init__(server, **how)
        self._headers_s = server.patience.headers_s
        self._sock = sock
        self._late: asyncio.TimerHandle | None = None
        self._is_served = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        if self.transport is not None:
            # With ``high=0`` asyncio pauses writers of an empty buffer over TLS, until the client sends something.
            self.transport.set_write_buffer_limits(high=1, low=0)
        self._expect()

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        super().data_received(data)
        if self._late is None and not self._is_served:
            self._expect()

    def connection_lost(self, exc: BaseException | None) -> None:
        """See ``asyncio.Protocol``."""
        super().connection_lost(exc)
        self.headers_came()

    def headers_came(self) -> None:
        """Record that a request begins, or that none will."""
        self._is_served = True
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def request_ended(self) -> None:
        """Record that the reply is complete, so that the next request may begin."""
        self._is_served = False

    def drop(self) -> None:
        """End the connection soon, whatever its state; closing it would wait for the other end."""
        if self.transport is not None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _expect(self) -> None:
        self._late = self._loop.call_later(self._headers_s, self.drop)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer input that is not HTTP, or our own bug. Raises ConnectionError if no answer can be sent any more."""
        if isinstance(exc, ConnectionError):  # the client has gone, or was dropped, while it was answered
            raise exc
        if isinstance(exc, HttpProcessingError):
            what = Refusal(431 if isinstance(exc, LineTooLong) else 400, INVALID, "not a supported HTTP request")
        else:
            boundary.report_error("http/connection", exc or AssertionError(message))
            what = internal()
        if request.writer.output_size > 0:
            raise ConnectionError("a reply has begun")
        headers = {"Content-Type": JSON, "Server": SERVER, **what.headers}
        response = web.Response(body=what.body, status=what.status, headers=headers)
        response.force_close()
        return response
