"""What every transport keeps to, whatever brings the bytes: see ``cluster.transport``.

    memory   the handlers of a data server, called in this process
    lent     pages that are lent, read by an agent that copies late and in the wrong order, in this process
    unix, tcp, tls   a data connection to a process of its own
    nixl     pages that are lent, read by NIXL from a process of its own

Layers that are sent as they become ready are no READ: ``tests/engine`` has them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Store
from kvstore.client.local.node import LocalNode
from kvstore.cluster import nixl
from kvstore.cluster.data_connection import DialCredentials
from kvstore.cluster.nixl import CHUNK_BYTES, CHUNKS_MAX, NixlTransport
from kvstore.cluster.peer_links import PeerLinks, PoolNode
from kvstore.cluster.transport import CHECKSUM, LateBytes, PullResult, TcpTransport, Transport
from kvstore.errors import KVStoreError, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import FrameClass, Tier
from kvstore.node.cluster import page_handlers
from kvstore.wire.data import ChainQuery, ReadRequest
from tests.helpers.api import Certificates
from tests.helpers.content import LARGE, MLA, SMALL, Pages, chain, contents, first_wrong
from tests.helpers.memory_transport import MemoryAgent, MemoryLinks, MemoryOwner
from tests.helpers.processes import Machine, Worker, put, stopped
from tests.helpers.workers import serving

WAYS = ("memory", "lent", "unix", "tcp", "tls", "nixl")
LATE_S = 30.0
GONE_S = 10.0  # far more than the loss of an owner may cost


class Owner:
    """Who has the pages, and the transport that brings them."""

    def __init__(self, way: str, machine: Machine, folder: Path) -> None:
        self.way = way
        self.open = True
        self.machine = machine
        self.armed = folder / f"armed-{way}"
        self.worker: Worker | None = None
        self.peer = PoolNode("n", "process", "", ())
        self.node: LocalNode | None = None
        credentials = DialCredentials()
        if way in ("memory", "lent"):
            self.node = LocalNode(machine.folder("n"), timeout_s=LATE_S)
            self.memory = MemoryOwner(serving.handlers(self.node, lambda: MemoryAgent("owner")))
            links: Any = MemoryLinks(self.memory)
        else:
            files = Certificates(folder) if way == "tls" else None
            names = [str(files.path(name)) for name in ("server.pem", "server.key")] if files is not None else []
            told = {"folder": str(machine.folder("n")), "way": way, "socket": str(folder / "socket"), "files": names}
            command = [sys.executable, "-m", "tests.helpers.workers.serving"]
            self.worker = machine.start(Worker, "serving", [*command, json.dumps({**told, "armed": str(self.armed)})])
            found = self.worker.wait_for("serves")
            self.peer = PoolNode("n", found["process"], "", (found["address"],), tls=way == "tls")
            if files is not None:
                credentials = DialCredentials(ca=str(files.path("ca.pem")))
            links = PeerLinks("", "test", credentials)
        self.links = links
        self.agents: list[MemoryAgent] = []
        self.transport: Transport = self._transport()

    def _transport(self) -> Transport:
        if self.way == "lent":
            return NixlTransport(self.links, self._agent)  # type: ignore[arg-type]
        return NixlTransport(self.links) if self.way == "nixl" else TcpTransport(self.links)

    def _agent(self, name: str) -> MemoryAgent:
        self.agents.append(MemoryAgent(name))
        return self.agents[-1]

    def read(
        self,
        keys: Keys,
        layout: Layout = SMALL,
        part: tuple[int, int] | None = None,
        rows: Pages | None = None,
        silence_s: float = LATE_S,
        held: Any = None,
    ) -> tuple[PullResult, Pages]:
        offset, length = part or (0, layout.page_bytes)
        into = np.zeros((len(keys), length), np.uint8) if rows is None else rows
        request = ReadRequest(chain_of(layout), keys, offset, length)
        found = self.transport.read(self.peer, request, into, time.monotonic() + LATE_S, silence_s, held)
        return found, into

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self.transport.close()
        self.links.close()
        if self.worker is not None:
            self.worker.kill()
        if self.node is not None:
            self.node.close()


def chain_of(layout: Layout) -> ChainQuery:
    shape = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
    return ChainQuery(layout.fingerprint, "", "", shape, layout.attention == "full")


@pytest.fixture(scope="module")
def machine_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One node for all tests of this file: they put pages of their own."""
    here = Machine(tmp_path_factory.mktemp("machine"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_SHM_DIR", str(here.shm_dir))
        config = here.logs / "node.toml"  # a page that a test damages for a moment is found by reads alone
        config.write_text("[node]\nscrub_bytes_per_s = 0\n")
        here.serve("n", dram="128MiB", config=str(config))
        try:
            yield here
        finally:
            here.close()


@pytest.fixture(scope="module")
def store(machine_of_all: Machine) -> Store:
    return machine_of_all.connect("n")


@pytest.fixture(scope="module")
def owners(machine_of_all: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Owner]]:
    made: dict[str, Owner] = {}

    def owner_of(way: str) -> Owner:
        if way not in made or not made[way].open:
            made[way] = Owner(way, machine_of_all, tmp_path_factory.mktemp(way))
        return made[way]

    yield owner_of
    for each in made.values():
        each.close()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    found = str(request.param)
    if found == "nixl" and nixl.missing():
        pytest.skip(f"nixl: {nixl.missing()}; pip install --no-deps nixl-cu12 (69 MB) for this test")
    return found


@pytest.fixture
def owner(way: str, owners: Callable[[str], Owner]) -> Owner:
    return owners(way)


@pytest.fixture
def lost(way: str, owners: Callable[[str], Owner]) -> Iterator[Owner]:
    """One that is lost in the test."""
    found = owners(way)
    yield found
    found.close()


seeds = iter(range(1, 1 << 20))


@pytest.mark.parametrize("layout", [SMALL, LARGE, MLA], ids=lambda layout: layout.model)
def test_bytes_are_right_whole_pages_and_parts(owner: Owner, store: Store, layout: Layout) -> None:
    """Whole pages, layers, and ranges of no layer; a tail that is not there, and a beginning that was not asked for."""
    seed = next(seeds)
    keys, want = chain(seed, 24, layout), contents(chain(seed, 24, layout), layout)
    put(store, seed, 20, layout)
    layer = layout.layer_bytes
    for first, length in [(0, layout.page_bytes), (layer, 2 * layer), (3, 5), (layer - 1, layer)]:
        found, rows = owner.read(keys, layout, (first, length))
        assert (found.pages, found.reason, found.tiers) == (20, "absent", {Tier.DRAM: 20})
        assert first_wrong(rows[:20], want[:20, first : first + length]) == ""
        assert not rows[20:].any()
    found, rows = owner.read(keys[5:20], layout)
    assert (found.pages, found.reason) == (15, "") and first_wrong(rows, want[5:20]) == ""


def test_places_may_lie_anywhere(owner: Owner, store: Store) -> None:
    seed = next(seeds)
    put(store, seed, 10)
    keys = chain(seed, 10)
    memory = np.zeros((20, SMALL.page_bytes), np.uint8)
    owner.read(keys, rows=[memory[2 * page + 1] for page in range(10)])  # type: ignore[arg-type]
    assert first_wrong(np.ascontiguousarray(memory[1::2]), contents(keys)) == "" and not memory[::2].any()


def test_what_is_not_there_is_a_miss(owner: Owner, store: Store) -> None:
    found, rows = owner.read(chain(next(seeds), 5))
    assert (found.pages, found.reason, found.tiers) == (0, "absent", {}) and not rows.any()


def test_a_flipped_bit_is_found_by_the_checksum_of_its_layer(owner: Owner, store: Store) -> None:
    seed = next(seeds)
    put(store, seed, 12)
    keys = chain(seed, 12)
    store.verify()  # which stamps
    node = LocalNode(owner.machine.folder("n"))
    try:
        mapped = node.writable()
        address = mapped.index.find(Tier.DRAM, mapped.in_pool(keys).hashes[7])
        assert address is not None
        extent = mapped.dram.extent(address.extent)
        assert extent is not None
        extent.pages[address.frame, SMALL.layer_bytes + 3] ^= 1
        found, rows = owner.read(keys)
        assert (found.pages, found.reason) == (7, CHECKSUM) and first_wrong(rows[:7], contents(keys)[:7]) == ""
        assert owner.read(keys, part=(0, SMALL.layer_bytes))[0].pages == 12, "that layer is sound"
        extent.pages[address.frame, SMALL.layer_bytes + 3] ^= 1
        assert owner.read(keys)[0].pages == 12
    finally:
        node.close()


def test_pages_that_change_while_they_are_sent_do_not_count(
    owner: Owner, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = next(seeds)
    put(store, seed, 12)
    keys = chain(seed, 12)
    assert owner.read(keys)[0].pages == 12
    with monkeypatch.context() as patch:
        if owner.node is not None:
            for name in ("pack_range", "pack_lent"):
                patch.setattr(page_handlers, name, getattr(page_handlers, name))  # put back afterwards
            serving.lose_when_armed(owner.node, owner.armed)
        owner.armed.touch()
        found, _ = owner.read(keys)
    assert (found.pages, found.reason) == (0, "generation")
    assert owner.read(keys)[0].reason == "absent"


def test_an_owner_that_was_killed_costs_a_moment(lost: Owner, store: Store) -> None:
    seed = next(seeds)
    put(store, seed, 12)
    assert lost.read(chain(seed, 12))[0].pages == 12
    if lost.worker is not None:
        lost.worker.kill()
    else:
        lost.memory.killed = True
    for _ in range(3):
        began_s = time.monotonic()
        with pytest.raises(KVStoreError):
            lost.read(chain(seed, 12), silence_s=0.3)
        assert time.monotonic() - began_s < GONE_S


def test_an_owner_that_stands_still_costs_the_silence_and_nothing_lands_later(lost: Owner, store: Store) -> None:
    """Not even when it goes on: what a failed read was to bring is nobody's."""
    seed = next(seeds)
    put(store, seed, 30, LARGE)
    keys, rows = chain(seed, 30, LARGE), np.zeros((30, LARGE.page_bytes), np.uint8)
    assert lost.read(keys, LARGE)[0].pages == 30
    if lost.worker is None:
        lost.memory.stopped = True
        with pytest.raises(Unavailable):
            lost.read(keys, LARGE, rows=rows, silence_s=0.3)
        lost.memory.stopped = False
    else:
        with stopped(lost.worker.pid):
            began_s = time.monotonic()
            with pytest.raises(Unavailable):
                lost.read(keys, LARGE, rows=rows, silence_s=0.3)
            assert time.monotonic() - began_s < GONE_S
    seen = rows.copy()
    lost.links.close()
    lost.links = lost.links if lost.worker is None else PeerLinks("", "test", lost.links._credentials)
    lost.transport._links = lost.links  # type: ignore[attr-defined]
    assert lost.read(keys, LARGE)[0].pages == 30, "it has gone on"
    assert (rows == seen).all()


def test_memory_of_a_read_is_bounded(owner: Owner, store: Store) -> None:
    """Beside the places, whose memory is there already."""
    store.evict(pages=1 << 20)
    seed, pages = next(seeds), 160
    put(store, seed, pages, LARGE)
    keys, rows = chain(seed, pages, LARGE), np.ones((pages, LARGE.page_bytes), np.uint8)
    if owner.way == "memory":  # the reply is made in this process, and is all there
        assert owner.read(keys, LARGE, rows=rows)[0].pages == pages
        return
    owner.read(keys[:1], LARGE)
    before = private_bytes()
    assert owner.read(keys, LARGE, rows=rows)[0].pages == pages
    assert first_wrong(rows, contents(keys, LARGE)) == ""
    assert private_bytes() - before < rows.nbytes / 2
    for agent in owner.agents:
        assert agent.under_way_bytes_max <= CHUNKS_MAX * CHUNK_BYTES


def private_bytes() -> int:
    status = Path(f"/proc/{os.getpid()}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


# --- bytes that may come late: transports that read one-sidedly ------------------------------------------------------


class Frames:
    """Places that somebody holds; ``left`` and ``landed`` say what was heard of them."""

    def __init__(self, pages: int) -> None:
        self.rows = np.zeros((pages, LARGE.page_bytes), np.uint8)
        self.left = self.landed = 0

    def leave(self) -> Callable[[], None]:
        self.left += 1
        return self.land

    def land(self) -> None:
        self.landed += 1


@pytest.fixture
def lender(owners: Callable[[str], Owner]) -> Iterator[Owner]:
    """One whose agent has read nothing yet."""
    owners("lent").close()
    found = owners("lent")
    yield found
    found.close()


def transport_of(owner: Owner) -> NixlTransport:
    assert isinstance(owner.transport, NixlTransport)
    return owner.transport


@pytest.mark.parametrize("fails", [False, True])
def test_frames_in_which_bytes_may_land_late_are_left(lender: Owner, store: Store, fails: bool) -> None:
    """Until the read has ended; for ever where nobody can say that it has."""
    seed = next(seeds)
    put(store, seed, 40, LARGE)
    keys, frames, more = chain(seed, 40, LARGE), Frames(40), Frames(40)
    assert lender.read(keys, LARGE, rows=frames.rows, held=frames)[0].pages == 40
    assert first_wrong(frames.rows, contents(keys, LARGE)) == "" and not frames.left
    (agent,) = lender.agents
    agent.late, agent.fails = not fails, fails
    with pytest.raises(LateBytes):
        lender.read(keys, LARGE, rows=more.rows, silence_s=0.1, held=more)
    assert (more.left, more.landed) == (1, 0) and transport_of(lender).late_bytes == CHUNKS_MAX * CHUNK_BYTES
    agent.late, others = False, Frames(40)
    if fails:
        with pytest.raises(LateBytes):
            lender.read(keys, LARGE, rows=others.rows, silence_s=0.1, held=others)
        agent.fails = False
    for _ in range(40):  # one look is one page
        assert lender.read(keys, LARGE, rows=frames.rows, held=frames)[0].pages == 40
    assert (more.left, more.landed) == (1, 1), "told once, when all had landed"
    assert transport_of(lender).late_bytes == 0 and not frames.left


def test_a_callers_buffer_never_gets_late_bytes(lender: Owner, store: Store) -> None:
    seed = next(seeds)
    put(store, seed, 40, LARGE)
    keys, rows = chain(seed, 40, LARGE), np.zeros((40, LARGE.page_bytes), np.uint8)
    assert lender.read(keys[:1], LARGE)[0].pages == 1
    (agent,) = lender.agents
    agent.late = True
    with pytest.raises(Unavailable):
        lender.read(keys, LARGE, rows=rows, silence_s=0.1)
    agent.late = False
    for _ in range(20):
        assert lender.read(keys, LARGE)[0].pages == 40
    assert not rows.any() and transport_of(lender).late_bytes == 0


def test_a_transport_with_too_many_late_bytes_reads_no_more(lender: Owner, store: Store) -> None:
    seed = next(seeds)
    put(store, seed, 40, LARGE)
    keys = chain(seed, 40, LARGE)
    assert lender.read(keys, LARGE)[0].pages == 40
    (agent,) = lender.agents
    agent.fails = True
    for _ in range(40):
        with pytest.raises(Unavailable) as told:
            lender.read(keys, LARGE, silence_s=0.05)
    assert "in use" in str(told.value) or "late bytes may still" in str(told.value)


def test_pages_that_are_lent_are_given_back(lender: Owner, store: Store) -> None:
    seed = next(seeds)
    put(store, seed, 20)
    assert lender.read(chain(seed, 20))[0].pages == 20
    assert store.stats()["leases"] == 0
