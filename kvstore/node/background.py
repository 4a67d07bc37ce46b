"""The background threads of a node: ticks, memory population, scrubbing, copies between tiers, and the NVMe scan.

``StopSave`` runs when a node stops and its memory will be lost: it saves the pages that only DRAM has to NVMe, in
bounded time. ``state.tiering.last_save`` decides what to save and in which order, and the mover's lanes copy it. A
device that is not responding blocks only its own lane. After a kill during the save, the pages that were not saved yet
are lost, as after a power failure.
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

BATCH_BYTES_MIN = 1 << 20  # size of the first batch; later ones grow to what the disk writes in about BATCH_S
BATCH_S = 0.5
PROGRESS_LOG_S = 1.0
PAUSE_S = 0.001  # after a decision that looked at chains but had nothing to save
TICK_S = 0.1
JOIN_S = 5.0
BACKGROUND_NICENESS = 10  # of the thread that populates and scrubs, so that threads that serve run first


class StopSave:
    """Saves what only DRAM has, once.

    Attributes:
        pages, bytes: number of pages and bytes saved so far.
        chains: number of chains that the state has not looked at yet.
    """

    def __init__(self, node: Node, mover: Mover) -> None:
        self._node = node
        self._mover = mover
        self.pages = self.bytes = self.chains = 0

    def run(self, save_s: float, why: str, is_cut_short: Callable[[], bool]) -> bool:
        """Save until everything is saved, ``save_s`` seconds have passed, or ``is_cut_short`` returns True.

        The lanes still finish the copies that were started. Every saved page is on NVMe, no matter how the save ends.
        Returns True if the save was tried for every page.
        """
        started_s = logged_s = time.monotonic()
        counts_before, size, done, batch_s = self._saved_counts(), BATCH_BYTES_MIN, self._node.nvme is None, 0.0
        logs.event(log, logging.INFO, "saving the pages that only DRAM has", why=why, stop_save_s=save_s)
        self._node.enter(DaemonState.ENDING)
        while not done and not is_cut_short() and (now_s := time.monotonic()) - started_s < save_s:
            reply = self._mover.save_all(size)
            if reply is None:  # no shared memory for another table of NVMe
                break
            self.chains, under_way = reply.detail["chains"], reply.detail["under_way"]
            done = not self.chains and not under_way
            if reply.detail["begun"]:
                if batch_s:  # the previous batch has ended, or is late
                    is_fast = now_s - batch_s < BATCH_S
                    size = min(BATCH_BYTES, 2 * size) if is_fast else max(BATCH_BYTES_MIN, size // 2)
                batch_s = now_s
            if under_way:
                self._mover.wait()
            elif not done:
                time.sleep(PAUSE_S)
            if now_s - logged_s >= PROGRESS_LOG_S:
                logged_s = now_s
                self._log_progress("saving", counts_before, now_s - started_s)
        self._log_progress("saved" if done else "not all is saved", counts_before, time.monotonic() - started_s)
        return done

    def _saved_counts(self) -> tuple[int, int]:
        counters = self._node.look(lambda _, state: dict(state.counters))
        return counters.get("pages_saved", 0), counters.get("bytes_saved", 0)

    def _log_progress(self, message: str, before: tuple[int, int], took_s: float) -> None:
        pages, size = self._saved_counts()
        self.pages, self.bytes = pages - before[0], size - before[1]
        fields = {"pages": self.pages, "bytes": self.bytes, "chains_left": self.chains, "took_s": round(took_s, 3)}
        logs.event(log, logging.INFO, message, **fields)


class Background:
    """The background threads of a node, from ``start`` to ``stop``. A thread ends after its current piece of work."""

    def __init__(self, node: Node, scrubber: Scrubber) -> None:
        self._node = node
        self._scrubber = scrubber
        self.mover = Mover(node)
        self.scanner = Scanner(node)
        self._kv_events = KvEvents(node) if node.config.kv_events else None
        self._stopped = threading.Event()
        self._lanes_stopped = threading.Event()
        self._relay = Relay(node)
        self._populating, self._has_work = True, False
        steps: dict[str, Callable[[], bool | None]] = {"tick": self._tick, "background": self._work}
        if node.config.nvme:
            steps |= {"mover": self._move, "scanner": lambda: self.scanner.run(self._stopped)}
        if node.relayed:
            steps["relay"] = self._run_relay
        runs = {name: boundary.thread_loop(f"task/{name}", step, self._stopped) for name, step in steps.items()}
        self._threads = [
            threading.Thread(target=run, name=f"kvstore-{name}", daemon=True) for name, run in runs.items()
        ]
        self._lanes: list[threading.Thread] = []

    def start(self) -> None:
        """Start all threads, and the publication of KV events. Raises what ``KvEvents.start`` raises."""
        if self._kv_events is not None:
            self._kv_events.start()
        for lane in self.mover.lanes:
            name = f"kvstore-{lane.name}"
            run = boundary.thread_loop("task/lane", partial(_run_lane, lane), self._lanes_stopped)
            self._lanes.append(threading.Thread(target=run, name=name, daemon=True))
        for thread in (*self._lanes, *self._threads):
            thread.start()

    def stop(self, save_s: float = 0.0, why: str = "", is_cut_short: Callable[[], bool] = lambda: False) -> None:
        """Write a last checkpoint, and end the threads. The next start populates memory that has no pages yet.

        Args:
            save_s: the time to save what only DRAM has; 0 if DRAM stays.
            why: why DRAM will be lost, for the log.
            is_cut_short: ends the save early when it returns True.
        """
        self._stopped.set()
        if self._kv_events is not None:
            self._kv_events.stop()
        self.mover.wake()
        if save_s:  # before the joins: a thread that reads from a device may take long to end
            StopSave(self._node, self.mover).run(save_s, why, is_cut_short)
        _join(self._threads, self._deadline_s())
        self.mover.checkpoint()
        deadline_s = self._deadline_s()
        if not self.mover.rest(deadline_s):
            log.error("a device does not answer: the node ends without it")
        self._lanes_stopped.set()
        for lane in self.mover.lanes:
            lane.wake()
        _join(self._lanes, deadline_s)

    def _deadline_s(self) -> float:
        """Return the deadline for the end of the threads. It leaves time to give up each device once."""
        config = self._node.config
        return time.monotonic() + JOIN_S + len(config.nvme) * config.nvme_answer_s

    # --- one step of each thread ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._stopped.wait(TICK_S):
            self._node.tick()

    def _work(self) -> None:
        if self._populating:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
            self._populating = self._node.populate_next()
            return
        if self._stopped.wait(0.0 if self._has_work else TICK_S / 2):
            return
        self._has_work = self._scrubber.step()

    def _move(self) -> None:
        if not self.mover.decide():
            self.mover.wait()

    def _run_relay(self) -> None:
        if not self._relay.step():
            self._stopped.wait(TICK_S)


def _run_lane(lane: DeviceLane) -> None:
    if not lane.step():
        lane.wait()


def _join(threads: Iterable[threading.Thread], deadline_s: float) -> None:
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
