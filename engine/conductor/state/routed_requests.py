"""The requests of a conductor: their records, the routes chosen for them, and the queues where they wait for an engine.

Each model has its own queue, because an engine serves only its own model. A queue shares the engines fairly among
tenants, by start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996):

- The start tag of a request is the queue's virtual time, or the end tag of its tenant's previous request if that is
  later. Its end tag is its start tag plus its cost, in seconds of an engine.
- The request with the smallest start tag is served next. Its start tag becomes the virtual time.

A tenant that floods the queue delays other tenants only by the work that it has under way. A tenant that returns after
a pause has not saved up any credit. Priorities order only the requests of one tenant, so a tenant that gives all its
requests a high priority gains nothing over other tenants.
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

TOKEN_BYTES: Final = 4  # memory of one token of a prompt
EXTRA_BYTES: Final = 1 << 20  # memory of the parameters that are passed on, which have at most 64 KiB of JSON


@dataclass(frozen=True, slots=True)
class Computing:
    """An engine that could compute the prompt.

    Attributes:
        cached: tokens of the prompt that it need not compute.
        own: the part of ``cached`` that its own node has now.
        donor: the node that supplies the rest of ``cached``; its own node if an engine there is computing them. Empty:
            there is none.
        after_s: when the donor will have them. The conductor keeps the request until then. 0: the donor has them now.
        wait_s, move_s, prefill_s: see the docstring of ``candidates``.
        harm_s: the total delay, in seconds, for the requests that the engine is answering.
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
        """The predicted seconds until the prompt is computed."""
        return max(self.wait_s, self.move_s) + self.prefill_s


@dataclass(frozen=True, slots=True)
class Answering:
    """An engine that could answer the request.

    Attributes:
        own: tokens of the prompt that its own node has now.
        batch: sequences that it would decode together, including this one.
        token_s: seconds of a decode step with this batch.
        harm_s: the total delay, in seconds, that this answer causes to the engine's other requests.
    """

    engine: FleetEngine
    own: int
    batch: int
    token_s: float
    harm_s: float


@dataclass(frozen=True, slots=True)
class Route:
    """The pair of engines for a request, with the predicted times.

    Attributes:
        tail_s: the exposed part of the hand-off and its extra time; 0 if one engine does both.
        total_s: seconds until the last token, plus the harm to other requests. The default policy minimizes this.
    """

    computing: Computing
    answering: Answering
    tail_s: float
    total_s: float

    @property
    def local(self) -> bool:
        """True if one engine computes the prompt and answers."""
        return self.computing.engine is self.answering.engine

    @property
    def first_token_s(self) -> float:
        """The predicted seconds until the first token."""
        return self.computing.ready_s + self.tail_s


class RequestPhase(Enum):
    """Where a request is."""

    WAITING = auto()  # in the queue, until an engine has room
    KEPT = auto()  # its route is chosen, but another engine is still computing the prefix that it will use
    SENT = auto()  # at its engines, without a token so far
    DECODING = auto()  # its first token has come


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """The record of one request, from its arrival to its end. Only ``ConductorState`` changes it.

    Attributes:
        number: the conductor's number for it.
        request: the request as it arrived.
        pages: fingerprints of the prompt's full pages, in order, by layout. Every layout that an engine of its model
            has is included.
        barred: engines that can never serve it.
        arrived_s: the time of its arrival.
        first_token_s, token_s: its limits on latency, or the conductor's defaults; 0 for no limit.
        cost_s: predicted seconds of an engine for its prompt.
        answer_s: predicted seconds of an engine for its answer.
        route: the chosen route; None if it waits.
        failed: engines that failed on it.
        generated: how many tokens of the answer have come.
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
        """The model that the client requested."""
        return self.request.model

    @property
    def tenant(self) -> str:
        """The tenant whose share of the queue it uses."""
        return self.request.tenant

    @property
    def priority(self) -> int:
        """The rank among the tenant's requests. The highest priority goes first."""
        return self.request.priority

    @property
    def size(self) -> int:
        """Bytes of memory that it takes here."""
        return TOKEN_BYTES * len(self.request.tokens) + (EXTRA_BYTES if self.request.extra else 0)

    @property
    def tokens(self) -> int:
        """How many tokens the next engine begins with: the prompt and the generated tokens."""
        return len(self.request.tokens) + self.generated

    @property
    def answer_max(self) -> int:
        """How many more tokens the answer may have."""
        return max(1, self.request.sampling.max_tokens - self.generated)

    @property
    def engines(self) -> tuple[str, ...]:
        """The names of the engines of its route; empty while it waits."""
        if self.route is None:
            return ()
        names = self.route.computing.engine.about.name, self.route.answering.engine.about.name
        return names if names[0] != names[1] else names[:1]


@dataclass(slots=True)
class _Tenant:
    """The waiting requests of one tenant.

    Attributes:
        end_s: the end tag of its last request that was served.
        lines: its waiting requests by priority, each line in the order of arrival.
        cost_s: the sum of their costs.
    """

    end_s: float = 0.0
    lines: dict[int, deque[RoutedRequest]] = field(default_factory=dict)
    cost_s: float = 0.0

    def first(self) -> RoutedRequest:
        return self.lines[max(self.lines)][0]


