"""Finds, reads and puts many objects at once on a node of this machine, with few Python steps for each.

``find_heads`` looks up the heads of all names in one index transaction, then proves them one extent at a time. A head
is proven like any page (see ``verify_hit``): its frame's word says SEALED under the generation that the index named,
and its record holds the whole key. ``find_head`` does the same for one name.

``read_objects`` finds heads and pieces in two index transactions, copies the values, and compares all generations again
at the end. Objects that are not in DRAM or that changed are left to the caller, which reads them one after another.

``ObjectsPut`` copies many objects into granted frames, and publishes or seals many at a time, each object as a whole.
It leaves some objects to the caller, which puts them one after another (``PiecesPut``, ``HeadPut``) and reports why one
is not stored: those larger than a request, those without frames, and those with which the node is busy.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import failpoint
from kvstore.client.buffers import DeviceRows, Rows, Scattered
from kvstore.client.local.frame_copies import frames_of
from kvstore.client.local.grants import BATCH_BYTES, GrantPool, Purpose, still_ours
from kvstore.client.local.index_lookup import find_published
from kvstore.client.local.node import Mapped
from kvstore.client.local.publisher import PendingReply
from kvstore.client.local.put import LocalPut, SealBatch
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.device.host_memory import copy
from kvstore.errors import InvalidRequest, NodeUnavailable, QuotaExceeded
from kvstore.model.objects import (
    NONCE_BYTES,
    About,
    HeadRows,
    class_for,
    is_object_class,
    key_hash,
    pieces_of,
    read_row,
)
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, KEY, Address, FrameClass, FrameState, Status, word_of
from kvstore.shm.index import IndexDamaged
from kvstore.wire.control import NO_REPLY, OBJECT, Op, batch_objects, encode, pack_addresses

_SEALED = int(FrameState.SEALED)


class GatheredFrames(NamedTuple):
    """Frames of one extent as they were at one moment.

    Attributes:
        places: the position of each among the requested objects.
        gathered: the frames again, as an array.
        words: each frame's word at that moment. ``rows``: the identity rows at that moment, ``[frames, width]``.
    """

    extent: MappedExtent
    places: Sequence[int]
    frames: Sequence[int]
    gathered: npt.NDArray[np.intp]
    words: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint8]

    def changed(self) -> list[int]:
        """Return the places of frames that have changed since."""
        now = self.extent.words[self.gathered]
        if now.tobytes() == self.words.tobytes():
            return []
        same = (now == self.words).tolist()
        return [place for place, held in zip(self.places, same, strict=True) if not held]


def gather(mapped: Mapped, raws: Sequence[bytes | None]) -> list[GatheredFrames]:
    """Return the frames at these raw DRAM addresses that are sealed under the named generations, by extent."""
    places: Sequence[int] = range(len(raws))
    if None in raws:
        places = [place for place, raw in enumerate(raws) if raw is not None]
    packed = b"".join([raw[:ADDRESS_BYTES] for raw in raws if raw is not None])
    flat = struct.unpack("<" + "IIQ" * len(places), packed)
    numbers, frames, generations = flat[0::3], flat[1::3], flat[2::3]
    words = [generation << 8 | _SEALED for generation in generations]
    several = dict.fromkeys(numbers)
    if len(several) == 1:
        return _sealed(mapped, numbers[0], places, frames, words)
    found = []
    for number in several:
        mine = [i for i, other in enumerate(numbers) if other == number]
        parts = ([of[i] for i in mine] for of in (places, frames, words))
        found += _sealed(mapped, number, *parts)
    return found


def _sealed(
    mapped: Mapped, number: int, places: Sequence[int], frames: Sequence[int], words: Sequence[int]
) -> list[GatheredFrames]:
    """Return the frames of one extent that are sealed under the named generations; empty if there are none."""
    extent = mapped.dram.extents.get(number) or mapped.dram.extent(number)
    if extent is None or max(frames) >= len(extent.words):
        return []
    index = np.array(frames, np.intp)
    now = extent.words[index]
    if now.tolist() != words:
        kept = [i for i, (mine, named) in enumerate(zip(now.tolist(), words, strict=True)) if mine == named]
        if not kept:
            return []
        places, frames = [places[i] for i in kept], [frames[i] for i in kept]
        index, now = index[kept], now[kept]
    return [GatheredFrames(extent, places, frames, index, now, extent.identity[index])]


class DramHeads:
    """The heads of those requested objects that are in DRAM.

    Attributes:
        keys: the keys of all names, in any tier. ``raws``: their addresses in DRAM, as the index names them.
        frames: the frames under which they were proven.
        heads: by position among the names: extent, frame and bytes of the value; None if it is not proven.
        large: by position, for objects that have pieces: how many, and their nonce.
        other: positions of names for which the index names another object's page.
    """

    __slots__ = ("keys", "raws", "frames", "heads", "large", "other")

    def __init__(self, mapped: Mapped, root: bytes, names: Sequence[bytes], keys: list[bytes] | None = None) -> None:
        self.keys = keys if keys is not None else [key_hash(root, name) for name in names]
        self.raws: list[bytes | None] = []
        self.frames: list[GatheredFrames] = []
        self.heads: list[tuple[MappedExtent, int, int] | None] = [None] * len(names)
        self.large: dict[int, tuple[int, bytes]] = {}
        self.other: set[int] = set()
        try:
            self.raws = find_published(mapped, self.keys)
        except IndexDamaged:
            return  # the daemon will rebuild the index under a new epoch
        for frames in gather(mapped, self.raws) if any(self.raws) else ():
            if is_object_class(frames.extent.frame_class):
                self.frames.append(frames)
                self._prove(frames, root, names)

    def _prove(self, frames: GatheredFrames, root: bytes, names: Sequence[bytes]) -> None:
        told, heads, keys, extent = HeadRows(frames.rows, root), self.heads, self.keys, frames.extent
        sizes, pieces = told.value_bytes, told.pieces
        for i, (place, frame) in enumerate(zip(frames.places, frames.frames, strict=True)):
            if told.key(i) == keys[place] and told.name(i) == names[place]:
                heads[place] = extent, frame, sizes[i]
                if pieces[i]:
                    self.large[place] = pieces[i], told.nonce(i)
            elif int(extent.words[frame]) == int(frames.words[i]):  # else it has left, and may be in a lower tier
                self.other.add(place)


def find_heads(
    mapped: Mapped, root: bytes, names: Sequence[bytes], keys: list[bytes] | None = None
) -> list[bytes | None]:
    """Return the address of each object's head, in any tier; None if there is none, or if it belongs to another
    string. ``keys``: those of the names, if they are known."""
    proven = DramHeads(mapped, root, names, keys)
    found = [raw if head is not None else None for raw, head in zip(proven.raws, proven.heads, strict=False)]
    found += [None] * (len(names) - len(found))
    left = [place for place, raw in enumerate(found) if raw is None and place not in proven.other]
    for reader in mapped.lower.values() if left else ():
        try:
            raws = mapped.index.find_many(reader.tier, [proven.keys[place] for place in left])
        except IndexDamaged:
            break
        unseen = []
        for place, raw in zip(left, raws, strict=True):
            head = reader.object_head(raw) if raw is not None else None
            about = read_row(head.row) if head is not None else None
            if head is None:
                unseen.append(place)
            elif about is not None and about[0] == root and about[1].name == names[place]:
                found[place] = raw if head.row[KEY] == proven.keys[place] else None
        left = unseen
    return found


Place = tuple[MappedExtent, int]
"""A page's frame."""


