"""NvmePages: pages on NVMe as the daemon writes, reads and proves them. No decisions, no index.

A page is written with its header in front, straight from its frame in DRAM; several consecutive frames at a time where
pages are small, several runs side by side. What is read is proven by header and checksums, or it is a reason.

NvmeStore: the devices of a node as one of its tiers, carved without waiting for any of them.

NvmeExtents: which extents are carved where, as the node decides it and as its devices come to know it.

The node decides with its mutex held, so nothing here that it calls then touches a device: an extent is *planned* until
something is copied there, and *stale* from its drop until its device forgets it::

    carve ──> planned ──make──> known to the device ──drop──> stale ──tidy, or make of the next one──> gone

A kill forgets what is planned or stale, and nothing else: a planned extent holds no page yet. A stale one may be found
again, with right pages in it, but no object: those are erased before their extent can be dropped.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvstore.device.host_memory import Bounces, copy
from kvstore.errors import KVStoreError
from kvstore.model.replica import (
    IDENTITY_HEAD_BYTES,
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


class NvmeExtents:
    """Lives with its ``NvmePages``. ``carve``, ``drop`` and ``is_clean`` wait for no device; all others may."""

    def __init__(self, devices: NvmeDevices) -> None:
        self._devices = devices
        self._making = {device: threading.Lock() for device in devices.devices}
        self._planned: dict[int, tuple[int, FrameClass]] = {}
        self._stale: set[int] = set()

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """An extent begins."""
        device, local = self._devices.place(position)
        known = position in self._planned or (local in device.extents and position not in self._stale)
        assert not known and self._devices.frames_of(frame_class), (position, frame_class)
        self._planned[position] = number, frame_class

    def drop(self, position: int) -> None:
        """An extent ends: all its frames are free, and there is no copy."""
        if self._planned.pop(position, None) is None:
            self._stale.add(position)

    def make(self, position: int) -> None:
        """Make an extent known on its device, where it is not. Raises OSError where that cannot be."""
        with self._making[self._devices.place(position)[0]]:
            planned = self._planned.get(position)
            if planned is None:
                return
            self._forget(position)
            self._devices.carve(position, *planned)
            del self._planned[position]

    @property
    def stale(self) -> list[int]:
        """Positions that are to be tidied."""
        return list(self._stale)

    def tidy(self, positions: Iterable[int]) -> dict[int, OSError]:
        """Let the devices forget what was dropped of these; positions where that failed."""
        failed: dict[int, OSError] = {}
        for position in self._stale.intersection(positions):
            try:
                with self._making[self._devices.place(position)[0]]:
                    self._forget(position)
            except OSError as error:
                log.error("an extent could not be dropped: %s", error)
                failed[position] = error
                self._stale.discard(position)  # what is found there later is of an unknown extent
        return failed

    def _forget(self, position: int) -> None:
        device, local = self._devices.place(position)
        if local in device.extents:
            device.drop(local)
        self._stale.discard(position)

    def distrust(self, table: ExtentTable) -> dict[int, OSError]:
        """A page of this extent does not hold: the next start scans it, unless there is a checkpoint before that.

        Its directory still names that page, and might keep a sound copy in another extent from being adopted. Returns
        its position where that failed.
        """
        device, local = self._devices.place(table.position)
        try:
            device.withdraw(local, table.extent)
        except OSError as error:
            log.error("an extent's checkpoint could not be withdrawn: %s", error)
            return {table.position: error}
        return {}

    def erase(self, frames: Iterable[tuple[ExtentTable, int]]) -> dict[int, OSError]:
        """Overwrite the headers of these frames, which only the caller holds, durably; positions where that failed.

        An extent's checkpoint is withdrawn first: its directory names the frames.
        """
        by_position: dict[int, list[tuple[FrameClass, int]]] = {}
        for table, frame in frames:
            if table.position not in self._planned:  # there nothing was ever written
                by_position.setdefault(table.position, []).append((table.frame_class, frame))
        failed: dict[int, OSError] = {}
        for position, here in by_position.items():
            device, local = self._devices.place(position)
            try:
                self._devices.open_for_writing([position])
                try:
                    for frame_class, frame in here:
                        device.erase_header(local, frame, frame_class)
                    device.sync()
                finally:
                    self._devices.close_for_writing([position])
            except OSError as error:
                log.error("objects could not be erased: %s", error)
                failed[position] = error
        return failed

    def is_clean(self, position: int) -> bool:
        """The extent's last checkpoint is younger than the last write there."""
        device, local = self._devices.place(position)
        extent = device.extents.get(local)
        return extent is None or extent.clean or position in self._planned

    def checkpoint(self, position: int, rows: Rows, version: int) -> OSError | None:
        """Make an extent's directory durable; it then counts as clean if nothing was written since ``version``.

        Returns the error where it cannot be written: the next start will scan the extent.
        """
        try:
            self._devices.write_directory(position, rows)
            self._devices.mark_clean({position: version})
        except OSError as error:
            return error
        return None


