"""Lookups, reads and puts of many objects at once, on a local node, with few Python steps for each object.

``find_heads`` looks up the heads of all names in one index transaction, and then proves them extent by extent. A head
is proven like a page (see ``verify_hit``): its frame's word says SEALED under the generation that the index names, and
its record contains the whole key. ``find_head`` does the same for one name.

A member of a group is found only if the index lists the group as complete, which is read after the heads. So all
members were stored at that moment. Puts and deletes also see the members of incomplete groups (``stored_heads``).

``read_objects`` finds heads and pieces in two index transactions, copies the values, and then compares all generations
again. It leaves objects that are not in DRAM, or that have changed, to the caller, which reads them one by one.

``ObjectsPut`` copies many objects into granted frames, and publishes or seals many of them at a time. Each object is
stored as a whole or not at all. It leaves some objects to the caller: those that are larger than a request, those
without frames, and those with which the node is busy. The caller puts these one by one (``PiecesPut``, ``HeadPut``),
which also shows why an object cannot be stored.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import failpoint
from kvstore.client.buffers import DeviceRows, Rows
from kvstore.client.device_link import DeviceCopies
from kvstore.client.local.frame_copies import PageFrame, copy_value, device_writes, leased_for_copy, mapped_runs
from kvstore.client.local.grants import BATCH_BYTES, GrantedFrames, GrantPool, Purpose, is_still_granted
from kvstore.client.local.index_lookup import Member, complete_groups, find_published
from kvstore.client.local.node import MappedNode
from kvstore.client.local.publisher import PendingReply
from kvstore.client.local.put import LocalPut, SealBatch
from kvstore.client.local.stamps import new_nonces, new_stamp
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.client.local.verify_hit import Run
from kvstore.client.value_buffers import Scattered
from kvstore.device.host_memory import copy
from kvstore.errors import InvalidRequest, NodeUnavailable, QuotaExceeded
from kvstore.model.objects import (
    NO_GROUP,
    About,
    HeadRows,
    ObjectGroup,
    class_for,
    is_object_class,
    key_hash,
    pieces_of,
    read_row,
)
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, KEY, Address, FrameClass, FrameState, Status, word_of
from kvstore.shm.index import IndexDamaged
from kvstore.wire.control import IN_POOL, NO_REPLY, OBJECT, Op, batch_objects, encode

_SEALED = int(FrameState.SEALED)


class GatheredFrames(NamedTuple):
    """Sealed frames of one extent, with their words and records at one moment.

    Attributes:
        positions: the position of each frame's object among the requested objects.
        frames: the frames.
        frame_array: the frames as an array.
        words: the words of the frames.
        rows: the identity rows of the frames, ``[frames, width]``.
    """

    extent: MappedExtent
    positions: Sequence[int]
    frames: Sequence[int]
    frame_array: npt.NDArray[np.intp]
    words: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint8]

    def runs(self, positions: Collection[int]) -> list[Run]:
        """Return the frames of the objects at these positions, each as a run of one page."""
        chosen = zip(self.positions, self.frames, self.words, strict=True)
        return [Run(self.extent, frame, 0, 1, word.tobytes()) for at, frame, word in chosen if at in positions]

    def changed(self) -> list[int]:
        """Return the positions of objects whose frames have changed since."""
        words = self.extent.words[self.frame_array]
        if words.tobytes() == self.words.tobytes():
            return []
        unchanged = (words == self.words).tolist()
        return [position for position, is_same in zip(self.positions, unchanged, strict=True) if not is_same]


def gather(mapped: MappedNode, raws: Sequence[bytes | None]) -> list[GatheredFrames]:
    """Return the frames at these raw DRAM addresses, by extent. Omit those that are not sealed under the generation in
    their address."""
    positions: Sequence[int] = range(len(raws))
    if None in raws:
        positions = [position for position, raw in enumerate(raws) if raw is not None]
    addresses = b"".join([raw[:ADDRESS_BYTES] for raw in raws if raw is not None])
    fields = struct.unpack("<" + "IIQ" * len(positions), addresses)
    numbers, frames, generations = fields[0::3], fields[1::3], fields[2::3]
    words = [generation << 8 | _SEALED for generation in generations]
    extent_numbers = dict.fromkeys(numbers)
    if len(extent_numbers) == 1:
        return _gather_extent(mapped, numbers[0], positions, frames, words)
    gathered = []
    for number in extent_numbers:
        chosen = [i for i, other in enumerate(numbers) if other == number]
        parts = ([values[i] for i in chosen] for values in (positions, frames, words))
        gathered += _gather_extent(mapped, number, *parts)
    return gathered


def _gather_extent(
    mapped: MappedNode, number: int, positions: Sequence[int], frames: Sequence[int], words: Sequence[int]
) -> list[GatheredFrames]:
    """Return the frames of one extent that have these words; empty if there are none."""
    extent = mapped.dram.extents.get(number) or mapped.dram.extent(number)
    if extent is None or max(frames) >= len(extent.words):
        return []
    frame_array = np.array(frames, np.intp)
    current = extent.words[frame_array]
    if current.tolist() != words:
        equal = [i for i, (word, expected) in enumerate(zip(current.tolist(), words, strict=True)) if word == expected]
        if not equal:
            return []
        positions, frames = [positions[i] for i in equal], [frames[i] for i in equal]
        frame_array, current = frame_array[equal], current[equal]
    return [GatheredFrames(extent, positions, frames, frame_array, current, extent.identity[frame_array])]


class DramHeads:
    """The proven heads in DRAM of requested objects.

    Attributes:
        keys: the keys of all names.
        raws: for each name, the address in DRAM that the index names; empty if the index is damaged.
        frames: the frames of the heads.
        heads: for each name, extent, frame and value size of its head; None if no head is proven.
        large: for objects with pieces, the number of pieces and their nonce, by position.
        groups: for members of groups, complete or not, their group, by position.
        members: for members of complete groups, their membership, by position.
        other: positions of names whose key belongs to another object, or whose head is hidden.

    Args:
        keys: the keys of all names, if the caller has computed them.
        hidden: heads of groups that are not complete are found too, as puts and deletes need.
    """

    __slots__ = ("keys", "raws", "frames", "heads", "large", "groups", "members", "other")

    def __init__(
        self,
        mapped: MappedNode,
        root: bytes,
        names: Sequence[bytes],
        keys: list[bytes] | None = None,
        hidden: bool = False,
    ) -> None:
        self.keys = keys if keys is not None else [key_hash(root, name) for name in names]
        self.raws: list[bytes | None] = []
        self.frames: list[GatheredFrames] = []
        self.heads: list[tuple[MappedExtent, int, int] | None] = [None] * len(names)
        self.large: dict[int, tuple[int, bytes]] = {}
        self.groups: dict[int, ObjectGroup] = {}
        self.members: dict[int, Member] = {}
        self.other: set[int] = set()
        try:
            self.raws = find_published(mapped, self.keys)
        except IndexDamaged:
            return  # the daemon will rebuild the index under a new epoch
        for frames in gather(mapped, self.raws) if any(self.raws) else ():
            if is_object_class(frames.extent.frame_class):
                self.frames.append(frames)
                self._prove(frames, root, names)
        if self.groups:
            complete = complete_groups(mapped, self.groups.values())
            self.members = {at: (group, complete[group]) for at, group in self.groups.items() if group in complete}
            for position in [] if hidden else self.groups.keys() - self.members.keys():
                self.heads[position] = None
                self.large.pop(position, None)
                self.other.add(position)

    def _prove(self, frames: GatheredFrames, root: bytes, names: Sequence[bytes]) -> None:
        records, heads, keys, extent = HeadRows(frames.rows, root), self.heads, self.keys, frames.extent
        sizes, pieces = records.value_bytes, records.pieces
        for i, (position, frame) in enumerate(zip(frames.positions, frames.frames, strict=True)):
            if records.key(i) == keys[position] and records.name(i) == names[position]:
                heads[position] = extent, frame, sizes[i]
                if pieces[i]:
                    self.large[position] = pieces[i], records.nonce(i)
                if records.members[i]:
                    self.groups[position] = records.group(i)
            elif int(extent.words[frame]) == int(frames.words[i]):  # otherwise the object may be in a lower tier now
                self.other.add(position)


def find_heads(mapped: MappedNode, root: bytes, names: Sequence[bytes]) -> list[bytes | None]:
    """Return the address of each object's head, in any tier; None if there is none, if its group is not complete, or if
    the key belongs to another object."""
    return stored_heads(mapped, root, names, hidden=False)[0]


def stored_heads(
    mapped: MappedNode, root: bytes, names: Sequence[bytes], keys: list[bytes] | None = None, hidden: bool = True
) -> tuple[list[bytes | None], dict[int, ObjectGroup]]:
    """Return the address of each object's head; None if there is none, or if the key belongs to another object.

    Args:
        keys: the keys of the names, if the caller has computed them.
        hidden: heads of groups that are not complete are found too. Their groups are returned by position.
    """
    dram = DramHeads(mapped, root, names, keys, hidden)
    groups = {position: group for position, group in dram.groups.items() if position not in dram.members}
    addresses = [raw if head is not None else None for raw, head in zip(dram.raws, dram.heads, strict=False)]
    addresses += [None] * (len(names) - len(addresses))
    missing = [position for position, raw in enumerate(addresses) if raw is None and position not in dram.other]
    for position, lower in find_lower_heads(mapped, root, names, dram.keys, missing, hidden).items():
        addresses[position] = lower.address
        if lower.about.group.members and lower.member is None:
            groups[position] = lower.about.group
    return addresses, groups


def read_objects(
    mapped: MappedNode, root: bytes, names: Sequence[bytes], targets: Sequence[Rows | Scattered]
) -> tuple[list[int | None], dict[int, Member]]:
    """Copy objects from DRAM into their targets. Return the size of each, and which of them are members of groups.

    The size is None if the object could not be read in this way, and -1 if its group is not complete.

    Frames that a device copies are leased until the copy's event, if the node answers.

    Raises:
        InvalidRequest: a target is too small. Nothing was copied.
        DeviceLost, DeadlineExceeded: see ``DeviceCopies.finish``. Some objects may have been copied.
    """
    dram = DramHeads(mapped, root, names)
    heads, large, sizes = dram.heads, dram.large, list[int | None]()
    for position, (head, target) in enumerate(zip(heads, targets, strict=True)):
        if head is None:
            continue
        extent, _, size = head
        count = large[position][0] if position in large else 0
        if (count or size > extent.page_bytes) and count != pieces_of(size, extent.page_bytes):
            heads[position] = None  # the record is damaged
            large.pop(position, None)
        elif target.nbytes < size:
            raise InvalidRequest("out", f"must have at least {size} bytes for the value (got {target.nbytes})")
    piece_frames, pieces = find_pieces(mapped, root, names, dram, large) if large else ([], {})
    if failpoint.ACTIVE:
        failpoint.hit("client.reading")
    copies, on_device = DeviceCopies(to_device=True), set[int]()
    for position, (head, target) in enumerate(zip(heads, targets, strict=True)):
        if head is None or (position in large and position not in pieces):
            sizes.append(None)
            continue
        extent, frame, size = head
        if type(target) is Scattered or position in pieces:
            parts = target.parts if isinstance(target, Scattered) else [target]
            copy_value([*pieces.get(position, ()), (extent, frame)], parts, size, copies, to_pages=False)
            if type(target) is Scattered and target.on_device:
                on_device.add(position)
        else:
            assert not isinstance(target, Scattered)
            row = extent.pages[frame]
            copy(target if target.size == size else target[:size], row if row.size == size else row[:size])
        sizes.append(size)
    if copies:
        runs = [run for frames in (*dram.frames, *piece_frames) for run in frames.runs(on_device)]
        with leased_for_copy(mapped, runs):
            copies.finish({run.extent.number: run.extent for run in runs}.values())
    now_ns = time.monotonic_ns()
    for frames in (*dram.frames, *piece_frames):
        for position in frames.changed():
            sizes[position] = None
        frames.extent.last_use[frames.frame_array] = now_ns
    for position, object_pieces in pieces.items():  # count the pieces as a get of one object does
        if sizes[position] is not None:
            row_number, count = mapped.row(object_pieces[0][0].frame_class), len(object_pieces)
            mapped.counters.got(row_number, count, count, 0, "")
    for position in dram.groups.keys() - dram.members.keys():
        sizes[position] = -1
    return sizes, {position: member for position, member in dram.members.items() if sizes[position] is not None}


def find_pieces(
    mapped: MappedNode,
    root: bytes,
    names: Sequence[bytes],
    dram: DramHeads,
    large: Mapping[int, tuple[int, bytes]],
) -> tuple[list[GatheredFrames], dict[int, list[PageFrame]]]:
    """Return the frames of the pieces of large objects. Also return the pieces in order, by the object's position, for
    objects whose pieces are all in DRAM.

    Args:
        large: all of ``dram.large`` or some of it.
    """
    keys: list[bytes] = []
    rows: list[bytes] = []
    owners: list[int] = []
    for owner, (count, nonce) in large.items():
        head = dram.heads[owner]
        assert head is not None, "a large object has a proven head"
        about = About(names[owner], head[2], count, nonce, dram.groups.get(owner, NO_GROUP))
        chain = about.piece_keys(root, head[0].frame_class.page_tokens)
        width = len(chain.identity_bytes) // count
        keys += chain.hashes
        rows += [chain.identity_bytes[start : start + width] for start in range(0, count * width, width)]
        owners += [owner] * count
    try:
        raws = mapped.index.find_many(mapped.dram.tier, keys)
    except IndexDamaged:
        return [], {}
    proven: list[PageFrame | None] = [None] * len(keys)
    gathered = gather(mapped, raws) if any(raws) else []
    for frames in gathered:
        data, width = frames.rows.tobytes(), frames.rows.shape[1]
        for i, (piece, frame) in enumerate(zip(frames.positions, frames.frames, strict=True)):
            head = dram.heads[owners[piece]]
            has_class = head is not None and frames.extent.frame_class == head[0].frame_class
            if has_class and data[i * width : (i + 1) * width] == rows[piece]:
                proven[piece] = frames.extent, frame
    incomplete = {owner for owner, page in zip(owners, proven, strict=True) if page is None}
    pieces: dict[int, list[PageFrame]] = {}
    for owner, page in zip(owners, proven, strict=True):
        if page is not None and owner not in incomplete:
            pieces.setdefault(owner, []).append(page)
    return [frames._replace(positions=[owners[piece] for piece in frames.positions]) for frames in gathered], pieces


class ProvenHead(NamedTuple):
    """The proven head of an object, at a raw address. ``extent`` is None if the head is not in DRAM. ``member`` is set
    if the object is a member of a complete group."""

    about: About
    frame_class: FrameClass
    address: bytes
    extent: MappedExtent | None
    frame: int
    word: int
    member: Member | None = None

    def copy_to(self, target: Scattered, start: int) -> bool:
        """Copy the end of the value, which the head contains, from DRAM to byte ``start`` of the target. Return False
        if the page has changed."""
        assert self.extent is not None
        target.write(start, self.extent.pages[self.frame, : self.about.value_bytes - start])
        self.extent.last_use[self.frame] = time.monotonic_ns()
        return int(self.extent.words[self.frame]) == self.word


def find_lower_heads(
    mapped: MappedNode,
    root: bytes,
    names: Sequence[bytes],
    keys: Sequence[bytes],
    missing: list[int],
    hidden: bool = False,
) -> dict[int, ProvenHead]:
    """Return the heads of objects in lower tiers, by position.

    Args:
        keys: the keys of all ``names``.
        missing: the positions of the objects to find, which are not in DRAM.
        hidden: heads of groups that are not complete are found too.
    """
    heads: dict[int, ProvenHead] = {}
    for reader in mapped.lower.values() if missing else ():
        try:
            raws = mapped.index.find_many(reader.tier, [keys[position] for position in missing])
        except IndexDamaged:
            break
        still_missing = []
        for position, raw in zip(missing, raws, strict=True):
            head = reader.object_head(raw) if raw is not None else None
            about = read_row(head.row) if head is not None else None
            if raw is None or head is None:
                still_missing.append(position)
            elif about is not None and (about[0], about[1].name, head.row[KEY]) == (
                root,
                names[position],
                keys[position],
            ):
                heads[position] = ProvenHead(about[1], head.frame_class, raw, None, 0, 0)
        missing = still_missing
    groups = {position: head.about.group for position, head in heads.items() if head.about.group.members}
    complete = complete_groups(mapped, groups.values()) if groups else {}
    for position, group in groups.items():
        if group in complete:
            heads[position] = heads[position]._replace(member=(group, complete[group]))
        elif not hidden:
            del heads[position]
    return heads


def find_head(mapped: MappedNode, root: bytes, name: bytes) -> ProvenHead | None:
    """Return the head of an object, in any tier; None if there is none, if its group is not complete, or if the key
    belongs to another object."""
    head = stored_head(mapped, root, name)
    if head is None or not head.about.group.members:
        return head
    group = head.about.group
    entry = complete_groups(mapped, [group]).get(group)
    return head._replace(member=(group, entry)) if entry is not None else None


def stored_head(mapped: MappedNode, root: bytes, name: bytes) -> ProvenHead | None:
    """Return the head of an object, in any tier and whether or not its group is complete; None if there is none, or if
    the key belongs to another object."""
    key = key_hash(root, name)
    try:
        for reader in mapped.tiers:
            is_dram = reader.tier is mapped.dram.tier
            raw = (find_published(mapped, [key]) if is_dram else mapped.index.find_many(reader.tier, [key]))[0]
            head = reader.object_head(raw) if raw is not None else None
            if raw is not None and head is not None:
                about = read_row(head.row)
                if about is None or about[0] != root or about[1].name != name or head.row[KEY] != key:
                    return None
                return ProvenHead(about[1], head.frame_class, raw, head.extent, head.frame, head.word)
    except IndexDamaged:
        pass  # the daemon rebuilds the index under a new epoch
    return None


def plan_object(
    mapped: MappedNode, name: bytes, value_bytes: int, group: ObjectGroup, stamp: int
) -> tuple[FrameClass, About]:
    """Return the frame class and the description of an object to be put."""
    frame_class = class_for(name, value_bytes, int(mapped.header.extent_bytes), group)
    pieces = pieces_of(value_bytes, frame_class.page_bytes)
    return frame_class, About(name, value_bytes, pieces, new_nonces(stamp, 1)[0], group)


def copy_from(source: Scattered, start: int, mapped: MappedNode, frames: GrantedFrames) -> None:
    """Copy a value, starting at byte ``start``, into these frames, and wait for devices.

    Raises:
        NodeUnavailable: a frame no longer exists.
        DeviceLost, DeadlineExceeded: see ``DeviceCopies.finish``.
    """
    pages, copies = _frames_to_fill(mapped, frames), DeviceCopies(to_device=False)
    copy_value(pages, source.parts, source.nbytes, copies, to_pages=True, start=start)
    copies.finish(_extents_of(pages))


def _frames_to_fill(mapped: MappedNode, frames: GrantedFrames) -> list[PageFrame]:
    """Return the place of each frame, in order, and mark the frames as used now. Raises as ``mapped_runs``."""
    pages: list[PageFrame] = []
    now_ns = time.monotonic_ns()
    for extent, frame, i, j in mapped_runs(mapped, frames):
        pages += [(extent, number) for number in range(frame, frame + j - i)]
        extent.last_use[frame : frame + j - i] = now_ns
    return pages


def _extents_of(pages: Sequence[PageFrame]) -> Collection[MappedExtent]:
    return {extent.number: extent for extent, _ in pages}.values()


class _ObjectPagesPut(LocalPut):
    """A ``LocalPut`` whose bytes come from a value in several buffers."""

    _source: Scattered
    _start = 0

    def stored_pages(self) -> int:
        """Wait for the put, and return how many pages it has stored; 0 if the tenant's quota is used up."""
        try:
            return self.result()
        except QuotaExceeded:
            return 0

    @property
    def is_over_quota(self) -> bool:
        """True if the tenant's quota is used up."""
        return self._is_over_quota

    def _copy(self, rows: Rows | DeviceRows, page: int, frames: GrantedFrames) -> None:
        start = self._start + page * self._pool.frame_class.page_bytes
        with device_writes(self.mapped, frames, self._pool):
            copy_from(self._source, start, self.mapped, frames)


