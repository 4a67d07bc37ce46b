"""The version before this one, out of the history: a tree of its files, and its daemons, engines and clients."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engines.processes import EngineProcess
from tests.helpers.processes import ROOT, Daemon, Machine, P, Process, wait_until

OLD = "7018262c96503cd684b9441c4ffc3c302355f516"
"""Every change since is tried against this commit: files, messages and programs of it go on working."""

# -P: neither the working directory nor the script's comes first, so that PYTHONPATH says which kvstore it is.
PYTHON = (sys.executable, "-P")
CLI = (*PYTHON, "-c", "from kvstore.cli.main import main; main()")
ANSWER_S = 40.0


def unpack(folder: Path) -> Path:
    """Its packages in ``folder``; skips the test where the history is not here."""
    git = ["git", "-C", str(ROOT)]
    known = subprocess.run([*git, "cat-file", "-e", f"{OLD}^{{commit}}"], capture_output=True, text=True, check=False)
    if known.returncode:
        pytest.skip(f"commit {OLD[:7]} is not here (no history, or a shallow one): {known.stderr.strip()}")
    folder.mkdir()
    archive = subprocess.run([*git, "archive", OLD, "kvstore", "engine"], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


class Client(Process):
    """``any_version`` under one of the versions."""

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Call it; its answer. Fails at a deadline, or where the process has ended."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Call it, without waiting."""
        self.stdin.write(f"{json.dumps({'do': do, **arguments})}\n".encode())
        self.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer."""
        said = getattr(self, "_said", 0)

        def line() -> bool:
            assert self.alive or self.output().count("\n") > said, f"the client ended; {self.trace()}"
            return self.output().count("\n") > said

        wait_until("the client answers", line, ANSWER_S)
        self._said = said + 1
        return dict(json.loads(self.output().split("\n")[said]))


class Version:
    """Programs of one version on a machine; ``tree``: where its packages are."""

    def __init__(self, machine: Machine, tree: Path) -> None:
        self.machine = machine
        self.tree = tree

    def start(self, kind: type[P], what: str, command: Sequence[str]) -> P:
        """A process of this version."""
        return self.machine.start(kind, what, command, PYTHONPATH=str(self.tree))

    def serve(self, name: str = "n", **flags: str) -> Daemon:
        """A node daemon that is ready."""
        command = [*CLI, "serve", "--name", name]
        for flag, value in flags.items():
            command += [f"--{flag.replace('_', '-')}", value]
        daemon = self.start(Daemon, "serve", command)
        daemon.wait_ready(ANSWER_S)
        return daemon

    def client(self, address: str = "n", salt: str = "") -> Client:
        """A client of a node that serves."""
        script = str(Path(__file__).with_name("any_version.py"))
        client = self.start(Client, "client", [*PYTHON, script, address, salt])
        where = client.ask("where")["file"]
        assert Path(where).is_relative_to(self.tree), f"{where} is not of {self.tree}"
        return client

    def engine(self, model: str, **flags: str) -> EngineProcess:
        """An engine; it is not ready yet."""
        command = [*CLI, "engine", "--model", model]
        for flag, value in flags.items():
            command += [f"--{flag.replace('_', '-')}", value]
        return self.start(EngineProcess, "engine", command)


def grpc_of(daemon: Daemon) -> str:
    """The address of its gRPC API."""
    return "kv://" + daemon.output().split("grpc on ")[1].split()[0].rstrip(",")


def wait_saved(client: Client, pages: int, timeout_s: float = 60.0) -> None:
    """Everything is on NVMe, and nothing in DRAM."""
    deadline = time.monotonic() + timeout_s
    while (stats := client.ask("stats"))["dram"] or stats["nvme"] != pages:
        assert time.monotonic() < deadline, f"{stats}, not {pages} on NVMe"
        client.ask("evict")
        time.sleep(0.02)
