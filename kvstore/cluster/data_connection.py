"""Data connections over TCP (plain or TLS) or a unix socket: the stream, both ends' interfaces, and the client.

``Stream`` is a connected socket on which nothing waits without a deadline. ``DataConnection`` is the client's end.
``Caller`` and ``Exchange`` are a server's caller, and one request as its handler sees it. ``DialCredentials`` is the
identity of a client, from its environment.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvstore.config.reading import networks_of, parse_networks
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable
from kvstore.shm.unix_sockets import short
from kvstore.wire.data import (
    BODY_MAX,
    HEAD,
    FrameKind,
    Head,
    Hello,
    Welcome,
    WireError,
    pack_head,
    pack_hello,
    unpack_error,
    unpack_head,
    unpack_welcome,
)

LOOK_S: Final = 0.05  # interval at which a blocked send or receive checks its deadline
STALL_S: Final = 2 * LOOK_S  # a longer gap between two checks is a stall of this process
TLS_PIECE: Final = 256 << 10  # bytes encrypted at a time
BUFFERS_MAX: Final = 512  # buffers of one call; the kernel accepts 1024

Buffer = bytes | bytearray | memoryview


class Stream:
    """One connection. One thread sends and one receives at a time.

    Life: made of a connected socket -> used -> ``close``, once, by its owner. After an error it must not be used.

    Args:
        silence_s: how long the other end may be silent (send or accept no byte) while we wait for it. With a
            ``rate_min``, it is the largest ``delay_s``. May be changed.
        peer: the other end, for messages.

    Attributes:
        sent_bytes: how many bytes the kernel has accepted so far.
        rate_min: minimum bytes per second while we wait for them; 0 for none. May be changed.
        delay_s: by how much our waiting has exceeded the time that the received bytes need at that rate.
    """

    def __init__(self, sock: socket.socket, silence_s: float, peer: str) -> None:
        self._sock = sock
        self.silence_s = silence_s
        self.sent_bytes = 0
        self.rate_min = 0
        self.delay_s = 0.0
        self._peer = peer
        self._tls = isinstance(sock, ssl.SSLSocket)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls:
            sock.settimeout(LOOK_S)
        else:
            sock.settimeout(None)
            look = struct.pack("ll", 0, int(LOOK_S * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, look)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, look)

    @property
    def peer(self) -> str:
        """The other end's name."""
        return self._peer

    def receive_into(self, view: memoryview, deadline_s: float, silence_s: float | None = None) -> None:
        """Fill ``view`` with the next bytes.

        Raises:
            NodeUnavailable: the other end has gone.
            DeadlineExceeded: the other end did not send all bytes in time, sent nothing for a while, or sent too
                slowly.
        """
        silence_s = self.silence_s if silence_s is None else silence_s
        have, size, flags = 0, len(view), 0 if self._tls else socket.MSG_WAITALL
        looked_s = time.monotonic()
        self.delay_s = self.delay_s if self.rate_min else 0.0
        while have < size:
            try:
                more = self._sock.recv_into(view[have:], size - have, flags)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                more = -1
            except (OSError, ValueError) as error:  # ValueError: TLS after the other end has closed
                raise NodeUnavailable(f"{self._peer}: the connection is lost ({error})") from None
            if more == 0:
                raise NodeUnavailable(f"{self._peer}: closed the connection")
            now_s = time.monotonic()
            self.delay_s += min(now_s - looked_s, STALL_S)
            looked_s = now_s
            if more > 0:
                have += more
                self.delay_s = max(0.0, self.delay_s - more / self.rate_min) if self.rate_min else 0.0
            is_late = self.delay_s >= silence_s
            if (have < size and (now_s >= deadline_s or is_late)) or (self.rate_min and is_late):
                raise DeadlineExceeded(f"{self._peer}: sent {have} of {size} bytes in time")

    def receive(self, size: int, deadline_s: float, silence_s: float | None = None) -> bytearray:
        """Return the next ``size`` bytes. Raises as ``receive_into``."""
        data = bytearray(size)
        self.receive_into(memoryview(data), deadline_s, silence_s)
        return data

    def receive_head(self, deadline_s: float, silence_s: float | None = None) -> Head:
        """Return the head of the next frame. Raises as ``receive_into`` and ``unpack_head``."""
        return unpack_head(self.receive(HEAD.size, deadline_s, silence_s))

    def receive_some(self, view: memoryview, wait: bool) -> int:
        """Receive bytes that have arrived. Return their number, or 0 if there are none.

        Args:
            wait: wait for them, but at most ``LOOK_S``.

        Raises:
            NodeUnavailable: the other end has gone.
        """
        try:
            if wait:
                count = self._sock.recv_into(view)
            elif self._tls:
                count = self._without_waiting(lambda: self._sock.recv_into(view))
            else:
                count = self._sock.recv_into(view, 0, socket.MSG_DONTWAIT)
        except (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except (OSError, ValueError) as error:
            raise NodeUnavailable(f"{self._peer}: the connection is lost ({error})") from None
        if not count:
            raise NodeUnavailable(f"{self._peer}: closed the connection")
        return count

    def send_frame_now(self, kind: FrameKind, request: int, buffers: Sequence[Buffer]) -> None:
        """Send a small frame without waiting. Raises NodeUnavailable if it is not accepted as a whole at once."""
        frame = b"".join((pack_head(kind, request, sum(map(len, buffers))), *buffers))
        try:
            if self._tls:
                count = self._without_waiting(lambda: self._sock.send(frame))
            else:
                count = self._sock.send(frame, socket.MSG_DONTWAIT)
        except (OSError, ValueError) as error:
            raise NodeUnavailable(f"{self._peer}: the connection is lost ({error})") from None
        if count < len(frame):
            raise NodeUnavailable(f"{self._peer}: does not accept what is sent to it")

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._sock.fileno()

    @property
    def has_bytes(self) -> bool:
        """See ``DataConnection``."""
        return isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0

    def _without_waiting(self, call: Callable[[], int]) -> int:
        """Call a method of a TLS socket that must not block. A plain socket has a flag for this."""
        self._sock.settimeout(0.0)
        try:
            return call()
        finally:
            self._sock.settimeout(LOOK_S)

    def send(self, buffers: Sequence[Buffer], deadline_s: float) -> None:
        """Send all of these buffers, one after the other.

        Raises:
            NodeUnavailable: the other end has gone.
            DeadlineExceeded: the other end did not accept all bytes in time, or accepted none for a while. Some bytes
                may have been sent.
        """
        views = [view.cast("B") for each in buffers if (view := memoryview(each)).nbytes]
        first, heard_s = 0, time.monotonic()
        while first < len(views):
            try:
                sent = self._send_some(views, first)
            except (BlockingIOError, TimeoutError, ssl.SSLWantWriteError):
                sent = 0
            except (OSError, ValueError) as error:
                raise NodeUnavailable(f"{self._peer}: the connection is lost ({error})") from None
            now_s = time.monotonic()
            heard_s = now_s if sent else heard_s
            self.sent_bytes += sent
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]
            if first < len(views) and (now_s >= deadline_s or now_s - heard_s >= self.silence_s):
                raise DeadlineExceeded(f"{self._peer}: does not accept what is sent to it")

    def _send_some(self, views: list[memoryview], first: int) -> int:
        if self._tls:
            return self._sock.send(views[first][:TLS_PIECE])
        return self._sock.sendmsg(views[first : first + BUFFERS_MAX])

    def send_frame(self, kind: FrameKind, request: int, buffers: Sequence[Buffer], deadline_s: float) -> None:
        """Send a frame with these buffers as its body. Raises as ``send``."""
        size = sum(memoryview(each).nbytes for each in buffers)
        self.send([pack_head(kind, request, size), *buffers], deadline_s)

    def close(self) -> None:
        """End the connection and return the socket, which must not be in use."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()


class Caller(Protocol):
    """The caller at the other end of a connection, as the server knows it."""

    @property
    def name(self) -> str:
        """The caller's name in logs and shares."""
        ...

    @property
    def operator(self) -> bool:
        """Whether the caller has the rights of nodes and operators."""
        ...

    def check_salt(self, salt: str) -> None:
        """Raise PermissionDenied if pages under ``salt`` are not the caller's."""
        ...


