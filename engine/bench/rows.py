"""The rows that engines add to ``kvstore bench``, through the entry point ``kvstore.bench_rows``.

The module that measures a row, and torch with it, is imported only when the row runs. So listing rows is quick.
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


def lazy(module: str, function: str, **arguments: object) -> Measure:
    """Return a function that imports a module of this package and calls one of its functions.

    It raises BenchFailed if a required package is not installed.
    """

    def measure(stage: Stage, name: str, bar: Any) -> list[Result]:
        try:
            measure_row = getattr(importlib.import_module(f"engine.bench.{module}"), function)
        except ModuleNotFoundError as error:
            raise BenchFailed(f"{name}: needs the Python module {error.name}, which is not installed") from error
        results: list[Result] = measure_row(stage, name, bar, **arguments)
        return results

    return measure


ROWS = (
    Row("reuse_dram", "TTFT of 1k-8k tokens computed again / found in DRAM", None, lazy("reuse", "reuse")),
    Row(
        "reuse_hbm",
        "TTFT of 1k-8k tokens computed again / found in the arena; .dram: found in DRAM / in the arena",
        None,
        lazy("reuse", "arena"),
    ),
    Row("hook_layer", "writing a layer of a chunk to the pool / memcpy", HOOK, lazy("hook", "hook")),
    Row(
        "prefill_stores",
        "TTFT of a new prompt that is written to the pool / of one that is not",
        STORES,
        lazy("reuse", "stores"),
    ),
    *(
        Row(
            f"decode_step_{batch}",
            f"decode step of {batch} over pages / over a contiguous cache",
            STEP,
            lazy("decode_step", "decode_step", batch=batch),
        )
        for batch in (1, 8, 16)
    ),
)
