"""Events that an engine handles: calls, and the results of threads. They carry the time.

``sequence`` is the number that the shell gave a request; ids of requests may be used again, numbers are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.model.request import Role
from kvstore.errors import KVStoreError, NodeUnavailable


@dataclass(slots=True)
class Event:
    """Something happened at ``now_s``."""

    now_s: float


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class EnginesFound(Event):
    """The engines that compute prompts for others now, as the cluster reports; replaces the previous report.

    Engines given at the start take precedence: then these are not asked.
    """

    engines: tuple[str, ...]


@dataclass(slots=True)
class Submitted(Event):
    """A prompt to answer (or, not ``answers``, to compute for another engine and hold for ``hold_s``).

    Attributes:
        name: how errors refer to it.
        prompt: its tokens, including those that another engine has generated already, which are ``generated``.
        tokens_max: tokens of the answer, including those.
        engines: engines to compute the prompt, in this order; None: those given at the start, or found.
        stored: leading tokens that the pool has as exact pages.
        lazy: the KV is moved only once it is computed.
        stopped: the tokens generated so far already contain a stop string.
        names: names of its leading full pages: each stands for all tokens up to its end, and for their owner. Sequences
            with the same names share frames; empty if it shares nothing.
    """

    sequence: int
    name: str
    prompt: int
    generated: int
    tokens_max: int
    deadline_s: float
    role: Role = Role.BOTH
    answers: bool = True
    hold_s: float = 0.0
    engines: tuple[str, ...] | None = None
    stored: int = 0
    lazy: bool = False
    stopped: bool = False
    names: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Cancelled(Event):
    """The request is no longer wanted."""

    sequence: int


@dataclass(slots=True)
class Migrate(Event):
    """Let the engine at ``target`` continue it; a ``Reply`` answers ``call``."""

    sequence: int
    target: str
    call: int


@dataclass(slots=True)
class Drain(Event):
    """Let the engine at ``target`` continue all answers; None: they end here."""

    target: str | None


@dataclass(slots=True)
class Stop(Event):
    """The engine ends. No ``Turn`` follows."""


@dataclass(slots=True)
class DeviceFailed(Event):
    """The device is lost, and all KV with it: ``error`` ends all requests, present and later ones."""

    error: KVStoreError


def device_failed(error: KVStoreError) -> NodeUnavailable:
    """The error for requests."""
    return NodeUnavailable(f"this engine lost its device: {error}")


# --- what threads have finished ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class PrefixLoaded(Event):
    """``Load`` is done: this many leading tokens were in the pool, and are in the frames."""

    sequence: int
    tokens: int


@dataclass(slots=True)
class Computed(Event):
    """The engine that was asked has computed all of the prompt, and drawn its first token."""

    sequence: int
    attempt: int
    first_token: int


@dataclass(slots=True)
class AskFailed(Event):
    """The engine that was asked was not there, refused, or failed."""

    sequence: int
    attempt: int
    error: KVStoreError


@dataclass(slots=True)
class Moved(Event):
    """``Move`` is over, and its threads no longer use the frames: all of the prompt is in them, or there is an
    ``error``, before which ``tokens`` tokens came.
    """

    sequence: int
    attempt: int
    tokens: int
    error: KVStoreError | None = None


@dataclass(slots=True)
class SideStepped(Event):
    """``Aside`` is over: the next token, or None if the KV did not come, or the step failed (``error``)."""

    sequence: int
    token: int | None
    error: KVStoreError | None = None


@dataclass(slots=True)
class PullsEnded(Event):
    """After a ``Close``: no engine pulls, and none will."""

    sequence: int


@dataclass(slots=True)
class PassTaken(Event):
    """After a ``PassOn``: the other engine has begun to answer."""

    sequence: int


@dataclass(slots=True)
class NotTaken(Event):
    """After a ``PassOn``: the other engine will not answer. The request continues here."""

    sequence: int
    error: KVStoreError | None = None


@dataclass(slots=True)
class PassedOn(Event):
    """After ``PassTaken``: the client has received the end."""

    sequence: int


# --- turns ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arriving:
    """How far the KV of a sequence has arrived: leading layers that are there, and the time of one (0: unknown)."""

    layers: int
    layer_s: float = 0.0
    late: bool = False  # a step waited for it without success


@dataclass(slots=True)
class Turn(Event):
    """All events so far are handled: what is to run next? ``arriving``: sequences whose KV is on its way."""

    arriving: Mapping[int, Arriving] = field(default_factory=dict)


@dataclass(slots=True)
class Stepped(Event):
    """``Step`` is done. Sequences that were to draw have drawn, and their clients have the tokens.

    Attributes:
        ends: by sequence, "eos" or "stop" if that token ended the answer.
        missed: sequences whose KV did not arrive in time: they drew nothing.
        names: by sequence, the name of the page that its new token completes, if it shares pages.
        seconds: how long it took, of which it waited ``waited_s`` for layers.
    """

    ends: Mapping[int, str]
    missed: frozenset[int]
    seconds: float
    waited_s: float = 0.0
    names: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class StepFailed(Event):
    """``Step`` could not be computed, for a reason of its own: memory that is not there. No sequence has drawn, and
    beyond what was cached before the step the contents of its sequences' frames are undefined.
    """

    error: KVStoreError


@dataclass(slots=True)
class TokenDrawn(Event):
    """``Draw`` is done; ``end`` and ``name`` as in ``Stepped.ends`` and ``names``, or empty."""

    sequence: int
    end: str
    name: bytes = b""
