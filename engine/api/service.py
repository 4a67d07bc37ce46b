"""The gRPC calls of ``kvstore.v1.Engine``.

The engine has a thread of its own, which never waits for a caller. It puts the events of a request into a mailbox, and
a coroutine sends them as fast as the caller reads. The request bounds the number of events in a mailbox: ``max_tokens``
and the end of the answer, or one for each chunk of a prompt. If a caller reads nothing for ``gate.STALL_S``, the call
ends and the request is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import grpc
import numpy as np

from engine.api.metrics import EngineTally
from engine.api.pulling import PulledEngine, PullServer
from engine.api.wire import SERVICE, prefill_reply, replies_of, request_of, salt_of, tokenized, tokens_bytes
from engine.config import EngineConfig
from engine.model.layouts import explain_mismatch
from engine.model.request import (
    REVISION_MAX,
    Cancel,
    Done,
    Event,
    Failed,
    Finished,
    PrefillEvent,
    Request,
    Role,
    RoleOrder,
)
from engine.text.tokenizer import Tokenizer
from kvstore.errors import (
    InvalidRequest,
    KVStoreError,
    PermissionDenied,
    TooManyCalls,
    VersionMismatch,
)
from kvstore.model.layout import Layout
from kvstore.pb import engine_pb2 as pb
from kvstore.pb import store_pb2
from kvstore.server.gate import Call, Gate, parse
from kvstore.server.grpc_server import Limits, LoopServer, serve_methods
from kvstore.server.identities import Identity
from kvstore.server.request_cost import with_buffers
from kvstore.wire.grpc import document, layout_of

SHARE_MAX: Final = 0.75  # of the maximum number of requests, for one caller
RETRY_AFTER_S: Final = 0.2
BEFORE_DEADLINE_S: Final = 0.2  # how long before its deadline a drain ends, so that the reply arrives in time

PING_MS_MIN: Final = 1000  # clients may ping this often, to detect a suspended engine soon
MESSAGE_BYTES_ALL: Final = 256 << 20  # memory for all large requests together

Item = TypeVar("Item")


class ServedEngine(PulledEngine, Protocol):
    """The engine that is served. ``engine.shell.engine.Engine`` implements this, and has the details."""

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Cancel:
        """Begin to answer a prompt."""

    def prefill(self, request: Request, layout: Layout, hold_s: float, emit: Callable[[PrefillEvent], None]) -> Cancel:
        """Begin to compute a prompt for another engine."""

    def cancel(self, request_id: str) -> bool:
        """Cancel a request."""

    def release(self, request_id: str) -> bool:
        """End a prefill that is no longer needed."""

    def status(self) -> dict[str, Any]:
        """Return the engine's configuration, load and speed."""

    def set_role(self, role: Role, order: RoleOrder | None) -> None:
        """Change which requests the engine accepts. ``order``: the leading conductor's; None from an operator."""

    def migrate(self, request_id: str, target: str) -> bool:
        """Move a running request to another engine."""

    def drain(self, target: str | None, timeout_s: float) -> int:
        """Refuse new requests, and wait until no request runs."""


class EngineModel(Protocol):
    """The parts of a model that the service needs."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    def layouts(self, page_tokens: int) -> tuple[Layout, ...]:
        """Return the layouts of pages of ``page_tokens`` tokens, one for each cache group."""


class Mailbox(Generic[Item]):
    """A queue from any thread to the event loop in which it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._has_items = asyncio.Event()
        self._is_signalled = False

    def put(self, item: Item) -> None:
        """Add an item. Never waits. Any thread may call this."""
        self._items.append(item)
        if not self._is_signalled:
            self._is_signalled = True
            with contextlib.suppress(RuntimeError):  # the event loop has ended, and no coroutine reads
                self._loop.call_soon_threadsafe(self._has_items.set)

    async def take(self) -> list[Item]:
        """Wait for an item, then return and remove all items."""
        while True:
            await self._has_items.wait()
            self._has_items.clear()
            self._is_signalled = False  # before the queue is read, so that later items signal again
            items = []
            while self._items:
                items.append(self._items.popleft())
            if items:
                return items


