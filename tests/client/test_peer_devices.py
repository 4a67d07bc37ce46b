"""Pages in the memory of another process's device: from device to device where one reaches the other, else by way of
the host. The other process is a real one, and passes a descriptor of its memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Tier
from kvstore.client import device_link
from kvstore.client.device_link import DeviceLink
from kvstore.client.local import hbm
from kvstore.client.local.segment import LocalSegment
from kvstore.client.local.store import LocalStore
from kvstore.device import cuda
from kvstore.device.base import DeviceExport
from kvstore.device.host_device import FALSE_ANSWERS_MAX, HostDevice, HostMemory
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.shm.mounted import MountedTable
from kvstore.tier import peer_memory
from kvstore.tier.peer_memory import DevicePages
from tests.helpers.content import SMALL, chain, contents, layer_of, prompt
from tests.helpers.device_buffers import InterfaceBuffer, added_device
from tests.helpers.device_frames import STRIDE, device_named, frames_of, shown
from tests.helpers.device_waits import WaitSite, forget, wait_sites
from tests.helpers.inside import node_of
from tests.helpers.mounted import Engine
from tests.helpers.processes import Machine, check_laws, put, stopped, wait_until

GPUS = [device.name for device in cuda.find().devices]
PAGES = 12
FRAMES = 16
WAITS = wait_sites(hbm)


class Ways:
    """How pages came: copies that were direct, and reads by way of the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.direct = self.by_host = 0
        copy, read = DeviceLink.copy_pieces, DevicePages.read

        def copied(*given: Any, **named: Any) -> Any:
            self.direct += 1
            return copy(*given, **named)

        def was_read(*given: Any) -> None:
            self.by_host += 1
            read(*given)

        monkeypatch.setattr(DeviceLink, "copy_pieces", copied)
        monkeypatch.setattr(DevicePages, "read", was_read)


def buffer(device: HostDevice, pages: int = PAGES) -> InterfaceBuffer:
    return InterfaceBuffer(device, (pages, SMALL.page_bytes))


def store_of(machine: Machine) -> LocalStore:
    store = machine.connect("n")
    assert isinstance(store, LocalStore)
    return store


# --- two processes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("of", "to"), [("host:0", "host:0"), *product(GPUS, GPUS)])
def test_any_device_reads_what_another_process_has(machine: Machine, of: str, to: str) -> None:
    """Peers in host memory, and each pair of GPUs that there are."""
    machine.serve("n")
    engine = Engine(machine, device=of)
    engine.publish(1, PAGES)
    with added_device(to) if to not in GPUS else nullcontext(device_named(to)) as device:
        memory = device.allocate(PAGES * SMALL.page_bytes)
        told = {"shape": (PAGES, SMALL.page_bytes), "typestr": "|u1", "data": (memory.address, False), "version": 3}
        out = type("Buffer", (), {"__cuda_array_interface__": told})()
        match = store_of(machine).cache(SMALL).get(chain(1, PAGES), out)
        assert match.tiers == {Tier.HBM: PAGES}
        assert (frames_of(device, memory, PAGES, SMALL.page_bytes) == contents(chain(1, PAGES))).all()


