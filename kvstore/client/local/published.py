"""Published: pages that were put, and that the node has not taken in yet. No page is proven by what stands in the log.

Whoever misses a key looks for it there. If it is there, the node is asked to take in what was published, and the index
once more. A page that follows its parent to NVMe is waited for. With the node down that is a miss, until it is back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.rpc.base import Channel
from kvstore.rpc.control import Op
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import Header
from kvstore.tier.put_log import PutLog

DRAIN_S: Final = 2.0  # a node that does not answer within this is not asked again before it gives a sign
ARRIVAL_S: Final = 2.0  # a page that is not on NVMe within this is not waited for again before its slot goes on
_LOOK_S: Final = 0.001
_PUTS_ID = Header.puts_id.position


class Published:
    """The log of one mapped node, for whoever reads there. Threads may share it.

    Args:
        timeout_s: how long a request to the node may take, where that is less than a look at the log waits.

    Attributes:
        seen: up to which positions the node was through at some moment, twice. They only grow. So where they are the
            same after the index was read, nothing was taken in meanwhile: a page that the index does not have, and that
            does not wait in the log either, was not put before.
    """

    __slots__ = ("_folder", "_header", "_id", "_log", "_stuck", "_unanswered_ns", "_wait_s", "seen")

    def __init__(self, folder: NodeFolder, header: Header, timeout_s: float = DRAIN_S) -> None:
        self._wait_s = min(timeout_s, DRAIN_S)
        self._folder = folder
        self._header = header
        self._id: int = header.puts_id
        self._log = PutLog.open(folder, self._id)
        self._unanswered_ns = -1  # the node's last sign when it did not answer
        self._stuck: dict[int, int] = {}  # slot -> up to where it was taken in when a page of it did not arrive
        self.seen = b""

    @property
    def drained(self) -> bytes:
        """Up to which positions the node is through now."""
        log = self._log
        return log.drained if log is not None else b""

    def rests(self, seen: bytes) -> bool:
        """Nothing was taken in since then, and nothing waits: what the index did not have is not there."""
        log = self._log
        return self._header.words[_PUTS_ID] == self._id and (log is None or log.positions() == seen)

    def elsewhere(self, key: bytes, slot: int) -> bool:
        """Whether the page of that key is published in another slot, and not taken in. A hint."""
        log = self._log
        return log is not None and log.holder(key, slot) >= 0

    def waits(self, key: bytes, looked: bytes) -> tuple[bool, bytes]:
        """Whether the page of that key is published, or shown while it is written, and not taken in; and up to which
        positions was ``looked``, for the next look. False where nothing has moved since."""
        log = self._current()
        positions = log.positions() if log is not None else b""
        return log is not None and positions != looked and log.holder(key) >= 0, positions

    def look(self, missed: Callable[[], list[bytes]], seen: bytes, channel: Channel) -> bytes | None:
        """After the index did not have all keys: None where that is final. Else it is worth another look, and what is
        ``seen`` before that. Where one of the keys that were ``missed`` is among what was published, the node takes
        that in first.

        ``seen``: of before the index was read.
        """
        before, log = self._log, self._current()
        seen = seen if log is before else b""
        if log is None or log.positions() == seen:
            return None
        waiting = [key for key in missed() if log.holder(key) >= 0]
        if not waiting and 2 * log.drained == seen:
            return None
        if waiting and not self._ask(channel):
            return None
        for key in waiting:
            self._await_arrival(log, key)
        self.seen = 2 * log.drained
        return self.seen

    def _current(self) -> PutLog | None:
        """The node's log; another one where the daemon has made it since this node was mapped."""
        if self._header.words[_PUTS_ID] != self._id:
            self._id = self._header.words[_PUTS_ID]
            self._log = PutLog.open(self._folder, self._id)
        return self._log

    def _ask(self, channel: Channel) -> bool:
        """Have the node take in what was published; False where it does not."""
        sign_ns = self._header.heartbeat_ns
        if sign_ns == self._unanswered_ns:
            return False
        try:
            channel.request(Op.DRAIN, timeout_s=self._wait_s).result()
            return True
        except (Unavailable, InvalidRequest):  # InvalidRequest: the store was closed meanwhile
            self._unanswered_ns = sign_ns
        return False

    def _await_arrival(self, log: PutLog, key: bytes) -> None:
        """A record that the node was asked to take in, and that is still there, is of pages on their way to NVMe."""
        deadline = time.monotonic() + min(self._wait_s, ARRIVAL_S)
        while (slot := log.holder(key)) >= 0:
            marked = log.marked(slot)
            if marked == self._stuck.get(slot):
                return
            if time.monotonic() > deadline:
                self._stuck[slot] = marked
                return
            time.sleep(_LOOK_S)
