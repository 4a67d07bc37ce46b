"""Host memory: page-aligned arrays, copies between arrays, and reusable buffers for disks."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

PAGE_BYTES: Final = 4096


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """Return a new array like ``numpy.empty``, but page-aligned. Such arrays are fastest as ``out`` of a store.

    numpy's large arrays usually start 16 bytes after a memory page. Pages of a store start at one, and processors copy
    faster between addresses with the same offset in their memory pages.

    Raises:
        InvalidRequest: a negative shape, or a type that is not plain numbers. The error names the argument.
    """
    lengths = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    if any(length < 0 for length in lengths):
        raise InvalidRequest("shape", f"must not be negative (got {shape})")
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise InvalidRequest("dtype", str(error)) from None
    if kind.hasobject or not kind.itemsize:
        raise InvalidRequest("dtype", f"must be plain numbers (got {kind})")
    nbytes = math.prod(lengths) * kind.itemsize
    memory = np.empty(nbytes + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + nbytes].view(kind).reshape(lengths)


def _is_amd() -> bool:
    try:
        with open("/proc/cpuinfo", "rb") as file:
            return b"AuthenticAMD" in file.read(4096)
    except OSError:
        return False


# On AMD's Zen processors `rep movsb` has a half to a tenth of its speed if the target's offset in its memory page is 1
# to 31 bytes larger than the source's, and glibc before 2.39 copies rows of these lengths that way (its bug 30994). A
# loop over vectors is equally fast for all offsets. For good offsets `rep movsb` is faster by up to a third.
_LOOP_LENGTHS: Final = range(16 << 10, 1 << 20) if _is_amd() else range(0)
_SLOW_OFFSETS: Final = range(1, 32)

_first: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer
_address = ctypes.addressof


def copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copy rows of bytes, ``target[...] = source``, in the fastest way for this processor. Same shapes, no overlap."""
    if target.shape[-1] in _LOOP_LENGTHS and _may_be_slow(target, source):
        np.bitwise_or(source, source, out=target)  # numpy copies with memcpy, but this is a loop of its own
    else:
        target[...] = source


def _may_be_slow(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> bool:
    """Return True if some rows might have offsets for which `rep movsb` is slow."""
    if target.ndim > 1 and (target.ndim > 2 or (target.strides[0] - source.strides[0]) % PAGE_BYTES):
        return True
    try:
        offset = _address(_first(target)) - _address(_first(source))
    except (TypeError, ValueError):  # read-only, or rows that are not contiguous
        offset = target.ctypes.data - source.ctypes.data
    return offset % PAGE_BYTES in _SLOW_OFFSETS


Bytes = npt.NDArray[np.uint8]

LARGE_PAGE_BYTES: Final = 2 << 20


class Bounces:
    """Reusable buffers in large memory pages, because a disk is slower if its memory consists of many small pages.

    Measured with batches of 8 MiB and four threads: reads reach 1.2-1.8 GB/s into ordinary or shared memory, and 3.5
    into large pages; writes 3-4 and 6.7. To allocate a buffer each time would cost more than it gains. So at most
    ``KEPT_MAX`` buffers are kept."""

    KEPT_MAX: Final = 8

    def __init__(self) -> None:
        self._buffers: list[Bytes] = []

    @contextlib.contextmanager
    def borrow(self, nbytes: int) -> Iterator[Bytes]:
        """Yield ``[nbytes]``, page-aligned, with undefined contents, until the context ends."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = large_buffer(nbytes)
        if len(buffer) < nbytes:
            buffer = large_buffer(nbytes)
        yield buffer[:nbytes]
        if len(self._buffers) < self.KEPT_MAX:
            self._buffers.append(buffer)


def large_buffer(nbytes: int) -> Bytes:
    """Allocate at least ``nbytes``, aligned to large pages, and in large pages if the kernel has them."""
    size_bytes = -(-nbytes // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES  # entire pages
    memory = mmap.mmap(-1, size_bytes + LARGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % LARGE_PAGE_BYTES
    return array[start : start + size_bytes]
