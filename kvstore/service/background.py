"""Background: the threads of a node that nobody waits for: time, memory population, scrubbing."""

from __future__ import annotations

import os
import threading

from kvstore.service.node import Node
from kvstore.service.scrubber import Scrubber

TICK_S = 0.1
JOIN_S = 5.0
BACKGROUND_NICENESS = 10  # scrubbing yields to whoever serves


class Background:
    """Runs from ``start`` to ``stop``; both threads end within a slice of work."""

    def __init__(self, node: Node, scrubber: Scrubber) -> None:
        self._node = node
        self._scrubber = scrubber
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._tick, name="kvstore-tick", daemon=True),
            threading.Thread(target=self._work, name="kvstore-background", daemon=True),
        ]

    def start(self) -> None:
        """Begin ticking, populating and scrubbing."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads. Memory that was not populated yet is by the next start."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def _tick(self) -> None:
        while not self._stopped.wait(TICK_S):
            self._node.tick()

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
        while not self._stopped.is_set() and self._node.populate_next():
            pass
        more = False
        while not self._stopped.wait(0.0 if more else TICK_S / 2):
            more = self._scrubber.step()
