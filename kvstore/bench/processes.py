"""Processes that benchmarks and the demo start: commands of ``kvstore``, the node daemon, and readers and writers.

Each one is ended by its pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final

from kvstore.bench.harness import BenchFailed
from kvstore.errors import NodeUnavailable
from kvstore.shm.folder import PREFIX, purge

STOP_S: Final = 20.0


class Child:
    """A command of ``kvstore`` in its own process.

    Life: constructed and started -> ``line`` when it is ready -> ``kill``, or ``ask_to_end`` and ``wait``.

    Args:
        what: name of the process in messages.
        log: file to which its stderr is appended; None means an unnamed temporary file.
    """

    def __init__(self, what: str, arguments: Sequence[str], env: Mapping[str, str], log: Path | None = None) -> None:
        self.what = what
        self._errors = open(log, "ab+") if log is not None else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(env),
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends its children in order
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def line(self, timeout_s: float) -> str:
        """Return the line that the process prints when it is ready. Raises NodeUnavailable if it ends before that, or
        after ``timeout_s``."""
        assert self._process.stdout is not None
        pipe, text, deadline_s = self._process.stdout.fileno(), b"", time.monotonic() + timeout_s
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise NodeUnavailable(f"{self.what} was not ready within {timeout_s:g} s")
            more = os.read(pipe, 4096)
            if not more:
                raise NodeUnavailable(
                    f"{self.what} ended with exit code {self._process.wait(STOP_S)}: {self._last_error()}"
                )
            text += more
        return text.decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill -9 the process, and wait until it has ended."""
        self._process.kill()
        self.wait()

    def ask_to_end(self) -> None:
        """Send SIGTERM, unless the process has ended."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait until the process has ended; kill it after ``STOP_S``."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._errors.close()

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no error output")


READY_S = 120.0  # the first start populates memory
ANSWER_S = 600.0
NO_SETTINGS: Mapping[str, object] = MappingProxyType({})


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a running process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def environment(shm_dir: Path, settings: Mapping[str, object] = NO_SETTINGS) -> dict[str, str]:
    """Return the environment of a child process: this process's, with ``settings`` of the node instead of the user's
    own.

    So a row measures the defaults, except for the settings that it names.
    """
    others = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    ours = {f"KVSTORE_{name.upper()}": str(value) for name, value in settings.items()}
    return {**others, **ours, "KVSTORE_SHM_DIR": str(shm_dir)}


class Daemon:
    """``kvstore serve`` in its own process.

    Life: created -> ``start`` -> ``kill`` or ``stop`` -> ``start`` again, or ``end``, which removes its pages.
    Leaving a ``with`` calls ``end``.
    """

    def __init__(
        self,
        name: str,
        dram_bytes: int,
        shm_dir: Path,
        extent_bytes: int | None = None,
        settings: Mapping[str, object] = NO_SETTINGS,
    ) -> None:
        self.name = name
        self.folder = shm_dir / f"{PREFIX}{name}"
        self._environment = environment(shm_dir, settings)
        self._arguments = ["serve", "--name", name, "--dram", str(dram_bytes)]
        if extent_bytes is not None:
            self._arguments += ["--extent", str(extent_bytes)]
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        """The process id of the running daemon."""
        assert self._child is not None, "not started"
        return self._child.pid

    def start(self) -> float:
        """Start the daemon; return the seconds until its ready line.

        Raises:
            BenchFailed: the daemon did not become ready. The message has its last error.
        """
        assert self._child is None, "is running"
        start_s = time.monotonic()
        self._child = Child("the daemon", self._arguments, self._environment)
        try:
            self._child.line(READY_S)
        except NodeUnavailable as error:
            self.kill()
            raise BenchFailed(str(error)) from None
        return time.monotonic() - start_s

    def kill(self) -> None:
        """Kill -9 the daemon, and wait until it has ended."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def stop(self) -> None:
        """Send SIGTERM and wait; kill -9 the daemon if it does not end in time."""
        child, self._child = self._child, None
        if child is not None:
            child.ask_to_end()
            child.wait()

    def end(self) -> None:
        """Stop the daemon and remove its pages."""
        try:
            self.stop()
        finally:
            purge(self.folder)

    def memory_bytes(self) -> dict[str, int]:
        """Return the daemon's memory as the kernel counts it: ``resident`` and its parts ``private`` and ``shared``."""
        names = {"VmRSS": "resident", "RssAnon": "private", "RssShmem": "shared", "RssFile": "files"}
        sizes = {}
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in names:
                sizes[names[name]] = int(value.split()[0]) << 10
        return sizes

    def cpu_s(self) -> float:
        """Return the CPU seconds of the running daemon."""
        return cpu_s(self.pid)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class PeerProcess:
    """A second process that uses the store (``kvstore.bench.peer``): JSON requests in, JSON answers out, one per line.

    Life: constructed and started -> ``ask`` -> ``close``, also by leaving a ``with``. It also ends with this process.
    """

    def __init__(self, node: str, shm_dir: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.bench.peer", node],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(shm_dir),
            start_new_session=True,
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return its answer. Raises BenchFailed if the request failed."""
        self.send(do, **arguments)
        return self.answer()

    def send(self, do: str, **arguments: Any) -> None:
        """Send a request. ``answer`` returns its answer later."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchFailed(f"the peer process ended (exit code {self._process.wait(STOP_S)})") from None

    def answer(self) -> dict[str, Any]:
        """Return the answer to the oldest request. Raises BenchFailed if the request failed, if the process ended, or
        if it did not answer in time."""
        line = _line(self._process, ANSWER_S)
        if not line:
            raise BenchFailed(f"the peer process did not answer (exit code {self._process.poll()})")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise BenchFailed(f"peer: {answer['failed']}")
        return answer

    def close(self) -> None:
        """End the process by closing its input."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _line(process: subprocess.Popen[bytes], timeout_s: float) -> bytes:
    """Return the next line of a process's output; empty if the process ended or wrote nothing in time. The process must
    write one line at a time."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        return b""
    return process.stdout.readline()
