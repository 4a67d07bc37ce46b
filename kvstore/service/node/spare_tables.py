"""SpareTables: memory for the tables of extents that a decision may carve, had before it is made.

A decision cannot be half performed: where a table could not be made in its middle, state, records and index would tell
different stories. So the node makes the tables of a class first, tells the state how many there are
(``Segment.tables``), and an extent that is carved takes one of them.
"""

from __future__ import annotations

import errno

from kvstore.errors import OutOfSpace
from kvstore.model.replica import FrameClass
from kvstore.tier.folder import NodeFolder
from kvstore.tier.records import TableFiles

CLASSES_MAX = 4  # that spare tables are kept for: those asked for last


class SpareTables:
    """Spare tables of a node's DRAM extents. Files that a kill leaves are removed by the next start.

    Attributes:
        blocked: the last one could not be made for want of descriptors.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._spares: dict[FrameClass, list[TableFiles]] = {}
        self._made = 0
        self.blocked = False

    def have(self, frame_class: FrameClass, frames: int, count: int) -> int:
        """Make spare tables of a class until there are ``count``; returns how many there are, fewer where memory is
        out, or descriptors are (``blocked``). They are mapped already: to take one needs neither."""
        self.blocked = False
        spares = self._spares.setdefault(frame_class, [])
        while len(self._spares) > CLASSES_MAX:
            for files in self._spares.pop(next(iter(self._spares))):
                files.remove()
        while len(spares) < count:
            self._made += 1
            try:
                spares.append(TableFiles.make(self._folder, self._made, frame_class, frames))
            except (OSError, OutOfSpace) as error:
                self.blocked = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
                break
        return min(len(spares), count)

    def take(self, frame_class: FrameClass) -> TableFiles | None:
        """A table for an extent that is carved now; None where none was asked for."""
        spares = self._spares.get(frame_class)
        return spares.pop() if spares else None
