"""One suite over every device: the peer in host memory, ours of CUDA over a driver that is carried out in host memory,
and each GPU that a driver shows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.device import cuda, host_memory
from kvstore.device.base import Addresses, Bytes, Device, DeviceExport, DeviceLost, DeviceStream
from kvstore.device.host_device import FALSE_ANSWERS_MAX, POISON, HostDevice
from kvstore.errors import DeadlineExceeded, OutOfSpace, Unavailable
from tests.helpers.fake_driver import FakeDriver, faked

PIECE = 3000
SEEDS = [0, 1, 2]
GPUS = cuda.find().devices
DRIVERS: dict[str, dict[str, Any]] = {  # old: without batches; bare: without NVRTC
    "driver": {},
    "old driver": {"batches": False},
    "bare driver": {"kernels": False},
    "old and bare driver": {"batches": False, "kernels": False, "seed": 1},
}


@pytest.fixture(params=SEEDS)
def host(request: pytest.FixtureRequest) -> HostDevice:
    return HostDevice(seed=request.param)


@pytest.fixture(params=[*SEEDS, *DRIVERS, *GPUS], ids=lambda param: getattr(param, "name", str(param)))
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if request.param in SEEDS:
        yield HostDevice(seed=request.param)
    elif request.param in DRIVERS:
        with faked(monkeypatch, FakeDriver(**DRIVERS[request.param])) as found:
            yield found
    else:
        yield request.param


def deadline() -> float:
    return time.monotonic() + 30


def some(nbytes: int, seed: int = 0) -> Bytes:
    memory = host_memory.empty(nbytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return memory


def addresses(base: int, offsets: Sequence[int]) -> Addresses:
    return np.array([base + offset for offset in offsets], np.uint64)


def copy(stream: DeviceStream, target: int, source: int, nbytes: int) -> None:
    stream.copy(addresses(target, [0]), addresses(source, [0]), np.array([nbytes], np.uint64))


def at(memory: Bytes) -> int:
    return memory.ctypes.data


def read(device: Device, address: int, nbytes: int) -> Bytes:
    """What is in the device's memory, or the host's, by a stream that knows nothing of others."""
    found, stream = host_memory.empty(nbytes), device.stream()
    copy(stream, at(found), address, nbytes)
    stream.record().wait(deadline())
    return found


# --- Every device ---------------------------------------------------------------------------------------------------


def test_a_batch_goes_there_and_back(device: Device) -> None:
    count = 40
    offsets = [index * 4096 for index in range(count)]
    sizes = np.array([PIECE - 7 * index for index in range(count)], np.uint64)
    source, back = some(count * 4096), host_memory.empty(count * 4096)
    memory, stream = device.allocate(count * 4096), device.stream()
    order = np.random.default_rng(5).permutation(count)
    stream.copy(addresses(memory.address, offsets)[order], addresses(at(source), offsets), sizes)
    stream.copy(addresses(at(back), offsets), addresses(memory.address, offsets)[order], sizes)
    stream.record().wait(deadline())
    for offset, size in zip(offsets, sizes.tolist(), strict=True):
        assert np.array_equal(back[offset : offset + size], source[offset : offset + size])
    memory.free()


def test_nothing_and_empty_pieces(device: Device) -> None:
    memory, stream, source = device.allocate(4096), device.stream(), some(4096)
    stream.copy(*(np.empty(0, np.uint64) for _ in range(3)))
    base = addresses(memory.address, [0, 100])
    stream.copy(base, addresses(at(source), [0, 0]), np.array([0, 100], np.uint64))
    stream.record().wait(deadline())
    assert np.array_equal(read(device, memory.address + 100, 100), source[:100])
    memory.free()


def test_a_stream_keeps_its_order(device: Device) -> None:
    memory, stream = device.allocate(4 * PIECE), device.stream()
    first, second = some(PIECE, 1), some(PIECE, 2)
    copy(stream, memory.address, at(first), PIECE)
    copy(stream, memory.address + PIECE, memory.address, PIECE)
    copy(stream, memory.address, at(second), PIECE)
    stream.record().wait(deadline())
    assert np.array_equal(read(device, memory.address, PIECE), second)
    assert np.array_equal(read(device, memory.address + PIECE, PIECE), first)
    memory.free()


def test_a_stream_begins_behind_anothers_event(device: Device) -> None:
    memory, source = device.allocate(3 * PIECE), some(PIECE)
    streams = [device.stream() for _ in range(3)]
    copy(streams[0], memory.address, at(source), PIECE)
    for index in (1, 2):
        streams[index].wait(streams[index - 1].record())
        copy(streams[index], memory.address + index * PIECE, memory.address + (index - 1) * PIECE, PIECE)
    streams[2].record().wait(deadline())
    assert np.array_equal(read(device, memory.address + 2 * PIECE, PIECE), source)
    memory.free()


def test_an_event_comes_and_stays(device: Device) -> None:
    memory, stream, source = device.allocate(PIECE), device.stream(), some(PIECE)
    empty = stream.record()
    copy(stream, memory.address, at(source), PIECE)
    event, until = stream.record(), deadline()
    while not event.over():
        assert time.monotonic() < until
    assert event.over() and empty.over()
    event.wait(time.monotonic() - 1)  # nothing is left to wait for
    assert np.array_equal(read(device, memory.address, PIECE), source)
    memory.free()


def test_pinned_memory(device: Device) -> None:
    memory, stream, source = device.allocate(1 << 16), device.stream(), some(1 << 16)
    target = some(1 << 16, 1)
    read_only = source.view()
    read_only.flags.writeable = False
    device.register(target)
    device.register(read_only)
    copy(stream, memory.address, at(source), 1 << 16)
    copy(stream, at(target), memory.address, 1 << 16)
    stream.record().wait(deadline())
    device.unregister(target)
    device.unregister(read_only)
    assert np.array_equal(target, source)
    device.register(target)  # as if it had never been
    device.unregister(target)
    memory.free()


def test_whose_memory_it_is(device: Device) -> None:
    memory = device.allocate(10_000)
    assert memory.address % 256 == 0 and memory.nbytes == 10_000
    assert device.owns(memory.address) and device.owns(memory.address + 9999)
    assert not device.owns(at(some(4096)))
    memory.free()
    assert not device.owns(memory.address)
    memory.free()


def test_a_stream_is_found_by_its_handle(device: Device) -> None:
    memory, source = device.allocate(2 * PIECE), some(PIECE)
    theirs, ours = device.stream(), device.stream()
    assert theirs.handle and theirs.handle != ours.handle
    copy(theirs, memory.address, at(source), PIECE)
    ours.wait(device.stream_of(theirs.handle).record())
    copy(ours, memory.address + PIECE, memory.address, PIECE)
    ours.record().wait(deadline())
    assert np.array_equal(read(device, memory.address + PIECE, PIECE), source)
    memory.free()


def test_shared_memory_is_the_same_for_whoever_opens_it(device: Device) -> None:
    """By the descriptor, which may be closed then; it outlives its owner's use of it."""
    memory, stream, source = device.allocate(1 << 16, shared=True), device.stream(), some(1 << 16)
    copy(stream, memory.address, at(source), 1 << 16)
    stream.record().wait(deadline())
    export = device.export(memory.address + 100)
    assert (export.device, export.offset) == (device.uuid, 100) and export.nbytes >= 1 << 16
    if export.descriptor < 0:
        pytest.skip("this driver has no descriptors, and a process does not open a handle of its own")
    opened = device.open_export(export)
    os.close(export.descriptor)
    assert opened.nbytes == export.nbytes and opened.address != memory.address
    memory.free()
    assert np.array_equal(read(device, opened.address, 1 << 16), source)
    opened.free()
    opened.free()


