"""Pulling: the KV of a prefill over a data connection, from the engine's frames into those of the engine that asked for
it.

PULL names the prefill, which has to be the caller's. PIECE frames follow as layers are computed, each a head and its
bytes; one of no tokens says that the engine is still at it. END is the end. A connection is admitted as a gRPC call is.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from engine.config import EngineConfig
from engine.model.piece import Bytes, LocalData, Piece
from kvstore.client.remote.endpoint import Endpoint, GivenCredentials
from kvstore.cluster.data_connection import Buffer, DataConnection, DialCredentials, Exchange
from kvstore.cluster.data_listener import Server, ServerLimits
from kvstore.errors import InvalidRequest
from kvstore.limits import PULLS_PART
from kvstore.server.certificates import ServerCertificate
from kvstore.server.identities import Identity
from kvstore.server.listening import UNIX
from kvstore.wire.data import FrameKind, Hello, WireError

PULLS_MAX: Final = 384  # at a time, for one server; each has a thread, which waits for layers
IDLE_S: Final = 10.0  # a client asks right after it connects
SILENCE_S: Final = 5.0  # an engine that is silent for this long is suspended; it sends something every second
BESIDE: Final = ".data"  # suffix of the unix socket of an engine's data, next to the one of its API
_HEAD: Final = struct.Struct("<IIQQQ")  # layer, tokens, token_start, bytes, checksum


class PulledEngine(Protocol):
    """The engine that is pulled from. See ``engine.shell.engine``."""

    def pull(
        self, request_id: str, token_start: int, codec: str, timeout_s: float, beat: Callable[[], None]
    ) -> Generator[Piece, None, None]:
        """The KV of a prefill; blocks."""


# --- the engine that computed ----------------------------------------------------------------------------------------


class PullServer:
    """Serves data connections of an engine, from ``start`` to ``stop``: one server per listening address.

    Args:
        find: finds the caller with this token, or with a certificate of these names.
        name_of: the engine's name for the prefill that a caller has under an id; raises PermissionDenied where the
            caller has none.

    Attributes:
        port: the TCP port, the same on every host; before ``start`` the requested one.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: PulledEngine,
        find: Callable[[str | None, Sequence[str]], Identity],
        name_of: Callable[[str, Identity], str],
    ) -> None:
        self.port = config.data_port
        self._config = config
        self._engine = engine
        self._find = find
        self._name_of = name_of
        self._servers: list[Server] = []
        self._ways = 1  # servers that share the descriptors

    def start(self, addresses: Sequence[str]) -> None:
        """Listen next to these addresses of the gRPC API. Raises InvalidRequest if that is not possible."""
        hosts = list(dict.fromkeys(each.rpartition(":")[0] for each in addresses if not each.startswith(UNIX)))
        paths = [each.removeprefix(UNIX) for each in addresses if each.startswith(UNIX)]
        self._ways = len(hosts) + len(paths)
        for path in paths:
            self._server(tls=False).start_unix(Path(path + BESIDE), self._config.file_mode)
        for host in hosts:
            server = self._server(tls=self._config.tls_cert is not None)
            where = server.start(host.removeprefix("[").removesuffix("]"), self.port)
            self.port = int(where.rpartition(":")[2])

    def stop(self) -> None:
        """End connections under way."""
        for server in self._servers:
            server.stop()

    def _server(self, tls: bool) -> Server:
        config = self._config
        certificate = ServerCertificate.of(config) if tls else None
        limits = ServerLimits(
            connections_max=PULLS_MAX,
            part=PULLS_PART / self._ways,
            reply_s=config.request_s_max,
            idle_s=IDLE_S,
        )
        context = certificate.for_sockets() if certificate is not None else None
        server = Server(config.name, {FrameKind.PULL: self._pull}, self._admit, limits, context)
        self._servers.append(server)
        return server

    def _admit(self, hello: Hello, names: Sequence[str]) -> Identity:
        return self._find(hello.token or None, names)

    def _pull(self, exchange: Exchange, body: memoryview) -> None:
        """See ``Handler``. Raises PermissionDenied, and what ``Prefills.pull`` does."""
        request_id, token_start, codec, timeout_s = _unpack_pull(body)
        timeout_s = min(timeout_s, self._config.request_s_max)
        caller = exchange.caller
        assert isinstance(caller, Identity), "``_admit`` knows no others"
        name = self._name_of(request_id, caller)

        def beat() -> None:
            exchange.reply(FrameKind.PIECE, _HEAD.pack(0, 0, 0, 0, 0))

        pieces = self._engine.pull(name, token_start, codec, timeout_s, beat)
        try:
            for piece in pieces:
                assert isinstance(piece.data, LocalData)
                rows = piece.data.rows
                buffers: list[Buffer] = [rows.data] if rows.flags.c_contiguous else [row.data for row in rows]
                numbers = piece.layer, piece.tokens, piece.token_start, rows.nbytes, piece.checksum
                exchange.reply(FrameKind.PIECE, _HEAD.pack(*numbers), *buffers)
        finally:
            pieces.close()
        exchange.reply(FrameKind.END)


