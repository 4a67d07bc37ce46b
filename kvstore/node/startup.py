"""Startup: from a folder in any condition to a node that can serve.

Fresh (nothing there, another boot, another version): everything is recreated under a new incarnation, nothing old is
ever served. Found: tables are recovered (``state.recovery``), the index is compared with them and rebuilt where it
differs. One path for a clean stop and for kill -9, so that it is exercised every time.

What a start finds of memory that engines have mounted: those that live go on, the others have ended.

Resize: a node that is started with another ``dram`` size keeps its pages.

*Larger.* The segment's file is made longer. Clients have mapped the old length, and would be told of pages beyond
it; so all files get a new incarnation, by which clients of any version know that they have to map them again.
First the files are renamed one by one, then the header, which clients look at, so that they always find either all or
none. A kill between is noticed by the next start (``Header.growing_to``), which does the rest.

*Smaller.* The file keeps its length, since it is mapped. Positions beyond the new bound are carved no more; what lies
there moves or leaves, once no lease and no writer needs it to stay (``state.node_state``). Then memory is given back.

Extents keep the size that they were made with.
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
from kvstore.model.replica import FRAME_ALIGN, SHARDS_MAX, Address, FrameClass, Tier
from kvstore.node import book
from kvstore.node.book import NAME as QUARANTINE
from kvstore.node.book import NAMES, PINS, Held, read_quarantine, write_quarantine
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
from kvstore.state.recovery import ExtentFound
from kvstore.tier.base import TierStore
from kvstore.tier.dram import DramStore, SegmentFile, check_space

log = logging.getLogger("kvstore.node")


def found_mounts(folder: NodeFolder, header: Header, living: Collection[int], now_ns: int) -> Iterator[ev.FoundMount]:
    """One event per segment whose engine lives. What cannot be believed, and what dead engines left, is removed.

    Engines continue to write in the meantime. What they publish is later in the log, and counts when it is taken in: a
    frame that has another page by then has it under a newer generation.
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
            logs.event(log, logging.ERROR, "more memory is mounted than a node may know", segment=number)
            remove_mounted(folder, number)
            return
        yield _found(table, now_ns)


def _found(table: MountedTable, now_ns: int) -> ev.FoundMount:
    event = ev.FoundMount(
        *(now_ns, table.session, table.number, table.frame_class, table.frames),
        *([], [], [], []),
    )
    for frame in table.sealed().tolist():
        generation, key, root, span = table.generation(frame), table.key(frame), table.root(frame), table.span(frame)
        if generation == table.generation(frame) and table.is_sealed(frame):  # it has not changed
            event.addresses.append(Address(table.number, frame, generation))
            event.keys.append(key)
            event.roots.append(root)
            event.spans.append(span)
    return event


HEAD_BYTES = 256  # of a book: its incarnation stands in the first line


def open_segment(folder: NodeFolder, header: Header) -> SegmentFile | None:
    """The segment of this header, when what a kill left half renamed is, and as long as it was when its tail was cut
    off; None where there is none to be had."""
    if header.growing_to:
        _rename(folder, header)
    cut = SegmentFile.cut_to(folder, header.incarnation)
    if cut is not None:
        _give_up_beyond(folder, header.incarnation, *cut)
        SegmentFile.lengthen(folder)
    return SegmentFile.open(folder, header.incarnation)


def _give_up_beyond(folder: NodeFolder, incarnation: int, extent_bytes: int, left: int) -> None:
    """The segment's tail was cut off: no page there may be believed, before there are zeros in their place."""
    given_up = 0
    for number in folder.extents():
        table = ExtentTable.open(folder, number, incarnation, writable=True)
        if table is None:
            continue
        end = table.position * extent_bytes + table.frames * table.frame_class.frame_bytes
        if end > left:
            table.disbelieve()
            given_up += 1
        table.close()
    log.warning("%s: its tail was cut off; %d extents are given up with their pages", folder.segment, given_up)


