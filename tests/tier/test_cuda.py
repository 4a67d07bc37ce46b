"""What of CUDA is decided without a device: errors, ways of pieces, and one line why there is none."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from cuda.bindings import driver

from kvstore.device import cuda, cuda_driver
from kvstore.device.base import DeviceLost
from kvstore.device.cuda import CudaEvent
from kvstore.device.cuda_copies import (
    BATCH_VERSION,
    RegisteredRange,
    RegisteredRanges,
    attributes,
    error_name,
    in_allocations,
)
from kvstore.device.cuda_driver import (
    LOST,
    DriverError,
    access_of,
    allocate_mapped,
    call,
    export,
    fault,
    open_export,
    properties_of,
)
from kvstore.errors import DeadlineExceeded, OutOfSpace, Unavailable
from tests.helpers.fake_driver import has_driver, package_takes

BASE = 0x7F00_0000_0000


def u64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


# --- Whether there is one -------------------------------------------------------------------------------------------


def test_without_a_driver_there_is_one_line() -> None:
    devices, missing = cuda.find()
    assert bool(devices) == (not missing)
    assert "\n" not in missing
    if not has_driver():
        assert missing == "no NVIDIA driver"


def test_without_a_driver_the_package_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 13.3.1 its error is a plain RuntimeError, from which nothing is to be seen."""

    def init(_: int) -> tuple[Any, ...]:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(driver, "cuInit", init)
    monkeypatch.setattr(cuda_driver, "absent", lambda: cuda_driver.NO_DRIVER)
    cuda_driver.begin.cache_clear()
    cuda._devices.cache_clear()
    assert cuda.find() == ((), "no NVIDIA driver")


def test_the_modules_load_no_driver_and_no_package() -> None:
    look = "import sys, kvstore.device.cuda; print([name for name in sys.modules if name.partition('.')[0] == 'cuda'])"
    assert subprocess.check_output([sys.executable, "-c", look], text=True) == "[]\n"


# --- Errors ---------------------------------------------------------------------------------------------------------


def test_all_errors_that_end_a_process_are_lost_devices() -> None:
    """As the driver's own words have it; up to 13.1 the package has none for single errors."""
    assert {each.name for each in driver.CUresult} >= LOST
    words = {each.name: " ".join((each.__doc__ or "").split()) for each in driver.CUresult}
    if not any(words.values()):
        pytest.skip("this version of cuda-bindings says nothing of single errors")
    ends = {name for name, text in words.items() if "process must be terminated" in text}
    assert len(ends) > 8
    assert ends <= LOST


def test_errors_of_the_driver_become_ours() -> None:
    assert type(fault("CUDA_ERROR_ILLEGAL_ADDRESS", "cuX")) is DeviceLost
    assert type(fault("CUDA_ERROR_OUT_OF_MEMORY", "cuX")) is OutOfSpace
    other = fault("CUDA_ERROR_NOT_PERMITTED", "cuMemHostRegister")
    assert isinstance(other, Unavailable) and not isinstance(other, DeviceLost)
    assert str(other) == "cuda: cuMemHostRegister: CUDA_ERROR_NOT_PERMITTED"
    assert str(pickle.loads(pickle.dumps(other))) == str(other)
    assert error_name(driver, 700) == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert error_name(driver, 54321) == "error 54321"


def test_a_call_that_the_driver_lacks_is_one_line() -> None:
    def cuNewCall() -> None:
        raise RuntimeError('Function "cuNewCall" not found\nlibcuda.so.1')

    with pytest.raises(DriverError, match='^cuda: cuNewCall: Function "cuNewCall" not found$'):
        call(cuNewCall)


def test_an_error_number_that_the_package_does_not_know_is_one_line() -> None:
    """Up to 13.1 the package looks the number up in a table: KeyError."""

    def cuEventQuery(_: int) -> tuple[Any, ...]:
        return ({}[929],)

    with pytest.raises(DriverError, match="^cuda: cuEventQuery: 929$"):
        call(cuEventQuery, 1)
    primary: Any = SimpleNamespace(driver=SimpleNamespace(cuEventQuery=cuEventQuery), current=nullcontext)
    with pytest.raises(DriverError, match="929"):
        CudaEvent(primary, 1).over()


# --- Waiting --------------------------------------------------------------------------------------------------------


