"""Rows about the hook of a forward pass: how much time a prefill needs to write its pages to the pool.

This process computes prompts on one core, chunk by chunk. After each layer, the forward calls a hook. The engine's hook
writes this layer of the chunk's pages to the pool. The hook of the limit copies the same bytes, equally warm in the
caches, to pages in plain shared memory, with one call of ``memcpy`` for each page. The two hooks alternate, chunk by
chunk. The process has touched all memory of both before. The time to reserve frames before a chunk, and to seal pages
after it, is a row of its own.
"""

from __future__ import annotations

import mmap
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.bench.processes import Scale, prompt, start_node
from engine.compute.models import load_model
from engine.compute.paged_cache import Batch
from engine.compute.runner import Runner
from engine.memory.arena import Arena
from engine.memory.staging import HostStaging, Stagings
from engine.model.request import Request
from engine.pool.store import Chunk, Pool
from engine.pool.work import Work
from kvstore.addresses import connect
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage
from kvstore.client.store import Store

CHUNK = Bar(0.0003, at_least=False, of_ratio=False, unit="s")


@dataclass
class Times:
    """Times in seconds.

    Attributes:
        layers: of the hook, for each layer of each chunk.
        around: of the calls before and after the forward of each chunk.
        forward: of the forward of each chunk.
    """

    layers: list[float] = field(default_factory=list)
    around: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)