class Queue:
    """The requests that wait for the engines of one model. The module's docstring explains the order.

    Args:
        room: memory for waiting requests, shared by all queues.
    """

    def __init__(self, room: QueueRoom) -> None:
        self._room = room
        self._virtual_s = 0.0  # the virtual time
        self._tenants: dict[str, _Tenant] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: RoutedRequest) -> None:
        """Add a request after the others of its tenant and priority.

        Raises:
            TooManyCalls: there is no memory for it.
        """
        self._room.take(request.tenant, request.size)
        tenant = self._tenants.setdefault(request.tenant, _Tenant(self._virtual_s))
        tenant.lines.setdefault(request.priority, deque()).append(request)
        self._count_request(tenant, request, 1)

    def requeue(self, request: RoutedRequest) -> None:
        """Put a request that was served back at the front, after its engine failed. Its tenant does not pay again."""
        self._room.take(request.tenant, request.size, force=True)
        tenant = self._tenants.setdefault(request.tenant, _Tenant(self._virtual_s))
        tenant.end_s = max(self._virtual_s, tenant.end_s) - request.cost_s
        tenant.lines.setdefault(request.priority, deque()).appendleft(request)
        self._count_request(tenant, request, 1)

    def first(self) -> RoutedRequest | None:
        """Return the request to serve next, without removing it; None if the queue is empty."""
        best: tuple[float, str] | None = None
        for name, tenant in self._tenants.items():
            if tenant.lines:
                start = max(self._virtual_s, tenant.end_s), name
                best = start if best is None or start < best else best
        return self._tenants[best[1]].first() if best is not None else None

    def serve(self, request: RoutedRequest) -> None:
        """Remove the request that ``first`` returned, and charge its cost to its tenant."""
        tenant = self._tenants[request.tenant]
        self._virtual_s = max(self._virtual_s, tenant.end_s)
        tenant.end_s = self._virtual_s + request.cost_s
        self.drop(request)

    def drop(self, request: RoutedRequest) -> None:
        """Remove a request that is not served. Its tenant pays nothing."""
        tenant = self._tenants[request.tenant]
        line = tenant.lines[request.priority]
        line.remove(request)
        if not line:
            del tenant.lines[request.priority]
        self._count_request(tenant, request, -1)
        self._room.give(request.tenant, request.size)
        if not tenant.lines:
            self._forget_idle_tenants()

    def _forget_idle_tenants(self) -> None:
        """Forget tenants without requests whose end tag the virtual time has reached; all tenants if nothing waits."""
        for name in [name for name, tenant in self._tenants.items() if not tenant.lines]:
            if not self._count or self._tenants[name].end_s <= self._virtual_s:
                del self._tenants[name]

    def ahead_s(self, tenant: str, cost_s: float) -> float:
        """Return the seconds of engines that go to other requests before a new request of this tenant is served.

        All waiting requests of the tenant are served before the new one. Each other tenant is served at most as much
        as this tenant in the same time.

        Args:
            cost_s: the cost of the new request.
        """
        own = self._tenants.get(tenant)
        own_s = own.cost_s if own is not None else 0.0
        others_s = (each.cost_s for each in self._tenants.values() if each is not own)
        return own_s + sum(min(other_s, own_s + cost_s) for other_s in others_s)

    def _count_request(self, tenant: _Tenant, request: RoutedRequest, sign: int) -> None:
        tenant.cost_s = max(0.0, tenant.cost_s + sign * request.cost_s)
        self._count += sign


class QueueRoom:
    """The memory that all waiting requests together may take.

    A tenant may take no more memory than is still free (the dynamic threshold of Choudhury and Hahne, 1998). One tenant
    alone gets at most half of the memory, and two tenants that both want all of it get a third each. Some memory
    therefore always remains for another tenant.

    Args:
        bytes_max: the size of this memory.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes_used = 0
        self._bytes_by_tenant: dict[str, int] = {}

    def take(self, tenant: str, size: int, *, force: bool = False) -> None:
        """Take ``size`` bytes for a request of this tenant. With ``force`` the call never fails.

        Raises:
            TooManyCalls: the tenant would exceed its limit.
        """
        tenant_bytes = self._bytes_by_tenant.get(tenant, 0)
        if not force and tenant_bytes + size > self._bytes_max - self._bytes_used - size:
            raise TooManyCalls(f"{tenant_bytes} bytes of prompts of {tenant} wait already", retry_after_s=1.0)
        self._bytes_by_tenant[tenant] = tenant_bytes + size
        self._bytes_used += size

    def give(self, tenant: str, size: int) -> None:
        """Give back the memory of a request that no longer waits."""
        remaining = self._bytes_by_tenant[tenant] - size
        self._bytes_used -= size
        if remaining:
            self._bytes_by_tenant[tenant] = remaining
        else:
            del self._bytes_by_tenant[tenant]
