"""LMCache's own checks over our plugin for its second level, and faults: `make hosts` installs it and runs this."""

from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.hosts import LMCACHE, LMCACHE_ENV, AnsweringWorker
from tests.helpers.pool import kill_node
from tests.helpers.processes import Machine, wait_until

CHUNK_BYTES = 256 << 10
ANSWER_S = 60.0
START_S = 60.0

pytestmark = [
    pytest.mark.skipif(not LMCACHE.exists(), reason="LMCache is not there: make hosts"),
    pytest.mark.timeout(300),
]


class LmcacheWorker(AnsweringWorker):
    """See ``workers.lmcache_worker``."""

    def do(self, what: str, first: int, count: int, salt: str = "") -> dict[str, Any]:
        """Returns the worker's answer."""
        return self.ask({"do": what, "first": first, "count": count, "salt": salt}, ANSWER_S)


def plugin(node: str, **params: str) -> dict[str, Any]:
    """As in the docs."""
    return {
        "type": "plugin",
        "module_path": "kvstore.adapters.lmcache",
        "class_name": "KVStoreL2Adapter",
        "adapter_params": {"node": node, **params},
    }


def lmcache(*words: str) -> subprocess.CompletedProcess[str]:
    """One of LMCache's own programs."""
    command = [str(LMCACHE), *words]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | LMCACHE_ENV, timeout=240, check=False
    )


def checked(spec: dict[str, Any], keys: int) -> dict[str, int]:
    """What LMCache's check of an adapter counts: it ends with 0 whatever it finds."""
    words = ["--mode", "test_l2_adapter", "--num-keys", str(keys), "--l2-adapter", json.dumps(spec)]
    run = lmcache("-m", "lmcache.v1.basic_check", *words)
    absent = re.search(r"Validation: (\d+)/\d+ correctly absent", run.stdout)
    found = re.search(r"Validation: (\d+)/\d+ found", run.stdout)
    loaded = re.search(r"Validation \(loaded\): (\d+)/\d+", run.stdout)
    right = re.search(r"Validation \(content\): (\d+)/\d+", run.stdout)
    assert absent and found and loaded and right, run.stdout + run.stderr
    counts = {"absent": absent, "found": found, "loaded": loaded, "right": right}
    return {name: int(count[1]) for name, count in counts.items()}


def worker(machine: Machine, spec: dict[str, Any]) -> LmcacheWorker:
    path = Path(__file__).resolve().parents[1] / "helpers" / "workers" / "lmcache_worker.py"
    one = machine.start(LmcacheWorker, "lmcache", [str(LMCACHE), str(path), json.dumps(spec)], None, **LMCACHE_ENV)
    one.wait_for(1, START_S)
    return one


def test_its_basic_check_passes(machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    assert checked(plugin("pool"), 20) == {"absent": 20, "found": 20, "loaded": 20, "right": 20}


def test_its_benchmark_verifies_every_key(machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    words = ["--no-skip-verify", "--rounds", "2", "--in-flight", "2", "--l2-adapter", json.dumps(plugin("pool"))]
    run = lmcache("-m", "lmcache.cli.main", "bench", "l2", *words)
    assert "[Verify] All 64 keys data verified OK." in run.stdout, run.stdout + run.stderr


def test_its_fault_injector_costs_hits_only(machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    found = checked({"type": "fault_inject", "rate": 0.5, "inner": plugin("pool")}, 40)
    assert found["found"] == 40 and 0 < found["loaded"] < 40 and found["right"] == found["loaded"]


def test_chunks_outlive_processes_and_faults_are_misses(machine: Machine, tmp_path: Path) -> None:
    """Another process finds them, also without a daemon; damage and a node that is gone are misses."""
    config = tmp_path / "node.toml"
    config.write_text("[node]\nscrub_bytes_per_s = 0\nverify_reads = true\n")
    node = machine.serve("pool", dram="64MiB", config=str(config))
    one, other = worker(machine, plugin("pool")), worker(machine, plugin("pool"))
    assert one.do("lookup", 0, 8)["done"] == [False] * 8
    stored = one.do("store", 0, 8)
    assert stored["done"] == [True] * 8 and stored["used"] == 8 * CHUNK_BYTES
    assert other.do("lookup", 4, 8)["done"] == [True] * 4 + [False] * 4
    assert other.do("load", 0, 8) | {"used": 0} == {"done": [True] * 8, "right": [True] * 8, "used": 0}
    assert other.do("lookup", 0, 8, "another")["done"] == [False] * 8, "salts are apart"
    one.do("delete", 0, 2)
    assert other.do("lookup", 0, 4)["done"] == [False, False, True, True]
    node.kill()
    loaded = other.do("load", 2, 2)
    assert loaded["done"] == loaded["right"] == [True, True], "reads need no daemon"
    assert one.do("store", 20, 2)["done"] == [False] * 2
    node = machine.serve("pool", config=str(config))
    with machine.connect("pool") as pool:
        assert pool.verify()["findings"] == [], "every value has its checksums now"
    for path in machine.folder("pool").glob("segment*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            data[:] = bytes(len(data))
    assert not any(other.do("load", 2, 6)["done"]), "damaged"
    node.kill()
    shutil.rmtree(machine.folder("pool"))
    assert not any(other.do("load", 0, 8)["done"])


def test_chunks_of_another_node_are_loaded_and_its_end_is_a_miss(machine: Machine, tmp_path: Path) -> None:
    flags = {"dram": "64MiB", "catalog": f"file:{tmp_path / 'catalog'}"}
    node, _ = machine.serve("a", **flags), machine.serve("b", **flags)
    one, other = worker(machine, plugin("a")), worker(machine, plugin("b"))
    assert one.do("store", 0, 8)["done"] == [True] * 8
    wait_until("b finds them", lambda: other.do("lookup", 0, 8)["done"] == [True] * 8, ANSWER_S)
    assert other.do("load", 0, 4) | {"used": 0} == {"done": [True] * 4, "right": [True] * 4, "used": 0}
    kill_node(machine, "a", node)
    loaded = other.do("load", 0, 8)
    assert loaded["right"] == loaded["done"], "a miss, and never wrong bytes"
    assert other.do("store", 8, 2)["done"] == [True] * 2


def test_a_folder_of_weights_keeps_chunks_apart(machine: Machine, tmp_path: Path) -> None:
    machine.serve("pool", dram="64MiB")
    weights = tmp_path / "model.safetensors"
    for said, there in ((b"first", False), (b"first", True), (b"other", False)):
        weights.write_bytes(said)
        one = worker(machine, plugin("pool", model=str(tmp_path)))
        assert one.do("lookup", 0, 4)["done"] == [there] * 4
        assert there or one.do("store", 0, 4)["done"] == [True] * 4
        one.kill()
    assert worker(machine, plugin("pool")).do("lookup", 0, 4)["done"] == [False] * 4


def test_what_cannot_be_is_said_at_the_start(machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    refused = {
        "no node named 'nowhere'": plugin("nowhere"),
        "unknown setting 'size'": plugin("pool", size="3"),
        "there is no folder 'no/where'": plugin("pool", model="no/where"),
    }
    for why, spec in refused.items():
        run = lmcache("-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--l2-adapter", json.dumps(spec))
        assert why in run.stderr.splitlines()[-1]
