"""A tier more is a class and a row for the node, and a class and a row for its clients: pages go down to it, are found,
read and proven there, and come up again."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.local import node as lower_tiers
from kvstore.config import NodeConfig, NvmeTarget
from kvstore.model.replica import Address, FrameClass, Status, Tier
from kvstore.node import startup
from kvstore.node.node import Node
from kvstore.node.relay import Relay
from kvstore.node.tier_mover import Mover
from kvstore.state import events as ev
from kvstore.state.interfaces import TieringRules
from kvstore.tier.nvme import frame_header
from kvstore.tier.nvme.disk import aligned_buffer
from kvstore.tier.nvme.frame_header import FrameHeader
from tests.helpers.inside import node_of
from tests.helpers.memory_reader import MemoryReader
from tests.helpers.memory_store import MemoryStore
from tests.helpers.processes import wait_until
from tests.helpers.worlds.world import Chain, root_of

FAR = Tier.HBM  # the one name of a tier that no store has yet; here it is the lowest
SMALL = FrameClass(page_bytes=8000, page_tokens=2, layers=4)
EXTENT_BYTES = 1 << 20
A = 1
CHAIN = Chain(SMALL, (1, 2, 3, 4, 5, 6))


class Pool:
    """A node of three tiers, without threads."""

    def __init__(self, node: Node, far: MemoryStore) -> None:
        self.node = node
        self.far = far
        self.mover, self.relay = Mover(node), Relay(node)

    def where(self, tier: Tier, key: bytes) -> Address | None:
        """What the index says."""
        found = self.node.contents.look(tier, [key])
        assert found is not None
        return found[0]

    def pages(self, tier: Tier) -> int:
        """Stored there."""
        return sum(extent.sealed for extent in self.node.state.spaces[tier].segment.extents.values())

    def settle(self) -> None:
        """Whatever was decided is carried out."""
        while self.mover.step() | self.relay.step():
            pass
        assert self.node.verify() == []

    def put(self, chain: Chain, data: np.ndarray) -> None:
        """As a client does."""
        count, now_ns = len(chain.keys), time.monotonic_ns
        addresses = self.node.handle(ev.Grant(now_ns(), A, SMALL, count)).addresses
        for page, address in zip(data, addresses, strict=True):
            contents = self.node.contents
            contents.page(contents.extents[address.extent], address.frame)[:] = page
        sealed = self.node.handle(ev.SealGranted(now_ns(), A, SMALL, root_of(SMALL), addresses, chain.rows))
        assert sealed.statuses == [Status.OK] * count

    def leaves(self, tier: Tier, chain: Chain) -> None:
        """An operator has these pages leave that tier."""
        addresses = [address for key in reversed(chain.keys) if (address := self.where(tier, key)) is not None]
        reply = self.node.handle(ev.EvictChosen(time.monotonic_ns(), addresses))
        assert len(reply.detail["gone"]) == len(addresses) > 0, reply.detail

    def prefetch(self, tier: Tier, chain: Chain) -> list[int]:
        """Somebody wants these pages one tier further up."""
        addresses = [address for key in chain.keys if (address := self.where(tier, key)) is not None]
        return self.node.handle(ev.Prefetch(time.monotonic_ns(), A, addresses)).statuses


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvtest-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def pool(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    far = MemoryStore(FAR, 77, EXTENT_BYTES, 4)
    row = startup.LowerTier(lambda *_: far, lambda _: TieringRules(demote_at=0.0, promote_after=1))
    monkeypatch.setitem(startup.LOWER_TIERS, FAR, row)
    target = NvmeTarget(tmp_path / "nvme", 8 << 20)
    node = Node.start(NodeConfig(name="n", shm_dir=shm_dir, dram=4 << 20, nvme=(target,), demote_at=0.0))
    while node.populate_next():
        pass
    pool = Pool(node, far)
    yield pool
    pool.node.stop(remove=True)


@pytest.fixture
def store(tmp_path: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvstore.Store]:
    """An embedded store of three tiers, whose pages are saved in all of them as soon as they are sealed."""
    far = MemoryStore(FAR, 77, EXTENT_BYTES, 4)
    row = startup.LowerTier(lambda *_: far, lambda _: TieringRules(demote_at=0.0, promote_after=100))
    monkeypatch.setitem(startup.LOWER_TIERS, FAR, row)
    monkeypatch.setitem(lower_tiers.LOWER_READERS, FAR, lambda folder, _: MemoryReader(far, folder))
    nvme = f"{tmp_path / 'nvme'}:8MiB"
    with kvstore.open(dram="4MiB", nvme=nvme, shm_dir=shm_dir, demote_at=0.0, promote_after=100) as store:
        yield store


def test_pages_go_down_to_the_third_tier_and_come_up_again(pool: Pool) -> None:
    data = np.random.default_rng(1).integers(0, 256, (len(CHAIN.keys), SMALL.page_bytes), np.uint8)
    pool.put(CHAIN, data)
    pool.settle()
    assert [pool.pages(tier) for tier in (Tier.DRAM, Tier.NVME, FAR)] == [6, 6, 6]
    for page, key in zip(data, CHAIN.keys, strict=True):
        address = pool.where(FAR, key)
        assert address is not None
        position = pool.node.contents.extents[address.extent].position
        header, found = aligned_buffer(pool.far.header_bytes(SMALL)), aligned_buffer(SMALL.frame_bytes)
        pool.far.read_page(position, address.frame, SMALL, header, found)
        proof = frame_header.unpack(header, SMALL, pool.far.incarnation, *address)
        assert isinstance(proof, FrameHeader) and proof.key == key
        assert frame_header.is_payload_sound(found, SMALL, proof.payload_sum)
        assert (found[: SMALL.page_bytes] == page).all()
    pool.leaves(Tier.DRAM, CHAIN)
    pool.leaves(Tier.NVME, CHAIN)
    pool.settle()
    assert [pool.pages(tier) for tier in (Tier.DRAM, Tier.NVME, FAR)] == [0, 0, 6]
    for tier, above in ((FAR, Tier.NVME), (Tier.NVME, Tier.DRAM)):
        assert pool.prefetch(tier, CHAIN) == [Status.BUSY] * 6
        pool.settle()
        assert pool.pages(above) == 6
    for page, key in zip(data, CHAIN.keys, strict=True):
        address = pool.where(Tier.DRAM, key)
        assert address is not None
        contents = pool.node.contents
        assert (contents.page(contents.extents[address.extent], address.frame) == page).all()


def test_a_damaged_page_of_the_third_tier_is_dropped_and_not_promoted(pool: Pool) -> None:
    pool.put(CHAIN, np.zeros((len(CHAIN.keys), SMALL.page_bytes), np.uint8))
    pool.settle()
    pool.leaves(Tier.DRAM, CHAIN)
    pool.leaves(Tier.NVME, CHAIN)
    address = pool.where(FAR, CHAIN.keys[3])
    assert address is not None
    _, page = pool.far.pages[pool.node.contents.extents[address.extent].position, address.frame]
    page[100] ^= 1
    pool.prefetch(FAR, CHAIN)
    pool.settle()
    assert [pool.pages(tier) for tier in (Tier.NVME, FAR)] == [3, 3]


def test_a_daemon_that_starts_again_knows_nothing_of_another_stores_pages(pool: Pool) -> None:
    pool.put(CHAIN, np.zeros((len(CHAIN.keys), SMALL.page_bytes), np.uint8))
    pool.settle()
    pool.node.stop()
    pool.far.incarnation += 1
    pool.far.carved.clear()
    pool.node = Node.start(pool.node.config)
    assert pool.node.verify() == []
    assert [pool.pages(tier) for tier in (Tier.DRAM, Tier.NVME, FAR)] == [6, 6, 0]


# --- what clients read ------------------------------------------------------------------------------------------------

LAYOUT = kvstore.Layout(model="m", layers=4, kv_heads=2, head_dim=16, dtype="float16", page_tokens=8)
TOKENS = list(range(6 * LAYOUT.page_tokens))
PROMPT = [*TOKENS, 0]  # a hit leaves at least one token to be computed


def counts(store: kvstore.Store) -> dict[Tier, int]:
    """Pages that the index lists, by tier."""
    mapped = node_of(store).writable()
    return {reader.tier: mapped.index.count(reader.tier) for reader in mapped.tiers}


def sink(store: kvstore.Store, *tiers: str) -> None:
    """Wait until all pages are in the lowest tier, then have them leave these."""
    wait_until("all pages are in every tier", lambda: len(set(counts(store).values())) == 1 and counts(store)[FAR])
    for tier in tiers:
        assert store.evict(tier=tier, percent=100)["stayed"] == {}, tier


@pytest.mark.parametrize("attention", ["full", "window"])
def test_a_client_reads_the_third_tier(store: kvstore.Store, attention: str) -> None:
    window = {"attention": "window", "window": 32} if attention == "window" else {}
    layout = dataclasses.replace(LAYOUT, **window)
    cache = store.cache(layout)
    data = np.random.default_rng(1).integers(0, 256, (6, layout.page_bytes), np.uint8)
    assert cache.put(TOKENS, data) == 6
    sink(store, "dram", "nvme")
    assert counts(store) == {Tier.DRAM: 0, Tier.NVME: 0, FAR: 6}
    assert cache.lookup(PROMPT).tiers == {FAR: 6}
    match = cache.get(PROMPT)
    assert (match.tiers, match.reason) == ({FAR: 6}, "") and match.data is not None and (match.data == data).all()
    half = cache.get_shard(PROMPT, rank=1, ranks=2)
    assert half.tiers == {FAR: 6}
    assert cache.get([*PROMPT, *range(16)]).tiers == {FAR: 6}
    assert cache.prefetch(TOKENS[:17]).pages == 2
    found = counts(store)
    assert found == {Tier.DRAM: 2, Tier.NVME: 2, FAR: 6}
    match = cache.get(PROMPT)
    assert match.tiers == {Tier.DRAM: 2, FAR: 4} and match.data is not None and (match.data == data).all()
    sink_dram = store.evict(tier="dram", percent=100)
    assert sink_dram["pages"] == 2
    match = cache.get(PROMPT)
    assert match.tiers == {Tier.NVME: 2, FAR: 4} and match.data is not None and (match.data == data).all()
    with cache.lease(PROMPT) as lease:  # views are of memory: all come up, tier by tier
        assert len(lease.pages) == 6 and all((view == page).all() for view, page in zip(lease.pages, data, strict=True))
