"""Links: the connections of a conductor to engines and nodes, on its event loop.

Calls raise errors of ``kvstore.errors``, as those of every client do. The conductor's identity comes from the
environment (``KVSTORE_TOKEN``, ``KVSTORE_TLS_CA`` and so on).
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
from engine.client import KEEPALIVE, SLACK_S, url_of
from engine.conductor.state.engine_table import EngineAbout
from engine.conductor.state.measured_speed import MeasuredSpeed
from engine.model.request import AnswerTokens, Finished, Request, Role, RoleOrder, Token
from kvstore.client.remote.admin import document
from kvstore.client.remote.endpoint import CallerCredentials, endpoint
from kvstore.client.remote.node import OPTIONS
from kvstore.cluster.directory import GONE, AnnounceBatch
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable
from kvstore.model.replica import TIERS
from kvstore.pb import engine_pb2, store_pb2
from kvstore.wire.grpc import from_rpc

NODES: Final = "kvstore.v1.Store"
BLOCKING_ONLY: Final = grpc.experimental.ChannelOptions.SingleThreadedUnaryStream  # asyncio channels refuse this option
ASYNC_OPTIONS: Final = tuple((({key: value for key, value in OPTIONS if key != BLOCKING_ONLY}) | KEEPALIVE).items())


class AnswerLink(Protocol):
    """A connection to an engine of any kind."""

    def answer(self, request: Request) -> AsyncGenerator[AnswerTokens | Finished, None]:
        """Yield the engine's answer; the last part is a ``Finished``.

        Closing the generator ends the engine's work on the answer within a second.

        Raises:
            InvalidRequest: no engine can answer the request.
            KVStoreError: this engine is not responding; another one may.
        """

    def refusal(self, request: Request, is_started: bool) -> InvalidRequest | None:
        """Return why the engine cannot serve this request; None if it can.

        Args:
            is_started: True if the engine would have to continue an answer that another engine has started.
        """

    async def set_role(self, role: Role, order: RoleOrder, timeout_s: float) -> None:
        """Send an order of the leader. Raises KVStoreError if the engine refuses it, or is not responding."""


@dataclass(frozen=True, slots=True)
class KnownEngine:
    """An engine that has sent a description of itself.

    Attributes:
        layout: the layout of its pages; None means a foreign engine.
        model_path: the folder of its model's tokenizer; None if every byte is a token.
        speeds: what the conductor measures, if the engine does not report its speeds; otherwise None.
    """

    about: EngineAbout
    link: AnswerLink
    layout: store_pb2.Layout | None
    model_path: str | None
    speeds: MeasuredSpeed | None = None


class GrpcLink:
    """A gRPC connection. The first call connects it, and ``retire`` closes it. Belongs to one event loop."""

    def __init__(self, service: str, address: str) -> None:
        self.address = address
        remote = endpoint(url_of(address), CallerCredentials(), os.environ)
        self._service = service
        self._metadata = (("authorization", f"Bearer {remote.token}"),) if remote.token else ()
        self._streams, self._retired = 0, False
        options = list(ASYNC_OPTIONS)
        if remote.tls:
            credentials = grpc.ssl_channel_credentials(remote.ca, remote.key, remote.cert)
            self._channel = grpc.aio.secure_channel(remote.target, credentials, options)
        else:
            self._channel = grpc.aio.insecure_channel(remote.target, options)

    async def retire(self) -> None:
        """Close the connection as soon as no stream is open."""
        self._retired = True
        if not self._streams:
            await self._channel.close()

    async def _call(self, name: str, message: Any, reply: type[Any], timeout_s: float) -> Any:
        method = self._channel.unary_unary(
            f"/{self._service}/{name}",
            request_serializer=type(message).SerializeToString,
            response_deserializer=reply.FromString,
        )
        with _errors_from(self.address):
            return await method(message, timeout=timeout_s, metadata=self._metadata)

    async def _stream(self, name: str, message: Any, reply: type[Any], timeout_s: float) -> AsyncGenerator[Any, None]:
        """Yield replies as they come. Closing the generator cancels the call."""
        method = self._channel.unary_stream(
            f"/{self._service}/{name}",
            request_serializer=type(message).SerializeToString,
            response_deserializer=reply.FromString,
        )
        call = method(message, timeout=timeout_s, metadata=self._metadata)
        self._streams += 1
        try:
            with _errors_from(self.address):
                while (message := await call.read()) is not grpc.aio.EOF:
                    yield message
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
        """Return the engine's description and its load. Raises Unavailable if it is not responding."""
        return document(await self._call("Status", store_pb2.Empty(), Struct, timeout_s))

    async def set_role(self, role: Role, order: RoleOrder, timeout_s: float) -> None:
        """Send an order of the leader; see ``AnswerLink``."""
        await self._call("SetRole", set_role_request(role, order), store_pb2.Empty, timeout_s)

    def refusal(self, request: Request, is_started: bool) -> InvalidRequest | None:
        """Return an error if the request has parameters for engines of other systems."""
        unknown = next(iter(request.extra), None)
        return InvalidRequest(unknown, "unknown parameter") if unknown is not None else None

    async def answer(self, request: Request) -> AsyncGenerator[AnswerTokens | Finished, None]:
        """Yield the engine's answer; see ``AnswerLink``."""
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
        """Yield all pages of the node in batches, then the pages that it gains and loses, for ``timeout_s``."""
        async with contextlib.aclosing(
            self._stream("WatchPages", store_pb2.Empty(), store_pb2.PageBatch, timeout_s)
        ) as batches:
            async for batch in batches:
                marks = np.frombuffer(batch.marks, np.uint8)
                if len(batch.fingerprints) != 8 * len(marks):
                    sizes = f"got {len(batch.fingerprints)} bytes for {len(marks)} marks"
                    raise KVStoreError(f"{self.address}: fingerprints: must have 8 bytes for each mark ({sizes})")
                if len(marks) and int((marks & ~np.uint8(GONE)).max()) >= len(TIERS):
                    raise KVStoreError(f"{self.address}: a batch names an unknown tier")
                pages = np.frombuffer(batch.fingerprints, "<u8").astype(np.uint64)
                yield AnnounceBatch(self.name, batch.stream, batch.number, pages, marks, batch.whole)

    async def prefetch(
        self, layout: store_pb2.Layout, salt: str, adapter: str, tokens: npt.NDArray[np.uint32], timeout_s: float
    ) -> None:
        """Ask the node to load the full pages of these tokens into its memory, from its NVMe or from other nodes."""
        data = tokens_bytes(tokens)
        pages = store_pb2.Pages(layout=layout, salt=salt, adapter=adapter, tokens=data, whole_pages=True)
        await self._call("Prefetch", store_pb2.LookupRequest(pages=pages), store_pb2.LookupReply, timeout_s)


@contextlib.contextmanager
def _errors_from(address: str) -> Iterator[None]:
    """Translate the error of a failed call, and add the address of the other end if that is unavailable."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        translated = from_rpc(error)
        if type(translated) is NodeUnavailable:
            raise NodeUnavailable(f"{address}: {translated}") from None
        raise translated from None
