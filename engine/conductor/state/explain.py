"""Explain: documents about a decision, with all candidates, their predicted terms, the choice, and the reason."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from engine.conductor.state import instructions as do
from engine.conductor.state.candidates import Candidates
from engine.conductor.state.engine_table import EngineTable, FleetEngine
from engine.conductor.state.routed_requests import Route, RoutedRequest

Explanation = dict[str, object]
DIGITS: Final = 6  # of seconds in a document, after the point


def explain_decision(
    candidates: Candidates, table: EngineTable, route: Route | None, outcome: str, policy: str, split: str
) -> Explanation:
    """Return a document about a decision: the request, every engine of its model, and the choice.

    Args:
        table: all engines of the model.
        route: the chosen pair; None if no engine can take the request now.
        outcome: a sentence that says what happens to the request.
        policy, split: names of the rules that were used.
    """
    rows = [_candidate(candidates, place, route) for place in range(len(candidates.engines))]
    rows.sort(key=lambda row: (_best_total_s(row), str(row["engine"])))
    included = {engine.about.name for engine in candidates.engines}
    excluded = [engine for engine in table.engines if engine.about.name not in included]
    return {
        **_request_terms(candidates.request),
        "policy": policy,
        "split": split,
        "outcome": outcome,
        "chosen": _choice(route) if route is not None else None,
        "why": _why(candidates, route, rows, policy),
        "candidates": rows,
        "left_out": [
            {"engine": engine.about.name, "why": _why_excluded(engine, candidates.request, candidates.now_s)}
            for engine in excluded
        ],
    }


def route_document(send: do.Send, policy: str, split: str) -> dict[str, Any]:
    """Return a document that says where a request is sent, with the predicted times."""
    computing, answering = send.route.computing, send.route.answering
    seconds = {
        "waited_s": send.waited_s,
        "wait_s": computing.wait_s,
        "move_s": computing.move_s,
        "prefill_s": computing.prefill_s,
        "tail_s": send.route.tail_s,
        "first_token_s": send.route.first_token_s,
        "token_s": answering.token_s,
        "total_s": send.route.total_s,
    }
    return {
        "policy": policy,
        "split": split,
        "computes": computing.engine.about.name,
        "answers": answering.engine.about.name,
        "cached_tokens": computing.cached,
        "own_tokens": computing.own,
        "donor": computing.donor,
        "batch": answering.batch,
        **{name: _round(value) for name, value in seconds.items()},
    }


def explain_refusal(request: RoutedRequest, outcome: str, policy: str, split: str) -> Explanation:
    """Return a document about a request that no engine can ever answer."""
    rest: Explanation = {"chosen": None, "why": outcome, "candidates": [], "left_out": []}
    return {**_request_terms(request), "policy": policy, "split": split, "outcome": outcome, **rest}


def _request_terms(request: RoutedRequest) -> Explanation:
    pages = {layout: len(fingerprints) for layout, fingerprints in sorted(request.pages.items())}
    terms = {
        "model": request.model,
        "tenant": request.tenant,
        "tokens": request.tokens,
        "answer_max": request.answer_max,
    }
    return {"request": {**terms, "pages": pages, "first_token_s": request.first_token_s, "token_s": request.token_s}}


def _candidate(candidates: Candidates, place: int, route: Route | None) -> Explanation:
    """Return the terms of one engine: if it computes, if it answers, and with its best partner."""
    computing, about = candidates.computing(place), candidates.engines[place].about
    routes = [candidates.route(place, other) for other in _partners(candidates, place)]
    best = min(routes, key=lambda pair: (pair.total_s, pair.answering.engine.about.name), default=None)
    part = ""
    if route is not None:
        computes, answers = route.computing.engine.about.name, route.answering.engine.about.name
        is_both = about.name == computes == answers
        part = "both" if is_both else {computes: "computes", answers: "answers"}.get(about.name, "")
    terms: Explanation = {
        "engine": about.name,
        "role": str(candidates.engines[place].role),
        "part": part,
        "silent": candidates.engines[place].silent,
        "own_tokens": computing.own,
        "memory_tokens": int(candidates.upper_pages[place]) * about.page_tokens,
        "nvme_tokens": int(candidates.own_pages[place] - candidates.upper_pages[place]) * about.page_tokens,
        "cached_tokens": computing.cached,
        "donor": computing.donor,
        "wait_s": _round(computing.wait_s),
        "move_s": _round(computing.move_s),
        "prefill_s": _round(computing.prefill_s),
        "ready_s": _round(computing.ready_s),
        "harm_s": _round(computing.harm_s),
    }
    if place in candidates.answers:
        answering = candidates.answering(place)
        terms |= {"batch": answering.batch, "token_s": _round(answering.token_s)}
        terms |= {"answer_harm_s": _round(answering.harm_s)}
    if best is not None:
        terms["best"] = _choice(best)
    return terms


def _partners(candidates: Candidates, place: int) -> list[int]:
    """Return the engines to consider for the answer if this one computes: itself, and the best other engine."""
    partners = [place] if place in candidates.answers else []
    if place in candidates.prefills:
        others = candidates.partners(place)
        if len(others):
            tails_s = candidates.tails_s(np.array([place]), others)
            partners.append(int(others[candidates.totals_s(np.array([place]), others, tails_s).argmin()]))
    return partners


def _choice(route: Route) -> Explanation:
    return {
        "computes": route.computing.engine.about.name,
        "answers": route.answering.engine.about.name,
        "first_token_s": _round(route.first_token_s),
        "token_s": _round(route.answering.token_s),
        "tail_s": _round(route.tail_s),
        "total_s": _round(route.total_s),
    }


def _best_total_s(row: Explanation) -> float:
    best = row.get("best")
    return float(best["total_s"]) if isinstance(best, dict) else math.inf


def _why(candidates: Candidates, route: Route | None, rows: list[Explanation], policy: str) -> str:
    if route is None:
        return "No engine can take it now." if not rows else "No engine that answers can take it now."
    computing, request = route.computing, candidates.request
    name, other = computing.engine.about.name, route.answering.engine.about.name
    engines = f"{name} computes and answers" if route.local else f"{name} computes and {other} answers"
    cached = f"{computing.cached} of {request.tokens} tokens need no computation"
    if computing.donor == computing.engine.about.node and computing.donor:
        cached += ", some of which are being computed there"
    elif computing.donor:
        cached += f", some of which come from {computing.donor}"
    times = f"it can begin after {max(computing.wait_s, computing.move_s):.3f} s and takes {computing.prefill_s:.3f} s"
    handoff = "" if route.local else f"; {route.tail_s:.3f} s of the hand-off are not hidden"
    choice = f"{engines}: {cached}; {times}{handoff}; the first token comes after {route.first_token_s:.3f} s."
    others = [row for row in rows if not row["part"] and "best" in row]
    if not others:
        return f"{choice} There is no other candidate."
    more_s = _best_total_s(others[0]) - route.total_s
    note = "" if more_s >= 0 else f", which {policy} does not consider"
    return f"{choice} If {others[0]['engine']} computed it, the total would change by {more_s:+.3f} s{note}."


def _why_excluded(engine: FleetEngine, request: RoutedRequest, now_s: float) -> str:
    about, tokens = engine.about, request.tokens + request.answer_max
    if (about.context_max and tokens > about.context_max) or (about.tokens_max and tokens > about.tokens_max):
        return f"it never holds {tokens} tokens"
    if engine.draining:
        return "it drains"
    if engine.role_change_pending:
        return "it was ordered to change its role, and has not reported its role since"
    if engine.unsure:
        return (
            f"it refused a request because of its role, which was {engine.role} in its last report; it is asked again"
        )
    if engine.avoided_until_s > now_s:
        return f"it failed on a request; it gets requests again in {engine.avoided_until_s - now_s:.1f} s"
    if about.name in request.barred:
        return "it cannot serve such a request"
    return "it failed on this request before"


def _round(seconds: float) -> float:
    return round(seconds, DIGITS)
