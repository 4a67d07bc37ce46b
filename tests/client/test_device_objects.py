"""Opaque objects from and into device memory, in every kind of store, on the device whose copies finish late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import DevicePointer, Store
from kvstore.client import device_link
from kvstore.client.device_link import DeviceLink
from kvstore.client.local.lease import RunLease
from kvstore.device.base import DeviceEvent, DeviceLost
from kvstore.device.copies import PinnedBounces
from kvstore.device.host_device import HostDevice
from kvstore.errors import DeadlineExceeded, InvalidRequest
from tests.helpers.device_buffers import DLPackBuffer, InterfaceBuffer, added_device, finish
from tests.helpers.device_waits import WaitSite, forget, wait_sites
from tests.helpers.fake_driver import FakeDriver, faked
from tests.helpers.processes import Machine, frames, wait_until
from tests.helpers.workers.objects import value_of

SIZES = (1, 4096, 5000, 65_537, 300_000, (2 << 20) + 3)
LARGE = (17 << 20) + 5  # more than one request


@pytest.fixture(params=["embedded", "daemon", "kv"])
def store(request: pytest.FixtureRequest, stores: dict[str, Store]) -> Store:
    return stores[request.param]


@pytest.fixture(params=["embedded", "daemon"])
def near(request: pytest.FixtureRequest, stores: dict[str, Store]) -> Store:
    return stores[request.param]


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    return str(request.node.nodeid)


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with added_device() as device:
        yield device


def buffer(device: HostDevice, size: int, content: bytes | None = None) -> InterfaceBuffer:
    array = np.frombuffer(content, np.uint8) if content is not None else None
    return InterfaceBuffer(device, (size,), array)


def filled(device: HostDevice, content: bytes) -> InterfaceBuffer:
    return buffer(device, len(content), content)


# --- every kind of store --------------------------------------------------------------------------------------------


def test_values_of_all_sizes_in_one_batch(store: Store, salt: str, device: HostDevice) -> None:
    values = {f"k{i}": value_of(i, size) for i, size in enumerate(SIZES)}
    assert all(store.put_many(list(values), [filled(device, value) for value in values.values()], salt))
    assert [store.get(key, salt=salt).tobytes() for key in values] == list(values.values())
    outs = [buffer(device, len(value) + 9) for value in values.values()]
    keys = [*values, "none"]
    assert store.get_many(keys, [*outs, buffer(device, 1)], salt) == [*map(len, values.values()), -1]
    for out, value in zip(outs, values.values(), strict=True):
        assert out.seen[: len(value)].tobytes() == value
        assert out.part(slice(len(value), None)).untouched, "nothing is written behind the value"


def test_one_value_of_more_than_a_request(store: Store, salt: str, device: HostDevice) -> None:
    value, out = value_of(1, LARGE), buffer(device, LARGE)
    half = filled(device, value[: LARGE // 2]), np.frombuffer(value[LARGE // 2 :], np.uint8)
    assert store.put("large", list(half), salt)
    assert store.get("large", out, salt) == LARGE and out.seen.tobytes() == value
    assert store.put("large", filled(device, value[::-1]), salt, replace=True)
    assert store.get("large", salt=salt).tobytes() == value[::-1]


def test_buffers_of_the_host_and_of_two_devices_in_one_value(store: Store, salt: str, device: HostDevice) -> None:
    value, cuts = value_of(3, 700_000), (0, 10, 200_000, 200_001, 500_000, 700_000)
    with added_device("host:1") as other:
        places: list[Callable[[bytes], Any]] = [
            lambda part: filled(device, part),
            lambda part: np.frombuffer(part, np.uint8),
            lambda part: filled(other, part),
            lambda part: DLPackBuffer(filled(device, part)),
            lambda part: part,
        ]
        parts = [place(value[i:j]) for place, i, j in zip(places, cuts, cuts[1:], strict=False)]
        assert store.put_many(["mixed", "host", "empty"], [parts, b"host", []], salt) == [True, True, True]
        assert store.get("mixed", salt=salt).tobytes() == value
        outs = [buffer(other, 300_000), np.zeros(1000, np.uint8), buffer(device, 500_000)]
        host = bytearray(4)
        assert store.get_many(["mixed", "host"], [outs, host], salt) == [700_000, 4]
        got = b"".join((out if isinstance(out, np.ndarray) else out.seen).tobytes() for out in outs)
        assert got[:700_000] == value and host == b"host"


def test_memory_by_its_address(store: Store, salt: str, device: HostDevice) -> None:
    value = value_of(5, 100_000)
    source, out = filled(device, value), buffer(device, 100_000)
    assert store.put("k", DevicePointer(source.memory.address + 5, 90_000), salt)
    assert store.get(
        "k", [DevicePointer(out.memory.address, 50_000), DevicePointer(out.memory.address + 50_000, 40_000)], salt
    )
    assert out.seen[:90_000].tobytes() == value[5:90_005]
    with pytest.raises(InvalidRequest, match="^data: must be memory of host:0 up to its last byte"):
        store.put("beyond", DevicePointer(source.memory.address, 100_001), salt)
    for address, nbytes, field in ((0, 1, "address"), ("x", 1, "address"), (1, -1, "nbytes"), (1, 1 << 64, "nbytes")):
        with pytest.raises(InvalidRequest, match=f"^{field}: must be a positive integer"):
            DevicePointer(address, nbytes)  # type: ignore[arg-type]
    assert not store.contains("beyond", salt)


def test_the_callers_queued_work_comes_first(store: Store, salt: str, device: HostDevice) -> None:
    """Each value's kernel runs in a stream of its own, and has not begun when the values are put."""
    values = [value_of(i, 40_000) for i in range(3)]
    sources = [buffer(device, 40_000) for _ in values]
    for source, value in zip(sources, values, strict=True):
        stream = device.stream()
        source.stream = stream.handle

        def kernel(source: InterfaceBuffer = source, value: bytes = value) -> None:
            source.seen[...] = np.frombuffer(value, np.uint8)

        stream.launch(kernel)
    keys = ["a", "b", "c"]
    assert all(store.put_many(keys, sources, salt))
    assert [store.get(key, salt=salt).tobytes() for key in keys] == values


