"""StopSave: an end with which the node's memory goes. What only DRAM holds is saved to NVMe, in bounded time.

What is saved, and in what order, is decided by ``state.last_save``; the mover's lanes carry it. A device that does not
answer keeps its own lane, and others go on without it. A kill on the way costs what was not saved yet, as a power
failure would.
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
PAUSE_S = 0.001  # where chains were looked at that need no saving


class StopSave:
    """One run per end of a node. ``pages`` and ``bytes`` count what was saved, ``chains`` what is left to look at."""

    def __init__(self, node: Node, mover: Mover) -> None:
        self._node = node
        self._mover = mover
        self.pages = self.bytes = self.chains = 0

    def run(self, save_s: float, why: str, ended: Callable[[], bool]) -> bool:
        """Save until everything is, or ``save_s`` are over, or ``ended`` says so; whether everything was tried.

        Blocks. The lanes finish what was begun. Whatever ends it, what was saved is a page of NVMe.
        """
        began_s = told_s = time.monotonic()
        saved, size, done, batch_s = self._saved(), BATCH_BYTES_FIRST, self._node.nvme is None, 0.0
        logs.event(log, logging.INFO, "what only DRAM holds is saved", why=why, stop_save_s=save_s)
        self._node.enter(DaemonState.ENDING)
        while not done and not ended() and (now_s := time.monotonic()) - began_s < save_s:
            reply = self._mover.save_all(size)
            if reply is None:  # shared memory has no room for another table of NVMe's
                break
            self.chains, under_way = reply.detail["chains"], reply.detail["under_way"]
            done = not self.chains and not under_way
            if reply.detail["begun"]:
                if batch_s:  # the batch before is over, or late
                    quick = now_s - batch_s < BATCH_S
                    size = min(BATCH_BYTES, 2 * size) if quick else max(BATCH_BYTES_FIRST, size // 2)
                batch_s = now_s
            if under_way:
                self._mover.wait()
            elif not done:
                time.sleep(PAUSE_S)
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
