"""Staging: bytes of an arena's frames as the host sees them: in place on a CPU, through a buffer on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import numpy.typing as npt
import torch

import kvstore
from engine.memory.arena import Arena
from kvstore.errors import InvalidRequest
from kvstore.tier.host_memory import copy

Bytes = npt.NDArray[np.uint8]


class Staging(ABC):
    """The way of one arena's bytes to and from the host. Whoever calls has the frames. Holds nothing itself.

    ``send`` brings bytes out of frames, ``receive`` into them; ``count`` frames lie one after the other from ``frame``
    on. What is sent may be the frames themselves: it holds until they change.

    Attributes:
        in_place: what is sent are the frames themselves, always: what is computed there later is seen in it.
    """

    in_place = False

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @abstractmethod
    def receive(self, frame: int, count: int) -> AbstractContextManager[Bytes]:
        """Rows ``[count, page_bytes]`` to be filled, which hold the frames' bytes; in the frames when the ``with``
        ends."""

    @abstractmethod
    def receive_layer(self, frame: int, layer: int, data: Bytes) -> None:
        """Put one layer of consecutive pages, ``[count, layer_bytes]``, into frames."""

    @abstractmethod
    def layer_target(self, frame: int, count: int, layer: int) -> AbstractContextManager[Bytes]:
        """For one layer that is read straight into frames: rows ``[count, layer_bytes]``, there when the ``with``
        ends."""

    @abstractmethod
    def send(self, frame: int, count: int) -> Bytes:
        """Rows ``[count, page_bytes]``."""

    @abstractmethod
    def send_layer(self, frame: int, count: int, layer: int) -> Bytes:
        """One layer of them, ``[count, layer_bytes]``; may be strided."""

    def send_tail(self, frame: int, layer: int, tokens: int) -> Bytes:
        """The first ``tokens`` tokens of one layer of a page, ``[1, kv_heads * tokens * token_bytes]``. Only those:
        what is behind them in the frame may be another tenant's.
        """
        part = self._arena.pages[frame, layer, :, :tokens].contiguous()
        rows: Bytes = part.reshape(1, -1).view(torch.uint8).cpu().numpy()
        return rows

    def receive_tail(self, frame: int, layer: int, tokens: int, data: Bytes) -> None:
        """Put what ``send_tail`` gave."""
        target = self._arena.pages[frame, layer, :, :tokens]
        if data.size != target.numel() * target.element_size():
            raise InvalidRequest("data", f"{data.size} bytes are not {tokens} tokens of one layer")
        target.copy_(torch.from_numpy(data.reshape(-1)).view(target.dtype).view(target.shape))


class HostStaging(Staging):
    """Frames that are host memory: nothing is copied on the way."""

    in_place = True

    @contextmanager
    def receive(self, frame: int, count: int) -> Iterator[Bytes]:
        """See ``Staging``."""
        yield self._arena.rows(frame, count)

    def receive_layer(self, frame: int, layer: int, data: Bytes) -> None:
        """See ``Staging``."""
        copy(self._arena.layer_rows(frame, len(data), layer), data)

    @contextmanager
    def layer_target(self, frame: int, count: int, layer: int) -> Iterator[Bytes]:
        """See ``Staging``."""
        yield self._arena.layer_rows(frame, count, layer)

    def send(self, frame: int, count: int) -> Bytes:
        """See ``Staging``."""
        return self._arena.rows(frame, count)

    def send_layer(self, frame: int, count: int, layer: int) -> Bytes:
        """See ``Staging``."""
        return self._arena.layer_rows(frame, count, layer)


class DeviceStaging(Staging):
    """Frames of a device: their bytes come and go through a buffer on the host."""

    @contextmanager
    def receive(self, frame: int, count: int) -> Iterator[Bytes]:
        """See ``Staging``."""
        pages = self._bytes(frame, count)
        rows = pages.cpu()
        yield rows.numpy()
        pages.copy_(rows)

    def receive_layer(self, frame: int, layer: int, data: Bytes) -> None:
        """See ``Staging``."""
        target = self._arena.pages[frame : frame + len(data), layer]
        target.copy_(torch.from_numpy(data).view(target.dtype).view(target.shape))

    @contextmanager
    def layer_target(self, frame: int, count: int, layer: int) -> Iterator[Bytes]:
        """See ``Staging``."""
        rows = kvstore.empty((count, self._arena.layout.layer_bytes))
        yield rows
        self.receive_layer(frame, layer, rows)

    def send(self, frame: int, count: int) -> Bytes:
        """See ``Staging``."""
        rows: Bytes = self._bytes(frame, count).cpu().numpy()
        return rows

    def send_layer(self, frame: int, count: int, layer: int) -> Bytes:
        """See ``Staging``."""
        part = self._arena.pages[frame : frame + count, layer]
        rows: Bytes = part.reshape(count, -1).view(torch.uint8).cpu().numpy()
        return rows

    def _bytes(self, frame: int, count: int) -> torch.Tensor:
        return self._arena.pages[frame : frame + count].view(count, -1).view(torch.uint8)


def staging_of(arena: Arena) -> Staging:
    """The way that suits where the arena is."""
    return HostStaging(arena) if arena.device.type == "cpu" else DeviceStaging(arena)