def read_objects(
    mapped: Mapped, root: bytes, names: Sequence[bytes], targets: Sequence[Rows | Scattered]
) -> list[int | None]:
    """Copy each of these objects into its target. Returns the bytes of each; None if it could not be read this way.

    Raises:
        InvalidRequest: a target is too small; nothing was copied.
    """
    found = DramHeads(mapped, root, names)
    heads, large, lengths = found.heads, found.large, list[int | None]()
    for place, (head, target) in enumerate(zip(heads, targets, strict=True)):
        if head is None:
            continue
        extent, _, size = head
        count = large[place][0] if place in large else 0
        if (count or size > extent.page_bytes) and count != pieces_of(size, extent.page_bytes):
            heads[place] = None  # its record is damaged
            large.pop(place, None)
        elif target.nbytes < size:
            raise InvalidRequest("out", f"must have at least {size} bytes for the value (got {target.nbytes})")
    pieces, before = _pieces(mapped, root, names, found) if large else ([], {})
    if failpoint.ACTIVE:
        failpoint.hit("client.reading")
    for place, (head, target) in enumerate(zip(heads, targets, strict=True)):
        if head is None or (place in large and place not in before):
            lengths.append(None)
            continue
        extent, frame, size = head
        if type(target) is Scattered or place in before:
            _copy([*before.get(place, ()), (extent, frame)], size, target)
        else:
            assert not isinstance(target, Scattered)
            row = extent.pages[frame]
            copy(target if target.size == size else target[:size], row if row.size == size else row[:size])
        lengths.append(size)
    now_ns = time.monotonic_ns()
    for frames in (*found.frames, *pieces):
        for place in frames.changed():
            lengths[place] = None
        frames.extent.last_use[frames.gathered] = now_ns
    for place, chain in before.items():  # count the pages as a get of one object does
        if lengths[place] is not None:
            mapped.counters.got(mapped.row(chain[0][0].frame_class), len(chain), len(chain), 0, "")
    return lengths


