"""``mooncake.store`` over a node: codes as Mooncake's, values as they were put, and finding it by ``import``."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner

from kvstore.adapters.mooncake import MooncakeDistributedStore, ReplicateConfig
from kvstore.adapters.mooncake.install import FILE, SHIM, install
from kvstore.adapters.mooncake.store import INVALID_PARAMS, OBJECT_NOT_FOUND, RPC_FAIL
from kvstore.errors import InvalidRequest
from tests.helpers.device_buffers import InterfaceBuffer, added_device
from tests.helpers.nursery import ROOT
from tests.helpers.processes import Machine, check_laws

KIB = 1 << 10
Bytes = npt.NDArray[np.uint8]

ANOTHER_PROCESS = """
import ctypes, json, numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
store = MooncakeDistributedStore()
codes = [store.setup("localhost", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", "127.0.0.1:50051", None)]
out = np.zeros(5000, np.uint8)
codes += [store.register_buffer(out.ctypes.data, out.nbytes), store.is_exist("a"), store.is_exist("b")]
codes += store.batch_get_into_multi_buffers(["a"], [[out.ctypes.data, out.ctypes.data + 3000]], [[3000, 2000]])
codes += [int(out.sum()), store.close(), ReplicateConfig().replica_num]
print(json.dumps(codes))
"""


def of_node(name: str = "n", **settings: str) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 1 << 30, 1 << 30, "tcp", "", name, **settings) == 0
    return store


def filled(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def place(array: Bytes) -> tuple[int, int]:
    return array.ctypes.data, array.nbytes


def test_values_come_back_and_codes_are_mooncakes(machine: Machine) -> None:
    machine.serve("n")
    store = of_node()
    assert store.get("k") == b"" and store.is_exist("k") == 0 and store.get_size("k") == OBJECT_NOT_FOUND
    assert store.put("k", b"some bytes") == 0
    assert store.put("k", b"others", ReplicateConfig()) == 0, "a value that is there stays, which is no error"
    assert store.get("k") == b"some bytes" and store.is_exist("k") == 1 and store.get_size("k") == 10
    assert store.batch_is_exist(["k", "l"]) == [1, 0]
    assert list(store.batch_get_replica_desc(["k", "l"])) == ["k"]
    assert store.remove("k") == 0 and store.remove("k") == OBJECT_NOT_FOUND and store.get("k") == b""
    assert store.put("k" * 2000, b"x") == INVALID_PARAMS
    assert store.close() == 0 and store.put("k", b"x") == RPC_FAIL == store.is_exist("k")


def test_buffers_are_filled_where_they_lie(machine: Machine) -> None:
    machine.serve("n")
    store = of_node()
    data, out = filled(64 * KIB), np.zeros(64 * KIB, np.uint8)
    assert store.put_from("k", *place(data)) == INVALID_PARAMS, "not registered"
    assert store.register_buffer(*place(data)) == store.register_buffer(*place(out)) == 0
    assert store.register_buffer(*place(data)) == 0, "again"
    assert store.put_from("k", *place(data)) == 0
    assert store.get_into("k", *place(out)) == data.nbytes and np.array_equal(out, data)
    assert store.get_into("k", out.ctypes.data, 100) == INVALID_PARAMS, "too small"
    assert store.get_into("l", *place(out)) == OBJECT_NOT_FOUND

    # Pieces of several values, one of them missing, one of them named twice, one outside.
    start, size = place(data)
    thirds = [[start, start + 100], [start + 200], [start + 200], [start + size - 10]]
    codes = store.batch_put_from_multi_buffers(["a", "b", "b", "c"], thirds, [[50, 100], [300], [300], [11]])
    assert codes == [0, 0, 0, INVALID_PARAMS]
    out[:] = 0
    start = out.ctypes.data
    found = store.batch_get_into_multi_buffers(
        ["a", "c", "b"], [[start, start + 60], [start], [start + 300]], 3 * [[300]]
    )
    assert found == [INVALID_PARAMS, OBJECT_NOT_FOUND, 300], "as many sizes as pointers"
    found = store.batch_get_into_multi_buffers(["a", "b"], [[start, start + 60], [start + 400]], [[60, 90], [300]])
    assert found == [150, 300]
    assert np.array_equal(out[:150], np.concatenate([data[:50], data[100:200]]))
    assert np.array_equal(out[400:700], data[200:500])
    assert store.batch_get_into(["b", "k"], [start, start], [300, out.nbytes]) == [300, data.nbytes]
    assert store.batch_put_from(["d"], [data.ctypes.data], [10]) == [0] and store.get("d") == data[:10].tobytes()

    assert store.unregister_buffer(start) == 0 and store.unregister_buffer(start) == INVALID_PARAMS
    assert store.get_into("k", *place(out)) == INVALID_PARAMS
    assert store.remove_all() == 4 and store.remove_all(force=True) == 0


def test_device_memory_is_registered_and_copied_by_pointers(machine: Machine) -> None:
    """Host and device buffers may be mixed in one call, and in one value."""
    machine.serve("n")
    store = of_node()
    with added_device() as device:
        data, host = InterfaceBuffer(device, (64 * KIB,), filled(64 * KIB)), np.zeros(64 * KIB, np.uint8)
        out = InterfaceBuffer(device, (64 * KIB,))
        start, target, place = data.memory.address, out.memory.address, host.ctypes.data
        assert store.register_buffer(start, 64 * KIB + 1) == INVALID_PARAMS, "more than the device's memory"
        for address in (start, target, place):
            assert store.register_buffer(address, 64 * KIB) == 0
        codes = store.batch_put_from(["a", "b", "c"], [start, start + 100, start + 10], [5000, 300, 64 * KIB])
        assert codes == [0, 0, INVALID_PARAMS]
        codes = store.batch_get_into(["b", "a", "none"], [target, place, target], [300, 5000, 1])
        assert codes == [300, 5000, OBJECT_NOT_FOUND]
        assert np.array_equal(out.seen[:300], data.seen[100:400]) and np.array_equal(host[:5000], data.seen[:5000])
        assert out.part(slice(300, None)).untouched
        pieces = [[start, place, start + 9000], [start + 20_000]]
        assert store.batch_put_from_multi_buffers(["m", "n"], pieces, [[1000, 100, 7000], [10]]) == [0, 0]
        targets = [[target + 1000, target + 20_000], [place + 6000]]
        assert store.batch_get_into_multi_buffers(["m", "n"], targets, [[1050, 8000], [10]]) == [8100, 10]
        found = np.concatenate([out.seen[1000:2050], out.seen[20_000:27_050]])
        assert np.array_equal(found, np.concatenate([data.seen[:1000], host[:100], data.seen[9000:16_000]]))
        assert np.array_equal(host[6000:6010], data.seen[20_000:20_010])
        assert device.pinned_bytes > host.nbytes, "the host's buffer, and the frames"
        assert store.unregister_buffer(start) == 0 and store.put_from("o", start, 10) == INVALID_PARAMS
        assert store.close() == 0


def test_values_are_pinned_as_far_as_the_limits_allow(machine: Machine) -> None:
    machine.serve("n", dram="32MiB")
    store, own = of_node(), machine.connect("n")
    soft, hard = ReplicateConfig(with_soft_pin=True), ReplicateConfig(with_hard_pin=True)
    data = filled(1 << 20)
    assert store.register_buffer(*place(data)) == 0 and store.put("soft", b"1", soft) == 0
    start = data.ctypes.data
    assert store.batch_put_from(["hard", "bad"], [start, 5], [1 << 19, 5], hard) == [0, INVALID_PARAMS]
    assert store.put("hard", b"2", hard) == 0, "a value that is there is pinned again"
    pins = sorted(pin["until"] - time.time() for pin in own.pins()["pins"])
    assert [round(seconds / 60) for seconds in pins] == [30, 30 * 24 * 60]
    large = [f"k{number}" for number in range(20)]
    assert store.batch_put_from_multi_buffers(large, [[start]] * 20, [[1 << 20]] * 20, hard) == [0] * 20
    assert 2 < len(own.pins()["pins"]) < 20, "more pins are refused, but the values are stored"
    assert store.batch_is_exist(large) == [1] * 20
    assert store.remove("hard") == 0 and store.remove_all() == 21 and own.pins()["pins"] == []


def test_the_values_of_a_group_are_there_together_or_not_at_all(machine: Machine) -> None:
    machine.serve("n", dram="16MiB")
    store, own = of_node(), machine.connect("n")
    data = filled(1 << 20)
    start, size = place(data)
    assert store.register_buffer(start, size) == 0

    def put(keys: list[str], ids: list[str], bad: str = "") -> list[int]:
        places = [start + 1000 * number if key != bad else 5 for number, key in enumerate(keys)]
        return store.batch_put_from(keys, places, [300_000] * len(keys), ReplicateConfig(group_ids=ids))

    assert put(["a/k", "b/k", "single", "a/v", "b/v", "none"], ["a", "b", "s", "a", "b", ""]) == [0] * 6
    assert store.batch_is_exist(["a/k", "a/v", "b/k", "b/v", "single", "none"]) == [1] * 6
    assert store.get("b/v") == data[4000:304_000].tobytes()
    assert put(["a/v", "a/k", "a/other"], ["a"] * 3) == [0] * 3, "values that are there stay, with their group"
    assert store.get("a/v") == data[3000:303_000].tobytes() and store.is_exist("a/other") == 1
    assert store.remove("a/k") == 0 and store.batch_is_exist(["a/v", "a/other", "b/k"]) == [0, 1, 1]
    assert put(["c/k", "d/k", "c/v", "d/v"], ["c", "d", "c", "d"], bad="c/v") == [*(INVALID_PARAMS, 0)] * 2
    assert store.batch_is_exist(["c/k", "c/v", "d/k", "d/v"]) == [0, 0, 1, 1]
    long = "l" * 2000
    assert put(["i/k", "i/v", "i/x", long, "j/k"], ["i", "i", "i", "j", "j"]) == [0] * 3 + [INVALID_PARAMS] * 2
    assert store.batch_is_exist(["i/k", "i/v", "i/x", "j/k"]) == [1, 1, 1, 0], "one group does not affect the others"
    assert put(["e"], []) == [0] and put(["f", "g"], ["f"]) == [INVALID_PARAMS] * 2
    assert store.put("h" * 2000, b"x", ReplicateConfig(group_ids=["h"])) == INVALID_PARAMS
    for number in range(60):  # more than fits
        keys = [f"{number}/{part}" for part in "kvx"]
        assert put(keys, [str(number)] * 3) == [0] * 3
        found = store.batch_is_exist([f"{past}/{part}" for past in range(number) for part in "kvx"])
        assert all(sum(found[at : at + 3]) in (0, 3) for at in range(0, len(found), 3)), "no group is there in part"
    assert 0 < sum(found) < len(found)
    check_laws(own)


def test_only_memory_of_this_process_is_registered(machine: Machine) -> None:
    machine.serve("n")
    store = of_node()
    assert store.register_buffer(1 << 46, 4096) == INVALID_PARAMS, "nothing is mapped there"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    reserved = libc.mmap(None, 1 << 20, 0, 0x22, -1, 0)  # addresses without memory, as drivers of devices reserve them
    try:
        assert store.register_buffer(reserved, 1 << 20) == INVALID_PARAMS
    finally:
        libc.munmap(reserved, 1 << 20)


def test_tenants_and_the_stores_own_objects_are_apart(machine: Machine) -> None:
    machine.serve("n")
    store, other, own = of_node(), of_node(tenant_id="other"), machine.connect("n")
    own.put("k", b"own")
    assert store.put("k", b"first") == other.put("k", b"second") == 0
    assert (store.get("k"), other.get("k")) == (b"first", b"second")
    assert store.remove_all() == 1
    assert (store.get("k"), other.get("k"), bytes(own.get("k"))) == (b"", b"second", b"own")


def test_a_prefix_is_removed_and_no_other_expression(machine: Machine) -> None:
    machine.serve("n")
    store, other = of_node(), of_node(tenant_id="t")
    keys = ["m/a.1", "m/a.2", "m/ab", "n/a.1", "x+y"]
    for each in keys:
        assert store.put(each, b"value") == other.put(each, b"value") == 0
    for regex in (
        "m/a",
        "^m/a$",
        "^m/[ab]",
        "^m/a?",
        "^m/a*",
        "a.*",
        "^(m|n)/",
        "^m/a.",
        r"^m/\w",
        ".*a",
        "^m/.*1",
        "^m/a\\",
    ):
        with pytest.raises(InvalidRequest, match="regex: must be a prefix"):
            store.remove_by_regex(regex)
    assert store.batch_is_exist(keys) == [1] * 5, "nothing is removed"
    assert store.remove_by_regex(r"^m/a\.") == 2 and store.batch_is_exist(keys) == [0, 0, 1, 1, 1]
    assert store.remove_by_regex("^m.*") == 1 and store.remove_by_regex(r"^x\+y.*$", True) == 1
    assert store.remove_by_regex(".*") == 1 and store.remove_by_regex("^") == 0
    assert other.batch_is_exist(keys) == [1] * 5
    assert other.remove_all() == 5


def test_another_process_finds_it_by_its_name_also_after_a_kill(machine: Machine) -> None:
    daemon = machine.serve("n")
    data = filled(5000)
    assert of_node().put("a", data.tobytes()) == 0
    daemon.kill()
    machine.serve("n")
    env = machine.env(PYTHONPATH=str(SHIM))
    command = [sys.executable, "-c", ANOTHER_PROCESS]
    said = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout) == [0, 0, 1, 0, 5000, int(data.sum()), 0, 1]


def run_install(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.adapters.mooncake.install", *arguments]
    env = {"PYTHONPATH": f"{ROOT}:{path}" if path else str(ROOT)}
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_install_is_one_file_that_goes_again(tmp_path: Path) -> None:
    site = f"--site={tmp_path}"
    assert run_install("--path").stdout.strip() == str(SHIM)
    assert run_install(site).returncode == 0
    assert (tmp_path / FILE).read_text().strip() == str(SHIM)
    code = f"import site; site.addsitedir({str(tmp_path)!r}); import mooncake.store as m; print(m.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == str(SHIM / "mooncake" / "store.py"), found.stderr
    assert run_install(site, path=SHIM).returncode == 0, "again"
    assert run_install(site, "--remove").returncode == 0 and not list(tmp_path.iterdir())
    assert run_install(site, "--remove").returncode == 0


def as_link(target: Path, victim: Path) -> None:
    target.symlink_to(victim)


def as_link_to_nothing(target: Path, victim: Path) -> None:
    victim.unlink()
    target.symlink_to(victim)


def as_link_to_ours(target: Path, victim: Path) -> None:
    victim.write_text(f"{SHIM}\n")
    target.symlink_to(victim)


def as_hard_link(target: Path, victim: Path) -> None:
    target.hardlink_to(victim)


def as_file(target: Path, victim: Path) -> None:
    target.write_text(f"import os\n{SHIM}\n")


def as_large_file(target: Path, victim: Path) -> None:
    target.write_text("/x" * 5000 + f"{SHIM}\n")


def as_pipe(target: Path, victim: Path) -> None:
    os.mkfifo(target)


def as_folder(target: Path, victim: Path) -> None:
    target.mkdir()


@pytest.mark.parametrize("arguments", [(), ("--remove",)], ids=["install", "remove"])
@pytest.mark.parametrize(
    "make",
    [as_link, as_link_to_nothing, as_link_to_ours, as_hard_link, as_file, as_large_file, as_pipe, as_folder],
    ids=lambda make: make.__name__,
)
def test_install_leaves_what_it_did_not_write(tmp_path: Path, make: Any, arguments: tuple[str, ...]) -> None:
    """Neither overwritten, nor written through, nor deleted, nor waited for."""
    site, victim = tmp_path / "site", tmp_path / "victim"
    site.mkdir()
    victim.write_text("precious")
    make(site / FILE, victim)

    def state() -> list[Any]:
        there = [victim, site / FILE]
        return [[os.path.lexists(each), each.is_file() and each.read_bytes()] for each in there] + [os.listdir(site)]

    before = state()
    refused = CliRunner().invoke(install, [f"--site={site}", *arguments])
    assert refused.exit_code == 1 and "left unchanged" in refused.stderr, refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and state() == before


def test_a_file_that_changes_while_it_is_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at it and its removal another program puts its own file there."""
    target = tmp_path / FILE
    target.write_text(f"{SHIM}\n")
    rename = os.rename

    def late(source: str, *more: Any, **places: Any) -> None:
        if source == FILE:
            target.unlink()
            target.write_text("precious")
        rename(source, *more, **places)

    monkeypatch.setattr(os, "rename", late)
    done = CliRunner().invoke(install, [f"--site={tmp_path}", "--remove"])
    assert done.exit_code == 1 and target.read_text() == "precious" and os.listdir(tmp_path) == [FILE]
