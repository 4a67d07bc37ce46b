"""Performer: carries out the instructions of a node's decisions, in order, on record tables and index.

The state also reads records through it (``startup.TierView``). One thread at a time uses a performer.

A decision cannot be half performed: if a table could not be created in the middle, state, records and index would
contradict each other. So the node creates spare tables first (``SpareTables``), and gives the state their number
(``Segment.tables``). An extent that is carved takes one of them.

Copies between tiers take long. The performer puts them into ``Waiting``, and the threads of ``background`` carry them
out.
"""

from __future__ import annotations

import errno
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

import numpy as np
import xxhash

from kvstore import boundary, failpoint
from kvstore.errors import OutOfSpace
from kvstore.model.replica import (
    ADDRESS,
    ADDRESS_BYTES,
    REPLICATED_INFO,
    SHARDS_MAX,
    STAMPED,
    Address,
    FrameClass,
    FrameState,
    RecordFormat,
    Tier,
    frame_runs,
    identity_bytes,
    info_word,
    keys_of,
    standing_of,
    word_of,
)
from kvstore.node.book import Book
from kvstore.node.event_log import EventLog
from kvstore.node.index_keeper import GROUPS, IndexKeeper, IndexOp
from kvstore.node.nvme_pages import NvmePages
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.index import GROUP_ENTRY, Index
from kvstore.shm.lmdb_environment import TIER_TABLES
from kvstore.shm.mounted import remove_mounted
from kvstore.shm.put_log import PutLog
from kvstore.shm.records import ExtentTable, TableFiles
from kvstore.state import instructions as do
from kvstore.state.interfaces import ChainRun, Rows
from kvstore.tier.base import TierStore
from kvstore.tier.dram import DramStore
from kvstore.wire.control import pack_addresses

log = logging.getLogger("kvstore.node")

CLASSES_MAX = 4  # number of classes with spare tables: the most recently requested classes
OWED_RUNS_MAX = 16384  # runs of new pages that the replicator has not taken yet
UNSTAMPED_MAX = 16384  # sealed pages in the queue for checksums; a sweep of the scrubber finds the others
SEALED, RESERVED = FrameState.SEALED, FrameState.RESERVED
_FIRST_COPIES = frozenset(("put", "through"))  # causes of seals after which a page may want a second copy
# The tail of a granted frame's record: ``info``, then the first writer. Sum, deadline, group, other writers are zero.
_GRANTED = struct.Struct(f"<Q24xQ{8 * (SHARDS_MAX - 1)}x")

DECIDED = boundary.StateGuard("state/node")
"""The guard around each decision and its performance. If either fails half-way, the state cannot be trusted, and a
daemon ends."""

DeviceWrite = do.Save | do.Carry | do.Erase


class SpareTables:
    """Spare tables for the next extents in DRAM, see the module. After a kill, the next start removes their files.

    Attributes:
        blocked: the last table could not be created for lack of descriptors.
    """

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._spares: dict[FrameClass, list[TableFiles]] = {}
        self._created = 0
        self.blocked = False

    def fill(self, frame_class: FrameClass, frames: int, count: int) -> int:
        """Create spare tables of a class until there are ``count``. Return how many there are, at most ``count``.

        There are fewer if memory or descriptors run out (``blocked`` if descriptors).
        Spare tables are mapped already. So
        ``take`` needs neither.
        """
        self.blocked = False
        spares = self._spares.setdefault(frame_class, [])
        while len(self._spares) > CLASSES_MAX:
            for files in self._spares.pop(next(iter(self._spares))):
                files.remove()
        while len(spares) < count:
            self._created += 1
            try:
                spares.append(TableFiles.make(self._folder, self._created, frame_class, frames))
            except (OSError, OutOfSpace) as error:
                self.blocked = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
                break
        return min(len(spares), count)

    def take(self, frame_class: FrameClass) -> TableFiles | None:
        """Remove and return a spare table of that class; None if there is none."""
        spares = self._spares.get(frame_class)
        return spares.pop() if spares else None


