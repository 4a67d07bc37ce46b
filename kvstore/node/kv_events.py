"""KvEvents: what happens to pages, published over ZMQ in the wire format of vLLM's KV events.

PUB ``[topic, number, payload]``: number 8 bytes big-endian, payload msgpack ``[seconds, events, 0]``, an event a map:
"BlockStored", "BlockRemoved" or "AllBlocksCleared" as its "type", and the fields that vLLM gives it. A block is a page,
its hash the 16 bytes of its key, its medium "CPU" (DRAM) or "DISK" (NVMe). ROUTER: ``number`` (with or without an empty
frame before it) asks for all that is kept from there on, answered with ``[number, payload]`` each, and at the end
``[-1, ""]``.

A publisher begins with ``AllBlocksCleared`` and all that is stored, and does so again where it fell behind so far that
events were overwritten. Numbers are consecutive until the daemon ends; the next one's are higher, so that a subscriber
sees a gap and asks. Nothing here is waited for by the node: subscribers that read too slowly miss messages.

Pages as KV events tell of them: key, parent, token ids; read from the records while the node goes on.

Nothing is locked. A record is believed where its word is the same before and after, as readers of the pool do it; the
token ids of a page that is on NVMe alone are in its header there. A page that is gone, or not to be read, is None.
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
from kvstore.node.event_log import CLEARED, STORED, PageEvent
from kvstore.node.frame_view import Contents
from kvstore.node.index_keeper import snapshot
from kvstore.node.node import Node
from kvstore.shm.records import ExtentTable, Record
from kvstore.state import prefix_links
from kvstore.tier.nvme import frame_header, geometry
from kvstore.tier.nvme.disk import aligned_buffer
from kvstore.tier.nvme.frame_header import FrameHeader

log = logging.getLogger("kvstore.events")

TOKENS_MAX = 4096  # of one batch, unless one page has more: some 15 KB

# vLLM's names; other consumers know them too.
MEDIUMS = {Tier.HBM: "GPU", Tier.DRAM: "CPU", Tier.NVME: "DISK"}
KvEvent = dict[str, Any]
"""A map, as vLLM and SGLang pack theirs: "type", and its fields by name."""

CLEARED_EVENT: Final[KvEvent] = {"type": "AllBlocksCleared"}


class PageFacts(NamedTuple):
    """A stored page. ``parent`` None: it starts its chain. ``tokens`` uint32 little-endian, end to end; none for a page
    of an opaque object, which is not reported."""

    key: bytes
    parent: bytes | None
    tokens: bytes


class PageReader:
    """Reads what is stored where. Lives with its node; one thread uses it.

    A page that has gone when it is read is not told of as stored, and neither is what hangs on it, until its going has
    been told: it may be back by then, and its children be found before it is told of again.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._skipped: set[tuple[Tier, bytes]] = set()  # stored, as events say, and not told of

    def stored_now(self, keys: list[bytes], tier: Tier) -> list[PageFacts | None] | None:
        """Pages that an event says were stored, as far as they are to be told of. None: the index cannot tell."""
        pages = self.find(keys, tier)
        gone = [i for i, page in enumerate(pages or ()) if page is None]
        again = self.find([keys[i] for i in gone], tier) if gone else []  # moved inside the tier just now, perhaps
        if pages is None or again is None:
            return None
        for i, page in zip(gone, again, strict=True):
            pages[i] = page
        return [self._told(key, tier, page) for key, page in zip(keys, pages, strict=True)]

    def _told(self, key: bytes, tier: Tier, page: PageFacts | None) -> PageFacts | None:
        if page is None or (page.parent is not None and (tier, page.parent) in self._skipped):
            self._skipped.add((tier, key))
            return None
        self._skipped.discard((tier, key))
        return page

    def gone(self, keys: list[bytes], tier: Tier) -> None:
        """An event says that these pages left."""
        if self._skipped:
            self._skipped.difference_update((tier, key) for key in keys)

    def forget(self) -> None:
        """Report everything again."""
        self._skipped.clear()

    def find(self, keys: list[bytes], tier: Tier) -> list[PageFacts | None] | None:
        """These pages, where they are in ``tier`` now. None: the index cannot tell at present."""
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
        """Every page of ``tier``, parents before their children, chain by chain.

        Events report a page that comes, goes or moves in the meantime.
        """
        if tier == Tier.HBM:
            yield from self._stored_by_engines()
            return
        snapshots = [snapshot(table) for table in self._contents.tables(tier)]
        links = prefix_links.link(snapshots)
        order = np.argsort(links.parent, kind="stable")  # sibling pages
        parents = links.parent[order]
        starts, ends = (np.searchsorted(parents, np.arange(len(parents)), side) for side in ("left", "right"))
        waiting = order[parents == -1].tolist()
        while waiting:
            i = waiting.pop()
            if links.duplicate[i]:
                continue
            key = links.key(i)
            facts = self._read(key, links.address(i), None)
            if facts is None:
                facts = (self.find([key], tier) or [None])[0]  # moved since, perhaps
            if self._told(key, tier, facts) is None or facts is None:
                continue  # and what hangs on it
            waiting += order[starts[i] : ends[i]].tolist()
            if facts.tokens:
                yield facts

    def _stored_by_engines(self) -> Iterator[PageFacts]:
        """Every page in memory that engines have mounted, where a page may be without its parent."""
        found = {key: page for key, address in self._contents.listed(Tier.HBM) if (page := self._mounted(key, address))}
        children: dict[bytes, list[bytes]] = {}
        for key, page in found.items():
            children.setdefault(page.parent or b"", []).append(key)
        waiting = [key for key, page in found.items() if page.parent not in found]
        while waiting:
            key = waiting.pop()
            if self._told(key, Tier.HBM, found[key]) is not None:
                waiting += children.get(key, ())
                yield found[key]

    def _mounted(self, key: bytes, address: Address) -> PageFacts | None:
        table = self._contents.mounted(address.extent)
        word = word_of(address.generation, FrameState.SEALED)
        if table is None or address.frame >= table.frames or int(table.words[address.frame]) != word:
            return None
        record = Record(table.rows[address.frame].tobytes(), table.fmt)
        if int(table.words[address.frame]) != word or record.key != key:
            return None
        return PageFacts(key, record.parent if record.parent != record.root else None, record.tokens)

    def _read(self, key: bytes, address: Address, above: Address | None) -> PageFacts | None:
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
            copy = self._contents.table(above.extent)
            found = _record(copy, key, above) if copy is not None and above.frame < copy.frames else None
            if found is not None and found.tokens:
                return found.tokens
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
        found = frame_header.unpack(buffer, frame_class, incarnation, *address)
        return found.tokens.tobytes() if isinstance(found, FrameHeader) and found.key == key else None


