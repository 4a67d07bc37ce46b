"""Requests of a conductor: what its decisions know of each, the route that is chosen for it, and the queue where it
waits until an engine has room.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): a request's start tag is the later of the queue's virtual
time and the end of the tenant's last request; its end is later by its cost, in seconds of an engine. The smallest
start tag goes first, and becomes the virtual time. So a tenant that floods the queue delays other tenants by what it
has under way, and no more; a tenant that comes back after a pause has saved up nothing. Priorities only order the
requests of one tenant: claiming a high priority for all of them gains nothing over other tenants. Every model has its
own queue, because its engines cannot serve requests for another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from engine.conductor.state.engine_table import FleetEngine
from engine.model.request import Request
from kvstore.errors import TooManyCalls
from kvstore.model.prefix import Fingerprints

TOKEN_BYTES: Final = 4  # of memory
EXTRA_BYTES: Final = 1 << 20  # of the parameters that are passed on: at most 64 KiB of JSON


@dataclass(frozen=True, slots=True)
class Computing:
    """An engine that could compute the prompt.

    Attributes:
        cached: tokens that it need not compute.
        own: those of them that its own node has now.
        donor: the node that supplies the others, its own if they are being computed there; empty: none.
        after_s: when the donor has them: the request is kept until then; 0: now.
        wait_s, move_s, prefill_s: see the docstring of ``candidates``.
        harm_s: the total delay, in seconds, to the requests that it answers.
    """

    engine: FleetEngine
    cached: int
    own: int
    donor: str
    after_s: float
    wait_s: float
    move_s: float
    prefill_s: float
    harm_s: float

    @property
    def ready_s(self) -> float:
        """Seconds until the prompt is computed."""
        return max(self.wait_s, self.move_s) + self.prefill_s


@dataclass(frozen=True, slots=True)
class Answering:
    """An engine that could answer.

    Attributes:
        own: tokens of the prompt that its own node has now.
        batch: sequences that it would decode together, this one among them.
        token_s: its step then.
        harm_s: the total delay, in seconds, to the other requests while this answer lasts.
    """

    engine: FleetEngine
    own: int
    batch: int
    token_s: float
    harm_s: float


@dataclass(frozen=True, slots=True)
class Route:
    """A pair of engines, and what it leads to.

    Attributes:
        tail_s: the exposed part of the hand-off, and its extra cost; 0 if one engine does both.
        total_s: until the last token, including the harm to other requests: the default policy minimizes this.
    """

    computing: Computing
    answering: Answering
    tail_s: float
    total_s: float

    @property
    def local(self) -> bool:
        """True if one engine does both."""
        return self.computing.engine is self.answering.engine

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token."""
        return self.computing.ready_s + self.tail_s


