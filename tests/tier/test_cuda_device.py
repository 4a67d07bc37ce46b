"""The device of CUDA as a whole, over a driver that is carried out in host memory: what the suite of all devices does
not see of it. Which way pieces go, what the driver is told, and what becomes of its refusals."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from kvstore.device import cuda, host_memory
from kvstore.device.base import Addresses, Bytes, DeviceLost
from kvstore.device.cuda import CudaDevice, CudaStream
from kvstore.device.cuda_copies import Way
from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from tests.helpers.fake_driver import FakeDriver, faked

PIECE = 9000  # longer than what goes by the kernel, as it is measured here
BATCH, SINGLE, KERNEL = "cuMemcpyBatchAsync", "cuMemcpyAsync", "cuLaunchKernel"


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    with faked(monkeypatch, fake) as found:
        yield found


def some(nbytes: int = PIECE) -> Bytes:
    memory = host_memory.empty(nbytes)
    memory[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return memory


def read_only(content: Bytes) -> Bytes:
    """Memory that nobody may write to, as the machine sees it."""
    pages = mmap.mmap(-1, len(content))
    pages[:] = content.tobytes()
    found = np.frombuffer(pages, np.uint8)
    address, length = found.ctypes.data, -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.PROT_READ) == 0
    found.flags.writeable = False
    return found


def at(*places: int) -> Addresses:
    return np.array(places, np.uint64)


def done(stream: CudaStream) -> None:
    stream.record().wait(time.monotonic() + 30)


def ways(fake: FakeDriver) -> list[str]:
    """How pieces went since this was last asked."""
    found = [name for name in fake.said if name in (BATCH, SINGLE, KERNEL)]
    fake.said.clear()
    return found


def there_and_back(device: CudaDevice, stream: CudaStream, source: Bytes) -> None:
    """Two pieces to the device in one copy, and back to memory that is not registered."""
    memory, back, half = device.allocate(len(source)), some(len(source)), len(source) // 2
    back[:] = 0
    ends, nbytes = np.array([0, half], np.uint64), at(half, len(source) - half)
    stream.copy(memory.address + ends, source.ctypes.data + ends, nbytes)
    stream.copy(back.ctypes.data + ends, memory.address + ends, nbytes)
    done(stream)
    memory.free()
    assert np.array_equal(back, source)


# --- Opening --------------------------------------------------------------------------------------------------------


def test_what_goes_faster_by_the_kernel_is_measured_by_the_devices_time(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine takes two microseconds to begin a piece. To the device a kernel has half of its speed, to the host so
    little that it never pays, and within the device it always does."""
    kernel_bytes_per_s = {"to the device": 20e9, "to the host": 1e9, "within": 1e12}

    def rate(how: str, way: str, count: int, nbytes: int) -> float:
        if how == "kernel":
            return count * nbytes / kernel_bytes_per_s[way]
        return count * (2e-6 + nbytes / 50e9)

    fake.rate = rate
    monkeypatch.setattr(cuda, "REPEATS", 1)
    with faked(monkeypatch, fake, measured=256 << 10) as device:
        assert device.kernel_below == {Way.TO_DEVICE: 64 << 10, Way.TO_HOST: 0, Way.WITHIN: 512 << 10}
    assert not fake.registered and fake.device.pinned_bytes == 0, "what it was measured with is given back"
    assert fake.device._bytes_free == 1 << 30


