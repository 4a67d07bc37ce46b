"""vLLM's own tiered offloading over our tier. The whole way needs a GPU: here is all of it but the GPU."""

from __future__ import annotations

import json
import mmap
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.hosts import VLLM, VLLM_ENV, AnsweringWorker
from tests.helpers.pool import kill_node
from tests.helpers.processes import Machine, wait_until

START_S = 120.0
ANSWER_S = 60.0

pytestmark = [
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts"),
    pytest.mark.timeout(400),
]


class TierWorker(AnsweringWorker):
    """See ``workers.vllm_tier``."""

    def do(self, what: str, first: int, count: int) -> list[bool]:
        """Returns for each page whether it was done."""
        done: list[bool] = self.ask({"do": what, "first": first, "count": count}, ANSWER_S)["done"]
        return done


def started(machine: Machine, model: str = "a/model", dtype: str = "float16", **settings: Any) -> TierWorker:
    """One that is being started, with a tier as in the docs."""
    path = Path(__file__).resolve().parents[1] / "helpers" / "workers" / "vllm_tier.py"
    entry = {"type": "KVStoreTier", "module_path": "kvstore.adapters.vllm.tier", **settings}
    told = json.dumps({"entry": entry, "model": model, "dtype": dtype})
    return machine.start(TierWorker, "vllm-tier", [str(VLLM), str(path), told], None, **VLLM_ENV)


def test_chunks_outlive_the_first_tier_and_its_process(machine: Machine, tmp_path: Path) -> None:
    """Found after a reset, by another process, and without a daemon; damage and a node that is gone are misses."""
    config = tmp_path / "node.toml"
    config.write_text("[node]\nscrub_bytes_per_s = 0\nverify_reads = true\n")
    node = machine.serve("pool", dram="64MiB", config=str(config))
    one, other, apart = (
        started(machine, node="pool"),
        started(machine, node="pool"),
        started(machine, node="pool", dtype="bfloat16"),
    )
    for each in (one, other, apart):
        assert each.wait_for(1, START_S) == {"ready": True}
    assert one.do("load", 0, 4) == [False] * 4
    assert one.do("store", 0, 8) == [True] * 8
    assert one.do("load", 0, 8) == [True] * 8, "after a reset"
    assert other.do("load", 4, 8) == [True] * 4 + [False] * 4, "another process"
    assert apart.do("load", 0, 8) == [False] * 8, "another dtype"
    with machine.connect("pool") as pool:
        assert pool.verify()["findings"] == [], "every chunk has its checksums now"
    node.kill()
    assert other.do("load", 0, 8) == [True] * 8, "reads need no daemon"
    assert one.do("store", 20, 2) == [True] * 2, "vLLM hears of no error"
    node = machine.serve("pool", config=str(config))
    for path in machine.folder("pool").glob("segment*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            data[:] = bytes(len(data))
    assert other.do("load", 0, 8) == [False] * 8, "damaged"
    node.kill()
    shutil.rmtree(machine.folder("pool"))
    assert one.do("load", 0, 8) == [False] * 8


def test_chunks_of_another_node_are_loaded_and_its_end_is_a_miss(machine: Machine, tmp_path: Path) -> None:
    flags = {"dram": "64MiB", "catalog": f"file:{tmp_path / 'catalog'}"}
    node, _ = machine.serve("a", **flags), machine.serve("b", **flags)
    one, other = started(machine, node="a"), started(machine, node="b")
    for each in (one, other):
        assert each.wait_for(1, START_S) == {"ready": True}
    assert one.do("store", 0, 8) == [True] * 8
    wait_until("b finds them", lambda: other.do("load", 0, 4) == [True] * 4, ANSWER_S)
    kill_node(machine, "a", node)
    assert len(other.do("load", 0, 8)) == 8, "a miss where they are gone"
    assert other.do("store", 10, 2) == [True] * 2 == other.do("load", 10, 2)


def test_a_chunk_that_cannot_be_loaded_is_a_miss_until_it_is_stored_again(machine: Machine, tmp_path: Path) -> None:
    """One flipped bit amid its bytes. And vLLM's manager ends well with the tier."""
    config = tmp_path / "node.toml"
    config.write_text("[node]\nscrub_bytes_per_s = 0\nverify_reads = true\n")
    node = machine.serve("pool", dram="64MiB", config=str(config))
    one = started(machine, node="pool")
    assert one.wait_for(1, START_S) == {"ready": True}
    assert one.do("store", 0, 4) == [True] * 4
    with machine.connect("pool") as pool:
        assert pool.verify()["findings"] == []
    flipped = sum(flip(machine.folder("pool"), number) for number in range(2))
    assert flipped == 2, "each chunk lies in one place"
    assert one.do("lookup", 0, 4) == [True] * 4, "nobody has noticed"
    assert one.do("load", 0, 4) == [False, False, True, True], "damaged ones fail, the others do not"
    assert one.do("store", 0, 2) == [True] * 2
    assert one.do("load", 0, 4) == [True] * 4, "stored again"
    node.kill()
    assert sum(flip(machine.folder("pool"), number) for number in (2, 3)) == 2
    assert one.do("lookup", 1, 3) == [True] * 3
    assert one.do("load", 1, 3) == [True, False, False], "nobody drops them now, and vLLM asks until it is a miss"
    assert one.do("lookup", 1, 3) == [True, False, False]
    one.stdin.close()
    assert one.wait(ANSWER_S) == 0


def test_models_in_folders_have_the_chunks_of_their_weights(machine: Machine, tmp_path: Path) -> None:
    """The same name, other weights: nothing of the first is found."""
    machine.serve("pool", dram="64MiB")
    weights = tmp_path / "model.safetensors"
    for said, found in ((b"first", False), (b"first", True), (b"other", False)):
        weights.write_bytes(said)
        one = started(machine, model=str(tmp_path), node="pool")
        assert one.wait_for(1, START_S) == {"ready": True}
        assert one.do("load", 0, 2) == [found] * 2
        if not found:
            assert one.do("store", 0, 2) == [True] * 2
        one.kill()


def test_a_chunk_that_is_stuck_stops_a_reset_and_nothing_else(machine: Machine) -> None:
    """vLLM may not use its memory again before: its reset fails in time, and the next one works."""
    machine.serve("pool", dram="64MiB")
    one = started(machine, node="pool")
    assert one.wait_for(1, START_S) == {"ready": True}
    assert one.do("store", 0, 3) == [True] * 3
    assert one.do("load", 8, 1) == [False], "and the first tier is empty"
    assert one.do("reset_stuck", 0, 3) == [False, True]
    assert one.do("load", 0, 3) == [True] * 3, "who was given up is found the next time"
    one.stdin.close()
    assert one.wait(ANSWER_S) == 0


def flip(folder: Path, number: int) -> int:
    """Flip a bit amid a chunk's bytes, wherever they lie; in how many places."""
    start, places = np.random.default_rng(number).integers(0, 256, 64, np.uint8).tobytes(), 0
    for path in folder.glob("segment*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            at = data.find(start)
            while at >= 0:
                data[at + 4096] ^= 1
                places, at = places + 1, data.find(start, at + 1)
    return places


def test_what_cannot_be_is_said_at_the_start(machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    refused = {
        "no node named 'nowhere'": started(machine, node="nowhere"),
        "unexpected keyword argument 'size'": started(machine, node="pool", size=3),
    }
    for why, one in refused.items():
        assert why in one.wait_for(1, START_S)["refused"]
