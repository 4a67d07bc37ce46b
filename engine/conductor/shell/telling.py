"""Telling: a decision as a document, for people and for ``kvstore route --explain``."""

from __future__ import annotations

from typing import Any, Final

from engine.conductor.state import instructions as do
from engine.conductor.state.conductor_state import ConductorState
from engine.conductor.state.options import Answering, Computing, Options, Route, RouteWish

CANDIDATES_MAX: Final = 64  # told, of each kind


def routed(it: do.Send, state: ConductorState) -> dict[str, Any]:
    """Where a request was sent."""
    return {
        "policy": state.rules.policy,
        "split": state.rules.split,
        "waited_ms": 1e3 * it.waited_s,
        **_route(it.route),
    }


def explained(state: ConductorState, wish: RouteWish, now_s: float) -> dict[str, Any]:
    """What would be done with a request now."""
    said: dict[str, Any] = {"policy": state.rules.policy, "split": state.rules.split, "tokens": wish.tokens}
    options = state.options(wish, now_s)
    pair = state.policy.route(options, state.split) if options is not None else None
    if options is None or pair is None:
        return {**said, "refused": "no engine can take it now", "candidates": {"computing": [], "answering": []}}
    return {**said, **_route(options.route(*pair)), "candidates": _candidates(options)}


def _route(route: Route) -> dict[str, Any]:
    computing, answering = route.computing, route.answering
    return {
        "computes": computing.engine.about.name,
        "answers": answering.engine.about.name,
        "first_token_ms": 1e3 * route.first_token_s,
        "tail_ms": 1e3 * route.tail_s,
        "total_ms": 1e3 * route.total_s,
        **_terms(computing),
        **_step(answering),
    }


def _candidates(options: Options) -> dict[str, Any]:
    """The soonest of each kind."""
    both = sorted({*options.prefills.tolist(), *options.answers.tolist()}, key=lambda at: float(options.ready_s[at]))
    computing = [options.computing(at) for at in both[:CANDIDATES_MAX]]
    answers = sorted(options.answers.tolist(), key=lambda at: float(options.token_s[at]))
    answering = [options.answering(at) for at in answers[:CANDIDATES_MAX]]
    return {
        "computing": [
            {"engine": each.engine.about.name, "ready_ms": 1e3 * each.ready_s, **_terms(each)} for each in computing
        ],
        "answering": [{"engine": each.engine.about.name, **_step(each)} for each in answering],
    }


def _terms(each: Computing) -> dict[str, Any]:
    return {
        "cached_tokens": each.cached,
        "own_tokens": each.own,
        "donor": each.donor,
        "wait_ms": 1e3 * each.wait_s,
        "move_ms": 1e3 * each.move_s,
        "prefill_ms": 1e3 * each.prefill_s,
        "harm_ms": 1e3 * each.harm_s,
    }


def _step(each: Answering) -> dict[str, Any]:
    return {"batch": each.batch, "token_ms": 1e3 * each.token_s}
