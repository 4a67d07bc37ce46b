"""Steps of decoding that are replayed: what is recorded, where a step is put for it, and when it is not done.

What records here is a call that computes the same again: all but CUDA's own part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import kvstore
from engine.compute import graphs, kernels, paged_cache, runner
from engine.compute.graphs import StepGraphs, graph_sizes, step_rows
from engine.compute.models import load_model
from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import Runner
from engine.memory.arena import Arena, Arenas, GroupedArenas
from tests.helpers.engines.paged import GatherKernel

LAYOUT = kvstore.Layout(model="m", layers=2, kv_heads=2, head_dim=4, dtype="float32", page_tokens=16)


def slice_of(frames: list[int], start: int, *tokens: int) -> Slice:
    return Slice(torch.tensor(frames), start, np.array(tokens))


def test_when_a_step_is_replayed_and_by_which_graph() -> None:
    arena = Arena(LAYOUT, 8, 4)
    one, chunk, long = slice_of([3, 1], 20, 7), slice_of([2], 3, 7, 8), slice_of([0, 1, 2, 3], 48, 7)
    sizes = graph_sizes(8)
    assert step_rows(Batch(arena, [one]), sizes, 3) == 1
    assert step_rows(Batch(arena, [one] * 3), sizes, 3) == 4
    assert step_rows(Batch(arena, [one] * 9), sizes, 3) is None, "more than the largest"
    assert step_rows(Batch(arena, [one, chunk]), sizes, 3) is None, "a chunk"
    assert step_rows(Batch(arena, [one, long]), sizes, 3) is None, "too long a table"
    assert step_rows(Batch(arena, [one, long]), sizes, 4) == 2
    assert step_rows(Batch(arena, [one], before=print), sizes, 3) is None, "a layer is awaited"
    assert step_rows(Batch(arena, [one], after=print), sizes, 3) is None


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mla", "tiny-gpt-oss", "tiny-gemma2"])
def test_replayed_steps_are_those_of_a_forward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    choice = kernels.KernelChoice(GatherKernel(), "plain")
    for module in (paged_cache, runner):
        monkeypatch.setattr(module, "kernel_for", lambda layout, device: choice)
    model = load_model(name)
    arena = Arena(model.layout(16), 40, model.geometry.k_dim)
    mine = Runner(model, arena)
    draw = np.random.default_rng(2)
    lengths = [40, 3, 80, 16, 33]
    tables = list(torch.randperm(40)[:30].split(6))
    tokens = [draw.integers(0, 256, n + 6) for n in lengths]
    mine.forward(Batch(arena, [Slice(t, 0, x[:n]) for t, x, n in zip(tables, tokens, lengths, strict=True)]))
    before = arena.pages.clone()

    def step(at: int, count: int) -> torch.Tensor:
        parts = zip(tables[:count], tokens, lengths, strict=False)
        return mine.forward(Batch(arena, [Slice(t, n + at, x[n + at : n + at + 1]) for t, x, n in parts]))

    wanted = [step(at, count) for at, count in enumerate((1, 3, 5, 2))]
    after = arena.pages.clone()
    arena.pages.copy_(before)
    recorded: list[Callable[[], torch.Tensor]] = []

    def record(run: graphs.Run) -> graphs.Run:
        run()
        recorded.append(run)
        return run

    mine.record(5, 8, record)
    assert "up to 5 sequences" in mine.graphs and len(recorded) == len(graph_sizes(5)) and arena.frames_free == 40
    arena.pages.copy_(before)
    monkeypatch.setattr(mine, "_forward", None)  # from here on nothing is computed any other way
    for at, count in enumerate((1, 3, 5, 2)):
        torch.testing.assert_close(step(at, count), wanted[at], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(arena.pages, after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-gemma3"])
def test_replayed_steps_over_two_cache_groups_are_those_over_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Page tables of two groups have nothing in common; beside one arena of whole pages. By a kernel, and without."""
    model, draw = load_model(name), np.random.default_rng(4)
    members = [group.layers for group in model.geometry.groups]
    lengths, tokens = [40, 3, 80], [draw.integers(0, 256, 86) for _ in range(3)]

    def run(arenas: Arenas, record: bool) -> torch.Tensor:
        mine = Runner(model, arenas)
        tables = torch.stack([torch.randperm(40)[:18].view(3, 6) for _ in arenas.groups], dim=1)
        each = list(zip(tables, tokens, lengths, strict=True))
        rows = [mine.forward(Batch(arenas, [Slice(t, 0, x[:n]) for t, x, n in each]))]
        if record:
            for arena in arenas.groups:
                arena.take(40)  # it writes to the frame that is left
            mine.record(4, 8, lambda run: (run(), run)[1])
            assert "up to 4 sequences" in mine.graphs
            monkeypatch.setattr(mine, "_forward", None)
        for at in range(4):
            batch = Batch(arenas, [Slice(t, n + at, x[n + at : n + at + 1]) for t, x, n in each])
            rows.append(mine.forward(batch))
        return torch.cat(rows)

    def arenas() -> Arenas:
        return GroupedArenas([Arena(one, 41, 16) for one in model.layouts(16)], members)

    wanted = run(Arena(model.layout(16), 41, 16), False)
    torch.testing.assert_close(run(arenas(), False), wanted, atol=1e-4, rtol=1e-4)
    choice = kernels.KernelChoice(GatherKernel(), "plain")
    for module in (paged_cache, runner):
        monkeypatch.setattr(module, "kernel_for", lambda layout, device: choice)
    for record in (False, True):
        torch.testing.assert_close(run(arenas(), record), wanted, atol=1e-4, rtol=1e-4)


