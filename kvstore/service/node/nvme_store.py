"""NvmeStore: the devices of a node as one of its tiers, carved without waiting for any of them."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.model.replica import FrameClass, Tier
from kvstore.service.node.nvme_extents import NvmeExtents
from kvstore.tier.base import Bytes
from kvstore.tier.nvme_devices import NvmeDevices

START_SHIFT = 32  # of a generation's 56 bits: four thousand million pages per start, sixteen million starts


class NvmeStore:
    """See ``TierStore``. ``devices`` are joined already; ``close`` closes them."""

    tier = Tier.NVME
    mapped = False
    relayed = False

    def __init__(self, devices: NvmeDevices) -> None:
        self.devices = devices
        self.extents = NvmeExtents(devices)

    @property
    def generation(self) -> int:
        """See ``TierStore``."""
        return self.devices.starts << START_SHIFT

    @property
    def incarnation(self) -> int:
        """The incarnation of the set of devices: tables that name another one are void."""
        return self.devices.incarnation

    @property
    def extent_bytes(self) -> int:
        """See ``TierStore``."""
        return self.devices.extent_bytes

    @property
    def positions(self) -> int:
        """See ``TierStore``."""
        return self.devices.positions

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return self.devices.frames_of(frame_class)

    def header_bytes(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return self.devices.header_bytes(frame_class)

    def header_incarnation(self, position: int) -> int:
        """See ``TierStore``."""
        return self.devices.header_incarnation(position)

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """See ``TierStore``. The device hears of it when something is to be written there."""
        self.extents.carve(position, number, frame_class)

    def drop(self, position: int) -> None:
        """See ``TierStore``. The device hears of it later."""
        self.extents.drop(position)

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""
        wanted = set(positions)
        for position in wanted:
            self.extents.make(position)
        self.devices.open_for_writing(wanted)

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""
        self.devices.close_for_writing(positions)

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        self.devices.write_page(position, frame, frame_class, header, page)

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        self.devices.read_page(position, frame, frame_class, header, page)

    def sync(self) -> None:
        """See ``TierStore``."""
        self.devices.sync()

    def close(self) -> None:
        """See ``TierStore``."""
        self.devices.close()
