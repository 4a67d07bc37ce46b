"""Child: a command of ``kvstore`` as a process of its own, for the demo and the benchmarks, which start several."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.errors import NodeUnavailable

STOP_S: Final = 20.0


class Child:
    """A process of ``kvstore``. Started when made; ends by itself, or by ``ask_to_end`` or ``kill``, and ``wait``.

    Args:
        what: its name in messages.
        log: the file that what it says on stderr is added to; None: a file without a name.
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
            start_new_session=True,  # Ctrl-C is for us alone: we end them, in order
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def line(self, timeout_s: float) -> str:
        """The line it prints when it serves. Raises NodeUnavailable where it ends before, or takes longer."""
        assert self._process.stdout is not None
        pipe, text, deadline_s = self._process.stdout.fileno(), b"", time.monotonic() + timeout_s
        while not text.endswith(b"\n"):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise NodeUnavailable(f"{self.what} did not serve within {timeout_s:g} s")
            more = os.read(pipe, 4096)
            if not more:
                raise NodeUnavailable(f"{self.what} ended with {self._process.wait(STOP_S)}: {self._last_words()}")
            text += more
        return text.decode(errors="replace").strip()

    def kill(self) -> None:
        """kill -9, and wait for the end."""
        self._process.kill()
        self.wait()

    def ask_to_end(self) -> None:
        """SIGTERM."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self) -> None:
        """Wait for its end, and make it end where that takes too long."""
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_S)
        finally:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")
