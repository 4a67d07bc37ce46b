"""The calls of ``kvstore.v1.Engine``: from messages to an engine and back.

The engine works in a thread of its own and never waits for a caller: its events go into a mailbox per request, which a
coroutine empties as fast as its caller reads. What is in a mailbox is bounded by the request: ``max_tokens`` events and
one, or one per chunk of a prompt. A caller that reads nothing for ``STALL_S`` is disconnected and its request
cancelled.
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

SHARE_MAX: Final = 0.75  # largest share of the request limit for one caller
RETRY_AFTER_S: Final = 0.2
BEFORE_DEADLINE_S: Final = 0.2  # how long before its deadline a waiting call ends, to report the result

PING_MS_MIN: Final = 1000  # its clients watch it closely
MESSAGE_BYTES_ALL: Final = 256 << 20  # large requests, all together

Item = TypeVar("Item")


class ServedEngine(PulledEngine, Protocol):
    """The engine that is served. See ``engine.shell.engine``."""

    def submit(self, request: Request, emit: Callable[[Event], None]) -> Cancel:
        """Answer a prompt."""

    def prefill(self, request: Request, layout: Layout, hold_s: float, emit: Callable[[PrefillEvent], None]) -> Cancel:
        """Compute a prompt for another engine."""

    def cancel(self, request_id: str) -> bool:
        """End a request."""

    def release(self, request_id: str) -> bool:
        """End a prefill."""

    def status(self) -> dict[str, Any]:
        """What it is and how busy it is."""

    def set_role(self, role: Role, order: RoleOrder | None) -> None:
        """Change its role; ``order``: from a leading conductor."""

    def migrate(self, request_id: str, target: str) -> bool:
        """Let another engine continue a request."""

    def drain(self, target: str | None, timeout_s: float) -> int:
        """Refuse new requests; wait for running ones."""


class Served(Protocol):
    """The model, as far as the service needs it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""

    def layouts(self, page_tokens: int) -> tuple[Layout, ...]:
        """Layouts of pages of this many tokens, one per cache group."""


