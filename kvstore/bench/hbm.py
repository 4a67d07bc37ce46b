"""Rows about copies between host memory and GPU memory: pages in frames, compared with one plain copy of the same size.

Both sides are pinned, even for the limit. Frames are in random order, so that no two pieces can be merged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Final

import numpy as np

from kvstore.bench.harness import Bar, BenchFailed, Kind, NotMeasured, Result, alternate, result, speeds
from kvstore.bench.stage import MIB, Stage
from kvstore.device import cuda
from kvstore.device.base import Addresses, Device, DeviceStream
from kvstore.device.host_memory import empty

BATCH_BYTES: Final = 64 * MIB
BATCH_BYTES_QUICK: Final = 8 * MIB
STEPS: Final = 20  # steps per variant and round
COPY_S: Final = 30.0
PLAIN: Final = "one plain pinned copy"

Pieces = tuple[Addresses, Addresses, Addresses]  # targets, sources, lengths
Copy = Callable[[Addresses, Addresses, Addresses], None]


class CopiedFrames:
    """Memory of the host and of a device, and half of the frames in each, in random order.

    Life: made -> copied in both directions -> ``verify`` -> ``close``.
    """

    def __init__(self, device: Device, length: int, nbytes: int) -> None:
        self.device = device
        self.nbytes = nbytes
        self._host = empty(2 * nbytes)
        random = np.random.default_rng(length)
        self._host[:] = random.integers(0, 256, 2 * nbytes, np.uint8)
        device.register(self._host)
        self._memory = device.allocate(2 * nbytes)
        self.stream, self.other = device.stream(), device.stream()
        places = [random.permutation(2 * nbytes // length)[: nbytes // length] for _ in range(2)]
        here, there = (frames.astype(np.uint64) * np.uint64(length) for frames in places)
        lengths = np.full(nbytes // length, length, np.uint64)
        host, memory = self._host.ctypes.data + here, self._memory.address + there
        self.to_device: Pieces = memory, host, lengths
        self.to_host: Pieces = host, memory, lengths
        self._frames = here

    def plain(self, back: bool = False) -> Pieces:
        """Return the pieces of one plain copy of the same size, in one direction."""
        ends = [np.array([end], np.uint64) for end in (self._memory.address, self._host.ctypes.data)]
        target, source = reversed(ends) if back else ends
        return target, source, np.array([self.nbytes], np.uint64)

    def verify(self) -> None:
        """Copy every frame to the device and back. Raises BenchFailed if a byte differs."""
        expected = self._host.copy()
        copy_and_wait(self.stream, self.stream.copy, self.to_device)
        first, length = self._host.ctypes.data, self.to_host[2]
        self._host[:] = 0
        copy_and_wait(self.stream, self.stream.copy, self.to_host)
        for start, size in zip((self.to_host[0] - np.uint64(first)).tolist(), length.tolist(), strict=True):
            if (self._host[start : start + size] != expected[start : start + size]).any():
                raise BenchFailed("a copy to the device and back changed bytes")
        self._host[:] = expected

    def close(self) -> None:
        """Free the memory. No copy may be in progress."""
        self._memory.free()
        self.device.unregister(self._host)


def copy_and_wait(stream: DeviceStream, copy: Copy, pieces: Pieces) -> None:
    """Copy the pieces, and wait until the copy is done."""
    copy(*pieces)
    stream.record().wait(time.monotonic() + COPY_S)


def one_way(stage: Stage, name: str, bar: Bar | None, length: int, back: bool) -> list[Result]:
    """Measure copies of frames in one direction: in the way that the device chooses, with the kernel (``.kernel``) and
    with the copy engines (``.engines``). Raises NotMeasured."""
    device = _device()
    with closing(CopiedFrames(device, length, _batch(stage))) as frames:
        frames.verify()
        pieces = frames.to_host if back else frames.to_device
        plain = frames.plain(back)
        stream = device.stream()
        ways: dict[str, Copy] = {"ours": stream.copy}
        if length < 2 * MIB:
            ways |= _ways(device, stream)
        variants: dict[str, Callable[[int], object]] = {"limit": _timed(stream, stream.copy, plain)}
        variants |= {way: _timed(stream, copy, pieces) for way, copy in ways.items()}
        return lines(stage, name, bar, variants, frames.nbytes)


def both_ways(stage: Stage, name: str, bar: Bar | None, length: int) -> list[Result]:
    """Measure copies to the device and from it at the same time, on two streams. Raises NotMeasured."""
    device = _device()
    nbytes = _batch(stage)
    with closing(CopiedFrames(device, length, nbytes)) as there, closing(CopiedFrames(device, length, nbytes)) as back:
        there.verify()
        back.verify()

        def both(first: Pieces, second: Pieces) -> None:
            there.stream.copy(*first)
            copy_and_wait(back.stream, back.stream.copy, second)
            there.stream.record().wait(time.monotonic() + COPY_S)

        variants: dict[str, Callable[[int], object]] = {
            "limit": lambda _: both(there.plain(), back.plain(back=True)),
            "ours": lambda _: both(there.to_device, back.to_host),
        }
        return lines(stage, name, bar, variants, 2 * nbytes)


def lines(
    stage: Stage, name: str, bar: Bar | None, variants: Mapping[str, Callable[[int], object]], nbytes: int
) -> list[Result]:
    """Measure all variants. Return a line for ``ours``, and a line without a bar for each other one, all compared with
    ``limit``."""
    rounds = stage.settings.rounds
    steps = range(len(variants) * (2 if stage.settings.quick else STEPS))
    seconds = alternate(variants, steps, rounds, lambda step: step, lambda variant, value: None)
    limit = speeds(seconds["limit"], nbytes)
    return [
        result(
            name if way == "ours" else f"{name}.{way}",
            Kind.SPEED,
            speeds(seconds[way], nbytes),
            limit,
            bar=bar if way == "ours" else None,
            limit_is=PLAIN,
        )
        for way in variants
        if way != "limit"
    ]


def _timed(stream: DeviceStream, copy: Copy, pieces: Pieces) -> Callable[[int], object]:
    return lambda _: copy_and_wait(stream, copy, pieces)


def _ways(device: cuda.CudaDevice, stream: cuda.CudaStream) -> dict[str, Copy]:
    ways: dict[str, Copy] = {"engines": stream.copy_by_engines}
    return ways if device.kernel_missing else {**ways, "kernel": stream.copy_by_kernel}


def _device() -> cuda.CudaDevice:
    devices, missing = cuda.find()
    if missing:
        raise NotMeasured(missing)
    return devices[0]


def _batch(stage: Stage) -> int:
    return BATCH_BYTES_QUICK if stage.settings.quick else BATCH_BYTES
