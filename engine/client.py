"""EngineClient: an engine for programs, and for other engines.

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
# A suspended engine, or one whose machine has gone, is detected after the sum of these milliseconds, however
# long its answer may take. (Not ``keepalive_timeout_ms``: a ping for another reason may be on its way instead.)
WATCH: Final = {
    "grpc.keepalive_time_ms": 3000,
    "grpc.http2.ping_timeout_ms": 4000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.min_reconnect_backoff_ms": 2000,  # also how long one attempt to connect may take; a busy engine needs a while
}
SLACK_S: Final = 2.0  # a call outlives its request by that much, so that the engine says itself what is late


@dataclass(frozen=True)
class Answer:
    """A whole answer. ``engines``: addresses that gave it, in order; more than one if it had to be resumed
    elsewhere.
    """

    tokens: tuple[int, ...]
    text: str
    reason: str
    usage: Usage
    engines: tuple[str, ...] = ()


class _RemoteEngine(RemoteNode):
    service = f"/{SERVICE}/"
    options = tuple((dict(OPTIONS) | WATCH).items())


class EngineClient:
    """A connection to one engine; threads may share it.

    Life: made (nothing is sent) -> connected by the first call, and reconnected automatically after a loss ->
    ``close``, being dropped, or the end of the process.

    Args:
        address: ``HOST:PORT``, ``kv://HOST:PORT`` or ``unix:/PATH``.
        token, tls_ca, tls_cert, tls_key, tls_server_name: who we are and whom to trust; those not given come from the
            environment, as for ``kvstore.connect``.
        timeout_s: of calls that answer at once.

    Raises:
        InvalidRequest: the address or the credentials make no sense.
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
        self._data_port = 0  # as the engine said last

    def close(self) -> None:
        """End the connection; calls under way fail."""
        self._remote.close()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- answers ----------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, *, resume: Sequence[str] = (), **how: Any) -> Answer:
        """The whole answer to a prompt. Arguments and errors as ``stream``."""
        answer = ResumableAnswer(self, user_request(prompt, **how), tuple(resume))
        *drawn, last = answer.events()
        assert isinstance(last, Finished), "a stream ends with Finished, or raises"
        tokens = tuple(event.id for event in drawn if isinstance(event, Token))
        text = "".join(event.text for event in (*drawn, last))
        return Answer(tokens, text, last.reason, last.usage, tuple(answer.engines))

    def stream(
        self, prompt: Prompt, *, resume: Sequence[str] = (), **how: Any
    ) -> Generator[Token | Finished, None, None]:
        """The tokens of an answer as they are drawn, last ``Finished``. Closing the iterator cancels the request.

        Args:
            prompt: text, which the engine tokenises, or token ids.
            resume: engines that go on where this one fails or dies in the middle: tokens are drawn as they would have
                been here, and none comes twice. Each is asked once.
            how: fields of ``Sampling`` (``max_tokens``, ``temperature``, ``top_p``, ``seed``, ``stop``,
                ``ignore_eos``) and of ``Request`` (``id``, ``salt``, ``deadline_s``, ``prefill``,
                ``handoff``, ``source``, ``grain``, ``use_pool``, ``allow_lossy``, ``retention``: a
                ``kvstore.Retention``, or a list of them for ranges of the prompt's tokens).

        Raises:
            InvalidRequest: the engine, or this call, refuses the request; names the field.
            NodeUnavailable: no engine answers, or the engine was lost and so were those to resume at.
            TooManyCalls: it has enough to do.
            DeadlineExceeded: there was no whole answer in time.
        """
        return ResumableAnswer(self, user_request(prompt, **how), tuple(resume)).events()

    def submit(self, request: Request) -> Iterator[Event]:
        """The events of one request at this engine, with nothing around it. Raises what ``stream`` does."""
        message = submit_request(request)
        for reply in self.replies(message, request.deadline_s):
            yield from events_of(reply)

    def replies(self, message: pb.SubmitRequest, deadline_s: float) -> Iterator[pb.SubmitReply]:
        """The replies to a request, as messages."""
        yield from self._replies("Submit", message, pb.SubmitReply, deadline_s + SLACK_S)

    # --- hand-offs --------------------------------------------------------------------------------------------------

    def prefill(
        self, request: Request, layout: Layout, hold_s: float | None = None, *, timeout_s: float | None = None
    ) -> Iterator[PrefillEvent]:
        """Have a prompt computed: ``Admitted``, ``Progress``, last ``Done``. Closing the iterator before gives it up.

        Args:
            layout: of the engine that is to use the KV.
            hold_s: how long the KV is kept then; None: as long as that engine is set up to.

        Raises:
            VersionMismatch: that engine's layout differs; says in which fields.
            InvalidRequest, NodeUnavailable, TooManyCalls, DeadlineExceeded: as ``stream``.
        """
        message = pb.PrefillRequest(
            request=submit_request(request),
            layout=layout_message(layout),
            hold_ms=int((hold_s or 0) * 1000),
        )
        left_s = timeout_s if timeout_s is not None else request.deadline_s + SLACK_S
        for reply in self._replies("Prefill", message, pb.PrefillReply, left_s):
            if reply.HasField("admitted"):
                self._data_port = reply.admitted.data_port
            yield prefill_event(reply)

    def pull(
        self, request_id: str, token_start: int = 0, codec: str = "none", *, timeout_s: float | None = None
    ) -> Generator[Piece, None, None]:
        """The KV of a prefill that was admitted, as it is computed. Each piece is read into its place before the next
        one is asked for, and its user compares the checksum.

        Raises:
            InvalidRequest: there is no such prefill, or the start or the codec make no sense.
            PermissionDenied: it belongs to another caller.
            NodeUnavailable: the engine, or the prefill, has gone.
            DeadlineExceeded: not everything came in time.
        """
        credentials = dial_credentials(self._credentials, self._endpoint)
        left_s = timeout_s if timeout_s is not None else ANSWER_S
        yield from pull(self._data_address(), credentials, request_id, token_start, codec, left_s)

    def _data_address(self) -> str:
        target = self._endpoint.target
        if target.startswith(UNIX):
            return target + DATA_SUFFIX
        if not self._data_port:
            raise NodeUnavailable(f"engine {self.address} has told of no data connections: it is of another version")
        host = target.removeprefix("dns:///").removeprefix("ipv6:").rpartition(":")[0]
        return f"{host}:{self._data_port}"

    def release(self, request_id: str) -> bool:
        """End a prefill whose KV is no longer needed. Returns whether there was one."""
        return bool(self._call("Release", pb.RequestId(request_id=request_id), pb.Found).found)

    # --- requests and the engine ------------------------------------------------------------------------------------

    def cancel(self, request_id: str) -> bool:
        """End a request; its caller gets ``Finished("cancelled")``. Returns whether there was one."""
        return bool(self._call("Cancel", pb.RequestId(request_id=request_id), pb.Found).found)

    def status(self, timeout_s: float | None = None) -> dict[str, Any]:
        """What the engine is, how busy, and how fast."""
        return document(self._call("Status", store_pb2.Empty(), Struct, timeout_s))

    def set_role(self, role: Role | str, order: RoleOrder | None = None) -> None:
        """Change what the engine does; for operators. ``order``: of a leader among conductors."""
        self._call("SetRole", set_role_request(role, order), store_pb2.Empty)

    def migrate(self, request_id: str, target: str, timeout_s: float = 60.0) -> bool:
        """Let the engine at ``target`` continue a request; for operators. Returns whether there was one."""
        message = pb.MigrateRequest(request_id=request_id, target=target)
        return bool(self._call("Migrate", message, pb.Found, timeout_s, again=False).found)

    def drain(self, target: str | None = None, timeout_s: float = 60.0) -> int:
        """Take no new requests, and wait for those that run; where there is a ``target`` they go on there. How many
        still run then. For operators."""
        message = pb.DrainRequest(target=target or "", timeout_ms=max(1, int(timeout_s * 1000)))
        return int(self._call("Drain", message, pb.DrainReply, timeout_s + SLACK_S, again=False).left)

    # --- inside -----------------------------------------------------------------------------------------------------

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
        """A client of another engine, with the same credentials."""
        return EngineClient(address, **vars(self._credentials), timeout_s=self._timeout_s)


def url_of(address: str) -> str:
    """``HOST:PORT`` and ``unix:/PATH``, as engines print them, as ``kvstore.connect`` has them."""
    if address.startswith("unix:"):
        return f"kv+unix://{address.removeprefix('unix:')}"
    return address if address.startswith(SCHEMES) else f"kv://{address}"
