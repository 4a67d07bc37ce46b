"""Sequence: one request inside an engine, from admission to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.model.request import Failed, Finished, Request, Token, Usage
from engine.text.detokenizer import Detokenizer
from kvstore.client.prefix_cache import PrefixCache
from kvstore.errors import DeadlineExceeded, KVStoreError, NodeUnavailable


class State(Enum):
    """Where a sequence is. Every state but the last two holds frames, except WAITING."""

    WAITING = auto()  # for frames
    LOADING = auto()  # a thread reads its prefix from the pool
    MOVING = auto()  # another engine computes its prompt; threads bring the KV
    COMPUTING = auto()  # chunk by chunk
    DECODING = auto()
    HELD = auto()  # computed for another engine, which has not fetched everything yet
    LEFT = auto()  # another engine goes on with it, this one passes its tokens on
    ENDED = auto()


class Arrivals:
    """How many tokens of each layer are in the frames, where another thread brings them.

    Life: made -> ``reached`` per piece -> complete, or ``failed`` with the reason; both wake whoever waits.
    """

    def __init__(self, layers: int) -> None:
        self._tokens = [0] * layers
        self._changed = threading.Condition()
        self.failure: KVStoreError | None = None
        self.late = False  # a step waited for it in vain
        self.layer_s = 0.0  # how long a layer takes to arrive, smoothed; 0: unknown
        self._last_s = 0.0

    def reached(self, layer: int, tokens: int) -> None:
        """All of the first ``tokens`` tokens of ``layer`` are there."""
        now = time.monotonic()
        with self._changed:
            self._tokens[layer] = max(self._tokens[layer], tokens)
            if self._last_s:
                gap = now - self._last_s
                self.layer_s = gap if not self.layer_s else 0.7 * self.layer_s + 0.3 * gap
            self._last_s = now
            self._changed.notify_all()

    def all_reached(self, tokens: int) -> None:
        """The same for all layers, where they came together."""
        with self._changed:
            self._tokens = [max(tokens, there) for there in self._tokens]
            self._changed.notify_all()

    def fail(self, error: KVStoreError) -> None:
        """No more will come."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def tokens(self, layer: int) -> int:
        """Tokens of that layer that are there."""
        return self._tokens[layer]

    def layers_with(self, tokens: int) -> int:
        """Leading layers that have that many."""
        return next((i for i, there in enumerate(self._tokens) if there < tokens), len(self._tokens))

    def wait(self, layer: int, tokens: int, deadline_s: float) -> bool:
        """Whether that many are there, by ``deadline_s`` of ``time.monotonic`` at the latest."""
        with self._changed:
            while self._tokens[layer] < tokens:
                left_s = deadline_s - time.monotonic()
                if self.failure is not None or left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True


@dataclass
class Spent:
    """What a sequence has cost so far; becomes a ``Usage``."""

    cached: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    loaded_bytes: int = 0
    moved_bytes: int = 0
    written_bytes: int = 0
    prefill_engine: str = ""
    prefill_cached: dict[str, int] = field(default_factory=dict)


