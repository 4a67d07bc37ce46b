"""Links between machines that are cut and healed, both ways and one way: three nodes and a real etcd, each on a machine
with an address of its own, and TLS between them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Match
from kvstore.cluster.peer_links import PeersFile
from tests.helpers.api import Certificates, identities_file
from tests.helpers.beacon import Beacon
from tests.helpers.etcd import Etcd
from tests.helpers.network import FarMachine, Network, why_not
from tests.helpers.pool import PAGES, Pool
from tests.helpers.processes import put, wait_until

CHAINS = {"a": (1, 3, 4), "b": (3, 4, 5)}
GET_S = 1.0  # for a get, less the time for which a beacon saw the machine or this process stand still
HEALED_S = 90.0
UNHEARD_S = 4.0  # more than two seconds after it was last heard an owner is unsure of a node; the machine may be slow


class FarPool(Pool):
    """Whoever asks does so from their own machine."""

    network: Network
    beacon: Beacon

    def got(self, name: str, seed: int) -> int:
        """Pages that a program beside that node reads; right ones, and in time."""

        def timed() -> tuple[Match, float]:
            began_s = time.monotonic()
            match = self.get(name, seed)
            ended_s = time.monotonic()
            return match, ended_s - began_s - self.beacon.stall_s(began_s, ended_s)

        match, took_s = self.network.inside(name).submit(timed).result(60)
        assert took_s < GET_S, f"{name}: chain {seed} took {took_s:.1f} s"
        return match.pages

    def reads(self, name: str, *seeds: int) -> None:
        """Wait until that is so, and all of it."""
        for seed in seeds:
            wait_until(f"{name} reads chain {seed}", lambda seed=seed: self.got(name, seed) == PAGES, HEALED_S)

    def loses(self, name: str, seed: int) -> None:
        """What was kept of it here is the last there is."""

        def gone() -> bool:
            self.stores[name].evict(pages=1 << 20)
            return self.got(name, seed) == 0

        wait_until(f"{name} has nothing of chain {seed}", gone, HEALED_S)

    def members(self, name: str) -> set[str]:
        """Who there is, as that node knows."""
        view = PeersFile(self.machine.folder(name)).look()
        return set(view.peers) if view is not None else set()


ETCD = ("etcd",)
THREE = ("etcd", "etcd2", "etcd3")


@pytest.fixture(params=[ETCD])
def etcds(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The machines of etcd's members."""
    machines: tuple[str, ...] = request.param
    return machines


@pytest.fixture
def network(etcds: tuple[str, ...]) -> Iterator[Network]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made = Network(("a", "b", "c", *etcds))
    yield made
    made.close()


@pytest.fixture
def beacon() -> Iterator[Beacon]:
    with Beacon(threads=True) as seen:
        yield seen


@pytest.fixture
def pool(
    network: Network, etcds: tuple[str, ...], beacon: Beacon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FarPool]:
    (tmp_path / "tls").mkdir()
    certificates = Certificates(tmp_path / "tls", addresses=tuple(map(network.address, "abc")))
    ours = {"KVSTORE_TOKEN": "op-token", "KVSTORE_TLS_CA": certificates.path("ca.pem")}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    etcd = Etcd(tmp_path / "etcd", places=[(network.address(each), network.enter(each)) for each in etcds])
    machine = FarMachine(
        tmp_path,
        network,
        "c",
        ours,
        tls_cert=certificates.path("server.pem"),
        tls_key=certificates.path("server.key"),
        identities=identities_file(tmp_path),
        catalog_ttl_s="2",
    )
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(machine.shm_dir))
    try:
        made = FarPool(machine, "etcd://" + ",".join(etcd.endpoints))
        made.network, made.beacon = network, beacon
        for name, seeds in CHAINS.items():
            for seed in seeds:
                put(made.stores[name], seed, PAGES)
        made.reads("c", 1, 3, 4, 5)
        yield made
    finally:
        machine.close()
        etcd.close()


def test_links_are_cut_and_healed(pool: FarPool, network: Network) -> None:
    cut_both_ways(pool, network)
    cut_one_way(pool, network)


