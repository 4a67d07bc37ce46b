"""Header: one page of 8-byte words that the daemon writes and each client reads before every operation.

A client notices with one load each that the index was rebuilt (``epoch``), that the segment was replaced
(``incarnation``; 0: the node was purged), and whether the daemon is alive (``heartbeat_ns``). The page is rewritten in
place, never replaced, so that maps made before a restart of the daemon see the new words.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from pathlib import Path
from typing import Final, overload

from kvstore.errors import VersionMismatch
from kvstore.safe_files import open_plain
from kvstore.shm.folder import NodeFolder

HEADER_BYTES: Final = 4096
FORMAT_VERSION: Final = 5  # of all files of a node's folder that have no version of their own
_MAGIC: Final = int.from_bytes(b"KVSTORE1", "little")
_WORDS: Final = 22  # number of words in use


class DaemonState(IntEnum):
    """The state that the daemon wrote last."""

    STARTING = 0
    READY = 1
    STOPPED = 2
    ENDING = 3  # it saves the content of its memory, and accepts no more


class _Word:
    """One word of the page as an attribute: reading is one aligned 8-byte load, and assigning one store."""

    def __init__(self, position: int) -> None:
        self.position = position

    @overload
    def __get__(self, header: None, owner: type[Header]) -> _Word: ...
    @overload
    def __get__(self, header: Header, owner: type[Header]) -> int: ...
    def __get__(self, header: Header | None, owner: type[Header]) -> int | _Word:
        return self if header is None else header.words[self.position]

    def __set__(self, header: Header, value: int) -> None:
        header.words[self.position] = value


class Header:
    """A mapped header page. Made by ``create`` or ``open``; ends with ``close()``.

    Assigning needs a writable map (the daemon's); otherwise it raises TypeError. ``words`` is the page itself.
    """

    incarnation = _Word(2)  # random, not 0; drawn when the segment was made
    epoch = _Word(3)  # epoch of the index
    extent_bytes = _Word(4)  # size of each position of the segment
    positions = _Word(5)
    pid = _Word(6)  # of the daemon
    heartbeat_ns = _Word(7)  # CLOCK_MONOTONIC, stored by the daemon each tick
    state = _Word(8)  # DaemonState
    populated_bytes = _Word(11)  # bytes of the segment whose memory is allocated
    next_extent = _Word(12)  # smaller extent numbers were used; none is reused, even after a restart
    verify_reads = _Word(13)  # 1: clients verify checksums on every read
    names_forgotten = _Word(14)  # how often the node has forgotten names of roots: clients then name theirs again
    growing_to = _Word(15)  # the incarnation that the node's files are changing to; 0: none. See ``node.startup``
    puts_id = _Word(16)  # of its ``put_log.PutLog``; 0: none
    mounts = _Word(17)  # number of mounted segments, see ``mounted``
    replicas = _Word(18)  # on how many nodes clients store a page unless they say otherwise; 0: the node is in no pool
    object_stamp = _Word(19)  # stamps up to this one are in tombstones: new objects get later stamps
    contact = _Word(20)  # when the node last had contact with its pool, in minutes since the epoch; 0: never
    lower_tiers = _Word(21)  # number of tiers below DRAM that the node has

    def __init__(self, path: Path, map_: mmap.mmap) -> None:
        self.path = path
        self._map = map_
        self.words = memoryview(map_).cast("Q")

    @classmethod
    def create(cls, folder: NodeFolder, incarnation: int, extent_bytes: int, positions: int) -> Header:
        """Write the header of a new segment: state STARTING, this pid and boot; epoch and the rest are 0.

        An older header is overwritten in place, so that clients that map it see the new incarnation.

        Raises:
            OutOfSpace: no memory for the page.
        """
        assert incarnation != 0, "0 means purged"
        path = folder.header
        try:
            header = cls(path, _map(path, writable=True))
        except (FileNotFoundError, ValueError):  # ValueError: the file is too short
            folder.new_file(path, HEADER_BYTES, b"")
            header = cls(path, _map(path, writable=True))
        words = header.words
        words[0] = 0  # a client that opens the header now sees none; the magic is stored last
        for position in range(1, _WORDS):
            words[position] = 0
        header.extent_bytes, header.positions = extent_bytes, positions
        header.pid, header.state = os.getpid(), DaemonState.STARTING
        boot = boot_id()
        words[9], words[10] = int.from_bytes(boot[:8], "little"), int.from_bytes(boot[8:], "little")
        words[1], header.incarnation = FORMAT_VERSION, incarnation
        words[0] = _MAGIC
        return header

    @classmethod
    def open(cls, folder: NodeFolder, writable: bool = False) -> Header | None:
        """Map the existing header. Return None if it is absent, too short, incomplete, or belongs to a purged node.

        Raises:
            VersionMismatch: it has another version of the file formats.
        """
        try:
            header = cls(folder.header, _map(folder.header, writable))
        except (FileNotFoundError, ValueError):  # ValueError: the file is too short
            return None
        magic, version = header.words[0], header.words[1]
        if magic != _MAGIC or header.incarnation == 0:
            header.close()
            return None
        if version != FORMAT_VERSION:
            header.close()
            raise unknown_version(folder, "file", version, FORMAT_VERSION)
        return header

    @property
    def boot_id(self) -> bytes:
        """16 bytes that identify the boot in which the header was created. Deadlines in records are void in another
        boot."""
        return self.words[9].to_bytes(8, "little") + self.words[10].to_bytes(8, "little")

    def close(self) -> None:
        """Unmap. Reading a word afterwards raises ValueError. The file stays."""
        self.words.release()
        self._map.close()


def unknown_version(folder: NodeFolder, what: str, version: int, known: int) -> VersionMismatch:
    """Return the error for a sound file of a node whose version this program cannot read."""
    return VersionMismatch(
        f"node {folder.name!r} has {what} format {version}, this program knows {known}; "
        "run the same version on both sides (or `kvstore purge` the node)"
    )


def boot_id() -> bytes:
    """Return 16 bytes that identify the running boot of this machine; zeros if the kernel has no boot id."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return bytes.fromhex(file.read().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)


def _map(path: Path, writable: bool) -> mmap.mmap:
    fd = open_plain(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(fd, HEADER_BYTES, mmap.MAP_SHARED, protection)
    finally:
        os.close(fd)
