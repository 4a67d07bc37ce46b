"""Workers of one real vLLM are shards of pages: engines of another number of ranks read what others wrote."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from tests.helpers.hosts import VLLM
from tests.helpers.processes import Machine
from tests.helpers.vllm_engines import by_hand, engine, model, prompts, ready, transfer

pytestmark = [
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts"),
    pytest.mark.timeout(900),
]


def test_engines_of_one_two_and_four_ranks_read_one_another(machine: Machine, tmp_path: Path) -> None:
    """Llama with two KV heads: of two ranks each has one, of four two have the same, and one of these writes."""
    path, asked = model(tmp_path, "llama"), prompts()
    config = tmp_path / "node.toml"
    config.write_text("[node]\nscrub_bytes_per_s = 0\nverify_reads = true\n")
    machine.serve("pool", dram="64MiB", config=str(config))
    one = engine(machine, path, transfer("pool"))
    two, four = (
        engine(machine, path, transfer("pool"), distributed_executor_backend="mp", tensor_parallel_size=ranks)
        for ranks in (2, 4)
    )
    ready(one, two, four)
    expected, _ = one.answer(asked, "apart")
    for salt, writer in {"one": one, "two": two, "four": four}.items():
        first, cached = writer.answer(asked, salt)
        assert first == expected and cached != by_hand(asked)
        for reader in (one, two, four):
            assert reader.answer(asked, salt) == (expected, by_hand(asked)), f"what {salt} wrote"
    assert machine.connect("pool").verify()["findings"] == [], "every page has its checksums now"
    for segment in machine.folder("pool").glob("segment*"):
        with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            data[:] = bytes(len(data))
    found, cached = four.answer(asked, "two")
    assert found == expected and cached != by_hand(asked), "no rank can load: it is computed"
