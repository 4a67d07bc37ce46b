"""Sequence: what the decisions need to know of one request. The shell has its tokens, frames and client."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.state.rules import needed_from
from kvstore.errors import KVStoreError


class Phase(Enum):
    """Where a sequence is.

    ::

        WAITING -> LOADING -> COMPUTING ------------> DECODING -> ENDED
                        `---> MOVING -> DECODING      DECODING <-> LEFT -> ENDED
                                                      DECODING -> TOLD -> ENDED     answered before its KV was here
                                                      COMPUTING -> HELD -> ENDED    computed for another engine
    """

    WAITING = auto()  # until it gets frames
    LOADING = auto()  # a thread reads its prefix from the pool
    MOVING = auto()  # another engine computes its prompt; threads bring the KV
    COMPUTING = auto()  # chunk by chunk
    DECODING = auto()
    HELD = auto()  # computed for another engine, which has not fetched everything yet
    LEFT = auto()  # another engine continues it, and this one passes its tokens on
    TOLD = auto()  # the answer was sent, while its mover is still running: the KV is stored at the end
    ENDED = auto()


@dataclass(slots=True)
class Attempt:
    """A prompt that one other engine was asked to compute.

    Life: asked -> computed, moved (either may be first) -> settled; or ``error``, and the next engine is asked.
    """

    number: int
    engine: str
    first_token: int | None = None  # set once it is computed
    begun: bool = False  # frames may have been written to
    tokens: int = 0  # tokens of the prompt in the frames, once the mover has ended
    moved: bool = False  # all of the prompt is there
    error: KVStoreError | None = None


@dataclass(slots=True)
class Passing:
    """A move to another engine; ``call`` is the call to answer, 0 for a drain, or once it was answered."""

    call: int
    until_s: float
    drained: bool
    taken: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. Only ``EngineState`` changes it.

    Attributes:
        prompt: number of tokens that it came with, to be prefilled.
        length: number of known tokens: the prompt, then the tokens drawn.
        cached: leading tokens whose KV is in the frames, or arriving there.
        pages: frames that it needs; it has all of them (``holds``) or none.
        beside: frames in the other cache groups, at most as many: its first pages have frames there, too.
        span: pages of all its tokens: more than ``pages`` if it has a ring of frames, see ``Rules.frames_for``.
        windows: for each group in which it has a ring, how many tokens its tokens see; else 0.
        table: numbers of the pages in its frames; other sequences may share the leading ones: see ``Frames``.
        names: names of its leading full pages, as far as its tokens are known.
        whole, listed: how many of these are complete in the frames; and how many leading ones of them can be shared.
        answers: False if it is computed for another engine.
        engines: those that may still be asked for the prompt.
        loading, moving, aside, pulled: users of its frames other than the step: a loader, a mover, a side batch, other
            engines that pull. The frames return when none is left.
    """

    number: int
    name: str
    prompt: int
    generated: int
    tokens_max: int
    pages: int
    answers: bool
    begun_s: float
    deadline_s: float
    hold_s: float = 0.0
    page_tokens: int = 1
    beside: tuple[int, ...] = ()
    span: int = 0
    windows: tuple[int, ...] = (0,)
    names: list[bytes] = field(default_factory=list)
    whole: int = 0
    listed: int = 0
    table: list[int] = field(default_factory=list)
    length: int = 0
    cached: int = 0
    phase: Phase = Phase.WAITING
    holds: bool = False
    loading: bool = False
    moving: bool = False
    aside: bool = False
    pulled: bool = False
    held_until_s: float = 0.0
    engines: list[str] = field(default_factory=list)
    attempts: int = 0
    attempt: Attempt | None = None
    passing: Passing | None = None

    def laid_out(self) -> list[int]:
        """The page whose frame each of its pages uses: ``table``, repeated if that is a ring."""
        return self._round(self.pages)

    def beside_out(self) -> list[list[int]]:
        """For each other cache group, the page whose frame each of its pages uses."""
        return [self._round(frames) for frames in self.beside]

    def _round(self, frames: int) -> list[int]:
        return [self.table[page % frames] for page in range(self.span)]

    @property
    def has_ring(self) -> bool:
        """True if some of its pages are overwritten by later ones."""
        return any(self.windows)

    def needed(self, tokens: int) -> int:
        """The start of the first page that some group needs, among its first ``tokens`` tokens."""
        return min(needed_from(window, tokens, self.page_tokens) for window in self.windows)

    @property
    def touched(self) -> bool:
        """True if its frames may be read or written outside of a step."""
        return self.loading or self.moving or self.aside or self.pulled
