"""Background: the threads of a node that nobody waits for: time, memory population, scrubbing."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from kvstore import boundary
from kvstore.service.events.kv_events import KvEvents
from kvstore.service.node.node import Node
from kvstore.service.upkeep.device_lanes import DeviceLane
from kvstore.service.upkeep.relay import Relay
from kvstore.service.upkeep.scanner import Scanner
from kvstore.service.upkeep.scrubber import Scrubber
from kvstore.service.upkeep.stop_save import StopSave
from kvstore.service.upkeep.tier_mover import Mover

TICK_S = 0.1
JOIN_S = 5.0
BACKGROUND_NICENESS = 10  # scrubbing yields to threads that serve

log = logging.getLogger("kvstore.node")


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
        runs = {name: boundary.kept(f"task/{name}", step, self._stopped) for name, step in steps.items()}
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
            run = boundary.kept("task/lane", partial(_turn, lane), self._carried)
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
        """When a thread should be through with what it is at: each device may have to be given up meanwhile."""
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
