"""Rows about engines: that ``kvstore bench`` finds them, what studies compute, and rows from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.studies.fleet import FleetAnswer, FleetRequest, check, conversation, pace
from bench.studies.handoff import Prefilled, ideal_s
from bench.studies.policies import measures
from engine.bench.processes import FULL, QUICK, Scale, check_same, cores, prompt
from engine.bench.rows import ROWS
from engine.client import Answer
from engine.compute.presets import PRESETS, paced_answer
from engine.model.request import Usage
from kvstore.bench.harness import BenchFailed
from kvstore.bench.rows import ROWS as OWN
from kvstore.bench.rows import select_rows
from tests.helpers.benchmarks import QUICK_S, run_quick
from tests.helpers.nursery import of_engines

ROOT = Path(__file__).resolve().parents[2]


def test_rows_of_engines_are_added_and_replace_none() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) and not set(names) & set(OWN)
    assert {row.name for row in select_rows([])} == {*OWN, *names}
    assert [row.name for row in select_rows(["hook_layer", "get_2m"])] == ["get_2m", "hook_layer"]


def test_rows_of_the_store_load_no_engine() -> None:
    code = "import sys; from kvstore.bench.rows import select_rows\n"
    code += "select_rows(['get_2m']); print('engine' in sys.modules); "
    code += "select_rows([]); print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("scale", [FULL, QUICK])
def test_scales_know_their_models(scale: Scale) -> None:
    config = PRESETS[scale.model].config
    content = 2 * config["num_key_value_heads"] * config["head_dim"]
    assert scale.token_bytes == 4 * content * config["num_hidden_layers"]
    lengths = [*scale.prompt_tokens.values(), scale.handoff_tokens]
    assert max(lengths) + scale.page_tokens <= config["max_position_embeddings"]
    assert scale.arena_bytes >= 2 * max(lengths) * scale.token_bytes
    assert sum(lengths) * scale.token_bytes < scale.dram_bytes, "nothing is evicted while a row runs"


def test_prompts_follow_from_length_and_seed() -> None:
    assert prompt(100, 1).tolist() == prompt(100, 1).tolist() != prompt(100, 2).tolist()
    assert cores() == sorted(cores())


# --- The ideal pipeline ---------------------------------------------------------------------------------------------

TWO_CHUNKS = Prefilled(ends_s=(1.0, 2.0), tokens=(100, 200))


def test_ideal_of_a_fast_link_is_the_prefill_and_a_step() -> None:
    assert ideal_s(TWO_CHUNKS, 0.1, layers=4, layer_token_bytes=1, bytes_per_s=1e12) == pytest.approx(2.1)


def test_ideal_of_a_slow_link_is_the_transfer_and_what_the_last_layer_takes() -> None:
    # 200 tokens of 4 layers at 100 B/s are 8 s, and the first byte goes at once.
    found = ideal_s(TWO_CHUNKS, 0.1, layers=4, layer_token_bytes=1, bytes_per_s=100)
    assert found == pytest.approx(8 + 0.1 / 4)


def test_ideal_of_a_link_as_fast_as_the_prefill() -> None:
    # A piece of 100 tokens takes 1 / 4 s, as long as its layer: the last one begins at 1.75 s and is there at 2 s.
    found = ideal_s(TWO_CHUNKS, 0.4, layers=4, layer_token_bytes=1, bytes_per_s=400)
    assert found == pytest.approx(2.4)
    # Twice as slow: 4 s of transfer, one step's last layer.
    found = ideal_s(TWO_CHUNKS, 0.4, layers=4, layer_token_bytes=1, bytes_per_s=200)
    assert found == pytest.approx(4.1)


# --- Routing --------------------------------------------------------------------------------------------------------


def test_a_conversation_asks_for_so_much_of_the_engines() -> None:
    asked = conversation(20.0, 0.5, 8, seed=1)
    assert [each.tokens.tolist() for each in asked] == [each.tokens.tolist() for each in conversation(20.0, 0.5, 8, 1)]
    work_s = sum(pace().step_s([(0, len(each.tokens))], 0) for each in asked)
    assert 0.3 < work_s / (20.0 * 8) < 0.7, "half of what they can do"
    assert all(0 <= each.at_s < 20 and each.answer_tokens >= 1 and each.tokens.max() < 256 for each in asked)
    shared = sum((asked[0].tokens[:16] == each.tokens[:16]).all() for each in asked if len(each.tokens) >= 16)
    assert shared > 0.9 * len(asked), "they begin with the same page"


def test_measures_count_what_was_refused_as_missed() -> None:
    tokens = np.arange(20, dtype=np.uint32)
    good = FleetAnswer(FleetRequest(0.0, tokens, 3), token_ids=[1, 2, 3], first_s=0.5, last_s=0.7, found_tokens=10)
    late = FleetAnswer(FleetRequest(0.0, tokens, 1), token_ids=[1], first_s=9.5, last_s=9.5)
    found = measures([good, late, FleetAnswer(FleetRequest(0.0, tokens, 1), refused=True)])
    assert found["ttft_s"] == 5.0 and found["reuse"] == 0.25
    assert (found["refused"], found["goodput"]) == pytest.approx((1 / 3, 1 / 3))
    with pytest.raises(BenchFailed, match="refused"):
        measures([FleetAnswer(FleetRequest(0.0, tokens, 1), refused=True)])


def test_a_wrong_answer_fails_a_row() -> None:
    tokens = np.arange(20, dtype=np.uint32)
    right = paced_answer(tokens.tolist(), 2)
    check([FleetAnswer(FleetRequest(0.0, tokens, 2), token_ids=right)])
    with pytest.raises(BenchFailed, match="wrong answer"):
        check([FleetAnswer(FleetRequest(0.0, tokens, 2), token_ids=[right[0], right[1] ^ 1])])


# --- What is checked, what is concluded ------------------------------------------------------------------------------


def test_another_answer_fails_the_row() -> None:
    answers = [Answer(tokens, "", "length", Usage(prompt_tokens=1)) for tokens in ((1, 2), (1, 2), (1, 3))]
    check_same("x", answers[0], answers[1])
    with pytest.raises(BenchFailed, match=r"x: wrong answer \(1, 3\), expected \(1, 2\)"):
        check_same("x", answers[2], answers[0])


@pytest.mark.slow
@pytest.mark.timeout(2 * QUICK_S)
def test_rows_from_end_to_end(tmp_path: Path) -> None:
    rows = ("reuse_dram", "reuse_hbm", "hook_layer", "prefill_stores")  # decode_step: tests/engine/test_runner.py
    lines = run_quick(tmp_path, *rows, nursery=of_engines())
    assert {f"reuse_dram.{label}" for label in QUICK.prompt_tokens} | {
        f"reuse_hbm.{label}.dram" for label in QUICK.prompt_tokens
    } <= set(lines)
    assert all(line["ratio"] > 0 for line in lines.values() if line["limit"] is not None)
    assert lines["hook_layer.chunk"]["ours"] > 0
    barred = {name for name, line in lines.items() if line["bar"]}
    assert barred == {"reuse_dram.128_pages.longer", "hook_layer", "hook_layer.chunk", "prefill_stores"}


def test_studies_are_measured_by_the_same_harness(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.studies", "--quick", "--json", "turn_64", "--dir", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    (line,) = json.loads(said)["rows"]
    assert line["name"] == "turn_64" and line["ratio"] > 0
    wrong = subprocess.run([*command, "turn_65"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode == 2 and "names: unknown study (got turn_65)" in wrong.stderr
