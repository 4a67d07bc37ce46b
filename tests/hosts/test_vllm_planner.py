"""What the planner decides of vLLM's own requests, and what a step costs that has nothing to do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.hosts import VLLM, VLLM_ENV

pytestmark = pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """In vLLM's environment."""
    environment = {**os.environ, **VLLM_ENV}
    return subprocess.run([VLLM, *command], env=environment, capture_output=True, text=True, timeout=280, check=False)


def test_another_vllm_is_told_in_one_line() -> None:
    done = run(
        "-c",
        "from vllm.distributed.kv_transfer.kv_connector.v1 import base; del base.SupportsHMA; "
        "import kvstore.adapters.vllm",
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


def test_media_are_part_of_keys_and_idle_steps_cost_little() -> None:
    """300 tokens, pages of 64, an image at 80: only the page before it says the same of another image."""
    worker = Path(__file__).parents[1] / "helpers" / "workers" / "vllm_planner.py"
    done = run(worker)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    one_page = dict.fromkeys(("another image", "another place", "no image", "two pages"), 64)
    nothing = dict.fromkeys(("before", "embeddings", "nameless"), 0)
    assert told["found"] == {"the same": 256, **one_page, **nothing}
    assert told["kinds"] == ["auto", "fp8_e4m3", "fp8_e5m2"], "bytes that mean something else are not shared"
    first, still, other, in_place = told["loras"].values()
    assert first == still != other == in_place, "files of a LoRA tell its pages apart, as they were when it was loaded"
    assert told["kept"] == [0, 0]
    assert told["step_us"] < 300, "about 20, of which a step notices nothing"
