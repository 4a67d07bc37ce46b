"""A pool that is turned over while writers stand still, and what must hold of everybody's pages afterwards."""

from __future__ import annotations

from kvstore import Store
from tests.helpers.content import SMALL
from tests.helpers.processes import Daemon, Machine, Worker, check_right, frames, put, wait_until

POOL_PAGES = (4 << 20) // SMALL.page_bytes  # of --dram 4MiB
PAGES = 16


def turn_over(machine: Machine, first: int, times: int = 4) -> dict[int, int]:
    """Other writers put ``times`` the capacity. Returns what they put."""
    prompts = dict.fromkeys(range(first, first + times * POOL_PAGES // PAGES), PAGES)
    with machine.connect("n") as other:
        stored = sum(put(other, seed, PAGES) for seed in prompts)
    assert stored >= (times - 1) * POOL_PAGES, f"only {stored} pages went in"
    return prompts


def restart(machine: Machine, daemon: Daemon) -> Daemon:
    daemon.kill()
    return machine.serve("n")


def everything_right(store: Store, prompts: dict[int, int]) -> int:
    """Byte for byte. Most of the pool is what was put last."""
    there = check_right(store, prompts)
    assert there > POOL_PAGES // 2, f"only {there} pages are there: nothing could have been damaged"
    return there


def held(store: Store) -> int:
    states = frames(store)
    return states["reserved"] + states["quarantined"]


def went_on(writer: Worker, store: Store, prompts: dict[int, int]) -> None:
    """Its seal is refused, or its pages are what their keys say."""
    wait_until("its put ends", lambda: writer.events("sealed") or writer.events("refused"))
    check_right(store, {1: PAGES, **prompts})
