"""The Triton kernels compile for GPUs, whether there is one or not, and fit into what a multiprocessor has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.engines.interpreter import ABSENT

ROOT = Path(__file__).resolve().parents[2]
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # CUDA C++ Programming Guide, compute capabilities

if ABSENT:
    pytest.skip(ABSENT, allow_module_level=True)


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_kernels_compile_and_fit(arch: int, tmp_path: Path) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.helpers.workers.triton_compile", str(arch)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 16
    assert all(each["shared"] <= SHARED_BYTES[arch] for each in made), made
