"""``LocalSegment``: mounted memory of this process. The local node indexes its pages, and other processes on the
machine read them."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.errors import InvalidRequest, NodeUnavailable, OutOfSpace, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, fingerprint, span_start, spans_of
from kvstore.model.replica import Address, FrameClass, Status
from kvstore.model.shard import Strides
from kvstore.safe_files import open_plain
from kvstore.shm.mounted import MountedTable, data_path
from kvstore.tier.peer_memory import HOST, MountedMemory, SharedFrames
from kvstore.wire.control import BATCH_MAX, CHAINED, NO_REPLY, Op, encode, pack_addresses, pack_class

ANSWER_S: Final = 0.25  # longest wait for the node's reply, if the log is full and a message is needed
SILENCE_NS: Final = 1_000_000_000  # a node that did not answer gets no messages for this time
CLOSE_S: Final = 1.0  # longest wait for the node when the segment is closed


class LocalSegment:
    """A mounted segment, from ``mount`` until ``close``, or until this process or its session ends. Thread-safe.

    This process owns the pages: it writes them, and decides when they are removed. The states of a frame::

        free ──write, publish──> readable by all ──retire──> no new reader; free once the last reader is done

    A page is published once all its bytes are written, and its frame is not written again until it is free. Pages can
    be published while the node's daemon is down. They are found once the daemon is running again.

    Attributes:
        number: the number that the node gave the segment.
        memory: the segment's bytes, uint8, for writing; empty if the caller has passed memory to ``mount``.
        pages: the bytes as ``[frames, page_bytes]``; empty if the memory has strides.
    """

    def __init__(
        self, node: LocalNode, mapped: MappedNode, layout: Layout, table: MountedTable, memory: MountedMemory | None
    ) -> None:
        self._node = node
        self._mounted_memory = memory
        self._mapped = mapped
        self._layout = layout
        self._table = table
        self._lock = threading.Lock()
        self._generation_next = 1
        self._retired: dict[int, int] = {}  # when each frame was retired, in ns
        self._is_closed = False
        self._no_messages_until_ns = 0
        self.number = table.number
        self.memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self.pages: npt.NDArray[np.uint8] = np.empty((0, layout.page_bytes), np.uint8)

    @property
    def frames(self) -> int:
        """The number of frames."""
        return self._table.frames

    def publish(self, keys: Keys, frames: Sequence[int]) -> bool:
        """Publish consecutive pages of a chain, one in each of these frames, to all processes on the machine.

        Return whether the node was notified. A node that is down finds the pages when it starts.

        Raises:
            InvalidRequest: the keys have another layout or another number than the frames; or a frame is named twice,
                does not exist, or is not free. Nothing was published.
            NodeUnavailable: the segment is closed, its session was renewed, or the node was recreated.
        """
        frames = [int(frame) for frame in frames]
        with self._lock:
            self._check(keys, frames)
            keys = self._mapped.in_pool(keys)
            above = keys.above
            if above is None:
                raise InvalidRequest("keys", "must belong to a chain whose keys are known from the root on")
            position = len(above)
            previous_span = fingerprint(above[span_start(position - 1)]) if position else 0
            first, self._generation_next = self._generation_next, self._generation_next + len(frames)
            spans = spans_of(keys.hashes, position, previous_span)
            self._table.fill(frames, first, keys, position, spans)
            addresses = [Address(self.number, frame, first + i) for i, frame in enumerate(frames)]
            is_notified = True
            for start in range(0, len(frames), BATCH_MAX):
                part = slice(start, start + BATCH_MAX)
                head = keys.root + CHAINED.pack(position + start, spans[start - 1] if start else previous_span)
                body = (head, pack_addresses(addresses[part]), *keys.hashes[part])
                is_notified = self._notify(Op.PUBLISH, len(addresses[part]), body) and is_notified
            return is_notified

    def retire(self, frames: Sequence[int]) -> list[int]:
        """Retire the pages in these frames, so that no new reader can read them. Return the frames that are free, which
        may be written now.

        Other processes are still reading the other frames. Call again for these. They are free after at most a fifth of
        a second.

        Raises:
            InvalidRequest: a frame does not exist.
        """
        frames = [int(frame) for frame in frames]
        with self._lock:
            self._check_frames(frames)
            retired: list[Address] = []
            now_ns = time.monotonic_ns()
            for frame in frames:
                if frame not in self._retired and (generation := self._table.retire(frame)):
                    self._retired[frame] = now_ns
                    retired.append(Address(self.number, frame, generation))
            for start in range(0, len(retired), BATCH_MAX):
                part = retired[start : start + BATCH_MAX]
                self._notify(Op.RETRACT, len(part), (pack_addresses(part),))
            free = [frame for frame in frames if not self._is_read(frame)]
            for frame in free:
                self._retired.pop(frame, None)
                self._table.clear(frame)
            return free

    def close(self) -> None:
        """Unmount the segment, after which no process reads it. The memory stays as long as this process uses it. May
        be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._mapped.hbm.disown(self.number)
            if self._mounted_memory is not None:
                self._mounted_memory.withdraw()
            for frame in range(self.frames):
                self._table.clear(frame)
            try:
                self._mapped.exchange(Op.UNMOUNT, a=self.number, timeout_s=CLOSE_S)
            except (Unavailable, InvalidRequest):  # the node unmounts the segment when the session ends
                return

    def _is_read(self, frame: int) -> bool:
        """Return whether another process may still be reading a retired frame."""
        retired_ns = self._retired.get(frame)
        return retired_ns is not None and self._table.is_held(frame, retired_ns)

    def _check(self, keys: Keys, frames: list[int]) -> None:
        """Raise the errors of ``publish``."""
        self._node.check_open()
        if self._is_closed or self._mapped.channel.ended:
            raise NodeUnavailable(f"{self._node.name}: the segment is closed, or its session has ended: mount again")
        if keys.page_tokens != self._layout.page_tokens:
            raise InvalidRequest("keys", "must be of the segment's layout")
        if not frames or len(keys) != len(frames) or len(set(frames)) != len(frames):
            raise InvalidRequest("frames", f"must be {len(keys)} different frames, one per key")
        self._check_frames(frames)
        used = [frame for frame in frames if int(self._table.words[frame])]
        if used:
            raise InvalidRequest("frames", f"must be free: retire frame {used[0]} first")

    def _check_frames(self, frames: list[int]) -> None:
        for frame in frames:
            if not 0 <= frame < self.frames:
                raise InvalidRequest("frames", f"must be below {self.frames} (got {frame})")

    def _notify(self, op: Op, count: int, body: tuple[bytes, ...]) -> bool:
        """Notify the node through the log, or by a message if the log is full. Return False if neither was possible.

        A node that was not notified reads the records at its next start, or when it is notified after a frame is used
        again.
        """
        channel = self._mapped.channel
        publisher = channel.publisher
        request = encode(op, 0, count=count, a=self.number, flags=NO_REPLY, body=body)
        try:
            if publisher is not None:
                with channel.copies:
                    if publisher.publish(request, [], self._mapped.header):
                        return True
            if time.monotonic_ns() >= self._no_messages_until_ns:
                channel.request(op, count=count, a=self.number, body=body, timeout_s=ANSWER_S).result()
                return True
        except (Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
            self._no_messages_until_ns = time.monotonic_ns() + SILENCE_NS
        return False


def mount(
    node: LocalNode, layout: Layout, frames: int, memory: MountedMemory | None, strides: Strides | None
) -> LocalSegment:
    """Mount memory of this process. The arguments and errors are those of ``LocalStore.mount``."""
    is_contiguous = strides is None
    if strides is None:
        strides = Strides.whole(layout.page_bytes, memory.stride if memory is not None else layout.page_bytes)
    if strides.page_bytes != layout.page_bytes:
        raise InvalidRequest("strides", f"must cover {layout.page_bytes} bytes of a page (got {strides.page_bytes})")
    if is_contiguous and strides.block < layout.page_bytes:
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
        if is_contiguous:
            segment.pages = segment.memory.reshape(frames, layout.page_bytes)
        mapped.hbm.own(table, SharedFrames(segment.memory, table))
    return segment


def _shared(mapped: MappedNode, number: int, nbytes: int) -> mmap.mmap:
    """Create the shared memory of a segment. Raises OutOfSpace, OSError."""
    path = data_path(mapped.folder, number)
    mapped.folder.new_file(path, nbytes, b"")
    fd = open_plain(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)
