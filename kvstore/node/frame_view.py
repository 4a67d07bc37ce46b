"""Contents: the layout of a node's data, for threads that read it in parallel with the node's decisions."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.model.replica import Address, FrameClass, Tier
from kvstore.node.nvme_pages import NvmePages
from kvstore.node.performer import Performer
from kvstore.shm.mounted import MountedTable, mounted_path
from kvstore.shm.records import ExtentTable
from kvstore.state.interfaces import Rows
from kvstore.tier.base import TierStore


class Contents:
    """Nothing is locked, and nothing is to be written here.

    An extent may be dropped while it is read: its words are zero then. So a record, or a page, is believed where its
    word is the same before and after. A node that has stopped has no extents.
    """

    def __init__(self, performer: Performer) -> None:
        self._performer = performer
        self._mounted: dict[int, MountedTable] = {}

    @property
    def extents(self) -> Mapping[int, ExtentTable]:
        """The tables of all extents, by number."""
        return self._performer.tables

    def table(self, extent: int) -> ExtentTable | None:
        """The tables of an extent; None where there is none of that number."""
        return self._performer.tables.get(extent)

    def tables(self, *tiers: Tier) -> list[ExtentTable]:
        """The tables of all extents of these tiers; without an argument, of all tiers."""
        return [table for table in list(self._performer.tables.values()) if not tiers or table.tier in tiers]

    def tier_of(self, extent: int) -> Tier | None:
        """Where an extent is; None where there is none of that number."""
        table = self.table(extent)
        return table.tier if table is not None else None

    def mapped(self, extent: int) -> bool:
        """Whether its frames are memory of this process; also where there is no extent of that number."""
        tier = self.tier_of(extent)
        return tier is None or self._performer.stores[tier].mapped

    def above(self, tier: Tier) -> Tier | None:
        """The next faster tier; None: there is none."""
        tiers = list(self._performer.stores)
        place = tiers.index(tier) if tier in tiers else 0
        return tiers[place - 1] if place else None

    def class_of(self, extent: int) -> FrameClass | None:
        """What frames an extent has; None where there is none of that number."""
        table = self.table(extent)
        return table.frame_class if table is not None else None

    def frames_of(self, table: ExtentTable) -> Rows:
        """``[frames, frame_bytes]`` of an extent in a mapped tier."""
        return self._performer.frames_of(table)

    def page(self, table: ExtentTable, frame: int) -> Rows:
        """``[page_bytes]`` of a frame in a mapped tier."""
        return self.frames_of(table)[frame, : table.frame_class.page_bytes]

    def store_of(self, extent: int) -> TierStore:
        """Where the frames of an extent rest."""
        return self._performer.stores[self.extents[extent].tier]

    @property
    def nvme(self) -> NvmePages | None:
        """See ``Node.nvme``."""
        return self._performer.nvme

    def listed(self, tier: Tier) -> list[tuple[bytes, Address]]:
        """What the index lists of a tier, by key."""
        return list(self._performer.index.addresses(tier))

    def mounted(self, number: int) -> MountedTable | None:
        """The records of a segment that an engine has mounted; None where there are none. What they say is the
        engine's word: believe a row where its word is the same before and after."""
        found = self._mounted.get(number)
        if found is None or not mounted_path(self._performer.folder, number).exists():
            self._mounted.pop(number, None)
            found = MountedTable.open(self._performer.folder, number, self._performer.header.incarnation)
            if found is not None:
                self._mounted[number] = found
        return found

    def look(self, tier: Tier, keys: list[bytes]) -> list[Address | None] | None:
        """Where the index says that these pages are; None: it cannot tell at present."""
        return self._performer.index.look(tier, keys)
