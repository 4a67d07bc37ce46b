"""What a conductor is told to do."""

from __future__ import annotations

from dataclasses import dataclass

from engine.conductor.state.options import Route
from engine.model.request import Role


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something to do."""


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Send the request to the engine that answers; that one asks the other to compute its prompt, where it is another.

    What fails is told with ``Broke``.
    """

    number: int
    route: Route
    waited_s: float


@dataclass(frozen=True, slots=True)
class Refuse(Instruction):
    """Tell its client to come back later, or, where ``retry_s`` is None, that it never can be answered."""

    number: int
    why: str
    retry_s: float | None


@dataclass(frozen=True, slots=True)
class LoseRequest(Instruction):
    """Tell its client that the answer is lost: too many engines failed on it."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class SetRole(Instruction):
    """Tell an engine to do something else from now on. What is under way there is finished as it began."""

    engine: str
    role: Role
