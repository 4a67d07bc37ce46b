"""Link: limits the speed of KV between two engines, for tests and benchmarks.

Bytes are really moved; then the link is occupied until they would have arrived. A link serves one transfer at a time,
as a network card does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstore.errors import InvalidRequest

GB = 1e9
# One-way speed of the fabrics in bytes per second, and the start-up time of a transfer.
FABRICS: dict[str, tuple[float, float]] = {
    "nvlink": (800 * GB, 2e-6),
    "pcie": (30 * GB, 5e-6),
    "rdma": (25 * GB, 5e-6),
    "10gbe": (1.25 * GB, 30e-6),
}
_UNITS = {"B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
SLEEP_MAX_S = 0.05  # so that a transfer that is cancelled notices


class Link:
    """A bound on bytes per second. ``Link(0)`` bounds nothing. Threads may share it."""

    def __init__(self, bytes_per_s: float = 0.0, latency_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, size_bytes: int, given_up: Callable[[], bool] = lambda: False) -> None:
        """Return when ``size_bytes`` more would have arrived, or when ``given_up`` returns True."""
        if not self.bytes_per_s:
            return
        with self._lock:
            start = max(time.monotonic(), self._free_at)
            self._free_at = until = start + size_bytes / self.bytes_per_s
        until += self.latency_s
        while (left_s := until - time.monotonic()) > 0 and not given_up():
            time.sleep(min(left_s, SLEEP_MAX_S))


def parse_link(text: str) -> Link:
    """Parse ``none``, a fabric of ``FABRICS``, or a speed such as ``1.5GB/s``.

    Raises:
        InvalidRequest: it is not one of these.
    """
    if text in ("", "none"):
        return Link()
    if text in FABRICS:
        return Link(*FABRICS[text])
    for unit in sorted(_UNITS, key=len, reverse=True):
        number = text.removesuffix(unit)
        if number != text:
            try:
                speed = float(number) * _UNITS[unit]
            except ValueError:
                break
            if 0 < speed < 1e15:
                return Link(speed)
            break
    raise InvalidRequest("link", f"{text!r} is not none, {', '.join(FABRICS)} or a speed such as 1.5GB/s")
