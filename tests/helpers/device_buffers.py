"""Buffers in the memory of a device's peer, as other libraries hand theirs out."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.device import cuda
from kvstore.device.host_device import POISON, HostDevice, HostMemory

Array = npt.NDArray[np.uint8]


@contextmanager
def added_device(name: str = "host:0", reaches: Collection[str] = ()) -> Iterator[HostDevice]:
    """A device that this process has meanwhile."""
    device = HostDevice(name, seed=1, reaches=reaches)
    cuda.add(device)
    try:
        yield device
    finally:
        cuda.remove(device)
        device.lose()  # what a test left undone


def finish(device: HostDevice) -> None:
    """All that any stream of the device was given is done."""
    for stream in list(device._streams.values()):
        stream.record().wait(1e12)


class InterfaceBuffer:
    """``__cuda_array_interface__``. ``seen``: what is there now, which a program could not look at."""

    def __init__(self, device: HostDevice, shape: tuple[int, ...], content: Array | None = None) -> None:
        self.memory: HostMemory = device.allocate(int(np.prod(shape)))
        self.seen: Array = self.memory.view().reshape(shape)
        if content is not None:
            self.seen[...] = content
        self.stream: int | None = None
        self.read_only = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.seen.shape,
            "typestr": "|u1",
            "data": (self.seen.ctypes.data, self.read_only),
            "strides": None if self.seen.flags.c_contiguous else self.seen.strides,
            "version": 3,
            "stream": self.stream,
        }

    def part(self, *index: Any) -> InterfaceBuffer:
        """A view of it."""
        view = object.__new__(InterfaceBuffer)
        view.memory, view.seen, view.stream, view.read_only = self.memory, self.seen[index], self.stream, False
        return view

    @property
    def untouched(self) -> bool:
        """Whether nothing but poison is there."""
        return bool((self.seen == POISON).all())


class DLPackBuffer:
    """A device's memory by DLPack."""

    def __init__(self, buffer: InterfaceBuffer) -> None:
        self._buffer = buffer
        self.streams: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, stream: int | None = None) -> Any:
        self.streams.append(stream)
        return self._buffer.seen.__dlpack__()
