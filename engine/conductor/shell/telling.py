"""Describes where a request was sent, as a document. Seconds and names are those of ``explaining``."""

from __future__ import annotations

from typing import Any, Final

from engine.conductor.state import instructions as do
from engine.conductor.state.conductor_state import ConductorRules

DIGITS: Final = 6


def routed(it: do.Send, rules: ConductorRules) -> dict[str, Any]:
    """Where a request was sent, and the predicted times."""
    computing, answering = it.route.computing, it.route.answering
    seconds = {
        "waited_s": it.waited_s,
        "wait_s": computing.wait_s,
        "move_s": computing.move_s,
        "prefill_s": computing.prefill_s,
        "tail_s": it.route.tail_s,
        "first_token_s": it.route.first_token_s,
        "token_s": answering.token_s,
        "total_s": it.route.total_s,
    }
    return {
        "policy": rules.policy,
        "split": rules.split,
        "computes": computing.engine.about.name,
        "answers": answering.engine.about.name,
        "cached_tokens": computing.cached,
        "own_tokens": computing.own,
        "donor": computing.donor,
        "batch": answering.batch,
        **{name: round(value, DIGITS) for name, value in seconds.items()},
    }
