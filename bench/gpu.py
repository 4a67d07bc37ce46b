"""``python bench/gpu.py [first|more] [--out FOLDER] [--wheels FOLDER]``: the commands of ``make gpu`` and
``make gpu-more``.

Steps run one after the other. Each has a time limit, and all together take less than ten minutes, because a machine
with a GPU is often lent for no longer. If a step fails or exceeds its limit, the others still run, and the exit status
is 1. Each command writes its output to a file with its name. ``summary.txt`` has the important lines: read it first,
then ``probe.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
TOTAL_S: Final = 560.0  # all steps: ten minutes, minus the time to start the machine and to send files back
PAUSE_S: Final = 10.0  # from the interrupt of a command to its kill
LINES_MAX: Final = 25  # lines of one command in the summary
SUMMARY_LINE: Final = re.compile(r"FAILED|ERROR|passed|failed|no tests|kvstore: |gpu_probe: | s\)| s, FAILED\)|Invalid")
CHECK: Final = """
import sys
from kvstore.device import cuda

missing = cuda.find().missing
sys.exit(missing and f"gpu: no GPU here: {missing}")
"""

PYTHON: Final = (sys.executable,)
PYTEST: Final = (*PYTHON, "-m", "pytest", "-q", "-rfEs", "--no-header", "-p", "no:cacheprovider", "--timeout", "150")
ROWS: Final = (*PYTHON, str(ROOT / "bench" / "run.py"))
MEMCHECK: Final = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9")
HBM_ROWS: Final = tuple(f"hbm_{verb}_{size}" for size in ("2m", "64k") for verb in ("read", "write", "both"))
ENGINE_ROWS: Final = ("reuse_dram", "reuse_hbm", "prefill_stores", "decode_step_1", "decode_step_8")


class Step(NamedTuple):
    """Commands that run at the same time, by name. The name is also that of the output file."""

    limit_s: float
    commands: Mapping[str, Sequence[str]]


def pytest_of(jobs: int, *tests: str, only: str = "") -> tuple[str, ...]:
    """Return the pytest command for ``tests`` in ``jobs`` processes. Each process has its own device context of half a
    gigabyte."""
    return (*PYTEST, "-n", str(jobs), *tests, *(("-k", only) if only else ()))


def steps_of(which: str, out: Path) -> list[Step]:
    """Return the steps of ``first`` (correctness, and the speed of copies) or of ``more`` (tests and rows that take
    longer)."""
    if which == "first":
        devices = pytest_of(
            5,
            *(f"tests/tier/test_{name}.py" for name in ("device_contract", "cuda", "cuda_device", "cuda_kernels")),
            "tests/tier/test_contract.py",
            "tests/client/test_torch_buffers.py",
            "tests/client/test_peer_devices.py",
            "tests/transfer/test_device_paths.py",
            only="GPU or cuda or torch or any_device or device_paths",
        )
        engines = (f"tests/engine/test_{name}.py" for name in ("tokens", "keeping", "sharing"))
        return [
            Step(215, {"probe": (*PYTHON, str(ROOT / "bench" / "gpu_probe.py"), "--out", str(out))}),
            Step(115, {"devices": devices, "kernels": pytest_of(8, "tests/kernels/test_triton.py")}),
            Step(150, {"engines": pytest_of(10, *engines, only="cuda")}),
            Step(60, {"rows": (*ROWS, *HBM_ROWS, "--runs", "2", "--json")}),
        ]
    checks = {
        "memcheck_copies": (*MEMCHECK, *PYTEST, "tests/tier/test_contract.py", "-k", "GPU and overlap"),
        "memcheck_kernels": (*MEMCHECK, *PYTEST, "tests/kernels/test_triton.py", "-k", "half_precision or not_read"),
    }
    return [
        Step(200, {"handoffs": pytest_of(10, "tests/engine/test_handoff_tokens.py", only="cuda")}),
        Step(150, {"rows": (*ROWS, *ENGINE_ROWS, "--device", "cuda:0", "--runs", "2", "--json")}),
        *(Step(80, {name: command}) for name, command in checks.items() if shutil.which(MEMCHECK[0])),
    ]


# --- Running the steps ----------------------------------------------------------------------------------------------


class Summary:
    """Lines that are printed, and written to ``summary.txt``."""

    def __init__(self, out: Path) -> None:
        self._file = (out / "summary.txt").open("w")

    def say(self, line: str) -> None:
        """Print and write one line."""
        print(line, flush=True)
        print(line, file=self._file, flush=True)


def run(steps: Sequence[Step], out: Path, summary: Summary, total_s: float = TOTAL_S) -> list[str]:
    """Run all steps; return the names of the commands that failed or exceeded their limit."""
    # Commands inherit an ignored SIGINT if a shell started this one with "&".
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_s, failed = time.monotonic() + total_s, list[str]()
    for step in steps:
        remaining_s = end_s - time.monotonic()
        summary.say(f"== {', '.join(step.commands)} ({remaining_s:.0f} s left)")
        limit_s = min(step.limit_s, remaining_s)
        if limit_s < 1:
            summary.say("not run: no time is left")
            failed += step.commands
            continue
        for name, code in _together(step, out, time.monotonic() + limit_s).items():
            _summarize(name, code, out, summary)
            failed += [name] if code != "0" else []
    return failed


def _together(step: Step, out: Path, end_s: float) -> dict[str, str]:
    """Run the commands of a step at the same time; return how each one ended."""
    children = {}
    for name, command in step.commands.items():
        text, numbers = out / f"{name}.txt", out / f"{name}.json"  # JSON output has its own file
        with text.open("w") as errors, numbers.open("w") if "--json" in command else text.open("a") as output:
            children[name] = subprocess.Popen(
                command, stdout=output, stderr=errors, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True
            )
    return {name: _ending(child, end_s) for name, child in children.items()}


def _ending(child: subprocess.Popen[bytes], end_s: float) -> str:
    """Wait for a command; return its exit code. At its limit interrupt it, so that pytest writes its summary, and then
    kill it."""
    try:
        return str(child.wait(max(0.0, end_s - time.monotonic())))
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(PAUSE_S)
    finally:
        if child.poll() is None or child.returncode:
            _kill_group(child)
    return "ended at its limit"


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _summarize(name: str, code: str, out: Path, summary: Summary) -> None:
    lines = (out / f"{name}.txt").read_text(errors="replace").splitlines()
    important = [line[:400] for line in lines if SUMMARY_LINE.search(line)]
    summary.say(f"-- {name}: {'well' if code == '0' else f'FAILED ({code})'}")
    for line in (important or lines)[-LINES_MAX:]:
        summary.say(line)


# --- Setting up -----------------------------------------------------------------------------------------------------


def set_up(wheels: Path | None, shm: str) -> None:
    """Install the wheels of a folder for this run only, and enlarge /dev/shm if ``shm`` is a size.

    Raises:
        CalledProcessError: pip cannot install the wheels.
    """
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if wheels is not None:
        site = tempfile.mkdtemp(prefix="kvstore-gpu-")
        pip = (*PYTHON, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-cache-dir", "--target", site)
        subprocess.run([*pip, *map(str, sorted(wheels.glob("*.whl")))], check=True)
        path.insert(0, site)
    if shm:
        subprocess.run(["mount", "-o", f"remount,size={shm}", "/dev/shm"], check=False)
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def describe(out: Path) -> None:
    """Describe the machine in ``machine.txt``."""
    commands = ("nvidia-smi", "nvidia-smi topo -m", "uname -a", "lscpu", "free -m", "df -h /dev/shm /tmp /var/tmp")
    with (out / "machine.txt").open("w") as file:
        for command in (*commands, f"{sys.executable} -m pip list"):
            print(f"$ {command}", file=file, flush=True)
            if shutil.which(command.split()[0]):
                subprocess.run(command.split(), stdout=file, stderr=file, check=False, timeout=30)


def main() -> int:
    """Run the steps; return 1 if a command failed or if there is no GPU."""
    parser = argparse.ArgumentParser(description="Runs the tests and measurements that need a GPU.")
    parser.add_argument("which", nargs="?", choices=("first", "more"), default="first")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder for all output")
    parser.add_argument("--wheels", type=Path, help="folder with the wheels of packages that the machine lacks")
    parser.add_argument("--shm", default="", help="remount /dev/shm with that size, such as 48G")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    set_up(options.wheels, options.shm)
    if subprocess.run([*PYTHON, "-c", CHECK], cwd=ROOT, check=False).returncode:
        return 1
    describe(out)
    summary = Summary(out)
    failed = run(steps_of(options.which, out), out, summary, TOTAL_S - (time.monotonic() - start_s))
    summary.say(f"== {'failed: ' + ', '.join(failed) if failed else 'all is well'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
