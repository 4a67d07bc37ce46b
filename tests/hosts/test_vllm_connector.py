"""A real vLLM over our connector: `make hosts` installs it and runs this. `make test` does not."""

from __future__ import annotations

import mmap
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.hosts import VLLM
from tests.helpers.processes import Machine
from tests.helpers.vllm_engines import by_hand, engine, model, prompts, transfer

pytestmark = [
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts"),
    pytest.mark.timeout(900),
]


def test_answers_are_those_without_a_connector_wherever_the_pages_are(
    plain: dict[str, Any], machine: Machine, tmp_path: Path
) -> None:
    """Found again after a reset, by another process, after kill -9 of the node, and after a reboot, from NVMe."""
    asked, expected = prompts(), plain["tokens"]
    config = tmp_path / "node.toml"
    config.write_text('[node]\nnvme_extent = "4MiB"\non_stop = "save"\n')
    node = machine.serve("pool", dram="64MiB", nvme=f"{tmp_path / 'nvme'}:64MiB", config=str(config))
    one, other = (engine(machine, plain["model"], transfer("pool")) for _ in range(2))
    for each in (one, other):
        each.wait_for("ready")
    first, cached = one.answer(asked)
    assert first == expected and cached != by_hand(asked)
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
    late = engine(machine, plain["model"], transfer("pool"))
    late.wait_for("ready")
    assert late.answer(asked) == (expected, by_hand(asked)), "after a reboot"