class Sequence:
    """One request here. Touched by the engine's thread, except where a method says otherwise.

    Attributes:
        tokens: uint32 ``[capacity]``, of which the first ``length`` are known: the prompt, then what was generated.
        cached: leading tokens whose KV is in the frames, or will be by ``arrivals``.
        frames: int64 page table, ``capacity`` tokens long; None while it waits.
        stored_pages: leading pages that are known to be in the pool.
        lossy: some of its KV came from a lossy replica: none of what follows may be stored as exact.
    """

    def __init__(
        self,
        request: Request,
        emit: Callable[[Any], None],
        text: Detokenizer | None,
        page_tokens: int,
        cache: PrefixCache | None,
        answers: bool = True,
    ) -> None:
        self.request = request
        self.id = request.id
        self.answers = answers  # False: it is prefilled for another engine
        self.begun_s = time.monotonic()
        self.deadline_s = self.begun_s + request.deadline_s
        self.page_tokens = page_tokens
        self.prompt = len(request.tokens)  # what there is to prefill
        left = max(1, request.sampling.max_tokens - request.generated) if answers else 1
        self.capacity = self.prompt + (left if answers else 0)
        self.tokens: npt.NDArray[np.uint32] = np.empty(self.prompt + left, np.uint32)
        self.tokens[: self.prompt] = request.tokens
        self.length = self.prompt
        self.generated = request.generated
        if text is not None:  # what another engine has told already
            for token in request.tokens[request.prompt_tokens :].tolist():
                text.feed(token)
        self.cached = 0
        self.frames: torch.Tensor | None = None
        self.cache = cache
        self.stored_pages = 0
        self.lossy = False
        self.state = State.WAITING
        self.arrivals: Arrivals | None = None
        self.spent = Spent()
        self.cancelled = False
        self.progress: Arrivals | None = None  # of a prefill for another engine: what that may pull
        self.loading = False  # a thread reads its prefix into the frames
        self.pulls = 0  # transfers out of its frames under way
        self.hold_s = self.held_until_s = 0.0  # of a prefill that is done
        self.elsewhere: Callable[[], object] | None = None  # cancels it where it went on
        self._emit = emit
        self._text = text
        self._first_s = self._second_s = self._last_s = 0.0

    @property
    def pages(self) -> int:
        """Frames it needs."""
        return -(-self.capacity // self.page_tokens)

    @property
    def left(self) -> int:
        """Known tokens whose KV has to be computed for the logits of the next one; 1 while it decodes."""
        return self.length - self.cached

    def compute_rest(self) -> None:
        """What is not in the frames is computed here. Where all of it is, the last token is computed again, into its
        own frame: nobody keeps logits.
        """
        if self.cached == self.length:
            self.cached = self.length - 1
            loaded = self.spent.cached
            if sum(loaded.values()) == self.prompt:
                loaded[next(reversed(loaded))] -= 1  # pages came in their order: the tier of the last one
        self.state = State.COMPUTING

    def since_first_s(self) -> float:
        """Seconds since its first token was drawn."""
        return time.monotonic() - self._first_s

    def expired(self, now_s: float) -> bool:
        """Whether its deadline has passed."""
        return now_s > self.deadline_s

    # --- telling its client -----------------------------------------------------------------------------------------

    def tell(self, event: Any) -> None:
        """Pass an event on, unless its client was told an end."""
        if self.state is not State.ENDED:
            self._emit(event)

    @property
    def stopped(self) -> bool:
        """Whether what another engine has told already holds a stop string."""
        return self._text is not None and self._text.stopped is not None

    def token(self, token: int, eos: frozenset[int]) -> str:
        """One more token was drawn; tells the client. Returns why that was the last one, or ""."""
        now = time.monotonic()
        if not self._first_s:
            self._first_s = now
        elif not self._second_s:
            self._second_s = now
        self._last_s = now
        sampling = self.request.sampling
        index, self.generated = self.generated, self.generated + 1
        self.tokens[self.length] = token
        self.length += 1
        if token in eos and not sampling.ignore_eos:
            return "eos"
        self._emit(Token(token, index, self._text.feed(token) if self._text is not None else ""))
        if self._text is not None and self._text.stopped is not None:
            return "stop"
        return "length" if self.generated >= sampling.max_tokens else ""

    def finish(self, reason: str) -> None:
        """The last event. A client that was told an end is told nothing more."""
        if self.state is State.ENDED:
            return
        self.state = State.ENDED
        rest = self._text.flush() if self._text is not None else ""
        if self._text is not None and self._text.stopped is not None:
            reason = "stop"  # its last character was held back until now
        self._emit(Finished(reason, self.usage(), rest))

    def fail(self, error: KVStoreError) -> None:
        """The other last event."""
        if self.state is State.ENDED:
            return
        self.state = State.ENDED
        self._emit(Failed(error))

    def give_up(self) -> None:
        """It was cancelled, or its deadline has passed."""
        if self.cancelled and self.answers:
            self.finish("cancelled")
        elif self.cancelled:
            self.fail(NodeUnavailable(f"prefill {self.id} was given up"))
        else:
            self.fail(DeadlineExceeded(f"request {self.id} was not answered within {self.request.deadline_s:g} s"))

    def usage(self) -> Usage:
        """What it cost until now."""
        made = self.generated - self.request.generated
        first, second = self._first_s or time.monotonic(), self._second_s
        spent = self.spent
        return Usage(
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=self.generated,
            cached_tokens=dict(spent.cached),
            computed_tokens=spent.computed,
            prefill_engine=spent.prefill_engine,
            prefill_cached_tokens=dict(spent.prefill_cached),
            ttft_ms=1e3 * (first - self.begun_s),
            gap_ms=1e3 * (second - first) if second else 0.0,
            tpot_ms=1e3 * (self._last_s - second) / (made - 2) if second and made > 2 else 0.0,
            loaded_bytes=spent.loaded_bytes,
            moved_bytes=spent.moved_bytes,
            written_bytes=spent.written_bytes,
        )