def _pieces(
    mapped: Mapped, root: bytes, names: Sequence[bytes], heads: DramHeads
) -> tuple[list[GatheredFrames], dict[int, list[Place]]]:
    """Return the frames of these objects' pieces, and their places by position in ``names``, for objects of which all
    pieces exist."""
    keys: list[bytes] = []
    rows: list[bytes] = []
    owners: list[int] = []
    for owner, (count, nonce) in heads.large.items():
        head = heads.heads[owner]
        assert head is not None, "proven"
        about = About(names[owner], head[2], count, nonce)
        chain = about.piece_keys(root, head[0].frame_class.page_tokens)
        width = len(chain.identity_bytes) // count
        keys += chain.hashes
        rows += [chain.identity_bytes[at : at + width] for at in range(0, count * width, width)]
        owners += [owner] * count
    try:
        raws = mapped.index.find_many(mapped.dram.tier, keys)
    except IndexDamaged:
        return [], {}
    proven: list[Place | None] = [None] * len(keys)
    found = gather(mapped, raws) if any(raws) else []
    for frames in found:
        data, width = frames.rows.tobytes(), frames.rows.shape[1]
        for i, (place, frame) in enumerate(zip(frames.places, frames.frames, strict=True)):
            head = heads.heads[owners[place]]
            of_class = head is not None and frames.extent.frame_class == head[0].frame_class
            if of_class and data[i * width : (i + 1) * width] == rows[place]:
                proven[place] = frames.extent, frame
    places: dict[int, list[Place]] = {}
    lost = {owner for owner, piece in zip(owners, proven, strict=True) if piece is None}
    for owner, piece in zip(owners, proven, strict=True):
        if piece is not None and owner not in lost:
            places.setdefault(owner, []).append(piece)
    return [frames._replace(places=[owners[place] for place in frames.places]) for frames in found], places


