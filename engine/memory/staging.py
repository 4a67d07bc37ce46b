"""Staging: moves KV between the frames of an arena and host memory.

The frames of a CPU are used in place. The frames of a device are copied (``device_staging``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import numpy.typing as npt
import torch

from engine.memory.arena import Arena, Arenas
from kvstore.client.buffers import DeviceRows
from kvstore.device.host_memory import copy
from kvstore.errors import InvalidRequest

Bytes = npt.NDArray[np.uint8]


class Staging(ABC):
    """Moves bytes between the frames of one arena and host memory. The caller owns the frames.

    ``send`` methods read frames, ``receive`` methods and targets write to them. ``frame`` and ``count`` name ``count``
    consecutive frames. Data that is sent may be a view of the frames: it is valid until the frames change.

    Attributes:
        in_place: True if data that is sent is always a view of the frames.
        frames_max: how many whole pages one call may send or receive.
    """

    in_place = False

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.frames_max = arena.frames_total

    def mark_computed(self, layer: int) -> None:  # noqa: B027 - a CPU computes at once
        """Record that all work so far on this layer was submitted to the device.

        Data of the layer that is sent from now on includes the results. The engine's thread calls this.
        """

    def finish(self) -> None:  # noqa: B027
        """Wait until the device has done all work that was submitted so far. The engine's thread calls this."""

    def arrival_gate(self) -> Callable[[], None] | None:
        """Return a function that makes later computations wait for the layers received so far.

        Returns None if these layers are already in the frames.
        """
        return None

    def settle(self) -> None:  # noqa: B027
        """Wait until all received data is in the frames.

        A thread that has received layers calls this before the frames get a new owner.
        """

    def close(self) -> None:  # noqa: B027
        """Release all resources. Call no other method afterwards."""

    @abstractmethod
    def receive(self, frame: int, count: int) -> AbstractContextManager[Bytes]:
        """Yield rows ``[count, page_bytes]`` for the caller to fill. They are in the frames after the ``with`` block.

        The contents of a frame whose row was not filled are undefined.
        """

    @abstractmethod
    def page_target(self, frame: int, count: int) -> AbstractContextManager[Bytes | DeviceRows]:
        """Yield the frames themselves, as rows in host or device memory, for the caller to fill.

        At the end of the ``with`` block, the caller's data must be complete.
        """

    @abstractmethod
    def receive_layer(self, frame: int, layer: int, data: Bytes) -> None:
        """Write one layer of consecutive pages, ``[count, layer_bytes]``, into frames.

        Only computations behind the ``arrival_gate`` are certain to see the data.
        """

    @abstractmethod
    def layer_target(self, frame: int, count: int, layer: int) -> AbstractContextManager[Bytes]:
        """Yield rows ``[count, layer_bytes]`` of one layer for the caller to fill.

        Only computations behind the ``arrival_gate`` are certain to see the data after the ``with`` block.
        """

    @abstractmethod
    def send(self, frame: int, count: int) -> Bytes:
        """Return whole frames, ``[count, page_bytes]``."""

    @abstractmethod
    def send_layer(self, frame: int, count: int, layer: int) -> Bytes:
        """Return one layer of frames, ``[count, layer_bytes]``. The rows may be strided."""

    @abstractmethod
    def start_send_layer(self, frames: Sequence[tuple[int, int, int]], layer: int) -> Callable[[], Bytes]:
        """Begin to send one layer of the frames of ``runs``. Returns a function that waits and returns the rows.

        Any thread may call the function, once.
        """

    @abstractmethod
    def send_tail(self, frame: int, layer: int, tokens: int) -> Bytes:
        """Return the first ``tokens`` tokens of one layer of a page, ``[1, kv_heads * tokens * token_bytes]``.

        The rest of the frame is not sent, because it may contain another tenant's data.
        """

    @abstractmethod
    def receive_tail(self, frame: int, layer: int, tokens: int, data: Bytes) -> None:
        """Write the data of ``send_tail`` into a frame, like ``receive_layer``."""


class Stagings:
    """The stagings of an engine's arenas, one for each cache group of the model."""

    def __init__(self, arenas: Arenas, groups: Sequence[Staging]) -> None:
        assert tuple(staging.arena for staging in groups) == arenas.groups
        self.arenas = arenas
        self.groups = tuple(groups)
        self.in_place = groups[0].in_place

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        return len(self.arenas.places)

    def at(self, layer: int) -> tuple[int, Staging, int]:
        """Return, for a layer of the model, its group, the group's staging, and the layer's number in the group."""
        group, number = self.arenas.places[layer]
        return group, self.groups[group], number

    def mark_computed(self, layer: int) -> None:
        """Record that all work so far on a layer of the model was submitted to the device."""
        _, staging, number = self.at(layer)
        staging.mark_computed(number)

    def finish(self) -> None:
        """Wait until the device has done all work that was submitted so far. All groups share one stream."""
        self.groups[0].finish()

    def settle(self) -> None:
        """Wait until all received data is in the frames."""
        for staging in self.groups:
            staging.settle()

    def close(self) -> None:
        """Release all resources."""
        for staging in self.groups:
            staging.close()


class HostStaging(Staging):
    """The staging of frames in host memory: all rows are views of the frames, except where noted."""

    in_place = True

    @contextmanager
    def receive(self, frame: int, count: int) -> Iterator[Bytes]:
        """Yield views of whole frames to fill."""
        yield self.arena.rows(frame, count)

    @contextmanager
    def page_target(self, frame: int, count: int) -> Iterator[Bytes | DeviceRows]:
        """Yield views of whole frames to fill."""
        yield self.arena.rows(frame, count)

    def receive_layer(self, frame: int, layer: int, data: Bytes) -> None:
        """Copy one layer into frames."""
        copy(self.arena.layer_rows(frame, len(data), layer), data)

    @contextmanager
    def layer_target(self, frame: int, count: int, layer: int) -> Iterator[Bytes]:
        """Yield views of one layer of frames to fill."""
        yield self.arena.layer_rows(frame, count, layer)

    def send(self, frame: int, count: int) -> Bytes:
        """Return views of whole frames."""
        return self.arena.rows(frame, count)

    def send_layer(self, frame: int, count: int, layer: int) -> Bytes:
        """Return strided views of one layer of frames."""
        return self.arena.layer_rows(frame, count, layer)

    def start_send_layer(self, frames: Sequence[tuple[int, int, int]], layer: int) -> Callable[[], Bytes]:
        """Return a function that copies one layer of the frames of these runs."""
        return lambda: np.concatenate([self.send_layer(frame, count, layer) for _, frame, count in frames])

    def send_tail(self, frame: int, layer: int, tokens: int) -> Bytes:
        """Return a copy of the first tokens of one layer of a page."""
        part = self.arena.pages[frame, layer, :, :tokens].contiguous()
        rows: Bytes = part.reshape(1, -1).view(torch.uint8).numpy()
        return rows

    def receive_tail(self, frame: int, layer: int, tokens: int, data: Bytes) -> None:
        """Copy the first tokens of one layer of a page into a frame."""
        target = self.arena.pages[frame, layer, :, :tokens]
        if data.size != (nbytes := target.numel() * target.element_size()):
            raise InvalidRequest("data", f"{tokens} tokens of one layer have {nbytes} bytes (got {data.size})")
        target.copy_(torch.from_numpy(data.reshape(-1)).view(target.dtype).view(target.shape))
