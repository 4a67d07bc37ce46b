"""Startup: turns a folder in any condition into a node that can serve.

If the folder is empty, or its files are from another boot or version, everything is created under a new incarnation,
and no old page is served. Otherwise the tables are recovered (``state.recovery``), and the index is compared with them
and rebuilt if it differs. A start after a clean stop takes the same path as a start after kill -9, so that every start
exercises it. Memory that engines have mounted stays mounted while they are alive.

A node that is started with another ``dram`` size keeps its pages, in extents of the old size:

*Larger.* The segment's file is lengthened. Clients have mapped the old length, and must not receive addresses beyond
it. So all files get a new incarnation, which makes clients of any version map them again. The files are renamed one by
one, and the header last, where clients look. So clients find either all files or none. If a kill interrupts this, the
next start continues (``Header.growing_to``).

*Smaller.* The file keeps its length, because it is mapped. Positions beyond the new bound are no longer carved. Pages
there are moved or evicted when no lease and no writer needs them (``state.node_state``). Then the memory is freed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvstore import failpoint, logs
from kvstore.config import MIB, NodeConfig, format_size
from kvstore.errors import InvalidRequest
from kvstore.model.objects import ObjectGroup, groups_in
from kvstore.model.replica import FRAME_ALIGN, SHARDS_MAX, Address, FrameClass, FrameState, Tier
from kvstore.node import book
from kvstore.node.book import NAMES, PINS, QUARANTINE, Quarantine, read_quarantine, write_quarantine
from kvstore.node.index_keeper import snapshot
from kvstore.node.nvme_pages import NvmePages
from kvstore.node.nvme_start import open_nvme, open_tables, secret_on_nvme
from kvstore.node.performer import Performer
from kvstore.node.put_drain import open_log
from kvstore.safe_files import open_plain, remove
from kvstore.shm.folder import NodeFolder, new_secret, read_secret, reap_embedded, write_secret
from kvstore.shm.header import DaemonState, Header, boot_id
from kvstore.shm.index import Index, IndexDamaged
from kvstore.shm.mounted import MountedTable, mounted_numbers, remove_mounted
from kvstore.shm.records import ExtentTable, claimed_positions, remove_tables
from kvstore.shm.sessions import living_ids
from kvstore.state import events as ev
from kvstore.state import recovery
from kvstore.state.eviction import POLICIES
from kvstore.state.frames import ExtentNumbers, Segment
from kvstore.state.interfaces import Snapshot, TieringRules, TierParts
from kvstore.state.mounts import MOUNTED_FRAMES_MAX, MOUNTS_MAX
from kvstore.state.node_state import NodeState
from kvstore.state.recovery import StoredExtent
from kvstore.tier.base import TierStore
from kvstore.tier.dram import DramStore, SegmentFile, check_space

log = logging.getLogger("kvstore.node")

EXTENT_BYTES_MAX = 128 * MIB
EXTENTS_AIMED_AT = 16
LARGE_PAGE = 2 * MIB  # larger extents are multiples of this, so that tmpfs can use large pages
INDEX_BYTES_PER_FRAME = 256  # size of the map: four times an entry, so that snapshots of readers fit too
INDEX_BYTES_MIN = 16 * MIB
TABLES_BYTES_MIN = 1 * MIB
BOOK_HEAD_BYTES = 256  # more than the first line of a book, which has the incarnation


@dataclass(frozen=True)
class LowerTier:
    """A tier below DRAM.

    Attributes:
        open: opens the tier's store; returns None if the node has no such tier. The arguments are those of
            ``open_nvme``.
        rules: returns when pages are copied to this tier and back.
    """

    open: Callable[[NodeConfig, NodeFolder, dict[str, str], bytes | None], TierStore | None]
    rules: Callable[[NodeConfig], TieringRules]


def nvme_rules(config: NodeConfig) -> TieringRules:
    """Return the configured rules of the NVMe tier."""
    admission, cap = config.nvme_admission, config.nvme_write_bytes_per_day
    return TieringRules(config.demote_at, config.promote_after, admission, cap)


LOWER_TIERS: dict[Tier, LowerTier] = {Tier.NVME: LowerTier(open_nvme, nvme_rules)}
"""The lower tiers, the fastest first. A new tier needs a class (``TierStore``) and a row here."""


def start(config: NodeConfig, failures: dict[str, str]) -> tuple[Performer, NodeState]:
    """Lock the node's name, then recover or create its pool. Adds NVMe targets that fail to ``failures``.

    Raises:
        NodeBusy, InvalidRequest: see ``Node.start``.
    """
    reap_embedded(config.shm_dir)
    folder = NodeFolder(config.shm_dir, config.name, group_shared=config.group)
    folder.lock()
    try:
        return _open(config, folder, failures)
    except BaseException:
        folder.close()
        raise


def _open(config: NodeConfig, folder: NodeFolder, failures: dict[str, str]) -> tuple[Performer, NodeState]:
    header = Header.open(folder, writable=True)
    segment_file = None
    if header is not None and header.boot_id == boot_id():
        segment_file = open_segment(folder, header)
        if segment_file is not None and read_secret(folder, header.incarnation) is None:
            segment_file.close()
            log.warning("node %s: its secret is absent or damaged: the pages in memory are lost", config.name)
            segment_file = None
    if header is None or segment_file is None:
        extent_bytes = extent_bytes_of(config)
        positions = config.dram // extent_bytes
        # Tables and index need more memory: about a hundredth for pages of 64 KiB.
        check_space(config.shm_dir, positions * extent_bytes + positions * extent_bytes // 64 + TABLES_BYTES_MIN)
        _clear(folder)
        incarnation, secret = secrets.randbits(63) | 1, secret_on_nvme(config, folder)
        write_secret(folder, incarnation, secret if secret is not None else new_secret())
        header = Header.create(folder, incarnation, extent_bytes, positions)
        segment_file = SegmentFile.create(folder, header.incarnation, extent_bytes, positions)
    else:
        segment_file = resize(config, folder, header, segment_file)
    header.state = DaemonState.STARTING
    header.heartbeat_ns = 0  # the stored heartbeat is an earlier daemon's
    header.pid = os.getpid()
    header.verify_reads = int(config.verify_reads)
    header.replicas = 0  # a daemon with a pool sets it
    return _recover(config, folder, header, segment_file, failures)


def extent_bytes_of(config: NodeConfig) -> int:
    """Return the configured extent size, or a sixteenth of the segment in multiples of 2 MiB, at most 128 MiB."""
    if config.extent:
        return config.extent
    share = config.dram // EXTENTS_AIMED_AT
    unit = LARGE_PAGE if share >= LARGE_PAGE else FRAME_ALIGN
    return max(FRAME_ALIGN, min(share // unit * unit, EXTENT_BYTES_MAX))


def _clear(folder: NodeFolder) -> None:
    """Remove files from another boot or incarnation, which cannot be used but take memory."""
    for extent in folder.extents():
        remove_tables(folder, extent)
    for epoch in folder.epochs():
        Index.remove(folder, epoch)
    for number in mounted_numbers(folder):
        remove_mounted(folder, number)
    remove(folder.segment)
    remove(folder.path / QUARANTINE)
    remove(folder.puts)


# --- the segment and its size ----------------------------------------------------------------------------------------


def open_segment(folder: NodeFolder, header: Header) -> SegmentFile | None:
    """Open the segment of this header; return None if it is absent or damaged.

    Finishes an interrupted change of the incarnation first. If the file's tail was cut off, the extents there are
    dropped, and the file gets its length again.
    """
    if header.growing_to:
        _change_incarnation(folder, header)
    cut = SegmentFile.cut_to(folder, header.incarnation)
    if cut is not None:
        _drop_beyond(folder, header.incarnation, *cut)
        SegmentFile.lengthen(folder)
    return SegmentFile.open(folder, header.incarnation)


def _drop_beyond(folder: NodeFolder, incarnation: int, extent_bytes: int, bytes_left: int) -> None:
    """Invalidate the tables of extents beyond the cut. Call it before the file is lengthened with zeros."""
    dropped = 0
    for number in folder.extents():
        table = ExtentTable.open(folder, number, incarnation, writable=True)
        if table is None:
            continue
        end = table.position * extent_bytes + table.frames * table.frame_class.frame_bytes
        if end > bytes_left:
            table.invalidate()
            dropped += 1
        table.close()
    log.warning("%s: its tail was cut off; %d extents are dropped with their pages", folder.segment, dropped)


def resize(config: NodeConfig, folder: NodeFolder, header: Header, segment: SegmentFile) -> SegmentFile:
    """Return the segment with as many positions as fit into ``config.dram``, and set ``header.positions``.

    Raises:
        InvalidRequest: memory does not suffice; ``dram`` is less than one extent; ``extent`` differs.
    """
    extent_bytes = header.extent_bytes
    size = f"{format_size(header.positions * extent_bytes)} in extents of {format_size(extent_bytes)}"
    remedy = f"or drop its pages with `kvstore purge {config.name}`"
    if config.extent and config.extent != extent_bytes:
        raise InvalidRequest("extent", f"node {config.name} has a segment of {size}; start it with that size, {remedy}")
    positions = config.dram // extent_bytes
    if not positions:
        reason = f"node {config.name} has a segment of {size}; start it with at least one extent, {remedy}"
        raise InvalidRequest("dram", reason)
    more_bytes = (positions - header.positions) * extent_bytes
    if more_bytes > 0:
        check_space(config.shm_dir, more_bytes + more_bytes // 64)
    if positions > segment.positions:
        segment.close()
        header.growing_to = secrets.randbits(63) | 1
        SegmentFile.lengthen(folder, positions)
        _change_incarnation(folder, header)
        lengthened = SegmentFile.open(folder, header.incarnation)
        assert lengthened is not None, "lengthened above"
        segment = lengthened
    if more_bytes:
        log.warning("dram: %s becomes %s", size, format_size(positions * extent_bytes))
    header.positions = positions
    return segment


def _change_incarnation(folder: NodeFolder, header: Header) -> None:
    """Give all files the incarnation ``header.growing_to``. Idempotent: call it again if it was interrupted."""
    old, new = header.incarnation, header.growing_to
    for name in (NAMES, PINS):
        _rename_book(folder.path / name, old, new)
    secret = read_secret(folder, old)
    if secret is not None:  # else the file has the new incarnation already
        write_secret(folder, new, secret)
    quarantine = read_quarantine(folder, old)
    if quarantine:
        write_quarantine(folder, new, quarantine)
    if failpoint.ACTIVE:
        failpoint.hit("node.resize")
    for number in folder.extents():
        ExtentTable.rename(folder, number, old, new)
        if failpoint.ACTIVE:
            failpoint.hit("node.resize")
    SegmentFile.rename(folder, old, new)
    if failpoint.ACTIVE:
        failpoint.hit("node.resize")
    header.incarnation = new
    header.growing_to = 0


def _rename_book(path: Path, old: int, new: int) -> None:
    try:
        fd = open_plain(path, os.O_RDWR)
    except OSError:
        return  # the file does not exist
    try:
        offset = os.pread(fd, BOOK_HEAD_BYTES, 0).find(f"{old:016x}".encode())
        if offset >= 0:
            os.pwrite(fd, f"{new:016x}".encode(), offset)
    finally:
        os.close(fd)


# --- recovery --------------------------------------------------------------------------------------------------------


def _recover(
    config: NodeConfig, folder: NodeFolder, header: Header, segment_file: SegmentFile, failures: dict[str, str]
) -> tuple[Performer, NodeState]:
    with contextlib.ExitStack() as stack:
        stores: dict[Tier, TierStore] = {Tier.DRAM: DramStore(segment_file, header.incarnation)}
        for tier, lower in LOWER_TIERS.items():
            store = lower.open(config, folder, failures, read_secret(folder, header.incarnation))
            if store is not None:
                stack.callback(store.close)
                stores[tier] = store
        recovered = recover_tiers(config, folder, header, stores, time.monotonic_ns)
        stack.pop_all()
        return recovered


def recover_tiers(
    config: NodeConfig,
    folder: NodeFolder,
    header: Header,
    stores: dict[Tier, TierStore],
    now_ns: Callable[[], int],
) -> tuple[Performer, NodeState]:
    """Recover a node from its files, no matter when its last daemon ended, and open ``stores``.

    ``now_ns`` is the clock of the deadlines in the files.
    """
    # The smallest frame is one block. In a tier with headers its header takes another block.
    blocks = [store.positions * store.extent_bytes // FRAME_ALIGN for store in stores.values()]
    frames_max = blocks[0] + sum(blocks[1:]) // 2
    map_bytes = INDEX_BYTES_MIN + INDEX_BYTES_PER_FRAME * frames_max
    index = _open_index(folder, header, map_bytes)
    performer = Performer(folder, header, stores, index, map_bytes, now_ns)
    performer.puts = puts = open_log(folder, header)
    living = living_ids(folder) | set(puts.sessions() if puts is not None else ())
    quarantine = _map_tables(folder, header, performer, living)
    state = _state(config, header, performer, book.read_names(folder, header.incarnation))
    performer.index.mounted, performer.index.groups = state.mounts.entries, state.groups.listed
    extents = [read_extent(table) for table in performer.tables.values()]
    instructions = recovery.recover(state, extents, header.next_extent, now_ns(), living, quarantine)
    if failpoint.ACTIVE:
        failpoint.hit("node.recover")
    performer.index.unlist_groups()
    performer.perform(instructions)
    header.mounts, header.lower_tiers = 0, len(stores) - 1
    for event in mount_events(folder, header, living, now_ns()):
        performer.perform(state.handle(event))
    if not performer.index.agrees():
        performer.index.rebuild("start")
    performer.index.list_groups(now_ns())
    recovery.settle(state)
    nvme = performer.nvme
    if nvme is not None:
        state.tiering.pairs[nvme.tier].demotion.begin_day(nvme.day_bytes_left(config.nvme_write_bytes_per_day))
    for position in sorted(state.segment.beyond):  # empty positions beyond a smaller ``dram``
        performer.dram.give_back(position)
    pins = book.read_pins(folder, header.incarnation, now_ns())
    if pins:
        performer.perform(state.handle(ev.RestorePins(now_ns(), pins)))
    performer.book.flush()
    header.names_forgotten += 1  # clients register names again, because a kill may have lost the name of a stored page
    return performer, state


def _map_tables(folder: NodeFolder, header: Header, performer: Performer, living: set[int]) -> Quarantine:
    """Map the tables of all extents into ``performer.tables``, and drop extents whose tables are damaged.

    Returns the positions of DRAM where a living session may still write.
    """
    lost: list[int] = []
    for number in folder.extents():
        stores = performer.stores.values()
        opened = (ExtentTable.open(folder, number, store.incarnation, writable=True) for store in stores)
        table = next(filter(None, opened), None)
        used = {(t.tier, t.position) for t in performer.tables.values()}
        if table is not None and (table.tier, table.position) not in used:
            performer.tables[number] = table
        else:
            lost.append(number)
    nvme = performer.nvme
    quarantine = _drop_lost(folder, header, performer, nvme, lost, living)
    if nvme is not None:
        open_tables(folder, nvme, performer.tables)
        nvme.devices.write_map(folder)
    else:
        remove(folder.nvme)
    mapped = [table for table in performer.tables.values() if performer.stores[table.tier].mapped]
    carved = [(table.position, table.frame_class) for table in mapped]
    performer.stores[Tier.DRAM] = DramStore(performer.dram.segment, header.incarnation, carved)
    return quarantine


def _drop_lost(
    folder: NodeFolder, header: Header, performer: Performer, nvme: NvmePages | None, lost: list[int], living: set[int]
) -> Quarantine:
    """Drop the ``lost`` extents, whose tables are damaged.

    Returns the positions where a living session might still write: positions of the lost extents, and positions in the
    quarantine of earlier starts.
    """
    carved = {table.position for table in performer.tables.values() if performer.stores[table.tier].mapped}
    vacant = set(range(performer.dram.segment.positions)) - carved
    earlier, doubtful = read_quarantine(folder, header.incarnation), set[int]()
    on_nvme = set() if nvme is None else {extent.number for extent in nvme.devices.extents.values()}
    for number in set(lost) - on_nvme:
        claimed = claimed_positions(folder, number, header.incarnation)
        doubtful |= vacant if claimed is None else claimed & vacant
    if earlier is None:
        earlier, doubtful = {}, vacant
    writers = {
        position: earlier.get(position, set()) | (living if position in doubtful else set())
        for position in {*earlier, *doubtful} & vacant
    }
    quarantine = {position: sessions for position, sessions in writers.items() if sessions}
    keep = False
    if quarantine != earlier:
        try:
            write_quarantine(folder, header.incarnation, quarantine)
        except OSError as error:
            log.error("the quarantine of positions cannot be written: %s", error)
            keep = True  # the next start finds the lost extents again
    if doubtful and quarantine:
        log.warning("%d positions are held for %d sessions that may still write there", len(quarantine), len(living))
    for number in lost:
        _drop_extent(folder, number, keep)
    return quarantine


def _drop_extent(folder: NodeFolder, number: int, keep: bool) -> None:
    """Zero the tables of an extent, and remove them unless ``keep``.

    Another extent will use its position. So clients that have mapped the tables, with a lease perhaps, must see that no
    page is sealed there. ``keep`` leaves the file as the only trace of the extent.
    """
    with contextlib.suppress(FileNotFoundError):
        fd = open_plain(folder.records(number), os.O_RDWR)
        with open(fd, "r+b", buffering=0) as file:
            file.write(bytes(os.fstat(fd).st_size))
    if not keep:
        remove_tables(folder, number)


def _state(config: NodeConfig, header: Header, performer: Performer, names: Iterable[Any]) -> NodeState:
    """Return a state without pages, for ``recovery`` to fill."""
    if config.eviction not in POLICIES:
        raise InvalidRequest("eviction", f"must be one of {', '.join(POLICIES)} (got {config.eviction!r})")
    tiers: dict[Tier, TierParts] = {}
    numbers = ExtentNumbers()
    for tier, store in performer.stores.items():
        segment = Segment(
            store.extent_bytes,
            store.positions,
            frames_in=partial(_frames_in, store),
            stride=partial(_stride, store),
            numbers=numbers,
            policy=config.eviction,
        )
        rules = LOWER_TIERS[tier].rules(config) if tier in LOWER_TIERS else TieringRules()
        if tiers:
            segment.populated.update(range(store.positions))
        else:
            segment.limit(header.positions)
        view = TierView(performer, tier)
        tiers[tier] = TierParts(segment, view, view, store.generation, rules)
    return NodeState(
        tiers,
        lease_ttl_ns_max=int(config.lease_ttl_s_max * 1e9),
        sessions_max=config.sessions_max,
        quotas=config.quotas,
        named=names,
        pins_share_max=config.pins_share_max,
    )


def _frames_in(store: TierStore, extent_bytes: int, frame_class: FrameClass) -> int:
    assert extent_bytes == store.extent_bytes
    return store.frames_of(frame_class)


def _stride(store: TierStore, frame_class: FrameClass) -> int:
    return store.header_bytes(frame_class) + frame_class.frame_bytes


def _open_index(folder: NodeFolder, header: Header, map_bytes: int) -> Index:
    """Open the index, or create an empty one if it is absent or damaged. The caller compares it with the records."""
    epochs = folder.epochs()
    try:
        index = Index.open_writer(folder, header.epoch, map_bytes, fresh=False)
    except IndexDamaged:
        # A new epoch makes clients close the damaged index.
        epoch = max([header.epoch, *epochs]) + 1
        index = Index.open_writer(folder, epoch, map_bytes, fresh=True)
        header.epoch = epoch
    for stale in epochs:
        if stale != header.epoch:
            Index.remove(folder, stale)
    return index


def read_extent(table: ExtentTable) -> StoredExtent:
    """Return copies of an extent's columns for ``recovery``."""
    fmt = table.fmt

    def words(offset: int) -> Any:
        return table.column(offset).copy()

    none = np.zeros((table.frames, SHARDS_MAX), np.uint64)
    groups, writers = none[:, 0], none
    if fmt.tail:
        groups = words(fmt.group)
        writers = np.stack([words(fmt.writers + 8 * shard) for shard in range(SHARDS_MAX)], axis=1)
    sound = np.array(table.identity_sums(slice(0, table.frames)), np.uint64) == words(fmt.identity_sum)
    return StoredExtent(
        table.extent,
        table.position,
        table.frame_class,
        snapshot(table),
        words(fmt.info),
        words(fmt.lease_until_ns),
        groups,
        writers,
        sound,
        table.tier,
        _groups_of(table),
    )


