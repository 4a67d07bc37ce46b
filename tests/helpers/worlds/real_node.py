"""RealNode: the product's start and performer over one node's files in memory, for worlds without processes.

The product makes records, marks, header, index, book and segment in a folder of tmpfs, and its NVMe devices work on a
disk in memory (``copying``). Nothing runs in the background. A kill may come before every change that outlives a
process: a store into records, marks or the header, a file that gets its name or goes, a transaction of the index. A
store into several records may be cut in its middle. ``promises`` checks every instruction before it is performed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import failpoint
from kvstore.config import NodeConfig, Quota
from kvstore.model.replica import ADDRESS, Address, FrameClass, FrameState, Tier, word_of
from kvstore.node import book, nvme_start, startup
from kvstore.node.index_keeper import snapshot
from kvstore.node.performer import Performer
from kvstore.shm import records
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.index import Index
from kvstore.shm.records import ExtentTable
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state import integrity
from kvstore.state.interfaces import Snapshot, TieringRules
from kvstore.state.node_state import NodeState
from kvstore.tier.base import TierStore
from kvstore.tier.dram import DramStore, SegmentFile
from kvstore.tier.nvme import frame_header, geometry
from kvstore.tier.nvme.disk import aligned_buffer
from kvstore.tier.nvme.frame_header import layer_sums
from kvstore.tier.nvme.table import frame_offset
from tests.helpers.worlds.copying import StagedDevices, StagedPages, WorldDisk
from tests.helpers.worlds.promises import Nobody, Promises, Watch

SEALED, RESERVED, QUARANTINED = FrameState.SEALED, FrameState.RESERVED, FrameState.QUARANTINED
CONTENT_BYTES = 16  # at the front of a page, in a world; the rest is zeros


class Scarce(Protocol):
    """Memory that may run out; only some tests have it."""

    def take_table(self, frame_class: FrameClass, frames: int) -> None:
        """An extent is carved."""
        ...

    def drop(self, frames: int) -> None:
        """An extent's tables are given up; processes that map them keep the memory."""
        ...

    def commit(self, changes: int, entries: int) -> None:
        """The index follows a decision."""
        ...


@dataclass
class Nvme:
    """A node's NVMe tier: its disk (which outlives even a reboot), its rules, and how both tiers evict."""

    disk: WorldDisk
    rules: TieringRules = field(default_factory=TieringRules)
    policy: str = "lru"


class Killed(BaseException):
    """Raised where the node dies."""


class Entries(MutableMapping[bytes, Address]):
    """A tier's table of the node's index, as a dict."""

    def __init__(self, node: RealNode, tier: Tier) -> None:
        self._node, self._tier = node, tier

    def __getitem__(self, key: bytes) -> Address:
        address = self._node.performer.index.find(self._tier, key) if key else None
        if address is None:
            raise KeyError(key)
        return address

    def __iter__(self) -> Iterator[bytes]:
        return (key for key, _ in self._node.performer.index.addresses(self._tier))

    def __len__(self) -> int:
        return self._node.performer.index._index.count(self._tier)

    def __setitem__(self, key: bytes, address: Address) -> None:
        self._node.performer.index.commit([(self._tier, [key], [ADDRESS.pack(*address)])])

    def __delitem__(self, key: bytes) -> None:
        self._node.performer.index.commit([(self._tier, [key], [])])


class _Words:
    """The words of a header. Each store is a step."""

    def __init__(self, words: memoryview, step: Callable[[], None]) -> None:
        self._words, self._step = words, step

    def __getitem__(self, at: int) -> int:
        return int(self._words[at])

    def __setitem__(self, at: int, value: int) -> None:
        self._step()
        self._words[at] = value

    def release(self) -> None:
        """See ``memoryview``."""
        self._words.release()


