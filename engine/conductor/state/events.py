"""Events: what a conductor decides about. Each has its time, and ``number`` is the conductor's number of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.conductor.state.engine_table import EngineAbout, LoadReport
from engine.model.request import Request, Role
from kvstore.cluster.directory import AnnounceBatch
from kvstore.model.prefix import Fingerprints


@dataclass(frozen=True, slots=True)
class ConductorEvent:
    """An event at the time ``now_s``."""

    now_s: float


# --- members -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineFound(ConductorEvent):
    """An engine has joined, or its description has changed."""

    about: EngineAbout
    role: Role


@dataclass(frozen=True, slots=True)
class EngineLost(ConductorEvent):
    """An engine is no longer in the catalog. An ``EngineFailed`` follows for each request that was sent to it."""

    name: str


@dataclass(frozen=True, slots=True)
class NodeFound(ConductorEvent):
    """A node has joined."""

    name: str
    host: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class NodeLost(ConductorEvent):
    """A node is no longer in the catalog."""

    name: str


@dataclass(frozen=True, slots=True)
class PagesReported(ConductorEvent):
    """A node has reported all its pages, or the pages that it has gained and lost."""

    batch: AnnounceBatch


@dataclass(frozen=True, slots=True)
class ReportRequested(ConductorEvent):
    """The conductor is asking an engine for a report now."""

    engine: str


@dataclass(frozen=True, slots=True)
class LoadReported(ConductorEvent):
    """An engine has answered with a report."""

    engine: str
    report: LoadReport


@dataclass(frozen=True, slots=True)
class EngineSilent(ConductorEvent):
    """An engine did not answer when asked for a report."""

    engine: str


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived(ConductorEvent):
    """A request has arrived. ``RoutedRequest`` explains ``pages`` and ``barred``."""

    number: int
    request: Request
    pages: Mapping[str, Fingerprints]
    barred: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstToken(ConductorEvent):
    """The first token of an answer has arrived, so the prompt is computed."""

    number: int


@dataclass(frozen=True, slots=True)
class AnswerEnded(ConductorEvent):
    """An answer is complete.

    Attributes:
        tokens: tokens of the answer.
        cached: tokens of the prompt that the engine did not have to compute.
        prefill_s: seconds that the others took; 0 if unknown.
    """

    number: int
    tokens: int
    cached: int = 0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestCancelled(ConductorEvent):
    """A request has ended without a complete answer: its client disconnected, or no other engine could answer it."""

    number: int


@dataclass(frozen=True, slots=True)
class EngineFailed(ConductorEvent):
    """The engine that answers a request has failed, or another engine that it needed.

    Attributes:
        engine: the engine that failed.
        generated: how many tokens of the answer have come.
        barred: engines that cannot continue the answer.
        lost: why no engine can continue; empty if another engine may.
    """

    number: int
    engine: str
    generated: int
    barred: tuple[str, ...] = ()
    lost: str = ""


@dataclass(frozen=True, slots=True)
class RoleRefused(ConductorEvent):
    """An engine refused a request because its role is no longer the reported one. It computed nothing."""

    number: int
    engine: str


@dataclass(frozen=True, slots=True)
class Ticked(ConductorEvent):
    """Time has passed."""


# --- orders -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeadershipChanged(ConductorEvent):
    """This conductor has begun or ceased to lead. Only the leader gives orders.

    Attributes:
        revision: the revision of its election, see ``RoleOrder``.
    """

    leads: bool
    revision: int = 0


@dataclass(frozen=True, slots=True)
class RoleOrderEnded(ConductorEvent):
    """An order to change a role is no longer under way: the engine has answered, or it never will."""

    engine: str


@dataclass(frozen=True, slots=True)
class PageOrderEnded(ConductorEvent):
    """An order to move pages was carried out, or never will be."""

    order: int
