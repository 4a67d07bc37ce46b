"""GrantPool: frames of one class granted to this session ahead of need, so that a put is one message."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import chain, pairwise
from typing import NamedTuple

from kvstore.client.local.publisher import Channel, PendingReply
from kvstore.client.prefix_cache import PendingPut
from kvstore.errors import InvalidRequest, NodeUnavailable, QuotaExceeded, Unavailable
from kvstore.model.replica import Address, FrameClass, FrameState, Status
from kvstore.wire.control import (
    AHEAD,
    BATCH_MAX,
    NO_REPLY,
    Op,
    batch_pages,
    pack_addresses,
    pack_class,
    unpack_addresses,
)

# The next batch is copied while this one is sealed. But a send wakes the node, often on this same core, so a request
# costs as much as copying half a MiB. Measured: 16 MiB is best for pages of 64 KiB to 2 MiB.
BATCH_BYTES = 16 << 20
AHEAD_FRAMES_MAX = 256
AHEAD_BYTES_MAX = 64 << 20
POOLS_MAX = 256  # of a client: the one in a node serves all remote callers, who may use any geometry
IDLE_S = 2.0  # unused frames are returned after this time
PUTS_UNREAD_MAX = 16  # asynchronous puts with unread replies; these may contain granted frames
AHEAD_PUTS = 32  # frames for this many puts like the last one are requested when half are left, so no put waits
OVER_QUOTA = "the tenant's quota is used up by pages that cannot be evicted"
BUSY_PAUSE_S = 0.002  # before another request to a node that is saving pages to free space

_RESERVED = int(FrameState.RESERVED)


class Purpose(NamedTuple):
    """The purpose of frames: pages that follow the page of key ``before``, in a put that has published from ``since``
    on (0: nothing). Neither that page nor the last page of that put may be evicted to free space for them.
    """

    before: bytes
    since: int = 0


class GrantPool:
    """RESERVED frames without a key that this session may write into. Threads may share it.

    Life of a frame here: granted -> ``take`` (its taker writes a page into it) -> sealed, or handed back with ``add``
    if the page was already stored. Remaining frames are returned to the node when none was taken for ``IDLE_S``, at
    ``Channel.close``, or by the death of this process. Frames whose state is unknown after a lost connection are never
    written again: ``forfeit``. The pool's one timer ends with ``end``, and is not started again once the channel has
    ended.

    Args:
        root: the only root whose pages may be written into these frames, since they count for its tenant; empty for
            any.
    """

    def __init__(self, frame_class: FrameClass, channel: Channel, root: bytes = b"") -> None:
        self.frame_class = frame_class
        self.root = root
        self.class_number = pack_class(frame_class)
        self.request_pages = batch_pages(frame_class.page_tokens, frame_class.layers)  # in one seal request, at most
        self.batch_pages = max(1, min(self.request_pages, BATCH_BYTES // frame_class.page_bytes))  # copied, then sealed
        self.ahead_max = max(1, min(AHEAD_FRAMES_MAX, AHEAD_BYTES_MAX // frame_class.frame_bytes))
        self._channel = channel
        self._lock = threading.Lock()
        self._runs: list[list[Address]] = []  # of consecutive frames, ascending
        self._forfeited: list[Address] = []
        self._used_s = 0.0  # when frames were last taken
        self._timer: threading.Timer | None = None
        self._asked: PendingReply | None = None  # frames requested
        self._unread: deque[PendingPut] = deque()

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    @property
    def idle(self) -> bool:
        """True if the pool has no frame, and none is requested or being returned."""
        waiting = self._asked is not None or self._timer is not None
        return not (self._runs or self._forfeited or self._unread or waiting)

    def take(self, count: int) -> list[Address]:
        """Take up to ``count`` frames, ascending: of the shortest run that has as many, else of the shortest runs.

        So long runs last: a put into one run is one copy, and its pages leave together.
        """
        if self._asked is not None and len(self) < count:
            self._collect()
        with self._lock:
            self._used_s = time.monotonic()
            best: list[Address] = []
            for run in self._runs:
                if len(run) >= count and (not best or len(run) < len(best)):
                    best = run
            if len(best) > count:
                taken = best[:count]
                del best[:count]
                return taken
            taken = []
            for run in [best] if best else sorted(self._runs, key=len):
                part = run[: count - len(taken)]
                del run[: len(part)]
                taken += part
            self._runs = [run for run in self._runs if run]
        return taken if best else sorted(taken)

    def ask_ahead(self, used: int, purpose: Callable[[], Purpose]) -> None:
        """After a put of ``used`` pages, request the frames for further puts like it. ``take`` reads the reply."""
        if self._asked is not None:
            return
        with self._lock:
            remaining = sum(map(len, self._runs))
            most = min(self.ahead_max, AHEAD_PUTS * used)
            if (remaining >= 2 * used and 2 * remaining >= most) or remaining >= most or self._asked is not None:
                return
            with contextlib.suppress(Unavailable):
                self._asked = self._request(most - remaining, purpose(), AHEAD)
            if self._timer is None and self._asked is not None:
                self._watch()

    def _collect(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
                self.add(self.granted(asked))

    def add(self, addresses: list[Address]) -> None:
        """Add frames that were granted, or handed back unsealed. Those beyond ``ahead_max`` are returned to the
        node."""
        if not addresses:
            return
        with self._lock:
            frames = sorted([*chain.from_iterable(self._runs), *addresses])
            spare = frames[self.ahead_max :]
            self._runs = _runs(frames[: self.ahead_max])
            if self._timer is None:
                self._watch()
        self.forfeit(spare)

    def unread(self, put: PendingPut) -> None:
        """Keep a put whose result may never be requested. Its replies are read when many others wait, or when no frame
        was taken for ``IDLE_S``; until then the frames of refused pages stay in use."""
        self._unread.append(put)
        self._read(PUTS_UNREAD_MAX)
        with self._lock:
            if self._timer is None:
                self._watch()

    def _read(self, left: int) -> None:
        while len(self._unread) > left:
            # The result keeps the failure; InvalidRequest: its session has ended; IndexError: another thread read it.
            with contextlib.suppress(Unavailable, InvalidRequest, IndexError):
                self._unread.popleft().result()

    def _watch(self) -> None:
        """Keep one timer while there are frames, so that a client that stopped writing does not keep them."""
        if not self._channel.ended:
            self._timer = threading.Timer(IDLE_S, self._idle)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """End the timer after the channel has ended: it must not keep this pool, and the node's memory, alive."""
        timer = self._timer  # without the lock: a finalizer may run in a thread that holds it
        if timer is not None:
            timer.cancel()

    def _idle(self) -> None:
        self._collect()
        if time.monotonic() - self._used_s >= IDLE_S:
            self._read(0)
        with self._lock:
            self._timer, idle = None, []
            if time.monotonic() - self._used_s >= IDLE_S:
                idle, self._runs = [*chain.from_iterable(self._runs)], []
            if self._runs or self._unread or self._asked is not None:  # requested after the check above
                self._watch()
        self.forfeit(idle)

    def ask(self, count: int, purpose: Purpose) -> PendingReply:
        """Request up to ``count`` frames, whose reply ``granted`` reads.

        Raises what ``Channel.request`` does.
        """
        self._give_back()
        return self._request(count, purpose, 0)

    def _request(self, count: int, purpose: Purpose, flags: int) -> PendingReply:
        count, number, since = min(count, BATCH_MAX), self.class_number, purpose.since
        body = (purpose.before, self.root)
        return self._channel.request(Op.GRANT, count=count, a=number, b=since, flags=flags, body=body)

    @staticmethod
    def granted(reply: PendingReply) -> list[Address]:
        """Return the granted frames, ascending; empty if the node has none free, or not yet.

        Raises:
            QuotaExceeded: the tenant's quota is used up.
        """
        message = reply.result()
        if message.op == Status.OVER_QUOTA:
            raise QuotaExceeded(OVER_QUOTA)
        return sorted(unpack_addresses(message.body, message.entries))

    def take_granted(self, count: int, purpose: Purpose, timeout_s: float) -> list[Address]:
        """``take``, then wait for the node to grant the missing frames: fewer if the store is full of pages that cannot
        be evicted, or if the tenant's quota is used up. More frames for similar puts are then requested.

        Raises NodeUnavailable or DeadlineExceeded if the node does not answer.
        """
        deadline = time.monotonic() + timeout_s  # also for frames that were requested ahead
        frames = self.take(count)
        try:
            while missing := count - len(frames):
                if time.monotonic() >= deadline:
                    raise NodeUnavailable(f"{missing} frames were not granted in time")
                more = self.wait_granted(self.ask(missing, purpose), missing, purpose, deadline)
                if not more:
                    break
                frames = sorted([*frames, *more])
        except QuotaExceeded:
            pass
        except Unavailable:
            self.add(frames)
            raise
        self.ask_ahead(count, lambda: purpose)
        return frames

    def wait_granted(self, asked: PendingReply, count: int, purpose: Purpose, deadline: float) -> list[Address]:
        """As ``granted``, but ask once more if the answer was lost with the daemon, and until ``deadline`` while the
        node is saving pages to free space."""
        try:
            frames = self.granted(asked)
        except NodeUnavailable:
            asked = self.ask(count, purpose)
            frames = self.granted(asked)
        while not frames and asked.result().op == Status.BUSY and time.monotonic() < deadline:
            time.sleep(BUSY_PAUSE_S)
            asked = self.ask(count, purpose)
            frames = self.granted(asked)
        return frames

    def forfeit(self, addresses: list[Address]) -> None:
        """Never write into these frames again. The node is told now, or when it is available again."""
        if addresses:
            with self._lock:
                self._forfeited += addresses
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
            self._give_back(timeout_s=0.0)
        with self._lock:
            if self._forfeited and self._timer is None:
                self._watch()  # another thread was sending, or the node is down

    def _give_back(self, timeout_s: float | None = None) -> None:
        while self._forfeited:
            with self._lock:
                some = self._forfeited[:BATCH_MAX]
                del self._forfeited[:BATCH_MAX]
            try:
                body = (pack_addresses(some),)
                self._channel.request(Op.REVOKE, count=len(some), flags=NO_REPLY, body=body, timeout_s=timeout_s)
            except Unavailable:
                with self._lock:
                    self._forfeited += some
                raise