# --- the engine that decodes ------------------------------------------------------------------------------------------


def pull(
    address: str,
    credentials: DialCredentials,
    request_id: str,
    token_start: int,
    codec: str,
    timeout_s: float,
) -> Generator[Piece, None, None]:
    """The pieces of a prefill, each to be read into its place before the next one. Over a connection of its own: when
    the generator is closed nothing of it can arrive any more.

    Raises:
        InvalidRequest: there is no such prefill, or the start or the codec is not valid.
        NodeUnavailable: the engine, or the prefill, has gone.
        DeadlineExceeded: not everything came in time.
    """
    deadline_s = time.monotonic() + timeout_s
    hello = Hello(caller=f"engine {os.getpid()}", token=credentials.token)
    connection = DataConnection.open(address, hello, credentials, deadline_s=deadline_s, silence_s=SILENCE_S)
    try:
        number = connection.send(
            FrameKind.PULL, _pack_pull(request_id, token_start, codec, timeout_s), deadline_s=deadline_s
        )
        yield from _pieces(connection, number, deadline_s)
    finally:
        connection.close()


def _pieces(connection: DataConnection, number: int, deadline_s: float) -> Iterator[Piece]:
    while True:
        head = connection.receive_head(number, FrameKind.PIECE, FrameKind.END, deadline_s=deadline_s)
        if head.kind is FrameKind.END:
            return
        raw = connection.receive(_HEAD.size, deadline_s=deadline_s)
        layer, tokens, token_start, size, checksum = _HEAD.unpack(raw)
        if head.body_bytes != _HEAD.size + size:
            raise WireError(f"a piece of {size} bytes in a frame of {head.body_bytes}")
        if tokens:
            data = _Arriving(connection, size, deadline_s)
            yield Piece(layer, token_start, tokens, data, checksum)
            data.check_read()


class _Arriving:
    """The bytes of a piece that have not arrived yet: see ``PieceData``."""

    def __init__(self, connection: DataConnection, nbytes: int, deadline_s: float) -> None:
        self.nbytes = nbytes
        self._connection = connection
        self._deadline_s = deadline_s
        self._read = False

    def read_into(self, rows: Sequence[Bytes]) -> None:
        """See ``PieceData``."""
        assert not self._read and sum(part.nbytes for part in rows) == self.nbytes
        self._read = True
        for part in rows:
            for row in (part,) if part.flags.c_contiguous else part:
                self._connection.receive_into(row.data.cast("B"), deadline_s=self._deadline_s)

    def check_read(self) -> None:
        """Check that this piece was read before the next one is requested."""
        assert self._read, "a piece was passed over"


def dial_credentials(given: GivenCredentials, found: Endpoint) -> DialCredentials:
    """How data connections show who we are, and are encrypted: as those of gRPC to this endpoint."""
    if not found.tls:
        return DialCredentials(found.token)
    ca, cert, key = (str(getattr(given, name) or os.environ.get(f"KVSTORE_{name.upper()}", "")) for name in _FILES)
    return DialCredentials(found.token, ca, cert, key, given.tls_server_name or "")


_FILES: Final = ("tls_ca", "tls_cert", "tls_key")


# --- the request ------------------------------------------------------------------------------------------------------


def _pack_pull(request_id: str, token_start: int, codec: str, timeout_s: float) -> bytes:
    said = {"request_id": request_id, "token_start": token_start, "codec": codec, "timeout_s": timeout_s}
    return json.dumps(said).encode()


def _unpack_pull(body: memoryview) -> tuple[str, int, str, float]:
    """Unpack a PULL. Raises InvalidRequest if it is not valid."""
    try:
        said: Any = json.loads(bytes(body))
        found = said["request_id"], said["token_start"], said["codec"], said["timeout_s"]
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None, 0, "", 0.0
    if not all(
        type(value) in kinds for value, kinds in zip(found, ((str,), (int,), (str,), (int, float)), strict=True)
    ):
        raise InvalidRequest("pull", "must name a prefill, start, codec and time-out")
    if not found[3] > 0:  # also refuses NaN
        raise InvalidRequest("timeout_s", f"must be more than zero (got {found[3]})")
    return found