def test_a_device_that_does_not_copy_is_lost_when_it_is_opened(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    staying = len(cuda._IN_USE)
    with faked(monkeypatch, fake) as device:
        monkeypatch.setattr(cuda, "DEADLINE_S", 0.01)
        fake.device.hold()
        with pytest.raises(DeviceLost, match="did not end in time"):
            device.allocate(100)
    assert len(cuda._IN_USE) == staying + 1, "the device may still write there"
    cuda._IN_USE.pop()
    fake.device.let_go()


# --- Contexts and waits ---------------------------------------------------------------------------------------------


def test_each_thread_has_the_context_for_its_calls(fake: FakeDriver, device: CudaDevice) -> None:
    failed: list[BaseException] = []
    stream = device.stream()

    def work() -> None:
        try:
            there_and_back(device, stream, some())
            assert not fake.stack
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed


def test_an_event_is_waited_for_until_the_deadline(fake: FakeDriver, device: CudaDevice) -> None:
    memory, source, stream = device.allocate(PIECE), some(), device.stream()
    stream.copy(at(memory.address), at(source.ctypes.data), at(PIECE))
    event = stream.record()
    fake.device.hold()
    with pytest.raises(DeadlineExceeded):
        event.wait(time.monotonic() + 0.01)
    assert not event.over()
    fake.device.let_go()
    event.wait(time.monotonic() + 30)
    assert event.over()
    memory.free()


# --- Ways of pieces -------------------------------------------------------------------------------------------------


def test_pieces_go_in_one_batch_or_by_the_kernel(fake: FakeDriver, device: CudaDevice) -> None:
    stream, source = device.stream(), some()
    ways(fake)
    there_and_back(device, stream, source)
    assert ways(fake) == [BATCH, BATCH]
    device.register(source)
    there_and_back(device, stream, source)
    assert ways(fake) == [KERNEL, BATCH], "halves are short enough, where the device sees them"
    device.unregister(source)
    there_and_back(device, stream, source)
    assert ways(fake) == [BATCH, BATCH]


def test_short_pieces_of_a_copy_go_by_the_kernel_and_long_ones_by_the_engines(
    fake: FakeDriver, device: CudaDevice
) -> None:
    """As many launches as they need. What goes from host to host goes by the engines, however short it is."""
    short, count = 8, 300
    stream, source, back = device.stream(), some(count * short + PIECE), some(count * short + PIECE)
    memory = device.allocate(len(source))
    for each in (source, back):
        device.register(each)
    back[:] = 0
    nbytes = np.array([short] * count + [PIECE], np.uint64)
    ends = np.cumsum(nbytes) - nbytes
    ways(fake)
    stream.copy(memory.address + ends, source.ctypes.data + ends, nbytes)
    stream.copy(back.ctypes.data + ends, memory.address + ends, nbytes)
    assert ways(fake) == [BATCH, KERNEL, KERNEL, KERNEL] * 2
    done(stream)
    assert np.array_equal(back, source)
    stream.copy(back.ctypes.data + ends[:1], source.ctypes.data + ends[1:2], nbytes[:1])
    assert ways(fake) == [BATCH]
    done(stream)
    assert np.array_equal(back[:short], source[short : 2 * short])
    for each in (source, back):
        device.unregister(each)
    memory.free()


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams_take_pieces_one_by_one(fake: FakeDriver, device: CudaDevice, handle: int) -> None:
    stream = device.stream_of(handle)
    ways(fake)
    there_and_back(device, stream, some())
    assert ways(fake) == [SINGLE] * 4
    stream.copy(at(0, 0), at(0, 0), at(0, 0))
    assert ways(fake) == []


def test_a_driver_that_knows_the_call_but_not_on_this_device(fake: FakeDriver, device: CudaDevice) -> None:
    """It is not asked again, once it refused memory that is registered: other memory may be the reason."""
    stream, source = device.stream(), some(4 * PIECE)  # too long for the kernel
    fake.batch_answer = lambda spans: driver.CUresult.CUDA_ERROR_NOT_SUPPORTED
    ways(fake)
    there_and_back(device, stream, source)
    assert ways(fake) == [BATCH, SINGLE, SINGLE] * 2 and device.batches
    device.register(source)
    there_and_back(device, stream, source)
    assert ways(fake) == [BATCH, *[SINGLE] * 4]
    assert not device.batches
    device.unregister(source)


def test_a_batch_with_pieces_that_it_may_not_have(fake: FakeDriver, device: CudaDevice) -> None:
    """They go one by one, and the next batch is a batch again."""
    stream, source, back, memory = device.stream(), some(), some(), device.allocate(PIECE)
    device.register(source)
    known = {memory.address, source.ctypes.data}
    fake.batch_answer = lambda spans: (
        driver.CUresult.CUDA_SUCCESS
        if all(start in known for start, _ in spans)
        else driver.CUresult.CUDA_ERROR_INVALID_VALUE
    )
    back[:] = 0
    ways(fake)
    stream.copy(at(memory.address), at(source.ctypes.data), at(PIECE))
    stream.copy(at(back.ctypes.data, 0), at(memory.address, 0), at(PIECE, 0))
    stream.copy(at(memory.address), at(source.ctypes.data), at(PIECE))
    done(stream)
    assert ways(fake) == [BATCH, BATCH, SINGLE, BATCH] and device.batches
    assert np.array_equal(back, source)
    device.unregister(source)
    memory.free()


# --- Registered memory ----------------------------------------------------------------------------------------------


def test_memory_that_is_mapped_read_only_is_registered_as_such(fake: FakeDriver, device: CudaDevice) -> None:
    source, other, stream = read_only(some()), some(), device.stream()
    device.register(source)
    device.register(other)
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    assert fake.registered == {
        source.ctypes.data: (PIECE, flags | driver.CU_MEMHOSTREGISTER_READ_ONLY),
        other.ctypes.data: (PIECE, flags),
    }
    ways(fake)
    there_and_back(device, stream, source)
    assert ways(fake) == [KERNEL, BATCH]
    memory = device.allocate(PIECE)
    with pytest.raises(Unavailable, match="the kernel cannot reach that memory"):
        stream.copy_by_kernel(at(source.ctypes.data), at(memory.address), at(PIECE))
    stream.copy_by_kernel(at(other.ctypes.data), at(memory.address), at(PIECE))
    done(stream)
    for each in (source, other):
        device.unregister(each)
    memory.free()


# --- A device that is lost ------------------------------------------------------------------------------------------


def test_a_lost_device(fake: FakeDriver, device: CudaDevice) -> None:
    memory, shared, source = device.allocate(PIECE), device.allocate(PIECE, shared=True), some()
    stream, event = device.stream(), device.stream().record()
    device.register(source)
    fake.lose()
    calls: list[Any] = [
        event.over,
        lambda: event.wait(time.monotonic() + 30),
        lambda: stream.copy(at(memory.address), at(source.ctypes.data), at(PIECE)),
        lambda: stream.wait(event),
        stream.record,
        device.stream,
        lambda: device.allocate(1),
        lambda: device.allocate(1, shared=True),
        lambda: device.export(shared.address),
        lambda: device.register(some(4096)),
    ]
    for call in calls:
        with pytest.raises(DeviceLost, match="ECC_UNCORRECTABLE"):
            call()
    assert "ECC_UNCORRECTABLE" in device.lost
    assert cuda.find() == ((), f"cuda:0 was lost ({device.lost})")
    for give_back in (memory.free, shared.free, lambda: device.unregister(source)):
        give_back()
    assert not device.owns(memory.address)


@pytest.mark.parametrize("first", ["owns", "free", "free shared", "unregister"])
def test_whoever_gives_back_is_the_first_to_see_that_the_device_is_lost(
    fake: FakeDriver, device: CudaDevice, first: str
) -> None:
    memory, shared, source = device.allocate(PIECE), device.allocate(PIECE, shared=True), some()
    device.register(source)
    calls: dict[str, Any] = {
        "owns": lambda: device.owns(memory.address),
        "free": memory.free,
        "free shared": shared.free,
        "unregister": lambda: device.unregister(source),
    }
    fake.lose()
    assert not calls.pop(first)()
    assert "ECC_UNCORRECTABLE" in device.lost
    for call in calls.values():
        assert not call()


@pytest.mark.timeout(60)
def test_memory_that_is_collected_while_the_device_is_opened_is_unpinned(
    fake: FakeDriver, device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs a finalizer in the thread that opens the device, and so holds its lock."""
    opened, memory = cuda._OpenDevice, some()
    collected = list[str]()

    def opens(*given: Any) -> Any:
        made = opened(*given)
        device.unregister(memory)
        collected.append("while it was opened")
        return made

    monkeypatch.setattr(cuda, "_OpenDevice", opens)
    device.allocate(100).free()
    assert collected
    device.register(memory)
    device.unregister(memory)
    assert not fake.registered


def test_a_stream_whose_work_is_recorded_is_refused_before_anything_waits_for_it(
    fake: FakeDriver, device: CudaDevice
) -> None:
    """An event of it would draw our copies into the recording: all of them would fail until it ends."""
    theirs, ours = device.stream(), device.stream()
    fake.capturing.add(theirs.handle)
    with pytest.raises(InvalidRequest, match=r"^stream: records a CUDA graph: copy outside of it \(got stream 0x"):
        device.stream_of(theirs.handle).record()
    there_and_back(device, ours, some())
    fake.capturing.clear()
    device.stream_of(theirs.handle).record().wait(time.monotonic() + 30)
