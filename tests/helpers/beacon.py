"""Beacon: how much of the time in a window this machine, or this process, gave to a task that needs next to none.

A test that judges a deadline subtracts the stall that a beacon observed in the same window, so that it judges the
product and not the machine::

    with Beacon() as beacon:
        began_s = time.monotonic()
        call()
        took_s = time.monotonic() - began_s
        assert took_s - beacon.stall_s(began_s) < LIMIT_S

A beacon sleeps for ``STEP_S`` again and again, and records by how much each sleep was too long. There are two of them:
a process of its own sees what the machine does not give; a thread of this process sees in addition what the
interpreter lock of a test with many threads costs that test.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from types import TracebackType
from typing import Final, Self

STEP_S: Final = 0.005
NOISE_S: Final = 0.001  # an oversleep that any machine has
RECORD: Final = struct.Struct("=dd")  # when a sleep ended by the monotonic clock, and by how much it was too long
START_S: Final = 30.0
# It writes down when it last ran in the file's first record, and every oversleep in a record of its own behind that.
CHILD: Final = f"""
import os, struct, time
at = 16
ended = time.monotonic()
while os.getppid() == {{parent}}:
    os.pwrite({{file}}, struct.pack("=dd", ended, 0.0), 0)
    began = ended
    time.sleep({STEP_S})
    ended = time.monotonic()
    if ended - began > {STEP_S + NOISE_S}:
        os.pwrite({{file}}, struct.pack("=dd", ended, ended - began - {STEP_S}), at)
        at += 16
"""


class Beacon:
    """Watches from ``with`` to its end.

    Args:
        threads: watch by a thread of this process, too.
    """

    def __init__(self, threads: bool = False) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self.child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="beacon", daemon=True) if threads else None
        self._seen: list[tuple[float, float]] = []
        self._over = threading.Event()

    def __enter__(self) -> Self:
        descriptor = self._file.fileno()
        program = CHILD.format(parent=os.getpid(), file=descriptor)
        self.child = subprocess.Popen([sys.executable, "-S", "-E", "-c", program], pass_fds=[descriptor])
        deadline_s = time.monotonic() + START_S
        while not os.fstat(descriptor).st_size:
            assert time.monotonic() < deadline_s and self.child.poll() is None, "the beacon did not start"
            time.sleep(STEP_S)
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self.child is not None:
            self.child.kill()
            self.child.wait(START_S)
        if self._thread is not None:
            self._thread.join(START_S)
        self._file.close()

    def stall_s(self, began_s: float, ended_s: float | None = None) -> float:
        """Seconds between two moments, by ``time.monotonic``, in which the beacons should have run and did not.

        The larger of both beacons' sums. ``ended_s`` is now where it is not given.
        """
        until_s = time.monotonic() if ended_s is None else ended_s
        deadline_s = time.monotonic() + START_S
        while self._ran_s() < until_s:  # it has not yet recorded the stall that it is in
            assert time.monotonic() < deadline_s, f"the beacon did not run for {START_S:g} s"
            time.sleep(STEP_S)
        size = os.fstat(self._file.fileno()).st_size
        child = list(RECORD.iter_unpack(os.pread(self._file.fileno(), size - size % RECORD.size, 0)))[1:]
        return max(_lost_s(child, began_s, until_s), _lost_s(self._seen, began_s, until_s))

    def _ran_s(self) -> float:
        """When the child ran last."""
        record = os.pread(self._file.fileno(), RECORD.size, 0)
        return float(RECORD.unpack(record)[0]) if record else 0.0

    def _watch(self) -> None:
        ended_s = time.monotonic()
        while not self._over.is_set():
            began_s = ended_s
            time.sleep(STEP_S)
            ended_s = time.monotonic()
            if ended_s - began_s > STEP_S + NOISE_S:
                self._seen.append((ended_s, ended_s - began_s - STEP_S))


def _lost_s(records: list[tuple[float, float]], began_s: float, until_s: float) -> float:
    """The part of every oversleep that lies in the window, summed."""
    parts = (min(ended_s, until_s) - max(ended_s - over_s, began_s) for ended_s, over_s in list(records))
    return sum(part for part in parts if part > 0)
