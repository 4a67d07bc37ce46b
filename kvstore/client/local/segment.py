"""LocalSegment: memory of this process whose pages the node of this machine knows, and its other processes read."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.local.node import LocalNode, Mapped
from kvstore.errors import InvalidRequest, NodeUnavailable, OutOfSpace, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, fingerprint, span_start, spans_of
from kvstore.model.replica import Address, FrameClass, Status
from kvstore.model.shard import Strides
from kvstore.safe_files import open_plain
from kvstore.shm.mounted import MountedTable, data_path
from kvstore.tier.peer_memory import HOST, MountedMemory, SharedFrames
from kvstore.wire.control import BATCH_MAX, CHAINED, NO_REPLY, Op, encode, pack_addresses, pack_class

ANSWER_S: Final = 0.25  # for a node that has to be told, the log being full
SILENCE_NS: Final = 1_000_000_000  # one that did not answer is not told so again before that
CLOSE_S: Final = 1.0


class LocalSegment:
    """One segment, from ``mount`` until ``close``, or until this process or its session ends. Threads may share it.

    The pages are this process's own: it writes them, and decides what stays. A frame's life::

        free ──write, publish──> readable by all ──retire──> nobody begins to read; free once nobody reads

    Only full pages are published, after their bytes are there. A frame that is published is not written into. Where the
    node has no daemon just now, what is published is found when there is one again.

    Attributes:
        number: what the node calls it.
        memory: uint8, to be written into; empty where it was given to ``mount``.
        pages: the same as ``[frames, page_bytes]``; empty where it has strides.
    """

    def __init__(
        self, node: LocalNode, mapped: Mapped, layout: Layout, table: MountedTable, given: MountedMemory | None
    ) -> None:
        self._node = node
        self._given = given
        self._mapped = mapped
        self._layout = layout
        self._table = table
        self._lock = threading.Lock()
        self._generation = 1  # the next one
        self._retired: dict[int, int] = {}  # frame -> since when
        self._closed = False
        self._silent_ns = 0  # until then the node is told by the log alone
        self.number = table.number
        self.memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.pages: npt.NDArray[np.uint8] = np.empty((0, layout.page_bytes), np.uint8)

    @property
    def frames(self) -> int:
        """How many it has."""
        return self._table.frames

    def publish(self, keys: Keys, frames: Sequence[int]) -> bool:
        """These consecutive pages of a chain are in these frames from now on, for every process of the machine.

        Returns whether the node was told. Where it was not, being away, it finds them when it starts.

        Raises:
            InvalidRequest: keys of another layout, or as many frames as keys are needed; a frame is named twice, is not
                there, or is not free. Nothing was published.
            NodeUnavailable: the segment is closed, its session was renewed, or the node was made anew.
        """
        frames = [int(frame) for frame in frames]
        with self._lock:
            self._check(keys, frames)
            keys = self._mapped.in_pool(keys)
            above = keys.above
            if above is None:
                raise InvalidRequest("keys", "must be of a chain that is known from its root")
            position = len(above)
            before = fingerprint(above[span_start(position - 1)]) if position else 0
            first, self._generation = self._generation, self._generation + len(frames)
            spans = spans_of(keys.hashes, position, before)
            self._table.fill(frames, first, keys, position, spans)
            addresses = [Address(self.number, frame, first + i) for i, frame in enumerate(frames)]
            told = True
            for start in range(0, len(frames), BATCH_MAX):
                some = slice(start, start + BATCH_MAX)
                head = keys.root + CHAINED.pack(position + start, spans[start - 1] if start else before)
                body = (head, pack_addresses(addresses[some]), *keys.hashes[some])
                told = self._tell(Op.PUBLISH, len(addresses[some]), body) and told
            return told

    def retire(self, frames: Sequence[int]) -> list[int]:
        """Nobody begins to read these frames' pages. Returns the frames that are free: they may be written into. The
        others are being read by another process; ask again, for a fifth of a second at most.

        Raises:
            InvalidRequest: a frame is not there.
        """
        frames = [int(frame) for frame in frames]
        with self._lock:
            self._check_frames(frames)
            gone: list[Address] = []
            now_ns = time.monotonic_ns()
            for frame in frames:
                if frame not in self._retired and (generation := self._table.retire(frame)):
                    self._retired[frame] = now_ns
                    gone.append(Address(self.number, frame, generation))
            for start in range(0, len(gone), BATCH_MAX):
                some = gone[start : start + BATCH_MAX]
                self._tell(Op.RETRACT, len(some), (pack_addresses(some),))
            free = [frame for frame in frames if not self._is_read(frame)]
            for frame in free:
                self._retired.pop(frame, None)
                self._table.clear(frame)
            return free

    def close(self) -> None:
        """The node forgets the segment, and others read it no more. Twice is fine; the memory stays as long as it is
        used here."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._mapped.hbm.disown(self.number)
            if self._given is not None:
                self._given.withdraw()
            for frame in range(self.frames):
                self._table.clear(frame)
            try:
                self._mapped.exchange(Op.UNMOUNT, a=self.number, timeout_s=CLOSE_S)
            except (Unavailable, InvalidRequest):  # it learns that when our session ends
                return

    def _is_read(self, frame: int) -> bool:
        since_ns = self._retired.get(frame)
        return since_ns is not None and self._table.is_held(frame, since_ns)

    def _check(self, keys: Keys, frames: list[int]) -> None:
        self._node.check_open()
        if self._closed or self._mapped.channel.ended:
            raise NodeUnavailable(f"{self._node.name}: the segment is closed, or its session has ended: mount again")
        if keys.page_tokens != self._layout.page_tokens:
            raise InvalidRequest("keys", "are of another layout")
        if not frames or len(keys) != len(frames) or len(set(frames)) != len(frames):
            raise InvalidRequest("frames", f"{len(keys)} pages need as many different frames, at least one")
        self._check_frames(frames)
        taken = [frame for frame in frames if int(self._table.words[frame])]
        if taken:
            raise InvalidRequest("frames", f"frame {taken[0]} has a page: retire it first")

    def _check_frames(self, frames: list[int]) -> None:
        for frame in frames:
            if not 0 <= frame < self.frames:
                raise InvalidRequest("frames", f"{frame} is not below {self.frames}")

    def _tell(self, op: Op, count: int, body: tuple[bytes, ...]) -> bool:
        """By the log; where that has no room by a message. Whether it was told: a node that is down finds the records
        at its next start, and of a frame it hears again when that is used again."""
        channel = self._mapped.channel
        publisher = channel.publisher
        request = encode(op, 0, count=count, a=self.number, flags=NO_REPLY, body=body)
        try:
            if publisher is not None and publisher.publish(request, [], self._mapped.header):
                if publisher.unheard:
                    with contextlib.suppress(Unavailable):  # it looks there by itself, later
                        channel.request(Op.DRAIN, flags=NO_REPLY, timeout_s=0.0)
                return True
            if time.monotonic_ns() >= self._silent_ns:
                channel.request(op, count=count, a=self.number, body=body, timeout_s=ANSWER_S).result()
                return True
        except (Unavailable, InvalidRequest):  # InvalidRequest: the store was closed meanwhile
            self._silent_ns = time.monotonic_ns() + SILENCE_NS
        return False


