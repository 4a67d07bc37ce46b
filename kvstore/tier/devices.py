"""The devices of this process: GPUs as their driver shows them when one is first asked for, and those added."""

from __future__ import annotations

import threading

from kvstore.tier import cuda
from kvstore.tier.device import Device

_lock = threading.Lock()
_added: list[Device] = []


def devices() -> list[Device]:
    """All there are now. None is opened by that."""
    return [*_added, *cuda.find().devices]


def missing() -> str:
    """Why there is no GPU, in one line; "" where there is one."""
    return cuda.find().missing


def device_of(address: int) -> Device | None:
    """Whose memory it is; None: the host's."""
    return next((device for device in devices() if device.owns(address)), None)


def add(device: Device) -> None:
    """Have another one in this process: ``HostDevice`` for tests."""
    with _lock:
        _added.append(device)


def remove(device: Device) -> None:
    """Undo ``add``."""
    with _lock:
        _added.remove(device)
