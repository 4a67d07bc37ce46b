"""Links: connections of a conductor to engines and nodes, on its event loop.

Errors are those of ``kvstore.errors``, as for every client; our identity comes from the environment (``KVSTORE_TOKEN``,
``KVSTORE_TLS_CA`` and so on).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import grpc.experimental
import numpy as np
import numpy.typing as npt
from google.protobuf.struct_pb2 import Struct

from engine.api.wire import SERVICE as ENGINES
from engine.api.wire import events_of, set_role_request, submit_request, tokens_bytes
from engine.client import SLACK_S, WATCH, url_of
from engine.conductor.state.engine_table import EngineAbout
from engine.conductor.state.measured_speed import MeasuredSpeed
from engine.model.request import AnswerTokens, Finished, Request, Role, RoleOrder, Token
from kvstore.client.remote.admin import document
from kvstore.client.remote.endpoint import GivenCredentials, endpoint
from kvstore.client.remote.node import OPTIONS
from kvstore.cluster.directory import GONE, TIERS, AnnounceBatch
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable
from kvstore.pb import engine_pb2, store_pb2
from kvstore.wire.grpc import from_rpc

NODES: Final = "kvstore.v1.Store"
NOT_ASYNC: Final = grpc.experimental.ChannelOptions.SingleThreadedUnaryStream
OPTIONS_HERE: Final = tuple((({key: value for key, value in OPTIONS if key != NOT_ASYNC}) | WATCH).items())


class AnswerLink(Protocol):
    """A connection to an engine of any kind."""

    def answer(self, request: Request) -> AsyncGenerator[AnswerTokens | Finished, None]:
        """The engine's answer: one ``Finished`` at the end. Closing it ends the work there within a second.

        Raises:
            InvalidRequest: no engine would answer it.
            KVStoreError: this engine does not; another one may.
        """

    def why_not(self, request: Request, begun: bool) -> InvalidRequest | None:
        """Why it cannot answer this, or continue an answer that has ``begun``; None: it can."""

    async def set_role(self, role: Role, order: RoleOrder, timeout_s: float) -> None:
        """Carry out an order of the leader. Raises KVStoreError if the engine refuses it, or does not answer."""


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """An engine that has described itself.

    Attributes:
        layout: of its pages; None: a foreign engine.
        model_path: the folder of its model's tokenizer; None: every byte is a token.
        speeds: observed, for an engine that does not report them.
    """

    about: EngineAbout
    link: AnswerLink
    layout: store_pb2.Layout | None
    model_path: str | None
    speeds: MeasuredSpeed | None = None


class GrpcLink:
    """One connection. Made unconnected -> connected by the first call -> ``retire``. Belongs to one event loop."""

    def __init__(self, service: str, address: str) -> None:
        self.address = address
        ours = endpoint(url_of(address), GivenCredentials(), os.environ)
        self._service = service
        self._metadata = (("authorization", f"Bearer {ours.token}"),) if ours.token else ()
        self._streams, self._retired = 0, False
        options = list(OPTIONS_HERE)
        if ours.tls:
            credentials = grpc.ssl_channel_credentials(ours.ca, ours.key, ours.cert)
            self._channel = grpc.aio.secure_channel(ours.target, credentials, options)
        else:
            self._channel = grpc.aio.insecure_channel(ours.target, options)

    async def retire(self) -> None:
        """End the connection with the last stream under way; at once if there is none."""
        self._retired = True
        if not self._streams:
            await self._channel.close()

    async def _call(self, name: str, message: Any, reply: type[Any], timeout_s: float) -> Any:
        method = self._channel.unary_unary(
            f"/{self._service}/{name}",
            request_serializer=type(message).SerializeToString,
            response_deserializer=reply.FromString,
        )
        with _named(self.address):
            return await method(message, timeout=timeout_s, metadata=self._metadata)

    async def _stream(self, name: str, message: Any, reply: type[Any], timeout_s: float) -> AsyncGenerator[Any, None]:
        """Replies as they come. Closing it cancels the call."""
        method = self._channel.unary_stream(
            f"/{self._service}/{name}",
            request_serializer=type(message).SerializeToString,
            response_deserializer=reply.FromString,
        )
        call = method(message, timeout=timeout_s, metadata=self._metadata)
        self._streams += 1
        try:
            with _named(self.address):
                while (said := await call.read()) is not grpc.aio.EOF:
                    yield said
        finally:
            call.cancel()
            self._streams -= 1
            if self._retired and not self._streams:
                await self._channel.close()


class EngineLink(GrpcLink):
    """A connection to an engine."""

    def __init__(self, address: str) -> None:
        super().__init__(ENGINES, address)

    async def status(self, timeout_s: float) -> dict[str, Any]:
        """What it is and how busy. Raises Unavailable if it does not answer."""
        return document(await self._call("Status", store_pb2.Empty(), Struct, timeout_s))

    async def set_role(self, role: Role, order: RoleOrder, timeout_s: float) -> None:
        """See ``AnswerLink``."""
        await self._call("SetRole", set_role_request(role, order), store_pb2.Empty, timeout_s)

    def why_not(self, request: Request, begun: bool) -> InvalidRequest | None:
        """See ``AnswerLink``."""
        unknown = next(iter(request.extra), None)
        return InvalidRequest(unknown, "unknown parameter") if unknown is not None else None

    async def answer(self, request: Request) -> AsyncGenerator[AnswerTokens | Finished, None]:
        """See ``AnswerLink``."""
        message = submit_request(request)
        async with contextlib.aclosing(
            self._stream("Submit", message, engine_pb2.SubmitReply, request.deadline_s + SLACK_S)
        ) as replies:
            async for reply in replies:
                tokens: list[Token] = []
                for event in events_of(reply):
                    if isinstance(event, Finished):
                        yield event
                        return
                    assert isinstance(event, Token), event
                    tokens.append(event)
                if tokens:
                    yield AnswerTokens(tuple(token.id for token in tokens), "".join(token.text for token in tokens))


class NodeLink(GrpcLink):
    """A connection to a node."""

    def __init__(self, name: str, address: str) -> None:
        super().__init__(NODES, address)
        self.name = name

    async def pages(self, timeout_s: float) -> AsyncGenerator[AnnounceBatch, None]:
        """All its pages in batches, then what comes and goes, until the deadline nears."""
        async with contextlib.aclosing(
            self._stream("WatchPages", store_pb2.Empty(), store_pb2.PageBatch, timeout_s)
        ) as batches:
            async for batch in batches:
                marks = np.frombuffer(batch.marks, np.uint8)
                if len(batch.fingerprints) != 8 * len(marks):
                    raise KVStoreError(f"{self.address}: a batch has {len(marks)} marks, and fingerprints of others")
                if len(marks) and int((marks & ~np.uint8(GONE)).max()) >= len(TIERS):
                    raise KVStoreError(f"{self.address}: a batch names an unknown tier")
                pages = np.frombuffer(batch.fingerprints, "<u8").astype(np.uint64)
                yield AnnounceBatch(self.name, batch.stream, batch.number, pages, marks, batch.whole)

    async def prefetch(
        self, layout: store_pb2.Layout, salt: str, adapter: str, tokens: npt.NDArray[np.uint32], timeout_s: float
    ) -> None:
        """Ask it to bring the full pages of these tokens into its memory, from its NVMe or from other nodes."""
        said = store_pb2.Pages(layout=layout, salt=salt, adapter=adapter, tokens=tokens_bytes(tokens), whole_pages=True)
        await self._call("Prefetch", store_pb2.LookupRequest(pages=said), store_pb2.LookupReply, timeout_s)


@contextlib.contextmanager
def _named(address: str) -> Iterator[None]:
    """The error of a failed call, with the name of the other end."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        meant = from_rpc(error)
        raise (NodeUnavailable(f"{address}: {meant}") if type(meant) is NodeUnavailable else meant) from None
