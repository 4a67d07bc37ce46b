"""Integrity: relations that hold in a conductor's state after every event. Tests check them in simulated fleets."""

from __future__ import annotations

from engine.conductor.state.conductor_state import ConductorState
from engine.conductor.state.engine_table import Columns, EngineTable, NumberedNames
from engine.conductor.state.routed_requests import RequestPhase


def check(state: ConductorState) -> None:
    """Assert that every request is in its queue or at its engines, and that engines have no other requests.

    The counters of each engine and the columns of each table must match the requests, too.
    """
    waiting = [number for number, request in state.requests.items() if request.phase is RequestPhase.WAITING]
    assert sum(map(len, state.queues.values())) == len(waiting), (state.queues, waiting)
    numbers_by_engine: dict[str, set[int]] = {}
    for number, request in state.requests.items():
        assert request.number == number and (request.route is None) == (request.phase is RequestPhase.WAITING), request
        for name in request.engines:
            if request.phase is not RequestPhase.DECODING or name == request.engines[-1]:
                numbers_by_engine.setdefault(name, set()).add(number)
    for name, engine in state.fleet.engines.items():
        numbers = numbers_by_engine.get(name, set())
        assert engine.works.keys() <= numbers, (name, engine.works.keys() - numbers)
        works = engine.works.values()
        assert engine.waiting == sum(1 for work in works if work.prefill_s and not work.computed), name
        assert engine.ends == sorted(work.ends_s for work in works if work.decodes), name
        assert engine.tokens == sum(work.tokens for work in works if work.decodes), name
        assert engine.others_waiting >= 0 and engine.others_running >= 0, name
    for model in state.fleet.models:
        table = state.fleet.table(model)
        assert table is not None
        fresh = EngineTable(table.engines, state.fleet.nodes, NumberedNames())
        changing = slice(0, Columns.CHANGING)
        assert (table.columns.values[changing] == fresh.columns.values[changing]).all(), model
