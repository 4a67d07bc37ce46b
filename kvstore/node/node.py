"""Node: one machine's pool. Owns the files, asks the state, has the performer carry out what it decides.

Lives from ``start`` (lock taken, tables recovered or made) to ``stop`` (lock released; files stay, so that the next
start finds every sealed page) or to a kill at any point, which the next start repairs.

Room: memory is had before a decision that needs it, so that no decision is performed by half.

What a decision may carve needs three things of the tmpfs: frames (populated positions), tables, and an index that can
follow. Where one of them cannot be had, the state is told before it decides, and does without.
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
from kvstore.node.frame_view import Contents
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

INDEX_HEADROOM_BYTES = 1 << 20  # left free on the tmpfs whenever an extent is carved
TABLE_DESCRIPTORS = 8  # what making and mapping a table takes, twice
LEAN_BYTES_PER_FRAME = RecordFormat(0, 0, tail=False).row_bytes + 8  # record and mark of a tier that is not mapped


def shm_free_bytes(folder: Path) -> int:
    """What the tmpfs of that folder has left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def lean_table_fits(folder: Path, frames: int) -> bool:
    """True where another table of ``frames`` frames, of a tier that is not mapped, has room and descriptors."""
    return shm_free_bytes(folder) > frames * LEAN_BYTES_PER_FRAME + INDEX_HEADROOM_BYTES and descriptors_left()


def descriptors_left() -> bool:
    """True where this process can open ``TABLE_DESCRIPTORS`` files now."""
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
    """What the tmpfs of a node's folder still gives."""

    def __init__(self, performer: Performer) -> None:
        self._performer = performer

    def tables(self, frame_class: FrameClass, frames: int, count: int) -> int:
        """Have ``count`` spare tables of ``frames`` frames; returns how many there are, fewer where memory is out."""
        return self._performer.spares.have(frame_class, frames, count)

    def index(self, frames_more: int) -> bool:
        """Have what the index needs to follow every change, with ``frames_more`` frames more. False: memory is out."""
        frames = sum(table.frames for table in self._performer.tables.values())
        return self._performer.index.reserve(frames + frames_more)

    def blocked(self) -> bool:
        """True where tables are missing for want of descriptors, which comes to an end: memory would not help."""
        return self._performer.spares.blocked

    def low(self) -> bool:
        """Less is left than sessions and a rebuild of the index may need."""
        return shm_free_bytes(self._performer.folder.path) < INDEX_HEADROOM_BYTES

    def give_back(self, position: int) -> None:
        """A vacant position's memory goes to others, for good."""
        self._performer.dram.give_back(position)


def make_room(state: NodeState, memory: FolderMemory, frame_class: FrameClass, count: int, now_ns: int) -> None:
    """Before a decision that may take ``count`` frames of a class: tell the state how many extents it may carve.

    Where memory is out, vacant positions give theirs up for tables: the pool shrinks, the node goes on.
    ``Segment.tables`` is to be cleared after the decision.
    """
    segment = state.segment
    pool = segment.pool(frame_class)
    while wanted := state.space.extents_wanted(pool, count):
        have = memory.tables(frame_class, pool.frames_per_extent, wanted)
        if not memory.index(have * pool.frames_per_extent):
            have = 0
        segment.tables[frame_class] = have
        if not segment.vacant or memory.blocked() or (have == wanted and not memory.low()):
            return
        position = max(segment.vacant)
        memory.give_back(position)
        state.handle(ev.PopulationFailed(now_ns, [position]))  # there is nothing to perform


INDEX_CHECK_EVERY_TICKS = 10
SESSIONS_SWEEP_EVERY_TICKS = 50

log = logging.getLogger("kvstore.node")

Looked = TypeVar("Looked")
Result = TypeVar("Result")
Otherwise = TypeVar("Otherwise")
Rest = ParamSpec("Rest")


