"""HostDevice: the peer of a GPU in host memory, which delays and reorders work as far as a device may.

Nothing happens at the time of a call. Work runs when a later event is waited for or found to be over, and only the work
that this event needs: earlier work of its stream, and of the streams that it waits for. Sources are read at that time,
and the pieces of one copy are copied in a random order (by seed). A target is poisoned as soon as no earlier call can
still read it. So code that does not wait for an event always finds wrong bytes.

``reaches`` says which of these devices can reach each other. A copy from the memory of a device that is out of reach is
detected as an error. Shared memory is a memory file, which other processes map by its descriptor. Tests may lose
the device (``lose``), hold its work back (``hold``), make it refuse to pin memory (``refuse_registration``), and
replace the physical pages of memory (``replace_pages``).
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import ClassVar, Final

import numpy as np

from kvstore.device.base import Addresses, Bytes, DeviceEvent, DeviceExport, DeviceLost
from kvstore.errors import DeadlineExceeded, OutOfSpace, Unavailable

POISON: Final = 0xD5

Span = tuple[int, int]  # from, to


class HostMemory:
    """See ``DeviceMemory``. Addresses are never reused, so that a use after ``free`` is detected."""

    def __init__(
        self, on_free: Callable[[HostMemory], None], nbytes: int, descriptor: int = -1, theirs: bool = False
    ) -> None:
        self._on_free = on_free
        self._map = mmap.mmap(descriptor, max(nbytes, 1))
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.live = True
        self.descriptor = -1 if theirs else descriptor  # -1: it is not shared; a mapping has its own
        self.theirs = theirs  # memory of another process
        if not theirs:
            ctypes.memset(self.address, POISON, nbytes)

    def free(self) -> None:
        """See ``DeviceMemory``."""
        self._on_free(self)

    def view(self) -> Bytes:
        """Return a view of the bytes for tests and for functions that act as kernels. Programs must copy the bytes."""
        return np.frombuffer(self._map, np.uint8, self.nbytes)

    def let_go(self) -> None:
        """Give the pages back, and keep the addresses."""
        self.live = False
        self._map.madvise(mmap.MADV_DONTNEED)
        if self.descriptor >= 0:
            os.close(self.descriptor)


def check_apart(reads: list[Span], writes: list[Span]) -> None:
    """Assert that no piece is written where another piece is read or written."""
    order = sorted(writes)
    for (_, end), (begin, _) in pairwise(order):
        assert end <= begin, "pieces of one copy are written over each other"
    for begin, end in reads:
        at = bisect_right(order, (begin, begin)) - 1
        assert at < 0 or order[at][1] <= begin, "a piece is read where another is written"
        assert at + 1 >= len(order) or end <= order[at + 1][0], "a piece is read where another is written"


def check_mapped(pieces: list[Span], *, writable: bool) -> None:
    """Assert that every piece is in memory that this process may read, or write."""
    if not pieces:
        return
    ranges: list[list[int]] = []  # in order; adjacent ranges are joined
    with open("/proc/self/maps") as file:
        for line in file:
            span, mode = line.split(maxsplit=2)[:2]
            begin, end = (int(bound, 16) for bound in span.split("-"))
            if not mode.startswith("rw" if writable else "r"):
                continue
            if ranges and ranges[-1][1] == begin:
                ranges[-1][1] = end
            else:
                ranges.append([begin, end])
    for begin, end in pieces:
        at = bisect_right(ranges, begin, key=lambda span: span[0]) - 1
        assert at >= 0 and end <= ranges[at][1], f"{begin, end} is not {'writable ' if writable else ''}memory"


FALSE_ANSWERS_MAX: Final = 2  # how often an event may report that it is not over although it could be

_FIRST_HANDLE: Final = 0x1000  # 0, 1 and 2 are the default streams


class _Work:
    """An item of a stream: a copy, a wait, or a kernel."""

    def __init__(self, run: Callable[[], None], reads: list[Span], writes: list[Span] | None) -> None:
        self.run, self.reads, self.writes = run, reads, writes  # ``writes`` None: the item may write anywhere

    def touches(self, piece: Span) -> bool:
        """Return True if the item may read or write there."""
        return self.writes is None or any(a < piece[1] and piece[0] < b for a, b in (*self.reads, *self.writes))


class HostEvent:
    """See ``DeviceEvent``."""

    def __init__(self, device: HostDevice, stream: HostStream, work_before: int, falses: int) -> None:
        self._device, self.stream, self.work_before, self._falses = device, stream, work_before, falses

    def over(self) -> bool:
        """See ``DeviceEvent``. Returns False a few times first."""
        with self._device.changed:
            self._device.check()
            if self.stream.done >= self.work_before:
                return True
            if self._falses or self._device.held:
                self._falses = max(0, self._falses - 1)
                return False
            self._device.run(self)
            return True

    def wait(self, deadline_s: float) -> None:
        """See ``DeviceEvent``."""
        device = self._device
        with device.changed:
            device.check()
            while self.stream.done < self.work_before:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(f"{device.name} did not do its work in time")
                if not device.held:
                    device.run(self)
                    return
                device.changed.wait(left_s)
                device.check()


class HostStream:
    """See ``DeviceStream``."""

    def __init__(self, device: HostDevice, handle: int) -> None:
        self._device = device
        self.handle = handle
        self.work: deque[_Work] = deque()
        self.done = 0

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """See ``DeviceStream``."""
        assert targets.dtype == sources.dtype == nbytes.dtype == np.uint64, "addresses are uint64"
        assert targets.shape == sources.shape == nbytes.shape and targets.ndim == 1
        pieces = [piece for piece in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True) if piece[2]]
        reads = [(source, source + size) for _, source, size in pieces]
        writes = [(target, target + size) for target, _, size in pieces]
        check_apart(reads, writes)
        device = self._device
        with device.changed:
            device.check()
            check_mapped(device.host_pieces(reads), writable=False)
            check_mapped(device.host_pieces(writes), writable=True)
            for piece in writes:
                if not any(work.touches(piece) for work in device.pending()):
                    ctypes.memset(piece[0], POISON, piece[1] - piece[0])
            self.work.append(_Work(lambda: device.perform(reads, writes), reads, writes))

    def wait(self, event: DeviceEvent) -> None:
        """See ``DeviceStream``."""
        assert isinstance(event, HostEvent)
        with self._device.changed:
            self._device.check()
            self.work.append(_Work(lambda: self._device.run(event), [], []))

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run the function ``kernel`` in stream order, as if it were a kernel. It must not call the device."""
        with self._device.changed:
            self._device.check()
            self.work.append(_Work(kernel, [], None))

    def record(self) -> HostEvent:
        """See ``DeviceStream``."""
        with self._device.changed:
            self._device.check()
            return HostEvent(self._device, self, self.done + len(self.work), self._device.falses())


