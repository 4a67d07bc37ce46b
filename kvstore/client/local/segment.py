"""LocalSegment: memory of this process whose pages the local node indexes, and which other processes of the machine
read."""

from __future__ import annotations

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

ANSWER_S: Final = 0.25  # wait for a node that needs a message because the log is full
SILENCE_NS: Final = 1_000_000_000  # pause of messages to a node that did not answer
CLOSE_S: Final = 1.0


class LocalSegment:
    """One segment, from ``mount`` until ``close``, or until this process or its session ends. Threads may share it.

    This process owns the pages: it writes them, and decides which stay. A frame's life::

        free ──write, publish──> readable by all ──retire──> no new reader; free once the last reader is done

    Only full pages are published, after their bytes are written. A published frame is not written into. While the
    node's daemon is down, pages can be published; they are found when it is back.

    Attributes:
        number: the node's number for the segment.
        memory: uint8, to be written into; empty if the caller gave memory to ``mount``.
        pages: the memory as ``[frames, page_bytes]``; empty if it has strides.
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
        self._retired: dict[int, int] = {}  # frame -> when it was retired
        self._closed = False
        self._silent_ns = 0  # until then only the log is used
        self.number = table.number
        self.memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.pages: npt.NDArray[np.uint8] = np.empty((0, layout.page_bytes), np.uint8)

    @property
    def frames(self) -> int:
        """The number of frames."""
        return self._table.frames

    def publish(self, keys: Keys, frames: Sequence[int]) -> bool:
        """Publish these consecutive pages of a chain, which are in these frames, to every process of the machine.

        Returns whether the node was told. A node that is down finds them when it starts.

        Raises:
            InvalidRequest: keys are of another layout, or not as many as frames; a frame is named twice, does not
                exist, or is not free. Nothing was published.
            NodeUnavailable: the segment is closed, its session was renewed, or the node was recreated.
        """
        frames = [int(frame) for frame in frames]
        with self._lock:
            self._check(keys, frames)
            keys = self._mapped.in_pool(keys)
            above = keys.above
            if above is None:
                raise InvalidRequest("keys", "must be of a chain that is known from its root on")
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
        """Let no reader begin to read these frames' pages. Returns the frames that are free, which may be written into.
        The others are being read by another process; call again, for at most a fifth of a second.

        Raises:
            InvalidRequest: a frame does not exist.
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
        """Make the node forget the segment, so that others do not read it any more. May be called twice; the memory
        stays as long as this process uses it."""
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
            except (Unavailable, InvalidRequest):  # the node learns it when the session ends
                return

    def _is_read(self, frame: int) -> bool:
        since_ns = self._retired.get(frame)
        return since_ns is not None and self._table.is_held(frame, since_ns)

    def _check(self, keys: Keys, frames: list[int]) -> None:
        self._node.check_open()
        if self._closed or self._mapped.channel.ended:
            raise NodeUnavailable(f"{self._node.name}: the segment is closed, or its session has ended: mount again")
        if keys.page_tokens != self._layout.page_tokens:
            raise InvalidRequest("keys", "must be of the segment's layout")
        if not frames or len(keys) != len(frames) or len(set(frames)) != len(frames):
            raise InvalidRequest("frames", f"must be {len(keys)} different frames, one per key")
        self._check_frames(frames)
        taken = [frame for frame in frames if int(self._table.words[frame])]
        if taken:
            raise InvalidRequest("frames", f"must be free: retire frame {taken[0]} first")

    def _check_frames(self, frames: list[int]) -> None:
        for frame in frames:
            if not 0 <= frame < self.frames:
                raise InvalidRequest("frames", f"must be below {self.frames} (got {frame})")

    def _tell(self, op: Op, count: int, body: tuple[bytes, ...]) -> bool:
        """Tell the node through the log, or with a message if the log is full. Returns whether that was done: a node
        that is down finds the records at its next start, and is told of a frame again when the frame is used again."""
        channel = self._mapped.channel
        publisher = channel.publisher
        request = encode(op, 0, count=count, a=self.number, flags=NO_REPLY, body=body)
        try:
            if publisher is not None and publisher.publish(request, [], self._mapped.header):
                return True
            if time.monotonic_ns() >= self._silent_ns:
                channel.request(op, count=count, a=self.number, body=body, timeout_s=ANSWER_S).result()
                return True
        except (Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
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
        raise InvalidRequest("strides", f"must cover {layout.page_bytes} bytes of a page (got {strides.page_bytes})")
    if whole and strides.block < layout.page_bytes:
        raise InvalidRequest("memory", f"must have frames {layout.page_bytes} bytes apart (got {strides.block})")
    nbytes = strides.nbytes(frames)
    if memory is not None and memory.nbytes < nbytes:
        raise InvalidRequest("memory", f"must have at least {nbytes} bytes for {frames} frames (got {memory.nbytes})")
    mapped = node.writable()
    frame_class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
    message = mapped.exchange(Op.MOUNT, a=pack_class(frame_class), b=frames)
    if message.op != Status.OK:
        raise OutOfSpace(f"{node.name}: the node's limit of mounted memory is reached")
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
    """Create the shared memory of a segment. Raises OutOfSpace, OSError."""
    path = data_path(mapped.folder, number)
    mapped.folder.new_file(path, nbytes, b"")
    fd = open_plain(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
