"""Reading from NVMe as clients do: pages put there by hand, beside an embedded node that knows nothing of them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Tier
from kvstore.client.local import hints, nvme
from kvstore.client.local.copying import checksums_of
from kvstore.client.local.grants import GrantPools
from kvstore.client.local.nvme import NvmeRead
from kvstore.model import prefix
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS, ADDRESS_BYTES, Address, FrameClass, FrameState, Status, info_word, word_of
from kvstore.shm.header import Header
from kvstore.shm.index import Index
from kvstore.shm.records import ExtentTable
from kvstore.tier.nvme import frame_header, geometry
from kvstore.tier.nvme.devices import NvmeDevices
from kvstore.tier.nvme.disk import FileDisk, aligned_buffer
from kvstore.tier.nvme.map import NvmeMap, Place
from kvstore.wire import control
from kvstore.wire.control import HINT, NO_REPLY, Message, Op
from tests.helpers.inside import node_of

LAYOUT = kvstore.Layout(model="m", layers=4, kv_heads=2, head_dim=16, dtype="float16", page_tokens=8)
ODD = kvstore.Layout(model="odd", layers=3, kv_heads=1, head_dim=24, dtype="float16", page_tokens=7)
LARGE = kvstore.Layout(model="large", layers=4, kv_heads=2, head_dim=128, dtype="float16", page_tokens=32)
WINDOW = kvstore.Layout(
    model="w", layers=4, kv_heads=2, head_dim=16, dtype="float16", page_tokens=8, attention="window", window=32
)
MIB = 1 << 20
FIRST_EXTENT = 1_000_000  # far above the node's own numbers


class Shelf:
    """NVMe of a node, filled by hand."""

    def __init__(self, store: kvstore.Store, folder: Path, devices: int = 1) -> None:
        folder.mkdir(exist_ok=True)
        self.store = store
        self.paths = [folder / f"device-{number}" for number in range(devices)]
        disks = [FileDisk.open(path, 24 * MIB, create=True) for path in self.paths]
        self.devices = NvmeDevices.open(disks, "", 4 * MIB)
        self.mapped = node_of(store).writable()
        self.devices.write_map(self.mapped.folder)
        header = Header.open(self.mapped.folder, writable=True)
        assert header is not None
        header.lower_tiers = 1
        self.tables: dict[FrameClass, ExtentTable] = {}
        self.taken: dict[FrameClass, int] = {}
        self.generation = 1 << 40
        self.positions = iter(range(self.devices.positions))

    def carve(self, frame_class: FrameClass) -> ExtentTable:
        """Another extent of that class; pages go there from now on."""
        position = next(self.positions)
        number = FIRST_EXTENT + position
        self.devices.carve(position, number, frame_class)
        frames = self.devices.frames_of(frame_class)
        table = ExtentTable.create(
            self.mapped.folder, number, position, frame_class, self.devices.incarnation, frames, Tier.NVME
        )
        self.tables[frame_class], self.taken[frame_class] = table, 0
        return table

    def save(self, cache: kvstore.PrefixCache, keys: Keys, data: np.ndarray[Any, Any], gap: int = 0) -> list[Address]:
        """Put pages on NVMe, ``gap`` frames left free after each."""
        frame_class, rows = cache.frame_class, data.reshape(len(keys), -1)
        table = self.tables.get(frame_class) or self.carve(frame_class)
        identities = np.frombuffer(keys.identity_bytes, np.uint8).reshape(len(keys), -1)
        sums = checksums_of(rows, frame_class.layers)
        header, page = aligned_buffer(geometry.header_bytes(frame_class)), aligned_buffer(frame_class.frame_bytes)
        addresses = []
        self.devices.open_for_writing([table.position])
        for i in range(len(keys)):
            frame = self.taken[frame_class]
            self.taken[frame_class] += 1 + gap
            self.generation += 1
            address = Address(table.extent, frame, self.generation)
            parent, info = keys.hashes[i - 1] if i else keys.parent, info_word(frame_class.page_bytes, position=i)
            incarnation = self.devices.header_incarnation(table.position)
            what = identities[i], parent, info, sums[i], frame_header.payload_sum(rows[i], frame_class)
            frame_header.pack(header, frame_class, incarnation, address, *what)
            page[: rows.shape[1]] = rows[i]
            self.devices.write_page(table.position, frame, frame_class, header, page)
            table.rows[frame, 8:56] = identities[i, :48]
            table.rows[frame, table.fmt.parent] = np.frombuffer(parent, np.uint8)
            table.column(table.fmt.info)[frame] = info
            table.words[frame] = word_of(self.generation, FrameState.SEALED)
            addresses.append(address)
        self.devices.close_for_writing([table.position])
        self.devices.sync()
        with self.mapped.index.begin() as txn:
            txn.put(Tier.NVME, keys.hashes, [ADDRESS.pack(*address) for address in addresses])
        return addresses

    def forget(self, keys: Keys) -> None:
        """The index does not know them any more."""
        with self.mapped.index.begin() as txn:
            txn.delete(Tier.NVME, keys.hashes)

    def place(self, address: Address, frame_class: FrameClass) -> Place:
        """Where a page's header begins."""
        map_ = NvmeMap.open(self.mapped.folder)
        table = self.tables[frame_class]
        assert map_ is not None and table.extent == address.extent
        place = map_.place(table.position, frame_class, address.frame)
        assert place is not None
        return place

    def damage(self, address: Address, frame_class: FrameClass, at: int) -> None:
        """Flip a bit, ``at`` bytes from the beginning of the page's header."""
        place = self.place(address, frame_class)
        with open(place.disk.path, "r+b") as file:
            file.seek(place.offset + at)
            byte = file.read(1)[0]
            file.seek(place.offset + at)
            file.write(bytes([byte ^ 4]))


