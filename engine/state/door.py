"""Door: which requests are accepted. Decided while the caller waits, whatever the engine computes meanwhile."""

from __future__ import annotations

from typing import Final

from engine.model.request import NO_ORDER, Role, RoleOrder
from kvstore.errors import InvalidRequest, NodeUnavailable, TooManyCalls

ROLE: Final = "role"  # the field of a request that is refused since the engine does other work


class Door:
    """The role, and who is inside. Ids are refused while they are in use.

    Attributes:
        order: the last order of a leader that was carried out; ``by``: who set the role last.
        known: numbers of sequences by id: all that have not ended, and prefills until nobody can pull them any more.
    """

    def __init__(self, role: Role, requests_max: int) -> None:
        self.role = role
        self.order = NO_ORDER
        self.by = "start"
        self.draining = False
        self.known: dict[str, int] = {}
        self._requests_max = requests_max

    def set_role(self, role: Role, order: RoleOrder | None) -> None:
        """Take other requests from now on.

        Args:
            order: of a leader among conductors. None: an operator sets the role, which also ends a drain.

        Raises:
            InvalidRequest: an order as late as this one was carried out before: another conductor leads by now.
            NodeUnavailable: the engine is drained, which no leader ends.
        """
        if order is None:
            self.role, self.by, self.draining = role, "operator", False
            return
        if order <= self.order:
            known, got = (f"order {each.number} of revision {each.revision}" for each in (self.order, order))
            raise InvalidRequest("revision", f"{known} was carried out before (got {got})")
        if self.draining:
            raise NodeUnavailable("this engine keeps its role: it is being drained")
        self.role, self.by, self.order = role, "leader", order

    def check(self, answers: bool) -> None:
        """Whether requests of that kind are taken at all.

        Raises:
            InvalidRequest: not in this role.
            NodeUnavailable: no requests, by an engine that is drained or ends.
        """
        if answers and self.role is Role.PREFILL:
            raise InvalidRequest(ROLE, "this engine computes prompts for others; ask one of role decode or both")
        if not answers and self.role is Role.DECODE:
            raise InvalidRequest(ROLE, "this engine answers requests; ask one of role prefill or both")
        if self.draining:
            raise NodeUnavailable("this engine takes no new requests: it is being drained")

    def enter(self, request_id: str, number: int) -> None:
        """One more.

        Raises:
            InvalidRequest: its id is in use.
            TooManyCalls: as many as may be are here.
        """
        if request_id in self.known:
            raise InvalidRequest("request_id", f"{request_id} is in use here")
        if len(self.known) >= self._requests_max:
            raise TooManyCalls(f"{self._requests_max} requests are here already", retry_after_s=1.0)
        self.known[request_id] = number

    def leave(self, request_id: str) -> None:
        """Its id is free."""
        del self.known[request_id]
