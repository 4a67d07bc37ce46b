"""Node: the pool of one machine. It owns the files, and its performer carries out what its state decides.

``start`` takes the lock of the node's name, and recovers or creates the tables. ``stop`` releases the lock. The files
stay, and the next start finds every sealed page. After a kill at any time, the next start repairs the files.

A decision cannot be half performed. So before a decision that may carve extents, the node reserves what those extents
need on the tmpfs: memory for frames (populated positions), tables, and space for the index to grow. If the tmpfs has no
memory for one of them, the node limits the number of extents that the state may carve in this decision.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from kvstore import logs
from kvstore.config import NodeConfig, format_size
from kvstore.errors import InvalidRequest, OutOfSpace, Unavailable
from kvstore.model.replica import Address, FrameClass, FrameState, RecordFormat, Tier
from kvstore.node import startup
from kvstore.node.contents import Contents
from kvstore.node.nvme_pages import NvmePages
from kvstore.node.performer import DECIDED, Performer
from kvstore.node.put_drain import PutDrain
from kvstore.shm.folder import purge
from kvstore.shm.header import DaemonState
from kvstore.shm.put_log import Deciding
from kvstore.shm.records import ExtentTable
from kvstore.shm.sessions import Sessions
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state import integrity
from kvstore.state.interfaces import Rows
from kvstore.state.node_state import NodeState

INDEX_HEADROOM_BYTES = 1 << 20  # stays free on the tmpfs when an extent is carved
TABLE_DESCRIPTORS = 8  # twice the number that creating and mapping a table takes
LEAN_BYTES_PER_FRAME = RecordFormat(0, 0, tail=False).row_bytes + 8  # record and last use, in a tier that is not mapped
INDEX_CHECK_EVERY_TICKS = 10
SESSIONS_SWEEP_EVERY_TICKS = 50

log = logging.getLogger("kvstore.node")

Looked = TypeVar("Looked")
Result = TypeVar("Result")
Otherwise = TypeVar("Otherwise")
Rest = ParamSpec("Rest")


# --- memory for the next decision -----------------------------------------------------------------------------------


def shm_free_bytes(folder: Path) -> int:
    """Return the free bytes of the folder's tmpfs."""
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def lean_table_fits(folder: Path, frames: int) -> bool:
    """Return True if there are memory and descriptors for a table of ``frames`` frames in a tier that is not mapped."""
    return shm_free_bytes(folder) > frames * LEAN_BYTES_PER_FRAME + INDEX_HEADROOM_BYTES and has_descriptors()


def has_descriptors() -> bool:
    """Return True if this process can open ``TABLE_DESCRIPTORS`` files now."""
    opened: list[int] = []
    try:
        while len(opened) < TABLE_DESCRIPTORS:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


class FolderMemory:
    """Memory of the tmpfs that a node's folder is in."""

    def __init__(self, performer: Performer) -> None:
        self._performer = performer

    def tables(self, frame_class: FrameClass, frames: int, count: int) -> int:
        """Create spare tables of ``frames`` frames until there are ``count``. Returns how many there are, fewer if
        memory or descriptors run out."""
        return self._performer.spares.fill(frame_class, frames, count)

    def index(self, frames_more: int) -> bool:
        """Reserve memory for all index changes of a pool with ``frames_more`` more frames. Return False if there is not
        enough."""
        frames = sum(table.frames for table in self._performer.tables.values())
        return self._performer.index.reserve(frames + frames_more)

    def blocked(self) -> bool:
        """Return True if tables are missing for lack of descriptors. That is temporary, and memory would not help."""
        return self._performer.spares.blocked

    def low(self) -> bool:
        """Return True if less memory is free than sessions and a rebuild of the index may need."""
        return shm_free_bytes(self._performer.folder.path) < INDEX_HEADROOM_BYTES

    def give_back(self, position: int) -> None:
        """Free the memory of a vacant position for good."""
        self._performer.dram.give_back(position)


def make_room(state: NodeState, memory: FolderMemory, frame_class: FrameClass, count: int, now_ns: int) -> None:
    """Set how many extents the state may carve in a decision that may take ``count`` frames of a class.

    If memory runs out, vacant positions are given back to make room for tables: the pool shrinks, and the node
    continues. The caller clears ``Segment.tables`` after the decision.
    """
    segment = state.segment
    pool = segment.pool(frame_class)
    while extents := state.space.extents_needed(pool, count):
        tables = memory.tables(frame_class, pool.frames_per_extent, extents)
        if not memory.index(tables * pool.frames_per_extent):
            tables = 0
        segment.tables[frame_class] = tables
        if not segment.vacant or memory.blocked() or (tables == extents and not memory.low()):
            return
        position = max(segment.vacant)
        memory.give_back(position)
        state.handle(ev.PopulationFailed(now_ns, [position]))  # returns no instructions