@dataclass(slots=True)
class Scan:
    """The scan of NVMe after a start: ``pages_done`` of ``pages`` frames were read, until it is ``finished``."""

    pages: int = 0
    pages_done: int = 0
    finished: bool = False

    @property
    def under_way(self) -> bool:
        """Frames are still to be read."""
        return self.pages > 0 and not self.finished


def while_running(
    otherwise: Otherwise,
) -> Callable[[Callable[Concatenate[Node, Rest], Result]], Callable[Concatenate[Node, Rest], Result | Otherwise]]:
    """A method of ``Node`` for which it holds still. A thread that is late for the node's end gets ``otherwise``."""

    def holding(
        method: Callable[Concatenate[Node, Rest], Result],
    ) -> Callable[Concatenate[Node, Rest], Result | Otherwise]:
        def held(node: Node, /, *args: Rest.args, **kwargs: Rest.kwargs) -> Result | Otherwise:
            with node._mutex:
                if node._stopped:
                    return otherwise
                node.puts.take_in()
                result = method(node, *args, **kwargs)
            node.performer.book.flush()
            return result

        update_wrapper(held, method)
        return held

    return holding


class Node:
    """Whole from the moment that ``start`` has made it. Threads: anyone may call ``handle``; one event is decided and
    performed at a time.

    Attributes:
        state: what was decided so far.
        contents: the layout of the data, for threads that read in parallel with the decisions.
        waiting: what was decided and is still to be carried out.
        sessions: which clients live and what they counted.
        puts: what clients published.
        events: what happened to pages.
        scan: of NVMe, where there is one.
        nvme_failures: path -> why that target is not used, or not written to any more.
        ending: no call is served any more; long calls break off.
        kv_last: number of the last KV event published, where there are any.
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
        self.kv_last: Callable[[], int] | None = None
        self._mutex = Deciding(performer.puts)
        self.puts = PutDrain(performer, state, self.contents, self._mutex)
        self._ticks = 0
        self._stopped = False

    # --- life -------------------------------------------------------------------------------------------------------

    @classmethod
    def start(cls, config: NodeConfig) -> Node:
        """Take the node's name and make its pool ready to serve; memory is populated later, in the background.

        Raises:
            NodeBusy: another daemon holds the name.
            InvalidRequest: the segment does not fit, or the folder holds one of another size.
        """
        failures: dict[str, str] = {}
        node = cls(config, *startup.start(config, failures), failures)
        for session in node.puts.sessions():  # what it published is taken in before
            node.handle(ev.SessionOpened(time.monotonic_ns(), session))
            node.handle(ev.ConnectionLost(time.monotonic_ns(), session))
        node.sessions.sweep()
        return node

    def stop(self, *, remove: bool = False, keep_name: bool = False) -> None:
        """Release the name, unless ``keep_name``: then ``release_name`` does. Sealed pages stay for the next start,
        unless ``remove``; mapped readers read on. May be repeated."""
        with self._mutex:
            if not self._stopped:
                self._stopped = True
                self.puts.end()
                self.enter(DaemonState.STOPPED)
                self.performer.close(keep_name)
                if remove:
                    purge(self.folder)

    def release_name(self) -> None:
        """The node has stopped, and from here on another one may have its name."""
        self.performer.folder.close()

    def enter(self, state: DaemonState) -> None:
        """Tell clients what the node is about. With it they have a sign of this daemon, before its first tick."""
        self.performer.header.heartbeat_ns = time.monotonic_ns()
        self.performer.header.state = state

    @property
    def incarnation(self) -> int:
        """Drawn when its segment was made."""
        return self.performer.header.incarnation

    @property
    def control(self) -> Path:
        """Where its control socket is."""
        return self.performer.folder.control

    @property
    def folder(self) -> Path:
        """Where the node's files are."""
        return self.performer.folder.path

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> do.Reply:
        """Decide and perform one event; the index is committed when this returns, and what was deleted is erased.

        Raises:
            Unavailable: an object is deleted, and cannot be erased where it lay on NVMe.
        """
        with self._mutex:
            if self._stopped:
                return do.Reply()  # a thread that was late for the stop
            self.puts.take_in()
            nvme, erases = self.performer.nvme, list[do.Erase]()
            with DECIDED:
                needed = self.state.frames_needed(event)
                if needed is not None:
                    self._make_room(*needed)
                instructions = self.state.handle(event)
                self.state.segment.tables.clear()
                if nvme is not None and _deletes(event):
                    erases = _taken_out(instructions, self.performer.tables, nvme.tier)
                reply = self.performer.perform(instructions)
            while self.performer.sessions_to_check:
                session = self.performer.sessions_to_check.pop()
                if not self.sessions.alive(session) and self.puts.may_end(session):
                    self._decide(ev.SessionDead(time.monotonic_ns(), session))
                    self.puts.ended(session)
        self.performer.book.flush()
        if erases and nvme is not None:
            self._erase_all(nvme, erases)  # only the caller waits for the disk
        return reply if reply is not None else do.Reply()

    def _decide(self, event: ev.Event) -> do.Reply | None:
        """Decide and perform one event that needs no room. The mutex is held."""
        with DECIDED:
            return self.performer.perform(self.state.handle(event))

    def erase(self, nvme: NvmePages, erasing: do.Erase, places: Iterable[int]) -> set[int]:
        """Make what was in these frames unreadable. Returns the places whose device fails: there a reboot may bring it
        back.

        Objects that are deleted, or leave NVMe, are erased while the node goes on. Their frames are RETIRING in the
        meantime: no reader reads them, no writer is granted them, and the next start goes on where a kill came between.
        A caller that deletes waits for its own, without the mutex: an object that is gone stays gone. What leaves on
        its own is the mover's to erase; until then the same key cannot be stored or deleted (``Status.BUSY``).
        """
        tables = self.contents.extents
        found = {place: erasing.pages[place][1] for place in places}
        broken = nvme.extents.erase((tables[address.extent], address.frame) for address in found.values())
        if broken:
            self.device_failed(broken)
        return {place for place, address in found.items() if tables[address.extent].position in broken}

    def _erase_all(self, nvme: NvmePages, erases: list[do.Erase]) -> None:
        """Carry out and report what a caller's own deletion takes.

        Raises:
            Unavailable: a device fails; the objects are deleted all the same.
        """
        remaining, sound = deque(erases), True
        try:
            while remaining:
                erasing = remaining[0]
                failed = self.erase(nvme, erasing, range(len(erasing.pages)))
                self.handle(ev.Erased(time.monotonic_ns(), erasing.number, failed))
                sound &= not failed
                remaining.popleft()
        finally:
            self.waiting.copies.extend(remaining)  # a caller that is interrupted leaves them to the mover
        if not sound:
            raise Unavailable("an object is deleted, but its device fails: a reboot may bring it back")

    def check_class(self, frame_class: FrameClass) -> None:
        """Raises InvalidRequest where a page of that class is larger than an extent."""
        extent_bytes = self.state.segment.extent_bytes
        if frame_class.frame_bytes > extent_bytes:
            remedy = "start the node with a larger --extent or --dram"
            reason = f"{frame_class.page_bytes} does not fit an extent of {format_size(extent_bytes)}; {remedy}"
            raise InvalidRequest("page_bytes", reason)

    def _make_room(self, frame_class: FrameClass, count: int) -> None:
        """Before a decision that may carve extents: memory for their frames, their tables, and the index's growth."""
        segment = self.state.segment
        pool = segment.pool(frame_class)
        if pool.free >= count or not pool.frames_per_extent:
            return
        frames = pool.frames_per_extent
        short = -(-(count - pool.free) // frames)  # of extents: nothing leaves while there is memory to be had
        missing = max(0, short - len(segment.vacant & segment.populated))
        for position in sorted(segment.vacant - segment.populated)[:missing]:
            self._decide(self._populated(position))
        make_room(self.state, FolderMemory(self.performer), frame_class, count, time.monotonic_ns())

    def populate_next(self) -> bool:
        """Allocate the memory of one more position; False when there is none left.

        Raises nothing: where the machine has no memory, the pool is smaller."""
        position = self._unpopulated()
        if position is None:
            return False
        self.handle(self._populated(position))  # outside the mutex: half a second per GiB
        return True

    @while_running(None)
    def _unpopulated(self) -> int | None:
        return min(self.state.segment.vacant - self.state.segment.populated, default=None)

    def _populated(self, position: int) -> ev.Event:
        try:
            self.performer.dram.segment.populate(position)
            return ev.Populated(time.monotonic_ns(), [position])
        except OutOfSpace:
            return ev.PopulationFailed(time.monotonic_ns(), [position])

    def tick(self) -> None:
        """Do what is due: end what is past its deadline, sweep lost sessions and dead readers, let the index grow."""
        now_ns = time.monotonic_ns()
        self.handle(ev.Tick(now_ns))
        if self._ticks % SESSIONS_SWEEP_EVERY_TICKS == 0:
            self.sessions.sweep()
        self._beat(now_ns)

    @while_running(None)
    def _beat(self, now_ns: int) -> None:
        self._give_back(now_ns)
        header, segment = self.performer.header, self.state.segment
        header.heartbeat_ns = now_ns
        header.populated_bytes = len(segment.populated) * segment.extent_bytes
        self._ticks += 1
        if self._ticks % INDEX_CHECK_EVERY_TICKS == 0:
            self.performer.index.tidy()

    def _give_back(self, now_ns: int) -> None:
        """The memory of positions that a smaller node has no use for, once nothing lies there."""
        segment = self.state.segment
        position = max(segment.beyond & segment.populated, default=None)
        if position is not None:  # one at a time: the kernel takes a while over each, and others wait
            self.performer.dram.give_back(position)
            self._decide(ev.PopulationFailed(now_ns, [position]))

    def drop_damaged(self, address: Address, reason: str) -> None:
        """A sealed page does not hold: it and its descendants go, counted under ``damaged_<reason>``.

        Of NVMe the extent's directory is withdrawn as well, which may take as long as its device does.
        """
        table, nvme = self._dropped(address, reason), self.nvme
        if table is not None and nvme is not None and table.tier == nvme.tier:
            self.device_failed(nvme.extents.withdraw_checkpoint(table))

    @while_running(None)
    def _dropped(self, address: Address, reason: str) -> ExtentTable | None:
        """Where the page was; None where nothing is sealed there."""
        if not self.state.space_of(address.extent).pages.sealed(address):
            return None
        table = self.performer.tables[address.extent]
        event = ev.Damaged(time.monotonic_ns(), address, reason, self.performer.key_of(address))
        self._decide(event)
        return table

    @while_running(0)
    def check_words(self) -> int:
        """Every record's word must say what was decided. One that does not is set right, and if a page is sealed there,
        that page is dropped like any other damaged one. Returns how many pages were."""
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
            if self.state.space_of(address.extent).pages.sealed(address):  # else it hung on one that went just now
                event = ev.Damaged(time.monotonic_ns(), address, "record", self.performer.key_of(address))
                self._decide(event)
                dropped += 1
        return dropped

    @while_running(None)
    def check_indexed(self, address: Address, key: bytes) -> None:
        """A sealed page must be in the index under its key; where it is not, the index is rebuilt from the records."""
        performer = self.performer
        if not self.state.space_of(address.extent).pages.sealed(address):
            return
        tier = performer.tables[address.extent].tier
        if performer.index.find(tier, key) != address and performer.key(address.extent, address.frame) == key:
            performer.index.rebuild("damaged")

    # --- NVMe: for the mover and the scanner ------------------------------------------------------------------------

    @property
    def relayed(self) -> list[Tier]:
        """Tiers that ``upkeep.relay`` carries pages to."""
        return [tier for tier, store in self.performer.stores.items() if store.relayed]

    @property
    def nvme(self) -> NvmePages | None:
        """The pages on NVMe; None where the node has no such tier, or has stopped."""
        return self.performer.nvme

    @while_running(None)
    def demote(self, bytes_max: int, tier: Tier = Tier.NVME) -> None:
        """Decide what to save to a tier now; it is ``waiting`` then. Not where the tables have no room to grow."""
        if self._tables_fit(tier):
            event = ev.Demote(time.monotonic_ns(), tier, bytes_max, self._left_today())
            self._decide(event)

    @while_running(None)
    def save_all(self, bytes_max: int) -> do.Reply | None:
        """DRAM is about to go: ``demote`` what is next. See ``events.SaveAll``; None where nothing can be saved."""
        if not self._tables_fit(Tier.NVME):
            return None
        return self._decide(ev.SaveAll(time.monotonic_ns(), bytes_max, self._left_today()))

    def _left_today(self) -> int:
        return self.nvme.day_bytes_left(self.config.nvme_write_bytes_per_day) if self.nvme is not None else 0

    def _tables_fit(self, tier: Tier) -> bool:
        frames = [pool.frames_per_extent for pool in self.state.spaces[tier].segment.pools.values()]
        return lean_table_fits(self.folder, max(frames, default=0))

    def device_failed(self, broken: dict[int, OSError]) -> None:
        """Writing at these positions failed: their devices are read on, and not written to until the next start."""
        nvme = self.nvme
        if nvme is None:
            return
        for position, error in broken.items():
            path = nvme.path(position)
            if path not in self.nvme_failures:
                self.nvme_failures[path] = str(error)
                said = "device failed: it takes no more writes, the node goes on without"
                logs.event(log, logging.ERROR, said, path=path, reason=str(error))
                self.handle(ev.TierFailed(time.monotonic_ns(), nvme.tier, nvme.devices.neighbours(position)))

    def nvme_tables(self) -> list[ExtentTable]:
        """The tables of all extents on NVMe."""
        return self.contents.tables(Tier.NVME)

    @while_running(None)
    def directory_rows(self, table: ExtentTable) -> Rows | None:
        """A copy of an extent's rows, of one moment; None where the extent is gone."""
        return table.rows.copy() if self.performer.tables.get(table.extent) is table else None

    @while_running(None)
    def count(self, what: str) -> None:
        """Count something for ``stats``."""
        self.state.counters[what] += 1

    def look(self, at: Callable[[Performer, NodeState], Looked]) -> Looked:
        """Look at a node that makes no decision during that time: be quick, change nothing, keep no reference to the
        state."""
        self.puts.drain()
        with self._mutex:
            if self._stopped:
                raise Unavailable("the node is stopping")
            return at(self.performer, self.state)

    def verify(self) -> list[str]:
        """The conservation laws over state, records and index, now. One line per finding."""
        return self.look(_findings)


def _findings(performer: Performer, state: NodeState) -> list[str]:
    return integrity.check_all(state, performer.index.addresses)


def _deletes(event: ev.Event) -> bool:
    """The caller behind this event is told only when what it deletes is gone for good."""
    return type(event) in (ev.Delete, ev.SealObjects) or (type(event) is ev.SealGranted and event.replaces is not None)


def _taken_out(instructions: list[do.Instruction], tables: dict[int, ExtentTable], tier: Tier) -> list[do.Erase]:
    """The erasures in that tier among these instructions, which are left without them."""
    erases = [
        instruction
        for instruction in instructions
        if type(instruction) is do.Erase and tables[instruction.pages[0][1].extent].tier == tier
    ]
    instructions[:] = [instruction for instruction in instructions if instruction not in erases]
    return erases