Admit = Callable[[Hello, Sequence[str]], Caller]
"""Returns the caller that sends this hello, with a certificate of these names (none without TLS). Called again before
each request, since a caller may expire, or may be removed.

Raises Unauthenticated for an unknown caller, InvalidRequest for one that wants another server."""


class Exchange(Protocol):
    """One request as its handler sees it. Used by one thread, until the handler returns."""

    @property
    def caller(self) -> Caller:
        """The caller that sent the request."""
        ...

    @property
    def connections(self) -> int:
        """How many connections the server has open."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes that this connection has sent so far. Any thread may read it."""
        ...

    def abort(self) -> None:
        """End the connection now. Any thread may call this; sends in progress fail."""
        ...

    def reply(self, kind: FrameKind, *body: Buffer) -> None:
        """Send one frame of the reply. When this returns, the buffers may be reused.

        Raises:
            Unavailable: the other end has gone or accepts nothing. The handler must end, and so does the connection.
        """
        ...


Handler = Callable[[Exchange, memoryview], None]
"""Answers a request with this body. Replies at least once, or raises: a KVStoreError is sent to the caller, and the
connection continues. Several threads call it at the same time, one per connection. The body is reused when the handler
returns."""


def read_token(path: str) -> str:
    """Return the token in that file. Raises OSError."""
    return Path(path).read_text(encoding="latin-1").strip()


