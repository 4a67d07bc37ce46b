"""Stream: a connected socket, plain or TLS, on which nothing waits without a deadline."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from typing import Final

from kvstore.errors import DeadlineExceeded, NodeUnavailable
from kvstore.transfer.wire import HEAD, FrameKind, Head, WireError, pack_head, unpack_head

LOOK_S: Final = 0.05  # how often a blocked send or receive looks at its deadline
STALL_S: Final = 2 * LOOK_S  # what takes longer between two looks is a stall of our own
TLS_PIECE: Final = 256 << 10  # is encrypted in one go
BUFFERS_MAX: Final = 512  # of one call; the kernel takes 1024

Buffer = bytes | bytearray | memoryview


class Stream:
    """One connection. One thread sends and one receives at a time.

    Life: made of a connected socket -> used -> ``close``, once, by its owner. After an error it is of no use.

    Args:
        silence_s: how long the other end may bring, or take, not a single byte while we wait for it. May be changed.
            With a ``rate_min``: how far it may be behind that rate.
        who: the other end, for messages.

    Attributes:
        sent_bytes: what the kernel has taken so far.
        rate_min: bytes per second that have to come while we wait for them; 0: any. May be changed.
        behind_s: how much longer we have waited for what came than it takes at that rate.
    """

    def __init__(self, sock: socket.socket, silence_s: float, who: str) -> None:
        self._sock = sock
        self.silence_s = silence_s
        self.sent_bytes = 0
        self.rate_min = 0
        self.behind_s = 0.0
        self._who = who
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
    def who(self) -> str:
        """The other end."""
        return self._who

    def receive_into(self, view: memoryview, deadline_s: float, silence_s: float | None = None) -> None:
        """Fill ``view`` with what comes next.

        Raises:
            NodeUnavailable: the other end has gone.
            DeadlineExceeded: it did not send all of it in time, or nothing at all for a while, or too slowly.
        """
        silence_s = self.silence_s if silence_s is None else silence_s
        have, wanted, flags = 0, len(view), 0 if self._tls else socket.MSG_WAITALL
        looked_s = time.monotonic()
        self.behind_s = self.behind_s if self.rate_min else 0.0
        while have < wanted:
            try:
                more = self._sock.recv_into(view[have:], wanted - have, flags)
            except (BlockingIOError, TimeoutError, ssl.SSLWantReadError):
                more = -1
            except (OSError, ValueError) as error:  # ValueError: TLS after the other end was shut
                raise NodeUnavailable(f"{self._who}: the connection is lost ({error})") from None
            if more == 0:
                raise NodeUnavailable(f"{self._who}: closed the connection")
            now_s = time.monotonic()
            self.behind_s += min(now_s - looked_s, STALL_S)
            looked_s = now_s
            if more > 0:
                have += more
                self.behind_s = max(0.0, self.behind_s - more / self.rate_min) if self.rate_min else 0.0
            late = self.behind_s >= silence_s
            if (have < wanted and (now_s >= deadline_s or late)) or (self.rate_min and late):
                raise DeadlineExceeded(f"{self._who}: sent {have} of {wanted} bytes in time")

    def receive(self, size: int, deadline_s: float, silence_s: float | None = None) -> bytearray:
        """The next ``size`` bytes. Raises as ``receive_into``."""
        data = bytearray(size)
        self.receive_into(memoryview(data), deadline_s, silence_s)
        return data

    def receive_head(self, deadline_s: float, silence_s: float | None = None) -> Head:
        """The head of the next frame. Raises as ``receive_into``, and what ``unpack_head`` does."""
        return unpack_head(self.receive(HEAD.size, deadline_s, silence_s))

    def receive_frame(self, kind: FrameKind, body_bytes_max: int, deadline_s: float) -> tuple[Head, bytearray]:
        """The next frame, which has to be of that kind. Raises as ``receive_head``, WireError where it is another."""
        head = self.receive_head(deadline_s)
        if head.kind is not kind or head.body_bytes > body_bytes_max:
            raise WireError(f"{self._who}: sent {head.kind.name} of {head.body_bytes} bytes, not {kind.name}")
        return head, self.receive(head.body_bytes, deadline_s)

    def send(self, buffers: Sequence[Buffer], deadline_s: float) -> None:
        """Send all of these, end to end.

        Raises:
            NodeUnavailable: the other end has gone.
            DeadlineExceeded: it did not take all of it in time, or nothing at all for a while; some may be on its way.
        """
        views = [view.cast("B") for each in buffers if (view := memoryview(each)).nbytes]
        first, heard_s = 0, time.monotonic()
        while first < len(views):
            try:
                sent = self._send_some(views, first)
            except (BlockingIOError, TimeoutError, ssl.SSLWantWriteError):
                sent = 0
            except (OSError, ValueError) as error:
                raise NodeUnavailable(f"{self._who}: the connection is lost ({error})") from None
            now_s = time.monotonic()
            heard_s = now_s if sent else heard_s
            self.sent_bytes += sent
            while first < len(views) and sent >= len(views[first]):
                sent -= len(views[first])
                first += 1
            if sent:
                views[first] = views[first][sent:]
            if first < len(views) and (now_s >= deadline_s or now_s - heard_s >= self.silence_s):
                raise DeadlineExceeded(f"{self._who}: does not take what is sent to it")

    def _send_some(self, views: list[memoryview], first: int) -> int:
        if self._tls:
            return self._sock.send(views[first][:TLS_PIECE])
        return self._sock.sendmsg(views[first : first + BUFFERS_MAX])

    def send_frame(self, kind: FrameKind, request: int, buffers: Sequence[Buffer], deadline_s: float) -> None:
        """Send a frame whose body these are. Raises as ``send``."""
        size = sum(memoryview(each).nbytes for each in buffers)
        self.send([pack_head(kind, request, size), *buffers], deadline_s)

    def close(self) -> None:
        """End the connection and give the socket back. Nobody may be using it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()
