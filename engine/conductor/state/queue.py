"""Queue: requests that wait until an engine has room, a fair share for every tenant.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): a request's start tag is the later of the queue's virtual
time and the end of the tenant's last request; its end is that much later as it costs, in seconds of an engine. The
smallest start tag goes first, and becomes the virtual time. So a tenant that floods the queue delays others by what it
has under way, and no more; one that comes back after a pause has saved up nothing. Priorities order the requests of one
tenant alone: who claims them for everything gains nothing over others.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvstore.errors import TooManyCalls


@dataclass(slots=True)
class QueuedRequest:
    """A request that waits. ``cost_s``: seconds of an engine, by prediction; ``size``: bytes that it keeps here."""

    number: int
    cost_s: float
    size: int
    priority: int = 0


@dataclass(slots=True)
class _Tenant:
    """Of one tenant: its requests, by priority, and the end tag of the last one that has left the queue."""

    end_s: float = 0.0
    lines: dict[int, deque[QueuedRequest]] = field(default_factory=dict)
    size: int = 0
    cost_s: float = 0.0

    def first(self) -> QueuedRequest:
        return self.lines[max(self.lines)][0]


class Queue:
    """All that wait.

    Args:
        bytes_max: that they may keep together. Half of it is any one tenant's at most, while there are others.
    """

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self._now_s = 0.0  # virtual
        self._tenants: dict[str, _Tenant] = {}
        self._size = 0

    def __len__(self) -> int:
        return sum(len(line) for tenant in self._tenants.values() for line in tenant.lines.values())

    def add(self, tenant: str, waiting: QueuedRequest) -> None:
        """One more, behind those of its tenant and priority.

        Raises:
            TooManyCalls: there is no room for it.
        """
        known = self._tenants.get(tenant)
        theirs = known.size if known is not None else 0
        if self._size + waiting.size > self._max or theirs + waiting.size > self._max // 2:
            raise TooManyCalls(f"{theirs} bytes of prompts of {tenant} wait already", retry_after_s=1.0)
        if known is None:
            known = self._tenants[tenant] = _Tenant(self._now_s)
        known.lines.setdefault(waiting.priority, deque()).append(waiting)
        self._count(known, waiting, 1)

    def back(self, tenant: str, waiting: QueuedRequest) -> None:
        """One that left the queue goes on in front: the engine that had it failed. It costs its tenant nothing more."""
        known = self._tenants.setdefault(tenant, _Tenant(self._now_s))
        known.end_s -= waiting.cost_s
        known.lines.setdefault(waiting.priority, deque()).appendleft(waiting)
        self._count(known, waiting, 1)

    def first(self) -> tuple[str, QueuedRequest] | None:
        """Who is next; it stays in the queue."""
        waiting = [name for name, tenant in self._tenants.items() if tenant.lines]
        if not waiting:
            return None
        tenant = min(waiting, key=lambda name: (max(self._now_s, self._tenants[name].end_s), name))
        return tenant, self._tenants[tenant].first()

    def take(self, tenant: str, waiting: QueuedRequest) -> None:
        """The one that ``first`` gave leaves, to be served."""
        known = self._tenants[tenant]
        self._now_s = max(self._now_s, known.end_s)
        known.end_s = self._now_s + waiting.cost_s
        self.drop(tenant, waiting)

    def drop(self, tenant: str, waiting: QueuedRequest) -> None:
        """One leaves unserved."""
        known = self._tenants[tenant]
        line = known.lines[waiting.priority]
        line.remove(waiting)
        if not line:
            del known.lines[waiting.priority]
        self._count(known, waiting, -1)
        # A tenant without requests is forgotten once others have caught up with it, or nobody waits.
        alone = not len(self)
        for name in [name for name, each in self._tenants.items() if not each.lines]:
            if alone or self._tenants[name].end_s <= self._now_s:
                del self._tenants[name]

    def ahead_s(self, tenant: str, cost_s: float) -> float:
        """Seconds of engines that are served before a new request of this tenant.

        All that its tenant has waiting; of every other tenant what it has, at most as much as goes to this one
        meanwhile.
        """
        known = self._tenants.get(tenant)
        mine_s = known.cost_s if known is not None else 0.0
        others = (each.cost_s for each in self._tenants.values() if each is not known)
        return mine_s + sum(min(other, mine_s + cost_s) for other in others)

    def _count(self, known: _Tenant, waiting: QueuedRequest, sign: int) -> None:
        known.size += sign * waiting.size
        known.cost_s += sign * waiting.cost_s
        self._size += sign * waiting.size
