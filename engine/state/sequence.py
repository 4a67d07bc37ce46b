"""Sequence: what the decisions need to know of one request. Its tokens, frames and client are the shell's."""

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

    WAITING = auto()  # for frames
    LOADING = auto()  # a thread reads its prefix from the pool
    MOVING = auto()  # another engine computes its prompt; threads bring the KV
    COMPUTING = auto()  # chunk by chunk
    DECODING = auto()
    HELD = auto()  # computed for another engine, which has not fetched everything yet
    LEFT = auto()  # another engine goes on with it, this one passes its tokens on
    TOLD = auto()  # answered to the end, while its mover still moves: what it brings is stored then
    ENDED = auto()


@dataclass(slots=True)
class Attempt:
    """A prompt that one other engine was asked to compute.

    Life: asked -> computed, moved (either may be first) -> settled; or ``error``, and the next engine is asked.
    """

    number: int
    engine: str
    first_token: int | None = None  # known once it is computed
    begun: bool = False  # frames may have been written to
    tokens: int = 0  # of the prompt that are in the frames, once the mover has ended
    moved: bool = False  # all of it is
    error: KVStoreError | None = None


@dataclass(slots=True)
class Passing:
    """A sequence on its way to another engine; ``call`` is who asked, 0 where a drain did, or once it was answered."""

    call: int
    until_s: float
    drained: bool
    taken: bool = False


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. Written by ``EngineState`` alone.

    Attributes:
        prompt: tokens it came with: what there is to prefill.
        length: tokens that are known: the prompt, then what was drawn.
        cached: leading tokens whose KV is in the frames, or arriving there.
        pages: frames that it needs; it has all of them (``holds``) or none.
        beside: and of the other cache groups, at most as many: its first pages have frames there, too.
        span: pages of all its tokens: more than ``pages`` where it has a ring of frames, see ``Rules.frames_for``.
        windows: of each group, where the sequence has a ring there, what its tokens see; else 0.
        table: numbers of the pages in them, of which other sequences may have the leading ones, too: see ``Frames``.
        names: of its leading full pages, as far as its tokens are known.
        whole, listed: how many of these are complete in the frames; and how many leading ones of them others may take.
        answers: False where it is computed for another engine.
        engines: those that may still be asked for the prompt.
        loading, moving, aside, pulled: who may touch its frames beside the step: a loader, a mover, a side batch, other
            engines that pull. The frames return when nobody does.
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
        """The page in whose frame each of its pages lies: ``table``, over and over where that is a ring."""
        return self._round(self.pages)

    def beside_out(self) -> list[list[int]]:
        """The same of each other cache group."""
        return [self._round(frames) for frames in self.beside]

    def _round(self, frames: int) -> list[int]:
        return [self.table[page % frames] for page in range(self.span)]

    @property
    def has_ring(self) -> bool:
        """Whether some of its pages are overwritten by later ones."""
        return any(self.windows)

    def needed(self, tokens: int) -> int:
        """Of the first ``tokens`` tokens, where the page begins from which on some group needs them."""
        return min(needed_from(window, tokens, self.page_tokens) for window in self.windows)

    @property
    def touched(self) -> bool:
        """Whether somebody may read or write its frames outside of a step."""
        return self.loading or self.moving or self.aside or self.pulled
