"""Limits: how much of each limited resource a caller gets. One module for gRPC, the data server and HTTP.

**Descriptors.** A daemon raises its limit when it starts (``raise_descriptors``) and keeps some for itself
(``DESCRIPTORS_KEPT``). Each of its servers takes at most a part of the rest (``connections_max``).

**Connections.** ``Connections`` counts each connection from the moment it is accepted, including TLS handshakes. If
there are too many, one whose caller has not identified itself is dropped: the oldest one of the network that has most
of them.

**Everything else** (running requests, bytes of bodies, threads, reads from NVMe, time under a lock) is given out by
``Shares`` in an event loop, and by ``ThreadShares`` between threads. The rules are the same:

1. One eighth is for owners that hold nothing yet, so that a newcomer gets something at once, however long the steps of
other owners take.
2. Owners (the identities of callers) that hold or want something may hold equal parts of the rest. A tenant that is
alone may hold half of the rest.
3. One request may have as much as it needs if its owner has no other request.
4. The next turn goes to the waiting owner that has used least, where use is the amount times the time. An owner gains
no credit by being idle.

Worked example: 16 threads. Tenant a, alone, holds 7 at most. When b comes, it gets 7 as well. c gets one of the last 2
at once, and more as steps of a and b end, until the three hold 14 together: 5, 5 and 4.

A request that would wait longer than it may is refused at once. The expected wait is its place in line times the recent
wait per place. Worked example: 30 requests wait, and the last request that was admitted was tenth and waited 0.5 s. So
the next one will wait 1.5 s. If it has 1 s left, it is refused and told when to retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kvstore.errors import NodeUnavailable, TooManyCalls

DESCRIPTORS_KEPT: Final = (
    64  # files of NVMe targets, and of segments and tables in shared memory
    + 32  # LMDB, session files while they are looked at
    + 64  # etcd, data servers and engines that this daemon calls
    + 32  # logs, bells, listeners, pipes of child processes
    + 64  # connections that were dropped and are not closed yet, or are just being refused
)
# Parts of the remaining descriptors, by server.
GRPC_PART: Final = 3 / 8
HTTP_PART: Final = 1 / 8  # of a node or an engine
LOCAL_PART: Final = 3 / 8  # of a node, for programs of this machine
PULLS_PART: Final = 3 / 8  # of an engine, for those that read its KV
OPENAI_PART: Final = 1 / 2  # of a conductor, for HTTP
DATA_PART: Final = 1 / 2  # of a data server, which has no other server in its process
assert GRPC_PART + HTTP_PART + LOCAL_PART <= 1, "a node's daemon"
assert GRPC_PART + HTTP_PART + PULLS_PART <= 1, "an engine"
assert GRPC_PART + OPENAI_PART <= 1, "a conductor"
DESCRIPTORS_UNBOUNDED: Final = 1 << 20  # what "no limit" counts as
CONNECTIONS_MIN: Final = 8  # of a server, however few descriptors there are
UNKNOWN_PART: Final = 3  # one connection in three is for callers that have not identified themselves
LEAVING_MAX: Final = 32  # connections that were dropped and are not closed yet
NEWCOMERS_PART: Final = 8  # one eighth is for owners that hold nothing yet
REFUSAL_S: Final = 1.0  # an owner that was refused counts as waiting for this long
WAITING_MAX: Final = 4096  # of one kind of shares; never reached, because running calls are bounded
PACES_MAX: Final = 256  # owners whose use and waits are remembered
RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
LANE_OWNERS: Final = 2  # a lane has this many times the threads that one owner may have
LOOK_S: Final = 0.05  # how often a waiting thread checks whether a holder is too slow
_WEIGHT: Final = 0.1  # of the newest wait in the average

Value = TypeVar("Value")


class Owner(Protocol):
    """A caller, as a server has identified it."""

    @property
    def name(self) -> str:
        """The owner's name, which identifies it."""
        ...

    @property
    def operator(self) -> bool:
        """True for operators and nodes. An operator that is alone may hold more than a tenant."""
        ...


