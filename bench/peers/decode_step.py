"""Compares the time of a decode step and of a prefill between our engine and vLLM.

Both run on a CPU, with the same weights and prompts. Each engine is a process that is stopped between its turns::

    .venv/bin/python bench/peers/decode_step.py [--sequences 1,8] [--contexts 128,1024] [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import numpy as np
from starting import ROOT, VLLM, VLLM_ENVIRONMENT

ENGINE = Path(__file__).with_name("decode_engine.py")
PRESET, SEED = "small-llama", 5  # 53 million parameters
READY_S, TURN_S = 300.0, 120.0
TIE = 1e-3  # two logits tie if they differ by less than this share of the highest one: float32 sums depend on order


class PausedEngine:
    """An engine in its own process, which is stopped (SIGSTOP) except during ``ask``.

    Life: made, which starts the process -> ``ready`` -> ``ask``, any number of times -> ``close``.
    """

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,  # signals reach its process group, which includes its children
            )
        self._log = log

    def ready(self) -> None:
        """Wait until the engine accepts prompts, and stop it."""
        self._line(READY_S)
        self._signal(signal.SIGSTOP)

    def ask(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Return an answer of ``tokens`` tokens to each prompt, and the arrival times. See ``decode_engine.py``."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(TURN_S))
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """Kill the process group."""
        self._signal(signal.SIGKILL)
        self._process.wait(30)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _line(self, timeout_s: float) -> str:
        """Return the next line of output that is JSON. Raises SystemExit if there is none in time."""
        assert self._process.stdout is not None
        with DefaultSelector() as selector:
            selector.register(self._process.stdout, EVENT_READ)
            while selector.select(timeout_s):
                line = self._process.stdout.readline()
                if not line:
                    break
                if line.startswith("{"):
                    return line
        errors = self._log.read_text().strip().splitlines()
        sys.exit(f"an engine ended or hangs: {errors[-1] if errors else 'no error output'}")


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn: the whole prefill, and the mean step while all sequences decode."""

    prefill_s: float
    step_s: float

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Turn:
        """Compute a turn from the arrival times of tokens. All sequences decode between the latest first token and the
        earliest last token."""
        arrivals: list[list[float]] = answer["arrivals_s"]
        start, stop = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
        steps = sum(start < at <= stop for times in arrivals for at in times) / len(arrivals)
        return cls(start, (stop - start) / steps)


