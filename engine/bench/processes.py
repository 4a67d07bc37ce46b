"""Processes: engines that rows start, each on one core of its own, and what the rows ask of them."""

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

READY_S = 180.0  # a model is made or read
ANSWER_S = 300.0

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Scale:
    """How large the rows are: the model, its pages, and the node's memory for its prompts.

    Attributes:
        token_bytes: of KV of one token.
        step_tokens: of a chunk.
        long: prompts of the rows about reuse, in tokens: one more than full pages, and full pages. For both only the
            last token is computed.
        handed: a prompt that is written to the pool, or handed over.
    """

    model: str
    page_tokens: int
    step_tokens: int
    token_bytes: int
    dram_bytes: int
    extent_bytes: int
    long: Mapping[str, int]
    handed: int

    @classmethod
    def of(cls, settings: RunSettings) -> Scale:
        """Return the scale of a quick run, or of a full run."""
        return QUICK if settings.quick else FULL

    @property
    def arena_bytes(self) -> int:
        """The arena's size: two of the longest requests."""
        return 2 * self.token_bytes * (max(self.long.values()) + 2 * self.page_tokens)

    @property
    def engine(self) -> dict[str, object]:
        """Settings of every engine of a row. It keeps no pages: what is found comes from the pool, or elsewhere."""
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
    long={"1k": 1025, "1k_pages": 1024, "2k": 2049, "4k": 4097, "8k": 8193},
    handed=2048,
)
QUICK = Scale(
    "tiny-llama",
    page_tokens=16,
    step_tokens=64,
    token_bytes=3 * 2 * 2 * 16 * 4,
    dram_bytes=48 * MIB,
    extent_bytes=16 * MIB,
    long={"128": 129, "128_pages": 128, "256": 257},
    handed=200,
)


def cores() -> list[int]:
    """The cores this process may use, ascending."""
    return sorted(os.sched_getaffinity(0))


def prompt(tokens: int, seed: int) -> Tokens:
    """A prompt of random bytes, the same from a seed everywhere."""
    return np.random.default_rng((tokens, seed)).integers(0, 256, tokens).astype(np.uint32)


class EngineProcess:
    """``kvstore engine`` as a real process that computes on core number ``core`` alone.

    Life: made (started) -> ``ready`` -> asked through ``client`` -> ``close``, by its own pid, which leaving a ``with``
    does.

    Args:
        core: index into ``cores()``; counted round where there are fewer.
        settings: those of ``EngineConfig``.
    """

    def __init__(self, core: int, shm_dir: Path, settings: Mapping[str, object]) -> None:
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        env = {**environment(shm_dir), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._child = Child("an engine", ["engine", "--log-level=warning", *arguments], env)
        mine = cores()
        os.sched_setaffinity(self._child.pid, {mine[core % len(mine)]})  # threads it starts later have it too
        self._client: EngineClient | None = None
        self.address = ""

    def ready(self) -> None:
        """Wait until it serves. Raises BenchFailed where it does not; carries what it said."""
        try:
            line = self._child.line(READY_S)
        except NodeUnavailable as error:
            self._child.kill()
            raise BenchFailed(str(error)) from None
        self.address = line.partition(", grpc on ")[2].partition(",")[0].split()[0]
        self._client = EngineClient(self.address)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def client(self) -> EngineClient:
        """To ask it, once it is ready."""
        assert self._client is not None, "not ready"
        return self._client

    def answer(self, tokens: Tokens, *, max_tokens: int = 2, **how: Any) -> Answer:
        """Return a greedy answer of exactly ``max_tokens`` tokens."""
        return self.client.generate(tokens, max_tokens=max_tokens, ignore_eos=True, deadline_s=ANSWER_S, **how)

    def close(self) -> None:
        """SIGTERM, and wait; kill -9 where it does not go."""
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


def node(stage: Stage, scene: ExitStack, settings: Mapping[str, object]) -> Daemon:
    """A node for the engines of a row, ended with ``scene``. Nothing else runs at the same time."""
    stage.clear()
    scale = Scale.of(stage.settings)
    size_bytes = stage.settings.bounded(scale.dram_bytes)
    return stage.daemon(scene, size_bytes, scale.extent_bytes, {"eviction": "lru", **settings})


def started(stage: Stage, scene: ExitStack, core: int, settings: Mapping[str, object]) -> EngineProcess:
    """An engine with these settings in addition to the usual ones, ended with ``scene``. It is not ``ready`` yet."""
    settings = {**Scale.of(stage.settings).engine, "device": stage.settings.device, **settings}
    return scene.enter_context(EngineProcess(core, stage.settings.shm_dir, settings))


def same(name: str, got: Answer, want: Answer) -> None:
    """Raises BenchFailed where two answers to a prompt differ."""
    if got.tokens != want.tokens:
        raise BenchFailed(f"{name}: answered {got.tokens}, recomputed it is {want.tokens}")
