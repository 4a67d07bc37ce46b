"""The row about the adapter for transformers: a prompt given to ``generate`` again, against the first time.

The model runs in this process on one core, with a node beside it. Every round has a prompt of its own: the first call
computes and stores it, the second one loads it. Both have to answer alike.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import torch

from engine.bench.processes import Scale, node, prompt
from engine.compute import presets
from kvstore.adapters.transformers import PromptCache, prefix_cache
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage
from kvstore.client.connect import connect

NEW_TOKENS = 16


def notebook(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """How many times faster ``generate`` is where all but the end of the prompt is found."""
    scale = Scale.of(stage.settings)
    threads = torch.get_num_threads()
    with ExitStack() as scene:
        scene.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        daemon = node(stage, scene, {})
        store = scene.enter_context(connect(daemon.name))
        cached = prefix_cache(presets.build(scale.model, 0).eval(), store, page_tokens=scale.page_tokens)
        first: list[float] = []
        again: list[float] = []
        _asked(cached, torch.zeros(1, scale.handed, dtype=torch.int64))  # nothing is new to the process after it
        for turn in range(stage.settings.rounds):
            tokens = torch.from_numpy(prompt(scale.handed, seed=turn).astype("int64"))[None]
            took_s, want = _asked(cached, tokens)
            first.append(took_s)
            took_s, answer = _asked(cached, tokens)
            again.append(took_s)
            if cached.last is None or cached.last.tokens < scale.handed - scale.page_tokens:
                raise BenchFailed(f"{name}: only {cached.last} of {scale.handed} tokens was found")
            if not torch.equal(answer, want):
                raise BenchFailed(f"{name}: answered {answer.tolist()}, computed it is {want.tolist()}")
    details = {"model": scale.model, "prompt_tokens": scale.handed, "new_tokens": NEW_TOKENS}
    return [result(name, Kind.GAIN, again, first, bar=bar, limit_is="the first call", details=details)]


def _asked(cached: PromptCache, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    answer: torch.Tensor = cached.generate(tokens, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    return time.perf_counter() - start, answer
