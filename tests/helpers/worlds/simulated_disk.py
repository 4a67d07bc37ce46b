"""SimulatedDisk: what lies on NVMe, as the protocol of the tier sees it. No bytes, but what they say.

A frame holds a header and a payload, written at one moment each, so that a test can tear them apart. What is not
synced may be lost. Checkpoints (directories) are believed at the next start only for extents that nobody wrote to
since; the frames of the others wait for a scan.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Address, FrameClass, FrameState, Tier, word_of
from tests.helpers.worlds.tables import Table

FREE, SEALED, QUARANTINED = FrameState.FREE, FrameState.SEALED, FrameState.QUARANTINED


@dataclass(frozen=True)
class Written:
    """A frame on the disk. ``proof`` is what its checksums are of, ``payload`` what is there."""

    address: Address
    head: bytes  # key, root, extra
    parent: bytes
    standing: int
    proof: object
    payload: object

    @property
    def key(self) -> bytes:
        """The page's key."""
        return self.head[:16]

    @property
    def sound(self) -> bool:
        """Header and payload fit together."""
        return self.proof == self.payload


@dataclass
class Extent:
    """An extent as the disk's table has it."""

    number: int
    frame_class: FrameClass
    frames: int
    clean: bool = False
    directory: tuple[npt.NDArray[np.uint64], Table] | None = None  # words, and a table with the bodies
    version: int = 0  # writes into it
    open: int = 0  # copies under way that will be known to the records later


@dataclass
class SimulatedDisk:
    """See the module."""

    extent_bytes: int
    positions: int
    random: random.Random = field(default_factory=lambda: random.Random(1))
    starts: int = 1
    extents: dict[int, Extent] = field(default_factory=dict)
    frames: dict[tuple[int, int], Written] = field(default_factory=dict)  # (position, frame)
    unsynced: dict[tuple[int, int], Written | None] = field(default_factory=dict)  # -> what was there before
    stale: set[int] = field(default_factory=set)  # positions of extents that were dropped, and the device still has
    failed: set[int] = field(default_factory=set)  # positions that take no more writes
    events: Counter[str] = field(default_factory=Counter)

    def carve(self, position: int, number: int, frame_class: FrameClass, frames: int) -> None:
        """See ``NvmeDevices.carve``."""
        assert 0 <= position < self.positions
        assert position not in self.extents or position in self.stale
        self.stale.discard(position)
        self.extents[position] = Extent(number, frame_class, frames)

    def drop(self, position: int) -> None:
        """See ``NvmePages.drop``: the device forgets an extent when it comes to it, or when another is carved there."""
        self.stale.add(position)

    def tidy(self) -> None:
        """See ``NvmePages.tidy``."""
        for position in self.stale:
            del self.extents[position]
        self.stale.clear()

    # --- writing ----------------------------------------------------------------------------------------------------

    def open(self, positions: set[int]) -> None:
        """See ``NvmeDevices.open_for_writing``."""
        for position in positions:
            extent = self.extents[position]
            extent.clean = False
            extent.version += 1
            extent.open += 1

    def shut(self, numbers: dict[int, int]) -> None:
        """The records say what became of what was written at these positions (-> extent)."""
        for position, number in numbers.items():
            extent = self.extents.get(position)
            if extent is not None and extent.number == number:
                extent.version += 1  # a directory taken meanwhile does not have it
                extent.open -= 1

    def write(self, position: int, written: Written) -> bool:
        """One frame. False: the device has failed."""
        if position in self.failed:
            return False
        assert not self.extents[position].clean, "written to while the checkpoint counts as clean"
        place = position, written.address.frame
        self.unsynced.setdefault(place, self.frames.get(place))
        self.frames[place] = written
        return True

    def sync(self) -> None:
        """What was written is durable."""
        self.unsynced.clear()

    def read(self, position: int, frame: int) -> Written | None:
        """What is there; None where there is nothing sound."""
        written = self.frames.get((position, frame))
        extent = self.extents[position]
        fits = written is not None and written.address[:2] == (extent.number, frame)
        return written if fits and written is not None and written.sound else None

    def erase(self, position: int, frame: int) -> bool:
        """See ``NvmePages.erase``, with its sync. False: the device has failed."""
        if position not in self.failed:
            self.frames.pop((position, frame), None)
            self.unsynced.pop((position, frame), None)
            self.extents[position].clean = False
            self.extents[position].version += 1
        return position not in self.failed

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def mark_clean(self, table: Table, words: npt.NDArray[np.uint64], version: int) -> bool:
        """A directory taken at ``version`` is durable; it counts where nobody wrote since."""
        extent = self.extents.get(table.position)
        if extent is None or extent.number != table.number or extent.version != version or extent.open:
            return False
        extent.directory = words, table
        extent.clean = True
        self.events["checkpoints"] += 1
        return True

    # --- starting again ---------------------------------------------------------------------------------------------

    def power_loss(self) -> list[Table]:
        """A reboot. Returns the tables that the next start makes from what is there."""
        for place, before in self.unsynced.items():
            fate = self.random.randrange(3)
            if fate == 0:
                if before is None:
                    del self.frames[place]
                else:
                    self.frames[place] = before
            elif fate == 1:
                self.frames[place] = replace(self.frames[place], payload="torn")
        self.unsynced.clear()
        self.stale.clear()
        return [self.found(position) for position in self.extents]

    def found(self, position: int) -> Table:
        """An extent's table, made from the disk alone."""
        extent = self.extents[position]
        extent.open = 0
        table = Table(extent.number, position, extent.frame_class, extent.frames, Tier.NVME)
        table.words[:] = word_of(0, QUARANTINED)
        if extent.clean:
            assert extent.directory is not None
            words, bodies = extent.directory
            for column in ("rows", "parents", "infos", "sums"):
                getattr(table, column)[:] = getattr(bodies, column)
            sealed = (words & np.uint64(0xFF)) == SEALED
            table.words[:] = np.where(sealed, words, words & ~np.uint64(0xFF))
        self.events["clean" if extent.clean else "scanned"] += 1
        return table
