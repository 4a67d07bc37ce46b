"""A program that opens and closes stores all day: nothing of a closed one may live on."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import kvstore
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.processes import Machine, wait_until

WARM, LIVES = 30, 100  # stores opened, put into and closed: so that caches are warm, and then
GROWTH_BYTES = 8 << 20  # a hundred that lived on would keep about 20 MiB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def live(count: int) -> None:
    keys = chain(1, 4)
    for _ in range(count):
        with kvstore.open(dram="4MiB") as store:
            assert store.cache(SMALL).put(keys, contents(keys)) == 4


def test_open_put_close_leaves_no_thread_and_no_memory(machine: Machine) -> None:
    """Each store is closed with frames granted ahead, whose timer once started another for ever."""
    before = threading.active_count()
    live(WARM)
    gc.collect()
    resident = resident_bytes()
    live(LIVES)
    gc.collect()
    grown = resident_bytes() - resident
    assert grown < GROWTH_BYTES, f"{grown} bytes more after {LIVES} stores were closed"
    wait_until("no thread lives longer than its store", lambda: threading.active_count() <= before)
