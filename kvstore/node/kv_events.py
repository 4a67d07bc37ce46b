"""KvEvents: publishes a node's page events over ZMQ in the wire format of vLLM's KV events.

The PUB socket sends ``[topic, number, payload]``. The number has 8 bytes, big-endian. The payload is msgpack
``[seconds, events, 0]``. Each event is a map with the fields of vLLM; its "type" is "BlockStored", "BlockRemoved" or
"AllBlocksCleared". A block is a page, its hash is the page's key (16 bytes), and its medium is "GPU" (HBM), "CPU"
(DRAM) or "DISK" (NVMe).

The ROUTER socket replays messages. A subscriber sends a number, with or without an empty frame before it. It receives
``[number, payload]`` of each retained message from this number on, and then ``[-1, ""]``.

A publisher begins with ``AllBlocksCleared`` and all stored pages. It does so again if it was so slow that the event log
lost events. Numbers are consecutive until the daemon ends. The next daemon's numbers are higher, so that a subscriber
detects the gap and asks for a replay. The node never waits for subscribers: a slow one misses messages.

An event needs the page's parent and token ids. ``PageReader`` reads them from the records without a lock. A record is
valid if its word is equal before and after the read. If a page is only on NVMe, its header there has the token ids.
"""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

from kvstore import boundary
from kvstore.errors import InvalidRequest
from kvstore.model.objects import HEAD_TAG, PIECE_TAG
from kvstore.model.replica import Address, FrameState, Tier, word_of
from kvstore.node.contents import Contents
from kvstore.node.event_log import CLEARED, STORED, PageEvent
from kvstore.node.index_keeper import snapshot
from kvstore.node.node import Node
from kvstore.shm.records import ExtentTable, Record
from kvstore.state import prefix_links
from kvstore.tier.nvme import frame_header, geometry
from kvstore.tier.nvme.disk import aligned_buffer
from kvstore.tier.nvme.frame_header import FrameHeader

log = logging.getLogger("kvstore.events")

TOKENS_MAX = 4096  # per batch (about 15 KB), unless one page has more
MEDIUMS = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.NVME: "DISK"}  # names of vLLM, which other consumers use too
TOPIC = b"kv-events"
END = (-1).to_bytes(8, "big", signed=True)
LOCAL = ("ipc://", "inproc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:")
REPLAY_MESSAGES_MAX = 10_000  # messages that are retained for replays ...
REPLAY_BYTES_MAX = 64 << 20  # ... and their bytes
REPLAYS_MAX = 64  # replays at the same time; further ones wait
REPLAY_STUCK_S = 10.0  # a replay ends if its subscriber takes no message for this time
QUEUED_MAX = 1000  # messages that wait for a slow subscriber (ZMQ's high-water mark)
EVENTS_PER_STEP = 64
LOOK_S = 0.02
RESYNC_EVERY_S = 5.0
JOIN_S = 5.0
DUMPS_MAX = 4  # dumps at the same time
DUMP_IDLE_S = 60.0  # a dump ends if its reader does not continue for this time
DUMP_PART_BYTES = 80 << 10  # fits into a message in base64

KvEvent = dict[str, Any]
"""An event as vLLM and SGLang pack it: a map of "type" and the other fields."""

CLEARED_EVENT: Final[KvEvent] = {"type": "AllBlocksCleared"}


def import_packages(field: str) -> tuple[ModuleType, ModuleType]:
    """Return the modules zmq and msgpack.

    Raises:
        InvalidRequest: a package is not installed. The error names ``field``.
    """
    try:
        import msgpack
        import zmq
    except ImportError as missing:
        raise InvalidRequest(field, f"needs the Python package {missing.name}: install kvstore[events]") from missing
    return zmq, msgpack