def _copy(pages: list[Place], value_bytes: int, target: Rows | Scattered) -> None:
    """Copy a value's pages end to end into its target."""
    if not value_bytes:
        return  # an empty target may have no parts
    page_bytes, at = pages[0][0].page_bytes, 0
    parts = iter(target.parts if isinstance(target, Scattered) else [target])
    part, start = next(parts), 0  # the part with byte ``at`` of the value, and where it begins
    while at < value_bytes:
        while at == start + part.size:
            start, part = start + part.size, next(parts)
        extent, frame = pages[at // page_bytes]
        low = at % page_bytes
        size = min(page_bytes - low, start + part.size - at, value_bytes - at)
        copy(part[at - start : at - start + size], extent.pages[frame, low : low + size])
        at += size


class Found(NamedTuple):
    """A proven head of an object. ``extent`` is None if it is not in memory."""

    about: About
    frame_class: FrameClass
    address: bytes
    extent: MappedExtent | None
    frame: int
    word: int

    def copy_to(self, into: Scattered, start: int) -> bool:
        """Copy the head's part of the value from DRAM; return False if the page has changed."""
        assert self.extent is not None
        into.write(start, self.extent.pages[self.frame, : self.about.value_bytes - start])
        self.extent.last_use[self.frame] = time.monotonic_ns()
        return int(self.extent.words[self.frame]) == self.word


def find_head(mapped: Mapped, root: bytes, name: bytes) -> Found | None:
    """Return the head of the object of that name, in any tier; None if there is none, or if it belongs to another
    string."""
    key = key_hash(root, name)
    try:
        for reader in mapped.tiers:
            memory = reader.tier is mapped.dram.tier
            raw = (find_published(mapped, [key]) if memory else mapped.index.find_many(reader.tier, [key]))[0]
            head = reader.object_head(raw) if raw is not None else None
            if raw is not None and head is not None:
                about = read_row(head.row)
                if about is None or about[0] != root or about[1].name != name or head.row[KEY] != key:
                    return None
                return Found(about[1], head.frame_class, raw, head.extent, head.frame, head.word)
    except IndexDamaged:
        pass  # the daemon will rebuild the index under a new epoch
    return None


def planned(mapped: Mapped, name: bytes, value_bytes: int) -> tuple[FrameClass, About]:
    """Return the frame class for an object to be put, and the description of the object."""
    frame_class = class_for(name, value_bytes, int(mapped.header.extent_bytes))
    pieces = pieces_of(value_bytes, frame_class.page_bytes)
    return frame_class, About(name, value_bytes, pieces, secrets.token_bytes(NONCE_BYTES))


def copy_from(source: Scattered, start: int, mapped: Mapped, addresses: list[Address]) -> None:
    """Copy a value, from ``start`` on, into these frames. Raises NodeUnavailable if they are gone."""
    for extent, frame, i, j in frames_of(mapped, addresses):
        for place in range(i, j):
            source.read(start + place * extent.page_bytes, extent.pages[frame + place - i])
        extent.last_use[frame : frame + j - i] = time.monotonic_ns()


class _FromSource(LocalPut):
    """A ``LocalPut`` whose bytes come from a value in several buffers."""

    _source: Scattered
    _start = 0

    def settled(self) -> int:
        """As ``result``, but 0 if the tenant's quota is used up; see ``refused``."""
        try:
            return self.result()
        except QuotaExceeded:
            return 0

    @property
    def refused(self) -> bool:
        """True if the tenant's quota is used up."""
        return self._refused

    def _copy(self, rows: Rows | DeviceRows, page: int, addresses: list[Address]) -> None:
        copy_from(self._source, self._start + page * self._pool.frame_class.page_bytes, self._mapped, addresses)


class PiecesPut(_FromSource):
    """A put of the pieces of an object."""

    pieces = 0

    def send_from(self, source: Scattered, pieces: int) -> None:
        """Copy the pieces and send their seals."""
        self._source, self.pieces = source, pieces
        self.send(np.empty((pieces, 0), np.uint8), 0)

    def last_address(self) -> bytes | None:
        """Return the address of the last stored piece."""
        try:
            found = [
                raw
                for raw in self._mapped.index.find_many(self._mapped.dram.tier, self._keys.hashes)
                if raw is not None
            ]
        except IndexDamaged:
            return None
        return found[-1] if found else None


class HeadPut(_FromSource):
    """A put of the head of an object. After ``result``, ``busy`` or ``present`` says why it is not stored."""

    def __init__(self, mapped: Mapped, keys: Keys, frame_class: FrameClass, replaces: bytes) -> None:
        super().__init__(mapped, keys, frame_class)
        self._replaces = replaces
        self.busy = self.present = False

    def send_from(self, source: Scattered, start: int) -> None:
        """Copy the head and send its seal."""
        self._source, self._start = source, start
        self.send(np.empty((1, 0), np.uint8), 0)

    def _seal(
        self, rows: Rows | DeviceRows | None, page: int, addresses: list[Address], body: tuple[bytes, ...]
    ) -> None:
        batch = SealBatch(page, addresses, (*body, self._replaces))
        self._batches.append(batch)
        self._request(batch)

    def _request(self, batch: SealBatch) -> None:
        number = self._pool.class_number
        batch.reply = self._mapped.channel.request(Op.SEAL_GRANTED, count=1, a=number, flags=OBJECT, body=batch.body)
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")

    def _sort_out(self, batch: SealBatch, statuses: bytes) -> list[int]:
        self.busy, self.present = Status.BUSY in statuses, Status.PRESENT in statuses
        return super()._sort_out(batch, statuses)


_OK, _PRESENT, _STALE = int(Status.OK), int(Status.PRESENT), int(Status.STALE)
_NOTHING: Final = bytes(ADDRESS_BYTES)


class _Whole(NamedTuple):
    """An object to be put: its position among the names, and its number of pages."""

    place: int
    about: About
    pages: int


@dataclass(slots=True)
class _Sealing:
    """Objects in one request, and the frames of their pages in order. ``reply`` is None until the request is sent."""

    pool: GrantPool
    objects: list[_Whole]
    addresses: list[Address]
    body: tuple[bytes, ...]
    reply: PendingReply | None = None


class ObjectsPut:
    """The objects of one call. ``stored`` is called once.

    Args:
        replace: also put objects whose names exist. They wait for the node, which compares what they replace.
        wait: False publishes the objects, where that is possible, instead of waiting for the node.
    """

    def __init__(
        self,
        mapped: Mapped,
        root: bytes,
        names: Sequence[bytes],
        sources: Sequence[Scattered],
        replace: bool,
        wait: bool,
    ) -> None:
        self._mapped, self._root, self._replace = mapped, root, replace
        self._names, self._sources = names, sources
        self._keys = [key_hash(root, name) for name in names]
        self._publishes = not (wait or replace) and LocalPut.may_publish(mapped)
        self._replaced = find_heads(mapped, root, names, self._keys)
        self._stored: list[bool | None] = [None] * len(names)

    def stored(self) -> list[bool | None]:
        """Put the objects. Returns for each whether this put stored it; None if it is still to be put.

        Raises:
            InvalidRequest: the node refuses these requests; some objects may be stored.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time; some may be stored.
        """
        under_way: deque[_Sealing] = deque()
        try:
            for pool, objects in self._requests():
                sealing = self._copied(pool, objects)
                if sealing is not None and not (self._publishes and self._publish(sealing)):
                    under_way.append(sealing)
                    sealing.reply = self._request(sealing)
            while under_way:
                back = self._settle(under_way[0])
                sealing = under_way.popleft()  # first, so that no frame is forfeited that the pool has again
                sealing.pool.add(back)
        except BaseException:
            for sealing in under_way:
                sealing.pool.forfeit(sealing.addresses)
            raise
        return self._stored

    def _requests(self) -> Iterator[tuple[GrantPool, list[_Whole]]]:
        """Yield the objects to be put now, as many at a time as fit one request."""
        by_class: dict[FrameClass, list[_Whole]] = {}
        nonces = secrets.token_bytes(NONCE_BYTES * len(self._names))
        extent_bytes, replaced = int(self._mapped.header.extent_bytes), self._replaced
        last, objects = None, list[_Whole]()
        for place, (name, source) in enumerate(zip(self._names, self._sources, strict=True)):
            if replaced[place] is not None and not self._replace:
                self._stored[place] = False
                continue
            size = source.nbytes
            frame_class = class_for(name, size, extent_bytes)
            if frame_class is not last:  # usually all values of a call have one class
                last, objects = frame_class, by_class.setdefault(frame_class, [])
            pieces = pieces_of(size, frame_class.page_bytes) if size > frame_class.page_bytes else 0
            about = About(name, size, pieces, nonces[NONCE_BYTES * place : NONCE_BYTES * (place + 1)])
            objects.append(_Whole(place, about, pieces + 1))
        for frame_class, objects in by_class.items():
            pool = self._mapped.pool(frame_class, self._root if self._publishes else b"")
            limit = min(batch_objects(frame_class.page_tokens), max(1, BATCH_BYTES // frame_class.page_bytes))
            batch: list[_Whole] = []
            room = limit
            for each in objects:
                if each.pages > limit:
                    continue  # its pieces are sent on their own, request after request
                if each.pages > room:
                    yield pool, batch
                    batch, room = [], limit
                batch.append(each)
                room -= each.pages
            if batch:
                yield pool, batch

    def _copied(self, pool: GrantPool, objects: list[_Whole]) -> _Sealing | None:
        """Copy as many of these objects as there are frames for. Returns None if there are no frames."""
        pages = sum([each.pages for each in objects])
        frames = pool.take_granted(pages, Purpose(self._root), self._mapped.timeout_s)
        if len(frames) < pages:
            room, all_objects, objects = len(frames), objects, []
            for each in all_objects:
                if each.pages <= room:
                    objects.append(each)
                    room -= each.pages
            used = len(frames) - room
            frames, spare = frames[:used], frames[used:]
            pool.add(spare)
            if not objects:
                return None
        try:
            if failpoint.ACTIVE:
                failpoint.hit("client.granted")
            with self._mapped.channel.copies:
                self._copy(objects, frames)
            return _Sealing(pool, objects, frames, self._body(pool.frame_class, objects, frames))
        except BaseException:
            pool.forfeit(frames)
            raise

    def _copy(self, objects: list[_Whole], frames: list[Address]) -> None:
        pages: list[Rows] = []
        now_ns = time.monotonic_ns()
        for extent, frame, i, j in frames_of(self._mapped, frames):
            pages.extend(extent.pages[frame : frame + j - i])
            extent.last_use[frame : frame + j - i] = now_ns
        at = 0
        for place, about, count in objects:
            source = self._sources[place]
            if count == 1 and len(source.parts) == 1:
                copy(pages[at][: about.value_bytes], source.parts[0])
            else:
                for page, row in enumerate(pages[at : at + count]):
                    source.read(page * row.size, row)
            at += count
            if failpoint.ACTIVE:
                failpoint.hit("client.copied")

    def _body(self, frame_class: FrameClass, objects: list[_Whole], frames: list[Address]) -> tuple[bytes, ...]:
        """Return the identity rows of the objects' pages, and the addresses that their heads replace."""
        root, width, keys = self._root, frame_class.page_tokens, self._keys
        rows: list[bytes] = []
        replaced: list[bytes] = []
        for place, about, _ in objects:
            if about.pieces:
                rows.append(about.piece_keys(root, width).identity_bytes)
                replaced.append(_NOTHING * about.pieces)
            rows.append(about.row(root, width, keys[place]))
            replaced.append(self._replaced[place] or _NOTHING)
        return pack_addresses(frames), *rows, *replaced

    def _publish(self, sealing: _Sealing) -> bool:
        """Publish these objects in the log: they are found from now on. Returns False if they must be sent as a request
        instead: the log is full."""
        publisher, mapped = self._mapped.channel.publisher, self._mapped
        if publisher is None:
            return False
        count, number = len(sealing.addresses), sealing.pool.class_number
        request = encode(Op.SEAL_OBJECTS, 0, count=count, a=number, flags=NO_REPLY, body=sealing.body)
        if not publisher.publish(request, [self._keys[each.place] for each in sealing.objects], mapped.header):
            return False
        if failpoint.ACTIVE:
            failpoint.hit("client.published")
        for each in sealing.objects:
            self._stored[each.place] = True
        mapped.counters.put(mapped.row(sealing.pool.frame_class), count)
        return True

    def _request(self, sealing: _Sealing) -> PendingReply:
        count, number = len(sealing.addresses), sealing.pool.class_number
        reply = self._mapped.channel.request(Op.SEAL_OBJECTS, count=count, a=number, body=sealing.body)
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")
        return reply

    def _settle(self, sealing: _Sealing) -> list[Address]:
        """Wait for the outcome of a request, and return the frames that are still ours. The request is sent once more
        if the daemon ended before it answered."""
        assert sealing.reply is not None
        count, again = len(sealing.addresses), False
        try:
            message = sealing.reply.result()
        except NodeUnavailable:
            again = True
            message = self._request(sealing).result()
        statuses = bytes(message.body[:count])
        back, stale = list[Address](), list[Address]()
        at = sealed = 0
        for each in sealing.objects:
            addresses, status = sealing.addresses[at : at + each.pages], statuses[at]
            at += each.pages
            head = addresses[-1]
            if status == _OK or (again and self._word(head) == word_of(head.generation, FrameState.SEALED)):
                self._stored[each.place] = True
                sealed += each.pages
                continue
            if status == _PRESENT and not self._replace:
                self._stored[each.place] = False
            # The record counts, not what the status implies. But a frame that the node does not know as ours is never
            # written again, and all frames of an object have one status.
            ours = [address for address in addresses if still_ours(address, self._word(address))]
            (stale if status == _STALE else back).extend(ours)
        sealing.pool.forfeit(stale)
        self._mapped.counters.put(self._mapped.row(sealing.pool.frame_class), sealed)
        return back

    def _word(self, address: Address) -> int:
        extent = self._mapped.dram.extent(address.extent)
        return int(extent.words[address.frame]) if extent is not None else 0
