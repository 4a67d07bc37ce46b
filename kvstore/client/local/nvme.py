"""NvmeReader: pages on NVMe as a client reads them: from the device itself, without asking anybody.

The index names a frame. What stands in front of that frame on the device proves the page: incarnation, address, key,
root, extra and token ids as the caller's keys have them, and every layer's checksum. Header and payload come in one
read; only pages that hold are copied to the caller. In the end the records (lean ones) say whether the pages were
there all the time.

Worked example: 32 pages of 256 KiB lie in frames 8..39 of extent 6. That is one run, read in 6 parts of 5, 7, 7, 7, 4
and 2 frames, which lie end to end on the device as header, page, header, page, ...: at most 2 MiB each. Two threads
read the parts one by one, and while they do, the caller checks and copies what they brought. If page 17 does not hold,
the match ends there, whatever page 18 may be; the caller's rows from 17 on hold what they held before, or what their
page is.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.client.local.read_threads import Bounce, Read, ReadThreads
from kvstore.client.local.tier_reader import ObjectHead
from kvstore.client.match import ABSENT, CHECKSUM, EXTENT, GENERATION, IDENTITY, IO
from kvstore.model.objects import is_object_class
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS, FrameClass, FrameState, Tier
from kvstore.tier import nvme_geometry
from kvstore.tier.disk import Bytes, Disk
from kvstore.tier.folder import NodeFolder
from kvstore.tier.frame_header import faults, payload_sums_in, unpack
from kvstore.tier.host_memory import copy
from kvstore.tier.nvme_map import NvmeMap
from kvstore.tier.records import ExtentTable

PART_BYTES: Final = 2 << 20  # of one read, where a page is not larger
SMALL_BYTES: Final = PART_BYTES // 4  # smaller reads cost more than they bring
HEADER_SILENCE_S: Final = 5.0  # after which a device that was asked for one header counts as silent
RECHECK_NS: Final = 100_000_000  # how often a read looks whether the node's devices are others

_SEALED = int(FrameState.SEALED)
_digest = xxhash.xxh3_64_intdigest


class NvmeExtent:
    """One extent on NVMe as a client sees it. A dropped one's words are zero, so that nothing matches."""

    __slots__ = ("number", "position", "frame_class", "words", "last_use", "roots", "_table")

    def __init__(self, table: ExtentTable) -> None:
        self.number = table.extent
        self.position = table.position
        self.frame_class = table.frame_class
        self.words = table.words
        self.last_use = table.last_use
        self.roots = table.rows[:, table.fmt.root]
        self._table = table  # keeps the mappings


class NvmeRun(NamedTuple):
    """Pages ``page .. page + length`` in consecutive frames of one extent; ``words`` are those frames' words."""

    extent: NvmeExtent
    frame: int
    page: int
    length: int
    words: bytes


class ReadPart(NamedTuple):
    """What one read brings: ``length`` pages from ``page`` on, in consecutive frames."""

    disk: Disk
    offset: int
    incarnation: int  # of that disk
    extent: NvmeExtent
    frame: int
    page: int
    length: int
    generations: npt.NDArray[np.uint64]

    def frames(self) -> list[ReadPart]:
        """One part per frame."""
        stride = nvme_geometry.stride_bytes(self.extent.frame_class)
        return [
            self._replace(
                offset=self.offset + i * stride,
                frame=self.frame + i,
                page=self.page + i,
                length=1,
                generations=self.generations[i : i + 1],
            )
            for i in range(self.length)
        ]


