"""Publisher: where one session publishes its puts, instead of sending them: its slot in the node's log of puts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from kvstore.rpc.copies import Copies
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import Header
from kvstore.tier.put_log import PutLog


class Publisher:
    """Threads may share it. Life: made (publishes nothing) -> ``assigned`` by each HELLO, to a slot or to none -> its
    session ends: ``Copies.close`` lets nothing be published any more, and the slot is free when the session's lock is.

    Attributes:
        slot: -1 where it has none.
        charges: the node takes a GRANT's word for whose frames they are. One of the version before could refuse what a
            tenant with a quota has published.
    """

    def __init__(self, folder: Path, session: int, copies: Copies) -> None:
        self._folder = folder
        self._session = session
        self._copies = copies
        self._lock = threading.Lock()
        self._log: PutLog | None = None
        self.slot = -1
        self.charges = False
        self._pid = 0  # of the daemon that said so: another one may not know of logs

    def assigned(self, said: Any) -> list[bytes]:
        """What HELLO was answered: ``{"id", "slot", "pid", "charges"}``, or None. Returns requests that were published
        and that this node will not take in, being of a version without logs, or having made another one: they are to be
        sent.
        """
        log, slot = self._log, self.slot
        self._pid = int(said["pid"]) if said else 0
        self.charges = bool(said and said.get("charges"))
        id_, now = (int(said["id"], 16), int(said["slot"])) if said else (0, -1)
        if log is not None and (log.id, slot) == (id_, now):
            return []
        with self._lock:
            self._log = PutLog.open(NodeFolder.at(self._folder), id_) if id_ else None
            self.slot = now
        return log.left(slot, self._session) if log is not None else []

    def publish(self, request: bytes, header: Header) -> int:
        """Publish a ``SEAL_GRANTED``; its position in the slot. 0: not now, or not here; ``header``: the node's.

        Raises what the session's ``Copies`` do, once that is closed.
        """
        with self._copies, self._lock:
            log = self._log
            if log is None or log.id != header.puts_id or self._pid != header.pid:
                return 0
            return log.append(self.slot, self._session, request)

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
        log = self._log
        return log is not None and log.holds(key, self.slot)

    @property
    def unheard(self) -> bool:
        """The node does not look by itself now: tell it."""
        log = self._log
        return log is not None and log.asleep
