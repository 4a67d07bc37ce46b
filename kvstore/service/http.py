"""HTTP of a daemon: ``/healthz`` (the process answers) and ``/readyz`` (it serves; 503 until then)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvstore.config import parse_address
from kvstore.errors import InvalidRequest

REQUEST_S = 5.0  # a client that dawdles is cut off

Route = Callable[[], tuple[int, str, str]]
"""Status, content type and body of a GET."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: HttpServer

    def do_GET(self) -> None:
        route = self.server.routes.get(self.path.partition("?")[0])
        status, kind, text = route() if route is not None else (404, "text/plain", "not found\n")
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Health checks are no news."""


class HttpServer(ThreadingHTTPServer):
    """Serves ``routes`` from ``start`` to ``stop``. Raises InvalidRequest where the address cannot be had."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, address: str, routes: dict[str, Route]) -> None:
        self.routes = routes
        try:
            super().__init__(parse_address(address, "http"), _Handler)
        except OSError as error:
            raise InvalidRequest("http", f"cannot listen on {address}: {error.strerror}") from None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.2,), name="kvstore-http", daemon=True)

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
