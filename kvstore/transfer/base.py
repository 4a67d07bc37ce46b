"""What the two ends of a data connection agree on beside the wire: who calls, and what answers a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvstore.transfer.stream import Buffer
from kvstore.transfer.wire import FrameKind, Hello


class Caller(Protocol):
    """The caller at the other end of a connection, as the server knows it."""

    @property
    def name(self) -> str:
        """For logs and shares."""
        ...

    @property
    def operator(self) -> bool:
        """Whether the caller may do what nodes and operators may."""
        ...

    def check_salt(self, salt: str) -> None:
        """Raises PermissionDenied where pages under ``salt`` are not the caller's."""
        ...


Admit = Callable[[Hello, Sequence[str]], Caller]
"""The caller that sends this hello, with a certificate of these names (none without TLS). Called again before each
request: a caller may expire, or be known no longer.

Raises Unauthenticated for an unknown caller, InvalidRequest for one that takes us for another server."""


class Exchange(Protocol):
    """One request as its handler sees it. Used by one thread; of no use once the handler has returned."""

    @property
    def caller(self) -> Caller:
        """The caller that sent the request."""
        ...

    @property
    def connections(self) -> int:
        """How many the server has open."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes that this connection has sent so far. Any thread may ask."""
        ...

    def abort(self) -> None:
        """End the connection now, from any thread: what sends over it fails."""
        ...

    def reply(self, kind: FrameKind, *body: Buffer) -> None:
        """Send one frame of the reply; it has left our memory, or is copied by the kernel, when this returns.

        Raises:
            Unavailable: the other end has gone or takes nothing: the handler ends, and so does the connection.
        """
        ...


Handler = Callable[[Exchange, memoryview], None]
"""Answers a request with this body. Replies at least once, or raises: a KVStoreError is sent to the caller, and the
connection goes on. Several threads call it at a time, one per connection. The body is reused when it returns."""


def read_token(path: str) -> str:
    """The token in that file. Raises OSError."""
    return Path(path).read_text(encoding="latin-1").strip()


@dataclass(frozen=True)
class DialCredentials:
    """How a client shows who it is, and what it trusts. Never part of a message or a repr.

    Attributes:
        token: "" for none; where it is in a file, what that held at first.
        token_file: "" for none. It is read for every connection: a token may be replaced while we run.
        ca, cert, key: paths of PEM files; TLS is used where one of them, or ``server_name``, is given.
        server_name: what the server's certificate names, where that is not the address's host.
    """

    token: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    token_file: str = ""

    @property
    def token_now(self) -> str:
        """The token, as its file has it now; while that cannot be read, as it was at first."""
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
