"""Processes of rows: engines with one core each, their nodes, and the sizes that the rows use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.client import Answer, EngineClient
from kvstore.bench.harness import BenchFailed
from kvstore.bench.processes import Child, Daemon, environment
from kvstore.bench.stage import GIB, MIB, RunSettings, Stage
from kvstore.errors import NodeUnavailable

READY_S = 180.0  # long enough to make or to read a model
ANSWER_S = 300.0

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Scale:
    """The sizes of the rows: the model, its pages, the prompts, and the node's memory for them.

    Attributes:
        step_tokens: the number of tokens of a chunk.
        token_bytes: the number of bytes of the KV of one token.
        prompt_tokens: the prompts of the rows about reuse, by label. A prompt has only full pages, or one token more.
            In both cases a hit computes only the last token.
        handoff_tokens: the length of a prompt that is written to the pool or handed off.
    """

    model: str
    page_tokens: int
    step_tokens: int
    token_bytes: int
    dram_bytes: int
    extent_bytes: int
    prompt_tokens: Mapping[str, int]
    handoff_tokens: int

    @classmethod
    def of(cls, settings: RunSettings) -> Scale:
        """Return the scale of a quick or a full run."""
        return QUICK if settings.quick else FULL

    @property
    def arena_bytes(self) -> int:
        """The size of an arena for two of the longest requests."""
        return 2 * self.token_bytes * (max(self.prompt_tokens.values()) + 2 * self.page_tokens)

    @property
    def engine(self) -> dict[str, object]:
        """The settings of every engine of a row. Engines keep no pages in their arenas, so hits come from the pool."""
        return {
            "model": self.model,
            "threads": 1,
            "page_tokens": self.page_tokens,
            "chunk_tokens": self.step_tokens,
            "arena": self.arena_bytes,
            "keep_pages": 0,
        }


FULL = Scale(
    "small-llama",
    page_tokens=64,
    step_tokens=512,
    token_bytes=12 * 4 * 2 * 64 * 4,
    dram_bytes=GIB,
    extent_bytes=128 * MIB,
    prompt_tokens={"1k": 1025, "1k_pages": 1024, "2k": 2049, "4k": 4097, "8k": 8193},
    handoff_tokens=2048,
)
QUICK = Scale(
    "tiny-llama",
    page_tokens=16,
    step_tokens=64,
    token_bytes=3 * 2 * 2 * 16 * 4,
    dram_bytes=48 * MIB,
    extent_bytes=16 * MIB,
    prompt_tokens={"128": 129, "128_pages": 128, "256": 257},
    handoff_tokens=200,
)


def cores() -> list[int]:
    """Return the cores that this process may use, ascending."""
    return sorted(os.sched_getaffinity(0))


def prompt(tokens: int, seed: int) -> Tokens:
    """Return a prompt of random bytes. The same length and seed give the same prompt on every machine."""
    return np.random.default_rng((tokens, seed)).integers(0, 256, tokens).astype(np.uint32)


class EngineProcess:
    """A process of ``kvstore engine`` that computes on one core.

    Life: made (the process is started) -> ``ready`` -> used through ``client`` -> ``close``, also at the end of a
    ``with`` block.

    Args:
        core: the index into ``cores()``, modulo their number.
        settings: settings of ``EngineConfig``.
    """

    def __init__(self, core: int, shm_dir: Path, settings: Mapping[str, object]) -> None:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        env = {**environment(shm_dir), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._child = Child("an engine", ["engine", "--log-level=warning", *arguments], env)
        available = cores()
        os.sched_setaffinity(self._child.pid, {available[core % len(available)]})  # its threads inherit this
        self._client: EngineClient | None = None
        self.address = ""

    def ready(self) -> None:
        """Wait until the engine serves. Raises BenchFailed, with the engine's last output, if it does not."""
        try:
            line = self._child.line(READY_S)
        except NodeUnavailable as error:
            self._child.kill()
            raise BenchFailed(str(error)) from None
        self.address = line.partition(", grpc on ")[2].partition(",")[0].split()[0]
        self._client = EngineClient(self.address)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def client(self) -> EngineClient:
        """A client of the engine. The engine must be ready."""
        assert self._client is not None, "call ready() first"
        return self._client

    def answer(self, tokens: Tokens, *, max_tokens: int = 2, **arguments: Any) -> Answer:
        """Return a greedy answer of exactly ``max_tokens`` tokens."""
        return self.client.generate(tokens, max_tokens=max_tokens, ignore_eos=True, deadline_s=ANSWER_S, **arguments)

    def close(self) -> None:
        """Send SIGTERM and wait. If the process does not end, kill it."""
        if self._client is not None:
            self._client.close()
        self._child.ask_to_end()
        self._child.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_node(stage: Stage, scene: ExitStack, settings: Mapping[str, object]) -> Daemon:
    """Start a node for the engines of a row. It ends with ``scene``. The node with stored pages is ended first."""
    stage.clear()
    scale = Scale.of(stage.settings)
    size_bytes = stage.settings.bounded(scale.dram_bytes)
    return stage.daemon(scene, size_bytes, scale.extent_bytes, {"eviction": "lru", **settings})


def start_engine(stage: Stage, scene: ExitStack, core: int, settings: Mapping[str, object]) -> EngineProcess:
    """Start an engine with these settings in addition to ``Scale.engine``. It ends with ``scene``.

    The caller must call ``ready``.
    """
    settings = {**Scale.of(stage.settings).engine, "device": stage.settings.device, **settings}
    return scene.enter_context(EngineProcess(core, stage.settings.shm_dir, settings))


def check_same(name: str, answer: Answer, expected: Answer) -> None:
    """Raise BenchFailed if two answers to a prompt differ."""
    if answer.tokens != expected.tokens:
        raise BenchFailed(f"{name}: wrong answer {answer.tokens}, expected {expected.tokens}")
