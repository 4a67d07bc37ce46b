"""Queue: requests that wait until an engine has room, with a fair share for every tenant.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): a request's start tag is the later of the queue's virtual
time and the end of the tenant's last request; its end is later by its cost, in seconds of an engine. The smallest
start tag goes first, and becomes the virtual time. So a tenant that floods the queue delays other tenants by what it
has under way, and no more; a tenant that comes back after a pause has saved up nothing. Priorities only order the
requests of one tenant: claiming a high priority for all of them gains nothing over other tenants. Every model has its
own queue, because its engines cannot serve requests for another one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.conductor.state.routed_request import RoutedRequest
from kvstore.errors import TooManyCalls


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
