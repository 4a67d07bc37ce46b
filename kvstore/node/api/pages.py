"""Calls for pages over gRPC: About, Lookup, Read, Prefetch, Write and WatchPages.

All but WatchPages use the client library, as any client on this machine does. WatchPages sends a caller, such as a
conductor, the pages that a node stores and each change, in the form in which owners of the directory receive them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

from kvstore import about
from kvstore.client.local.cache import WHOLE_BYTES
from kvstore.client.match import ABSENT, Match
from kvstore.client.store import Store
from kvstore.cluster.announce_plan import LOOK_S, AnnouncePlan
from kvstore.cluster.directory import AnnounceBatch
from kvstore.device.host_memory import empty
from kvstore.errors import InvalidRequest, QuotaExceeded, TooManyCalls
from kvstore.model.replica import SHARDS_MAX
from kvstore.model.shard import Shard
from kvstore.node.api import streams
from kvstore.node.api.messages import PromptPages, lookup_reply, prompt_of
from kvstore.node.api.reservations import Reservations
from kvstore.node.node import Node
from kvstore.node.page_feed import PageFeed
from kvstore.pb import store_pb2 as pb
from kvstore.server.gate import Call, parse
from kvstore.server.request_cost import weight_of
from kvstore.wire.grpc import MESSAGE_BYTES_MAX

LOOKUP_HERE_PAGES: Final = 256  # up to this length a lookup in the event loop is faster than a thread
LOOKUP_HERE_BYTES: Final = 64 << 10
PREFETCH_STEP_S: Final = 0.25  # a thread waits for pages at most this long before it checks that the call still runs


class PageCalls:
    """Handlers for the page calls. ``store`` is a client of ``node`` in this process, which all callers share."""

    def __init__(self, store: Store, node: Node, reservations: Reservations, object_bytes_max: int) -> None:
        self._store = store
        self._node = node
        self._reservations = reservations
        self._about = pb.AboutReply(
            name=node.config.name,
            version=about.version(),
            extent_bytes=node.look(lambda _, state: state.segment.extent_bytes),
            message_bytes_max=MESSAGE_BYTES_MAX,
            ranks_max=SHARDS_MAX,
            object_bytes_max=object_bytes_max,
        )

    async def about(self, call: Call, message: bytes) -> bytes:
        """Describe the node, and what this caller may do."""
        parse(pb.AboutRequest, message)
        reply = pb.AboutReply(identity=call.caller.name, operator=call.caller.operator, salts=sorted(call.caller.salts))
        reply.MergeFrom(self._about)
        return reply.SerializeToString()

    async def lookup(self, call: Call, message: bytes) -> bytes:
        """Return the number of leading pages that are stored."""
        request = parse(pb.LookupRequest, message)
        call.caller.check_salt(request.pages.salt)

        def work() -> bytes:
            prompt = self._prompt(request.pages)
            return lookup_reply(_lookup(prompt), prompt).SerializeToString()

        return work() if _is_short(request.pages) else await call.quick(work)

    async def prefetch(self, call: Call, message: bytes) -> bytes:
        """Load pages into DRAM in steps, so that the thread is soon free if the call is cancelled."""
        request = parse(pb.LookupRequest, message)
        call.caller.check_salt(request.pages.salt)
        prompt = await call.quick(self._prompt, request.pages)
        match = Match(0, 0, ABSENT)
        while not prompt.orphan:
            started_s = time.monotonic()
            match = await call.wait(prompt.cache.prefetch, prompt.keys, min(PREFETCH_STEP_S, max(0.01, call.left_s)))
            if match.pages == len(prompt.keys) or time.monotonic() - started_s < PREFETCH_STEP_S:
                break
        return lookup_reply(match, prompt).SerializeToString()

    async def read(self, call: Call, message: bytes) -> None:
        """Send a match, then the bytes of its pages in batches. Each page is proven when it is read."""
        request = parse(pb.ReadRequest, message)
        call.caller.check_salt(request.pages.salt)

        def lookup() -> tuple[PromptPages, Shard, Match]:
            prompt = self._prompt(request.pages)
            cut = request.rank, request.ranks or 1, request.stage, request.stages or 1
            return prompt, Shard(prompt.cache.layout, *cut), _lookup(prompt)

        prompt, shard, match = lookup() if _is_short(request.pages) else await call.quick(lookup)
        whole_bytes = max(WHOLE_BYTES, prompt.cache.page_bytes) if shard.count > 1 else 0
        async with call.buffers(streams.buffer_bytes(shard.nbytes) + whole_bytes):
            await call.send(pb.ReadReply(match=lookup_reply(match, prompt)).SerializeToString())
            rows = empty((min(match.pages, streams.batch_pages(shard.nbytes)), shard.nbytes))
            page, reason = 0, ""
            steps = (
                partial(_get, prompt, shard, start, min(start + len(rows), match.pages), rows, request.verify)
                for start in range(0, match.pages, max(1, len(rows)))
            )
            async with contextlib.aclosing(streams.run_ahead(call, steps)) as batches:
                async for batch_match, messages in batches:
                    for packed in messages:
                        await call.send(packed)
                    page, reason = page + batch_match.pages, batch_match.reason
                    if reason:
                        break
            if page < match.pages:  # some pages were evicted since the lookup
                actual = Match(page * prompt.cache.layout.page_tokens, page, reason)
                await call.send(pb.ReadReply(match=lookup_reply(actual, prompt, with_keys=False)).SerializeToString())

    async def write(self, call: Call, requests: AsyncIterator[bytes]) -> bytes:
        """Store pages as they arrive, or write into reserved ones."""
        first = await streams.first_of(requests, call)
        async with call.buffers(await weight_of(call, pb.WriteBegin.DESCRIPTOR, first.begin or b"")):
            return await self._write(call, first, requests)

    async def _write(self, call: Call, first: streams.Data, requests: AsyncIterator[bytes]) -> bytes:
        begin = parse(pb.WriteBegin, first.begin or b"")
        if begin.reservation:
            if begin.HasField("pages"):
                raise InvalidRequest("pages", "must be absent: the reservation names them")
            return await self._reservations.write(call, begin.reservation, streams.batches(first, requests, call))
        call.caller.check_salt(begin.pages.salt)
        prompt = await call.quick(self._prompt, begin.pages, False)
        if prompt.orphan:  # nothing can be stored without the parent, which may have been evicted
            return pb.WriteReply().SerializeToString()
        new_pages = 0

        def put(page: int, rows: Any) -> bool:
            nonlocal new_pages
            keys = prompt.keys[page : page + len(rows)]
            try:
                new_pages += prompt.cache.put(keys, rows, wait=True)
            except QuotaExceeded:
                if not new_pages:
                    raise
                return False  # some pages are stored: the reply has their number
            return prompt.cache.lookup(keys).pages == len(keys)

        page_bytes = prompt.cache.page_bytes
        async with call.buffers(streams.buffer_bytes(page_bytes)):
            pages = streams.PageAssembly(len(prompt.keys), page_bytes, put)
            if await streams.feed(call, pages, streams.batches(first, requests, call)):
                pages.end()
        lookup = partial(prompt.cache.lookup, prompt.keys)
        match = lookup() if _is_short(begin.pages) else await call.quick(lookup)
        return pb.WriteReply(new_pages=new_pages, pages=match.pages).SerializeToString()

    def _prompt(self, pages: pb.Pages, to_match: bool = True) -> PromptPages:
        return prompt_of(self._store, self._node, pages, to_match=to_match)


def _is_short(pages: pb.Pages) -> bool:
    """Return whether hashing takes hardly any time, and no parent has to be looked up under the node's mutex."""
    page_bytes = 4 * (pages.layout.page_tokens or 64)
    size = len(pages.tokens)
    return size <= LOOKUP_HERE_BYTES and size <= LOOKUP_HERE_PAGES * page_bytes and not pages.parent


