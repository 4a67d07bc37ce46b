"""Checks: refuses requests that no engine of this model and memory can ever serve."""

from __future__ import annotations

from collections.abc import Sequence

from engine.compute.models import Model
from engine.compute.sampling import check
from engine.model.request import Request
from engine.state.rules import Rules, ring_frames
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.retention import checked


def memory_frames(
    arena_bytes: int, layouts: Sequence[Layout], windows: Sequence[int], chunk_tokens: int, batch_max: int
) -> tuple[int, ...]:
    """Frames of each cache group that fit in the memory.

    A further group with a window gets rings for ``batch_max`` sequences, as long as those take no more than half of the
    memory, and no more frames than pages of all layers would fit: the first group then has at least that many.

    Raises:
        InvalidRequest: not even one page fits.
    """
    page_bytes = sum(layout.page_bytes for layout in layouts)
    whole = arena_bytes // page_bytes
    if not whole:
        raise InvalidRequest("arena", f"{arena_bytes} bytes hold no page of {page_bytes}")
    beside = []
    for layout, window in list(zip(layouts, windows, strict=True))[1:]:
        ring = ring_frames(window, chunk_tokens, layout.page_tokens)
        beside.append(min(whole, batch_max * ring, max(ring, arena_bytes // 2 // layout.page_bytes)))
    taken = sum(frames * layout.page_bytes for frames, layout in zip(beside, layouts[1:], strict=True))
    return (arena_bytes - taken) // layouts[0].page_bytes, *beside


def check_request(request: Request, model: Model, rules: Rules, answers: bool) -> None:
    """Refuse a request that can never be served.

    Raises:
        InvalidRequest: an empty prompt, ids that the model does not know, more tokens than its context or than all
            frames hold, invalid sampling or hints; names the field.
    """
    check(request.sampling)
    tokens = request.tokens
    if not len(tokens):
        raise InvalidRequest("tokens", "must not be empty")
    if int(tokens.max()) >= model.geometry.vocab_size:
        where = int(tokens.argmax())
        raise InvalidRequest("tokens", f"id {tokens[where]} at {where} is not in 0..{model.geometry.vocab_size - 1}")
    if not 0 <= request.generated < len(tokens):
        raise InvalidRequest("generated", f"{request.generated} of {len(tokens)} tokens leave no prompt")
    if answers and request.generated >= request.sampling.max_tokens:
        raise InvalidRequest("generated", f"{request.generated} tokens are all of max_tokens already")
    total = request.prompt_tokens + (request.sampling.max_tokens if answers else request.generated)
    if total > model.context_tokens_max:
        what = f"{request.prompt_tokens} tokens and max_tokens={request.sampling.max_tokens}"
        raise InvalidRequest("tokens", f"{what} are beyond the context of {model.context_tokens_max}")
    if not rules.holds(total):
        what = f"the arena of {rules.tokens_max}"
        raise InvalidRequest("tokens", f"{total} tokens do not fit {what}")
    if request.adapter:
        raise InvalidRequest("adapter", "this engine runs its model without adapters")
    checked(request.retention)
    if not 0 < request.deadline_s < 1e6:
        raise InvalidRequest("deadline_s", f"must be positive seconds, not {request.deadline_s!r}")
