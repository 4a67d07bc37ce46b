"""Processes that begin in milliseconds: forks of one that has everything imported, and children of ours all the same.

Importing takes a daemon half a second of a core, and an engine six. A nursery imports once; ``Nursery.spawn`` forks it
and runs what a new interpreter with that command line would run: ``-c CODE`` or ``-m MODULE``, with its environment,
input and outputs. What is forked has no thread and no connection of the nursery's, which starts neither. Whoever tests
the start of an interpreter itself starts one.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvstore import failpoint

ROOT = Path(__file__).resolve().parents[2]
# What a process of each kind imports first or last; all below comes with it.
NODES = (
    *("kvstore.cli.main", "kvstore.cli.serve", "kvstore.service.daemon", "kvstore.service.api.server"),
    *("kvstore.service.operator.metrics", "kvstore.client.remote.store"),
)
ENGINES = (
    *("kvstore.cli.main", "engine.cli", "engine.daemon", "engine.compute.models", "engine.api.server"),
    *("engine.client", "engine.shell.engine", "kvstore.client.remote.store"),
    *("engine.conductor.daemon", "engine.conductor.door.server"),
)
IMPORT_S = 120.0
REQUEST_BYTES_MAX = 1 << 17
POLL_S = 0.002
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


class Child:
    """A process that was forked for us, with the part of ``subprocess.Popen`` that we use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """The same at its end. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
            time.sleep(POLL_S)
        return code


class Nursery:
    """Life: made (nothing runs) -> ``spawn``, which starts it when first called -> ends with this process."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def spawn(self, command: Sequence[str], env: Mapping[str, str], stdin: int, stdout: int, stderr: int) -> Child:
        """Run ``command``, of a Python interpreter, on these descriptors."""
        assert command[0] == sys.executable and command[1] in ("-c", "-m"), command
        request = json.dumps({"command": list(command[1:]), "env": dict(env)}).encode()
        assert len(request) <= REQUEST_BYTES_MAX
        with self._lock:
            asked = self._socket = self._socket or self._start()
            with _adopting():
                socket.send_fds(asked, [request], [stdin, stdout, stderr])
                return Child(int(asked.recv(64)))

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(IMPORT_S)
        env = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.nursery", str(theirs.fileno()), *self._modules],
                env=env | {"PYTHONFAULTHANDLER": "1", "GRPC_VERBOSITY": "NONE"},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        return ours


@lru_cache
def of_nodes() -> Nursery:
    """For nodes, their clients and commands."""
    return Nursery(NODES)


@lru_cache
def of_engines() -> Nursery:
    """For engines: with torch."""
    return Nursery(ENGINES)


class _adopting:
    """Inside, orphans below this process become its children."""

    def __enter__(self) -> None:
        self._set(1)

    def __exit__(self, *failed: object) -> None:
        self._set(0)

    @staticmethod
    def _set(whether: int) -> None:
        if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, whether, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


# --- in the nursery -------------------------------------------------------------------------------------------------


def run(command: list[str]) -> None:
    """What ``python *command`` runs."""
    how, what, *arguments = command
    if how == "-m":
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *arguments]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def born(asked: socket.socket) -> dict[str, Any] | None:
    """Forks for every request, and returns the request in the new process; None at the end of the nursery."""
    while True:
        message, streams, _, _ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 3)
        if not message:
            return None
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:  # ends at once, so that who asked adopts what it forks
            pid = os.fork()
            if pid:
                os.write(tells, str(pid).encode())
                os._exit(0)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            for number in (asked.detach(), told, tells, *streams):
                os.close(number)
            request: dict[str, Any] = json.loads(message)
            return request
        os.waitpid(between, 0)
        asked.send(os.read(told, 32))
        for number in (told, tells, *streams):
            os.close(number)


def main() -> None:
    """See the module."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # what is shared stays shared: no collection writes to it
    request = born(asked)
    if request is None:
        return
    os.environ.clear()
    os.environ.update(request["env"])
    failpoint.arm(os.environ.get("KVSTORE_FAILPOINT", ""))
    run(request["command"])


if __name__ == "__main__":
    main()
