"""``kvstore bench --quick`` as a process that is ended whatever happens, and its lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

QUICK_S = 300  # an end for what hangs; half a minute on two quiet cores
STOP_S = 60.0


def run_quick(folder: Path, *rows: str) -> dict[str, dict[str, Any]]:
    """The lines by name; nothing is left behind."""
    command = [sys.executable, "-m", "kvstore", "bench", "--quick", "--json", "--dir", str(folder), *rows]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, complaints = process.communicate(timeout=QUICK_S)
    except BaseException:
        process.send_signal(signal.SIGINT)  # it ends what it has started
        process.communicate(timeout=STOP_S)
        raise
    assert process.returncode == 0, complaints
    document = json.loads(output)
    assert document["machine"]["cores"] >= 1 and not document["failed"]
    shm_dir = os.environ.get("KVSTORE_SHM_DIR") or "/dev/shm"
    assert not [name for name in os.listdir(shm_dir) if name.startswith(f"kvstore-bench-{process.pid}-")]
    assert not list(folder.iterdir())
    return {line["name"]: line for line in document["rows"]}
