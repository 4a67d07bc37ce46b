"""Nouns of serving: requests to an engine, its answers, and what a prefill hands to a decode.

A request's life: submitted -> admitted (it waits for frames) -> its prefix is loaded, the rest computed, here or by
another engine -> decoding, a ``Token`` event each -> one ``Finished`` or ``Failed``. Cancelling, the deadline and a
stop of the engine are the other ways to end; each gives its frames back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError
from kvstore.model.retention import Retention


class Role(StrEnum):
    """What an engine does. It can be changed while it runs; work under way finishes as it began."""

    PREFILL = "prefill"  # computes prompts for others
    DECODE = "decode"  # answers requests; prompts are computed elsewhere, short ones here
    BOTH = "both"  # answers requests, packing chunks of prompts with decode steps


class RoleOrder(NamedTuple):
    """The order of a leading conductor that sets a role. Orders compare: an engine only carries out later ones.

    Attributes:
        revision: of the leader that gave it. Every leader has a larger one than the leaders before it.
        number: of the order among those of its leader.
    """

    revision: int
    number: int


NO_ORDER: Final = RoleOrder(0, 0)
REVISION_MAX: Final = (1 << 53) - 1  # a status says it as a number of JSON
PRIORITY_MAX: Final = 100  # the largest distance above or below the other requests of its tenant
NO_TOKENS: Final = np.zeros(0, np.uint32)  # of a request that has a text


class Timing(StrEnum):
    """When a decode engine moves the KV of a prompt that another engine computes."""

    EAGER = "eager"  # while it is being computed, into frames held from the start
    LAZY = "lazy"  # when it is computed and a slot is free; the prefill engine keeps it until then


class Source(StrEnum):
    """Where a decode engine reads the KV of such a prompt."""

    ARENA = "arena"  # out of the prefill engine's device memory
    DRAM = "dram"  # full pages out of the pool, the rest out of the arena


class Grain(StrEnum):
    """The pieces in which KV moves."""

    LAYER = "layer"  # layer by layer, as they are ready
    WHOLE = "whole"  # at once, after the last layer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 is greedy. Token ``i`` of an answer depends on ``seed``, ``i`` and the
    logits alone, so that a decode resumed elsewhere goes on as it would have here.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to answer: the one form of a request, from the HTTP server or a client to the engine that computes it.

    A conductor needs ``model`` and everything below ``retention``; engines ignore them.

    Attributes:
        id: chosen by the caller; two requests of one caller have different ones.
        tokens: uint32 ``[n]``; the tokens generated so far of a resumed request are at the end.
        text: the prompt instead of ``tokens``, until a server has tokenized it.
        salt: the root of its pages; None: the default of the server that takes it.
        generated: the number of tokens that were generated so far.
        deadline_s: seconds from its submission within which it is answered or fails.
        prefill: addresses of engines to ask for the prefill, in this order; None: those the engine was started with.
            If none of them answers, it is computed here.
        handoff, source, grain: how the KV travels then; None: as the engine was started.
        use_pool: False neither loads from the pool nor writes to it, nor shares frames with other requests,
            nor leaves pages there.
        allow_lossy: KV that went through int8 may be used. What is computed from it is never stored as exact.
        retention: how long its pages are worth keeping in the pool: ranges of its tokens and of the answer, counted
            from the prompt's first token.
        model: name of the model that answers it.
        tenant: the tenant whose share of the engines it takes.
        priority: among requests of its tenant, the higher one first.
        first_token_s, token_s: limits for the first token, and between two tokens; 0: the conductor's own rules.
            A request that cannot meet them is refused at once.
        explain: True if the answer is to say where the request went, with all candidates. It costs time.
        needs_ids: True if the ids of the answer's tokens are needed: not every engine of others reports them.
        extra: parameters that only engines of others know; they are passed on unchanged.
    """

    id: str
    tokens: npt.NDArray[np.uint32]
    text: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    salt: str | None = None
    adapter: str = ""
    generated: int = 0
    deadline_s: float = 300.0
    prefill: tuple[str, ...] | None = None
    handoff: Timing | None = None
    source: Source | None = None
    grain: Grain | None = None
    use_pool: bool = True
    allow_lossy: bool = False
    retention: tuple[Retention, ...] = ()
    model: str = ""
    tenant: str = ""
    priority: int = 0
    first_token_s: float = 0.0
    token_s: float = 0.0
    explain: bool = False
    needs_ids: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were asked with, without what was generated since."""
        return len(self.tokens) - self.generated

    @property
    def page_salt(self) -> str:
        """The salt of its pages at the server that has taken it."""
        return self.salt or ""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request cost. Tokens of the prompt are cached (by tier), moved here by a hand-off, or computed here.

    Attributes:
        cached_tokens: by the tier they were loaded from: "dram", "nvme"; lossy replicas as "dram-int8" and the like;
            "hbm": they were in the engine's own frames, where another request has or had them.
        prefill_engine: address of the engine that computed the prompt; "" for this one.
        prefill_cached_tokens: what that engine found, by tier.
        ttft_ms: from submission to the first token; gap_ms: from there to the second; tpot_ms: mean of all later gaps.
        prefill_ms: of the steps that computed the prompt, here or at ``prefill_engine``, this request's part. Waits are
            not in it: for its turn, and for what is loaded or moved.
        loaded_bytes, moved_bytes, written_bytes: read from the pool, pulled from another engine, written to the pool.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    prefill_engine: str = ""
    prefill_cached_tokens: Mapping[str, int] = field(default_factory=dict)
    ttft_ms: float = 0.0
    gap_ms: float = 0.0
    tpot_ms: float = 0.0
    loaded_bytes: int = 0
    moved_bytes: int = 0
    written_bytes: int = 0
    prefill_ms: float = 0.0


@dataclass(frozen=True)
class Token:
    """A token of the answer. ``text`` is what is certain by now: a character may need several, a stop string may
    begin.
    """

    id: int
    index: int
    text: str = ""


@dataclass(frozen=True)
class Finished:
    """The end of an answer. ``reason``: "stop" (a stop string), "eos", "length", "cancelled". ``text``: what was still
    held back.
    """

    reason: str
    usage: Usage
    text: str = ""


@dataclass(frozen=True)
class Failed:
    """The end of a request without a (whole) answer, and why."""

    error: KVStoreError


@dataclass(frozen=True)
class Admitted:
    """A prefill for another engine has begun: this much of its prompt was in the pool, by tier.

    ``lossy``: some of it as lossy replicas, so that all that follows is no longer exact.
    """

    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    lossy: bool = False


@dataclass(frozen=True)
class Progress:
    """``tokens`` of the prompt are computed, at ``tokens_per_s``."""

    tokens: int
    tokens_per_s: float


Event = Token | Finished | Failed
Emit = Callable[[Event], None]
"""Called by the engine's thread, once per event, in order; must not block."""
Cancel = Callable[[], None]
"""Ends one request; does nothing if it has ended."""


