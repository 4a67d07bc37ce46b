"""Contents: read access to a node's tables and pages, for threads that read while the node decides."""

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
    """The tables and pages of a node, without a lock. Callers must not write here.

    If an extent is dropped while a thread reads it, its words become zero. So a record or a page is valid only if its
    word is equal before and after the read. A node that has stopped has no extents.
    """

    def __init__(self, performer: Performer) -> None:
        self._performer = performer
        self._mounted: dict[int, MountedTable] = {}

    @property
    def extents(self) -> Mapping[int, ExtentTable]:
        """The tables of all extents, by number."""
        return self._performer.tables

    def table(self, extent: int) -> ExtentTable | None:
        """Return the table of an extent; None if there is no such extent."""
        return self._performer.tables.get(extent)

    def tables(self, *tiers: Tier) -> list[ExtentTable]:
        """Return the tables of all extents of these tiers; without arguments, of all tiers."""
        return [table for table in list(self._performer.tables.values()) if not tiers or table.tier in tiers]

    def tier_of(self, extent: int) -> Tier | None:
        """Return the tier of an extent; None if there is no such extent."""
        table = self.table(extent)
        return table.tier if table is not None else None

    def mapped(self, extent: int) -> bool:
        """Return True if the extent's frames are memory of this process, or if there is no such extent."""
        tier = self.tier_of(extent)
        return tier is None or self._performer.stores[tier].mapped

    def above(self, tier: Tier) -> Tier | None:
        """Return the next faster tier; None for the fastest one."""
        tiers = list(self._performer.stores)
        index = tiers.index(tier) if tier in tiers else 0
        return tiers[index - 1] if index else None

    def class_of(self, extent: int) -> FrameClass | None:
        """Return the class of an extent's frames; None if there is no such extent."""
        table = self.table(extent)
        return table.frame_class if table is not None else None

    def frames_of(self, table: ExtentTable) -> Rows:
        """Return ``[frames, frame_bytes]`` of an extent in a mapped tier."""
        return self._performer.frames_of(table)

    def page(self, table: ExtentTable, frame: int) -> Rows:
        """Return ``[page_bytes]`` of a frame in a mapped tier."""
        return self.frames_of(table)[frame, : table.frame_class.page_bytes]

    def store_of(self, extent: int) -> TierStore:
        """Return the store of an extent's tier."""
        return self._performer.stores[self.extents[extent].tier]

    @property
    def nvme(self) -> NvmePages | None:
        """The NVMe tier; None if the node has none, or has stopped."""
        return self._performer.nvme

    def listed(self, tier: Tier) -> list[tuple[bytes, Address]]:
        """Return the entries of the index for a tier, in key order."""
        return list(self._performer.index.addresses(tier))

    def mounted(self, number: int) -> MountedTable | None:
        """Return the table of a segment that an engine has mounted; None if there is none.

        The engine writes it. So a row is valid only if its word is equal before and after the read.
        """
        table = self._mounted.get(number)
        if table is None or not mounted_path(self._performer.folder, number).exists():
            self._mounted.pop(number, None)
            table = MountedTable.open(self._performer.folder, number, self._performer.header.incarnation)
            if table is not None:
                self._mounted[number] = table
        return table

    def look(self, tier: Tier, keys: list[bytes]) -> list[Address | None] | None:
        """Return each key's address, or None for a key without an entry. Return None instead of a list if the index
        cannot be read now."""
        return self._performer.index.look(tier, keys)
