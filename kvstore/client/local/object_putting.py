"""ObjectsPut: several objects on their way into a node of this machine: copied into granted frames, and sealed many at
a time, each as a whole.

What cannot be put so is left to who puts one object after another, and says why an object is not stored: one that is
larger than a request may bring, one that gets no frames now, one that the node is busy with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore import failpoint
from kvstore.client.local.grants import GrantPool, Purpose, still_ours
from kvstore.client.local.node import Mapped
from kvstore.client.local.object_finding import find_heads
from kvstore.client.local.object_parts import copy_from, planned
from kvstore.client.local.put import BATCH_BYTES
from kvstore.client.scattered import Scattered
from kvstore.errors import NodeUnavailable
from kvstore.model.objects import About
from kvstore.model.replica import ADDRESS_BYTES, Address, FrameClass, FrameState, Status, word_of
from kvstore.rpc.base import PendingReply
from kvstore.rpc.control import Op, batch_objects, pack_addresses

_OK, _PRESENT, _STALE = int(Status.OK), int(Status.PRESENT), int(Status.STALE)
_NOTHING: Final = bytes(ADDRESS_BYTES)


class _Whole(NamedTuple):
    """An object to be put: where among the names it is, and how many pages it will have."""

    place: int
    about: About
    pages: int


@dataclass(slots=True)
class _Sealing:
    """Objects under one request, and their pages' frames in order. ``reply``: None until it is sent."""

    pool: GrantPool
    objects: list[_Whole]
    addresses: list[Address]
    body: tuple[bytes, ...]
    reply: PendingReply | None = None


class ObjectsPut:
    """One call's objects. ``stored`` is called once."""

    def __init__(
        self, mapped: Mapped, root: bytes, names: Sequence[bytes], sources: Sequence[Scattered], replace: bool
    ) -> None:
        self._mapped, self._root, self._replace = mapped, root, replace
        self._names, self._sources = names, sources
        self._replaced = find_heads(mapped, root, names)
        self._stored: list[bool | None] = [None] * len(names)

    def stored(self) -> list[bool | None]:
        """Put them; of each whether it is stored, by this put; None: that is still to be done.

        Raises:
            InvalidRequest: the node refuses what these requests say; some may be stored.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time; some may be stored.
        """
        under_way: deque[_Sealing] = deque()
        try:
            for pool, objects in self._requests():
                sealing = self._copied(pool, objects)
                if sealing is not None:
                    under_way.append(sealing)
                    sealing.reply = self._request(sealing)
            while under_way:
                back = self._settle(under_way[0])
                sealing = under_way.popleft()  # first: no frame is forfeited that the pool has again
                sealing.pool.add(back)
        except BaseException:
            for sealing in under_way:
                sealing.pool.forfeit(sealing.addresses)
            raise
        return self._stored

    def _requests(self) -> Iterator[tuple[GrantPool, list[_Whole]]]:
        """The objects that are to be put now, as many as one request takes at a time."""
        by_class: dict[FrameClass, list[_Whole]] = {}
        for place, (name, source) in enumerate(zip(self._names, self._sources, strict=True)):
            if self._replaced[place] is not None and not self._replace:
                self._stored[place] = False
                continue
            frame_class, about = planned(self._mapped, name, source.nbytes)
            by_class.setdefault(frame_class, []).append(_Whole(place, about, about.pieces + 1))
        for frame_class, objects in by_class.items():
            pool = self._mapped.pool(frame_class)
            limit = min(batch_objects(frame_class.page_tokens), max(1, BATCH_BYTES // frame_class.page_bytes))
            some: list[_Whole] = []
            left = limit
            for each in objects:
                if each.pages > limit:
                    continue  # its pieces go by themselves, request after request
                if each.pages > left:
                    yield pool, some
                    some, left = [], limit
                some.append(each)
                left -= each.pages
            if some:
                yield pool, some

    def _copied(self, pool: GrantPool, objects: list[_Whole]) -> _Sealing | None:
        """Copy these into frames; as many of them as there are frames for. None: of none."""
        wanted = sum([each.pages for each in objects])
        frames = pool.take_granted(wanted, Purpose(self._root), self._mapped.timeout_s)
        if len(frames) < wanted:
            left, wished, objects = len(frames), objects, []
            for each in wished:
                if each.pages <= left:
                    objects.append(each)
                    left -= each.pages
            used = len(frames) - left
            frames, spare = frames[:used], frames[used:]
            pool.add(spare)
            if not objects:
                return None
        try:
            if failpoint.ACTIVE:
                failpoint.hit("client.granted")
            with self._mapped.channel.copies:
                at = 0
                for each in objects:
                    copy_from(self._sources[each.place], 0, self._mapped, frames[at : at + each.pages])
                    at += each.pages
                    if failpoint.ACTIVE:
                        failpoint.hit("client.copied")
            return _Sealing(pool, objects, frames, self._body(pool.frame_class, objects, frames))
        except BaseException:
            pool.forfeit(frames)
            raise

    def _body(self, frame_class: FrameClass, objects: list[_Whole], frames: list[Address]) -> tuple[bytes, ...]:
        """The identity rows of their pages, and what their heads replace."""
        root, width = self._root, frame_class.page_tokens
        rows: list[bytes] = []
        replaced: list[bytes] = []
        for each in objects:
            if each.about.pieces:
                rows.append(each.about.piece_keys(root, width).identity_bytes)
                replaced.append(_NOTHING * each.about.pieces)
            rows.append(each.about.head_keys(root, width).identity_bytes)
            replaced.append(self._replaced[each.place] or _NOTHING)
        return pack_addresses(frames), *rows, *replaced

    def _request(self, sealing: _Sealing) -> PendingReply:
        count, number = len(sealing.addresses), sealing.pool.class_number
        reply = self._mapped.channel.request(Op.SEAL_OBJECTS, count=count, a=number, body=sealing.body)
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")
        return reply

    def _settle(self, sealing: _Sealing) -> list[Address]:
        """Wait for what became of these; the frames that are still ours. Sent again once, where the daemon went away
        before it answered."""
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
            # What the record says counts, not what the status implies; but a frame that the node does not know as ours
            # is never written again, and all frames of an object have one status.
            ours = [address for address in addresses if still_ours(address, self._word(address))]
            (stale if status == _STALE else back).extend(ours)
        sealing.pool.forfeit(stale)
        self._mapped.counters.put(self._mapped.row(sealing.pool.frame_class), sealed)
        return back

    def _word(self, address: Address) -> int:
        extent = self._mapped.dram.extent(address.extent)
        return int(extent.words[address.frame]) if extent is not None else 0
