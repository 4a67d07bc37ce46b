"""HTTP of a daemon: ``/healthz`` (the process answers), ``/readyz`` (it serves; 503 until then) and ``/metrics``.

A connection is one request, and has ``REQUEST_S`` for all of it. If there are too many connections, the oldest one
whose request has not arrived is dropped.

``HostNames`` decides which host names a daemon answers to, so that a web page cannot reach it through a browser. A page
of ``evil.example`` may point that name at 127.0.0.1 after it is loaded (DNS rebinding), and the browser then gives our
answers to its scripts. Such requests name ``evil.example`` as their host. So a request has to name one of:

- an IP address, or a name without a dot, because a stranger can redirect neither;
- ``localhost``, or a name that ends with ``.localhost``;
- this machine's own name, the host of ``http``, or a name in the server's certificate;
- a name of ``http_hosts``, for example that of a load balancer.

A request from a page of another site names that site as its origin, and is refused too. Clients that are not browsers
name no origin.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

from kvstore import boundary
from kvstore.config import parse_address
from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InternalError, InvalidRequest, KVStoreError, TooManyCalls
from kvstore.limits import HTTP_PART, UNKNOWN_PART, Connections, Guest, NamedOwner, Owner, ThreadShares, connections_max

ANY: Final = "*"
_HEADER: Final = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")
SHOWN_MAX: Final = 100  # characters of a refused header in the error


class HostNames:
    """Checks the Host and Origin of a request against ``names``, in which ``*.example`` matches one more label."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {name.lower().rstrip(".") for name in names}

    @classmethod
    def of(cls, config: DaemonConfig, certificate_names: Iterable[str] = ()) -> HostNames:
        """Return the host names of a daemon. ``certificate_names`` are the names in its HTTP certificate."""
        own = [parse_address(config.http, "http")[0]] if config.http is not None else []
        return cls((*own, socket.gethostname(), *certificate_names, *config.http_hosts))

    def refusal(self, hosts: Sequence[str], origins: Sequence[str]) -> str:
        """Return why a request with these headers is refused, or ""."""
        if len(hosts) > 1 or len(origins) > 1:
            return "host: must be named once, and the origin at most once"
        host = _host(hosts[0]) if hosts else ""
        if host is None or (host and not self._may_be_named(host)):
            shown = _shown(hosts[0])
            return f"host: is not a name of this server (got {shown!r}); the setting http_hosts takes more names"
        if origins and not self._may_come_from(origins[0], host):
            return f"origin: pages of other sites are not answered (got {_shown(origins[0])!r})"
        return ""

    def _may_be_named(self, host: str) -> bool:
        return ANY in self._names or _is_number(host) or "." not in host or _is_local(host) or self._is_ours(host)

    def _may_come_from(self, origin: str, host: str) -> bool:
        try:
            site = (urlsplit(origin).hostname or "").rstrip(".")
        except ValueError:
            return False
        return bool(site) and (site == host or self._is_ours(site) or (_is_local(site) and _is_local(host)))

    def _is_ours(self, host: str) -> bool:
        return host in self._names or f"*.{host.partition('.')[2]}" in self._names


def _host(header: str) -> str | None:
    """Return the host in a Host header, in lower case and without its port; None if there is none."""
    match = _HEADER.fullmatch(header)
    return (match[1] or match[2]).lower().rstrip(".") or None if match else None


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    if _is_number(host):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def _shown(header: str) -> str:
    return header[:SHOWN_MAX].encode("ascii", "replace").decode()


REQUEST_S: Final = 5.0  # a slower request is cut off
CONNECTIONS_MAX: Final = 64  # each has a thread
ROOM_S: Final = 0.2  # how long to wait for a dropped connection to end
LOOK_S: Final = 0.2
ACCEPT_AGAIN_S: Final = 0.05  # pause after no descriptor was free for a connection
SERVER: Final = "kvstore"
COSTLY: Final = ("/metrics",)  # answered one request at a time, with a turn for each address

_BUSY: Final = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"

log = logging.getLogger("kvstore.http")

