"""GrantPool: frames of one class granted to this session ahead of need, so that a put is one message."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import NamedTuple

from kvstore.client.local.publisher import Channel, PendingReply
from kvstore.client.prefix_cache import PendingPut
from kvstore.errors import InvalidRequest, NodeUnavailable, QuotaExceeded, Unavailable
from kvstore.model.replica import Address, FrameClass, FrameState, Status
from kvstore.wire.control import AHEAD, BATCH_MAX, NO_REPLY, Op, pack_addresses, pack_class, unpack_addresses

AHEAD_FRAMES_MAX = 256
AHEAD_BYTES_MAX = 64 << 20
POOLS_MAX = 256  # of a client: a node's own, on behalf of all its remote callers, sees any geometry they think of
IDLE_S = 2.0  # frames that nobody took for so long are given back
PUTS_UNREAD_MAX = 16  # asynchronous puts whose replies nobody has read; frames granted in return wait in them
AHEAD_PUTS = 32  # so many puts like the last one are asked for at once, when half of them is left: no put waits for it
OVER_QUOTA = "the tenant has all it may have, in pages that may not leave"
BUSY_PAUSE_S = 0.002  # before asking again a node that is saving pages to make room

_RESERVED = int(FrameState.RESERVED)


class Purpose(NamedTuple):
    """What frames are for: pages that follow the page of key ``before``, of a put that has published from ``since`` on
    (0: nothing). Neither that page nor the last one of that put is to leave to make room.
    """

    before: bytes
    since: int = 0


class GrantPool:
    """RESERVED frames without a key, ours to write into. Threads may share it.

    Life of a frame here: granted -> ``take`` (its taker writes a page into it) -> sealed, or handed back with ``add``
    where the page was already stored. What is left goes back to the node when nobody took a frame for ``IDLE_S``, at
    ``Channel.close``, or by the death of this process. What may be in doubt after a lost connection is never written
    again: ``forfeit``. Its one timer ends with ``end``, and starts no other once its channel has ended.

    Args:
        root: the only one whose pages may be written into its frames, since they count for its tenant; nothing: any.
    """

    def __init__(self, frame_class: FrameClass, channel: Channel, root: bytes = b"") -> None:
        self.frame_class = frame_class
        self.root = root
        self.class_number = pack_class(frame_class)
        self.ahead_max = max(1, min(AHEAD_FRAMES_MAX, AHEAD_BYTES_MAX // frame_class.frame_bytes))
        self._channel = channel
        self._lock = threading.Lock()
        self._frames: list[Address] = []  # ascending
        self._forfeited: list[Address] = []
        self._used_s = 0.0  # when frames were last taken
        self._timer: threading.Timer | None = None
        self._asked: PendingReply | None = None  # frames on their way
        self._unread: deque[PendingPut] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def idle(self) -> bool:
        """Whether it has no frame, and none that is on its way in or out."""
        waiting = self._asked is not None or self._timer is not None
        return not (self._frames or self._forfeited or self._unread or waiting)

    def take(self, count: int) -> list[Address]:
        """Up to ``count`` frames, ascending; consecutive ones where there are enough."""
        if len(self._frames) < count:
            self._collect()
        with self._lock:
            self._used_s = time.monotonic()
            frames = self._frames
            start = _consecutive(frames, count) if 1 < count < len(frames) else 0
            taken = frames[start : start + count]
            del frames[start : start + count]
        return taken

    def ask_ahead(self, used: int, purpose: Purpose) -> None:
        """With a put of ``used`` pages: have another one like it find its frames. Asked for now, read by ``take``."""
        with self._lock:
            left = len(self._frames)
            most = min(self.ahead_max, AHEAD_PUTS * used)
            count = most - left
            if left >= max(2 * used, most // 2) or count <= 0 or self._asked is not None:
                return
            with contextlib.suppress(Unavailable):
                self._asked = self._request(count, purpose, AHEAD)
            if self._timer is None and self._asked is not None:
                self._watch()

    def _collect(self) -> None:
        with self._lock:
            asked, self._asked = self._asked, None
        if asked is not None:
            with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed meanwhile
                self.add(self.granted(asked))

    def add(self, addresses: list[Address]) -> None:
        """Frames granted, or handed back unsealed. More than ``ahead_max`` are given back to the node."""
        if not addresses:
            return
        with self._lock:
            self._frames += addresses
            self._frames.sort()
            spare = self._frames[self.ahead_max :]
            del self._frames[self.ahead_max :]
            if self._timer is None and self._frames:
                self._watch()
        self.forfeit(spare)

    def unread(self, put: PendingPut) -> None:
        """A put whose result may never be asked for. Its replies are read when many others wait, or when nobody took a
        frame for ``IDLE_S``: where pages were refused, their frames are ours until then."""
        self._unread.append(put)
        self._read(PUTS_UNREAD_MAX)
        with self._lock:
            if self._timer is None:
                self._watch()

    def _read(self, left: int) -> None:
        while len(self._unread) > left:
            # Kept for whoever asks for that result; InvalidRequest: its session has ended; IndexError: another read it.
            with contextlib.suppress(Unavailable, InvalidRequest, IndexError):
                self._unread.popleft().result()

    def _watch(self) -> None:
        """One timer while there are frames: a client that stopped writing must not keep them from others."""
        if not self._channel.ended:
            self._timer = threading.Timer(IDLE_S, self._idle)
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """The channel has ended, and all frames with it: no timer may keep this pool, and its node's memory."""
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
                idle, self._frames = self._frames, []
            if self._frames or self._unread or self._asked is not None:  # asked for since the look above
                self._watch()
        self.forfeit(idle)

    def ask(self, count: int, purpose: Purpose) -> PendingReply:
        """Request up to ``count`` frames; ``granted`` reads the reply.

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
        """The frames that came, ascending; empty where the node has none to give, or not yet.

        Raises:
            QuotaExceeded: the tenant may have no more.
        """
        message = reply.result()
        if message.op == Status.OVER_QUOTA:
            raise QuotaExceeded(OVER_QUOTA)
        return sorted(unpack_addresses(message.body, message.entries))

    def take_granted(self, count: int, purpose: Purpose, timeout_s: float) -> list[Address]:
        """``take``, and what is missing as the node grants it: fewer where the store is full of what may not leave, or
        where the tenant may have no more. Others like these are on their way then.

        Raises NodeUnavailable or DeadlineExceeded where the node does not answer.
        """
        deadline = time.monotonic() + timeout_s  # also of frames that were asked for ahead
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
        self.ask_ahead(count, purpose)
        return frames

    def wait_granted(self, asked: PendingReply, count: int, purpose: Purpose, deadline: float) -> list[Address]:
        """As ``granted``; asked once more where the answer was lost with its daemon, and again until ``deadline`` where
        the node is busy saving pages to make room."""
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
        """Never write into these again. The node hears of it now, or when it listens again."""
        if addresses:
            with self._lock:
                self._forfeited += addresses
        with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed meanwhile
            self._give_back(timeout_s=0.0)
        with self._lock:
            if self._forfeited and self._timer is None:
                self._watch()  # somebody else was just sending, or the node is down

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
    """The pools of one session, one per class, and of roots with a quota per root. Threads may share it.

    Ends with its channel: ``end``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._pools: dict[tuple[FrameClass, bytes], GrantPool] = {}

    def of(self, frame_class: FrameClass, root: bytes = b"") -> GrantPool:
        """The pool of a class. Of very many classes only the pools in use are kept; others are soon made."""
        about = frame_class, root
        pool = self._pools.get(about)
        if pool is not None:
            return pool
        if len(self._pools) >= POOLS_MAX:
            for other in [other for other, pool in list(self._pools.items()) if pool.idle]:
                self._pools.pop(other, None)
        return self._pools.setdefault(about, GrantPool(frame_class, self._channel, root))

    def end(self) -> None:
        """End the timers. The channel has ended."""
        for pool in list(self._pools.values()):
            pool.end()


def still_ours(address: Address, word: int) -> bool:
    """Whether a frame whose record's word is ``word`` is still RESERVED under the generation it was granted with."""
    return word == address.generation << 8 | _RESERVED


def _consecutive(frames: list[Address], count: int) -> int:
    """Where the first run of ``count`` consecutive frames starts; 0 where there is none."""
    start, before, last = 0, frames[0], frames[count - 1]
    if last.extent == before.extent and last.frame - before.frame == count - 1:
        return 0
    for place, frame in enumerate(frames):
        if frame.extent != before.extent or frame.frame - before.frame != place - start:
            start, before = place, frame
        if place - start == count - 1:
            return start
    return 0
