"""Work: the tokens, the frames and the client of one request. ``engine.state`` has the decisions about the request."""

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

NAME_BYTES: Final = 32  # equal names mean equal tokens: collisions of a hash of 32 bytes cannot be found


@dataclass
class Cost:
    """The cost of a request so far. ``Work.usage`` makes a ``Usage`` from it."""

    cached: dict[str, int] = field(default_factory=dict)
    computed: int = 0
    loaded_bytes: int = 0
    moved_bytes: int = 0
    written_bytes: int = 0
    prefill_engine: str = ""
    prefill_cached: dict[str, int] = field(default_factory=dict)
    prefill_s: float = 0.0


class Work:
    """One request, as the shell sees it.

    The engine's thread uses it. While a thread loads or moves KV for the request, that thread alone uses its frames,
    ``cost``, ``lossy`` and ``from_arenas``. Any thread may send events to its client.

    Attributes:
        number: the number of the sequence in ``engine.state``.
        prompt: the number of tokens to prefill.
        tokens: uint32. The first ``length`` are known: the prompt, then the tokens drawn.
        frames: page tables, int64 ``[groups, pages]``, a row for each cache group; None without frames.
        windows: for each group, how many tokens a token sees if the request has a ring there (``Rules.frames_for``),
            else 0.
        rings: for each group, the number of frames of the request.
        shared_pages: leading pages that were in the arena before. Their frames are never written to.
        first_pages: for each group, the first page that is in the frames. Earlier pages were not needed.
        stored_pages: for each group, how many leading pages the pool is known to have.
        keys: for storing full pages: the cache that made the keys, the keys, and the retention hints.
        from_arenas: True if pages came from the arena of another engine. The pool may lack them.
        lossy: True if some KV came from a lossy replica. No page computed after it may be stored as exact.
        progress: for a prefill, the layers that other engines may pull.
        first_token: for a prefill, the first token of the answer, once drawn.
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
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + request.deadline_s
        self.page_tokens = page_tokens
        self.prompt = self.length = len(request.tokens)
        draws_max = max(1, request.sampling.max_tokens - request.generated) if answers else 1
        self.tokens: npt.NDArray[np.uint32] = np.empty(self.prompt + draws_max, np.uint32)
        self.tokens[: self.prompt] = request.tokens
        self._text = text
        if text is not None:  # another engine has already sent the text of these tokens
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
        self.cost = Cost()
        self.progress: Arrivals | None = None
        self.first_token = 0
        self._emit = emit
        self._sending = threading.Lock()  # guards ``_ended``, and keeps events in order
        self._ended = False
        self._first_s = self._second_s = self._last_s = 0.0  # when these tokens were drawn; 0 before
        self._name = b""  # the name of the last full page; empty if the request shares no pages

    @property
    def generated(self) -> int:
        """The number of known tokens of the answer, including those that another engine generated."""
        return self.request.generated + self.length - self.prompt

    @property
    def stopped(self) -> bool:
        """True if the text of the answer contains a stop string."""
        return self._text is not None and self._text.stopped is not None

    def page_names(self) -> tuple[bytes, ...]:
        """Return the names of the prompt's full pages (``events.Submitted.names``), or none if it shares no pages.

        Called once, before the first token is drawn. Requests of one tenant and adapter share pages. A request shares
        none if it allows lossy KV, if it does not use the pool and so computes all of its KV, or if it has a ring,
        whose pages are overwritten.
        """
        request = self.request
        if not request.use_pool or request.allow_lossy or self.has_ring:
            return ()
        self._name = blake2b(repr((request.page_salt, request.adapter)).encode(), digest_size=NAME_BYTES).digest()
        return tuple(self._next_name(stop) for stop in range(self.page_tokens, self.prompt + 1, self.page_tokens))

    def new_page_name(self) -> bytes:
        """Return the name of the page that the last token completes, or b"" if it completes none or none is shared."""
        return self._next_name(self.length) if self._name and self.length % self.page_tokens == 0 else b""

    def _next_name(self, stop: int) -> bytes:
        page = self.tokens[stop - self.page_tokens : stop].tobytes()
        self._name = blake2b(self._name + page, digest_size=NAME_BYTES).digest()
        return self._name

    def since_first_s(self) -> float:
        """Return the seconds since the first token was drawn."""
        return time.monotonic() - self._first_s

    def for_prefill(self, wire_id: str) -> Request:
        """Return a request for another engine to compute the prompt: same tokens and sampling, another id."""
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
        """True if later pages overwrite some of the request's pages."""
        return any(self.windows)

    def needed_from(self, tokens: int, group: int) -> int:
        """Return the first token of the first page that ``group`` still needs after ``tokens`` tokens."""
        return needed_from(self.windows[group], tokens, self.page_tokens)

    def first_page_in_frames(self, pages: int, group: int) -> int:
        """Return the first of the ``pages`` leading pages that is still in the frames of ``group``.

        In a ring, the next page may already have overwritten the oldest one.
        """
        return max(self.first_pages[group], pages + 1 - self.rings[group]) if self.windows[group] else 0

    def record_loaded(self, tokens: int) -> None:
        """Record that the frames have all pages needed after ``tokens`` tokens. They might lack earlier pages."""
        self.first_pages = [self.needed_from(tokens, group) // self.page_tokens for group in range(len(self.windows))]

    def record_stored(self, pages: int) -> None:
        """Record that the pool has the needed pages among the first ``pages`` pages of every group."""
        self.stored_pages = [pages] * len(self.windows)

    # --- the client -------------------------------------------------------------------------------------------------

    def send(self, event: Any) -> None:
        """Send an event to the client, unless the client has received the end."""
        with self._sending:
            if not self._ended:
                self._ended = isinstance(event, Finished | Failed)
                self._emit(event)

    def add_token(self, token: int, eos: frozenset[int]) -> str:
        """Append a drawn token and send it to the client. Returns "eos" or "stop" if it ends the answer, else ""."""
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
        self.send(Token(token, index, self._text.feed(token) if self._text is not None else ""))
        return "stop" if self.stopped else ""

    def finish(self, reason: str) -> None:
        """Send the end of the answer."""
        rest = self._text.flush() if self._text is not None else ""
        # The flush may complete a stop string, if its last character was held back until now.
        self.send(Finished("stop" if self.stopped else reason, self.usage(), rest))

    def fail(self, error: KVStoreError) -> None:
        """Send the failure as the last event."""
        self.send(Failed(error))

    # --- usage ------------------------------------------------------------------------------------------------------

    def recompute_last(self) -> None:
        """Exclude the last token of a loaded prompt from the cached ones, because it is computed again."""
        loaded = self.cost.cached
        if sum(loaded.values()) == self.prompt:
            loaded[next(reversed(loaded))] -= 1  # pages are loaded in order, so this is the tier of the last page

    def usage(self) -> Usage:
        """Return the usage so far."""
        drawn = self.length - self.prompt
        first, second = self._first_s or time.monotonic(), self._second_s
        cost = self.cost
        return Usage(
            prompt_tokens=self.request.prompt_tokens,
            completion_tokens=self.generated,
            cached_tokens=dict(cost.cached),
            computed_tokens=cost.computed,
            prefill_engine=cost.prefill_engine,
            prefill_cached_tokens=dict(cost.prefill_cached),
            ttft_ms=1e3 * (first - self.started_s),
            gap_ms=1e3 * (second - first) if second else 0.0,
            tpot_ms=1e3 * (self._last_s - second) / (drawn - 2) if second and drawn > 2 else 0.0,
            loaded_bytes=cost.loaded_bytes,
            moved_bytes=cost.moved_bytes,
            written_bytes=cost.written_bytes,
            prefill_ms=1e3 * cost.prefill_s,
        )
