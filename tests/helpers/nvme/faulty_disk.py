"""FaultyDisk: a disk in memory that loses power and fails on request, under one seed."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Sequence

import pytest

from kvstore.tier.nvme.disk import Bytes
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
        self._durable = self.data.copy()
        self._unsynced: list[tuple[int, Bytes]] = []

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        self._fail(self.fail_reads)
        super().read(offset, buffers)

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        before = self.data[offset : offset + sum(buffer.nbytes for buffer in buffers)].copy()
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
        for offset, written in self._unsynced:
            self._durable[offset : offset + len(written)] = written
        self._unsynced = []

    def power_loss(self) -> FaultyDisk:
        """The disk as the next start finds it: what was synced, and of the rest any sectors, in any order."""
        after = FaultyDisk(self.size_bytes, self.random.randrange(1 << 32), self.path)
        after.data[:] = self._durable
        log = list(self._unsynced)
        self.random.shuffle(log)
        for offset, written in log:
            share = self.random.choice((0, 0.5, 0.9, 1))
            for at in range(0, len(written), SECTOR_BYTES):
                if self.random.random() < share:
                    after.data[offset + at : offset + at + SECTOR_BYTES] = written[at : at + SECTOR_BYTES]
        after._durable[:] = after.data
        return after

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
