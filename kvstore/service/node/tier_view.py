"""TierView: what a node's state reads back of one tier."""

from __future__ import annotations

from functools import partial

from kvstore.model.replica import Tier
from kvstore.service.node.index_keeper import snapshot
from kvstore.service.node.performer import Performer
from kvstore.state.views import Snapshot


class TierView:
    """The tier's table of the index (``PageIndex``), and its records (``RecordView``)."""

    def __init__(self, performer: Performer, tier: Tier) -> None:
        self._performer = performer
        self._tier = tier
        self.find = partial(performer.index.find, tier)
        self.absent = partial(performer.index.absent, tier)
        self.key, self.parent, self.root, self.extra = performer.key, performer.parent, performer.root, performer.extra
        self.lineage, self.standing, self.last_use_ns = performer.lineage, performer.standing, performer.last_use_ns

    def snapshots(self) -> list[Snapshot]:
        """See ``RecordView``."""
        return [snapshot(table) for table in self._performer.tables.values() if table.tier == self._tier]
