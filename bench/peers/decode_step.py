"""Seconds per step of decoding, and of prefill: our engine compared with vLLM, on a CPU, with the same weights and
prompts.

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
TIE = 1e-3  # logits this near, of the highest one, are as good as equal: float32 sums in another order


class PausedEngine:
    """An engine in a process of its own, which stands still but for the turns that it is given.

    Life: started -> ``ready`` -> ``ask``, any number of times -> closed, which ends the process.
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
                start_new_session=True,  # a group of its own: what it has started stands still with it
            )
        self._log = log

    def ready(self) -> None:
        """Wait until it can be asked, and stop it."""
        self._line(READY_S)
        self._signal(signal.SIGSTOP)

    def ask(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Return answers of ``tokens`` tokens each, and their times of arrival. See ``decode_engine.py``."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line(TURN_S))
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)
        self._process.wait(30)

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def _line(self, timeout_s: float) -> str:
        """The next line of it that is JSON."""
        assert self._process.stdout is not None
        with DefaultSelector() as selector:
            selector.register(self._process.stdout, EVENT_READ)
            while selector.select(timeout_s):
                line = self._process.stdout.readline()
                if not line:
                    break
                if line.startswith("{"):
                    return line
        told = self._log.read_text().strip().splitlines()
        sys.exit(f"an engine has ended, or hangs: {told[-1] if told else 'it said nothing'}")


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn: the whole prefill, and the mean step while all sequences decode."""

    prefill_s: float
    step_s: float

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Turn:
        """From when tokens came: all sequences decode from the latest first token to the earliest last one."""
        came: list[list[float]] = answer["came_s"]
        start, stop = max(times[0] for times in came), min(times[-1] for times in came)
        steps = sum(start < at <= stop for times in came for at in times) / len(came)
        return cls(start, (stop - start) / steps)


def save_model(folder: Path) -> None:
    """A model with random weights, and a tokenizer that knows numbers alone."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from engine.compute import presets

    net = presets.build(PRESET, SEED)
    net.save_pretrained(folder)
    words = {str(number): number for number in range(net.config.vocab_size)}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")))
    wrapped.save_pretrained(folder)


class Judge:
    """Whether two answers are equal but for ties, by the plain model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._net: Any = None

    def apart(self, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
        """Says equal, tie where the first tokens to differ have logits as good as equal, or OTHER."""
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
    told = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    return told | VLLM_ENVIRONMENT if kind == "vllm" else told


def measured(
    engines: dict[str, PausedEngine], judge: Judge, sequences: int, context: int, told: argparse.Namespace
) -> dict[str, Any]:
    """Measure a row: medians of the turns of each variant, taken alternately."""
    turns: dict[str, list[Turn]] = {kind: [] for kind in engines}
    same: list[str] = []
    random = np.random.default_rng([sequences, context])
    for number in range(told.rounds + 1):
        prompts = random.integers(3, 250, (sequences, context)).tolist()
        kinds = list(engines)[:: -1 if number % 2 else 1]
        answers = {kind: engines[kind].ask(prompts, told.tokens) for kind in kinds}
        for kind in engines if number else ():  # the first of a kind makes buffers
            turns[kind].append(Turn.of(answers[kind]))
        for kind in engines.keys() - {"vllm"}:
            triples = zip(prompts, answers[kind]["tokens"], answers["vllm"]["tokens"], strict=True)
            same += [judge.apart(*triple) for triple in triples]
    row: dict[str, Any] = {"sequences": sequences, "context": context}
    for kind, taken in turns.items():
        for what in ("prefill_s", "step_s"):
            seconds = [getattr(turn, what) for turn in taken]
            row[f"{kind}_{what}"] = {"median": statistics.median(seconds), "min": min(seconds)}
    for kind in engines.keys() - {"vllm"}:
        for what in ("prefill", "step"):
            ours, theirs = row[f"{kind}_{what}_s"], row[f"vllm_{what}_s"]
            row[f"{kind}_{what}_ratio"] = {by: ours[by] / theirs[by] for by in ours}
    row["answers"] = {verdict: same.count(verdict) for verdict in ("equal", "tie", "OTHER") if verdict in same}
    return row


def show(rows: list[dict[str, Any]], kinds: list[str]) -> None:
    """The table: medians, and minima in brackets."""
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
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description="A step of decoding: our engine compared with vLLM, on a CPU.")
    parser.add_argument("--sequences", default="1,8", help="decoded together")
    parser.add_argument("--contexts", default="128,1024", help="tokens of prompts")
    parser.add_argument("--tokens", type=int, default=25, help="of an answer (default 25)")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each engine and row (default 11)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine (default: all cores)")
    parser.add_argument("--ours", default="direct,grpc", help="our engine: in its process, as a daemon, or both")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    told = parser.parse_args()
    if not VLLM.exists():
        sys.exit("vLLM is not there: make hosts")
    sequences = [int(count) for count in told.sequences.split(",")]
    contexts = [int(tokens) for tokens in told.contexts.split(",")]
    kinds = ["vllm", *told.ours.split(",")]
    about = {"threads": told.threads, "batch": max(sequences), "tokens": max(contexts) + told.tokens}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # engines that stand still would stay
    with ExitStack() as scene:
        folder = Path(tempfile.mkdtemp(prefix="peers-"))
        scene.callback(shutil.rmtree, folder)
        save_model(folder / "model")
        engines: dict[str, PausedEngine] = {}
        for kind in kinds:
            python = str(VLLM) if kind == "vllm" else sys.executable
            how = json.dumps({"kind": kind, "model": str(folder / "model"), **about})
            command = [python, str(ENGINE), how]
            engines[kind] = PausedEngine(command, environment(kind, told.threads), folder / f"{kind}.log")
            scene.callback(engines[kind].close)
            engines[kind].ready()
        judge = Judge(folder / "model")
        rows = [measured(engines, judge, count, tokens, told) for count in sequences for tokens in contexts]
    if told.json:
        sys.stdout.write(json.dumps(rows, indent=2) + "\n")
    else:
        show(rows, kinds)


if __name__ == "__main__":
    main()
