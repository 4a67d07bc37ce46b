"""NvmePages: pages on NVMe as the daemon writes, reads and proves them. No decisions, no index.

A page is written with its header in front, straight from its frame in DRAM; several consecutive frames at a time where
pages are small, four runs side by side. What is read is proven by header and checksums, or it is a reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvstore.errors import KVStoreError
from kvstore.model.replica import IDENTITY_HEAD_BYTES, STAMPED, Address, FrameClass, FrameState, info_word, standing_of
from kvstore.state.events import Copying
from kvstore.state.views import Rows
from kvstore.tier import frame_header
from kvstore.tier.disk import aligned_buffer
from kvstore.tier.frame_header import FrameHeader, layer_sums, payload_sum
from kvstore.tier.io_threads import IoThreads
from kvstore.tier.nvme_devices import NvmeDevices
from kvstore.tier.records import ExtentTable

log = logging.getLogger("kvstore.nvme")

RUN_BYTES = 1 << 20  # of consecutive frames in one system call: larger pages go one by one
START_SHIFT = 32  # of a generation's 56 bits: four thousand million pages per start, sixteen million starts
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
    failed, with its error.
    """

    rows: Rows
    checksums: Any
    failed: dict[int, str] = field(default_factory=dict)
    damaged: list[tuple[Address, str]] = field(default_factory=list)
    broken: dict[int, OSError] = field(default_factory=dict)
    open_positions: set[int] = field(default_factory=set)


