"""What an engine decides to do. The shell performs instructions in order; slow ones run in threads, which respond with
the event named here. ``Step`` and ``Draw`` are performed at once, and their events come before any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.errors import KVStoreError


@dataclass(slots=True)
class LoadPrefix:
    """Give a sequence frames for the pages of its ``table``, the first ``shared`` of which are in the arena, and read
    the rest of its stored prompt into the others -> ``PrefixLoaded``. Each page of a ring appears several times.
    ``beside``: the tables of the model's other cache groups, where the same pages have frames of their own."""

    sequence: int
    table: list[int]
    shared: int = 0
    beside: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class EvictPages:
    """Stop keeping these pages: their frames are unused."""

    pages: list[int]


@dataclass(slots=True)
class OfferPages:
    """Write the missing ones of these kept pages to the pool: consecutive pages of a chain, which will be evicted
    soon.
    """

    pages: list[int]


@dataclass(slots=True)
class AskPrefill:
    """Ask another engine to compute the prompt -> ``Computed`` or ``AskFailed``."""

    sequence: int
    attempt: int
    engine: str


@dataclass(slots=True)
class MoveIn:
    """Bring the KV from token ``start`` on from the engine that ``AskPrefill`` asked -> ``Moved``."""

    sequence: int
    attempt: int
    start: int


@dataclass(slots=True)
class GiveUp:
    """Give up a prefill that is no longer wanted. A mover ends soon, with ``Moved``."""

    sequence: int


@dataclass(slots=True)
class Settle:
    """Tell ``engine`` that its hand-off is complete."""

    sequence: int


@dataclass(slots=True)
class Dismiss:
    """Drop a hand-off that has failed: the next engine is asked, or the prompt is computed here."""

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
    """Run one forward: the next token of each of ``decoding``, and the tokens of ``parts`` -> ``Stepped`` or
    ``StepFailed``."""

    decoding: list[int]
    parts: list[Part]


@dataclass(slots=True)
class Aside:
    """Make the next token in a thread of its own, which may wait for layers -> ``SideStepped``."""

    sequence: int


@dataclass(slots=True)
class Draw:
    """Draw the next token and send it to the client -> ``TokenDrawn``."""

    sequence: int
    token: int


@dataclass(slots=True)
class Recompute:
    """Compute the last token again for its logits: all of the prompt was loaded."""

    sequence: int


@dataclass(slots=True)
class StorePages:
    """Write the missing ones of the first ``pages`` pages, which are full, to the pool, without waiting."""

    sequence: int
    pages: int


@dataclass(slots=True)
class TellAdmitted:
    """Tell the engine that asked for a prefill that it has begun, with ``cached`` tokens."""

    sequence: int
    cached: int


@dataclass(slots=True)
class TellProgress:
    """Tell the engine that asked for a prefill how far it is."""

    sequence: int
    tokens: int


@dataclass(slots=True)
class Hold:
    """Tell the engine that asked for a prefill that it is complete, and keep the frames for it to pull."""

    sequence: int


@dataclass(slots=True)
class Close:
    """End a prefill: no engine may begin to pull -> ``PullsEnded``."""

    sequence: int


@dataclass(slots=True)
class PassOn:
    """Ask the engine at ``target`` to continue, and pass its replies on -> ``NotTaken``, or ``Taken`` and then
    ``PassedOn``.
    """

    sequence: int
    target: str


@dataclass(slots=True)
class Left:
    """Record that another engine continues the sequence."""

    sequence: int


@dataclass(slots=True)
class CancelThere:
    """Cancel the sequence at the engine that it was passed on to."""

    sequence: int


@dataclass(slots=True)
class AnswerCall:
    """Answer a call; for ``call`` 0, a drain's, errors are logged."""

    call: int
    result: bool | KVStoreError


@dataclass(slots=True)
class Forget:
    """Free the id of a sequence."""

    sequence: int


@dataclass(slots=True)
class Finish:
    """Tell its client the end: why there are no more tokens."""

    sequence: int
    reason: str


@dataclass(slots=True)
class Fail:
    """Tell its client that it failed. ``cancelled``: at the client's request."""

    sequence: int
    error: KVStoreError
    cancelled: bool = False


@dataclass(slots=True)
class GiveBack:
    """Take its frames back. The pages of ``freed`` are gone; ``stay`` are its leading pages that stay in the arena,
    kept or in use by other sequences, in order."""

    sequence: int
    freed: list[int]
    stay: list[int]


@dataclass(slots=True)
class EndSequence:
    """Drop what remains of a sequence; no later event may name it."""

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
