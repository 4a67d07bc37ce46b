"""Workers of one real vLLM are shards of pages: engines of another number of ranks read what others wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.hosts import VLLM
from tests.helpers.processes import Machine
from tests.helpers.vllm_engines import by_hand, engine, model, prompts, ready, transfer

pytestmark = [
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts"),
    pytest.mark.timeout(900),
]


def test_one_reads_what_two_ranks_wrote_and_they_read_what_one_wrote(machine: Machine, tmp_path: Path) -> None:
    """Llama with two KV heads: a rank has one of them."""
    path, asked = model(tmp_path, "llama"), prompts()
    machine.serve("pool", dram="64MiB")
    one = engine(machine, path, transfer("pool"))
    two = engine(machine, path, transfer("pool"), distributed_executor_backend="mp", tensor_parallel_size=2)
    ready(one, two)
    expected, cached = two.answer(asked)
    assert cached != by_hand(asked)
    assert one.answer(asked) == (expected, by_hand(asked)), "one reads what two wrote"
    assert two.answer(asked) == (expected, by_hand(asked)), "two read what they wrote"
    first, cached = one.answer(asked, "another")
    assert first == expected and cached != by_hand(asked)
    assert two.answer(asked, "another") == (expected, by_hand(asked)), "two read what one wrote"
