"""Checks: what no engine of this model and memory can ever serve."""

from __future__ import annotations

from engine.compute.models import Model
from engine.compute.sampling import check
from engine.model.request import Request
from engine.state.rules import Rules
from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.retention import checked


def memory_frames(arena_bytes: int, layout: Layout) -> int:
    """Frames that fit.

    Raises:
        InvalidRequest: not even one.
    """
    frames = arena_bytes // layout.page_bytes
    if not frames:
        raise InvalidRequest("arena", f"{arena_bytes} bytes hold no page of {layout.page_bytes}")
    return frames


def check_request(request: Request, model: Model, rules: Rules, answers: bool) -> None:
    """Refuse what can never be served.

    Raises:
        InvalidRequest: an empty prompt, ids that the model does not know, more tokens than its context or than all
            frames hold, sampling or hints that make no sense; names the field.
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
    if rules.frames_for(total) > rules.frames:
        what = f"the arena of {rules.frames * rules.page_tokens}"
        raise InvalidRequest("tokens", f"{total} tokens do not fit {what}")
    if request.adapter:
        raise InvalidRequest("adapter", "this engine runs its model without adapters")
    checked(request.retention)
    if not 0 < request.deadline_s < 1e6:
        raise InvalidRequest("deadline_s", f"must be positive seconds, not {request.deadline_s!r}")
