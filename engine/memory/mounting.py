"""Mounting: an arena as a segment of the node of its machine, so that other processes find and read what it keeps.

The arena of a host lies in the segment's shared memory from the start; that of a device is shown by a handle of its
driver. An engine does without where neither can be had: then nobody but itself reads its frames.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from engine.memory.arena import Arena, Arenas, GroupedArenas
from kvstore.client.local.segment import LocalSegment
from kvstore.client.local.store import LocalStore
from kvstore.client.store import Store
from kvstore.errors import KVStoreError
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.transfer.exported import MountedMemory

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
    arena = None if device == "cpu" else Arena(layout, frames, k_dim, device)
    try:
        segment = home.mount(layout, frames, _of_device(arena) if arena is not None else None)
    except (KVStoreError, OSError) as error:
        log.warning("what the arena keeps is not shown to others: %s", error)
        return arena or Arena(layout, frames, k_dim, device), MountedArena(None, str(error))
    return arena or Arena(layout, frames, k_dim, device, segment.pages), MountedArena(segment)


def _of_device(arena: Arena) -> MountedMemory:
    from engine.memory.device_staging import device_of
    from kvstore.transfer.cuda import CudaFrames

    pages = arena.pages
    return CudaFrames(device_of(arena), pages.data_ptr(), arena.layout.page_bytes, pages.numel() * pages.element_size())
