"""KvEvents: what happens to pages, published over ZMQ in the wire format of vLLM's KV events.

PUB ``[topic, number, payload]``: number 8 bytes big-endian, payload msgpack ``[seconds, events, 0]``, an event a map:
"BlockStored", "BlockRemoved" or "AllBlocksCleared" as its "type", and the fields that vLLM gives it. A block is a page,
its hash the 16 bytes of its key, its medium "CPU" (DRAM) or "DISK" (NVMe). ROUTER: ``number`` (with or without an empty
frame before it) asks for all that is kept from there on, answered with ``[number, payload]`` each, and at the end
``[-1, ""]``.

A publisher begins with ``AllBlocksCleared`` and all that is stored, and does so again where it fell behind so far that
events were overwritten. Numbers are consecutive until the daemon ends; the next one's are higher, so that a subscriber
sees a gap and asks. Nothing here is waited for by the node: subscribers that read too slowly miss messages.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from kvstore import boundary
from kvstore.errors import InvalidRequest
from kvstore.service.events import kv_pages
from kvstore.service.events.kv_pages import MEDIUMS, KvEvent, PageReader
from kvstore.service.node.event_log import CLEARED, STORED, PageEvent
from kvstore.service.node.node import Node

log = logging.getLogger("kvstore.events")

TOPIC = b"kv-events"
END = (-1).to_bytes(8, "big", signed=True)
REPLAY_MESSAGES_MAX = 10_000  # kept for subscribers that missed some
REPLAY_BYTES_MAX = 64 << 20
REPLAYS_MAX = 64  # subscribers that are being answered; further ones wait
REPLAY_STUCK_S = 10.0  # one that takes nothing for this long is given up
QUEUED_MAX = 1000  # messages that wait for a slow subscriber (ZMQ's high-water mark)
EVENTS_PER_STEP = 64
LOOK_S = 0.02
RESYNC_EVERY_S = 5.0
JOIN_S = 5.0
LOCAL = ("ipc://", "inproc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:")

DUMPS_MAX = 4  # being read at a time
DUMP_IDLE_S = 60.0  # a dump that nobody reads on is given up
DUMP_PART_BYTES = 80 << 10  # in base64 it fits a message


def needed(field: str) -> tuple[ModuleType, ModuleType]:
    """The modules zmq and msgpack. Raises InvalidRequest naming ``field`` where they are not installed."""
    try:
        import msgpack
        import zmq
    except ImportError as missing:
        raise InvalidRequest(field, f"needs the Python package {missing.name}: install kvstore[events]") from missing
    return zmq, msgpack


class KvEvents:
    """Publishes from ``start`` to ``stop``. Made for nodes that have ``kv_events`` configured."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-kv-events", daemon=True)
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        # Subscriber (identity, maybe an empty frame) -> next number, when it last took one.
        self._replays: dict[tuple[bytes, ...], tuple[int, float]] = {}
        self._next = time.time_ns() // 1000  # above all that an earlier daemon drew
        self._resync_due_s: float | None = 0.0  # everything is to be told anew, from then on
        self._after = 0
        self._pub: Any = None
        self._router: Any = None

    def start(self) -> None:
        """Bind both sockets and begin.

        Raises:
            InvalidRequest: an address cannot be bound, or a package is missing.
        """
        config = self._node.config
        self._zmq, self._msgpack = needed("kv_events")
        context = self._context = self._zmq.Context(io_threads=1)
        try:
            self._pub = self._bind(context, self._zmq.PUB, "kv_events", config.kv_events)
            if config.kv_events_replay:
                self._router = self._bind(context, self._zmq.ROUTER, "kv_events_replay", config.kv_events_replay)
                self._router.setsockopt(self._zmq.ROUTER_MANDATORY, 1)  # tell us who is full or gone
        except InvalidRequest:
            context.destroy(linger=0)
            raise
        if not config.kv_events.startswith(LOCAL):
            log.warning(
                "kv_events: every process that reaches %s learns the token ids of all tenants", config.kv_events
            )
        self._reader = PageReader(self._node.contents)
        self._node.kv_last = lambda: self._next - 1
        self._thread.start()

    def _bind(self, context: Any, kind: int, field: str, address: str) -> Any:
        socket = context.socket(kind)
        socket.setsockopt(self._zmq.SNDHWM, QUEUED_MAX)
        socket.setsockopt(self._zmq.RCVHWM, REPLAYS_MAX)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.MAXMSGSIZE, 1024)  # of what comes in: numbers
        try:
            socket.bind(address)
        except self._zmq.ZMQError as error:
            raise InvalidRequest(field, f"{address!r} cannot be bound: {error}") from error
        return socket

    def stop(self) -> None:
        """Unbind. Subscribers that have not read yet get no more."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        self._node.kv_last = None

    def _run(self) -> None:
        boundary.kept("task/kv events", self._turn, self._stopped)()
        self._context.destroy(linger=0)

    def _turn(self) -> None:
        try:
            busy = self._publish_news()
        except Exception:
            self._resync_later("an event could not be published")
            raise
        busy |= self._serve_replays()
        if not busy:
            self._stopped.wait(LOOK_S)

    # --- publishing -------------------------------------------------------------------------------------------------

    def _publish_news(self) -> bool:
        if self._resync_due_s is not None and time.monotonic() >= self._resync_due_s:
            self._tell_everything()
            return True
        events, self._after, lost = self._node.events.since(self._after, EVENTS_PER_STEP)
        if lost:
            self._resync_later(f"{lost} events were overwritten before they were published")
        if self._resync_due_s is None:
            for event in events:
                self._publish_event(event)
        return bool(events)

    def _resync_later(self, why: str) -> None:
        if self._resync_due_s is None:
            log.warning("KV events: %s: everything is told anew", why)
            self._node.count("kv_events_told_anew")
            self._resync_due_s = time.monotonic() + RESYNC_EVERY_S

    def _tell_everything(self) -> None:
        """Events after this moment's last are told next: what changes meanwhile is told twice, not never."""
        self._after, self._resync_due_s = self._node.events.last, None
        self._reader.forget()
        self._publish([kv_pages.CLEARED], time.time())
        for batch in kv_pages.batches(kv_pages.everything_stored(self._reader)):
            if self._stopped.is_set():
                return
            self._publish(batch, time.time())
            self._serve_replays()

    def _publish_event(self, event: PageEvent) -> None:
        medium = MEDIUMS.get(event.tier, str(event.tier))
        if event.kind == CLEARED:
            self._resync_due_s = 0.0
        elif event.kind in STORED:
            pages = self._reader.stored_now(event.keys, event.tier)
            if pages is None:
                self._resync_later("the index is being rebuilt")
                return
            for batch in kv_pages.batches(kv_pages.blocks_stored(pages, medium)):
                self._publish(batch, event.time_ns / 1e9)
        else:
            self._reader.gone(event.keys, event.tier)
            self._publish([kv_pages.blocks_removed(event.keys, medium)], event.time_ns / 1e9)

    def _publish(self, events: list[KvEvent], seconds: float) -> None:
        payload = self._msgpack.packb([seconds, events, 0])
        seq = self._next
        self._kept.append((seq, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > REPLAY_MESSAGES_MAX or self._kept_bytes > REPLAY_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._next = seq + 1
        try:
            self._pub.send_multipart((TOPIC, seq.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)
        except self._zmq.ZMQError as error:
            log.warning("KV events: number %d was not sent: %s", seq, error)  # it is kept, a gap tells of it

    # --- replay -----------------------------------------------------------------------------------------------------

    def _serve_replays(self) -> bool:
        if self._router is None:
            return False
        while len(self._replays) < REPLAYS_MAX:
            try:
                who, *rest = self._router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.ZMQError:  # nobody asks
                break
            if len(rest) in (1, 2) and len(rest[-1]) <= 8 and (len(rest) == 1 or not rest[0]):
                self._replays[who, *rest[:-1]] = int.from_bytes(rest[-1], "big"), time.monotonic()
        progress = False
        for asker, (seq, since_s) in list(self._replays.items()):
            progress |= self._replay(asker, seq, since_s)
        return progress

    def _replay(self, who: tuple[bytes, ...], seq: int, since_s: float) -> bool:
        """Send what that subscriber can take now; what is left comes with the next step."""
        first = self._kept[0][0] if self._kept else self._next
        seq = started = max(seq, first)
        try:
            while seq < self._next:
                frames = (*who, seq.to_bytes(8, "big"), self._kept[seq - first][1])
                self._router.send_multipart(frames, self._zmq.NOBLOCK)
                seq += 1
            self._router.send_multipart((*who, END, b""), self._zmq.NOBLOCK)
        except self._zmq.Again:
            if seq > started or time.monotonic() - since_s < REPLAY_STUCK_S:
                self._replays[who] = seq, time.monotonic() if seq > started else since_s
                return seq > started
        except self._zmq.ZMQError:  # it has gone
            pass
        del self._replays[who]
        return True


# --- dumps ----------------------------------------------------------------------------------------------------------


class Dumps:
    """The admin call ``kv_dump``: all that is stored, as the payloads of KV events, for late subscribers.

    ``{}`` begins one, ``{"dump": id}`` goes on: ``{"dump": id or None at the end, "data": base64 of payloads end to
    end, "seq": number of the last event published before, None where none are, "after": the same of page events}``.
    A dump that is not read further ends on its own.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._mutex = threading.Lock()
        self._open: OrderedDict[str, tuple[float, dict[str, Any], Iterator[bytes]]] = OrderedDict()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises InvalidRequest where the dump is not, or not any more, being read."""
        _, msgpack = needed("kv_dump")
        now_s = time.monotonic()
        with self._mutex:
            for idle in [name for name, (used_s, *_) in self._open.items() if now_s - used_s > DUMP_IDLE_S]:
                del self._open[idle]
            name: Any = request.get("dump")
            found: tuple[float, dict[str, Any], Iterator[bytes]] | None
            if name is None:
                name, found = secrets.token_hex(8), (now_s, self._heads(), _parts(self._payloads(msgpack.packb)))
                if len(self._open) >= DUMPS_MAX:
                    self._open.popitem(last=False)
            else:
                found = self._open.pop(name, None) if isinstance(name, str) else None
                if found is None:
                    raise InvalidRequest("dump", f"{name!r} is not being read: begin anew")
        _, heads, parts = found
        part = next(parts)
        more = len(part) == DUMP_PART_BYTES
        if more:
            with self._mutex:
                self._open[name] = time.monotonic(), heads, parts
        return {**heads, "dump": name if more else None, "data": base64.b64encode(part).decode()}

    def _heads(self) -> dict[str, Any]:
        last = self._node.kv_last
        return {"seq": last() if last is not None else None, "after": self._node.events.last}

    def _payloads(self, pack: Any) -> Iterator[bytes]:
        yield pack([time.time(), [kv_pages.CLEARED], 0])
        for batch in kv_pages.batches(kv_pages.everything_stored(PageReader(self._node.contents))):
            yield pack([time.time(), batch, 0])


def _parts(payloads: Iterator[bytes]) -> Iterator[bytes]:
    """Their bytes in parts of ``DUMP_PART_BYTES``; the last one is shorter, or empty."""
    part = bytearray()
    for payload in payloads:
        part += payload
        while len(part) >= DUMP_PART_BYTES:
            yield bytes(part[:DUMP_PART_BYTES])
            del part[:DUMP_PART_BYTES]
    yield bytes(part)
