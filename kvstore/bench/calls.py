"""Row about the length of a put's path: how many Python functions a warm put calls, and in how many files they are.

The store is embedded, so that the daemon's half counts too. Another machine gives the same numbers.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

import numpy as np

import kvstore
from kvstore.bench.content import LAYOUTS, tokens_of
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage

PAGES: Final = 12
WARM: Final = 3  # puts before the one that is counted
GEOMETRY: Final = "4k"


def put(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """``<name>``: calls of Python functions in the thread that puts; ``.files``: the files that they are in."""
    layout = LAYOUTS[GEOMETRY]
    counts, files = list[float](), list[float]()
    rows = np.ones((PAGES, layout.page_bytes), np.uint8)
    with kvstore.open(dram="16MiB", shm_dir=stage.settings.shm_dir) as store:
        cache = store.cache(layout)
        for turn in range(WARM + stage.settings.rounds):
            keys = cache.keys(tokens_of(12, turn, PAGES * layout.page_tokens))
            called: list[str] = []

            def note(frame: FrameType, event: str, argument: object, into: list[str] = called) -> None:
                if event == "call":
                    into.append(frame.f_code.co_filename)

            sys.setprofile(note)
            try:
                stored = cache.put(keys, rows, wait=True)
            finally:
                sys.setprofile(None)
            if stored != PAGES:
                raise BenchFailed(f"put stored {stored} of {PAGES} new pages")
            if turn >= WARM:
                counts.append(len(called))
                files.append(len(set(called)))
    details = {"pages": PAGES}
    return [
        result(name, Kind.TIMES, counts, bar=bar, details=details),
        result(f"{name}.files", Kind.TIMES, files, details=details),
    ]