class KvEvents:
    """The publisher of a node that has ``kv_events`` configured. It publishes from ``start`` to ``stop``."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-kv-events", daemon=True)
        self._retained: deque[tuple[int, bytes]] = deque()  # number and payload
        self._retained_bytes = 0
        # Frames that identify a subscriber -> the next number to send, and the time of the last progress.
        self._replays: dict[tuple[bytes, ...], tuple[int, float]] = {}
        self._next = time.time_ns() // 1000  # higher than all numbers of earlier daemons
        self._resync_due_s: float | None = 0.0  # when to report everything; None if no resync is due
        self._after = 0  # number of the last event read from the node's log
        self._pub: Any = None
        self._router: Any = None

    def start(self) -> None:
        """Bind both sockets and begin to publish.

        Raises:
            InvalidRequest: an address cannot be bound, or a package is not installed.
        """
        config = self._node.config
        self._zmq, self._msgpack = import_packages("kv_events")
        context = self._context = self._zmq.Context(io_threads=1)
        try:
            self._pub = self._bind(context, self._zmq.PUB, "kv_events", config.kv_events)
            if config.kv_events_replay:
                self._router = self._bind(context, self._zmq.ROUTER, "kv_events_replay", config.kv_events_replay)
                self._router.setsockopt(self._zmq.ROUTER_MANDATORY, 1)  # a send to a full or lost peer raises
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
        socket.setsockopt(self._zmq.MAXMSGSIZE, 1024)  # subscribers send only numbers
        try:
            socket.bind(address)
        except self._zmq.ZMQError as error:
            raise InvalidRequest(field, f"cannot be bound: {error} (got {address!r})") from error
        return socket

    def stop(self) -> None:
        """Stop publishing and close the sockets. Queued messages are discarded."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        self._node.kv_last = None

    def _run(self) -> None:
        boundary.thread_loop("task/kv events", self._turn, self._stopped)()
        self._context.destroy(linger=0)

    def _turn(self) -> None:
        try:
            busy = self._publish_new_events()
        except Exception:
            self._schedule_resync("an event could not be published")
            raise
        busy |= self._serve_replays()
        if not busy:
            self._stopped.wait(LOOK_S)

    # --- publishing -------------------------------------------------------------------------------------------------

    def _publish_new_events(self) -> bool:
        if self._resync_due_s is not None and time.monotonic() >= self._resync_due_s:
            self._resync()
            return True
        events, self._after, lost = self._node.events.since(self._after, EVENTS_PER_STEP)
        if lost:
            self._schedule_resync(f"{lost} events were overwritten before they were published")
        if self._resync_due_s is None:
            for event in events:
                self._publish_event(event)
        return bool(events)

    def _schedule_resync(self, why: str) -> None:
        if self._resync_due_s is None:
            log.warning("KV events: %s: everything is reported again", why)
            self._node.count("kv_events_resyncs")
            self._resync_due_s = time.monotonic() + RESYNC_EVERY_S

    def _resync(self) -> None:
        """Publish all stored pages. A change in the meantime may be reported twice, but is never missed."""
        self._after, self._resync_due_s = self._node.events.last, None  # before the pages are read
        self._reader.reset()
        self._publish([CLEARED_EVENT], time.time())
        for batch in batches(everything_stored(self._reader)):
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
                self._schedule_resync("the index is being rebuilt")
                return
            for batch in batches(blocks_stored(pages, medium)):
                self._publish(batch, event.time_ns / 1e9)
        else:
            self._reader.remove(event.keys, event.tier)
            self._publish([blocks_removed(event.keys, medium)], event.time_ns / 1e9)

    def _publish(self, events: list[KvEvent], seconds: float) -> None:
        payload = self._msgpack.packb([seconds, events, 0])
        seq = self._next
        self._retained.append((seq, payload))
        self._retained_bytes += len(payload)
        while len(self._retained) > REPLAY_MESSAGES_MAX or self._retained_bytes > REPLAY_BYTES_MAX:
            self._retained_bytes -= len(self._retained.popleft()[1])
        self._next = seq + 1
        try:
            self._pub.send_multipart((TOPIC, seq.to_bytes(8, "big"), payload), self._zmq.NOBLOCK)
        except self._zmq.ZMQError as error:  # subscribers detect the gap, and may ask for a replay
            log.warning("KV events: number %d was not sent: %s", seq, error)

    # --- replay -----------------------------------------------------------------------------------------------------

    def _serve_replays(self) -> bool:
        if self._router is None:
            return False
        while len(self._replays) < REPLAYS_MAX:
            try:
                identity, *frames = self._router.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.ZMQError:  # no request is waiting
                break
            if len(frames) in (1, 2) and len(frames[-1]) <= 8 and (len(frames) == 1 or not frames[0]):
                self._replays[identity, *frames[:-1]] = int.from_bytes(frames[-1], "big"), time.monotonic()
        progress = False
        for subscriber, (seq, since_s) in list(self._replays.items()):
            progress |= self._replay(subscriber, seq, since_s)
        return progress

    def _replay(self, subscriber: tuple[bytes, ...], seq: int, since_s: float) -> bool:
        """Send as many messages as the subscriber takes now. Returns False if there was no progress."""
        first = self._retained[0][0] if self._retained else self._next
        seq = started = max(seq, first)
        try:
            while seq < self._next:
                frames = (*subscriber, seq.to_bytes(8, "big"), self._retained[seq - first][1])
                self._router.send_multipart(frames, self._zmq.NOBLOCK)
                seq += 1
            self._router.send_multipart((*subscriber, END, b""), self._zmq.NOBLOCK)
        except self._zmq.Again:
            if seq > started or time.monotonic() - since_s < REPLAY_STUCK_S:
                self._replays[subscriber] = seq, time.monotonic() if seq > started else since_s
                return seq > started
        except self._zmq.ZMQError:  # the subscriber has disconnected
            pass
        del self._replays[subscriber]
        return True


