"""The background threads of a node: time, memory population, scrubbing.

StopSave: an end with which the node's memory goes. What only DRAM holds is saved to NVMe, in bounded time.

What is saved, and in what order, is decided by ``state.tiering.last_save``; the mover's lanes carry it. A device that
does not answer keeps its own lane, and others go on without it. A kill on the way costs what was not saved yet, as
a power failure would.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from kvstore import boundary, logs
from kvstore.node.kv_events import KvEvents
from kvstore.node.node import Node
from kvstore.node.relay import Relay
from kvstore.node.scanner import Scanner
from kvstore.node.scrubber import Scrubber
from kvstore.node.tier_mover import BATCH_BYTES, DeviceLane, Mover
from kvstore.shm.header import DaemonState

log = logging.getLogger("kvstore.node")

BATCH_BYTES_FIRST = 1 << 20  # then as much as the disk takes in about BATCH_S: no stop waits longer
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


TICK_S = 0.1
JOIN_S = 5.0
BACKGROUND_NICENESS = 10  # scrubbing yields to threads that serve


class Background:
    """Runs from ``start`` to ``stop``; its threads end within a slice of work."""

    def __init__(self, node: Node, scrubber: Scrubber) -> None:
        self._node = node
        self._scrubber = scrubber
        self.mover = Mover(node)
        self.scanner = Scanner(node)
        self._kv_events = KvEvents(node) if node.config.kv_events else None
        self._stopped = threading.Event()
        self._carried = threading.Event()  # the mover's lanes end
        self._relay = Relay(node)
        self._populating, self._more = True, False
        steps: dict[str, Callable[[], bool | None]] = {"tick": self._tick, "background": self._work}
        if node.config.nvme:
            steps |= {"mover": self._move, "scanner": lambda: self.scanner.run(self._stopped)}
        if node.relayed:
            steps["relay"] = self._carry
        runs = {name: boundary.thread_loop(f"task/{name}", step, self._stopped) for name, step in steps.items()}
        self._threads = [
            threading.Thread(target=run, name=f"kvstore-{name}", daemon=True) for name, run in runs.items()
        ]
        self._lanes: list[threading.Thread] = []

    def start(self) -> None:
        """Begin ticking, populating and scrubbing; and publishing, see ``KvEvents.start`` for what that raises."""
        if self._kv_events is not None:
            self._kv_events.start()
        for lane in self.mover.lanes:
            name = f"kvstore-{lane.name}"
            run = boundary.thread_loop("task/lane", partial(_turn, lane), self._carried)
            self._lanes.append(threading.Thread(target=run, name=name, daemon=True))
        for thread in (*self._lanes, *self._threads):
            thread.start()

    def stop(self, save_s: float = 0.0, why: str = "", ended: Callable[[], bool] = lambda: False) -> None:
        """End the threads, and write a last checkpoint. Memory that was not populated yet is by the next start.

        ``save_s``: DRAM is about to go, ``why``, so its pages are saved to NVMe for ``save_s``, or until ``ended``.
        """
        self._stopped.set()
        if self._kv_events is not None:
            self._kv_events.stop()
        self.mover.wake()
        if save_s:  # at once: a thread that reads from a device may not come back for long
            StopSave(self._node, self.mover).run(save_s, why, ended)
        _join(self._threads, self._deadline_s())
        self.mover.checkpoint()
        deadline_s = self._deadline_s()
        if not self.mover.rest(deadline_s):
            log.error("a device does not answer: the node ends without it")
        self._carried.set()
        for lane in self.mover.lanes:
            lane.wake()
        _join(self._lanes, deadline_s)

    def _deadline_s(self) -> float:
        """When a thread should be through with what it is at: each device may have to be given up in the meantime."""
        config = self._node.config
        return time.monotonic() + JOIN_S + len(config.nvme) * config.nvme_answer_s

    # --- one turn of each thread ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._stopped.wait(TICK_S):
            self._node.tick()

    def _work(self) -> None:
        if self._populating:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
            self._populating = self._node.populate_next()
            return
        if self._stopped.wait(0.0 if self._more else TICK_S / 2):
            return
        self._more = self._scrubber.step()

    def _move(self) -> None:
        if not self.mover.decide():
            self.mover.wait()

    def _carry(self) -> None:
        if not self._relay.step():
            self._stopped.wait(TICK_S)


def _turn(lane: DeviceLane) -> None:
    if not lane.step():
        lane.wait()


def _join(threads: Iterable[threading.Thread], deadline_s: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
