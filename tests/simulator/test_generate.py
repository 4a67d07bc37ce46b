"""Generated traces: reproducible, well-formed, and with the statistics they promise."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.simulator.cli import simulate
from engine.simulator.generate import BimodalShape, ConversationShape, bimodal, conversations
from engine.simulator.trace import read_trace, statistics
from kvstore.cli.main import run
from kvstore.errors import InvalidRequest
from tests.helpers.traces import assert_well_formed, digest


@pytest.fixture(scope="module")
def recorded_like() -> dict[str, Any]:
    return statistics(conversations(12_000, seed=1))


def test_traces_are_the_same_everywhere() -> None:
    assert digest(conversations(200, seed=7)) == "311104f63784a7ce"
    assert digest(bimodal(200, seed=7)) == "128fe8478eb78186"


@pytest.mark.parametrize("generator", [conversations, bimodal])
def test_a_seed_decides(generator: Any) -> None:
    assert digest(generator(300, seed=3)) == digest(generator(300, seed=3))
    assert digest(generator(300, seed=3)) != digest(generator(300, seed=4))
    assert list(generator(100, seed=3)) == list(generator(300, seed=3))[:100]
    assert list(generator(0)) == []


@pytest.mark.parametrize(
    ("name", "recorded", "tolerance"),
    [
        ("input_tokens_mean", 12_035, 0.1),
        ("output_tokens_mean", 343, 0.1),
        ("blocks_used_once_ratio", 0.758, 0.1),
        ("reuse_gap_s_p50", 114, 0.15),
        ("block_hit_ratio_infinite", 0.366, 0.15),
        ("interarrival_s_mean", 1 / 3.4, 0.05),
    ],
)
def test_conversations_resemble_the_recorded_trace(
    recorded_like: dict[str, Any], name: str, recorded: float, tolerance: float
) -> None:
    assert recorded_like[name] == pytest.approx(recorded, rel=tolerance)


def test_conversations_go_on_as_often_as_asked(recorded_like: dict[str, Any]) -> None:
    measured = recorded_like["next_turn_ratio"][:6]
    assert measured == pytest.approx([0.34, 0.44, 0.55, 0.64, 0.66, 0.69], rel=0.2)


def test_a_next_turn_repeats_full_blocks_only() -> None:
    """One session for ever: each prompt holds the full blocks before it, and no block that was partly filled."""
    shape = ConversationShape(next_turn=(1.0,), tick_ms=1, pause_s_min=0, pause_s_median=0.001, pause_s_sigma=0)
    requests = list(conversations(20, rate=0.001, seed=5, shape=shape))
    for before, after in pairwise(requests):
        full = before.input_tokens // 512
        assert after.input_tokens > before.input_tokens + before.output_tokens
        assert after.block_ids[:full] == before.block_ids[:full]
        assert not set(before.block_ids[full:]) & set(after.block_ids)


def test_a_bimodal_mix() -> None:
    requests = list(bimodal(6000, rate=5, seed=2))
    assert_well_formed(requests)
    found = statistics(requests)
    assert found["interarrival_s_mean"] == pytest.approx(0.2, rel=0.05)
    assert found["interarrival_s_p50"] == pytest.approx(0.2 * 0.693, rel=0.1)
    assert found["input_tokens_mean"] == pytest.approx(0.2 * 24_000 + 0.8 * 1500 + 0.5 * 1024, rel=0.05)
    assert sum(r.input_tokens > 8000 for r in requests) / 6000 == pytest.approx(0.2, abs=0.03)
    assert sum(r.block_ids[0] < 32 for r in requests) / 6000 == pytest.approx(0.5, abs=0.03)
    assert {r.block_ids[0] for r in requests if r.block_ids[0] < 32} == set(range(0, 32, 2))


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("requests", lambda: conversations(-1)),
        ("rate", lambda: conversations(1, rate=0)),
        ("rate", lambda: bimodal(1, rate=float("nan"))),
        ("seed", lambda: bimodal(1, seed=-1)),
        ("next_turn", lambda: ConversationShape(next_turn=())),
        ("next_turn", lambda: ConversationShape(next_turn=(1.5,))),
        ("pause_s_median", lambda: ConversationShape(pause_s_median=0)),
        ("context_tokens", lambda: ConversationShape(context_tokens=880)),
        ("long_ratio", lambda: BimodalShape(long_ratio=-0.1)),
        ("prefix_tokens", lambda: BimodalShape(prefix_tokens=100)),
        ("prefixes", lambda: BimodalShape(prefixes=0)),
    ],
)
def test_bad_arguments_are_named(field: str, call: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call()
    assert refused.value.field == field


def test_generate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.jsonl"
    arguments = ["generate", "--kind", "bimodal", "--requests", "20", "--seed", "7", "--out"]
    assert run(simulate, [*arguments, str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 20
    assert list(read_trace(path)) == list(bimodal(20, seed=7))
    assert run(simulate, [*arguments, "-"]) == 0
    assert capsys.readouterr().out == path.read_text()