def fit(config: NodeConfig, folder: NodeFolder, header: Header, segment: SegmentFile) -> SegmentFile:
    """The node's segment with as many positions as ``config.dram`` has room for. ``header.positions`` tells how many.

    Raises:
        InvalidRequest: memory for more cannot be had; less than one extent is left; extents of another size are asked.
    """
    extent_bytes = header.extent_bytes
    has = f"{format_size(header.positions * extent_bytes)} in extents of {format_size(extent_bytes)}"
    remedy = f"or drop its pages with `kvstore purge {config.name}`"
    if config.extent and config.extent != extent_bytes:
        raise InvalidRequest("extent", f"node {config.name} has a segment of {has}; start it with that size, {remedy}")
    positions = config.dram // extent_bytes
    if not positions:
        raise InvalidRequest("dram", f"node {config.name} has a segment of {has}; start it with one at least, {remedy}")
    more = (positions - header.positions) * extent_bytes
    if more > 0:
        check_space(config.shm_dir, more + more // 64)
    if positions > segment.positions:
        segment.close()
        header.growing_to = secrets.randbits(63) | 1
        SegmentFile.lengthen(folder, positions)
        _rename(folder, header)
        grown = SegmentFile.open(folder, header.incarnation)
        assert grown is not None, "made just now"
        segment = grown
    if more:
        log.warning("dram: %s becomes %s", has, format_size(positions * extent_bytes))
    header.positions = positions
    return segment


def _rename(folder: NodeFolder, header: Header) -> None:
    """All files of this incarnation get the next one. Begun again where it was cut short."""
    old, new = header.incarnation, header.growing_to
    for name in (NAMES, PINS):
        _rename_book(folder.path / name, old, new)
    secret = read_secret(folder, old)
    if secret is not None:  # else it has the new incarnation already
        write_secret(folder, new, secret)
    held = read_quarantine(folder, old)
    if held:
        write_quarantine(folder, new, held)
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
        return  # there is none
    try:
        place = os.pread(fd, HEAD_BYTES, 0).find(f"{old:016x}".encode())
        if place >= 0:
            os.pwrite(fd, f"{new:016x}".encode(), place)
    finally:
        os.close(fd)


EXTENT_BYTES_MAX = 128 * MIB
EXTENTS_AIMED_AT = 16
LARGE_PAGE = 2 * MIB  # positions of larger segments are multiples of this, for large pages where tmpfs has them
INDEX_BYTES_PER_FRAME = 256  # map size: four times what an entry takes, so that readers' snapshots fit
INDEX_BYTES_MIN = 16 * MIB
TABLES_BYTES_MIN = 1 * MIB


def extent_bytes_of(config: NodeConfig) -> int:
    """The configured extent size, or a sixteenth of the segment: 2 MiB multiples up to 128 MiB."""
    if config.extent:
        return config.extent
    share = config.dram // EXTENTS_AIMED_AT
    unit = LARGE_PAGE if share >= LARGE_PAGE else FRAME_ALIGN
    return max(FRAME_ALIGN, min(share // unit * unit, EXTENT_BYTES_MAX))


def start(config: NodeConfig, failures: dict[str, str]) -> tuple[Performer, NodeState]:
    """Lock the name, then recover or make the pool. See ``Node.start``. NVMe targets that fail go to ``failures``."""
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
        # Tables and index come on top: about a hundredth for pages of 64 KiB: see ``node.node``.
        check_space(config.shm_dir, positions * extent_bytes + positions * extent_bytes // 64 + TABLES_BYTES_MIN)
        _clear(folder)
        incarnation, known = secrets.randbits(63) | 1, secret_on_nvme(config, folder)
        write_secret(folder, incarnation, known if known is not None else new_secret())
        header = Header.create(folder, incarnation, extent_bytes, positions)
        segment_file = SegmentFile.create(folder, header.incarnation, extent_bytes, positions)
    else:
        segment_file = fit(config, folder, header, segment_file)
    header.state = DaemonState.STARTING
    header.heartbeat_ns = 0  # the one before gave no sign of us
    header.pid = os.getpid()
    header.verify_reads = int(config.verify_reads)
    return _recover(config, folder, header, segment_file, failures)


def _clear(folder: NodeFolder) -> None:
    """Remove what another boot or incarnation left: it could not be read any more, and would keep its memory."""
    for extent in folder.extents():
        remove_tables(folder, extent)
    for epoch in folder.epochs():
        Index.remove(folder, epoch)
    for number in mounted_numbers(folder):
        remove_mounted(folder, number)
    remove(folder.segment)
    remove(folder.path / QUARANTINE)
    remove(folder.puts)


def _void(folder: NodeFolder, number: int, keep: bool) -> None:
    """Give up an extent whose tables cannot be believed. Its position will hold other pages: clients that mapped it,
    lease holders among them, must see that nothing is sealed there any more. ``keep`` the file that says there was
    one: nothing else does."""
    with contextlib.suppress(FileNotFoundError):
        fd = open_plain(folder.records(number), os.O_RDWR)
        with open(fd, "r+b", buffering=0) as file:
            file.write(bytes(os.fstat(fd).st_size))
    if not keep:
        remove_tables(folder, number)


def _give_up(
    folder: NodeFolder, header: Header, performer: Performer, nvme: NvmePages | None, lost: list[int], living: set[int]
) -> Held:
    """Give up extents whose tables cannot be believed. Returns the positions where a living session may write: those,
    and what earlier starts wrote down."""
    carved = {table.position for table in performer.tables.values() if performer.stores[table.tier].mapped}
    vacant = set(range(performer.dram.segment.positions)) - carved
    held, doubted = read_quarantine(folder, header.incarnation), set[int]()
    on_nvme = set() if nvme is None else {extent.number for extent in nvme.devices.extents.values()}
    for number in set(lost) - on_nvme:
        claimed = claimed_positions(folder, number, header.incarnation)
        doubted |= vacant if claimed is None else claimed & vacant
    if held is None:
        held, doubted = {}, vacant
    now = {at: held.get(at, set()) | (living if at in doubted else set()) for at in {*held, *doubted} & vacant}
    now = {at: sessions for at, sessions in now.items() if sessions}
    keep = False
    if now != held:
        try:
            write_quarantine(folder, header.incarnation, now)
        except OSError as error:
            log.error("positions in quarantine cannot be written down: %s", error)
            keep = True
    if doubted and now:
        log.warning("%d positions are held for %d sessions that may still write there", len(now), len(living))
    for number in lost:
        _void(folder, number, keep)
    return now


@dataclass(frozen=True)
class LowerTier:
    """A tier below DRAM: how its store is opened (None where there is none, see ``open_nvme``), and its rules."""

    open: Callable[[NodeConfig, NodeFolder, dict[str, str], bytes | None], TierStore | None]
    rules: Callable[[NodeConfig], TieringRules]


def nvme_rules(config: NodeConfig) -> TieringRules:
    """How pages come to NVMe and back."""
    admission, cap = config.nvme_admission, config.nvme_write_bytes_per_day
    return TieringRules(config.demote_at, config.promote_after, admission, cap)


LOWER_TIERS: dict[Tier, LowerTier] = {Tier.NVME: LowerTier(open_nvme, nvme_rules)}
"""The tiers below DRAM, the fastest first. Another one is a class (``TierStore``) and a row here."""


def _recover(
    config: NodeConfig, folder: NodeFolder, header: Header, segment_file: SegmentFile, failures: dict[str, str]
) -> tuple[Performer, NodeState]:
    with contextlib.ExitStack() as stack:
        stores: dict[Tier, TierStore] = {Tier.DRAM: DramStore(segment_file, header.incarnation)}
        for tier, about in LOWER_TIERS.items():
            store = about.open(config, folder, failures, read_secret(folder, header.incarnation))
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
    """A node over its files and open ``stores``, as the daemon before left them at any moment. ``now_ns``: the clock
    that deadlines in the files are of."""
    # The smallest frame there is takes a block, and where pages have headers another one.
    blocks = [store.positions * store.extent_bytes // FRAME_ALIGN for store in stores.values()]
    frames_max = blocks[0] + sum(blocks[1:]) // 2
    map_bytes = INDEX_BYTES_MIN + INDEX_BYTES_PER_FRAME * frames_max
    index = _open_index(folder, header, map_bytes)
    performer = Performer(folder, header, stores, index, map_bytes, now_ns)
    nvme, segment_file = performer.nvme, performer.dram.segment
    performer.puts = puts = open_log(folder, header)
    living, lost = living_ids(folder) | set(puts.sessions() if puts is not None else ()), list[int]()
    for number in folder.extents():
        opened = (ExtentTable.open(folder, number, store.incarnation, writable=True) for store in stores.values())
        table = next(filter(None, opened), None)
        taken = {(t.tier, t.position) for t in performer.tables.values()}
        if table is not None and (table.tier, table.position) not in taken:
            performer.tables[number] = table
        else:
            lost.append(number)
    quarantined = _give_up(folder, header, performer, nvme, lost, living)
    if nvme is not None:
        open_tables(folder, nvme, performer.tables)
        nvme.devices.write_map(folder)
    else:
        remove(folder.nvme)
    mapped = [table for table in performer.tables.values() if performer.stores[table.tier].mapped]
    carved = [(table.position, table.frame_class) for table in mapped]
    performer.stores[Tier.DRAM] = DramStore(segment_file, header.incarnation, carved)
    state = _state(config, header, performer, book.read_names(folder, header.incarnation))
    performer.index.mounted = state.mounts.entries
    found = [extent_found(table) for table in performer.tables.values()]
    instructions = recovery.recover(state, found, header.next_extent, now_ns(), living, quarantined)
    if failpoint.ACTIVE:
        failpoint.hit("node.recover")
    performer.perform(instructions)
    header.mounts = 0
    for mount in found_mounts(folder, header, living, now_ns()):
        performer.perform(state.handle(mount))
    if not performer.index.agrees():
        performer.index.rebuild("start")
    recovery.settle(state)
    if nvme is not None:
        state.tiering.pairs[nvme.tier].demotion.begin_day(nvme.day_bytes_left(config.nvme_write_bytes_per_day))
    for position in sorted(state.segment.beyond):  # of a larger node that was here before
        performer.dram.give_back(position)
    pins = book.read_pins(folder, header.incarnation, now_ns())
    if pins:
        performer.perform(state.handle(ev.RestorePins(now_ns(), pins)))
    performer.book.flush()
    header.names_forgotten += 1  # a kill may have come between a page and its root's name: clients say theirs again
    return performer, state


def _state(config: NodeConfig, header: Header, performer: Performer, named: Iterable[Any]) -> NodeState:
    if config.eviction not in POLICIES:
        raise InvalidRequest("eviction", f"there is no policy {config.eviction!r}; there are {', '.join(POLICIES)}")
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
        named=named,
        pins_share_max=config.pins_share_max,
    )


def _frames_in(store: TierStore, extent_bytes: int, frame_class: FrameClass) -> int:
    assert extent_bytes == store.extent_bytes
    return store.frames_of(frame_class)


def _stride(store: TierStore, frame_class: FrameClass) -> int:
    return store.header_bytes(frame_class) + frame_class.frame_bytes


def _open_index(folder: NodeFolder, header: Header, map_bytes: int) -> Index:
    """The index that is there, or an empty one: the comparison with the records decides what it is worth."""
    epochs = folder.epochs()
    try:
        index = Index.open_writer(folder, header.epoch, map_bytes, fresh=False)
    except IndexDamaged:
        # Under a new epoch: clients that have the damaged one open must see that it is no more.
        epoch = max([header.epoch, *epochs]) + 1
        index = Index.open_writer(folder, epoch, map_bytes, fresh=True)
        header.epoch = epoch
    for stale in epochs:
        if stale != header.epoch:
            Index.remove(folder, stale)
    return index


def extent_found(table: ExtentTable) -> ExtentFound:
    """What a start finds of an extent, for recovery to judge."""
    fmt = table.fmt

    def words(offset: int) -> Any:
        return table.column(offset).copy()

    none = np.zeros((table.frames, SHARDS_MAX), np.uint64)
    groups, writers = none[:, 0], none
    if fmt.tail:
        groups = words(fmt.group)
        writers = np.stack([words(fmt.writers + 8 * shard) for shard in range(SHARDS_MAX)], axis=1)
    sound = np.array(table.identity_sums(slice(0, table.frames)), np.uint64) == words(fmt.identity_sum)
    return ExtentFound(
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
    )


class TierView:
    """The tier's table of the index (``PageIndex``), and its records (``RecordView``)."""

    def __init__(self, performer: Performer, tier: Tier) -> None:
        self._performer = performer
        self._tier = tier
        self.find = partial(performer.index.find, tier)
        self.absent = partial(performer.index.absent, tier)
        self.key, self.parent, self.root, self.extra = performer.key, performer.parent, performer.root, performer.extra
        self.lineage, self.standing, self.last_use_ns = performer.lineage, performer.standing, performer.last_use_ns
        self.run = performer.run

    def snapshots(self) -> list[Snapshot]:
        """See ``RecordView``."""
        return [snapshot(table) for table in self._performer.tables.values() if table.tier == self._tier]
