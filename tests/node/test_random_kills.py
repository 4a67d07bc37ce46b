"""kill -9 of daemon, writers and readers at hundreds of random points, with several of each running.

``KVSTORE_TEST_KILLS`` sets how many kills there are (120), ``KVSTORE_TEST_SEED`` draws the pauses and the victims.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest

from kvstore import Store
from kvstore.client.local.grants import AHEAD_FRAMES_MAX
from tests.helpers.content import SMALL
from tests.helpers.processes import (
    Daemon,
    Machine,
    Process,
    Worker,
    check_laws,
    check_pages,
    check_right,
    evict_all,
    put,
    wait_settled,
)

PAGES_MIN = 100  # looked at per round, or the round shows nothing
UNDISTURBED_S = 40.0  # that a busy machine has, after the kills, to get so far
KILLS = int(os.environ.get("KVSTORE_TEST_KILLS", "120"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
ROUNDS = 6
PAUSE_S = (0.0, 0.12)  # between kills: some hit a process that is just starting
NODE = "n"
EXTENT = "256KiB"  # many, so that some are made when a daemon is killed
WRITERS, READERS = 3, 2
PROMPTS, PAGES = 60, 8  # of one writer, and of one prompt, at most


def dram_for(kills: int) -> str:
    """Memory for all that the writers of so many kills can have at the very most."""
    frames = (WRITERS + kills) * (PROMPTS * PAGES + PAGES + AHEAD_FRAMES_MAX)  # some of it given up, some granted ahead
    return f"{(frames * SMALL.page_bytes >> 20) + 1}MiB"


class Crowd:
    """A daemon, three writers and two readers; whoever is killed is replaced at once."""

    def __init__(self, machine: Machine, dram: str, first: int) -> None:
        self.machine = machine
        self.next_first = first
        self.daemon = machine.serve(NODE, dram=dram, extent=EXTENT)
        self.writers = [self.writer() for _ in range(WRITERS)]
        self.readers = [self.reader() for _ in range(READERS)]
        self.gone: list[Worker] = []

    def writer(self) -> Worker:
        """Writers have prompts of their own, a thousand each."""
        first, self.next_first = self.next_first, self.next_first + 1000
        return self.machine.worker("mixed", NODE, first=first, pages=PAGES, count=PROMPTS, pause_s=0.01)

    def reader(self) -> Worker:
        """Readers follow the writers."""
        first, seed = max(0, self.next_first - 3000), self.next_first
        return self.machine.worker("read", NODE, first=first, count=3020, pages=PAGES, pause_s=0.005, random=seed)

    def kill(self, rng: random.Random) -> str:
        """kill -9 one of them, and start another. Returns who it was."""
        who = rng.choices(("daemon", "writer", "reader"), (5, 3, 2))[0]
        if who == "daemon":
            murder(self.daemon)
            self.daemon = self.machine.spawn(NODE)
        else:
            crowd: list[Worker] = self.writers if who == "writer" else self.readers
            replace: Callable[[], Worker] = self.writer if who == "writer" else self.reader
            victim = rng.randrange(len(crowd))
            murder(crowd[victim])
            self.gone.append(crowd[victim])
            crowd[victim] = replace()
        return who

    def end(self) -> Daemon:
        """A daemon that serves, workers ended: half of them in peace, the others killed."""
        if not self.daemon.alive:
            raise AssertionError(f"the daemon ended by itself: {self.daemon.trace()}")
        self.daemon.wait_ready()
        for worker in (self.writers[0], *self.readers):
            worker.finish()
        for worker in self.writers[1:]:
            worker.kill()
        for worker in (*self.gone, *self.writers, *self.readers):
            assert worker.events("wrong") == [], worker.events("wrong")
        return self.daemon

    def acknowledged(self) -> dict[int, int]:
        """What any writer was promised."""
        return {seed: pages for w in (*self.gone, *self.writers) for seed, pages in w.acknowledged().items()}


def murder(victim: Process) -> None:
    """kill -9. A victim that had ended before is a finding, unless its work was done."""
    code = victim.kill()
    assert code in (-int(signal.SIGKILL), 0), f"{victim.log.name} had ended with {code}: {victim.trace()}"


def check(store: Store, crowd: Crowd, everything_kept: bool) -> int:
    """All that has to hold when only the daemon is left. Returns how many pages were looked at."""
    wait_settled(store)
    check_laws(store)
    acked = crowd.acknowledged()
    if everything_kept:
        check_nothing_had_to_leave(store)
    looked_at = check_pages(store, acked) if everything_kept else check_right(store, acked)
    assert put(store, crowd.next_first, PAGES) == PAGES, "a new writer cannot go on"
    assert check_right(store, {crowd.next_first: PAGES}) == PAGES or not everything_kept
    return looked_at


def check_nothing_had_to_leave(store: Store) -> None:
    """No daemon of this round made room. Pages of one size never give an extent back: if some are vacant now, some
    always were."""
    tier = store.stats()["tiers"]["dram"]
    room = {name: tier[name] for name in ("evicted", "failed_bytes", "extents_quarantined")}
    assert room == {"evicted": {}, "failed_bytes": 0, "extents_quarantined": 0} and tier["extents_vacant"] > 0, tier


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_kills(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """In even rounds the pool holds everything, so that nothing may be lost; in odd ones pages leave all the time."""
    rng = random.Random(SEED)
    kills: Counter[str] = Counter()
    pages = 0
    began = time.monotonic()
    for number in range(ROUNDS):
        fits = number % 2 == 0
        wanted = KILLS // ROUNDS + (number < KILLS % ROUNDS)
        if number:
            assert machine.run("purge", NODE).returncode == 0
        crowd = Crowd(machine, dram_for(wanted) if fits else "4MiB", first=1_000_000 * (number + 1))
        for _ in range(wanted):
            time.sleep(rng.uniform(*PAUSE_S))
            kills[crowd.kill(rng)] += 1
        until = time.monotonic() + UNDISTURBED_S
        while sum(crowd.acknowledged().values()) <= PAGES_MIN + 20 and time.monotonic() < until:
            time.sleep(0.1)
        daemon = crowd.end()
        with machine.connect(NODE) as store:
            found = check(store, crowd, everything_kept=fits)
            assert found > PAGES_MIN, f"round {number}: only {found} pages were stored: too little happened"
            pages += found
        with machine.connect(NODE) as store:
            wait_settled(store)
            evict_all(store)
            check_laws(store)
        assert daemon.terminate() == 0
    assert sum(kills.values()) >= KILLS
    with capsys.disabled():
        took = time.monotonic() - began
        total = sum(kills.values())
        print(f"\n{total} kills ({dict(kills)}), seed {SEED}: {pages} pages compared byte for byte in {took:.0f} s")
