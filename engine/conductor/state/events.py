"""Events that a conductor handles. They carry the time; ``number`` is the one that the shell gave a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.conductor.state.engine_table import EngineAbout, LoadReport
from engine.model.request import Request, Role
from kvstore.cluster.directory import AnnounceBatch
from kvstore.model.prefix import Fingerprints


@dataclass(frozen=True, slots=True)
class ConductorEvent:
    """Something happened at ``now_s``."""

    now_s: float


# --- members -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineFound(ConductorEvent):
    """An engine has joined, or has changed its description."""

    about: EngineAbout
    role: Role


@dataclass(frozen=True, slots=True)
class EngineLost(ConductorEvent):
    """An engine has left the catalog. Each of its requests is reported separately, by ``Broke``."""

    name: str


@dataclass(frozen=True, slots=True)
class NodeFound(ConductorEvent):
    """A node is there."""

    name: str
    host: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class NodeLost(ConductorEvent):
    """A node has left the catalog."""

    name: str


@dataclass(frozen=True, slots=True)
class PagesReported(ConductorEvent):
    """What a node has, and which pages came and went there."""

    batch: AnnounceBatch


@dataclass(frozen=True, slots=True)
class ReportAsked(ConductorEvent):
    """An engine is asked for a report now."""

    engine: str


@dataclass(frozen=True, slots=True)
class Reported(ConductorEvent):
    """An engine has answered with its report."""

    engine: str
    report: LoadReport


@dataclass(frozen=True, slots=True)
class Silent(ConductorEvent):
    """An engine did not answer when asked for a report."""

    engine: str


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived(ConductorEvent):
    """A request has arrived. ``pages``, ``barred``: see ``RoutedRequest``."""

    number: int
    request: Request
    pages: Mapping[str, Fingerprints]
    barred: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstToken(ConductorEvent):
    """The prompt of a request is computed."""

    number: int


@dataclass(frozen=True, slots=True)
class Ended(ConductorEvent):
    """An answer of this many tokens is complete. ``cached`` tokens of its prompt were found, and computing the others
    took ``prefill_s``; 0: not known."""

    number: int
    tokens: int
    cached: int = 0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestCancelled(ConductorEvent):
    """The client has gone, or there will be no answer and no other engine would do better."""

    number: int


@dataclass(frozen=True, slots=True)
class Broke(ConductorEvent):
    """The engine that answers, or another that it needed, has failed. ``generated`` tokens have come until now.

    Attributes:
        barred: engines that cannot go on with it.
        lost: why no engine can continue; empty: one may.
    """

    number: int
    engine: str
    generated: int
    barred: tuple[str, ...] = ()
    lost: str = ""


@dataclass(frozen=True, slots=True)
class RoleRefused(ConductorEvent):
    """An engine refused a request because of its role, which is not the one it reported. Nothing was computed."""

    number: int
    engine: str


@dataclass(frozen=True, slots=True)
class Ticked(ConductorEvent):
    """Time has passed."""


# --- orders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeadershipChanged(ConductorEvent):
    """Whether this conductor leads: only the leader gives orders. ``revision``: of its election, see ``RoleOrder``."""

    leads: bool
    revision: int = 0


@dataclass(frozen=True, slots=True)
class RoleAnswered(ConductorEvent):
    """An order to change a role is no longer under way: the engine has answered, or will not carry it out."""

    engine: str


@dataclass(frozen=True, slots=True)
class OrderEnded(ConductorEvent):
    """An order to move pages was carried out, or will not be."""

    order: int