# --- reading pages ---------------------------------------------------------------------------------------------------


class PageFacts(NamedTuple):
    """A stored page as an event describes it.

    Attributes:
        parent: key of the parent; None for the first page of a chain.
        tokens: token ids, uint32 little-endian; empty for a page of an opaque object, which is not reported.
    """

    key: bytes
    parent: bytes | None
    tokens: bytes


class PageReader:
    """Reads the stored pages of a node for events. One thread uses it.

    An event may say that a page was stored although the page has been removed since. Such a page is skipped, and so are
    its descendants, until an event says that it was removed. Otherwise, if the page were stored again, its children
    could be reported before it.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._skipped: set[tuple[Tier, bytes]] = set()  # stored according to events, but not reported

    def stored_now(self, keys: list[bytes], tier: Tier) -> list[PageFacts | None] | None:
        """Return the pages that were stored according to an event, with None in place of each page to skip.

        Return None instead of a list if the index cannot be read now.
        """
        pages = self.find(keys, tier)
        absent = [i for i, page in enumerate(pages or ()) if page is None]
        retried = self.find([keys[i] for i in absent], tier) if absent else []  # may have moved inside the tier
        if pages is None or retried is None:
            return None
        for i, page in zip(absent, retried, strict=True):
            pages[i] = page
        return [self._reportable(key, tier, page) for key, page in zip(keys, pages, strict=True)]

    def _reportable(self, key: bytes, tier: Tier, page: PageFacts | None) -> PageFacts | None:
        """Return the page, or None if it must be skipped."""
        if page is None or (page.parent is not None and (tier, page.parent) in self._skipped):
            self._skipped.add((tier, key))
            return None
        self._skipped.discard((tier, key))
        return page

    def remove(self, keys: list[bytes], tier: Tier) -> None:
        """Handle an event that says that these pages were removed."""
        if self._skipped:
            self._skipped.difference_update((tier, key) for key in keys)

    def reset(self) -> None:
        """Start over: everything will be reported again."""
        self._skipped.clear()

    def find(self, keys: list[bytes], tier: Tier) -> list[PageFacts | None] | None:
        """Return the pages with these keys in ``tier``. Return None instead of a list if the index cannot be read
        now."""
        look = self._contents.look
        here = look(tier, keys)
        upper = self._contents.above(tier)
        above = look(upper, keys) if upper is not None else [None] * len(keys)
        if here is None or above is None:
            return None
        return [
            self._read(key, address, copy) if address is not None else None
            for key, address, copy in zip(keys, here, above, strict=True)
        ]

    def stored(self, tier: Tier) -> Iterator[PageFacts]:
        """Yield every page of ``tier``, parents before their children.

        If a page is added, removed or moved in the meantime, an event reports it.
        """
        if tier == Tier.HBM:
            yield from self._stored_by_engines()
            return
        snapshots = [snapshot(table) for table in self._contents.tables(tier)]
        links = prefix_links.link(snapshots)
        order = np.argsort(links.parent, kind="stable")  # puts siblings next to each other
        parents = links.parent[order]
        starts, ends = (np.searchsorted(parents, np.arange(len(parents)), side) for side in ("left", "right"))
        stack = order[parents == -1].tolist()
        while stack:
            i = stack.pop()
            if links.duplicate[i]:
                continue
            key = links.key(i)
            page = self._read(key, links.address(i), None)
            if page is None:
                page = (self.find([key], tier) or [None])[0]  # may have moved since the snapshot
            if self._reportable(key, tier, page) is None or page is None:
                continue  # without its descendants
            stack += order[starts[i] : ends[i]].tolist()
            if page.tokens:
                yield page

    def _stored_by_engines(self) -> Iterator[PageFacts]:
        """Yield every page in memory that engines have mounted. A page there may be without its parent."""
        pages = {key: page for key, address in self._contents.listed(Tier.HBM) if (page := self._mounted(key, address))}
        children: dict[bytes, list[bytes]] = {}
        for key, page in pages.items():
            children.setdefault(page.parent or b"", []).append(key)
        stack = [key for key, page in pages.items() if page.parent not in pages]
        while stack:
            key = stack.pop()
            if self._reportable(key, Tier.HBM, pages[key]) is not None:
                stack += children.get(key, ())
                yield pages[key]

    def _mounted(self, key: bytes, address: Address) -> PageFacts | None:
        """Return a page in memory that an engine has mounted; None if the page is no longer at the address."""
        table = self._contents.mounted(address.extent)
        word = word_of(address.generation, FrameState.SEALED)
        if table is None or address.frame >= table.frames or int(table.words[address.frame]) != word:
            return None
        record = Record(table.rows[address.frame].tobytes(), table.fmt)
        if int(table.words[address.frame]) != word or record.key != key:
            return None
        return PageFacts(key, record.parent if record.parent != record.root else None, record.tokens)

    def _read(self, key: bytes, address: Address, above: Address | None) -> PageFacts | None:
        """Return the page at the address; None if it was removed. ``above``: its address in the next faster tier."""
        table = self._contents.table(address.extent)
        if table is None:
            return self._mounted(key, address)
        if address.frame >= table.frames:
            return None
        record = _record(table, key, address)
        if record is None:
            return None
        if record.extra.startswith((HEAD_TAG, PIECE_TAG)):  # an opaque object has no token ids
            return PageFacts(key, None, b"")
        tokens = self._tokens(key, address, table, record, above)
        parent = record.parent if record.parent != record.root else None
        return None if tokens is None else PageFacts(key, parent, tokens)

    def _tokens(
        self, key: bytes, address: Address, table: ExtentTable, record: Record, above: Address | None
    ) -> bytes | None:
        if record.tokens:
            return record.tokens
        if above is not None:
            upper = self._contents.table(above.extent)
            copy = _record(upper, key, above) if upper is not None and above.frame < upper.frames else None
            if copy is not None and copy.tokens:
                return copy.tokens
        return self._tokens_on_nvme(key, address, table)

    def _tokens_on_nvme(self, key: bytes, address: Address, table: ExtentTable) -> bytes | None:
        nvme, frame_class = self._contents.nvme, table.frame_class
        if nvme is None:
            return None
        buffer = aligned_buffer(geometry.header_bytes(frame_class))
        try:
            nvme.devices.read_header(table.position, address.frame, frame_class, buffer)
        except OSError as error:
            log.warning("frame %d of extent %d could not be read: %s", address.frame, address.extent, error)
            return None
        incarnation = nvme.devices.header_incarnation(table.position)
        header = frame_header.unpack(buffer, frame_class, incarnation, *address)
        return header.tokens.tobytes() if isinstance(header, FrameHeader) and header.key == key else None


def _record(table: ExtentTable, key: bytes, address: Address) -> Record | None:
    """Return the record of a sealed page; None if the page is no longer at the address."""
    word = word_of(address.generation, FrameState.SEALED)
    if int(table.words[address.frame]) != word:
        return None
    record = table.record(address.frame)
    return record if int(table.words[address.frame]) == word and record.key == key else None


# --- events of vLLM --------------------------------------------------------------------------------------------------


def blocks_stored(pages: Iterable[PageFacts | None], medium: str) -> Iterator[KvEvent]:
    """Yield ``BlockStored`` events. Each one covers consecutive pages of a chain with at most ``TOKENS_MAX`` tokens."""
    run: list[PageFacts] = []
    for page in pages:
        if page is None or not page.tokens:
            continue
        follows = run and page.parent == run[-1].key and len(page.tokens) == len(run[-1].tokens)
        if run and not (follows and (len(run) + 1) * len(page.tokens) <= 4 * TOKENS_MAX):
            yield _stored(run, medium)
            run = []
        run.append(page)
    if run:
        yield _stored(run, medium)


def _stored(run: list[PageFacts], medium: str) -> KvEvent:
    return {
        "type": "BlockStored",
        "block_hashes": [page.key for page in run],
        "parent_block_hash": run[0].parent,
        "token_ids": np.frombuffer(b"".join(page.tokens for page in run), "<u4").tolist(),
        "block_size": len(run[0].tokens) // 4,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def blocks_removed(keys: list[bytes], medium: str) -> KvEvent:
    """Return a ``BlockRemoved`` event."""
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": medium}


def everything_stored(reader: PageReader) -> Iterator[KvEvent]:
    """Yield ``BlockStored`` events of all pages in all tiers."""
    for tier, medium in MEDIUMS.items():
        yield from blocks_stored(reader.stored(tier), medium)


def batches(events: Iterable[KvEvent]) -> Iterator[list[KvEvent]]:
    """Group events, in order, into batches of about ``TOKENS_MAX`` token ids."""
    batch: list[KvEvent] = []
    tokens = 0
    for event in events:
        size = len(event.get("token_ids", ())) or 1
        if batch and tokens + size > TOKENS_MAX:
            yield batch
            batch, tokens = [], 0
        batch.append(event)
        tokens += size
    if batch:
        yield batch


# --- dumps -----------------------------------------------------------------------------------------------------------


class Dumps:
    """The admin call ``kv_dump``, by which late subscribers receive all stored pages as payloads of KV events.

    ``{}`` begins a dump, and ``{"dump": id}`` continues it. The answer has "dump" (the id; None at the end), "data" (a
    part of the joined payloads, in base64), "seq" (the number of the last event published before the dump; None if no
    events are published) and "after" (the number of the last page event before the dump). A dump that is not continued
    ends after ``DUMP_IDLE_S``.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._mutex = threading.Lock()
        self._open: OrderedDict[str, tuple[float, dict[str, Any], Iterator[bytes]]] = OrderedDict()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one call.

        Raises:
            InvalidRequest: there is no dump with this id, or it has ended.
        """
        _, msgpack = import_packages("kv_dump")
        now_s = time.monotonic()
        with self._mutex:
            for idle in [name for name, (used_s, *_) in self._open.items() if now_s - used_s > DUMP_IDLE_S]:
                del self._open[idle]
            name: Any = request.get("dump")
            dump: tuple[float, dict[str, Any], Iterator[bytes]] | None
            if name is None:
                name, dump = secrets.token_hex(8), (now_s, self._numbers(), _parts(self._payloads(msgpack.packb)))
                if len(self._open) >= DUMPS_MAX:
                    self._open.popitem(last=False)
            else:
                dump = self._open.pop(name, None) if isinstance(name, str) else None
                if dump is None:
                    raise InvalidRequest("dump", f"is unknown or has ended: begin again (got {name!r})")
        _, numbers, parts = dump
        part = next(parts)
        has_more = len(part) == DUMP_PART_BYTES
        if has_more:
            with self._mutex:
                self._open[name] = time.monotonic(), numbers, parts
        return {**numbers, "dump": name if has_more else None, "data": base64.b64encode(part).decode()}

    def _numbers(self) -> dict[str, Any]:
        """Return the numbers of the last KV event and the last page event."""
        last = self._node.kv_last
        return {"seq": last() if last is not None else None, "after": self._node.events.last}

    def _payloads(self, pack: Any) -> Iterator[bytes]:
        yield pack([time.time(), [CLEARED_EVENT], 0])
        for batch in batches(everything_stored(PageReader(self._node.contents))):
            yield pack([time.time(), batch, 0])


def _parts(payloads: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the joined payloads in parts of ``DUMP_PART_BYTES``; the last part is shorter, or empty."""
    part = bytearray()
    for payload in payloads:
        part += payload
        while len(part) >= DUMP_PART_BYTES:
            yield bytes(part[:DUMP_PART_BYTES])
            del part[:DUMP_PART_BYTES]
    yield bytes(part)