@dataclass(frozen=True, kw_only=True)
class HandOff:
    """The result of a finished prefill for the decode that asked for it. The KV itself is pulled, or read from the
    pool.

    Attributes:
        pages: keys of the prompt's full pages, in order; all are sealed in the pool, or (not ``stored``) only held.
        tail_tokens: tokens of the last page that is not full: they have no key, and travel from the arena.
        first_token: the token from the prompt's logits under the request's sampling.
        generated: state of the sampler: number of tokens drawn.
        prefill_ms: of the steps that computed it.
    """

    request_id: str
    pages: tuple[bytes, ...]
    stored: int
    tail_tokens: int
    first_token: int
    generated: int
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    computed_tokens: int = 0
    prefill_ms: float = 0.0


@dataclass(frozen=True)
class Done:
    """The prefill for another engine is complete."""

    handoff: HandOff


PrefillEvent = Admitted | Progress | Done | Failed


@dataclass(frozen=True)
class AnswerRoute:
    """Where the request goes, and why: what ``kvstore route --explain`` prints."""

    document: dict[str, Any]


@dataclass(frozen=True)
class AnswerTokens:
    """More tokens of the answer. ``text``: the part that is certain by now, maybe empty. No ``ids``: they are not
    known.
    """

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class AnswerEnd:
    """The end. ``reason``: "stop", "eos", "length", "cancelled". ``text``: the rest that was held back."""

    reason: str
    text: str
    usage: Usage


AnswerPart = AnswerRoute | AnswerTokens | AnswerEnd


@dataclass(frozen=True)
class ServedModel:
    """A model that an engine serves.

    Attributes:
        path: its folder, with tokenizer and chat template; None for a preset.
        foreign: True if only engines of others serve it.
    """

    name: str
    path: str | None
    context_tokens: int
    foreign: bool = False