def test_bad_device_memory_is_refused_and_nothing_is_stored(store: Store, salt: str, device: HostDevice) -> None:
    good, locked = filled(device, b"good"), buffer(device, 100)
    locked.read_only = True
    strange = InterfaceBuffer(HostDevice("host:7"), (100,))
    gaps = InterfaceBuffer(device, (10, 20)).part(slice(None), slice(0, 10))
    for bad, why in ((gaps, "C-contiguous"), (strange, "must be memory of a device")):
        with pytest.raises(InvalidRequest, match=f"^data: .*{why}"):
            store.put_many(["a", "b"], [good, [good, bad]], salt)
    assert store.contains(["a", "b"], salt) == [False, False]
    assert store.put("a", good, salt)
    small = buffer(device, 3)
    for bad, why in (
        (gaps, "C-contiguous"),
        (strange, "memory of a device"),
        (locked, "writable"),
        (small, "at least 4"),
    ):
        for call in (lambda: store.get("a", bad, salt), lambda: store.get_many(["a"], [bad], salt)):  # noqa: B023
            with pytest.raises(InvalidRequest, match=f"^out: .*{why}"):
                call()
    assert small.untouched


def test_a_lost_device_fails_its_calls_alone(store: Store, salt: str, device: HostDevice) -> None:
    lost = filled(device, bytes(50_000))
    assert store.put("k", b"value", salt)
    device.lose()
    for call in (lambda: store.get("k", lost, salt), lambda: store.put("l", lost, salt)):
        with pytest.raises(DeviceLost, match="host:0 is lost"):
            call()
    assert not store.contains("l", salt)
    with added_device() as other:
        out = buffer(other, 5)
        assert store.put("l", filled(other, b"later"), salt) and store.get("l", out, salt) == 5
        assert out.seen.tobytes() == b"later"


def test_registered_device_memory_is_a_value_by_its_address(store: Store, salt: str, device: HostDevice) -> None:
    value = value_of(9, 60_000)
    pool = filled(device, value)
    start = pool.memory.address
    with store.register(pool) as registration:
        assert store.registered(pool.part(slice(5, 10))) and not store.registered(buffer(device, 1))
        with pytest.raises(InvalidRequest, match="^buffer: must not overlap"):
            store.register(DevicePointer(start + 1, 1))
        assert store.put("k", registration.part(start + 1000, 20_000), salt)
        assert store.get("k", registration.part(start + 30_000, 30_000), salt) == 20_000
        assert pool.seen[30_000:50_000].tobytes() == value[1000:21_000]
        for address, size in ((start - 1, 2), (start + 59_999, 2), (start, -1)):
            with pytest.raises(InvalidRequest, match="^address: must be inside the buffer"):
                registration.part(address, size)
    assert not store.registered(pool)


def test_registered_host_memory_is_pinned_where_a_device_is_in_use(device: HostDevice, tmp_path: Path) -> None:
    memory, more = np.zeros(1 << 16, np.uint8), np.zeros(1 << 16, np.uint8)
    with kvstore.open(dram="16MiB", shm_dir=tmp_path) as store:
        with store.register(memory):
            assert device.pinned_bytes == memory.nbytes
        assert device.pinned_bytes == 0
        device.refuse_registration = True
        with store.register(memory):
            assert store.registered(memory), "the driver may refuse: copies take longer then"
        device.refuse_registration = False
        store.register(more)
        assert device.pinned_bytes == more.nbytes
    assert device.pinned_bytes == 0, "the end of the store ends its registrations"