Route = Callable[[], tuple[int, str, str]]
"""Status, content type and body of a GET."""


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_S
    server: HttpServer

    def do_GET(self) -> None:
        owner = self.server.mark_request(self.request)
        path = self.path.partition("?")[0]
        route = self.server.routes.get(path)
        refusal = self.server.hosts.refusal(self.headers.get_all("Host", []), self.headers.get_all("Origin", []))
        try:
            place = f"http/{path.strip('/') if route is not None else 'other'}"
            with contextlib.ExitStack() as turn, boundary.RequestGuard(place):
                if refusal:
                    status, kind, text = 403, "text/plain", f"{refusal}\n"
                elif route is None:
                    status, kind, text = 404, "text/plain", "not found\n"
                else:
                    if path in COSTLY:
                        turn.enter_context(self.server.turns.turn(owner, REQUEST_S))
                    status, kind, text = route()
        except InternalError as error:
            status, kind, text = 500, "text/plain", f"{error}\n"
        except KVStoreError as error:  # the node is stopping, or the request did not get its turn in time
            status, kind, text = 503, "text/plain", f"{error}\n"
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def version_string(self) -> str:
        """Return the Server header."""
        return SERVER

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: health checks are not worth a line."""


class HttpServer(ThreadingHTTPServer):
    """Serves ``routes`` from ``start`` to ``stop``, only for requests that name one of ``hosts``.

    Raises InvalidRequest if the server cannot listen at the address.
    """

    daemon_threads = True
    # If strangers fill this queue, the kernel drops a caller's first packet, which is sent again after 1, 3 and 7 s. In
    # a longer queue, a caller waits longer for the requests of strangers.
    request_queue_size = 256

    def __init__(self, address: str, routes: dict[str, Route], hosts: HostNames) -> None:
        self.routes = routes
        self.hosts = hosts
        self._guests = Connections(max(UNKNOWN_PART, connections_max(HTTP_PART, CONNECTIONS_MAX)))
        self.turns = ThreadShares("turns at HTTP", "http", 1)
        self._open: dict[socket.socket, tuple[Guest, float]] = {}  # for each connection, when its time is up
        try:
            super().__init__(parse_address(address, "http"), _Handler)
        except OSError as error:
            raise InvalidRequest("http", f"cannot listen on {address}: {error.strerror}") from None
        self._thread = threading.Thread(target=self.serve_forever, args=(LOOK_S,), name="kvstore-http", daemon=True)

    @property
    def address(self) -> str:
        """The HOST:PORT at which the server listens, with the real port."""
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

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. If no descriptor is free, the connection waits in the backlog, and is accepted a little
        later."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_AGAIN_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection in a thread, if there is room."""
        guest = self._guests.accept(client_address[0], partial(_shut, request), ROOM_S)
        if guest is None:
            with contextlib.suppress(OSError):
                request.setblocking(False)
                request.send(_BUSY)
            super().shutdown_request(request)
            return
        self._open[request] = guest, time.monotonic() + REQUEST_S
        super().process_request(request, client_address)

    def mark_request(self, request: Any) -> Owner:
        """Note that a full request has arrived on this connection, so that it no longer gives way to others. Returns
        its owner.

        Raises:
            ConnectionError: the connection was dropped, and the bytes read so far only look like a request.
        """
        guest, _ = self._open[request]
        owner = NamedOwner(guest.network)
        if guest.leaving:
            raise ConnectionAbortedError("dropped")
        with contextlib.suppress(TooManyCalls):  # an address beyond its share is still served
            self._guests.identify(guest, owner)
        return owner

    def shutdown_request(self, request: Any) -> None:
        """Close the connection and free its place."""
        guest, _ = self._open.pop(request, (None, 0.0))
        super().shutdown_request(request)
        if guest is not None:
            self._guests.remove(guest)

    def service_actions(self) -> None:
        """Cut off requests that take too long. Runs every ``LOOK_S`` and after every connection."""
        now_s = time.monotonic()
        for request, (_, until_s) in list(self._open.items()):
            if now_s > until_s:
                _shut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an unexpected error that ended a connection or prevented the start of its thread."""
        error = sys.exc_info()[1]
        if error is not None:
            boundary.report_error("http/connection", error)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer the request."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            super().finish_request(request, client_address)


def _shut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class Readiness(threading.Event):
    """Set while a daemon serves. Clearing it afterwards means that the daemon is draining."""

    draining = False

    def clear(self) -> None:
        """See ``Event``."""
        self.draining = self.draining or self.is_set()
        super().clear()


def readyz(ready: Readiness, fault: Callable[[], str] = lambda: "") -> Route:
    """Make the route that says whether the daemon serves. ``fault`` returns a problem to report while it still
    serves."""

    def answer() -> tuple[int, str, str]:
        if not ready.is_set():
            return 503, "text/plain", "draining\n" if ready.draining else "starting\n"
        problem = fault()
        return 200, "text/plain", f"ready, but {problem}\n" if problem else "ready\n"

    return answer


def routes(ready: Readiness) -> dict[str, Route]:
    """Return the routes that every daemon answers from startup."""

    return {
        "/healthz": lambda: (200, "text/plain", "ok\n"),
        "/readyz": readyz(ready),
        "/metrics": lambda: (503, "text/plain", "starting\n"),  # replaced once the daemon has metrics
    }
