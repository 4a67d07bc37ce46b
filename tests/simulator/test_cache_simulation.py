"""`kvstore simulate cache`: the rules of a node, the yardsticks, the table, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.simulator.cache import (
    LIAR,
    TENANTS,
    TENTHS,
    CacheAccess,
    CacheSimulation,
    accesses,
    assign_tenants,
    with_hints,
)
from engine.simulator.cli import GENERATORS, simulate
from engine.simulator.compare import (
    BELADY,
    BELADY_BLOCKS,
    LRU_BLOCKS,
    Belady,
    Half,
    belady_hits,
    compare,
    infinite_hits,
    lru_hits,
)
from engine.simulator.generate import (
    AgentShape,
    ConversationShape,
    ScanShape,
    ShiftShape,
    agents,
    conversations,
    scans,
    shifts,
)
from engine.simulator.policies import POLICIES, make_policy
from engine.simulator.trace import statistics, write_trace
from kvstore.cli.main import run
from kvstore.errors import InvalidRequest
from kvstore.model.retention import Retention
from tests.helpers.traces import assert_well_formed, digest

QUIET = settings(derandomize=True, deadline=None, max_examples=40)
every_policy = pytest.mark.parametrize("name", POLICIES)


def trace_of(*requests: tuple[int, ...]) -> list[CacheAccess]:
    """These block ids, a second apart."""
    return [CacheAccess(1000 * number, blocks) for number, blocks in enumerate(requests)]


def simulated(capacity: int, name: str, trace: list[CacheAccess]) -> tuple[list[int], CacheSimulation]:
    """Hits per request, and the cache at the end."""
    simulation = CacheSimulation(capacity, make_policy(name, capacity))
    return [simulation.request(access.now_ms, access.blocks) for access in trace], simulation


def check_closed(simulation: CacheSimulation, parents: dict[int, int | None]) -> None:
    """Every page's parent is stored, counts are right, the policy lists the leaves, and no slot is lost."""
    stored = simulation.slots
    for block, slot in stored.items():
        parent = parents[block]
        assert parent is None or parent in stored, "the parent of every page is stored"
        children = sum(parents[other] == block for other in stored)
        assert simulation.children[slot] == children
        assert (slot in simulation.policy) == (children == 0)
    assert sorted([*simulation.free, *stored.values()]) == list(range(len(simulation.pages)))


# --- a node's rules --------------------------------------------------------------------------------------------------


def test_hits_by_hand() -> None:
    """The example at the top of the module, and on: what is held stays, what does not fit is cut."""
    trace = trace_of((1, 2), (1, 3), (1, 3, 4), (5, 6, 7, 8), (1, 3), (5, 6, 7))
    hits, simulation = simulated(3, "lru", trace)
    #              1-2  1-3  evicts 2 | all leave; 5-6-7 fit | evicts 7, 6; 1-3 | 5: evicts 3, 1 for 6, 7
    assert hits == [0, 1, 2, 0, 0, 1]
    assert set(simulation.slots) == {5, 6, 7} and simulation.evicted == 1 + 3 + 2 + 2


@every_policy
@QUIET
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_every_policy_keeps_prefixes_closed(name: str, seed: int, capacity: int) -> None:
    shape = AgentShape(applications=3, system_tokens_mean=1500, context_tokens=12_000, fork_ratio=0.3, pause_s_median=2)
    trace = accesses(agents(60, seed=seed, shape=shape))
    parents: dict[int, int | None] = {}
    simulation = CacheSimulation(capacity, make_policy(name, capacity))
    for access in trace:
        parents |= dict(zip(access.blocks, (None, *access.blocks[:-1]), strict=True))
        stored = [block for block in access.blocks if block in simulation.slots]
        assert simulation.request(access.now_ms, access.blocks) == len(stored), "what is stored is a prefix"
        check_closed(simulation, parents)


@every_policy
@pytest.mark.parametrize("capacity", [20, 200])
def test_no_policy_beats_the_optimum(name: str, capacity: int) -> None:
    shape = ConversationShape(opening_tokens_mean=2000, text_tokens_mean=500, pause_s_median=20)
    trace = accesses(conversations(1500, seed=3, shape=shape))
    hits, _ = CacheSimulation(capacity, make_policy(name, capacity)).run(trace)
    best, _ = CacheSimulation(capacity, Belady(trace)).run(trace)
    assert hits <= best <= belady_hits(trace, capacity)
    assert lru_hits(trace, capacity) <= belady_hits(trace, capacity) <= infinite_hits(trace)


@pytest.mark.parametrize(("kind", "capacity"), [("conversations", 2000), ("scans", 2000)])
def test_the_default_gains_over_lru(kind: str, capacity: int) -> None:
    found = compare(kind, GENERATORS[kind](3000, 3.4, 5), [capacity], ["lru", "gittins"], Half.SECOND)
    assert found.ratio("gittins", capacity) > 1.05 * found.ratio("lru", capacity)


# --- traces of other shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generator", [scans, agents, shifts])
def test_a_seed_decides(generator: Any) -> None:
    assert digest(generator(300, seed=3)) == digest(generator(300, seed=3))
    assert digest(generator(300, seed=3)) != digest(generator(300, seed=4))
    assert list(generator(0)) == []
    assert len(list(generator(250))) == 250


def test_traces_are_the_same_everywhere() -> None:
    assert [digest(generator(200, seed=7)) for generator in (scans, agents, shifts)] == [
        "d8e25f7c8dbf902d",
        "15bcb5725d4cf295",
        "311104f63784a7ce",
    ]


