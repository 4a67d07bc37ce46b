"""Where the programs are that the store is a part of, and workers in them that answer line by line.

`make hosts` installs the programs, each in an environment of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.helpers.processes import Process, wait_until

_ROOT = Path(__file__).resolve().parents[2]
VLLM = _ROOT / ".hosts" / "vllm" / "bin" / "python"
# It runs the code of this tree, asks nobody outside, and is content with one core and a gigabyte.
VLLM_ENV = {
    "PYTHONPATH": str(_ROOT),
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

LMCACHE = _ROOT / ".hosts" / "lmcache" / "bin" / "python"
LMCACHE_LIB = LMCACHE.parents[1] / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
LMCACHE_ENV = {"PYTHONPATH": str(_ROOT), "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}

SGLANG = _ROOT / ".hosts" / "sglang" / "bin" / "python"
SGLANG_ENV = {"PYTHONPATH": str(_ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

# Beside this environment and not in it: where transformers finds accelerate it loads models by it.
PEFT = _ROOT / ".hosts" / "peft" / "peft"
PEFT_ENV = {"PYTHONPATH": f"{_ROOT}:{PEFT.parent}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class AnsweringWorker(Process):
    """A program that prints one JSON document when it is ready, and one for each that it is sent."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lines = 1

    def answers(self) -> list[dict[str, Any]]:
        """All documents that the program has printed."""
        return [json.loads(line) for line in self.output().splitlines() if line.startswith("{")]

    def wait_for(self, lines: int, timeout_s: float) -> dict[str, Any]:
        """The answer with that number, which begins at 1."""
        wait_until("an answer", lambda: len(self.answers()) >= lines or not self.alive, timeout_s)
        assert len(self.answers()) >= lines, self.errors.read_text(errors="replace")[-2000:]
        return self.answers()[lines - 1]

    def ask(self, document: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a document and return its answer."""
        self.stdin.write(json.dumps(document).encode() + b"\n")
        self.stdin.flush()
        self._lines += 1
        return self.wait_for(self._lines, timeout_s)
