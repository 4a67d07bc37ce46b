"""The machine of the demo: a node, two engines and a conductor as processes, and their files.

The processes are started with the commands that a user would type. No matter how the demo ends, it
terminates its processes by id and removes all files.
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
ENGINE_START_S: Final = 300.0  # long enough to import torch and to read a large model
PAGE_TOKENS: Final = 32
LOCAL_PREFILL_TOKENS: Final = 128
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns the first signal of ``ENDING`` that arrives into KeyboardInterrupt, except inside ``deferred``.

    Attributes:
        is_pending: True if a signal has arrived inside ``deferred``.
    """

    def __init__(self) -> None:
        self.is_pending = False
        self._is_deferred = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals inside the ``with`` block."""
        before = {number: signal.signal(number, self._handle) for number in ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals until the end of the ``with`` block, for example while a process is started."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
            if self.is_pending:  # after an error, too, because the signal may be its cause
                self._interrupt()

    def ignore(self) -> None:
        """Ignore all further signals during the clean-up, which takes a limited time."""
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_deferred:
            self.is_pending = True
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        self.ignore()
        raise KeyboardInterrupt


@dataclass(frozen=True)
class MachinePlan:
    """The settings of the demo's machine.

    Attributes:
        work_dir: a folder for sockets, logs and the catalog.
        nvme: the path of the NVMe file.
        model: a folder, or the name of a preset.
    """

    name: str
    work_dir: Path
    nvme: Path
    model: str
    dram_bytes: int
    nvme_bytes: int

    @property
    def is_preset(self) -> bool:
        """True if the model is a preset, whose weights are random."""
        return self.model in PRESETS


class Machine:
    """The processes of the demo.

    Life: constructed (nothing runs) -> ``start`` -> ``kill_node`` and ``start_node`` -> ``restart`` -> ``close``.
    """

    def __init__(self, plan: MachinePlan, interrupts: Interrupts) -> None:
        self.plan = plan
        self.interrupts = interrupts
        self.prefill_address = f"unix:{plan.work_dir / 'prefill'}"
        self.http_address = ""  # the conductor's, once started
        self._decode_address = f"unix:{plan.work_dir / 'decode'}"
        self._catalog = ["--catalog", f"file:{plan.work_dir / 'catalog'}"]
        self._shm_dir = Path(os.environ.get("KVSTORE_SHM_DIR", "/dev/shm"))
        # The user's settings for other nodes and engines must not apply to these.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        settings = {"KVSTORE_SHM_DIR": self._shm_dir, "TMPDIR": plan.work_dir, "OMP_NUM_THREADS": 1}
        self._env = inherited | {name: str(value) for name, value in settings.items()}
        self._children: list[Child] = []
        self._node: Child | None = None
        self._client: EngineClient | None = None

    @property
    def client(self) -> EngineClient:
        """A client of the decode engine."""
        assert self._client is not None, "the engines are not running"
        return self._client

    def start(self, keep_pages: bool = False) -> list[str]:
        """Start the node and the engines. Returns the lines that they print when they are ready.

        Args:
            keep_pages: True if engines keep pages in their own memory (HBM); False to reuse pages only from the pool.
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
        """Start the conductor for both engines. Returns the line that it prints when it is ready."""
        engines = ["--engine", self.prefill_address, "--engine", self._decode_address]
        line = self._child("conductor", "--http", "127.0.0.1:0", *engines, *self._catalog).line(NODE_START_S)
        self.http_address = line.split("http on ")[1].split()[0]
        return line

    def start_node(self) -> str:
        """Start the node, for the first time or again. Returns the line that it prints when it is ready."""
        plan = self.plan
        tiers = ["--dram", str(plan.dram_bytes), "--nvme", f"{plan.nvme}:{plan.nvme_bytes}", "--demote-at", "0"]
        listen = ["--listen", "127.0.0.1:0", *self._catalog]  # so that the conductor can ask for the node's pages
        self._node = self._child("serve", "--name", plan.name, *tiers, "--on-stop", "save", *listen)
        return self._node.line(NODE_START_S)

    def kill_node(self) -> None:
        """Kill the node with -9."""
        assert self._node is not None
        self._node.kill()
        self._children.remove(self._node)

    def restart(self) -> list[str]:
        """Simulate a restart of the machine: end all processes, empty shared memory, start the node and the engines.

        The engines keep pages from now on.
        """
        self._stop()
        return self.start(keep_pages=True)

    def close(self) -> None:
        """End all processes, and remove the node's files in shared memory."""
        self.interrupts.ignore()
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
        with self.interrupts.deferred():
            log = self.plan.work_dir / f"{arguments[0]}.log"
            child = Child(f"kvstore {arguments[0]}", [*arguments, "--log-level", "error"], self._env, log)
            self._children.append(child)
        return child