class _Stored(np.ndarray[Any, Any]):
    """An array of records or marks. Each store is a step; a kill cuts a store into several rows in its middle."""

    step: Callable[[], None] | None = None

    def __array_finalize__(self, base: Any) -> None:
        self.step = getattr(base, "step", None)

    def __setitem__(self, where: Any, value: Any) -> None:
        if self.step is not None:
            try:
                self.step()
            except Killed:
                rows, values = self[where], np.asarray(value)
                if isinstance(where, slice | tuple) and values.shape[:1] == rows.shape[:1]:
                    np.ndarray.__setitem__(rows, slice(len(rows) // 2), values[: len(rows) // 2])
                raise
        super().__setitem__(where, value)


class WatchedPerformer(Performer):
    """The product's performer, watched by its ``RealNode``."""

    def __init__(self, node: RealNode, *about: Any) -> None:
        super().__init__(*about)
        self._node = node
        node.performer = self
        commit = self.index.commit

        def counted(ops: list[Any]) -> None:
            if node.scarce is not None:
                node.scarce.commit(sum(len(keys) for _, keys, _ in ops), len(node.index))
            commit(ops)

        self.index.commit = counted  # type: ignore[method-assign]

    def perform(self, instructions: list[do.Instruction]) -> do.Reply | None:
        """See ``Performer``."""
        self._node.performing = iter(instructions)
        with self._node.watched():
            return super().perform(instructions)


class RealNode:
    """One node, through all its lives: ``start`` begins one, after a kill at any moment too. ``close`` ends it.

    Attributes:
        performer: the one that lives, or died last.
        copies: copies and erasures that the state decided and the mover has not begun.
        killed: whether the last ``perform``, or ``start``, was cut short.
        counts: whether ``perform`` counts its steps where it is not to be killed; and how many it has counted.
    """

    performer: WatchedPerformer

    def __init__(self, extent_bytes: int, positions: int, watch: Watch | None = None, nvme: Nvme | None = None) -> None:
        self.extent_bytes, self.positions, self.nvme = extent_bytes, positions, nvme
        self.now_ns = 0
        self.scarce: Scarce | None = None
        self.copies: deque[do.Save | do.Load | do.Carry | do.Erase] = deque()
        self.indexes = {tier: Entries(self, tier) for tier in Tier}
        self.performing: Iterator[do.Instruction] = iter(())
        self.killed = False
        self.counts = False
        self.counted = 0
        self._promises = Promises(self, watch if watch is not None else Nobody())
        self._left: int | None = None  # steps until a kill
        # Pages that were proven, by their place on the disk: address, key, incarnation, and a hash of what was there.
        self._proven: dict[int, tuple[Address, bytes, int, bytes]] = {}
        self._name = f"world{next(_numbers)}"
        self._folder: NodeFolder | None = None
        self._incarnations = itertools.count(1)
        self._make()
        _living.append(self)

    # --- files ------------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        """The files of a new node."""
        folder = self._locked()
        header = Header.create(folder, next(self._incarnations), self.extent_bytes, self.positions)
        SegmentFile.create(folder, header.incarnation, self.extent_bytes, self.positions).close()
        header.close()

    def _locked(self) -> NodeFolder:
        if self._folder is not None:
            self._folder.close()
        self._folder = NodeFolder(_shm_dir(), self._name)
        self._folder.lock()
        return self._folder

    @property
    def folder(self) -> NodeFolder:
        """Where its files are."""
        assert self._folder is not None
        return self._folder

    def lose_memory(self) -> None:
        """Turn the machine off and on: nothing but the disk is left."""
        self._bury()
        shutil.rmtree(self.folder.path)
        self._promises.forget_numbers()
        self._make()
        if self.nvme is not None:
            self.nvme.disk.lose_power()

    def forget_tables(self) -> None:
        """Say that NVMe's tables in memory were half filled when the node was killed."""
        (self.folder.path / nvme_start.LOADING).touch()

    def close(self) -> None:
        """Remove all of the node."""
        self._bury()
        path = self.folder.path
        self.folder.close()
        shutil.rmtree(path, ignore_errors=True)
        if self in _living:
            _living.remove(self)

    def _bury(self) -> None:
        """Unmap what the dead performer mapped. A dead process writes nothing more, to no device either."""
        if "performer" in self.__dict__:
            performer = self.performer
            performer.stores.pop(Tier.NVME, None)
            performer.book = book.Book(self.folder, performer.header.incarnation)
            performer.close(keep_name=True)
            del self.performer
        self.copies.clear()

    # --- starts -----------------------------------------------------------------------------------------------------

    def start(self, now_ns: int, options: dict[str, Any], steps: int | None = None) -> NodeState | None:
        """Start as a daemon does, from what the last one left; None where it is killed after ``steps`` steps."""
        self._bury()
        self.now_ns, self.killed = now_ns, False
        self._promises.begin()
        folder = self._locked()
        header = Header.open(folder, writable=True)
        segment = SegmentFile.open(folder, header.incarnation) if header is not None else None
        assert header is not None and segment is not None
        stores: dict[Tier, TierStore] = {Tier.DRAM: DramStore(segment, header.incarnation)}
        if self.nvme is not None:
            disk = self.nvme.disk
            stores[Tier.NVME] = StagedPages(StagedDevices.open([disk], self._name, disk.extent_bytes))
        about = self._config(options), folder, header, stores, lambda: self.now_ns
        try:
            with patch.object(startup, "Performer", lambda *made: WatchedPerformer(self, *made)), self._dying(steps):
                _, state = startup.recover_tiers(*about)
        except Killed:
            return None
        self._take_copies()
        return state

    def _config(self, options: dict[str, Any]) -> NodeConfig:
        rules = self.nvme.rules if self.nvme is not None else TieringRules()
        quotas: tuple[Quota, ...] = tuple(options.get("quotas", ()))
        return NodeConfig(
            name=self._name,
            dram=self.extent_bytes * self.positions,
            extent=self.extent_bytes,
            shm_dir=_shm_dir(),
            eviction=self.nvme.policy if self.nvme is not None else "lru",  # tests of an order are about this one
            demote_at=rules.demote_at,
            promote_after=rules.promote_after,
            nvme_admission=rules.admission,
            nvme_write_bytes_per_day=rules.write_bytes_per_day,
            lease_ttl_s_max=options.get("lease_ttl_ns_max", 3600 * 10**9) / 1e9,
            sessions_max=options.get("sessions_max", 256),
            pins_share_max=options.get("pins_share_max", 0.5),
            quotas=quotas,
        )

    # --- performing -------------------------------------------------------------------------------------------------

    def perform(self, instructions: list[do.Instruction], steps: int | None = None) -> do.Reply | None:
        """Perform one decision; with ``steps``, only that many steps of it. Then call ``start``: there is no reply."""
        try:
            with self._dying(sys.maxsize if steps is None and self.counts else steps):
                reply = self.performer.perform(instructions)
                self._step()
        except Killed:
            return None
        self.performer.book.flush()
        self._take_copies()
        return reply

    def _take_copies(self) -> None:
        waiting = self.performer.waiting
        self.copies += [*waiting.loads, *waiting.copies]
        waiting.loads.clear()
        waiting.copies.clear()

    @staticmethod
    def count_stores(instructions: list[do.Instruction]) -> int:
        """About how many steps ``perform`` takes, to draw a kill point from."""
        return 1 + sum(3 + 2 * len(getattr(instruction, "addresses", ())) for instruction in instructions)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at every instruction that is performed meanwhile."""
        before = failpoint.ACTIVE, failpoint.hit
        failpoint.ACTIVE, failpoint.hit = True, self._hit  # type: ignore[assignment]
        try:
            yield
        finally:
            failpoint.ACTIVE, failpoint.hit = before  # type: ignore[assignment]

    @contextlib.contextmanager
    def _dying(self, steps: int | None) -> Iterator[None]:
        """Kill the node after that many steps; None: never."""
        if steps is None:
            yield
            return
        self._left = steps
        begin, rename, remove = Index.begin, os.rename, records.remove

        def stepping(call: Callable[..., Any]) -> Callable[..., Any]:
            def stepped(*about: Any, **more: Any) -> Any:
                self._step()
                return call(*about, **more)

            return stepped

        try:
            with (
                self.watched(),
                patch.object(Index, "begin", stepping(begin)),
                patch.object(os, "rename", stepping(rename)),
                patch.object(records, "remove", stepping(remove)),
            ):
                yield
        finally:
            self._left = None

    def _step(self) -> None:
        """Called before every change that outlives the node; a kill comes here."""
        if self._left is None:
            return
        if self._left == 0:
            self.killed = True
            raise Killed
        self._left -= 1
        self.counted += 1

    def _hit(self, name: str) -> None:
        """Called in place of ``failpoint.hit``."""
        if self._left is not None and not self.killed:
            self._count_stores()
        if name in ("node.event", "node.instruction"):
            instruction = next(self.performing, None)
            if instruction is not None and not self.killed:
                self._promises.check(instruction)

    def _count_stores(self) -> None:
        """Make every store into records, marks and the header a step."""
        if isinstance(self.performer.header.words, memoryview):
            self.performer.header.words = _Words(self.performer.header.words, self._step)  # type: ignore[assignment]
        for table in self.performer.tables.values():
            if not isinstance(table.rows, _Stored):
                table.rows, table.words, table.last_use = map(self._stored, (table.rows, table.words, table.last_use))
                table.column = self._stored_column(table.column)  # type: ignore[method-assign]

    def _stored(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        view = array.view(_Stored)
        view.step = self._step
        return view

    def _stored_column(self, column: Callable[[int], Any]) -> Callable[[int], Any]:
        return lambda offset: self._stored(column(offset))

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def index(self) -> Entries:
        """DRAM's table of the index."""
        return self.indexes[Tier.DRAM]

    @property
    def nvme_index(self) -> Entries:
        """NVMe's table of the index."""
        return self.indexes[Tier.NVME]

    @property
    def pend(self) -> dict[bytes, Address]:
        """The frames that readers are shown for pages that are being written."""
        return dict(self.performer.index.pending())

    @property
    def pins(self) -> dict[int, ev.Pin]:
        """Pins that the next start would find."""
        found = book.read_pins(self.folder, self.performer.header.incarnation, self.now_ns)
        return {pin.pin: pin for pin in found}

    def write_pin(self, pin: do.WritePin) -> None:
        """Write a pin down, as an earlier daemon did."""
        self.performer.book.add_pin(pin)
        self.performer.book.flush()

    @property
    def pages(self) -> StagedPages:
        """The node's hand on its NVMe devices."""
        nvme = self.performer.nvme
        assert isinstance(nvme, StagedPages)
        return nvme

    @property
    def tables(self) -> dict[int, ExtentTable]:
        """Records and marks of each extent."""
        return self.performer.tables

    def generation(self, extent: int, frame: int) -> int:
        """What the record's word says."""
        return int(self.tables[extent].words[frame]) >> 8

    def frame_state(self, extent: int, frame: int) -> FrameState:
        """What the record's word says."""
        return FrameState(int(self.tables[extent].words[frame]) & 0xFF)

    def is_sealed(self, address: Address, state: FrameState = SEALED) -> bool:
        """True where the record has that generation and state."""
        table = self.tables.get(address.extent)
        return table is not None and int(table.words[address.frame]) == word_of(address.generation, state)

    def leases(self, extent: int) -> npt.NDArray[np.uint64]:
        """The deadline of each frame's lease or reservation."""
        table = self.tables[extent]
        return table.column(table.fmt.lease_until_ns)

    def snapshots(self, tier: Tier = Tier.DRAM) -> list[Snapshot]:
        """See ``RecordView``."""
        return [snapshot(table) for table in self.tables.values() if table.tier == tier]

    def is_waiting(self, table: ExtentTable) -> bool:
        """True where some frames wait for a scan, or for a writer to end."""
        return bool(((table.words & np.uint64(0xFF)) == QUARANTINED).any())

    def proven(self, address: Address, key: bytes) -> bytes | None:
        """The content of a page of NVMe, proven as a reader proves it; None where it does not hold.

        Worlds ask for the same pages again and again: a page whose bytes on the disk are those of before is proven.
        """
        assert self.nvme is not None
        table, devices = self.tables[address.extent], self.pages.devices
        frame_class, start = table.frame_class, self._place(address)
        stored = self.nvme.disk.data[start : start + geometry.stride_bytes(frame_class)]
        incarnation = devices.header_incarnation(table.position)
        proof = address, key, incarnation, xxhash.xxh3_128_digest(stored)
        header, page = _buffers(frame_class)
        if self._proven.get(start) != proof:
            devices.read_page(table.position, address.frame, frame_class, header, page)
            frame, generation = address.frame, address.generation
            found = frame_header.unpack(header, frame_class, incarnation, address.extent, frame, generation)
            if not isinstance(found, frame_header.FrameHeader) or found.key != key:
                return None
            if not frame_header.is_payload_sound(page, frame_class, found.payload_sum):
                return None
            self._proven[start] = proof
        return stored[len(header) :][:CONTENT_BYTES].tobytes()

    def rot(self, address: Address) -> None:
        """Alter a page on NVMe."""
        assert self.nvme is not None
        frame_class = self.tables[address.extent].frame_class
        self.nvme.disk.data[self._place(address) + geometry.header_bytes(frame_class)] ^= 1

    def _place(self, address: Address) -> int:
        """Where a frame of NVMe begins on the disk."""
        table = self.tables[address.extent]
        device, position = self.pages.devices.place(table.position)
        return frame_offset(device.superblock, position, table.frame_class, address.frame)

    # --- contents ---------------------------------------------------------------------------------------------------

    def write(self, address: Address, content: bytes) -> None:
        """Store a page's content into its frame of DRAM, as a client does."""
        self._page(address)[:CONTENT_BYTES] = np.frombuffer(content.ljust(CONTENT_BYTES)[:CONTENT_BYTES], np.uint8)

    def content(self, address: Address) -> bytes:
        """The content of the page in a frame of DRAM."""
        return self._page(address)[:CONTENT_BYTES].tobytes()

    def sums(self, addresses: list[Address]) -> npt.NDArray[np.uint32]:
        """The checksums of the pages in these frames of DRAM, as their writer makes them."""
        frame_class = self.tables[addresses[0].extent].frame_class
        pages = [self._page(address)[: frame_class.page_bytes] for address in addresses]
        return np.stack([layer_sums(page, frame_class.layers) for page in pages])

    def _page(self, address: Address) -> npt.NDArray[np.uint8]:
        frame: npt.NDArray[np.uint8] = self.performer.frames_of(self.tables[address.extent])[address.frame]
        return frame

    # --- laws -------------------------------------------------------------------------------------------------------

    def check(self, state: NodeState) -> list[str]:
        """``integrity.check``, and what it does not know: what readers are shown of pending pages."""
        wrong, pend = [], self.pend
        for tier in state.spaces:
            wrong += integrity.check(state, tier, self.snapshots(tier), self.indexes[tier].items())
        wrong += state.groups.findings(self.performer.index.group_hashes())
        wrong += integrity.check_mounts(state, self.indexes[Tier.HBM].items())
        live = [page for page in state.pending.by_address.values() if not page.doomed]
        for key, address in pend.items():
            page = state.pending.by_address.get(address)
            if page is None or page.doomed or page.key != key:
                wrong.append(f"pending {key.hex()}: {address} is no live reservation of it")
        wrong += [f"pending {p.key.hex()}: readers are not shown it" for p in live if p.key not in pend]
        wrong += [
            f"pending {page.key.hex()}: its parent is sealed and not held"
            for page in live
            if not page.at_root and not page.holds_parent and state.space.pages.find(page.parent) is not None
        ]
        for address, page in state.pending.by_address.items():
            frame_state = self.frame_state(address.extent, address.frame)
            if page.doomed != (frame_state == QUARANTINED):
                wrong.append(f"{address}: {frame_state.name}, and {'doomed' if page.doomed else 'live'}")
        return wrong


_numbers = itertools.count()
_living: list[RealNode] = []


@lru_cache(16)
def _buffers(frame_class: FrameClass) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """For a header of the class, and its page."""
    return aligned_buffer(geometry.header_bytes(frame_class)), aligned_buffer(frame_class.frame_bytes)


@lru_cache(1)
def _shm_dir() -> Path:
    """The folder of all nodes of this process, until ``close_all``."""
    return Path(tempfile.mkdtemp(prefix="kvtest-", dir="/dev/shm"))


def close_all() -> None:
    """Close every node that a test has left."""
    for node in list(_living):
        node.close()
    if _shm_dir.cache_info().currsize:
        shutil.rmtree(_shm_dir())
        _shm_dir.cache_clear()
