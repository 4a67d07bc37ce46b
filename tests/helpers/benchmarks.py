"""``kvstore bench --quick`` as a process that is ended whatever happens, and its lines."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.helpers.nursery import Nursery
from tests.helpers.processes import Process

QUICK_S = 300  # an end for what hangs; half a minute on two quiet cores
STOP_S = 60.0


def run_quick(logs: Path, *rows: str, nursery: Nursery | None = None) -> dict[str, dict[str, Any]]:
    """The lines by name; nothing is left behind. ``nursery``: what it is forked by, and all that it starts."""
    folder = logs / "measured"
    folder.mkdir()
    command = [sys.executable, "-m", "kvstore", "bench", "--quick", "--json", "--dir", str(folder), *rows]
    process = Process(command, os.environ, logs / "bench.log", nursery)
    try:
        code = process.wait(QUICK_S)
    except BaseException:
        process.signal(signal.SIGINT)  # it ends what it has started
        process.wait(STOP_S)
        raise
    assert code == 0, process.trace()
    document = json.loads(process.output())
    assert document["machine"]["cores"] >= 1 and not document["failed"]
    shm_dir = os.environ.get("KVSTORE_SHM_DIR") or "/dev/shm"
    assert not [name for name in os.listdir(shm_dir) if name.startswith(f"kvstore-bench-{process.pid}-")]
    assert not list(folder.iterdir())
    return {line["name"]: line for line in document["rows"]}