# --- the node -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Scan:
    """Progress of the scan of NVMe after startup: ``pages_done`` of ``pages`` frames were read."""

    pages: int = 0
    pages_done: int = 0
    finished: bool = False

    @property
    def under_way(self) -> bool:
        """True if frames remain to be read."""
        return self.pages > 0 and not self.finished


def while_running(
    otherwise: Otherwise,
) -> Callable[[Callable[Concatenate[Node, Rest], Result]], Callable[Concatenate[Node, Rest], Result | Otherwise]]:
    """Decorate a method of ``Node`` that runs under the mutex, after published puts are taken in.

    After ``stop`` it does nothing and returns ``otherwise``.
    """

    def decorate(
        method: Callable[Concatenate[Node, Rest], Result],
    ) -> Callable[Concatenate[Node, Rest], Result | Otherwise]:
        def locked(node: Node, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result | Otherwise:
            with node._mutex:
                if node._stopped:
                    return otherwise
                node.puts.take_in()
                result = method(node, *args, **kwargs)
            node.performer.book.flush()
            return result

        update_wrapper(locked, method)
        return locked

    return decorate


class Node:
    """The pool of one machine, see the module. Made by ``start``, ends with ``stop``.

    Any thread may call ``handle``. One event at a time is decided and performed.

    Attributes:
        state: all decisions so far.
        contents: the tables and pages, for threads that read while the node decides.
        waiting: decided work that other threads carry out.
        sessions: the clients that are alive, and their counters.
        puts: applies the puts that clients publish.
        events: the log of changes to pages.
        scan: progress of the scan of NVMe.
        nvme_failures: path of a target that is not used, or no longer written to -> the reason.
        ending: calls are refused, and long calls stop early.
        owed_of: returns for each key whether a second copy on another node is owed, see ``Op.OWED``; None without a
            replicator.
        kv_last: returns the number of the last published KV event; None if no events are published.
    """

    def __init__(
        self, config: NodeConfig, performer: Performer, state: NodeState, nvme_failures: dict[str, str]
    ) -> None:
        self.config = config
        self.performer = performer
        self.state = state
        self.contents = Contents(performer)
        self.waiting = performer.waiting
        self.sessions = Sessions(performer.folder)
        self.events = performer.events
        self.events.salt_of = state.tenants.salt
        self.scan = Scan()
        self.nvme_failures = nvme_failures
        self.started_ns = time.monotonic_ns()
        self.ending = False
        self.owed_of: Callable[[list[bytes]], list[int]] | None = None
        self.kv_last: Callable[[], int] | None = None
        self._mutex = Deciding(performer.puts)
        self.puts = PutDrain(performer, state, self.contents, self._mutex)
        self._ticks = 0
        self._stopped = False

    # --- start and stop ---------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, config: NodeConfig) -> Node:
        """Lock the node's name and make its pool ready to serve. Memory is populated later, in the background.

        Raises:
            NodeBusy: another daemon has the name.
            InvalidRequest: the segment does not fit, or the folder has a segment with another extent size.
        """
        failures: dict[str, str] = {}
        node = cls(config, *startup.start(config, failures), failures)
        for session in node.puts.sessions():  # ``handle`` takes in what they published before
            node.handle(ev.SessionOpened(time.monotonic_ns(), session))
            node.handle(ev.ConnectionLost(time.monotonic_ns(), session))
        node.sessions.sweep()
        return node

    def stop(self, *, remove: bool = False, keep_name: bool = False) -> None:
        """Stop the node and release its name. A second call does nothing.

        Sealed pages stay for the next start, and clients that mapped them continue to read.

        Args:
            remove: delete the node's files.
            keep_name: keep the name until ``release_name``.
        """
        with self._mutex:
            if not self._stopped:
                self._stopped = True
                self.puts.end()
                self.enter(DaemonState.STOPPED)
                self.performer.close(keep_name)
                if remove:
                    purge(self.folder)

    def release_name(self) -> None:
        """Release the name of a stopped node, so that another node may take it."""
        self.performer.folder.close()

    def enter(self, state: DaemonState) -> None:
        """Show clients the daemon's state, with a heartbeat, so that they need not wait for the first tick."""
        self.performer.header.heartbeat_ns = time.monotonic_ns()
        self.performer.header.state = state

    @property
    def incarnation(self) -> int:
        """The incarnation of the node's segment."""
        return self.performer.header.incarnation

    @property
    def control(self) -> Path:
        """Path of the control socket."""
        return self.performer.folder.control

    @property
    def folder(self) -> Path:
        """Path of the node's files."""
        return self.performer.folder.path

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> do.Reply:
        """Decide and perform one event. When this returns, the index is committed, and deleted objects are erased.

        Raises:
            Unavailable: an object is deleted, but could not be erased from NVMe.
        """
        with self._mutex:
            if self._stopped:
                return do.Reply()
            self.puts.take_in()
            nvme, erases = self.performer.nvme, list[do.Erase]()
            with DECIDED:
                request = self.state.frames_needed(event)
                if request is not None:
                    self._make_room(*request)
                instructions = self.state.handle(event)
                self.state.segment.tables.clear()
                if nvme is not None and _waits_for_erasure(event):
                    erases = _take_erasures(instructions, self.performer.tables, nvme.tier)
                reply = self.performer.perform(instructions)
            while self.performer.sessions_to_check:
                session = self.performer.sessions_to_check.pop()
                if not self.sessions.alive(session) and self.puts.may_end(session):
                    self._decide(ev.SessionDead(time.monotonic_ns(), session))
                    self.puts.free_slot(session)
        self.performer.book.flush()
        if erases and nvme is not None:
            self._erase_all(nvme, erases)  # without the mutex: only this caller waits for the device
        return reply if reply is not None else do.Reply()

    def _decide(self, event: ev.Event) -> do.Reply | None:
        """Decide and perform one event that needs no new memory. The caller holds the mutex."""
        with DECIDED:
            return self.performer.perform(self.state.handle(event))

    def erase(self, nvme: NvmePages, erasure: do.Erase, places: Iterable[int]) -> set[int]:
        """Make the former contents of these frames unreadable. Returns the places whose device failed: a reboot may
        restore their objects.

        Objects that are deleted, or removed from NVMe, are erased without the mutex. Their frames are RETIRING until
        then: no reader reads them and no writer receives them. If the daemon is killed, the next start continues the
        erasure.

        A caller that deletes objects waits for the erasure, so that a deleted object stays deleted. The mover erases
        all other objects. Until it has, their keys cannot be stored or deleted (``Status.BUSY``).
        """
        tables = self.contents.extents
        addresses = {place: erasure.pages[place][1] for place in places}
        broken = nvme.extents.erase((tables[address.extent], address.frame) for address in addresses.values())
        if broken:
            self.device_failed(broken)
        return {place for place, address in addresses.items() if tables[address.extent].position in broken}

    def _erase_all(self, nvme: NvmePages, erases: list[do.Erase]) -> None:
        """Carry out and report the erasures of a caller's own deletion.

        Raises:
            Unavailable: a device failed. The objects are deleted all the same.
        """
        remaining, all_erased = deque(erases), True
        try:
            while remaining:
                erasure = remaining[0]
                failed = self.erase(nvme, erasure, range(len(erasure.pages)))
                self.handle(ev.Erased(time.monotonic_ns(), erasure.number, failed))
                all_erased &= not failed
                remaining.popleft()
        finally:
            self.waiting.copies.extend(remaining)  # if this caller is interrupted, the mover continues
        if not all_erased:
            raise Unavailable("an object is deleted, but its device fails: a reboot may bring it back")

    def check_class(self, frame_class: FrameClass) -> None:
        """Raise InvalidRequest if a page of this class is larger than an extent."""
        extent_bytes = self.state.segment.extent_bytes
        if frame_class.frame_bytes > extent_bytes:
            limit = f"must fit into an extent of {format_size(extent_bytes)} (got {frame_class.page_bytes})"
            raise InvalidRequest("page_bytes", f"{limit}: start the node with a larger --extent or --dram")

    def _make_room(self, frame_class: FrameClass, count: int) -> None:
        """Reserve memory for the extents that the next decision may carve: frames, tables and index."""
        segment = self.state.segment
        pool = segment.pool(frame_class)
        if pool.free >= count or not pool.frames_per_extent:
            return
        # Populate first: the state must not evict pages while there is unused memory.
        extents = -(-(count - pool.free) // pool.frames_per_extent)
        missing = max(0, extents - len(segment.vacant & segment.populated))
        for position in sorted(segment.vacant - segment.populated)[:missing]:
            self._decide(self._populate(position))
        make_room(self.state, FolderMemory(self.performer), frame_class, count, time.monotonic_ns())

    def populate_next(self) -> bool:
        """Allocate the memory of one more position; return False if all positions have theirs.

        If the machine has no memory, this does not raise: the pool becomes smaller."""
        position = self._unpopulated()
        if position is None:
            return False
        self.handle(self._populate(position))  # without the mutex, because it takes half a second per GiB
        return True

    @while_running(None)
    def _unpopulated(self) -> int | None:
        return min(self.state.segment.vacant - self.state.segment.populated, default=None)

    def _populate(self, position: int) -> ev.Event:
        """Allocate the memory of a position, and return the event that reports it."""
        try:
            self.performer.dram.segment.populate(position)
            return ev.Populated(time.monotonic_ns(), [position])
        except OutOfSpace:
            return ev.PopulationFailed(time.monotonic_ns(), [position])

    def tick(self) -> None:
        """Handle expired deadlines, dead sessions and dead readers, and let the index grow. Call this periodically."""
        now_ns = time.monotonic_ns()
        self.handle(ev.Tick(now_ns))
        if self._ticks % SESSIONS_SWEEP_EVERY_TICKS == 0:
            self.sessions.sweep()
        self._update_header(now_ns)

    @while_running(None)
    def _update_header(self, now_ns: int) -> None:
        self._give_back_position(now_ns)
        header, segment = self.performer.header, self.state.segment
        header.heartbeat_ns = now_ns
        header.populated_bytes = len(segment.populated) * segment.extent_bytes
        self._ticks += 1
        if self._ticks % INDEX_CHECK_EVERY_TICKS == 0:
            self.performer.index.tidy()

    def _give_back_position(self, now_ns: int) -> None:
        """Free the memory of an empty position that a node with less DRAM does not use.

        One position per tick, because the kernel takes a while for each and other callers wait.
        """
        segment = self.state.segment
        position = max(segment.beyond & segment.populated, default=None)
        if position is not None:
            self.performer.dram.give_back(position)
            self._decide(ev.PopulationFailed(now_ns, [position]))

    def drop_damaged(self, address: Address, reason: str) -> None:
        """Drop a damaged page and its descendants, and count them under ``damaged_<reason>``.

        For a page on NVMe, the extent's checkpoint is withdrawn too, which waits for the device.
        """
        table, nvme = self._drop_damaged(address, reason), self.nvme
        if table is not None and nvme is not None and table.tier == nvme.tier:
            self.device_failed(nvme.extents.withdraw_checkpoint(table))

    @while_running(None)
    def _drop_damaged(self, address: Address, reason: str) -> ExtentTable | None:
        """Return the table of the page that was dropped; None if no page is sealed at this address."""
        if not self.state.space_of(address.extent).pages.sealed(address):
            return None
        table = self.performer.tables[address.extent]
        self._decide(ev.Damaged(time.monotonic_ns(), address, reason, self.performer.key_of(address)))
        return table

    @while_running(0)
    def check_words(self) -> int:
        """Compare every record's word with the state, and correct the words that differ.

        If such a record's page is sealed, drop it as damaged. Return how many pages were dropped.
        """
        sealed: list[Address] = []
        extents = [item for space in self.state.spaces.values() for item in space.segment.extents.items()]
        for number, extent in extents:
            words = np.frombuffer(extent.generation, np.uint64) << np.uint64(8)
            words |= np.frombuffer(extent.state, np.uint8)
            stored = self.performer.tables[number].words
            for frame in np.flatnonzero(words != stored).tolist():
                stored[frame] = words[frame]
                if extent.state[frame] == FrameState.SEALED:
                    sealed.append(Address(number, frame, extent.generation[frame]))
        dropped = 0
        for address in sealed:
            if self.state.space_of(address.extent).pages.sealed(address):  # not yet dropped as a descendant
                self._decide(ev.Damaged(time.monotonic_ns(), address, "record", self.performer.key_of(address)))
                dropped += 1
        return dropped

    @while_running(None)
    def check_indexed(self, address: Address, key: bytes) -> None:
        """Rebuild the index from the records if it does not list this sealed page under its key."""
        performer = self.performer
        if not self.state.space_of(address.extent).pages.sealed(address):
            return
        tier = performer.tables[address.extent].tier
        if performer.index.find(tier, key) != address and performer.key(address.extent, address.frame) == key:
            performer.index.rebuild("damaged")

    # --- lower tiers: for the mover, the relay and the scanner ------------------------------------------------------

    @property
    def relayed(self) -> list[Tier]:
        """The tiers whose pages ``node.relay`` copies."""
        return [tier for tier, store in self.performer.stores.items() if store.relayed]

    @property
    def nvme(self) -> NvmePages | None:
        """The NVMe tier; None if the node has none, or has stopped."""
        return self.performer.nvme

    @while_running(None)
    def demote(self, bytes_max: int, tier: Tier = Tier.NVME) -> None:
        """Decide what to save to a tier now, and put it into ``waiting``. Does nothing without memory for tables."""
        if self._tables_fit(tier):
            self._decide(ev.Demote(time.monotonic_ns(), tier, bytes_max, self._day_bytes_left()))

    @while_running(None)
    def save_all(self, bytes_max: int) -> do.Reply | None:
        """Decide what to save next before DRAM is lost, see ``events.SaveAll``. Return None if nothing can be saved."""
        if not self._tables_fit(Tier.NVME):
            return None
        return self._decide(ev.SaveAll(time.monotonic_ns(), bytes_max, self._day_bytes_left()))

    def _day_bytes_left(self) -> int:
        return self.nvme.day_bytes_left(self.config.nvme_write_bytes_per_day) if self.nvme is not None else 0

    def _tables_fit(self, tier: Tier) -> bool:
        frames = [pool.frames_per_extent for pool in self.state.spaces[tier].segment.pools.values()]
        return lean_table_fits(self.folder, max(frames, default=0))

    def device_failed(self, broken: dict[int, OSError]) -> None:
        """Stop writing to the devices of these positions until the next start. Their pages can still be read."""
        nvme = self.nvme
        if nvme is None:
            return
        for position, error in broken.items():
            path = nvme.path(position)
            if path not in self.nvme_failures:
                self.nvme_failures[path] = str(error)
                message = "device failed: it takes no more writes, the node goes on without"
                logs.event(log, logging.ERROR, message, path=path, reason=str(error))
                self.handle(ev.TierFailed(time.monotonic_ns(), nvme.tier, nvme.devices.neighbours(position)))

    def nvme_tables(self) -> list[ExtentTable]:
        """Return the tables of all extents on NVMe."""
        return self.contents.tables(Tier.NVME)

    @while_running(None)
    def directory_rows(self, table: ExtentTable) -> Rows | None:
        """Return a consistent copy of an extent's rows; None if the extent was dropped."""
        return table.rows.copy() if self.performer.tables.get(table.extent) is table else None

    @while_running(None)
    def count(self, name: str) -> None:
        """Add 1 to a counter of ``stats``."""
        self.state.counters[name] += 1

    def look(self, at: Callable[[Performer, NodeState], Looked]) -> Looked:
        """Call ``at`` under the mutex. It must be quick, change nothing, and keep no reference to the state.

        Raises:
            Unavailable: the node has stopped.
        """
        self.puts.drain()
        with self._mutex:
            if self._stopped:
                raise Unavailable("the node is stopping")
            return at(self.performer, self.state)

    def verify(self) -> list[str]:
        """Check the conservation laws over state, records and index. Returns one line per finding."""
        return self.look(_findings)


def _findings(performer: Performer, state: NodeState) -> list[str]:
    return integrity.check_all(state, performer.index.addresses, performer.index.group_hashes)


def _waits_for_erasure(event: ev.Event) -> bool:
    """Return True if the caller's reply must wait until the objects that this event deletes are erased."""
    return type(event) in (ev.Bury, ev.Delete, ev.SealObjects) or (
        type(event) is ev.SealGranted and event.replaces is not None
    )


def _take_erasures(instructions: list[do.Instruction], tables: dict[int, ExtentTable], tier: Tier) -> list[do.Erase]:
    """Remove the erasures in that tier from the instructions, and return them."""
    erases = [
        instruction
        for instruction in instructions
        if type(instruction) is do.Erase and tables[instruction.pages[0][1].extent].tier == tier
    ]
    instructions[:] = [instruction for instruction in instructions if instruction not in erases]
    return erases
