"""Rows that engines add to ``kvstore bench``, by the entry point ``kvstore.bench_rows``.

Listing them loads nothing: what measures a row is imported when the row is run, and torch with it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kvstore.bench.harness import Bar, BenchFailed, Result
from kvstore.bench.rows import Row
from kvstore.bench.stage import Stage

Measure = Callable[[Stage, str, Any], list[Result]]

STEP = Bar(1.15, at_least=False)
HOOK = Bar(0.8)
STORES = Bar(1.03, at_least=False)


def late(module: str, function: str, **arguments: object) -> Measure:
    """``function`` of a module of this package, imported when it is called.

    It raises BenchFailed where a package is missing.
    """

    def measure(stage: Stage, name: str, bar: Any) -> list[Result]:
        try:
            found = getattr(importlib.import_module(f"engine.bench.{module}"), function)
        except ModuleNotFoundError as missing:
            raise BenchFailed(f"{name}: needs the Python module {missing.name}, not found") from missing
        lines: list[Result] = found(stage, name, bar, **arguments)
        return lines

    return measure


ROWS = (
    Row("reuse_dram", "TTFT of 1k-8k tokens computed again / found in DRAM", None, late("reuse", "reuse")),
    Row(
        "reuse_hbm",
        "TTFT of 1k-8k tokens computed again / found in the arena; .dram: found in DRAM / in the arena",
        None,
        late("reuse", "arena"),
    ),
    Row("hook_layer", "writing a layer of a chunk to the pool / memcpy", HOOK, late("hook", "hook")),
    Row(
        "prefill_stores",
        "TTFT of a new prompt that is written to the pool / of one that is not",
        STORES,
        late("reuse", "stores"),
    ),
    *(
        Row(
            f"decode_step_{batch}",
            f"decode step of {batch} over pages / over a contiguous cache",
            STEP,
            late("decode_step", "decode_step", batch=batch),
        )
        for batch in (1, 8, 16)
    ),
)