class Line:
    """A channel that notes requests, and answers those of ``answers`` in the node's place."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.sent: list[tuple[Op, int, int, bytes]] = []
        self.answers: dict[Op, Callable[[int, bytes], bytes]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)

    def request(self, op: Op, *, count: int = 0, a: int = 0, flags: int = 0, body: Iterable[bytes] = (), **more: Any):  # type: ignore[no-untyped-def]
        body = tuple(body)
        self.sent.append((op, flags, a, b"".join(body)))
        if op in self.answers:
            return Reply(self.answers[op](count, b"".join(body)))
        return self.channel.request(op, count=count, a=a, flags=flags, body=body, **more)

    def asked(self, op: Op) -> list[tuple[int, int, bytes]]:
        """(flags, a, body) of the requests of that kind so far."""
        return [(flags, a, body) for sent, flags, a, body in self.sent if sent == op]

    def close(self) -> None:
        self.channel.close()


class Reply:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def result(self) -> Message:
        return control.decode(memoryview(self.data))


def statuses(*values: int) -> bytes:
    return control.encode(Status.OK, 0, count=len(values), body=[control.pack_statuses(values)])


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(dram="8MiB", shm_dir=tmp_path, scrub_bytes_per_s=0) as store:
        yield store


@pytest.fixture
def shelf(store: kvstore.Store, tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf(store, tmp_path / "nvme")
    yield shelf
    shelf.devices.close()


@pytest.fixture
def line(store: kvstore.Store) -> Line:
    mapped = node_of(store).writable()
    mapped.channel = line = Line(mapped.channel)
    mapped.pools = GrantPools(line)
    line.answers[Op.PREFETCH] = lambda count, body: statuses(*[Status.NO_SPACE] * count)
    return line


@pytest.fixture
def cache(store: kvstore.Store, line: Line) -> kvstore.PrefixCache:
    return store.cache(LAYOUT)


def chain(cache: kvstore.PrefixCache, pages: int, start: int = 0) -> Keys:
    tokens = np.arange(start, start + pages * cache.layout.page_tokens, dtype=np.uint32)
    return cache.keys(tokens)


def content(cache: kvstore.PrefixCache, pages: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (pages, cache.page_bytes), np.uint8)


# --- get ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [LAYOUT, ODD, LARGE], ids=lambda layout: layout.model)
@pytest.mark.parametrize("gap", [0, 1])
@pytest.mark.parametrize("dram", [0, 1, 5, 12])
def test_get_goes_on_from_dram_to_nvme(
    store: kvstore.Store, shelf: Shelf, line: Line, layout: kvstore.Layout, gap: int, dram: int
) -> None:
    cache = store.cache(layout)
    keys, data = chain(cache, 12), content(cache, 12)
    if dram:
        cache.put(keys[:dram], data[:dram])
    shelf.save(cache, keys[:9], data[:9], gap)
    stored = max(dram, 9)
    tiers = {tier: pages for tier, pages in ((Tier.DRAM, dram), (Tier.NVME, stored - dram)) if pages}
    found = cache.lookup(keys)
    assert (found.pages, found.tokens, found.tiers) == (stored, stored * layout.page_tokens, tiers)
    assert found.reason == ("" if stored == 12 else "absent")

    out = np.full((12, cache.page_bytes), 7, np.uint8)
    match = cache.get(keys, out)
    assert (match.pages, match.tiers, match.reason) == (stored, tiers, found.reason)
    np.testing.assert_array_equal(out[:stored], data[:stored])
    assert (out[stored:] == 7).all()
    match = cache.get(keys)
    assert match.data is not None and (match.pages, match.tiers) == (stored, tiers)
    np.testing.assert_array_equal(match.data, data[:stored])
    assert cache.get(keys[:stored]).reason == ""


def test_a_chain_in_several_extents_and_devices(store: kvstore.Store, line: Line, tmp_path: Path) -> None:
    shelf, cache = Shelf(store, tmp_path / "nvme", devices=3), store.cache(LARGE)
    keys, data = chain(cache, 30), content(cache, 30)
    for start in range(0, 30, 5):
        shelf.carve(cache.frame_class)
        shelf.save(cache, keys[start : start + 5], data[start : start + 5])
    np.testing.assert_array_equal(cache.get(keys).data, data)
    np.testing.assert_array_equal(cache.get(keys[7:19]).data, data[7:19])
    shelf.devices.close()


def test_what_was_read_is_marked_and_told_once(shelf: Shelf, cache: kvstore.PrefixCache, line: Line) -> None:
    keys, data = chain(cache, 8), content(cache, 8)
    cache.put(keys[:3], data[:3])
    addresses = shelf.save(cache, keys, data)
    before_ns = time.monotonic_ns()
    assert cache.get(keys).pages == 8
    used = shelf.tables[cache.frame_class].last_use[:9].tolist()
    assert used[:3] == [0, 0, 0], "these came from DRAM"
    assert all(before_ns < mark <= time.monotonic_ns() for mark in used[3:8]) and used[8] == 0
    expected = b"".join(ADDRESS.pack(*address) for address in addresses[3:])
    assert line.asked(Op.PREFETCH) == [(NO_REPLY | HINT, 0, expected)]
    assert cache.get(keys[:3]).pages == 3 and cache.lookup(keys).pages == 8
    assert len(line.asked(Op.PREFETCH)) == 1, "nothing was read from NVMe"


def _never_of_nvme(verb: Callable[..., Any]) -> Callable[..., Any]:
    def asked(index: Index, tier: Tier, keys: Any, *about: Any) -> Any:
        assert tier is Tier.DRAM
        return verb(index, tier, keys, *about)

    return asked


def test_a_full_dram_hit_does_not_look_at_nvme(
    shelf: Shelf, cache: kvstore.PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, data = chain(cache, 8), content(cache, 8)
    cache.put(keys, data)
    shelf.save(cache, keys, data)
    for verb in ("find", "find_many", "longest"):
        monkeypatch.setattr(Index, verb, _never_of_nvme(getattr(Index, verb)))
    assert cache.lookup(keys).tiers == cache.get(keys).tiers == {Tier.DRAM: 8}
    assert cache.put(keys, data) == 0


def test_pages_of_a_layout_that_is_not_closed_lie_here_and_there(
    store: kvstore.Store, shelf: Shelf, line: Line
) -> None:
    cache = store.cache(WINDOW)
    keys, data = chain(cache, 10), content(cache, 10)
    cache.put(keys, data)
    mapped = node_of(store).writable()
    for pages in ((2, 3), (5, 6), (8, 10)):
        part = keys[slice(*pages)]
        shelf.save(cache, part, data[slice(*pages)])
        with mapped.index.begin() as txn:
            txn.delete(Tier.DRAM, part.hashes)
    with mapped.index.begin() as txn:
        txn.delete(Tier.NVME, keys[9:].hashes)
    assert cache.lookup(keys).tiers == {Tier.DRAM: 6, Tier.NVME: 3}
    out = np.full((10, cache.page_bytes), 7, np.uint8)
    match = cache.get(keys, out)
    assert (match.pages, match.tiers, match.reason) == (9, {Tier.DRAM: 6, Tier.NVME: 3}, "absent")
    np.testing.assert_array_equal(out[:9], data[:9])
    assert (out[9] == 7).all()
    np.testing.assert_array_equal(cache.get(keys).data, data[:9])


# --- what is not believed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["magic", "incarnation", "key", "token", "checksum", "first layer", "last layer"])
@pytest.mark.parametrize("page", [0, 4])
def test_damage_ends_the_match_and_is_told(
    shelf: Shelf, cache: kvstore.PrefixCache, line: Line, at: str, page: int
) -> None:
    keys, data = chain(cache, 6), content(cache, 6)
    addresses = shelf.save(cache, keys, data)
    header_bytes = geometry.header_bytes(cache.frame_class)
    places = {"magic": 0, "incarnation": 16, "key": 73, "token": 72 + 48 + 5, "checksum": 72 + 48 + 32 + 1}
    places |= {"first layer": header_bytes, "last layer": header_bytes + cache.page_bytes - 1}
    shelf.damage(addresses[page], cache.frame_class, places[at])
    line.answers[Op.SCRUB] = lambda count, body: statuses(Status.DAMAGED)
    out = np.full((6, cache.page_bytes), 7, np.uint8)
    match = cache.get(keys, out)
    assert (match.pages, match.reason, match.tiers) == (page, "checksum", {Tier.NVME: page} if page else {})
    np.testing.assert_array_equal(out[:page], data[:page])
    assert (out[page] == 7).all(), "only what holds is copied"
    assert line.asked(Op.SCRUB) == [(0, 0, ADDRESS.pack(*addresses[page]))]
    assert node_of(cache).misses == {"checksum": 1}


def test_damage_is_no_error_where_the_daemon_is_silent(
    shelf: Shelf, cache: kvstore.PrefixCache, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(cache, 2)
    addresses = shelf.save(cache, keys, content(cache, 2))
    shelf.damage(addresses[1], cache.frame_class, geometry.header_bytes(cache.frame_class))
    monkeypatch.setattr(hints, "SILENT_NS", -1)
    wait_until(lambda: shelf.mapped.header.heartbeat_ns > 0)
    assert cache.get(keys).reason == "checksum"
    assert line.sent == []


def test_a_forged_collision_is_a_miss(
    shelf: Shelf, cache: kvstore.PrefixCache, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "page_hash", lambda data: b"same-key" + len(data).to_bytes(8, "little"))
    ours, theirs = chain(cache, 1), chain(cache, 1, 500)
    assert ours.hashes == theirs.hashes
    shelf.save(cache, ours, content(cache, 1))
    out = np.full((1, cache.page_bytes), 9, np.uint8)
    match = cache.get(theirs, out)
    assert (match.pages, match.reason) == (0, "identity") and (out == 9).all()
    assert not line.asked(Op.SCRUB), "it is sound, and somebody else's"
    assert cache.get(ours).pages == 1


@pytest.mark.parametrize("page", [0, 3])
def test_a_page_that_left_is_a_miss(shelf: Shelf, cache: kvstore.PrefixCache, page: int) -> None:
    keys, data = chain(cache, 5), content(cache, 5)
    addresses = shelf.save(cache, keys, data)
    table = shelf.tables[cache.frame_class]
    frame = addresses[page].frame
    table.words[frame] = word_of(1 << 50, FrameState.FREE)
    assert cache.get(keys).reason == "generation" and cache.get(keys).pages == page
    table.words[frame] = word_of(addresses[page].generation, FrameState.SEALED)
    assert cache.get(keys).pages == 5


def test_a_page_overwritten_while_it_is_read(
    shelf: Shelf, cache: kvstore.PrefixCache, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its bytes were: no damage, and what took its place is found where that is a page of ours."""
    keys, data = chain(cache, 5), content(cache, 5)
    addresses = shelf.save(cache, keys, data)
    read = FileDisk.read
    moved = threading.Event()

    def meanwhile(disk: FileDisk, offset: int, buffers: Any) -> None:
        if not moved.is_set():
            moved.set()
            shelf.damage(addresses[2], cache.frame_class, geometry.header_bytes(cache.frame_class))
            shelf.tables[cache.frame_class].words[addresses[2].frame] = word_of(1 << 50, FrameState.FREE)
            shelf.carve(cache.frame_class)
            shelf.save(cache, keys[2:], data[2:])
        read(disk, offset, buffers)

    monkeypatch.setattr(FileDisk, "read", meanwhile)
    match = cache.get(keys)
    assert (match.pages, match.reason, match.tiers) == (5, "", {Tier.NVME: 5})
    np.testing.assert_array_equal(match.data, data)
    assert not line.asked(Op.SCRUB)