def test_a_wait_ends_soon_after_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes ten microseconds here. There is no sleep before it pays, none is long beside the wait so far, and
    none goes beyond the deadline."""
    nobody: Any = None
    event = CudaEvent(nobody, 1)
    clock_s, slept = [0.0], list[tuple[float, float]]()  # when, and for how long

    def monotonic() -> float:
        clock_s[0] += 10e-6
        return clock_s[0]

    def sleep(seconds: float) -> None:
        slept.append((clock_s[0], seconds))
        clock_s[0] += seconds

    monkeypatch.setattr(event, "over", lambda: False)
    monkeypatch.setattr(cuda, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep))
    with pytest.raises(DeadlineExceeded):
        event.wait(0.1)
    assert 50e-6 < slept[0][0] < 100e-6
    assert all(0 < seconds <= min(1e-3, waited_s / 20) for waited_s, seconds in slept)
    assert max(seconds for _, seconds in slept) == 1e-3, "a long wait is no spin"
    assert 0.1 <= clock_s[0] < 0.1001


# --- Ways of pieces -------------------------------------------------------------------------------------------------


def test_attributes_are_those_that_the_call_of_12_8_takes() -> None:
    """Order of the source, two places of a type and a number each, flags: 24 bytes."""
    assert BATCH_VERSION == 12080
    found = attributes(driver)
    found.flags = 9
    words = (ctypes.c_uint32 * 6).from_address(int(found.getPtr()))
    assert list(words) == [1, 0, 0, 0, 0, 9]


def test_registered_memory_is_found_where_the_device_sees_it() -> None:
    ranges = RegisteredRanges()
    inside, there = ranges.translate(u64(5), u64(1), write=False)
    assert (inside.tolist(), there.tolist()) == ([False], [5])
    ranges.add(RegisteredRange(BASE + 0x9000, BASE + 0xA000, 0x100, False))
    ranges.add(RegisteredRange(BASE, BASE + 0x1000, BASE, True))
    at = u64(BASE, BASE + 0xFFF, BASE + 0xFFF, BASE + 0x1000, BASE - 1, BASE + 0x9010, BASE + 0x9010)
    nbytes = u64(0x1000, 1, 2, 1, 1, 0xFF0, 0xFF1)
    inside, there = ranges.translate(at, nbytes, write=False)
    assert inside.tolist() == [True, True, False, False, False, True, False]
    assert there.tolist() == [*at[:5].tolist(), 0x110, int(at[6])]
    assert ranges.translate(at, nbytes, write=True)[0].tolist() == [True, True, False, False, False, False, False]
    ranges.remove(BASE)
    assert ranges.translate(at, nbytes, write=False)[0].tolist() == [False, False, False, False, False, True, False]


@pytest.mark.timeout(60)
def test_a_finalizer_may_take_a_range_away_while_another_one_comes() -> None:
    """The collector runs it in the same thread, in the midst of the change."""
    ranges, gone = RegisteredRanges(), u64(BASE)

    class Collected(RegisteredRange):
        def __getattribute__(self, name: str) -> Any:
            if name == "device_address" and dead:
                ranges.remove(dead.pop())
            return super().__getattribute__(name)

    dead = [BASE]
    ranges.add(RegisteredRange(BASE, BASE + 0x1000, BASE, True))
    ranges.add(Collected(BASE + 0x9000, BASE + 0xA000, 0x100, False))
    assert not ranges.translate(gone, u64(1), write=False)[0].any()
    assert ranges.translate(u64(BASE + 0x9000), u64(1), write=False)[0].all()


def test_pieces_in_memory_of_the_device_are_found_with_few_questions() -> None:
    asked = []

    def allocation(address: int) -> tuple[int, int] | None:
        asked.append(address)
        start = address // 1000 * 1000
        return None if start == 3000 else (start, start + 1000)

    ok, one = u64(1000, 2500, 1999, 2000), u64(1, 1, 1, 1)
    assert in_allocations(ok, one, allocation)
    assert asked == [1000, 2500]
    assert in_allocations(u64(), u64(), allocation)
    assert not in_allocations(u64(1000, 3500), u64(1, 1), allocation)
    assert not in_allocations(u64(1999), u64(2), allocation)  # it goes on behind the end
    assert not in_allocations(u64(*range(10_000, 30_000, 1000)), np.ones(20, np.uint64), allocation)  # too many


# --- Memory that others open ----------------------------------------------------------------------------------------


class Answers(NamedTuple):
    """A primary context that says of every attribute the same."""

    attributes: int
    driver: Any = driver
    ordinal: int = 3

    def attribute(self, name: str) -> int:
        assert hasattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return self.attributes


def test_what_the_driver_is_asked_for_memory_with_a_descriptor() -> None:
    """Field by field, as the driver's structures have them: what is set in a part is set in the whole."""
    primary: Any = Answers(1)
    properties, access = properties_of(primary), access_of(primary)
    found = (ctypes.c_int * 4).from_address(int(properties.getPtr()))
    assert list(found) == [1, 1, 1, 3], "pinned, by a file descriptor, on device 3"
    assert properties.allocFlags.gpuDirectRDMACapable == 1
    assert properties_of(Answers(0)).allocFlags.gpuDirectRDMACapable == 0  # type: ignore[arg-type]
    told = (ctypes.c_int * 3).from_address(int(access.getPtr()))
    assert list(told) == [1, 3, 3], "device 3 reads and writes"


