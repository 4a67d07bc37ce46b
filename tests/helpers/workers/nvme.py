"""What worker processes do beside ``pages``: ``python -m tests.helpers.workers.nvme VERB JSON``."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvstore import config as configuration
from kvstore import failpoint
from kvstore.errors import Unavailable
from kvstore.service import daemon
from kvstore.service.upkeep.scanner import Scanner
from kvstore.tier.frame_header import FrameHeader
from tests.helpers.workers import pages as workers
from tests.helpers.workers.pages import Arguments, bytes_of, compare, keys_of, log, opened, wait_for_go

_PR_SET_PDEATHSIG = 1


def prefetch(a: Arguments) -> None:
    """Have prompts ``first .. first + count`` brought to DRAM in any order, and read them, until SIGTERM."""
    rng = random.Random(a.get("random", 1))
    with opened(a) as (_, cache):
        done = pages = 0
        while not workers._ended:
            keys = keys_of(a, rng.randrange(a["first"], a["first"] + a["count"]), a["pages"])
            with contextlib.suppress(Unavailable):
                cache.prefetch(keys, timeout_s=0.2)
            match = cache.get(keys)
            if match.pages:
                assert match.data is not None
                compare(match.data, bytes_of(a, keys)[: match.pages], "after a prefetch")
            done, pages = done + 1, pages + match.pages
            if done % 20 == 1:
                log("prefetched", prefetches=done, pages=pages)
            time.sleep(a.get("pause_s", 0.0))


def arm(step: str) -> None:
    """As $KVSTORE_FAILPOINT does where a process begins; "" is none."""
    name, _, count = step.partition(":")
    assert not step or name in failpoint.NAMES, name
    failpoint.ACTIVE, failpoint._name, failpoint._left = bool(step), name, int(count or 1)


def nursery(a: Arguments) -> None:
    """A daemon for every line on stdin, in a child that has everything imported: quick to start, so quick to kill.

    A line names its configuration, and the failpoint where it dies, if it is to. Logs ``born``, ``ready`` and ``died``
    with its pid; the next one is only started when the last one is dead. ``scan_gate``: a file that says how many
    extents of its scan may have begun, so that others see it at work for as long as they look.
    """
    gate, scan, begun = a.get("scan_gate", ""), Scanner._scan, 0

    def scan_slowly(*arguments: Any) -> Iterator[FrameHeader]:
        nonlocal begun
        begun += 1
        while gate and begun > int(Path(gate).read_text() or 0):
            time.sleep(0.01)
        yield from scan(*arguments)

    Scanner._scan = scan_slowly  # type: ignore[method-assign, assignment]
    while True:
        path, _, step = wait_for_go().partition(" ")
        settings = configuration.load(path).node
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            arm(step)
            code = 1
            try:
                daemon.serve(settings, lambda line: log("ready", pid=os.getpid(), line=line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        log("born", pid=pid)
        _, status = os.waitpid(pid, 0)
        log("died", pid=pid, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    workers.VERBS |= {"prefetch": prefetch, "nursery": nursery}
    workers.main()