def test_a_page_of_zeros_changes_the_answer(plain: dict[str, Any], machine: Machine, tmp_path: Path) -> None:
    """So equal answers tell that the pages were right. The node's scrubber, which would find the zeros, is off."""
    config = tmp_path / "node.toml"
    config.write_text("[node]\nscrub_bytes_per_s = 0\n")
    machine.serve("pool", dram="64MiB", config=str(config))
    one = engine(machine, plain["model"], transfer("pool"))
    one.wait_for("ready")
    asked, expected = prompts(), plain["tokens"]
    assert one.answer(asked)[0] == expected
    for path in machine.folder("pool").glob("segment*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            data[:] = bytes(len(data))
    assert one.answer(asked)[0] != expected


def test_damage_costs_a_recompute(plain: dict[str, Any], machine: Machine, tmp_path: Path) -> None:
    """The lookup finds pages that the load then cannot prove, since every read is verified here."""
    config = tmp_path / "node.toml"
    config.write_text("[node]\nscrub_bytes_per_s = 0\nverify_reads = true\n")
    machine.serve("pool", dram="64MiB", config=str(config))
    one = engine(machine, plain["model"], transfer("pool"))
    one.wait_for("ready")
    asked, expected = prompts(), plain["tokens"]
    assert one.answer(asked)[0] == expected
    assert one.answer(asked) == (expected, by_hand(asked))
    pool = machine.connect("pool")
    assert pool.verify()["findings"] == [], "every page has its checksums now"
    for path in machine.folder("pool").glob("segment*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            data[:] = bytes(len(data))
    found, cached = one.answer(asked)
    assert found == expected and cached != by_hand(asked)


def test_a_node_that_dies_costs_a_recompute(plain: dict[str, Any], machine: Machine) -> None:
    """kill -9, and its memory is gone as well, while prompts are being answered."""
    asked, expected = prompts(), plain["tokens"]
    node = machine.serve("pool", dram="64MiB")
    one = engine(machine, plain["model"], transfer("pool"))
    one.wait_for("ready")
    assert one.answer(asked)[0] == expected
    one.ask(asked)
    node.kill()
    assert one.answered()["tokens"] == expected
    shutil.rmtree(machine.folder("pool"))
    assert one.answer(asked)[0] == expected


def test_one_prefills_and_another_decodes(plain: dict[str, Any], machine: Machine) -> None:
    asked, expected = prompts(), plain["tokens"]
    machine.serve("pool", dram="64MiB")
    prefill, decode = (
        engine(machine, plain["model"], transfer("pool", role)) for role in ("kv_producer", "kv_consumer")
    )
    for each in (prefill, decode):
        each.wait_for("ready")
    assert decode.answer(asked)[0] == expected
    assert prefill.answer(asked)[0] == expected
    assert decode.answer(asked) == (expected, by_hand(asked))
    again, cached = prefill.answer(asked)
    assert again == expected and cached != by_hand(asked), "it does not load"


def test_salts_keep_pages_apart(plain: dict[str, Any], machine: Machine) -> None:
    """A request's ``cache_salt``, which its user chooses, of any length."""
    asked, expected = prompts(), plain["tokens"]
    machine.serve("pool", dram="64MiB")
    one = engine(machine, plain["model"], transfer("pool"))
    one.wait_for("ready")
    for salt in ("", "mine", "m" * 100_000):
        first, cached = one.answer(asked, salt)
        assert first == expected and cached != by_hand(asked), "another's pages"
        assert one.answer(asked, salt) == (expected, by_hand(asked))


def test_windows_keep_only_what_they_need(machine: Machine, tmp_path: Path) -> None:
    """500 tokens, windows of 100, to be resumed every 192 tokens: what 192, 384 and 448 need, and what is answered."""
    machine.serve("pool", dram="64MiB")
    one = engine(machine, model(tmp_path, "hybrid"), transfer("pool", boundary_tokens=150))
    one.wait_for("ready")
    random = np.random.default_rng(12)
    asked = random.integers(3, 900, 500).tolist()
    other = asked[:300] + random.integers(3, 900, 50).tolist()
    first, cached = one.answer([asked])
    full, window = 8, len([1, 2, 4, 5, 6, 7])  # an answer has 24 tokens
    assert cached == [0] and machine.connect("pool").pages(limit=1)["total"] == full + window
    assert one.answer([asked]) == (first, [448])
    expected, cached = one.answer([other], "apart")
    assert cached == [0] and one.answer([other]) == (expected, [192])


def test_windows_where_blocks_are_scarce(machine: Machine, tmp_path: Path) -> None:
    """No two requests wait with loaded pages for blocks that the other one has."""
    path = model(tmp_path, "hybrid")
    machine.serve("pool", dram="64MiB")
    plain, one = (
        engine(machine, path),
        engine(machine, path, transfer("pool", boundary_tokens=192), num_gpu_blocks_override=60),
    )
    for each in (plain, one):
        each.wait_for("ready")
    random = np.random.default_rng(5)
    base = random.integers(3, 900, 700).tolist()
    shapes = [(291, 117), (63, 45), (629, 115), (52, 132), (686, 198), (203, 113)]
    asked = [base[:cut] + random.integers(3, 900, more).tolist() for cut, more in shapes]
    expected, _ = plain.answer(asked)
    assert one.answer(asked)[0] == expected
    assert one.answer(asked) == (expected, by_hand(asked))


def test_two_ranks_write_windows_that_one_reads(machine: Machine, tmp_path: Path) -> None:
    path = model(tmp_path, "hybrid")
    machine.serve("pool", dram="64MiB")
    one = engine(machine, path, transfer("pool"))
    two = engine(machine, path, transfer("pool"), tensor_parallel_size=2)
    for each in (one, two):
        each.wait_for("ready")
    asked = prompts()
    expected, _ = one.answer(asked, "apart")
    first, cached = two.answer(asked)
    assert first == expected and cached != by_hand(asked)
    assert two.answer(asked) == (expected, by_hand(asked))
    assert one.answer(asked) == (expected, by_hand(asked))


def test_a_model_of_windows_alone(machine: Machine, tmp_path: Path) -> None:
    machine.serve("pool", dram="64MiB")
    one = engine(machine, model(tmp_path, "window"), transfer("pool"))
    one.wait_for("ready")
    asked = prompts()
    expected, _ = one.answer(asked)
    assert one.answer(asked) == (expected, by_hand(asked))
    assert one.answer([asked[3]], "apart") == (expected[3:], [0])


def test_what_cannot_be_is_said_at_the_start(machine: Machine, tmp_path: Path) -> None:
    path = model(tmp_path, "llama")
    hybrid, states = model(tmp_path, "hybrid"), model(tmp_path, "mamba")
    machine.serve("pool", dram="64MiB")
    started = {
        "no node named 'nowhere'": engine(machine, path, transfer("nowhere")),
        "unknown setting 'pages'": engine(machine, path, transfer("pool", pages=3)),
        "windows need vLLM's hybrid cache manager": engine(
            machine, hybrid, transfer("pool"), disable_hybrid_kv_cache_manager=True
        ),
        "got MambaSpec": engine(machine, states, transfer("pool")),
        "kv_load_failure_policy": engine(machine, path, transfer("pool").replace("recompute", "fail")),
    }
    for why, one in started.items():
        assert why in one.wait_for("refused")["why"]