def test_what_cannot_be_opened(device: Device) -> None:
    plain = DeviceExport(device.uuid, 0, 4096, b"no handle")
    for export in (plain, plain._replace(device=bytes(16)), plain._replace(handle=b"", descriptor=-1)):
        with pytest.raises(Unavailable):
            device.open_export(export)
    with pytest.raises(Unavailable):
        device.export(at(some(4096)))
    assert device.reach(device.uuid) == "" and device.reach(bytes(16))


def test_more_memory_than_there_is(device: Device) -> None:
    with pytest.raises(OutOfSpace):
        device.allocate(1 << 50)
    device.allocate(4096).free()


# --- The liberties of the peer --------------------------------------------------------------------------------------


def test_nothing_has_happened_before_the_event(host: HostDevice) -> None:
    memory, stream, source = host.allocate(PIECE), host.stream(), some(PIECE)
    copy(stream, memory.address, at(source), PIECE)
    assert (memory.view() == POISON).all()
    source[:] = 7  # too early
    event = stream.record()
    assert (memory.view() == POISON).all()
    event.wait(deadline())
    assert (memory.view() == 7).all()


def test_a_stream_that_does_not_wait_reads_poison(host: HostDevice) -> None:
    memory, source = host.allocate(2 * PIECE), some(PIECE)
    first, second = host.stream(), host.stream()
    copy(first, memory.address, at(source), PIECE)
    copy(second, memory.address + PIECE, memory.address, PIECE)
    second.record().wait(deadline())
    assert (memory.view() == POISON).all()


def test_poison_spares_what_earlier_work_reads(host: HostDevice) -> None:
    memory, stream, source, found = host.allocate(PIECE), host.stream(), some(PIECE), some(PIECE, 1)
    later, seen = some(PIECE, 2), list[Bytes]()
    copy(stream, memory.address, at(source), PIECE)
    copy(stream, at(found), memory.address, PIECE)
    stream.launch(lambda: seen.append(memory.view().copy()))
    copy(stream, memory.address, at(later), PIECE)
    host.stream().copy(*(addresses(x, [0]) for x in (at(source), at(found), 1)))  # poisons no byte of the source
    stream.record().wait(deadline())
    assert np.array_equal(found, source) and np.array_equal(seen[0], source)


