"""``GrantPool``: frames of one class that the node grants to this session ahead of need, so that a put need not wait
for frames."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np

from kvstore.client.local.publisher import Channel, PendingReply
from kvstore.client.prefix_cache import PendingPut
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, QuotaExceeded, Unavailable
from kvstore.model.replica import (
    ADDRESS,
    ADDRESS_BYTES,
    ADDRESS_DTYPE,
    Address,
    FrameClass,
    FrameState,
    Status,
    address_of,
)
from kvstore.wire.control import AHEAD, BATCH_MAX, NO_REPLY, Op, batch_pages, pack_addresses, pack_class

# A batch is copied while the node seals the batch before it. But a request wakes the node, often on the same core, and
# so takes as long as copying half a MiB. By measurement, 16 MiB is best for pages of 64 KiB to 2 MiB.
BATCH_BYTES = 16 << 20
AHEAD_FRAMES_MAX = 256  # frames in one pool
AHEAD_BYTES_MAX = 64 << 20  # bytes of the frames in one pool
POOLS_MAX = 256  # pools of one client. A node's own client serves all remote callers, whose pages may have any size
IDLE_S = 2.0  # a pool returns its frames if none was taken for this time
PUTS_UNREAD_MAX = 16  # asynchronous puts whose results have not been read
AHEAD_PUTS = 32  # a pool is filled with frames for this many puts like the last one, when half of them are left
OVER_QUOTA = "the tenant's quota is used up by pages that cannot be evicted"
BUSY_PAUSE_S = 0.002  # pause before another request to a node that is saving pages to free space

_RESERVED = int(FrameState.RESERVED)
_address = ADDRESS.unpack_from


class GrantedFrames(Sequence[Address]):
    """The addresses of granted frames, in the form of requests. Immutable; a slice copies 16 bytes per frame.

    Attributes:
        raw: the addresses, without gaps.
        runs: ``(extent, first frame, i, j)`` for each run ``[i:j]`` of consecutive frames of one extent.
    """

    __slots__ = ("raw", "runs")

    def __init__(self, raw: bytes, runs: tuple[tuple[int, int, int, int], ...]) -> None:
        self.raw = raw
        self.runs = runs

    @classmethod
    def of(cls, addresses: Iterable[Address]) -> GrantedFrames:
        """Return these addresses as ``GrantedFrames``, in the same order."""
        return cls.of_raw(pack_addresses(addresses))

    @classmethod
    def of_raw(cls, raw: bytes) -> GrantedFrames:
        """Return the addresses in ``raw`` as ``GrantedFrames``, in the same order."""
        count = len(raw) // ADDRESS_BYTES
        if count < 2:
            return cls(raw, ((*_address(raw)[:2], 0, 1),) if count else ())
        fields = np.frombuffer(raw, ADDRESS_DTYPE)
        places = fields["extent"].astype(np.int64) << 32 | fields["frame"]
        starts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist()]
        firsts = places[starts].tolist()
        stops = [*starts[1:], count]
        runs = [(at >> 32, at & 0xFFFFFFFF, i, j) for at, i, j in zip(firsts, starts, stops, strict=True)]
        return cls(raw, tuple(runs))

    @classmethod
    def ascending(cls, parts: Iterable[GrantedFrames]) -> GrantedFrames:
        """Return the addresses of all ``parts`` in ascending order."""
        runs = sorted([part[i:j] for part in parts for _, _, i, j in part.runs], key=lambda run: run.runs[0])
        return cls.of_raw(b"".join([run.raw for run in runs]))

    def split(self) -> list[GrantedFrames]:
        """Return each run as ``GrantedFrames`` of its own."""
        return [self[i:j] for _, _, i, j in self.runs]

    def __len__(self) -> int:
        return len(self.raw) // ADDRESS_BYTES

    def __iter__(self) -> Iterator[Address]:
        return map(address_of, ADDRESS.iter_unpack(self.raw))

    @overload
    def __getitem__(self, place: int) -> Address: ...
    @overload
    def __getitem__(self, place: slice) -> GrantedFrames: ...
    def __getitem__(self, place: int | slice) -> Address | GrantedFrames:
        if not isinstance(place, slice):
            return address_of(_address(self.raw, range(len(self))[place] * ADDRESS_BYTES))
        start, stop, step = place.indices(len(self))
        assert step == 1, "slices are consecutive"
        if start >= stop:
            return NO_FRAMES
        runs = [
            (extent, frame + max(start - i, 0), max(i - start, 0), min(j, stop) - start)
            for extent, frame, i, j in self.runs
            if i < stop and j > start
        ]
        return GrantedFrames(self.raw[start * ADDRESS_BYTES : stop * ADDRESS_BYTES], tuple(runs))


NO_FRAMES = GrantedFrames(b"", ())


class Purpose(NamedTuple):
    """The purpose of requested frames. It tells the node which pages it must not evict to free them.

    Attributes:
        before: the key of the page that is the parent of the put's next page. It is not evicted.
        since: where the records of this put begin in the session's slot of the log; 0 if nothing is published. The last
            page that this put has published is not evicted.
    """

    before: bytes
    since: int = 0


class GrantPool:
    """RESERVED frames without a key, into which this session may write. Thread-safe.

    The node grants a frame, ``take`` takes it from the pool, and its taker writes a page and seals it. If the page is
    stored already, the taker returns the frame with ``add``. The pool returns its frames to the node if none was taken
    for ``IDLE_S``. The frames also return with ``Channel.close`` and with the end of this process. If the state of a
    frame is unknown after a lost connection, ``forfeit`` gives it up, and it is never written again.

    A timer of the pool watches for unused frames. ``end`` stops it after the channel has ended.

    Args:
        root: the only root whose pages may be written into these frames, because they count for its tenant; empty for
            any root.
    """

    def __init__(self, frame_class: FrameClass, channel: Channel, root: bytes = b"") -> None:
        self.frame_class = frame_class
        self.root = root
        self.class_number = pack_class(frame_class)
        self.request_pages = batch_pages(frame_class.page_tokens, frame_class.layers)  # limit of pages in one request
        self.batch_pages = max(1, min(self.request_pages, BATCH_BYTES // frame_class.page_bytes))  # pages in one batch
        self.ahead_max = max(1, min(AHEAD_FRAMES_MAX, AHEAD_BYTES_MAX // frame_class.frame_bytes))
        self._channel = channel
        self._lock = threading.Lock()
        self.row = channel.counters.row(frame_class.page_bytes, frame_class.page_tokens)  # where new pages are counted
        self._free: list[GrantedFrames] = []  # runs of consecutive frames, ascending
        self._count = 0  # number of frames in all of them
        self._forfeited = bytearray()  # the addresses of frames to return to the node
        self._used_s = 0.0  # when frames were last taken
        self._timer: threading.Timer | None = None
        self._request_ahead: PendingReply | None = None  # a request for frames whose reply is not read
        self._unread: deque[PendingPut] = deque()
        self._late: list[PendingReply] = []  # requests without a reply at their deadline; the channel bounds them

    def __len__(self) -> int:
        return self._count

    @property
    def is_idle(self) -> bool:
        """True if the pool has no frame, and none is requested or being returned."""
        is_waiting = self._request_ahead is not None or self._timer is not None
        return not (self._free or self._forfeited or self._unread or self._late or is_waiting)

    def take(self, count: int) -> GrantedFrames:
        """Take up to ``count`` frames, and return them ascending. They come from the shortest run that has ``count``
        frames, or from the shortest runs if there is none.

        Therefore, long runs are kept for large puts. A put into one run is one copy, and its pages are evicted
        together.
        """
        if self._request_ahead is not None and self._count < count:
            self._read_request_ahead()
        with self._lock:
            self._used_s = time.monotonic()
            free, size = self._free, count * ADDRESS_BYTES
            best, best_bytes = -1, 0
            for place, run in enumerate(free):
                run_bytes = len(run.raw)
                if run_bytes >= size and (best < 0 or run_bytes < best_bytes):
                    best, best_bytes = place, run_bytes
            if best < 0:
                return self._take_short_runs(count)
            self._count -= count
            if best_bytes == size:
                return free.pop(best)
            raw, ((extent, frame, _, stop),) = free[best].raw, free[best].runs
            free[best] = GrantedFrames(raw[size:], ((extent, frame + count, 0, stop - count),))
            return GrantedFrames(raw[:size], ((extent, frame, 0, count),))

    def _take_short_runs(self, count: int) -> GrantedFrames:
        """Take up to ``count`` frames from the shortest runs. The caller holds ``_lock``."""
        parts: list[GrantedFrames] = []
        for run in sorted(self._free, key=len):
            if count:
                parts.append(run[:count])
                self._free.remove(run)
                if len(run) > count:
                    self._free.append(run[count:])
                count -= len(parts[-1])
        frames = GrantedFrames.ascending(parts)
        self._count -= len(frames)
        return frames

    def fill_ahead(self, used: int, purpose: Callable[[int], Purpose], page: int) -> None:
        """Request frames for further puts like the last one, which has used ``used`` frames, if too few remain. A later
        ``take`` reads the reply. ``purpose`` is called with ``page`` only if frames are requested."""
        remaining, frames_max = self._count, min(self.ahead_max, AHEAD_PUTS * used)
        is_enough = (remaining >= 2 * used and 2 * remaining >= frames_max) or remaining >= frames_max
        if is_enough:
            return
        with self._lock:
            if self._request_ahead is not None:
                return
            with contextlib.suppress(Unavailable):
                self._request_ahead = self._send_request(frames_max - remaining, purpose(page), AHEAD)
            if self._timer is None and self._request_ahead is not None:
                self._start_timer()

    def _read_request_ahead(self) -> None:
        with self._lock:
            reply, self._request_ahead = self._request_ahead, None
        if reply is not None:
            with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
                self.add(self.granted(reply))

    def _read_late(self) -> None:
        """Add the frames of replies that have arrived after their deadline."""
        with self._lock:
            late, self._late = self._late, []
        for reply in late:
            with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
                self.add(self.granted(reply))

    def add(self, frames: GrantedFrames) -> None:
        """Add frames that were granted, or that their taker has not sealed. Frames beyond ``ahead_max`` are returned to
        the node."""
        if not frames.raw:
            return
        with self._lock:
            frames = GrantedFrames.ascending([*self._free, frames])
            self._free = frames[: self.ahead_max].split()
            self._count = min(self.ahead_max, len(frames))
            if self._timer is None:
                self._start_timer()
        self.forfeit(frames[self.ahead_max :])

    def add_unread(self, put: PendingPut) -> None:
        """Keep a put whose result the caller may never read. The pool reads it when ``PUTS_UNREAD_MAX`` others wait, or
        when no frame was taken for ``IDLE_S``. Until then the frames of refused pages stay in use."""
        self._unread.append(put)
        self._read_puts(PUTS_UNREAD_MAX)
        with self._lock:
            if self._timer is None:
                self._start_timer()

    def _read_puts(self, unread_max: int) -> None:
        """Read the results of the oldest puts, until ``unread_max`` are left."""
        while len(self._unread) > unread_max:
            # The result keeps its failure. InvalidRequest: the session has ended. IndexError: another thread was first.
            with contextlib.suppress(Unavailable, InvalidRequest, IndexError):
                self._unread.popleft().result()

    def _start_timer(self) -> None:
        """Start the timer. It runs while the pool has frames, so that a client that stops writing does not keep
        them."""
        if not self._channel.ended:
            self._timer = threading.Timer(IDLE_S, self._check_idle)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """Stop the timer, after the channel has ended. A running timer would keep this pool and the node's memory."""
        timer = self._timer  # without the lock, because a finalizer may run in a thread that holds it
        if timer is not None:
            timer.cancel()

    def _check_idle(self) -> None:
        """Return the frames if none was taken for ``IDLE_S``. Start the timer again if the pool is still in use."""
        self._read_request_ahead()
        self._read_late()
        if time.monotonic() - self._used_s >= IDLE_S:
            self._read_puts(0)
        with self._lock:
            self._timer, unused = None, NO_FRAMES
            if time.monotonic() - self._used_s >= IDLE_S:
                unused, self._free, self._count = GrantedFrames.ascending(self._free), [], 0
            # Another thread may have sent a request.
            if self._free or self._unread or self._late or self._request_ahead is not None:
                self._start_timer()
        self.forfeit(unused)

    def request(self, count: int, purpose: Purpose) -> PendingReply:
        """Request up to ``count`` frames. ``granted`` reads the reply. Raises as ``Channel.request``."""
        self._return_forfeited()
        return self._send_request(count, purpose, 0)

    def _send_request(self, count: int, purpose: Purpose, flags: int) -> PendingReply:
        count, number, since = min(count, BATCH_MAX), self.class_number, purpose.since
        body = (purpose.before, self.root)
        return self._channel.request(Op.GRANT, count=count, a=number, b=since, flags=flags, body=body)

    def granted(self, reply: PendingReply) -> GrantedFrames:
        """Wait for the reply to a request, and return the granted frames, ascending. There are none if the node has no
        free frames, or has none yet. Frames in a reply that arrives after its deadline are added to the pool.

        Raises:
            QuotaExceeded: the tenant's quota is used up.
            NodeUnavailable, DeadlineExceeded: there is no reply.
        """
        try:
            message = reply.result()
        except DeadlineExceeded:
            with self._lock:
                self._late.append(reply)
                if self._timer is None:
                    self._start_timer()
            raise
        if message.op == Status.OVER_QUOTA:
            raise QuotaExceeded(OVER_QUOTA)
        return GrantedFrames.ascending([GrantedFrames.of_raw(bytes(message.body[: message.entries * ADDRESS_BYTES]))])

    def take_granted(self, count: int, purpose: Purpose, timeout_s: float) -> GrantedFrames:
        """Take ``count`` frames, and wait for the node to grant those that the pool lacks. Then request more frames for
        similar puts.

        Return fewer frames if the store is full of pages that cannot be evicted, or if the tenant's quota is used up.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node did not answer in time.
        """
        deadline = time.monotonic() + timeout_s  # includes the wait for frames that were requested ahead
        frames = self.take(count)
        try:
            while missing := count - len(frames):
                if time.monotonic() >= deadline:
                    raise NodeUnavailable(f"{missing} frames were not granted in time")
                more = self.wait_granted(self.request(missing, purpose), missing, purpose, deadline)
                if not more:
                    break
                frames = GrantedFrames.ascending([frames, more])
        except QuotaExceeded:
            pass
        except Unavailable:
            self.add(frames)
            raise
        self.fill_ahead(count, lambda _: purpose, 0)
        return frames

    def wait_granted(self, reply: PendingReply, count: int, purpose: Purpose, deadline: float) -> GrantedFrames:
        """Wait for the reply to a request, and return the granted frames. Send the request again if the daemon ended
        before it replied, and until ``deadline`` while the node is saving pages to free space. Raises as ``granted``
        and ``request``."""
        try:
            frames = self.granted(reply)
        except NodeUnavailable:
            reply = self.request(count, purpose)
            frames = self.granted(reply)
        while not frames and reply.result().op == Status.BUSY and time.monotonic() < deadline:
            time.sleep(BUSY_PAUSE_S)
            reply = self.request(count, purpose)
            frames = self.granted(reply)
        return frames

    def forfeit(self, frames: GrantedFrames) -> None:
        """Give up frames. The caller must no longer write into them. They return to the node now, or once it is
        available again."""
        with self._lock:
            self._forfeited += frames.raw
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
            self._return_forfeited(timeout_s=0.0)
        with self._lock:
            if self._forfeited and self._timer is None:
                self._start_timer()  # another thread was sending, or the node is down

    def _return_forfeited(self, timeout_s: float | None = None) -> None:
        while self._forfeited:
            with self._lock:
                raw = bytes(self._forfeited[: BATCH_MAX * ADDRESS_BYTES])
                del self._forfeited[: len(raw)]
            if not raw:
                return  # another thread has sent them
            count = len(raw) // ADDRESS_BYTES
            try:
                self._channel.request(Op.REVOKE, count=count, flags=NO_REPLY, body=(raw,), timeout_s=timeout_s)
            except Unavailable:
                with self._lock:
                    self._forfeited += raw
                raise


class GrantPools:
    """The pools of one session: one for each class, and one for each class and root with a quota. Thread-safe. ``end``
    ends it, after its channel has ended."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pools: dict[tuple[tuple[int, int, int], bytes], GrantPool] = {}

    def of(self, frame_class: FrameClass, root: bytes = b"") -> GrantPool:
        """Return the pool of a class, created at its first use. When there are ``POOLS_MAX`` pools, idle ones are
        dropped first."""
        key = frame_class.numbers, root
        pool = self._pools.get(key)
        if pool is not None:
            return pool
        if len(self._pools) >= POOLS_MAX:
            for other in [other for other, pool in list(self._pools.items()) if pool.is_idle]:
                self._pools.pop(other, None)
        return self._pools.setdefault(key, GrantPool(frame_class, self._channel, root))

    def end(self) -> None:
        """Stop the timers, after the channel has ended."""
        for pool in list(self._pools.values()):
            pool.end()


def is_still_granted(address: Address, word: int) -> bool:
    """Return whether ``word``, the current word of a granted frame, says RESERVED under the generation of the grant."""
    return word == address.generation << 8 | _RESERVED