def test_a_model_that_cannot_be_recorded_runs_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = kernels.KernelChoice(GatherKernel(), "plain")
    for module in (paged_cache, runner):
        monkeypatch.setattr(module, "kernel_for", lambda layout, device: choice)
    model = load_model("tiny-llama")
    arena = Arena(model.layout(16), 4, model.geometry.k_dim)
    mine = Runner(model, arena)

    def record(run: graphs.Run) -> graphs.Run:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    mine.record(4, 4, record)
    assert mine.graphs == "none: operation not permitted when stream is capturing" and arena.frames_free == 4
    assert mine.forward(Batch(arena, [slice_of([0], 0, 5)])).isfinite().all()


class FakeCuda:
    """What the recorder asks of torch.cuda: streams by number, and whether something is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
        self.current, self.made, self.fails = 0, 0, fails
        self.mode, self.said = 0, list[tuple[str, object]]()
        for name in ("synchronize", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        self.waits: list[tuple[int, int]] = []
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(self.current, self.waits))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: FakeEntered(self, stream))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: self.mode)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode))

    def new_stream(self, device: object) -> FakeStream:
        self.made += 1
        return FakeStream(self.made, self.waits)

    def capture_begin(self, *pool: object, **how: object) -> None:
        self.said.append(("pool", pool))

    def capture_end(self) -> None:
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def pool(self) -> str:
        return "the pool"

    def replay(self) -> None:
        self.said.append(("replay", self.current))


class FakeEntered:
    """``with torch.cuda.stream``: whoever does not leave it stays in it."""

    def __init__(self, fake: FakeCuda, stream: FakeStream) -> None:
        self._fake, self._stream = fake, stream

    def __enter__(self) -> None:
        self._before, self._fake.current = self._fake.current, self._stream.number

    def __exit__(self, *_: object) -> None:
        self._fake.current = self._before


class FakeStream:
    def __init__(self, number: int, waits: list[tuple[int, int]]) -> None:
        self.number, self._waits = number, waits

    def wait_stream(self, other: FakeStream) -> None:
        self._waits.append((self.number, other.number))


@pytest.mark.parametrize("fails", [False, True])
def test_the_stream_is_the_same_after_a_recording(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """By PyTorch's own ``torch.cuda.graph``, which leaves it where a recording fails: copies would wait for another."""
    fake = FakeCuda(monkeypatch, fails)
    record, ran = graphs.cuda_recorder(torch.device("cpu")), list[tuple[int, object]]()

    def run() -> torch.Tensor:
        ran.append((fake.current, fake.mode))
        return torch.zeros(1)

    for _ in range(2):
        with pytest.raises(RuntimeError) if fails else nullcontext():
            record(run)()
        assert fake.current == 0
    assert ran == [(1, 0), (1, "error"), (1, 0)] * 2, "in one stream of its own, once for each of three ends"
    if not fails:
        assert fake.said == [("pool", ()), ("replay", 0), ("pool", ("the pool",)), ("replay", 0)]


def test_the_streams_wait_for_each_other_around_what_is_made_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream aside reads what the usual one wrote; that one goes on behind it."""
    fake = FakeCuda(monkeypatch, fails=False)
    before: list[list[tuple[int, int]]] = []

    def run() -> torch.Tensor:
        before.append(list(fake.waits))
        return torch.zeros(1)

    graphs.cuda_recorder(torch.device("cpu"))(run)
    assert before == [[(1, 0)], [(1, 0)], [(1, 0), (0, 1)]]


def test_what_a_replay_gave_stays_and_no_other_is_in_between() -> None:
    """Graphs have one place for what they read, and one for what they give."""
    arena = Arena(LAYOUT, 4, 4)
    place, inside = torch.zeros(2, 1), list[int]()

    def forward(batch: Batch) -> torch.Tensor:
        inside.append(1)
        assert len(inside) == 1, "two replays at once"
        tokens = batch.tokens.clone()
        time.sleep(0.002)
        assert torch.equal(batch.tokens, tokens), "another one's tokens"
        place[: tokens.shape[1]] = tokens.T
        inside.pop()
        return place[: tokens.shape[1]]

    mine = StepGraphs(forward, arena, GatherKernel(), 2, 2, [0], lambda run: run)

    def asked(token: int) -> None:
        for _ in range(20):
            batch = Batch(arena, [slice_of([1], 3, token), slice_of([2], 3, token + 100)])
            given = mine.replay(batch, 2)
            mine.replay(Batch(arena, [slice_of([3], 3, 0)] * 2), 2)
            assert given[:, 0].tolist() == [token, token + 100]

    with ThreadPoolExecutor(3) as threads:
        for each in [threads.submit(asked, token) for token in (5, 6, 7)]:
            each.result()


def test_what_waits_for_the_device_is_not_begun_to_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch, fails=False)

    def run() -> torch.Tensor:
        if fake.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="synchronizing"):
        graphs.cuda_recorder(torch.device("cpu"))(run)
    assert (fake.current, fake.mode, fake.said) == (0, 0, [])