class SealedInbox:
    """New pages that want a second copy, until the replicator takes them. Any thread may call ``take``.

    A node without a replicator, or with a slow one, forgets the newest pages beyond ``OWED_RUNS_MAX`` runs. ``lost``
    then counts them, and the replicator finds them in the records.

    Attributes:
        arrived: set when pages are added.
        lost: runs that were not added.
    """

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.lost = 0
        self._runs: deque[tuple[bytes, list[bytes], int]] = deque()

    def add(self, parent: bytes, keys: list[bytes], page_bytes: int) -> None:
        """Add consecutive pages of a chain, which follow the page ``parent``. One thread at a time calls this."""
        if len(self._runs) >= OWED_RUNS_MAX:
            self.lost += 1
        else:
            self._runs.append((parent, keys, page_bytes))
        self.arrived.set()

    def take(self) -> list[tuple[bytes, list[bytes], int]]:
        """Remove and return all runs, as (page before, keys, size of a page)."""
        self.arrived.clear()
        return [self._runs.popleft() for _ in range(len(self._runs))]


@dataclass(slots=True)
class Waiting:
    """Queues of decided work. ``Tiering`` limits how many copies are under way, and so the first three queues.

    Attributes:
        copies: writes to NVMe, for the mover.
        loads: reads from NVMe, for the mover.
        relays: copies to and from the tiers of the relay.
        unstamped: sealed pages without checksums, for the scrubber.
        owed: new pages that want a second copy on another node, for the replicator.
    """

    copies: deque[DeviceWrite] = field(default_factory=deque)
    loads: deque[do.Load] = field(default_factory=deque)
    relays: deque[DeviceWrite | do.Load] = field(default_factory=deque)
    unstamped: deque[Address] = field(default_factory=lambda: deque(maxlen=UNSTAMPED_MAX))
    owed: SealedInbox = field(default_factory=lambda: SealedInbox())


