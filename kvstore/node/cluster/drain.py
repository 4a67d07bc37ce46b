"""``NodeDrain``: moves the pages of a node to other nodes, and takes the node out of its pool.

A drain marks the node in the catalog first, so that no other node copies pages to it. It then orders copies of the
pages that no other node has. The chains that are worth most come first: the most recently used ones, weighted by
retention hints. Pages that programs of this machine store in the meantime are moved as well. At the deadline, or when
nothing is left to move, the node leaves the catalog and its data server ends. The daemon itself continues: programs of
its machine read and write their node until SIGTERM, and the next start joins the pool again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final

from kvstore import boundary, logs
from kvstore.client.local.peer_caching import BUSY, FULL
from kvstore.cluster.catalog.schema import NodeEntry
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.objects import is_object_class
from kvstore.node.cluster.chain_parts import read_part
from kvstore.node.cluster.replicator import Replicator
from kvstore.node.cluster.survey import MissingRun
from kvstore.node.node import Node
from kvstore.node.performer import Performer
from kvstore.state.node_state import NodeState

DEADLINE_S: Final = 300.0
DEADLINE_S_MAX: Final = 24 * 3600.0
MARK_S: Final = 1.0  # within this time, other nodes have seen a change of the catalog
PAUSE_S: Final = 0.2  # between two tries of pages that could not be copied
TRIES: Final = 5  # of pages that could not be copied
STOP_S: Final = 5.0

log = logging.getLogger("kvstore.cluster")


class DrainState(StrEnum):
    """How far a drain is."""

    NONE = "none"
    MOVING = "moving"
    LEFT = "left"


class NodeDrain:
    """The drain of one node: none -> moving -> left. It cannot be cancelled; a new start of the daemon joins again.

    Args:
        publish: publishes the node's entry in the catalog.
        leave: takes the node out of the pool.
    """

    def __init__(
        self, node: Node, replicator: Replicator, publish: Callable[[NodeEntry], None], leave: Callable[[], None]
    ) -> None:
        self.state = DrainState.NONE
        self._node = node
        self._replicator = replicator
        self._publish = publish
        self._leave = leave
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._deadline_s = math.inf
        self._began_s = self._ended_s = 0.0
        self._moved_pages = self._moved_bytes = self._left_pages = self._left_bytes = self._object_pages = 0
        self._reasons: Counter[str] = Counter()

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out the admin call ``drain``: begin to drain, and return the status. If the node is being drained, only
        change the deadline.

        Raises:
            InvalidRequest: the deadline is invalid.
        """
        seconds = request.get("deadline_s", DEADLINE_S)
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 < seconds <= DEADLINE_S_MAX:
            raise InvalidRequest("deadline_s", f"must be above 0 and at most {DEADLINE_S_MAX:g} (got {seconds!r})")
        with self._lock:
            self._deadline_s = time.monotonic() + seconds
            if self.state is DrainState.NONE:
                self.state, self._began_s = DrainState.MOVING, time.monotonic()
                run = boundary.thread_loop("task/drain", self._run, self._stopping)
                self._thread = threading.Thread(target=run, name="drain", daemon=True)
                self._thread.start()
        return self.status()

    def status(self, _: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what was moved, and what is left and why. Carries out the admin call ``drain_status``."""
        end_s = self._ended_s or time.monotonic()
        return {
            "state": str(self.state),
            "moved_pages": self._moved_pages,
            "moved_bytes": self._moved_bytes,
            "left_pages": self._left_pages,
            "left_bytes": self._left_bytes,
            "left_object_pages": self._object_pages,
            "reasons": dict(self._reasons),
            "took_s": round(end_s - self._began_s, 3) if self._began_s else 0.0,
        }

    def stop(self) -> None:
        """End the drain early, because the daemon stops."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _is_over(self) -> bool:
        """Return True once the deadline has passed, or the daemon stops."""
        return self._stopping.is_set() or time.monotonic() >= self._deadline_s

    def _run(self) -> bool:
        """Drain the node, and return True to end the thread's loop."""
        logs.event(log, logging.INFO, "drain begins", deadline_s=round(self._deadline_s - time.monotonic(), 1))
        self._replicator.entry = replace(self._replicator.entry, draining=True)
        self._publish(self._replicator.entry)
        self._stopping.wait(min(MARK_S, max(0.0, self._deadline_s - time.monotonic())))
        try:
            self._move_all()
            self._object_pages = self._node.look(_object_pages)
        except Unavailable:  # the node is stopping
            return True
        if not self._stopping.is_set():
            self._leave()
            self._ended_s, self.state = time.monotonic(), DrainState.LEFT
            logs.event(log, logging.INFO, "drain ended", moved=self._moved_pages, left=self._left_pages)
        return True

    def _move_all(self) -> None:
        """Move pages until none is left, no more can be moved, or the deadline has passed."""
        stuck, moved = 0, set[bytes]()  # the directory lists moved pages only a moment later
        while True:
            runs, _ = self._replicator.survey.missing(self._replicator.counted(), replicated=False, assume_missing=True)
            runs = [left for run in runs if (left := replace(run, keys=[k for k in run.keys if k not in moved])).keys]
            self._left_pages, self._left_bytes = sum(len(run.keys) for run in runs), sum(run.nbytes for run in runs)
            if self._is_over() or not runs or stuck > TRIES:
                return
            self._reasons.clear()
            before = self._moved_pages
            for run in runs:
                if self._is_over():
                    break
                moved.update(self._move(run))
            stuck = stuck + 1 if self._moved_pages == before else 0
            self._stopping.wait(PAUSE_S)

    def _move(self, run: MissingRun) -> list[bytes]:
        """Move the pages of a run, as far as other nodes store them, and return their keys."""
        moved = list[bytes]()
        keys, refused, tries = run.keys, tuple[str, ...](), 0
        while keys and not self._is_over():
            try:
                part = read_part(self._node, keys)
            except OSError:  # a device is not responding
                self._reasons["a device is not responding"] += len(keys)
                break
            if isinstance(part, int):
                keys = keys[part:]
                continue
            pages, reason, node = self._replicator.send(part, run.keys[0], refused)
            moved += keys[:pages]
            self._moved_pages += pages
            self._moved_bytes += pages * run.page_bytes
            self._left_pages -= pages
            self._left_bytes -= pages * run.page_bytes
            keys, tries = keys[pages:], 0 if pages else tries + 1
            if reason == FULL:
                refused += (node,)
            elif not pages and (not node or tries >= TRIES):
                self._reasons[FULL if refused and not node else reason] += len(keys)
                break
            elif not pages:
                self._stopping.wait(PAUSE_S if reason != BUSY else 2 * PAUSE_S)
        return moved


def _object_pages(_: Performer, state: NodeState) -> int:
    """Return how many stored pages belong to opaque objects, which are not moved."""
    pools = [pool for space in state.spaces.values() for pool in space.segment.pools.values()]
    extents = [extent for pool in pools if is_object_class(pool.frame_class) for extent in pool.extents.values()]
    return sum(extent.sealed for extent in extents)
