"""What an engine decides to do. The shell performs instructions in order; those that take time run in threads, which
answer with the event named here. ``Step`` and ``Draw`` are performed at once, and answered before anything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.errors import KVStoreError


@dataclass(slots=True)
class LoadPrefix:
    """Give it frames for the pages of its ``table``, of which the first ``shared`` are in the arena, and read what else
    is stored of its prompt into the others -> ``PrefixLoaded``. Of a ring, each page stands there several times.
    ``beside``: the same of the model's other cache groups, where the same pages have frames of their own."""

    sequence: int
    table: list[int]
    shared: int = 0
    beside: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class EvictPages:
    """These pages are kept no longer: their frames are unused."""

    pages: list[int]


@dataclass(slots=True)
class OfferPages:
    """These kept pages, consecutive ones of a chain, will be evicted soon: write to the pool what it has not."""

    pages: list[int]


@dataclass(slots=True)
class AskPrefill:
    """Have another engine compute the prompt -> ``Computed`` or ``AskFailed``."""

    sequence: int
    attempt: int
    engine: str


@dataclass(slots=True)
class MoveIn:
    """Bring the KV from token ``start`` on out of what ``AskPrefill`` began -> ``Moved``."""

    sequence: int
    attempt: int
    start: int


@dataclass(slots=True)
class GiveUp:
    """Nobody wants what was asked for. A mover ends soon, with ``Moved``."""

    sequence: int


@dataclass(slots=True)
class Settle:
    """The hand-off from ``engine`` is complete."""

    sequence: int


@dataclass(slots=True)
class Dismiss:
    """The hand-off has failed: the next engine is asked, or the prompt is computed here."""

    sequence: int
    engine: str
    error: KVStoreError


@dataclass(slots=True)
class Part:
    """Tokens from ``start`` to ``stop`` of a sequence, to be computed; ``draws``: then its next token."""

    sequence: int
    start: int
    stop: int
    draws: bool


@dataclass(slots=True)
class Step:
    """One forward: the next token of each of ``decoding``, and the tokens of ``parts`` -> ``Stepped`` or
    ``StepFailed``."""

    decoding: list[int]
    parts: list[Part]


@dataclass(slots=True)
class Aside:
    """Make its next token in a thread of its own, which may wait for layers -> ``SideStepped``."""

    sequence: int


@dataclass(slots=True)
class Draw:
    """This is its next token: tell its client -> ``TokenDrawn``."""

    sequence: int
    token: int


@dataclass(slots=True)
class Recompute:
    """All of its prompt was loaded: its last token is computed all the same, for the logits."""

    sequence: int


@dataclass(slots=True)
class StorePages:
    """Its first ``pages`` pages are full: write to the pool what is not there, without waiting."""

    sequence: int
    pages: int


@dataclass(slots=True)
class TellAdmitted:
    """Tell who asked for a prefill that it has begun, with ``cached`` tokens."""

    sequence: int
    cached: int


@dataclass(slots=True)
class TellProgress:
    """Tell who asked for a prefill how far it is."""

    sequence: int
    tokens: int


@dataclass(slots=True)
class Hold:
    """A prefill is complete: tell who asked, and keep the frames for who pulls."""

    sequence: int


@dataclass(slots=True)
class Close:
    """A prefill is over: let nobody begin to pull -> ``PullsEnded``."""

    sequence: int


@dataclass(slots=True)
class PassOn:
    """Have the engine at ``target`` go on with it, and pass on what that says -> ``NotTaken``, or ``Taken`` and then
    ``PassedOn``.
    """

    sequence: int
    target: str


@dataclass(slots=True)
class Left:
    """Another engine goes on with it."""

    sequence: int


@dataclass(slots=True)
class CancelThere:
    """Cancel it where it was passed on to."""

    sequence: int


@dataclass(slots=True)
class AnswerCall:
    """Answer a call; a ``call`` of 0 is a drain's, which wants errors told to the log."""

    call: int
    result: bool | KVStoreError


@dataclass(slots=True)
class Forget:
    """Its id is free."""

    sequence: int


@dataclass(slots=True)
class Finish:
    """Tell its client the end: why there are no more tokens."""

    sequence: int
    reason: str


@dataclass(slots=True)
class Fail:
    """Tell its client the other end. ``cancelled``: the client wanted it."""

    sequence: int
    error: KVStoreError
    cancelled: bool = False


@dataclass(slots=True)
class GiveBack:
    """It has no frames any more. The pages of ``freed`` are gone; ``stay`` are those of its leading tokens that stay in
    the arena, kept or had by others, in order."""

    sequence: int
    freed: list[int]
    stay: list[int]


@dataclass(slots=True)
class EndSequence:
    """Nothing is left of it; no event may name it any more."""

    sequence: int


Instruction = (
    LoadPrefix
    | EvictPages
    | OfferPages
    | AskPrefill
    | MoveIn
    | GiveUp
    | Settle
    | Dismiss
    | Step
    | Aside
    | Draw
    | Recompute
    | StorePages
    | TellAdmitted
    | TellProgress
    | Hold
    | Close
    | PassOn
    | Left
    | CancelThere
    | AnswerCall
    | Forget
    | Finish
    | Fail
    | GiveBack
    | EndSequence
)
