"""MemoryShell: performs a node's instructions on plain arrays, and doubts every one of them.

It is the node's performer and startup without files: records are numpy columns, the index a dict that is committed at
the end of each decision. Work is cut into the stores a kill could fall between (``steps``), so that a test can stop
after any number of them and go on with ``recovered``. On the way it asserts what each instruction promises about the
frame it touches; what the clients of the store know better (who may still write, who holds a lease) comes in through
``Watch``.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvstore.model.replica import Address, FrameClass, FrameState, Tier, standing_of, word_of
from kvstore.state import events as ev
from kvstore.state import integrity, prefix_links, recovery
from kvstore.state.frames import Segment
from kvstore.state.interfaces import Snapshot, TieringRules, TierParts
from kvstore.state.node_state import NodeState
from kvstore.state.recovery import ExtentFound
from kvstore.state.tiering.tiering import NODE_SESSION
from kvstore.state.writing import was_granted
from kvstore.tier.nvme import geometry
from tests.helpers.worlds.simulated_disk import SimulatedDisk
from tests.helpers.worlds.tables import Table

FREE, RESERVED, SEALED = FrameState.FREE, FrameState.RESERVED, FrameState.SEALED
RETIRING, QUARANTINED = FrameState.RETIRING, FrameState.QUARANTINED


class Watch(Protocol):
    """What only the clients know for sure."""

    def may_write(self, extent: int, frame: int) -> set[int]:
        """Living sessions that might store into this frame at any moment."""
        ...

    def is_leased(self, extent: int, frame: int) -> bool:
        """A living client was promised that this frame keeps its page, and the promise has not run out."""
        ...


class Scarce(Protocol):
    """Memory that may run out, where a test has such."""

    def take_table(self, frame_class: FrameClass, frames: int) -> None:
        """An extent is carved."""
        ...

    def drop(self, frames: int) -> None:
        """An extent's tables are given up; whoever maps them keeps their memory."""
        ...

    def commit(self, changes: int, entries: int) -> None:
        """The index follows a decision."""
        ...


class Nobody:
    """A watch without clients."""

    def may_write(self, extent: int, frame: int) -> set[int]:
        """See ``Watch``."""
        return set()

    def is_leased(self, extent: int, frame: int) -> bool:
        """See ``Watch``."""
        return False


@dataclass
class Nvme:
    """A node's NVMe tier: its disk (which outlives even a reboot), its rules, and how both tiers evict."""

    disk: SimulatedDisk
    rules: TieringRules = field(default_factory=TieringRules)
    policy: str = "lru"


class TierView:
    """What the state reads back of a tier: its index, and its records."""

    def __init__(self, shell: MemoryShell, tier: Tier) -> None:
        self._shell = shell
        self._tier = tier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shell, name)  # records are read the same way whatever the tier

    def find(self, key: bytes) -> Address | None:
        """See ``PageIndex``."""
        return self._shell.indexes[self._tier].get(key)

    def absent(self, keys: Sequence[bytes]) -> int:
        """See ``PageIndex``."""
        index = self._shell.indexes[self._tier]
        return next((i for i, key in enumerate(keys) if key in index), len(keys))

    def snapshots(self) -> list[Snapshot]:
        """See ``RecordView``."""
        return self._shell.snapshots(self._tier)


