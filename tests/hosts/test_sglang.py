"""SGLang's storage factory and host pools over our back end, and over its own for Mooncake: `make hosts` runs this."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvstore.adapters.mooncake.install import SHIM
from tests.helpers.hosts import SGLANG, SGLANG_ENV, AnsweringWorker
from tests.helpers.pool import kill_node
from tests.helpers.processes import Machine, wait_until

ANSWER_S = 60.0
START_S = 120.0
OURS = {
    "backend_name": "kvstore",
    "module_path": "kvstore.adapters.sglang",
    "class_name": "KVStoreHiCache",
    "interface_v1": 1,
    "node": "pool",
}
MOONCAKE = {"master_server_address": "pool", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp"}
WITH_SHIM = {"PYTHONPATH": f"{SGLANG_ENV['PYTHONPATH']}:{SHIM}"}
WORKER = Path(__file__).resolve().parents[1] / "helpers" / "workers" / "sglang_worker.py"

pytestmark = [
    pytest.mark.skipif(not SGLANG.exists(), reason="SGLang is not there: make hosts"),
    pytest.mark.timeout(600),
]


class SglangWorker(AnsweringWorker):
    """See ``workers.sglang_worker``."""

    def do(self, what: str, first: int = 0, count: int = 4) -> Any:
        """Returns what was done. Of a read, asserts that the pages reported as found have their content."""
        answer = self.ask({"do": what, "first": first, "count": count}, ANSWER_S)
        if what.startswith("get"):
            assert answer["right"] == answer["done"], "pages that were found have their content, no others"
        return answer["done"]


def told(**changes: Any) -> dict[str, Any]:
    """What a worker is told."""
    usual = {"backend": "dynamic", "extra": OURS, "layout": "page_first", "mla": False, "tp_rank": 0, "tp_size": 2}
    return usual | {"dtype": "bfloat16", "model": "a/model"} | changes


def start(machine: Machine, *, env: dict[str, str] | None = None, **changes: Any) -> SglangWorker:
    """A worker that is not waited for."""
    command = [str(SGLANG), str(WORKER), json.dumps(told(**changes))]
    return machine.start(SglangWorker, "sglang", command, None, **(SGLANG_ENV | (env or {})))


def ready(*workers: SglangWorker) -> None:
    for one in workers:
        one.wait_for(1, START_S)


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_of_its_host_pools_come_back(layout: str, mla: bool, machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    one = start(machine, layout=layout, mla=mla)
    ready(one)
    assert (one.do("exists"), one.do("get"), one.do("get2")) == (0, [False] * 4, [False] * 4)
    assert (one.do("set"), one.do("exists", 0, 6)) == ([True] * 4, 4)
    assert one.do("get", 0, 6) == [True] * 4 + [False] * 2
    assert one.do("exists2") == [0, 0], "its window has nothing yet"
    assert one.do("set2", 2, 2) == [True] * 2 and one.do("get2") == [False] * 2 + [True] * 2
    assert one.do("exists2") == [0, 4], "all of its pages, or only the last"
    assert one.do("stats") == [6, 6] and one.do("stats") == [0, 0]
    assert one.do("clear") is True and one.do("exists") == 0


def test_engines_that_differ_never_mix(machine: Machine) -> None:
    """Nor do ranks, except those of MLA, which have the same pages; nor do pages that were copied and that were not."""
    machine.serve("pool", dram="64MiB")
    copied = {**OURS, "interface_v1": 0}
    one, head, rank = start(machine), start(machine, layout="page_head"), start(machine, tp_rank=1)
    ready(one, head, rank)
    assert one.do("set") == [True] * 4
    assert [head.do("exists"), rank.do("exists")] == [0, 0]
    assert (head.do("set"), head.do("get")) == ([True] * 4,) * 2
    for each in (one, head, rank):
        each.kill()
    others = [start(machine, **each) for each in ({"dtype": "float16"}, {"model": "b/model"}, {"extra": copied})]
    ready(*others)
    assert [each.do("exists") for each in others] == [0, 0, 0]
    flat = others[2]
    assert (flat.do("set_flat"), flat.do("exists"), flat.do("get_flat")) == (True, 4, [True] * 4)
    for each in others:
        each.kill()
    writer, reader = start(machine, mla=True), start(machine, mla=True, tp_rank=1)
    ready(writer, reader)
    assert writer.do("set") == [True] * 4 and reader.do("get") == [True] * 4


def test_pages_of_another_node_come_back_and_its_end_is_a_miss(machine: Machine, tmp_path: Path) -> None:
    flags = {"dram": "64MiB", "catalog": f"file:{tmp_path / 'catalog'}"}
    node, _ = machine.serve("a", **flags), machine.serve("b", **flags)
    one, other = start(machine, extra={**OURS, "node": "a"}), start(machine, extra={**OURS, "node": "b"})
    ready(one, other)
    assert one.do("set") == [True] * 4
    wait_until("b finds them", lambda: other.do("exists") == 4, ANSWER_S)
    assert other.do("get") == [True] * 4
    kill_node(machine, "a", node)
    other.do("get")  # asserts that pages that were found have their content
    assert other.do("set", 10) == [True] * 4 == other.do("get", 10)


def test_pages_of_all_ranks_are_found_together(machine: Machine) -> None:
    """With the setting for groups. Pages without groups have other names."""
    machine.serve("pool", dram="64MiB")
    grouped = {**OURS, "groups": True}
    one, other, alone = start(machine, extra=grouped), start(machine, extra=grouped, tp_rank=1), start(machine)
    ready(one, other, alone)
    assert one.do("set") == [True] * 4
    assert (one.do("exists"), one.do("get"), alone.do("exists")) == (0, [False] * 4, 0)
    assert other.do("set", 0, 2) == [True] * 2
    assert (one.do("exists"), other.do("exists"), one.do("get")) == (2, 2, [True] * 2 + [False] * 2)


def test_models_in_folders_have_the_pages_of_their_weights(machine: Machine, tmp_path: Path) -> None:
    """The same name, other weights: nothing of the first is found. So it is with a folder that the settings name."""
    machine.serve("pool", dram="64MiB")
    weights = tmp_path / "model.safetensors"
    for said, stored in ((b"first", 0), (b"first", 4), (b"other", 0)):
        weights.write_bytes(said)
        both = start(machine, model=str(tmp_path)), start(machine, extra={**OURS, "model": str(tmp_path)})
        ready(*both)
        assert [one.do("exists") for one in both] == [stored] * 2
        for one in both:
            assert stored or one.do("set") == [True] * 4
            one.kill()


def test_pages_outlive_processes_and_faults_are_misses(machine: Machine, tmp_path: Path) -> None:
    """Another process finds them, also without a daemon; damage and a node that is gone are misses."""
    config = tmp_path / "node.toml"
    config.write_text("[node]\nscrub_bytes_per_s = 0\nverify_reads = true\n")
    node = machine.serve("pool", dram="64MiB", config=str(config))
    one, other = start(machine), start(machine)
    ready(one, other)
    assert one.do("set") == [True] * 4
    assert other.do("get") == [True] * 4
    node.kill()
    assert other.do("get") == [True] * 4, "reads need no daemon"
    assert one.do("set", 20) == [False] * 4
    node = machine.serve("pool", config=str(config))
    with machine.connect("pool") as pool:
        assert pool.verify()["findings"] == [], "every value has its checksums now"
    for path in machine.folder("pool").glob("segment*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            data[:] = bytes(len(data))
    assert other.do("get") == [False] * 4, "damaged"
    node.kill()
    shutil.rmtree(machine.folder("pool"))
    assert other.do("get") == [False] * 4


def test_its_fault_injector_costs_hits_only(machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    one = start(machine, env={"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.5"})
    ready(one)
    written = [all(one.do("set", 4 * i)) for i in range(12)]
    read = [all(one.do("get", 4 * i)) for i in range(12)]
    assert any(read) and not all(read)
    assert all(there for there, found in zip(written, read, strict=True) if found)


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("no node named 'nowhere'", {"extra": {**OURS, "node": "nowhere"}}),
        ("unknown setting 'size'", {"extra": {**OURS, "size": 3}}),
        ("there is no folder 'no/where'", {"extra": {**OURS, "model": "no/where"}}),
        ("got 'page_unified'", {"layout": "page_unified"}),
    ],
)
def test_what_cannot_be_is_said_at_the_start(why: str, changes: dict[str, Any], machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    one = start(machine, **changes)
    wait_until("the end", lambda: not one.alive, START_S)
    assert why in one.errors.read_text(errors="replace").splitlines()[-1]


@pytest.mark.parametrize("mla", [False, True])
def test_its_own_mooncake_back_end_runs_over_ours(mla: bool, machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    one, other = (start(machine, env=WITH_SHIM, backend="mooncake", extra=MOONCAKE, mla=mla) for _ in range(2))
    ready(one, other)
    assert (one.do("exists"), one.do("set"), one.do("set2")) == (0, [True] * 4, [True] * 4)
    assert (other.do("exists", 0, 6), other.do("exists2")) == (4, [4, 4])
    assert (other.do("get"), other.do("get2")) == ([True] * 4, [True] * 4)


def test_its_own_test_of_mooncake_passes_over_ours(machine: Machine) -> None:
    machine.serve("pool", dram="64MiB")
    command = [str(SGLANG), "-m", "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"]
    env = os.environ | SGLANG_ENV | WITH_SHIM | {"MOONCAKE_MASTER": "pool", "KVSTORE_NODE": "pool"}
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, check=False)
    assert run.returncode == 0 and "All tests passed" in run.stderr, run.stdout + run.stderr
