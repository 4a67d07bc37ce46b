"""Gate: every call passes here. Who is it, is there room for it, how long may it take; and what its failure is called.

Nothing of a request is read before its caller is known. Work that blocks runs in threads (``Call.quick``, ``run``,
``wait``), in steps of a few MiB each: a call that is cancelled or past its deadline ends at once; its step goes on
to its own end, and the step's thread and memory count as taken until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    NodeUnavailable,
    TooManyCalls,
    Unauthenticated,
)
from kvstore.service.api.identities import LOCAL, UNKNOWN, Identities, Identity, is_tenant
from kvstore.service.api.watching import Calls
from kvstore.transfer.grpc_errors import status_of

QUICK_THREADS: Final = 4  # for what only looks at the index, or asks the node
READ_THREADS: Final = 8  # for what copies or reads pages
WAIT_THREADS: Final = 8  # for what may have to wait for room: writers of a full node do not hold up its readers
RETRY_AFTER_S: Final = 0.1
STALL_S: Final = 20.0  # a stream whose other end takes or sends nothing for so long is over: it holds buffers
MESSAGE_BYTES_FREE: Final = 64 << 10  # a larger request counts as buffers while its call is under way,
MESSAGE_COPIES: Final = 4  # as often as this: its bytes, the message, its keys and tokens
CALLS_OUTSIDE: Final = 4  # as many as ``rpcs_max`` allows times this may be on their way into the gate, or be refused
CALLS_SHARE, BUFFERS_SHARE = 0.75, 0.5  # of all, that one tenant's calls may have: others are still served
TOKEN_BYTES_MAX: Final = 4096

log = logging.getLogger("kvstore.api")

Request = TypeVar("Request", bound=Message)
Value = TypeVar("Value")


class Lane:
    """Some threads. What waits for one waits in the event loop, where it is counted and can be cancelled."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, f"kvstore-api-{name}")
        self._slots = asyncio.Semaphore(count)

    async def run(
        self, started: Callable[[Future[Any]], None], work: Callable[[], Value], undo: Callable[[Value], object] | None
    ) -> Value:
        """Do ``work``. Where the call ends meanwhile, ``undo`` gets what came of it: nobody else will."""
        await self._slots.acquire()
        try:
            step = self._pool.submit(work)
        except RuntimeError:  # the daemon ends
            self._slots.release()
            raise NodeUnavailable("the node is ending") from None
        started(step)
        try:
            value = await asyncio.wrap_future(step)
        except asyncio.CancelledError:
            left = partial(self._left, undo)
            loop = asyncio.get_running_loop()
            step.add_done_callback(lambda done: _call_soon(loop, partial(left, done)))
            raise
        except BaseException:
            self._slots.release()
            raise
        self._slots.release()
        return value

    def _left(self, undo: Callable[[Any], object] | None, step: Future[Any]) -> None:
        self._slots.release()
        if undo is not None and not step.cancelled() and step.exception() is None:
            with contextlib.suppress(RuntimeError):  # the daemon ends, and everything held with it
                self._pool.submit(undo, step.result())

    def close(self) -> None:
        """Steps under way are waited for: they end by their own deadlines."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Threads:
    """The threads that do what blocks. Each call has one step in them at a time. Made in the event loop."""

    def __init__(self) -> None:
        self.quick = Lane(QUICK_THREADS, "quick")
        self.read = Lane(READ_THREADS, "read")
        self.wait = Lane(WAIT_THREADS, "wait")

    def close(self) -> None:
        """See ``Lane.close``."""
        for lane in (self.quick, self.read, self.wait):
            lane.close()


class Budget:
    """Bytes of buffers for all calls together: taken before a call's first step, given back after its last one.

    One tenant's calls hold ``BUFFERS_SHARE`` of them at most, or one call's, however much that is.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self._share = int(total_bytes * BUFFERS_SHARE)
        self._of: Counter[Identity] = Counter()
        self._waiting: list[asyncio.Future[None]] = []

    def _fits(self, size: int, owner: Identity, mine: int) -> bool:
        theirs = self._of[owner] if is_tenant(owner) else 0
        return size <= self.free_bytes and (theirs == mine or not theirs or theirs + size <= self._share)

    async def take(self, size: int, wait_s: float, owner: Identity = LOCAL, mine: int = 0) -> int:
        """How many bytes that took: more than all counts as all. ``mine``: what the same call has taken already.

        Raises TooManyCalls where there is no room within ``wait_s``.
        """
        size = min(size, self.total_bytes - mine)
        try:
            async with asyncio.timeout(wait_s):
                while not self._fits(size, owner, mine):
                    freed = asyncio.get_running_loop().create_future()
                    self._waiting.append(freed)
                    try:
                        await freed
                    finally:
                        if freed in self._waiting:
                            self._waiting.remove(freed)
        except TimeoutError:
            raise TooManyCalls("other calls hold all buffers", RETRY_AFTER_S) from None
        self.free_bytes -= size
        self._of[owner] += size
        return size

    def give(self, size: int, owner: Identity = LOCAL) -> None:
        """Give back what ``take`` said."""
        self.free_bytes += size
        self._of[owner] -= size
        if not self._of[owner]:
            del self._of[owner]
        waiting, self._waiting = self._waiting, []
        for freed in waiting:
            if not freed.done():
                freed.set_result(None)


