"""DataConnection: the client's end of a data connection over TCP, plain or TLS, or over a unix socket."""

from __future__ import annotations

import ipaddress
import itertools
import socket
import ssl
import time
from pathlib import Path
from typing import Final

from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable
from kvstore.transfer.base import DialCredentials
from kvstore.transfer.stream import Buffer, Stream
from kvstore.transfer.unix import short
from kvstore.transfer.wire import (
    BODY_MAX,
    FrameKind,
    Head,
    Hello,
    Welcome,
    WireError,
    pack_hello,
    unpack_error,
    unpack_welcome,
)

UNIX: Final = "unix:"
SILENCE_S: Final = 0.5  # a peer that owes us bytes and sends none for this long is dead


class DataConnection:
    """One connection to one node. One thread at a time.

    Life: ``open`` -> requests are sent, replies received in the same order -> ``close``. After an error other than one
    that came as an ERROR frame (``broken`` says which) it is of no use: what it was about to bring may still come.

    Attributes:
        welcome: what the server said of itself.
        broken: whether it is of no use any more.
        fresh: whether it was opened for its first request, and not kept open since an earlier one.
    """

    def __init__(self, stream: Stream, welcome: Welcome) -> None:
        self.welcome = welcome
        self.broken = False
        self.fresh = True
        self._stream = stream
        self._numbers = itertools.count(1)

    @classmethod
    def open(
        cls,
        address: str,
        hello: Hello,
        credentials: DialCredentials | None = None,
        *,
        tls: bool | None = None,
        deadline_s: float,
        silence_s: float = SILENCE_S,
    ) -> DataConnection:
        """Connect to HOST:PORT or unix:PATH, and say who we are.

        Args:
            tls: whether the server's connections are encrypted; None: where the credentials say so.
            deadline_s: of ``time.monotonic()``.

        Raises:
            NodeUnavailable, DeadlineExceeded: nobody answers there.
            InvalidRequest: the address or a certificate makes no sense; the server is another one; a token would
                travel in clear.
            Unauthenticated, VersionMismatch, TooManyCalls: the server refuses us.
        """
        within_s = max(0.001, min(deadline_s - time.monotonic(), silence_s))
        try:
            sock = _connect(address, credentials or DialCredentials(), tls, bool(hello.token), within_s)
        except InvalidRequest:
            raise
        except TimeoutError:
            raise DeadlineExceeded(f"{address}: does not answer") from None
        except (OSError, ValueError) as error:
            raise NodeUnavailable(f"{address}: cannot be reached ({error})") from None
        stream = Stream(sock, silence_s, address)
        try:
            stream.send_frame(FrameKind.HELLO, 0, [pack_hello(hello)], deadline_s)
            head = stream.receive_head(deadline_s)
            body = stream.receive(min(head.body_bytes, BODY_MAX[FrameKind.ERROR]), deadline_s)
            if head.kind is FrameKind.ERROR:
                raise unpack_error(body)
            if head.kind is not FrameKind.WELCOME:
                raise WireError(f"{address}: answered HELLO with {head.kind.name}")
            return cls(stream, unpack_welcome(body))
        except KVStoreError:
            stream.close()
            raise

    @property
    def silence_s(self) -> float:
        """How long the server may bring, or take, not a single byte while we wait for it."""
        return self._stream.silence_s

    @silence_s.setter
    def silence_s(self, silence_s: float) -> None:
        self._stream.silence_s = silence_s

    @property
    def rate_min(self) -> int:
        """Bytes per second that the server has to send while we wait for them; 0: any. Until the next request."""
        return self._stream.rate_min

    @rate_min.setter
    def rate_min(self, rate_min: int) -> None:
        self._stream.rate_min = rate_min

    def send(self, kind: FrameKind, *body: Buffer, deadline_s: float) -> int:
        """Send a request, and do not wait for its reply; returns its number. Raises as ``Stream.send``."""
        number = next(self._numbers) & 0xFFFFFFFF
        self._stream.rate_min, self._stream.behind_s = 0, 0.0
        try:
            self._stream.send_frame(kind, number, body, deadline_s)
        except KVStoreError:
            self.broken = True
            raise
        return number

    def receive_head(self, request: int, *kinds: FrameKind, deadline_s: float) -> Head:
        """The head of the next frame of the reply to that request.

        Raises:
            KVStoreError: what the server answered instead, as ``wire.unpack_error`` tells it; the connection goes on.
            NodeUnavailable, DeadlineExceeded, WireError, VersionMismatch: the connection is broken.
        """
        try:
            head = self._stream.receive_head(deadline_s)
            if head.kind is FrameKind.ERROR and head.request not in (request, 0):
                words = unpack_error(self._stream.receive(head.body_bytes, deadline_s))  # it was idle, and was ended
                raise NodeUnavailable(f"{self._stream.who}: ended the connection ({words})")
            if head.kind not in (*kinds, FrameKind.ERROR) or head.request not in (request, 0):
                raise WireError(f"{self._stream.who}: sent {head.kind.name} of request {head.request}")
        except KVStoreError:
            self.broken = True
            raise
        if head.kind is not FrameKind.ERROR:
            return head
        error = unpack_error(self.receive(head.body_bytes, deadline_s=deadline_s))
        self.broken = self.broken or isinstance(error, WireError) or head.request != request
        raise error

    def receive(self, size: int, *, deadline_s: float) -> bytearray:
        """The next bytes of a frame whose head was received. Raises as ``Stream.receive``."""
        data = bytearray(size)
        self.receive_into(memoryview(data), deadline_s=deadline_s)
        return data

    def receive_into(self, view: memoryview, *, deadline_s: float) -> None:
        """Receive the next bytes of a frame into ``view``. Raises as ``receive``."""
        try:
            self._stream.receive_into(view, deadline_s)
        except KVStoreError:
            self.broken = True
            raise

    def call(self, kind: FrameKind, *body: Buffer, reply: FrameKind, deadline_s: float) -> bytearray:
        """Send a request and wait for its reply of one frame, whose body this is. Raises as ``receive_head``."""
        number = self.send(kind, *body, deadline_s=deadline_s)
        head = self.receive_head(number, reply, deadline_s=deadline_s)
        return self.receive(head.body_bytes, deadline_s=deadline_s)

    def close(self) -> None:
        """End it."""
        self.broken = True
        self._stream.close()


def _connect(address: str, ours: DialCredentials, tls: bool | None, token: bool, within_s: float) -> socket.socket:
    if address.startswith(UNIX):  # its permissions say who may connect
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(within_s)
            with short(Path(address.removeprefix(UNIX))) as name:
                sock.connect(name)
        except OSError:
            sock.close()
            raise
        return sock
    host, port = _split(address)
    context = _context(ours) if (ours.tls if tls is None else tls) else None
    if context is None and not is_loopback(host):
        if token:
            raise InvalidRequest("token", f"would travel in clear to {host}: give the authorities of its certificate")
        if ours.tls:  # a writer of the catalog cannot switch TLS off
            raise InvalidRequest("tls", f"pages of {host} would travel in clear")
    sock = socket.create_connection((host, port), within_s)
    return context.wrap_socket(sock, server_hostname=ours.server_name or host) if context is not None else sock


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidRequest("address", f"must be HOST:PORT, not {address!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _context(credentials: DialCredentials) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=credentials.ca or None)
        if credentials.cert:
            context.load_cert_chain(credentials.cert, credentials.key or None)
    except (OSError, ValueError) as error:
        raise InvalidRequest("tls_ca", f"cannot be used ({error})") from None
    return context


def is_loopback(host: str) -> bool:
    """Whether what is sent to that host, a name or an IP address, stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
