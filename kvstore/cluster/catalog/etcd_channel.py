"""EtcdChannel: calls to whichever etcd endpoint answers, with deadlines, TLS, user and password.

The messages come from the etcd3 package. It cannot be imported together with protobuf 4 or later, because its generated
modules make descriptors in the old way. Their serialized file descriptors are valid, though. So ``messages`` reads
those bytes from the package's files with ``ast``, without running their code, and makes classes in a separate
descriptor pool, where names like ``kv.proto`` do not collide with others.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import logging
import ssl
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kvstore.cluster.catalog.base import VALUE_BYTES_MAX
from kvstore.config.reading import ChangedFiles
from kvstore.errors import InvalidRequest, Unauthenticated, Unavailable

_FILES: Final = ("kv_pb2.py", "auth_pb2.py", "rpc_pb2.py")  # each after the files that it imports
_REMEDY: Final = "needs the etcd3 package: pip install 'kvstore[etcd]'"


class Messages:
    """One class per message of ``etcdserverpb`` and ``mvccpb``, as attributes. A class is made on first use."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        for package in ("etcdserverpb", "mvccpb"):
            try:
                found = self._pool.FindMessageTypeByName(f"{package}.{name}")
            except KeyError:
                continue
            made = message_factory.GetMessageClass(found)
            setattr(self, name, made)
            return made
        raise AttributeError(name)


@cache
def messages() -> Messages:
    """Load the messages; cached.

    Raises:
        InvalidRequest: the package is not installed.
    """
    package = importlib.util.find_spec("etcd3")
    if package is None or package.origin is None:
        raise InvalidRequest("catalog", f"etcd:// {_REMEDY}")
    pool = descriptor_pool.DescriptorPool()
    for name in _FILES:
        file = descriptor_pb2.FileDescriptorProto.FromString(
            _serialized(Path(package.origin).parent / "etcdrpc" / name)
        )
        pool.Add(file)
    return Messages(pool)


def _serialized(path: Path) -> bytes:
    """Return the bytes that the module passes to ``FileDescriptor(serialized_pb=...)``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb":
            value = node.value
            # Old generators write `_b('...')`, a string whose latin-1 encoding has the bytes.
            literal = value.args[0] if isinstance(value, ast.Call) else value
            if isinstance(literal, ast.Constant):
                return literal.value if isinstance(literal.value, bytes) else str(literal.value).encode("latin-1")
    raise InvalidRequest("catalog", f"{path} has no descriptor; the etcd3 package must have version 0.12")


ATTEMPT_S: Final = 2.0  # time for one endpoint, while others might answer
ASK_S: Final = 2.0  # a stream that is silent for this long is asked for a sign of life
PAUSE_S: Final = 0.05
MESSAGE_BYTES_MAX: Final = 256 << 20  # for a listing, which is also bounded by its number of entries
_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 6000),  # a server refuses pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", 2 * VALUE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # how long a hanging server may take to accept a connection
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
)
# With these codes another endpoint is tried. All others go to the caller.
_ELSEWHERE: Final = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_LEADER: Final = ("hasleader", "true")  # a member that is cut off then refuses calls, instead of staying silent
# etcd's messages for an unknown token, for one older than its users and roles, and for a missing one.
_STALE_TOKEN: Final = ("invalid auth token", "revision of auth store is old", "user name is empty")
_NO_USERS: Final = "authentication is not enabled"
_NO_SPACE: Final = "database space exceeded"

log = logging.getLogger("kvstore.cluster.catalog")


class EtcdRefusal(Unavailable):
    """etcd's own error for one request. ``code`` is its status."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True)
class Credentials:
    """How a process identifies itself to etcd. Files are read again when they change.

    Attributes:
        ca, certificate, key: PEM files. With ``ca`` or ``certificate`` the connection is TLS.
        user: user for etcd's own authentication; "" for none.
        password_file: file with that user's password; only the file's owner may be able to read it.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    user: str = ""
    password_file: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that a channel is made from."""
        return tuple(each for each in (self.ca, self.certificate, self.key) if each is not None)

    def tls(self) -> grpc.ChannelCredentials | None:
        """Return credentials for a channel, or None for plain text. Raises InvalidRequest if the files are not
        valid."""
        if self.ca is None and self.certificate is None:
            return None
        if (self.certificate is None) != (self.key is None):
            raise InvalidRequest("catalog_cert", "must be given together with catalog_key")
        parts = _pem("catalog_ca", self.ca), _pem("catalog_key", self.key), _pem("catalog_cert", self.certificate)
        try:  # gRPC would accept invalid files, and fail every connection later
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None and self.key is not None:
                context.load_cert_chain(self.certificate, self.key, password="")
        except (OSError, ValueError) as error:
            raise InvalidRequest("catalog_cert", f"must fit its key and the authorities ({error})") from None
        return grpc.ssl_channel_credentials(*parts)

    def password(self) -> str:
        """Return the password now in the file. Raises InvalidRequest if the file cannot be read, or other users can
        read it."""
        path = self.password_file
        if path is None:
            return ""
        try:
            if path.stat().st_mode & 0o077:
                raise InvalidRequest("catalog_password_file", f"{path} can be read by other users; chmod 600 it")
            return path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest("catalog_password_file", f"{path}: {error}") from error


