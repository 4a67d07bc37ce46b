"""Traces: what is written is read back, bad lines are named, tokens follow block ids, statistics count right."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.simulator.cli import simulate
from engine.simulator.trace import VOCABULARY_TOKENS, TraceRequest, read_trace, statistics, write_trace
from kvstore.cli.main import run
from kvstore.errors import InvalidRequest

GOOD = {"timestamp": 3000, "input_length": 1100, "output_length": 52, "hash_ids": [0, 41, 42]}


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    requests, now_ms = [], 0
    for _ in range(draw(st.integers(0, 6))):
        now_ms += draw(st.integers(0, 10_000))
        ids = tuple(draw(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5, unique=True)))
        input_tokens = 512 * (len(ids) - 1) + draw(st.integers(1, 512))
        requests.append(TraceRequest(now_ms, input_tokens, draw(st.integers(0, 4000)), ids))
    return requests


@given(traces())
def test_a_trace_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, requests: list[TraceRequest]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    assert write_trace(path, requests) == len(requests)
    assert list(read_trace(path)) == requests
    assert list(read_trace(path, limit=2)) == requests[:2]
    stream = io.StringIO()
    write_trace(stream, requests)
    assert stream.getvalue() == path.read_text()


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("{", ""),
        ("[1]", ""),
        ("\udcff", ""),
        ("[" * 100_000, ""),
        ({"timestamp": -1}, " timestamp"),
        ({"timestamp": 2999}, " timestamp"),
        ({"timestamp": 1.5}, " timestamp"),
        ({"input_length": 0}, " input_length"),
        ({"input_length": None}, " input_length"),
        ({"output_length": True}, " output_length"),
        ({"output_length": -3}, " output_length"),
        ({"hash_ids": 7}, " hash_ids"),
        ({"hash_ids": [0, 1]}, " hash_ids"),
        ({"hash_ids": [0, 1, -2]}, " hash_ids"),
        ({"hash_ids": [0, 1, "2"]}, " hash_ids"),
        ({"hash_ids": [0, 1, 2**63]}, " hash_ids"),
        ({"hash_ids": [0, 1, 0]}, " hash_ids"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, field: str) -> None:
    text = line if isinstance(line, str) else json.dumps(GOOD | line)  # type: ignore[operator]
    path = tmp_path / "trace.jsonl"
    path.write_bytes((json.dumps(GOOD) + "\n" + text + "\n").encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequest) as refused:
        list(read_trace(path))
    assert refused.value.field == f"trace.jsonl:2{field}"
    assert "\n" not in str(refused.value)
    assert len(list(read_trace(path, limit=1))) == 1  # lines not asked for are not read


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    def failing() -> Iterator[TraceRequest]:
        yield TraceRequest(0, 1, 1, (1,))
        raise KeyboardInterrupt

    path = tmp_path / "trace.jsonl"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write_trace(path, failing())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tokens_follow_their_definition() -> None:
    """Against SplitMix64 written out one word at a time."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(word: int) -> int:
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        return word ^ (word >> 31)

    request = TraceRequest(0, 700, 1, (5, 2**62))
    expected = []
    for block in request.block_ids:
        state = mix((block + golden) & mask)
        expected += [(mix((state + step * golden) & mask) >> 32) * VOCABULARY_TOKENS >> 32 for step in range(1, 513)]
    assert request.tokens().tolist() == expected[:700]


@given(st.lists(st.integers(0, 2**40), max_size=4, unique=True), st.integers(1, 512), st.integers(1, 512))
def test_shared_ids_are_shared_tokens(shared: list[int], tail_a: int, tail_b: int) -> None:
    start = 512 * len(shared)
    a = TraceRequest(0, start + tail_a, 1, (*shared, 2**41)).tokens()
    b = TraceRequest(9, start + tail_b, 1, (*shared, 2**41 + 1)).tokens()
    assert np.array_equal(a[:start], b[:start])
    assert a.max() < VOCABULARY_TOKENS
    common = min(tail_a, tail_b)
    assert common < 8 or not np.array_equal(a[start : start + common], b[start : start + common])


def test_statistics_by_hand() -> None:
    found = statistics(
        [
            TraceRequest(0, 1100, 10, (0, 1, 2)),  # a conversation: two full blocks
            TraceRequest(0, 1100, 20, (0, 3, 4)),  # another, which stays alone
            TraceRequest(6000, 1700, 30, (0, 1, 5, 6)),  # next turn of the first: 0 and 1 again
            TraceRequest(9000, 600, 40, (0, 7)),  # too short to have had a next turn that shows
        ]
    )
    assert found["requests"] == 4
    assert found["duration_s"] == 9
    assert found["interarrival_s_mean"] == 3
    assert found["interarrival_s_p50"] == 3
    assert found["interarrival_s_max"] == 6
    assert found["input_tokens_mean"] == 1125
    assert found["output_tokens_mean"] == 25
    assert (found["blocks"], found["blocks_distinct"]) == (12, 8)
    assert found["blocks_used_once_ratio"] == 6 / 8
    assert found["block_hit_ratio_infinite"] == 4 / 12
    assert found["reuse_gap_s_p50"] == 4.5  # block 0: 0, 6, 3; block 1: 6
    assert found["next_turn_ratio"] == []  # of too few requests


def test_stats_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n")
    assert run(simulate, ["stats", "--trace", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["input_tokens_mean"] == 1100
    assert run(simulate, ["stats", "--trace", str(path)]) == 0
    assert "input_tokens_mean" in capsys.readouterr().out
    path.write_text("{")
    assert run(simulate, ["stats", "--trace", str(path)]) == 2
    assert capsys.readouterr().err == "kvstore: trace.jsonl:1: must be a JSON object\n"
