"""Engines over a device that is none: a peer in host memory that copies late, beside torch, which computes at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import engine.shell.engine
from engine.memory.arena import Arena, Arenas
from engine.memory.device_staging import DeviceStaging
from engine.memory.staging import Stagings
from kvstore.tier.device import Addresses, DeviceEvent
from kvstore.tier.host_device import HostDevice, HostEvent

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


class DeviceHost:
    """Has every engine of a test keep its frames on a device of its own, which the host may not look into."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices: list[HostDevice] = []
        monkeypatch.setattr(engine.shell.engine, "stagings_of", self._stagings_of)
        monkeypatch.setattr(Arena, "rows", _forbidden)
        monkeypatch.setattr(Arena, "layer_rows", _forbidden)

    def _stagings_of(self, arenas: Arenas) -> Stagings:
        device = HostDevice(f"host:{len(self.devices)}", seed=len(self.devices))
        self.devices.append(device)
        stream, computing = Eager(device), threading.Lock()
        return Stagings(arenas, [DeviceStaging(arena, device, stream, computing) for arena in arenas.groups])


def _forbidden(*_: Any) -> np.ndarray[Any, Any]:
    raise AssertionError("the host looks into memory of a device")
