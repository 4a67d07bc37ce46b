"""What an engine decides to do. The shell performs instructions in order.

Slow instructions run in threads. Each docstring names the event that follows, after an arrow. ``Step`` and ``Draw`` are
performed at once, and their events come before any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.errors import KVStoreError


@dataclass(slots=True)
class LoadPrefix:
    """Give a sequence frames for the pages of its ``table``, and fill them from the pool -> ``PrefixLoaded``.

    The first ``shared`` pages are already in the arena. Each page of a ring appears several times in its table.
    ``other_tables``: the tables of the model's other cache groups, where the pages have frames of their own.
    """

    sequence: int
    table: list[int]
    shared: int = 0
    other_tables: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class EvictPages:
    """Evict these kept pages. Their frames become unused."""

    pages: list[int]


@dataclass(slots=True)
class OfferPages:
    """Write the pages that the pool lacks. These are consecutive kept pages that will be evicted soon."""

    pages: list[int]


@dataclass(slots=True)
class AskPrefill:
    """Ask another engine to compute the prompt -> ``Computed`` or ``AskFailed``."""

    sequence: int
    attempt: int
    engine: str


@dataclass(slots=True)
class MoveIn:
    """Move the KV here from the engine that ``AskPrefill`` asked, starting at token ``start`` -> ``Moved``."""

    sequence: int
    attempt: int
    start: int


@dataclass(slots=True)
class GiveUp:
    """Cancel the prefill at the other engine. A mover ends soon, with ``Moved``."""

    sequence: int


@dataclass(slots=True)
class Settle:
    """Notify the other engine that the hand-off is complete."""

    sequence: int


@dataclass(slots=True)
class Dismiss:
    """Drop a hand-off that has failed."""

    sequence: int
    engine: str
    error: KVStoreError


@dataclass(slots=True)
class Part:
    """Tokens ``start`` to ``stop`` of a sequence, to be computed. ``draws``: True to draw the next token after them."""

    sequence: int
    start: int
    stop: int
    draws: bool


@dataclass(slots=True)
class Step:
    """Run one forward pass: the next token of each of ``decoding``, and the tokens of ``parts`` -> ``Stepped`` or
    ``StepFailed``."""

    decoding: list[int]
    parts: list[Part]


@dataclass(slots=True)
class SideStep:
    """Make the next token in a separate thread, because the step may wait for layers -> ``SideStepped``."""

    sequence: int


@dataclass(slots=True)
class Draw:
    """Draw the next token and send it to the client -> ``TokenDrawn``."""

    sequence: int
    token: int


@dataclass(slots=True)
class Recompute:
    """Prepare to recompute the last token into its own frame, because the whole prompt was loaded."""

    sequence: int


@dataclass(slots=True)
class StorePages:
    """Write the first ``pages`` pages to the pool if it lacks them. Does not wait."""

    sequence: int
    pages: int


@dataclass(slots=True)
class TellAdmitted:
    """Report to the engine that asked for a prefill that the prefill has begun with ``cached`` tokens in the frames."""

    sequence: int
    cached: int


@dataclass(slots=True)
class TellProgress:
    """Report to the engine that asked for a prefill that ``tokens`` tokens are computed."""

    sequence: int
    tokens: int


@dataclass(slots=True)
class Hold:
    """Report to the requesting engine that its prefill is complete, and keep the frames until it pulls them."""

    sequence: int


@dataclass(slots=True)
class Close:
    """End a prefill: no engine may begin to pull -> ``PullsEnded``."""

    sequence: int


@dataclass(slots=True)
class PassOn:
    """Ask the engine at ``target`` to continue, and pass on its tokens.

    -> ``NotTaken``, or ``PassTaken`` and later ``PassedOn``.
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
    """Answer a call. The number 0 stands for a drain, whose errors are logged."""

    call: int
    result: bool | KVStoreError


@dataclass(slots=True)
class Forget:
    """Free the id of a sequence."""

    sequence: int


@dataclass(slots=True)
class Finish:
    """Send the client the end of the answer, with the reason."""

    sequence: int
    reason: str


@dataclass(slots=True)
class Fail:
    """Send the client the failure of the request. ``cancelled``: True if the client asked for that."""

    sequence: int
    error: KVStoreError
    cancelled: bool = False


@dataclass(slots=True)
class GiveBack:
    """Take back the frames of a sequence.

    Attributes:
        freed: pages whose frames are unused now.
        stay: its leading pages that stay in the arena, kept or in use by other sequences, in order.
    """

    sequence: int
    freed: list[int]
    stay: list[int]


@dataclass(slots=True)
class EndSequence:
    """Drop all that remains of a sequence; no later event may name it."""

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
    | SideStep
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
