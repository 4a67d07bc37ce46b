"""Calls of which a gRPC server sees the headers and no more: gRPC's own clients keep the rules that these break."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING = 1, 3, 4, 6
END_STREAM, END_HEADERS, ACK = 1, 4, 1
HEADER_TABLE, STREAMS_MAX = 1, 3  # settings
STATUS: Final = b"grpc-status"
HEAD: Final = struct.Struct(">HBBBL")


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2."""
    return HEAD.pack(len(payload) >> 8, len(payload) & 255, kind, flags, stream) + payload


def call_headers(method: str, timeout_s: float | None = None, token: str = "") -> bytes:
    """The header block of a gRPC call, as literals that no table keeps. ``method``: /package.Service/Name."""
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost", "te": "trailers"}
    fields["content-type"] = "application/grpc"
    if timeout_s is not None:
        fields["grpc-timeout"] = f"{int(timeout_s * 1000)}m"
    if token:
        fields["authorization"] = f"Bearer {token}"
    texts = [(name.encode(), value.encode()) for name, value in fields.items()]
    assert all(len(text) < 127 for pair in texts for text in pair), "one byte says how long it is"
    return b"".join(b"\0" + b"".join(bytes([len(text)]) + text for text in pair) for pair in texts)


def status_of(block: bytes) -> str:
    """The grpc-status of a header block; "" where it has none, as where a call was reset."""
    at = block.find(STATUS) + len(STATUS)
    return block[at + 1 : at + 1 + block[at]].decode() if at >= len(STATUS) else ""


class HalfOpenCalls:
    """Life: made (connected) -> ``open``, ``flush``, ``poll``, any number of times -> ``close``. Nothing waits."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=10)
        self._socket.setblocking(False)
        self.streams_max = 0  # that the server allows, once it has said so; nothing here keeps to it
        self._open: set[int] = set()
        self._next = 1
        self._out = bytearray(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HL", HEADER_TABLE, 0)))
        self._in = bytearray()

    def open(self, headers: bytes) -> None:
        """Begin a call: its headers, and nothing more ever."""
        self._out += frame(HEADERS, END_HEADERS, self._next, headers)
        self._open.add(self._next)
        self._next += 2

    def flush(self) -> None:
        """Give the socket what it takes now."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._out:
                del self._out[: self._socket.send(self._out)]

    def poll(self) -> Iterator[str]:
        """The grpc-status of each call that has ended; "" of one that was reset."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self._in += self._socket.recv(1 << 18)
        while len(self._in) >= HEAD.size:
            high, low, kind, flags, stream = HEAD.unpack_from(self._in)
            end = HEAD.size + (high << 8 | low)
            if len(self._in) < end:
                break
            payload = bytes(self._in[HEAD.size : end])
            del self._in[:end]
            if kind == SETTINGS and not flags & ACK:
                settings = dict(struct.iter_unpack(">HL", payload))
                self.streams_max = settings.get(STREAMS_MAX, self.streams_max)
                self._out += frame(SETTINGS, ACK, 0)
            elif kind == PING and not flags & ACK:
                self._out += frame(PING, ACK, 0, payload)
            elif stream in self._open and (kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM)):
                self._open.remove(stream)
                yield status_of(payload) if kind == HEADERS else ""

    def close(self) -> None:
        """Leave without a word."""
        self._socket.close()