class PiecesPut(_ObjectPagesPut):
    """A put of the pieces of an object."""

    pieces = 0

    def send_from(self, source: Scattered, pieces: int) -> None:
        """Copy the pieces from the value, and send their seals."""
        self._source, self.pieces = source, pieces
        self.send(np.empty((pieces, 0), np.uint8), 0)

    def last_address(self) -> bytes | None:
        """Return the address of the last stored piece; None if there is none."""
        try:
            raws = self.mapped.index.find_many(self.mapped.dram.tier, self._keys.hashes)
        except IndexDamaged:
            return None
        return next((raw for raw in reversed(raws) if raw is not None), None)


class HeadPut(_ObjectPagesPut):
    """A put of the head of an object.

    Attributes:
        is_busy: after ``result``, True if the node could not store the head now.
        is_present: after ``result``, True if another object is stored under the key.
    """

    def __init__(self, mapped: MappedNode, keys: Keys, frame_class: FrameClass, replaced: bytes, in_pool: bool) -> None:
        super().__init__(mapped, keys, frame_class, OBJECT)
        self._replaced = replaced
        self._in_pool = IN_POOL if in_pool else 0
        self.is_busy = self.is_present = False

    def send_from(self, source: Scattered, start: int) -> None:
        """Copy the end of the value, starting at byte ``start``, into the head, and send its seal."""
        self._source, self._start = source, start
        self.send(np.empty((1, 0), np.uint8), 0)

    def _body(self, page: int, frames: GrantedFrames) -> tuple[bytes, ...]:
        return *super()._body(page, frames), self._replaced

    def _request(self, batch: SealBatch) -> None:
        number = self._pool.class_number
        fields = {"count": 1, "a": number, "b": self._in_pool, "flags": OBJECT}
        batch.reply = self.mapped.channel.request(Op.SEAL_GRANTED, **fields, body=batch.body)
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")

    def _sort_frames(self, batch: SealBatch, statuses: bytes) -> list[int]:
        self.is_busy, self.is_present = Status.BUSY in statuses, Status.PRESENT in statuses
        return super()._sort_frames(batch, statuses)