@dataclass(frozen=True)
class NamedOwner:
    """An owner that has only a name."""

    name: str
    operator: bool = False


ALONE: Final = NamedOwner("local", operator=True)
"""The owner of what is used where callers are not identified."""

# --- descriptors ------------------------------------------------------------------------------------------------------


def raise_descriptors() -> int:
    """Raise this process' limit on descriptors as far as possible. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a container may forbid it; then the limit stays
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return descriptors()


def descriptors() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DESCRIPTORS_UNBOUNDED if soft == resource.RLIM_INFINITY else soft


def connections_max(part: float, most: int) -> int:
    """How many connections a server may have: at most ``most``, and at most ``part`` of the descriptors that are not
    reserved."""
    return min(most, max(CONNECTIONS_MIN, int(part * (descriptors() - DESCRIPTORS_KEPT))))


# --- shares -----------------------------------------------------------------------------------------------------------


class _Waiter:
    """One waiting request. ``granted``: it holds ``size``, which it has to give back."""

    def __init__(
        self, size: int, owner: Owner, mine: int, before: int, begun: bool, wake: Callable[[], object]
    ) -> None:
        self.size = size
        self.owner = owner
        self.mine = mine
        self.before = before
        self.begun = begun
        self.wake = wake
        self.granted = False
        self.began_s = time.monotonic()


class _Pace:
    """How much an owner has used (amount times seconds), how long it waits per place in line, and how long it holds
    what it gets."""

    def __init__(self) -> None:
        self.use = 0.0
        self._wait_s = 0.0
        self._places = 0.0
        self._hold_s = 0.0

    @property
    def place_s(self) -> float:
        """The recent wait per place. All waits count, because a single wait, such as one during a stall, says
        little."""
        return self._wait_s / self._places if self._places else 0.0

    def add_wait(self, seconds: float, places: int) -> None:
        """Record one wait."""
        self._wait_s += seconds - _WEIGHT * self._wait_s
        self._places += places - _WEIGHT * self._places

    def add_hold(self, seconds: float, size: int) -> None:
        """Charge for ``size`` that was given back after ``seconds``."""
        self.use += seconds * size
        self._hold_s += _WEIGHT * (seconds - self._hold_s)

    def expected_s(self, before: int) -> float:
        """The expected wait with ``before`` places ahead."""
        return (before + 1) * self.place_s + self._hold_s


class Shares:
    """A limited resource that callers share. For one event loop, or for threads that use a lock of their own.

    Life of a part: ``take`` or ``take_now`` -> held by its owner -> ``give``, once.

    Args:
        resource: for messages: "other calls hold all <resource>".
        kind: for metrics.
        total: how much there is.
        each: how much of it a tenant may hold; None: half of what is not for newcomers.
        each_operator: how much an operator that is alone may hold; None: all.

    Attributes:
        free: how much is not held.
    """

    def __init__(
        self, resource: str, kind: str, total: int, each: int | None = None, each_operator: int | None = None
    ) -> None:
        self.total = total
        self.free = total
        self._resource = resource
        self._kind = kind
        self._common = total - total // NEWCOMERS_PART
        self._each = self._part(2) if each is None else each
        self._each_operator = total if each_operator is None else each_operator
        self._holdings: Counter[str] = Counter()
        self._queues: OrderedDict[str, deque[_Waiter]] = OrderedDict()
        self._refusals: OrderedDict[str, float] = (
            OrderedDict()
        )  # owners refused by ``take_now``, and until when they count as waiting
        self._paces: OrderedDict[str, _Pace] = OrderedDict()
        self._last_use = 0.0  # the use of the owner that was admitted last, where a newcomer begins

    def held(self, owner: Owner) -> int:
        """How much this owner holds."""
        return self._holdings[owner.name]

    def _part(self, owners: int) -> int:
        return max(1, -(-self._common // owners))

    def _fits(self, size: int, owner: Owner, mine: int) -> bool:
        amount = self._holdings[owner.name]
        if size > self.free:
            return not size
        if amount == mine:
            return True  # the owner's only request
        most = self._each_operator if owner.operator else self._each
        others = len(self._holdings) - 1 + sum(name not in self._holdings for name in (*self._queues, *self._refusals))
        most = min(most, self._part(others + 1)) if others else most
        reserve = 0 if most == self.total else self.total - self._common
        return amount + size <= most and size <= self.free - reserve

    def take_now(self, size: int, owner: Owner) -> bool:
        """Take ``size`` without waiting. If that fails, the owner counts as waiting for a while."""
        now_s = time.monotonic()
        while self._refusals and next(iter(self._refusals.values())) < now_s:
            self._refusals.popitem(last=False)
        self._refusals.pop(owner.name, None)
        if self._fits(size, owner, 0):
            self.grant(size, owner)
            return True
        self._refusals[owner.name] = now_s + REFUSAL_S
        return False

    async def take(self, size: int, wait_s: float, owner: Owner = ALONE, mine: int = 0, *, begun: bool = False) -> int:
        """Take ``size``, and return how much was taken. More than all counts as all, or as nearly all if the request
        already holds some.

        Args:
            wait_s: how long the caller may wait for the part, and then hold it.
            mine: how much the same request already holds. If it holds something, its owner's requests that hold nothing
                come after it, because they may need what it holds.
            begun: the request has already had a turn. It alternates with its owner's new requests, however many there
                are, and is not refused because of the expected wait.

        Raises:
            TooManyCalls: it would take longer than ``wait_s``, or did.
        """
        # Requests that hold a little and want all the rest would wait for each other, so they leave a little free.
        size = max(0, min(size, self.total - mine - (self.total // NEWCOMERS_PART if mine else 0)))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = self.ask(size, owner, partial(_wake, turn), mine, begun, wait_s)
        if waiter is None:
            return size
        try:
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException as error:
            refusal = self.leave(waiter)
            if isinstance(error, TimeoutError):
                raise refusal from None
            raise
        return size

    def ask(
        self,
        size: int,
        owner: Owner,
        wake: Callable[[], object],
        mine: int = 0,
        begun: bool = False,
        wait_s: float | None = None,
    ) -> _Waiter | None:
        """Take ``size`` now and return None, or stand in line: ``wake`` is called when it is granted.

        Raises:
            TooManyCalls: it would probably take longer than ``wait_s``.
        """
        pace = self._pace(owner)
        pace.use = max(pace.use, self._last_use)
        if (not size or mine or owner.name not in self._queues) and self._fits(size, owner, mine):
            self.grant(size, owner)
            return None
        place = self._place(owner, mine)
        waiter = _Waiter(size, owner, mine, self._before(owner, place), begun, wake)
        self._check(waiter, wait_s)
        queue = self._queues.setdefault(owner.name, deque())
        queue.insert(2 * sum(other.begun for other in queue) + 1 if begun else place, waiter)
        return waiter

    def leave(self, waiter: _Waiter) -> TooManyCalls:
        """Leave the line, and give back a part that was granted at the same moment. Returns the error for the
        caller."""
        if waiter.granted:
            self.give(waiter.size, waiter.owner)
        else:
            self._forget(waiter)
            self._learn(waiter, at_least=True)
            self._let_in()  # requests after it may want less
        return self._refusal(waiter)

    def give(self, size: int, owner: Owner = ALONE, held_s: float | None = None) -> None:
        """Give back a part. ``held_s``: how long it was held."""
        self.free += size
        self._holdings[owner.name] -= size
        if not self._holdings[owner.name]:
            del self._holdings[owner.name]
        if held_s is not None:
            self._pace(owner).add_hold(held_s, size)
        self._let_in()

    def grant(self, size: int, owner: Owner) -> None:
        """Give ``size`` to this owner even if it is not free, because another request is about to give it back."""
        self.free -= size
        if size:
            self._holdings[owner.name] += size
        pace = self._pace(owner)
        self._last_use = pace.use = max(pace.use, self._last_use)

    def _let_in(self) -> None:
        """Admit waiting requests that fit, always from the owner that has used least; equal owners alternate."""
        while self._queues:
            first = [queue[0] for queue in self._queues.values()]
            fit = [each for each in first if self._fits(each.size, each.owner, each.mine)]
            if not fit:
                return
            waiter = min(fit, key=lambda each: self._pace(each.owner).use)
            self._queues.move_to_end(waiter.owner.name)
            self._forget(waiter)
            self.grant(waiter.size, waiter.owner)
            waiter.granted = True
            self._learn(waiter)
            waiter.wake()

    def _forget(self, waiter: _Waiter) -> None:
        queue = self._queues.get(waiter.owner.name)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._queues[waiter.owner.name]

    def _place(self, owner: Owner, mine: int) -> int:
        """How many requests of this owner are admitted before its next one, which already holds ``mine``."""
        queue = self._queues.get(owner.name, ())
        return sum(other.mine > 0 for other in queue) if mine else len(queue)

    def _before(self, owner: Owner, place: int) -> int:
        """How many requests are admitted before this request of the owner, if all use the same."""
        return place + sum(min(len(queue), place + 1) for name, queue in self._queues.items() if name != owner.name)

    def _check(self, waiter: _Waiter, wait_s: float | None) -> None:
        """Refuse the request if it would wait too long. The first in line always waits, so that a shorter wait is
        noticed."""
        is_late = wait_s is not None and self._pace(waiter.owner).expected_s(waiter.before) > wait_s
        if sum(map(len, self._queues.values())) >= WAITING_MAX or (waiter.before and not waiter.begun and is_late):
            raise self._refusal(waiter)

    def _learn(self, waiter: _Waiter, at_least: bool = False) -> None:
        pace, seconds = self._pace(waiter.owner), time.monotonic() - waiter.began_s
        if not at_least or seconds / (waiter.before + 1) > pace.place_s:
            pace.add_wait(seconds, waiter.before + 1)

    def _pace(self, owner: Owner) -> _Pace:
        pace = self._paces.setdefault(owner.name, _Pace())
        self._paces.move_to_end(owner.name)
        if len(self._paces) > PACES_MAX:
            self._paces.popitem(last=False)
        return pace

    def _refusal(self, waiter: _Waiter) -> TooManyCalls:
        retry_s = min(max(self._pace(waiter.owner).expected_s(waiter.before), RETRY_S_MIN), RETRY_S_MAX)
        return TooManyCalls(f"other calls hold all {self._resource}", retry_s, self._kind)


def _wake(turn: asyncio.Future[None]) -> None:
    if not turn.done():  # otherwise the request is just ending, and gives back what was granted
        turn.set_result(None)


class Holder(Protocol):
    """A holder of a turn that may be too slow for those that wait."""

    def late(self) -> bool:
        """Whether it has made less progress than it must. Called repeatedly while a thread waits."""
        ...

    def cut(self) -> None:
        """End it soon. Called from any thread; its own thread then gives the turn back."""
        ...


class ThreadShares:
    """Turns at a limited resource, between threads, by the rules of ``Shares``. ``total`` threads have a turn at a
    time.

    Worked example with a total of 1: a lock whose time is shared equally between owners. While one tenant's 100 threads
    wait, a thread of another tenant waits for the end of one turn only.
    """

    def __init__(self, resource: str, kind: str, total: int) -> None:
        self._shares = Shares(resource, kind, total)
        self._lock = threading.Lock()
        self._holders: list[Holder] = []

    @contextlib.contextmanager
    def turn(self, owner: Owner, wait_s: float, holder: Holder | None = None) -> Iterator[None]:
        """Take a turn for the time of the context.

        Args:
            holder: ended if it is late and another thread waits.

        Raises:
            TooManyCalls: no turn came within ``wait_s``.
        """
        self._take(owner, wait_s)
        began_s = time.monotonic()
        if holder is not None:
            with self._lock:
                self._holders.append(holder)
        try:
            yield
        finally:
            with self._lock:
                if holder is not None:
                    self._holders.remove(holder)
                self._shares.give(1, owner, time.monotonic() - began_s)

    def _take(self, owner: Owner, wait_s: float) -> None:
        turn, deadline_s = threading.Event(), time.monotonic() + wait_s
        with self._lock:
            waiter = self._shares.ask(1, owner, turn.set)
        while waiter is not None:
            left_s = max(0.0, deadline_s - time.monotonic())
            if turn.wait(min(left_s, LOOK_S) if self._holders else left_s):
                return
            with self._lock:
                for holder in self._holders:
                    if holder.late():
                        holder.cut()
                if not waiter.granted and time.monotonic() >= deadline_s:
                    raise self._shares.leave(waiter)


class Lane:
    """Threads for blocking work of an event loop, at most ``count`` of them for one owner. Work waits for a thread in
    the loop, where it is counted, gets its turn, and can be cancelled."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(LANE_OWNERS * count, f"kvstore-{name}")
        self._slots = Shares(f"threads that {name}", name, LANE_OWNERS * count, count, count)

    async def run(
        self,
        on_start: Callable[[Future[Any]], None],
        work: Callable[[], Value],
        undo: Callable[[Value], object] | None,
        owner: Owner = ALONE,
        left_s: float = 60.0,
        begun: bool = False,
    ) -> Value:
        """Do ``work`` in a thread. If the call ends first, ``undo`` gets the result.

        Args:
            left_s: until the call's deadline.
            begun: see ``Shares.take``.

        Raises:
            TooManyCalls: no thread is free in time.
        """
        await self._slots.take(1, left_s, owner, begun=begun)
        began_s = time.monotonic()
        try:
            step = self._pool.submit(work)
        except RuntimeError:  # the daemon ends
            self._slots.give(1, owner)
            raise NodeUnavailable("the node is ending") from None
        on_start(step)
        try:
            value = await asyncio.wrap_future(step)
        except asyncio.CancelledError:
            finish = partial(self._finish, owner, began_s, undo)
            loop = asyncio.get_running_loop()
            step.add_done_callback(lambda done: call_soon(loop, partial(finish, done)))
            raise
        except BaseException:
            self._slots.give(1, owner)
            raise
        self._slots.give(1, owner, time.monotonic() - began_s)
        return value

    def _finish(self, owner: Owner, began_s: float, undo: Callable[[Any], object] | None, step: Future[Any]) -> None:
        self._slots.give(1, owner, time.monotonic() - began_s)
        if undo is not None and not step.cancelled() and step.exception() is None:
            with contextlib.suppress(RuntimeError):  # the daemon is ending, so nothing needs to be given back
                self._pool.submit(undo, step.result())

    def close(self, wait: bool = True) -> None:
        """Accept no more work. ``wait``: wait for running steps, which end by their own deadlines."""
        self._pool.shutdown(wait=wait, cancel_futures=True)


