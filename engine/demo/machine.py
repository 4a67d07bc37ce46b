"""The demo's machine: a node, two engines and a conductor as processes, their files, and how all of that ends.

They are started with the commands that a user would type. Whatever happens, every process is ended by its id, and no
file is left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from engine.client import EngineClient
from engine.compute.presets import PRESETS
from kvstore.bench.processes import Child
from kvstore.shm.folder import PREFIX, purge

NODE_START_S: Final = 60.0
ENGINE_START_S: Final = 300.0  # torch is imported, and a large model read
PAGE_TOKENS: Final = 32
LOCAL_PREFILL_TOKENS: Final = 128
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns the first signal that asks for an end into KeyboardInterrupt: not while a process is being started, and
    not while everything is being cleaned up.
    """

    def __init__(self) -> None:
        self.came = False
        self._held = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Inside, such signals are handled here."""
        before = {number: signal.signal(number, self._handle) for number in ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, signals wait; ``came`` is True once there is one."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self.came:  # also where something failed: that may be why
                self._interrupt()

    def ignored(self) -> None:
        """From here on signals do nothing: the clean-up that follows is bounded."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self.came = True
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        self.ignored()
        raise KeyboardInterrupt


@dataclass(frozen=True)
class MachinePlan:
    """What the machine has. ``place``: a folder for sockets and logs; ``nvme``: the path of the NVMe file."""

    name: str
    place: Path
    nvme: Path
    model: str
    dram_bytes: int
    nvme_bytes: int

    @property
    def is_preset(self) -> bool:
        """True if the model's weights are random numbers."""
        return self.model in PRESETS


class Machine:
    """Life: made (nothing runs) -> ``start`` -> ``kill_node`` and ``start_node`` -> ``restart`` -> ``close``."""

    def __init__(self, plan: MachinePlan, interrupts: Interrupts) -> None:
        self.plan = plan
        self.interrupts = interrupts
        self.prefill_address = f"unix:{plan.place / 'prefill'}"
        self.http_address = ""  # of the conductor
        self._decode_address = f"unix:{plan.place / 'decode'}"
        self._catalog = ["--catalog", f"file:{plan.place / 'catalog'}"]
        self._shm_dir = Path(os.environ.get("KVSTORE_SHM_DIR", "/dev/shm"))
        # What the caller has set for nodes and engines of its own is not meant for these.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        ours = {"KVSTORE_SHM_DIR": self._shm_dir, "TMPDIR": plan.place, "OMP_NUM_THREADS": 1}
        self._env = clean | {name: str(value) for name, value in ours.items()}
        self._children: list[Child] = []
        self._node: Child | None = None
        self._client: EngineClient | None = None

    @property
    def client(self) -> EngineClient:
        """The engine that answers."""
        assert self._client is not None, "it is not running"
        return self._client

    def start(self, keep_pages: bool = False) -> list[str]:
        """Start the node and the engines; returns the lines in which they say what they are.

        Args:
            keep_pages: engines keep pages in their own memory (HBM). Without that, all reuse is from the pool.
        """
        lines = [self.start_node()]
        engines = [
            self._engine("prefill", self.prefill_address, keep_pages),
            self._engine("decode", self._decode_address, keep_pages, "--prefill", self.prefill_address),
        ]
        lines += [engine.line(ENGINE_START_S) for engine in engines]
        self._client = EngineClient(self._decode_address)
        return lines

    def start_conductor(self) -> str:
        """Start the conductor in front of both engines; returns its line."""
        engines = ["--engine", self.prefill_address, "--engine", self._decode_address]
        line = self._child("conductor", "--http", "127.0.0.1:0", *engines, *self._catalog).line(NODE_START_S)
        self.http_address = line.split("http on ")[1].split()[0]
        return line

    def start_node(self) -> str:
        """Start the node, for the first time or again; returns its line."""
        plan = self.plan
        tiers = ["--dram", str(plan.dram_bytes), "--nvme", f"{plan.nvme}:{plan.nvme_bytes}", "--demote-at", "0"]
        listen = ["--listen", "127.0.0.1:0", *self._catalog]  # where the conductor asks what pages it has
        self._node = self._child("serve", "--name", plan.name, *tiers, "--on-stop", "save", *listen)
        return self._node.line(NODE_START_S)

    def kill_node(self) -> None:
        """Kill the node with -9."""
        assert self._node is not None
        self._node.kill()
        self._children.remove(self._node)

    def restart(self) -> list[str]:
        """Do what a restart of the machine does: end all processes, empty shared memory, start node and engines. The
        engines keep pages from now on."""
        self._stop()
        return self.start(keep_pages=True)

    def close(self) -> None:
        """End every process, and remove what was in shared memory."""
        self.interrupts.ignored()
        self._stop()

    def _stop(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        for child in self._children:
            child.ask_to_end()
        for child in self._children:
            child.wait()
        self._children.clear()
        purge(self._shm_dir / f"{PREFIX}{self.plan.name}")

    def _engine(self, role: str, address: str, keep_pages: bool, *more: str) -> Child:
        arguments = ["--role", role, "--name", role, "--model", self.plan.model, "--node", self.plan.name]
        arguments += ["--listen", address, "--threads", "1", "--arena", "512MiB", "--drain-s", "1"]
        arguments += ["--page-tokens", str(PAGE_TOKENS), "--local-prefill-tokens", str(LOCAL_PREFILL_TOKENS)]
        return self._child("engine", *arguments, "--keep-pages", str(int(keep_pages)), *more)

    def _child(self, *arguments: str) -> Child:
        with self.interrupts.held():
            log = self.plan.place / f"{arguments[0]}.log"
            child = Child(f"kvstore {arguments[0]}", [*arguments, "--log-level", "error"], self._env, log)
            self._children.append(child)
        return child