def save_model(folder: Path) -> None:
    """Save a model with random weights, and a tokenizer whose words are numbers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from engine.compute import presets

    net = presets.build(PRESET, SEED)
    net.save_pretrained(folder)
    words = {str(number): number for number in range(net.config.vocab_size)}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")))
    wrapped.save_pretrained(folder)


class Judge:
    """Compares answers with the plain model to see whether the first difference is a tie."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._net: Any = None

    def verdict(self, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
        """Return ``equal``; ``tie`` if the first tokens that differ have nearly equal logits; else ``OTHER``."""
        if ours == theirs:
            return "equal"
        import torch
        from transformers import AutoModelForCausalLM

        if self._net is None:
            self._net = AutoModelForCausalLM.from_pretrained(self._folder).eval()
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        with torch.inference_mode():
            logits = self._net(torch.tensor([prompt + ours[:at]]), logits_to_keep=1).logits[0, -1]
        gap = float((logits[ours[at]] - logits[theirs[at]]).abs())
        return "tie" if gap <= TIE * float(logits.abs().max()) else "OTHER"


def environment(kind: str, threads: int) -> dict[str, str]:
    """Return the environment of an engine's process."""
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    return variables | VLLM_ENVIRONMENT if kind == "vllm" else variables


def measure(
    engines: dict[str, PausedEngine], judge: Judge, sequences: int, context: int, options: argparse.Namespace
) -> dict[str, Any]:
    """Return one row: medians and minima of the turns of each engine. The engines alternate."""
    turns: dict[str, list[Turn]] = {kind: [] for kind in engines}
    verdicts: list[str] = []
    random = np.random.default_rng([sequences, context])
    for number in range(options.rounds + 1):
        prompts = random.integers(3, 250, (sequences, context)).tolist()
        kinds = list(engines)[:: -1 if number % 2 else 1]
        answers = {kind: engines[kind].ask(prompts, options.tokens) for kind in kinds}
        for kind in engines if number else ():  # the first turn of each engine allocates buffers and does not count
            turns[kind].append(Turn.of(answers[kind]))
        for kind in engines.keys() - {"vllm"}:
            triples = zip(prompts, answers[kind]["tokens"], answers["vllm"]["tokens"], strict=True)
            verdicts += [judge.verdict(*triple) for triple in triples]
    row: dict[str, Any] = {"sequences": sequences, "context": context}
    for kind, turns_of_kind in turns.items():
        for what in ("prefill_s", "step_s"):
            seconds = [getattr(turn, what) for turn in turns_of_kind]
            row[f"{kind}_{what}"] = {"median": statistics.median(seconds), "min": min(seconds)}
    for kind in engines.keys() - {"vllm"}:
        for what in ("prefill", "step"):
            ours, theirs = row[f"{kind}_{what}_s"], row[f"vllm_{what}_s"]
            row[f"{kind}_{what}_ratio"] = {by: ours[by] / theirs[by] for by in ours}
    row["answers"] = {verdict: verdicts.count(verdict) for verdict in ("equal", "tie", "OTHER") if verdict in verdicts}
    return row


def show(rows: list[dict[str, Any]], kinds: list[str]) -> None:
    """Print the table: medians, with minima in brackets."""
    sys.stdout.write(f"{'sequences':>9}{'context':>9} {'engine':8}{'prefill ms (least)':>19}{'step ms (least)':>16}")
    sys.stdout.write(f"{'prefill/vllm':>14}{'step/vllm':>14}  answers\n")
    for row in rows:
        for kind in kinds:
            prefill, step = row[f"{kind}_prefill_s"], row[f"{kind}_step_s"]
            line = f"{row['sequences']:9}{row['context']:9} {kind:8}"
            line += f"{1e3 * prefill['median']:10.1f} {'({:.1f})'.format(1e3 * prefill['min']):>8}"
            line += f"{1e3 * step['median']:8.2f} {'({:.2f})'.format(1e3 * step['min']):>7}"
            if kind != "vllm":
                prefill, step = row[f"{kind}_prefill_ratio"], row[f"{kind}_step_ratio"]
                answers = ", ".join(f"{count} {verdict}" for verdict, count in row["answers"].items())
                line += f"{prefill['median']:7.2f} {'({:.2f})'.format(prefill['min']):>6}"
                line += f"{step['median']:7.2f} {'({:.2f})'.format(step['min']):>6}  {answers}"
            sys.stdout.write(line + "\n")


def main() -> None:
    """Measure every row, and print a table or JSON."""
    parser = argparse.ArgumentParser(description="Compares a decode step of our engine with one of vLLM, on a CPU.")
    parser.add_argument("--sequences", default="1,8", help="sequences that decode together")
    parser.add_argument("--contexts", default="128,1024", help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=25, help="tokens per answer (default 25)")
    parser.add_argument("--rounds", type=int, default=11, help="turns per engine and row (default 11)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads per engine (default: all cores)")
    parser.add_argument(
        "--ours", default="direct,grpc", help="our engine: direct (in one process), grpc (a daemon), or both"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if not VLLM.exists():
        sys.exit("vLLM is not installed; run `make hosts`")
    sequences = [int(count) for count in options.sequences.split(",")]
    contexts = [int(tokens) for tokens in options.contexts.split(",")]
    kinds = ["vllm", *options.ours.split(",")]
    limits = {"threads": options.threads, "batch": max(sequences), "tokens": max(contexts) + options.tokens}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # else stopped engines would remain
    with ExitStack() as scene:
        folder = Path(tempfile.mkdtemp(prefix="peers-"))
        scene.callback(shutil.rmtree, folder)
        save_model(folder / "model")
        engines: dict[str, PausedEngine] = {}
        for kind in kinds:
            python = str(VLLM) if kind == "vllm" else sys.executable
            arguments = json.dumps({"kind": kind, "model": str(folder / "model"), **limits})
            command = [python, str(ENGINE), arguments]
            engines[kind] = PausedEngine(command, environment(kind, options.threads), folder / f"{kind}.log")
            scene.callback(engines[kind].close)
            engines[kind].ready()
        judge = Judge(folder / "model")
        rows = [measure(engines, judge, count, tokens, options) for count in sequences for tokens in contexts]
    if options.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        show(rows, kinds)


if __name__ == "__main__":
    main()
