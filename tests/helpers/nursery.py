"""Processes that begin in milliseconds: forks of one that has everything imported, and children of ours all the same.

Importing takes a daemon half a second of a core, and an engine six. A nursery imports once; ``Nursery.spawn`` forks it
and runs what a new interpreter with that command line would run: ``-c CODE`` or ``-m MODULE``, with its environment,
input and outputs. What is forked has no thread and no connection of the nursery's, which starts neither. It ends as an
interpreter does, but leaves its memory to the kernel. A command that starts others of its own (a daemon its data
server, the demo its engines) has a nest: a fork of it, made before it does anything, that forks those. Whoever tests
the start of an interpreter itself starts one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NoReturn

from kvstore import failpoint

ROOT = Path(__file__).resolve().parents[2]
# What a process of each kind imports first or last; all below comes with it.
NODES = (
    *("kvstore.cli.main", "kvstore.cli.serve", "kvstore.node.daemon", "kvstore.node.api.server"),
    *("kvstore.node.operator.metrics", "kvstore.client.remote.store"),
)
ENGINES = (
    *("kvstore.cli.main", "engine.cli", "engine.daemon", "engine.compute.models", "engine.api.service"),
    *("engine.client", "engine.shell.engine", "kvstore.client.remote.store"),
    *("engine.conductor.daemon", "engine.conductor.http.server", "engine.compute.cpu_kernel", "kvstore.node.daemon"),
)
MODELS = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen3", "deepseek_v3"))
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
        with self._lock:
            self._socket = self._socket or self._start()
            return Child(_asked(self._socket, command, env, (stdin, stdout, stderr)))

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


def _asked(
    nursery: socket.socket,
    command: Sequence[str],
    env: Mapping[str, str],
    streams: Sequence[int],
    session: bool = False,
) -> int:
    """The process id of what is forked for that, as a child of ours."""
    assert command[0] == sys.executable and command[1] in ("-c", "-m"), command
    request = json.dumps({"command": list(command[1:]), "env": dict(env), "session": session}).encode()
    assert len(request) <= REQUEST_BYTES_MAX
    with _adopting():
        socket.send_fds(nursery, [request], streams)
        return int(nursery.recv(64))


@lru_cache
def of_nodes() -> Nursery:
    """For nodes, their clients and commands."""
    return Nursery(NODES)


@lru_cache
def of_engines() -> Nursery:
    """For engines: with torch."""
    return Nursery((*ENGINES, *MODELS))


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


def run(command: list[str]) -> NoReturn:
    """What ``python *command`` runs, and its end."""
    code: object = 1
    try:
        _run(command)
        code = 0
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        traceback.print_exc()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run(command: list[str]) -> None:
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
            if request["session"]:
                os.setsid()
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
    while request is not None and starts_others(request["command"]):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            subprocess.Popen = nesting(ours, subprocess.Popen)  # type: ignore[assignment, misc]
            break
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the one that it forks for
        with open(os.devnull, "r+b") as nothing:
            for number in range(3):
                os.dup2(nothing.fileno(), number)
        request = born(theirs)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if request is None:
        os._exit(0)
    os.environ.clear()
    os.environ.update(request["env"])
    failpoint.arm(os.environ.get("KVSTORE_FAILPOINT", ""))
    run(request["command"])


# --- a nest ---------------------------------------------------------------------------------------------------------


def starts_others(command: list[str]) -> bool:
    """Whether that is a command of ``kvstore`` that starts others."""
    return "demo" in command or "bench" in command or {"serve", "--catalog"} <= set(command)


class Nested(Child):
    """A process of a nest, with the part of ``subprocess.Popen`` that ``kvstore`` uses."""

    def __init__(
        self,
        nest: socket.socket,
        command: Sequence[str],
        *,
        start_new_session: bool,
        stdin: int,
        stdout: int,
        stderr: IO[bytes] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        theirs, self.stdin = self._stream(stdin, "wb")
        said, self.stdout = self._stream(stdout, "rb")
        errors = stderr.fileno() if stderr is not None else 2
        super().__init__(_asked(nest, command, env or os.environ, (theirs, said, errors), start_new_session))
        os.close(theirs)
        os.close(said)

    @staticmethod
    def _stream(what: int, mode: str) -> tuple[int, IO[bytes] | None]:
        """Its end, and ours."""
        if what == subprocess.DEVNULL:
            return os.open(os.devnull, os.O_RDWR), None
        assert what == subprocess.PIPE
        reads, writes = os.pipe()
        its, ours = (reads, writes) if mode == "wb" else (writes, reads)
        return its, open(ours, mode)

    def wait(self, timeout_s: float = float("inf")) -> int:
        """See ``Child``."""
        return super().wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, where it lives."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, where it lives."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def nesting(nest: socket.socket, popen: Callable[..., Any]) -> Callable[..., Any]:
    """``subprocess.Popen``, but a module of ours is run by a process of the nest."""

    def started(command: Sequence[str], **how: Any) -> Any:
        mine = command[1] == "-m" and command[2].partition(".")[0] == "kvstore"
        return Nested(nest, command, **how) if mine else popen(command, **how)

    return started


if __name__ == "__main__":
    main()
