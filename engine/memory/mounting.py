"""Mounting: an arena as a segment of its machine's node, so that other processes find and read the pages it keeps.

A host's arena is in the segment's shared memory from the start. A device's arena is memory from the device itself, not
from PyTorch: another process can only open whole allocations. PyTorch's caching allocator puts many tensors into one,
and in its expandable segments a tensor spans many, none of which can be opened. PyTorch accepts our memory as a tensor
all the same. If neither is possible, only the engine itself reads its frames.
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

LOOK_S = 0.001  # between two checks whether a reader has ended

log = logging.getLogger("kvstore.engine.mounting")


class MountedArena:
    """Which frames of an arena the node and its other processes know. A frame's life::

        taken ──show──> any process may read it ──hide──> no read begins; readers end ──clear──> written into again

    ``show`` and ``hide`` are for the engine's thread, and never wait. ``clear`` is for other threads.

    Attributes:
        why: the reason that it is not mounted (any more); "" while it is.
    """

    def __init__(self, segment: LocalSegment | None, why: str = "") -> None:
        self.why = why
        self._segment = segment
        self._lock = threading.Lock()
        self._read: set[int] = set()  # frames that were hidden while they were read

    @property
    def number(self) -> int | None:
        """The segment's number at the node; None: it is not mounted."""
        return self._segment.number if self._segment is not None and not self.why else None

    def show(self, keys: Keys, frames: Sequence[int]) -> bool:
        """Show consecutive pages of a chain, which are complete in these frames. Returns whether others find them
        now.
        """
        if self._segment is None or self.why:
            return False
        try:
            told = self._segment.publish(keys, frames)
        except KVStoreError as error:
            self.end(str(error))
            return False
        if not told:
            self.hide(frames)
        return told

    def hide(self, frames: Sequence[int]) -> None:
        """Let no read begin in these frames, which were shown."""
        if self._segment is not None:
            read = set(frames) - set(self._segment.retire(frames))
            if read:
                with self._lock:
                    self._read |= read

    def clear(self, frames: Sequence[int]) -> None:
        """Return when these frames, which are hidden if they ever were shown, are no longer read: they may be written
        to. That takes ``mounted.HOLD_NS`` at most, whatever readers say."""
        while self._segment is not None:
            with self._lock:
                read = self._read.intersection(frames)
            if not read:
                return
            free = self._segment.retire(sorted(read))
            with self._lock:
                self._read.difference_update(free)
            if len(free) < len(read):
                time.sleep(LOOK_S)

    def end(self, why: str, level: int = logging.WARNING) -> None:
        """Show nothing from now on. May be repeated: the first reason counts."""
        if self._segment is not None and not self.why:
            log.log(level, "kept pages are no longer shown to other processes: %s", why)
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
    """An engine's arenas, one per cache group. One alone is mounted at the node of ``home``, if that is one of this
    machine: a segment shows pages of one layout, and pages of windows do not stay.

    Args:
        members: layers of each group.
        home: a store whose session is not renewed: the segment ends with it.
        why: a reason not to mount the arena.
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
    failed: Exception | None = None
    try:
        there = device_of(torch.device(device))
        memory = there.allocate(nbytes, shared=True)
        arena = Arena(layout, frames, k_dim, device, tensor_of(memory, nbytes, device))
    except (KVStoreError, RuntimeError) as error:  # RuntimeError: PyTorch does not accept it as a tensor
        failed = error
    if failed is not None:
        if memory is not None:
            memory.free()  # there is not room for two
        return Arena(layout, frames, k_dim, device), _unmounted(failed)
    assert memory is not None
    try:
        shown = DeviceFrames(there, memory.address, layout.page_bytes, nbytes)
        return arena, MountedArena(home.mount(layout, frames, shown))
    except (KVStoreError, OSError) as error:
        return arena, _unmounted(error)


def _unmounted(error: Exception) -> MountedArena:
    log.warning("kept pages are not shown to other processes: %s", error)
    return MountedArena(None, str(error))


class DeviceBytes:
    """Device memory in a form that PyTorch accepts: uint8. It is freed with the last tensor."""

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
    """A tensor over this many bytes of that memory. Raises RuntimeError: PyTorch does not accept it."""
    return torch.as_tensor(DeviceBytes(memory, nbytes), device=device)
