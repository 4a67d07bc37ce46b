"""Engines over a device that is none: a peer in host memory that copies late, and shows late what torch computes."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np
import pytest

import engine.shell.engine
from engine.compute.paged_cache import Batch
from engine.memory.arena import Arena, Arenas
from engine.memory.device_staging import DeviceStaging
from engine.memory.staging import Stagings
from engine.shell.performer import StepRunner
from kvstore.device.base import Addresses, DeviceEvent
from kvstore.device.host_device import POISON, HostDevice, HostEvent, Span, _Work

DEADLINE_S = 60.0


class Eager:
    """The stream of a library whose work is done when it is given: what this stream is to wait for, it waits for."""

    handle = 0

    def __init__(self, device: HostDevice) -> None:
        self._stream = device.stream_of(0)

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """See ``DeviceStream``."""
        raise AssertionError("nobody copies in the stream that computes")

    def wait(self, event: DeviceEvent) -> None:
        """See ``DeviceStream``."""
        event.wait(time.monotonic() + DEADLINE_S)

    def record(self) -> HostEvent:
        """See ``DeviceStream``."""
        return self._stream.record()


class LateDevice(HostDevice):
    """Copies find what torch computed in the turn of its stream alone: until then they bring poison."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name, seed)
        self._given: dict[int, tuple[_Work, int]] = {}  # with the thread that gave it

    def wrote(self, pieces: list[Span]) -> None:
        """A kernel of the stream that computes was given, which writes there."""
        with self.changed:
            self.check()
            work = _Work(lambda: None, [], pieces)
            self.stream_of(0).work.append(work)
            self._given[id(work)] = work, threading.get_ident()

    def perform(self, reads: list[Span], writes: list[Span]) -> None:
        """See ``HostDevice``."""
        super().perform(reads, writes)
        late = np.array([piece for work in self.stream_of(0).work for piece in work.writes or ()], np.int64)
        for (first, stop), (target, _) in zip(reads, writes, strict=True) if len(late) else ():
            begin, end = np.maximum(late[:, 0], first), np.minimum(late[:, 1], stop)
            for a, b in zip(begin[begin < end].tolist(), end[begin < end].tolist(), strict=True):
                ctypes.memset(target + a - first, POISON, b - a)

    def computes(self) -> bool:
        """Whether work of the calling thread is left."""
        with self.changed:
            left = {id(work) for work in self.stream_of(0).work}
            self._given = {key: each for key, each in self._given.items() if key in left}
            return threading.get_ident() in {thread for _, thread in self._given.values()}


class DeviceHost:
    """Has every engine of a test keep its frames on a device of its own, which the host may not look into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices: list[LateDevice] = []
        self._of: list[tuple[Arenas, LateDevice]] = []
        self._tap(monkeypatch)
        monkeypatch.setattr(engine.shell.engine, "stagings_of", self._stagings_of)
        monkeypatch.setattr(Arena, "rows", _forbidden)
        monkeypatch.setattr(Arena, "layer_rows", _forbidden)

    def _tap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Hear of what is computed, and of what is drawn: by then all of it is."""
        write, drawn = Batch.write, StepRunner._record_tokens

        def writes(batch: Batch, layer: int, content: Any) -> None:
            write(batch, layer, content)
            for device in [device for arenas, device in self._of if arenas is batch.arenas]:
                device.wrote(_written(batch, layer))

        def draws(runner: StepRunner, *given: Any) -> Any:
            for device in [device for arenas, device in self._of if arenas is runner._stagings.arenas]:
                assert not device.computes(), "draws from what is still computed"
            return drawn(runner, *given)

        monkeypatch.setattr(Batch, "write", writes)
        monkeypatch.setattr(StepRunner, "_record_tokens", draws)

    def _stagings_of(self, arenas: Arenas) -> Stagings:
        device = LateDevice(f"host:{len(self.devices)}", seed=len(self.devices))
        self.devices.append(device)
        self._of.append((arenas, device))
        stream, computing = Eager(device), threading.Lock()
        return Stagings(arenas, [DeviceStaging(arena, device, stream, computing) for arena in arenas.groups])


def _written(batch: Batch, layer: int) -> list[Span]:
    """Where the new tokens of a batch lie, of that layer."""
    group, number = batch.arenas.places[layer]
    pages = batch.arenas.groups[group].pages
    frame, _, head, slot, _ = (stride * pages.element_size() for stride in pages.stride())
    first = pages[:, number].data_ptr()
    nbytes = pages.shape[-1] * pages.element_size()
    rows = zip(batch._frames[group].tolist(), batch._slots.tolist(), strict=True)
    starts = [first + f * frame + h * head + s * slot for f, s in rows for h in range(pages.shape[2])]
    return [(start, start + nbytes) for start in starts]


def _forbidden(*_: Any) -> np.ndarray[Any, Any]:
    raise AssertionError("the host looks into memory of a device")
