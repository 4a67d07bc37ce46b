"""A client of HTTP/2 that is nothing but frames: it costs little per call, and it need not keep the rules.

gRPC's own clients cost as much per call as a server does, so they cannot bring more than it takes; and they cannot
leave a request half sent. This one knows of HTTP/2 what a gRPC call needs. Header fields are literals without Huffman
codes, both ways: the table of the other side is set to nothing.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME_BYTES_MAX: Final = 16384
WINDOW_MAX: Final = (1 << 31) - 1
WINDOW: Final = 65535  # what every window begins with
STREAMS_MAX: Final = WINDOW_MAX  # where the other side has not said
STATUS: Final = b"grpc-status"
READ_BYTES: Final = 1 << 18
_FRAME_HEAD: Final = struct.Struct(">HBBBL")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return _FRAME_HEAD.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def header_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Header fields as literals that no table keeps."""
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, size = len(data) - 127, bytearray([127])
    while rest > 127:
        size.append(rest & 127 | 128)
        rest >>= 7
    return bytes(size) + bytes([rest]) + data


def call_headers(method: str, timeout_s: float | None = None, token: str = "") -> bytes:
    """The header block of a gRPC call. ``method``: /package.Service/Name."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    if timeout_s is not None:
        fields.append(("grpc-timeout", f"{max(1, int(timeout_s * 1000))}m"))
    if token:
        fields.append(("authorization", f"Bearer {token}"))
    return header_block(fields)


def message_of(data: bytes) -> bytes:
    """A gRPC message, not compressed, before it is cut into frames."""
    return struct.pack(">BL", 0, len(data)) + data


def trailer(block: bytes, name: bytes = STATUS) -> str | None:
    """The value of a field in a header block of the other side; None where it is not there."""
    at = block.find(name)
    if at < 0:
        return None
    size = block[at + len(name)]
    return block[at + len(name) + 1 : at + len(name) + 1 + size].decode()


class Connection:
    """One connection. Life: made (connected, preface sent) -> ``open``, ``send``, ``poll``, any number of times ->
    ``close``. ``poll`` and ``flush`` do not wait; nothing is sent beyond what the other side's windows allow.
    """

    def __init__(self, host: str, port: int, preface: bool = True) -> None:
        self.socket = socket.create_connection((host, port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.closed = False
        self.received_bytes = 0  # of messages
        self.streams_max = STREAMS_MAX  # that the other side allows; nothing here keeps to it
        self._next = 1
        self._out = bytearray()
        self._in = bytearray()
        self._window = WINDOW  # of the connection, for what we send
        self._stream_window = WINDOW
        self._windows: dict[int, int] = {}
        self._waiting: deque[tuple[int, memoryview, bool]] = deque()  # (stream, data not sent, whether it ends then)
        if preface:
            settings = struct.pack(">HLHL", 1, 0, 4, WINDOW_MAX)  # no header table; all streams may send as they like
            self._out += PREFACE + frame(SETTINGS, 0, 0, settings)
            self._out += frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", WINDOW_MAX - WINDOW))

    def fileno(self) -> int:
        """Of its socket."""
        return self.socket.fileno()

    @property
    def to_write(self) -> bool:
        """Whether the socket has not taken everything."""
        return bool(self._out)

    def open(self, headers: bytes) -> int:
        """Begin a call; its stream's number. Nothing but its headers is there then."""
        stream, self._next = self._next, self._next + 2
        self._windows[stream] = self._stream_window
        self._out += frame(HEADERS, END_HEADERS, stream, headers)
        return stream

    def send(self, stream: int, data: bytes, end: bool = True) -> None:
        """Send of a message what there is; ``end``: nothing more comes."""
        self._waiting.append((stream, memoryview(data), end))
        self._push()

    def _push(self) -> None:
        for _ in range(len(self._waiting)):
            stream, data, end = self._waiting.popleft()
            while stream in self._windows:
                size = min(len(data), FRAME_BYTES_MAX, self._window, self._windows[stream])
                if not size and len(data):
                    self._waiting.append((stream, data, end))
                    break
                last = size == len(data)
                self._out += frame(DATA, END_STREAM if last and end else 0, stream, bytes(data[:size]))
                self._window -= size
                self._windows[stream] -= size
                data = data[size:]
                if last:
                    break

    def flush(self) -> None:
        """Give the socket what it takes now."""
        with contextlib.suppress(BlockingIOError):
            try:
                while self._out:
                    del self._out[: self.socket.send(self._out)]
            except ConnectionError:
                self.closed = True
                self._out.clear()

    def poll(self) -> Iterator[tuple[int, str, bytes]]:
        """Calls that ended: stream, its grpc-status ("" where it was reset), and the block of its trailers."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return
        self._in += data
        at = 0
        while len(self._in) - at >= 9:
            high, low, kind, flags, stream = _FRAME_HEAD.unpack_from(self._in, at)
            size = high << 8 | low
            if len(self._in) - at < 9 + size:
                break
            if kind == DATA:
                self.received_bytes += size
                ended = flags & END_STREAM
                payload = b""
            else:
                payload = bytes(self._in[at + 9 : at + 9 + size])
                ended = self._take(kind, flags, stream, payload)
            at += 9 + size
            if ended and self._windows.pop(stream, None) is not None:
                yield stream, trailer(payload) or "", payload
        del self._in[:at]
        self._push()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> bool:
        """One frame of the other side; whether it ends its stream."""
        if kind == HEADERS:
            return bool(flags & END_STREAM)
        if kind == RST_STREAM:
            return True
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack_from(">HL", payload, at)
                if name == 3:
                    self.streams_max = value
                elif name == 4:
                    for open_stream in self._windows:
                        self._windows[open_stream] += value - self._stream_window
                    self._stream_window = value
            self._out += frame(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self._out += frame(PING, ACK, 0, payload)
        elif kind == GOAWAY:
            self.closed = True
        elif kind == WINDOW_UPDATE:
            more = struct.unpack(">L", payload)[0]
            if not stream:
                self._window += more
            elif stream in self._windows:
                self._windows[stream] += more
        return False

    def close(self) -> None:
        """Leave without a word."""
        self.socket.close()
