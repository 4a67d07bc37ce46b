"""What an engine's decisions hear of: calls, and what threads have finished. Time arrives inside.

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
    """Who computes prompts for others now, by what the cluster tells; replaces what was told before.

    Engines that we were started with come before them: then these are not asked.
    """

    engines: tuple[str, ...]


@dataclass(slots=True)
class Submitted(Event):
    """A prompt is to be answered (or, not ``answers``, computed for another engine and held for ``hold_s``).

    Attributes:
        name: what errors call it.
        prompt: its tokens, with those that another engine has generated already, which are ``generated``.
        tokens_max: of the answer, with those.
        engines: to compute the prompt, in this order; None: those the engine was started with, or found.
        stored: leading tokens that the pool has as exact pages.
        lazy: the KV moves only once it is computed.
        stopped: what was generated already holds a stop string.
        names: of its leading full pages: each stands for all tokens up to its end, and who they belong to. Sequences of
            the same names share frames; none where it shares nothing.
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
    """Nobody wants it any more."""

    sequence: int


@dataclass(slots=True)
class Migrate(Event):
    """The engine at ``target`` shall go on with it; ``call`` is answered by a ``Reply``."""

    sequence: int
    target: str
    call: int


@dataclass(slots=True)
class Drain(Event):
    """Answers shall go on at ``target``; None: they end here."""

    target: str | None


@dataclass(slots=True)
class Stop(Event):
    """The engine ends. ``Turn`` comes no more."""


@dataclass(slots=True)
class DeviceFailed(Event):
    """The device is lost, and all KV with it: ``error`` ends what is here and what comes."""

    error: KVStoreError


def device_failed(error: KVStoreError) -> NodeUnavailable:
    """What requests are told."""
    return NodeUnavailable(f"this engine lost its device: {error}")


# --- what threads have finished ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class PrefixLoaded(Event):
    """``Load`` is done: that many leading tokens were in the pool, and are in the frames."""

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
    """That engine was not there, refused, or failed."""

    sequence: int
    attempt: int
    error: KVStoreError


@dataclass(slots=True)
class Moved(Event):
    """``Move`` is over, and no thread of it touches the frames: all of the prompt is in them, or there is an
    ``error``, and so much came before it.
    """

    sequence: int
    attempt: int
    tokens: int
    error: KVStoreError | None = None


@dataclass(slots=True)
class SideStepped(Event):
    """``Aside`` is over: its next token, or None where the KV did not come, or it failed (``error``)."""

    sequence: int
    token: int | None
    error: KVStoreError | None = None


@dataclass(slots=True)
class PullsEnded(Event):
    """After a ``Close``: nobody pulls, and nobody will."""

    sequence: int


@dataclass(slots=True)
class PassTaken(Event):
    """After a ``PassOn``: the other engine has said its first word."""

    sequence: int


@dataclass(slots=True)
class NotTaken(Event):
    """After a ``PassOn``: it will not say one. The request goes on here."""

    sequence: int
    error: KVStoreError | None = None


@dataclass(slots=True)
class PassedOn(Event):
    """After ``PassTaken``: the client was told the end."""

    sequence: int


# --- turns ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arriving:
    """How far the KV of a sequence is: leading layers that are there, and what a layer takes (0: unknown)."""

    layers: int
    layer_s: float = 0.0
    late: bool = False  # a step waited for it in vain


@dataclass(slots=True)
class Turn(Event):
    """All events so far are handled: what is to run next? ``arriving``: of sequences whose KV is on its way."""

    arriving: Mapping[int, Arriving] = field(default_factory=dict)


@dataclass(slots=True)
class Stepped(Event):
    """``Step`` is done. Whoever was to draw has drawn and told its client.

    Attributes:
        ends: by sequence, "eos" or "stop" where that token ended the answer.
        missed: those whose KV did not come in time: they drew nothing.
        names: by sequence, of the page that its new token is the last one of, where it shares pages.
        seconds: what it took, of which it waited ``waited_s`` for layers.
    """

    ends: Mapping[int, str]
    missed: frozenset[int]
    seconds: float
    waited_s: float = 0.0
    names: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class StepFailed(Event):
    """``Step`` could not be computed, for a reason that is no other step's: memory that is not there. Nobody has drawn,
    and behind what was cached before it the frames of its sequences hold anything.
    """

    error: KVStoreError


@dataclass(slots=True)
class TokenDrawn(Event):
    """``Draw`` is done; ``end`` as in ``Stepped.ends``, or "", and ``name`` as there, or b""."""

    sequence: int
    end: str
    name: bytes = b""
