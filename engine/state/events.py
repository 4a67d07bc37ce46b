"""Events that an engine handles: calls, and the results of threads. Each carries its time.

``sequence`` is the number that the shell gave a request. A client may use a request id again; numbers are unique.
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
    """The cluster reports all engines that now compute prompts for others.

    They are not asked if this engine was started with addresses of such engines.
    """

    engines: tuple[str, ...]


@dataclass(slots=True)
class Submitted(Event):
    """A prompt to answer or, if ``answers`` is False, to compute for another engine and hold for ``hold_s``.

    Attributes:
        name: the name of the request in errors.
        prompt: the number of tokens to prefill, including those that another engine has already generated.
        generated: the number of tokens that another engine has already generated.
        tokens_max: the maximum number of tokens of the answer, including ``generated``.
        engines: engines to ask for the prompt, in this order; None means the engines given at startup, or
            else the cluster's.
        stored: leading tokens that the pool has as exact pages.
        lazy: True to move the KV only after all of it is computed.
        stopped: True if the tokens generated so far already contain a stop string.
        names: names of the leading full pages. A name identifies all tokens up to the end of its page, and their owner.
            Sequences share the frames of pages with equal names. Empty if the sequence shares nothing.
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
    """The client cancelled the request or disconnected."""

    sequence: int


@dataclass(slots=True)
class Migrate(Event):
    """A caller asks to let the engine at ``target`` continue the answer; an ``AnswerCall`` answers ``call``."""

    sequence: int
    target: str
    call: int


@dataclass(slots=True)
class Drain(Event):
    """An operator asks to let the engine at ``target``, or this engine if it is None, continue all answers."""

    target: str | None


@dataclass(slots=True)
class Stop(Event):
    """The engine ends. No ``Turn`` follows."""


@dataclass(slots=True)
class DeviceFailed(Event):
    """The device and all KV are lost: ``error`` fails all requests, present and later ones."""

    error: KVStoreError


def device_failed(error: KVStoreError) -> NodeUnavailable:
    """Return the error with which requests fail after the device was lost."""
    return NodeUnavailable(f"this engine lost its device: {error}")


# --- results of threads -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class PrefixLoaded(Event):
    """``LoadPrefix`` is done: the KV of the first ``tokens`` tokens is in the frames."""

    sequence: int
    tokens: int


@dataclass(slots=True)
class Computed(Event):
    """The other engine has computed all of the prompt, and drawn the first token."""

    sequence: int
    attempt: int
    first_token: int


@dataclass(slots=True)
class AskFailed(Event):
    """The other engine could not be reached, refused, or failed."""

    sequence: int
    attempt: int
    error: KVStoreError


@dataclass(slots=True)
class Moved(Event):
    """``MoveIn`` is over, and its threads no longer use the frames.

    The KV of the first ``tokens`` tokens is in the frames: all of the prompt, unless there is an ``error``.
    """

    sequence: int
    attempt: int
    tokens: int
    error: KVStoreError | None = None


@dataclass(slots=True)
class SideStepped(Event):
    """``SideStep`` is over. ``token``: the next token; None if the KV did not arrive or the step failed (``error``)."""

    sequence: int
    token: int | None
    error: KVStoreError | None = None


@dataclass(slots=True)
class PullsEnded(Event):
    """After a ``Close``: no engine is pulling, and none will begin to."""

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
    """After ``PassTaken``: the client has received the end of the answer."""

    sequence: int


# --- turns ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Arriving:
    """How much of a sequence's KV has arrived: the number of leading layers, and seconds per layer (0 if unknown)."""

    layers: int
    layer_s: float = 0.0
    late: bool = False  # True if a step has waited for a layer without success


@dataclass(slots=True)
class Turn(Event):
    """All events so far are handled, and the next step can be chosen. ``arriving``: by sequence, KV on its way."""

    arriving: Mapping[int, Arriving] = field(default_factory=dict)


@dataclass(slots=True)
class Stepped(Event):
    """``Step`` is done: its new tokens are drawn and sent to the clients.

    Attributes:
        ends: sequence -> "eos" or "stop", if its new token ends the answer.
        missed: sequences whose KV did not arrive in time, and that have no new token.
        names: sequence -> name of the page that its new token completes, if it shares pages.
        seconds: how long the step took.
        waited_s: the part of ``seconds`` in which the step waited for layers.
    """

    ends: Mapping[int, str]
    missed: frozenset[int]
    seconds: float
    waited_s: float = 0.0
    names: Mapping[int, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class StepFailed(Event):
    """``Step`` failed, for example for lack of memory, and the device still works.

    No token was drawn. KV that was cached before the step is intact; the rest of the sequences' frames is undefined.
    """

    error: KVStoreError


@dataclass(slots=True)
class TokenDrawn(Event):
    """``Draw`` is done. ``end`` and ``name``: as in ``Stepped.ends`` and ``Stepped.names``, or empty."""

    sequence: int
    end: str
    name: bytes = b""
