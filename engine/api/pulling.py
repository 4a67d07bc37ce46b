"""Pulling: sends the KV of a prefill over a data connection, from the frames of one engine to those of another.

The caller sends PULL with the id of a prefill that it has requested. The engine replies with a PIECE for each layer of
each chunk once it is computed: a head, then the bytes. A PIECE without tokens is a sign of life while the next layer is
computed. END is the last reply. Connections are admitted by the same rules as gRPC calls.
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
from kvstore.client.remote.endpoint import CallerCredentials, Endpoint
from kvstore.cluster.data_connection import Buffer, DataConnection, DialCredentials, Exchange
from kvstore.cluster.data_listener import Server, ServerLimits
from kvstore.errors import InvalidRequest
from kvstore.limits import PULLS_PART
from kvstore.server.certificates import ServerCertificate
from kvstore.server.identities import Identity
from kvstore.server.listening import UNIX
from kvstore.wire.data import FrameKind, Hello, WireError

PULLS_MAX: Final = 384  # concurrent pulls of one server, each with a thread that waits for layers
IDLE_S: Final = 10.0  # how long a connection may be idle; a client sends PULL right after it connects
SILENCE_S: Final = 5.0  # an engine that sends nothing for this long is suspended: it sends a PIECE every second
DATA_SUFFIX: Final = ".data"  # the unix socket for data is the API's path with this suffix
_HEAD: Final = struct.Struct("<IIQQQ")  # layer, tokens, token_start, bytes, checksum


class PulledEngine(Protocol):
    """The engine that has the KV. ``engine.shell.engine.Engine`` implements this."""

    def pull(
        self, request_id: str, token_start: int, codec: str, timeout_s: float, beat: Callable[[], None]
    ) -> Generator[Piece, None, None]:
        """Yield the KV of a prefill. Blocks until a piece is computed."""


# --- the engine that computed ----------------------------------------------------------------------------------------


class PullServer:
    """Serves the data connections of an engine from ``start`` to ``stop``, with one server per listening address.

    Args:
        find: returns the caller with this token, or with a certificate with these names.
        name_of: returns the engine's name for a caller's prefill. Raises PermissionDenied if the caller has no prefill
            with this id.

    Attributes:
        port: the TCP port, which is the same on every host. Before ``start``, the requested port.
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
        self._servers_count = 1  # servers that share the descriptors

    def start(self, addresses: Sequence[str]) -> None:
        """Listen next to these addresses of the gRPC API. Raises InvalidRequest if an address cannot be used."""
        hosts = list(dict.fromkeys(each.rpartition(":")[0] for each in addresses if not each.startswith(UNIX)))
        paths = [each.removeprefix(UNIX) for each in addresses if each.startswith(UNIX)]
        self._servers_count = len(hosts) + len(paths)
        for path in paths:
            self._server(tls=False).start_unix(Path(path + DATA_SUFFIX), self._config.file_mode)
        for host in hosts:
            server = self._server(tls=self._config.tls_cert is not None)
            address = server.start(host.removeprefix("[").removesuffix("]"), self.port)
            self.port = int(address.rpartition(":")[2])

    def stop(self) -> None:
        """Stop listening, and end all connections."""
        for server in self._servers:
            server.stop()

    def _server(self, tls: bool) -> Server:
        config = self._config
        certificate = ServerCertificate.of(config) if tls else None
        limits = ServerLimits(
            connections_max=PULLS_MAX,
            part=PULLS_PART / self._servers_count,
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
        """Serve one PULL. Raises PermissionDenied, and the errors of ``Prefills.pull``."""
        request_id, token_start, codec, timeout_s = _unpack_pull(body)
        timeout_s = min(timeout_s, self._config.request_s_max)
        caller = exchange.caller
        assert isinstance(caller, Identity), "``_admit`` returns an ``Identity``"
        name = self._name_of(request_id, caller)

        def beat() -> None:
            exchange.reply(FrameKind.PIECE, _HEAD.pack(0, 0, 0, 0, 0))

        pieces = self._engine.pull(name, token_start, codec, timeout_s, beat)
        try:
            for piece in pieces:
                assert isinstance(piece.data, LocalData)
                rows = piece.data.rows
                buffers: list[Buffer] = [rows.data] if rows.flags.c_contiguous else [row.data for row in rows]
                head = _HEAD.pack(piece.layer, piece.tokens, piece.token_start, rows.nbytes, piece.checksum)
                exchange.reply(FrameKind.PIECE, head, *buffers)
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
    """Yield the pieces of a prefill. The caller must read each piece before it requests the next.

    The pull has its own connection. No more bytes can arrive once the generator is closed.

    Raises:
        InvalidRequest: there is no such prefill, or the start or the codec is not valid.
        NodeUnavailable: the engine is unreachable, or the prefill has failed.
        DeadlineExceeded: not all pieces arrived in time.
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
            raise WireError(f"a piece of {size} bytes does not fit a body of {head.body_bytes} bytes")
        if tokens:
            data = _RemoteData(connection, size, deadline_s)
            yield Piece(layer, token_start, tokens, data, checksum)
            data.check_read()


class _RemoteData:
    """The bytes of a piece. Reading them receives them. Implements ``PieceData``."""

    def __init__(self, connection: DataConnection, nbytes: int, deadline_s: float) -> None:
        self.nbytes = nbytes
        self._connection = connection
        self._deadline_s = deadline_s
        self._is_read = False

    def read_into(self, rows: Sequence[Bytes]) -> None:
        """Receive the bytes into these arrays, in order."""
        assert not self._is_read and sum(part.nbytes for part in rows) == self.nbytes
        self._is_read = True
        for part in rows:
            for row in (part,) if part.flags.c_contiguous else part:
                self._connection.receive_into(row.data.cast("B"), deadline_s=self._deadline_s)

    def check_read(self) -> None:
        """Assert that the piece was read, before the next one is requested."""
        assert self._is_read, "a piece was skipped"


def dial_credentials(given: CallerCredentials, endpoint: Endpoint) -> DialCredentials:
    """Return the credentials for data connections. They are the same as for gRPC connections to the endpoint."""
    if not endpoint.tls:
        return DialCredentials(endpoint.token)
    ca, cert, key = (str(getattr(given, name) or os.environ.get(f"KVSTORE_{name.upper()}", "")) for name in _FILES)
    return DialCredentials(endpoint.token, ca, cert, key, given.tls_server_name or "")


_FILES: Final = ("tls_ca", "tls_cert", "tls_key")


# --- the request ------------------------------------------------------------------------------------------------------


def _pack_pull(request_id: str, token_start: int, codec: str, timeout_s: float) -> bytes:
    document = {"request_id": request_id, "token_start": token_start, "codec": codec, "timeout_s": timeout_s}
    return json.dumps(document).encode()


def _unpack_pull(body: memoryview) -> tuple[str, int, str, float]:
    """Unpack a PULL: the id of the prefill, the first token, the codec, and the timeout in seconds.

    Raises InvalidRequest if the body is not valid.
    """
    try:
        document: Any = json.loads(bytes(body))
        values = document["request_id"], document["token_start"], document["codec"], document["timeout_s"]
    except (ValueError, KeyError, TypeError, RecursionError):
        values = None, 0, "", 0.0
    if not all(
        type(value) in kinds for value, kinds in zip(values, ((str,), (int,), (str,), (int, float)), strict=True)
    ):
        raise InvalidRequest("pull", "must be a JSON object with request_id, token_start, codec and timeout_s")
    if not values[3] > 0:  # also refuses NaN
        raise InvalidRequest("timeout_s", f"must be more than zero (got {values[3]})")
    return values