class NvmePages:
    """The daemon's hand on its devices. Lives with the ``Performer``; one thread saves, one loads, anyone reads."""

    def __init__(self, devices: NvmeDevices) -> None:
        self.devices = devices
        self.io = IoThreads()
        self.bytes_written = 0
        self.bytes_read = 0

    @property
    def generation(self) -> int:
        """Below every generation that this start may draw, above all that earlier ones drew."""
        return self.devices.starts << START_SHIFT

    @property
    def incarnation(self) -> int:
        """Of the set of devices: tables that name another one are void."""
        return self.devices.incarnation

    def close(self) -> None:
        """Let go of the devices. What is stored stays."""
        self.io.close()
        self.devices.close()

    # --- down: DRAM to NVMe -----------------------------------------------------------------------------------------

    def save(self, pages: list[Copying], tables: Tables, frames_of: Frames) -> Copied:
        """Write these pages, of one class, and make them durable. Pages that changed or do not hold are not claimed.

        Their extents stay open for writing until the caller says ``saved``: when the records say what is there.
        """
        frame_class = tables[pages[0].source.extent].frame_class
        done = Copied(
            np.zeros((len(pages), IDENTITY_HEAD_BYTES + 4 * frame_class.page_tokens), np.uint8),
            np.zeros((len(pages), frame_class.layers), np.uint32),
        )
        positions = {tables[page.target.extent].position for page in pages}
        try:
            self.devices.open_for_writing(positions)
        except OSError as error:
            return _all_broken(done, pages, positions, error)
        done.open_positions = positions
        runs = list(_runs([page.target for page in pages], frame_class))
        tasks = [partial(self._save_run, run, pages, tables, frames_of, done) for run in runs]
        for run, result in zip(runs, self.io.run(tasks), strict=True):
            if isinstance(result, OSError | KVStoreError):
                self._broke(done, run, tables[pages[run.start].target.extent].position, result)
        for position, broken in self._sync(positions).items():
            done.broken[position] = broken
            here = self.devices.neighbours(position)
            lost = [i for i, page in enumerate(pages) if tables[page.target.extent].position in here]
            done.failed |= dict.fromkeys(lost, IO)
        return done

    def _sync(self, positions: Iterable[int]) -> dict[int, OSError]:
        """Make what was written at these positions durable; a position of each device that cannot, and its error."""
        broken = {}
        for device, position in {self.devices.place(position)[0]: position for position in positions}.items():
            try:
                device.sync()
            except OSError as error:
                broken[position] = error
        return broken

    def saved(self, done: Copied) -> None:
        """The records say what became of a ``save``."""
        self.devices.close_for_writing(done.open_positions)

    def _save_run(self, run: range, pages: list[Copying], tables: Tables, frames_of: Frames, done: Copied) -> None:
        target = tables[pages[run.start].target.extent]
        frame_class, incarnation = target.frame_class, self.devices.header_incarnation(target.position)
        headers = aligned_buffer(len(run) * frame_class.nvme_header_bytes).reshape(len(run), -1)
        payloads: list[Rows] = []
        for slot, i in enumerate(run):
            source, page = tables[pages[i].source.extent], pages[i]
            frame = frames_of(source)[page.source.frame]
            payloads.append(frame)
            frame[frame_class.page_bytes :] = 0  # padding is nobody's
            row = source.rows[page.source.frame].copy()
            words, fmt = row.view(np.uint64), source.fmt
            # In this order: what changes between the two is noticed by the record's checksums, or later by this one.
            total = payload_sum(frame, frame_class)
            sums = layer_sums(frame[: frame_class.page_bytes], frame_class.layers)
            info = int(words[fmt.info // 8])
            if not _is_sealed(source, page.source):
                done.failed[i] = MOVED
                continue
            if source.identity_sums(slice(page.source.frame, page.source.frame + 1))[0] != words[fmt.identity_sum // 8]:
                done.failed[i] = RECORD
                done.damaged.append((page.source, RECORD))
                continue
            if info >> 48 & STAMPED and not np.array_equal(sums, row[fmt.checksums].view(np.uint32)):
                done.failed[i] = DATA
                done.damaged.append((page.source, DATA))
                continue
            info = info_word(frame_class.page_bytes, flags=STAMPED, position=0) | standing_of(info)
            identity, parent = row[fmt.identity], row[fmt.parent].tobytes()
            place = headers[slot], frame_class, incarnation, page.target
            frame_header.pack(*place, identity, parent, info, sums, total)
            done.rows[i], done.checksums[i] = identity, sums
        self.devices.write_run(target.position, pages[run.start].target.frame, frame_class, headers, payloads)
        self.bytes_written += len(run) * frame_class.nvme_stride
        for i in run:
            if i not in done.failed and not _is_sealed(tables[pages[i].source.extent], pages[i].source):
                done.failed[i] = MOVED

    # --- up: NVMe to DRAM -------------------------------------------------------------------------------------------

    def load(self, pages: list[Copying], tables: Tables, frames_of: Frames) -> Copied:
        """Read these pages, of one class, into their DRAM frames and prove them."""
        frame_class = tables[pages[0].source.extent].frame_class
        done = Copied(
            np.zeros((len(pages), IDENTITY_HEAD_BYTES + 4 * frame_class.page_tokens), np.uint8),
            np.zeros((len(pages), frame_class.layers), np.uint32),
        )
        runs = list(_runs([page.source for page in pages], frame_class))
        tasks = [partial(self._load_run, run, pages, tables, frames_of, done) for run in runs]
        for run, result in zip(runs, self.io.run(tasks), strict=True):
            if isinstance(result, OSError | KVStoreError):
                log.error("pages could not be read: %s", result)
                done.failed |= dict.fromkeys(run, IO)
                done.damaged += [(pages[i].source, IO) for i in run]
        return done

    def _load_run(self, run: range, pages: list[Copying], tables: Tables, frames_of: Frames, done: Copied) -> None:
        table, first = tables[pages[run.start].source.extent], pages[run.start].source.frame
        targets = [frames_of(tables[pages[i].target.extent])[pages[i].target.frame] for i in run]
        for i, found in zip(run, self._read_run(table, first, targets), strict=True):
            page = pages[i]
            if not _is_sealed(table, page.source):
                done.failed[i] = MOVED
            elif isinstance(found, str):
                done.failed[i] = IO if found == IO else DATA
                done.damaged.append((page.source, found))
            elif found.key != page.key or found.address != page.source:
                done.failed[i] = DATA
                done.damaged.append((page.source, "swapped"))
            else:
                done.rows[i], done.checksums[i] = identity_row(found), found.checksums

    def read(self, table: ExtentTable, first: int, count: int) -> list[FrameHeader | str]:
        """What lies in these consecutive frames, proven by header and checksums; else why it does not hold: a reason of
        ``frame_header``, ``EMPTY``, or ``IO`` where the device cannot read it."""
        buffer = aligned_buffer(count * table.frame_class.frame_bytes).reshape(count, -1)
        return self._read_run(table, first, list(buffer))

    def _read_run(self, table: ExtentTable, first: int, payloads: list[Rows]) -> list[FrameHeader | str]:
        """See ``read``; the pages lie in ``payloads`` then."""
        frame_class = table.frame_class
        headers = aligned_buffer(len(payloads) * frame_class.nvme_header_bytes).reshape(len(payloads), -1)
        try:
            self.devices.read_run(table.position, first, frame_class, headers, payloads)
        except OSError as error:
            if len(payloads) > 1:  # one frame that cannot be read does not take the others with it
                return [self._read_run(table, first + i, [payload])[0] for i, payload in enumerate(payloads)]
            log.error("frame %d of extent %d could not be read: %s", first, table.extent, error)
            return [IO]
        self.bytes_read += len(payloads) * frame_class.nvme_stride
        incarnation = self.devices.header_incarnation(table.position)
        found: list[FrameHeader | str] = []
        for i, payload in enumerate(payloads):
            header = frame_header.unpack(headers[i], frame_class, incarnation, table.extent, first + i)
            if header == "header" and not headers[i].any():
                header = EMPTY
            if isinstance(header, FrameHeader) and not frame_header.is_payload_sound(
                payload, frame_class, header.checksums, header.payload_sum
            ):
                header = "payload"
            found.append(header)
        return found

    def verify(self, table: ExtentTable, address: Address) -> str:
        """Why the page at this address does not hold; "" where it does."""
        found = self.read(table, address.frame, 1)[0]
        if isinstance(found, str):
            return found
        same = found.address == address and found.key == table.rows[address.frame, 8:24].tobytes()
        return "" if same else "swapped"

    # --- extents ----------------------------------------------------------------------------------------------------

    def carve(self, position: int, number: int, frame_class: FrameClass) -> OSError | None:
        """Make an extent known on its device; the error where it cannot be (writing there will fail as well)."""
        try:
            self.devices.carve(position, number, frame_class)
        except OSError as error:
            log.error("an extent could not be made: %s", error)
            return error
        return None

    def drop(self, position: int) -> None:
        """The device forgets an extent. Where it cannot, what is found there later is of an extent nobody knows."""
        try:
            self.devices.drop(position)
        except OSError as error:
            log.error("an extent could not be dropped: %s", error)

    def move(self, source: ExtentTable, frame: int, target: ExtentTable, address: Address) -> bool:
        """Copy a page into another frame, under its new address. False: it cannot, and the page is lost with it."""
        frame_class = source.frame_class
        payload = aligned_buffer(frame_class.frame_bytes)
        headers = aligned_buffer(frame_class.nvme_header_bytes).reshape(1, -1)
        try:
            found = self._read_run(source, frame, [payload])[0]
            if isinstance(found, str):
                return False
            incarnation = self.devices.header_incarnation(target.position)
            rest = found.parent, found.info, found.checksums, found.payload_sum
            frame_header.pack(headers[0], frame_class, incarnation, address, identity_row(found), *rest)
            self.devices.open_for_writing([target.position])
            try:
                self.devices.write_run(target.position, address.frame, frame_class, headers, [payload])
                self.devices.sync()
            finally:
                self.devices.close_for_writing([target.position])
        except OSError as error:
            log.error("a page could not be moved: %s", error)
            return False
        return True

    def distrust(self, position: int) -> None:
        """A page of this extent does not hold: the next start scans it, unless there is a checkpoint before that.

        Its directory still names that page, and might keep a sound copy in another extent from being adopted.
        """
        try:
            self.devices.open_for_writing([position])
            self.devices.close_for_writing([position])
        except OSError as error:
            log.error("an extent's checkpoint could not be withdrawn: %s", error)

    def is_clean(self, position: int) -> bool:
        """The extent's last checkpoint is younger than the last write there."""
        device, local = self.devices.place(position)
        extent = device.extents.get(local)
        return extent is None or extent.clean

    def path(self, position: int) -> str:
        """Of the device at that position."""
        return self.devices.place(position)[0].disk.path

    def checkpoint(self, position: int, rows: Rows, version: int) -> OSError | None:
        """Make an extent's directory durable; it then counts as clean where nobody wrote since ``version``.

        Returns the error where it cannot be written: the next start will scan the extent.
        """
        try:
            self.devices.write_directory(position, rows)
            self.devices.mark_clean({position: version})
        except OSError as error:
            return error
        return None

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


def _all_broken(done: Copied, pages: list[Copying], positions: set[int], error: OSError) -> Copied:
    done.failed = dict.fromkeys(range(len(pages)), IO)
    done.broken = dict.fromkeys(positions, error)
    return done


def _runs(addresses: list[Address], frame_class: FrameClass) -> Iterator[range]:
    """Places of consecutive frames, as many as one system call should take."""
    most, start = max(1, RUN_BYTES // frame_class.nvme_stride), 0
    for i in range(1, len(addresses) + 1):
        if i < len(addresses) and i - start < most:
            before, here = addresses[i - 1], addresses[i]
            if here.extent == before.extent and here.frame == before.frame + 1:
                continue
        yield range(start, i)
        start = i
