"""TwinShell: the shell in memory and the real one, side by side: what one does to tables the other does to files.

Every decision of a world is performed by both, instruction by instruction, and after each instruction, and after the
commit, records and index must say the same. A kill ends both at the same place: the real one is then opened again from
the files that it left, and has to find what the model finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import failpoint
from kvstore.model.replica import SHARDS_MAX, FrameState, Tier, standing_of
from kvstore.node.nvme_pages import NvmePages
from kvstore.node.performer import Performer
from kvstore.node.startup import extent_found
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.index import Index
from kvstore.shm.records import ExtentTable
from kvstore.state import events as ev
from kvstore.state.recovery import ExtentFound
from kvstore.tier.base import TierStore
from kvstore.tier.dram import DramStore, SegmentFile
from kvstore.tier.nvme.devices import NvmeDevices
from tests.helpers.nvme.memory_disk import MemoryDisk
from tests.helpers.worlds.memory_shell import MemoryShell, Nvme, Watch
from tests.helpers.worlds.tables import Table

FREE, RESERVED, SEALED = FrameState.FREE, FrameState.RESERVED, FrameState.SEALED
RETIRING, QUARANTINED = FrameState.RETIRING, FrameState.QUARANTINED
INDEX_BYTES = 4 << 20
_SHARDS = 0xFFFF << 32  # of an info word: how many there are, and which have sealed


class Killed(BaseException):
    """The real shell ends here."""


class TwinShell(MemoryShell):
    """See the module. ``compared`` counts how often both were looked at, ``kills`` how often they died."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        shm_dir: Path,
        extent_bytes: int,
        positions: int,
        watch: Watch | None = None,
        nvme: Nvme | None = None,
    ) -> None:
        super().__init__(extent_bytes, positions, watch, nvme)
        self.compared = self.kills = 0
        self.folder = NodeFolder(shm_dir, f"twin{len(list(shm_dir.iterdir()))}")
        self.folder.lock()
        header = Header.create(self.folder, 7, extent_bytes, positions)
        SegmentFile.create(self.folder, header.incarnation, extent_bytes, positions).close()
        Index.open_writer(self.folder, header.epoch, INDEX_BYTES, fresh=True).close()
        header.close()
        self._waiting: Iterator[ev.Instruction] = iter(())  # what the real one is about to perform
        self._left: int | None = None  # instructions until the kill
        patch.setattr(failpoint, "ACTIVE", True)
        patch.setattr(failpoint, "hit", self._hit)
        self.real = self._opened()

    # --- the real one -----------------------------------------------------------------------------------------------

    def _opened(self) -> Performer:
        """The real shell as a daemon finds it that starts: from its files."""
        header = Header.open(self.folder, writable=True)
        assert header is not None
        segment = SegmentFile.open(self.folder, header.incarnation)
        assert segment is not None
        index = Index.open_writer(self.folder, header.epoch, INDEX_BYTES, fresh=False)
        stores: dict[Tier, TierStore] = {Tier.DRAM: DramStore(segment, header.incarnation)}
        if self.nvme is not None:  # decided about, never written to: the world has a disk of its own
            disk = self.nvme.disk
            size_bytes = (disk.positions + 8) * disk.extent_bytes
            stores[Tier.NVME] = NvmePages(NvmeDevices.open([MemoryDisk(size_bytes, "/d0")], "twin", disk.extent_bytes))
        real = Performer(self.folder, header, stores, index, INDEX_BYTES, lambda: self.now_ns)
        for number in self.folder.extents():
            table = ExtentTable.open(self.folder, number, header.incarnation, writable=True)
            assert table is not None, "an extent's tables are damaged"
            real.tables[number] = table
        mapped = [(table.position, table.frame_class) for table in real.tables.values()]
        real.stores[Tier.DRAM] = DramStore(segment, header.incarnation, mapped)
        return real

    def close(self) -> None:
        """Let go of the files."""
        self.real.close()

    def _hit(self, name: str) -> None:
        """The real shell has come to that place."""
        if name == "node.commit" and self._left == 0:
            raise Killed
        if name == "node.instruction":
            instruction = next(self._waiting)
            for _ in self.verbs[type(instruction)](instruction):
                pass
            self.compare()
        if name in ("node.event", "node.instruction") and self._left is not None:
            self._left -= name == "node.instruction"
            if self._left == 0:
                raise Killed

    # --- performing -------------------------------------------------------------------------------------------------

    @staticmethod
    def count_stores(instructions: list[ev.Instruction]) -> int:
        """Here a kill falls between two instructions."""
        return 1 + len(instructions)

    def perform(self, instructions: list[ev.Instruction], steps: int | None = None) -> ev.Reply | None:
        """See ``MemoryShell``: both perform. ``steps``: that many instructions, then a kill."""
        for number, table in self.tables.items():  # what clients have stored
            self.real.tables[number].last_use[:] = table.last_use
        self.ops, self.reply = [], None
        self._waiting, self._left = iter(instructions), steps
        try:
            reply = self.real.perform(instructions)
        except Killed:
            self.kills += 1
            self.ops, self.reply = [], None
            self.real.close(keep_name=True)
            self.real = self._opened()
            self.compare()
            return None
        finally:
            self._left = None
        assert next(self._waiting, None) is None, "the real shell left something out"
        assert reply is self.reply
        for _ in self.stores([]):  # the commit
            pass
        self.compare_indexes()
        return reply

    def found(self) -> list[ExtentFound]:
        """See ``MemoryShell``; the real start sees the same."""
        found = super().found()
        for mine in found:
            self._compare_found(mine, extent_found(self.real.tables[mine.number]))
        return found

    def reindex(self) -> None:
        """See ``MemoryShell``; the real one compares its index, and makes it anew where it differs."""
        super().reindex()
        if not self.real.index.agrees():
            self.real.index.rebuild("start")
        self.compare_indexes()

    # --- comparing --------------------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Records and marks of both say the same, as far as they mean anything."""
        self.compared += 1
        assert self.tables.keys() == self.real.tables.keys()
        for number, mine in self.tables.items():
            self._compare_table(mine, self.real.tables[number])

    @staticmethod
    def _compare_table(mine: Table, real: ExtentTable) -> None:
        about = mine.number, mine.position, mine.frame_class, mine.frames, mine.tier
        assert about == (real.extent, real.position, real.frame_class, real.frames, real.tier)
        np.testing.assert_array_equal(mine.words, real.words)
        fmt, states = real.fmt, mine.words & np.uint64(0xFF)
        written = np.isin(states, (RESERVED, QUARANTINED))
        if mine.tier == Tier.DRAM:
            words = [real.column(fmt.group + 8 * i) for i in range(1 + SHARDS_MAX)]
            tails = np.stack(words, axis=1)
            np.testing.assert_array_equal(mine.tails[written, : 1 + SHARDS_MAX], tails[written])
            written &= mine.tails[:, 0] != 0  # the others have no key yet
        else:
            written &= states == QUARANTINED
        stored = np.isin(states, (SEALED, RETIRING))
        for frames in (written, stored):
            width = mine.rows.shape[1]
            np.testing.assert_array_equal(mine.rows[frames], real.rows[frames, 8 : 8 + width])
            np.testing.assert_array_equal(mine.parents[frames], real.rows[frames, fmt.parent])
            np.testing.assert_array_equal(mine.leases[frames], real.column(fmt.lease_until_ns)[frames])
            np.testing.assert_array_equal(mine.last_use[frames], real.last_use[frames])
        infos = real.column(fmt.info)
        np.testing.assert_array_equal(mine.infos[written] & np.uint64(_SHARDS), infos[written] & np.uint64(_SHARDS))
        for frame in np.flatnonzero(stored).tolist():
            assert standing_of(int(mine.infos[frame])) == standing_of(int(infos[frame]))
            assert real.identity_sums(slice(frame, frame + 1)) == [int(real.column(fmt.identity_sum)[frame])]

    @staticmethod
    def _compare_found(mine: ExtentFound, real: ExtentFound) -> None:
        assert (mine.position, mine.frame_class, mine.tier) == (real.position, real.frame_class, real.tier)
        states = mine.snapshot.words & np.uint64(0xFF)
        stored = np.isin(states, (SEALED, RETIRING))
        for name in ("words", "keys", "roots", "parents"):
            frames = stored if name != "words" else slice(None)
            theirs = getattr(real.snapshot, name)[frames]
            np.testing.assert_array_equal(getattr(mine.snapshot, name)[frames], theirs)
        assert mine.sound[stored].all() and real.sound[stored].all()

    def compare_indexes(self) -> None:
        """Both indexes name the same pages at the same addresses, stored ones and those being written."""
        self.compared += 1
        for tier in self.real.index.tiers:
            assert dict(self.real.index.addresses(tier)) == self.indexes[tier]
        assert dict(self.real.index.pending()) == self.pend
