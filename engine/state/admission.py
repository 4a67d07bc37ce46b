"""Admission: which requests an engine accepts. The engine decides while the caller waits, whatever step is running."""

from __future__ import annotations

from typing import Final

from engine.model.request import NO_ORDER, Role, RoleOrder
from kvstore.errors import InvalidRequest, NodeUnavailable, TooManyCalls

ROLE: Final = "role"  # the field named in the refusal of a request that does not suit the engine's role


class Admission:
    """The engine's role, and the ids in use. A request whose id is in use is refused.

    Attributes:
        order: the last order of a leader that was carried out.
        role_set_by: what set the role last: "start", "operator" or "leader".
        numbers: the sequence number of each request id in use. The id of an answer is in use until the answer has
            ended; the id of a prefill, as long as an engine can pull the prefill.
    """

    def __init__(self, role: Role, requests_max: int) -> None:
        self.role = role
        self.order = NO_ORDER
        self.role_set_by = "start"
        self.draining = False
        self.numbers: dict[str, int] = {}
        self._requests_max = requests_max

    def set_role(self, role: Role, order: RoleOrder | None) -> None:
        """Change which requests are taken from now on.

        Args:
            order: the order of a leading conductor; None if an operator sets the role, which also ends a drain.

        Raises:
            InvalidRequest: this order, or a later one, was carried out before: another conductor may lead now.
            NodeUnavailable: the engine is drained, and only an operator can end that.
        """
        if order is None:
            self.role, self.role_set_by, self.draining = role, "operator", False
            return
        if order <= self.order:
            last, received = (f"order {each.number} of revision {each.revision}" for each in (self.order, order))
            raise InvalidRequest("revision", f"{last} was carried out before (got {received})")
        if self.draining:
            raise NodeUnavailable("this engine keeps its role: it is being drained")
        self.role, self.role_set_by, self.order = role, "leader", order

    def check(self, answers: bool) -> None:
        """Check that the engine takes requests of this kind.

        Raises:
            InvalidRequest: the engine has another role.
            NodeUnavailable: the engine is drained, and takes no requests.
        """
        if answers and self.role is Role.PREFILL:
            raise InvalidRequest(
                ROLE, "this engine only computes prompts for other engines; use an engine of role decode or both"
            )
        if not answers and self.role is Role.DECODE:
            raise InvalidRequest(
                ROLE, "this engine does not compute prompts for other engines; use an engine of role prefill or both"
            )
        if self.draining:
            raise NodeUnavailable("this engine takes no new requests: it is being drained")

    def enter(self, request_id: str, number: int) -> None:
        """Register a request.

        Raises:
            InvalidRequest: the id is in use.
            TooManyCalls: the engine already has the maximum number of requests.
        """
        if request_id in self.numbers:
            raise InvalidRequest("request_id", f"{request_id} is in use by another request")
        if len(self.numbers) >= self._requests_max:
            raise TooManyCalls(f"this engine already has {self._requests_max} requests", retry_after_s=1.0)
        self.numbers[request_id] = number

    def leave(self, request_id: str) -> None:
        """Free the id of a request."""
        del self.numbers[request_id]
