"""Gate: admits gRPC calls. It identifies the caller, makes room, limits the call's time, and sets the status of a
failure.

**Requests that do not arrive.** The gate identifies a caller by metadata, before it reads anything of the request. A
call whose request does not arrive gives way to calls that need its place, and ends soon in any case. The time in which
the event loop is late does not count, because the request may have arrived unread.

**Work that blocks** runs in threads (``Call.quick``, ``run``, ``wait``), in steps of a few MiB each. A call that is
cancelled or past its deadline ends at once. Its current step runs to its end, and its thread and memory count as used
until then.

**Calls that would be late.** A call that cannot be answered in time is refused at once. Lanes and buffers estimate the
wait for threads and memory. ``Pressure`` estimates the wait for the event loop, which has no queue that we can see. It
knows how late the loop is, and how many calls end per second. A new call takes as long as the calls before it need to
end. Worked example: the loop is 8 ms late, 900 calls end per second, and 300 are running. The next call will take a
third of a second. Estimates are rough, so it is admitted if it has two thirds of a second left (``MARGIN`` is 2). Calls
count by owner, as in ``limits.Shares``: with n running calls, an owner's next call comes after these n, and after at
most n + 1 of each other owner. A call that waits for its caller is not running.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvstore import boundary
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, TooManyCalls, Unauthenticated
from kvstore.limits import Lane, Shares, call_soon
from kvstore.server.call_counts import Calls
from kvstore.server.grpc_connections import GrpcConnections
from kvstore.server.identities import LOCAL, UNKNOWN, Identities, Identity
from kvstore.wire.grpc import status_of

LOOK_S: Final = 0.02
LOOK_S_MAX: Final = 2 * LOOK_S  # the most that one look adds to ``on_time_s``
WINDOW_S: Final = 0.1  # ended calls are counted over this time
LAG_S_MIN: Final = 0.002  # a loop with less lag is not overloaded
LOOP_TURNS: Final = 4  # turns of the loop that a call takes at least: request, step, reply, end
MARGIN: Final = 2.0  # a call is admitted if it will probably end in half of the time it has
RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
_WEIGHT: Final = 0.3  # of the newest look
_WEIGHT_LESS: Final = 0.1  # of a lower rate: a machine that pauses for a moment is not slower


class Pressure:
    """How busy the event loop is. Used only in the event loop.

    Attributes:
        lag_s: how late the loop recently ran timers.
        on_time_s: a clock that nearly stops while the loop is late, because requests may have arrived unread.
        ends_per_s: how many calls can end per second, as observed; 0 if not known yet.
        running: running calls by owner, without calls that wait for their caller.
    """

    def __init__(self) -> None:
        self.lag_s = 0.0
        self.on_time_s = 0.0
        self.ends_per_s = 0.0
        self.running: Counter[Identity] = Counter()
        self._ends = 0
        self._began_s: float | None = None  # when the window began
        self._busy = True  # the loop was busy at every look of this window

    @contextlib.contextmanager
    def count_running(self, owner: Identity) -> Iterator[None]:
        """Count an admitted call as running."""
        self.running[owner] += 1
        try:
            yield
        finally:
            self._less(owner)
            self._ends += 1

    @contextlib.contextmanager
    def count_waiting(self, owner: Identity) -> Iterator[None]:
        """Do not count a call as running while it waits for its caller."""
        self._less(owner)
        try:
            yield
        finally:
            self.running[owner] += 1

    def _less(self, owner: Identity) -> None:
        self.running[owner] -= 1
        if not self.running[owner]:
            del self.running[owner]

    def check(self, owner: Identity, left_s: float) -> None:
        """Raise TooManyCalls if a call of this owner that begins now would not end within ``left_s``."""
        if self.lag_s < LAG_S_MIN or self.running.total() < LOOP_TURNS:
            return  # the loop is not late because of too many calls
        expected_s = LOOP_TURNS * self.lag_s
        if self.ends_per_s:
            mine = self.running[owner]
            before = sum(min(calls, mine + 1) for other, calls in self.running.items() if other != owner) + mine
            expected_s = max(expected_s, MARGIN * before / self.ends_per_s)
        if expected_s > left_s:
            retry_s = min(max(expected_s - left_s, RETRY_S_MIN), RETRY_S_MAX)
            raise TooManyCalls("there are too many calls to answer this one in time", retry_s, "late")

    async def look(self) -> None:
        """Sleep for ``LOOK_S`` and update the numbers. The server calls this repeatedly."""
        clock = asyncio.get_running_loop().time
        last_s = clock()
        if self._began_s is None:
            self._began_s = last_s
        await asyncio.sleep(LOOK_S)
        now_s = clock()
        self.lag_s += _WEIGHT * (max(0.0, now_s - last_s - LOOK_S) - self.lag_s)
        self.on_time_s += min(now_s - last_s, LOOK_S_MAX)
        self._busy = self._busy and self.running.total() >= LOOP_TURNS
        if now_s - self._began_s >= WINDOW_S:
            self._count(self._ends / (now_s - self._began_s))
            self._ends, self._busy, self._began_s = 0, True, now_s

    def _count(self, rate: float) -> None:
        """Update ``ends_per_s`` with the rate of a window. This rate is a lower bound of what is possible. It is an
        upper bound too if the loop was always busy."""
        if rate > self.ends_per_s:
            self.ends_per_s += _WEIGHT * (rate - self.ends_per_s) if self.ends_per_s else rate
        elif self._busy and self._ends:
            self.ends_per_s += _WEIGHT_LESS * (rate - self.ends_per_s)


RETRY_AFTER_S: Final = 0.1
STALL_S: Final = 20.0  # a stream holds buffers, so it ends if its caller reads or sends nothing for this long
FIRST_MESSAGE_S: Final = 10.0  # for a request to arrive after its headers, in the time of ``on_time_s``
HALF_OPEN_S: Final = 0.25  # without room, calls that have waited this long for their request give way
MESSAGE_BYTES_FREE: Final = 64 << 10  # a larger request takes buffers while its call runs ...
MESSAGE_COPIES: Final = 4  # ... this many times its size: its bytes, the message, its keys and tokens
CALLS_OUTSIDE: Final = 4  # times ``rpcs_max``: calls that are entering the gate or being refused
QUICK_THREADS: Final = 4  # for work that only reads the index or asks the node
READ_THREADS: Final = 8  # for work that copies or reads pages
WAIT_THREADS: Final = 8  # for work that may wait for space; so writers of a full node do not delay its readers
TOKEN_BYTES_MAX: Final = 4096

Item = TypeVar("Item")
Request = TypeVar("Request", bound=Message)
Value = TypeVar("Value")


class Threads:
    """The threads for blocking work. Each call runs one step in them at a time. Made in the event loop."""

    def __init__(self) -> None:
        self.quick = Lane(QUICK_THREADS, "quick")
        self.read = Lane(READ_THREADS, "read")
        self.wait = Lane(WAIT_THREADS, "wait")

    def close(self) -> None:
        """See ``Lane.close``."""
        for lane in (self.quick, self.read, self.wait):
            lane.close()


class Call:
    """One admitted call, with its caller and its deadline (``time.monotonic``). Exists while its handler runs."""

    def __init__(self, gate: Gate, caller: Identity, context: Any, deadline: float) -> None:
        self.caller = caller
        self.deadline = deadline
        self._gate = gate
        self._context = context
        self._step: Future[Any] | None = None
        self._buffer_bytes = 0  # bytes of buffers
        self._has_request = False  # whether the first message has arrived

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, not negative."""
        return max(0.0, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raise Unauthenticated if the caller's identity has expired or was removed."""
        self._gate.identities.check(self.caller)

    async def quick(
        self, work: Callable[..., Value], *args: Any, undo: Callable[[Value], object] | None = None
    ) -> Value:
        """Run ``work``, which neither copies much nor waits, in a thread. ``undo``: see ``wait``."""
        return await self._run(self._gate.threads.quick, partial(work, *args), undo)

    async def run(self, work: Callable[..., Value], *args: Any) -> Value:
        """Run ``work``, which reads or copies a few MiB, in a thread."""
        return await self._run(self._gate.threads.read, partial(work, *args))

    async def wait(
        self, work: Callable[..., Value], *args: Any, undo: Callable[[Value], object] | None = None
    ) -> Value:
        """Run ``work``, which may wait for space, in a thread. ``undo``: called with the result if the call ends first,
        so that nothing stays reserved for a caller that did not receive it."""
        return await self._run(self._gate.threads.wait, partial(work, *args), undo)

    async def _run(self, lane: Lane, work: Callable[[], Value], undo: Callable[[Value], object] | None = None) -> Value:
        self.check()
        begun = self._step is not None or self._buffer_bytes > 0
        return await lane.run(self._on_start, work, undo, self.caller, self.left_s, begun)

    def waits(self) -> contextlib.AbstractContextManager[None]:
        """Do not count the call as running while it waits for its caller inside this context."""
        return self._gate.pressure.count_waiting(self.caller)

    def _on_start(self, step: Future[Any]) -> None:
        self._step = step

    @contextlib.asynccontextmanager
    async def buffers(self, size: int) -> AsyncIterator[None]:
        """Take ``size`` bytes of the node's buffers. They are given back when the last step that may use them has
        ended."""
        budget = self._gate.budget
        size = await budget.take(size, min(self.left_s, self._gate.buffers_wait_s), self.caller, self._buffer_bytes)
        self._buffer_bytes += size
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._buffer_bytes -= size
            if self._step is None or self._step.done():
                budget.give(size, self.caller, time.monotonic() - began_s)
            else:  # the call has ended, but a thread still uses the buffers
                loop = asyncio.get_running_loop()
                self._step.add_done_callback(lambda _: call_soon(loop, partial(budget.give, size, self.caller)))

    async def send(self, message: bytes) -> None:
        """Send one reply of a stream. Waits until the transport accepts it. Checks the caller's identity."""
        self.check()
        with _limit_stall("took"), _end_if_gone(), self.waits():
            async with asyncio.timeout(self._gate.stall_s):
                await self._context.write(message)
        self._gate.calls.sent_bytes += len(message)

    @contextlib.asynccontextmanager
    async def request(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Receive the only message of a call. A large message takes buffers."""
        message = await self.receive(requests)
        if message is None:
            raise InvalidRequest("request", "is missing")
        if len(message) <= MESSAGE_BYTES_FREE:
            yield message
            return
        async with self.buffers(MESSAGE_COPIES * len(message)):
            yield message

    async def receive(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """Return the next message of a stream, or None at its end. Checks the caller's identity."""
        if not self._has_request:
            message = await self.first(requests)
        else:
            with _limit_stall("sent"), self.waits():
                async with asyncio.timeout(self._gate.stall_s):
                    message = await anext(requests, None)
        self._gate.calls.received_bytes += len(message or b"")
        self.check()
        return message

    async def first(self, requests: AsyncIterator[Item]) -> Item | None:
        """Return the first message. It has to arrive soon."""
        try:
            async with self._gate.half_open(self):
                with self.waits():
                    return await anext(requests, None)
        except TimeoutError:
            raise DeadlineExceeded("the request did not come in time") from None
        finally:
            self._has_request = True


@contextlib.contextmanager
def _limit_stall(verb: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded(f"the caller {verb} nothing for too long, and its stream holds buffers") from None


def parse(kind: type[Request], message: bytes) -> Request:
    """Parse the message as a request of type ``kind``. Raises InvalidRequest if the bytes are not one."""
    try:
        return kind.FromString(message)
    except DecodeError:
        raise InvalidRequest("request", f"must be a {kind.DESCRIPTOR.name}") from None


class Gate:
    """Admits calls, at most ``rpcs_max`` at once.

    Attributes:
        under_way: calls that were admitted and have not ended.
        calls: counts of all calls, for metrics.
        connections: the server's connections, once it listens.
        pressure: how busy the event loop is.
    """

    buffers_wait_s = 2.0
    stall_s = STALL_S
    first_message_s = FIRST_MESSAGE_S

    def __init__(
        self, identities: Identities, threads: Threads, rpcs_max: int, timeout_s_max: float, buffer_bytes: int
    ) -> None:
        self.identities = identities
        self.threads = threads
        self.budget = Shares("buffers", "buffers", buffer_bytes)
        self.places = Shares("places of rpcs_max", "calls", rpcs_max)
        self.under_way = 0
        self.calls = Calls()
        self.pressure = Pressure()
        self.connections = GrpcConnections((), 0)
        self._rpcs_max = rpcs_max
        self._timeout_s_max = timeout_s_max
        self._half_open: dict[Call, tuple[float, asyncio.Timeout]] = {}  # the start in ``on_time_s``; oldest first

    @contextlib.asynccontextmanager
    async def admit(self, context: Any) -> AsyncIterator[Call]:
        """Admit a call until the context ends. An error that is raised inside ends the call with its status."""
        try:
            caller = self._identify(context)
            self.connections.note_call(context.peer(), caller)
            limit_s = self._limit_s(context)
            self._make_room(caller, limit_s)
            self.under_way += 1
            try:
                async with asyncio.timeout(limit_s):
                    with self.pressure.count_running(caller):
                        yield Call(self, caller, context, time.monotonic() + limit_s)
            finally:
                self.under_way -= 1
                self.places.give(1, caller)
        except KVStoreError as error:
            if isinstance(error, TooManyCalls):
                self.calls.shed[error.kind] += 1
            await _abort(context, error)
        except TimeoutError:
            await _abort(context, DeadlineExceeded("the call did not end within its deadline"))
        except grpc.aio.BaseError:
            raise
        except Exception as error:  # gRPC would send the error's text to the caller
            await _abort(context, boundary.report_error("grpc", error))
            raise

    def _make_room(self, caller: Identity, limit_s: float) -> None:
        """Take a place for the call. Raises TooManyCalls if there is none, or if the call would end too late."""
        self.pressure.check(caller, limit_s)  # first, so that no call gives way to one that is then refused
        places = self.places
        if places.take_now(1, caller):
            return
        if self._give_way(caller) or (places.free <= 0 and self._give_way(None)):
            places.grant(1, caller)
        elif places.free > 0:
            raise TooManyCalls(f"{caller.name} has {places.held(caller)} calls under way", RETRY_AFTER_S, "share")
        else:
            reason = f"{self._rpcs_max} calls are under way, rpcs_max allows no more"
            raise TooManyCalls(reason, RETRY_AFTER_S, "calls")

    def _give_way(self, owner: Identity | None) -> bool:
        """End the oldest call (of ``owner``, or of any caller) whose request has not arrived. It ends in the loop's
        next turn."""
        before_s = self.pressure.on_time_s - HALF_OPEN_S
        for call, (since_s, _) in self._half_open.items():
            if since_s > before_s:
                break
            if owner is None or call.caller == owner:
                self._end_half_open(call)
                self.calls.shed["half_open"] += 1
                return True
        return False

    def _end_half_open(self, call: Call) -> None:
        _, timeout = self._half_open.pop(call)
        timeout.reschedule(asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def half_open(self, call: Call) -> AsyncIterator[None]:
        """Wait for a request inside this context. Raises TimeoutError if it does not arrive, or another call needs the
        place."""
        async with asyncio.timeout(None) as timeout:
            self._half_open[call] = self.pressure.on_time_s, timeout
            try:
                yield
            finally:
                self._half_open.pop(call, None)

    async def look(self) -> None:
        """Update ``pressure``, and end calls whose request does not arrive. The server calls this repeatedly."""
        await self.pressure.look()
        before_s = self.pressure.on_time_s - self.first_message_s
        for call, (since_s, _) in list(self._half_open.items()):
            if since_s > before_s:
                break
            self._end_half_open(call)

    def _limit_s(self, context: Any) -> float:
        left_s = context.time_remaining()
        return self._timeout_s_max if left_s is None else min(max(0.0, left_s), self._timeout_s_max)

    def _identify(self, context: Any) -> Identity:
        if not self.identities.required:
            return LOCAL
        token = _token(context.invocation_metadata() or ())
        if token is None and context.peer().startswith("unix:"):
            return LOCAL  # the socket's permissions decide who may connect
        return self.identities.find(token, _certificate_names(context.auth_context()))


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the bearer token; None without an authorization header."""
    values = [value for key, value in metadata if key == "authorization"]
    if not values:
        return None
    value = values[0]
    if len(values) != 1 or not isinstance(value, str) or len(value) > TOKEN_BYTES_MAX:
        raise Unauthenticated(UNKNOWN)
    scheme, _, token = value.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated(UNKNOWN)
    return token.strip()


def _certificate_names(auth: Any) -> list[str]:
    names = [*auth.get("x509_common_name", ()), *auth.get("x509_subject_alternative_name", ())]
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names]


async def _abort(context: Any, error: KVStoreError) -> None:
    code, details, metadata = status_of(error)
    with _end_if_gone():
        await context.abort(grpc.StatusCode[code], details, metadata)


@contextlib.contextmanager
def _end_if_gone() -> Iterator[None]:
    """If the caller has disconnected, end the call as cancelled, so that nothing is logged."""
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
