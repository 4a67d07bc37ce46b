"""``python bench/gpu.py [first|more] [--out FOLDER] [--wheels FOLDER]``: what ``make gpu`` and ``make gpu-more`` run.

Steps are run one after the other, each with a limit, all of them within ten minutes: a machine with a GPU is often lent
for no longer. A step that fails, or runs past its limit, does not keep the others from running; the exit status is 1 at
the end. What each one wrote is in a file of its name, and what matters of that in ``summary.txt``: read that first,
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
TOTAL_S: Final = 560.0  # of all steps: ten minutes, less what a lent machine needs to begin and to send files back
PAUSE_S: Final = 10.0  # from asking a command to end to ending it
LINES_MAX: Final = 25  # of a command, in the summary
TELLING: Final = re.compile(r"FAILED|ERROR|passed|failed|no tests|kvstore: |gpu_probe: | s\)| s, FAILED\)|Invalid")
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
    """Commands that run at the same time, by the name of their file."""

    limit_s: float
    commands: Mapping[str, Sequence[str]]


def in_turn(jobs: int, *tests: str, only: str = "") -> tuple[str, ...]:
    """pytest over these, with that many processes: each of them has a context of the device, of half a gigabyte."""
    return (*PYTEST, "-n", str(jobs), *tests, *(("-k", only) if only else ()))


def steps_of(which: str, out: Path) -> list[Step]:
    """``first``: is it right, and how fast are copies; ``more``: what takes longer."""
    if which == "first":
        devices = in_turn(
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
            Step(115, {"devices": devices, "kernels": in_turn(8, "tests/kernels/test_triton.py")}),
            Step(150, {"engines": in_turn(10, *engines, only="cuda")}),
            Step(60, {"rows": (*ROWS, *HBM_ROWS, "--runs", "2", "--json")}),
        ]
    checks = {
        "memcheck_copies": (*MEMCHECK, *PYTEST, "tests/tier/test_contract.py", "-k", "GPU and overlap"),
        "memcheck_kernels": (*MEMCHECK, *PYTEST, "tests/kernels/test_triton.py", "-k", "half_precision or not_read"),
    }
    return [
        Step(200, {"handoffs": in_turn(10, "tests/engine/test_handoff_tokens.py", only="cuda")}),
        Step(150, {"rows": (*ROWS, *ENGINE_ROWS, "--device", "cuda:0", "--runs", "2", "--json")}),
        *(Step(80, {name: command}) for name, command in checks.items() if shutil.which(MEMCHECK[0])),
    ]


# --- Running them ---------------------------------------------------------------------------------------------------


class Summary:
    """What is printed, and kept in ``summary.txt``."""

    def __init__(self, out: Path) -> None:
        self._file = (out / "summary.txt").open("w")

    def say(self, line: str) -> None:
        """Add a line."""
        print(line, flush=True)
        print(line, file=self._file, flush=True)


def run(steps: Sequence[Step], out: Path, summary: Summary, total_s: float = TOTAL_S) -> list[str]:
    """Run all steps; the names of commands that failed or were ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # commands ignore it where a shell started us with "&"
    end_s, failed = time.monotonic() + total_s, list[str]()
    for step in steps:
        left_s = end_s - time.monotonic()
        summary.say(f"== {', '.join(step.commands)} ({left_s:.0f} s left)")
        limit_s = min(step.limit_s, left_s)
        if limit_s < 1:
            summary.say("not run: no time is left")
            failed += step.commands
            continue
        for name, code in _together(step, out, time.monotonic() + limit_s).items():
            _tell(name, code, out, summary)
            failed += [name] if code != "0" else []
    return failed


def _together(step: Step, out: Path, end_s: float) -> dict[str, str]:
    """Run the commands of a step at the same time; how each one ended."""
    children = {}
    for name, command in step.commands.items():
        text, numbers = out / f"{name}.txt", out / f"{name}.json"  # JSON is written into a file of its own
        with text.open("w") as errors, numbers.open("w") if "--json" in command else text.open("a") as output:
            children[name] = subprocess.Popen(
                command, stdout=output, stderr=errors, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True
            )
    return {name: _ended(child, end_s) for name, child in children.items()}


def _ended(child: subprocess.Popen[bytes], end_s: float) -> str:
    """Wait for a command. Past its limit it is interrupted, so that pytest writes its summary, then killed."""
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
    """End it and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _tell(name: str, code: str, out: Path, summary: Summary) -> None:
    lines = (out / f"{name}.txt").read_text(errors="replace").splitlines()
    telling = [line[:400] for line in lines if TELLING.search(line)]
    summary.say(f"-- {name}: {'well' if code == '0' else f'FAILED ({code})'}")
    for line in (telling or lines)[-LINES_MAX:]:
        summary.say(line)


# --- Setting up -----------------------------------------------------------------------------------------------------


def set_up(wheels: Path | None, shm: str) -> None:
    """Packages of a folder, for this run alone; and more shared memory, where that is asked for.

    Raises:
        CalledProcessError: pip does not take the wheels.
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
    """What the machine is, in ``machine.txt``."""
    commands = ("nvidia-smi", "nvidia-smi topo -m", "uname -a", "lscpu", "free -m", "df -h /dev/shm /tmp /var/tmp")
    with (out / "machine.txt").open("w") as file:
        for command in (*commands, f"{sys.executable} -m pip list"):
            print(f"$ {command}", file=file, flush=True)
            if shutil.which(command.split()[0]):
                subprocess.run(command.split(), stdout=file, stderr=file, check=False, timeout=30)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="All that is to be tried on a machine with a GPU.")
    parser.add_argument("which", nargs="?", choices=("first", "more"), default="first")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="folder of all that is written")
    parser.add_argument("--wheels", type=Path, help="folder of packages that the machine lacks")
    parser.add_argument("--shm", default="", help="remount /dev/shm with that size, such as 48G")
    options = parser.parse_args()
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    set_up(options.wheels, options.shm)
    if subprocess.run([*PYTHON, "-c", CHECK], cwd=ROOT, check=False).returncode:
        return 1
    describe(out)
    summary = Summary(out)
    failed = run(steps_of(options.which, out), out, summary, TOTAL_S - (time.monotonic() - begin_s))
    summary.say(f"== {'failed: ' + ', '.join(failed) if failed else 'all is well'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
