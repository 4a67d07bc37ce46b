"""Nouns of a conductor's decisions: a request, and the route that is chosen for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from engine.conductor.state.fleet import FleetEngine
from engine.model.request import Request
from kvstore.model.prefix import Fingerprints

TOKEN_BYTES: Final = 4  # of memory
EXTRA_BYTES: Final = 1 << 20  # of the parameters that are passed on: at most 64 KiB of JSON


@dataclass(frozen=True, slots=True)
class Computing:
    """An engine that could compute the prompt.

    Attributes:
        cached: tokens that it need not compute.
        own: those of them that its own node has now.
        donor: the node that supplies the others, its own if they are being computed there; empty: none.
        after_s: when the donor has them: the request is kept until then; 0: now.
        wait_s, move_s, prefill_s: see the docstring of ``candidates``.
        harm_s: the total delay, in seconds, to the requests that it answers.
    """

    engine: FleetEngine
    cached: int
    own: int
    donor: str
    after_s: float
    wait_s: float
    move_s: float
    prefill_s: float
    harm_s: float

    @property
    def ready_s(self) -> float:
        """Seconds until the prompt is computed."""
        return max(self.wait_s, self.move_s) + self.prefill_s


@dataclass(frozen=True, slots=True)
class Answering:
    """An engine that could answer.

    Attributes:
        own: tokens of the prompt that its own node has now.
        batch: sequences that it would decode together, this one among them.
        token_s: its step then.
        harm_s: the total delay, in seconds, to the other requests while this answer lasts.
    """

    engine: FleetEngine
    own: int
    batch: int
    token_s: float
    harm_s: float


@dataclass(frozen=True, slots=True)
class Route:
    """A pair of engines, and what it leads to.

    Attributes:
        tail_s: the exposed part of the hand-off, and its extra cost; 0 if one engine does both.
        total_s: until the last token, including the harm to other requests: the default policy minimizes this.
    """

    computing: Computing
    answering: Answering
    tail_s: float
    total_s: float

    @property
    def local(self) -> bool:
        """True if one engine does both."""
        return self.computing.engine is self.answering.engine

    @property
    def first_token_s(self) -> float:
        """Seconds until the first token."""
        return self.computing.ready_s + self.tail_s


class RequestPhase(Enum):
    """Where a request is."""

    WAITING = auto()  # in the queue, until an engine has room
    KEPT = auto()  # for an engine, until another one has computed what both begin with
    SENT = auto()
    DECODING = auto()


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """What the decisions need to know of one request, from its arrival to its end. Only ``ConductorState`` changes it.

    Attributes:
        number: the conductor's.
        request: as it arrived.
        pages: fingerprints of the prompt's full pages, in order, for each layout that an engine of its model has.
        barred: engines that it can never go to.
        arrived_s: when it came.
        first_token_s, token_s: the limits that it is to meet: its own or the conductor's; 0: no limit.
        cost_s: seconds of an engine for its prompt, by prediction; ``answer_s``: for its answer.
        route: where it was sent.
        failed: engines that failed on it.
        generated: tokens of the answer that have come already.
    """

    number: int
    request: Request
    pages: Mapping[str, Fingerprints]
    barred: tuple[str, ...] = ()
    arrived_s: float = 0.0
    first_token_s: float = 0.0
    token_s: float = 0.0
    cost_s: float = 0.0
    answer_s: float = 0.0
    phase: RequestPhase = RequestPhase.WAITING
    route: Route | None = None
    failed: tuple[str, ...] = ()
    generated: int = 0

    @property
    def model(self) -> str:
        """The model that is to answer it."""
        return self.request.model

    @property
    def tenant(self) -> str:
        """The tenant that it counts for."""
        return self.request.tenant

    @property
    def priority(self) -> int:
        """Among requests of its tenant, the higher one first."""
        return self.request.priority

    @property
    def size(self) -> int:
        """Bytes that it keeps here."""
        return TOKEN_BYTES * len(self.request.tokens) + (EXTRA_BYTES if self.request.extra else 0)

    @property
    def tokens(self) -> int:
        """Tokens that the next engine begins with: the prompt, and what was generated."""
        return len(self.request.tokens) + self.generated

    @property
    def answer_max(self) -> int:
        """Tokens that the rest of the answer may have."""
        return max(1, self.request.sampling.max_tokens - self.generated)

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that the request is at."""
        if self.route is None:
            return ()
        both = self.route.computing.engine.about.name, self.route.answering.engine.about.name
        return both if both[0] != both[1] else both[:1]
