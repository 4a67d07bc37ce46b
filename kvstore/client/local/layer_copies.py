"""LayerCopies: layers of one writer on their way from a device into its frames."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.client.buffers import Rows
from kvstore.client.device_link import DeviceLink, link_of
from kvstore.client.device_rows import DeviceRows
from kvstore.client.pins import PinnedExtent
from kvstore.errors import DeadlineExceeded
from kvstore.rpc.copies import Copies
from kvstore.tier.device import DeviceEvent

Pairs = list[tuple[Rows, DeviceRows]]


class _Begun(NamedTuple):
    layer: int
    link: DeviceLink
    event: DeviceEvent
    pairs: Pairs


class LayerCopies:
    """Copies that were begun and nobody waits for yet. While there is one, no session ends beneath it. Of one thread.

    Ends with ``finish``. Where that gives up, the session stays until the process ends, and its frames with it: the
    device may still write into them.
    """

    def __init__(self) -> None:
        self._copies: Copies | None = None  # entered, while there are some
        self._begun: deque[_Begun] = deque()

    def __bool__(self) -> bool:
        return bool(self._begun)

    def begin(self, copies: Copies, layer: int, extents: Sequence[PinnedExtent], pairs: Pairs) -> None:
        """Copy one layer into frames of these extents, behind what the caller's stream does.

        Raises:
            DeviceLost: nothing was begun.
        """
        link = link_of(pairs[0][1].device)
        event = link.copy(pairs, extents, to_device=False, layer=True)
        if self._copies is None:
            copies.__enter__()
            self._copies = copies
        self._begun.append(_Begun(layer, link, event, pairs))

    def below(self, layers: int) -> int:
        """How many leading layers at most are there, of ``layers``. Waits for nothing. Raises DeviceLost."""
        while self._begun and self._begun[0].event.over():
            self._begun.popleft()
        self._leave()
        return min((begun.layer for begun in self._begun), default=layers)

    def finish(self) -> None:
        """Wait until all are there.

        Raises:
            DeviceLost: they never will be; nothing writes any more.
            DeadlineExceeded: the device may still write.
        """
        memory = list(self._begun)
        try:
            for _, link, event, _ in memory:
                link.wait(event, memory)
        except DeadlineExceeded:
            self._copies = None  # one that does not end
            raise
        finally:
            self._begun.clear()
            self._leave()

    def _leave(self) -> None:
        if not self._begun and self._copies is not None:
            copies, self._copies = self._copies, None
            copies.__exit__()
