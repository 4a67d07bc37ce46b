"""The Triton kernel against the formula and against engines on a CPU: on a device where there is one, else by Triton's
interpreter. ``make kernels`` runs it where Triton is not installed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.compute import kernels, paged_cache, presets
from engine.compute.kernel_args import Terms
from engine.compute.models import Model, load_model
from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import Runner
from engine.memory.arena import Arena
from tests.helpers.engines.interpreter import ABSENT, DEVICE
from tests.helpers.engines.paged import TERMS, compare, paged_world, steps

if ABSENT:
    pytest.skip(ABSENT, allow_module_level=True)

from engine.compute.triton_kernel import TritonKernel, block_shape, splits_of, stages_of

ONE, MANY = 1, 400  # cores: no sequence is divided, and every one that can be is
RUN = [name for name, preset in presets.PRESETS.items() if preset.pace is None]


def use(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Read pages by the kernel, on the host."""
    choice = kernels.KernelChoice(TritonKernel(cores), "triton")
    monkeypatch.setattr(paged_cache, "kernel_for", lambda layout, device: choice)


def mixed(tables: list[torch.Tensor], lengths: list[int], counts: list[int]) -> list[Slice]:
    return [
        Slice(table, length - count, torch.zeros(count))
        for table, length, count in zip(tables, lengths, counts, strict=True)
    ]


@pytest.mark.parametrize("cores", [ONE, MANY])
@pytest.mark.parametrize(
    ("page_tokens", "kv_heads", "group", "dim"),
    [
        (16, 2, 3, 64),
        (64, 2, 4, 128),
        (4, 1, 1, 16),  # a block has many pages
        (24, 3, 8, 24),  # nothing is a power of two
        (16, 1, 20, 80),  # more heads than a program has, in two parts
        (64, 1, 5, 7),
    ],
)
def test_steps_and_chunks_of_every_shape(monkeypatch, page_tokens, kv_heads, group, dim, cores):
    use(monkeypatch, cores)
    lengths = [1, 2, 17, 64, 65, 300]
    arena, tables = paged_world(kv_heads, dim, page_tokens, lengths, device=DEVICE)
    compare(arena, steps(tables, lengths), kv_heads * group, Terms(dim**-0.5), tolerance=5e-6)
    slices = mixed(tables, lengths, [1, 1, 17, 3, 40, 70])
    compare(arena, slices, kv_heads * group, Terms(dim**-0.5), tolerance=5e-6)


@pytest.mark.parametrize("cores", [ONE, MANY])
@pytest.mark.parametrize("name", TERMS)
def test_every_term(monkeypatch, name, cores):
    use(monkeypatch, cores)
    lengths = [9, 40, 170, 33, 21]
    arena, tables = paged_world(2, 16, 16, lengths, device=DEVICE)
    compare(arena, steps(tables, lengths), 4, TERMS[name], tolerance=2e-5)
    compare(arena, mixed(tables, lengths, [9, 1, 30, 5, 1]), 4, TERMS[name], tolerance=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pages_of_half_precision(monkeypatch, dtype):
    use(monkeypatch, ONE)
    lengths = [5, 77]
    arena, tables = paged_world(2, 32, 16, lengths, dtype, DEVICE)
    compare(arena, steps(tables, lengths), 4, Terms(0.2), tolerance=5e-6)


def test_what_no_token_sees_is_not_read(monkeypatch):
    use(monkeypatch, MANY)
    lengths = [21, 270]
    arena, tables = paged_world(2, 16, 16, lengths, device=DEVICE)
    for table, length in zip(tables, lengths, strict=True):
        arena.pages[table[-1], :, :, (length - 1) % 16 + 1 :] = np.nan
    unused = set(range(arena.frames_total)) - {int(frame) for table in tables for frame in table}
    arena.pages[list(unused)] = np.nan
    arena.pages[:, 0] = np.nan
    compare(arena, steps(tables, lengths), 4, Terms(0.25), tolerance=5e-6)


@pytest.mark.parametrize(
    ("name", "page_tokens", "cores"),
    [
        *((name, *way) for name in RUN if name.startswith("tiny") for way in ((16, ONE), (64, MANY))),
        *((name, 32, MANY) for name in RUN if not name.startswith("tiny")),
    ],
)
def test_engines_compute_what_they_do_on_a_cpu(monkeypatch, name, page_tokens, cores):
    """A batch of chunks, then one of both, then one of steps; all logits, and all KV that is left in the frames."""
    lengths = [3, 20, 97, 130] if name.startswith("tiny") else [3, 40]
    here = run(load_model(name), page_tokens, lengths)
    use(monkeypatch, cores)
    there = run(load_model(name, device=DEVICE), page_tokens, lengths)
    for ours, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4 * float(theirs.abs().max()), rtol=0)