@dataclass(frozen=True)
class DialCredentials:
    """A client's identity, and the authorities that it trusts. Never part of a message or a repr.

    Attributes:
        token: the token, or "" for none. If there is a token file, its contents at the start.
        token_file: path of a file with the token, or "". It is read for every connection, so that the token can be
            replaced at run time.
        ca, cert, key: paths of PEM files; TLS is used if one of them, or ``server_name``, is given.
        server_name: the name in the server's certificate, if it differs from the address's host.
        private_networks: networks, in CIDR notation, to which connections may be plain although there are credentials.
    """

    token: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    token_file: str = ""
    private_networks: tuple[str, ...] = ()

    @property
    def token_now(self) -> str:
        """The token that its file has now, or ``token`` if the file cannot be read."""
        if not self.token_file:
            return self.token
        try:
            return read_token(self.token_file)
        except OSError:
            return self.token

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.ca or self.cert or self.key or self.server_name)

    def __repr__(self) -> str:
        return f"DialCredentials(tls={self.tls})"


UNIX: Final = "unix:"
PRIVATE_NETWORKS: Final = "KVSTORE_DATA_PRIVATE_NETWORKS"
SILENCE_S: Final = 0.5  # a peer that has to send bytes and sends none for this time counts as dead


class DataConnection:
    """One connection to one node. One thread at a time.

    Life: ``open`` -> requests are sent, replies received in the same order -> ``close``. After an error, except for one
    in an ERROR frame (``broken`` is then False), it must not be used: the awaited bytes may still arrive.

    Attributes:
        welcome: the server's description of itself.
        broken: whether the connection must no longer be used.
        fresh: whether the connection was just opened, rather than kept open since an earlier request.
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
        plain_from: Sequence[str] = (),
        deadline_s: float,
        silence_s: float = SILENCE_S,
    ) -> DataConnection:
        """Connect to HOST:PORT or unix:PATH, and identify this client.

        Args:
            tls: whether the server's connections are encrypted; None to decide by the credentials.
            plain_from: networks from which the server accepts plain connections, too. They are used if the server is in
                a private network of the credentials.
            deadline_s: a time of ``time.monotonic()``.

        Raises:
            NodeUnavailable, DeadlineExceeded: no server answers at this address.
            InvalidRequest: the address or a certificate is invalid; another server answers; or a token would be sent
                unencrypted.
            Unauthenticated, VersionMismatch, TooManyCalls: the server refuses us.
        """
        within_s = max(0.001, min(deadline_s - time.monotonic(), silence_s))
        try:
            sock = _connect(address, credentials or DialCredentials(), tls, plain_from, bool(hello.token), within_s)
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
        """How long the server may send or accept no byte while we wait for it."""
        return self._stream.silence_s

    @silence_s.setter
    def silence_s(self, silence_s: float) -> None:
        self._stream.silence_s = silence_s

    @property
    def rate_min(self) -> int:
        """Minimum bytes per second from the server while we wait for them, until the next request; 0 for none."""
        return self._stream.rate_min

    @rate_min.setter
    def rate_min(self, rate_min: int) -> None:
        self._stream.rate_min = rate_min

    def send(self, kind: FrameKind, *body: Buffer, deadline_s: float) -> int:
        """Send a request without waiting for its reply; return its number. Raises as ``Stream.send``."""
        number = next(self._numbers) & 0xFFFFFFFF
        self._stream.rate_min, self._stream.delay_s = 0, 0.0
        try:
            self._stream.send_frame(kind, number, body, deadline_s)
        except KVStoreError:
            self.broken = True
            raise
        return number

    def receive_head(self, request: int, *kinds: FrameKind, deadline_s: float) -> Head:
        """Return the head of the next frame of the reply to that request.

        Raises:
            KVStoreError: the error that the server answered, from ``wire.unpack_error``; the connection continues.
            NodeUnavailable, DeadlineExceeded, WireError, VersionMismatch: the connection is broken.
        """
        try:
            head = self._stream.receive_head(deadline_s)
            if head.kind is FrameKind.ERROR and head.request not in (request, 0):
                reason = unpack_error(self._stream.receive(head.body_bytes, deadline_s))  # we were idle for too long
                raise NodeUnavailable(f"{self._stream.peer}: ended the connection ({reason})")
            if head.kind not in (*kinds, FrameKind.ERROR) or head.request not in (request, 0):
                raise WireError(f"{self._stream.peer}: sent {head.kind.name} of request {head.request}")
        except KVStoreError:
            self.broken = True
            raise
        if head.kind is not FrameKind.ERROR:
            return head
        error = unpack_error(self.receive(head.body_bytes, deadline_s=deadline_s))
        self.broken = self.broken or isinstance(error, WireError) or head.request != request
        raise error

    def receive(self, size: int, *, deadline_s: float) -> bytearray:
        """Return the next bytes of a frame whose head was received. Raises as ``Stream.receive``."""
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

    def fileno(self) -> int:
        """Return the descriptor of its socket."""
        return self._stream.fileno()

    @property
    def has_bytes(self) -> bool:
        """Whether bytes have been received that its socket does not announce any more (TLS)."""
        return self._stream.has_bytes

    def call(self, kind: FrameKind, *body: Buffer, reply: FrameKind, deadline_s: float) -> bytearray:
        """Send a request, wait for its reply of one frame, and return that frame's body. Raises as ``receive_head``."""
        number = self.send(kind, *body, deadline_s=deadline_s)
        head = self.receive_head(number, reply, deadline_s=deadline_s)
        return self.receive(head.body_bytes, deadline_s=deadline_s)

    def close(self) -> None:
        """Close the connection."""
        self.broken = True
        self._stream.close()


