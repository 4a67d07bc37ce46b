"""The demo's machine: a node and two engines as processes, their files, and how all of that ends.

``kvstore serve`` and ``kvstore engine`` are started as anybody would. Whatever happens, every process is ended by its
id, and no file is left.
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
from kvstore.serving.child import Child
from kvstore.tier.folder import PREFIX
from kvstore.tier.purging import purge

NODE_START_S: Final = 30.0
ENGINE_START_S: Final = 300.0  # a large model is read from a disk
PAGE_TOKENS: Final = 32
LOCAL_PREFILL_TOKENS: Final = 128
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Signals that ask for an end raise KeyboardInterrupt: one of them, never while a process is being started, and
    none while everything is being cleaned up.
    """

    def __init__(self) -> None:
        self.came = False
        self._held = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Inside, such signals are ours."""
        before = {number: signal.signal(number, self._handle) for number in ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, they wait; ``came`` says whether there is one."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if self.came:  # also where something failed: that may be why
                self._interrupt()

    def ignored(self) -> None:
        """From here on they do nothing: what is cleaned up now is bounded anyway."""
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
    """What the machine has. ``place``: a folder for sockets and logs; ``nvme``: where that file shall be."""

    name: str
    place: Path
    nvme: Path
    model: str
    dram_bytes: int
    nvme_bytes: int

    @property
    def is_preset(self) -> bool:
        """Whether the model is made of random numbers."""
        return self.model in PRESETS


class Machine:
    """Life: made (nothing runs) -> ``start`` -> ``kill_node`` and ``start_node`` -> ``restart`` -> ``close``."""

    def __init__(self, plan: MachinePlan, interrupts: Interrupts) -> None:
        self.plan = plan
        self.prefill_address = ""
        self.interrupts = interrupts
        self._shm_dir = Path(os.environ.get("KVSTORE_SHM_DIR", "/dev/shm"))
        # What the caller has set for nodes and engines of its own is not meant for these.
        clean = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        ours = {"KVSTORE_SHM_DIR": self._shm_dir, "TMPDIR": plan.place, "OMP_NUM_THREADS": 1}
        self._env = clean | {name: str(value) for name, value in ours.items()}
        self._children: list[Child] = []
        self._node: Child | None = None
        self._restarted = False
        self._client: EngineClient | None = None

    @property
    def client(self) -> EngineClient:
        """The engine that answers."""
        assert self._client is not None, "it does not run"
        return self._client

    def start(self) -> list[str]:
        """Start everything; the lines in which node and engines say what they are."""
        lines = [self.start_node()]
        # Unix sockets, because the decode engine has to know the other's address before that one serves.
        prefill = self._engine("prefill")
        decode = self._engine("decode", "--prefill", self._socket("prefill"))
        for child in (prefill, decode):
            lines.append(child.line(ENGINE_START_S))
        self.prefill_address = self._socket("prefill")
        self._client = EngineClient(self._socket("decode"))
        return lines

    def start_node(self) -> str:
        """Start the node, for the first time or again; its line."""
        plan = self.plan
        sizes = ["--dram", str(plan.dram_bytes), "--nvme", f"{plan.nvme}:{plan.nvme_bytes}", "--demote-at", "0"]
        cluster = ["--listen", "127.0.0.1:0", *self._catalog]  # where the conductor asks what pages it has
        self._node = self._child("the node", ["serve", "--name", plan.name, *sizes, *cluster, "--log-level", "warning"])
        return self._node.line(NODE_START_S)

    @contextmanager
    def conductor(self) -> Iterator[str]:
        """A conductor that knows them all, while the block runs: the address of its HTTP door."""
        engines = ["--engine", self._socket("prefill"), "--engine", self._socket("decode")]
        arguments = ["conductor", "--http", "127.0.0.1:0", *engines, *self._catalog, "--log-level", "error"]
        child = self._child("the conductor", arguments)
        try:
            yield child.line(NODE_START_S).split("http on ")[1].split()[0]
        finally:
            child.ask_to_end()
            child.wait()
            self._children.remove(child)

    @property
    def _catalog(self) -> list[str]:
        return ["--catalog", f"file:{self.plan.place / 'catalog'}"]

    def kill_node(self) -> None:
        """kill -9."""
        assert self._node is not None
        self._node.kill()
        self._node = None

    def restart(self) -> list[str]:
        """What a restart of the machine does: nothing runs, shared memory is empty. Then as ``start``, but that engines
        keep pages from now on: before, all reuse is the pool's."""
        self._stop()
        self._restarted = True
        return self.start()

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
        self._node = None
        purge(self._shm_dir / f"{PREFIX}{self.plan.name}")

    def _engine(self, role: str, *more: str) -> Child:
        plan = self.plan
        arguments = ["--role", role, "--model", plan.model, "--node", plan.name, "--listen", self._socket(role)]
        arguments += ["--threads", "1", "--page-tokens", str(PAGE_TOKENS), "--arena", "512MiB", "--drain-s", "1"]
        arguments += ["--keep-pages", f"{int(self._restarted)}"]
        arguments += ["--local-prefill-tokens", str(LOCAL_PREFILL_TOKENS), "--name", role, "--log-level", "error"]
        return self._child(f"the {role} engine", ["engine", *arguments, *more])

    def _socket(self, role: str) -> str:
        return f"unix:{self.plan.place / role}"

    def _child(self, what: str, arguments: list[str]) -> Child:
        log = self.plan.place / f"{what.split()[1]}.log"
        with self.interrupts.held():
            child = Child(what, arguments, self._env, log)
            self._children.append(child)
        return child