class PlainMemory:
    """The reference for the limit. It copies a chunk's layers to shared memory outside a store."""

    def __init__(self, stage: Stage, pages: int, page_bytes: int) -> None:
        with tempfile.TemporaryFile(dir=stage.settings.shm_dir) as file:
            file.truncate(pages * page_bytes)
            memory = mmap.mmap(file.fileno(), pages * page_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # like a node, if the kernel supports it
        self._rows = np.frombuffer(memory, np.uint8).reshape(pages, page_bytes)
        self._rows[:] = 1
        self._page = 0

    def before(self, pages: int) -> None:
        """Select other pages for the next chunk. They are not in CPU caches, like the pages of a pool."""
        self._page = self._page + pages if self._page + 2 * pages <= len(self._rows) else 0

    def layer(self, arena: Arena, frame: int, count: int, layer: int) -> None:
        """Copy one layer of ``count`` consecutive frames."""
        start, stop = arena.layout.byte_range(layer)
        self._rows[self._page : self._page + count, start:stop] = arena.layer_rows(frame, count, layer)


class Prefiller:
    """A model, an arena and a pool, as in the computing thread of an engine."""

    def __init__(self, stage: Stage, scene: ExitStack) -> None:
        self.scale = Scale.of(stage.settings)
        daemon = start_node(stage, scene, {})
        store = scene.enter_context(connect(daemon.name))
        model = load_model(self.scale.model)
        self.layout = model.layout(self.scale.page_tokens)
        self.tokens = self.scale.handoff_tokens // self.scale.step_tokens * self.scale.step_tokens
        self.arena = Arena(self.layout, self.tokens // self.scale.page_tokens + 1, model.geometry.k_dim)
        self.runner = Runner(model, self.arena)
        self.pool = Pool(store, [self.layout], Stagings(self.arena, [HostStaging(self.arena)]))
        chunk_pages = self.scale.step_tokens // self.scale.page_tokens
        self.plain = PlainMemory(stage, 8 * chunk_pages, self.layout.page_bytes)
        self._touch_frames(store, chunk_pages)

    def _touch_frames(self, store: Store, pages: int) -> None:
        """Put pages into every frame of the pool, and evict them, so that this process has touched all frames."""
        cache = store.cache(self.layout, salt="walk")
        rows = np.zeros((pages, self.layout.page_bytes), np.uint8)
        for chain in range(self.scale.dram_bytes // rows.nbytes + 1):
            if cache.put(prompt(pages * self.scale.page_tokens, chain), rows) != pages:
                raise BenchFailed("the pool did not accept the pages that touch its frames")
        while store.evict(pages=1 << 20)["pages"]:
            pass

    def prompt(self, seed: int, first: int) -> tuple[Times, Times]:
        """Compute one new prompt. Returns the times of the engine's hook and of the limit.

        The two hooks alternate, chunk by chunk. The engine's hook is used first if ``first`` is even. The limit's
        chunks are also written to the pool, outside of the measured time, because later pages need their parents.
        """
        work = self._work(seed)
        assert work.frames is not None
        ours, limit = Times(), Times()
        try:
            for number in range(self.tokens // self.scale.step_tokens):
                self._chunk(work, number, ours, limit, (number + first) % 2 == 0)
        finally:
            self.arena.give_back(work.frames[0])
        self._check(work)
        return ours, limit

    def _work(self, seed: int) -> Work:
        request = Request(id=str(seed), tokens=prompt(self.tokens, seed), salt=f"bench-{seed}")
        cache = self.pool.cache(request.page_salt, "")
        work = Work(seed, request, lambda event: None, None, self.scale.page_tokens, cache, False)
        frames = self.arena.take(-(-self.tokens // self.scale.page_tokens))
        assert frames is not None, "the arena has frames for one prompt"
        work.frames = frames[None]
        return work

    def _check(self, work: Work) -> None:
        if self.pool.failures or work.stored_pages != [self.tokens // self.scale.page_tokens]:
            expected = self.tokens // self.scale.page_tokens
            stored = f"{work.stored_pages[0]} of {expected} pages of a prompt were stored"
            raise BenchFailed(f"{stored}, and {self.pool.failures} calls failed")

    def _chunk(self, work: Work, number: int, ours: Times, limit: Times, is_ours: bool) -> None:
        size = self.scale.step_tokens
        chunk = Chunk(work, number * size, (number + 1) * size, self.pool)
        assert work.frames is not None
        page_tokens = self.scale.page_tokens
        first, count = chunk.start // page_tokens, chunk.tokens // page_tokens
        frame = int(work.frames[0, first])
        self.plain.before(count)
        clock = time.perf_counter

        def hook(layer: int) -> None:
            start = clock()
            if is_ours:
                chunk.layer(layer)
                ours.layers.append(clock() - start)
                return
            self.plain.layer(self.arena, frame, count, layer)
            limit.layers.append(clock() - start)
            chunk.layer(layer)

        start = clock()
        chunk.before()
        before = clock() - start
        start = clock()
        self.runner.forward(Batch(self.arena, [chunk.slice], None, hook))
        ours.forward.append(clock() - start)
        start = clock()
        chunk.after()
        ours.around.append(before + clock() - start)


@contextmanager
def _prefiller(stage: Stage) -> Iterator[Prefiller]:
    """Yield a prefiller that uses one core, and has computed a prompt to warm up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as scene:
            prefiller = Prefiller(stage, scene)
            prefiller.prompt(seed=1, first=0)
            yield prefiller
    finally:
        torch.set_num_threads(threads)


def hook(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Measure the hook.

    ``<name>``: bytes per second, compared with memcpy. ``<name>.time``: seconds for one layer of a chunk.
    ``<name>.chunk``: seconds to reserve and to seal the pages of a chunk.
    """
    with _prefiller(stage) as prefiller:
        rounds = [prefiller.prompt(10 + turn, turn) for turn in range(stage.settings.rounds)]
    nbytes = prefiller.scale.step_tokens // prefiller.scale.page_tokens * prefiller.layout.layer_bytes
    ours, limit = ([statistics.median(times.layers) for times in side] for side in zip(*rounds, strict=True))
    around = [statistics.median(times.around) for times, _ in rounds]
    details = {
        "chunk_tokens": prefiller.scale.step_tokens,
        "layer_bytes": nbytes,
        "layers": prefiller.layout.layers,
        "chunk_s": statistics.median(seconds for times, _ in rounds for seconds in times.forward),
    }
    limit_is = "memcpy of the same bytes into shared memory"
    return [
        result(
            name,
            Kind.SPEED,
            [nbytes / seconds for seconds in ours],
            [nbytes / seconds for seconds in limit],
            bar=bar,
            limit_is=limit_is,
            details=details,
        ),
        result(f"{name}.time", Kind.TIME, ours, limit, limit_is=limit_is, details=details),
        result(f"{name}.chunk", Kind.TIME, around, bar=CHUNK, details=details),
    ]
