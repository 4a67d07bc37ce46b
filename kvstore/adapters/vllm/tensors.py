"""Tensors of a worker: in which order work on them is done, and how the store gets at their bytes.

Work on tensors of the host is done when it is given. A GPU does it later, in the order of a stream, and streams know
nothing of each other: what one thread gives is behind another thread's work only where a stream waits for an event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvstore.client.device_rows import DeviceRows
from kvstore.tier.device import Addresses, Device, DeviceEvent, DeviceStream
from kvstore.tier.devices import device_of, missing

Work = Callable[[], None]


class Tensors(Protocol):
    """See the module.

    Attributes:
        late: work is done after it was given, so that the bytes of a save are there later.
    """

    @property
    def late(self) -> bool:
        """See the class."""
        ...

    def current(self) -> DeviceStream:
        """The stream in which the calling thread computes."""
        ...

    def stream(self) -> DeviceStream:
        """A stream of our own, ordered with no other."""
        ...

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        """Give work on tensors to one of our own streams, or to the one in which the calling thread computes."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the same memory that holds anything."""
        ...

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> Any:
        """Pages, one a row, as buffers of the store: it begins behind what ``stream`` has been given so far. None:
        nothing of that has to be waited for."""
        ...


def tensors_of(tensor: torch.Tensor) -> Tensors:
    """For a worker that has its cache in such tensors.

    Raises:
        ValueError: they are in memory of a device that this process cannot copy to and from.
    """
    if tensor.device.type == "cpu":
        return HostTensors()
    device = device_of(tensor.data_ptr())
    if device is None:
        why = missing() or "its driver does not know that memory"
        raise ValueError(f"KVStoreConnector: the cache is on {tensor.device}, which the store cannot use: {why}")
    return CudaTensors(device, tensor.device)


class HostTensors:
    """See ``Tensors``."""

    late = False

    def current(self) -> DeviceStream:
        """See ``Tensors``."""
        return _DONE

    def stream(self) -> DeviceStream:
        """See ``Tensors``."""
        return _DONE

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        """See ``Tensors``."""
        work()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``Tensors``."""
        return torch.empty(shape, dtype=dtype)

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> torch.Tensor:
        """See ``Tensors``."""
        return pages.flatten(1)


class CudaTensors:
    """See ``Tensors``. Streams and events are the store's own, so that each wait has a deadline."""

    late = True

    def __init__(self, device: Device, place: torch.device) -> None:
        self._device = device
        self._place = place

    def current(self) -> DeviceStream:
        """See ``Tensors``."""
        return self._device.stream_of(torch.cuda.current_stream(self._place).cuda_stream)

    def stream(self) -> DeviceStream:
        """See ``Tensors``."""
        return self._device.stream()

    def run(self, work: Work, stream: DeviceStream | None = None) -> None:
        """See ``Tensors``."""
        if stream is None:
            work()
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle, self._place)):
            work()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``Tensors``."""
        return torch.empty(shape, dtype=dtype, device=self._place)

    def rows(self, pages: torch.Tensor, stream: DeviceStream | None = None) -> DeviceRows:
        """See ``Tensors``."""
        return device_rows(self._device, pages, stream)


def device_rows(device: Device, pages: torch.Tensor, stream: DeviceStream | None) -> DeviceRows:
    """Contiguous pages in memory of a device, one a row."""
    assert pages.is_contiguous()
    row_bytes = pages[:1].nbytes
    handle = None if stream is None else stream.handle
    return DeviceRows(device, pages.data_ptr(), len(pages), row_bytes, row_bytes, handle, pages)


class _DoneStream:
    """The stream of work that is done when it is given."""

    handle = 0

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """See ``DeviceStream``. Bytes of the host are copied by the host."""
        raise AssertionError("nothing is copied in a stream of the host")

    def wait(self, event: DeviceEvent) -> None:
        """See ``DeviceStream``."""

    def record(self) -> DeviceEvent:
        """See ``DeviceStream``."""
        return _OVER


class _OverEvent:
    """An event of such a stream."""

    def over(self) -> bool:
        """See ``DeviceEvent``."""
        return True

    def wait(self, deadline_s: float) -> None:
        """See ``DeviceEvent``."""


_DONE = _DoneStream()
_OVER = _OverEvent()
