"""Which ways there are to devices, as a process of its own tells, and in one line where there are none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvstore.device import cuda, cuda_driver
from kvstore.device.host_device import HostDevice
from kvstore.errors import Unavailable
from kvstore.node.operator.device_paths import DevicePaths, copy_both_ways, no_devices, peers_of, probe_in_process


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_without_a_driver_nobody_is_asked() -> None:
    found = DevicePaths([]).look()
    if cuda_driver.absent():
        assert found == {"missing": "no NVIDIA driver", "devices": {}, "paths": {}}
    else:
        assert found["missing"] == "the NVIDIA driver is being asked"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.kill(os.getpid(), 11)", "asking the NVIDIA driver ended with SIGSEGV"),
        ("raise SystemExit(3)", "asking the NVIDIA driver ended with 3"),
        ("print('[]')", "asking the NVIDIA driver ended with 0"),
    ],
)
def test_a_process_that_breaks_is_one_line(code: str, words: str) -> None:
    assert probe_in_process(python(code), 100) == no_devices(words)


def test_a_process_that_hangs_costs_its_deadline() -> None:
    assert probe_in_process(python("import time; time.sleep(100)"), 0.2) == no_devices(
        "the NVIDIA driver did not answer in 0.2 s"
    )


def test_bytes_come_there_and_back() -> None:
    assert copy_both_ways(HostDevice()) == ""
    device = HostDevice()
    device.lose()
    with pytest.raises(Unavailable):
        copy_both_ways(device)


def test_which_devices_reach_each_other() -> None:
    one, two = HostDevice("host:1"), HostDevice("host:2", reaches=["host:1"])
    assert peers_of([one]) == "" == peers_of([two])
    assert peers_of([one, two]) == "through the host for host:1 from host:2"
    assert peers_of([HostDevice("host:1", reaches=["host:2"]), two]) == ""


@pytest.mark.skipif(bool(cuda.find().missing), reason=f"ways to a GPU: {cuda.find().missing}")
def test_a_gpu_has_its_ways(tmp_path: Path) -> None:
    """Engines and the kernel work wherever there is a device; what does not says why, in one line."""
    (nvme := tmp_path / "nvme").write_bytes(bytes(16 << 20))
    report = probe_in_process([sys.executable, "-m", "kvstore.node.operator.device_paths", str(nvme)], 100)
    assert report["missing"] == "" and report["devices"]["cuda:0"]
    paths = report["paths"]
    assert [*paths] == ["engines", "kernel", "peers", "gds", "nixl"]
    assert paths["kernel"] == "" and paths["engines"] in (
        "",
        "the driver is older than CUDA 12.8: each piece is a call",
    )
    assert all("\n" not in why for why in paths.values())
