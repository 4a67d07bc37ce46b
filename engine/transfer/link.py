"""Link: limits the speed at which KV moves between two engines, for tests and benchmarks.

The bytes are moved first, at full speed. Then the link is busy until they would have arrived over the simulated fabric.
A link serves one transfer at a time, like a network card.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvstore.errors import InvalidRequest

GB = 1e9
# One-way speed in bytes per second, and the latency of a transfer in seconds.
FABRICS: dict[str, tuple[float, float]] = {
    "nvlink": (800 * GB, 2e-6),
    "pcie": (30 * GB, 5e-6),
    "rdma": (25 * GB, 5e-6),
    "10gbe": (1.25 * GB, 30e-6),
}
_UNITS = {"B/s": 1.0, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
SLEEP_MAX_S = 0.05  # how long a cancelled transfer may take to end


class Link:
    """A limit on bytes per second; 0 for no limit. Threads may share it."""

    def __init__(self, bytes_per_s: float = 0.0, latency_s: float = 0.0) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the transfers so far will be over

    def carry(self, size_bytes: int, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait until ``size_bytes`` more would have arrived, or until ``is_cancelled`` returns True."""
        if not self.bytes_per_s:
            return
        with self._lock:
            start_s = max(time.monotonic(), self._free_s)
            self._free_s = end_s = start_s + size_bytes / self.bytes_per_s
        end_s += self.latency_s
        while (remaining_s := end_s - time.monotonic()) > 0 and not is_cancelled():
            time.sleep(min(remaining_s, SLEEP_MAX_S))


def parse_link(text: str) -> Link:
    """Parse ``none``, a fabric of ``FABRICS``, or a speed such as ``1.5GB/s``.

    Raises:
        InvalidRequest: the text has none of these forms.
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
    raise InvalidRequest("link", f"must be none, {', '.join(FABRICS)} or a speed such as 1.5GB/s (got {text!r})")
