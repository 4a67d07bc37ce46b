"""What a conductor's decisions hear of. Time arrives inside; ``number`` is the one the shell gave a request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.conductor.state.fleet import EngineAbout, LoadReport
from engine.conductor.state.options import RouteWish
from engine.model.request import Role
from kvstore.state.directory import Told


@dataclass(frozen=True, slots=True)
class ConductorEvent:
    """Something happened at ``now_s``."""

    now_s: float


# --- who there is -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineFound(ConductorEvent):
    """An engine is there, or says something else of itself."""

    about: EngineAbout
    role: Role


@dataclass(frozen=True, slots=True)
class EngineLost(ConductorEvent):
    """It has left the catalog. Requests that it had are told about one by one, by ``Broke``."""

    name: str


@dataclass(frozen=True, slots=True)
class NodeFound(ConductorEvent):
    """A node is there."""

    name: str
    host: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class NodeLost(ConductorEvent):
    """It has left the catalog."""

    name: str


@dataclass(frozen=True, slots=True)
class PagesTold(ConductorEvent):
    """What a node has, and what came and went there."""

    batch: Told


@dataclass(frozen=True, slots=True)
class ReportAsked(ConductorEvent):
    """An engine is asked for a report now."""

    engine: str


@dataclass(frozen=True, slots=True)
class Reported(ConductorEvent):
    """It has answered."""

    engine: str
    report: LoadReport


@dataclass(frozen=True, slots=True)
class Silent(ConductorEvent):
    """It has not."""

    engine: str


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived(ConductorEvent):
    """A request. ``size``: bytes that it keeps here while it waits."""

    wish: RouteWish
    size: int


@dataclass(frozen=True, slots=True)
class FirstToken(ConductorEvent):
    """Its prompt is computed."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended(ConductorEvent):
    """There is a whole answer, of so many tokens. Of its prompt ``cached`` were found, and the others took
    ``prefill_s``; 0: that is not known."""

    number: int
    tokens: int
    cached: int = 0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestCancelled(ConductorEvent):
    """Nobody wants the answer any more, or there will be none and no other engine would do better."""

    number: int


@dataclass(frozen=True, slots=True)
class Broke(ConductorEvent):
    """The engine that answers has failed, or another that it needed. ``generated`` tokens have come until now.

    Attributes:
        barred: engines that cannot go on with it.
        lost: why no engine can; empty: one may.
    """

    number: int
    engine: str
    generated: int
    barred: tuple[str, ...] = ()
    lost: str = ""


@dataclass(frozen=True, slots=True)
class RoleRefused(ConductorEvent):
    """An engine refused a request for its role: it does other work than it had reported. Nothing was computed."""

    number: int
    engine: str


@dataclass(frozen=True, slots=True)
class Ticked(ConductorEvent):
    """Time has passed."""


# --- orders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeadershipTold(ConductorEvent):
    """Whether this conductor leads: the leader alone gives orders. ``revision``: of its election, see ``RoleOrder``."""

    leads: bool
    revision: int = 0


@dataclass(frozen=True, slots=True)
class RoleAnswered(ConductorEvent):
    """An order for another role is no longer under way: the engine has answered, or will not carry it out."""

    engine: str


@dataclass(frozen=True, slots=True)
class OrderEnded(ConductorEvent):
    """An order is carried out, or will not be."""

    order: int
