"""PutDrain: takes in what clients published in the log of puts, before the node decides about anything else.

A record is decided like the request that it contains. Puts are performed together, in one transaction of the index, and
then marked. If a page is rejected (another writer was first, its parent has left), its frame is free at once, and the
writer is not told. An invalid record is skipped, and a damaged slot is not read further: its frames are freed when the
session ends.

A parent may leave for NVMe just before its child is published. Then the child follows it there, and its record stays
until it has arrived: it is retried every ``AGAIN_S``, also by the next daemon, while later records are taken in.

Sealing: turns a client's request to seal granted frames, or to announce what it writes there, into an event for the
state.

The request comes over the control socket or from the log of puts, with the same bytes and the same checks.
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
from kvstore.node.frame_view import Contents
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

ClassOf = Callable[[int], FrameClass | None]
"""Returns the class of an extent's frames; None if there is no such extent."""


def seal_event(session: int, message: Message, class_of: ClassOf, now_ns: int) -> ev.SealGranted:
    """Return the event of a ``SEAL_GRANTED``; its rows are a view of the message.

    Raises:
        InvalidRequest: the request is invalid.
    """
    frame_class = control.unpack_class(message.a)
    count, body = message.entries, message.body
    if count == 0:
        raise InvalidRequest("count", "must not be 0")
    width = identity_bytes(frame_class.page_tokens)
    parent = control.unpack_key(body, 0)
    addresses = control.unpack_addresses(body, count, KEY_BYTES)
    start = KEY_BYTES + count * ADDRESS_BYTES
    rows = control.unpack_rows(body, count, frame_class.page_tokens, start)
    sums = None
    if message.flags & control.CHECKSUMS:
        sums = _checksums(body, start + count * width, count, frame_class.layers)
    addresses = _of_class(addresses, frame_class, class_of)
    continues = bool(message.flags & control.CONTINUES)
    hints = control.unpack_hints(message)
    event = ev.SealGranted(now_ns, session, frame_class, parent, addresses, rows, sums, continues, hints=hints)
    if message.flags & control.OBJECT:
        if count != 1 or sums is not None:
            raise InvalidRequest("count", "one object at a time, without checksums")
        event.replaces = control.unpack_addresses(body, 1, start + width)[0]
    return event


def objects_event(session: int, message: Message, class_of: ClassOf, now_ns: int) -> ev.SealObjects:
    """The event of a ``SEAL_OBJECTS``; its rows are a view of the message. Raises as ``seal_event``."""
    frame_class = control.unpack_class(message.a)
    count, body = message.entries, message.body
    if count == 0:
        raise InvalidRequest("count", "must not be 0")
    addresses = control.unpack_addresses(body, count)
    rows = control.unpack_rows(body, count, frame_class.page_tokens, count * ADDRESS_BYTES)
    start = count * (ADDRESS_BYTES + identity_bytes(frame_class.page_tokens))
    stop = start + count * ADDRESS_BYTES
    nothing = bytes(body[start:stop]) == bytes(count * ADDRESS_BYTES)
    replaces = [NOWHERE] * count if nothing else control.unpack_addresses(body, count, start)
    addresses = _of_class(addresses, frame_class, class_of)
    return ev.SealObjects(now_ns, session, frame_class, addresses, rows, replaces)


def _of_class(addresses: list[Address], frame_class: FrameClass, class_of: ClassOf) -> list[Address]:
    """Return the addresses, void if the extent is gone. Raises InvalidRequest if an extent is of another class."""
    for number in {address.extent for address in addresses}:
        there = class_of(number)
        if there is None:  # dropped since: its addresses are of no frame now
            # Each stays a distinct address, since an address that is named twice is refused.
            addresses = [a if a.extent != number else Address(0, i, 0) for i, a in enumerate(addresses)]
        elif there != frame_class:
            raise InvalidRequest("addresses", f"extent {number} holds frames of another class")
    return addresses


def begin_event(session: int, message: Message, class_of: ClassOf, now_ns: int) -> ev.Begin:
    """The event of a ``BEGIN``. Raises as ``seal_event``."""
    said, ttl_ns = seal_event(session, message, class_of, now_ns), message.b * 1_000_000
    return ev.Begin(now_ns, session, said.frame_class, ttl_ns, said.parent, said.addresses, said.rows)


def publish_event(session: int, message: Message, now_ns: int) -> ev.Publish:
    """The event of a ``PUBLISH``. Raises InvalidRequest if it is invalid."""
    body, count = message.body, message.entries
    addresses_at = KEY_BYTES + control.CHAINED.size
    addresses = control.unpack_addresses(body, count, addresses_at)
    keys = control.unpack_keys(body, count, addresses_at + count * ADDRESS_BYTES)
    position, before = control.CHAINED.unpack_from(body, KEY_BYTES)
    return ev.Publish(now_ns, session, message.a, control.unpack_key(body, 0), position, before, addresses, keys)