def call_soon(loop: asyncio.AbstractEventLoop, then: Callable[[], None]) -> None:
    """Call ``then`` in the loop, if it still runs. Any thread may call this."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, so nothing needs to be given back
        loop.call_soon_threadsafe(then)


# --- connections ------------------------------------------------------------------------------------------------------


class Guest:
    """One connection of a server. Made by ``Connections.accept``; ends with ``Connections.remove``, once.

    Attributes:
        owner: its caller; None until the caller has identified itself.
        leaving: it was dropped, and is about to end.
    """

    def __init__(self, network: str, drop: Callable[[], object]) -> None:
        self.network = network
        self.drop = drop
        self.owner: Owner | None = None
        self.leaving = False


class Connections:
    """The connections of a server, counted from accept to close. Any thread, or any event loop.

    ::

        sock, peer = listener.accept()
        guest = connections.accept(peer[0], drop)  # None: close it. ``drop`` ends it soon, from any thread
        ...                                        # TLS handshake, then the caller identifies itself
        connections.identify(guest, identity)      # raises TooManyCalls if the caller has its share
        ...
        connections.remove(guest)                  # when its socket is closed

    Two thirds of ``total`` are for callers that have identified themselves, by the rules of ``Shares``. These
    connections are never dropped. All other callers may use whatever is free. If there is no room, the oldest of their
    connections is dropped.
    """

    def __init__(self, total: int) -> None:
        assert total >= UNKNOWN_PART, "one call must be admitted"
        self.total = total
        self._condition = threading.Condition(threading.RLock())
        self._shares = Shares("connections", "connections", total - total // UNKNOWN_PART)
        self._strangers: dict[str, OrderedDict[Guest, None]] = {}  # by network, the oldest first
        self._open: set[Guest] = set()
        self._leaving = 0

    def __len__(self) -> int:
        """Open connections."""
        return len(self._open)

    def accept(self, address: str, drop: Callable[[], object], wait_s: float = 0.0) -> Guest | None:
        """Count a connection that was accepted. None if there is no room; then the caller has to close it.

        Args:
            drop: ends this connection soon; its server then calls ``remove``.
            wait_s: how long to wait for dropped connections to end.
        """
        with self._condition:
            if len(self._open) - self._leaving >= self.total and not self._drop_oldest():
                return None
            if not self._condition.wait_for(lambda: self._leaving <= LEAVING_MAX, wait_s):
                return None
            guest = Guest(network_of(address), drop)
            self._open.add(guest)
            self._strangers.setdefault(guest.network, OrderedDict())[guest] = None
            return guest

    def identify(self, guest: Guest, owner: Owner) -> None:
        """Count the connection as its caller's, which has identified itself. A connection keeps its first owner.

        Raises:
            TooManyCalls: the owner has all connections that it may have. This one still counts as a stranger's.
        """
        with self._condition:
            if guest.owner is not None:
                return
            if guest.leaving or not self._shares.take_now(1, owner):
                count = self._shares.held(owner)
                raise TooManyCalls(
                    f"{owner.name} has {count} connections, and may not have more now", kind="connections"
                )
            guest.owner = owner
            self._forget(guest)

    def remove(self, guest: Guest) -> None:
        """Stop counting a connection, which is closed. Does nothing the second time."""
        with self._condition:
            if guest not in self._open:
                return
            self._open.remove(guest)
            self._leaving -= guest.leaving
            self._forget(guest)
            if guest.owner is not None:
                self._shares.give(1, guest.owner)
            self._condition.notify_all()

    def _drop_oldest(self) -> bool:
        """Drop the oldest unidentified connection of the network that has most of them. False if there is none."""
        if not self._strangers:
            return False
        _, most = max((len(guests), network) for network, guests in self._strangers.items())
        guest = next(iter(self._strangers[most]))
        self._forget(guest)
        guest.leaving = True
        self._leaving += 1
        guest.drop()
        return True

    def _forget(self, guest: Guest) -> None:
        mine = self._strangers.get(guest.network)
        if mine is not None:
            mine.pop(guest, None)
            if not mine:
                del self._strangers[guest.network]


def network_of(address: str) -> str:
    """The network of an address. For IPv6 it is the first 64 bits, because one machine may have all addresses after
    them."""
    try:
        number = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(number.ipv4_mapped or int(number) >> 64)
