"""Step graphs: a step of decoding as one call to a device, in place of some hundred that the host makes one by one.

A graph is the forward of a batch of so many single tokens, recorded once over tensors that stay where they are. A step
puts its tokens, positions and page tables there, and has the graph replayed. There is a graph for some numbers of
sequences; what is left over repeats the first one, and writes the KV that the first one writes.

Steps with anything else run as ever: chunks, layers that are still awaited (the host has to be asked between layers),
longer page tables than there is room for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.compute.paged_cache import Batch, Slice
from engine.compute.tiles import BatchReading, PageKernel, SliceTable
from engine.memory.arena import Arenas

Run = Callable[[], torch.Tensor]
EVEN = 8  # beyond so many sequences, graphs are so far apart


def graph_sizes(rows_max: int) -> list[int]:
    """For how many sequences there are graphs, ascending; at most twice as many rows are computed as are wanted.

    Example: up to 20: 1, 2, 4, 8, 16 and 20.
    """
    sizes = [1, 2, 4, *range(EVEN, rows_max, EVEN), rows_max]
    return sorted({size for size in sizes if size <= rows_max})


def step_rows(batch: Batch, sizes: Sequence[int], pages_max: int) -> int | None:
    """Rows of the graph for this batch; None where it has to run as ever."""
    if batch.before is not None or batch.after is not None:
        return None
    page_tokens = batch.layout.page_tokens
    if any(part.count > 1 or -(-part.stop // page_tokens) > pages_max for part in batch.slices):
        return None
    return next((size for size in sizes if size >= len(batch.slices)), None)


class StepTensors:
    """Where graphs find a step, int64: ``heads [3 + groups, rows]`` (token, position, slot, then a frame per cache
    group), ``tables [groups, rows, pages]``."""

    def __init__(self, device: torch.device, groups: int, rows: int, pages: int) -> None:
        self.heads = torch.zeros((3 + groups, rows), dtype=torch.int64, device=device)
        self.tables = torch.zeros((groups, rows, pages), dtype=torch.int64, device=device)

    def fill(self, slices: Sequence[Slice], rows: int, page_tokens: int) -> None:
        """Put single tokens there, so many rows of them: see the module on those that are left over."""
        heads, tables = laid_out(slices, rows, page_tokens)
        self.heads[:, :rows] = torch.from_numpy(heads)
        self.tables[:, :rows, : tables.shape[2]] = torch.from_numpy(tables)


def laid_out(
    slices: Sequence[Slice], rows: int, page_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What ``StepTensors`` holds, for so many rows; what no row reads of a table is 0."""
    starts = np.array([part.start for part in slices])
    pages = starts // page_tokens + 1
    tables = np.zeros((len(slices[0].tables), rows, int(pages.max())), np.int64)
    for row, (part, count) in enumerate(zip(slices, pages.tolist(), strict=True)):
        tables[:, row, :count] = part.tables[:, :count].numpy()
    tokens = np.array([int(part.tokens[0]) for part in slices])
    heads = np.empty((3 + len(tables), rows), np.int64)
    heads[:3, : len(slices)] = tokens, starts, starts % page_tokens
    heads[3:, : len(slices)] = tables[:, np.arange(len(slices)), pages - 1]
    heads[:, len(slices) :] = heads[:, :1]
    tables[:, len(slices) :] = tables[:, :1]
    return heads, tables


class StepBatch(Batch):
    """A batch of the first ``rows`` of ``tensors``, whatever these hold when it is run."""

    def __init__(self, arenas: Arenas, kernel: PageKernel, tensors: StepTensors, rows: int) -> None:
        self.arenas, self.layout = arenas, arenas.groups[0].layout
        self.before = self.after = None
        self.kernel = kernel
        self.steps, self.chunks, self.slices = None, [], []
        self.tokens, self.positions = tensors.heads[0, None, :rows], tensors.heads[1, None, :rows]
        self._slots, self._frames = tensors.heads[2, :rows], tensors.heads[3:, :rows]
        each = torch.arange(rows, device=arenas.device)
        self.last = each
        pages = tensors.tables.shape[2]
        self.readings = [
            BatchReading(
                SliceTable(
                    row=each,
                    start=tensors.heads[1, :rows],
                    count=torch.ones_like(each),
                    first=each * pages,
                    frames=frames.view(-1),
                    stop_max=pages * self.layout.page_tokens,
                    steps=True,
                    slices=rows,
                ),
                np.ones(rows, np.int64),
            )
            for frames in tensors.tables
        ]


class StepGraphs:
    """See the module. Several threads may replay; one does at a time.

    Args:
        forward: of a batch, to be recorded.
        kernel: what the forward reads pages with.
        rows_max: sequences of a step at most.
        pages_max: of one of them.
        frames: of each cache group, one that nobody has meanwhile: recording writes there.
        record: makes a call that repeats what another one does on the device, to the same tensors.
    """

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        arenas: Arenas,
        kernel: PageKernel,
        rows_max: int,
        pages_max: int,
        frames: Sequence[int],
        record: Callable[[Run], Run],
    ) -> None:
        self._arenas = arenas
        self._pages_max = pages_max
        self._sizes = graph_sizes(rows_max)
        self._tensors = StepTensors(arenas.device, len(frames), rows_max, pages_max)
        for group, frame in enumerate(frames):
            self._tensors.heads[3 + group] = self._tensors.tables[group] = frame
        self._lock = threading.Lock()
        self._graphs: dict[int, Run] = {}
        for rows in reversed(self._sizes):  # the largest first: the others find room in its memory
            batch = StepBatch(arenas, kernel, self._tensors, rows)
            self._graphs[rows] = record(lambda batch=batch: forward(batch))  # type: ignore[misc]

    def rows(self, batch: Batch) -> int | None:
        """See ``step_rows``."""
        return step_rows(batch, self._sizes, self._pages_max)

    def replay(self, batch: Batch, rows: int) -> torch.Tensor:
        """What ``forward(batch)`` would give, by the graph of so many rows."""
        with self._lock:
            self._tensors.fill(batch.slices, rows, self._arenas.groups[0].layout.page_tokens)
            return self._graphs[rows]()[: len(batch.slices)].clone()


def cuda_recorder(device: torch.device) -> Callable[[Run], Run]:
    """Records CUDA graphs that share their memory, in a stream of their own: PyTorch's default one for that is of
    whichever device was first recorded on. ``record`` raises RuntimeError: it cannot be recorded."""
    pool: Any = None
    aside = torch.cuda.Stream(device)

    def record(run: Run) -> Run:
        nonlocal pool
        here = torch.cuda.current_stream(device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            run()  # what is made on first use is made here, and not recorded
            with _waiting_for_nothing():
                run()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # The outer one comes back to this stream also where the recording fails, which the inner one does not.
        with (
            torch.cuda.stream(here),
            torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"),
        ):
            out = run()
        pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    return record


@contextmanager
def _waiting_for_nothing() -> Iterator[None]:
    """Inside, what waits for the device raises RuntimeError. A recording that fails for it leaves PyTorch's allocator
    and its random numbers as if it went on; so it is not begun."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
