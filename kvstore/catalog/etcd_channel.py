"""EtcdChannel: calls to whichever endpoint answers. Deadlines, other endpoints, TLS, user and password are here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from kvstore.catalog.base import VALUE_BYTES_MAX
from kvstore.catalog.etcd_messages import Messages, messages
from kvstore.errors import InvalidRequest, Unauthenticated, Unavailable

ATTEMPT_S: Final = 2.0  # one endpoint, while others may answer
PAUSE_S: Final = 0.05
MESSAGE_BYTES_MAX: Final = 256 << 20  # a listing; bounded by entries too
_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 6000),  # a server refuses pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", 2 * VALUE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # how long a server that hangs may take to greet us
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
)
# What another endpoint may answer better. Anything else is told to the caller.
_ELSEWHERE: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_LEADER: Final = ("hasleader", "true")  # a member that is cut off from the others refuses, and does not stay silent


@dataclass(frozen=True)
class Credentials:
    """How to prove oneself to etcd.

    Attributes:
        ca, certificate, key: PEM files. With ``ca`` or ``certificate`` the connection is TLS.
        user, password: of etcd's own authentication.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = ""

    def tls(self) -> grpc.ChannelCredentials | None:
        """What a channel needs, or None for plain text."""
        if self.ca is None and self.certificate is None:
            return None
        if (self.certificate is None) != (self.key is None):
            raise InvalidRequest("catalog_cert", "a certificate and its key come together")
        return grpc.ssl_channel_credentials(
            _pem("catalog_ca", self.ca), _pem("catalog_key", self.key), _pem("catalog_cert", self.certificate)
        )