def cut_both_ways(pool: FarPool, network: Network) -> None:
    """b has no link."""
    network.cut("b")
    pool.loses("c", 5)
    assert pool.got("c", 1) == PAGES and pool.got("a", 3) == PAGES
    pool.reads("c", 3, 4)
    assert pool.got("b", 5) == PAGES, "a node that is alone goes on"
    put(pool.stores["b"], 6, PAGES)
    wait_until("b is missed", lambda: pool.members("c") == {"a", "c"}, HEALED_S)
    assert pool.members("b") == {"a", "b", "c"}, "it knows whom it knew"
    assert pool.got("b", 6) == PAGES and pool.got("b", 1) == 0
    network.heal("b")
    pool.well(HEALED_S)
    pool.reads("c", 1, 3, 4, 5, 6)


def test_an_owner_that_is_not_told_says_so(pool: FarPool, network: Network) -> None:
    """What a sends b is lost; both live, as the catalog knows. c finds and reads all that a has stored since."""
    network.lose("a", "b")
    seeds = range(20, 32)
    for seed in seeds:
        put(pool.stores["a"], seed, PAGES)
    time.sleep(UNHEARD_S)
    assert pool.members("c") == {"a", "b", "c"}
    found = {seed: pool.network.inside("c").submit(pool.lookup, "c", seed).result(60).pages for seed in seeds}
    assert found == dict.fromkeys(seeds, PAGES)
    assert [pool.got("c", seed) for seed in seeds] == [PAGES] * len(seeds)
    network.find("a", "b")
    pool.well(HEALED_S)


def cut_one_way(pool: FarPool, network: Network) -> None:
    """From c to b; then from b to etcd, while b's data server is reached as ever."""
    network.lose("c", "b")
    pool.loses("c", 5)
    assert pool.got("c", 1) == PAGES and pool.got("a", 5) == PAGES, "others are not touched"
    pool.reads("c", 3, 4)
    assert pool.members("a") == pool.members("c") == {"a", "b", "c"}, "it lives, as the catalog knows"
    network.find("c", "b")
    pool.reads("c", 5)
    network.lose("b", "etcd")
    wait_until("b is missed", lambda: pool.members("a") == {"a", "c"}, HEALED_S)
    put(pool.stores["b"], 7, PAGES)
    assert pool.got("b", 1) == PAGES, "it thinks itself a member, and reads"
    assert pool.got("c", 1) == PAGES and pool.got("a", 3) == PAGES
    network.find("b", "etcd")
    pool.well(HEALED_S)
    pool.stores["c"].evict(pages=1 << 20)
    pool.reads("c", 1, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("etcds", [THREE], indirect=True)
def test_etcd_is_split(pool: FarPool, network: Network) -> None:
    """One of three members has no link to the others. Nodes that reach all of them stay; so do those that reach just
    the two. A node that reaches the lonely one alone is missed, goes on, and comes back."""
    alone, others = THREE[0], THREE[1:]
    between = [(alone, other) for other in others] + [(other, alone) for other in others]
    for pair in between:
        network.lose(*pair)
    for other in others:  # b is on the lonely member's side, a on that of the two; c reaches all
        network.lose("b", other)
    network.lose("a", alone)
    wait_until("b is missed", lambda: pool.members("a") == pool.members("c") == {"a", "c"}, HEALED_S)
    assert pool.members("b") == {"a", "b", "c"}, "it knows whom it knew"
    put(pool.stores["a"], 8, PAGES)
    put(pool.stores["b"], 9, PAGES)
    pool.reads("c", 8)
    assert pool.got("b", 9) == PAGES and pool.got("b", 1) == PAGES and pool.got("c", 1) == PAGES
    for other in others:
        network.find("b", other)
    network.find("a", alone)
    wait_until("b is back, by way of the two", lambda: pool.members("a") == {"a", "b", "c"}, HEALED_S)
    pool.reads("c", 9)
    for pair in between:
        network.find(*pair)
    pool.well(HEALED_S)
    pool.reads("a", 1, 3, 4, 5, 8, 9)
