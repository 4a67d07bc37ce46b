"""PutDrain: before each decision of the node, it takes in the requests that clients published in the log of puts.

A record contains a request in the bytes that the control socket uses. The functions at the top turn such bytes into
events, for both sources. Puts are performed together, in one transaction of the index, and then marked in the log.

If a page is rejected because another writer was first or its parent was evicted, its frame is free at once, and the
writer gets no reply. An invalid record is skipped. A damaged slot is not read further, and its frames are freed when
its session ends.

A parent might move to NVMe just before its child is published. Then the child is saved to NVMe too. Its record stays in
the log until the save has ended, and is retried every ``RETRY_S``, also by the next daemon. Later records do not wait
for it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import boundary, failpoint, logs
from kvstore.errors import InternalError, InvalidRequest, OutOfSpace
from kvstore.model.replica import ADDRESS_BYTES, KEY_BYTES, Address, FrameClass, Status, identity_bytes
from kvstore.node.contents import Contents
from kvstore.node.performer import DECIDED, Performer
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.put_log import Deciding, LogDamaged, PutLog
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.node_state import NodeState
from kvstore.state.objects import NOWHERE
from kvstore.wire import control
from kvstore.wire.control import Message, Op

log = logging.getLogger("kvstore.node")

GROUP_PAGES = 64  # pages of a group of records; bounds the memory of its index transaction
RETRY_S = 0.005  # between retries of records whose pages are being saved to NVMe
_BUSY = int(Status.BUSY)
_READ = boundary.RequestGuard("control/published")
# These are performed together. After one of them, others usually follow, so the log is polled more often.
_BATCHED = ev.SealGranted, ev.SealObjects, ev.Publish, ev.Retract

ClassOf = Callable[[int], FrameClass | None]
"""Returns the class of an extent's frames; None if there is no such extent."""


# --- requests as events ---------------------------------------------------------------------------------------------


def seal_event(session: int, message: Message, class_of: ClassOf, now_ns: int) -> ev.SealGranted:
    """Return the event of a ``SEAL_GRANTED``.

    Raises:
        InvalidRequest: the request is invalid.
    """
    frame_class = control.unpack_class(message.a)
    count, body = message.entries, message.body
    if count == 0:
        raise InvalidRequest("count", "must not be 0")
    parent = control.unpack_key(body, 0)
    addresses = control.unpack_addresses(body, count, KEY_BYTES)
    start = KEY_BYTES + count * ADDRESS_BYTES
    rows = control.unpack_columns(body, count, frame_class.page_tokens, start)
    stop, sums = start + control.columns_bytes(count, frame_class.page_tokens), None
    if message.flags & control.CHECKSUMS:
        sums = _checksums(body, stop, count, frame_class.layers)
    addresses = _of_class(addresses, frame_class, class_of)
    continues = bool(message.flags & control.CONTINUES)
    hints = control.unpack_hints(message)
    event = ev.SealGranted(now_ns, session, frame_class, parent, addresses, rows, sums, continues, hints=hints)
    if message.flags & control.OBJECT:
        if count != 1 or sums is not None:
            raise InvalidRequest("count", "one object at a time, without checksums")
        event.replaces = control.unpack_addresses(body, 1, stop)[0]
        event.in_pool = message.b == control.IN_POOL
    return event


def objects_event(session: int, message: Message, class_of: ClassOf, now_ns: int) -> ev.SealObjects:
    """Return the event of a ``SEAL_OBJECTS``. Its rows are a view of the message. Raises as ``seal_event``."""
    frame_class = control.unpack_class(message.a)
    count, body = message.entries, message.body
    if count == 0:
        raise InvalidRequest("count", "must not be 0")
    addresses = control.unpack_addresses(body, count)
    rows = control.unpack_rows(body, count, frame_class.page_tokens, count * ADDRESS_BYTES)
    start = count * (ADDRESS_BYTES + identity_bytes(frame_class.page_tokens))
    stop = start + count * ADDRESS_BYTES
    is_all_new = bytes(body[start:stop]) == bytes(count * ADDRESS_BYTES)
    replaces = [NOWHERE] * count if is_all_new else control.unpack_addresses(body, count, start)
    addresses = _of_class(addresses, frame_class, class_of)
    return ev.SealObjects(now_ns, session, frame_class, addresses, rows, replaces, in_pool=message.b == control.IN_POOL)


