"""Gets go on while nodes, data servers and members of a real etcd are killed and stopped: no wrong byte, none hangs,
and all is well after.

Real processes under one seed, ``KVSTORE_TEST_SEED``. ``KVSTORE_TEST_FAULTS_S`` says for how long: docs/cluster.md.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Store
from kvstore.cluster.catalog.base import boot_s
from kvstore.cluster.peer_links import PeersFile
from tests.helpers.beacon import Beacon
from tests.helpers.content import SMALL, chain, contents, first_wrong, prompt
from tests.helpers.etcd import Etcd
from tests.helpers.pool import PAGES, Pool, patient
from tests.helpers.processes import Machine, check_pages, put, stopped, wait_until

FAULTS_S = float(os.environ.get("KVSTORE_TEST_FAULTS_S", "4"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
GET_S = 1.0  # for a get, less the time for which a beacon saw the machine or this process stand still
END_S = 30.0  # for a reader to end
WELL_S = 90.0
TTL_S = 2.0
CHAINS = {"a": (1, 2, 3), "b": (4, 5, 6)}  # by the node that has them; 3 and 4 are on both
BOTH = {"a": 4, "b": 3}


class Reader(threading.Thread):
    """Gets chains at random until it is told to end."""

    def __init__(self, store: Store, seed: int, beacon: Beacon) -> None:
        super().__init__(daemon=True)
        self._beacon = beacon
        self.ending = threading.Event()
        self.problems: list[str] = []
        self.gets = self.remote = self.short = 0
        self.longest_s = 0.0
        self._store = store
        self._chance = random.Random(seed)

    def run(self) -> None:
        cache, out = self._store.cache(SMALL), np.zeros((PAGES, SMALL.page_bytes), np.uint8)
        while not self.ending.is_set() and not self.problems:
            seed = self._chance.choice([*CHAINS["a"], *CHAINS["b"]])
            began_s = time.monotonic()
            match = cache.get(prompt(seed, PAGES), out)
            self.check_time(began_s, time.monotonic())
            wrong = first_wrong(out[: match.pages], contents(chain(seed, PAGES))[: match.pages])
            if wrong:
                self.problems.append(f"chain {seed}: {wrong}")
            self.gets, self.remote = self.gets + 1, self.remote + bool(match.nodes)
            self.short += match.pages < PAGES
            if match.pages and not match.nodes:  # it was kept here: let it be read from elsewhere again
                self._store.evict(pages=1 << 20)

    def check_time(self, began_s: float, ended_s: float) -> None:
        took_s = ended_s - began_s
        if took_s > GET_S:
            took_s -= self._beacon.stall_s(began_s, ended_s)
        self.longest_s = max(self.longest_s, took_s)

    def finish(self) -> None:
        """End it. Fails where it saw anything that must not be."""
        self.ending.set()
        self.join(END_S)
        assert not self.is_alive(), "a get hangs"
        assert self.problems == [], f"KVSTORE_TEST_SEED={SEED}"
        assert self.remote > 10 and self.longest_s < GET_S, (self.gets, self.remote, self.longest_s)


class Faults:
    """What happens to nodes a and b, and to etcd; c reads."""

    def __init__(self, pool: Pool, etcd: Etcd) -> None:
        self._pool = pool
        self._etcd = etcd

    def data_server_is_killed(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):  # one that was killed is found until it has let go of its file
            os.kill(self._pool.data_server(name), signal.SIGKILL)
        time.sleep(0.3)

    def data_server_stops(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError), stopped(self._pool.data_server(name)):
            time.sleep(1.0)

    def daemon_stops(self, name: str) -> None:
        self._pool.daemons[name].stop()
        time.sleep(1.0)
        self._pool.daemons[name].resume()

    def daemon_is_killed(self, name: str) -> None:
        self._pool.daemons[name].kill()
        time.sleep(0.5)
        self._pool.daemons[name] = self._pool.machine.serve(name)

    def etcd_member_stops(self, name: str) -> None:
        member = self._etcd.members["ab".index(name)]
        member.pause()
        time.sleep(1.0)
        member.resume()

    def etcd_member_is_killed(self, name: str) -> None:
        number = "ab".index(name)
        self._etcd.members[number].kill()
        time.sleep(0.3)
        self._etcd.restart(number)
        self._etcd.members[number].wait_serving()


@pytest.fixture
def etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Etcd]:
    servers = Etcd(tmp_path / "etcd", members=request.param)
    yield servers
    servers.close()


@pytest.fixture
def pool(machine: Machine, etcd: Etcd) -> Pool:
    """All chains are stored, and c finds them."""
    made = Pool(machine, "etcd://" + ",".join(etcd.endpoints), catalog_ttl_s=str(TTL_S))
    for name, seeds in CHAINS.items():
        for seed in (*seeds, BOTH[name]):
            put(made.stores[name], seed, PAGES)
    for seed in (*CHAINS["a"], *CHAINS["b"]):
        made.known("c", seed)
    return made


@pytest.fixture
def beacon() -> Iterator[Beacon]:
    with Beacon(threads=True) as seen:
        yield seen


def all_is_there(pool: Pool) -> None:
    """The pool is well, no page was lost, and each is read from everywhere."""
    document = pool.well(WELL_S)
    assert [each["node"] for each in document["nodes"]] == ["a", "b", "c"]
    for name, seeds in CHAINS.items():
        check_pages(pool.stores[name], dict.fromkeys((*seeds, BOTH[name]), PAGES))
        for seed in seeds:
            wait_until(f"chain {seed} is there again", lambda seed=seed: pool.get("c", seed).pages == PAGES, WELL_S)


@pytest.mark.parametrize("etcd", [3], indirect=True, ids=["three-members"])
def test_gets_go_on(pool: Pool, etcd: Etcd, beacon: Beacon) -> None:
    faults, chance = Faults(pool, etcd), random.Random(SEED)
    kinds = [getattr(faults, name) for name in sorted(vars(Faults)) if not name.startswith("_")]
    readers = [Reader(pool.stores["c"], SEED + i, beacon) for i in range(2)]
    for reader in readers:
        reader.start()
    until_s = time.monotonic() + FAULTS_S
    try:
        while time.monotonic() < until_s and not any(reader.problems for reader in readers):
            name = chance.choice("ab")
            wait_until(f"{name} has a data server", lambda name=name: pool.has_data_server(name), WELL_S)
            chance.choice(kinds)(name)
    finally:
        for reader in readers:
            reader.ending.set()
    for reader in readers:
        reader.finish()
    all_is_there(pool)


@pytest.mark.parametrize("etcd", [1], indirect=True, ids=["one-member"])
def test_all_of_etcd_is_away(pool: Pool, etcd: Etcd, beacon: Beacon, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than sessions live: whoever was known is read from as before, and all come back by themselves."""
    patient(monkeypatch)
    reader = Reader(pool.stores["c"], SEED, beacon)
    views = {name: PeersFile(pool.machine.folder(name)) for name in "abc"}

    def unheard() -> bool:
        told = [view.look() for view in views.values()]
        return all(each is not None and boot_s() - each.heard_s > 2 * TTL_S for each in told)

    reader.start()
    etcd.members[0].kill()
    wait_until("sessions are over", unheard, WELL_S)
    assert all(len(view.look().peers) == 3 for view in views.values())  # type: ignore[union-attr]
    wait_until("it reads on", lambda seen=reader.gets: reader.gets > seen + 20, WELL_S)
    etcd.restart()
    wait_until("all were heard of", lambda: not unheard(), WELL_S)
    reader.finish()
    assert reader.short == 0, "live pages stay readable"
    all_is_there(pool)
