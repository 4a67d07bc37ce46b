"""One gRPC channel to a node, with credentials, deadlines and one retry. Any thread may use it."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NoReturn, TypeVar

import grpc
import grpc.experimental

from kvstore.client.remote.endpoint import Endpoint
from kvstore.client.store import AFTER_FORK
from kvstore.client.workers import Workers
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, Unavailable, VersionMismatch
from kvstore.pb import store_pb2 as pb
from kvstore.wire.grpc import ERROR_KEY, from_rpc

SERVICE: Final = "/kvstore.v1.Store/"
MESSAGE_BYTES_MAX: Final = 64 << 20  # largest received message: a part of data, or a list of pages
STREAM_BYTES_PER_S_MIN: Final = 32 << 20  # the speed for which the deadlines of streams are long enough
OVERHEAD_BYTES: Final = 64 << 10  # what a message may contain in addition to its data or tokens
REQUEST_BYTES: Final = 2 << 20  # tokens in one request: half a million of them
REQUEST_PAGES: Final = 1 << 15
DATA_BYTES: Final = 2 << 20  # data in one message. The size hardly matters, but whole pages save the node one copy

# The first attempt to reconnect is immediate, and pauses are at most a second: a restarted daemon is soon found.
OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # the longest time of one attempt, enough for busy or distant nodes
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.enable_retries", 0),  # this module retries, and knows which calls can be repeated
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # stores share no connection, because their credentials differ
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)

Reply = TypeVar("Reply")


class _Resources:
    """The resources of a ``RemoteNode``. They are closed with it, even if it is only dropped or the process exits."""

    def __init__(self, channel: grpc.Channel, workers: Workers) -> None:
        self.pid = os.getpid()
        self.channel = channel
        self.workers = workers

    def close(self) -> None:
        """Close the workers and the channel. Does nothing in a forked child: gRPC's threads belong to the parent."""
        if os.getpid() == self.pid:
            self.workers.close()
            self.channel.close()


class RemoteNode:
    """A node at the other end of a connection.

    Making the object sends nothing. The first call connects, and a later call reconnects after a loss. The connection
    ends with ``close``, when the object is dropped, or with the process. In a forked child every call is refused.

    Args:
        endpoint: the node's address and the caller's credentials.
        timeout_s: deadline of a call. Streams of data get more, according to their size.

    Attributes:
        about: the node's description of itself, set by ``ask_about``.
        misses: the number of matches that ended early, by reason. Concurrent threads may lose counts.
    """

    service = SERVICE
    options: tuple[tuple[str, Any], ...] = OPTIONS

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.refusal = ""
        self.misses: dict[str, int] = {}
        self.about = pb.AboutReply()
        self.workers = Workers("kvstore-remote")
        self._pid = os.getpid()
        self._metadata = (("authorization", f"Bearer {endpoint.token}"),) if endpoint.token else ()
        self._channel = _channel(endpoint, self.options)
        self._methods: dict[str, Callable[..., Any]] = {}
        self._finalizer = weakref.finalize(self, _Resources(self._channel, self.workers).close)
        _nodes.add(self)

    @property
    def data_bytes(self) -> int:
        """The largest amount of data in one message."""
        message_bytes_max = self.about.message_bytes_max
        return max(1, min(DATA_BYTES, message_bytes_max - OVERHEAD_BYTES)) if message_bytes_max else DATA_BYTES

    @property
    def request_bytes(self) -> int:
        """The largest amount of tokens and media in one request."""
        return min(self.about.message_bytes_max or REQUEST_BYTES, REQUEST_BYTES + OVERHEAD_BYTES) - OVERHEAD_BYTES

    def ask_about(self, timeout_s: float | None = None) -> None:
        """Ask the node for its description, and set ``about``. Raises as ``call``."""
        self.about = self.call("About", pb.AboutRequest(), pb.AboutReply, timeout_s)

    def call(
        self, name: str, request: Any, reply: type[Reply], timeout_s: float | None = None, again: bool = True
    ) -> Reply:
        """Send one request and return its reply.

        Args:
            again: repeat the call once if the connection was lost. Only for calls that may run twice.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node did not answer in time.
            KVStoreError: the node refused the call; the exception is the one of a local node.
        """
        method = self._method(name, "unary_unary", type(request).SerializeToString, reply.FromString)  # type: ignore[attr-defined]
        answer: Reply = self._attempt(lambda left_s: method(request, **self._options_of(left_s)), timeout_s, again)
        return answer

    def receive(self, name: str, request: bytes, timeout_s: float) -> Iterator[bytes]:
        """Send one request and return its replies as raw messages. Iterating raises grpc.RpcError; ``cancel`` ends
        the stream."""
        self.check_open()
        stream: Iterator[bytes] = self._method(name, "unary_stream", None, None)(request, **self._options_of(timeout_s))
        return stream

    def send(self, name: str, messages: Iterator[bytes], timeout_s: float) -> Any:
        """Send raw requests, and return a ``grpc.Future`` of the raw reply. A thread of gRPC iterates ``messages``."""
        self.check_open()
        return self._method(name, "stream_unary", None, None).future(messages, **self._options_of(timeout_s))  # type: ignore[attr-defined]

    def _method(self, name: str, kind: str, serializer: Any, deserializer: Any) -> Callable[..., Any]:
        self.check_open()
        method = self._methods.get(name)
        if method is None:
            method = getattr(self._channel, kind)(
                self.service + name, request_serializer=serializer, response_deserializer=deserializer
            )
            self._methods[name] = method
        return method

    def _options_of(self, timeout_s: float) -> dict[str, Any]:
        return {"timeout": timeout_s, "metadata": (*self._metadata, *traceparent())}

    def _attempt(self, attempt: Callable[[float], Reply], timeout_s: float | None, again: bool) -> Reply:
        """Make the attempt within the deadline. If the connection was lost and ``again`` is true, repeat it once."""
        deadline = time.monotonic() + (timeout_s if timeout_s is not None else self.timeout_s)
        while True:
            try:
                return attempt(max(0.001, deadline - time.monotonic()))
            except grpc.RpcError as error:
                if not (again and is_connection_lost(error)):
                    self.refuse(error)
                again = False
            except ValueError:  # gRPC's error if another thread has closed the channel
                self.check_open()
                raise

    def refuse(self, error: grpc.RpcError) -> NoReturn:
        """Raise the exception that stands for a failed call."""
        self.check_open()
        raise self.exception_of(error) from None

    def exception_of(self, error: grpc.RpcError) -> KVStoreError:
        """Return the exception that stands for a failed call. Its message has the node's address."""
        call = _call_of(error)
        if call is None:
            return Unavailable(f"{self.endpoint.address}: {error}")
        exception = from_rpc(call)
        if call.code() is grpc.StatusCode.UNIMPLEMENTED and type(exception) is VersionMismatch:
            return VersionMismatch(f"{self.endpoint.address}: not a kvstore node, or another version ({exception})")
        if type(exception) in (NodeUnavailable, DeadlineExceeded):
            return type(exception)(f"{self.endpoint.address}: {exception}")
        return exception

    def stream_s(self, size_bytes: int) -> float:
        """Return the deadline of a stream of ``size_bytes``."""
        return self.timeout_s + size_bytes / STREAM_BYTES_PER_S_MIN

    def missed(self, reason: str) -> None:
        """Count a match that ended early for ``reason``."""
        self.misses[reason] = self.misses.get(reason, 0) + 1

    def check_open(self) -> None:
        """Raise InvalidRequest if the store is closed, or if this is a forked child."""
        if self.refusal:
            raise InvalidRequest("store", self.refusal)

    def close(self) -> None:
        """End the connection. Later calls are refused, and calls in progress fail."""
        if not self.refusal:
            self.refusal = "is closed"
            self._finalizer()

    def _after_fork(self) -> None:
        self.refusal = AFTER_FORK.format(self._pid)
        _channels_of_parent.append(self._channel)  # dropping it would wait for gRPC's threads, which are the parent's