class Call:
    """One admitted call: who makes it and until when (``time.monotonic``). Lives as long as its handler."""

    def __init__(self, gate: Gate, caller: Identity, context: Any, deadline: float) -> None:
        self.caller = caller
        self.deadline = deadline
        self._gate = gate
        self._context = context
        self._step: Future[Any] | None = None
        self._taken = 0  # bytes of buffers

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, not negative."""
        return max(0.0, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raises Unauthenticated where the caller's identity has expired or was taken away since."""
        self._gate.identities.check(self.caller)

    async def quick(self, work: Callable[..., Value], *args: Any) -> Value:
        """Do ``work``, which neither copies much nor waits, in a thread."""
        return await self._run(self._gate.threads.quick, partial(work, *args))

    async def run(self, work: Callable[..., Value], *args: Any) -> Value:
        """Read or copy a few MiB in a thread."""
        return await self._run(self._gate.threads.read, partial(work, *args))

    async def wait(
        self, work: Callable[..., Value], *args: Any, undo: Callable[[Value], object] | None = None
    ) -> Value:
        """Do what may have to wait for room in a thread. ``undo``: what to do with its value where the call ends first,
        so that nothing stays held for a caller who was not told of it."""
        return await self._run(self._gate.threads.wait, partial(work, *args), undo)

    async def _run(self, lane: Lane, work: Callable[[], Value], undo: Callable[[Value], object] | None = None) -> Value:
        self.check()
        return await lane.run(self._began, work, undo)

    def _began(self, step: Future[Any]) -> None:
        self._step = step

    @contextlib.asynccontextmanager
    async def buffers(self, size: int) -> AsyncIterator[None]:
        """``size`` bytes of the node's buffers; given back when the last step that may use them has ended."""
        budget = self._gate.budget
        size = await budget.take(size, min(self.left_s, self._gate.buffers_wait_s), self.caller, self._taken)
        self._taken += size
        try:
            yield
        finally:
            self._taken -= size
            if self._step is None or self._step.done():
                budget.give(size, self.caller)
            else:  # nobody waits for it any more, but a thread is in it
                loop = asyncio.get_running_loop()
                self._step.add_done_callback(lambda _: _call_soon(loop, partial(budget.give, size, self.caller)))

    async def send(self, message: bytes) -> None:
        """One reply of a stream; waits until the transport has taken it. The identity must hold still."""
        self.check()
        with _stalls("took"), _gone():
            async with asyncio.timeout(self._gate.stall_s):
                await self._context.write(message)
        self._gate.calls.sent_bytes += len(message)

    async def receive(self, requests: AsyncIterator[bytes]) -> bytes | None:
        """The next message of a stream; None: the caller is done. The identity must hold still."""
        with _stalls("sent"):
            async with asyncio.timeout(self._gate.stall_s):
                message = await anext(requests, None)
        self._gate.calls.received_bytes += len(message or b"")
        self.check()
        return message