# --- straight from and to a node's frames ---------------------------------------------------------------------------


def test_values_in_dram_pass_through_no_bounce(
    near: Store, salt: str, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(PinnedBounces, "borrow")
    keys = [f"k{i}" for i in range(8)]
    values = [value_of(i, 90_000) for i in range(8)]
    outs = [buffer(device, 90_000) for _ in keys]
    assert all(near.put_many(keys, [filled(device, value) for value in values], salt, wait=False))
    assert near.get_many(keys, outs, salt) == [90_000] * 8 and near.get("k3", outs[0], salt) == 90_000
    assert [out.seen.tobytes() for out in outs[1:]] == values[1:] and outs[0].seen.tobytes() == values[3]


@pytest.mark.parametrize("leased", [True, False])
def test_values_that_leave_while_a_device_reads_them(
    tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch, leased: bool
) -> None:
    """Under the lease they stay; without it they are a miss, and never bytes of another value."""
    if not leased:
        monkeypatch.setattr(RunLease, "take", lambda self, runs: sum(run.length for run in runs))
    with kvstore.open(dram="4MiB", shm_dir=tmp_path) as store:
        values = {f"k{i}": value_of(i, 100_000) for i in range(4)}
        assert all(store.put_many(list(values), list(values.values())))
        outs, begun, wait = [buffer(device, 100_000) for _ in values], threading.Event(), DeviceLink.wait

        def late(link: DeviceLink, event: DeviceEvent, memory: object) -> None:
            if not begun.is_set():
                begun.set()
                for i in range(80):  # twice the capacity
                    store.put(f"other{i}", value_of(100 + i, 100_000))
            wait(link, event, memory)

        monkeypatch.setattr(DeviceLink, "wait", late)
        sizes = store.get_many(list(values), outs)
        assert begun.is_set() and sizes == [100_000 if leased else -1] * 4
        for out, size, value in zip(outs, sizes, values.values(), strict=True):
            assert size < 0 or out.seen.tobytes() == value


@pytest.mark.parametrize("size", [100_000, LARGE])
def test_a_device_that_is_late_writes_into_no_frame_of_another_value(
    tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(device_link, "COPY_DEADLINE_S", 0.05)
    with kvstore.open(dram="48MiB", extent="4MiB", shm_dir=tmp_path) as store:
        device.hold()
        with pytest.raises(DeadlineExceeded):
            store.put("late", filled(device, value_of(0, size)))
        others = {f"k{i}": value_of(i, 800_000) for i in range(120)}  # twice the capacity
        for key, value in others.items():
            store.put(key, value)
        device.let_go()
        finish(device)
        found = {key: store.get(key) for key in others}
        assert sum(value is not None for value in found.values()) > 5
        assert all(value is None or value.tobytes() == others[key] for key, value in found.items())
        assert not store.contains("late") and store.verify()["findings"] == []


def test_frames_of_a_lost_devices_values_are_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait, lost = DeviceLink.wait, list[HostDevice]()

    def without_it(self: DeviceLink, *given: Any) -> None:
        lost[-1].lose()
        wait(self, *given)

    with kvstore.open(dram="8MiB", shm_dir=tmp_path) as store:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceLink, "wait", without_it)
            for i in range(12):
                with added_device() as device:
                    lost.append(device)
                    with pytest.raises(DeviceLost):
                        store.put_many(["a", "b"], [filled(device, value_of(i, 1 << 20)), b"1"])
        assert store.put_many(["c", "d"], [value_of(1, 3 << 20), value_of(2, 3 << 20)]) == [True, True]
        assert not store.contains("a")
        wait_until("all frames are given back", lambda: not frames(store).get("reserved"))


def test_values_on_nvme_and_verified_values(tmp_path: Path, machine: Machine, device: HostDevice) -> None:
    values = {f"k{i}": value_of(i, size) for i, size in enumerate((10, 300_000, (9 << 20) + 1, 3 << 20))}
    settings: dict[str, Any] = {"nvme": [f"{tmp_path / 'nvme'}:64MiB"], "extent": "2MiB", "nvme_extent": "4MiB"}
    with kvstore.open(dram="16MiB", verify_reads=True, demote_at=0.0, shm_dir=machine.shm_dir, **settings) as store:
        for key, value in values.items():
            assert store.put(key, filled(device, value))
            stored = len(store.object_keys())
            wait_until("it is saved", lambda stored=stored: store.stats()["tiers"]["nvme"]["pages"] >= stored)
        for key, value in values.items():
            out = [buffer(device, 100), buffer(device, len(value))]
            assert store.get(key, out) == len(value)
            assert (out[0].seen.tobytes() + out[1].seen.tobytes())[: len(value)] == value
        outs = [buffer(device, len(value)) for value in values.values()]
        assert store.get_many(list(values), outs) == [*map(len, values.values())]
        assert [out.seen.tobytes() for out in outs] == list(values.values())


# --- every wait is needed -------------------------------------------------------------------------------------------


def right_get(store: Store, salt: str, device: HostDevice) -> bool:
    out, value = buffer(device, 50_000), value_of(1, 50_000)
    store.put("k", value, salt)
    return store.get("k", out, salt) == len(value) and out.seen.tobytes() == value


def right_put(store: Store, salt: str, device: HostDevice) -> bool:
    value = value_of(2, 50_000)
    store.put("l", filled(device, value), salt)
    return bool(store.get("l", salt=salt).tobytes() == value)


SITES = [site for site in wait_sites(device_link) if site.function == "finish"]


@pytest.mark.parametrize("right", [right_get, right_put])
@pytest.mark.parametrize("site", [*SITES, None], ids=str)
def test_bytes_are_right_with_the_wait_and_wrong_without_it(
    near: Store,
    salt: str,
    device: HostDevice,
    monkeypatch: pytest.MonkeyPatch,
    site: WaitSite | None,
    right: Callable[[Store, str, HostDevice], bool],
) -> None:
    assert len(SITES) == 1
    left_out = forget(monkeypatch, site) if site is not None else []
    assert right(near, salt, device) == (site is None)
    assert bool(left_out) == (site is not None)


# --- the calls of a driver, and the end of a store ------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [True, False])
def test_a_driver_copies_values_and_refuses_a_stream_that_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    """The driver is a fake, but all code above it is what runs on a GPU."""
    fake = FakeDriver(kernels=kernels)
    with faked(monkeypatch, fake) as gpu, kvstore.open(dram="16MiB", shm_dir=tmp_path) as store:
        memory, streams = gpu.allocate(1 << 20), [gpu.stream(), gpu.stream()]
        seen = next(each for each in fake.device._memories if each.address == memory.address).view()
        seen[:] = np.frombuffer(value_of(1, 1 << 20), np.uint8)

        def at(start: int, size: int, stream: int = 0) -> DevicePointer:
            return DevicePointer(memory.address + start, size, streams[stream].handle)

        value = seen[:105_000].tobytes() + b"host"
        parts = [at(0, 5000), at(5000, 100_000, 1), b"host"]
        assert store.put_many(["mixed", "small"], [parts, at(7, 9000)]) == [True, True]
        assert store.get("mixed").tobytes() == value
        outs = [at(300_000, 9000), [at(400_000, 105_000, 1), at(600_000, 4)]]
        assert store.get_many(["small", "mixed"], outs) == [9000, 105_004]
        assert seen[300_000:309_000].tobytes() == value[7:9007]
        assert seen[400_000:505_000].tobytes() + seen[600_000:600_004].tobytes() == value
        fake.capturing.add(streams[1].handle)
        with pytest.raises(InvalidRequest, match="^stream: records a CUDA graph"):
            store.put("recorded", at(0, 200_000, 1))
        with pytest.raises(InvalidRequest, match="^stream: records a CUDA graph"):
            store.get("small", at(0, 9000, 1))
        assert not store.contains("recorded") and store.put("recorded", at(0, 200_000))
        wait_until("all frames are given back", lambda: not frames(store).get("reserved"))


def has_work(device: HostDevice) -> bool:
    with device.changed:
        return any(work.writes for work in device.pending())


def test_a_store_that_is_closed_during_a_late_copy_keeps_its_frames(
    machine: Machine, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it is closed before the copy is found to be late."""
    machine.serve("n", dram="4MiB")
    store, other = machine.connect("n"), machine.connect("n")
    failures = list[Exception]()
    with monkeypatch.context() as patch:
        patch.setattr(device_link, "COPY_DEADLINE_S", 0.5)
        device.hold()

        def put() -> None:
            try:
                store.put("late", filled(device, bytes(200_000)))
            except DeadlineExceeded as error:
                failures.append(error)

        thread = threading.Thread(target=put)
        thread.start()
        wait_until("the copy has begun", lambda: has_work(device))
        store.close()
        thread.join(30)
    assert len(failures) == 1
    values = {f"k{i}": value_of(i, 200_000) for i in range(40)}  # twice the capacity
    for key, value in values.items():
        other.put(key, value)
    device.let_go()
    finish(device)
    found = {key: value for key in values if (value := other.get(key)) is not None}
    assert len(found) > 3 and all(value.tobytes() == values[key] for key, value in found.items())
