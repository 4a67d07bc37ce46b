"""FaultyDisk: a disk in memory that loses power and fails on request, under one seed."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Sequence

import pytest

from kvstore.tier.nvme.disk import BLOCK_BYTES, Bytes
from tests.helpers.nvme.memory_disk import MemoryDisk

SECTOR_BYTES = 512  # what a disk writes whole or not at all


class FaultyDisk(MemoryDisk):
    """Reads see every write; power loss keeps of those after the last ``sync`` what chance wants.

    Attributes:
        fail_reads, fail_writes, fail_sync: errno that such calls raise from now on, or None.
        fail_after: so many more calls of the failing kinds succeed first. A failing write is torn as by power loss.
        steps: writes and syncs so far.
        cut_at: power is lost at this step (``PowerCut``), half way through it.
    """

    def __init__(self, size_bytes: int, seed: int, path: str = "faulty") -> None:
        super().__init__(size_bytes, path)
        self.random = random.Random(seed)
        self.fail_reads: int | None = None
        self.fail_writes: int | None = None
        self.fail_sync: int | None = None
        self.fail_after = 0
        self.steps = 0
        self.cut_at: int | None = None
        self._unsynced: list[tuple[int, Bytes]] = []
        self._durable: dict[int, Bytes] = {}  # blocks that were written since, as they were: by their offsets

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        self._fail(self.fail_reads)
        super().read(offset, buffers)

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        before = self.data[offset : offset + sum(buffer.nbytes for buffer in buffers)].copy()
        for at in range(0, len(before), BLOCK_BYTES):
            self._durable.setdefault(offset + at, before[at : at + BLOCK_BYTES])
        super().write(offset, buffers)
        written = self.data[offset : offset + len(before)].copy()
        self._unsynced.append((offset, written))
        try:
            self._step()
            self._fail(self.fail_writes)
        except OSError:
            for at in range(0, len(before), SECTOR_BYTES):
                if self.random.random() < 0.5:
                    written[at : at + SECTOR_BYTES] = before[at : at + SECTOR_BYTES]
            self.data[offset : offset + len(before)] = written
            raise

    def sync(self) -> None:
        """See ``Disk``."""
        self._step()
        self._fail(self.fail_sync)
        self._unsynced, self._durable = [], {}

    def power_loss(self) -> FaultyDisk:
        """The disk as the next start finds it; this one stays as it is."""
        after = FaultyDisk(self.size_bytes, self.random.randrange(1 << 32), self.path)
        after.data[:] = self.data
        self._lose(after.data)
        return after

    def lose_power(self) -> None:
        """From here on this is the disk as the next start finds it."""
        self._lose(self.data)
        self._unsynced, self._durable = [], {}

    def _lose(self, data: Bytes) -> None:
        """Keep what was synced, and any sectors of the rest, in any order."""
        for offset, block in self._durable.items():
            data[offset : offset + BLOCK_BYTES] = block
        log = list(self._unsynced)
        self.random.shuffle(log)
        for offset, written in log:
            share = self.random.choice((0, 0.5, 0.9, 1))
            for at in range(0, len(written), SECTOR_BYTES):
                if self.random.random() < share:
                    data[offset + at : offset + at + SECTOR_BYTES] = written[at : at + SECTOR_BYTES]

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.cut_at:
            raise PowerCut

    def _fail(self, code: int | None) -> None:
        if code is None:
            return
        if self.fail_after > 0:
            self.fail_after -= 1
            return
        raise OSError(code, os.strerror(code), self.path)


class PowerCut(BaseException):
    """The machine is off; what the program would do next does not happen."""


EIO = errno.EIO


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """As file systems without O_DIRECT do."""
    real = fcntl.fcntl

    def refusing(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