class OwnedRequest(NamedTuple):
    """A request and the caller that owns it.

    Attributes:
        request_id: the id that the caller chose.
        until_s: when the entry may be dropped, even if the request was never ended.
    """

    request_id: str
    caller: Identity
    until_s: float


class Owners:
    """The requests of all callers, each with its owner, so that a caller has no access to requests of other callers.

    Request ids are unique only within one caller. The engine uses other names, which no caller chooses. Any thread may
    call ``find``. Only the event loop calls the other methods.
    """

    def __init__(self, requests_max: int) -> None:
        self._requests: dict[str, OwnedRequest] = {}  # by the engine's name
        self._numbers = itertools.count(1)
        self._requests_each_max = max(1, int(requests_max * SHARE_MAX))

    @contextlib.contextmanager
    def adding(self, request_id: str, caller: Identity, seconds: float) -> Iterator[str]:
        """Add a request for ``seconds``, and yield the engine's name for it. Remove it if the ``with`` block fails.

        Raises:
            TooManyCalls: the caller has its maximum number of requests.
            InvalidRequest: the caller has another request with this id.
        """
        now_s = time.monotonic()
        self._requests = {name: each for name, each in self._requests.items() if each.until_s > now_s}
        ids = [each.request_id for each in self._requests.values() if each.caller == caller]
        if len(ids) >= self._requests_each_max and not caller.operator:
            raise TooManyCalls(f"{caller.name} has the maximum of {self._requests_each_max} requests", RETRY_AFTER_S)
        if request_id in ids:
            raise InvalidRequest("request_id", f"{request_id} is in use")
        name = f"{request_id}~{next(self._numbers)}"
        self._requests[name] = OwnedRequest(request_id, caller, now_s + seconds)
        try:
            yield name
        except BaseException:
            self.drop(name)
            raise

    def drop(self, name: str) -> None:
        """Remove a request that has ended."""
        self._requests.pop(name, None)

    def find(self, request_id: str, caller: Identity) -> str:
        """Return the engine's name for a request of this caller.

        An operator also finds requests of other callers, and gets ``request_id`` if there is none.

        Raises PermissionDenied if the caller has no request with this id, and is not an operator.
        """
        requests = [(each.caller, name) for name, each in list(self._requests.items()) if each.request_id == request_id]
        own = [name for owner, name in requests if owner == caller]
        if own:
            return own[0]
        if not caller.operator:
            raise PermissionDenied(f"{caller.name} has no request {request_id!r}")
        return requests[0][1] if requests else request_id


