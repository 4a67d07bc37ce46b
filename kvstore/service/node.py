"""Node: one machine's pool. Owns the files, asks the state, has the performer carry out what it decides.

Lives from ``start`` (lock taken, tables recovered or made) to ``stop`` (lock released; files stay, so that the next
start finds every sealed page) or to a kill at any point, which the next start repairs.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.config import NodeConfig, format_size
from kvstore.errors import InvalidRequest, OutOfSpace
from kvstore.model.replica import MARKS_ROW_BYTES, Address, FrameClass, FrameState
from kvstore.service import startup
from kvstore.service.performer import Performer
from kvstore.state import events as ev
from kvstore.state import integrity
from kvstore.state.node_state import NodeState
from kvstore.tier.folder import purge
from kvstore.tier.header import DaemonState

INDEX_CHECK_EVERY_TICKS = 10

INDEX_HEADROOM_BYTES = 1 << 20  # left free on the tmpfs whenever an extent is carved


class Node:
    """Threads: anyone may call ``handle``; one event is decided and performed at a time."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.embedded_sessions: set[int] = set()  # clients in this process: they live as long as we do
        self._mutex = threading.Lock()
        self._ticks = 0
        self._performer: Performer | None = None
        self._state: NodeState | None = None
        self.started_ns = 0

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the node's name and make its pool ready to serve; memory is populated later, in the background.

        Raises:
            NodeBusy: another daemon holds the name.
            InvalidRequest: the segment does not fit, or the folder holds one of another size.
        """
        self._performer, self._state = startup.start(self.config)
        self.started_ns = time.monotonic_ns()

    def stop(self, *, remove: bool = False) -> None:
        """Release the name. Sealed pages stay for the next start, unless ``remove``; mapped readers read on."""
        with self._mutex:
            if self._performer is not None:
                self._performer.header.state = DaemonState.STOPPED
                path = self.folder
                self._performer.close()
                self._performer = self._state = None
                if remove:
                    purge(path)

    @property
    def performer(self) -> Performer:
        """The files' owner, of a started node."""
        assert self._performer is not None, "the node is not started"
        return self._performer

    @property
    def state(self) -> NodeState:
        """What the node decided so far, of a started node."""
        assert self._state is not None, "the node is not started"
        return self._state

    @property
    def folder(self) -> Path:
        """Where the node's files are."""
        return self.performer.folder.path

    # --- events -----------------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> ev.Reply:
        """Decide and perform one event; the index is committed when this returns."""
        with self._mutex:
            if self._performer is None:
                return ev.Reply()  # a thread that was late for the stop
            if type(event) is ev.Grant or type(event) is ev.Reserve:
                self._make_room(event)
            reply = self._performer.perform(self.state.handle(event))
            while self._performer.sessions_to_check:
                session = self._performer.sessions_to_check.pop()
                alive = session in self.embedded_sessions or startup.session_alive(self._performer.folder, session)
                if not alive:
                    self._performer.perform(self.state.handle(ev.SessionDead(time.monotonic_ns(), session)))
        return reply if reply is not None else ev.Reply()

    def check_class(self, frame_class: FrameClass) -> None:
        """Raises InvalidRequest where a page of that class is larger than an extent."""
        extent_bytes = self.state.segment.extent_bytes
        if frame_class.frame_bytes > extent_bytes:
            remedy = "start the node with a larger --extent or --dram"
            reason = f"{frame_class.page_bytes} does not fit an extent of {format_size(extent_bytes)}; {remedy}"
            raise InvalidRequest("page_bytes", reason)

    def _make_room(self, event: ev.Grant | ev.Reserve) -> None:
        """Before a decision that may carve an extent: memory for its frames, its tables, and the index's growth.

        Where the tmpfs is full, a vacant position gives its memory up for tables: the pool shrinks, the node goes on.
        """
        segment = self.state.segment
        pool = segment.pool(event.frame_class)
        count = event.count if isinstance(event, ev.Grant) else len(event.rows)
        if not segment.vacant or pool.free >= count or not pool.frames_per_extent:
            return
        if not segment.vacant & segment.populated:
            self._populate(min(segment.vacant))
        frames = pool.frames_per_extent
        tables_bytes = frames * (event.frame_class.record.row_bytes + MARKS_ROW_BYTES) + INDEX_HEADROOM_BYTES
        while segment.vacant and self._shm_free_bytes() < tables_bytes:
            position = max(segment.vacant)
            self.performer.segment.give_back(position)
            self.performer.perform(self.state.handle(ev.PopulationFailed(event.now_ns, [position])))

    def _shm_free_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def populate_next(self) -> bool:
        """Allocate the memory of one more position; False when there is none left. Raises nothing: less is less."""
        with self._mutex:
            if self._state is None:
                return False
            waiting = self.state.segment.vacant - self.state.segment.populated
        if not waiting:
            return False
        position = min(waiting)
        try:
            self.performer.segment.populate(position)  # outside the mutex: half a second per GiB
            event: ev.Event = ev.Populated(time.monotonic_ns(), [position])
        except OutOfSpace:
            event = ev.PopulationFailed(time.monotonic_ns(), [position])
        self.handle(event)
        return True

    def _populate(self, position: int) -> None:
        now_ns = time.monotonic_ns()
        try:
            self.performer.segment.populate(position)
            self.performer.perform(self.state.handle(ev.Populated(now_ns, [position])))
        except OutOfSpace:
            self.performer.perform(self.state.handle(ev.PopulationFailed(now_ns, [position])))

    def tick(self) -> None:
        """Time went on: deadlines, lost sessions, readers that died inside the index, growth of the index."""
        now_ns = time.monotonic_ns()
        self.handle(ev.Tick(now_ns))
        with self._mutex:
            if self._performer is None:
                return
            self._performer.header.heartbeat_ns = now_ns
            self._performer.header.populated_bytes = len(self.state.segment.populated) * self.state.segment.extent_bytes
            self._ticks += 1
            if self._ticks % INDEX_CHECK_EVERY_TICKS == 0:
                self._performer.index.tidy()

    def drop_damaged(self, address: Address, reason: str) -> None:
        """A sealed page does not hold: it and its descendants go, counted under ``damaged_<reason>``."""
        with self._mutex:
            if self._performer is not None and self.state.space.sealed(address):
                event = ev.Damaged(time.monotonic_ns(), address, reason, self._performer.key_of(address))
                self._performer.perform(self.state.handle(event))

    def check_words(self) -> int:
        """Every record's word must say what was decided. One that does not is set right, and if a page is sealed there,
        that page is dropped like any other damaged one. Returns how many pages were."""
        with self._mutex:
            if self._performer is None:
                return 0
            sealed: list[Address] = []
            for number, extent in self.state.segment.extents.items():
                words = np.frombuffer(extent.generation, np.uint64) << np.uint64(8)
                words |= np.frombuffer(extent.state, np.uint8)
                theirs = self._performer.tables[number].words
                for frame in np.flatnonzero(words != theirs).tolist():
                    theirs[frame] = words[frame]
                    if extent.state[frame] == FrameState.SEALED:
                        sealed.append(Address(number, frame, extent.generation[frame]))
            dropped = 0
            for address in sealed:
                if self.state.space.sealed(address):  # and not the descendant of one that went just now
                    event = ev.Damaged(time.monotonic_ns(), address, "record", self._performer.key_of(address))
                    self._performer.perform(self.state.handle(event))
                    dropped += 1
            return dropped

    def check_indexed(self, address: Address, key: bytes) -> None:
        """A sealed page must be in the index under its key; where it is not, the index is rebuilt from the records."""
        with self._mutex:
            performer = self._performer
            if performer is None or not self.state.space.sealed(address):
                return
            if performer.find(key) != address and performer.key(address.extent, address.frame) == key:
                performer.index.rebuild("damaged")

    # --- looking in -------------------------------------------------------------------------------------------------

    def verify(self) -> list[str]:
        """The conservation laws over state, records and index, now. One line per finding."""
        with self._mutex:
            performer = self.performer
            entries = performer.index.addresses()
            return integrity.check(self.state, performer.snapshots(), entries)

    def stats(self) -> dict[str, Any]:
        """Numbers for ``status``: bytes, frames by state, pages, sessions, leases, counters."""
        with self._mutex:
            state, performer = self.state, self.performer
            segment = state.segment
            frames: Counter[str] = Counter()
            classes: list[dict[str, Any]] = []
            for pool in segment.pools.values():
                counts = {s.name.lower(): sum(e.count(s) for e in pool.extents.values()) for s in FrameState}
                frames.update(counts)
                classes.append(
                    {
                        "page_bytes": pool.frame_class.page_bytes,
                        "page_tokens": pool.frame_class.page_tokens,
                        "layers": pool.frame_class.layers,
                        "extents": len(pool.extents),
                        "frames": counts,
                    }
                )
            used = sum(c["frames"]["sealed"] * c["page_bytes"] for c in classes)
            return {
                "name": self.config.name,
                "pid": os.getpid(),
                "incarnation": f"{performer.header.incarnation:016x}",
                "state": DaemonState(performer.header.state).name.lower(),
                "uptime_s": (time.monotonic_ns() - self.started_ns) / 1e9,
                "tiers": {
                    "dram": {
                        "capacity_bytes": segment.positions * segment.extent_bytes,
                        "used_bytes": used,
                        "populated_bytes": len(segment.populated) * segment.extent_bytes,
                        "failed_bytes": len(segment.failed) * segment.extent_bytes,
                        "extent_bytes": segment.extent_bytes,
                        "extents": len(segment.extents),
                        "extents_vacant": len(segment.vacant),
                        "pages": frames["sealed"],
                        "frames": dict(frames),
                        "classes": classes,
                    }
                },
                "sessions": len(state.sessions),
                "sessions_connected": sum(s.connected for s in state.sessions.values()),
                "leases": len(state.leases),
                "reservations": len(state.pending),
                "index": {
                    "epoch": performer.header.epoch,
                    "used_bytes": performer.index.used_bytes(),
                    "rebuilds": dict(performer.index.rebuilds),
                },
                "counters": dict(state.counters),
            }
