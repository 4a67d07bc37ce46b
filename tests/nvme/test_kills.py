"""kill -9 of a node with NVMe: at every named step of moving, checkpoint, format and scan, and at random moments.

Kills between any two stores of a decision are tested in ``tests/worlds/test_tier_kills.py``.

DRAM holds less than half of what is stored, NVMe all of it: so nothing that was acknowledged may be missing, ever.
``KVSTORE_TEST_KILLS`` sets how many random kills there are (160), ``KVSTORE_TEST_SEED`` draws the pauses.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from kvstore import Store
from kvstore.client.local import grants
from tests.helpers.nvme.nodes import (
    KILLED,
    MOVING_STEPS,
    NODE,
    check_closed,
    check_findings,
    check_sound,
    check_stored,
    configure,
    kill,
    nvme,
    nvme_worker,
    reboot,
    serve_format,
    start_killed,
    stored,
    target,
    wait_pages,
    wait_quiet,
    wait_scanned,
)
from tests.helpers.nvme.nodes import PROMPT_PAGES as PAGES
from tests.helpers.processes import Daemon, Machine, check_right, put, wait_until

KILLS = int(os.environ.get("KVSTORE_TEST_KILLS", "160"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
ENOUGH_S = 40.0  # without kills, where a busy machine had stored little between them

# Steps of a node that moves pages, and at which of its hits it is killed. Some come with every batch or extent table,
# the reports of copies rarely.
MOVING = {
    "mover.copy": (1, 2, 7),
    "mover.saved": (1, 3, 6),
    "mover.loaded": (1, 2, 5),
    "mover.reported": (1, 4, 9),
    "mover.checkpoint": (1, 3, 8),
    "nvme.table": (3, 5, 9, 16),  # the first two are the start's own
}
assert set(MOVING) == set(MOVING_STEPS)


@pytest.fixture(autouse=True)
def give_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does not keep frames that it was granted ahead for seconds: the tests wait for them often."""
    monkeypatch.setattr(grants, "IDLE_S", 0.1)


class Load:
    """Writers, a reader, and one who prefetches; together they put more than twice what DRAM holds."""

    def __init__(self, machine: Machine, first: int, count: int = 60, pause_s: float = 0.01) -> None:
        self.writers = [
            machine.worker("put", NODE, first=at, count=count, pages=PAGES, parts=2, pause_s=pause_s)
            for at in (first, first + count)
        ]
        span: dict[str, Any] = {"first": first, "count": 2 * count, "pages": PAGES}
        self.readers = [
            machine.worker("read", NODE, **span, pause_s=0.005),
            nvme_worker(machine, "prefetch", **span, pause_s=0.005),
        ]
        for worker in (*self.writers, *self.readers):
            worker.wait_for("started")

    @property
    def acknowledged(self) -> dict[int, int]:
        """What the writers were promised."""
        return {seed: pages for worker in self.writers for seed, pages in worker.acknowledged().items()}

    def end(self) -> dict[int, int]:
        """Readers in peace, writers wherever they are. Returns what was acknowledged."""
        for reader in self.readers:
            reader.finish()
        for writer in self.writers:
            writer.kill()
        for worker in (*self.writers, *self.readers):
            assert worker.events("wrong") == [], worker.events("wrong")
        return self.acknowledged


def killed(daemon: Daemon) -> None:
    """It came to its failpoint."""
    assert daemon.wait(60) == KILLED, daemon.trace()


def check_after(store: Store, acked: dict[int, int]) -> None:
    """The load is still on, the daemon was just started again."""
    check_findings(store)
    check_stored(store, acked)


def check_at_rest(store: Store, acked: dict[int, int]) -> None:
    """Nobody else is at work: everything is there and sound, nothing is held, and it goes on."""
    wait_quiet(store)
    check_sound(store)
    check_stored(store, acked)
    assert put(store, 900_000, PAGES) in (0, PAGES)
    check_stored(store, {900_000: PAGES})
    wait_quiet(store)
    check_findings(store)