class Mailbox(Generic[Item]):
    """From any thread into the event loop it was made in. ``put`` never waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[Item] = deque()
        self._some = asyncio.Event()
        self._told = False

    def put(self, item: Item) -> None:
        """Add an event."""
        self._items.append(item)
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop has ended, and every reader with it
                self._loop.call_soon_threadsafe(self._some.set)

    async def take(self) -> list[Item]:
        """Take all events; waits for one."""
        while True:
            await self._some.wait()
            self._some.clear()
            self._told = False  # before the check: later events signal again
            found = []
            while self._items:
                found.append(self._items.popleft())
            if found:
                return found


class OwnedRequest(NamedTuple):
    """A request of a caller, under the id that the caller chose, until it can no longer be asked for."""

    request_id: str
    caller: Identity
    until_s: float


class Owners:
    """Maps requests to their owners, so that knowing an id grants no access: each caller has ids of its own, and the
    engine knows a request by a name that no caller chooses. Any thread may ``find``; the rest is the event loop's.
    """

    def __init__(self, requests_max: int) -> None:
        self._known: dict[str, OwnedRequest] = {}  # by the engine's name
        self._numbers = itertools.count(1)
        self._each_max = max(1, int(requests_max * SHARE_MAX))

    @contextlib.contextmanager
    def adding(self, request_id: str, caller: Identity, seconds: float) -> Iterator[str]:
        """Add a request; it is removed if the block fails. Yields the engine's name for it.

        Raises TooManyCalls if there is no room for more requests of this caller, InvalidRequest if its id is in use.
        """
        now_s = time.monotonic()
        self._known = {name: each for name, each in self._known.items() if each.until_s > now_s}
        theirs = [each.request_id for each in self._known.values() if each.caller == caller]
        if len(theirs) >= self._each_max and not caller.operator:
            raise TooManyCalls(f"{caller.name} has {self._each_max} requests here", RETRY_AFTER_S)
        if request_id in theirs:
            raise InvalidRequest("request_id", f"{request_id} is in use")
        name = f"{request_id}~{next(self._numbers)}"
        self._known[name] = OwnedRequest(request_id, caller, now_s + seconds)
        try:
            yield name
        except BaseException:
            self.drop(name)
            raise

    def drop(self, name: str) -> None:
        """Remove a request that has ended."""
        self._known.pop(name, None)

    def find(self, request_id: str, caller: Identity) -> str:
        """The engine's name for a request of this caller, or, for an operator, of any; the id if there is none.

        Raises PermissionDenied if it is not the caller's, or there is none, and the caller is not an operator.
        """
        found = [(each.caller, name) for name, each in list(self._known.items()) if each.request_id == request_id]
        own = [name for owner, name in found if owner == caller]
        if own:
            return own[0]
        if not caller.operator:
            raise PermissionDenied(f"request {request_id!r} is not one of {caller.name}'s")
        return found[0][1] if found else request_id


class EngineCalls:
    """All calls. Made in the event loop.

    Args:
        data_port: of the engine's data connections, for callers over TCP.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine: ServedEngine,
        model: Served,
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
        self._ends = ThreadPoolExecutor(1, "engine-ends")  # tells the engine that a caller has gone

    def close(self) -> None:
        """End the threads after their current work, which has a deadline."""
        self._ends.shutdown(wait=True)

    # --- answering --------------------------------------------------------------------------------------------------

    async def submit(self, call: Call, message: bytes) -> None:
        """Answer a prompt."""
        said = parse(pb.SubmitRequest, message)
        with self._counting():
            call.caller.check_salt(salt_of(said, self._config.salt))
            request = await call.quick(self._request, said, call.left_s)
            self._check_engines(call, request)
            mailbox: Mailbox[Event] = Mailbox()
            with self._owners.adding(request.id, call.caller, request.deadline_s) as name:
                inner = replace(request, id=name)
                cancel = await call.wait(self._engine.submit, inner, mailbox.put, undo=lambda cancel: cancel())
        tokens = tokens_bytes(request.tokens) if said.text else b""
        accepted = pb.Accepted(request_id=request.id, prompt_tokens=request.prompt_tokens, tokens=tokens)
        try:
            await call.send(pb.SubmitReply(accepted=accepted).SerializeToString())
            async for events in _until_end(call, mailbox):
                if isinstance(events[-1], Finished):
                    self._owners.drop(name)  # before its caller receives the end, and asks again
                for reply in replies_of(events):
                    await call.send(reply.SerializeToString())
        finally:
            self._owners.drop(name)
            self._later(cancel)  # if it has ended already, nothing happens

    def _request(self, said: pb.SubmitRequest, left_s: float) -> Request:
        """The request of a message. Blocks: it tokenises."""
        request = request_of(said, self._config.salt, min(left_s, self._config.request_s_max))
        if not request.text:
            return request
        return tokenized(request, np.array(self._model.tokenizer.encode(request.text), np.uint32))

    def _check_engines(self, call: Call, request: Request) -> None:
        """Only operators may name any engine: it receives the prompt, and this engine's own token."""
        if not call.caller.operator and not {*(request.prefill or ())} <= {*self._config.prefill}:
            raise PermissionDenied(f"{call.caller.name} may name only engines that this one was started with")

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except KVStoreError as error:
            self._tally.refused(error)
            raise

    # --- for other engines ------------------------------------------------------------------------------------------

    async def prefill(self, call: Call, message: bytes) -> None:
        """Compute a prompt for another engine, and keep its KV for a while."""
        said = parse(pb.PrefillRequest, message)
        hold_s = min(said.hold_ms / 1000 or self._config.hold_s, self._config.hold_s)
        with self._counting():
            if not said.request.request_id:
                raise InvalidRequest("request_id", "is missing: the KV is requested by it")
            call.caller.check_salt(salt_of(said.request, self._config.salt))
            theirs = await call.quick(layout_of, said.layout)
            if theirs != self._layout:
                raise VersionMismatch(explain_mismatch(self._layout, theirs))
            request = await call.quick(self._request, said.request, call.left_s)
            mailbox: Mailbox[PrefillEvent] = Mailbox()
            with self._owners.adding(request.id, call.caller, request.deadline_s + hold_s) as name:
                inner = replace(request, id=name)
                give_up = await call.wait(
                    self._engine.prefill, inner, theirs, hold_s, mailbox.put, undo=lambda give_up: give_up()
                )
        done = False
        try:
            async for events in _until_end(call, mailbox):
                for event in events:
                    if isinstance(event, Done):
                        done, event = True, Done(replace(event.handoff, request_id=request.id))
                    await call.send(prefill_reply(event, self._data_port()).SerializeToString())
        finally:
            if not done:
                self._owners.drop(name)
                self._later(give_up)

    def _later(self, what: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # this server has ended, and soon the engine
            self._ends.submit(what)

    async def release(self, call: Call, message: bytes) -> bytes:
        """End a prefill whose KV is no longer needed."""
        said = parse(pb.RequestId, message)
        name = self._owners.find(said.request_id, call.caller)
        found = await call.quick(self._engine.release, name)
        self._owners.drop(name)
        return pb.Found(found=found).SerializeToString()

    # --- about requests, and the engine -----------------------------------------------------------------------------

    async def cancel(self, call: Call, message: bytes) -> bytes:
        """End a request."""
        said = parse(pb.RequestId, message)
        name = self._owners.find(said.request_id, call.caller)
        return pb.Found(found=await call.quick(self._engine.cancel, name)).SerializeToString()

    async def status(self, call: Call, message: bytes) -> bytes:
        """What the engine is, how busy, and how fast."""
        parse(store_pb2.Empty, message)
        return await call.quick(lambda: document({**self._engine.status(), "done": self._tally.done}))

    async def set_role(self, call: Call, message: bytes) -> bytes:
        """Change what the engine does."""
        said = parse(pb.SetRoleRequest, message)
        call.caller.check_operator()
        try:
            role = Role(said.role)
        except ValueError:
            raise InvalidRequest("role", f"{said.role!r} is not one of {', '.join(Role)}") from None
        order = RoleOrder(said.revision, said.number) if said.HasField("revision") else None
        if order is not None and max(order) > REVISION_MAX:
            raise InvalidRequest("revision", f"must be at most {REVISION_MAX}, as must its number (got {max(order)})")
        await call.quick(self._engine.set_role, role, order)
        return store_pb2.Empty().SerializeToString()

    async def migrate(self, call: Call, message: bytes) -> bytes:
        """Let another engine continue a request."""
        said = parse(pb.MigrateRequest, message)
        call.caller.check_operator()
        if not said.target:
            raise InvalidRequest("target", "is missing: the address of another engine")
        name = self._owners.find(said.request_id, call.caller)
        found = await call.wait(self._engine.migrate, name, said.target)
        return pb.Found(found=found).SerializeToString()

    async def drain(self, call: Call, message: bytes) -> bytes:
        """Refuse new requests, and wait for running ones, or move them elsewhere."""
        said = parse(pb.DrainRequest, message)
        call.caller.check_operator()
        left_s = max(0.0, call.left_s - BEFORE_DEADLINE_S)
        timeout_s = min(said.timeout_ms / 1000, left_s) if said.timeout_ms else left_s
        left = await call.wait(self._engine.drain, said.target or None, timeout_s)
        return pb.DrainReply(left=left).SerializeToString()


async def _until_end(call: Call, mailbox: Mailbox[Any]) -> AsyncIterator[list[Any]]:
    """Events, up to and with the last one. Raises the error of a ``Failed``, after the events before it."""
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
    """Serves from ``start`` to ``stop``."""

    def __init__(self, config: EngineConfig, engine: ServedEngine, model: Served, tally: EngineTally) -> None:
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
        """See ``LoopServer``; then the data connections, next to each address."""
        super().start()
        self._pulls.start(self.addresses)

    def stop(self) -> None:
        """See ``LoopServer``."""
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
