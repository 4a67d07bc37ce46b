"""PutLog: the file ``puts`` of a node's folder, in which clients publish their puts without a message.

Each session has a slot: three words and a ring of records. A record is a request as the client would have sent it over
the socket (``SEAL_GRANTED``, for example), and the daemon handles it like one that it has received there::

    0       head      magic, version, id, slots, bytes of a ring
    4 KiB   words     session[SLOTS]   published[SLOTS]   drained[SLOTS]   deciding
    8 KiB   rings     SLOTS times RING_BYTES:  | length, sum, request | length, sum, request | ...

``published`` and ``drained`` are positions that only grow; the place of a position in the ring is its remainder by
``RING_BYTES``. The client writes a record's bytes, then ``published``. The daemon performs a record, then stores
``drained``. So a half-written record is never published. A record that was performed but not marked, because of a kill
in between, is performed again. That changes nothing, because its frames are no longer granted. Only the daemon writes
``session``, ``drained`` and ``deciding``. A record is contiguous: if it does not fit before the end of the ring, it is
written at the front.

Worked example: the ring of slot 3 is drained up to position 262,000, and a ring has 262,144 bytes. A request of 500
bytes needs 520. ``_SKIP`` is written at 262,000, the record is at the ring's front, and ``published`` becomes
262,144 + 520.

A reader that misses a key looks for its bytes in the parts of all rings between ``drained`` and ``published``
(``holder``). A match proves nothing. It is a hint to ask the daemon to drain the logs.

The word ``deciding`` lets a client take a lease without a message. The client publishes the request, and then reads the
word. If the node is not deciding, every later decision drains the log first. So frames whose pages are unchanged are
kept. If the node is deciding, it may have read the log before, and the client sends the request (``Deciding``)::

    node                               client
    deciding = 1                       published = ... (with its LEASE)
    fence                              fence
    drain the log                      deciding? yes: send the request
    decide, perform                    no: are the words of the pages unchanged?
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

SLOTS: Final = 64  # number of sessions that may publish at a time; further sessions send a request for every put
RING_BYTES: Final = 256 << 10  # per slot; its memory is allocated with its first session
REQUEST_BYTES_MAX: Final = RING_BYTES // 2 - 32  # an empty ring always has room for one, wherever it begins

_MAGIC: Final = int.from_bytes(b"KVSPUTS1", "little")
_VERSION: Final = 3
_HEAD: Final = struct.Struct("<5Q")
_WORDS_AT: Final = 4096
_RINGS_AT: Final = 8192
_FILE_BYTES: Final = _RINGS_AT + SLOTS * RING_BYTES
# Length with this head and without padding; xxh3 of the request, seeded with its position.
_RECORD: Final = struct.Struct("<QQ")
_SKIP: Final = (1 << 64) - 1  # in place of a length: the next record is at the front of the ring
_PUBLISHED_AT: Final = _WORDS_AT + 8 * SLOTS
_DRAINED_AT: Final = _PUBLISHED_AT + 8 * SLOTS
_DECIDING_AT: Final = _DRAINED_AT + 8 * SLOTS
_CLOSED: Final = 1 << 63  # added to a session's id, which has fewer bits: the session must no longer publish
_SESSION, _PUBLISHED, _DRAINED, _DECIDING = 0, SLOTS, 2 * SLOTS, 3 * SLOTS  # places among the words

assert _DECIDING_AT + 8 <= _RINGS_AT
assert 2 * (REQUEST_BYTES_MAX + _RECORD.size) <= RING_BYTES


class LogDamaged(Exception):
    """The content of a slot is not valid. Only the node raises and handles this."""


class PutLog:
    """The mapped file. Made by ``create`` (the daemon) or ``open``; it is unmapped with the last reference.

    Attributes:
        id: random number, drawn when the file was made and stored in the node's header. Another id means another log.
        positions: returns the published positions of all slots, then the drained ones, as bytes.
        drained: returns the drained positions of all slots, as bytes. Both are C functions, because every lookup that
            misses calls one of them.
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
        """Make a new log, in place of an old one. Raises OutOfSpace if there is no memory for its words."""
        id_ = secrets.randbits(63) | 1
        folder.new_file(folder.puts, _FILE_BYTES, _HEAD.pack(_MAGIC, _VERSION, id_, SLOTS, RING_BYTES), sparse=True)
        fd = open_plain(folder.puts, os.O_RDWR)
        try:
            allocate(fd, 0, _RINGS_AT, str(folder.puts))
        finally:
            os.close(fd)
        log = cls.open(folder, id_)
        assert log is not None, "it was made just now"
        return log

    @classmethod
    def open(cls, folder: NodeFolder, id_: int, writable: bool = True) -> PutLog | None:
        """Open the log with this id. Return None if it is absent, or from another version."""
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
        is_valid = bool(id_) and _HEAD.unpack_from(map_) == (_MAGIC, _VERSION, id_, SLOTS, RING_BYTES)
        return cls(folder.puts, map_, id_) if is_valid else None

    # --- for readers ------------------------------------------------------------------------------------------------

    @property
    def is_drained(self) -> bool:
        """True if all published records have been drained."""
        map_ = self._map
        return map_[_PUBLISHED_AT:_DRAINED_AT] == map_[_DRAINED_AT:_DECIDING_AT]

    def waiting(self) -> list[int]:
        """Return the slots with records that have not been drained."""
        map_ = self._map
        published, drained = map_[_PUBLISHED_AT:_DRAINED_AT], map_[_DRAINED_AT:_DECIDING_AT]
        differs = int.from_bytes(published, "little") ^ int.from_bytes(drained, "little")
        slots = []
        while differs:
            slot = ((differs & -differs).bit_length() - 1) // 64
            differs = differs >> 64 * (slot + 1) << 64 * (slot + 1)
            slots.append(slot)
        return slots

    def holder(self, key: bytes, exclude: int = -1) -> int:
        """Return a slot, other than ``exclude``, with a pending record that has this key; -1 if there is none. A
        hint."""
        return next((slot for slot in self.waiting() if slot != exclude and self.holds(key, slot)), -1)

    def holds(self, key: bytes, slot: int) -> bool:
        """Return True if this slot has a pending record with this key. A hint."""
        find = self._map.find
        return any(find(key, start, stop) >= 0 for start, stop in self._pending(slot))

    def pending(self, keys: list[bytes]) -> list[bytes]:
        """Return the keys that have a pending record in any slot. The result is a hint."""
        find, parts = self._map.find, [part for slot in self.waiting() for part in self._pending(slot)]
        return [key for key in keys if any(find(key, start, stop) >= 0 for start, stop in parts)] if parts else []

    def _pending(self, slot: int) -> list[tuple[int, int]]:
        """Return the byte ranges of the file (start, stop) with this slot's pending records."""
        ring, start, stop = _RINGS_AT + slot * RING_BYTES, self._words[_DRAINED + slot], self._words[_PUBLISHED + slot]
        first, last = start % RING_BYTES, stop % RING_BYTES
        if start >= stop:
            return []
        if stop - start >= RING_BYTES:
            return [(ring, ring + RING_BYTES)]
        if first < last:
            return [(ring + first, ring + last)]
        return [(ring + first, ring + RING_BYTES), (ring, ring + last)]

    # --- for the client that owns a slot -----------------------------------------------------------------------------

    def append(self, slot: int, session: int, request: bytes) -> int:
        """Publish a request and return the position after it. It is performed once the slot is drained up to there.

        Return 0 if there is no room now, the request is too large, or the slot no longer belongs to this session.
        Only one thread of one process may call this for a slot.
        """
        words = self._words
        published = words[_PUBLISHED + slot]
        room = RING_BYTES - (published - words[_DRAINED + slot])
        length = _RECORD.size + len(request)
        size = length + -length % 8
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
        self._map[start : start + _RECORD.size] = _RECORD.pack(length, digest)
        self._map[start + _RECORD.size : start + length] = request
        if failpoint.ACTIVE:
            failpoint.hit("client.recorded")
        words[_PUBLISHED + slot] = published + size
        return published + size

    def undrained(self, slot: int, session: int) -> list[bytes]:
        """Return the requests that this session has published here but that the node will no longer drain."""
        try:
            return [request for _, request in self.records(slot)] if self._words[_SESSION + slot] == session else []
        except LogDamaged:
            return []

    def drained_position(self, slot: int) -> int:
        """Return the position up to which the daemon has performed this slot's records."""
        return self._words[_DRAINED + slot]

    def published(self, slot: int) -> int:
        """Return the position up to which this slot has records."""
        return self._words[_PUBLISHED + slot]

    # --- for the daemon ---------------------------------------------------------------------------------------------

    @property
    def deciding(self) -> bool:
        """True while the daemon is deciding. The daemon may have read the log before that."""
        return bool(self._words[_DECIDING])

    @deciding.setter
    def deciding(self, value: bool) -> None:
        self._words[_DECIDING] = int(value)

    def session(self, slot: int) -> int:
        """Return the session of a slot; 0 if the slot is free, or if its session may no longer publish."""
        session = self._words[_SESSION + slot]
        return session if session < _CLOSED else 0

    def sessions(self) -> dict[int, int]:
        """Return the slot of each session that has one."""
        words = self._words
        return {words[_SESSION + slot] & ~_CLOSED: slot for slot in range(SLOTS) if words[_SESSION + slot]}

    def assign(self, session: int) -> int | None:
        """Return the slot of this session, or give it a free one. Return None if its slot is closed, or if there is no
        free slot or memory."""
        slots = self.sessions()
        if session in slots:
            return slots[session] if self.session(slots[session]) else None
        free = next((slot for slot in range(SLOTS) if not self._words[_SESSION + slot]), None)
        if free is None or not self._allocate(free):
            return None
        self.skip(free)
        self._words[_SESSION + free] = session
        return free

    def _allocate(self, slot: int) -> bool:
        """Allocate a ring's memory, so that no store of a client raises SIGBUS. Return False if there is none."""
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
        """Stop the slot's session from publishing.

        It might be publishing right now. So no other session gets the slot until this one has ended.
        """
        self._words[_SESSION + slot] |= _CLOSED
        self.skip(slot)

    def free(self, slot: int) -> None:
        """Free the slot of a session that has ended."""
        self._words[_SESSION + slot] = 0

    def records(self, slot: int) -> Iterator[tuple[int, bytes]]:
        """Yield ``(position after the record, request)`` for each pending record, oldest first. The requests are
        copies.

        Raises:
            LogDamaged: the ring has bytes that ``append`` did not write.
        """
        position, stop = self._words[_DRAINED + slot], self._words[_PUBLISHED + slot]
        if not 0 <= stop - position <= RING_BYTES or (position | stop) % 8:
            raise LogDamaged(f"published {stop}, drained {position}")
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
                raise LogDamaged(f"the checksum of the record at {position} does not match")
            position += size
            yield position, request
        if position > stop:
            raise LogDamaged(f"published {stop}, records up to {position}")

    def mark(self, slot: int, position: int) -> None:
        """Record that everything up to this position was performed."""
        self._words[_DRAINED + slot] = position

    def skip(self, slot: int) -> None:
        """Discard everything that was published here so far."""
        self._words[_DRAINED + slot] = self._words[_PUBLISHED + slot]


def _padded(length: int) -> int:
    return length + -length % 8


class Deciding:
    """The mutex under which a node decides. Clients can see it in the node's log of puts.

    ``with deciding:`` encloses every decision; inside, the log is drained first. A node that is killed inside leaves
    the word set. Then clients send requests, and the next node clears the word with its first decision.
    """

    def __init__(self, puts: PutLog | None) -> None:
        self._puts = puts
        self._lock = threading.Lock()
        self._fence = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._puts is not None:
            self._puts.deciding = True
            with self._fence:  # any operation on a lock is a full fence: later reads come after the store
                pass

    def __exit__(self, *_: object) -> None:
        if self._puts is not None:
            self._puts.deciding = False
        self._lock.release()
