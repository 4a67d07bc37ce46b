"""The NVMe tier of a node: carves its extents, and writes, reads and verifies its pages. It makes no decisions.

On a device a page follows its header. A save copies pages from their DRAM frames into a buffer, adds headers, and
writes each run of consecutive frames with one system call. Several runs are written at a time. A read verifies each
page with its header and checksums, and returns a reason for a page that fails.

``NvmeExtents`` records which extents are carved. The node decides with its mutex held, so it must not wait for a device
then. An extent is therefore *planned* until the first copy to it, and *stale* from its drop until its device forgets
it::

    carve ──> planned ──create──> on the device ──drop──> stale ──drop_stale, or create of the next one──> forgotten

A kill loses the planned and stale extents, and nothing else. A planned extent has no page yet. The next start may find
a stale extent again, with valid pages in it. It finds no deleted object there, because objects are erased before their
extent can be dropped.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np

from kvstore.device.host_memory import Bounces, copy
from kvstore.errors import KVStoreError
from kvstore.model.replica import (
    IDENTITY_HEAD_BYTES,
    LEAN_IDENTITY_BYTES,
    STAMPED,
    Address,
    FrameClass,
    FrameState,
    Tier,
    info_word,
    standing_of,
)
from kvstore.shm.records import ExtentTable, Record
from kvstore.state.instructions import Copying
from kvstore.state.interfaces import Rows
from kvstore.tier.base import Bytes
from kvstore.tier.nvme import frame_header, geometry
from kvstore.tier.nvme.device import NvmeDevice
from kvstore.tier.nvme.devices import NvmeDevices, today
from kvstore.tier.nvme.disk import IoThreads, is_silent
from kvstore.tier.nvme.frame_header import FrameHeader, layer_sums, payload_sum

log = logging.getLogger("kvstore.nvme")

START_SHIFT: Final = 32  # splits a generation's 56 bits: 2**32 pages per start, and 2**24 starts
THREADS: Final = 6  # runs per device that are copied, verified or written at the same time ...
WRITES_MAX: Final = 3  # ... and how many of them are in a write call
READ_BYTES: Final = 1 << 20  # bytes of consecutive frames per read of a scan; a larger page has a read of its own
COPY_BYTES: Final = 4 << 20  # bytes of consecutive frames per system call of a copy; each takes a thread and the GIL
IO, DATA, RECORD, MOVED = "io", "data", "record", "moved"
EMPTY = "empty"  # a header of zeros: the frame was never written

Tables = Mapping[int, ExtentTable]
Frames = Callable[[ExtentTable], Rows]
"""Returns ``[frames, frame_bytes]`` of a DRAM extent."""


class NvmeExtents:
    """The carved extents of a node's devices, see the module.

    ``carve``, ``drop`` and ``is_clean`` wait for no device. All other methods may.
    """

    def __init__(self, devices: NvmeDevices) -> None:
        self._devices = devices
        self._locks = {device: threading.Lock() for device in devices.devices}
        self._planned: dict[int, tuple[int, FrameClass]] = {}  # position -> number and class
        self._stale: set[int] = set()

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """Plan an extent at an empty position."""
        device, local = self._devices.place(position)
        in_use = position in self._planned or (local in device.extents and position not in self._stale)
        assert not in_use and self._devices.frames_of(frame_class), (position, frame_class)
        self._planned[position] = number, frame_class

    def drop(self, position: int) -> None:
        """End an extent. All its frames are free, and no copy to or from it is under way."""
        if self._planned.pop(position, None) is None:
            self._stale.add(position)

    def create(self, position: int) -> None:
        """Create a planned extent on its device; do nothing if it is already there.

        Raises:
            OSError: the device failed. The extent is still planned.
        """
        with self._locks[self._devices.place(position)[0]]:
            planned = self._planned.get(position)
            if planned is None:
                return
            self._forget(position)
            self._devices.carve(position, *planned)
            del self._planned[position]

    @property
    def stale(self) -> list[int]:
        """The positions of stale extents."""
        return list(self._stale)

    def drop_stale(self, positions: Iterable[int]) -> dict[int, OSError]:
        """Remove the stale extents at these positions from their devices. Returns failed positions and their errors."""
        failed: dict[int, OSError] = {}
        for position in self._stale.intersection(positions):
            try:
                with self._locks[self._devices.place(position)[0]]:
                    self._forget(position)
            except OSError as error:
                log.error("an extent could not be dropped: %s", error)
                failed[position] = error
                self._stale.discard(position)  # a later start treats it as an unknown extent
        return failed

    def _forget(self, position: int) -> None:
        device, local = self._devices.place(position)
        if local in device.extents:
            device.drop(local)
        self._stale.discard(position)

    def withdraw_checkpoint(self, table: ExtentTable) -> dict[int, OSError]:
        """Make the next start scan this extent, unless a new checkpoint is written before then.

        Call this if a page of the extent is damaged. The old directory still names that page, and could keep the next
        start from adopting a valid copy in another extent. Returns the position and its error if the device failed.
        """
        device, local = self._devices.place(table.position)
        try:
            device.withdraw(local, table.extent)
        except OSError as error:
            log.error("an extent's checkpoint could not be withdrawn: %s", error)
            return {table.position: error}
        return {}

    def erase(self, frames: Iterable[tuple[ExtentTable, int]]) -> dict[int, OSError]:
        """Overwrite the headers of these frames durably. Returns each failed position and its error.

        Only the caller may use the frames. Each extent's checkpoint is withdrawn first, because its directory names
        them.
        """
        by_position: dict[int, list[tuple[FrameClass, int]]] = {}
        for table, frame in frames:
            if table.position not in self._planned:  # nothing was written to a planned extent
                by_position.setdefault(table.position, []).append((table.frame_class, frame))
        failed: dict[int, OSError] = {}
        for position, frames_here in by_position.items():
            device, local = self._devices.place(position)
            try:
                self._devices.open_for_writing([position])
                try:
                    for frame_class, frame in frames_here:
                        device.erase_header(local, frame, frame_class)
                    device.sync()
                finally:
                    self._devices.close_for_writing([position])
            except OSError as error:
                log.error("objects could not be erased: %s", error)
                failed[position] = error
        return failed

    def is_clean(self, position: int) -> bool:
        """True if nothing was written to the extent after its last checkpoint."""
        device, local = self._devices.place(position)
        extent = device.extents.get(local)
        return extent is None or extent.clean or position in self._planned

    def checkpoint(self, position: int, rows: Rows, version: int) -> OSError | None:
        """Write an extent's directory durably. The extent is then clean if nothing was written since ``version``.

        Returns the error if the write failed: the next start will scan the extent.
        """
        try:
            self._devices.write_directory(position, rows)
            self._devices.mark_clean({position: version})
        except OSError as error:
            return error
        return None


@dataclass(slots=True)
class CopyResult:
    """The result of a batch of copies. A page's *place* is its index in the batch.

    Attributes:
        rows: identity rows ``[pages, ...]``, valid for pages that are not in ``failed``.
        checksums: ``[pages, layers]``, valid for pages that are not in ``failed``.
        failed: place -> why the page was not copied.
        damaged: (source, reason) of each source page that failed its checks.
        broken: position -> the error of its device.
        open_positions: positions that are still open for writing.
        written_bytes: bytes of headers and pages that were written to devices.
    """

    rows: Rows
    checksums: Any
    failed: dict[int, str] = field(default_factory=dict)
    damaged: list[tuple[Address, str]] = field(default_factory=list)
    broken: dict[int, OSError] = field(default_factory=dict)
    open_positions: set[int] = field(default_factory=set)
    written_bytes: int = 0

    @classmethod
    def empty(cls, frame_class: FrameClass, pages: int) -> CopyResult:
        """Return a result to be filled, with rows and checksums of zeros for ``pages`` pages."""
        identity_bytes = IDENTITY_HEAD_BYTES + 4 * frame_class.page_tokens
        return cls(np.zeros((pages, identity_bytes), np.uint8), np.zeros((pages, frame_class.layers), np.uint32))

    def merge(self, part: CopyResult, places: list[int]) -> None:
        """Add the result of the pages at these places. Other threads may merge other places at the same time."""
        self.rows[places], self.checksums[places] = part.rows, part.checksums
        self.failed |= {places[i]: reason for i, reason in part.failed.items()}
        self.damaged += part.damaged
        self.broken |= part.broken
        self.open_positions |= part.open_positions


class NvmePages:
    """The NVMe tier as a ``TierStore``, with batched copies to, from and inside it. ``close`` closes the devices.

    All pages of one ``save`` or one ``load`` are on one device, so that no copy waits for another device. Pages of a
    ``carry`` may be on several. Any thread may call.
    """

    tier = Tier.NVME
    mapped = False
    relayed = False

    def __init__(self, devices: NvmeDevices) -> None:
        self.devices = devices
        self.extents = NvmeExtents(devices)
        # Each device has its own threads, because a thread waits as long as its device does. Carries have others.
        self._io = {device: IoThreads(THREADS) for device in devices.devices}
        self._carry_io = IoThreads(THREADS)
        self._writes = {device: threading.Semaphore(WRITES_MAX) for device in devices.devices}
        self._bounces = Bounces()

    def close(self) -> None:
        """Close the devices. The pages stay."""
        for io in (*self._io.values(), self._carry_io):
            io.close()
        self.devices.close()

    # --- a ``TierStore`` --------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """A number between all generations of earlier starts and all generations of this start."""
        return self.devices.starts << START_SHIFT

    @property
    def incarnation(self) -> int:
        """The incarnation of the set of devices. Tables from another incarnation are void."""
        return self.devices.incarnation

    @property
    def extent_bytes(self) -> int:
        """Size of an extent, the same on all devices."""
        return self.devices.extent_bytes

    @property
    def positions(self) -> int:
        """Number of extents that the devices have room for."""
        return self.devices.positions

    def frames_of(self, frame_class: FrameClass) -> int:
        """Return how many frames of this class fit in an extent; 0 if not even one fits."""
        return self.devices.frames_of(frame_class)

    def header_bytes(self, frame_class: FrameClass) -> int:
        """Return the size of the header before each frame."""
        return self.devices.header_bytes(frame_class)

    def header_incarnation(self, position: int) -> int:
        """Return the incarnation in the headers of frames at this position. It is the incarnation of their device."""
        return self.devices.header_incarnation(position)

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """Put an extent into the position. It is created on the device before the first write to it."""
        self.extents.carve(position, number, frame_class)

    def drop(self, position: int) -> None:
        """Make the position empty. The extent is dropped from the device later."""
        self.extents.drop(position)

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """Allow writes there until ``close_for_writing``. Raises OSError: none of the positions is open."""
        unique = set(positions)
        for position in unique:
            self.extents.create(position)
        self.devices.open_for_writing(unique)

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """End writing: the pages are synced and their records stored, or the pages were given up."""
        self.devices.close_for_writing(positions)

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """Write one frame and its header. Raises OSError: the frame may now contain anything."""
        self.devices.write_page(position, frame, frame_class, header, page)

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """Read one frame and its header, unverified. Raises OSError: the buffers are undefined."""
        self.devices.read_page(position, frame, frame_class, header, page)

    def sync(self) -> None:
        """Make earlier writes durable. Raises OSError: everything written since the last sync must be given up."""
        self.devices.sync()

    # --- down: DRAM to NVMe -----------------------------------------------------------------------------------------

    def save(self, pages: list[Copying], tables: Tables, frames_of: Frames) -> CopyResult:
        """Write these pages of one class durably to one device. Pages that changed or are damaged are in ``failed``.

        Their extents stay open for writing. The caller stores the records and then calls ``close_for_writing``.
        """
        frame_class = tables[pages[0].source.extent].frame_class
        result = CopyResult.empty(frame_class, len(pages))
        runs = _runs([page.target for page in pages], frame_class)
        io = self._io[self._device(pages[0].target, tables)]
        self._write(io, pages, tables, result, runs, lambda run: self._save_run(run, pages, tables, frames_of, result))
        return result

    def _write(
        self,
        io: IoThreads,
        pages: list[Copying],
        tables: Tables,
        result: CopyResult,
        runs: Iterable[range],
        write_run: Callable[[range], None],
    ) -> None:
        """Write these runs in parallel, and make them durable."""
        positions = [tables[page.target.extent].position for page in pages]
        result.open_positions = self._open({*positions}, result)
        result.failed |= {i: IO for i, position in enumerate(positions) if position not in result.open_positions}
        runs = [run for run in runs if run.start not in result.failed]
        stride = geometry.stride_bytes(tables[pages[0].target.extent].frame_class)
        for run, error in zip(runs, io.run([partial(write_run, run) for run in runs]), strict=True):
            if isinstance(error, OSError | KVStoreError):
                assert isinstance(error, OSError), error
                result.failed |= dict.fromkeys(run, IO)
                result.broken[self._failed_position(pages[run.start], tables, error)] = error
            else:
                result.written_bytes += len(run) * stride
        for position, broken in self._sync(result.open_positions).items():
            result.broken[position] = broken
            on_device = self.devices.neighbours(position)
            result.failed |= {i: IO for i, position in enumerate(positions) if position in on_device}

    def _open(self, positions: set[int], result: CopyResult) -> set[int]:
        """Open these positions for writing, device by device. Return the open positions; the others are in
        ``broken``."""
        opened: set[int] = set()
        by_device: defaultdict[str, set[int]] = defaultdict(set)
        for position in positions:
            by_device[self.path(position)].add(position)
        for on_device in by_device.values():
            try:
                self.open_for_writing(on_device)
                opened |= on_device
            except OSError as error:
                result.broken |= dict.fromkeys(on_device, error)
        return opened

    def _sync(self, positions: Iterable[int]) -> dict[int, OSError]:
        """Sync the devices of these positions. Return, for each device that failed, one of its positions and the
        error."""
        broken = {}
        for device, position in {self.devices.place(position)[0]: position for position in positions}.items():
            try:
                device.sync()
            except OSError as error:
                broken[position] = error
        return broken

    def _save_run(
        self, run: range, pages: list[Copying], tables: Tables, frames_of: Frames, result: CopyResult
    ) -> None:
        """Copy a run into a buffer, verify the copy, and write it. A page that fails gets a header of zeros."""
        target = tables[pages[run.start].target.extent]
        frame_class, header_bytes = target.frame_class, geometry.header_bytes(target.frame_class)
        with self._bounces.borrow(len(run) * geometry.stride_bytes(frame_class)) as buffer:
            slots, headers = buffer.reshape(len(run), -1), list[bytes]()
            for part in _runs([pages[i].source for i in run], frame_class):
                places = run[part.start : part.stop]
                first = pages[places[0]].source
                source, frames = tables[first.extent], slice(first.frame, first.frame + len(part))
                payloads = slots[part.start : part.stop, header_bytes:]
                copy(payloads, frames_of(source)[frames])
                headers += self._headers(places, source, frames, payloads, pages, target, result)
            slots[:, header_bytes + frame_class.page_bytes :] = 0  # padding
            slots[:, :header_bytes] = np.frombuffer(b"".join(headers), np.uint8).reshape(len(run), -1)
            with self._writes[self._device(pages[run.start].target, tables)]:
                self.devices.write_run(target.position, pages[run.start].target.frame, frame_class, slots)

    def _headers(
        self,
        places: range,
        source: ExtentTable,
        frames: slice,
        payloads: Rows,
        pages: list[Copying],
        target: ExtentTable,
        result: CopyResult,
    ) -> list[bytes]:
        """Return the headers of copies of consecutive frames; zeros for a page that does not match its record."""
        frame_class, fmt, incarnation = target.frame_class, source.fmt, self.devices.header_incarnation(target.position)
        rows = source.rows[frames].copy()
        raws, width = rows.tobytes(), rows.shape[1]
        views = [payload[: frame_class.page_bytes] for payload in payloads]
        digests = [(payload_sum(view, frame_class), layer_sums(view, frame_class.layers)) for view in views]
        words = source.words[frames].tolist()  # read after the copy: an equal word proves that the copy is the page
        result.rows[places.start : places.stop] = rows[:, fmt.identity]
        headers = [bytes(geometry.header_bytes(frame_class))] * len(places)
        for at, (i, word, (total, sums)) in enumerate(zip(places, words, digests, strict=True)):
            page, record = pages[i], Record(raws[at * width : (at + 1) * width], fmt)
            if word != page.source.generation << 8 | page.state:
                result.failed[i] = MOVED
            elif not record.is_sound() or (record.stamped and sums.tobytes() != record.raw[fmt.checksums]):
                result.failed[i] = DATA if record.is_sound() else RECORD
                result.damaged.append((page.source, result.failed[i]))
            else:
                info = info_word(frame_class.page_bytes, flags=STAMPED, position=0)
                info |= page.standing or standing_of(record.info)
                place = frame_class, incarnation, page.target
                headers[at] = frame_header.pack_bytes(*place, record.identity, record.parent, info, sums, total)
                result.checksums[i] = sums
        return headers

    # --- across: from one extent of NVMe to others ------------------------------------------------------------------

    def carry(self, pages: list[Copying], tables: Tables) -> CopyResult:
        """Copy these pages of one class durably into other frames of NVMe, under their new addresses.

        The source frames do not change. Pages that changed, are damaged or cannot be written are in ``failed``. Call
        ``close_for_writing`` afterwards, as for ``save``.
        """
        frame_class = tables[pages[0].source.extent].frame_class
        result = CopyResult(np.zeros((0, 0), np.uint8), np.zeros((0, 0), np.uint32))
        runs = _runs([page.source for page in pages], frame_class, [page.target for page in pages])
        write_run = partial(self._carry_run, pages=pages, tables=tables, result=result)
        self._write(self._carry_io, pages, tables, result, runs, write_run)
        return result

    def _carry_run(self, run: range, pages: list[Copying], tables: Tables, result: CopyResult) -> None:
        """Read a run, verify it, and write it to its new frames. A page that fails gets a header of zeros."""
        first = pages[run.start]
        source, target = tables[first.source.extent], tables[first.target.extent]
        frame_class, header_bytes = target.frame_class, geometry.header_bytes(target.frame_class)
        incarnation = self.devices.header_incarnation(target.position)
        with self._bounces.borrow(len(run) * geometry.stride_bytes(frame_class)) as buffer:
            slots = buffer.reshape(len(run), -1)
            for i, slot, page in zip(run, slots, self._read_run(source, first.source.frame, slots), strict=True):
                header = self._proven(i, pages[i], source, page, result)
                slot[:header_bytes] = 0
                if header is not None:
                    place, identity = (frame_class, incarnation, pages[i].target), identity_row(header)
                    rest = header.info, header.checksums, header.payload_sum
                    packed = frame_header.pack_bytes(*place, identity.tobytes(), header.parent, *rest)
                    slot[:header_bytes] = np.frombuffer(packed, np.uint8)
            with self._writes[self._device(first.target, tables)]:
                self.devices.write_run(target.position, first.target.frame, frame_class, slots)

    @staticmethod
    def _proven(
        i: int, copying: Copying, source: ExtentTable, page: FrameHeader | str, result: CopyResult
    ) -> FrameHeader | None:
        """Return the header of a page that was read, if it is the expected page; else put the reason into ``result``.

        ``page`` is what ``read`` returned for the frame.
        """
        if not _is_sealed(source, copying.source):
            result.failed[i] = MOVED
        elif isinstance(page, str):
            result.failed[i] = IO if page == IO else DATA
            result.damaged.append((copying.source, page))
        elif page.key != copying.key or page.address != copying.source:
            result.failed[i] = DATA
            result.damaged.append((copying.source, "swapped"))
        else:
            return page
        return None

    # --- up: NVMe to DRAM -------------------------------------------------------------------------------------------

    def load(self, pages: list[Copying], tables: Tables, frames_of: Frames) -> CopyResult:
        """Read these pages of one class from one device into their DRAM frames, and verify them."""
        frame_class = tables[pages[0].source.extent].frame_class
        result = CopyResult.empty(frame_class, len(pages))
        runs = list(_runs([page.source for page in pages], frame_class))
        tasks = [partial(self._load_run, run, pages, tables, frames_of, result) for run in runs]
        io = self._io[self._device(pages[0].source, tables)]
        for run, error in zip(runs, io.run(tasks), strict=True):
            if isinstance(error, OSError | KVStoreError):
                log.error("pages could not be read: %s", error)
                result.failed |= dict.fromkeys(run, IO)
                if isinstance(error, OSError) and is_silent(error):  # says nothing about the pages
                    result.broken[tables[pages[run.start].source.extent].position] = error
                else:
                    result.damaged += [(pages[i].source, IO) for i in run]
        return result

    def _load_run(
        self, run: range, pages: list[Copying], tables: Tables, frames_of: Frames, result: CopyResult
    ) -> None:
        table, first = tables[pages[run.start].source.extent], pages[run.start].source.frame
        header_bytes = geometry.header_bytes(table.frame_class)
        with self._bounces.borrow(len(run) * geometry.stride_bytes(table.frame_class)) as buffer:
            slots = buffer.reshape(len(run), -1)
            for i, slot, page in zip(run, slots, self._read_run(table, first, slots), strict=True):
                target, header = pages[i].target, self._proven(i, pages[i], table, page, result)
                if header is not None:
                    frames_of(tables[target.extent])[target.frame] = slot[header_bytes:]
                    result.rows[i], result.checksums[i] = identity_row(header), header.checksums

    def read(self, table: ExtentTable, first: int, count: int) -> list[FrameHeader | str]:
        """Read consecutive frames, and return the verified header of each page, or why the page is not valid.

        The reason is one of ``frame_header.REASONS``, ``EMPTY``, or ``IO`` if the device cannot read the frame.

        Raises:
            OSError: the device is not responding.
        """
        with self._bounces.borrow(count * geometry.stride_bytes(table.frame_class)) as buffer:
            return self._read_run(table, first, buffer.reshape(count, -1))

    def _read_run(self, table: ExtentTable, first: int, slots: Rows) -> list[FrameHeader | str]:
        """Do what ``read`` does, into ``slots`` ``[frames, stride_bytes]``. Each slot gets a header and its page."""
        frame_class = table.frame_class
        head = geometry.header_bytes(frame_class)
        headers, payloads = slots[:, :head], slots[:, head:]
        try:
            self.devices.read_run(table.position, first, frame_class, slots)
        except OSError as error:
            if is_silent(error):  # no frame can be read now, and the buffer must never be reused
                raise
            if len(slots) > 1:  # read one by one, so that one unreadable frame does not fail the others
                return [self._read_run(table, first + i, slots[i : i + 1])[0] for i in range(len(slots))]
            log.error("frame %d of extent %d could not be read: %s", first, table.extent, error)
            return [IO]
        incarnation = self.devices.header_incarnation(table.position)
        pages: list[FrameHeader | str] = []
        for i, payload in enumerate(payloads):
            page = frame_header.unpack(headers[i], frame_class, incarnation, table.extent, first + i)
            if page == "header" and not headers[i].any():
                page = EMPTY
            if isinstance(page, FrameHeader) and not frame_header.is_payload_sound(
                payload, frame_class, page.payload_sum
            ):
                page = "payload"
            pages.append(page)
        return pages

    def header(self, table: ExtentTable, frame: int) -> FrameHeader | str:
        """Read only the header of a page, and return it, or why it is not valid. Raises as ``read``."""
        frame_class = table.frame_class
        with self._bounces.borrow(geometry.header_bytes(frame_class)) as buffer:
            try:
                self.devices.read_header(table.position, frame, frame_class, buffer)
            except OSError as error:
                if is_silent(error):
                    raise
                return IO
            incarnation = self.devices.header_incarnation(table.position)
            return frame_header.unpack(buffer, frame_class, incarnation, table.extent, frame)

    def verify(self, table: ExtentTable, address: Address) -> str:
        """Return why the page at this address is damaged, or "" if it is valid. Raises as ``read``."""
        page = self.read(table, address.frame, 1)[0]
        if isinstance(page, str):
            return page
        return "" if page.address == address and page.key == table.key(address.frame) else "swapped"

    # --- devices ----------------------------------------------------------------------------------------------------

    def _device(self, address: Address, tables: Tables) -> NvmeDevice:
        return self.devices.place(tables[address.extent].position)[0]

    def day_bytes_left(self, cap_bytes: int) -> int:
        """Return how many bytes may still be written today if ``cap_bytes`` per day are allowed.

        Bytes count as soon as they are written, before the node's state receives the result of the copy.
        """
        return max(0, cap_bytes - self.devices.written_today(today()))

    def path(self, position: int) -> str:
        """Return the path of the device at that position."""
        return self.devices.place(position)[0].disk.path

    def _failed_position(self, page: Copying, tables: Tables, error: OSError) -> int:
        """Return the position where this copy failed: the target's, or the source's if its device has the error."""
        source, target = tables[page.source.extent], tables[page.target.extent].position
        is_source = source.tier == self.tier and self.path(source.position) == error.filename
        return source.position if is_source else target


def identity_row(header: FrameHeader) -> Rows:
    """Return key, root, extra and token ids in the form of a record."""
    return np.frombuffer(header.key + header.root + header.extra + header.tokens.tobytes(), np.uint8)


def lean_identities(headers: Sequence[FrameHeader]) -> Rows:
    """Return the identities of pages of any classes for lean records, ``[pages, LEAN_IDENTITY_BYTES]``."""
    rows = np.zeros((len(headers), LEAN_IDENTITY_BYTES), np.uint8)
    for row, header in zip(rows, headers, strict=True):
        identity = identity_row(header)[:LEAN_IDENTITY_BYTES]
        row[: len(identity)] = identity
    return rows


def _is_sealed(table: ExtentTable, address: Address) -> bool:
    return int(table.words[address.frame]) == address.generation << 8 | FrameState.SEALED


def _runs(addresses: list[Address], frame_class: FrameClass, others: list[Address] | None = None) -> Iterator[range]:
    """Yield ranges of places whose frames are consecutive, both here and in ``others``. Each takes one system call."""
    length_max, start = max(1, COPY_BYTES // geometry.stride_bytes(frame_class)), 0
    lists = [addresses] if others is None else [addresses, others]
    for i in range(1, len(addresses) + 1):
        if i < len(addresses) and i - start < length_max:
            pairs = [(frames[i - 1], frames[i]) for frames in lists]
            if all(second.extent == first.extent and second.frame == first.frame + 1 for first, second in pairs):
                continue
        yield range(start, i)
        start = i
