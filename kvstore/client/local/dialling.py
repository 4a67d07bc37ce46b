"""Dialling: a socket connected to the daemon of a node's folder, and what the daemon means where it refuses."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import NoReturn

from kvstore.errors import InvalidRequest, Unavailable, VersionMismatch
from kvstore.model.replica import Status
from kvstore.rpc.control import Message

_POLL = struct.pack("ll", 0, 50_000)  # a blocked send or receive looks at its deadline every 50 ms
_SUN_PATH_MAX = 100  # a unix socket's path has 108 bytes


def dial(sock: socket.socket, folder: Path) -> None:
    """Connect it. Raises OSError where nobody listens."""
    path = str(folder / "control")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _POLL)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _POLL)
    if len(path.encode()) <= _SUN_PATH_MAX:
        sock.connect(path)
        return
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{fd}/control")
    finally:
        os.close(fd)


def refuse(message: Message) -> NoReturn:
    """Raise what a refusal stands for."""
    text = bytes(message.body).decode(errors="replace")
    if message.op == Status.FAILED:
        raise Unavailable(text)
    field, _, reason = text.partition("\0")
    if field == "protocol":
        raise VersionMismatch(reason)
    raise InvalidRequest(field, reason)