@pytest.mark.parametrize("name", MOVING)
def test_killed_while_pages_move(name: str, machine: Machine) -> None:
    daemon = machine.serve(NODE, **configure(machine))
    store = machine.connect(NODE)
    load = Load(machine, first=0)
    wait_pages(store, 50)
    kill(daemon)
    for count in MOVING[name]:
        start_killed(machine, f"{name}:{count}")
        check_right(store, load.acknowledged)  # no daemon is needed to read, but for what was just published
        daemon = machine.serve(NODE)
        check_after(store, load.acknowledged)
        kill(daemon)
    machine.serve(NODE)
    wait_until("the writers go on", lambda: sum(load.acknowledged.values()) > 300)
    acked = load.end()
    check_at_rest(store, acked)
    assert nvme(store)["pages"] > 128, "DRAM held it all"


# --- format, start and scan -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hit", [1, 2, 4, 6, 8])
def test_killed_while_a_file_of_others_is_made_anew(hit: int, machine: Machine) -> None:
    """With --format. Afterwards it is theirs as it was, or ours, or half made: never anything in between."""
    path, content = target(machine), os.urandom(1 << 20) * 64
    path.write_bytes(content)
    flags = configure(machine, nvme_format=True)
    killed(machine.spawn(NODE, failpoint=f"nvme.format:{hit}", **flags))
    if hit == 1:
        assert path.read_bytes() == content, "nothing was decided yet"
    plain = configure(machine)
    daemon = machine.spawn(NODE, **plain)
    if hit == 1:
        assert daemon.wait() == 2 and "--format" in daemon.errors.read_text(), daemon.trace()
        daemon = serve_format(machine)
    else:
        daemon.wait_ready()
    with machine.connect(NODE) as store:
        put(store, 1, PAGES)
        check_stored(store, {1: PAGES})
        check_sound(store)
    assert daemon.terminate() == 0


def test_killed_while_extents_are_scanned(machine: Machine) -> None:
    """The same without checkpoints. What was on NVMe is there when a scan has come to its end."""
    daemon, store, acked = stored(machine, prompts=80)
    daemon.kill()
    store.close()
    reboot(machine)
    flags = configure(machine, checkpoint_s=1e6)
    for step in ("nvme.loaded:1", "nvme.loaded:4", "node.recover", "scanner.run:1", "scanner.run:5"):
        start_killed(machine, step, **flags)
    for step in ("scanner.offered:1", "scanner.run:2", "scanner.offered:1", "scanner.run:1"):
        start_killed(machine, step)
        with machine.connect(NODE) as late:
            check_right(late, acked)
    machine.serve(NODE)
    store = machine.connect(NODE)
    wait_scanned(store)
    check_stored(store, acked)
    check_at_rest(store, acked)


# --- random moments -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fits", [True, False])
def test_random_kills(fits: bool, machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Where NVMe holds everything nothing may be lost; where it does not, pages leave it all the time."""
    rng = random.Random(SEED + fits)
    size, kills = ("64MiB", KILLS - KILLS // 3) if fits else ("8MiB", KILLS // 3)
    flags = configure(machine, nvme=[f"{target(machine)}:{size}"])
    daemon = machine.serve(NODE, **flags)
    daemons = [daemon]
    store = machine.connect(NODE)
    load = Load(machine, first=0, count=100, pause_s=0.1 if fits else 0.02)
    began = time.monotonic()
    for number in range(kills):
        if rng.random() < 0.6:  # the others hit a start
            daemon.wait_ready()
        time.sleep(rng.uniform(0, 0.05))
        kill(daemon)
        daemon = machine.spawn(NODE)
        daemons.append(daemon)
        if number % 20 == 19:
            daemon.wait_ready()
            check_findings(store)
            if fits:
                check_stored(store, load.acknowledged)
    took = time.monotonic() - began
    daemon.wait_ready()
    killed, enough = sum(load.acknowledged.values()), 512 if fits else 300
    assert killed > 100, f"{killed} pages were stored between {kills} kills"
    wait_until("enough is stored", lambda: sum(load.acknowledged.values()) > enough, ENOUGH_S)
    acked = load.end()
    wait_quiet(store)
    check_sound(store)
    found = check_stored(store, acked) if fits else check_closed(store, acked)
    assert found > 200, f"{found} pages are there"
    if fits:
        check_at_rest(store, acked)
    about = nvme(store)
    kill(daemon)
    with capsys.disabled():
        print(
            f"\n{kills} kills in {took:.0f} s, {sum(bool(one.output()) for one in daemons)} starts came to serve: "
            f"{found} of {sum(acked.values())} pages are there, {about['pages']} of them on NVMe"
        )
