"""Dispatcher: decodes a request, calls the node, and encodes the reply.

``socket_server`` uses it for requests over the unix socket, and ``InProcessChannel`` for clients in the node's process.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore import boundary, failpoint
from kvstore.client.local.publisher import Copies
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable, Unavailable
from kvstore.model.replica import ADDRESS_BYTES, KEY_BYTES, SHARDS_MAX, Status
from kvstore.node.node import Node
from kvstore.node.operator.admin import Admin
from kvstore.node.put_drain import begin_event, objects_event, publish_event, retract_event, seal_event
from kvstore.node.scrubber import Scrubber
from kvstore.shm.counters import SessionCounters
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.mounts import MOUNTED_FRAMES_MAX
from kvstore.wire import control
from kvstore.wire.control import BATCH_MAX, Message, Op
from kvstore.wire.tombstones import unpack_tombstones

TEXT_MAX = 4096  # characters of an error
# Requests that a node refuses while it ends.
_WRITES = frozenset((Op.GRANT, Op.SEAL_GRANTED, Op.BEGIN, Op.RESERVE, Op.SEAL, Op.PREFETCH, Op.DELETE, Op.MOUNT))
_WRITES |= {Op.SEAL_OBJECTS, Op.BURY}


class Dispatcher:
    """The dispatcher of a node. Invalid requests change nothing.

    Attributes:
        wake: wakes the mover, because there may be pages to copy between tiers.
    """

    def __init__(self, node: Node, scrubber: Scrubber, wake: Callable[[], None]) -> None:
        self.node = node
        self.scrubber = scrubber
        self.wake = wake
        self._verbs: dict[int, Callable[[int, Message, int], bytes]] = {
            Op.GRANT: self._grant,
            Op.SEAL_GRANTED: self._seal_granted,
            Op.SEAL_OBJECTS: self._seal_objects,
            Op.BEGIN: self._begin,
            Op.RESERVE: self._reserve,
            Op.SEAL: self._seal,
            Op.REVOKE: self._revoke,
            Op.LEASE: self._lease,
            Op.RENEW: self._renew,
            Op.RELEASE: self._release,
            Op.SCRUB: self._scrub,
            Op.PREFETCH: self._prefetch,
            Op.DELETE: self._delete,
            Op.BURY: self._bury,
            Op.ADMIN: self._admin,
            Op.DRAIN: self._drain,
            Op.MOUNT: self._mount,
            Op.PUBLISH: self._publish,
            Op.RETRACT: self._retract,
            Op.UNMOUNT: self._unmount,
            Op.OWED: self._owed,
        }
        self._guards = {op: boundary.RequestGuard(f"control/{Op(op).name}") for op in self._verbs}
        self.admin = Admin(node, scrubber, wake)

    def hello(self, message: Message) -> tuple[int, bytes]:
        """Answer the first message of a connection. Return the session (0 if it is refused) and the reply."""
        try:
            if message.op != Op.HELLO:
                raise InvalidRequest("message", "the first request must be HELLO")
            hello = control.unpack_json(message.body)
            protocol = hello.get("protocol")
            if protocol != control.PROTOCOL:
                raise InvalidRequest("protocol", f"must be {control.PROTOCOL} (got {protocol!r})")
            if message.a == 0:
                raise InvalidRequest("session", "must not be 0")
            granted = hello.get("granted")
            if granted is not None and not isinstance(granted, int):
                raise InvalidRequest("granted", "must be a generation")
        except InvalidRequest as error:
            return 0, _refused(message, error)
        reply = self.node.handle(ev.SessionOpened(time.monotonic_ns(), message.a, granted))
        if reply.status != Status.OK:
            reason = f"{self.node.config.sessions_max} sessions are open, sessions_max allows no more"
            return 0, _failed(message, reason)
        incarnation, puts = f"{self.node.incarnation:016x}", self.node.puts.assign_slot(message.a)
        about = {"name": self.node.config.name, "incarnation": incarnation, "puts": puts}
        return message.a, control.encode(Status.OK, message.request_id, body=[control.pack_json(about)])

    def exchange(self, session: int, message: Message) -> bytes | None:
        """Handle a request. Returns the reply, or None if the client wants none."""
        try:
            if message.entries > BATCH_MAX:
                raise InvalidRequest("count", f"must be at most {BATCH_MAX} (got {message.entries})")
            verb = self._verbs.get(message.op)
            if verb is None:
                raise InvalidRequest("op", f"is unknown (got {message.op})")
            if self.node.ending and message.op in _WRITES:
                raise NodeUnavailable(f"{self.node.config.name}: the node is ending")
            with self._guards[message.op]:
                reply = verb(session, message, time.monotonic_ns())
        except InvalidRequest as error:
            reply = _refused(message, error)
        except KVStoreError as error:
            reply = _failed(message, str(error))
        if failpoint.ACTIVE:
            failpoint.hit("node.reply")
        return None if message.flags & control.NO_REPLY else reply

    def may_take_long(self, message: Message) -> bool:
        """Return True if a request needs another thread: a long admin call, or a request that reads or erases on
        NVMe."""
        if message.op == Op.SEAL_GRANTED:
            replaces = message.flags & control.OBJECT and any(message.body[-ADDRESS_BYTES:])
            return bool(replaces) and self.node.nvme is not None
        if message.op == Op.SEAL_OBJECTS:
            return self.node.nvme is not None and any(message.body[-ADDRESS_BYTES * message.entries :])
        if message.op in (Op.DELETE, Op.BURY):
            return self.node.nvme is not None
        try:
            if message.op == Op.SCRUB:  # one page of a few MiB in DRAM takes only a millisecond or two
                return message.entries > 1 or not self._is_mapped(message)
            return self.admin.may_take_long(control.unpack_json(message.body))
        except InvalidRequest:
            return False  # ``exchange`` refuses it

    def _is_mapped(self, message: Message) -> bool:
        addresses = control.unpack_addresses(message.body, message.entries)
        return all(self.node.contents.mapped(address.extent) for address in addresses)

    # --- verbs ------------------------------------------------------------------------------------------------------

    def _grant(self, session: int, message: Message, now_ns: int) -> bytes:
        frame_class = control.unpack_class(message.a)
        self.node.check_class(frame_class)
        anchor = control.unpack_key(message.body, 0) if message.body else b""
        root = control.unpack_key(message.body, KEY_BYTES) if len(message.body) > KEY_BYTES else b""
        ahead = bool(message.flags & control.AHEAD)
        grant = ev.Grant(now_ns, session, frame_class, message.entries, ahead, anchor, message.b, root)
        reply = self.node.handle(grant)
        if reply.status == Status.BUSY:
            self.wake()
        body = [control.pack_addresses(reply.addresses)]
        return control.encode(reply.status, message.request_id, count=len(reply.addresses), body=body)

    def _seal_granted(self, session: int, message: Message, now_ns: int) -> bytes:
        event = seal_event(session, message, self.node.contents.class_of, now_ns)
        reply = self.node.handle(event)
        if Status.BUSY in reply.statuses:
            self.wake()
        return _statuses(message, reply)

    def _seal_objects(self, session: int, message: Message, now_ns: int) -> bytes:
        reply = self.node.handle(objects_event(session, message, self.node.contents.class_of, now_ns))
        if Status.BUSY in reply.statuses:
            self.wake()
        return _statuses(message, reply)

    def _begin(self, session: int, message: Message, now_ns: int) -> bytes:
        event = begin_event(session, message, self.node.contents.class_of, now_ns)
        return control.encode(_check(self.node.handle(event)).status, message.request_id)

    def _reserve(self, session: int, message: Message, now_ns: int) -> bytes:
        frame_class = control.unpack_class(message.a)
        self.node.check_class(frame_class)
        count, body = _positive_count(message), message.body
        parent = control.unpack_key(body, control.WRITER.size)  # raises if the body is too short for WRITER
        group, shard, shards = control.WRITER.unpack_from(body)
        if not 1 <= shards <= SHARDS_MAX or shard >= shards:
            raise InvalidRequest("ranks", f"at most {SHARDS_MAX} ranks write one page (got rank {shard} of {shards})")
        if group == 0:
            raise InvalidRequest("group", "must not be 0")
        rows = control.unpack_rows(body, count, frame_class.page_tokens, control.WRITER.size + KEY_BYTES)
        ttl_ns = (message.b or int(self.node.config.reserve_ttl_s * 1000)) * 1_000_000
        event = ev.Reserve(now_ns, session, frame_class, group, shard, shards, ttl_ns, parent, rows)
        event.hints = control.unpack_hints(message)
        reply = _check(self.node.handle(event))
        if Status.BUSY in reply.statuses:
            self.wake()
        reply_body = [control.pack_statuses(reply.statuses), control.pack_addresses(reply.addresses)]
        return control.encode(reply.status, message.request_id, count=count, body=reply_body)

    def _seal(self, session: int, message: Message, now_ns: int) -> bytes:
        addresses = control.unpack_addresses(message.body, message.entries)
        return _statuses(message, self.node.handle(ev.Seal(now_ns, session, message.a, addresses)))

    def _revoke(self, session: int, message: Message, now_ns: int) -> bytes:
        addresses = control.unpack_addresses(message.body, message.entries)
        shard = message.a - 1 if message.a else None
        return _statuses(message, self.node.handle(ev.Revoke(now_ns, session, addresses, shard)))

    def _lease(self, session: int, message: Message, now_ns: int) -> bytes:
        addresses = control.unpack_addresses(message.body, message.entries)
        event = ev.TakeLease(now_ns, session, message.a, message.b * 1_000_000, addresses)
        return _statuses(message, self.node.handle(event))

    def _renew(self, session: int, message: Message, now_ns: int) -> bytes:
        return _statuses(message, self.node.handle(ev.RenewLease(now_ns, session, message.a, message.b * 1_000_000)))

    def _release(self, session: int, message: Message, now_ns: int) -> bytes:
        return _statuses(message, self.node.handle(ev.ReleaseLease(now_ns, session, message.a)))

    def _scrub(self, session: int, message: Message, now_ns: int) -> bytes:
        addresses = control.unpack_addresses(message.body, message.entries)
        statuses = [int(self.scrubber.scrub(address)) for address in addresses]
        return _statuses(message, do.Reply(statuses=statuses))

    def _prefetch(self, session: int, message: Message, now_ns: int) -> bytes:
        addresses = control.unpack_addresses(message.body, message.entries)
        hint = bool(message.flags & control.HINT)
        reply = self.node.handle(ev.Prefetch(now_ns, session, addresses, hint))
        self.wake()
        return _statuses(message, reply)

    def _delete(self, session: int, message: Message, now_ns: int) -> bytes:
        addresses = control.unpack_addresses(message.body, _positive_count(message))
        reply = self.node.handle(ev.Delete(now_ns, addresses))
        if Status.BUSY in reply.statuses:
            self.wake()
        return _statuses(message, reply)

    def _bury(self, session: int, message: Message, now_ns: int) -> bytes:
        tombstones = unpack_tombstones(message.body, _positive_count(message), now_ns)
        reply = self.node.handle(ev.Bury(now_ns, tombstones))
        if Status.BUSY in reply.statuses:
            self.wake()
        return _statuses(message, reply)

    def _drain(self, session: int, message: Message, now_ns: int) -> bytes:
        self.node.puts.drain()
        return control.encode(Status.OK, message.request_id)

    def _mount(self, session: int, message: Message, now_ns: int) -> bytes:
        frame_class = control.unpack_class(message.a)
        if not 1 <= message.b <= MOUNTED_FRAMES_MAX:
            raise InvalidRequest("frames", f"must be from 1 to {MOUNTED_FRAMES_MAX} (got {message.b})")
        reply = self.node.handle(ev.Mount(now_ns, session, frame_class, message.b))
        return control.encode(reply.status, message.request_id, a=reply.detail.get("segment", 0))

    def _publish(self, session: int, message: Message, now_ns: int) -> bytes:
        return _statuses(message, self.node.handle(publish_event(session, message, now_ns)))

    def _retract(self, session: int, message: Message, now_ns: int) -> bytes:
        return _statuses(message, self.node.handle(retract_event(session, message, now_ns)))

    def _unmount(self, session: int, message: Message, now_ns: int) -> bytes:
        return _statuses(message, self.node.handle(ev.Unmount(now_ns, session, message.a)))

    def _owed(self, session: int, message: Message, now_ns: int) -> bytes:
        keys = control.unpack_keys(message.body, _positive_count(message), 0)
        if message.a:
            self.node.handle(ev.WantCopies(now_ns, keys, owe=message.a == 1))
        owed_of = self.node.owed_of
        # Before the replicator has started, each page may be owed.
        status = Status.BUSY if self.node.performer.header.replicas else Status.OK
        statuses = owed_of(keys) if owed_of is not None else [int(status)] * len(keys)
        return _statuses(message, do.Reply(statuses=statuses))

    def _admin(self, session: int, message: Message, now_ns: int) -> bytes:
        body = control.pack_json(self.admin.call(control.unpack_json(message.body)))
        limit = control.MESSAGE_BYTES_MAX - control.HEAD.size
        if len(body) > limit:  # only for thousands of findings
            body = control.pack_json({"findings": ["too many to list"], "truncated": True})
        return control.encode(Status.OK, message.request_id, body=[body])


def _positive_count(message: Message) -> int:
    if message.entries == 0:
        raise InvalidRequest("count", "must not be 0")
    return message.entries


def _check(reply: do.Reply) -> do.Reply:
    """Return the reply, or raise InvalidRequest if the state refused the event."""
    if reply.status == Status.INVALID:
        raise InvalidRequest(reply.detail["field"], reply.detail["reason"])
    return reply


def _statuses(message: Message, reply: do.Reply) -> bytes:
    _check(reply)
    body = [control.pack_statuses(reply.statuses)]
    return control.encode(reply.status, message.request_id, count=len(reply.statuses), body=body)


def _refused(message: Message, error: InvalidRequest) -> bytes:
    return control.encode(Status.INVALID, message.request_id, body=[_text(f"{error.field}\0{error.reason}")])


def _failed(message: Message, reason: str) -> bytes:
    return control.encode(Status.FAILED, message.request_id, body=[_text(reason)])


def _text(text: str) -> bytes:
    """Encode an error text. It may quote a client's input, which may be long or not valid Unicode."""
    return text[:TEXT_MAX].encode(errors="replace")