def _record(table: ExtentTable, key: bytes, address: Address) -> Record | None:
    word = word_of(address.generation, FrameState.SEALED)
    if int(table.words[address.frame]) != word:
        return None
    record = table.record(address.frame)
    return record if int(table.words[address.frame]) == word and record.key == key else None


# --- in vLLM's words ------------------------------------------------------------------------------------------------


def blocks_stored(pages: Iterable[PageFacts | None], medium: str) -> Iterator[KvEvent]:
    """``BlockStored`` events: pages that follow one another in a chain share one, of ``TOKENS_MAX`` at most."""
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
    """A ``BlockRemoved`` event."""
    return {"type": "BlockRemoved", "block_hashes": keys, "medium": medium}


def everything_stored(reader: PageReader) -> Iterator[KvEvent]:
    """``BlockStored`` events of all that both tiers hold."""
    for tier, medium in MEDIUMS.items():
        yield from blocks_stored(reader.stored(tier), medium)


def batches(events: Iterable[KvEvent]) -> Iterator[list[KvEvent]]:
    """Split events into batches of about ``TOKENS_MAX`` token ids, in order."""
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
DUMP_IDLE_S = 60.0  # a dump that is not read any more is given up
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
        self._resync_due_s: float | None = 0.0  # when to report everything again
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
        boundary.thread_loop("task/kv events", self._turn, self._stopped)()
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
            log.warning("KV events: %s: everything is reported again", why)
            self._node.count("kv_events_told_anew")
            self._resync_due_s = time.monotonic() + RESYNC_EVERY_S

    def _tell_everything(self) -> None:
        """Events after this moment's last are told next: what changes meanwhile is told twice, not never."""
        self._after, self._resync_due_s = self._node.events.last, None
        self._reader.forget()
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
                self._resync_later("the index is being rebuilt")
                return
            for batch in batches(blocks_stored(pages, medium)):
                self._publish(batch, event.time_ns / 1e9)
        else:
            self._reader.gone(event.keys, event.tier)
            self._publish([blocks_removed(event.keys, medium)], event.time_ns / 1e9)

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
            except self._zmq.ZMQError:  # no subscriber asks
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
                    raise InvalidRequest("dump", f"{name!r} is not being read: begin again")
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
        yield pack([time.time(), [CLEARED_EVENT], 0])
        for batch in batches(everything_stored(PageReader(self._node.contents))):
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
