"""EngineClient: calls an engine, for programs and for other engines.

::

    with EngineClient("127.0.0.1:7080") as engine:
        answer = engine.generate("Once upon a time", max_tokens=32)
        for event in engine.stream(tokens, max_tokens=32, resume=["127.0.0.1:7081"]):
            ...

Every call has a deadline. Errors are those of ``kvstore.errors``.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import grpc
from google.protobuf.struct_pb2 import Struct

from engine.api.pulling import DATA_SUFFIX, dial_credentials, pull
from engine.api.resume import Prompt, ResumableAnswer, user_request
from engine.api.wire import SERVICE, events_of, prefill_event, set_role_request, submit_request
from engine.model.piece import Piece
from engine.model.request import Event, Finished, PrefillEvent, Request, Role, RoleOrder, Token, Usage
from kvstore.client.remote.admin import document
from kvstore.client.remote.endpoint import SCHEMES, CallerCredentials, endpoint
from kvstore.client.remote.node import OPTIONS, RemoteNode, end
from kvstore.cluster.data_connection import UNIX
from kvstore.errors import NodeUnavailable
from kvstore.model.layout import Layout
from kvstore.pb import engine_pb2 as pb
from kvstore.pb import store_pb2
from kvstore.wire.grpc import layout_message

TIMEOUT_S: Final = 10.0
ANSWER_S: Final = 300.0
# A suspended or unreachable engine is detected after the sum of the first two times, even during a long answer. (The
# option is not ``keepalive_timeout_ms``, because gRPC may be waiting for the reply to a ping of another kind.)
KEEPALIVE: Final = {
    "grpc.keepalive_time_ms": 3000,
    "grpc.http2.ping_timeout_ms": 4000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.min_reconnect_backoff_ms": 2000,  # also limits one attempt to connect; a busy engine needs some time
}
SLACK_S: Final = 2.0  # between the deadlines of a request and of its call, so that the engine reports what is late


@dataclass(frozen=True)
class Answer:
    """A complete answer.

    Attributes:
        engines: addresses of the engines that worked on the answer, in order. There are several if it was resumed.
    """

    tokens: tuple[int, ...]
    text: str
    reason: str
    usage: Usage
    engines: tuple[str, ...] = ()


class _RemoteEngine(RemoteNode):
    service = f"/{SERVICE}/"
    options = tuple((dict(OPTIONS) | KEEPALIVE).items())


class EngineClient:
    """A connection to one engine. Threads may share it.

    Life: made (nothing is sent) -> connected by the first call, and reconnected automatically after a failure ->
    ``close``, garbage collection, or the end of the process.

    Args:
        address: ``HOST:PORT``, ``kv://HOST:PORT`` or ``unix:/PATH``.
        token, tls_ca, tls_cert, tls_key, tls_server_name: the credentials. Those that are None come from the
            environment, as for ``kvstore.connect``.
        timeout_s: for calls that do not wait for an answer.

    Raises:
        InvalidRequest: the address or the credentials are not valid.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls_ca: str | Path | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        tls_server_name: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.address = address
        self._credentials = CallerCredentials(
            token=token, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, tls_server_name=tls_server_name
        )
        self._timeout_s = timeout_s
        self._endpoint = endpoint(url_of(address), self._credentials, os.environ)
        self._remote = _RemoteEngine(self._endpoint, timeout_s)
        self._data_port = 0  # the engine reports it when it admits a prefill

    def close(self) -> None:
        """End the connection. Running calls fail."""
        self._remote.close()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- answers ----------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, *, resume: Sequence[str] = (), **arguments: Any) -> Answer:
        """Return the complete answer to a prompt. Arguments and errors are those of ``stream``."""
        answer = ResumableAnswer(self, user_request(prompt, **arguments), tuple(resume))
        *events, end = answer.events()
        assert isinstance(end, Finished), "a stream ends with Finished, or raises"
        tokens = tuple(event.id for event in events if isinstance(event, Token))
        text = "".join(event.text for event in (*events, end))
        return Answer(tokens, text, end.reason, end.usage, tuple(answer.engines))

    def stream(
        self, prompt: Prompt, *, resume: Sequence[str] = (), **arguments: Any
    ) -> Generator[Token | Finished, None, None]:
        """Yield the tokens of an answer as they are drawn, then ``Finished``. Closing the iterator cancels the request.

        Args:
            prompt: a string, which the engine tokenizes, or token ids.
            resume: addresses of engines that continue the answer if an engine fails, each tried once. They draw the
                same tokens as the failed engine, and no token is yielded twice.
            arguments: fields of ``Sampling`` (``max_tokens``, ``temperature``, ``top_p``, ``seed``, ``stop``,
                ``ignore_eos``) and of ``Request`` (``id``, ``salt``, ``deadline_s``, ``prefill``,
                ``handoff``, ``source``, ``grain``, ``use_pool``, ``allow_lossy``, ``retention``: a
                ``kvstore.Retention``, or a list of them for ranges of the prompt's tokens).

        Raises:
            InvalidRequest: an argument is not valid. Names the field.
            NodeUnavailable: the engine, and all engines in ``resume``, are unreachable or have failed.
            TooManyCalls: the engine has too many requests.
            DeadlineExceeded: the answer was not complete in time.
        """
        return ResumableAnswer(self, user_request(prompt, **arguments), tuple(resume)).events()

    def submit(self, request: Request) -> Iterator[Event]:
        """Yield the events of one request at this engine, without resuming it. Raises the errors of ``stream``."""
        message = submit_request(request)
        for reply in self.replies(message, request.deadline_s):
            yield from events_of(reply)

    def replies(self, message: pb.SubmitRequest, deadline_s: float) -> Iterator[pb.SubmitReply]:
        """Yield the replies to a request, as messages."""
        yield from self._replies("Submit", message, pb.SubmitReply, deadline_s + SLACK_S)

    # --- hand-offs --------------------------------------------------------------------------------------------------

    def prefill(
        self, request: Request, layout: Layout, hold_s: float | None = None, *, timeout_s: float | None = None
    ) -> Iterator[PrefillEvent]:
        """Ask the engine to compute a prompt. Yields ``Admitted``, ``Progress`` events, and ``Done``.

        Closing the iterator before ``Done`` cancels the prefill.

        Args:
            layout: the layout of the engine that will use the KV.
            hold_s: how long the engine holds the KV after ``Done``; None means as long as its settings allow.

        Raises:
            VersionMismatch: the layouts differ; the text names the fields.
            InvalidRequest, NodeUnavailable, TooManyCalls, DeadlineExceeded: as for ``stream``.
        """
        message = pb.PrefillRequest(
            request=submit_request(request),
            layout=layout_message(layout),
            hold_ms=int((hold_s or 0) * 1000),
        )
        call_s = timeout_s if timeout_s is not None else request.deadline_s + SLACK_S
        for reply in self._replies("Prefill", message, pb.PrefillReply, call_s):
            if reply.HasField("admitted"):
                self._data_port = reply.admitted.data_port
            yield prefill_event(reply)

    def pull(
        self, request_id: str, token_start: int = 0, codec: str = "none", *, timeout_s: float | None = None
    ) -> Generator[Piece, None, None]:
        """Yield the KV of a prefill, as it is computed. The prefill must have been admitted.

        The caller reads each piece before it requests the next one, and verifies the checksums.

        Raises:
            InvalidRequest: there is no such prefill, or the start or the codec is not valid.
            PermissionDenied: the prefill belongs to another caller.
            NodeUnavailable: the engine is unreachable, or the prefill has failed.
            DeadlineExceeded: not all pieces arrived in time.
        """
        credentials = dial_credentials(self._credentials, self._endpoint)
        pull_s = timeout_s if timeout_s is not None else ANSWER_S
        yield from pull(self._data_address(), credentials, request_id, token_start, codec, pull_s)

    def _data_address(self) -> str:
        target = self._endpoint.target
        if target.startswith(UNIX):
            return target + DATA_SUFFIX
        if not self._data_port:
            raise NodeUnavailable(f"engine {self.address} has reported no port for data: its version is too old")
        host = target.removeprefix("dns:///").removeprefix("ipv6:").rpartition(":")[0]
        return f"{host}:{self._data_port}"

    def release(self, request_id: str) -> bool:
        """End a prefill whose KV is no longer needed. Returns True if there was one with this id."""
        return bool(self._call("Release", pb.RequestId(request_id=request_id), pb.Found).found)

    # --- requests and the engine ------------------------------------------------------------------------------------

    def cancel(self, request_id: str) -> bool:
        """Cancel a request. Its caller gets ``Finished("cancelled")``. Returns True if there was one with this id."""
        return bool(self._call("Cancel", pb.RequestId(request_id=request_id), pb.Found).found)

    def status(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the engine's configuration, load and speed."""
        return document(self._call("Status", store_pb2.Empty(), Struct, timeout_s))

    def set_role(self, role: Role | str, order: RoleOrder | None = None) -> None:
        """Change which requests the engine accepts. For operators.

        Args:
            order: the leading conductor's order; None from an operator.
        """
        self._call("SetRole", set_role_request(role, order), store_pb2.Empty)

    def migrate(self, request_id: str, target: str, timeout_s: float = 60.0) -> bool:
        """Move a running request to the engine at ``target``. For operators.

        Returns False if no answer with this id is running, or if it ended before the other engine took it.
        """
        message = pb.MigrateRequest(request_id=request_id, target=target)
        return bool(self._call("Migrate", message, pb.Found, timeout_s, again=False).found)

    def drain(self, target: str | None = None, timeout_s: float = 60.0) -> int:
        """Make the engine refuse new requests, and wait at most ``timeout_s`` until no request runs. For operators.

        If there is a ``target``, running answers are moved to that engine. Returns the number of requests that still
        run at the end.
        """
        message = pb.DrainRequest(target=target or "", timeout_ms=max(1, int(timeout_s * 1000)))
        return int(self._call("Drain", message, pb.DrainReply, timeout_s + SLACK_S, again=False).left)

    # --- the connection ---------------------------------------------------------------------------------------------

    def _call(
        self, name: str, message: Any, reply: type[Any], timeout_s: float | None = None, again: bool = True
    ) -> Any:
        return self._remote.call(name, message, reply, timeout_s, again)

    def _replies(self, name: str, message: Any, kind: type[Any], timeout_s: float) -> Iterator[Any]:
        for reply in self._receive(name, message, timeout_s):
            yield kind.FromString(reply)

    def _receive(self, name: str, message: Any, timeout_s: float) -> Iterator[bytes]:
        stream = self._remote.receive(name, message.SerializeToString(), max(0.001, timeout_s))
        try:
            yield from stream
        except grpc.RpcError as error:
            self._remote.refuse(error)
        finally:
            end(stream)

    def connect_to(self, address: str) -> EngineClient:
        """Return a client of another engine, with the same credentials."""
        return EngineClient(address, **vars(self._credentials), timeout_s=self._timeout_s)


def url_of(address: str) -> str:
    """Return the URL that ``kvstore.connect`` would take for an address as engines print it."""
    if address.startswith("unix:"):
        return f"kv+unix://{address.removeprefix('unix:')}"
    return address if address.startswith(SCHEMES) else f"kv://{address}"
