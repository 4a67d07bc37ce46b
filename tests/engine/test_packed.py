"""Packed linear layers, and what else makes a step of decoding fast on a CPU: the same numbers."""

from __future__ import annotations

import copy
import os
import queue
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from engine.compute.attention import SHARED_BYTES_MIN
from engine.compute.kernel_args import Terms
from engine.compute.kv_arrivals import Arrivals
from engine.compute.models import load_model
from engine.compute.omp_threads import run_in_own_thread
from engine.compute.packed_linear import ELEMENTS_MIN, PackedLinear, pack
from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import Runner, SideBatches
from tests.helpers.engines.paged import attended, paged_world, steps
from tests.helpers.engines.scheduled import Scheduler, arena_for, generated, prompts_of


class Layers(nn.Module):
    """Linear layers large and small, one of which attention reads."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.large = nn.Linear(320, 264, dtype=dtype)
        self.bare = nn.Linear(264, 320, bias=False, dtype=dtype)
        self.small = nn.Linear(16, 16, dtype=dtype)
        self.kv_b_proj = nn.Linear(320, 264, dtype=dtype)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_computes_what_the_layer_did(dtype, rows):
    torch.manual_seed(1)
    layers = Layers(dtype).requires_grad_(False)
    plain = copy.deepcopy(layers)
    pack(layers)
    for name, wide in (("large", 320), ("bare", 264)):
        given = torch.randn(1, rows, wide).to(dtype)
        layer, expected = getattr(layers, name), getattr(plain, name)(given).float()
        assert isinstance(layer, PackedLinear) or dtype == torch.bfloat16, "a processor may lack bfloat16"
        assert layer(given).shape == expected.shape
        assert torch.equal(layer.weight, getattr(plain, name).weight), "routers of some models look at it"
        assert (layer(given).float() - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2)


def test_large_layers_are_packed_once_and_their_weights_let_go_of():
    layers = Layers(torch.float32).requires_grad_(False)
    weight = weakref.ref(layers.large.weight)
    assert layers.small.weight.numel() < ELEMENTS_MIN <= layers.kv_b_proj.weight.numel()
    pack(layers)
    large = layers.large
    assert isinstance(large, PackedLinear) and weight() is None
    assert type(layers.small) is nn.Linear and type(layers.kv_b_proj) is nn.Linear
    pack(layers)
    assert layers.large is large and copy.deepcopy(layers).large is large


@pytest.mark.parametrize("name", ["small-llama", "small-mla"])
def test_answers_of_a_packed_model_are_those_of_the_plain_one(name, two_threads):
    torch.set_num_threads(1)  # what is not tested here: next to other tests, a team spends most of its time spinning
    model = load_model(name, seed=1)
    plain = copy.deepcopy(model.net)
    plain.generation_config.eos_token_id = None
    prompts = prompts_of((5, 70))
    expected = [generated(plain, prompt, 4) for prompt in prompts]
    torch.set_num_threads(2)
    arena = arena_for(model, 16, 256)
    answers = Scheduler(Runner(model, arena), arena, prompts, 4).answers(chunk=48)
    assert any(isinstance(layer, PackedLinear) for layer in model.net.modules())
    assert answers == expected


def test_threads_that_share_a_layer_make_the_same_numbers(two_threads):
    lengths = [700, 3, 900, 64, 1]
    arena, tables = paged_world(4, 64, 64, lengths)
    parts, query = steps(tables, lengths), torch.randn(len(lengths), 8, 64)
    assert sum(lengths) * 4 * 128 * 4 >= SHARED_BYTES_MIN
    shared = attended(arena, parts, query, Terms(0.125))
    torch.set_num_threads(1)
    assert torch.equal(shared, attended(arena, parts, query, Terms(0.125)))


def test_a_side_batch_makes_no_team_that_would_slow_other_steps(two_threads):
    model = load_model("small-mla")  # its products are oneDNN's, MKL's and our own
    arena = arena_for(model, 16, 256)
    runner, frames = Runner(model, arena), arena.take(16)
    sides, there, made = SideBatches(runner, arena, 1), Arrivals(model.geometry.layers), queue.SimpleQueue()
    there.all_reached(200)
    step = Slice(frames, 200, np.zeros(1, np.int64))
    runner.forward(Batch(arena, [step]))  # by a team
    before = len(os.listdir("/proc/self/task"))
    sides.add(step, there, 200, time.monotonic() + 60, made.put)
    assert made.get(timeout=60).shape == (model.geometry.vocab_size,)
    assert len(os.listdir("/proc/self/task")) <= before + 1 and torch.get_num_threads() == 2
    sides.stop()


def test_run_in_own_thread_ends_its_thread_and_raises_errors_in_the_caller():
    seen: list[threading.Thread] = []
    assert run_in_own_thread(lambda: seen.append(threading.current_thread()) or 7) == 7
    assert not seen[0].is_alive() and seen[0] is not threading.current_thread()
    with pytest.raises(KeyError):
        run_in_own_thread(lambda: {}["nothing"])
