"""Arena: the device memory of an engine, page-major frames with the same bytes as the store's pages. A model with
several cache groups has an arena for each (``Arenas``).

A frame is free -> taken (``take``) -> free again (``give_back``). ``engine.state`` decides which sequences share a
frame, and how long it keeps its page. The allocator prefers one run of consecutive frames: a sequence in one run is
read by attention, and moved by the store, with the fewest calls.

Example: frames 0-9, 2-4 taken. ``take(3)`` gives 5-7: of the free runs 0-1 and 5-9 the smallest that is large enough.
``take(6)`` would give 0, 1, 5-8: the largest run whole, the rest from the smallest that holds it.
"""

from __future__ import annotations

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

import kvstore

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Bytes = npt.NDArray[np.uint8]


class Arenas(ABC):
    """The memory of an engine: an arena for each cache group of its model. A single arena is the memory of a model with
    one.
    """

    @property
    @abstractmethod
    def groups(self) -> tuple[Arena, ...]:
        """An arena per group."""

    @property
    @abstractmethod
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model its group, and its number in there."""

    @property
    def device(self) -> torch.device:
        """The device of all arenas."""
        return self.groups[0].pages.device

    def layer_pages(self, layer: int) -> torch.Tensor:
        """One layer of the model in all frames of its group, ``[frames, kv_heads, page_tokens, content]``."""
        group, number = self.places[layer]
        return self.groups[group].pages[:, number]


class GroupedArenas(Arenas):
    """The arenas of a model with several cache groups: ``members`` are the layers of each."""

    def __init__(self, arenas: Sequence[Arena], members: Sequence[Sequence[int]]) -> None:
        assert [arena.layout.layers for arena in arenas] == [len(layers) for layers in members], members
        found = {layer: (g, n) for g, layers in enumerate(members) for n, layer in enumerate(layers)}
        self._groups = tuple(arenas)
        self._places = tuple(found[layer] for layer in range(len(found)))

    @property
    def groups(self) -> tuple[Arena, ...]:
        """See ``Arenas``."""
        return self._groups

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """See ``Arenas``."""
        return self._places


class Arena(Arenas):
    """``frames`` frames of the pages of ``layout`` on ``device``. Taking and returning frames is thread-safe.

    The contents of a frame belong to its taker. Memory starts as zeros, and a frame given back keeps its contents.

    Args:
        k_dim: elements of K (MLA: of the latent) in the content of a token and head; V (MLA: the rope key) follows.
        memory: memory to use instead of its own: on a host, ``[frames, page_bytes]``, contiguous zeros; on a device,
            that many bytes with any contents.

    Attributes:
        pages: ``[frames, layers, kv_heads, page_tokens, content]``.
    """

    def __init__(
        self,
        layout: kvstore.Layout,
        frames: int,
        k_dim: int,
        device: str = "cpu",
        memory: Bytes | torch.Tensor | None = None,
    ) -> None:
        assert frames > 0 and layout.dtype in DTYPES, (frames, layout.dtype)
        assert 0 < k_dim <= layout.shape[-1], (k_dim, layout.shape)
        self.layout = layout
        self.k_dim = k_dim
        self._places = tuple((0, layer) for layer in range(layout.layers))
        shape, dtype = (frames, *layout.shape), DTYPES[layout.dtype]
        if memory is None:
            self.pages = _zeros(shape, dtype, torch.device(device))
        elif isinstance(memory, torch.Tensor):
            self.pages = memory.view(-1).zero_().view(dtype).view(shape)
        else:
            assert memory.shape == (frames, layout.page_bytes) and memory.flags.c_contiguous, memory.shape
            self.pages = torch.from_numpy(memory).view(-1).view(dtype).view(shape)
        self.frames_total = frames
        self._bytes: Bytes | None = None
        if self.device.type == "cpu":
            self._bytes = self.pages.view(frames, -1).view(torch.uint8).numpy()
            assert self._bytes.shape == (frames, layout.page_bytes), self._bytes.shape
        self._lock = threading.Lock()
        self._free = np.ones(frames, dtype=np.bool_)
        self._frames_free = frames

    @property
    def groups(self) -> tuple[Arena, ...]:
        """Itself."""
        return (self,)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """All layers, in their order."""
        return self._places

    @property
    def frames_free(self) -> int:
        """Frames that are not taken."""
        return self._frames_free

    def take(self, count: int) -> torch.Tensor | None:
        """Take ``count`` frames, ascending int64, in as few runs as possible; None if there are not enough free
        ones.
        """
        assert count >= 0, count
        with self._lock:
            if count > self._frames_free:
                return None
            chosen = _choose(self._free, count)
            self._free[chosen] = False
            self._frames_free -= count
        return torch.from_numpy(chosen)

    def give_back(self, frames: torch.Tensor) -> None:
        """Free these frames, taken together or not, in any order."""
        numbers = frames.numpy()
        with self._lock:
            assert np.unique(numbers).size == numbers.size, "a frame is given back twice"
            assert not self._free[numbers].any(), "a frame is given back that is not taken"
            self._free[numbers] = True
            self._frames_free += numbers.size

    def rows(self, frame: int, count: int) -> Bytes:
        """The bytes of ``count`` frames from ``frame`` on, ``[count, page_bytes]``: a contiguous view, CPU only."""
        assert self._bytes is not None, "the host cannot see the bytes of a device's frames"
        assert frame >= 0 and count >= 0 and frame + count <= self.frames_total, (frame, count)
        return self._bytes[frame : frame + count]

    def layer_rows(self, frame: int, count: int, layer: int) -> Bytes:
        """The bytes of one layer of ``count`` frames, ``[count, layer_bytes]``: a strided view, CPU only."""
        start, stop = self.layout.byte_range(layer)
        return self.rows(frame, count)[:, start:stop]

    def check(self) -> None:
        """Check conservation: free and taken frames are all there are."""
        with self._lock:
            free = int(np.count_nonzero(self._free))
            assert free == self._frames_free, (free, self._frames_free)
            assert 0 <= free <= self.frames_total == self._free.size, free


def runs_upto(most: int, frames: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """``runs``, with runs of more than ``most`` frames split."""
    for index, frame, count in runs(frames):
        for start in range(0, count, most):
            yield index + start, frame + start, min(most, count - start)


def runs(frames: torch.Tensor | npt.NDArray[np.int64] | Sequence[int]) -> list[tuple[int, int, int]]:
    """``(index in the sequence, frame, count)`` of its runs of consecutive frames, in order.

    Example: frames 7, 8, 9, 3, 4 are ``[(0, 7, 3), (3, 3, 2)]``.
    """
    listed: list[int] = list(frames) if isinstance(frames, Sequence) else frames.tolist()
    if not listed:
        return []
    if listed == list(
        range(listed[0], listed[0] + len(listed))
    ):  # the usual case; and numpy's calls are slow in a forward
        return [(0, listed[0], len(listed))]
    numbers = np.array(listed, np.int64)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    counts = np.diff(starts, append=numbers.size)
    return list(zip(starts.tolist(), numbers[starts].tolist(), counts.tolist(), strict=True))


def _choose(free: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.int64]:
    """Choose ``count`` of the free frames, ascending: the fewest runs, and among those the tightest fit."""
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    chosen: list[npt.NDArray[np.int64]] = []
    left = np.ones(starts.size, dtype=np.bool_)
    while count:
        fits = np.flatnonzero(left & (lengths >= count))
        if fits.size:
            run = fits[np.argmin(lengths[fits])]
        else:
            run = np.argmax(np.where(left, lengths, 0))
        taken = min(count, int(lengths[run]))
        chosen.append(np.arange(starts[run], starts[run] + taken, dtype=np.int64))
        left[run] = False
        count -= taken
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a host in page-aligned memory of its own that asks for large pages.

    A malloc'ed block starts 16 bytes after a page, and vector loads that cross cache lines cost attention its speed.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
