"""Staging: moves bytes of an arena's frames to and from the host: in place on a CPU, by copies on a device
(``device_staging``).
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
    """Moves bytes of one arena to and from the host. The caller owns the frames. Holds nothing itself.

    ``send`` brings bytes out of frames, ``receive`` into them; ``count`` frames are consecutive, from ``frame``
    on. Sent data may be the frames themselves: it is valid until they change.

    Attributes:
        in_place: sent data is always the frames themselves: later computations show in it.
        frames_max: the most whole pages that may be sent or received at once.
    """

    in_place = False

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.frames_max = arena.frames_total

    def computed(self, layer: int) -> None:  # noqa: B027 - nothing to do where nothing is late
        """Called by the computing thread when it has given the device everything that computes this layer so far: data
        of that layer that is sent from then on includes it."""

    def finish(self) -> None:  # noqa: B027
        """Return when the device has computed what it was given so far. Called by the thread that computes."""

    def landing(self) -> Callable[[], None] | None:
        """A call that makes all later computations wait for the layers received so far; None: they are there."""
        return None

    def settle(self) -> None:  # noqa: B027
        """Return when everything received is in its frames. A thread that received layers calls it before the frames
        get a new owner."""

    def close(self) -> None:  # noqa: B027
        """End: nothing is sent or received any more."""

    @abstractmethod
    def receive(self, frame: int, count: int) -> AbstractContextManager[Bytes]:
        """Rows ``[count, page_bytes]`` to be filled; in the frames when the ``with`` ends. A row that is not filled
        leaves its frame undefined."""

    @abstractmethod
    def filling(self, frame: int, count: int) -> AbstractContextManager[Bytes | DeviceRows]:
        """Like ``receive``, but of the frames themselves: rows of the host or of the device; the writer waits until its
        data is there."""

    @abstractmethod
    def receive_layer(self, frame: int, layer: int, data: Bytes) -> None:
        """Put one layer of consecutive pages, ``[count, layer_bytes]``, into frames; there for computations that wait
        for ``landing``."""

    @abstractmethod
    def layer_target(self, frame: int, count: int, layer: int) -> AbstractContextManager[Bytes]:
        """Rows ``[count, layer_bytes]`` for one layer that is read straight into frames, there when the ``with`` ends,
        for computations that wait for ``landing``."""

    @abstractmethod
    def send(self, frame: int, count: int) -> Bytes:
        """Rows ``[count, page_bytes]`` of whole frames."""

    @abstractmethod
    def send_layer(self, frame: int, count: int, layer: int) -> Bytes:
        """One layer of whole frames, ``[count, layer_bytes]``; may be strided."""

    @abstractmethod
    def sending(self, frames: Sequence[tuple[int, int, int]], layer: int) -> Callable[[], Bytes]:
        """A call that returns one layer of all frames of these ``runs``; it may wait, in any thread. To be called
        once.
        """

    @abstractmethod
    def send_tail(self, frame: int, layer: int, tokens: int) -> Bytes:
        """The first ``tokens`` tokens of one layer of a page, ``[1, kv_heads * tokens * token_bytes]``. No more:
        the rest of the frame may be another tenant's.
        """

    @abstractmethod
    def receive_tail(self, frame: int, layer: int, tokens: int, data: Bytes) -> None:
        """Put the data of ``send_tail`` into a frame, like ``receive_layer``."""


class Stagings:
    """The stagings of an engine's arenas, one for each cache group of its model."""

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
        """For a layer of the model its group, the group's staging, and the layer's number in there."""
        group, number = self.arenas.places[layer]
        return group, self.groups[group], number

    def computed(self, layer: int) -> None:
        """See ``Staging``; a layer of the model."""
        _, staging, number = self.at(layer)
        staging.computed(number)

    def finish(self) -> None:
        """Wait for the device, see ``Staging``. All arenas are computed in one stream."""
        self.groups[0].finish()

    def settle(self) -> None:
        """See ``Staging``."""
        for staging in self.groups:
            staging.settle()

    def close(self) -> None:
        """See ``Staging``."""
        for staging in self.groups:
            staging.close()


class HostStaging(Staging):
    """Frames that are host memory: nothing is copied on the way."""

    in_place = True

    @contextmanager
    def receive(self, frame: int, count: int) -> Iterator[Bytes]:
        """See ``Staging``."""
        yield self.arena.rows(frame, count)

    @contextmanager
    def filling(self, frame: int, count: int) -> Iterator[Bytes | DeviceRows]:
        """See ``Staging``."""
        yield self.arena.rows(frame, count)

    def receive_layer(self, frame: int, layer: int, data: Bytes) -> None:
        """See ``Staging``."""
        copy(self.arena.layer_rows(frame, len(data), layer), data)

    @contextmanager
    def layer_target(self, frame: int, count: int, layer: int) -> Iterator[Bytes]:
        """See ``Staging``."""
        yield self.arena.layer_rows(frame, count, layer)

    def send(self, frame: int, count: int) -> Bytes:
        """See ``Staging``."""
        return self.arena.rows(frame, count)

    def send_layer(self, frame: int, count: int, layer: int) -> Bytes:
        """See ``Staging``."""
        return self.arena.layer_rows(frame, count, layer)

    def sending(self, frames: Sequence[tuple[int, int, int]], layer: int) -> Callable[[], Bytes]:
        """See ``Staging``."""
        return lambda: np.concatenate([self.send_layer(frame, count, layer) for _, frame, count in frames])

    def send_tail(self, frame: int, layer: int, tokens: int) -> Bytes:
        """See ``Staging``."""
        part = self.arena.pages[frame, layer, :, :tokens].contiguous()
        rows: Bytes = part.reshape(1, -1).view(torch.uint8).numpy()
        return rows

    def receive_tail(self, frame: int, layer: int, tokens: int, data: Bytes) -> None:
        """See ``Staging``."""
        target = self.arena.pages[frame, layer, :, :tokens]
        if data.size != target.numel() * target.element_size():
            raise InvalidRequest("data", f"{data.size} bytes are not {tokens} tokens of one layer")
        target.copy_(torch.from_numpy(data.reshape(-1)).view(target.dtype).view(target.shape))
