"""Promises: checks what each instruction promises about its frames, against their records, before it is performed.

Clients know better which sessions may still write, and which frames are leased: ``Watch`` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.model.replica import Address, FrameState, Tier, keys_of, word_of
from kvstore.shm.records import ExtentTable
from kvstore.state import instructions as do
from kvstore.state.tiering.tiering import NODE_SESSION
from kvstore.state.writing import was_granted

if TYPE_CHECKING:
    from tests.helpers.worlds.real_node import RealNode

FREE, RESERVED, SEALED = FrameState.FREE, FrameState.RESERVED, FrameState.SEALED
RETIRING, QUARANTINED = FrameState.RETIRING, FrameState.QUARANTINED


class Watch(Protocol):
    """Facts that only the clients know for sure."""

    def may_write(self, extent: int, frame: int) -> set[int]:
        """Living sessions that might store into this frame at any moment."""
        ...

    def is_leased(self, extent: int, frame: int) -> bool:
        """True while a living client has a lease on the page in this frame."""
        ...


class Nobody:
    """A watch without clients."""

    def may_write(self, extent: int, frame: int) -> set[int]:
        """See ``Watch``."""
        return set()

    def is_leased(self, extent: int, frame: int) -> bool:
        """See ``Watch``."""
        return False


class Promises:
    """See the module. A promise that does not hold is an AssertionError."""

    def __init__(self, node: RealNode, watch: Watch) -> None:
        self._node = node
        self._watch = watch
        self._carved = 0  # the number of the last extent that this life has carved
        self._dropped: set[int] = set()  # numbers of extents that are no more
        self._checks: dict[type, Callable[[Any], None]] = {
            do.Carve: self._carve,
            do.Drop: self._drop,
            do.WriteGranted: self._granted,
            do.WriteReserved: self._granting,
            do.WriteWriter: lambda said: self._all_are(said.addresses, RESERVED, QUARANTINED),
            do.WriteSealed: self._sealed,
            do.WriteShards: lambda said: self._all_are([said.address], RESERVED),
            do.WriteState: self._state,
            do.WriteLease: self._lease,
            do.WriteStamp: lambda said: self._all_are([said.address], SEALED),
            do.WriteReplicated: lambda said: self._all_are(said.addresses, SEALED),
            do.Move: self._move,
            do.WriteUse: self._use,
            do.Save: self._copy,
            do.Load: self._copy,
            do.Carry: self._copy,
            do.Erase: self._erase,
        }

    def check(self, instruction: do.Instruction) -> None:
        """Check an instruction that is about to be performed."""
        assert self._node.performer.header.next_extent > self._carved or not self._carved, "its number is not stored"
        check = self._checks.get(type(instruction))
        if check is not None:
            check(instruction)

    def begin(self) -> None:
        """A life begins: the last one may have ended before it stored a number."""
        self._carved = 0

    def forget_numbers(self) -> None:
        """Let extents of a new segment have any numbers."""
        self._dropped.clear()

    # --- records ---------------------------------------------------------------------------------------------------

    def _table(self, address: Address) -> ExtentTable:
        return self._node.tables[address.extent]

    def _all_are(self, addresses: list[Address], *states: FrameState) -> None:
        """The records have these very generations, and one of these states each."""
        for address in addresses:
            generation, state = self._word(address)
            assert generation == address.generation, f"{address} is not what the record says"
            assert state in states, f"{address} is {state.name}, not {states}"

    def _word(self, address: Address) -> tuple[int, FrameState]:
        word = int(self._table(address).words[address.frame])
        return word >> 8, FrameState(word & 0xFF)

    def _state_of(self, address: Address) -> FrameState:
        return self._word(address)[1]

    def _is_newer(self, address: Address) -> None:
        """Every generation a frame gets is greater than those it had."""
        assert self._word(address)[0] < address.generation, f"{address} is not new"

    # --- instructions -----------------------------------------------------------------------------------------------

    def _carve(self, said: do.Carve) -> None:
        node, tables = self._node, self._node.tables.values()
        fresh = said.extent >= node.performer.header.next_extent and said.extent not in self._dropped
        assert fresh and said.extent not in node.tables, "an extent number is used twice"
        self._carved = said.extent
        carved = {table.position for table in tables if table.tier == said.tier}
        assert said.position not in carved, "two extents in one position"
        if said.tier == Tier.DRAM:
            assert 0 <= said.position < node.positions
            assert said.frames * said.frame_class.frame_bytes <= node.extent_bytes
            if node.scarce is not None:
                node.scarce.take_table(said.frame_class, said.frames)

    def _drop(self, said: do.Drop) -> None:
        table = self._node.tables[said.extent]
        if self._node.scarce is not None:
            self._node.scarce.drop(table.frames)
        assert not (table.words & 0xFF).any(), "an extent in use is dropped"
        self._dropped.add(said.extent)

    def _granted(self, said: do.WriteGranted) -> None:
        self._granting(said)
        below = self._table(said.addresses[0]).tier != Tier.DRAM
        assert not below or said.session == NODE_SESSION, "only the node writes to NVMe"

    def _granting(self, said: do.WriteGranted | do.WriteReserved) -> None:
        """These frames are about to be given to ``session``: nobody else may be able to store into them."""
        for address in said.addresses:
            extent, frame, _ = address
            others = self._watch.may_write(extent, frame)
            table = self._table(address)
            if int(table.words[frame]) == word_of(address.generation, RESERVED):  # it has written into it
                group, owner = (int(table.column(offset)[frame]) for offset in (table.fmt.group, table.fmt.writers))
                assert owner == said.session and not set(others) - {said.session}, f"{address}: not its"
                assert not group or was_granted(group, address), f"{address}: not granted"
                continue
            self._is_newer(address)
            assert self._state_of(address) == FREE, f"{address} is granted while in use"
            others = others - {said.session}
            assert not others, f"{address} is granted to {said.session} while {others} may write into it"
            assert not self._watch.is_leased(extent, frame), f"{address} is granted under somebody's lease"

    def _sealed(self, said: do.WriteSealed) -> None:
        addresses = said.addresses
        assert len(said.keys) == len(addresses) == len(set(addresses)) == len(set(said.keys))
        assert len(said.standings) == len(addresses)
        (tier,) = {self._table(address).tier for address in addresses}
        for address in addresses:
            if tier == Tier.DRAM or self._state_of(address) != QUARANTINED:
                self._all_are([address], RESERVED)  # the others were found by the scan, and keep their generations
            writers = self._watch.may_write(address.extent, address.frame)
            assert not writers, f"{address} is sealed while {writers} may write into it"
        keys = keys_of(said.rows) if said.rows is not None else [self._table(a).key(a.frame) for a in addresses]
        assert keys == list(said.keys), "the records name other pages"

    def _state(self, said: do.WriteState) -> None:
        assert said.state in (FREE, RETIRING, QUARANTINED)
        assert len(set(said.addresses)) == len(said.addresses)
        for address in said.addresses:
            self._change(address, said.state)

    def _change(self, address: Address, state: FrameState) -> None:
        extent, frame, _ = address
        tier = self._table(address).tier
        if state == QUARANTINED:
            if int(self._table(address).words[frame]) & 0xFF <= QUARANTINED:
                self._all_are([address], RESERVED if tier == Tier.DRAM else SEALED)
            return
        before = self._state_of(address)
        self._is_newer(address)
        if state == RETIRING:
            below = (RESERVED, RETIRING) if tier == Tier.NVME else ()
            assert before in (SEALED, *below), f"{address} retires from {before.name}"
            return
        assert before != FREE, f"{address} is freed twice"
        assert not self._watch.is_leased(extent, frame), f"{address} is freed under somebody's lease"
        writers = self._watch.may_write(extent, frame)
        assert not writers, f"{address} is freed while {writers} may write into it"

    def _lease(self, said: do.WriteLease) -> None:
        for address in said.addresses:
            assert self._state_of(address) in (SEALED, RETIRING), f"{address} is leased, yet holds no page"

    def _move(self, said: do.Move) -> None:
        source, target = self._table(said.source), self._table(said.target)
        self._all_are([said.source], SEALED)
        if source.tier == Tier.DRAM:
            self._is_newer(said.target)
            assert self._state_of(said.target) == FREE
        else:
            self._all_are([said.target], RESERVED)
        assert said.freed[:2] == said.source[:2]
        assert said.freed.generation > said.source.generation
        assert source.key(said.source.frame) == said.key
        for address in (said.source, said.target):
            assert not self._watch.may_write(*address[:2]), f"{address} takes part in a move while it may be written"
            assert not self._watch.is_leased(*address[:2]), f"{address} moves under somebody's lease"
        assert source.tier == target.tier == said.tier

    def _use(self, said: do.WriteUse) -> None:
        for address in said.addresses:
            assert self._state_of(address) in (RESERVED, SEALED, QUARANTINED)

    def _copy(self, said: do.Save | do.Load | do.Carry) -> None:
        source = Tier.DRAM if isinstance(said, do.Save) else Tier.NVME
        target = Tier.DRAM if isinstance(said, do.Load) else Tier.NVME
        for page in said.pages:
            self._all_are([page.source], page.state)
            self._all_are([page.target], RESERVED)
            written = source == Tier.DRAM and not self._watch.may_write(*page.source[:2])
            assert page.state == SEALED or written, "it is written to"
            assert self._table(page.source).tier == source
            assert self._table(page.target).tier == target
            assert self._table(page.source).key(page.source.frame) == page.key

    def _erase(self, said: do.Erase) -> None:
        for _, address in said.pages:
            self._all_are([address], RETIRING)
            assert self._table(address).tier == Tier.NVME