def run(model: Model, page_tokens: int, lengths: list[int]) -> list[torch.Tensor]:
    frames = sum(-(-(n + 2) // page_tokens) for n in lengths) + 2
    arena = Arena(model.layout(page_tokens), frames, model.geometry.k_dim, str(model.device))
    runner = Runner(model, arena)
    scattered = torch.randperm(arena.frames_total, generator=torch.Generator().manual_seed(1))
    tables = list(scattered[: arena.frames_total - 2].split([-(-(n + 2) // page_tokens) for n in lengths]))
    draw = np.random.default_rng(4)
    tokens = [draw.integers(0, 256, n + 2) for n in lengths]
    found = []
    cuts = [[(0, n // 2) for n in lengths], [(n // 2, n) for n in lengths]]
    cuts[1][0] = (lengths[0] // 2, lengths[0] // 2 + 1)
    cuts += [[(lengths[0] // 2 + 1 if i == 0 else n, n + 1) for i, n in enumerate(lengths)]]
    cuts += [[(n + 1, n + 2) for n in lengths]]
    for cut in cuts:
        slices = [Slice(t, a, x[a:b]) for t, x, (a, b) in zip(tables, tokens, cut, strict=True)]
        found.append(runner.forward(Batch(arena, slices)).cpu())
    return [*found, arena.pages.float().cpu()]


def test_a_trial_finds_a_kernel_that_is_wrong(monkeypatch):
    layout = load_model("tiny-llama").layout(16)
    device = torch.device(DEVICE)
    right = TritonKernel(ONE)
    assert kernels.trial(right, layout, device) < 1e-5

    class Wrong(TritonKernel):
        def attend(self, *arguments):
            return super().attend(*arguments) * 1.1

    assert kernels.trial(Wrong(ONE), layout, device) > 0.05


def test_programs_fit_the_device():
    for group, k_dim, v_dim in [(1, 64, 64), (8, 128, 128), (128, 576, 512), (5, 7, 7), (16, 256, 256)]:
        for size in (2, 4):
            for only_steps in (True, False):
                shape = block_shape(group, k_dim, v_dim, size, only_steps)
                k_dims = shape["K_MAIN"] + shape["K_REST"]
                assert k_dims >= k_dim and min(shape["BLOCK_M"], shape["BLOCK_N"], shape["K_MAIN"]) >= 16
                staged = stages_of(size) * shape["BLOCK_N"] * (k_dims + max(16, v_dim)) * size
                assert shape["BLOCK_M"] * k_dims * size + staged <= 160 << 10, (shape, "more than a core's memory")


def test_sequences_are_divided_where_the_device_has_nothing_else_to_do():
    assert splits_of(programs=8, cores=132, stop_max=100_000, block_n=64) == 32
    assert splits_of(programs=64, cores=132, stop_max=100_000, block_n=64) == 4
    assert splits_of(programs=1000, cores=132, stop_max=100_000, block_n=64) == 1
    assert splits_of(programs=8, cores=132, stop_max=300, block_n=64) == 1