def _lookup(prompt: PromptPages) -> Match:
    return Match(0, 0, ABSENT) if prompt.orphan else prompt.cache.lookup(prompt.keys)


def _get(
    prompt: PromptPages, shard: Shard, page: int, stop: int, rows: streams.Rows, verify: bool
) -> tuple[Match, list[bytes]]:
    keys = prompt.keys[page:stop]
    if shard.count == 1:
        match = prompt.cache.get(keys, out=rows, verify=verify or None)
    else:
        rank, ranks, stage, stages = shard.cut.values()
        match = prompt.cache.get_shard(
            keys, rows, rank=rank, ranks=ranks, stage=stage, stages=stages, verify=verify or None
        )
    return match, streams.pack_pages(rows[: match.pages].reshape(-1).data)


WATCHERS_MAX: Final = 16  # each may queue all pages, and up to ``announce_plan.QUEUED_MAX`` changes, 9 bytes a page
RETRY_AFTER_S: Final = 1.0
BATCHES: Final = 16  # sent between two reads of the event log, which overwrites entries that are read too late
END_S: Final = 0.5  # before the deadline: a watch ends without an error
READER: Final = "reader"


class PageWatch:
    """The call WatchPages, with all its callers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._watchers = 0

    async def pages(self, call: Call, message: bytes) -> None:
        """Send all pages of the node, then each change. A batch is made once the previous one has been sent."""
        parse(pb.Empty, message)
        call.caller.check_operator()
        if self._watchers >= WATCHERS_MAX:
            raise TooManyCalls(f"{WATCHERS_MAX} callers watch pages already", RETRY_AFTER_S)
        self._watchers += 1
        try:
            await self._send_changes(call)
        finally:
            self._watchers -= 1

    async def _send_changes(self, call: Call) -> None:
        plan = AnnouncePlan(self._node.folder.name, lambda: secrets.randbits(63))
        plan.members([READER])
        feed = PageFeed(self._node, plan, Counter())
        while call.left_s > END_S:
            await call.quick(feed.follow)
            for _ in range(BATCHES):
                batch = plan.batch(READER)
                if batch is None:
                    break
                await call.send(_message(batch))
                plan.take_answer(READER, batch, batch.number + 1)
            if not plan.queued:
                call.check()
                with call.waits():
                    await asyncio.sleep(LOOK_S)


def _message(batch: AnnounceBatch) -> bytes:
    message = pb.PageBatch(
        stream=batch.stream,
        number=batch.number,
        fingerprints=batch.fingerprints.astype("<u8").tobytes(),
        marks=batch.marks.tobytes(),
        whole=batch.whole,
    )
    return message.SerializeToString()