def mount(
    node: LocalNode, layout: Layout, frames: int, memory: MountedMemory | None, strides: Strides | None
) -> LocalSegment:
    """See ``LocalStore.mount``."""
    whole = strides is None
    if strides is None:
        strides = Strides.whole(layout.page_bytes, memory.stride if memory is not None else layout.page_bytes)
    if strides.page_bytes != layout.page_bytes:
        raise InvalidRequest("strides", f"have {strides.page_bytes} bytes of a page, not {layout.page_bytes}")
    if whole and strides.block < layout.page_bytes:
        raise InvalidRequest("memory", f"has frames {strides.block} bytes apart, pages are {layout.page_bytes} long")
    nbytes = strides.nbytes(frames)
    if memory is not None and memory.nbytes < nbytes:
        raise InvalidRequest("memory", f"{memory.nbytes} bytes hold no {frames} frames, which take {nbytes}")
    mapped = node.writable()
    frame_class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
    message = mapped.exchange(Op.MOUNT, a=pack_class(frame_class), b=frames)
    if message.op != Status.OK:
        raise OutOfSpace(f"{node.name}: the node knows as much mounted memory as it may")
    number, kind = message.a, memory.kind if memory is not None else HOST
    parts = mapped.incarnation, number, mapped.channel.session, frame_class, frames, strides, kind
    try:
        shared = _shared(mapped, number, nbytes) if memory is None else None
        export = memory.export(mapped.folder, number) if memory is not None else b""
        table = MountedTable.create(mapped.folder, *parts, export)
    except (OSError, OutOfSpace, Unavailable):
        if memory is not None:
            memory.withdraw()
        mapped.exchange(Op.UNMOUNT, a=number)
        raise
    segment = LocalSegment(node, mapped, layout, table, memory)
    if memory is not None:
        try:
            mapped.hbm.own(table, memory.here(table))
        except Unavailable:
            segment.close()
            raise
    elif shared is not None:
        segment.memory = np.frombuffer(shared, np.uint8)
        if whole:
            segment.pages = segment.memory.reshape(frames, layout.page_bytes)
        mapped.hbm.own(table, SharedFrames(segment.memory, table))
    return segment


def _shared(mapped: Mapped, number: int, nbytes: int) -> mmap.mmap:
    """New shared memory of a segment. Raises OutOfSpace, OSError."""
    path = data_path(mapped.folder, number)
    mapped.folder.new_file(path, nbytes, b"")
    fd = open_plain(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