def _of_class(addresses: list[Address], frame_class: FrameClass, class_of: ClassOf) -> list[Address]:
    """Return the addresses. Each address in a dropped extent is replaced with one that names no frame.

    Raises:
        InvalidRequest: an extent has frames of another class.
    """
    for number in {address.extent for address in addresses}:
        extent_class = class_of(number)
        if extent_class is None:
            # The addresses must differ, because a request that names an address twice is refused.
            addresses = [a if a.extent != number else Address(0, i, 0) for i, a in enumerate(addresses)]
        elif extent_class != frame_class:
            raise InvalidRequest("addresses", f"extent {number} holds frames of another class")
    return addresses


def begin_event(session: int, message: Message, class_of: ClassOf, now_ns: int) -> ev.Begin:
    """Return the event of a ``BEGIN``, which has the body of a ``SEAL_GRANTED``. Raises as ``seal_event``."""
    seal, ttl_ns = seal_event(session, message, class_of, now_ns), message.b * 1_000_000
    return ev.Begin(now_ns, session, seal.frame_class, ttl_ns, seal.parent, seal.addresses, seal.rows)


def publish_event(session: int, message: Message, now_ns: int) -> ev.Publish:
    """Return the event of a ``PUBLISH``. Raises InvalidRequest if it is invalid."""
    body, count = message.body, message.entries
    addresses_at = KEY_BYTES + control.CHAINED.size
    addresses = control.unpack_addresses(body, count, addresses_at)
    keys = control.unpack_keys(body, count, addresses_at + count * ADDRESS_BYTES)
    position, before = control.CHAINED.unpack_from(body, KEY_BYTES)
    return ev.Publish(now_ns, session, message.a, control.unpack_key(body, 0), position, before, addresses, keys)


def retract_event(session: int, message: Message, now_ns: int) -> ev.Retract:
    """Return the event of a ``RETRACT``. Raises InvalidRequest if it is invalid."""
    return ev.Retract(now_ns, session, message.a, control.unpack_addresses(message.body, message.entries))


def _checksums(body: memoryview, offset: int, count: int, layers: int) -> npt.NDArray[np.uint32]:
    if len(body) < offset + 4 * count * layers:
        raise InvalidRequest("checksums", f"{count} pages of {layers} layers need {4 * count * layers} bytes")
    return np.frombuffer(body, np.uint32, count * layers, offset).reshape(count, layers)


# --- the log of puts -------------------------------------------------------------------------------------------------


def open_log(folder: NodeFolder, header: Header) -> PutLog | None:
    """Return the log that the header names, or a new one; None if there is no memory for it."""
    puts = PutLog.open(folder, header.puts_id)
    if puts is None:
        header.puts_id = 0
        try:
            puts = PutLog.create(folder)
        except OutOfSpace as error:
            log.warning("puts are not published in shared memory: %s", error)
            return None
        header.puts_id = puts.id
    return puts


@dataclass
class _DelayedSlot:
    """A slot with a record that must be retried, because its pages are being saved to NVMe.

    Attributes:
        stop: the published position of the slot when it was read.
        retry_s: when to read the slot again.
        done: positions of later records that are already taken in.
    """

    stop: int
    retry_s: float
    done: set[int] = field(default_factory=set)


class _Record(NamedTuple):
    """A record of a slot.

    Attributes:
        position: the end of the record.
        stop: the published position of the slot when the record was read.
        event: the record's event; None if the record is invalid or already taken in.
    """

    slot: int
    position: int
    stop: int
    event: ev.Event | None


