"""Real vLLM engines, and tiny models for them whose answers hang on every token before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from tests.helpers.hosts import VLLM, VLLM_ENV
from tests.helpers.processes import Machine, Process, wait_until

START_S = 280.0
ANSWER_S = 120.0
BLOCK, PAGE = 32, 64
TOKENS = 24  # of an answer

SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "window": MistralConfig(**SHAPE, sliding_window=64),
    "hybrid": Gemma3TextConfig(
        **SHAPE | {"num_hidden_layers": 6},
        sliding_window=100,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
        query_pre_attn_scalar=32,
        tie_word_embeddings=False,
    ),
    "mamba": MambaConfig(vocab_size=1000, hidden_size=128, state_size=16, num_hidden_layers=2),
}

Tokens = list[int]


class VllmEngine(Process):
    """See ``workers.vllm_worker``. One process: its engine runs in it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._asked = 0

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it has said, of one kind. vLLM prints lines of its own."""
        lines = [line for line in self.output().splitlines() if line.startswith('{"event"')]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def wait_for(self, name: str, count: int = 1, timeout_s: float = START_S) -> dict[str, Any]:
        """The last of ``count`` such events."""
        what = f"{self.log.name} says {name!r}"
        wait_until(what, lambda: len(self.events(name)) >= count or not self.alive, timeout_s)
        found = self.events(name)
        assert len(found) >= count, f"{what}: {self.errors.read_text(errors='replace')[-3000:]}"
        return found[count - 1]

    def ask(self, prompts: list[Tokens], salt: str = "", **more: Any) -> None:
        """Tell it prompts, and more of what the worker takes."""
        self._asked += 1
        self.tell(prompts, salt=salt, **more)

    def tell(self, prompts: list[Tokens], salt: str = "", **more: Any) -> None:
        """One line; see ``workers.vllm_worker``."""
        told = {"prompts": prompts, "tokens": TOKENS, "salt": salt, **more}
        self.stdin.write(json.dumps(told).encode() + b"\n")
        self.stdin.flush()

    def answered(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """What it answered to what it was told last."""
        return self.wait_for("answered", self._asked, timeout_s)

    def answer(self, prompts: list[Tokens], salt: str = "") -> tuple[list[Tokens], list[int]]:
        """Answers, and how many tokens of each prompt were cached."""
        self.ask(prompts, salt)
        found = self.answered()
        return found["tokens"], found["cached"]


def model(folder: Path, family: str) -> Path:
    """A tiny model of that family. Its random weights are so large that an answer hangs on every token before it."""
    path = folder / family
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(path)
    return path


def transfer(node: str, role: str = "kv_both", **extra: Any) -> str:
    """How vLLM is told to use the connector: as in the docs."""
    return json.dumps(
        {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.adapters.vllm",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"node": node, **extra},
        }
    )


def engine(
    machine: Machine, path: Path, told: str = "", environment: Mapping[str, str] | None = None, **settings: Any
) -> VllmEngine:
    """One that is being started, with other settings of vLLM's."""
    worker = Path(__file__).resolve().parent / "workers" / "vllm_worker.py"
    command = [str(VLLM), str(worker), str(path), told, json.dumps(settings)]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **VLLM_ENV, **(environment or {})}
    return machine.start(VllmEngine, "vllm", command, None, **environment)


def ready(*engines: VllmEngine) -> None:
    """Wait for them."""
    for each in engines:
        each.wait_for("ready")


def prompts() -> list[Tokens]:
    """Four, of which each begins with the same 200 tokens."""
    random = np.random.default_rng(11)
    base = random.integers(3, 900, 200).tolist()
    return [base + random.integers(3, 900, more).tolist() for more in (0, 10, 61, 90)]


def by_hand(asked: list[Tokens]) -> list[int]:
    """How many tokens a pool that has all of them finds: full pages, and never the last token."""
    return [(len(each) - 1) // PAGE * PAGE for each in asked]