START_SHIFT = 32  # of a generation's 56 bits: four thousand million pages per start, sixteen million starts


class NvmeStore:
    """See ``TierStore``. ``devices`` are joined already; ``close`` closes them."""

    tier = Tier.NVME
    mapped = False
    relayed = False

    def __init__(self, devices: NvmeDevices) -> None:
        self.devices = devices
        self.extents = NvmeExtents(devices)

    @property
    def generation(self) -> int:
        """See ``TierStore``."""
        return self.devices.starts << START_SHIFT

    @property
    def incarnation(self) -> int:
        """The incarnation of the set of devices: tables that name another one are void."""
        return self.devices.incarnation

    @property
    def extent_bytes(self) -> int:
        """See ``TierStore``."""
        return self.devices.extent_bytes

    @property
    def positions(self) -> int:
        """See ``TierStore``."""
        return self.devices.positions

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return self.devices.frames_of(frame_class)

    def header_bytes(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return self.devices.header_bytes(frame_class)

    def header_incarnation(self, position: int) -> int:
        """See ``TierStore``."""
        return self.devices.header_incarnation(position)

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """See ``TierStore``. The device hears of it when something is to be written there."""
        self.extents.carve(position, number, frame_class)

    def drop(self, position: int) -> None:
        """See ``TierStore``. The device hears of it later."""
        self.extents.drop(position)

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""
        wanted = set(positions)
        for position in wanted:
            self.extents.make(position)
        self.devices.open_for_writing(wanted)

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""
        self.devices.close_for_writing(positions)

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        self.devices.write_page(position, frame, frame_class, header, page)

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        self.devices.read_page(position, frame, frame_class, header, page)

    def sync(self) -> None:
        """See ``TierStore``."""
        self.devices.sync()

    def close(self) -> None:
        """See ``TierStore``."""
        self.devices.close()


THREADS, WRITES = 6, 3  # runs in work, and how many of them are written at a time: the others are copied and proven
RUN_BYTES = 1 << 20  # of consecutive frames that are looked at in one system call: larger pages go one by one
COPY_BYTES = 4 << 20  # that are copied in one: each costs a disk's thread, and waits for the interpreter
IO, DATA, RECORD, MOVED = "io", "data", "record", "moved"
EMPTY = "empty"  # all zeros: nothing was ever written there

Tables = Mapping[int, ExtentTable]
Frames = Callable[[ExtentTable], Rows]
"""``[frames, frame_bytes]`` of a DRAM extent."""


@dataclass(slots=True)
class Copied:
    """What became of a batch of copies.

    ``rows`` are identity rows ``[pages, ...]``, ``checksums`` ``[pages, layers]``, of those that are not in ``failed``
    (reason by place). ``damaged``: (source, reason) of pages that do not hold. ``broken``: positions whose device
    failed, with its error. ``written_bytes``: headers and pages that reached a device.
    """

    rows: Rows
    checksums: Any
    failed: dict[int, str] = field(default_factory=dict)
    damaged: list[tuple[Address, str]] = field(default_factory=list)
    broken: dict[int, OSError] = field(default_factory=dict)
    open_positions: set[int] = field(default_factory=set)
    written_bytes: int = 0

    @classmethod
    def of(cls, frame_class: FrameClass, pages: int) -> Copied:
        """Empty room for what is learnt of ``pages`` pages."""
        identity_bytes = IDENTITY_HEAD_BYTES + 4 * frame_class.page_tokens
        return cls(np.zeros((pages, identity_bytes), np.uint8), np.zeros((pages, frame_class.layers), np.uint32))

    def merge(self, part: Copied, places: list[int]) -> None:
        """This is what became of the pages at these places. Another thread may merge others in the meantime."""
        self.rows[places], self.checksums[places] = part.rows, part.checksums
        self.failed |= {places[i]: reason for i, reason in part.failed.items()}
        self.damaged += part.damaged
        self.broken |= part.broken
        self.open_positions |= part.open_positions


class NvmePages(NvmeStore):
    """The daemon's hand on its devices. Lives with the ``Performer``. Pages of one ``save``, or ``load``, are of one
    device, so that no copy waits for another device; those of a ``carry`` may be of several. Any thread may call."""

    def __init__(self, devices: NvmeDevices) -> None:
        super().__init__(devices)
        # By device, and for copies between two: a thread waits as long as its device does.
        self._io = {device: IoThreads(THREADS) for device in devices.devices}
        self._carry_io = IoThreads(THREADS)
        self._writes = {device: threading.Semaphore(WRITES) for device in devices.devices}
        self._bounces = Bounces()

    def close(self) -> None:
        """Let go of the devices. What is stored stays."""
        for io in (*self._io.values(), self._carry_io):
            io.close()
        super().close()

    # --- down: DRAM to NVMe -----------------------------------------------------------------------------------------

    def save(self, pages: list[Copying], tables: Tables, frames_of: Frames) -> Copied:
        """Write these pages, of one class, to one device, and make them durable. Pages that changed or do not hold are
        not claimed.

        Their extents stay open for writing until the caller says ``reported``: when the records say what is there.
        """
        frame_class = tables[pages[0].source.extent].frame_class
        done = Copied.of(frame_class, len(pages))
        runs = _runs([page.target for page in pages], frame_class)
        io = self._io[self._device(pages[0].target, tables)]
        self._write(io, pages, tables, done, runs, lambda run: self._save_run(run, pages, tables, frames_of, done))
        return done

    def _write(
        self,
        io: IoThreads,
        pages: list[Copying],
        tables: Tables,
        done: Copied,
        runs: Iterable[range],
        write_run: Callable[[range], None],
    ) -> None:
        """Write these runs, side by side, and make them durable."""
        where = [tables[page.target.extent].position for page in pages]
        done.open_positions = self._opened({*where}, done)
        done.failed |= {i: IO for i, position in enumerate(where) if position not in done.open_positions}
        runs = [run for run in runs if run.start not in done.failed]
        stride = geometry.stride_bytes(tables[pages[0].target.extent].frame_class)
        for run, result in zip(runs, io.run([partial(write_run, run) for run in runs]), strict=True):
            if isinstance(result, OSError | KVStoreError):
                self._broke(done, run, self._where(pages[run.start], tables, result), result)
            else:
                done.written_bytes += len(run) * stride
        for position, broken in self._sync(done.open_positions).items():
            done.broken[position] = broken
            here = self.devices.neighbours(position)
            done.failed |= {i: IO for i, position in enumerate(where) if position in here}

    def _opened(self, positions: set[int], done: Copied) -> set[int]:
        """The positions that are open for writing now, device by device; the others are noted as broken."""
        opened: set[int] = set()
        by_device: defaultdict[str, set[int]] = defaultdict(set)
        for position in positions:
            by_device[self.path(position)].add(position)
        for here in by_device.values():
            try:
                for position in here:
                    self.extents.make(position)
                self.devices.open_for_writing(here)
                opened |= here
            except OSError as error:
                done.broken |= dict.fromkeys(here, error)
        return opened

    def _sync(self, positions: Iterable[int]) -> dict[int, OSError]:
        """Make what was written at these positions durable; a position of each device that cannot, and its error."""
        broken = {}
        for device, position in {self.devices.place(position)[0]: position for position in positions}.items():
            try:
                device.sync()
            except OSError as error:
                broken[position] = error
        return broken

    def reported(self, done: Copied) -> None:
        """The records say what became of a ``save``, or a ``carry``."""
        self.devices.close_for_writing(done.open_positions)

    def _save_run(self, run: range, pages: list[Copying], tables: Tables, frames_of: Frames, done: Copied) -> None:
        """Copy the run, prove what was copied, write it. A page that does not hold is written with an empty header."""
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
                headers += self._headers(places, source, frames, payloads, pages, target, done)
            slots[:, header_bytes + frame_class.page_bytes :] = 0  # padding has no content
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
        done: Copied,
    ) -> list[bytes]:
        """The headers of pages from consecutive frames, whose copies are ``payloads``; of zeros for a page that is not
        what its record says."""
        frame_class, fmt, incarnation = target.frame_class, source.fmt, self.devices.header_incarnation(target.position)
        rows = source.rows[frames].copy()
        raws, width = rows.tobytes(), rows.shape[1]
        views = [payload[: frame_class.page_bytes] for payload in payloads]
        found = [(payload_sum(view, frame_class), layer_sums(view, frame_class.layers)) for view in views]
        words = source.words[frames].tolist()  # looked at after the copy: what was copied is that page
        done.rows[places.start : places.stop] = rows[:, fmt.identity]
        headers = [bytes(geometry.header_bytes(frame_class))] * len(places)
        for at, (i, word, (total, sums)) in enumerate(zip(places, words, found, strict=True)):
            page, record = pages[i], Record(raws[at * width : (at + 1) * width], fmt)
            if word != page.source.generation << 8 | page.state:
                done.failed[i] = MOVED
            elif not record.is_sound() or (record.stamped and sums.tobytes() != record.raw[fmt.checksums]):
                done.failed[i] = DATA if record.is_sound() else RECORD
                done.damaged.append((page.source, done.failed[i]))
            else:
                info = info_word(frame_class.page_bytes, flags=STAMPED, position=0)
                info |= page.standing or standing_of(record.info)
                place = frame_class, incarnation, page.target
                headers[at] = frame_header.pack_bytes(*place, record.identity, record.parent, info, sums, total)
                done.checksums[i] = sums
        return headers

    # --- across: from one extent of NVMe to others ------------------------------------------------------------------

    def carry(self, pages: list[Copying], tables: Tables) -> Copied:
        """Copy these pages, of one class, into other frames under their new addresses, and make them durable.

        Where they were they stay. What does not hold there, or cannot be written, is in ``failed``. See ``save``.
        """
        frame_class = tables[pages[0].source.extent].frame_class
        done = Copied(np.zeros((0, 0), np.uint8), np.zeros((0, 0), np.uint32))
        runs = _runs([page.source for page in pages], frame_class, [page.target for page in pages])
        write_run = partial(self._carry_run, pages=pages, tables=tables, done=done)
        self._write(self._carry_io, pages, tables, done, runs, write_run)
        return done

    def _carry_run(self, run: range, pages: list[Copying], tables: Tables, done: Copied) -> None:
        """Read the run, prove it, write it elsewhere. A page that does not hold is written with an empty header."""
        first = pages[run.start]
        source, target = tables[first.source.extent], tables[first.target.extent]
        frame_class, header_bytes = target.frame_class, geometry.header_bytes(target.frame_class)
        incarnation = self.devices.header_incarnation(target.position)
        with self._bounces.borrow(len(run) * geometry.stride_bytes(frame_class)) as buffer:
            slots = buffer.reshape(len(run), -1)
            for i, slot, found in zip(run, slots, self._read_run(source, first.source.frame, slots), strict=True):
                header = self._proven(i, pages[i], source, found, done)
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
        i: int, page: Copying, source: ExtentTable, found: FrameHeader | str, done: Copied
    ) -> FrameHeader | None:
        """What was read of a page of NVMe, where it is that page; else its reason is noted."""
        if not _is_sealed(source, page.source):
            done.failed[i] = MOVED
        elif isinstance(found, str):
            done.failed[i] = IO if found == IO else DATA
            done.damaged.append((page.source, found))
        elif found.key != page.key or found.address != page.source:
            done.failed[i] = DATA
            done.damaged.append((page.source, "swapped"))
        else:
            return found
        return None

    # --- up: NVMe to DRAM -------------------------------------------------------------------------------------------

    def load(self, pages: list[Copying], tables: Tables, frames_of: Frames) -> Copied:
        """Read these pages, of one class, from one device into their DRAM frames and prove them."""
        frame_class = tables[pages[0].source.extent].frame_class
        done = Copied.of(frame_class, len(pages))
        runs = list(_runs([page.source for page in pages], frame_class))
        tasks = [partial(self._load_run, run, pages, tables, frames_of, done) for run in runs]
        io = self._io[self._device(pages[0].source, tables)]
        for run, result in zip(runs, io.run(tasks), strict=True):
            if isinstance(result, OSError | KVStoreError):
                log.error("pages could not be read: %s", result)
                done.failed |= dict.fromkeys(run, IO)
                if isinstance(result, OSError) and is_silent(result):  # that says nothing about the pages
                    done.broken[tables[pages[run.start].source.extent].position] = result
                else:
                    done.damaged += [(pages[i].source, IO) for i in run]
        return done

    def _load_run(self, run: range, pages: list[Copying], tables: Tables, frames_of: Frames, done: Copied) -> None:
        table, first = tables[pages[run.start].source.extent], pages[run.start].source.frame
        header_bytes = geometry.header_bytes(table.frame_class)
        with self._bounces.borrow(len(run) * geometry.stride_bytes(table.frame_class)) as buffer:
            slots = buffer.reshape(len(run), -1)
            for i, slot, found in zip(run, slots, self._read_run(table, first, slots), strict=True):
                page, header = pages[i], self._proven(i, pages[i], table, found, done)
                if header is not None:
                    frames_of(tables[page.target.extent])[page.target.frame] = slot[header_bytes:]
                    done.rows[i], done.checksums[i] = identity_row(header), header.checksums

    def read(self, table: ExtentTable, first: int, count: int) -> list[FrameHeader | str]:
        """What lies in these consecutive frames, proven by header and checksums; else why it does not hold: a reason of
        ``frame_header``, ``EMPTY``, or ``IO`` where the device cannot read it.

        Raises:
            OSError: the device does not answer.
        """
        with self._bounces.borrow(count * geometry.stride_bytes(table.frame_class)) as buffer:
            return self._read_run(table, first, buffer.reshape(count, -1))

    def _read_run(self, table: ExtentTable, first: int, slots: Rows) -> list[FrameHeader | str]:
        """See ``read``; ``slots`` ``[frames, stride_bytes]`` are filled: header, page, header, page, ..."""
        frame_class = table.frame_class
        head = geometry.header_bytes(frame_class)
        headers, payloads = slots[:, :head], slots[:, head:]
        try:
            self.devices.read_run(table.position, first, frame_class, slots)
        except OSError as error:
            if is_silent(error):  # of all frames, for now; and the buffer is lost
                raise
            if len(slots) > 1:  # one frame that cannot be read does not take the others with it
                return [self._read_run(table, first + i, slots[i : i + 1])[0] for i in range(len(slots))]
            log.error("frame %d of extent %d could not be read: %s", first, table.extent, error)
            return [IO]
        incarnation = self.devices.header_incarnation(table.position)
        found: list[FrameHeader | str] = []
        for i, payload in enumerate(payloads):
            header = frame_header.unpack(headers[i], frame_class, incarnation, table.extent, first + i)
            if header == "header" and not headers[i].any():
                header = EMPTY
            if isinstance(header, FrameHeader) and not frame_header.is_payload_sound(
                payload, frame_class, header.payload_sum
            ):
                header = "payload"
            found.append(header)
        return found

    def verify(self, table: ExtentTable, address: Address) -> str:
        """Why the page at this address does not hold; "" where it does. Raises as ``read``."""
        found = self.read(table, address.frame, 1)[0]
        if isinstance(found, str):
            return found
        same = found.address == address and found.key == table.rows[address.frame, 8:24].tobytes()
        return "" if same else "swapped"

    # --- which device -----------------------------------------------------------------------------------------------

    def _device(self, address: Address, tables: Tables) -> NvmeDevice:
        return self.devices.place(tables[address.extent].position)[0]

    def day_bytes_left(self, cap_bytes: int) -> int:
        """What may be written today yet where that is the most on a day. What was written is counted before it is
        reported to the node's state."""
        return max(0, cap_bytes - self.devices.written_today(today()))

    def path(self, position: int) -> str:
        """The path of the device at that position."""
        return self.devices.place(position)[0].disk.path

    def _where(self, page: Copying, tables: Tables, error: OSError | KVStoreError) -> int:
        """The position of this page that the error is of: to which it is copied, or, of NVMe too, from which."""
        source, target = tables[page.source.extent], tables[page.target.extent].position
        failed = error.filename if isinstance(error, OSError) else ""
        return source.position if source.tier == self.tier and self.path(source.position) == failed else target

    @staticmethod
    def _broke(done: Copied, run: range, position: int, error: OSError | KVStoreError) -> None:
        assert isinstance(error, OSError), error
        done.failed |= dict.fromkeys(run, IO)
        done.broken[position] = error


def identity_row(header: FrameHeader) -> Rows:
    """Key, root, extra and token ids as a record keeps them."""
    return np.frombuffer(header.key + header.root + header.extra + header.tokens.tobytes(), np.uint8)


def _is_sealed(table: ExtentTable, address: Address) -> bool:
    return int(table.words[address.frame]) == address.generation << 8 | FrameState.SEALED


def _runs(addresses: list[Address], frame_class: FrameClass, others: list[Address] | None = None) -> Iterator[range]:
    """Places of consecutive frames, as many as one system call should take; consecutive in ``others``, too."""
    most, start = max(1, COPY_BYTES // geometry.stride_bytes(frame_class)), 0
    both = [addresses] if others is None else [addresses, others]
    for i in range(1, len(addresses) + 1):
        if i < len(addresses) and i - start < most:
            pairs = [(frames[i - 1], frames[i]) for frames in both]
            if all(here.extent == before.extent and here.frame == before.frame + 1 for before, here in pairs):
                continue
        yield range(start, i)
        start = i