def wait_for_any(connections: Sequence[DataConnection], seconds: float) -> DataConnection | None:
    """Wait until one of these connections has bytes of a reply, or has ended. Return it; None if none has in time."""
    for each in connections:
        if each.has_bytes:
            return each
    poll = select.poll()
    for each in connections:
        poll.register(each, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(max(0.0, 1000 * seconds))}
    return next((each for each in connections if each.fileno() in ready), None)


def _connect(
    address: str, ours: DialCredentials, tls: bool | None, plain_from: Sequence[str], token: bool, within_s: float
) -> socket.socket:
    if address.startswith(UNIX):  # the socket's permissions decide who may connect
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
    is_private = is_in(host, ours.private_networks)
    context = _context(ours) if (ours.tls if tls is None else tls) else None
    if context is None and not is_loopback(host) and not is_private:
        if token:
            raise InvalidRequest(
                "token", f"would be sent unencrypted to {host}: give the authorities of its certificate"
            )
        if ours.tls:  # a writer of the catalog cannot switch TLS off
            raise InvalidRequest("tls", f"must be used by {host}: its pages would be sent unencrypted")
    sock = socket.create_connection((host, port), within_s)
    if context is None or (is_private and is_in(sock.getsockname()[0], plain_from)):
        return sock
    return context.wrap_socket(sock, server_hostname=ours.server_name or host)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidRequest("address", f"must be HOST:PORT (got {address!r})")
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
    """Return whether traffic to a host name or IP address stays on this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_in(host: str, networks: Sequence[str]) -> bool:
    """Return whether ``host`` is an IP address in one of these networks, which are in CIDR notation."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in ipaddress.ip_network(each) for each in networks)


def credentials_of(env: Mapping[str, str]) -> DialCredentials:
    """``KVSTORE_TOKEN`` or ``KVSTORE_TOKEN_FILE``, ``KVSTORE_TLS_CA``, ``KVSTORE_TLS_CERT`` and ``KVSTORE_TLS_KEY``, as
    for ``kv://`` addresses, and ``KVSTORE_DATA_PRIVATE_NETWORKS``, which a daemon reads as its setting. The catalog's
    entry of a data server says whether its connections are encrypted.

    Raises:
        InvalidRequest: the token's file cannot be read, or a network is not valid. The error names the variable.
    """
    token, file = env.get("KVSTORE_TOKEN", ""), env.get("KVSTORE_TOKEN_FILE", "")
    file = file if not token else ""
    if file:
        try:
            token = read_token(file)
        except OSError as error:
            raise InvalidRequest("KVSTORE_TOKEN_FILE", f"cannot be read: {error.strerror}") from None
    paths = {name: env.get(f"KVSTORE_TLS_{name.upper()}", "") for name in ("ca", "cert", "key")}
    networks = networks_of(parse_networks(env.get(PRIVATE_NETWORKS, ""), PRIVATE_NETWORKS))
    return DialCredentials(token=token, token_file=file, private_networks=networks, **paths)