def test_an_event_may_deny_that_it_is_over() -> None:
    denied = 0
    for seed in range(8):
        device = HostDevice(seed=seed)
        memory, stream, source = device.allocate(PIECE), device.stream(), some(PIECE)
        copy(stream, memory.address, at(source), PIECE)
        event = stream.record()
        answers = [event.over() for _ in range(FALSE_ANSWERS_MAX + 1)]
        assert answers[-1] and answers == sorted(answers)
        denied += answers.count(False)
    assert denied


def test_an_event_that_does_not_come_in_time(host: HostDevice) -> None:
    memory, stream, source = host.allocate(PIECE), host.stream(), some(PIECE)
    copy(stream, memory.address, at(source), PIECE)
    event = stream.record()
    host.hold()
    with pytest.raises(DeadlineExceeded):
        event.wait(time.monotonic() + 0.01)
    assert not any(event.over() for _ in range(FALSE_ANSWERS_MAX + 1))
    host.let_go()
    event.wait(deadline())  # the work went on
    assert np.array_equal(memory.view(), source)


def test_a_lost_device(host: HostDevice) -> None:
    memory, stream, source = host.allocate(PIECE), host.stream(), some(PIECE)
    host.register(source)
    copy(stream, memory.address, at(source), PIECE)
    event = stream.record()
    host.lose()
    for call in (
        event.over,
        lambda: event.wait(deadline()),
        lambda: copy(stream, memory.address, at(source), PIECE),
        lambda: stream.wait(event),
        stream.record,
        host.stream,
        lambda: host.stream_of(stream.handle),
        lambda: host.allocate(1),
        lambda: host.register(some(4096)),
    ):
        with pytest.raises(DeviceLost):
            call()
    assert host.owns(memory.address)
    host.unregister(source)
    memory.free()


def test_memory_that_cannot_be_pinned(host: HostDevice) -> None:
    host.refuse_registration = True
    with pytest.raises(Unavailable):
        host.register(some(4096))


def test_devices_that_reach_each_other() -> None:
    far, near = HostDevice("host:1"), HostDevice("host:2", reaches=["host:1"])
    theirs, ours, source, stream = far.allocate(PIECE), near.allocate(PIECE), some(PIECE), near.stream()
    theirs.view()[:] = source
    copy(stream, ours.address, theirs.address, PIECE)
    stream.record().wait(deadline())
    assert np.array_equal(ours.view(), source)
    assert not near.owns(theirs.address) and far.reach(near.uuid) and not near.reach(far.uuid)


# --- The mistakes that it finds -------------------------------------------------------------------------------------


def test_a_copy_out_of_reach(host: HostDevice) -> None:
    far = HostDevice("host:1")
    theirs, ours = far.allocate(PIECE), host.allocate(PIECE)
    for target, source in ((ours, theirs), (theirs, ours)):
        with pytest.raises(AssertionError, match="cannot reach"):
            copy(host.stream(), target.address, source.address, PIECE)
    near = HostDevice("host:2", reaches=["host:1"])
    theirs.free()
    with pytest.raises(AssertionError, match="freed memory of host:1"):
        copy(near.stream(), near.allocate(PIECE).address, theirs.address, PIECE)


def test_a_copy_outside_of_memory(host: HostDevice) -> None:
    memory, stream, source = host.allocate(PIECE), host.stream(), some(2 * PIECE)
    for target, nbytes in [(memory.address + 1, PIECE), (memory.address - 1, PIECE), (64, 1)]:
        with pytest.raises(AssertionError):
            copy(stream, target, at(source), nbytes)
        with pytest.raises(AssertionError):
            copy(stream, at(source), target, nbytes)


def test_freed_memory_is_not_copied(host: HostDevice) -> None:
    memory, stream, source = host.allocate(PIECE), host.stream(), some(PIECE)
    memory.free()
    with pytest.raises(AssertionError):
        copy(stream, memory.address, at(source), PIECE)
    with pytest.raises(AssertionError):
        copy(stream, at(source), memory.address, PIECE)


def test_what_is_being_copied_is_not_given_back(host: HostDevice) -> None:
    memory, stream, source = host.allocate(PIECE), host.stream(), some(PIECE)
    host.register(source)
    copy(stream, memory.address, at(source), PIECE)
    with pytest.raises(AssertionError):
        memory.free()
    with pytest.raises(AssertionError):
        host.unregister(source)
    stream.record().wait(deadline())
    host.unregister(source)
    memory.free()


def test_pieces_over_each_other(host: HostDevice) -> None:
    memory, stream, source = host.allocate(4 * PIECE), host.stream(), some(4 * PIECE)
    sizes = np.array([PIECE, PIECE], np.uint64)
    with pytest.raises(AssertionError):
        stream.copy(addresses(memory.address, [0, PIECE - 1]), addresses(at(source), [0, PIECE]), sizes)
    with pytest.raises(AssertionError):
        stream.copy(addresses(memory.address, [0, PIECE]), addresses(memory.address, [2 * PIECE - 1, 3 * PIECE]), sizes)
