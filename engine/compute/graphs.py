"""Step graphs: a step of decoding as one call to a device, instead of some hundred that the host makes one by one.

A graph is the forward of a batch with a fixed number of single tokens, recorded once over tensors that stay in place. A
step copies its tokens, positions and page tables there, and replays the graph. There are graphs for some numbers of
sequences; spare rows repeat the first sequence, and write the same KV that it writes.

Steps with anything else run without a graph: chunks, layers that are still awaited (the host is asked between layers),
page tables that are too long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.compute.kernel_args import BatchReading, PageKernel, SliceTable
from engine.compute.paged_cache import Batch, Slice
from engine.memory.arena import Arenas

Run = Callable[[], torch.Tensor]
EVEN = 8  # graphs for more sequences than this are this far apart


def graph_sizes(rows_max: int) -> list[int]:
    """The numbers of sequences that have graphs, ascending; a step computes at most twice as many rows as it needs.

    Example: up to 20: 1, 2, 4, 8, 16 and 20.
    """
    sizes = [1, 2, 4, *range(EVEN, rows_max, EVEN), rows_max]
    return sorted({size for size in sizes if size <= rows_max})


def step_rows(batch: Batch, sizes: Sequence[int], pages_max: int) -> int | None:
    """Rows of the graph for this batch; None if it has to run without one."""
    if batch.before is not None or batch.after is not None:
        return None
    page_tokens = batch.layout.page_tokens
    if any(part.count > 1 or -(-part.stop // page_tokens) > pages_max for part in batch.slices):
        return None
    return next((size for size in sizes if size >= len(batch.slices)), None)


class StepTensors:
    """The tensors from which graphs read a step, int64: ``heads [3 + groups, rows]`` (token, position, slot, then a
    frame per cache group), ``tables [groups, rows, pages]``."""

    def __init__(self, device: torch.device, groups: int, rows: int, pages: int) -> None:
        self.heads = torch.zeros((3 + groups, rows), dtype=torch.int64, device=device)
        self.tables = torch.zeros((groups, rows, pages), dtype=torch.int64, device=device)

    def fill(self, slices: Sequence[Slice], rows: int, page_tokens: int) -> None:
        """Copy single tokens there, in this many rows: see the module on spare rows."""
        heads, tables = laid_out(slices, rows, page_tokens)
        self.heads[:, :rows] = torch.from_numpy(heads)
        self.tables[:, :rows, : tables.shape[2]] = torch.from_numpy(tables)


def laid_out(
    slices: Sequence[Slice], rows: int, page_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The contents of ``StepTensors``, for this many rows; parts of a table that no row reads are 0."""
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
    """A batch of the first ``rows`` of ``tensors``, with their contents at the time of the run."""

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
    """Graphs for the steps of an engine. Several threads may replay; one does at a time.

    Args:
        forward: runs a batch, to be recorded.
        kernel: the kernel with which the forward reads pages.
        rows_max: most sequences of a step.
        pages_max: most pages of one of them.
        frames: one unused frame of each cache group: recording writes there.
        record: makes a call that repeats on the device what another call does, with the same tensors.
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
        for rows in reversed(self._sizes):  # the largest first: the others fit in its memory
            batch = StepBatch(arenas, kernel, self._tensors, rows)
            self._graphs[rows] = record(lambda batch=batch: forward(batch))  # type: ignore[misc]

    def rows(self, batch: Batch) -> int | None:
        """See ``step_rows``."""
        return step_rows(batch, self._sizes, self._pages_max)

    def replay(self, batch: Batch, rows: int) -> torch.Tensor:
        """The result of ``forward(batch)``, by the graph with this many rows."""
        with self._lock:
            self._tensors.fill(batch.slices, rows, self._arenas.groups[0].layout.page_tokens)
            return self._graphs[rows]()[: len(batch.slices)].clone()


def cuda_recorder(device: torch.device) -> Callable[[Run], Run]:
    """Records CUDA graphs that share their memory, in a stream of their own: PyTorch's default stream for that belongs
    to the first device recorded on. ``record`` raises RuntimeError: it cannot be recorded."""
    pool: Any = None
    aside = torch.cuda.Stream(device)

    def record(run: Run) -> Run:
        nonlocal pool
        here = torch.cuda.current_stream(device)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            run()  # objects made on first use are made here, and not recorded
            with _waiting_for_nothing():
                run()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # The outer one returns to this stream also when recording fails; the inner one does not.
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
    """Inside, calls that wait for the device raise RuntimeError. A recording that fails because of one leaves PyTorch's
    allocator and its random numbers in recording state, so it must not be begun."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