class EngineCalls:
    """The methods of the gRPC service. Must be made in the event loop.

    Args:
        data_port: returns the TCP port of the engine's data connections.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: ServedEngine,
        model: EngineModel,
        tally: EngineTally,
        owners: Owners,
        data_port: Callable[[], int],
    ) -> None:
        self._config = config
        self._engine = engine
        self._model = model
        self._layout = model.layouts(config.page_tokens)[0]
        self._tally = tally
        self._owners = owners
        self._data_port = data_port
        self._cancels = ThreadPoolExecutor(1, "engine-ends")  # cancels requests whose call has ended

    def close(self) -> None:
        """Wait for the cancels that have begun, and end their thread."""
        self._cancels.shutdown(wait=True)

    # --- answering --------------------------------------------------------------------------------------------------

    async def submit(self, call: Call, data: bytes) -> None:
        """Answer a prompt. Sends the events of the answer."""
        message = parse(pb.SubmitRequest, data)
        with self._count_refusals():
            call.caller.check_salt(salt_of(message, self._config.salt))
            request = await call.quick(self._request, message, call.left_s)
            self._check_engines(call, request)
            mailbox: Mailbox[Event] = Mailbox()
            with self._owners.adding(request.id, call.caller, request.deadline_s) as name:
                inner = replace(request, id=name)
                cancel = await call.wait(self._engine.submit, inner, mailbox.put, undo=lambda cancel: cancel())
        tokens = tokens_bytes(request.tokens) if message.text else b""
        accepted = pb.Accepted(request_id=request.id, prompt_tokens=request.prompt_tokens, tokens=tokens)
        try:
            await call.send(pb.SubmitReply(accepted=accepted).SerializeToString())
            async for events in _until_end(call, mailbox):
                if isinstance(events[-1], Finished):
                    self._owners.drop(name)  # before the caller receives the end, because it may then use the id again
                for reply in replies_of(events):
                    await call.send(reply.SerializeToString())
        finally:
            self._owners.drop(name)
            self._run_later(cancel)  # does nothing if the request has ended

    def _request(self, message: pb.SubmitRequest, left_s: float) -> Request:
        """Return the request of a message. Tokenizes its text, so this may take long."""
        request = request_of(message, self._config.salt, min(left_s, self._config.request_s_max))
        if not request.text:
            return request
        return tokenized(request, np.array(self._model.tokenizer.encode(request.text), np.uint32))

    def _check_engines(self, call: Call, request: Request) -> None:
        """Refuse prefill engines that are not in the settings, unless the caller is an operator.

        A prefill engine receives the prompt and this engine's own token.
        """
        if not call.caller.operator and not {*(request.prefill or ())} <= {*self._config.prefill}:
            raise PermissionDenied(f"{call.caller.name} may only name prefill engines of this engine's settings")

    @contextlib.contextmanager
    def _count_refusals(self) -> Iterator[None]:
        try:
            yield
        except KVStoreError as error:
            self._tally.refused(error)
            raise

    # --- for other engines ------------------------------------------------------------------------------------------

    async def prefill(self, call: Call, data: bytes) -> None:
        """Compute a prompt for another engine, and hold its KV. Sends the events of the prefill."""
        message = parse(pb.PrefillRequest, data)
        hold_s = min(message.hold_ms / 1000 or self._config.hold_s, self._config.hold_s)
        with self._count_refusals():
            if not message.request.request_id:
                raise InvalidRequest("request_id", "must not be empty, because the KV is pulled by this id")
            call.caller.check_salt(salt_of(message.request, self._config.salt))
            theirs = await call.quick(layout_of, message.layout)
            if theirs != self._layout:
                raise VersionMismatch(explain_mismatch(self._layout, theirs))
            request = await call.quick(self._request, message.request, call.left_s)
            mailbox: Mailbox[PrefillEvent] = Mailbox()
            with self._owners.adding(request.id, call.caller, request.deadline_s + hold_s) as name:
                inner = replace(request, id=name)
                cancel = await call.wait(
                    self._engine.prefill, inner, theirs, hold_s, mailbox.put, undo=lambda cancel: cancel()
                )
        is_done = False
        try:
            async for events in _until_end(call, mailbox):
                for event in events:
                    if isinstance(event, Done):
                        is_done, event = True, Done(replace(event.handoff, request_id=request.id))
                    await call.send(prefill_reply(event, self._data_port()).SerializeToString())
        finally:
            if not is_done:
                self._owners.drop(name)
                self._run_later(cancel)

    def _run_later(self, cancel: Cancel) -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended, and the engine cancels all requests soon
            self._cancels.submit(cancel)

    async def release(self, call: Call, data: bytes) -> bytes:
        """End a prefill whose KV is no longer needed."""
        message = parse(pb.RequestId, data)
        name = self._owners.find(message.request_id, call.caller)
        found = await call.quick(self._engine.release, name)
        self._owners.drop(name)
        return pb.Found(found=found).SerializeToString()

    # --- operations -------------------------------------------------------------------------------------------------

    async def cancel(self, call: Call, data: bytes) -> bytes:
        """Cancel a request."""
        message = parse(pb.RequestId, data)
        name = self._owners.find(message.request_id, call.caller)
        return pb.Found(found=await call.quick(self._engine.cancel, name)).SerializeToString()

    async def status(self, call: Call, data: bytes) -> bytes:
        """Return the engine's configuration, load and speed."""
        parse(store_pb2.Empty, data)
        return await call.quick(lambda: document({**self._engine.status(), "done": self._tally.done}))

    async def set_role(self, call: Call, data: bytes) -> bytes:
        """Change which requests the engine accepts."""
        message = parse(pb.SetRoleRequest, data)
        call.caller.check_operator()
        try:
            role = Role(message.role)
        except ValueError:
            raise InvalidRequest("role", f"must be one of {', '.join(Role)} (got {message.role!r})") from None
        order = RoleOrder(message.revision, message.number) if message.HasField("revision") else None
        if order is not None and max(order) > REVISION_MAX:
            raise InvalidRequest("revision", f"revision and number must be at most {REVISION_MAX} (got {max(order)})")
        await call.quick(self._engine.set_role, role, order)
        return store_pb2.Empty().SerializeToString()

    async def migrate(self, call: Call, data: bytes) -> bytes:
        """Move a running request to another engine."""
        message = parse(pb.MigrateRequest, data)
        call.caller.check_operator()
        if not message.target:
            raise InvalidRequest("target", "must be the address of another engine")
        name = self._owners.find(message.request_id, call.caller)
        found = await call.wait(self._engine.migrate, name, message.target)
        return pb.Found(found=found).SerializeToString()

    async def drain(self, call: Call, data: bytes) -> bytes:
        """Refuse new requests, and wait until no request runs. Moves answers to another engine if there is a target."""
        message = parse(pb.DrainRequest, data)
        call.caller.check_operator()
        left_s = max(0.0, call.left_s - BEFORE_DEADLINE_S)
        timeout_s = min(message.timeout_ms / 1000, left_s) if message.timeout_ms else left_s
        running = await call.wait(self._engine.drain, message.target or None, timeout_s)
        return pb.DrainReply(left=running).SerializeToString()


