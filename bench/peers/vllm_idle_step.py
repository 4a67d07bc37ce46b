"""Measures what our connector costs vLLM in an idle step, which has nothing to load or save.

The cost is the time of all calls that vLLM makes to the connector, on the scheduler's and on the worker's side::

    .venv/bin/python bench/peers/vllm_idle_step.py [--sequences 1,8,64] [--steps N] [--json]
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starting import ROOT, VLLM, VLLM_ENVIRONMENT, VLLM_SETTINGS, node

NODE = "idle-step"
RUN_S = 900.0
PROMPT, PAGE = 70, 64
LOOPS = 1000  # empty calls that are timed after each step
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 32,  # vLLM makes two calls per layer
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@dataclass
class Calls:
    """Counts and times the calls of vLLM to the connector since ``begin``. For one thread.

    Attributes:
        seconds, counts: by side, ``scheduler`` or ``worker``.
        idle: True if the step had nothing to load or save.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    idle: bool = True
    _inside: bool = False

    def begin(self) -> None:
        """Reset all counts for the next step."""
        self.seconds, self.counts, self.idle = {"scheduler": 0.0, "worker": 0.0}, {"scheduler": 0, "worker": 0}, True

    def watch(self, connector: type) -> None:
        """Wrap the public methods of a connector to count and time calls from outside."""
        for name in dir(connector):
            method = getattr(connector, name)
            if not name.startswith("_") and callable(method) and not hasattr(method, "__self__"):
                setattr(connector, name, self._timed(method))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(connector: Any, *args: Any, **more: Any) -> Any:
            if self._inside:
                return call(connector, *args, **more)
            self._inside, side, start_s = True, connector.role.name.lower(), time.perf_counter()
            try:
                outcome = call(connector, *args, **more)
            finally:
                self.seconds[side] += time.perf_counter() - start_s
                self.counts[side] += 1
                self._inside = False
            if call.__name__ == "build_connector_meta" and (outcome.loads or outcome.saves):
                self.idle = False
            return outcome

        return timed


class EmptyConnector:
    """A connector whose only method does nothing."""

    role = SimpleNamespace(name="WORKER")

    def nothing(self) -> None:
        """Do nothing."""


class WatchedEmpty(EmptyConnector):
    """An ``EmptyConnector`` for ``Calls.watch`` to patch."""


def empty_s(connector: EmptyConnector) -> float:
    """Return the seconds of ``LOOPS`` empty calls. They show how fast this machine runs Python at the moment."""
    start_s = time.perf_counter()
    for _ in range(LOOPS):
        connector.nothing()
    return time.perf_counter() - start_s


def engine(options: dict[str, Any]) -> None:
    """Print one line of JSON: for each number of sequences, the calls in each idle step. Runs in vLLM's environment."""
    import numpy as np
    from vllm import LLM, SamplingParams

    from kvstore.adapters.vllm import KVStoreConnector

    calls = Calls()
    calls.begin()
    calls.watch(KVStoreConnector)
    clock = Calls()
    clock.watch(WatchedEmpty)
    empty, watched = EmptyConnector(), WatchedEmpty()
    llm = LLM(
        model=options["model"],
        load_format="dummy",
        block_size=32,
        max_model_len=PROMPT + options["steps"] + PAGE,
        max_num_seqs=max(options["sequences"]),
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.adapters.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"node": NODE},
        },
        **VLLM_SETTINGS,
    )
    random = np.random.default_rng()
    rows = []
    for count in options["sequences"]:
        sampling = SamplingParams(temperature=0, max_tokens=options["steps"], ignore_eos=True, detokenize=False)
        for number in range(count):
            prompt = random.integers(3, 900, PROMPT).tolist()
            llm.llm_engine.add_request(f"{count}-{number}", {"prompt_token_ids": prompt}, sampling)
        row: dict[str, Any] = {"sequences": count, "scheduler": [], "worker": [], "calls": [], "empty": [], "clock": []}
        while llm.llm_engine.has_unfinished_requests():
            calls.begin()
            llm.llm_engine.step()
            if calls.idle and calls.counts["worker"]:
                row["calls"].append([calls.counts["scheduler"], calls.counts["worker"]])
                row["scheduler"].append(calls.seconds["scheduler"])
                row["worker"].append(calls.seconds["worker"])
                row["empty"].append(empty_s(empty))
                clock.begin()
                empty_s(watched)
                row["clock"].append(clock.seconds["worker"])
        rows.append(row)
    print(json.dumps({"rows": rows}), flush=True)


def measure(sequences: list[int], steps: int) -> list[dict[str, Any]]:
    """Return a row for each number of sequences. Raises SystemExit if vLLM fails."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder, node(NODE, "256MiB"):
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        arguments = {"model": folder, "sequences": sequences, "steps": steps}
        command = [str(VLLM), __file__, "--engine", json.dumps(arguments)]
        environment = os.environ | VLLM_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=RUN_S, check=False, cwd=ROOT
        )
    lines = [line for line in run.stdout.splitlines() if line.startswith('{"rows"')]
    if not lines:
        sys.exit(run.stderr[-2000:] or f"vLLM ended with exit code {run.returncode}")
    return [_row(row) for row in json.loads(lines[-1])["rows"]]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return medians, without the cost of timing the calls. ``empty_calls`` is the number of empty calls, timed after
    the same step, that take as long."""
    about: dict[str, Any] = {"sequences": row["sequences"], "steps": len(row["empty"])}
    for at, side in enumerate(("scheduler", "worker")):
        counts = [calls[at] for calls in row["calls"]]
        timed = zip(row[side], counts, row["clock"], row["empty"], strict=True)
        costs = [step - count * (clock - empty) / LOOPS for step, count, clock, empty in timed]
        about[side] = {
            "calls": statistics.median(counts),
            "us": 1e6 * statistics.median(costs),
            "empty_calls": LOOPS * statistics.median(map(operator.truediv, costs, row["empty"])),
        }
    return about


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description="Measures what our connector costs vLLM in a step that moves nothing.")
    parser.add_argument("--sequences", default="1,8,64", help="sequences that decode together")
    parser.add_argument("--steps", type=int, default=400, help="steps per number of sequences (default 400)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        engine(json.loads(options.engine))
        return
    if not VLLM.exists():
        sys.exit("vLLM is not installed; run `make hosts`")
    rows = measure([int(count) for count in options.sequences.split(",")], options.steps)
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
        return
    head = ("sequences", "steps", "side", "calls", "us", "empty calls")
    sys.stdout.write("{:>9}{:>7}  {:10}{:>7}{:>8}{:>13}\n".format(*head))
    for row in rows:
        for side in ("scheduler", "worker"):
            cost = row[side]
            sys.stdout.write(f"{row['sequences']:9}{row['steps']:7}  {side:10}")
            sys.stdout.write(f"{cost['calls']:7.0f}{cost['us']:8.1f}{cost['empty_calls']:13.0f}\n")


if __name__ == "__main__":
    main()
