"""Forwards over frames against plain transformers: the same tokens, greedily, and the same logits but for rounding."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from engine.compute.models import Model, load_model
from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import Runner
from tests.helpers.engines.plain import as_reference
from tests.helpers.engines.scheduled import Scheduler, arena_for, generated, prompts_of

FAMILIES = ("tiny-llama", "tiny-qwen3", "tiny-mla", "tiny-mistral", "tiny-gemma2", "tiny-gpt-oss")
NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Both:
    """A model for runners, and the same one for ``generate``."""

    model: Model
    plain: PreTrainedModel


_models: dict[str, Both] = {}
_expected: dict[str, list[list[int]]] = {}


def both(name: str) -> Both:
    if name not in _models:
        model = load_model(name, seed=1)
        plain = as_reference(copy.deepcopy(model.net))  # before a runner changes how it attends
        plain.generation_config.eos_token_id = None  # an answer has its full length
        _models[name] = Both(model, plain)
    return _models[name]


def plain_logits(net: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return net(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("page_tokens", [16, 32, 64])
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_are_those_of_generate(name, page_tokens):
    """Sixteen ragged requests at once; chunks end inside of pages and windows."""
    world = both(name)
    prompts = prompts_of([1, 2, 15, 16, 17, 31, 33, 40, 41, 48, 63, 64, 65, 80, 100, 129])
    if name not in _expected:
        _expected[name] = [generated(world.plain, prompt, NEW_TOKENS) for prompt in prompts]
    expected = _expected[name]
    assert len({token for answer in expected for token in answer}) > 20  # they say something
    arena = arena_for(world.model, page_tokens, 16 * 64 + sum(len(prompt) + NEW_TOKENS for prompt in prompts))
    runner = Runner(world.model, arena)
    assert Scheduler(runner, arena, prompts, NEW_TOKENS).answers(chunk=29) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_whole_prompt_however_it_is_cut(name):
    world = both(name)
    (prompt,) = prompts_of([150])
    expected = plain_logits(world.plain, prompt)
    arena = arena_for(world.model, 16, 160)
    runner = Runner(world.model, arena)
    frames = arena.take(10)
    for cuts in ([0, 150], [0, 149, 150], [0, 16, 32, 150], [0, 1, 2, 3, 77, 150]):
        arena.pages.zero_()
        for start, stop in itertools.pairwise(cuts):
            logits = runner.forward(Batch(arena, [Slice(frames, start, np.array(prompt[start:stop]))]))
        torch.testing.assert_close(logits[0], expected, atol=2e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mla"])
def test_layers_that_arrive_while_the_forward_runs_are_as_good_as_if_they_had_been_there(name):
    world = both(name)
    arena = arena_for(world.model, 16, 128)
    runner = Runner(world.model, arena)
    (prompt,) = prompts_of([60])
    frames = arena.take(4)
    runner.forward(Batch(arena, [Slice(frames, 0, np.array(prompt[:48]))]))
    kept = arena.pages[frames[:3]].clone()
    for count in (1, 12):
        part = Slice(frames, 48, np.array(prompt[48 : 48 + count]))
        expected = runner.forward(Batch(arena, [part]))
        arena.pages[frames] = 0
        order: list[tuple[str, int]] = []

        def before(layer: int, order: list[tuple[str, int]] = order) -> None:
            order.append(("before", layer))
            arena.pages[frames[:3], layer] = kept[:, layer]

        def after(layer: int, order: list[tuple[str, int]] = order) -> None:
            order.append(("after", layer))

        assert torch.equal(runner.forward(Batch(arena, [part], before, after)), expected)
        layers = range(world.model.geometry.layers)
        assert order == [(when, layer) for layer in layers for when in ("before", "after")]


def test_two_threads_run_two_batches_over_one_net():
    world = both("tiny-qwen3")
    prompts = prompts_of([30, 45, 70, 12])
    expected = [generated(world.plain, prompt, NEW_TOKENS) for prompt in prompts]
    arena = arena_for(world.model, 16, 1024)
    runner = Runner(world.model, arena)
    halves = [Scheduler(runner, arena, some, NEW_TOKENS) for some in (prompts[:2], prompts[2:])]
    answers: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        torch.set_num_threads(1)
        answers[i] = halves[i].answers(chunk=7)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert answers[0] + answers[1] == expected


def test_what_a_hook_raises_ends_the_forward_and_the_next_one_is_as_before():
    world = both("tiny-llama")
    arena = arena_for(world.model, 16, 64)
    runner = Runner(world.model, arena)
    frames = arena.take(2)
    part = Slice(frames, 0, np.array([1, 2, 3]))
    expected = runner.forward(Batch(arena, [part]))

    def fail(layer: int) -> None:
        if layer == 1:
            raise TimeoutError("layer 1 never came")

    with pytest.raises(TimeoutError, match="never came"):
        runner.forward(Batch(arena, [part], before=fail))
    assert torch.equal(runner.forward(Batch(arena, [part])), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_is_near(dtype):
    world = both("tiny-llama")
    model = load_model("tiny-llama", dtype=dtype, seed=1)
    (prompt,) = prompts_of([40])
    expected = plain_logits(world.plain, prompt)
    arena = arena_for(model, 16, 48)
    runner = Runner(model, arena)
    frames = arena.take(3)
    runner.forward(Batch(arena, [Slice(frames, 0, np.array(prompt[:39]))]))
    logits = runner.forward(Batch(arena, [Slice(frames, 39, np.array(prompt[39:]))]))[0]
    assert logits.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=0) > 0.98