@dataclass(frozen=True)
class _ReadyReply:
    """A ``PendingReply`` that has its message already."""

    message: Message

    def result(self) -> Message:
        """Return the message."""
        return self.message


def closed() -> NodeUnavailable:
    """Return the error of requests and copies after the store was closed."""
    return NodeUnavailable("the store is closed")


class InProcessChannel:
    """A ``Channel`` to a node of this process. The caller's thread handles each request, under the node's mutex."""

    def __init__(self, node: Node, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._session = secrets.randbits(63) | 1
        self.ended = False
        self.copies = Copies()
        self.publisher = None  # nothing is published in shared memory, because a request is only a function call
        self.counters = SessionCounters()
        node.sessions.join(self._session, self.counters)
        node.handle(ev.SessionOpened(time.monotonic_ns(), self._session))

    @property
    def session(self) -> int:
        """The number of this channel's session."""
        return self._session

    def request(
        self,
        op: Op,
        *,
        count: int = 0,
        a: int = 0,
        b: int = 0,
        flags: int = 0,
        body: Iterable[bytes] = (),
        timeout_s: float | None = None,
    ) -> _ReadyReply:
        """Handle a request and return its reply. Ignores ``timeout_s``, since it waits only for the node's mutex.

        Raises:
            InvalidRequest, Unavailable: the node refused the request.
            NodeUnavailable: the channel is closed.
        """
        if self.ended:
            raise closed()
        request = control.encode(op, 0, count=count, a=a, b=b, flags=flags, body=body)
        reply = self._dispatcher.exchange(self._session, control.decode(memoryview(request)))
        message = control.decode(memoryview(reply or control.encode(Status.OK, 0)))
        if message.op == Status.INVALID:
            field, _, reason = bytes(message.body).decode().partition("\0")
            raise InvalidRequest(field, reason)
        if message.op == Status.FAILED:
            raise Unavailable(bytes(message.body).decode())
        return _ReadyReply(message)

    def close(self) -> None:
        """End the session when the copies in flight have ended. A second call does nothing."""
        if not self.ended:
            self.ended = True
            self.copies.close(closed, self._leave)

    def _leave(self) -> None:
        self._node.sessions.leave(self._session)
        self._node.handle(ev.SessionDead(time.monotonic_ns(), self._session))

    def wait_for_copies(self, deadline_s: float) -> bool:
        """Refuse new copies, and wait for those in flight. Returns False if some have not ended by ``deadline_s``."""
        ended = threading.Event()
        self.copies.close(closed, ended.set)
        return ended.wait(max(0.0, deadline_s - time.monotonic()))
