"""MemoryDisk: a peer of ``FileDisk`` in memory, as demanding as a real one."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.tier.nvme.disk import BLOCK_BYTES, Bytes, aligned_buffer, check_blocks


class MemoryDisk:
    """A disk of this process's memory. Gone with its last reference, not with ``close``."""

    def __init__(self, size_bytes: int, path: str = "memory") -> None:
        assert size_bytes > 0 and size_bytes % BLOCK_BYTES == 0, size_bytes
        self.path = path
        self.size_bytes = size_bytes
        self.direct = True  # and as demanding as a disk: see _check
        self.data = aligned_buffer(size_bytes)

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        self._check(offset, buffers)
        for buffer in buffers:
            buffer.reshape(-1)[:] = self.data[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        self._check(offset, buffers)
        for buffer in buffers:
            self.data[offset : offset + buffer.nbytes] = buffer.reshape(-1)
            offset += buffer.nbytes

    def sync(self) -> None:
        """See ``Disk``: there is no power to be lost."""

    def close(self) -> None:
        """See ``Disk``: it may be opened again."""

    def _check(self, offset: int, buffers: Sequence[Bytes]) -> None:
        check_blocks(self, offset, buffers)
        for buffer in buffers:
            assert buffer.ctypes.data % BLOCK_BYTES == 0 or not buffer.nbytes, "O_DIRECT would refuse this buffer"
            assert buffer.flags.c_contiguous