class MemoryShell:
    """Performs. What survives a kill of the daemon is all in here, except ``ops`` (the transaction not committed)."""

    def __init__(self, extent_bytes: int, positions: int, watch: Watch | None = None, nvme: Nvme | None = None) -> None:
        self.extent_bytes = extent_bytes
        self.positions = positions
        self.nvme = nvme
        self.policy = nvme.policy if nvme is not None else "lru"  # tests of an order are about this one
        self.watch: Watch = watch if watch is not None else Nobody()
        self.now_ns = 0
        self.scarce: Scarce | None = None
        self.tables: dict[int, Table] = {}
        self.indexes: dict[Tier, dict[bytes, Address]] = {tier: {} for tier in Tier}
        self.views = {tier: TierView(self, tier) for tier in Tier}
        self.content: dict[tuple[int, int], object] = {}  # what lies in a DRAM frame: of a page its key
        self.copies: deque[ev.Save | ev.Load | ev.Carry | ev.Erase] = deque()  # decided, not carried out
        self.pend: dict[bytes, Address] = {}
        self.next_extent = 1
        self.ops: list[tuple[str, bytes, Address | None, Tier]] = []
        self.to_check: list[int] = []
        self.reply: ev.Reply | None = None
        self.names: dict[str, dict[str, Any]] = {}  # of roots
        self.pins: dict[int, ev.WritePin] = {}
        self.verbs: dict[type, Callable[[Any], Iterator[None]]] = {
            ev.Carve: self._carve,
            ev.Drop: self._drop,
            ev.WriteGranted: self._write_granted,
            ev.WriteReserved: self._write_reserved,
            ev.WriteWriter: self._write_writer,
            ev.WriteSealed: self._write_sealed,
            ev.WriteShards: self._write_shards,
            ev.WriteState: self._write_state,
            ev.Unindex: self._unindex,
            ev.Unpend: self._unpend,
            ev.WriteLease: self._write_lease,
            ev.WriteStamp: self._write_stamp,
            ev.Move: self._move,
            ev.WriteUse: self._write_use,
            ev.WriteName: self._write_name,
            ev.WriteNames: self._write_names,
            ev.ForgetNames: lambda _: iter(()),
            ev.WritePin: self._write_pin,
            ev.WritePins: self._write_pins,
            ev.ErasePins: self._erase_pins,
            ev.Save: self._copy,
            ev.Load: self._copy,
            ev.Carry: self._copy,
            ev.Erase: self._erase,
            ev.ShowPages: self._show_pages,
            ev.WriteMounts: self._write_mounts,
            ev.EndMount: lambda _: iter(()),
            ev.CheckSession: self._check_session,
            ev.Reply: self._reply,
        }

    # --- reading back: RecordView, and an index per tier ------------------------------------------------------------

    @property
    def index(self) -> dict[bytes, Address]:
        """Of DRAM."""
        return self.indexes[Tier.DRAM]

    @property
    def nvme_index(self) -> dict[bytes, Address]:
        """Of NVMe."""
        return self.indexes[Tier.NVME]

    def key(self, extent: int, frame: int) -> bytes:
        """See ``RecordView``."""
        return self.tables[extent].rows[frame, :16].tobytes()

    def lineage(self, extent: int, frame: int) -> tuple[bytes, bytes, bytes]:
        """See ``RecordView``."""
        return self.key(extent, frame), self.root(extent, frame), self.parent(extent, frame)

    def root(self, extent: int, frame: int) -> bytes:
        """See ``RecordView``."""
        return self.tables[extent].rows[frame, 16:32].tobytes()

    def extra(self, extent: int, frame: int) -> bytes:
        """See ``RecordView``."""
        return self.tables[extent].rows[frame, 32:48].tobytes()

    def parent(self, extent: int, frame: int) -> bytes:
        """See ``RecordView``."""
        return self.tables[extent].parents[frame].tobytes()

    def last_use_ns(self, extent: int, frame: int) -> int:
        """See ``RecordView``."""
        return min(int(self.tables[extent].last_use[frame]), self.now_ns)

    def standing(self, extent: int, frame: int) -> int:
        """See ``RecordView``."""
        return standing_of(int(self.tables[extent].infos[frame]))

    def snapshots(self, tier: Tier = Tier.DRAM) -> list[Snapshot]:
        """See ``RecordView``."""
        return [table.snapshot() for table in self.tables.values() if table.tier == tier]

    def is_sealed(self, address: Address, state: FrameState = SEALED) -> bool:
        """The record says so, or that it has that other state."""
        table = self.tables.get(address.extent)
        return table is not None and int(table.words[address.frame]) == word_of(address.generation, state)

    # --- performing -------------------------------------------------------------------------------------------------

    def perform(self, instructions: list[ev.Instruction], steps: int | None = None) -> ev.Reply | None:
        """One decision; with ``steps``, only that many stores of it (a kill): no reply, no commit unless it came."""
        self.ops, self.reply = [], None
        for done, _ in enumerate(self.stores(instructions)):
            if done == steps:
                self.ops, self.reply = [], None
                return None
        return self.reply

    def stores(self, instructions: list[ev.Instruction]) -> Iterator[None]:
        """Yields before each store; the last one is the commit of the index."""
        for instruction in instructions:
            yield from self.verbs[type(instruction)](instruction)
        yield
        if self.scarce is not None:
            self.scarce.commit(len(self.ops), len(self.index))
        for verb, key, address, tier in self.ops:
            if verb == "put":
                assert address is not None
                self.indexes[tier][key] = address
            elif verb == "delete":
                self.indexes[tier].pop(key, None)
            elif verb == "pend":
                assert address is not None
                self.pend[key] = address
            else:
                self.pend.pop(key, None)
        self.ops = []

    @staticmethod
    def count_stores(instructions: list[ev.Instruction]) -> int:
        """About how many steps ``perform`` takes: what a kill point is drawn from."""
        return 1 + sum(3 + 2 * len(getattr(instruction, "addresses", ())) for instruction in instructions)

    def _put_word(self, address: Address, state: FrameState) -> None:
        self.tables[address.extent].words[address.frame] = word_of(address.generation, state)

    def _must_be(self, address: Address, *states: FrameState) -> None:
        """The record has this very generation, and one of these states."""
        table = self.tables[address.extent]
        assert table.generation(address.frame) == address.generation, f"{address} is not what the record says"
        assert table.state(address.frame) in states, f"{address} is {table.state(address.frame).name}, not {states}"

    def _must_be_newer(self, address: Address) -> None:
        """Every generation a frame gets is greater than those it had."""
        assert self.tables[address.extent].generation(address.frame) < address.generation, f"{address} is not new"

    def _by_extent(self, addresses: list[Address]) -> Iterator[tuple[Table, list[int]]]:
        """(table, places in ``addresses``): a batch is written extent by extent."""
        places: dict[int, list[int]] = defaultdict(list)
        for i, address in enumerate(addresses):
            places[address.extent].append(i)
        for number, where in places.items():
            yield self.tables[number], where

    def _carve(self, instruction: ev.Carve) -> Iterator[None]:
        number, position = instruction.extent, instruction.position
        tier, frame_class = instruction.tier, instruction.frame_class
        assert number >= self.next_extent, "an extent number is used twice"
        carved = {table.position for table in self.tables.values() if table.tier == tier}
        assert position not in carved, "two extents in one position"
        if tier == Tier.DRAM:
            assert 0 <= position < self.positions
            assert instruction.frames * frame_class.frame_bytes <= self.extent_bytes
        if self.scarce is not None and tier == Tier.DRAM:
            self.scarce.take_table(frame_class, instruction.frames)
        yield
        self.next_extent = number + 1
        yield
        self.tables[number] = Table(number, position, frame_class, instruction.frames, tier)
        if tier == Tier.NVME:
            yield
            self.disk.carve(position, number, frame_class, instruction.frames)

    @property
    def disk(self) -> SimulatedDisk:
        """Of a node that has NVMe."""
        assert self.nvme is not None
        return self.nvme.disk

    def _drop(self, instruction: ev.Drop) -> Iterator[None]:
        yield
        table = self.tables.pop(instruction.extent)
        if self.scarce is not None:
            self.scarce.drop(table.frames)
        assert all(table.state(frame) == FREE for frame in range(table.frames)), "an extent in use is dropped"
        if table.tier == Tier.NVME:
            yield
            self.disk.drop(table.position)

    def _granting(self, addresses: list[Address], session: int) -> None:
        """These frames are about to be given to ``session``: nobody else may be able to store into them."""
        for address in addresses:
            extent, frame, _ = address
            others = self.watch.may_write(extent, frame)
            if int(self.tables[extent].words[frame]) == word_of(address.generation, RESERVED):  # it has written into it
                group, owner = (int(word) for word in self.tables[extent].tails[frame, :2])
                assert owner == session and not set(others) - {session}, f"{address}: not its"
                assert not group or was_granted(group, address), f"{address}: not granted"
                continue
            self._must_be_newer(address)
            assert self.tables[extent].state(frame) == FREE, f"{address} is granted while in use"
            others = others - {session}
            assert not others, f"{address} is granted to {session} while {others} may write into it"
            assert not self.watch.is_leased(extent, frame), f"{address} is granted under somebody's lease"

    def _write_granted(self, instruction: ev.WriteGranted) -> Iterator[None]:
        self._granting(instruction.addresses, instruction.session)
        for table, places in self._by_extent(instruction.addresses):
            frames = [instruction.addresses[i].frame for i in places]
            yield
            table.rows[frames, :16] = 0
            table.infos[frames], table.leases[frames], table.tails[frames] = 0, 0, 0
            if table.tier == Tier.DRAM:
                table.tails[frames, 1] = instruction.session
            else:
                assert instruction.session == NODE_SESSION, "only the node writes to NVMe"
            for i in places:
                yield
                self._put_word(instruction.addresses[i], RESERVED)

    def _write_identity(self, table: Table, frames: list[int], rows: Any, parents: list[bytes]) -> None:
        table.rows[frames] = rows
        table.parents[frames] = np.frombuffer(b"".join(parents), np.uint8).reshape(-1, 16)
        for frame in frames:
            table.sums[frame] = table.sum_of(frame)

    def _write_reserved(self, instruction: ev.WriteReserved) -> Iterator[None]:
        self._granting(instruction.addresses, instruction.session)
        for table, places in self._by_extent(instruction.addresses):
            frames = [instruction.addresses[i].frame for i in places]
            yield
            self._write_identity(table, frames, instruction.rows[places], [instruction.parents[i] for i in places])
            table.infos[frames] = instruction.shards << 32
            table.leases[frames], table.tails[frames] = instruction.until_ns, 0
            table.tails[frames, 0], table.tails[frames, 1 + instruction.shard] = instruction.group, instruction.session
            for i in places:
                yield
                self._put_word(instruction.addresses[i], RESERVED)
        for row, address in zip(instruction.rows, instruction.addresses, strict=True):
            if row[:16].tobytes() not in self.pend:
                self.ops.append(("pend", row[:16].tobytes(), address, Tier.DRAM))

    def _write_writer(self, instruction: ev.WriteWriter) -> Iterator[None]:
        for address in instruction.addresses:
            self._must_be(address, RESERVED, QUARANTINED)
            yield
            self.tables[address.extent].tails[address.frame, 1 + instruction.shard] = instruction.session

    def _write_sealed(self, instruction: ev.WriteSealed) -> Iterator[None]:
        addresses = instruction.addresses
        assert len(instruction.keys) == len(addresses) == len(set(addresses)) == len(set(instruction.keys))
        assert len(instruction.standings) == len(addresses)
        (tier,) = {self.tables[address.extent].tier for address in addresses}
        for address in addresses:
            if tier == Tier.DRAM or self.tables[address.extent].state(address.frame) != QUARANTINED:
                self._must_be(address, RESERVED)  # the others were found by the scan, and keep the generation they had
            writers = self.watch.may_write(address.extent, address.frame)
            assert not writers, f"{address} is sealed while {writers} may write into it"
        for table, places in self._by_extent(addresses):
            frames = [addresses[i].frame for i in places]
            yield
            if instruction.checksums is not None:
                table.tails.view(np.uint32)[frames, : table.frame_class.layers] = instruction.checksums[places]
                yield
            if instruction.rows is not None:
                assert instruction.parents is not None
                parents = [instruction.parents[i] for i in places]
                self._write_identity(table, frames, instruction.rows[places], parents)
                table.infos[frames] = [instruction.standings[i] for i in places]
                yield
            table.leases[frames] = 0
            for i in places:
                assert table.rows[addresses[i].frame, :16].tobytes() == instruction.keys[i]
                yield
                self._put_word(addresses[i], SEALED)
            if instruction.rows is None:  # while it was RESERVED, its shards were there
                yield
                table.infos[frames] = [instruction.standings[i] for i in places]
        self.ops += [("put", key, address, tier) for key, address in zip(instruction.keys, addresses, strict=True)]

    def _write_shards(self, instruction: ev.WriteShards) -> Iterator[None]:
        self._must_be(instruction.address, RESERVED)
        yield
        info = instruction.shards << 32 | instruction.mask << 40
        self.tables[instruction.address.extent].infos[instruction.address.frame] = info

    def _write_state(self, instruction: ev.WriteState) -> Iterator[None]:
        state = instruction.state
        assert state in (FREE, RETIRING, QUARANTINED)
        assert len(set(instruction.addresses)) == len(instruction.addresses)
        for table, places in self._by_extent(instruction.addresses):
            for i in places:
                address = instruction.addresses[i]
                self._check_change(table, address, state)
                yield
                self._put_word(address, state)

    def _check_change(self, table: Table, address: Address, state: FrameState) -> None:
        extent, frame, _ = address
        if state == QUARANTINED:
            if int(table.words[frame]) & 0xFF <= QUARANTINED:
                self._must_be(address, RESERVED if table.tier == Tier.DRAM else SEALED)
            return
        before = table.state(frame)
        self._must_be_newer(address)
        if state == RETIRING:
            below = (RESERVED, RETIRING) if table.tier == Tier.NVME else ()
            assert before in (SEALED, *below), f"{address} retires from {before.name}"
            return
        assert before != FREE, f"{address} is freed twice"
        assert not self.watch.is_leased(extent, frame), f"{address} is freed under somebody's lease"
        writers = self.watch.may_write(extent, frame)
        assert not writers, f"{address} is freed while {writers} may write into it"

    def _unindex(self, instruction: ev.Unindex) -> Iterator[None]:
        yield
        self.ops += [("delete", key, None, instruction.tier) for key in instruction.keys]

    def _unpend(self, instruction: ev.Unpend) -> Iterator[None]:
        yield
        verb = "unpend" if instruction.heir is None else "pend"
        self.ops.append((verb, instruction.key, instruction.heir, Tier.DRAM))

    def _write_lease(self, instruction: ev.WriteLease) -> Iterator[None]:
        for address, until_ns in zip(instruction.addresses, instruction.until_ns, strict=True):
            table = self.tables[address.extent]
            assert table.state(address.frame) in (SEALED, RETIRING), f"{address} is leased, yet holds no page"
            yield
            table.leases[address.frame] = until_ns

    def _write_stamp(self, instruction: ev.WriteStamp) -> Iterator[None]:
        self._must_be(instruction.address, SEALED)
        yield

    def _move(self, instruction: ev.Move) -> Iterator[None]:
        source, target = self.tables[instruction.source.extent], self.tables[instruction.target.extent]
        old, new = instruction.source.frame, instruction.target.frame
        self._must_be(instruction.source, SEALED)
        if source.tier == Tier.DRAM:
            self._must_be_newer(instruction.target)
            assert target.state(new) == FREE
        else:
            self._must_be(instruction.target, RESERVED)
        assert instruction.freed[:2] == instruction.source[:2]
        assert instruction.freed.generation > instruction.source.generation
        assert self.key(*instruction.source[:2]) == instruction.key
        for address in (instruction.source, instruction.target):
            assert not self.watch.may_write(*address[:2]), f"{address} takes part in a move while it may be written"
            assert not self.watch.is_leased(*address[:2]), f"{address} moves under somebody's lease"
        assert source.tier == target.tier == instruction.tier
        yield
        if source.tier == Tier.DRAM:
            self.content[instruction.target[:2]] = self.content.get(instruction.source[:2])
        for column in ("rows", "parents", "infos", "sums", "leases", "tails", "last_use"):
            getattr(target, column)[new] = getattr(source, column)[old]
        yield
        self._put_word(instruction.target, SEALED)
        self.ops.append(("put", instruction.key, instruction.target, instruction.tier))
        yield
        self._put_word(instruction.freed, instruction.state)

    def _write_use(self, instruction: ev.WriteUse) -> Iterator[None]:
        for address, used_ns in zip(instruction.addresses, instruction.used_ns, strict=True):
            assert self.tables[address.extent].state(address.frame) in (RESERVED, SEALED, QUARANTINED)
            yield
            self.tables[address.extent].last_use[address.frame] = used_ns

    def _write_name(self, instruction: ev.WriteName) -> Iterator[None]:
        yield
        about = json.loads(instruction.line)
        self.names[about.pop("root")] = about

    def _write_names(self, instruction: ev.WriteNames) -> Iterator[None]:
        yield
        said = [json.loads(line) for line in instruction.lines]
        self.names = {about.pop("root"): about for about in said}

    def _write_pin(self, instruction: ev.WritePin) -> Iterator[None]:
        yield
        self.pins[instruction.number] = instruction

    def _write_pins(self, instruction: ev.WritePins) -> Iterator[None]:
        yield
        self.pins = {pin.number: pin for pin in instruction.pins}

    def _erase_pins(self, instruction: ev.ErasePins) -> Iterator[None]:
        yield
        for number in instruction.numbers:
            self.pins.pop(number, None)

    def _copy(self, instruction: ev.Save | ev.Load | ev.Carry) -> Iterator[None]:
        source = Tier.DRAM if isinstance(instruction, ev.Save) else Tier.NVME
        target = Tier.DRAM if isinstance(instruction, ev.Load) else Tier.NVME
        for page in instruction.pages:
            self._must_be(page.source, page.state)
            self._must_be(page.target, RESERVED)
            written = source == Tier.DRAM and not self.watch.may_write(*page.source[:2])
            assert page.state == SEALED or written, "it is written to"
            assert self.tables[page.source.extent].tier == source
            assert self.tables[page.target.extent].tier == target
            assert self.key(*page.source[:2]) == page.key
        yield
        self.copies.append(instruction)

    def _erase(self, instruction: ev.Erase) -> Iterator[None]:
        for _, address in instruction.pages:
            self._must_be(address, RETIRING)
            assert self.tables[address.extent].tier == Tier.NVME
        yield
        self.copies.append(instruction)

    def _show_pages(self, instruction: ev.ShowPages) -> Iterator[None]:
        yield
        assert len(instruction.spans) == (len(instruction.keys) if instruction.root else 0)
        pages = zip(instruction.keys, instruction.addresses, strict=True)
        self.ops += [("put", key, address, Tier.HBM) for key, address in pages]

    def _write_mounts(self, instruction: ev.WriteMounts) -> Iterator[None]:
        yield
        self.next_extent = max(self.next_extent, instruction.next_extent)

    def _check_session(self, instruction: ev.CheckSession) -> Iterator[None]:
        yield
        self.to_check.append(instruction.session)

    def _reply(self, instruction: ev.Reply) -> Iterator[None]:
        assert self.reply is None, "two replies to one event"
        self.reply = instruction
        return
        yield

    # --- starting again ---------------------------------------------------------------------------------------------

    def state(self, **options: Any) -> NodeState:
        """A fresh state over empty segments."""
        segment = Segment(self.extent_bytes, self.positions, policy=self.policy)
        tiers = {Tier.DRAM: TierParts(segment, *[self.views[Tier.DRAM]] * 2)}
        if self.nvme is not None:
            disk = self.nvme.disk
            below = Segment(
                disk.extent_bytes,
                disk.positions,
                frames_in=geometry.frames_in,
                stride=geometry.stride_bytes,
                numbers=segment.numbers,
                policy=self.policy,
            )
            below.populated.update(range(disk.positions))
            views = [self.views[Tier.NVME]] * 2
            tiers[Tier.NVME] = TierParts(below, *views, disk.starts << 32, self.nvme.rules)
        named = [(bytes.fromhex(root), about) for root, about in self.names.items()]
        return NodeState(tiers, named=named, **options)

    def found(self) -> list[ExtentFound]:
        """What the daemon sees of the tables when it starts."""
        return [table.found() for table in self.tables.values()]

    def rebooted(self) -> None:
        """Everything but the disk is gone; NVMe's tables are made again from it."""
        assert self.nvme is not None
        self.tables, self.pend, self.content = {}, {}, {}
        self.indexes = {tier: {} for tier in Tier}
        self.names, self.pins = {}, {}
        self.copies.clear()
        self.next_extent = 1
        for table in self.disk.power_loss():
            self.tables[table.number] = table

    def reconcile(self) -> None:
        """Extents that were being carved or dropped when the daemon died: the disk decides which there are."""
        known = {extent.number: position for position, extent in self.disk.extents.items()}
        for number, table in list(self.tables.items()):
            if table.tier == Tier.NVME and number not in known:
                del self.tables[number]
        for number, position in known.items():
            if number not in self.tables:
                self.tables[number] = self.disk.found(position)

    def recovered(self, state: NodeState, now_ns: int, steps: int | None = None) -> NodeState | None:
        """Fill a fresh ``state`` as the daemon does when it starts; None where it was killed again (``steps``)."""
        self.now_ns = now_ns
        self.to_check = []
        self.copies.clear()
        if self.nvme is not None:
            self.reconcile()
        instructions = recovery.recover(state, self.found(), self.next_extent, now_ns)
        self.perform(instructions, steps)
        if steps is not None and steps < self.count_stores(instructions):
            return None
        self.reindex()
        recovery.settle(state)
        pins = []
        for number, pin in self.pins.items():
            if pin.until_ns > now_ns:
                pins.append(ev.Pin(now_ns, number, pin.keys, pin.root, pin.until_ns, pin.until_s, pin.asked))
        self.perform(state.handle(ev.RestorePins(now_ns, pins)))
        return state

    def reindex(self) -> None:
        """Make the index agree with the records."""
        self.indexes = {tier: self._indexed(tier) for tier in Tier}
        self.pend = {}
        for number, table in self.tables.items():
            for frame in range(table.frames):
                key = self.key(number, frame)
                if table.tier == Tier.DRAM and table.state(frame) == RESERVED and int(table.tails[frame, 0]) != 0:
                    address = Address(number, frame, table.generation(frame))
                    if key not in self.pend or address.generation < self.pend[key].generation:
                        self.pend[key] = address

    def _indexed(self, tier: Tier) -> dict[bytes, Address]:
        links = prefix_links.link(self.snapshots(tier))
        assert not links.duplicate.any()
        return {links.key(i): links.address(i) for i in range(len(links.parent))}

    # --- laws -------------------------------------------------------------------------------------------------------

    def check(self, state: NodeState) -> list[str]:
        """``integrity.check``, and what it does not know: what readers are shown of pending pages."""
        wrong = []
        for tier in state.spaces:
            wrong += integrity.check(state, tier, self.snapshots(tier), self.indexes[tier].items())
        wrong += integrity.check_mounts(state, self.indexes[Tier.HBM].items())
        live = [page for page in state.pending.by_address.values() if not page.doomed]
        for key, address in self.pend.items():
            page = state.pending.by_address.get(address)
            if page is None or page.doomed or page.key != key:
                wrong.append(f"pending {key.hex()}: {address} is no live reservation of it")
        wrong += [f"pending {p.key.hex()}: readers are not shown it" for p in live if p.key not in self.pend]
        wrong += [
            f"pending {page.key.hex()}: its parent is sealed and not held"
            for page in live
            if not page.at_root and not page.holds_parent and state.space.find(page.parent) is not None
        ]
        for address, page in state.pending.by_address.items():
            frame_state = self.tables[address.extent].state(address.frame)
            if page.doomed != (frame_state == QUARANTINED):
                wrong.append(f"{address}: {frame_state.name}, and {'doomed' if page.doomed else 'live'}")
        capacity = self.positions * self.extent_bytes
        in_dram = [table for table in self.tables.values() if table.tier == Tier.DRAM]
        used = sum(table.frames * table.frame_class.frame_bytes for table in in_dram)
        if used > capacity:
            wrong.append(f"{used} bytes are carved out of {capacity}")
        return wrong