def test_scans_are_read_once_among_conversations() -> None:
    requests = list(scans(3000, seed=2))
    assert_well_formed(requests)
    documents = [request for request in requests if request.block_ids[0] % 2]
    assert 200 < len(documents) < 1000
    seen = [block for request in documents for block in request.block_ids]
    assert len(seen) == len(set(seen))
    assert (
        statistics(requests)["block_hit_ratio_infinite"]
        < statistics(conversations(3000, seed=2))["block_hit_ratio_infinite"]
    )


def test_agents_call_again_and_fork() -> None:
    requests = list(agents(3000, seed=2))
    assert_well_formed(requests)
    found = statistics(requests)
    assert found["reuse_gap_s_p50"] < 15 and found["block_hit_ratio_infinite"] > 0.9
    followers: dict[int, set[int]] = {}
    for request in requests:
        for block, following in zip(request.block_ids, request.block_ids[1:], strict=False):
            followers.setdefault(block, set()).add(following)
    assert max(len(following) for following in followers.values()) > 20, "an application's prompt"
    assert len({request.block_ids[0] for request in requests}) <= AgentShape().applications


def test_shifts_leave_nothing_behind() -> None:
    shape = ShiftShape(phase_requests=100)
    requests = list(shifts(700, seed=2, shape=shape))
    assert_well_formed(requests)
    phases = [
        {block for request in requests[first : first + 100] for block in request.block_ids}
        for first in range(0, 700, 100)
    ]
    assert sum(map(len, phases)) == len(set().union(*phases))


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("requests", lambda: scans(-1)),
        ("rate", lambda: agents(1, rate=0)),
        ("seed", lambda: shifts(1, seed=-1)),
        ("job_ratio", lambda: ScanShape(job_ratio=2)),
        ("document_tokens_mean", lambda: ScanShape(document_tokens_mean=0)),
        ("applications", lambda: AgentShape(applications=0)),
        ("fork_ratio", lambda: AgentShape(fork_ratio=-1)),
        ("phase_requests", lambda: ShiftShape(phase_requests=0)),
    ],
)
def test_bad_arguments_are_named(field: str, call: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call()
    assert refused.value.field == field


# --- the comparison and its command ----------------------------------------------------------------------------------


def test_cache_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.jsonl"
    write_trace(path, conversations(200, seed=4))
    options = ["cache", "--capacity", "50,500", "--policy", "lru,gittins", "--json"]
    assert run(simulate, [*options, "--trace", str(path)]) == 0
    read = json.loads(capsys.readouterr().out)
    assert run(simulate, [*options, "--generate", "conversations", "--requests", "200", "--seed", "4"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (read["source"], made["source"], read["requests"]) == ("made.jsonl", "conversations, seed 4", 200)
    assert [line["block_hit_ratio"] for line in read["lines"]] == [line["block_hit_ratio"] for line in made["lines"]]
    assert {line["policy"] for line in read["lines"]} == {LRU_BLOCKS, "lru", "gittins", BELADY, BELADY_BLOCKS}
    assert run(simulate, ["cache", "--generate", "agents", "--limit", "50", "--capacity", "30", "--policy", "lru"]) == 0
    said = capsys.readouterr().out
    assert "50 requests counted" in said and "infinite cache" in said


# --- hints ------------------------------------------------------------------------------------------------------------


def conversations_with_a_prompt(requests: int) -> list[CacheAccess]:
    """Requests that open with block 0, each followed by its own; every fourth is gone on from once, later."""
    return [
        CacheAccess(
            1000 * number, (0, *range(10 * number, 10 * number + 8)) if number % 4 or not number else (0, number)
        )
        for number in range(1, requests + 1)
    ]


def test_requests_are_dealt_by_session_and_hinted_by_rule() -> None:
    trace = [*conversations_with_a_prompt(40), CacheAccess(10**6, (0, 10, 11, 900)), CacheAccess(10**6 + 1, (901, 902))]
    plain = assign_tenants(trace)
    assert len({access.owner for access in plain}) > 1
    assert all(block % TENANTS == access.owner for access in plain for block in access.blocks), "none is shared"
    assert plain[0].owner == plain[-2].owner, "a session stays its tenant's"
    high, low, lie = Retention(2).hint, Retention(-2).hint, Retention(3).hint
    typed = with_hints(plain, "type")
    assert typed[-1].hints == bytes([low, low]) or typed[-1].owner == plain[0].owner
    for tenth in TENTHS:
        for before, after in zip(typed, with_hints(plain, "type", tenth), strict=True):
            count = len(after.blocks)
            says = {"hints": before.hints, "is silent": b"", "lies": bytes([lie]) * count}
            assert after.hints == (says[tenth] if after.owner == LIAR else before.hints)
    assert {hint for access in with_hints(plain, "sessions") for hint in access.hints} <= {0, high, low}
    with pytest.raises(InvalidRequest):
        with_hints(plain, "guess")


def test_who_lies_of_all_its_pages_harms_nobody() -> None:
    """To the page the same as one that says nothing; and hints of the others gain what they should."""
    plain = assign_tenants(
        [CacheAccess(access.now_ms, access.blocks) for access in accesses(conversations(2000, seed=1))]
    )
    hits = {}
    for tenth in ("is silent", "lies"):
        simulation = CacheSimulation(1500, make_policy("gittins", 1500))
        simulation.request(0, (1,), owner=1, hints=bytes([Retention(1).hint]))  # from here on owners are known
        simulation.run(with_hints(plain, "sessions", tenth))
        hits[tenth] = dict(simulation.hits_of)
    assert hits["lies"] == hits["is silent"]
    without = CacheSimulation(1500, make_policy("gittins", 1500))
    assert sum(hits["lies"].values()) > 1.05 * without.run(plain)[0]