class CheckedDriver:
    """The package's module of the driver, without a driver: each call is made with our arguments, which the package
    takes or refuses (TypeError) before it looks for the driver; what it returns is made up.

    Attributes:
        refused: a call that the driver refuses.
    """

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.said: list[str] = []
        self.returns: dict[str, tuple[Any, ...]] = {
            "cuMemGetAllocationGranularity": (2 << 20,),
            "cuMemCreate": (driver.CUmemGenericAllocationHandle(),),
            "cuMemImportFromShareableHandle": (driver.CUmemGenericAllocationHandle(),),
            "cuMemAddressReserve": (driver.CUdeviceptr(BASE),),
            "cuMemExportToShareableHandle": (os.memfd_create("exported"),),
            "cuIpcGetMemHandle": (driver.CUipcMemHandle(),),
            "cuIpcOpenMemHandle": (driver.CUdeviceptr(BASE),),
            "cuMemGetAddressRange": (driver.CUdeviceptr(BASE), 8 << 20),
            "cuMemAlloc": (driver.CUdeviceptr(BASE),),
        }

    def __getattr__(self, name: str) -> Any:
        found = getattr(driver, name)
        if not name.startswith("cu"):
            return found

        def checked(*given: object) -> tuple[Any, ...]:
            package_takes(name, given)
            self.said.append(name)
            if name == self.refused:
                return (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, *(None for _ in self.returns.get(name, ())))
            return (driver.CUresult.CUDA_SUCCESS, *self.returns.get(name, ()))

        checked.__name__ = name
        return checked


class CheckedPrimary(Answers):
    """A primary context that is current, of that driver."""

    lost = ""

    def current(self) -> nullcontext[None]:
        return nullcontext()


MAPPED = ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
UNMAPPED = ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
without_a_driver = pytest.mark.skipif(has_driver(), reason="the calls would be carried out")


@without_a_driver
def test_mapped_memory_is_made_shown_and_given_back() -> None:
    made = CheckedDriver()
    primary: Any = CheckedPrimary(1, made)
    memory = allocate_mapped(primary, (2 << 20) + 1)
    assert (memory.address, memory.nbytes) == (BASE, 4 << 20), "whole steps of the driver's"
    assert made.said == ["cuMemGetAllocationGranularity", "cuMemCreate", *MAPPED]
    shown = export(primary, bytes(16), memory, BASE + 100)
    assert (shown.offset, shown.nbytes, shown.handle) == (100, 4 << 20, b"") and shown.descriptor >= 0
    made.said.clear()
    theirs = open_export(primary, shown)
    os.close(shown.descriptor)
    assert theirs.nbytes == 4 << 20 and made.said == ["cuMemImportFromShareableHandle", *MAPPED]
    for each in (memory, theirs):
        made.said.clear()
        each.free()
        each.free()
        assert made.said == UNMAPPED


@without_a_driver
@pytest.mark.parametrize(("refused", "undone"), [*zip(MAPPED, ([1], [1, 2], [0, 1, 2]), strict=True)])
def test_what_was_done_before_a_refusal_is_undone(refused: str, undone: list[int]) -> None:
    made = CheckedDriver(refused)
    with pytest.raises(DriverError):
        allocate_mapped(CheckedPrimary(1, made), 1)  # type: ignore[arg-type]
    after = made.said[made.said.index(refused) + 1 :]
    assert after == [UNMAPPED[at] for at in undone]
