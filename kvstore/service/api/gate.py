"""Gate: every call passes here. Who is it, is there room for it, how long may it take; and what its failure is called.

Nothing of a request is read before its caller is known. Work that blocks runs in threads (``Call.run``), in steps of a
few MiB each: a call that is cancelled or past its deadline ends with the step it is in, and the step's memory counts as
taken until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, TooManyCalls, Unauthenticated
from kvstore.service.api.identities import LOCAL, UNKNOWN, Identities, Identity
from kvstore.transfer.grpc_errors import status_of

QUICK_THREADS: Final = 4  # for what only looks at the index, or asks the node
DATA_THREADS: Final = 8  # for what copies or reads pages, or may have to wait for room
RETRY_AFTER_S: Final = 0.1
TOKEN_BYTES_MAX: Final = 4096

Request = TypeVar("Request", bound=Message)
Value = TypeVar("Value")


class Threads:
    """The threads that do what blocks. Each call has one step in them at a time, so calls bound what waits."""

    def __init__(self) -> None:
        self.quick = ThreadPoolExecutor(QUICK_THREADS, "kvstore-api-quick")
        self.data = ThreadPoolExecutor(DATA_THREADS, "kvstore-api-data")

    def close(self) -> None:
        """Steps that wait are dropped, those under way are waited for: they end by their own deadlines."""
        for pool in (self.quick, self.data):
            pool.shutdown(wait=True, cancel_futures=True)


class Budget:
    """Bytes of buffers for all calls together: taken before a call's first step, given back after its last one."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.free_bytes = total_bytes
        self._waiting: list[asyncio.Future[None]] = []

    async def take(self, size: int, wait_s: float) -> None:
        """Raises TooManyCalls where there is no room within ``wait_s``. More than all counts as all."""
        size = min(size, self.total_bytes)
        try:
            async with asyncio.timeout(wait_s):
                while self.free_bytes < size:
                    freed = asyncio.get_running_loop().create_future()
                    self._waiting.append(freed)
                    await freed
        except TimeoutError:
            raise TooManyCalls("other calls hold all buffers", RETRY_AFTER_S) from None
        self.free_bytes -= size

    def give(self, size: int) -> None:
        """Give back what was taken."""
        self.free_bytes += min(size, self.total_bytes)
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

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, not negative."""
        return max(0.0, self.deadline - time.monotonic())

    def check(self) -> None:
        """Raises Unauthenticated where the caller's identity has expired or was taken away since."""
        self._gate.identities.check(self.caller)

    async def quick(self, work: Callable[..., Value], *args: Any) -> Value:
        """Do ``work`` in a thread of the quick ones."""
        return await self._run(self._gate.threads.quick, work, *args)

    async def run(self, work: Callable[..., Value], *args: Any) -> Value:
        """Do a step of a few MiB, or what may wait for room, in a thread."""
        return await self._run(self._gate.threads.data, work, *args)

    async def _run(self, pool: ThreadPoolExecutor, work: Callable[..., Value], *args: Any) -> Value:
        self.check()
        step = pool.submit(work, *args)
        self._step = step
        return await asyncio.wrap_future(step)

    @contextlib.asynccontextmanager
    async def buffers(self, size: int) -> AsyncIterator[None]:
        """``size`` bytes of the node's buffers; given back when the last step that may use them has ended."""
        budget = self._gate.budget
        await budget.take(size, min(self.left_s, self._gate.buffers_wait_s))
        try:
            yield
        finally:
            if self._step is None or self._step.done():
                budget.give(size)
            else:  # nobody waits for it any more, but a thread is in it
                loop = asyncio.get_running_loop()
                self._step.add_done_callback(lambda _: _call_soon(loop, partial(budget.give, size)))

    async def send(self, message: bytes) -> None:
        """One reply of a stream; waits until the transport has taken it. The identity must hold still."""
        self.check()
        await self._context.write(message)


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
    """

    buffers_wait_s = 2.0

    def __init__(
        self, identities: Identities, threads: Threads, rpcs_max: int, timeout_s_max: float, buffer_bytes: int
    ) -> None:
        self.identities = identities
        self.threads = threads
        self.budget = Budget(buffer_bytes)
        self.under_way = 0
        self._rpcs_max = rpcs_max
        self._timeout_s_max = timeout_s_max

    @contextlib.asynccontextmanager
    async def admit(self, context: Any) -> AsyncIterator[Call]:
        """A call from here on. What is raised inside ends it with the status that says so."""
        try:
            caller = self._identify(context)
            if self.under_way >= self._rpcs_max:
                raise TooManyCalls(f"{self._rpcs_max} calls are under way, rpcs_max allows no more", RETRY_AFTER_S)
            self.under_way += 1
            try:
                limit_s = self._limit_s(context)
                async with asyncio.timeout(limit_s):
                    yield Call(self, caller, context, time.monotonic() + limit_s)
            finally:
                self.under_way -= 1
        except KVStoreError as error:
            await _abort(context, error)
        except TimeoutError:
            await _abort(context, DeadlineExceeded("the call did not end within its deadline"))

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
    await context.abort(grpc.StatusCode[code], details, metadata)
