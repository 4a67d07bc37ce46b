"""Answers to other nodes about opaque objects of this node: OBJECTS, FORGET and KEYS (see ``wire.object_messages``).

Values in memory are sent from their frames: the kernel copies them, and after that the frames' generations are compared
again. Other values are read page by page into memory of this process, a few MiB at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from kvstore.client.buffers import Rows
from kvstore.client.local.frame_copies import PageFrame
from kvstore.client.local.index_lookup import lost_members
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.object_batches import DramHeads, ProvenHead, find_lower_heads, find_pieces
from kvstore.client.local.objects import LocalObjects, bury
from kvstore.client.local.stamps import wall_ns
from kvstore.client.local.store import LocalStore
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.cluster.data_connection import Buffer, Exchange
from kvstore.device.host_memory import empty
from kvstore.errors import InvalidRequest, TooManyCalls
from kvstore.limits import ThreadShares
from kvstore.model.objects import HEAD_TAG, NO_GROUP, key_hash, object_root, pieces_of, stamp_of
from kvstore.model.replica import EXTRA, STAMPED, Status
from kvstore.model.tombstones import TOMBSTONE_S, Tombstone
from kvstore.node.cluster.page_handlers import NVME_BYTES, NVME_WAIT_S, SendWatch
from kvstore.wire.data import RANGE_BYTES, FrameKind
from kvstore.wire.object_messages import (
    NAMES_MAX,
    NamesState,
    ObjectFacts,
    ObjectPart,
    ObjectsRequest,
    pack_forgotten,
    pack_heads,
    pack_names,
    pack_parts,
    page_sum,
    unpack_keys,
    unpack_objects,
)

BURY_S: Final = 2.0  # for the daemon to delete up to 512 objects
AHEAD_MAX_NS: Final = 600 * 10**9  # stamps of other machines may be this far ahead of this machine's clock
_STAMPED_BIT: Final = STAMPED << 48
_NONCE: Final = slice(EXTRA.start + len(HEAD_TAG), EXTRA.stop)


class ObjectsHandler:
    """The handler of OBJECTS of one node, for all threads.

    Args:
        below: the turns at lower tiers. Replies about pages take turns from it too.
    """

    def __init__(self, node: LocalNode, below: ThreadShares) -> None:
        self._node = node
        self._store = LocalStore(node)
        self._below = below

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """Send the facts and the values. Raises InvalidRequest, PermissionDenied."""
        request = unpack_objects(body)
        exchange.caller.check_salt(request.salt)
        mapped, count = self._node.mapped(), len(request.names)
        if mapped is None:
            exchange.reply(FrameKind.HEADS, pack_heads([None] * count))
            exchange.reply(FrameKind.VALID, bytes(count))
            return
        reply = _Reply(exchange, request, mapped, self._store, self._below)
        exchange.reply(FrameKind.HEADS, pack_heads(reply.facts))
        reply.send()
        exchange.reply(FrameKind.VALID, bytes(reply.valid))


Bury = Callable[[Exchange, list[Tombstone]], None]
"""Keeps tombstones in the part of the directory that this data server owns."""


class ForgetHandler:
    """The handler of FORGET of one node, for all threads. Tombstones are kept by the daemon, and by the directory even
    if the daemon does not answer.

    Args:
        bury: see ``Bury``.
        below: as for ``ObjectsHandler``.
    """

    def __init__(self, node: LocalNode, bury: Bury, below: ThreadShares) -> None:
        self._node = node
        self._bury = bury
        self._store = LocalStore(node)
        self._below = below

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """Delete older objects. Raises InvalidRequest, PermissionDenied, and Unavailable if the daemon does not
        answer."""
        request = unpack_objects(body)
        exchange.caller.check_salt(request.salt)
        if max(request.limits) > wall_ns() + AHEAD_MAX_NS:
            raise InvalidRequest("stamps", f"must not be in the future (got {max(request.limits)})")
        root, until_ns = object_root(request.salt), time.monotonic_ns() + TOMBSTONE_S * 10**9
        positions = [at for at, stamp in enumerate(request.limits) if stamp]
        keys = [key_hash(root, request.names[at]) for at in positions]
        tombstones = [
            Tombstone(key, root, request.limits[at], until_ns) for at, key in zip(positions, keys, strict=True)
        ]
        deleted = [False] * len(request.names)
        if tombstones:
            self._bury(exchange, tombstones)
            for at, status in zip(positions, bury(self._node, tombstones, BURY_S), strict=True):
                deleted[at] = status in (Status.OK, Status.BUSY)  # BUSY: the daemon deletes it soon
        mapped, stamps = self._node.mapped(), [0] * len(request.names)
        if mapped is not None:
            no_values = replace(request, limits=[0] * len(request.names))
            facts = _Reply(exchange, no_values, mapped, self._store, self._below).facts
            stamps = [stamp_of(its.nonce) if its is not None else 0 for its in facts]
        exchange.reply(FrameKind.FORGOTTEN, pack_forgotten(deleted, stamps))


class KeysHandler:
    """The handler of KEYS of one node, for all threads."""

    def __init__(self, node: LocalNode) -> None:
        self._store = LocalStore(node)

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """Send the keys that begin with the prefix, at most ``NAMES_MAX``. Raises InvalidRequest, PermissionDenied."""
        salt, prefix = unpack_keys(body)
        exchange.caller.check_salt(salt)
        count, state = 0, NamesState.COMPLETE
        for names in self._store.names_in_steps(salt, prefix):
            part = names[: NAMES_MAX - count]
            count += len(part)
            for packed in pack_names(part, NamesState.CONTINUES):
                exchange.reply(FrameKind.NAMES, packed)
            if count == NAMES_MAX:
                state = NamesState.CUT
                break
        exchange.reply(FrameKind.NAMES, *pack_names([], state))


class _Reply:
    """The reply to one OBJECTS. The constructor finds the objects.

    Attributes:
        facts: for each object, what HEADS says about it.
        valid: for each object, what VALID says about it.
    """

    def __init__(
        self,
        exchange: Exchange,
        request: ObjectsRequest,
        mapped: MappedNode,
        store: LocalObjects,
        below: ThreadShares,
    ) -> None:
        self.facts: list[ObjectFacts | None] = [None] * len(request.names)
        self.valid = bytearray(len(request.names))
        self._request = request
        self._mapped, self._store, self._below = mapped, store, below
        self._watch = SendWatch(exchange)
        self._root = object_root(request.salt)
        self._dram = dram = DramHeads(mapped, self._root, request.names)
        self._lower: dict[int, ProvenHead] = {}
        self._find_in_dram()
        missing = [at for at, facts in enumerate(self.facts) if facts is None and at not in dram.other]
        if missing and mapped.lower:
            self._find_below(missing)

    def _find_in_dram(self) -> None:
        """Note the facts about objects whose heads are in DRAM. Skip a head that has changed since it was proven, or
        whose record is damaged."""
        dram = self._dram
        for frames in dram.frames:
            nonces = frames.rows[:, _NONCE]
            for row, (position, frame) in enumerate(zip(frames.positions, frames.frames, strict=True)):
                head = dram.heads[position]
                if head is None or head[1] != frame:
                    continue
                size, page_bytes = head[2], frames.extent.page_bytes
                pieces = dram.large[position][0] if position in dram.large else 0
                if pieces == pieces_of(size, page_bytes):
                    group = dram.groups.get(position, NO_GROUP)
                    self.facts[position] = ObjectFacts(size, page_bytes, nonces[row].tobytes(), group)
            for position in frames.changed():
                self.facts[position] = None
        self.valid[:] = bytes(facts is not None for facts in self.facts)

    def _find_below(self, missing: list[int]) -> None:
        """Note the facts about objects whose heads are in lower tiers, if a turn comes in time."""
        try:
            with self._below.turn(self._watch.caller, NVME_WAIT_S, self._watch):
                heads = find_lower_heads(self._mapped, self._root, self._request.names, self._dram.keys, missing)
        except TooManyCalls:  # these objects are a miss; this server is alive
            return
        for position, head in heads.items():
            if head.about.is_whole(head.frame_class.page_bytes):
                self._lower[position] = head
                self._note(position, head)

    def _note(self, position: int, head: ProvenHead) -> None:
        about = head.about
        self.facts[position] = ObjectFacts(about.value_bytes, head.frame_class.page_bytes, about.nonce, about.group)
        self.valid[position] = 1

    def send(self) -> None:
        """Send the values that are within their limits, first those in memory. Afterwards ``valid`` says which are
        whole."""
        limits, dram = self._request.limits, self._dram
        to_send = [at for at, facts in enumerate(self.facts) if facts is not None and facts.value_bytes <= limits[at]]
        remaining = [at for at in to_send if at in self._lower]
        for group in self._groups([at for at in to_send if at not in self._lower]):
            large = {at: dram.large[at] for at in group if at in dram.large}
            frames, pieces = find_pieces(self._mapped, self._root, self._request.names, dram, large)
            in_dram = [at for at in group if at not in large or at in pieces]
            remaining += [at for at in group if at in large and at not in pieces]
            if in_dram:
                self._send_frames(in_dram, pieces)
            chosen, now_ns = set(in_dram), time.monotonic_ns()
            for gathered in (*frames, *dram.frames):
                for position in chosen.intersection(gathered.changed()):
                    self.valid[position] = 0
            for gathered in frames:
                gathered.extent.last_use[gathered.frame_array] = now_ns
            for position in in_dram:
                head = dram.heads[position]
                assert head is not None, "a value that is sent from memory has a proven head"
                head[0].last_use[head[1]] = now_ns
        for position in remaining:
            self._send_below(position)
        members = dram.members | {at: head.member for at, head in self._lower.items() if head.member is not None}
        if members and not all(self.valid):
            for position in lost_members(self._mapped, members):
                self.valid[position] = 0  # the group left in the meantime: none of the members is sent

    def _groups(self, positions: list[int]) -> Iterator[list[int]]:
        """Yield groups of objects that are sent together: at most ``RANGE_BYTES``, or one object."""
        group, size = list[int](), 0
        for position in positions:
            facts = self.facts[position]
            assert facts is not None, "only values that were found are sent"
            if group and size + facts.value_bytes > RANGE_BYTES:
                yield group
                group, size = [], 0
            group.append(position)
            size += facts.value_bytes
        if group:
            yield group

    def _send_frames(self, positions: list[int], pieces: dict[int, list[PageFrame]]) -> None:
        """Send values from their frames."""
        parts, sums, buffers = list[ObjectPart](), list[int](), list[Buffer]()
        for position in positions:
            head, facts = self._dram.heads[position], self.facts[position]
            assert head is not None and facts is not None, "a value that is sent from memory has a proven head"
            parts.append(ObjectPart(position, 0, facts.pages))
            for extent, frame in pieces.get(position, ()):
                page = extent.views[frame]
                sums.append(_stored_sum(extent, frame, page))
                buffers.append(page.data)
            extent, frame, _ = head
            start, stop = facts.page_range(facts.pages - 1, 1)
            page = extent.views[frame, : stop - start]
            sums.append(_stored_sum(extent, frame, page))
            buffers.append(page.data)
        self._watch.reply(FrameKind.PARTS, pack_parts(parts, sums), *buffers)

    def _send_below(self, position: int) -> None:
        """Send a value that has pages which are not in DRAM."""
        facts, head = self.facts[position], self._lower.get(position)
        assert facts is not None, "only values that were found are sent"
        if head is None:
            head = self._store.find_head(self._request.salt, self._request.names[position])
        self.valid[position] = 0
        if head is None or head.about.nonce != facts.nonce:
            return  # it was deleted or replaced in the meantime
        try:
            with self._below.turn(self._watch.caller, NVME_WAIT_S, self._watch):
                self.valid[position] = self._send_pages(position, head, facts)
        except TooManyCalls:
            return

    def _send_pages(self, position: int, head: ProvenHead, facts: ObjectFacts) -> bool:
        read = self._store.page_reader(self._mapped, self._request.salt, head)
        step = max(1, NVME_BYTES // facts.page_bytes)
        memory = empty((min(step, facts.pages), facts.page_bytes))
        for first in range(0, facts.pages, step):
            count = min(step, facts.pages - first)
            if not read(first, memory[:count]):
                return False
            start, stop = facts.page_range(first, count)
            rows = [row[: stop - start - at * facts.page_bytes] for at, row in enumerate(memory[:count])]
            sums = [page_sum(row) for row in rows]
            data = memory.reshape(-1)[: stop - start].data
            self._watch.reply(FrameKind.PARTS, pack_parts([ObjectPart(position, first, count)], sums), data)
        return True


def _stored_sum(extent: MappedExtent, frame: int, page: Rows) -> int:
    """Return the checksum of a page: the stored one if it covers all of ``page``, else a new one."""
    if page.size == extent.page_bytes and int(extent.info[frame]) & _STAMPED_BIT:
        return int(extent.checksums[frame, 0])
    return page_sum(page)
