"""Work: one request's tokens, frames and client. Only ``engine.state`` knows what is decided about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine.compute.kv_arrivals import Arrivals
from engine.model.request import Failed, Finished, Request, Token, Usage
from engine.state.rules import Rules, needed_from
from engine.text.tokenizer import Detokenizer
from kvstore.client.grouped_cache import GroupedCache
from kvstore.errors import KVStoreError
from kvstore.model.groups import GroupedKeys

NAME_BYTES: Final = 32  # as good as the tokens themselves: two chains with one name cannot be found


@dataclass
class Spent:
    """What a request has cost so far; becomes a ``Usage``."""

    cached: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    loaded_bytes: int = 0
    moved_bytes: int = 0
    written_bytes: int = 0
    prefill_engine: str = ""
    prefill_cached: dict[str, int] = field(default_factory=dict)
    prefill_s: float = 0.0


class Work:
    """One request. Belongs to the engine's thread; while a thread loads or moves, that thread has its frames,
    ``spent``, ``lossy`` and ``from_arenas``. Any thread may tell its client.

    Attributes:
        number: its number in ``engine.state``.
        prompt: tokens it came with.
        tokens: uint32, of which the first ``length`` are known: the prompt, then what was drawn.
        frames: int64 page tables ``[groups, pages]``, one per cache group of the model; None while it has none.
        windows: for each group in which it has a ring of frames (``Rules.frames_for``), tokens that one sees; else 0.
        rings: its frames, by group.
        shared_pages: leading pages that were in the arena when it came: they are not written to.
        first_pages: by group, the first page that was brought into its frames: earlier ones were not needed.
        stored_pages: by group, the number of leading pages that are known to be in the pool.
        keys: of its full pages, for storing them, with the cache that made them, and hints.
        from_arenas: some pages were loaded from another engine's arena: the pool may not have them.
        lossy: some of its KV came from a lossy replica: nothing after it may be stored as exact.
        progress: what other engines may pull of a prefill.
        first_token: of such a prefill, once it is drawn.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        emit: Callable[[Any], None],
        text: Detokenizer | None,
        page_tokens: int,
        cache: GroupedCache | None,
        answers: bool = True,
        rules: Rules | None = None,
    ) -> None:
        self.number = number
        self.request = request
        self.id = request.id
        self.answers = answers
        self.begun_s = time.monotonic()
        self.deadline_s = self.begun_s + request.deadline_s
        self.page_tokens = page_tokens
        self.prompt = self.length = len(request.tokens)
        left = max(1, request.sampling.max_tokens - request.generated) if answers else 1
        self.tokens: npt.NDArray[np.uint32] = np.empty(self.prompt + left, np.uint32)
        self.tokens[: self.prompt] = request.tokens
        self._text = text
        if text is not None:  # what another engine has sent already
            for token in request.tokens[request.prompt_tokens :].tolist():
                text.feed(token)
        self.frames: torch.Tensor | None = None
        capacity = len(self.tokens) if answers else self.prompt
        self.windows = rules.windows_for(capacity) if rules is not None else (0,)
        self.rings = (0,) * len(self.windows)
        self.first_pages = [0] * len(self.windows)
        self.cache = cache
        self.shared_pages, self.stored_pages = 0, [0] * len(self.windows)
        self.keys: tuple[GroupedCache, GroupedKeys, bytes] | None = None
        self.lossy = False
        self.from_arenas = False
        self.spent = Spent()
        self.progress: Arrivals | None = None
        self.first_token = 0
        self._emit = emit
        self._telling = threading.Lock()
        self._ended = False
        self._first_s = self._second_s = self._last_s = 0.0
        self._name = b""  # the name of its last full page, if it shares any

    @property
    def generated(self) -> int:
        """Tokens of the answer that are known, including another engine's."""
        return self.request.generated + self.length - self.prompt

    @property
    def stopped(self) -> bool:
        """True if the text that was sent holds a stop string."""
        return self._text is not None and self._text.stopped is not None

    def page_names(self) -> tuple[bytes, ...]:
        """Names of the full pages of its prompt, which requests may share, see ``Submitted``. Called once, before any
        token is drawn. Requests of one tenant and adapter that do without lossy KV share; a request without the pool
        has everything that it reads computed for itself. A ring has nothing to share: its pages do not stay."""
        request = self.request
        if not request.use_pool or request.allow_lossy or self.has_ring:
            return ()
        self._name = blake2b(repr((request.page_salt, request.adapter)).encode(), digest_size=NAME_BYTES).digest()
        return tuple(self._next_name(stop) for stop in range(self.page_tokens, self.prompt + 1, self.page_tokens))

    def new_page_name(self) -> bytes:
        """The name of the page that the last drawn token completes; b"" if it completes none."""
        return self._next_name(self.length) if self._name and self.length % self.page_tokens == 0 else b""

    def _next_name(self, stop: int) -> bytes:
        page = self.tokens[stop - self.page_tokens : stop].tobytes()
        self._name = blake2b(self._name + page, digest_size=NAME_BYTES).digest()
        return self._name

    def since_first_s(self) -> float:
        """Seconds since its first token was drawn."""
        return time.monotonic() - self._first_s

    def for_prefill(self, wire_id: str) -> Request:
        """The request to another engine that computes the prompt: the same tokens and sampling, under an id of its
        own.
        """
        return replace(
            self.request,
            id=wire_id,
            deadline_s=max(0.001, self.deadline_s - time.monotonic()),
            prefill=None,
            handoff=None,
            source=None,
            grain=None,
        )

    @property
    def has_ring(self) -> bool:
        """True if some of its pages are overwritten by later ones."""
        return any(self.windows)

    def needed(self, tokens: int, group: int) -> int:
        """The start of the first page that a group needs, among its first ``tokens`` tokens: ``needed_from``."""
        return needed_from(self.windows[group], tokens, self.page_tokens)

    def oldest(self, pages: int, group: int) -> int:
        """The first of this many leading pages that is in a group's frames, if the next one were begun."""
        return max(self.first_pages[group], pages + 1 - self.rings[group]) if self.windows[group] else 0

    def brought(self, tokens: int) -> None:
        """Record that what this many leading tokens need was brought into the frames, and maybe nothing before it."""
        self.first_pages = [self.needed(tokens, group) // self.page_tokens for group in range(len(self.windows))]

    def all_stored(self, pages: int) -> None:
        """Record that this many leading pages of every group are in the pool, as far as they are needed."""
        self.stored_pages = [pages] * len(self.windows)

    # --- telling its client -----------------------------------------------------------------------------------------

    def tell(self, event: Any) -> None:
        """Pass an event on. After an end, a client gets no more events."""
        with self._telling:
            if not self._ended:
                self._ended = isinstance(event, Finished | Failed)
                self._emit(event)

    def token(self, token: int, eos: frozenset[int]) -> str:
        """Record a drawn token and tell the client. Returns "eos" or "stop" if it ends the answer, else ""."""
        now = time.monotonic()
        if not self._first_s:
            self._first_s = now
        elif not self._second_s:
            self._second_s = now
        self._last_s = now
        index = self.generated
        self.tokens[self.length] = token
        self.length += 1
        if token in eos and not self.request.sampling.ignore_eos:
            return "eos"
        self.tell(Token(token, index, self._text.feed(token) if self._text is not None else ""))
        return "stop" if self.stopped else ""

    def finish(self, reason: str) -> None:
        """Send the last event of an answer."""
        rest = self._text.flush() if self._text is not None else ""
        # If a stop string is met only now, its last character was held back.
        self.tell(Finished("stop" if self.stopped else reason, self.usage(), rest))

    def fail(self, error: KVStoreError) -> None:
        """Send the failure as the last event."""
        self.tell(Failed(error))

    # --- what it cost -----------------------------------------------------------------------------------------------

    def recompute_last(self) -> None:
        """Count the last token of a loaded prompt as computed: it is computed again."""
        loaded = self.spent.cached
        if sum(loaded.values()) == self.prompt:
            loaded[next(reversed(loaded))] -= 1  # pages came in order: the tier of the last one

    def usage(self) -> Usage:
        """The usage until now."""
        made = self.length - self.prompt
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
            prefill_ms=1e3 * spent.prefill_s,
        )