def end(stream: Any) -> None:
    """End a stream that ``receive`` returned, at any point. Does nothing if it has ended.

    gRPC keeps the connection of such a stream until the stream's last event is taken. When a stream is cancelled or
    dropped, gRPC does not take the events, and the connection would stay open as long as the process runs, even after
    ``close``. They can be taken only through private attributes of gRPC. Without these, connections stay open. Events
    are not taken if a signal handler raised inside the stream: gRPC would then wait for them for ever.
    """
    stream.cancel()
    if isinstance(sys.exception(), KeyboardInterrupt | SystemExit):
        return
    state, take = getattr(stream, "_state", None), getattr(stream, "_consume_next_event", None)
    while take is not None and getattr(state, "due", None):
        take()  # returns at once: all events exist after the cancellation


def is_connection_lost(error: grpc.RpcError) -> bool:
    """Return whether a call failed because there was no connection or it broke. False if the node refused the call."""
    call = _call_of(error)
    if call is None or call.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    return not any(key == ERROR_KEY for key, _ in call.trailing_metadata() or ())


def _call_of(error: Any) -> Any:
    """Return the call that failed, or None if ``error`` is not a call. gRPC raises objects that are both."""
    return error if isinstance(error, grpc.Call) else None


def _channel(endpoint: Endpoint, defaults: tuple[tuple[str, Any], ...]) -> grpc.Channel:
    options = list(defaults)
    if not endpoint.tls:
        return grpc.insecure_channel(endpoint.target, options=options)
    if endpoint.server_name:
        options.append(("grpc.ssl_target_name_override", endpoint.server_name))
    credentials = grpc.ssl_channel_credentials(endpoint.ca, endpoint.key, endpoint.cert)
    return grpc.secure_channel(endpoint.target, credentials, options=options)


_nodes: weakref.WeakSet[RemoteNode] = weakref.WeakSet()
_channels_of_parent: list[grpc.Channel] = []


def _after_fork_in_child() -> None:
    for node in list(_nodes):
        node._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


def traceparent() -> tuple[tuple[str, str], ...]:
    """Return metadata that names the caller's current span (W3C Trace Context), or nothing. OpenTelemetry is not
    imported here."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return ()
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return ()
    return (("traceparent", f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"),)
