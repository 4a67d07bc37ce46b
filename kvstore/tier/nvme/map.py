"""NvmeMap: a node's NVMe as its clients read it, through descriptors of their own.

The daemon writes the node's ``nvme`` file when its devices are open: a line with the sum of the rest, then JSON: of
each device its path, incarnation and geometry, in the order that makes the row of positions. A client opens what it
may; a device that it may not open, or that is another by now, merely has no place: its pages are misses here. Nothing
read is believed before its header (``frame_header.faults``) and its checksums hold.
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
# One request of this size keeps a device busy; more would only keep other requests waiting.
RUN_BYTES_MAX: Final = 2 << 20


class Place(NamedTuple):
    """Where a frame's header begins, and the incarnation that this header must carry."""

    disk: Disk
    offset: int
    incarnation: int


class NvmeMap:
    """A node's devices, open for reading. Made by ``open``. Any thread may read.

    It is over with ``close``, or, where others may still be reading, with its last reference.

    Attributes:
        incarnation: of the set, as the NVMe extents' tables carry it.
    """

    def __init__(self, incarnation: int, devices: Sequence[tuple[Disk | None, Superblock]]) -> None:
        self.incarnation = incarnation
        self._devices = list(devices)
        self._row = interleave([superblock.positions for _, superblock in devices])

    @classmethod
    def open(cls, folder: NodeFolder) -> NvmeMap | None:
        """The devices that the node's ``nvme`` file names; None where there is none, or it makes no sense."""
        stored = _stored(folder)
        if stored is None:
            return None
        incarnation, named = stored
        return cls(incarnation, [(_opened(path, superblock), superblock) for path, superblock in named])

    @property
    def positions(self) -> int:
        """The positions of all devices together, including those that could not be opened."""
        return len(self._row)

    def place(self, position: int, frame_class: FrameClass, frame: int) -> Place | None:
        """Where that frame lies; None where its device cannot be read here."""
        if not 0 <= position < len(self._row):
            return None
        at, local = self._row[position]
        disk, superblock = self._devices[at]
        if disk is None:
            return None
        return Place(disk, frame_offset(superblock, local, frame_class, frame), superblock.incarnation)

    def close(self) -> None:
        """Close the devices. No read may be running."""
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
    """Path and expected superblock of each device that the node's ``nvme`` file names; none where it makes no sense."""
    stored = _stored(folder)
    return stored[1] if stored is not None else []


def _stored(folder: NodeFolder) -> tuple[int, list[tuple[str, Superblock]]] | None:
    try:
        digest, _, text = read_plain(folder.nvme).partition(b"\n")
        if digest != xxhash.xxh3_64_hexdigest(text).encode():
            return None
        stored = json.loads(text)
        if stored["version"] != VERSION:
            return None
        return int(stored["incarnation"]), [_named(device) for device in stored["devices"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def map_text(incarnation: int, devices: Sequence[tuple[str, Superblock]]) -> bytes:
    """What the ``nvme`` file holds."""
    named = [
        {
            "path": path,
            "incarnation": superblock.incarnation,
            "size_bytes": superblock.size_bytes,
            "extent_bytes": superblock.extent_bytes,
        }
        for path, superblock in devices
    ]
    text = json.dumps({"version": VERSION, "incarnation": incarnation, "devices": named}, indent=1).encode()
    return xxhash.xxh3_64_hexdigest(text).encode() + b"\n" + text


def _named(device: Any) -> tuple[str, Superblock]:
    sizes = (int(device[name]) for name in ("incarnation", "size_bytes", "extent_bytes"))
    incarnation, size_bytes, extent_bytes = sizes
    if size_bytes <= 0 or extent_bytes <= 0:
        raise ValueError(device)
    return str(device["path"]), Superblock.planned(incarnation, "", size_bytes, extent_bytes)


def _opened(path: str, expected: Superblock) -> Disk | None:
    """The device, where it still is the one that is meant."""
    try:
        disk = FileDisk.open(path, expected.size_bytes, writable=False)
    except (OSError, InvalidRequest):
        return None
    with contextlib.suppress(OSError):
        found = read_superblock(disk)
        if found is not None and found.incarnation == expected.incarnation and found.positions == expected.positions:
            return disk
    disk.close()
    return None