def retract_event(session: int, message: Message, now_ns: int) -> ev.Retract:
    """The event of a ``RETRACT``. Raises InvalidRequest if it is invalid."""
    return ev.Retract(now_ns, session, message.a, control.unpack_addresses(message.body, message.entries))


def _checksums(body: memoryview, offset: int, count: int, layers: int) -> npt.NDArray[np.uint32]:
    if len(body) < offset + 4 * count * layers:
        raise InvalidRequest("checksums", f"{count} pages of {layers} layers need {4 * count * layers} bytes")
    return np.frombuffer(body, np.uint32, count * layers, offset).reshape(count, layers)


log = logging.getLogger("kvstore.node")

_BUSY = int(Status.BUSY)
_READ = boundary.RequestGuard("control/published")
# Performed together, and more of them may come soon.
_WATCHED = ev.SealGranted, ev.SealObjects, ev.Publish, ev.Retract
PAGES_TOGETHER = 64  # of records in one decision, which bounds the memory of its index transaction
AGAIN_S = 0.005  # between checks of records whose pages are being saved to NVMe


def open_log(folder: NodeFolder, header: Header) -> PutLog | None:
    """Return the log that the header names, or a new one; None if there is no memory for it."""
    found = PutLog.open(folder, header.puts_id)
    if found is None:
        header.puts_id = 0
        try:
            found = PutLog.create(folder)
        except OutOfSpace as error:
            log.warning("puts are not published in shared memory: %s", error)
            return None
        header.puts_id = found.id
    return found


@dataclass
class _Held:
    """A slot with a record whose pages are being saved to NVMe. ``done``: later records that are taken in."""

    stop: int
    again_s: float
    done: set[int] = field(default_factory=set)


class _Record(NamedTuple):
    """A record of a slot, up to ``position``, when that slot was published up to ``stop``. ``event``: its event, or
    None."""

    slot: int
    position: int
    stop: int
    event: ev.Event | None


