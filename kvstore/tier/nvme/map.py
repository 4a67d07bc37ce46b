"""NvmeMap: a node's NVMe as clients read it. Each client opens its own descriptors.

When its devices are open, the daemon writes the node's ``nvme`` file: a line with the checksum of the rest, then JSON
with the path, incarnation and geometry of each device, in the order of the row of positions. A client opens the devices
that it may open. If it cannot open a device, or the device has changed, pages there are misses. A page that was read is
proven by its header (``frame_header.faults``) and its checksums.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import xxhash

from kvstore.errors import InvalidRequest
from kvstore.model.replica import FrameClass
from kvstore.safe_files import read_plain
from kvstore.shm.folder import NodeFolder
from kvstore.tier.nvme.disk import Disk, FileDisk
from kvstore.tier.nvme.table import Superblock, frame_offset, interleave
from kvstore.tier.nvme.target import read_superblock

VERSION: Final = 1
# One request of this size keeps a device busy. A larger one would only delay other requests.
RUN_BYTES_MAX: Final = 2 << 20


class Place(NamedTuple):
    """The disk offset of a frame's header, and the incarnation that the header must have."""

    disk: Disk
    offset: int
    incarnation: int


class NvmeMap:
    """A node's devices, open for reading. Made by ``open``. Any thread may read.

    Ends with ``close``. If other threads may still be reading, drop the last reference instead.

    Attributes:
        incarnation: incarnation of the set, as in the tables of the NVMe extents.
    """

    def __init__(self, incarnation: int, devices: Sequence[tuple[Disk | None, Superblock]]) -> None:
        self.incarnation = incarnation
        self._devices = list(devices)
        self._row = interleave([superblock.positions for _, superblock in devices])

    @classmethod
    def open(cls, folder: NodeFolder) -> NvmeMap | None:
        """Open the devices in the node's ``nvme`` file; None if there is no file or it is invalid."""
        contents = _read(folder)
        if contents is None:
            return None
        incarnation, devices = contents
        return cls(incarnation, [(_open(path, superblock), superblock) for path, superblock in devices])

    @property
    def positions(self) -> int:
        """The number of positions of all devices, including those that could not be opened."""
        return len(self._row)

    def place(self, position: int, frame_class: FrameClass, frame: int) -> Place | None:
        """Return where that frame is; None if its device cannot be read here."""
        if not 0 <= position < len(self._row):
            return None
        at, local = self._row[position]
        disk, superblock = self._devices[at]
        if disk is None:
            return None
        return Place(disk, frame_offset(superblock, local, frame_class, frame), superblock.incarnation)

    def close(self) -> None:
        """Close the devices. No read may be in progress."""
        for disk, _ in self._devices:
            if disk is not None:
                disk.close()
        self._devices = [(None, superblock) for _, superblock in self._devices]


def runs(places: Sequence[tuple[int, int]], stride: int, bytes_max: int = RUN_BYTES_MAX) -> Iterator[slice]:
    """Cut ``places`` (extent or position, frame) into pieces of consecutive frames of at most ``bytes_max``.

    Worked example: (1,4) (1,5) (1,7) (2,8) with room for many: slices 0:2, 2:3, 3:4.
    """
    frames_max = max(1, bytes_max // stride)
    start = 0
    for at in range(1, len(places) + 1):
        if at < len(places) and at - start < frames_max:
            extent, frame = places[at - 1]
            if places[at] == (extent, frame + 1):
                continue
        yield slice(start, at)
        start = at


def named_devices(folder: NodeFolder) -> list[tuple[str, Superblock]]:
    """Return path and expected superblock of each device in the node's ``nvme`` file; empty if the file is invalid."""
    contents = _read(folder)
    return contents[1] if contents is not None else []


def _read(folder: NodeFolder) -> tuple[int, list[tuple[str, Superblock]]] | None:
    try:
        digest, _, text = read_plain(folder.nvme).partition(b"\n")
        if digest != xxhash.xxh3_64_hexdigest(text).encode():
            return None
        document = json.loads(text)
        if document["version"] != VERSION:
            return None
        return int(document["incarnation"]), [_unpack(device) for device in document["devices"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def map_text(incarnation: int, devices: Sequence[tuple[str, Superblock]]) -> bytes:
    """Return the contents of the ``nvme`` file."""
    rows = [
        {
            "path": path,
            "incarnation": superblock.incarnation,
            "size_bytes": superblock.size_bytes,
            "extent_bytes": superblock.extent_bytes,
        }
        for path, superblock in devices
    ]
    text = json.dumps({"version": VERSION, "incarnation": incarnation, "devices": rows}, indent=1).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + text


def _unpack(device: Any) -> tuple[str, Superblock]:
    sizes = (int(device[name]) for name in ("incarnation", "size_bytes", "extent_bytes"))
    incarnation, size_bytes, extent_bytes = sizes
    if size_bytes <= 0 or extent_bytes <= 0:
        raise ValueError(device)
    return str(device["path"]), Superblock.plan(incarnation, "", size_bytes, extent_bytes)


def _open(path: str, expected: Superblock) -> Disk | None:
    """Return the device if it is still the expected one."""
    try:
        disk = FileDisk.open(path, expected.size_bytes, writable=False)
    except (OSError, InvalidRequest):
        return None
    with contextlib.suppress(OSError):
        actual = read_superblock(disk)
        if actual is not None and actual.incarnation == expected.incarnation and actual.positions == expected.positions:
            return disk
    disk.close()
    return None
