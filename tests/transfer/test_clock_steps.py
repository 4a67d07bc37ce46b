"""The wall clock of whole processes steps, far ahead and far back: nobody leaves, nothing ends early or late."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Store
from kvstore.cluster.peer_links import PeersFile
from tests.helpers.content import SMALL, chain, contents, first_wrong, prompt
from tests.helpers.pool import patient
from tests.helpers.processes import CLI, Daemon, Machine, put, wait_until

DAY_S = 86_400.0
TTL_S = 2.0
PAGES = 20
HOOK = """
import os, time

def stepped(clock, unit):
    def now():
        with open(os.environ["WALL_CLOCK_AHEAD_S"]) as file:
            return clock() + int(float(file.read()) * unit)
    return now

time.time, time.time_ns = stepped(time.time, 1), stepped(time.time_ns, 10**9)
"""


class Clock:
    """The wall clock of the processes that are started with ``env``: daemons and what they start."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "ahead_s"
        self.step(0)
        hook = folder / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        self.env = {"PYTHONPATH": str(hook), "WALL_CLOCK_AHEAD_S": str(self._file)}

    def step(self, ahead_s: float) -> None:
        """So far ahead of the machine's from now on."""
        following = self._file.with_suffix(".next")
        following.write_text(str(ahead_s))
        following.rename(self._file)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path)


@pytest.fixture
def stores(
    machine: Machine, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Store]]:
    """Nodes a and b of one pool; a's clock is the one that steps."""
    patient(monkeypatch)
    for name, env in (("a", clock.env), ("b", {})):
        flags = ["--dram", "16MiB", "--catalog", f"file:{tmp_path / 'catalog'}", "--catalog-ttl-s", str(TTL_S)]
        daemon = machine.start(Daemon, "serve", [*CLI, "serve", "--name", name, *flags], **env)
        daemon.wait_ready()
    yield {name: machine.connect(name) for name in "ab"}


def throughout(machine: Machine, holds: Callable[[], None]) -> None:
    """That holds until both nodes have heard of the catalog for longer than a session lives without being renewed."""
    views = [PeersFile(machine.folder(name)) for name in "ab"]
    began: list[float] = []

    def heard() -> bool:
        holds()
        now = [view.look() for view in views]
        assert all(each is not None and set(each.peers) == {"a", "b"} for each in now), now
        heard_s = [each.heard_s for each in now if each is not None]
        began[:] = began or heard_s
        return all(now_s > began_s + 1.5 * TTL_S for now_s, began_s in zip(heard_s, began, strict=True))

    wait_until("the catalog was heard of for long", heard, 60)


def test_no_session_lease_or_pin_goes_by_the_wall_clock(
    machine: Machine, clock: Clock, stores: dict[str, Store], tmp_path: Path
) -> None:
    a, b = stores["a"], stores["b"]
    for seed in (1, 2, 3):
        put(a, seed, PAGES)
    pinned = a.cache(SMALL)
    a.pin(pinned.keys(prompt(2, PAGES)), ttl_s=600)
    wait_until("b finds all", lambda: b.cache(SMALL).lookup(prompt(3, PAGES)).pages == PAGES, 60)

    def got(store: Store, seed: int) -> int:
        out = np.zeros((PAGES, SMALL.page_bytes), np.uint8)
        match = store.cache(SMALL).get(prompt(seed, PAGES), out)
        assert first_wrong(out[: match.pages], contents(chain(seed, PAGES))[: match.pages]) == ""
        return match.pages

    with a.cache(SMALL).lease(prompt(1, PAGES), ttl_s=600) as lease:
        for turn, ahead_s in enumerate((DAY_S, -400 * DAY_S, 0.0)):
            clock.step(ahead_s)
            a.evict(pages=1000)
            put(a, 10 + turn, PAGES)

            def holds(turn: int = turn) -> None:
                assert got(a, 1) == got(a, 2) == PAGES, "what is leased and what is pinned stays"
                assert got(a, 10 + turn) == PAGES

            throughout(machine, holds)
            wait_until("b reads what is new", lambda turn=turn: got(b, 10 + turn) == PAGES, 60)
            assert len(lease.pages) == PAGES and len(a.pins()["pins"]) == 1

    def clean() -> bool:
        told = machine.run("verify", "--cluster", "--catalog", f"file:{tmp_path / 'catalog'}", "--json")
        return told.returncode == 0 and bool(json.loads(told.stdout)["clean"])

    wait_until("the pool is well", clean, 60)


def test_the_hook_does_step(machine: Machine, clock: Clock) -> None:
    clock.step(-7 * DAY_S)
    code = "import time; print(time.clock_gettime(time.CLOCK_REALTIME) - time.time())"
    process = machine.start(Daemon, "clock", [CLI[0], "-c", code], **clock.env)
    assert process.wait(60) == 0
    assert abs(float(process.output()) - 7 * DAY_S) < 1