class PutDrain:
    """The node's side of the log, from the node's start to ``end``. The node calls ``take_in`` before each decision,
    with its mutex held; other threads call ``drain``.

    Attributes:
        times: the number of puts, and of pages in engines' own memory, that were taken in.
    """

    def __init__(self, performer: Performer, state: NodeState, contents: Contents, mutex: Deciding) -> None:
        self.times = 0
        self._puts = performer.puts
        self._performer = performer
        self._state = state
        self._class_of = contents.class_of
        self._mutex = mutex
        self._held: dict[int, _Held] = {}  # by slot
        self._asks: dict[int, Callable[[int, int, Message], ev.Event]] = {
            Op.SEAL_GRANTED: self._seal_granted,
            Op.SEAL_OBJECTS: self._seal_objects,
            Op.BEGIN: self._begin,
            Op.LEASE: self._lease,
            Op.RELEASE: self._release,
            Op.PUBLISH: self._publish,
            Op.RETRACT: self._retract,
        }

    def end(self) -> None:
        """Take in everything; later records are for the next start. The caller holds the mutex."""
        self.take_in()
        self._puts = None

    def drain(self) -> None:
        """Take in everything that was published before this call; the names that came with it are written."""
        with self._mutex:
            self.take_in()
        self._performer.book.flush()

    def take_in(self) -> None:
        """Take in published records, with the mutex held; ``Book.flush`` must follow. Takes half a microsecond if there
        are none."""
        puts = self._puts
        if puts is None or puts.quiet:
            return
        damaged: list[int] = []
        with DECIDED:
            records = list(chain.from_iterable(self._read(puts, slot, damaged) for slot in puts.waiting()))
            try:
                for record in records:  # first: no page that is leased leaves for what another session has published
                    if type(record.event) is ev.TakeLease:
                        self._performer.perform(self._state.handle(record.event))
            finally:
                for some in _together(records):
                    self._take_in(puts, some)
                for slot in damaged:
                    puts.close(slot)

    def _read(self, puts: PutLog, slot: int, damaged: list[int]) -> Iterator[_Record]:
        """Yield the current records of a slot, oldest first."""
        session = puts.session(slot)
        if not session:
            puts.skip(slot)
            return
        now_s, stop, before = time.monotonic(), puts.published(slot), self._held.pop(slot, None)
        if before is not None and before.stop == stop and now_s < before.again_s:
            self._held[slot] = before
            return
        done = before.done if before is not None else ()
        try:
            for position, request in puts.records(slot):
                event = self._event(session, position, request) if position not in done else None
                yield _Record(slot, position, stop, event)
        except LogDamaged as error:
            self._bad("a session's log of puts is damaged, and is not read further", error)
            damaged.append(slot)

    def _event(self, session: int, position: int, request: bytes) -> ev.Event | None:
        """Return a record's event; None for an invalid record, which is skipped."""
        try:
            with _READ:
                message = control.decode(memoryview(request))
                asks = self._asks.get(message.op)
                if asks is None or message.entries > control.BATCH_MAX:
                    raise InvalidRequest("op", f"{message.op}, {message.entries} pages: not published")
                return asks(session, position, message)
        except (InvalidRequest, InternalError) as error:
            self._bad("a published request is invalid, and is skipped", error)
            return None

    def _seal_granted(self, session: int, position: int, message: Message) -> ev.Event:
        if message.flags & control.OBJECT:
            raise InvalidRequest("flags", "an object is not published")
        event = seal_event(session, message, self._class_of, time.monotonic_ns())
        event.number = position
        return event

    def _seal_objects(self, session: int, position: int, message: Message) -> ev.Event:
        event = objects_event(session, message, self._class_of, time.monotonic_ns())
        if event.replaces.count(NOWHERE) != message.entries:
            raise InvalidRequest("replaces", "an object that replaces another is not published")
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

    def _bad(self, what: str, error: Exception) -> None:
        logs.event(log, logging.ERROR, what, reason=str(error))
        self._state.counters["put_logs_damaged"] += 1

    def _take_in(self, puts: PutLog, records: list[_Record]) -> None:
        """Decide about each record, perform that as one decision, and mark them. A record with an unexpected error is
        marked as well, so that it fails only once, and not in every later decision or daemon."""
        out: list[do.Instruction] = []
        statuses: list[list[int]] = []
        try:
            for record in records:
                statuses.append([])
                event = record.event
                if isinstance(event, _WATCHED):
                    event.joins = bool(out)
                    out += self._decided(event, statuses)
                elif type(event) is not ev.TakeLease and event is not None:
                    ready, out = out, []
                    self._performer.perform(ready)
                    self._performer.perform(self._decided(event, statuses))
        finally:
            try:
                self._performer.perform(out)
            finally:
                for record, answer in zip(records, statuses, strict=False):
                    self._mark(puts, record, _BUSY not in answer)

    def _decided(self, event: ev.Event, statuses: list[list[int]]) -> list[do.Instruction]:
        """Return the instructions to perform; the answer is the last of ``statuses``."""
        *decided, reply = self._state.handle(event)
        assert type(reply) is do.Reply, "these events are answered"
        statuses[-1] = reply.statuses
        return decided

    def _mark(self, puts: PutLog, record: _Record, done: bool) -> None:
        if done and isinstance(record.event, ev.SealGranted | ev.SealObjects):
            self._state.counters["puts_drained"] += 1
        if type(record.event) in _WATCHED:
            self.times += 1
        if failpoint.ACTIVE:
            failpoint.hit("node.drained")
        held = self._held.get(record.slot)
        if not done and held is None:
            held = self._held[record.slot] = _Held(record.stop, time.monotonic() + AGAIN_S)
        if held is None:
            puts.mark(record.slot, record.position)
        elif done:
            held.done.add(record.position)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def sessions(self) -> list[int]:
        """The sessions that have a slot."""
        return list(self._puts.sessions()) if self._puts is not None else []

    def give(self, session: int) -> dict[str, Any] | None:
        """Return the slot for a session that said hello, in the form of the reply; None if there is none."""
        with self._mutex:
            puts = self._puts
            slot = puts.give(session) if puts is not None else None
            if puts is None or slot is None:
                return None
            return {"id": f"{puts.id:016x}", "slot": slot, "pid": os.getpid()}

    def may_end(self, session: int) -> bool:
        """Return whether everything that a dead session published is taken in. The caller holds the mutex."""
        self.take_in()  # it may have published until just now
        puts = self._puts
        slot = puts.sessions().get(session) if puts is not None else None
        return puts is None or slot is None or puts.marked(slot) == puts.published(slot)

    def ended(self, session: int) -> None:
        """Free the slot of a session whose frames are free. The caller holds the mutex."""
        puts = self._puts
        slot = puts.sessions().get(session) if puts is not None else None
        if puts is not None and slot is not None:
            puts.free(slot)


def _together(records: list[_Record]) -> Iterator[list[_Record]]:
    """Group the records, in order, into lists that are performed as one decision each."""
    some: list[_Record] = []
    pages = 0
    for record in records:
        some.append(record)
        pages += len(record.event.addresses) if isinstance(record.event, _WATCHED) else 0
        if pages >= PAGES_TOGETHER:
            yield some
            some, pages = [], 0
    if some:
        yield some