class Performer:
    """Writes a node's files, from the start to the stop of its daemon. After a kill, ``recovery`` makes a new one."""

    def __init__(
        self,
        folder: NodeFolder,
        header: Header,
        stores: Mapping[Tier, TierStore],
        index: Index,
        index_bytes: int,
        now_ns: Callable[[], int],
    ) -> None:
        self.folder = folder
        self.header = header
        self.stores = dict(stores)
        self.waiting = Waiting()
        self.tables: dict[int, ExtentTable] = {}
        self.spares = SpareTables(folder)
        self.index = IndexKeeper(folder, header, index, index_bytes, self.tables, tuple(TIER_TABLES))
        self.sessions_to_check: list[int] = []
        self.events = EventLog(staged=True)
        self.book = Book(folder, header.incarnation)
        self.puts: PutLog | None = None
        self._index_ops: list[IndexOp] = []  # of the current decision
        self._now_ns = now_ns
        self._verbs: dict[type, Callable[[Any], None]] = {
            do.Carve: self._carve,
            do.Drop: self._drop,
            do.WriteGranted: self._write_granted,
            do.WriteReserved: self._write_reserved,
            do.WriteWriter: self._write_writer,
            do.WriteSealed: self._write_sealed,
            do.WriteShards: self._write_shards,
            do.WriteState: self._write_state,
            do.Unindex: self._unindex,
            do.ListGroups: self._list_groups,
            do.UnlistGroups: self._unlist_groups,
            do.Unpend: self._unpend,
            do.WriteLease: self._write_lease,
            do.WriteStamp: self._write_stamp,
            do.WriteReplicated: self._write_replicated,
            do.WriteObjectStamp: self._write_object_stamp,
            do.Move: self._move,
            do.WriteUse: self._write_use,
            do.WriteName: lambda instruction: self.book.add_name(instruction.line),
            do.WriteNames: self._forget_names,
            do.ForgetNames: self._forget_names,
            do.WritePin: self.book.add_pin,
            do.WritePins: lambda instruction: self.book.replace_pins(instruction.pins),
            do.ErasePins: lambda instruction: self.book.remove_pins(instruction.numbers),
            do.WriteQuarantine: lambda instruction: self.book.replace_quarantine(instruction.held),
            do.Save: self._copy,
            do.Load: self._copy,
            do.Carry: self._copy,
            do.Erase: self._copy,
            do.ShowPages: self._show_pages,
            do.WriteMounts: self._write_mounts,
            do.EndMount: lambda instruction: remove_mounted(folder, instruction.segment),
        }

    @property
    def dram(self) -> DramStore:
        """The store of the pages in DRAM."""
        dram = self.stores[Tier.DRAM]
        assert isinstance(dram, DramStore)
        return dram

    @property
    def nvme(self) -> NvmePages | None:
        """The store of the pages on NVMe; None if the node has no such tier."""
        nvme = self.stores.get(Tier.NVME)
        assert nvme is None or isinstance(nvme, NvmePages)
        return nvme

    # --- reading records: the interface ``RecordView`` --------------------------------------------------------------

    def key(self, extent: int, frame: int) -> bytes:
        """Return the page's key."""
        return self.tables[extent].key(frame)

    def lineage(self, extent: int, frame: int) -> tuple[bytes, bytes, bytes]:
        """Return the page's key, root and parent."""
        return self.tables[extent].lineage(frame)

    def root(self, extent: int, frame: int) -> bytes:
        """Return the root of the page's chain."""
        return self.tables[extent].root(frame)

    def extra(self, extent: int, frame: int) -> bytes:
        """Return the page's field for media digests, which in objects marks heads and pieces."""
        return self.tables[extent].extra(frame)

    def parent(self, extent: int, frame: int) -> bytes:
        """Return the key of the preceding page; for page 0, the root."""
        return self.tables[extent].parent(frame)

    def standing(self, extent: int, frame: int) -> int:
        """Return the page's position in its chain and its turns, see ``replica.standing_of``."""
        return standing_of(self.tables[extent].info(frame))

    def last_use_ns(self, extent: int, frame: int) -> int:
        """Return the last use of the page. A time in the future (damaged, or hostile) counts as now."""
        return min(self.tables[extent].used_ns(frame), self._now_ns())

    def run(self, extent: int, frames: slice) -> ChainRun:
        """Return what the records of consecutive frames contain."""
        table = self.tables[extent]
        keys, parents, infos = table.chain(frames)
        now_ns = self._now_ns()
        used_ns = [min(used, now_ns) for used in table.last_use[frames].tolist()]
        return ChainRun(keys.tobytes(), parents.tobytes(), [standing_of(info) for info in infos.tolist()], used_ns)

    def key_of(self, address: Address) -> bytes:
        """Return the key under which the index lists a sealed page, or the key in its record if the index does not list
        the address."""
        key = self.key(address.extent, address.frame)
        tier = self.tables[address.extent].tier
        if self.index.find(tier, key) != address:
            key = next((key for key, listed in self.index.addresses(tier) if listed == address), key)
        return key

    def close(self, keep_name: bool = False) -> None:
        """Unmap all files, and release the name unless ``keep_name``. The files stay."""
        self.book.flush()
        self.index.close()
        for table in self.tables.values():
            table.close()
        for store in self.stores.values():
            store.close()
        self.tables.clear()  # threads that still run find no extents
        self.stores.clear()
        self.header.close()
        if not keep_name:
            self.folder.close()

    # --- performing -------------------------------------------------------------------------------------------------

    def perform(self, instructions: list[do.Instruction]) -> do.Reply | None:
        """Carry out one decision and commit the index. Returns the decision's ``Reply``, if it has one."""
        reply = None
        if failpoint.ACTIVE:
            failpoint.hit("node.event")
        try:
            for instruction in instructions:
                if type(instruction) is do.Reply:
                    reply = instruction
                elif type(instruction) is do.CheckSession:
                    self.sessions_to_check.append(instruction.session)
                else:
                    self._verbs[type(instruction)](instruction)
                if failpoint.ACTIVE:
                    failpoint.hit("node.instruction")
        finally:  # even after an error, the index must match the records that were written
            self._commit_index()
        return reply

    def _commit_index(self) -> None:
        if self._index_ops:
            ops, self._index_ops = self._index_ops, []
            self.index.commit(ops)
            self.events.publish()  # after the commit, so that readers of the event find the page in the index

    def _carve(self, instruction: do.Carve) -> None:
        number, store = instruction.extent, self.stores[instruction.tier]
        self.header.next_extent = number + 1  # stored first, so that no number is reused
        files = self.spares.take(instruction.frame_class) if store.mapped else None
        self.tables[number] = ExtentTable.create(
            self.folder,
            number,
            instruction.position,
            instruction.frame_class,
            store.incarnation,
            instruction.frames,
            tier=instruction.tier,
            files=files,
        )
        store.carve(instruction.position, number, instruction.frame_class)

    def _drop(self, instruction: do.Drop) -> None:
        table = self.tables.pop(instruction.extent)
        table.unlink()
        self.stores[table.tier].drop(table.position)

    def _copy(self, instruction: DeviceWrite | do.Load) -> None:
        """Queue a copy or an erasure for the threads that carry it out."""
        addresses = [address for page in instruction.pages for address in _frames_of(page)]
        if any(self.stores[self.tables[address.extent].tier].relayed for address in addresses):
            self.waiting.relays.append(instruction)
        elif isinstance(instruction, do.Load):
            self.waiting.loads.append(instruction)
        else:
            self.waiting.copies.append(instruction)

    def _write_granted(self, instruction: do.WriteGranted) -> None:
        for table, frames, places in self._runs(instruction.addresses):
            fmt = table.fmt
            table.rows[frames, fmt.key] = 0
            if fmt.tail:
                tail = _GRANTED.pack(info_word(table.frame_class.page_bytes), instruction.session)
                table.rows[frames, fmt.words] = np.frombuffer(tail, np.uint8)
            self._write_words(table, instruction.addresses[places], RESERVED)

    def _write_reserved(self, instruction: do.WriteReserved) -> None:
        writers = np.zeros(1 + SHARDS_MAX, np.uint64)
        writers[0], writers[1 + instruction.shard] = instruction.group, instruction.session
        for table, frames, places in self._runs(instruction.addresses):
            info = info_word(table.frame_class.page_bytes, instruction.shards)
            parents, until_ns = instruction.parents[places], instruction.until_ns
            infos = [info] * len(parents)
            self._write_bodies(table, frames, instruction.rows[places], parents, infos, until_ns)
            table.rows[frames, table.fmt.writing] = writers.view(np.uint8)
            generations = [address.generation for address in instruction.addresses[places]]
            table.uses.begin(frames, np.array(generations, np.uint64))
            self._write_words(table, instruction.addresses[places], RESERVED)
        for key, address in zip(keys_of(instruction.rows), instruction.addresses, strict=True):
            if self.index.find_pending(key) is None:  # the index lists the earliest reservation of a key
                self._index_ops.append((None, [key], [ADDRESS.pack(*address)]))

    @staticmethod
    def _write_bodies(
        table: ExtentTable, frames: slice, rows: Rows, parents: list[bytes], infos: list[int], until_ns: int
    ) -> None:
        """Write the records' bytes between the word and the tail, in one store."""
        fmt, digest, count = table.fmt, xxhash.xxh3_64_intdigest, len(parents)
        width = identity_bytes(fmt.page_tokens)  # lean records have no token ids
        data, pad = rows[:, :width].tobytes(), bytes(fmt.parent.start - fmt.identity.stop)
        summed = [data[i * width : (i + 1) * width] + pad + parent for i, parent in enumerate(parents)]
        words = [*chain.from_iterable(zip(infos, map(digest, summed), repeat(until_ns), strict=False))]
        block = np.empty((count, len(summed[0]) + 24), np.uint8)
        block[:, :-24] = np.frombuffer(b"".join(summed), np.uint8).reshape(count, -1)
        block[:, -24:] = np.array(words, np.uint64).view(np.uint8).reshape(count, 24)
        table.rows[frames, fmt.before_writing] = block

    def _write_writer(self, instruction: do.WriteWriter) -> None:
        for table, frames, _ in self._runs(instruction.addresses):
            table.column(table.fmt.writers + 8 * instruction.shard)[frames] = instruction.session

    def _write_sealed(self, instruction: do.WriteSealed) -> None:
        addresses, sums = instruction.addresses, instruction.checksums
        tier = self.tables[addresses[0].extent].tier  # all pages of an instruction are in one tier
        for table, frames, places in self._runs(addresses):
            fmt = table.fmt
            plain = info_word(table.frame_class.page_bytes, flags=0, position=0)
            infos = [plain | info for info in instruction.standings[places]]
            if instruction.rows is not None and instruction.parents is not None:
                parents = instruction.parents[places]
                self._write_bodies(table, frames, instruction.rows[places], parents, infos, 0)
            else:
                table.column(fmt.lease_until_ns)[frames] = 0
            if failpoint.ACTIVE:
                failpoint.hit("node.word")
            self._write_words(table, addresses[places], SEALED)
            if instruction.rows is None:
                # Written after the word, because in a RESERVED frame startup reads the page's shards here. After a kill
                # in between, the page's place in the chain is wrong, but that is only a hint.
                table.column(fmt.info)[frames] = np.array(infos, np.uint64)
            if sums is not None:
                if fmt.tail:  # after the word: in a RESERVED frame, startup reads the writers here
                    table.rows[frames, fmt.checksums] = sums[places].view(np.uint8)
                table.column(fmt.info)[frames] |= np.uint64(STAMPED << 48)
        self._index_ops.append((tier, instruction.keys, _raw(addresses)))
        root = self.root(addresses[0].extent, addresses[0].frame)
        if instruction.cause in _FIRST_COPIES and _is_replicated(instruction.standings):
            first = self.tables[addresses[0].extent]
            parent = first.parent(addresses[0].frame)
            self.waiting.owed.add(parent, instruction.keys, first.frame_class.page_bytes)
        self.events.append_sealed(instruction.cause, tier, instruction.keys, root, instruction.rows, instruction.spans)
        if sums is None and self.tables[addresses[0].extent].fmt.tail:
            self.waiting.unstamped.extend(addresses)

    def _write_shards(self, instruction: do.WriteShards) -> None:
        table = self.tables[instruction.address.extent]
        info = info_word(table.frame_class.page_bytes, instruction.shards, instruction.mask)
        table.column(table.fmt.info)[instruction.address.frame] = info

    def _write_state(self, instruction: do.WriteState) -> None:
        for table, frames, places in self._runs(instruction.addresses):
            self._write_words(table, instruction.addresses[places], instruction.state)
            if instruction.state is FrameState.FREE:
                table.forget_writers(frames)

    @staticmethod
    def _write_words(table: ExtentTable, addresses: list[Address], state: FrameState) -> None:
        low, words = int(state), table.words
        for _, frame, generation in addresses:
            words[frame] = generation << 8 | low  # ``word_of``

    def _unindex(self, instruction: do.Unindex) -> None:
        tier, keys = instruction.tier, instruction.keys
        self._index_ops.append((tier, keys, []))
        self.events.append(instruction.kind, tier, instruction.reason, keys, instruction.roots, instruction.spans)

    def _list_groups(self, instruction: do.ListGroups) -> None:
        entries = [GROUP_ENTRY.pack(group.members, instruction.since_ns) for group in instruction.groups]
        self._index_ops.append((GROUPS, [group.hash for group in instruction.groups], entries))

    def _unlist_groups(self, instruction: do.UnlistGroups) -> None:
        self._index_ops.append((GROUPS, instruction.hashes, []))
        self._commit_index()

    def _show_pages(self, instruction: do.ShowPages) -> None:
        keys = instruction.keys
        self._index_ops.append((Tier.HBM, keys, _raw(instruction.addresses)))
        if instruction.root:
            self.events.append_sealed("put", Tier.HBM, keys, instruction.root, spans=instruction.spans)

    def _write_mounts(self, instruction: do.WriteMounts) -> None:
        # Stored first, so that no number is reused.
        self.header.next_extent = max(self.header.next_extent, instruction.next_extent)
        self.header.mounts = instruction.count

    def _unpend(self, instruction: do.Unpend) -> None:
        addresses = [instruction.heir] if instruction.heir is not None else []
        self._index_ops.append((None, [instruction.key], _raw(addresses)))

    def _write_lease(self, instruction: do.WriteLease) -> None:
        untils = np.array(instruction.until_ns, np.uint64)
        for table, frames, places in self._runs(instruction.addresses):
            table.column(table.fmt.lease_until_ns)[frames] = untils[places]

    def _write_stamp(self, instruction: do.WriteStamp) -> None:
        table = self.tables[instruction.address.extent]
        frame, fmt = instruction.address.frame, table.fmt
        table.rows[frame, fmt.checksums] = instruction.checksums.view(np.uint8)
        table.column(fmt.info)[frame] |= np.uint64(STAMPED << 48)

    def _write_replicated(self, instruction: do.WriteReplicated) -> None:
        for table, frames, _ in self._runs(instruction.addresses):
            table.column(table.fmt.info)[frames] |= np.uint64(REPLICATED_INFO)
        if instruction.keys:
            first = self.tables[instruction.addresses[0].extent]
            parent = first.parent(instruction.addresses[0].frame)
            self.waiting.owed.add(parent, instruction.keys, first.frame_class.page_bytes)

    def _write_object_stamp(self, instruction: do.WriteObjectStamp) -> None:
        self.header.object_stamp = max(self.header.object_stamp, instruction.stamp)

    def _write_use(self, instruction: do.WriteUse) -> None:
        used = np.array(instruction.used_ns, np.uint64)
        for table, frames, places in self._runs(instruction.addresses):
            table.last_use[frames] = used[places]

    def _forget_names(self, instruction: do.WriteNames | do.ForgetNames) -> None:
        """Count up, so that clients register forgotten names again before they put. Quotas depend on the names."""
        self.header.names_forgotten += 1
        if isinstance(instruction, do.WriteNames):
            self.book.replace_names(instruction.lines)

    def _move(self, instruction: do.Move) -> None:
        """Write data and body, then the new word, then the index entry, and the old word last.

        In a tier that is not mapped, a copy has already written the data.
        """
        source, target = self.tables[instruction.source.extent], self.tables[instruction.target.extent]
        old, new = instruction.source.frame, instruction.target.frame
        if self.stores[instruction.tier].mapped:
            self.frames_of(target)[new] = self.frames_of(source)[old]
        target.rows[new, RecordFormat.body] = source.rows[old, RecordFormat.body]
        target.last_use[new] = source.last_use[old]
        target.words[new] = word_of(instruction.target.generation, SEALED)
        self._index_ops.append((instruction.tier, [instruction.key], [ADDRESS.pack(*instruction.target)]))
        source.words[old] = word_of(instruction.freed.generation, instruction.state)

    def frames_of(self, table: ExtentTable) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return ``[frames, frame_bytes]`` of an extent in DRAM."""
        return self.dram.segment.frame_view(table.position, table.frame_class.frame_bytes, table.frames)

    def _runs(self, addresses: list[Address]) -> Iterator[tuple[ExtentTable, slice, slice]]:
        """Yield (table, frames, places in ``addresses``) of each run of consecutive frames.

        In a large, full node most runs have one page. Even then a slice of rows costs a tenth of an index array.
        """
        for number, first, i, j in frame_runs(addresses):
            yield self.tables[number], slice(first, first + j - i), slice(i, j)


def _raw(addresses: list[Address]) -> list[bytes]:
    """Return addresses as entries of the index."""
    packed = pack_addresses(addresses)
    return [packed[i : i + ADDRESS_BYTES] for i in range(0, len(packed), ADDRESS_BYTES)]


def _is_replicated(standings: list[int]) -> bool:
    """Return True if the pages want a second copy. The pages of one instruction were put by one call."""
    return bool(standings[0] & REPLICATED_INFO)


def _frames_of(page: do.Copying | tuple[bytes, Address]) -> tuple[Address, ...]:
    """Return the addresses of the frames that a copy or an erasure uses."""
    return (page.source, page.target) if isinstance(page, do.Copying) else page[1:]