class RequestPhase(Enum):
    """Where a request is."""

    WAITING = auto()  # in the queue, until an engine has room
    KEPT = auto()  # for an engine, until another one has computed what both begin with
    SENT = auto()
    DECODING = auto()


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """What the decisions need to know of one request, from its arrival to its end. Only ``ConductorState`` changes it.

    Attributes:
        number: the conductor's.
        request: as it arrived.
        pages: fingerprints of the prompt's full pages, in order, for each layout that an engine of its model has.
        barred: engines that it can never go to.
        arrived_s: when it came.
        first_token_s, token_s: the limits that it is to meet: its own or the conductor's; 0: no limit.
        cost_s: seconds of an engine for its prompt, by prediction; ``answer_s``: for its answer.
        route: where it was sent.
        failed: engines that failed on it.
        generated: tokens of the answer that have come already.
    """

    number: int
    request: Request
    pages: Mapping[str, Fingerprints]
    barred: tuple[str, ...] = ()
    arrived_s: float = 0.0
    first_token_s: float = 0.0
    token_s: float = 0.0
    cost_s: float = 0.0
    answer_s: float = 0.0
    phase: RequestPhase = RequestPhase.WAITING
    route: Route | None = None
    failed: tuple[str, ...] = ()
    generated: int = 0

    @property
    def model(self) -> str:
        """The model that is to answer it."""
        return self.request.model

    @property
    def tenant(self) -> str:
        """The tenant that it counts for."""
        return self.request.tenant

    @property
    def priority(self) -> int:
        """Among requests of its tenant, the higher one first."""
        return self.request.priority

    @property
    def size(self) -> int:
        """Bytes that it keeps here."""
        return TOKEN_BYTES * len(self.request.tokens) + (EXTRA_BYTES if self.request.extra else 0)

    @property
    def tokens(self) -> int:
        """Tokens that the next engine begins with: the prompt, and what was generated."""
        return len(self.request.tokens) + self.generated

    @property
    def answer_max(self) -> int:
        """Tokens that the rest of the answer may have."""
        return max(1, self.request.sampling.max_tokens - self.generated)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that the request is at."""
        if self.route is None:
            return ()
        both = self.route.computing.engine.about.name, self.route.answering.engine.about.name
        return both if both[0] != both[1] else both[:1]


@dataclass(slots=True)
class _Tenant:
    """The requests of one tenant, by priority, and the end tag of the last one that left the line."""

    end_s: float = 0.0
    lines: dict[int, deque[RoutedRequest]] = field(default_factory=dict)
    size: int = 0
    cost_s: float = 0.0

    def first(self) -> RoutedRequest:
        return self.lines[max(self.lines)][0]


class Queue:
    """Requests that wait for the engines of one model.

    Args:
        room: shared by all queues.
    """

    def __init__(self, room: QueueRoom) -> None:
        self._room = room
        self._now_s = 0.0  # virtual
        self._tenants: dict[str, _Tenant] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: RoutedRequest) -> None:
        """Add a request, behind those of its tenant and priority.

        Raises:
            TooManyCalls: there is no room for it.
        """
        self._room.take(request.tenant, request.size)
        known = self._tenants.get(request.tenant)
        if known is None:
            known = self._tenants[request.tenant] = _Tenant(self._now_s)
        known.lines.setdefault(request.priority, deque()).append(request)
        self._counted(known, request, 1)

    def back(self, request: RoutedRequest) -> None:
        """Put a request whose engine failed back at the front. It costs its tenant nothing more."""
        self._room.take(request.tenant, request.size, over=True)
        known = self._tenants.setdefault(request.tenant, _Tenant(self._now_s))
        known.end_s = max(self._now_s, known.end_s) - request.cost_s
        known.lines.setdefault(request.priority, deque()).appendleft(request)
        self._counted(known, request, 1)

    def first(self) -> RoutedRequest | None:
        """The next request; it stays in the queue."""
        best: tuple[float, str] | None = None
        for name, tenant in self._tenants.items():
            if tenant.lines:
                start = max(self._now_s, tenant.end_s), name
                best = start if best is None or start < best else best
        return self._tenants[best[1]].first() if best is not None else None

    def take(self, request: RoutedRequest) -> None:
        """Remove the request that ``first`` returned, to be served."""
        known = self._tenants[request.tenant]
        self._now_s = max(self._now_s, known.end_s)
        known.end_s = self._now_s + request.cost_s
        self.drop(request)

    def drop(self, request: RoutedRequest) -> None:
        """Remove a request unserved."""
        known = self._tenants[request.tenant]
        line = known.lines[request.priority]
        line.remove(request)
        if not line:
            del known.lines[request.priority]
        self._counted(known, request, -1)
        self._room.give(request.tenant, request.size)
        if (
            not known.lines
        ):  # a tenant without requests is forgotten once others have caught up with it, or nothing waits
            for name in [name for name, each in self._tenants.items() if not each.lines]:
                if not self._count or self._tenants[name].end_s <= self._now_s:
                    del self._tenants[name]

    def ahead_s(self, tenant: str, cost_s: float) -> float:
        """Seconds of engines that are served before a new request of this tenant.

        Everything that its own tenant has waiting; of every other tenant at most as much as is served to this tenant in
        the same time.
        """
        known = self._tenants.get(tenant)
        mine_s = known.cost_s if known is not None else 0.0
        others = (each.cost_s for each in self._tenants.values() if each is not known)
        return mine_s + sum(min(other, mine_s + cost_s) for other in others)

    def _counted(self, known: _Tenant, request: RoutedRequest, sign: int) -> None:
        known.size += sign * request.size
        known.cost_s = max(0.0, known.cost_s + sign * request.cost_s)
        self._count += sign


class QueueRoom:
    """Memory that waiting requests may take together.

    A single tenant may take as much as is free (the dynamic threshold of Choudhury and Hahne, 1998): half of it if it
    is alone, a third each if two want all of it, and so on; there is always some left for one more.

    Args:
        bytes_max: the limit.
    """

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self._size = 0
        self._tenants: dict[str, int] = {}

    def take(self, tenant: str, size: int, *, over: bool = False) -> None:
        """Take memory for a request; with ``over``, which was here before, the request is always admitted.

        Raises:
            TooManyCalls: there is no room for it.
        """
        theirs = self._tenants.get(tenant, 0)
        if not over and theirs + size > self._max - self._size - size:
            raise TooManyCalls(f"{theirs} bytes of prompts of {tenant} wait already", retry_after_s=1.0)
        self._tenants[tenant] = theirs + size
        self._size += size

    def give(self, tenant: str, size: int) -> None:
        """Return the memory of a request that no longer waits."""
        left = self._tenants[tenant] - size
        self._size -= size
        if left:
            self._tenants[tenant] = left
        else:
            del self._tenants[tenant]
