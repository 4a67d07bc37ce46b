"""PutLog: the file ``puts`` of a node's folder, in which clients publish what they have put, without a message.

Each session has a slot: three words and a ring of records. A record is the very request that the client would have
sent (``SEAL_GRANTED``, say), so the daemon takes it in as if it had come over the socket::

    0       head      magic, version, id, slots, bytes of a ring
    4 KiB   words     session[SLOTS]   published[SLOTS]   drained[SLOTS]   deciding
    8 KiB   rings     SLOTS times RING_BYTES:  | length, sum, request | length, sum, request | ...

``published`` and ``drained`` are positions that only grow; a position's place is its remainder by ``RING_BYTES``. The
client writes a record's bytes, then ``published``; the daemon performs what a record asks for, then stores ``drained``.
So a record that is half written was never published, and one that was performed but not marked (a kill in between) is
performed again, which changes nothing: its frames are not granted any more. The daemon alone writes ``session``,
``drained`` and ``deciding`` (see ``shm.put_log``). A record lies in one piece: one that does not
fit before the ring's end starts at its front.

Worked example: the ring of slot 3 is taken in up to position 262,000 of 262,144 * n. A request of 500 bytes needs 520:
``_SKIP`` is written at 262,000, the record is at the ring's front, and ``published`` becomes 262,144 + 520.

A reader that misses a key looks whether it is in a part of a ring between ``drained`` and ``published``, as plain bytes
(``holder``): what it finds there is a hint that the daemon should be asked to take in the logs, and proves nothing.

Deciding: the mutex under which a node decides, which clients can see in its log of puts.

A client takes a lease without a message: it publishes what it would have asked, and looks whether the node is just
deciding. If it is not, every decision from now on takes that in before; so frames whose pages are still what they were
are kept. If it is, the node may have looked already, and the client asks::

    node                               client
    deciding = 1                       published = ... (its LEASE is there)
    fence                              fence
    take in what is published          deciding? yes: ask
    decide, perform                    no: do the pages' words still say what they said?
    deciding = 0
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, cast

import xxhash

from kvstore import failpoint
from kvstore.errors import OutOfSpace
from kvstore.safe_files import open_plain
from kvstore.shm.folder import NodeFolder, allocate

SLOTS: Final = 64  # sessions that may publish at a time; those beyond ask for every put
RING_BYTES: Final = 256 << 10  # of a slot: memory from its first session on
REQUEST_BYTES_MAX: Final = RING_BYTES // 2 - 32  # a ring with nothing in it has room for one, wherever it begins

_MAGIC: Final = int.from_bytes(b"KVSPUTS1", "little")
_VERSION: Final = 2
_HEAD: Final = struct.Struct("<5Q")
_WORDS_AT: Final = 4096
_RINGS_AT: Final = 8192
_FILE_BYTES: Final = _RINGS_AT + SLOTS * RING_BYTES
_RECORD: Final = struct.Struct("<QQ")  # length with this head and without padding; xxh3 of the request, by its position
_SKIP: Final = (1 << 64) - 1  # in place of a length: the next record is at the ring's front
_PUBLISHED_AT: Final = _WORDS_AT + 8 * SLOTS
_DRAINED_AT: Final = _PUBLISHED_AT + 8 * SLOTS
_DECIDING_AT: Final = _DRAINED_AT + 8 * SLOTS
_CLOSED: Final = 1 << 63  # with a session's id, which has fewer bits: it publishes no more
_SESSION, _PUBLISHED, _DRAINED, _DECIDING = 0, SLOTS, 2 * SLOTS, 3 * SLOTS  # of words

assert _DECIDING_AT + 8 <= _RINGS_AT
assert 2 * (REQUEST_BYTES_MAX + _RECORD.size) <= RING_BYTES


class LogDamaged(Exception):
    """What a slot says cannot be. Never leaves the node."""


class PutLog:
    """The mapped file. Made by ``create`` (the daemon) or ``open``; it is unmapped with the last reference.

    Attributes:
        id: drawn when the file was made, and named by the node's header: another file is another log.
        positions: up to which positions something is published, of all slots, and then ``drained``. For every lookup
            that misses, so without a call of Python's.
    """

    def __init__(self, path: Path, map_: mmap.mmap, id_: int) -> None:
        self.path = path
        self.id = id_
        self._map = map_
        self._words = memoryview(map_)[_WORDS_AT:_RINGS_AT].cast("Q")
        part = cast("Callable[[slice], bytes]", map_.__getitem__)
        self.positions: Callable[[], bytes] = partial(part, slice(_PUBLISHED_AT, _DECIDING_AT))
        self.drained: Callable[[], bytes] = partial(part, slice(_DRAINED_AT, _DECIDING_AT))

    @classmethod
    def create(cls, folder: NodeFolder) -> PutLog:
        """A new one in place of what is there. Raises OutOfSpace where there is no memory for its words."""
        id_ = secrets.randbits(63) | 1
        folder.new_file(folder.puts, _FILE_BYTES, _HEAD.pack(_MAGIC, _VERSION, id_, SLOTS, RING_BYTES), sparse=True)
        fd = open_plain(folder.puts, os.O_RDWR)
        try:
            allocate(fd, 0, _RINGS_AT, str(folder.puts))
        finally:
            os.close(fd)
        log = cls.open(folder, id_)
        assert log is not None, "made just now"
        return log

    @classmethod
    def open(cls, folder: NodeFolder, id_: int, writable: bool = True) -> PutLog | None:
        """The log of that id; None where there is none, or one of another version."""
        try:
            fd = open_plain(folder.puts, os.O_RDWR if writable else os.O_RDONLY)
        except OSError:
            return None
        try:
            if os.fstat(fd).st_size != _FILE_BYTES:
                return None
            map_ = mmap.mmap(fd, _FILE_BYTES, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        finally:
            os.close(fd)
        known = not id_ or _HEAD.unpack_from(map_) != (_MAGIC, _VERSION, id_, SLOTS, RING_BYTES)
        return None if known else cls(folder.puts, map_, id_)

    # --- for readers ------------------------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Everything published has been taken in."""
        found = self._map
        return found[_PUBLISHED_AT:_DRAINED_AT] == found[_DRAINED_AT:_DECIDING_AT]

    def waiting(self) -> list[int]:
        """Slots with records that have not been taken in."""
        found = self._map
        published, drained = found[_PUBLISHED_AT:_DRAINED_AT], found[_DRAINED_AT:_DECIDING_AT]
        differs = int.from_bytes(published, "little") ^ int.from_bytes(drained, "little")
        slots = []
        while differs:
            slot = ((differs & -differs).bit_length() - 1) // 64
            differs = differs >> 64 * (slot + 1) << 64 * (slot + 1)
            slots.append(slot)
        return slots

    def holder(self, key: bytes, but: int = -1) -> int:
        """The slot, other than ``but``, in which that key was published and not taken in; -1: none. A hint."""
        return next((slot for slot in self.waiting() if slot != but and self.holds(key, slot)), -1)

    def holds(self, key: bytes, slot: int) -> bool:
        """Whether that key was published in this slot, and is not taken in. A hint."""
        find = self._map.find
        return any(find(key, start, stop) >= 0 for start, stop in self._pending(slot))

    def pending(self, keys: list[bytes]) -> list[bytes]:
        """Return those of these keys that were published in any slot and are not taken in. Hints."""
        find, parts = self._map.find, [part for slot in self.waiting() for part in self._pending(slot)]
        return [key for key in keys if any(find(key, start, stop) >= 0 for start, stop in parts)] if parts else []

    def _pending(self, slot: int) -> list[tuple[int, int]]:
        """Return the parts of the file, each from one byte up to another, with this slot's pending records."""
        ring, start, stop = _RINGS_AT + slot * RING_BYTES, self._words[_DRAINED + slot], self._words[_PUBLISHED + slot]
        first, last = start % RING_BYTES, stop % RING_BYTES
        if start >= stop:
            return []
        if stop - start >= RING_BYTES:
            return [(ring, ring + RING_BYTES)]
        if first < last:
            return [(ring + first, ring + last)]
        return [(ring + first, ring + RING_BYTES), (ring, ring + last)]

    # --- for the client that has a slot -----------------------------------------------------------------------------

    def append(self, slot: int, session: int, request: bytes) -> int:
        """Publish a request; its position, once the daemon has taken in up to which it is done. 0: no room now, too
        large, or the slot is not this session's (any more). One thread of one process calls it for a slot."""
        words = self._words
        published = words[_PUBLISHED + slot]
        room = RING_BYTES - (published - words[_DRAINED + slot])
        length = _RECORD.size + len(request)
        size = _padded(length)
        at = published % RING_BYTES
        skipped = RING_BYTES - at if at + size > RING_BYTES else 0
        if words[_SESSION + slot] != session or not skipped + size <= room <= RING_BYTES:
            return 0
        ring = _RINGS_AT + slot * RING_BYTES
        if skipped:
            self._map[ring + at : ring + at + 8] = _SKIP.to_bytes(8, "little")
            published, at = published + skipped, 0
        start = ring + at
        digest = xxhash.xxh3_64_intdigest(request, published)
        self._map[start : start + length] = _RECORD.pack(length, digest) + request
        if failpoint.ACTIVE:
            failpoint.hit("client.recorded")
        words[_PUBLISHED + slot] = published + size
        return published + size

    def left(self, slot: int, session: int) -> list[bytes]:
        """Return what this session published here and the node will not take in."""
        try:
            return [request for _, request in self.records(slot)] if self._words[_SESSION + slot] == session else []
        except LogDamaged:
            return []

    def marked(self, slot: int) -> int:
        """Up to which position the daemon is through."""
        return self._words[_DRAINED + slot]

    def published(self, slot: int) -> int:
        """Up to which position there is something."""
        return self._words[_PUBLISHED + slot]

    # --- for the daemon ---------------------------------------------------------------------------------------------

    @property
    def deciding(self) -> bool:
        """The daemon is deciding, and may have looked at the log before."""
        return bool(self._words[_DECIDING])

    @deciding.setter
    def deciding(self, value: bool) -> None:
        self._words[_DECIDING] = int(value)

    def session(self, slot: int) -> int:
        """The session of a slot; 0 if it is free, or if its session has stopped publishing."""
        session = self._words[_SESSION + slot]
        return session if session < _CLOSED else 0

    def sessions(self) -> dict[int, int]:
        """The slot of each session that has one."""
        words = self._words
        return {words[_SESSION + slot] & ~_CLOSED: slot for slot in range(SLOTS) if words[_SESSION + slot]}

    def give(self, session: int) -> int | None:
        """The session's slot: the one that it has, or a free one. None: there is none, no memory, or it is closed."""
        taken = self.sessions()
        if session in taken:
            return taken[session] if self.session(taken[session]) else None
        free = next((slot for slot in range(SLOTS) if not self._words[_SESSION + slot]), None)
        if free is None or not self._allocate(free):
            return None
        self.skip(free)
        self._words[_SESSION + free] = session
        return free

    def _allocate(self, slot: int) -> bool:
        """Memory for a ring, so that no store of a client dies of SIGBUS."""
        try:
            fd = open_plain(self.path, os.O_RDWR)
        except OSError:  # the folder was removed
            return False
        try:
            allocate(fd, _RINGS_AT + slot * RING_BYTES, RING_BYTES, str(self.path))
        except OutOfSpace:
            return False
        finally:
            os.close(fd)
        return True

    def close(self, slot: int) -> None:
        """The slot's session may publish no more. No other session may publish here until it has ended: it may be in
        the middle."""
        self._words[_SESSION + slot] |= _CLOSED
        self.skip(slot)

    def free(self, slot: int) -> None:
        """The slot's session has ended."""
        self._words[_SESSION + slot] = 0

    def records(self, slot: int) -> Iterator[tuple[int, bytes]]:
        """``(position after it, request)`` of what was published until now and not taken in, copied, oldest first.

        Raises:
            LogDamaged: what is there was not written by ``append``.
        """
        position, stop = self._words[_DRAINED + slot], self._words[_PUBLISHED + slot]
        if not 0 <= stop - position <= RING_BYTES or (position | stop) % 8:
            raise LogDamaged(f"published {stop}, taken in {position}")
        ring = _RINGS_AT + slot * RING_BYTES
        while position < stop:
            at = position % RING_BYTES
            if int.from_bytes(self._map[ring + at : ring + at + 8], "little") == _SKIP:
                position += RING_BYTES - at
                continue
            head = self._map[ring + at : ring + at + _RECORD.size].ljust(_RECORD.size, b"\0")
            length, digest = _RECORD.unpack(head)
            size = _padded(length)
            if not _RECORD.size < length or at + size > RING_BYTES or position + size > stop:
                raise LogDamaged(f"a record of {length} bytes at {position}")
            request = self._map[ring + at + _RECORD.size : ring + at + length]
            if xxhash.xxh3_64_intdigest(request, position) != digest:
                raise LogDamaged(f"the sum of the record at {position} does not hold")
            position += size
            yield position, request
        if position > stop:
            raise LogDamaged(f"published {stop}, records up to {position}")

    def mark(self, slot: int, position: int) -> None:
        """Everything up to there was performed."""
        self._words[_DRAINED + slot] = position

    def skip(self, slot: int) -> None:
        """Nothing that was published here so far counts (any more)."""
        self._words[_DRAINED + slot] = self._words[_PUBLISHED + slot]


def _padded(length: int) -> int:
    return length + -length % 8


class Deciding:
    """``with deciding:`` stands around every decision, and what is published is taken in first. A node that is killed
    in it leaves the word as it is: clients ask, and the next node sets it right with its first decision.
    """

    def __init__(self, puts: PutLog | None) -> None:
        self._puts = puts
        self._lock = threading.Lock()
        self._fence = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._puts is not None:
            self._puts.deciding = True
            with self._fence:  # any operation on a lock is a full fence: what is read from here on is read after it
                pass

    def __exit__(self, *_: object) -> None:
        if self._puts is not None:
            self._puts.deciding = False
        self._lock.release()
