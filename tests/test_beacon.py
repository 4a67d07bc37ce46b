"""The beacon that deadlines are judged by: it sees a stall, and it sees none where there was none."""

from __future__ import annotations

import os
import signal
import threading
import time

from tests.helpers.beacon import Beacon

STALL_S = 0.5


def test_a_stalled_process_is_seen_in_its_window_alone() -> None:
    with Beacon() as beacon:
        before_s = time.monotonic()
        time.sleep(0.1)
        began_s = time.monotonic()
        assert beacon.child is not None
        os.kill(beacon.child.pid, signal.SIGSTOP)
        time.sleep(STALL_S)
        os.kill(beacon.child.pid, signal.SIGCONT)
        ended_s = time.monotonic()
        assert STALL_S * 0.9 < beacon.stall_s(began_s, ended_s) <= ended_s - began_s
        assert beacon.stall_s(before_s, began_s) <= began_s - before_s


def test_an_interpreter_that_is_busy_stalls_its_threads() -> None:
    def hold() -> None:
        sum(range(3_000_000))  # one call, which does not let go of the interpreter

    with Beacon(threads=True) as beacon:
        began_s = time.monotonic()
        busy = threading.Thread(target=hold)
        busy.start()
        busy.join()
        ended_s = time.monotonic()
        time.sleep(0.05)  # the thread records a stall when it is over
        assert beacon.stall_s(began_s, ended_s) > 0.5 * (ended_s - began_s)
