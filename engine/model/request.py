"""Nouns of serving: requests to an engine, their answers, and hand-offs between engines.

Life of a request: submitted -> it waits for frames -> its prefix is loaded, and the rest of the prompt is computed,
here or by another engine -> decoding, with a ``Token`` event for each token -> ``Finished`` or ``Failed``. A request
can also end because it is cancelled, its deadline is over, or the engine stops. In all cases its frames are returned.
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
    """Which requests an engine accepts. The role can change at run time; requests that have begun are not affected."""

    PREFILL = "prefill"  # computes prompts for other engines
    DECODE = "decode"  # answers requests; other engines compute the prompts, except for short ones
    BOTH = "both"  # answers requests, and computes chunks of prompts together with decode steps


class RoleOrder(NamedTuple):
    """The number of a leading conductor's order to change a role. An engine refuses an order that is not a later one.

    Attributes:
        revision: the leader's revision. It is larger than the revision of every earlier leader.
        number: counts the orders of this leader.
    """

    revision: int
    number: int


NO_ORDER: Final = RoleOrder(0, 0)
REVISION_MAX: Final = (1 << 53) - 1  # the largest integer that every JSON parser can represent
PRIORITY_MAX: Final = 100  # priorities are from -100 to 100
NO_TOKENS: Final = np.zeros(0, np.uint32)  # the tokens of a request whose prompt is a string


class Timing(StrEnum):
    """When a decode engine moves the KV of a prompt that another engine computes."""

    EAGER = "eager"  # while the prompt is computed, into frames that the request has from the start
    LAZY = "lazy"  # once the prompt is computed and frames are free; the prefill engine holds the KV until then


class Source(StrEnum):
    """Where a decode engine reads the KV of a prompt that another engine has computed."""

    ARENA = "arena"  # from the arena of the prefill engine
    DRAM = "dram"  # full pages from the pool, the rest from the arena


class Grain(StrEnum):
    """The units in which KV moves."""

    LAYER = "layer"  # layer by layer, as soon as a layer is computed
    WHOLE = "whole"  # all KV at once, after the last layer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. With ``temperature`` 0, the most likely token is chosen.

    Token ``i`` of an answer depends only on ``seed``, ``i`` and the logits. So another engine that continues an answer
    draws the same tokens.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt to answer. Clients, HTTP servers, conductors and engines all use this form.

    ``model`` and the attributes after it are for conductors. Engines ignore them.

    Attributes:
        id: chosen by the caller, and unique among its requests.
        tokens: uint32 ``[n]``: the prompt, and the tokens generated so far if the request is resumed.
        text: the prompt as a string, until a server has tokenized it; then empty.
        salt: the tenant's name for its own pages; None means the default of the server that receives the request.
        generated: the number of tokens generated so far.
        deadline_s: how long after its submission the request is answered or fails, in seconds.
        prefill: addresses of engines to ask for the prefill, in this order; None means the engine's settings.
            If all of them fail, the engine that answers computes the prompt.
        handoff, source, grain: how the KV of a prefill moves; None means the engine's settings.
        use_pool: False to load no pages from the pool, write none to it, and share no frames with other requests.
        allow_lossy: True to use lossy replicas. Pages computed from lossy KV are never stored as exact.
        retention: how long pages should stay in the pool, for ranges of tokens of the prompt and the answer, counted
            from the first token of the prompt.
        model: the name of the model.
        tenant: the tenant to whose share of the engines the request counts.
        priority: requests of one tenant are served in the order of their priority, the highest first.
        first_token_s, token_s: limits for the time to the first token, and between two tokens; 0 means the conductor's
            settings. A request that cannot meet them is refused at once.
        explain: True to report the route and all candidates in the answer. The report takes time.
        needs_ids: True if the caller needs the ids of the answer's tokens, which not every foreign engine reports.
        extra: parameters for foreign engines, passed on unchanged.
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
        """The number of tokens of the prompt, without the tokens generated so far."""
        return len(self.tokens) - self.generated

    @property
    def page_salt(self) -> str:
        """The salt of the request's pages, once a server has set its default."""
        return self.salt or ""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a request has cost. Each token of the prompt was cached, moved here by a hand-off, or computed here.

    Attributes:
        cached_tokens: tokens whose KV was cached, by tier: "dram" or "nvme", with a suffix for lossy replicas, such as
            "dram-int8"; "hbm" if the KV was in the engine's own frames or in another engine's arena.
        prefill_engine: the address of the engine that computed the prompt; "" for this one.
        prefill_cached_tokens: ``cached_tokens`` at the prefill engine.
        ttft_ms: the time from submission to the first token.
        gap_ms: the time from the first token to the second.
        tpot_ms: the mean time between later tokens.
        prefill_ms: this request's share of the steps that computed the prompt, here or at ``prefill_engine``. Time in
            which the request waited for its turn, for loads or for a hand-off is not included.
        loaded_bytes: bytes read from the pool.
        moved_bytes: bytes that a hand-off moved here.
        written_bytes: bytes written to the pool.
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
    """A token of the answer.

    ``text`` has the characters that are certain now. A character may need several tokens, and the text may end with the
    beginning of a stop string.
    """

    id: int
    index: int
    text: str = ""