class PutDrain:
    """The reader of the log, from the node's start to ``end``.

    The node calls ``take_in`` before each decision, with its mutex held. Other threads call ``drain``.

    Attributes:
        records: number of records of puts and of mounted pages that were taken in.
    """

    def __init__(self, performer: Performer, state: NodeState, contents: Contents, mutex: Deciding) -> None:
        self.records = 0
        self._puts = performer.puts
        self._performer = performer
        self._state = state
        self._class_of = contents.class_of
        self._mutex = mutex
        self._delayed: dict[int, _DelayedSlot] = {}  # by slot
        self._decoders: dict[int, Callable[[int, int, Message], ev.Event]] = {
            Op.SEAL_GRANTED: self._seal_granted,
            Op.SEAL_OBJECTS: self._seal_objects,
            Op.BEGIN: self._begin,
            Op.LEASE: self._lease,
            Op.RELEASE: self._release,
            Op.PUBLISH: self._publish,
            Op.RETRACT: self._retract,
        }

    def end(self) -> None:
        """Take in everything. The next start takes in later records. The caller holds the mutex."""
        self.take_in()
        self._puts = None

    def drain(self) -> None:
        """Take in everything that was published before this call, and write the names that came with it."""
        with self._mutex:
            self.take_in()
        self._performer.book.flush()

    def take_in(self) -> None:
        """Take in all published records. The caller holds the mutex, and calls ``Book.flush`` afterwards.

        This takes half a microsecond if there are no records.
        """
        puts = self._puts
        if puts is None or puts.is_drained:
            return
        damaged: list[int] = []
        with DECIDED:
            records = list(chain.from_iterable(self._read(puts, slot, damaged) for slot in puts.waiting()))
            try:
                for record in records:  # leases first, so that no other session's put evicts a leased page
                    if type(record.event) is ev.TakeLease:
                        self._performer.perform(self._state.handle(record.event))
            finally:
                for group in _groups(records):
                    self._take_in(puts, group)
                for slot in damaged:
                    puts.close(slot)

    def _read(self, puts: PutLog, slot: int, damaged: list[int]) -> Iterator[_Record]:
        """Yield the current records of a slot, oldest first."""
        session = puts.session(slot)
        if not session:
            puts.skip(slot)
            return
        now_s, stop, delayed = time.monotonic(), puts.published(slot), self._delayed.pop(slot, None)
        if delayed is not None and delayed.stop == stop and now_s < delayed.retry_s:
            self._delayed[slot] = delayed
            return
        done = delayed.done if delayed is not None else ()
        try:
            for position, request in puts.records(slot):
                event = self._event(session, position, request) if position not in done else None
                yield _Record(slot, position, stop, event)
        except LogDamaged as error:
            self._log_damage("a session's log of puts is damaged, and is not read further", error)
            damaged.append(slot)

    def _event(self, session: int, position: int, request: bytes) -> ev.Event | None:
        """Return a record's event; None for an invalid record, which is skipped."""
        try:
            with _READ:
                message = control.decode(memoryview(request))
                decode = self._decoders.get(message.op)
                if decode is None or message.entries > control.BATCH_MAX:
                    raise InvalidRequest("op", f"cannot be published (got {message.op} with {message.entries} pages)")
                return decode(session, position, message)
        except (InvalidRequest, InternalError) as error:
            self._log_damage("a published request is invalid, and is skipped", error)
            return None

    def _seal_granted(self, session: int, position: int, message: Message) -> ev.Event:
        if message.flags & control.OBJECT:
            raise InvalidRequest("flags", "an object cannot be published as a page")
        event = seal_event(session, message, self._class_of, time.monotonic_ns())
        event.number = position
        return event

    def _seal_objects(self, session: int, position: int, message: Message) -> ev.Event:
        event = objects_event(session, message, self._class_of, time.monotonic_ns())
        if event.replaces.count(NOWHERE) != message.entries:
            raise InvalidRequest("replaces", "an object that replaces another one cannot be published")
        event.number = position
        return event

    def _begin(self, session: int, position: int, message: Message) -> ev.Event:
        return begin_event(session, message, self._class_of, time.monotonic_ns())

    @staticmethod
    def _lease(session: int, position: int, message: Message) -> ev.Event:
        addresses = control.unpack_addresses(message.body, message.entries)
        return ev.TakeLease(time.monotonic_ns(), session, message.a, message.b * 1_000_000, addresses)

    @staticmethod
    def _release(session: int, position: int, message: Message) -> ev.Event:
        return ev.ReleaseLease(time.monotonic_ns(), session, message.a)

    @staticmethod
    def _publish(session: int, position: int, message: Message) -> ev.Event:
        return publish_event(session, message, time.monotonic_ns())

    @staticmethod
    def _retract(session: int, position: int, message: Message) -> ev.Event:
        return retract_event(session, message, time.monotonic_ns())

    def _log_damage(self, message: str, error: Exception) -> None:
        logs.event(log, logging.ERROR, message, reason=str(error))
        self._state.counters["put_logs_damaged"] += 1

    def _take_in(self, puts: PutLog, records: list[_Record]) -> None:
        """Decide about each record, perform all of them as one decision, and mark them.

        A record with an unexpected error is marked too, so that it fails only once, and not in every later decision or
        daemon.
        """
        instructions: list[do.Instruction] = []
        statuses: list[list[int]] = []
        try:
            for record in records:
                statuses.append([])
                event = record.event
                if isinstance(event, _BATCHED):
                    event.joins = bool(instructions)
                    instructions += self._decide(event, statuses)
                elif type(event) is not ev.TakeLease and event is not None:
                    earlier, instructions = instructions, []
                    self._performer.perform(earlier)
                    self._performer.perform(self._decide(event, statuses))
        finally:
            try:
                self._performer.perform(instructions)
            finally:
                for record, page_statuses in zip(records, statuses, strict=False):
                    self._mark(puts, record, _BUSY not in page_statuses)

    def _decide(self, event: ev.Event, statuses: list[list[int]]) -> list[do.Instruction]:
        """Return the instructions of an event. Replace the last item of ``statuses`` with the reply's statuses."""
        *instructions, reply = self._state.handle(event)
        assert type(reply) is do.Reply, "the state replies to these events"
        statuses[-1] = reply.statuses
        return instructions

    def _mark(self, puts: PutLog, record: _Record, is_done: bool) -> None:
        """Mark a record as taken in, or delay its slot if it is not done."""
        if is_done and isinstance(record.event, ev.SealGranted | ev.SealObjects):
            self._state.counters["puts_drained"] += 1
        if type(record.event) in _BATCHED:
            self.records += 1
        if failpoint.ACTIVE:
            failpoint.hit("node.drained")
        delayed = self._delayed.get(record.slot)
        if not is_done and delayed is None:
            delayed = self._delayed[record.slot] = _DelayedSlot(record.stop, time.monotonic() + RETRY_S)
        if delayed is None:
            puts.mark(record.slot, record.position)
        elif is_done:
            delayed.done.add(record.position)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def sessions(self) -> list[int]:
        """Return the sessions that have a slot."""
        return list(self._puts.sessions()) if self._puts is not None else []

    def assign_slot(self, session: int) -> dict[str, Any] | None:
        """Assign a slot to a session, and describe it for the reply to HELLO; return None if there is none."""
        with self._mutex:
            puts = self._puts
            slot = puts.assign(session) if puts is not None else None
            if puts is None or slot is None:
                return None
            return {"id": f"{puts.id:016x}", "slot": slot, "pid": os.getpid()}

    def may_end(self, session: int) -> bool:
        """Return True if everything that a dead session published is taken in. The caller holds the mutex."""
        self.take_in()  # what it published just before its death
        puts = self._puts
        slot = puts.sessions().get(session) if puts is not None else None
        return puts is None or slot is None or puts.drained_position(slot) == puts.published(slot)

    def free_slot(self, session: int) -> None:
        """Free the slot of a session whose frames are free. The caller holds the mutex."""
        puts = self._puts
        slot = puts.sessions().get(session) if puts is not None else None
        if puts is not None and slot is not None:
            puts.free(slot)


def _groups(records: list[_Record]) -> Iterator[list[_Record]]:
    """Divide the records, in order, into groups that are performed as one decision each."""
    group: list[_Record] = []
    pages = 0
    for record in records:
        group.append(record)
        pages += len(record.event.addresses) if isinstance(record.event, _BATCHED) else 0
        if pages >= GROUP_PAGES:
            yield group
            group, pages = [], 0
    if group:
        yield group
