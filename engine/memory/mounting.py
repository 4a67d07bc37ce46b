"""Mounting: an arena as a segment of the node of its machine, so that other processes find and read what it keeps.

The arena of a host lies in the segment's shared memory from the start. That of a device is memory which the device
gives us, and not PyTorch: what others open is an allocation as a whole. PyTorch's caching allocator puts many tensors
into one, and in its expandable segments a tensor lies in many, none of which others can open. PyTorch takes ours for a
tensor all the same. An engine does without where neither can be had: then nobody but itself reads its frames.
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
from kvstore.errors import KVStoreError
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.tier.device import DeviceMemory
from kvstore.transfer.device_memory import DeviceFrames

LOOK_S = 0.001  # between two looks whether a reader has ended

log = logging.getLogger("kvstore.engine.mounting")


class MountedArena:
    """Which frames of an arena the node and its other processes know. A frame's life::

        taken ──show──> everybody may read it ──hide──> nobody begins to; its readers end ──clear──> written into again

    ``show`` and ``hide`` are for the engine's thread, and wait for nobody. ``clear`` is for any other one.

    Attributes:
        why: it is not mounted (any more); "" while it is.
    """

    def __init__(self, segment: LocalSegment | None, why: str = "") -> None:
        self.why = why
        self._segment = segment
        self._lock = threading.Lock()
        self._read: set[int] = set()  # frames that were hidden while somebody read there

    @property
    def number(self) -> int | None:
        """What the node calls the segment; None: it is not mounted."""
        return self._segment.number if self._segment is not None and not self.why else None

    def show(self, keys: Keys, frames: Sequence[int]) -> bool:
        """These consecutive pages of a chain are whole in these frames. Whether others find them from now on."""
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
        """Nobody begins to read in these frames, which were shown."""
        if self._segment is not None:
            read = set(frames) - set(self._segment.retire(frames))
            if read:
                with self._lock:
                    self._read |= read

    def clear(self, frames: Sequence[int]) -> None:
        """Return when nobody reads in these frames, which are hidden if they ever were shown: they may be written into.
        That takes ``mounted.HOLD_NS`` at most, whatever readers say."""
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
        """Nobody finds anything here any more. May be repeated: the first reason counts."""
        if self._segment is not None and not self.why:
            log.log(level, "what the arena keeps is not shown to others any more: %s", why)
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
    """An engine's arenas, one per cache group. One alone is mounted at the node of ``home``, where that is one of this
    machine: a segment shows pages of one layout, and pages of windows do not stay.

    Args:
        members: layers of each group.
        home: a store of which nobody renews the session: the segment ends with it.
        why: it is not to know the arena, for that reason.
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
    except (KVStoreError, RuntimeError) as error:  # RuntimeError: PyTorch does not take it for a tensor
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
    log.warning("what the arena keeps is not shown to others: %s", error)
    return MountedArena(None, str(error))


class DeviceBytes:
    """Memory of a device as PyTorch takes it: uint8. It is given back with the last tensor."""

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
    """So many bytes of that memory. Raises RuntimeError: PyTorch does not take it."""
    return torch.as_tensor(DeviceBytes(memory, nbytes), device=device)
