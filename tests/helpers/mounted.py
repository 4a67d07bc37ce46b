"""A process that mounts memory, for tests of who else sees it."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.helpers.nursery import of_nodes
from tests.helpers.processes import Machine, Worker

FRAMES = 64


class Engine:
    """A process that has mounted memory at node "n"."""

    def __init__(
        self, machine: Machine, node: str = "n", frames: int = FRAMES, strided: bool = False, device: str = ""
    ) -> None:
        told = json.dumps({"node": node, "frames": frames, "strided": strided, "device": device})
        command = [sys.executable, "-m", "tests.helpers.workers.mounting", told]
        self.process = machine.start(Worker, "mounting", command, of_nodes())
        self.number: int = self.process.wait_for("mounted")["number"]
        self._asked = 0

    def begin(self, verb: str, *given: Any) -> None:
        self.process.tell(json.dumps([verb, *given]))

    def end(self) -> dict[str, Any]:
        self._asked += 1
        return self.process.wait_for("done", self._asked)

    def ask(self, verb: str, *given: Any) -> dict[str, Any]:
        self.begin(verb, *given)
        return self.end()

    def publish(self, seed: int, pages: int, first: int = 0, salt: str = "") -> None:
        self.ask("publish", seed, pages, list(range(first, first + pages)), salt)
