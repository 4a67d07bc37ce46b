"""Work: one request's tokens, frames and client. What is decided about it is known to ``engine.state`` alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from engine.compute.arrivals import Arrivals
from engine.model.request import Failed, Finished, Request, Token, Usage
from engine.state.rules import Rules, needed_from
from engine.text.detokenizer import Detokenizer
from kvstore.client.grouped_cache import GroupedCache
from kvstore.errors import KVStoreError
from kvstore.model.groups import GroupedKeys

NAME_BYTES: Final = 32  # as good as the tokens themselves: nobody finds two chains of one name


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
    """One request here. Belongs to the engine's thread; a thread that was told to load or to move has its frames,
    ``spent``, ``lossy`` and ``from_arenas`` until it is done. Any thread may tell its client.

    Attributes:
        number: what ``engine.state`` knows it by.
        prompt: tokens it came with.
        tokens: uint32, of which the first ``length`` are known: the prompt, then what was drawn.
        frames: int64 page tables ``[groups, pages]``, one per cache group of the model; None while it has none.
        windows: of each group where it has a ring of frames (``Rules.frames_for``), tokens that one sees; else 0.
        rings: of each group its frames.
        shared_pages: leading pages that were in the arena when it came: nobody writes there.
        first_pages: of each group the first page that was brought into its frames: those before it were not needed.
        stored_pages: of each group leading pages that are known to be in the pool.
        keys: of its full pages, for whoever stores them, with the cache that made them, and hints.
        from_arenas: some pages were loaded out of another engine's arena: the pool may not have them.
        lossy: some of its KV came from a lossy replica: none of what follows may be stored as exact.
        progress: of a prefill for another engine: what that may pull.
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
        if text is not None:  # what another engine has told already
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
        self._name = b""  # of its last full page, where it shares any

    @property
    def generated(self) -> int:
        """Tokens of the answer that are known, another engine's among them."""
        return self.request.generated + self.length - self.prompt

    @property
    def stopped(self) -> bool:
        """Whether what was told holds a stop string."""
        return self._text is not None and self._text.stopped is not None

    def page_names(self) -> tuple[bytes, ...]:
        """Names of the full pages of its prompt, which others may share, see ``Submitted``. Called once, before any
        token is drawn. Those of one tenant and adapter who do without lossy KV share; who leaves the pool alone has all
        that it reads computed for itself. A ring has nothing to share: its pages do not stay."""
        request = self.request
        if not request.use_pool or request.allow_lossy or self.has_ring:
            return ()
        self._name = blake2b(repr((request.salt, request.adapter)).encode(), digest_size=NAME_BYTES).digest()
        return tuple(self._next_name(stop) for stop in range(self.page_tokens, self.prompt + 1, self.page_tokens))

    def new_page_name(self) -> bytes:
        """The name of the page that the token drawn last is the last one of; b"" where it is in the middle of one."""
        return self._next_name(self.length) if self._name and self.length % self.page_tokens == 0 else b""

    def _next_name(self, stop: int) -> bytes:
        page = self.tokens[stop - self.page_tokens : stop].tobytes()
        self._name = blake2b(self._name + page, digest_size=NAME_BYTES).digest()
        return self._name

    def since_first_s(self) -> float:
        """Seconds since its first token was drawn."""
        return time.monotonic() - self._first_s

    def for_prefill(self, wire_id: str) -> Request:
        """What another engine is asked that computes the prompt: the same tokens and sampling, under an id of its
        own."""
        request = self.request
        return Request(
            id=wire_id,
            tokens=request.tokens,
            sampling=request.sampling,
            salt=request.salt,
            adapter=request.adapter,
            generated=request.generated,
            deadline_s=max(0.001, self.deadline_s - time.monotonic()),
            use_pool=request.use_pool,
            allow_lossy=request.allow_lossy,
            retention=request.retention,
        )

    @property
    def has_ring(self) -> bool:
        """Whether some of its pages are overwritten by later ones."""
        return any(self.windows)

    def needed(self, tokens: int, group: int) -> int:
        """Of the first ``tokens`` tokens, where the page begins from which on a group needs them: ``needed_from``."""
        return needed_from(self.windows[group], tokens, self.page_tokens)

    def oldest(self, pages: int, group: int) -> int:
        """The first of so many leading pages that is in a group's frames, were the next one begun."""
        return max(self.first_pages[group], pages + 1 - self.rings[group]) if self.windows[group] else 0

    def brought(self, tokens: int) -> None:
        """What so many leading tokens need was brought into the frames, and maybe nothing before it."""
        self.first_pages = [self.needed(tokens, group) // self.page_tokens for group in range(len(self.windows))]

    def all_stored(self, pages: int) -> None:
        """So many leading pages of every group are in the pool, as far as they are needed."""
        self.stored_pages = [pages] * len(self.windows)

    # --- telling its client -----------------------------------------------------------------------------------------

    def tell(self, event: Any) -> None:
        """Pass an event on. A client that was told an end is told nothing more."""
        with self._telling:
            if not self._ended:
                self._ended = isinstance(event, Finished | Failed)
                self._emit(event)

    def token(self, token: int, eos: frozenset[int]) -> str:
        """One more token was drawn; tells the client. Returns "eos" or "stop" where it ends the answer, else ""."""
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
        """The last event."""
        rest = self._text.flush() if self._text is not None else ""
        # Where a stop string is met only now, its last character was held back.
        self.tell(Finished("stop" if self.stopped else reason, self.usage(), rest))

    def fail(self, error: KVStoreError) -> None:
        """The other last event."""
        self.tell(Failed(error))

    # --- what it cost -----------------------------------------------------------------------------------------------

    def recompute_last(self) -> None:
        """The last token of a prompt that was loaded is computed all the same: it counts as computed."""
        loaded = self.spent.cached
        if sum(loaded.values()) == self.prompt:
            loaded[next(reversed(loaded))] -= 1  # pages came in their order: the tier of the last one

    def usage(self) -> Usage:
        """What it cost until now."""
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
