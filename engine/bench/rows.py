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

IDEAL = Bar(1.2, at_least=False)
STEP = Bar(1.15, at_least=False)
MOUNTED = Bar(1.05, at_least=False)
HOOK = Bar(0.8)
STORES = Bar(1.03, at_least=False)
DECIDE = Bar(0.0003, at_least=False, of_ratio=False, unit="s")
ONCE = Bar(2.0, at_least=False, of_ratio=False)
TURN = Bar(0.0002, at_least=False, of_ratio=False, unit="s")


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
    Row("reuse_dram", "TTFT of 1k-8k tokens computed again / found in DRAM", None, late("reuse", "reuse", tier="dram")),
    Row("reuse_nvme", "TTFT of 1k-8k tokens computed again / found on NVMe", None, late("reuse", "reuse", tier="nvme")),
    Row(
        "reuse_hbm",
        "TTFT of 1k-8k tokens computed again / found in the arena; .dram: found in DRAM / in the arena",
        None,
        late("reuse", "arena"),
    ),
    Row("reuse_pays", "cached tokens from which on reuse brings the first token earlier", None, late("reuse", "pays")),
    Row(
        "notebook",
        "transformers' generate, a prompt of 2k tokens the first time / again",
        None,
        late("notebook", "notebook"),
    ),
    *(
        Row(
            f"handoff_{round(100 * ratio):03d}",
            f"2nd token of a prompt handed over, transfer = {ratio:g} x prefill / without; .ideal: / ideal pipeline",
            IDEAL,
            late("handoff", "handoff", ratio=ratio),
        )
        for ratio in (0.25, 0.5, 1.0)
    ),
    Row(
        "neighbours",
        "p99 gap of running answers while long prompts come in, packed or handed over / in quiet",
        None,
        late("neighbours", "neighbours"),
    ),
    Row("turn_64", "deciding a turn of 64 sequences / counting its tokens", TURN, late("turn", "turn", sequences=64)),
    *(
        Row(
            f"route_{engines}",
            f"a conductor's decision about a request, {engines} engines, an index of 1 M pages / looking pages up",
            DECIDE if engines == 64 else None,
            late("decisions", "decisions", engines=engines),
        )
        for engines in (16, 64, 256)
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
    *(
        Row(
            f"engine_step_{batch}",
            f"an engine's whole decode step of {batch} / a bare forward over a contiguous cache",
            STEP,
            late("engine_step", "engine_step", batch=batch),
        )
        for batch in (1, 8)
    ),
    Row(
        "mounted_step_8",
        "a decode step of 8 of an engine whose arena other processes may read / of one whose arena is its own",
        MOUNTED,
        late("engine_step", "mounted_step", batch=8),
    ),
    *(
        Row(
            f"compress_{codec}_{dtype}",
            f"pages of {dtype} to {codec} and back / memcpy of the exact bytes",
            None,
            late("compression", "speed", codec=codec, dtype=dtype),
        )
        for codec in ("int8",)
        for dtype in ("bfloat16", "float32")
    ),
    *(
        Row(
            f"compress_logits_{family}",
            f"a small {family}: bytes saved, error of logits",
            None,
            late("compression", "logits", number=number),
        )
        for number, family in enumerate(("llama", "qwen3", "mla"))
    ),
    Row(
        "conductor_policies",
        "TTFT of a generated conversation by policy and load, eight paced engines; reuse, refusals, goodput beside",
        None,
        late("routing", "policies"),
    ),
    Row(
        "conductor_burst",
        "how often the prefix of 1,000 equal prompts is computed, eight paced engines; .one: the busiest one's part",
        ONCE,
        late("routing", "burst"),
    ),
    Row(
        "conductor_real",
        "TTFT of a generated conversation by policy, two engines that compute with the demo's model",
        None,
        late("routing", "real"),
    ),
    Row(
        "conductor_roles",
        "goodput 30 s after the mix has turned, roles follow it, six paced engines / the best fixed split's",
        Bar(0.9, of_ratio=False),
        late("roles", "roles"),
    ),
    Row("http_first", "first event of a stream through the HTTP door / a bare server", None, late("door", "first")),
    Row("http_rate", "whole answers per second through the HTTP door / a bare server", None, late("door", "rate")),
    Row(
        "http_streams",
        "events per second of 500 open streams, HTTP door / a bare server",
        None,
        late("door", "streams"),
    ),
)
