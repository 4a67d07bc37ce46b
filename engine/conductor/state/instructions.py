"""Instructions: what a conductor does after an event."""

from __future__ import annotations

from dataclasses import dataclass

from engine.conductor.state.routed_requests import Route
from engine.model.request import Role, RoleOrder


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something to do."""


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Send the request to the engine that answers; if another engine computes the prompt, that engine asks it to.

    A failure is reported with ``Broke``.
    """

    number: int
    route: Route
    waited_s: float


@dataclass(frozen=True, slots=True)
class Refuse(Instruction):
    """Tell the client to retry later, or, if ``retry_s`` is None, that the request can never be answered."""

    number: int
    why: str
    retry_s: float | None


@dataclass(frozen=True, slots=True)
class LoseRequest(Instruction):
    """Tell the client that the answer is lost, because too many engines failed on it."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class RestartStream(Instruction):
    """Ask this node for a new stream, which begins with everything: a batch of its reports is missing."""

    node: str


@dataclass(frozen=True, slots=True)
class SetRole(Instruction):
    """Tell an engine its new role. Its running work finishes as it began.

    The engine is told within ``roles.ORDER_S`` or not at all, and then ``RoleAnswered`` follows. An engine refuses an
    order that is not later than the last one it has carried out.
    """

    engine: str
    role: Role
    order: RoleOrder


@dataclass(frozen=True, slots=True)
class CopyPrefix(Instruction):
    """Tell a node to bring the first ``pages`` pages of a request's prompt into its memory, from another node.

    It is the node's ``Prefetch`` call with the keys of these pages; ``source`` is the node that has them. Its end is
    reported with ``OrderEnded``, within ``orders.LATE_S``, after which the conductor stops waiting.

    Attributes:
        order: number of the order.
        number: the number of the request, which is still open when the order is given.
        layout: the layout of the pages, see ``RoutedRequest.pages``.
        size: the bytes to move.
    """

    order: int
    number: int
    node: str
    source: str
    layout: str
    pages: int
    size: int


@dataclass(frozen=True, slots=True)
class PrefetchPrefix(Instruction):
    """Tell a node to bring the first pages of a prompt into its memory from its own NVMe. See ``CopyPrefix``."""

    order: int
    number: int
    node: str
    layout: str
    pages: int
    size: int
