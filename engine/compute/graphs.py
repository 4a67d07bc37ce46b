"""Step graphs: they run a decoding step with one call to the device, where the host would otherwise make hundreds.

A graph is the recorded forward of a batch that has a fixed number of rows, one token each. The recording uses tensors
whose addresses never change. To run a step, the engine copies tokens, positions and page tables into those tensors and
replays the graph. There are graphs for some numbers of rows (``graph_sizes``). A step that has fewer sequences than
rows repeats its first sequence in the spare rows; they write the same KV again.

A step runs without a graph if it has a chunk, if the host must act between layers (to wait for KV or to send it), or if
a page table is too long.
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
SIZE_STEP = 8  # above this number of rows, each graph has this many rows more than the next smaller one


def graph_sizes(rows_max: int) -> list[int]:
    """Return the numbers of rows for which graphs are recorded, ascending.

    A step computes at most twice as many rows as it needs.

    Example: ``graph_sizes(20)`` is ``[1, 2, 4, 8, 16, 20]``.
    """
    sizes = [1, 2, 4, *range(SIZE_STEP, rows_max, SIZE_STEP), rows_max]
    return sorted({size for size in sizes if size <= rows_max})


def step_rows(batch: Batch, sizes: Sequence[int], pages_max: int) -> int | None:
    """Return the number of rows of the graph that fits this batch; None if the batch must run without a graph."""
    if batch.before is not None or batch.after is not None:
        return None
    page_tokens = batch.layout.page_tokens
    if any(part.count > 1 or -(-part.stop // page_tokens) > pages_max for part in batch.slices):
        return None
    return next((size for size in sizes if size >= len(batch.slices)), None)


class StepTensors:
    """The input tensors of all graphs, int64.

    Attributes:
        heads: ``[3 + groups, rows]``: token, position, slot in its page, then the page's frame in each cache group.
        tables: ``[groups, rows, pages]``: page tables.
    """

    def __init__(self, device: torch.device, groups: int, rows: int, pages: int) -> None:
        self.heads = torch.zeros((3 + groups, rows), dtype=torch.int64, device=device)
        self.tables = torch.zeros((groups, rows, pages), dtype=torch.int64, device=device)

    def fill(self, slices: Sequence[Slice], rows: int, page_tokens: int) -> None:
        """Copy ``slices`` of one token each into the first ``rows`` rows. Spare rows repeat the first slice."""
        heads, tables = step_arrays(slices, rows, page_tokens)
        self.heads[:, :rows] = torch.from_numpy(heads)
        self.tables[:, :rows, : tables.shape[2]] = torch.from_numpy(tables)


def step_arrays(
    slices: Sequence[Slice], rows: int, page_tokens: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ``heads`` and ``tables`` of ``StepTensors`` for this many rows. Table entries that no row reads are 0."""
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
    """A batch over the first ``rows`` rows of ``tensors``. Each run reads what the tensors contain at that time."""

    def __init__(self, arenas: Arenas, kernel: PageKernel, tensors: StepTensors, rows: int) -> None:
        self.arenas, self.layout = arenas, arenas.groups[0].layout
        self.before = self.after = None
        self.kernel = kernel
        self.steps, self.chunks, self.slices = None, [], []
        self.tokens, self.positions = tensors.heads[0, None, :rows], tensors.heads[1, None, :rows]
        self._slots, self._frames = tensors.heads[2, :rows], tensors.heads[3:, :rows]
        row_numbers = torch.arange(rows, device=arenas.device)
        self.last = row_numbers
        pages = tensors.tables.shape[2]
        self.readings = [
            BatchReading(
                SliceTable(
                    row=row_numbers,
                    start=tensors.heads[1, :rows],
                    count=torch.ones_like(row_numbers),
                    first=row_numbers * pages,
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
    """The graphs of one engine. Several threads may call ``replay``; a lock runs one replay at a time.

    Args:
        forward: runs a batch. The graph records its calls to the device.
        kernel: the kernel with which the forward reads pages.
        rows_max: the most sequences in a step.
        pages_max: the maximum number of pages in one sequence.
        frames: one unused frame of each cache group. Recording writes KV into them.
        record: runs a function, and returns a function that repeats its work on the device with the same tensors.
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
        for rows in reversed(self._sizes):  # the largest first: smaller graphs reuse its memory
            batch = StepBatch(arenas, kernel, self._tensors, rows)
            self._graphs[rows] = record(lambda batch=batch: forward(batch))  # type: ignore[misc]

    def rows(self, batch: Batch) -> int | None:
        """Return the number of rows of the graph that fits this batch; None if the batch must run without a graph."""
        return step_rows(batch, self._sizes, self._pages_max)

    def replay(self, batch: Batch, rows: int) -> torch.Tensor:
        """Return what ``forward(batch)`` would return, computed by the graph that has ``rows`` rows."""
        with self._lock:
            self._tensors.fill(batch.slices, rows, self._arenas.groups[0].layout.page_tokens)
            return self._graphs[rows]()[: len(batch.slices)].clone()


def cuda_recorder(device: torch.device) -> Callable[[Run], Run]:
    """Return a ``record`` function for ``StepGraphs`` that makes CUDA graphs. All its graphs share their memory.

    The function records in its own stream, because PyTorch's default stream for recording belongs to the first
    device that anything was recorded on. It raises RuntimeError if the forward pass cannot be recorded.
    """
    pool: Any = None
    recording_stream = torch.cuda.Stream(device)

    def record(run: Run) -> Run:
        nonlocal pool
        current_stream = torch.cuda.current_stream(device)
        recording_stream.wait_stream(current_stream)
        with torch.cuda.stream(recording_stream):
            run()  # the first run creates objects that must not be part of the recording
            with _refuse_device_waits():
                run()
        current_stream.wait_stream(recording_stream)
        graph = torch.cuda.CUDAGraph()
        # If recording fails, `graph` does not restore the current stream; the outer `stream` does.
        with (
            torch.cuda.stream(current_stream),
            torch.cuda.graph(graph, pool=pool, stream=recording_stream, capture_error_mode="thread_local"),
        ):
            out = run()
        pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    return record


@contextmanager
def _refuse_device_waits() -> Iterator[None]:
    """Make calls that wait for the device raise RuntimeError inside this context.

    Such a call would make a recording fail, and a failed recording leaves PyTorch's allocator and random number
    generator in recording state. So a trial run in this context comes before each recording.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
