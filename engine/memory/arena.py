"""Arena: the device memory of an engine, divided into frames. A page has the same bytes in a frame as in the store.

A model with several cache groups has an arena for each group (``Arenas``).

A frame is free -> taken (``take``) -> free again (``give_back``). ``engine.state`` decides which sequences share a
frame, and how long a page stays in it. The allocator prefers runs of consecutive frames, because attention and the
store then need the fewest calls.

Worked example: of frames 0-9, frames 2-4 are taken, so 0-1 and 5-9 are the free runs. ``take(3)`` returns 5-7, from the
smallest run that is large enough. ``take(6)`` returns 0, 5-9: all of the largest run, and the rest from the smallest
run that is large enough for it.
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
    """The memory of an engine: an arena for each cache group of its model.

    An ``Arena`` is also the ``Arenas`` of a model with one group.
    """

    @property
    @abstractmethod
    def groups(self) -> tuple[Arena, ...]:
        """One arena for each group."""

    @property
    @abstractmethod
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model, its group and its number in the group."""

    @property
    def device(self) -> torch.device:
        """The device of all arenas."""
        return self.groups[0].pages.device

    def layer_pages(self, layer: int) -> torch.Tensor:
        """Return one layer of the model in all frames of its group, ``[frames, kv_heads, page_tokens, content]``."""
        group, number = self.places[layer]
        return self.groups[group].pages[:, number]


class GroupedArenas(Arenas):
    """The arenas of a model with several cache groups. ``members``: the model's layers in each group."""

    def __init__(self, arenas: Sequence[Arena], members: Sequence[Sequence[int]]) -> None:
        assert [arena.layout.layers for arena in arenas] == [len(layers) for layers in members], members
        places = {layer: (g, n) for g, layers in enumerate(members) for n, layer in enumerate(layers)}
        self._groups = tuple(arenas)
        self._places = tuple(places[layer] for layer in range(len(places)))

    @property
    def groups(self) -> tuple[Arena, ...]:
        """One arena for each group."""
        return self._groups

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model, its group and its number in the group."""
        return self._places


class Arena(Arenas):
    """Frames for pages of one layout. Threads may take and return frames at the same time.

    Only the caller that has taken a frame may use its contents. All frames are zero at first. A frame that is given
    back keeps its contents.

    Args:
        k_dim: the number of elements of K (with MLA, of the latent) in the content of a token and head. V (with MLA,
            the rope key) follows.
        memory: memory to use instead of allocating some: on a host, contiguous zeros ``[frames, page_bytes]``; on a
            device, a tensor of as many bytes with any contents.

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
        """This arena alone."""
        return (self,)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each layer of the model, group 0 and the number of the layer."""
        return self._places

    @property
    def frames_free(self) -> int:
        """The number of frames that are not taken."""
        return self._frames_free

    def take(self, count: int) -> torch.Tensor | None:
        """Take ``count`` frames in as few runs as possible. Returns their numbers (int64, ascending).

        Returns None, and takes no frame, if fewer are free.
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
        """Free frames. They may come from several calls of ``take``, in any order."""
        numbers = frames.numpy()
        with self._lock:
            assert np.unique(numbers).size == numbers.size, "the same frame is given back twice"
            assert not self._free[numbers].any(), "a free frame is given back"
            self._free[numbers] = True
            self._frames_free += numbers.size

    def rows(self, frame: int, count: int) -> Bytes:
        """Return ``count`` frames, starting at ``frame``, as bytes ``[count, page_bytes]``: contiguous, CPU only."""
        assert self._bytes is not None, "the host cannot access the frames of a device"
        assert frame >= 0 and count >= 0 and frame + count <= self.frames_total, (frame, count)
        return self._bytes[frame : frame + count]

    def layer_rows(self, frame: int, count: int, layer: int) -> Bytes:
        """Return one layer of ``count`` frames as bytes ``[count, layer_bytes]``: a strided view, CPU only."""
        start, stop = self.layout.byte_range(layer)
        return self.rows(frame, count)[:, start:stop]

    def check(self) -> None:
        """Assert that the count of free frames is correct."""
        with self._lock:
            free = int(np.count_nonzero(self._free))
            assert free == self._frames_free, (free, self._frames_free)
            assert 0 <= free <= self.frames_total == self._free.size, free


def runs_upto(frames_max: int, frames: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the ``runs`` of ``frames``, divided so that none has more than ``frames_max`` frames."""
    for index, frame, count in runs(frames):
        for start in range(0, count, frames_max):
            yield index + start, frame + start, min(frames_max, count - start)


def runs(frames: torch.Tensor | npt.NDArray[np.int64] | Sequence[int]) -> list[tuple[int, int, int]]:
    """Divide ``frames`` into runs of consecutive frames. Returns ``(index, first frame, count)`` for each, in order.

    Example: frames 7, 8, 9, 3, 4 are ``[(0, 7, 3), (3, 3, 2)]``.
    """
    frame_list: list[int] = list(frames) if isinstance(frames, Sequence) else frames.tolist()
    if not frame_list:
        return []
    first, count = frame_list[0], len(frame_list)
    if frame_list == list(
        range(first, first + count)
    ):  # the usual case, without numpy, which is slow in a forward pass
        return [(0, first, count)]
    numbers = np.array(frame_list, np.int64)
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[0] - 2) != 1)
    counts = np.diff(starts, append=numbers.size)
    return list(zip(starts.tolist(), numbers[starts].tolist(), counts.tolist(), strict=True))


def _choose(free: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.int64]:
    """Choose ``count`` free frames from as few runs as possible. Returns their numbers, ascending.

    If a run is large enough for the remaining frames, the smallest such run is used, else the largest run.
    """
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    chosen: list[npt.NDArray[np.int64]] = []
    is_unused = np.ones(starts.size, dtype=np.bool_)
    while count:
        fits = np.flatnonzero(is_unused & (lengths >= count))
        if fits.size:
            run = fits[np.argmin(lengths[fits])]
        else:
            run = np.argmax(np.where(is_unused, lengths, 0))
        frames = min(count, int(lengths[run]))
        chosen.append(np.arange(starts[run], starts[run] + frames, dtype=np.int64))
        is_unused[run] = False
        count -= frames
    return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, on a host in page-aligned memory that may use huge pages.

    A large block from malloc begins 16 bytes after a page boundary. Vector loads would then cross cache lines, which
    slows attention down.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, int(np.prod(shape)) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