class EtcdChannel:
    """Calls ``etcdserverpb`` services over several endpoints. It stays with one endpoint while that endpoint answers.

    Before each call it checks the certificates' files; if they changed, new channels replace the old ones. When etcd
    refuses the token, the channel requests a new one with the password that the file has at that time.
    """

    def __init__(self, endpoints: Sequence[str], credentials: Credentials) -> None:
        self.messages: Messages = messages()
        self._endpoints = tuple(endpoints)
        self._credentials = credentials
        self._channels: list[grpc.aio.Channel] = []
        self._closes: set[asyncio.Task[None]] = set()
        self._files = ChangedFiles(credentials.files)
        self._at = 0
        self._move_event = asyncio.Event()  # set when we leave the current endpoint or its channel
        self._token: str | None = None  # None: not requested yet; "": etcd needs no token
        self._token_lock = asyncio.Lock()  # one call requests a token for all

    def open(self) -> None:
        """Make the channels, without connecting. Raises InvalidRequest if the certificates are not valid."""
        self._files.changed()
        self._channels = self._make_channels()

    async def close(self) -> None:
        """Close the channels."""
        channels, self._channels = self._channels, []
        await asyncio.gather(*(each.close() for each in channels), *self._closes)

    async def call(self, method: str, request: Any, answer: type[Any], call_s: float) -> Any:
        """Return one answer to ``/etcdserverpb.METHOD``.

        Raises:
            Unavailable: no endpoint answered within ``call_s``. The call might or might not have been performed.
            EtcdRefusal: an error of etcd's own, such as NOT_FOUND for a lease.
            Unauthenticated: etcd refuses this process, even with a new token.
            InvalidRequest: the password's file cannot be read.
        """
        ends_s = asyncio.get_running_loop().time() + call_s
        reason, tries, renewed = "no time was left", 0, False
        while (left_s := ends_s - asyncio.get_running_loop().time()) > 0:
            at = self._at
            try:
                return await self._once(at, method, request, answer, min(ATTEMPT_S, left_s))
            except grpc.aio.AioRpcError as error:
                if self._forgets_token(error) and not renewed:
                    renewed = True
                    continue
                if error.code() not in _ELSEWHERE or _NO_SPACE in (error.details() or ""):
                    raise self._to_error(error) from error
                reason = f"{self._endpoints[at]}: {error.details() or error.code().name}"
            self.next_endpoint(at)
            tries += 1
            if tries % len(self._endpoints) == 0:
                await asyncio.sleep(min(PAUSE_S * tries, 0.5))
        raise Unavailable(f"etcd did not answer in {call_s:g} s ({reason})")

    async def stream(
        self, method: str, request: Any, answer: type[Any], ask: bytes = b"", token: bool = True
    ) -> AsyncGenerator[Any, None]:
        """Yield the answers to one request, until the stream breaks or the iterator is closed.

        A hanging server keeps its streams open and silent. So a stream also breaks when a call has moved on to another
        endpoint or certificate, and when ``ask`` is not answered.

        Args:
            ask: sent when nothing arrived for ``ASK_S``. An answer has to arrive within ``ATTEMPT_S``.
            token: whether the request needs a token.

        Raises:
            Unavailable, Unauthenticated, InvalidRequest: as ``call``. The next stream may use another endpoint.
        """
        at = self._at
        call = None
        try:
            async with asyncio.timeout(2 * ATTEMPT_S):  # etcd answers the first request of every stream at once
                metadata = await self._metadata(at, ATTEMPT_S, token)
                moved, channel = self._move_event, self._channels[at]
                call = channel.stream_stream(
                    f"/etcdserverpb.{method}", request_serializer=_bytes_of, response_deserializer=answer.FromString
                )(metadata=metadata)
                await call.write(request)
                found = await call.read()
            while found is not grpc.aio.EOF:
                yield found
                found = await _read(call, moved, ask)
        except grpc.aio.AioRpcError as error:
            if self._forgets_token(error):
                raise Unavailable("etcd asked for a new token") from error
            self.next_endpoint(at)
            raise self._to_error(error) from error
        except (asyncio.InvalidStateError, grpc.aio.UsageError, TimeoutError) as error:
            # `write` raises InvalidStateError if the call's channel was closed.
            self.next_endpoint(at)
            raise Unavailable(f"etcd at {self._endpoints[at]} closed a stream") from error
        finally:
            if call is not None:
                call.cancel()
        self.next_endpoint(at)
        raise Unavailable(f"etcd at {self._endpoints[at]} ended a stream")

    @property
    def endpoint(self) -> int:
        """The number of the current endpoint."""
        return self._at

    def next_endpoint(self, from_endpoint: int) -> None:
        """Switch to the endpoint after this one, unless another call has already done so."""
        if self._at == from_endpoint:
            self._at = (from_endpoint + 1) % len(self._endpoints)
            self._move()

    def forget_token(self) -> None:
        """Make the next call request a new token, if there is a user."""
        self._token = None

    def _move(self) -> None:
        event, self._move_event = self._move_event, asyncio.Event()
        event.set()

    def _make_channels(self) -> list[grpc.aio.Channel]:
        tls = self._credentials.tls()
        return [
            grpc.aio.insecure_channel(each, _OPTIONS) if tls is None else grpc.aio.secure_channel(each, tls, _OPTIONS)
            for each in self._endpoints
        ]

    def _look_at_files(self) -> None:
        """Make new channels if the certificates changed. While the new files are invalid, the old channels stay."""
        if not self._files.changed():
            return
        try:
            channels = self._make_channels()
        except InvalidRequest as error:
            self._files.forget()  # they may be in the middle of being written
            log.debug("certificates for etcd are not read again yet: %s", error)
            return
        old, self._channels = self._channels, channels
        self._move()
        for channel in old:  # calls in progress end within ATTEMPT_S
            close = asyncio.create_task(channel.close(3 * ATTEMPT_S))
            self._closes.add(close)
            close.add_done_callback(self._closes.discard)
        log.info("certificates for etcd were read again")

    async def _once(self, at: int, method: str, request: Any, answer: type[Any], timeout_s: float) -> Any:
        metadata = await self._metadata(at, timeout_s)
        stub = self._channels[at].unary_unary(
            f"/etcdserverpb.{method}", request_serializer=_bytes_of, response_deserializer=answer.FromString
        )
        return await stub(request, timeout=timeout_s, metadata=metadata)

    async def _metadata(self, at: int, timeout_s: float, token: bool = True) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call or stream: a token that etcd has not refused yet."""
        self._look_at_files()
        if token and self._credentials.user and self._token is None:
            async with self._token_lock:
                if self._token is None:
                    self._token = await self._new_token(at, timeout_s)
        return (_LEADER, ("token", self._token)) if self._token else (_LEADER,)

    async def _new_token(self, at: int, timeout_s: float) -> str:
        """Request a token. Raises Unauthenticated if user or password are wrong, and InvalidRequest if the password's
        file cannot be read."""
        pb = self.messages
        stub = self._channels[at].unary_unary(
            "/etcdserverpb.Auth/Authenticate",
            request_serializer=_bytes_of,
            response_deserializer=pb.AuthenticateResponse.FromString,
        )
        request = pb.AuthenticateRequest(name=self._credentials.user, password=self._credentials.password())
        try:
            return str((await stub(request, timeout=timeout_s)).token)
        except grpc.aio.AioRpcError as error:
            if _NO_USERS in (error.details() or ""):
                return ""
            if error.code() in _ELSEWHERE:
                raise
            raise Unauthenticated(f"etcd refuses user {self._credentials.user!r}: {error.details()}") from error

    def _forgets_token(self, error: grpc.aio.AioRpcError) -> bool:
        """Return whether the token was refused, so that a new one might help. If so, forget the token."""
        is_stale = bool(self._credentials.user) and is_stale_token(error.details() or "")
        if is_stale:
            self.forget_token()
        return is_stale

    def _to_error(self, error: grpc.aio.AioRpcError) -> Exception:
        code, message = error.code(), error.details() or error.code().name
        if "user name is empty" in message:
            return Unauthenticated("etcd needs a user and a password: catalog_user, catalog_password_file")
        if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
            return Unauthenticated(f"etcd refuses: {message}")
        if _NO_SPACE in message:
            message = "its storage quota is used up: compact it, defragment it, and disarm the alarm"
        return EtcdRefusal(code, f"etcd at {self._endpoints[self._at]}: {message}")


async def _read(call: Any, move: asyncio.Event, ask: bytes) -> Any:
    """Return the next answer. Raises TimeoutError if ``ask`` gets no answer, or the channel has moved to another
    endpoint."""
    answer = asyncio.ensure_future(call.read())
    has_moved = asyncio.ensure_future(move.wait())
    try:
        for wait_s in (ASK_S, ATTEMPT_S) if ask else (None,):
            await asyncio.wait((answer, has_moved), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and not answer.cancelled():
                return answer.result()
            if answer.done() or has_moved.done():  # a call is cancelled when its channel is closed
                break
            if wait_s == ASK_S:
                await call.write(ask)
        raise TimeoutError
    finally:
        has_moved.cancel()
        answer.cancel()


def is_stale_token(message: str) -> bool:
    """Return whether this message of etcd means that a new token is needed."""
    return any(each in message for each in _STALE_TOKEN)


def _bytes_of(message: Any) -> bytes:
    return message if isinstance(message, bytes) else bytes(message.SerializeToString())


def _pem(setting: str, path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise InvalidRequest(setting, f"{path}: {error.strerror}") from error
