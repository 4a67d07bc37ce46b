"""``python -m bench.studies [NAME...]``: measures rows that the docs quote and that ``kvstore bench`` does not have.

Run it by hand on an idle machine, from the root of a checkout with the engine's packages. It uses the harness of
``kvstore bench``. ``bench/README.md`` explains the rows.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.bench.harness import Bar, Result
from kvstore.bench.rows import Row
from kvstore.bench.stage import SCRATCH_DIR, RunSettings, Stage
from kvstore.cli.bench import ROUNDS, measure
from kvstore.errors import KVStoreError

IDEAL = Bar(1.2, at_least=False)
STEP = Bar(1.15, at_least=False)
MOUNTED = Bar(1.05, at_least=False)
DECIDE = Bar(0.0003, at_least=False, of_ratio=False, unit="s")
TURN = Bar(0.0002, at_least=False, of_ratio=False, unit="s")
ONCE = Bar(2.0, at_least=False, of_ratio=False)
ROLES = Bar(0.9, of_ratio=False)
TEN_S = Bar(10.0, at_least=False, of_ratio=False, unit="s")
AHEAD = Bar(1.0, of_ratio=False)


def lazy(module: str, function: str, **arguments: object) -> Callable[[Stage, str, Any], list[Result]]:
    """Return a function that imports a module of this folder only when it is called."""

    def measure_row(stage: Stage, name: str, bar: Any) -> list[Result]:
        measure_lines = getattr(importlib.import_module(f"bench.studies.{module}"), function)
        return list(measure_lines(stage, name, bar, **arguments))

    return measure_row


ROWS = [
    *(
        Row(
            f"handoff_{round(100 * ratio):03d}",
            f"2nd token of a prompt handed over, transfer = {ratio:g} x prefill / without; .ideal: / ideal pipeline",
            IDEAL,
            lazy("handoff", "handoff", ratio=ratio),
        )
        for ratio in (0.25, 0.5, 1.0)
    ),
    Row("turn_64", "deciding a turn of 64 sequences / counting its tokens", TURN, lazy("turn", "turn", sequences=64)),
    *(
        Row(
            f"route_{engines}",
            f"a conductor's decision about a request, {engines} engines, 1 M pages / looking pages up",
            DECIDE if engines == 64 else None,
            lazy("decisions", "decisions", engines=engines),
        )
        for engines in (16, 64, 256)
    ),
    *(
        Row(
            f"engine_step_{batch}",
            f"an engine's whole decode step of {batch} / a bare forward over a contiguous cache",
            STEP,
            lazy("engine_step", "engine_step", batch=batch),
        )
        for batch in (1, 8)
    ),
    Row(
        "mounted_step_8",
        "decode step of 8 of an engine with a mounted arena / with a private arena",
        MOUNTED,
        lazy("engine_step", "mounted_step", batch=8),
    ),
    *(
        Row(
            f"compress_int8_{dtype}",
            f"pages of {dtype} to int8 and back / memcpy of the exact bytes",
            None,
            lazy("compression", "speed", codec="int8", dtype=dtype),
        )
        for dtype in ("bfloat16", "float32")
    ),
    *(
        Row(
            f"compress_logits_{family}",
            f"a small {family}: bytes saved, error of logits",
            None,
            lazy("compression", "logits", number=number),
        )
        for number, family in enumerate(("llama", "qwen3", "mla"))
    ),
    Row(
        "compress_logits_trained",
        "the same for a model that the row trains",
        None,
        lazy("compression", "trained_logits"),
    ),
    Row("conductor_policies", "TTFT by policy and load, eight paced engines", None, lazy("policies", "policies")),
    Row("conductor_burst", "how often the prefix of 1,000 equal prompts is computed", ONCE, lazy("policies", "burst")),
    Row(
        "conductor_roles",
        "goodput with roles that follow the load / with the best fixed split",
        ROLES,
        lazy("roles", "roles"),
    ),
    Row(
        "simulate_12031",
        "CPU time to serve 12,031 requests with 16 simulated engines",
        TEN_S,
        lazy("simulated", "speed"),
    ),
    Row(
        "simulate_policies",
        "mean TTFT of the policy before in FAST'25's order / of this one, simulated",
        AHEAD,
        lazy("simulated", "policies"),
    ),
    Row(
        "what_if_error",
        "mean error of the what-if formulas against the simulation",
        None,
        lazy("simulated", "formulas"),
    ),
]


def main() -> None:
    """Measure the named rows, or all."""
    parser = argparse.ArgumentParser(prog="python -m bench.studies", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(row.name for row in ROWS))
    parser.add_argument("--runs", type=int, default=ROUNDS)
    parser.add_argument(
        "--quick", action="store_true", help="little data: checks that rows work; the numbers mean nothing"
    )
    parser.add_argument("--dir", type=Path, default=SCRATCH_DIR, help="folder on a disk")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_intermixed_args()
    if unknown := set(options.names) - {row.name for row in ROWS}:
        parser.error(f"names: unknown study (got {', '.join(sorted(unknown))})")
    rows = [row for row in ROWS if not options.names or row.name in options.names]
    settings = RunSettings(rounds=1 if options.quick else options.runs, quick=options.quick, dir=options.dir)
    try:
        measure(rows, settings, options.json)
    except KVStoreError as failed:
        raise SystemExit(f"studies: {failed}") from failed


if __name__ == "__main__":
    main()