class HostDevice:
    """See ``Device`` and the module.

    Args:
        name: in the user's notation.
        seed: for the order of pieces, and for how often an event reports that it is not over.
        nbytes: the size of the device's memory.
        reaches: names of devices whose memory its streams can read and write.
    """

    in_use = True
    _all: ClassVar[weakref.WeakSet[HostDevice]] = weakref.WeakSet()  # of this process

    def __init__(
        self, name: str = "host:0", seed: int = 0, nbytes: int = 1 << 30, reaches: Collection[str] = ()
    ) -> None:
        self.name = name
        self.uuid = _uuid(name)
        self._reaches = {_uuid(other): other for other in (name, *reaches)}
        self.changed = threading.Condition()  # guards everything here and in its streams
        self.held = False
        self.refuse_registration = False
        self._lost = False
        self._rng = np.random.default_rng(seed)
        self._bytes_free = nbytes
        self._memories: list[HostMemory] = []  # by address, including freed ones
        self._registered: list[Span] = []
        self._stale: list[Span] = []  # of these
        self._streams: dict[int, HostStream] = {}
        self._all.add(self)

    def allocate(self, nbytes: int, *, shared: bool = False) -> HostMemory:
        """See ``Device``."""
        with self.changed:
            self.check()
            if nbytes > self._bytes_free:
                raise OutOfSpace(f"{self.name} has {self._bytes_free} bytes free, and {nbytes} are needed")
            self._bytes_free -= nbytes
            descriptor = -1
            if shared:
                descriptor = os.memfd_create(f"kvstore-{self.name}", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, max(nbytes, 1))
            return self._add(HostMemory(self.note_free, nbytes, descriptor))

    def export(self, address: int) -> DeviceExport:
        """See ``Device``."""
        with self.changed:
            self.check()
            memory = self._memory_at(address)
            if memory is None or memory.descriptor < 0 or memory.theirs or not memory.live:
                raise Unavailable(f"{self.name}: that memory cannot be shared with other processes")
            offset, nbytes = address - memory.address, memory.nbytes
            return DeviceExport(self.uuid, offset, nbytes, b"", os.dup(memory.descriptor))

    def open_export(self, export: DeviceExport) -> HostMemory:
        """See ``Device``."""
        with self.changed:
            self.check()
            if why := self.reach(export.device):
                raise Unavailable(why)
            if export.descriptor < 0 or os.fstat(export.descriptor).st_size < export.nbytes:
                raise Unavailable(f"{self.name}: the memory is not what its export says")
            return self._add(HostMemory(self.note_free, export.nbytes, export.descriptor, theirs=True))

    def reach(self, uuid: bytes) -> str:
        """See ``Device``."""
        return "" if uuid in self._reaches else f"{self.name} has no access to the memory of that device"

    def note_free(self, memory: HostMemory) -> None:
        """Note that ``memory`` was freed."""
        with self.changed:
            if memory.live:
                self._check_idle((memory.address, memory.address + memory.nbytes), "freed")
                self._bytes_free += 0 if memory.theirs else memory.nbytes
                memory.let_go()

    def owns(self, address: int) -> bool:
        """See ``Device``."""
        with self.changed:
            memory = self._memory_at(address)
            return memory is not None and memory.live and not memory.theirs

    def register(self, memory: Bytes) -> None:
        """See ``Device``."""
        span = _range_of(memory)
        with self.changed:
            self.check()
            if self.refuse_registration:
                raise Unavailable(f"{self.name} does not pin memory")
            assert not any(_meet(span, other) for other in self._registered), "registered twice"
            check_mapped([span], writable=False)
            self._registered.append(span)

    def unregister(self, memory: Bytes) -> None:
        """See ``Device``."""
        with self.changed:
            self._check_idle(_range_of(memory), "unregistered")
            self._registered.remove(_range_of(memory))
            self._stale = [span for span in self._stale if span in self._registered]

    @property
    def pinned_bytes(self) -> int:
        """How much host memory is pinned, for tests."""
        with self.changed:
            return sum(end - begin for begin, end in self._registered)

    def stream(self) -> HostStream:
        """See ``Device``."""
        with self.changed:
            self.check()
            return self._stream(_FIRST_HANDLE + len(self._streams))

    def stream_of(self, handle: int) -> HostStream:
        """See ``Device``. The streams made here, and the default ones: 0, 1 and 2."""
        with self.changed:
            self.check()
            assert handle in self._streams or handle in (0, 1, 2), f"no stream is known as {handle}"
            return self._streams.get(handle) or self._stream(handle)

    # --- Faults -----------------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Lose the device: every later call raises DeviceLost, and so do waiting calls. Its memory is poisoned."""
        with self.changed:
            self._lost = True
            for memory in self._memories:
                if memory.live:
                    ctypes.memset(memory.address, POISON, memory.nbytes)
            for stream in self._streams.values():
                stream.work.clear()
            self.changed.notify_all()

    def hold(self) -> None:
        """Stop all work, so that no more events are over."""
        with self.changed:
            self.held = True

    def let_go(self) -> None:
        """Continue the work."""
        with self.changed:
            self.held = False
            self.changed.notify_all()

    def replace_pages(self, memory: Bytes) -> None:
        """Give this memory other physical pages. A registered range still has the old ones, which nothing else maps. So
        a copy from there gives poison, and a copy to there is lost."""
        replaced = _range_of(memory)
        with self.changed:
            self._stale = [span for span in self._registered if span in self._stale or _meet(span, replaced)]

    # --- For streams and events, which hold the lock ----------------------------------------------------------------

    def check(self) -> None:
        """Raise DeviceLost if the device is lost."""
        if self._lost:
            raise DeviceLost(f"{self.name} is lost")

    def run(self, event: HostEvent) -> None:
        """Do the work that this event needs."""
        stream = event.stream
        while stream.done < event.work_before:
            work = stream.work.popleft()
            work.run()
            stream.done += 1

    def perform(self, reads: list[Span], writes: list[Span]) -> None:
        """Do one copy now, in a random order."""
        self.host_pieces(reads + writes)  # none of ours was freed since
        for at in self._rng.permutation(len(reads)):
            nbytes = reads[at][1] - reads[at][0]
            if any(_meet(reads[at], span) for span in self._stale):
                ctypes.memset(writes[at][0], POISON, nbytes)
            elif not any(_meet(writes[at], span) for span in self._stale):
                ctypes.memmove(writes[at][0], reads[at][0], nbytes)

    def host_pieces(self, pieces: list[Span]) -> list[Span]:
        """Return the pieces in host memory. Asserts that all other pieces are in unfreed memory of this device."""
        return [piece for piece in pieces if not self._is_ours(piece)]

    def pending(self) -> Iterator[_Work]:
        """Return all work that is not done yet."""
        for stream in self._streams.values():
            yield from stream.work

    def falses(self) -> int:
        """Return how often the next event reports that it is not over."""
        return int(self._rng.integers(FALSE_ANSWERS_MAX + 1))

    def _is_ours(self, piece: Span) -> bool:
        memory = self._memory_at(piece[0])
        if memory is None:
            assert self._memory_at(piece[1] - 1) is None, f"{piece} begins before memory of {self.name}"
            self._check_reached(piece)
            return False
        assert memory.live, f"{piece} is freed memory of {self.name}"
        assert piece[1] <= memory.address + memory.nbytes, f"{piece} leaves memory of {self.name}"
        return True

    def _check_reached(self, piece: Span) -> None:
        """Assert that memory of another device in this process is only used if this device can reach it."""
        for other in [device for device in self._all if device is not self]:
            memory = other._memory_at(piece[0])
            if memory is not None and not memory.theirs:
                assert not self.reach(other.uuid), f"{piece} is memory of {other.name}, which {self.name} cannot reach"
                assert memory.live, f"{piece} is freed memory of {other.name}"

    def _add(self, memory: HostMemory) -> HostMemory:
        insort(self._memories, memory, key=lambda m: m.address)
        return memory

    def _memory_at(self, address: int) -> HostMemory | None:
        at = bisect_right(self._memories, address, key=lambda m: m.address) - 1
        if at < 0 or address >= self._memories[at].address + self._memories[at].nbytes:
            return None
        return self._memories[at]

    def _check_idle(self, span: Span, verb: str) -> None:
        assert not any(work.writes is not None and work.touches(span) for work in self.pending()), (
            f"{span} is {verb} while work that touches it is pending"
        )

    def _stream(self, handle: int) -> HostStream:
        return self._streams.setdefault(handle, HostStream(self, handle))


def _range_of(memory: Bytes) -> Span:
    return memory.ctypes.data, memory.ctypes.data + memory.nbytes


def _meet(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _uuid(name: str) -> bytes:
    """Return the device's uuid, which is equal in every process."""
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