class NvmeReader:
    """See ``LowerReader``: one node's NVMe as one process reads it.

    Life: made (nothing opened) -> devices opened by the first read, again when the node says that they are others ->
    dropped. A page that leaves while it is read is a miss.
    """

    tier = Tier.NVME
    closed = True

    def __init__(self, folder: NodeFolder, threads: ReadThreads) -> None:
        self.threads = threads
        self._folder = folder
        self._map: NvmeMap | None = None
        self._map_id: tuple[int, ...] = ()
        self._mutex = threading.Lock()
        self._check_ns = 0  # when to look again whether the node's devices are others
        self._extents: dict[int, NvmeExtent] = {}

    def readable(self) -> bool:
        """See ``LowerReader``: there are devices, and this process may read at least what the node says of them."""
        return self._opened() is not None

    def root_at(self, raw: bytes) -> bytes | None:
        """See ``TierReader``."""
        number, frame, _ = ADDRESS.unpack_from(raw)
        extent = self._extent(number)
        return extent.roots[frame].tobytes() if extent is not None and frame < len(extent.roots) else None

    def class_at(self, raw: bytes) -> FrameClass | None:
        """See ``TierReader``."""
        extent = self._extent(ADDRESS.unpack_from(raw)[0])
        return extent.frame_class if extent is not None else None

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> NvmeRead:
        """See ``LowerReader``."""
        map_ = self._opened()
        if map_ is None:
            return NvmeRead(self, [], [], (), keys, rows, IO)
        reason = "" if len(located) == len(keys) else ABSENT
        runs, why = self._runs(located, frame_class, map_)
        return NvmeRead(self, located, runs, _parts(map_, runs), keys, rows, why or reason)

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """See ``TierReader``. Its header proves it."""
        number, frame, generation = ADDRESS.unpack(raw)
        map_ = self._opened()
        extent = None if map_ is None else self._extents.get(number) or self._open_extent(number, map_)
        if map_ is None or extent is None or not is_object_class(extent.frame_class) or frame >= len(extent.words):
            return None
        frame_class, place = extent.frame_class, map_.place(extent.position, extent.frame_class, frame)
        if place is None:
            return None
        batch = self.threads.start([Read(place.disk, place.offset, nvme_geometry.header_bytes(frame_class))])
        done = batch.next(HEADER_SILENCE_S)
        if done is None or isinstance(done[1], OSError):
            return None
        header = done[1].take(nvme_geometry.header_bytes(frame_class)).copy()
        batch.recycle(done[1])
        found = unpack(header, frame_class, place.incarnation, number, frame, generation)
        if isinstance(found, str) or int(extent.words[frame]) != generation << 8 | _SEALED:
            return None
        return ObjectHead(frame_class, found.key + found.root + found.extra + found.tokens.tobytes())

    def _runs(self, located: list[bytes], frame_class: FrameClass, map_: NvmeMap) -> tuple[list[NvmeRun], str]:
        """Runs of consecutive frames that should hold these pages, and why not all of them ("" where all).

        Whether they still do is looked at when they have been read: a page that left before is rare.
        """
        count = len(located)
        flat = struct.unpack("<" + "IIQ" * count, b"".join(located))
        numbers, frames, generations = flat[0::3], flat[1::3], flat[2::3]
        runs: list[NvmeRun] = []
        page = 0
        while page < count:
            number, offset, stop = numbers[page], frames[page] - page, page + 1
            while stop < count and frames[stop] - stop == offset and numbers[stop] == number:
                stop += 1
            extent = self._extents.get(number) or self._open_extent(number, map_)
            if extent is None or extent.frame_class != frame_class or frames[stop - 1] >= len(extent.words):
                return runs, EXTENT
            words = struct.pack(
                f"<{stop - page}Q", *[generation << 8 | _SEALED for generation in generations[page:stop]]
            )
            runs.append(NvmeRun(extent, frames[page], page, stop - page, words))
            page = stop
        return runs, ""

    # --- what is mapped ---------------------------------------------------------------------------------------------

    def _opened(self) -> NvmeMap | None:
        """The devices; None where the node has none, or this process may not read them."""
        if time.monotonic_ns() >= self._check_ns:
            with self._mutex:
                self._check()
        return self._map

    def _check(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._check_ns:
            return  # another thread was faster
        try:
            status = os.stat(self._folder.nvme)
        except OSError:
            identity: tuple[int, ...] = ()
        else:
            identity = status.st_dev, status.st_ino, status.st_mtime_ns
        if identity != self._map_id:
            # What other threads are reading by keeps its descriptors until they are done.
            self._map = NvmeMap.open(self._folder) if identity else None
            self._map_id, self._extents = identity, {}
        self._check_ns = now_ns + RECHECK_NS  # last: who sees it sees the map

    def forget(self, extent: NvmeExtent) -> None:
        """It does not hold what the index said: it may have been made anew, on the same devices or on others."""
        self._extents.pop(extent.number, None)
        self._check_ns = 0

    def _extent(self, number: int) -> NvmeExtent | None:
        extent = self._extents.get(number)
        if extent is None:
            map_ = self._opened()
            extent = self._open_extent(number, map_) if map_ is not None else None
        return extent

    def _open_extent(self, number: int, map_: NvmeMap) -> NvmeExtent | None:
        table = ExtentTable.open(self._folder, number, map_.incarnation)
        if table is None or table.tier is not self.tier:
            self._check_ns = 0
            return None
        extents = self._extents
        for old in extents.keys() - set(self._folder.extents()):  # rare enough to look: their mappings hold memory
            extents.pop(old, None)
        extent = NvmeExtent(table)
        extents[number] = extent
        return extent


class NvmeRead:
    """See ``PendingRead``: pages on their way from the devices. Made by ``NvmeReader.start``."""

    def __init__(
        self,
        reader: NvmeReader,
        located: list[bytes],
        runs: list[NvmeRun],
        parts: Iterable[ReadPart],
        keys: Keys,
        rows: Bytes,
        reason: str,
    ) -> None:
        self.damaged = b""
        self._reader = reader
        self._located = located
        self._runs = runs
        self._rows = rows
        self._parts: list[ReadPart] = []
        self._batch = reader.threads.start(map(self._noted, parts))
        read = self._parts[-1].page + self._parts[-1].length if self._parts else 0
        self._reason = IO if runs and read < runs[-1].page + runs[-1].length else reason
        self._identities = _identities(keys)

    def _noted(self, part: ReadPart) -> Read:
        self._parts.append(part)
        return _read_of(part)

    @property
    def addresses(self) -> bytes:
        """See ``PendingRead``."""
        return b"".join(self._located[: self._parts[-1].page + self._parts[-1].length]) if self._parts else b""

    def result(self, silence_s: float) -> tuple[int, str]:
        """See ``PendingRead``."""
        pages, reason = self._read_all(silence_s)
        now_ns = time.monotonic_ns()
        for run in self._runs:
            if run.page > pages:
                break
            now = run.extent.words[run.frame : run.frame + run.length].tobytes()
            same = run.length if now == run.words else _equal_rows(now, run.words, 8)
            if same < run.length and run.page + same <= pages:
                pages, reason = run.page + same, GENERATION  # what was read is not it, whatever it looked like
                self._reader.forget(run.extent)
            run.extent.last_use[run.frame : run.frame + max(0, min(same, pages - run.page))] = now_ns
        if reason == CHECKSUM:
            self.damaged = self._located[pages]
        return pages, reason

    def _read_all(self, silence_s: float) -> tuple[int, str]:
        """Check and copy what the devices bring, as it comes."""
        batch, parts = self._batch, list(self._parts)
        end = parts[-1].page + parts[-1].length if parts else 0
        missing = {part.page: IO for part in parts}  # first page that is not there -> why not
        first = end  # of those that do not hold, as far as known
        while (done := batch.next(silence_s)) is not None:
            number, outcome = done
            part = parts[number]
            if not isinstance(outcome, OSError):
                good, why = self._accept(part, outcome) if part.page < first else (0, ABSENT)
                batch.recycle(outcome)
                del missing[part.page]
                if good < part.length:
                    first = min(first, part.page + good)
                    missing[part.page + good] = why
            elif part.length > 1 and part.page < first:  # frame by frame: one must not cost those before it
                for one in part.frames():
                    missing[one.page] = IO
                    parts.append(one)
                    batch.add(_read_of(one))
            else:
                first = min(first, part.page)
        pages = min(missing, default=end)
        return pages, missing.get(pages, self._reason)

    def _accept(self, part: ReadPart, bounce: Bounce) -> tuple[int, str]:
        """Copy the leading pages of a part that hold to the caller's rows; how many, and why not all."""
        frame_class, pages = part.extent.frame_class, part.length
        head = nvme_geometry.header_bytes(frame_class)
        frames = bounce.take(pages * nvme_geometry.stride_bytes(frame_class)).reshape(pages, -1)
        headers, payloads = frames[:, :head], frames[:, head:]
        where = part.incarnation, part.extent.number, part.frame
        identities = self._identities[part.page : part.page + pages]
        reasons = faults(headers, frame_class, *where, part.generations, identities)
        sums = payload_sums_in(headers)
        good, why = pages, ""
        for i, (reason, page) in enumerate(zip(reasons, bounce.pages(frame_class, pages), strict=True)):
            if reason or _digest(page) != sums[i]:
                good, why = i, _why(part, i, headers[i]) if reason else CHECKSUM
                break
        copy(self._rows[part.page : part.page + good], payloads[:good, : frame_class.page_bytes])
        return good, why


def _read_of(part: ReadPart) -> Read:
    return Read(part.disk, part.offset, part.length * nvme_geometry.stride_bytes(part.extent.frame_class))


def _why(part: ReadPart, i: int, header: Bytes) -> str:
    """A header that is not what it should be: is it another page's that has the same key, or is it damaged?"""
    frame, generation = part.frame + i, int(part.generations[i])
    sound = unpack(header, part.extent.frame_class, part.incarnation, part.extent.number, frame, generation)
    return CHECKSUM if isinstance(sound, str) else IDENTITY


def _parts(map_: NvmeMap, runs: list[NvmeRun]) -> Iterator[ReadPart]:
    """Runs cut into reads. They end where a device could not be opened here.

    The first read is shorter than the second one, so that both are not done in the same moment. The last ones are
    short: what they bring is checked and copied when nothing is left to be read.
    """
    left, first = sum(run.length for run in runs), True
    for run in runs:
        frame_class = run.extent.frame_class
        stride = nvme_geometry.stride_bytes(frame_class)
        most, least = max(1, PART_BYTES // stride), max(1, SMALL_BYTES // stride)
        generations = np.frombuffer(run.words, np.uint64) >> np.uint64(8)
        i = 0
        while i < run.length:
            length = min(_step(left, most, least, first), run.length - i)
            place = map_.place(run.extent.position, frame_class, run.frame + i)
            if place is None:
                return
            yield ReadPart(*place, run.extent, run.frame + i, run.page + i, length, generations[i : i + length])
            i, left, first = i + length, left - length, False


def _step(left: int, most: int, least: int, first: bool) -> int:
    """Pages of the next read, where so many are left."""
    share = -(-left // 3) if first else -(-3 * left // 5)
    step = min(-(-2 * most // 3) if first else most, max(share, least))
    return left if left - step < least and left <= most else step


def _identities(keys: Keys) -> Bytes:
    return np.frombuffer(keys.identity_bytes, np.uint8).reshape(len(keys), -1)


def _equal_rows(left: bytes, right: bytes, width: int) -> int:
    """How many leading rows of ``width`` bytes are equal."""
    rows = min(len(left), len(right)) // width
    return next(
        (i for i in range(rows) if left[i * width : (i + 1) * width] != right[i * width : (i + 1) * width]), rows
    )
