"""NvmeDevices: the NVMe devices of one node as one row of positions, interleaved in proportion to their sizes.

Every start rebuilds the row from the devices that are present, because each device stores its own positions. So a
device may be missing, or come back, at any start. Its pages are missing, or return, with it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import xxhash

from kvstore.model.replica import FrameClass
from kvstore.shm.folder import NodeFolder
from kvstore.tier.base import Bytes
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.device import ExtentOnDisk, NvmeDevice
from kvstore.tier.nvme.disk import Disk
from kvstore.tier.nvme.map import map_text
from kvstore.tier.nvme.table import interleave

log = logging.getLogger("kvstore.nvme")


class NvmeDevices:
    """Several devices as one row of positions. Made by ``join``; ends with ``close``, which closes all. Any thread may
    call.

    Every call goes to the device of its position, see ``NvmeDevice``. An OSError has the ``filename`` of the failed
    device, and ``neighbours`` names all other positions on it.

    Attributes:
        devices: the devices, in the order of the configuration.
        incarnation: incarnation of this set. It changes with the devices, with their order, and if one is reformatted.
        starts: number of starts, equal on all devices. It is in the high bits of generations, which makes them unique
            across starts.
    """

    def __init__(self, devices: Sequence[NvmeDevice]) -> None:
        assert devices and len({(device.extent_bytes, device.starts) for device in devices}) == 1, "join them first"
        self.devices = tuple(devices)
        self.extent_bytes = devices[0].extent_bytes
        self._row = interleave([device.positions for device in devices])
        self._global = {place: position for position, place in enumerate(self._row)}
        self.positions = len(self._row)
        names = [(device.incarnation, device.disk.size_bytes) for device in devices]
        self.incarnation = xxhash.xxh3_64_intdigest(json.dumps(names).encode()) or 1

    @classmethod
    def join(cls, devices: Sequence[NvmeDevice]) -> NvmeDevices:
        """Make a set of devices that were opened one by one. After a failure the caller closes them.

        A device may have been absent while the others were in use. So all devices get the largest ``starts``. If two
        extents have the same number, only the extent on the most recently used device is kept.

        Raises:
            OSError: a device fails.
        """
        numbers: set[int] = set()
        latest_first = sorted(devices, key=lambda device: -device.starts)
        for device in latest_first:
            for extent in list(device.extents.values()):
                if extent.number in numbers:
                    log.warning("%s: extent %d is stale and dropped", device.disk.path, extent.number)
                    device.drop(extent.position)
                numbers.add(extent.number)
            device.raise_starts(latest_first[0].starts)
        return cls(devices)

    @classmethod
    def open(cls, disks: Sequence[Disk], owner: str, extent_bytes: int, format: bool = False) -> NvmeDevices:
        """Open all disks, see ``NvmeDevice.open``, and join them. Closes the disks if it raises.

        Raises:
            InvalidRequest, OSError: as ``NvmeDevice.open``, for one disk. Earlier disks may have been changed.
        """
        with contextlib.ExitStack() as stack:
            for disk in disks:
                stack.callback(disk.close)
            devices = cls.join([NvmeDevice.open(disk, owner, extent_bytes, format) for disk in disks])
            stack.pop_all()
            return devices

    @property
    def starts(self) -> int:
        """See the class."""
        return self.devices[0].starts

    @property
    def extents(self) -> dict[int, ExtentOnDisk]:
        """The carved extents by position in the row; a copy."""
        extents = {}
        for at, device in enumerate(self.devices):
            for local, extent in device.extents.items():
                position = self._global[at, local]
                extents[position] = replace(extent, position=position)
        return extents

    @property
    def doubted(self) -> set[int]:
        """See ``NvmeDevice``."""
        return {number for device in self.devices for number in device.doubted}

    def place(self, position: int) -> tuple[NvmeDevice, int]:
        """Return the device of this position, and the position on the device."""
        assert 0 <= position < self.positions, position
        at, local = self._row[position]
        return self.devices[at], local

    def device_of(self, position: int) -> int:
        """Return the index in ``devices`` of this position's device."""
        return self._row[position][0]

    def positions_of(self, device: int) -> list[int]:
        """Return all positions of the device with this index."""
        return [position for position, (at, _) in enumerate(self._row) if at == device]

    def neighbours(self, position: int) -> list[int]:
        """Return all positions on the same device, which are lost together."""
        return self.positions_of(self.device_of(position))

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return self.devices[0].frames_of(frame_class)

    def header_bytes(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return geometry.header_bytes(frame_class)

    def header_incarnation(self, position: int) -> int:
        """Return the incarnation in the headers of frames at this position, which is the device's incarnation."""
        return self.place(position)[0].incarnation

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """See ``TierStore`` and ``NvmeDevice``."""
        device, local = self.place(position)
        device.carve(local, number, frame_class)

    def drop(self, position: int) -> None:
        """See ``TierStore`` and ``NvmeDevice``."""
        device, local = self.place(position)
        device.drop(local)

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """See ``NvmeDevice``. If one device fails, none is open."""
        done: list[tuple[NvmeDevice, list[int]]] = []
        try:
            for device, locals_ in self._by_device(positions):
                device.open_for_writing(locals_)
                done.append((device, locals_))
        except OSError:
            for device, locals_ in done:
                device.close_for_writing(locals_)
            raise

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """See ``NvmeDevice``."""
        for device, locals_ in self._by_device(positions):
            device.close_for_writing(locals_)

    def version(self, position: int) -> int:
        """See ``NvmeDevice``."""
        device, local = self.place(position)
        return device.version(local)

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        device, local = self.place(position)
        device.write_page(local, frame, frame_class, header, page)

    def write_run(self, position: int, first: int, frame_class: FrameClass, frames: Bytes) -> None:
        """See ``NvmeDevice``."""
        device, local = self.place(position)
        device.write_run(local, first, frame_class, frames)

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        device, local = self.place(position)
        device.read_page(local, frame, frame_class, header, page)

    def read_run(self, position: int, first: int, frame_class: FrameClass, frames: Bytes) -> None:
        """See ``NvmeDevice``."""
        device, local = self.place(position)
        device.read_run(local, first, frame_class, frames)

    def read_header(self, position: int, frame: int, frame_class: FrameClass, header: Bytes) -> None:
        """See ``NvmeDevice``."""
        device, local = self.place(position)
        device.read_header(local, frame, frame_class, header)

    def sync(self) -> None:
        """See ``TierStore``. Syncs every device that was written to."""
        for device in self.devices:
            device.sync()

    def write_directory(self, position: int, rows: Bytes) -> None:
        """See ``NvmeDevice``."""
        device, local = self.place(position)
        device.write_directory(local, rows)

    def mark_clean(self, versions: dict[int, int]) -> set[int]:
        """See ``NvmeDevice``. If one device fails, extents on others may be clean."""
        clean = set()
        for at, device in enumerate(self.devices):
            mine = {self._row[p][1]: version for p, version in versions.items() if self._row[p][0] == at}
            if mine:  # skips devices without a request, which might not be responding
                clean |= {self._global[at, local] for local in device.mark_clean(mine)}
        return clean

    def directory(self, position: int) -> Bytes | None:
        """See ``NvmeDevice``."""
        device, local = self.place(position)
        return device.directory(local)

    def add_written(self, day: int, nbytes: int) -> None:
        """See ``NvmeDevice``. The bytes are counted for the set, and stored on its first device."""
        self.devices[0].add_written(day, nbytes)

    @property
    def contact(self) -> int | None:
        """The earliest ``contact`` of the devices; None if all are empty."""
        return min((minute for device in self.devices if (minute := device.contact) is not None), default=None)

    def note_contact(self, minute: int) -> None:
        """Store the time of a contact on every device, see ``NvmeDevice.note_contact``. Raises OSError."""
        for device in self.devices:
            device.note_contact(minute)

    def written_today(self, day: int) -> int:
        """See ``NvmeDevice``. Return the sum of all devices."""
        return sum(device.written_today(day) for device in self.devices)

    def write_map(self, folder: NodeFolder) -> None:
        """Write the node's ``nvme`` file, which tells clients where the devices are. The old file is replaced
        atomically.

        Raises:
            OutOfSpace: there is no memory for it. The old file stays.
        """
        devices = [(os.fspath(device.disk.path), device.superblock) for device in self.devices]
        text = map_text(self.incarnation, devices)
        folder.new_file(folder.nvme, len(text), text)

    def close(self) -> None:
        """Close all devices."""
        for device in self.devices:
            device.close()

    def _by_device(self, positions: Iterable[int]) -> list[tuple[NvmeDevice, list[int]]]:
        groups: dict[int, list[int]] = defaultdict(list)
        for position in positions:
            at, local = self._row[position]
            groups[at].append(local)
        return [(self.devices[at], locals_) for at, locals_ in groups.items()]


def today() -> int:
    """Return the current day (UTC) as a number since the epoch, by which written bytes are counted."""
    return int(time.time()) // 86_400