# --- devices that fail ----------------------------------------------------------------------------------------------


def test_a_failing_device_is_reason_io(
    shelf: Shelf, cache: kvstore.PrefixCache, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, data = chain(cache, 4), content(cache, 4)
    shelf.save(cache, keys, data)
    assert cache.get(keys).pages == 4

    def fail(disk: FileDisk, offset: int, buffers: Any) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(FileDisk, "read", fail)
        match = cache.get(keys)
        assert (match.pages, match.reason) == (0, "io")
    assert not line.asked(Op.SCRUB)
    assert cache.get(keys).pages == 4


def test_a_silent_device_costs_one_deadline_and_writes_nothing_later(
    store: kvstore.Store, shelf: Shelf, cache: kvstore.PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, data = chain(cache, 8), content(cache, 8)
    shelf.save(cache, keys, data)
    assert cache.get(keys).pages == 8
    mapped = node_of(store).writable()
    read, answer = FileDisk.read, threading.Event()

    def stall(disk: FileDisk, offset: int, buffers: Any) -> None:
        assert answer.wait(60)
        read(disk, offset, buffers)

    monkeypatch.setattr(FileDisk, "read", stall)
    out = np.full((8, cache.page_bytes), 7, np.uint8)
    for timeout_s in (0.5, 3600.0):  # the second one does not wait
        mapped.timeout_s = timeout_s
        match = cache.get(keys, out)
        assert (match.pages, match.reason) == (0, "io")
    answer.set()
    wait_until(lambda: not mapped.below[Tier.NVME].threads._abandoned)
    assert (out == 7).all(), "answered too late"
    assert cache.get(keys, out).pages == 8, "and is asked again"
    np.testing.assert_array_equal(out, data)


class Reads:
    """Reads of one run of 40 pages, in 4 parts of at most 16 pages; ``before`` is called before each."""

    def __init__(self, shelf: Shelf, cache: kvstore.PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys, self.data = chain(cache, 40), content(cache, 40)
        self.addresses = shelf.save(cache, self.keys, self.data)
        self.before: Callable[[range], None] = lambda pages: None
        self.accepted: list[int] = []  # parts, by their first page
        start = shelf.place(self.addresses[0], cache.frame_class).offset
        stride = geometry.stride_bytes(cache.frame_class)
        read, accept = FileDisk.read, NvmeRead._accept

        def observed(disk: FileDisk, offset: int, buffers: Any) -> None:
            first = (offset - start) // stride
            if pages := range(first, first + buffers[0].nbytes // stride):  # else a device is being opened
                self.before(pages)
            read(disk, offset, buffers)

        def accepted(nvme_read: NvmeRead, part: Any, bounce: Any) -> tuple[int, str]:
            self.accepted.append(part.page)
            return accept(nvme_read, part, bounce)

        monkeypatch.setattr(FileDisk, "read", observed)
        monkeypatch.setattr(NvmeRead, "_accept", accepted)
        monkeypatch.setattr(nvme, "PART_BYTES", 16 * stride)
        monkeypatch.setattr(nvme, "SMALL_BYTES", 4 * stride)


@pytest.fixture
def reads(shelf: Shelf, cache: kvstore.PrefixCache, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(shelf, cache, monkeypatch)


@pytest.mark.parametrize("page", [0, 10, 11, 17, 39])
def test_a_frame_that_cannot_be_read_does_not_cost_those_before_it(
    reads: Reads, cache: kvstore.PrefixCache, page: int
) -> None:
    def before(pages: range) -> None:
        if page in pages or 20 in pages:  # a later one does not count
            raise OSError(errno.EIO, "broken")

    reads.before = before
    match = cache.get(reads.keys)
    expected = min(page, 20)
    assert (match.pages, match.reason) == (expected, "io")
    if expected:
        np.testing.assert_array_equal(match.data, reads.data[:expected])


def test_damage_found_last_ends_the_match_all_the_same(
    reads: Reads, shelf: Shelf, cache: kvstore.PrefixCache, line: Line
) -> None:
    """The first part comes when all others, with a damaged page of their own, have been accepted."""
    for page in (2, 14):
        shelf.damage(reads.addresses[page], cache.frame_class, geometry.header_bytes(cache.frame_class))
    line.answers[Op.SCRUB] = lambda count, body: statuses(Status.DAMAGED)

    def before(pages: range) -> None:
        if pages[0] == 0:
            wait_until(lambda: 11 in reads.accepted)

    reads.before = before
    out = np.full((40, cache.page_bytes), 7, np.uint8)
    match = cache.get(reads.keys, out)
    assert reads.accepted[-1] == 0 and (match.pages, match.reason) == (2, "checksum")
    np.testing.assert_array_equal(out[:2], reads.data[:2])
    assert (out[2:11] == 7).all() and (out[14:27] == 7).all(), "only what holds is copied"
    np.testing.assert_array_equal(out[11:14], reads.data[11:14])
    assert line.asked(Op.SCRUB) == [(0, 0, ADDRESS.pack(*reads.addresses[2]))]


# --- put ------------------------------------------------------------------------------------------------------------


def test_put_writes_to_dram_what_is_on_nvme_only_and_calls_it_not_new(
    shelf: Shelf, cache: kvstore.PrefixCache, store: kvstore.Store
) -> None:
    keys, data = chain(cache, 10), content(cache, 10)
    shelf.save(cache, keys[:6], data[:6])
    assert cache.put(keys[:2], data[:2]) == 0
    assert cache.lookup(keys).tiers == {Tier.DRAM: 2, Tier.NVME: 4}
    assert cache.put(keys, data) == 4
    assert cache.lookup(keys).tiers == {Tier.DRAM: 10}
    assert cache.put(keys, data) == 0
    np.testing.assert_array_equal(cache.get(keys).data, data)


# --- a busy node ----------------------------------------------------------------------------------------------------


def test_a_writer_goes_on_where_the_node_was_busy(cache: kvstore.PrefixCache, line: Line) -> None:
    """The first two pages are reserved, the others have to wait."""

    def answer(count: int, body: bytes) -> bytes:
        del line.answers[Op.RESERVE]
        width = len(body[32:]) // count
        a = control.pack_class(cache.frame_class)
        reply = line.channel.request(Op.RESERVE, count=2, a=a, b=5000, body=(body[: 32 + 2 * width],)).result()
        addresses = bytes(reply.body[8:]) + bytes((count - 2) * ADDRESS_BYTES)
        values = [*reply.body[:2], *[Status.BUSY] * (count - 2)]
        return control.encode(Status.OK, 0, count=count, body=[control.pack_statuses(values), addresses])

    line.answers[Op.RESERVE] = answer
    keys, data = chain(cache, 5), content(cache, 5)
    with cache.writer(keys) as writer:
        assert writer.pages_new == [0, 1, 2, 3, 4]
        for page in writer.pages_new:
            writer.write_page(page, data[page])
    assert writer.sealed == 5
    np.testing.assert_array_equal(cache.get(keys).data, data)


# --- bringing pages to DRAM -----------------------------------------------------------------------------------------


class Promoter:
    """Does what a node does: brings pages to DRAM, and is busy with it for a while."""

    def __init__(self, cache: kvstore.PrefixCache, keys: Keys, data: np.ndarray[Any, Any], line: Line) -> None:
        self.cache, self.keys, self.data = cache, keys, data
        self.busy, self.room = 3, len(keys)
        self.asked: list[int] = []
        line.answers[Op.PREFETCH] = self

    def __call__(self, count: int, body: bytes) -> bytes:
        assert len(body) == count * ADDRESS_BYTES
        self.asked.append(count)
        self.busy -= 1
        if self.busy > 0:
            return statuses(*[Status.OK] * (count - 1), Status.BUSY)
        self.cache.put(self.keys[: self.room], self.data[: self.room])
        stored = self.room - (len(self.keys) - count)
        return statuses(*[Status.OK] * stored, *[Status.NO_SPACE] * (count - stored))


@pytest.mark.parametrize("room", [6, 4])
def test_prefetch(shelf: Shelf, cache: kvstore.PrefixCache, line: Line, room: int) -> None:
    keys, data = chain(cache, 6), content(cache, 6)
    cache.put(keys[:2], data[:2])
    shelf.save(cache, keys, data)
    promoter = Promoter(cache, keys, data, line)
    promoter.room = room
    match = cache.prefetch(keys)
    assert (match.pages, match.reason) == (room, "" if room == 6 else "absent")
    assert promoter.asked == [4, 4, 4]
    assert all(flags & NO_REPLY == 0 and a == 1 for flags, a, _ in line.asked(Op.PREFETCH))
    assert cache.lookup(keys).tiers.get(Tier.DRAM) == room


def test_prefetch_ends_at_its_deadline(shelf: Shelf, cache: kvstore.PrefixCache, line: Line) -> None:
    keys = chain(cache, 6)
    shelf.save(cache, keys, content(cache, 6))
    line.answers[Op.PREFETCH] = lambda count, body: statuses(*[Status.BUSY] * count)
    started = time.monotonic()
    assert (cache.prefetch(keys, 0.1).pages, cache.prefetch(keys, 0.001).reason) == (0, "absent")
    assert 0.1 < time.monotonic() - started < 30


def test_a_lease_brings_pages_first(shelf: Shelf, cache: kvstore.PrefixCache, line: Line) -> None:
    keys, data = chain(cache, 6), content(cache, 6)
    cache.put(keys[:1], data[:1])
    shelf.save(cache, keys, data)
    with cache.lease(keys) as lease:
        assert len(lease.pages) == 1, "no room for more"
    promoter = Promoter(cache, keys, data, line)
    with cache.lease(keys) as lease:
        assert (lease.match.pages, lease.match.tiers) == (6, {Tier.DRAM: 6})
        for page, view in zip(data, lease.pages, strict=True):
            np.testing.assert_array_equal(view, page)
    assert len(promoter.asked) == 3
    with cache.lease(keys):
        assert len(promoter.asked) == 3, "all there"


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- a node with NVMe of its own ------------------------------------------------------------------------------------

CHAINS, PAGES = 12, 24


class Filled:
    """A node whose DRAM is too small for what was put: some chains are on NVMe only."""

    def __init__(self, store: kvstore.Store) -> None:
        self.store = store
        self.cache = store.cache(LARGE)
        self.keys = [chain(self.cache, PAGES, 100_000 * i) for i in range(CHAINS)]
        self.data = [content(self.cache, PAGES, i) for i in range(CHAINS)]
        for keys, data in zip(self.keys, self.data, strict=True):
            assert self.cache.put(keys, data) == PAGES

    def on_nvme_only(self) -> int:
        """A chain of which nothing is in DRAM."""
        found = (i for i, keys in enumerate(self.keys) if self.cache.lookup(keys).tiers == {Tier.NVME: PAGES})
        return next(found)


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    (tmp_path / "shm").mkdir()
    device = f"{tmp_path / 'device'}:64MiB"
    with kvstore.open(dram="16MiB", nvme=device, shm_dir=tmp_path / "shm", scrub_bytes_per_s=0) as store:
        yield Filled(store)


def test_pages_are_brought_to_dram(filled: Filled) -> None:
    cache, store = filled.cache, filled.store
    first = filled.on_nvme_only()
    assert cache.prefetch(filled.keys[first]).pages == PAGES
    assert cache.lookup(filled.keys[first]).tiers == {Tier.DRAM: PAGES}

    second = filled.on_nvme_only()
    with cache.lease(filled.keys[second]) as lease:
        assert lease.match.pages == PAGES
        for page, view in zip(filled.data[second], lease.pages, strict=True):
            np.testing.assert_array_equal(view, page)

    third = filled.on_nvme_only()
    out = np.zeros((PAGES, cache.page_bytes // LARGE.layers), np.uint8)
    follower = cache.reader(filled.keys[third], timeout_s=10)
    for layer in range(LARGE.layers):
        follower.read_layer(layer, out)
        np.testing.assert_array_equal(out, filled.data[third].reshape(PAGES, LARGE.layers, -1)[:, layer])
    assert store.verify()["findings"] == []


def test_the_node_drops_what_a_reader_found_damaged(filled: Filled, tmp_path: Path) -> None:
    cache, cold = filled.cache, filled.on_nvme_only()
    mapped = node_of(filled.store).writable()
    address = mapped.index.find(Tier.NVME, filled.keys[cold].hashes[5])
    map_ = NvmeMap.open(mapped.folder)
    assert address is not None and map_ is not None
    table = ExtentTable.open(mapped.folder, address.extent, map_.incarnation)
    assert table is not None and table.tier is Tier.NVME
    place = map_.place(table.position, cache.frame_class, address.frame)
    assert place is not None
    with open(tmp_path / "device", "r+b") as file:
        file.seek(place.offset + geometry.header_bytes(cache.frame_class) + 100)
        file.write(b"not what was stored there")
    match = cache.get(filled.keys[cold])
    assert (match.pages, match.reason) == (5, "checksum")
    np.testing.assert_array_equal(match.data, filled.data[cold][:5])
    assert cache.lookup(filled.keys[cold]).pages == 5, "the node dropped it, and what hangs on it"
    assert filled.store.verify()["findings"] == []
