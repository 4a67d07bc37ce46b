"""What the planner decides of vLLM's own requests, and what the connector costs in a step that moves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hosts import VLLM, VLLM_ENV

EMPTY_US = 0.03  # of an empty call, where the machine has no other work

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """In vLLM's environment."""
    environment = {**os.environ, **VLLM_ENV}
    return subprocess.run([VLLM, *command], env=environment, capture_output=True, text=True, timeout=280, check=False)


def measured(script: str, *options: str) -> list[dict[str, Any]]:
    """Rows of a script beside our peers."""
    path = Path(__file__).parents[2] / "bench" / "peers" / script
    command = [sys.executable, str(path), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_another_vllm_is_told_in_one_line() -> None:
    done = run(
        "-c",
        "from vllm.distributed.kv_transfer.kv_connector.v1 import base; del base.SupportsHMA; "
        "from kvstore.adapters.vllm import KVStoreConnector",
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode and "KVStoreConnector needs the interface of vLLM 0.32" in last and "SupportsHMA" in last


def test_the_name_costs_processes_nothing_that_do_not_use_it() -> None:
    done = run(
        "-c",
        "import sys; from kvstore.adapters.vllm_plugin import register; register(); register(); "
        "assert 'kvstore.client' not in sys.modules and 'kvstore.adapters.vllm' not in sys.modules",
    )
    assert not done.returncode, done.stderr[-3000:]


def test_media_are_part_of_keys() -> None:
    """300 tokens, pages of 64, an image at 80: only the page before it says the same of another image."""
    worker = Path(__file__).parents[1] / "helpers" / "workers" / "vllm_planner.py"
    done = run(worker)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    one_page = dict.fromkeys(("another image", "another place", "no image", "two pages"), 64)
    nothing = dict.fromkeys(("before", "prompt logits", "without caches", "embeddings", "nameless"), 0)
    assert told["found"] == {"the same": 256, **one_page, **nothing}
    assert told["kinds"] == ["auto", "fp8_e4m3", "fp8_e5m2"], "bytes that mean something else are not shared"
    first, still, other, in_place = told["loras"].values()
    assert first == still != other == in_place, "files of a LoRA tell its pages apart, as they were when it was loaded"
    assert told["kept"] == [0, 0]
    assert told["told"] == {
        "not there": [0, 0],
        "there": [8, 0],
        "found again": [0, 0],
        "two have gone": [0, 4],
        "too many": [0, 4],
        "too many again": [4, 4],
        "reset": [0, 0],
    }


def test_steps_that_move_nothing_cost_less_than_100_us() -> None:
    """All that vLLM calls of the connector, 32 layers, 8 sequences; in empty calls of Python beside each step, since
    machines differ and have other work."""
    (row,) = measured("vllm_idle_step.py", "--sequences", "8", "--steps", "300")
    assert row["steps"] > 200
    assert row["worker"]["calls"] >= 2 * 32 and row["scheduler"]["calls"] >= 2, "vLLM asks both sides"
    for side in ("scheduler", "worker"):
        assert row[side]["empty_calls"] * EMPTY_US < 100, row


def test_a_known_prompt_is_loaded_sooner_than_it_is_computed() -> None:
    """Of 512 tokens, where vLLM's engine runs in the process that asks: its steps that compute nothing follow each
    other without a pause, and the loading thread still gets its turn."""
    (row,) = measured("vllm_ttft.py", "--peers", "kvstore", "--lengths", "512", "--rounds", "7")
    assert row["found"] == 448 and row["equal"], row
    assert row["known_ms"] < row["new_ms"], row