def _groups_of(table: ExtentTable) -> dict[int, ObjectGroup]:
    """Return the groups of the heads of objects in an extent, by frame."""
    return groups_in(table.rows[:, table.fmt.identity]) if table.frame_class.holds_objects else {}


def mount_events(folder: NodeFolder, header: Header, living: Collection[int], now_ns: int) -> Iterator[ev.RestoreMount]:
    """Yield one event per mounted segment whose engine is alive. Remove damaged tables, and tables of dead engines.

    Engines continue to write in the meantime. What they publish is taken in later, and takes precedence: if a frame
    has another page by then, that page has a newer generation.
    """
    frames = mounts = 0
    extents = set(folder.extents())
    for number in mounted_numbers(folder):
        table = MountedTable.open(folder, number, header.incarnation)
        sound = table is not None and number not in extents and number < header.next_extent
        if table is None or not sound or table.session not in living:
            remove_mounted(folder, number)
            continue
        frames, mounts = frames + table.frames, mounts + 1
        if frames > MOUNTED_FRAMES_MAX or mounts > MOUNTS_MAX:
            logs.event(log, logging.ERROR, "engines have mounted more memory than a node accepts", segment=number)
            remove_mounted(folder, number)
            return
        yield _mount_event(table, now_ns)


def _mount_event(table: MountedTable, now_ns: int) -> ev.RestoreMount:
    event = ev.RestoreMount(
        *(now_ns, table.session, table.number, table.frame_class, table.frames),
        *([], [], [], []),
    )
    for frame in table.sealed().tolist():
        generation, key, root, span = table.generation(frame), table.key(frame), table.root(frame), table.span(frame)
        if generation == table.generation(frame) and table.is_sealed(frame):  # unchanged while it was read
            event.addresses.append(Address(table.number, frame, generation))
            event.keys.append(key)
            event.roots.append(root)
            event.spans.append(span)
    return event


class TierView:
    """The state's view of one tier: its table of the index (``PageIndex``) and its records (``RecordView``)."""

    def __init__(self, performer: Performer, tier: Tier) -> None:
        self._performer = performer
        self._tier = tier
        self.find = partial(performer.index.find, tier)
        self.absent = partial(performer.index.absent, tier)
        self.key, self.parent, self.root, self.extra = performer.key, performer.parent, performer.root, performer.extra
        self.lineage, self.standing, self.last_use_ns = performer.lineage, performer.standing, performer.last_use_ns
        self.run = performer.run

    def memberships(self) -> list[tuple[bytes, ObjectGroup]]:
        """Return the key and the group of each sealed head of the tier that has a group."""
        return [
            (table.key(frame), group)
            for table in self._performer.tables.values()
            if table.tier == self._tier
            for frame, group in _groups_of(table).items()
            if int(table.words[frame]) & 0xFF == FrameState.SEALED
        ]

    def snapshots(self) -> list[Snapshot]:
        """Return a snapshot of each extent of the tier."""
        return [snapshot(table) for table in self._performer.tables.values() if table.tier == self._tier]
