"""Starts a node of ours for the scripts of this folder, and has the settings with which they start vLLM on a CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
VLLM = ROOT / ".hosts" / "vllm" / "bin" / "python"
READY_S = 60.0

# One process that contacts no other host and does not pin cores.
VLLM_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
VLLM_SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "gpu_memory_utilization": 0.5,
}


@contextmanager
def node(name: str, dram: str) -> Iterator[None]:
    """Run a node inside the context. The node and its clients use their own folder in shared memory, because the pages
    of a node outlive its process. Raises SystemExit if the node is not ready in time."""
    shared = tempfile.mkdtemp(prefix="peers-", dir="/dev/shm")
    os.environ["KVSTORE_SHM_DIR"] = shared
    command = [sys.executable, "-m", "kvstore", "serve", "--name", name, "--dram", dram]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    try:
        if not first_line(child.stdout, READY_S):
            sys.exit(f"our node ended, or was not ready after {READY_S:g} s")
        yield
    finally:
        child.terminate()
        child.wait(30)
        shutil.rmtree(shared)
        del os.environ["KVSTORE_SHM_DIR"]


def first_line(output: IO[str] | None, timeout_s: float) -> str:
    """Return the first line that a process prints; "" if it ends or prints nothing in time."""
    assert output is not None
    with DefaultSelector() as selector:
        selector.register(output, EVENT_READ)
        return output.readline() if selector.select(timeout_s) else ""
