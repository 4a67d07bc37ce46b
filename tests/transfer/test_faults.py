"""Gets go on while nodes and data servers are killed and stopped: no wrong byte, none hangs, and all is well after.

Real processes under one seed: ``KVSTORE_TEST_SEED``. ``KVSTORE_TEST_FAULTS_S`` says for how long.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np

from kvstore import Store
from tests.helpers.content import SMALL, chain, contents, first_wrong, prompt
from tests.helpers.pool import PAGES, Pool
from tests.helpers.processes import Machine, check_laws, put, stopped, wait_until

FAULTS_S = float(os.environ.get("KVSTORE_TEST_FAULTS_S", "8"))
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
GET_S = 15.0  # far above what a get may take: a second where a peer is lost, and this machine may be slow
WELL_S = 90.0
CHAINS = {"a": (1, 2, 3), "b": (4, 5, 6)}  # by the node that has them; 3 and 4 are on both


class Reader(threading.Thread):
    """Gets chains at random until it is told to end."""

    def __init__(self, store: Store, seed: int) -> None:
        super().__init__(daemon=True)
        self.ending = threading.Event()
        self.problems: list[str] = []
        self.gets = self.remote = 0
        self.longest_s = 0.0
        self._store = store
        self._chance = random.Random(seed)

    def run(self) -> None:
        cache, out = self._store.cache(SMALL), np.zeros((PAGES, SMALL.page_bytes), np.uint8)
        while not self.ending.is_set() and not self.problems:
            seed = self._chance.choice([*CHAINS["a"], *CHAINS["b"]])
            began_s = time.monotonic()
            match = cache.get(prompt(seed, PAGES), out)
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            wrong = first_wrong(out[: match.pages], contents(chain(seed, PAGES))[: match.pages])
            if wrong:
                self.problems.append(f"chain {seed}: {wrong}")
            self.gets, self.remote = self.gets + 1, self.remote + bool(match.nodes)
            if match.pages and not match.nodes:  # it was kept here: let it be read from elsewhere again
                self._store.evict(pages=1 << 20)


class Faults:
    """What happens to nodes a and b; c reads."""

    def __init__(self, pool: Pool, catalog: str) -> None:
        self._pool = pool
        self._catalog = catalog

    def data_server_is_killed(self, name: str) -> None:
        os.kill(self._pool.data_server(name), signal.SIGKILL)
        time.sleep(0.3)

    def data_server_stops(self, name: str) -> None:
        with stopped(self._pool.data_server(name)):
            time.sleep(1.0)

    def daemon_stops(self, name: str) -> None:
        self._pool.daemons[name].stop()
        time.sleep(1.0)
        self._pool.daemons[name].resume()

    def daemon_is_killed(self, name: str) -> None:
        self._pool.daemons[name].kill()
        time.sleep(0.5)
        self._pool.daemons[name] = self._pool.machine.serve(name, dram="32MiB", catalog=self._catalog)


def test_gets_go_on(machine: Machine, tmp_path: Path) -> None:
    catalog = f"file:{tmp_path / 'catalog'}"
    pool = Pool(machine, catalog)
    for name, seeds in CHAINS.items():
        for seed in seeds:
            put(pool.stores[name], seed, PAGES)
    put(pool.stores["b"], 3, PAGES)
    put(pool.stores["a"], 4, PAGES)
    for seed in (*CHAINS["a"], *CHAINS["b"]):
        pool.known("c", seed)
    faults, chance = Faults(pool, catalog), random.Random(SEED)
    kinds = [faults.data_server_is_killed, faults.data_server_stops, faults.daemon_stops, faults.daemon_is_killed]
    readers = [Reader(pool.stores["c"], SEED + i) for i in range(2)]
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
            reader.join(GET_S)
    for reader in readers:
        assert not reader.is_alive(), "a get hangs"
        assert reader.problems == [], f"KVSTORE_TEST_SEED={SEED}"
        assert reader.remote > 10 and reader.longest_s < GET_S, (reader.gets, reader.remote, reader.longest_s)
    for seed in (*CHAINS["a"], *CHAINS["b"]):
        wait_until(f"chain {seed} is there again", lambda seed=seed: pool.get("c", seed).pages == PAGES, WELL_S)
    for name in "abc":
        check_laws(pool.stores[name])
