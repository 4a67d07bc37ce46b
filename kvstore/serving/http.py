"""HTTP of a daemon: ``/healthz`` (the process answers), ``/readyz`` (it serves; 503 until then) and ``/metrics``.

A connection is one request, and has ``REQUEST_S`` for all of it, however slowly it comes. At most ``THREADS_MAX`` are
served at once; who comes then is told so without a thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from kvstore import boundary
from kvstore.config import parse_address
from kvstore.errors import InternalError, InvalidRequest, KVStoreError

REQUEST_S: Final = 5.0  # a client that dawdles is cut off
THREADS_MAX: Final = 16
LOOK_S: Final = 0.2

_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"

log = logging.getLogger("kvstore.http")

Route = Callable[[], tuple[int, str, str]]
"""Status, content type and body of a GET."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: HttpServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        route = self.server.routes.get(path)
        try:
            with boundary.answered(f"http/{path.strip('/') if route is not None else 'other'}"):
                status, kind, text = route() if route is not None else (404, "text/plain", "not found\n")
        except InternalError as error:
            status, kind, text = 500, "text/plain", f"{error}\n"
        except KVStoreError as error:  # the node is stopping
            status, kind, text = 503, "text/plain", f"{error}\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Health checks are no news."""


class HttpServer(ThreadingHTTPServer):
    """Serves ``routes`` from ``start`` to ``stop``. Raises InvalidRequest where the address cannot be had."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str, routes: dict[str, Route]) -> None:
        self.routes = routes
        self._served: dict[socket.socket, float] = {}  # connection -> until when it has a thread
        try:
            super().__init__(parse_address(address, "http"), _Handler)
        except OSError as error:
            raise InvalidRequest("http", f"cannot listen on {address}: {error.strerror}") from None
        self._thread = threading.Thread(target=self.serve_forever, args=(LOOK_S,), name="kvstore-http", daemon=True)

    @property
    def address(self) -> str:
        """HOST:PORT really listened on."""
        host, port = self.server_address[:2]
        return f"{host!s}:{port}"

    def start(self) -> None:
        """Answer requests."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        self.shutdown()
        self.server_close()

    # --- of one connection: called by ``ThreadingHTTPServer`` -------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for this connection, where there is one left."""
        if len(self._served) >= THREADS_MAX:
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        self._served[request] = time.monotonic() + REQUEST_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The connection is done."""
        self._served.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off who takes too long. Called every ``LOOK_S`` and after every connection."""
        now = time.monotonic()
        for request, until in list(self._served.items()):
            if now > until:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection ended by an unexpected error, or no thread could be started for it."""
        error = sys.exc_info()[1]
        if error is not None:
            boundary.failed("http/connection", error)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve it."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().finish_request(request, client_address)


def readyz(ready: threading.Event, fault: Callable[[], str] = lambda: "") -> Route:
    """Whether it serves. ``fault``: what it says beside that where something is wrong and it serves all the same."""

    def answer() -> tuple[int, str, str]:
        if not ready.is_set():
            return 503, "text/plain", "starting\n"
        wrong = fault()
        return 200, "text/plain", f"ready, but {wrong}\n" if wrong else "ready\n"

    return answer


def routes(ready: threading.Event) -> dict[str, Route]:
    """What every daemon answers from the beginning."""

    return {
        "/healthz": lambda: (200, "text/plain", "ok\n"),
        "/readyz": readyz(ready),
        "/metrics": lambda: (503, "text/plain", "starting\n"),  # until there is something to count
    }
