"""NvmeView: what a node's state reads back of its NVMe tier."""

from __future__ import annotations

from functools import partial

from kvstore.model.replica import Tier
from kvstore.service.node.index_keeper import snapshot
from kvstore.service.node.performer import Performer
from kvstore.state.views import Snapshot


class NvmeView:
    """What the state reads back of NVMe: the same records, another table of the index."""

    def __init__(self, performer: Performer) -> None:
        self._performer = performer
        self.find = performer.index.find_nvme
        self.absent = partial(performer.index.absent, tier=Tier.NVME)
        self.key, self.parent, self.root, self.extra = performer.key, performer.parent, performer.root, performer.extra
        self.standing, self.last_use_ns = performer.standing, performer.last_use_ns

    def snapshots(self) -> list[Snapshot]:
        """See ``RecordView``."""
        return [snapshot(table) for table in self._performer.tables.values() if table.tier == Tier.NVME]