async def _until_end(call: Call, mailbox: Mailbox[Any]) -> AsyncIterator[list[Any]]:
    """Yield all events, including the last one. Raises the error of a ``Failed`` after the events before it."""
    while True:
        with call.waits():
            events = await mailbox.take()
        last = events[-1]
        if isinstance(last, Failed):
            if len(events) > 1:
                yield events[:-1]
            raise last.error
        yield events
        if isinstance(last, Finished | Done):
            return


class EngineServer(LoopServer):
    """The server of an engine's gRPC calls and data connections. Serves from ``start`` to ``stop``."""

    def __init__(self, config: EngineConfig, engine: ServedEngine, model: EngineModel, tally: EngineTally) -> None:
        limits = Limits(
            rpcs_max=config.rpcs_max,
            call_s_max=config.request_s_max,
            buffer_bytes=MESSAGE_BYTES_ALL,
            streams_max=config.rpcs_max,
            ping_ms_min=PING_MS_MIN,
        )
        super().__init__("engine-api", SERVICE, config, limits)
        self._served = config, engine, model, tally
        self._owners = Owners(config.requests_max)
        self._pulls = PullServer(config, engine, self.identities.find, self._owners.find)

    def start(self) -> None:
        """Start the gRPC server, then listen for data connections next to each of its addresses."""
        super().start()
        self._pulls.start(self.addresses)

    def stop(self) -> None:
        """End the gRPC server, then all data connections."""
        super().stop()
        self._pulls.stop()

    def _open(self, gate: Gate, ends: contextlib.ExitStack) -> grpc.GenericRpcHandler:
        self._calls = calls = EngineCalls(*self._served, self._owners, lambda: self._pulls.port)
        unary = {
            "Release": calls.release,
            "Cancel": calls.cancel,
            "Status": calls.status,
            "SetRole": calls.set_role,
            "Migrate": calls.migrate,
            "Drain": calls.drain,
        }
        sending = {"Submit": calls.submit, "Prefill": calls.prefill}
        return serve_methods(gate, SERVICE, with_buffers(SERVICE, unary), with_buffers(SERVICE, sending))

    def _on_calls_end(self) -> None:
        self._calls.close()
