"""What `make gpu` runs on a machine with a GPU, as far as that goes without one: its order, limits and exit status, and
those items of the probe that need no PyTorch, over a driver that is carried out in host memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench import gpu, gpu_probe
from kvstore.device import cuda
from tests.helpers.fake_driver import FakeDriver, faked, has_driver

PYTHON = (sys.executable, "-c")
SLEEPS = "import time; time.sleep(300)"

without_a_driver = pytest.mark.skipif(has_driver(), reason="a driver is here")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[cuda.CudaDevice]:
    small = {"PINNED_BYTES": 1 << 20, "COPIED_BYTES": 1 << 20, "PIECES": (4096, 65536), "TOTALS": (1 << 20,)}
    for name, value in (small | {"REPEATS": 1, "CALLS": 20}).items():
        monkeypatch.setattr(gpu_probe, name, value)
    with faked(monkeypatch, FakeDriver()) as found:
        yield found


# --- The probe ------------------------------------------------------------------------------------------------------


@without_a_driver
@pytest.mark.parametrize("script", ["gpu.py", "gpu_probe.py"])
def test_without_a_gpu_there_is_one_line_and_a_failure(script: str, tmp_path: Path) -> None:
    command = [sys.executable, str(gpu.ROOT / "bench" / script), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == f"{script.removesuffix('.py')}: no GPU here: no NVIDIA driver\n"


def test_an_item_that_crashes_or_hangs_does_not_end_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    hangs = ("bash", "-c", f"sleep 300 & echo $! > {pid}; wait")
    items = [
        ("crashes", (*PYTHON, "import os; os.abort()"), 60.0),
        ("fails", (*PYTHON, "raise RuntimeError('no such call')"), 60.0),
        ("hangs", hangs, 3.0),
        ("says nothing", (*PYTHON, ""), 60.0),
        ("answers", (*PYTHON, "print('a warning'); print('{\"a\": 1}')"), 60.0),
    ]
    assert gpu_probe.probe(items, tmp_path) == ["crashes", "fails", "hangs", "says nothing"]
    found = json.loads((tmp_path / "probe.json").read_text())
    assert found["crashes"].startswith("SIGABRT") and "no such call" in found["fails"]
    assert found["hangs"] == "did not end in 3 s" and found["answers"] == {"a": 1}
    assert len(capsys.readouterr().out.splitlines()) == len(items)
    assert not _runs(int(pid.read_text())), "what it started is ended with it"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", ["opening", "attributes", "answers", "pinning", "bandwidth", "python_us"])
def test_items_over_a_driver_in_host_memory(device: cuda.CudaDevice, name: str) -> None:
    found = gpu_probe.ITEMS[name].measure()
    assert json.loads(json.dumps(found)), "it can be kept"
    expected = {
        "opening": {"batches": True, "kernel_missing": "", "model": "Fake"},
        "attributes": {"READ_ONLY_HOST_REGISTER_SUPPORTED": 1},
        "answers": {"reach_itself": "", "pageable_bytes_right": True},
        "pinning": {"read_only": "taken"},
        "bandwidth": {},
        "python_us": {},
    }[name]
    assert found.items() >= expected.items(), found
    if name == "bandwidth":
        assert all(isinstance(value, float) for value in found.values()), found
        assert {f"64k_of_1m_{way}_{how}" for way in ("to_device", "to_host") for how in ("engines", "kernel")} <= set(
            found
        )


def test_an_item_that_there_is_not_is_refused() -> None:
    command = [sys.executable, str(gpu.ROOT / "bench" / "gpu_probe.py"), "bandwith"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "items: unknown item (got 'bandwith')" in done.stderr


# --- The steps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], str]]:
    def runs(steps: list[gpu.Step], total_s: float = 60.0) -> tuple[list[str], str]:
        failed = gpu.run(steps, tmp_path, gpu.Summary(tmp_path), total_s)
        return failed, (tmp_path / "summary.txt").read_text()

    monkeypatch.setattr(gpu, "PAUSE_S", 2.0)
    return runs


def test_all_steps_run_after_one_that_fails(run: Callable[..., tuple[list[str], str]], tmp_path: Path) -> None:
    numbers = (*PYTHON, "import sys; print('{}'); print('kvstore: no bar', file=sys.stderr)", "--json")
    failed, summary = run(
        [
            gpu.Step(60, {"wrong": (*PYTHON, "print('1 failed'); raise SystemExit(3)"), "right": (*PYTHON, "")}),
            gpu.Step(60, {"rows": numbers}),
        ]
    )
    assert failed == ["wrong"]
    assert (
        "-- wrong: FAILED (3)\n1 failed\n-- right: well\n" in summary and "-- rows: well\nkvstore: no bar\n" in summary
    )
    assert (tmp_path / "rows.json").read_text() == "{}\n" and (tmp_path / "wrong.txt").read_text() == "1 failed\n"


def test_a_step_past_its_limit_is_ended_and_says_what_it_has(run: Callable[..., tuple[list[str], str]]) -> None:
    says = ("bash", "-c", "trap 'echo 5 passed; exit 2' INT; sleep 300 & wait")
    deaf = ("bash", "-c", "trap '' INT; sleep 300")
    steps = [gpu.Step(3, {"slow": says, "deaf": deaf}), gpu.Step(60, {"after": (*PYTHON, "")})]
    begin_s = time.monotonic()
    failed, summary = run(steps)
    assert time.monotonic() - begin_s < 60
    assert failed == ["slow", "deaf"] and "-- slow: FAILED (ended at its limit)\n5 passed\n" in summary
    assert "-- after: well" in summary


def test_steps_for_which_no_time_is_left_are_named(run: Callable[..., tuple[list[str], str]]) -> None:
    steps = [gpu.Step(60, {"slow": (*PYTHON, SLEEPS)}), gpu.Step(60, {"late": (*PYTHON, "")})]
    assert run(steps, 2.0)[0] == ["slow", "late"]


@pytest.mark.parametrize("which", ["first", "more"])
def test_what_is_run_is_there_and_ends_within_ten_minutes(which: str, tmp_path: Path) -> None:
    steps = gpu.steps_of(which, tmp_path)
    assert sum(step.limit_s for step in steps) <= gpu.TOTAL_S < 600
    told = [word for step in steps for command in step.commands.values() for word in command]
    assert all((gpu.ROOT / word).exists() for word in told if word.endswith(".py"))
    rows = subprocess.check_output([*gpu.ROWS, "--list"], text=True, env={**os.environ, "PYTHONPATH": ""}, timeout=60)
    assert all(name in rows for name in (*gpu.HBM_ROWS, *gpu.ENGINE_ROWS))