@pytest.mark.parametrize("name", ["host:0", "host:1"], ids=["one device", "two devices"])
def test_from_device_to_device(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A get whose first pages are in DRAM, all layers, and what the node counts."""
    machine.serve("n")
    store, engine, ways = store_of(machine), Engine(machine, device="host:0"), Ways(monkeypatch)
    engine.publish(1, PAGES)
    put(store, 1, 3)
    data = contents(chain(1, PAGES))
    with added_device(name, reaches=["host:0"]) as device:
        out = buffer(device)
        match = store.cache(SMALL).get(chain(1, PAGES), out)
        assert match.tiers == {Tier.DRAM: 3, Tier.HBM: PAGES - 3} and match.reason == ""
        assert (out.seen == data).all()
        assert (ways.direct, ways.by_host) == (1, 0)
        reader, target = (
            store.cache(SMALL).reader(prompt(1, PAGES)),
            InterfaceBuffer(device, (PAGES, SMALL.layer_bytes)),
        )
        for layer in range(SMALL.layers):
            reader.read_layer(layer, target)
            assert (target.seen == layer_of(data, layer)).all()
        assert (ways.direct, ways.by_host) == (1 + SMALL.layers, 0)
        assert store.stats()["clients"]["hit_hbm"] == PAGES - 3
        engine.ask("retire", [10, 11])
        match = store.cache(SMALL).get(chain(1, PAGES), out)
        assert (match.pages, match.reason) == (10, "absent")
    check_laws(store)


def test_devices_that_do_not_reach_each_other(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of the host where this process uses the other device too; else not at all: that is a miss."""
    machine.serve("n")
    store, engine, ways = store_of(machine), Engine(machine, device="host:0"), Ways(monkeypatch)
    engine.publish(1, PAGES)
    with added_device("host:1") as device:
        out = buffer(device)
        assert store.cache(SMALL).get(chain(1, PAGES), out).pages == 0 and out.untouched
        with added_device("host:0"):
            monkeypatch.setattr(hbm, "RETRY_NS", 0)
            store.cache(SMALL).get(chain(1, PAGES))  # forgets that it could not be opened
            mapped = node_of(store).mapped()
            assert mapped is not None
            mapped.hbm._retry_ns.clear()
            match = store.cache(SMALL).get(chain(1, PAGES), out)
            assert match.tiers == {Tier.HBM: PAGES} and (out.seen == contents(chain(1, PAGES))).all()
            assert ways.direct == 0 and ways.by_host > 0


def test_a_killed_engines_memory_is_let_go_of(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that reads nothing any more."""
    monkeypatch.setattr(hbm, "WATCH_S", 0.05)
    machine.serve("n")
    store, engine = store_of(machine), Engine(machine, device="host:0")
    engine.publish(1, PAGES)
    with added_device("host:1", reaches=["host:0"]) as device:
        assert store.cache(SMALL).get(chain(1, PAGES), buffer(device)).pages == PAGES
        opened = [weakref.ref(memory) for memory in device._memories if memory.theirs]
        assert len(opened) == 1 and all(memory.live for memory in device._memories if memory.theirs)
        engine.process.kill()
        wait_until("it is unmapped", lambda: not any(each.live for each in device._memories if each.theirs))


def test_an_engine_that_was_stopped_costs_one_deadline(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody passes the descriptor: a miss, and it is not asked again at once."""
    asked: list[Path] = []
    pass_on = peer_memory.receive_descriptor

    def counted(path: Path) -> int:
        asked.append(path)
        return pass_on(path)

    monkeypatch.setattr(peer_memory, "receive_descriptor", counted)
    monkeypatch.setattr(hbm, "RETRY_NS", 600 * 10**9)
    machine.serve("n")
    store, engine = store_of(machine), Engine(machine, device="host:0")
    engine.publish(1, PAGES)
    with added_device("host:0"), stopped(engine.process.pid):
        for _ in range(3):
            assert store.cache(SMALL).get(chain(1, PAGES)).pages == 0
        assert len(asked) == 1


# --- one process, in which every moment can be chosen ---------------------------------------------------------------


class Two:
    """An engine's memory on one device, a reader's on another, and a store of each."""

    def __init__(self, machine: Machine, stack: ExitStack) -> None:
        self.source = HostDevice("host:0", seed=3)
        self.device = stack.enter_context(added_device("host:1", reaches=["host:0"]))
        self.store, owner = store_of(machine), store_of(machine)
        self.memory: HostMemory = self.source.allocate(FRAMES * STRIDE, shared=True)
        self.segment: LocalSegment = owner.mount(SMALL, FRAMES, shown(self.source, self.memory))
        self.keys = chain(1, PAGES)
        self.fill(contents(self.keys))
        self.segment.publish(self.keys, range(PAGES))

    def fill(self, data: np.ndarray[Any, Any]) -> None:
        rows = self.memory.view().reshape(FRAMES, STRIDE)
        rows[:PAGES, : SMALL.page_bytes] = data

    def get(self) -> tuple[Any, InterfaceBuffer]:
        out = buffer(self.device)
        return self.store.cache(SMALL).get(self.keys, out), out


@pytest.fixture
def two(machine: Machine) -> Iterator[Two]:
    machine.serve("n")
    with ExitStack() as stack:
        yield Two(machine, stack)


@pytest.mark.parametrize("site", WAITS, ids=str)
def test_without_this_wait_bytes_are_wrong(two: Two, site: WaitSite, monkeypatch: pytest.MonkeyPatch) -> None:
    match, out = two.get()
    assert match.pages == PAGES and (out.seen == contents(two.keys)).all()
    left_out = forget(monkeypatch, site)
    match, out = two.get()
    assert match.pages == PAGES and not (out.seen == contents(two.keys)).all()
    assert left_out


def test_every_wait_is_tried() -> None:
    assert [str(site) for site in WAITS] == ["result"]


def test_a_copy_begins_behind_the_callers_stream(two: Two) -> None:
    """A kernel that the caller gave its stream before may still write to the target."""
    out, stream = buffer(two.device), two.device.stream()
    out.stream = stream.handle
    stream.launch(lambda: out.seen.fill(7))
    assert two.store.cache(SMALL).get(two.keys, out).tiers == {Tier.HBM: PAGES}
    stream.record().wait(1e12)
    assert (out.seen == contents(two.keys)).all()


@pytest.mark.parametrize("moment", ["before the copy", "after the copy"])
def test_a_page_that_turns_over_while_it_is_copied_is_a_miss(
    two: Two, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    wait = DeviceLink.wait

    def turned(self: DeviceLink, *given: Any) -> None:
        if moment == "after the copy":
            wait(self, *given)
        free: list[int] = []
        while len(free) < 3:  # as an engine that has waited long enough for whoever says that he reads
            free += [frame for frame in two.segment.retire([5, 6, 7]) if frame not in free]
        two.memory.view()[5 * STRIDE : 8 * STRIDE] = 9
        if moment == "before the copy":
            wait(self, *given)

    monkeypatch.setattr(DeviceLink, "wait", turned)
    match, out = two.get()
    assert (match.pages, match.reason) == (5, "absent")
    assert (out.seen[:5] == contents(two.keys)[:5]).all()


def test_frames_are_held_until_the_event(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hbm, "HOLD_NS", 600 * 10**9)
    monkeypatch.setattr(MountedTable, "is_held", lambda self, frame, _: bool(self.held[frame]))
    wait, free = DeviceLink.wait, list[list[int]]()

    def retired(self: DeviceLink, *given: Any) -> None:
        free.append(two.segment.retire(range(PAGES)))
        wait(self, *given)

    monkeypatch.setattr(DeviceLink, "wait", retired)
    match, out = two.get()
    assert match.pages == PAGES and (out.seen == contents(two.keys)).all()
    assert free == [[]] and two.segment.retire(range(PAGES)) == list(range(PAGES))


def opened_by(two: Two) -> weakref.ref[DevicePages]:
    """The engine's memory as the reader has it open."""
    mapped = node_of(two.store).mapped()
    assert mapped is not None
    memory = mapped.hbm._segments[two.segment.number].memory
    assert isinstance(memory, DevicePages)
    return weakref.ref(memory)


def let_go_of(two: Two) -> None:
    """The segment is closed, and its reader has looked."""
    two.segment.close()
    mapped = node_of(two.store).mapped()
    assert mapped is not None
    mapped.hbm.drop_ended()
    gc.collect()


def is_late(get: Callable[[], object]) -> bool:
    """Nothing is left of the error, which would hold what the call had."""
    try:
        get()
    except DeadlineExceeded:
        return True
    return False


def test_a_copy_that_is_late_keeps_the_memory_mapped(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its event, and no longer."""
    monkeypatch.setattr(device_link, "COPY_DEADLINE_S", 0.05)
    two.get()
    opened = opened_by(two)
    two.device.hold()
    assert is_late(two.get)
    let_go_of(two)
    assert opened() is not None, "the device still reads there"
    two.device.let_go()
    keys = chain(2, 3)
    put(two.store, 2, 3)
    for _ in range(FALSE_ANSWERS_MAX + 2):
        assert two.store.cache(SMALL).get(keys, buffer(two.device, 3)).pages == 3
    assert opened() is None and not any(memory.live for memory in two.device._memories if memory.theirs)


def test_memory_that_is_shorter_than_its_export_is_not_read(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from beyond its end would cost the reader its device."""
    whole = HostDevice.open_export

    def shorter(self: HostDevice, export: DeviceExport) -> HostMemory:
        return whole(self, export._replace(nbytes=export.nbytes - 1))

    monkeypatch.setattr(HostDevice, "open_export", shorter)
    match, out = two.get()
    assert match.pages == 0 and out.untouched and two.store.cache(SMALL).get(two.keys).pages == 0


def test_layers_that_do_not_lie_apart_come_by_the_host(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be copied directly, for whichever reason, is read as it ever was."""

    def refused(*_: Any) -> None:
        raise Unavailable("the layers of that memory do not lie apart")

    ways = Ways(monkeypatch)
    monkeypatch.setattr(DevicePages, "places", refused)
    with added_device("host:0"):
        match, out = two.get()
        assert match.tiers == {Tier.HBM: PAGES} and (out.seen == contents(two.keys)).all()
    assert ways.direct == 0 and ways.by_host
