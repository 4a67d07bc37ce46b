"""Scattered: one value in several buffers of a caller."""

from __future__ import annotations

from typing import Any

from kvstore.client.buffers import Rows, flat_bytes
from kvstore.errors import InvalidRequest
from kvstore.tier.host_memory import copy


class Scattered:
    """One value over several flat buffers, laid end to end."""

    def __init__(self, parts: list[Rows]) -> None:
        self.parts = parts
        self.nbytes: int = parts[0].size if len(parts) == 1 else sum([part.size for part in parts])

    @classmethod
    def of(cls, value: Any, field: str, writable: bool) -> Scattered:
        """A caller's buffer, or list of buffers. Raises InvalidRequest naming ``field``."""
        parts = [flat_bytes(part, field) for part in (value if isinstance(value, list | tuple) else [value])]
        if writable:
            for part in parts:
                if not part.flags.writeable:
                    raise InvalidRequest(field, "must be writable")
        return cls(parts)

    def write(self, start: int, data: Rows) -> None:
        """Copy ``data`` to ``start`` of the value."""
        for part, low, high, at in self._cut(start, data.size):
            copy(part[low:high], data[at : at + high - low])

    def read(self, start: int, into: Rows) -> None:
        """Copy from ``start`` of the value as much as ``into`` takes and there is."""
        if len(self.parts) == 1:
            part = self.parts[0][start : start + into.size]
            copy(into[: part.size], part)
            return
        for part, low, high, at in self._cut(start, min(into.size, self.nbytes - start)):
            copy(into[at : at + high - low], part[low:high])

    def rows(self, start: int, rows: int, row_bytes: int) -> Rows | None:
        """As many of these rows from ``start`` on as lie in one buffer, as a view; None where the first does not."""
        for part, low, _, _ in self._cut(start, 1):
            fit = min(rows, (part.size - low) // row_bytes)
            return part[low : low + fit * row_bytes].reshape(fit, row_bytes) if fit else None
        return None

    def _cut(self, start: int, count: int) -> list[tuple[Rows, int, int, int]]:
        """(buffer, low, high, place in ``start .. start + count``) of every buffer that has some of it."""
        cut, base, stop = [], 0, start + count
        for part in self.parts:
            low, high = max(start - base, 0), min(stop - base, part.size)
            if low < high:
                cut.append((part, low, high, base + low - start))
            base += part.size
        return cut
