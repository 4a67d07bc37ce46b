"""Connections of the door: what aiohttp is told, and how a reply goes out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from engine.conductor.door.errors import INVALID, Refusal, internal
from engine.conductor.door.tally import DoorTally
from kvstore import boundary

LINE_BYTES_MAX: Final = 8190  # of a request line, and of a header
HEADERS_MAX: Final = 64
CONNECTIONS_MAX: Final = 2048
LINGER_S: Final = 1.0  # for the rest of a body that was refused: a client that is still sending it gets to read why
LOOKS: Final = 4  # in the time that a client may stall
JSON: Final = "application/json"


class HttpReply:
    """Where one request's reply goes; an ``EventSink``. ``close`` it in the end.

    A client that takes nothing for ``stall_s`` is cut off: what lies in its connection's buffers goes with it. One
    timer looks after all writes; a timeout around each would cost a stream a third of its speed.
    """

    def __init__(self, request: web.BaseRequest, stall_s: float, tally: DoorTally) -> None:
        self.headers: dict[str, str] = {}
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
            self._began()
            await self._stream.prepare(self._request)
        self._writing_since_s = self._loop.time()
        await self._stream.write(events)
        self._writing_since_s = None
        self._tally.sent_bytes += len(events)

    async def end(self) -> web.StreamResponse:
        """The stream is complete."""
        assert self._stream is not None, "something was sent"
        self._writing_since_s = self._loop.time()
        await self._stream.write_eof()
        return self._stream

    async def whole(
        self, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> web.StreamResponse:
        """A reply of one piece."""
        given = {"Content-Type": kind, **self.headers, **(headers or {})}
        response = web.Response(body=body, status=status, headers=given)
        self._began()
        self._writing_since_s = self._loop.time()
        await response.prepare(self._request)
        await response.write_eof()
        self._tally.sent_bytes += len(body)
        return response

    def close(self) -> None:
        """The reply is complete, or given up."""
        if self._timer is not None:
            self._timer.cancel()

    def _began(self) -> None:
        self.on_begin()
        self._look()

    def _look(self) -> None:
        since_s, now_s = self._writing_since_s, self._loop.time()
        if since_s is not None and now_s - since_s >= self._stall_s and self._request.transport is not None:
            self._request.transport.abort()  # aiohttp cancels the request
        self._timer = self._loop.call_later(self._stall_s / LOOKS, self._look)


class DoorServer(web.Server):
    """Makes a handler for each connection; of at most ``CONNECTIONS_MAX``."""

    def __init__(
        self, serve: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], tally: DoorTally, headers_s: float
    ) -> None:
        super().__init__(serve, handler_cancellation=True)
        self._tally = tally
        self._how: dict[str, Any] = {
            "keepalive_timeout": headers_s,  # runs from the connection's begin, or the last reply, to the next request
            "max_line_size": LINE_BYTES_MAX,
            "max_field_size": LINE_BYTES_MAX,
            "max_headers": HEADERS_MAX,
            "lingering_time": LINGER_S,
            "auto_decompress": False,
            "access_log": None,
        }

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """See ``web.Server``."""
        super().connection_made(handler, transport)
        self._tally.connections = len(self.connections)
        if self._tally.connections > CONNECTIONS_MAX:
            transport.abort()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """See ``web.Server``."""
        super().connection_lost(handler, exc)
        self._tally.connections = max(0, len(self.connections) - 1)

    def __call__(self) -> web.RequestHandler:
        """The handler of a new connection."""
        return _Handler(self, loop=asyncio.get_running_loop(), **self._how)


class _Handler(web.RequestHandler):
    """A connection whose errors are of OpenAI's shape, too."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What was no HTTP, or our own bug. Raises ConnectionError where nothing can be said any more."""
        if isinstance(exc, HttpProcessingError):
            what = Refusal(
                431 if isinstance(exc, LineTooLong) else 400, INVALID, "this is no HTTP request that is taken"
            )
        else:
            boundary.failed("http/connection", exc or AssertionError(message))
            what = internal()
        if request.writer.output_size > 0:
            raise ConnectionError("a reply has begun")
        response = web.Response(body=what.body, status=what.status, content_type=JSON)
        response.force_close()
        return response