class GrantPools:
    """The pools of one session, one per class; for roots with a quota, one per class and root. Threads may share it.

    Ends with its channel: ``end``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pools: dict[tuple[FrameClass, bytes], GrantPool] = {}

    def of(self, frame_class: FrameClass, root: bytes = b"") -> GrantPool:
        """Return the pool of a class. Beyond ``POOLS_MAX`` classes only the pools in use are kept; others are cheap to
        make."""
        about = frame_class, root
        pool = self._pools.get(about)
        if pool is not None:
            return pool
        if len(self._pools) >= POOLS_MAX:
            for other in [other for other, pool in list(self._pools.items()) if pool.idle]:
                self._pools.pop(other, None)
        return self._pools.setdefault(about, GrantPool(frame_class, self._channel, root))

    def end(self) -> None:
        """End the timers after the channel has ended."""
        for pool in list(self._pools.values()):
            pool.end()


def still_ours(address: Address, word: int) -> bool:
    """Return whether a frame whose record's word is ``word`` is still RESERVED under the generation of its grant."""
    return word == address.generation << 8 | _RESERVED


def _runs(frames: list[Address]) -> list[list[Address]]:
    """Split ascending frames into runs of consecutive ones."""
    starts = [i for i, (a, b) in enumerate(pairwise(frames), 1) if b.extent != a.extent or b.frame != a.frame + 1]
    return [frames[start:stop] for start, stop in pairwise([0, *starts, len(frames)])]