@dataclass(frozen=True)
class Finished:
    """The end of an answer.

    Attributes:
        reason: "stop" (a stop string), "eos", "length", or "cancelled".
        text: the last characters of the text. They were not certain before.
    """

    reason: str
    usage: Usage
    text: str = ""


@dataclass(frozen=True)
class Failed:
    """The failure of a request. The answer is missing or incomplete."""

    error: KVStoreError


@dataclass(frozen=True)
class Admitted:
    """A prefill for another engine has begun.

    Attributes:
        prompt_tokens: the number of tokens of the prompt.
        cached_tokens: tokens whose KV was cached, by tier.
        lossy: True if some of this KV came from lossy replicas, so that no KV computed after it is exact.
    """

    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    lossy: bool = False


@dataclass(frozen=True)
class Progress:
    """``tokens`` tokens of the prompt are computed. ``tokens_per_s`` is the engine's measured prefill speed."""

    tokens: int
    tokens_per_s: float


Event = Token | Finished | Failed
Emit = Callable[[Event], None]
"""Receives the events of a request, in order. Threads of the engine call it, so it must not block."""
Cancel = Callable[[], None]
"""Cancels one request. Does nothing if the request has ended."""


@dataclass(frozen=True, kw_only=True)
class HandOff:
    """The result of a prefill, for the decode engine. The KV is not included: it is pulled, or read from the pool.

    Attributes:
        pages: keys of the prompt's full pages, in order.
        stored: how many leading ones of these pages are sealed in the pool. The prefill engine holds all of them.
        tail_tokens: the number of tokens after the last full page. They have no key, so they are always pulled.
        first_token: the first token of the answer.
        generated: the number of tokens drawn so far, which is the state of the sampler.
        cached_tokens, computed_tokens, prefill_ms: as in ``Usage``, at the prefill engine.
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
    """A prefill for another engine is complete."""

    handoff: HandOff


PrefillEvent = Admitted | Progress | Done | Failed


@dataclass(frozen=True)
class AnswerRoute:
    """The conductor's choice of engines, with the reasons, as ``kvstore route --explain`` prints it."""

    document: dict[str, Any]


@dataclass(frozen=True)
class AnswerTokens:
    """Further tokens of the answer.

    Attributes:
        ids: empty if the engine does not report ids.
        text: the characters that are certain now, maybe none.
    """

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class AnswerEnd:
    """The end of the answer, with the reason and the last characters as in ``Finished``."""

    reason: str
    text: str
    usage: Usage


AnswerPart = AnswerRoute | AnswerTokens | AnswerEnd


@dataclass(frozen=True)
class ServedModel:
    """A model that an engine serves.

    Attributes:
        path: the model's folder, with the tokenizer and the chat template; None for a preset.
        context_tokens: the maximum number of tokens of a prompt and its answer.
        foreign: True if only foreign engines serve the model.
    """

    name: str
    path: str | None
    context_tokens: int
    foreign: bool = False
