"""Door: which requests are accepted. Decided while the caller waits, whatever the engine computes meanwhile."""

from __future__ import annotations

from engine.model.request import Role
from kvstore.errors import InvalidRequest, NodeUnavailable, TooManyCalls


class Door:
    """The role, and who is inside. Ids are refused while they are in use.

    Attributes:
        known: numbers of sequences by id: all that have not ended, and prefills until nobody can pull them any more.
    """

    def __init__(self, role: Role, requests_max: int) -> None:
        self.role = role
        self.draining = False
        self.known: dict[str, int] = {}
        self._requests_max = requests_max

    def check(self, answers: bool) -> None:
        """Whether requests of that kind are taken at all.

        Raises:
            InvalidRequest: not in this role.
            NodeUnavailable: no requests, by an engine that is drained or ends.
        """
        if answers and self.role is Role.PREFILL:
            raise InvalidRequest("role", "this engine computes prompts for others; ask one of role decode or both")
        if not answers and self.role is Role.DECODE:
            raise InvalidRequest("role", "this engine answers requests; ask one of role prefill or both")
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