@contextlib.contextmanager
def _stalls(what: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise DeadlineExceeded(f"the caller {what} nothing for too long, and its stream holds buffers") from None


def parse(kind: type[Request], message: bytes) -> Request:
    """A request of that kind. Raises InvalidRequest where the bytes are none."""
    try:
        return kind.FromString(message)
    except DecodeError:
        raise InvalidRequest("request", f"is no {kind.DESCRIPTOR.name}") from None


class Gate:
    """Admits calls, at most ``rpcs_max`` at once.

    Attributes:
        under_way: calls admitted and not ended.
        calls: what became of all, for metrics.
    """

    buffers_wait_s = 2.0
    stall_s = STALL_S

    def __init__(
        self, identities: Identities, threads: Threads, rpcs_max: int, timeout_s_max: float, buffer_bytes: int
    ) -> None:
        self.identities = identities
        self.threads = threads
        self.budget = Budget(buffer_bytes)
        self.under_way = 0
        self._of: Counter[Identity] = Counter()
        self.calls = Calls()
        self._rpcs_max = rpcs_max
        self._timeout_s_max = timeout_s_max

    @contextlib.asynccontextmanager
    async def admit(self, context: Any, message: Any = b"") -> AsyncIterator[Call]:
        """A call from here on. What is raised inside ends it with the status that says so.

        Args:
            message: the request; a large one is memory that all calls have to share.
        """
        try:
            caller = self._identify(context)
            if self.under_way >= self._rpcs_max:
                raise TooManyCalls(f"{self._rpcs_max} calls are under way, rpcs_max allows no more", RETRY_AFTER_S)
            if is_tenant(caller) and self._of[caller] >= max(1, int(self._rpcs_max * CALLS_SHARE)):
                raise TooManyCalls(f"{self._of[caller]} calls of {caller.name}'s are under way", RETRY_AFTER_S)
            self.under_way += 1
            self._of[caller] += 1
            try:
                limit_s = self._limit_s(context)
                async with asyncio.timeout(limit_s):
                    call = Call(self, caller, context, time.monotonic() + limit_s)
                    if len(message) <= MESSAGE_BYTES_FREE:
                        yield call
                    else:
                        async with call.buffers(MESSAGE_COPIES * len(message)):
                            yield call
            finally:
                self.under_way -= 1
                self._of[caller] -= 1
                if not self._of[caller]:
                    del self._of[caller]
        except KVStoreError as error:
            await _abort(context, error)
        except TimeoutError:
            await _abort(context, DeadlineExceeded("the call did not end within its deadline"))
        except grpc.aio.BaseError:
            raise
        except Exception:  # our own bug: gRPC would tell its text to the caller
            log.exception("a call failed")
            with _gone():
                await context.abort(grpc.StatusCode.INTERNAL, "the node failed at this call: its log tells more")
            raise

    def _limit_s(self, context: Any) -> float:
        left_s = context.time_remaining()
        return self._timeout_s_max if left_s is None else min(max(0.0, left_s), self._timeout_s_max)

    def _identify(self, context: Any) -> Identity:
        if not self.identities.asked_for:
            return LOCAL
        token = _token(context.invocation_metadata() or ())
        if token is None and context.peer().startswith("unix:"):
            return LOCAL  # the socket's permissions have let it in
        return self.identities.find(token, _certificate_names(context.auth_context()))


def _call_soon(loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended, and what was to be given back with it
        loop.call_soon_threadsafe(then)


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The bearer token; None where there is no authorization at all."""
    said = [value for key, value in metadata if key == "authorization"]
    if not said:
        return None
    value = said[0]
    if len(said) != 1 or not isinstance(value, str) or len(value) > TOKEN_BYTES_MAX:
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
    with _gone():
        await context.abort(grpc.StatusCode[code], details, metadata)


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    """Where nobody is there any more to be told, the call ends as one that was cancelled: it is nothing to log."""
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
