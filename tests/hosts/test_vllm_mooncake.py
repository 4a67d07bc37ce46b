"""A real vLLM with its own, unmodified MooncakeStoreConnector, over our ``mooncake.store``. See ``make hosts``."""

from __future__ import annotations

import json
import mmap
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.adapters.mooncake.install import SHIM
from tests.helpers.hosts import VLLM, VLLM_ENV
from tests.helpers.processes import Machine, wait_until
from tests.helpers.vllm_engines import BLOCK, Tokens, VllmEngine, engine, prompts, ready

pytestmark = [
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts"),
    pytest.mark.timeout(900),
    pytest.mark.parametrize("plain", ["llama", "qwen3"], indirect=True),
]

Start = Callable[[], VllmEngine]


@pytest.fixture
def start(plain: dict[str, Any], machine: Machine, tmp_path: Path) -> Start:
    """Starts an engine with that connector, as Mooncake's documents say; the node "pool" has to be there."""
    config = tmp_path / "mooncake.json"
    told = {"metadata_server": "P2PHANDSHAKE", "master_server_address": "pool", "protocol": "tcp"}
    config.write_text(json.dumps(told))
    transfer = json.dumps(
        {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    )
    environment = {
        "PYTHONPATH": f"{VLLM_ENV['PYTHONPATH']}:{SHIM}",
        "MOONCAKE_CONFIG_PATH": str(config),
    }
    return lambda: engine(machine, plain["model"], transfer, environment)


def by_hand(asked: list[Tokens]) -> list[int]:
    """How many tokens a store that has all blocks finds, but never the last token."""
    return [(len(each) - 1) // BLOCK * BLOCK for each in asked]


def is_stored(asked: list[Tokens]) -> None:
    """Wait until the store has every block of these prompts: the connector puts them in the background."""
    blocks = {tuple(each[:stop]) for each in asked for stop in range(BLOCK, len(each) + 1, BLOCK)}
    with kvstore.connect("pool") as store:
        wait_until("all blocks are stored", lambda: store.stats()["tiers"]["dram"]["pages"] >= len(blocks), 60.0)


def test_answers_are_those_without_a_connector_wherever_the_values_are(
    plain: dict[str, Any], start: Start, machine: Machine, tmp_path: Path
) -> None:
    """Found again after a reset, by another process, after kill -9 of the node, and after a reboot, from NVMe."""
    asked, expected = prompts(), plain["tokens"]
    config = tmp_path / "node.toml"
    config.write_text('[node]\nnvme_extent = "4MiB"\non_stop = "save"\n')
    node = machine.serve("pool", dram="64MiB", nvme=f"{tmp_path / 'nvme'}:64MiB", config=str(config))
    one, other = start(), start()
    ready(one, other)
    first, cached = one.answer(asked)
    assert first == expected and cached != by_hand(asked)
    is_stored(asked)
    assert one.answer(asked) == (expected, by_hand(asked)), "after reset_prefix_cache"
    assert other.answer(asked) == (expected, by_hand(asked)), "another process"
    node.kill()
    assert other.answer(asked) == (expected, by_hand(asked)), "without a daemon"
    node = machine.serve("pool")
    assert one.answer(asked) == (expected, by_hand(asked)), "with a new daemon"
    one.kill()
    other.kill()
    assert node.terminate() == 0
    shutil.rmtree(machine.folder("pool"))
    machine.serve("pool")
    ready(late := start())
    assert late.answer(asked) == (expected, by_hand(asked)), "after a reboot"


def test_a_value_of_zeros_changes_the_answer(
    plain: dict[str, Any], start: Start, machine: Machine, tmp_path: Path
) -> None:
    """So equal answers tell that the values were right. The node's scrubber, which would find the zeros, is off."""
    config = tmp_path / "node.toml"
    config.write_text("[node]\nscrub_bytes_per_s = 0\n")
    machine.serve("pool", dram="64MiB", config=str(config))
    ready(one := start())
    asked, expected = prompts(), plain["tokens"]
    assert one.answer(asked)[0] == expected
    is_stored(asked)
    for path in machine.folder("pool").glob("segment*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            data[:] = bytes(len(data))
    assert one.answer(asked)[0] != expected


def test_a_node_that_dies_costs_a_recompute(plain: dict[str, Any], start: Start, machine: Machine) -> None:
    """kill -9, and its memory is gone as well, while prompts are being answered."""
    asked, expected = prompts(), plain["tokens"]
    node = machine.serve("pool", dram="64MiB")
    ready(one := start())
    assert one.answer(asked)[0] == expected
    is_stored(asked)
    one.ask(asked)
    node.kill()
    assert one.answered()["tokens"] == expected
    shutil.rmtree(machine.folder("pool"))
    assert one.answer(asked)[0] == expected