class EtcdChannel:
    """Calls of ``etcdserverpb`` services over several endpoints. It stays with one as long as that one answers."""

    def __init__(self, endpoints: Sequence[str], credentials: Credentials) -> None:
        self.messages: Messages = messages()
        self._endpoints = tuple(endpoints)
        self._credentials = credentials
        self._channels: list[grpc.aio.Channel] = []
        self._at = 0
        self._moved = asyncio.Event()  # set once we leave the endpoint we are at
        self._token = ""

    def open(self) -> None:
        """Make the channels; connects to nothing yet."""
        tls = self._credentials.tls()
        for endpoint in self._endpoints:
            self._channels.append(
                grpc.aio.insecure_channel(endpoint, _OPTIONS)
                if tls is None
                else grpc.aio.secure_channel(endpoint, tls, _OPTIONS)
            )

    async def close(self) -> None:
        """Close them."""
        channels, self._channels = self._channels, []
        await asyncio.gather(*(each.close() for each in channels))

    async def call(self, method: str, request: Any, answer: type[Any], call_s: float) -> Any:
        """One answer to ``/etcdserverpb.METHOD``.

        Raises:
            Unavailable: no endpoint answered within ``call_s``. It may have been done or not.
            Unauthenticated, InvalidRequest: refused.
            grpc.aio.AioRpcError: etcd's own errors, for the caller to read (NOT_FOUND of a lease).
        """
        ends_s = asyncio.get_running_loop().time() + call_s
        said = "no endpoint answers"
        tries = 0
        while (left_s := ends_s - asyncio.get_running_loop().time()) > 0:
            at = self._at
            try:
                return await self._once(at, method, request, answer, min(ATTEMPT_S, left_s))
            except grpc.aio.AioRpcError as error:
                if _token_is_stale(error):
                    await self._authenticate(at, min(ATTEMPT_S, left_s))
                    continue
                if error.code() not in _ELSEWHERE:
                    raise _translated(error) from error
                said = f"{self._endpoints[at]}: {error.details() or error.code().name}"
            self.next_endpoint(at)
            tries += 1
            if tries % len(self._endpoints) == 0:
                await asyncio.sleep(min(PAUSE_S * tries, 0.5))
        raise Unavailable(f"etcd did not answer in {call_s:g} s ({said})")

    async def stream(self, method: str, request: Any, answer: type[Any]) -> AsyncGenerator[Any, None]:
        """Answers to one request, until the stream breaks (Unavailable) or the iterator is closed.

        A server that hangs keeps its streams open and silent. So a stream also breaks once a call has moved on to
        another endpoint.
        """
        at = self._at
        stub = self._channels[at].stream_stream(
            f"/etcdserverpb.{method}", request_serializer=_bytes_of, response_deserializer=answer.FromString
        )
        call = stub(metadata=self._metadata())
        try:
            async with asyncio.timeout(ATTEMPT_S):  # every stream of ours is answered at once
                await call.write(request)
                found = await call.read()
            while found is not grpc.aio.EOF:
                yield found
                found = await self._read_unless_moved(call, at)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            # A call whose channel has gone raises InvalidStateError from `write`.
            if isinstance(error, grpc.aio.AioRpcError) and _token_is_stale(error):
                await self._authenticate(at, ATTEMPT_S)
                raise Unavailable("etcd asked for a new token") from error
            self.next_endpoint(at)
            raise Unavailable(f"etcd at {self._endpoints[at]} let a stream go: {error}") from error
        finally:
            call.cancel()
        self.next_endpoint(at)
        raise Unavailable(f"etcd at {self._endpoints[at]} ended a stream")

    async def _read_unless_moved(self, call: Any, at: int) -> Any:
        """The next answer. Raises TimeoutError where a call found meanwhile that this endpoint does not answer."""
        reading = asyncio.ensure_future(call.read())
        moved = asyncio.ensure_future(self._moved.wait())
        try:
            if self._at == at:
                await asyncio.wait((reading, moved), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            raise TimeoutError
        finally:
            moved.cancel()
            reading.cancel()

    @property
    def endpoint(self) -> int:
        """Number of the one it stays with now."""
        return self._at

    def next_endpoint(self, from_endpoint: int) -> None:
        """Go on with the endpoint after this one, unless somebody has done so already."""
        if self._at == from_endpoint:
            self._at = (from_endpoint + 1) % len(self._endpoints)
            moved, self._moved = self._moved, asyncio.Event()
            moved.set()

    async def _once(self, at: int, method: str, request: Any, answer: type[Any], timeout_s: float) -> Any:
        if self._credentials.user and not self._token:
            await self._authenticate(at, timeout_s)
        stub = self._channels[at].unary_unary(
            f"/etcdserverpb.{method}", request_serializer=_bytes_of, response_deserializer=answer.FromString
        )
        return await stub(request, timeout=timeout_s, metadata=self._metadata())

    async def _authenticate(self, at: int, timeout_s: float) -> None:
        """A fresh token. Raises Unauthenticated where user or password are wrong."""
        self._token = ""
        pb = self.messages
        stub = self._channels[at].unary_unary(
            "/etcdserverpb.Auth/Authenticate",
            request_serializer=_bytes_of,
            response_deserializer=pb.AuthenticateResponse.FromString,
        )
        request = pb.AuthenticateRequest(name=self._credentials.user, password=self._credentials.password)
        try:
            self._token = (await stub(request, timeout=timeout_s)).token
        except grpc.aio.AioRpcError as error:
            if error.code() in _ELSEWHERE:
                raise
            raise Unauthenticated(f"etcd refuses user {self._credentials.user!r}: {error.details()}") from error

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (_LEADER, ("token", self._token)) if self._token else (_LEADER,)


def _bytes_of(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _token_is_stale(error: grpc.aio.AioRpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAUTHENTICATED and "invalid auth token" in (error.details() or "")


def _translated(error: grpc.aio.AioRpcError) -> Exception:
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT and "user name is empty" in (error.details() or ""):
        return Unauthenticated("etcd wants a user and a password: catalog_user, catalog_password_file")
    if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return Unauthenticated(f"etcd refuses: {error.details()}")
    return error


def _pem(setting: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidRequest(setting, f"{path}: {error.strerror}") from error
