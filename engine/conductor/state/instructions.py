"""Instructions: the actions that follow from an event of a conductor."""

from __future__ import annotations

from dataclasses import dataclass

from engine.conductor.state.routed_requests import Route
from engine.model.request import Role, RoleOrder


@dataclass(frozen=True, slots=True)
class Instruction:
    """An action to perform."""


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Send the request to the engine that answers. If another engine computes the prompt, the first one asks it.

    An ``EngineFailed`` reports a failure.
    """

    number: int
    route: Route
    waited_s: float


@dataclass(frozen=True, slots=True)
class Refuse(Instruction):
    """Refuse the request. The client may retry after ``retry_s``, or never if that is None."""

    number: int
    why: str
    retry_s: float | None


@dataclass(frozen=True, slots=True)
class LoseRequest(Instruction):
    """End the request with an error, because no engine can continue the answer."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class RestartStream(Instruction):
    """Start a new stream of a node's pages, because a batch is missing. A new stream begins with all its pages."""

    node: str


@dataclass(frozen=True, slots=True)
class SetRole(Instruction):
    """Order an engine to change its role. It finishes its running work in the old role.

    The order reaches the engine within ``roles.ORDER_S`` or never. ``RoleOrderEnded`` follows in both cases. An engine
    refuses an order that is not later than the last one that it carried out.
    """

    engine: str
    role: Role
    order: RoleOrder


@dataclass(frozen=True, slots=True)
class CopyPrefix(Instruction):
    """Order a node to copy the first ``pages`` pages of a request's prompt from another node into its memory.

    The shell makes the node's ``Prefetch`` call. ``PageOrderEnded`` reports its end. After ``prefetch.LATE_S`` the
    conductor no longer waits for that event.

    Attributes:
        order: the number of the order.
        number: the number of the request. It has not ended when the order is given.
        source: a node that has the pages.
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
    """Order a node to load the first pages of a prompt from its own NVMe into its memory. See ``CopyPrefix``."""

    order: int
    number: int
    node: str
    layout: str
    pages: int
    size: int
