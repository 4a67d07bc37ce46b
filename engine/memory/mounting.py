"""Mounting makes an arena a segment of the local node, so that other processes can find and read its pages.

On a host, the arena is in the shared memory of the segment from the start. On a device, the arena is allocated through
the driver and not by PyTorch, because another process can open only whole allocations. PyTorch's caching allocator puts
many tensors into one allocation. With PyTorch's expandable segments, a tensor spans many allocations, and other
processes cannot open those. PyTorch can use the driver's memory as a tensor. If an arena cannot be mounted, only its
engine reads its frames.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from engine.memory.arena import Arena, Arenas, GroupedArenas
from engine.memory.device_staging import device_of
from kvstore.client.local.segment import LocalSegment
from kvstore.client.local.store import LocalStore
from kvstore.client.store import Store
from kvstore.device.base import DeviceMemory
from kvstore.errors import KVStoreError
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.tier.peer_memory import DeviceFrames

LOOK_S = 0.001  # how often a thread checks whether readers have ended

log = logging.getLogger("kvstore.engine.mounting")


class MountedArena:
    """The segment of an arena: which frames other processes on the machine may read.

    Life of a frame::

        taken ──show──> any process may read it ──hide──> no read begins, reads end ──clear──> may be written to again

    The engine's thread calls ``show`` and ``hide``, which never wait. Other threads call ``clear``.

    Attributes:
        why: the reason why the arena is not mounted, or no longer mounted; "" while it is mounted.
    """

    def __init__(self, segment: LocalSegment | None, why: str = "") -> None:
        self.why = why
        self._segment = segment
        self._lock = threading.Lock()
        self._busy: set[int] = set()  # hidden frames that readers may still read

    @property
    def number(self) -> int | None:
        """The number of the segment at the node; None if the arena is not mounted."""
        return self._segment.number if self._segment is not None and not self.why else None

    def show(self, keys: Keys, frames: Sequence[int]) -> bool:
        """Show consecutive pages of a chain. They must be complete in these frames.

        Returns True if other processes find the pages now.
        """
        if self._segment is None or self.why:
            return False
        try:
            is_published = self._segment.publish(keys, frames)
        except KVStoreError as error:
            self.end(str(error))
            return False
        if not is_published:
            self.hide(frames)
        return is_published

    def hide(self, frames: Sequence[int]) -> None:
        """Prevent further reads of these shown frames."""
        if self._segment is not None:
            busy = set(frames) - set(self._segment.retire(frames))
            if busy:
                with self._lock:
                    self._busy |= busy

    def clear(self, frames: Sequence[int]) -> None:
        """Wait until no process reads these frames, so that they may be written to.

        The caller must have hidden the frames that were shown. This takes at most ``mounted.HOLD_NS``, even if a
        reader does not end its read.
        """
        while self._segment is not None:
            with self._lock:
                busy = self._busy.intersection(frames)
            if not busy:
                return
            free = self._segment.retire(sorted(busy))
            with self._lock:
                self._busy.difference_update(free)
            if len(free) < len(busy):
                time.sleep(LOOK_S)

    def end(self, why: str, level: int = logging.WARNING) -> None:
        """Unmount the arena. Only the first call counts."""
        if self._segment is not None and not self.why:
            log.log(level, "other processes can no longer read pages of this engine: %s", why)
            self.why = why
            self._segment.close()


def arenas_of(
    layouts: Sequence[Layout],
    members: Sequence[Sequence[int]],
    frames: Sequence[int],
    k_dim: int,
    device: str,
    home: Store | None,
    why: str = "",
) -> tuple[Arenas, MountedArena]:
    """Make an engine's arenas, one for each cache group, and mount the arena of a model with one group.

    The arena is mounted at the node of ``home``, which must be on this machine. If there are several
    arenas, none is mounted: a segment has pages of one layout, and an engine does not keep the pages of a window.

    Args:
        members: the layers of each group.
        home: a store that must keep its session: the segment ends with it.
        why: a reason not to mount the arena; "" if there is none.
    """
    if len(layouts) == 1:
        return _arena_of(layouts[0], frames[0], k_dim, device, home, why)
    arenas = [Arena(layout, count, k_dim, device) for layout, count in zip(layouts, frames, strict=True)]
    return GroupedArenas(arenas, members), MountedArena(None, why or "the model has several cache groups")


def _arena_of(
    layout: Layout, frames: int, k_dim: int, device: str, home: Store | None, why: str
) -> tuple[Arena, MountedArena]:
    if why or not isinstance(home, LocalStore):
        return Arena(layout, frames, k_dim, device), MountedArena(None, why or "there is no node on this machine")
    if device == "cpu":
        try:
            segment = home.mount(layout, frames)
        except (KVStoreError, OSError) as error:
            return Arena(layout, frames, k_dim, device), _unmounted(error)
        return Arena(layout, frames, k_dim, device, segment.pages), MountedArena(segment)
    nbytes = frames * layout.page_bytes
    memory: DeviceMemory | None = None
    failure: Exception | None = None
    try:
        driver_device = device_of(torch.device(device))
        memory = driver_device.allocate(nbytes, shared=True)
        arena = Arena(layout, frames, k_dim, device, tensor_of(memory, nbytes, device))
    except (KVStoreError, RuntimeError) as error:  # RuntimeError: PyTorch cannot use the memory as a tensor
        failure = error
    if failure is not None:
        if memory is not None:
            memory.free()  # the device may not have enough memory for a second arena
        return Arena(layout, frames, k_dim, device), _unmounted(failure)
    assert memory is not None
    try:
        device_frames = DeviceFrames(driver_device, memory.address, layout.page_bytes, nbytes)
        return arena, MountedArena(home.mount(layout, frames, device_frames))
    except (KVStoreError, OSError) as error:
        return arena, _unmounted(error)


def _unmounted(error: Exception) -> MountedArena:
    log.warning("other processes cannot read pages of this engine: %s", error)
    return MountedArena(None, str(error))


class DeviceBytes:
    """Device memory as uint8, in a form that PyTorch accepts. The memory is freed with the last tensor."""

    def __init__(self, memory: DeviceMemory, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "strides": None,
            "version": 3,
        }
        weakref.finalize(self, memory.free).atexit = False


def tensor_of(memory: DeviceMemory, nbytes: int, device: str) -> torch.Tensor:
    """Return a tensor over ``nbytes`` of device memory. Raises RuntimeError if PyTorch does not accept the memory."""
    return torch.as_tensor(DeviceBytes(memory, nbytes), device=device)
