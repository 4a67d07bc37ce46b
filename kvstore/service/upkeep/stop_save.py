"""StopSave: an end with which the node's memory goes. What only DRAM holds is saved to NVMe, in bounded time.

What is saved, and in what order, is decided by ``state.last_save``; the mover, whose thread has ended, carries it. A
kill on the way costs what was not saved yet, as a power failure would.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from kvstore.service.node.node import Node
from kvstore.service.upkeep.tier_mover import BATCH_BYTES, Mover
from kvstore.serving import logs
from kvstore.tier.header import DaemonState

log = logging.getLogger("kvstore.nvme")

BATCH_BYTES_FIRST = 1 << 20  # then as much as the disk takes in about BATCH_S: nobody waits longer than that for an end
BATCH_S = 0.5
TELL_S = 1.0
PAUSE_S = 0.001  # where chains were looked at that need no saving, or another thread's batch is still under way


class StopSave:
    """One run per end of a node. ``pages`` and ``bytes`` count what was saved, ``chains`` what is left to look at."""

    def __init__(self, node: Node, mover: Mover) -> None:
        self._node = node
        self._mover = mover
        self.pages = self.bytes = self.chains = 0

    def run(self, save_s: float, why: str, ended: Callable[[], bool]) -> bool:
        """Save until everything is, or ``save_s`` are over, or ``ended`` says so; whether everything was looked at.

        Blocks. A batch that was begun is finished. Whatever ends it, what was saved is a page of NVMe.
        """
        began_s = told_s = time.monotonic()
        saved, size, done = self._saved(), BATCH_BYTES_FIRST, self._node.nvme is None
        logs.event(log, logging.INFO, "what only DRAM holds is saved", why=why, stop_save_s=save_s)
        self._node.enter(DaemonState.ENDING)
        self._mover.carry()  # what was decided before
        while not done and not ended():
            batch_s = time.monotonic()
            if batch_s - began_s >= save_s:
                break
            chains = self._mover.save_all(size)
            if chains is None:  # shared memory has no room for another table of NVMe's
                break
            self.chains, done = chains, not chains
            if not self._mover.carry() and not done:
                time.sleep(PAUSE_S)
            now_s = time.monotonic()
            size = min(BATCH_BYTES, 2 * size) if now_s - batch_s < BATCH_S else max(BATCH_BYTES_FIRST, size // 2)
            if now_s - told_s >= TELL_S:
                told_s = now_s
                self._tell("saving", saved, now_s - began_s)
        self._tell("saved" if done else "not all is saved", saved, time.monotonic() - began_s)
        return done

    def _saved(self) -> tuple[int, int]:
        counters = self._node.look(lambda _, state: dict(state.counters))
        return counters.get("pages_saved", 0), counters.get("bytes_saved", 0)

    def _tell(self, message: str, before: tuple[int, int], took_s: float) -> None:
        pages, size = self._saved()
        self.pages, self.bytes = pages - before[0], size - before[1]
        said = {"pages": self.pages, "bytes": self.bytes, "chains_left": self.chains, "took_s": round(took_s, 3)}
        logs.event(log, logging.INFO, message, **said)
