"""Publisher: where one session publishes its puts, instead of sending them: its slot in the node's log of puts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Final

from kvstore.rpc.copies import Copies
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import Header
from kvstore.tier.put_log import PutLog

WAITING_MAX: Final = 8192  # keys remembered; a ring has room for fewer


class Publisher:
    """Threads may share it. Life: made (publishes nothing) -> ``assigned`` by each HELLO, to a slot or to none -> its
    session ends: ``Copies.close`` lets nothing be published any more, and the slot is free when the session's lock is.

    Attributes:
        slot: -1 where it has none.
    """

    def __init__(self, folder: Path, session: int, copies: Copies) -> None:
        self._folder = folder
        self._session = session
        self._copies = copies
        self._lock = threading.Lock()
        self._log: PutLog | None = None
        self._waiting: dict[bytes, int] = {}  # key -> where its record ends; some may be taken in
        self.slot = -1
        self._pid = 0  # of the daemon that gave the slot

    def assigned(self, said: Any) -> list[bytes]:
        """What HELLO was answered: ``{"id", "slot", "pid"}``, or None. Returns requests that were published and that
        this node will not take in, since it has another log, or none: they are to be sent.
        """
        log, slot = self._log, self.slot
        self._pid = int(said["pid"]) if said else 0
        id_, now = (int(said["id"], 16), int(said["slot"])) if said else (0, -1)
        if log is not None and (log.id, slot) == (id_, now):
            return []
        with self._lock:
            self._log = PutLog.open(NodeFolder.at(self._folder), id_) if id_ else None
            self._waiting = {}
            self.slot = now
        return log.left(slot, self._session) if log is not None else []

    def publish(self, request: bytes, keys: list[bytes], header: Header) -> int:
        """Publish a request, about pages of these keys; its position in the slot. 0: not now, or not here; ``header``:
        the node's.

        Raises what the session's ``Copies`` do, once that is closed.
        """
        with self._copies, self._lock:
            log = self._log
            if log is None or log.id != header.puts_id or self._pid != header.pid:
                return 0
            position = log.append(self.slot, self._session, request)
            if position:
                if len(self._waiting) > WAITING_MAX:
                    marked = self.marked
                    self._waiting = {key: at for key, at in self._waiting.items() if at > marked}
                self._waiting.update(dict.fromkeys(keys, position))
            return position

    @property
    def marked(self) -> int:
        """Up to which position the node is through with what we published."""
        log = self._log
        return log.marked(self.slot) if log is not None else 0

    @property
    def published(self) -> int:
        """Up to which position we have published."""
        log = self._log
        return log.published(self.slot) if log is not None else 0

    def holds(self, key: bytes) -> bool:
        """Whether we published the page of that key, and the node has not taken it in."""
        return self._waiting.get(key, 0) > self.marked

    def leading(self, keys: list[bytes], start: int) -> int:
        """How many from ``start`` on of these keys we published, and the node has not taken in."""
        waiting, marked, page = self._waiting, self.marked, start
        while page < len(keys) and waiting.get(keys[page], 0) > marked:
            page += 1
        return page - start

    @property
    def deciding(self) -> bool:
        """The node may have looked before we published last: what it decides now knows nothing of that."""
        log = self._log
        return log is None or log.deciding

    @property
    def unheard(self) -> bool:
        """True while the node does not look on its own: wake it."""
        log = self._log
        return log is not None and log.asleep
