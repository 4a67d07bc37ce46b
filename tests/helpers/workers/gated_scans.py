"""``kvstore`` whose scans go on only so far: ``python -m tests.helpers.workers.gated_scans GATE serve ...``.

The file GATE says how many extents of its scan may have begun, so that others see it at work for as long as they
look.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore.cli.main import main
from kvstore.node.scanner import Scanner
from kvstore.tier.nvme.frame_header import FrameHeader

LOOK_S = 0.01


def gate_scans(gate: Path) -> None:
    """Have every scan of this process wait at the gate."""
    scan, begun = Scanner._scan, 0

    def scan_slowly(*arguments: Any) -> Iterator[FrameHeader]:
        nonlocal begun
        begun += 1
        while begun > int(gate.read_text() or 0):
            time.sleep(LOOK_S)
        yield from scan(*arguments)

    Scanner._scan = scan_slowly  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    gate_scans(Path(sys.argv.pop(1)))
    main()
