"""GrpcConnections: counts and limits the connections of a gRPC server, which gRPC accepts without telling its user.

Several times a second it lists the descriptors in ``/proc/self/fd``, and counts their connections with
``limits.Connections``, as other servers do. The gate reports which connections have made a call of a known caller. If
there are too many, the oldest of all other connections is shut down, and gRPC closes it as if its other end had gone.
So a stranger that keeps connections open, with or without HTTP/2 on them, shuts no caller out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import Collection
from functools import partial
from typing import Final
from urllib.parse import unquote

from kvstore.errors import TooManyCalls
from kvstore.limits import UNKNOWN_PART, Connections, Guest, Owner

LOOK_S: Final = 0.25
COUNTED_PART: Final = 0.75  # of the connections that gRPC accepts; the rest is for those between two looks
CALLERS_MAX: Final = 4096  # connections with a known caller that no look has seen yet
_FDS: Final = "/proc/self/fd"

Peer = tuple[str, int]


class GrpcConnections:
    """The connections of one server and its event loop. Unix sockets are guarded by permissions, and not counted.

    Args:
        addresses: HOST:PORT that the server listens at; other connections are ignored.
        most: the number of connections that gRPC accepts.
    """

    def __init__(self, addresses: Collection[str], most: int) -> None:
        self._ports = {int(each.rpartition(":")[2]) for each in addresses if not each.startswith("unix:")}
        self._connections = Connections(max(UNKNOWN_PART, int(COUNTED_PART * most)))
        self._links: dict[str, tuple[Peer, Guest] | None] = {}  # by the descriptor's link; None for other sockets
        self._guests: dict[Peer, Guest] = {}
        self._callers: dict[Peer, Owner] = {}  # callers on connections that no look has seen yet

    def note_call(self, peer: str, caller: Owner) -> None:
        """Note that a call of ``caller`` arrived over the connection from ``peer``, in gRPC's notation."""
        key = _peer(peer)
        guest = self._guests.get(key) if key is not None else None
        if guest is not None:
            self._identify(guest, caller)
        elif key is not None and self._ports and len(self._callers) < CALLERS_MAX:
            self._callers[key] = caller

    async def turn(self) -> None:
        """Pause, then look."""
        await asyncio.sleep(LOOK_S)
        self.look()

    def look(self) -> None:
        """Count new connections, and forget closed ones."""
        links = {link: fd for fd in os.listdir(_FDS) if (link := _link(fd)).startswith("socket:")}
        for link in [each for each in self._links if each not in links]:
            entry = self._links.pop(link)
            if entry is not None:
                self._connections.remove(entry[1])
                self._guests.pop(entry[0], None)
        for link, fd in links.items():
            if link not in self._links:
                self._take(link, int(fd))
        self._callers.clear()

    def _take(self, link: str, fd: int) -> None:
        try:
            with socket.socket(fileno=os.dup(fd)) as sock:
                peer = self._peer_of(sock)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                return  # the next look will see it
            peer = None  # the connection is closed, or this is a listener
        self._links[link] = None
        if peer is None:
            return
        guest = self._connections.accept(peer[0], partial(_shut, link, fd))
        if guest is None:
            _shut(link, fd)
            return
        self._links[link] = peer, guest
        self._guests[peer] = guest
        if peer in self._callers:
            self._identify(guest, self._callers[peer])

    def _peer_of(self, sock: socket.socket) -> Peer | None:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] not in self._ports:
            return None
        host, port = sock.getpeername()[:2]
        return _plain(host), port

    def _identify(self, guest: Guest, caller: Owner) -> None:
        with contextlib.suppress(TooManyCalls):  # beyond its caller's share a connection counts as a stranger's
            self._connections.identify(guest, caller)


def _link(fd: str) -> str:
    try:
        return os.readlink(f"{_FDS}/{fd}")
    except OSError:  # closed in the meantime
        return ""


def _shut(link: str, fd: int) -> None:
    """Shut the connection down if the descriptor still belongs to it."""
    with contextlib.suppress(OSError):
        ours = os.dup(fd)
        if _link(str(ours)) == link:
            with socket.socket(fileno=ours) as sock:
                sock.shutdown(socket.SHUT_RDWR)
        else:
            os.close(ours)


def _peer(peer: str) -> Peer | None:
    """Return ``ipv4:10.0.0.1:5555`` or ``ipv6:%5B::1%5D:5555``; None for unix sockets."""
    kind, _, address = peer.partition(":")
    host, _, port = unquote(address).rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if kind in ("ipv4", "ipv6") and port.isdigit() else None


def _plain(host: str) -> str:
    """Return the address as IPv4 if it is an IPv4 address or maps to one."""
    if ":" not in host:
        return host
    number = ipaddress.IPv6Address(host.partition("%")[0])
    return str(number.ipv4_mapped or number)