_OK, _PRESENT, _STALE = int(Status.OK), int(Status.PRESENT), int(Status.STALE)
_NO_ADDRESS: Final = bytes(ADDRESS_BYTES)


class _NewObject(NamedTuple):
    """An object to be put: its position among the names, its description, and the number of its pages."""

    position: int
    about: About
    pages: int


@dataclass(slots=True)
class _ObjectBatch:
    """Objects that one request seals, and the frames of their pages in order. ``reply`` is None until it is sent."""

    pool: GrantPool
    objects: list[_NewObject]
    frames: GrantedFrames
    body: tuple[bytes, ...]
    reply: PendingReply | None = None


class ObjectsPut:
    """A put of the objects of one call. ``result`` is called once.

    Args:
        replace: put objects whose names exist too. The call then waits for the node, which compares what they replace.
        wait: with False, the objects are published where that is possible, without waiting for the node.
        groups: the group of each object.
        nonces: the nonces of the values; None for new ones.
        in_pool: the values replace those of other nodes too.
        timeout_s: the longest wait for frames; None for the node's.
    """

    def __init__(
        self,
        mapped: MappedNode,
        root: bytes,
        names: Sequence[bytes],
        sources: Sequence[Scattered],
        replace: bool,
        wait: bool,
        groups: Sequence[ObjectGroup],
        nonces: Sequence[bytes] | None = None,
        timeout_s: float | None = None,
        in_pool: bool = False,
    ) -> None:
        self._in_pool = IN_POOL if in_pool else 0
        self._nonces = nonces if nonces is not None else new_nonces(new_stamp(mapped), len(names))
        self._timeout_s = mapped.timeout_s if timeout_s is None else timeout_s
        self._mapped, self._root, self._replace = mapped, root, replace
        self._names, self._sources = names, sources
        self._keys = [key_hash(root, name) for name in names]
        self._groups = groups
        self._replaced, hidden = stored_heads(mapped, root, names, self._keys)
        # A new object replaces a member of another group that no reader finds.
        self._hidden = {position for position, other in hidden.items() if other != groups[position]}
        self._publishes = not (wait or replace or self._hidden) and mapped.publishes
        self._stored: list[bool | None] = [None] * len(names)

    def result(self) -> list[bool | None]:
        """Put the objects. Return, for each, whether this put has stored it, or None if the caller must put it.

        Raises:
            InvalidRequest: the node refuses these requests. Some objects may be stored.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time. Some objects may be stored.
        """
        unanswered: deque[_ObjectBatch] = deque()
        try:
            for pool, objects in self._requests():
                batch = self._copy_objects(pool, objects)
                if batch is not None and not (self._publishes and self._publish(batch)):
                    unanswered.append(batch)
                    batch.reply = self._request(batch)
            while unanswered:
                unused = self._settle(unanswered[0])
                batch = unanswered.popleft()  # before `add`, so that a failure forfeits no frame of the pool
                batch.pool.add(GrantedFrames.of(unused))
        except BaseException:
            for batch in unanswered:
                batch.pool.forfeit(batch.frames)
            raise
        return self._stored

    def _requests(self) -> Iterator[tuple[GrantPool, list[_NewObject]]]:
        """Yield lists of objects that fit one request, each with the pool of their frames. Objects that are larger
        than a request are left to the caller."""
        by_class: dict[FrameClass, list[_NewObject]] = {}
        extent_bytes, replaced = int(self._mapped.header.extent_bytes), self._replaced
        last_class, objects = None, list[_NewObject]()
        for position, (name, source) in enumerate(zip(self._names, self._sources, strict=True)):
            if replaced[position] is not None and not self._may_replace(position):
                self._stored[position] = False
                continue
            size = source.nbytes
            frame_class = class_for(name, size, extent_bytes, self._groups[position])
            if frame_class is not last_class:  # usually all values of a call have one class
                last_class, objects = frame_class, by_class.setdefault(frame_class, [])
            pieces = pieces_of(size, frame_class.page_bytes) if size > frame_class.page_bytes else 0
            about = About(name, size, pieces, self._nonces[position], self._groups[position])
            objects.append(_NewObject(position, about, pieces + 1))
        for frame_class, objects in by_class.items():
            pool = self._mapped.pool(frame_class, self._root if self._publishes else b"")
            limit = min(batch_objects(frame_class.page_tokens), max(1, BATCH_BYTES // frame_class.page_bytes))
            group: list[_NewObject] = []
            pages_free = limit
            for new in objects:
                if new.pages > limit:
                    continue
                if new.pages > pages_free:
                    yield pool, group
                    group, pages_free = [], limit
                group.append(new)
                pages_free -= new.pages
            if group:
                yield pool, group

    def _copy_objects(self, pool: GrantPool, objects: list[_NewObject]) -> _ObjectBatch | None:
        """Copy as many of these objects as there are frames for. Return None if there are no frames."""
        pages = sum([new.pages for new in objects])
        frames = pool.take_granted(pages, Purpose(self._root), self._timeout_s)
        if len(frames) < pages:
            frames_free, all_objects, objects = len(frames), objects, []
            for new in all_objects:
                if new.pages <= frames_free:
                    objects.append(new)
                    frames_free -= new.pages
            used = len(frames) - frames_free
            frames, unused = frames[:used], frames[used:]
            pool.add(unused)
            if not objects:
                return None
        try:
            if failpoint.ACTIVE:
                failpoint.hit("client.granted")
            body = self._body(pool.frame_class, objects, frames)  # before the copy, as in ``LocalPut.send``
        except BaseException:
            pool.forfeit(frames)
            raise
        with self._mapped.channel.copies, device_writes(self._mapped, frames, pool):
            self._copy(objects, frames)
        return _ObjectBatch(pool, objects, frames, body)

    def _copy(self, objects: list[_NewObject], frames: GrantedFrames) -> None:
        """Copy the values of these objects into frames, and wait for devices. Raises as ``copy_from``."""
        pages, copies, first = _frames_to_fill(self._mapped, frames), DeviceCopies(to_device=False), 0
        for position, about, count in objects:
            source = self._sources[position]
            if count == 1 and len(source.parts) == 1 and not source.on_device:
                extent, frame = pages[first]
                copy(extent.pages[frame, : about.value_bytes], source.parts[0])  # type: ignore[arg-type]
            else:
                copy_value(pages[first : first + count], source.parts, about.value_bytes, copies, to_pages=True)
            first += count
            if failpoint.ACTIVE:
                failpoint.hit("client.copied")
        if copies:
            copies.finish(_extents_of(pages))

    def _body(self, frame_class: FrameClass, objects: list[_NewObject], frames: GrantedFrames) -> tuple[bytes, ...]:
        """Return the body of a request: the frames, the identity rows of the objects' pages, and the addresses of the
        heads that they replace."""
        root, width, keys = self._root, frame_class.page_tokens, self._keys
        rows: list[bytes] = []
        replaced: list[bytes] = []
        for position, about, _ in objects:
            if about.pieces:
                rows.append(about.piece_keys(root, width).identity_bytes)
                replaced.append(_NO_ADDRESS * about.pieces)
            rows.append(about.row(root, width, keys[position]))
            replaced.append(self._replaced[position] or _NO_ADDRESS)
        return frames.raw, *rows, *replaced

    def _publish(self, batch: _ObjectBatch) -> bool:
        """Publish a batch in the log, after which readers find its objects. Return False if it must be sent as a
        request, because the log is full."""
        publisher, mapped = self._mapped.channel.publisher, self._mapped
        if publisher is None:
            return False
        count, number = len(batch.frames), batch.pool.class_number
        request = encode(Op.SEAL_OBJECTS, 0, count=count, a=number, flags=NO_REPLY, body=batch.body)
        with mapped.channel.copies:
            if not publisher.publish(request, [self._keys[new.position] for new in batch.objects], mapped.header):
                return False
        if failpoint.ACTIVE:
            failpoint.hit("client.published")
        for new in batch.objects:
            self._stored[new.position] = True
        mapped.counters.put(batch.pool.row, count)
        return True

    def _request(self, batch: _ObjectBatch) -> PendingReply:
        count, number = len(batch.frames), batch.pool.class_number
        reply = self._mapped.channel.request(Op.SEAL_OBJECTS, count=count, a=number, b=self._in_pool, body=batch.body)
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")
        return reply

    def _settle(self, batch: _ObjectBatch) -> list[Address]:
        """Wait for the reply to a batch, and return the frames that were not used. The request is sent again if the
        daemon ended before it replied."""
        assert batch.reply is not None
        count, is_resent = len(batch.frames), False
        try:
            message = batch.reply.result()
        except NodeUnavailable:
            is_resent = True
            message = self._request(batch).result()
        statuses = bytes(message.body[:count])
        unused, stale = list[Address](), list[Address]()
        first = sealed = 0
        for new in batch.objects:
            frames, status = batch.frames[first : first + new.pages], statuses[first]
            first += new.pages
            head = frames[-1]
            if status == _OK or (is_resent and self._word(head) == word_of(head.generation, FrameState.SEALED)):
                self._stored[new.position] = True
                sealed += new.pages
                continue
            if status == _PRESENT and not self._may_replace(new.position):
                self._stored[new.position] = False
            # The records show which frames are still granted to this session. All frames of an object have one status.
            # If it is STALE, the node does not list them as granted, so they are never written again.
            granted = [address for address in frames if is_still_granted(address, self._word(address))]
            (stale if status == _STALE else unused).extend(granted)
        batch.pool.forfeit(GrantedFrames.of(stale))
        self._mapped.counters.put(batch.pool.row, sealed)
        return unused

    def _may_replace(self, position: int) -> bool:
        return self._replace or position in self._hidden

    def _word(self, address: Address) -> int:
        extent = self._mapped.dram.extent(address.extent)
        return int(extent.words[address.frame]) if extent is not None else 0
