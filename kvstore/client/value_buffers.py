"""``Scattered``: the buffers of one opaque object, in host or device memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstore.client.buffers import DevicePart, Rows, part_of
from kvstore.client.device_link import BOUNCE_BYTES, link_of
from kvstore.device.host_memory import copy, empty

Part = Rows | DevicePart


class Scattered:
    """One value in several flat buffers, in order.

    Attributes:
        on_device: True if some of the buffers are device memory.
    """

    __slots__ = ("parts", "nbytes", "on_device")

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.nbytes: int = parts[0].size if len(parts) == 1 else sum([part.size for part in parts])
        self.on_device = DevicePart in map(type, parts)

    @classmethod
    def of(cls, value: Any, field: str, writable: bool) -> Scattered:
        """Make a ``Scattered`` from a caller's buffer or list of buffers. Raises InvalidRequest (field ``field``)."""
        if isinstance(value, list | tuple):
            return cls([part_of(part, field, writable=writable) for part in value])
        return cls([part_of(value, field, writable=writable)])

    def host_parts(self) -> list[Rows]:
        """Return the buffers, all in host memory. Device memory is copied to new host memory.

        Raises:
            DeviceLost: the device has failed.
            DeadlineExceeded: the device did not copy in time.
        """
        return [_downloaded(part) if isinstance(part, DevicePart) else part for part in self.parts]

    def write(self, start: int, data: Rows) -> None:
        """Copy ``data`` into the value at offset ``start``, and return when all bytes are there. Raises as
        ``host_parts``; a device that did not copy in time may still write into the value."""
        for part, low, high, at in self._cut(start, data.size):
            if isinstance(part, DevicePart):
                for begin, stop in _steps(low, high):
                    row = data[at + begin - low : at + stop - low].reshape(1, -1)
                    link_of(part.device).upload(row, part.row(begin, stop))
            else:
                copy(part[low:high], data[at : at + high - low])

    def views(self, start: int, count: int) -> list[Rows]:
        """Return views of ``count`` bytes of the value starting at offset ``start``, one for each buffer. All of them
        are host memory."""
        views = []
        for part, low, high, _ in self._cut(start, count):
            assert not isinstance(part, DevicePart), "the host cannot read device memory"
            views.append(part[low:high])
        return views

    def rows(self, start: int, rows: int, row_bytes: int) -> Rows | None:
        """Return a view of the rows starting at ``start`` that are in one buffer of the host, at most ``rows``; None if
        the first row is not in one."""
        for part, low, _, _ in self._cut(start, 1):
            if isinstance(part, DevicePart):
                return None
            fit = min(rows, (part.size - low) // row_bytes)
            return part[low : low + fit * row_bytes].reshape(fit, row_bytes) if fit else None
        return None

    def _cut(self, start: int, count: int) -> list[tuple[Part, int, int, int]]:
        """Return (buffer, low, high, offset in the range) for each buffer with a part of the range."""
        cut, base, stop = [], 0, start + count
        for part in self.parts:
            low, high = max(start - base, 0), min(stop - base, part.size)
            if low < high:
                cut.append((part, low, high, base + low - start))
            base += part.size
        return cut


def _downloaded(part: DevicePart) -> Rows:
    host: Rows = empty(part.size)
    for begin, stop in _steps(0, part.size):
        link_of(part.device).download(part.row(begin, stop), host[begin:stop].reshape(1, -1))
    return host


def _steps(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most ``BOUNCE_BYTES`` that cover ``start`` to ``stop``."""
    for begin in range(start, stop, BOUNCE_BYTES):
        yield begin, min(begin + BOUNCE_BYTES, stop)
