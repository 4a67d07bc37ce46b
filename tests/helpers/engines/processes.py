"""Engines as real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.client import EngineClient
from tests.helpers.nursery import of_engines
from tests.helpers.processes import CLI, Machine, Process, wait_until

START_S = 90.0  # torch and transformers are loaded, on a slow, busy machine
WAIT_S = 60.0
SMALL = {"threads": "1", "arena": "16MiB", "page_tokens": "16", "node": "none"}


class EngineProcess(Process):
    """``kvstore engine``."""

    def wait_ready(self, timeout_s: float = START_S) -> EngineProcess:
        """Its ready line. Fails where it ends or says nothing until the deadline."""

        def said() -> bool:
            if not self.alive:
                raise AssertionError(f"the engine ended with {self.popen.returncode}; {self.trace()}")
            return "\n" in self.output()

        wait_until("the engine is ready", said, timeout_s)
        return self

    @property
    def address(self) -> str:
        """Of its gRPC API."""
        return self.output().split("grpc on ")[1].split()[0].rstrip(",")

    @property
    def http(self) -> str:
        """Of its HTTP."""
        return self.output().split("http on ")[1].split()[0]

    def client(self, **how: Any) -> EngineClient:
        """A new one."""
        return EngineClient(self.address, **how)


def spawn_engine(
    machine: Machine, model: str = "tiny-llama", env: dict[str, str] | None = None, **flags: str
) -> EngineProcess:
    """Start one without waiting for it; flags beside or instead of ``SMALL``."""
    command = [*CLI, "engine", "--model", model]
    for flag, value in {**SMALL, **flags}.items():
        command += [f"--{flag.replace('_', '-')}", value]
    return machine.start(EngineProcess, "engine", command, of_engines(), **(env or {}))


def serve_engine(machine: Machine, model: str = "tiny-llama", **flags: str) -> EngineProcess:
    """Start one, and wait until it is ready."""
    return spawn_engine(machine, model, **flags).wait_ready()


def wait_idle(client: EngineClient, timeout_s: float = WAIT_S) -> None:
    """Nothing is under way, and every frame is back."""

    def idle() -> bool:
        status = client.status()
        frames = status["frames"]
        return (
            not any(status["requests"].values()) and not status["prefills_held"] and frames["free"] == frames["total"]
        )

    wait_until("all frames are back", idle, timeout_s)


def prompt(length: int, seed: int = 0, vocabulary: int = 256) -> npt.NDArray[np.uint32]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocabulary, length, np.uint32)
