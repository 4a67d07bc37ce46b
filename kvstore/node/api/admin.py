"""Calls of operators over gRPC: the admin calls of ``node.operator.admin``, and Watch over the node's events."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from google.protobuf import json_format, struct_pb2

from kvstore.client.admin import keys_argument
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest
from kvstore.node.api.messages import keys_in_pool, prompt_of
from kvstore.node.event_log import EventLog, PageEvent
from kvstore.node.node import Node
from kvstore.node.operator.admin import Admin
from kvstore.pb import store_pb2 as pb
from kvstore.server.gate import Call, parse
from kvstore.wire.grpc import NotServed, document

PAGES_LIMIT: Final = 1000  # where a request names none
VERIFY_LOOK_S: Final = 0.05
WATCH_LOOK_S: Final = 0.02
WATCH_EVENTS: Final = 100  # read from the log at once
WATCH_PAGES: Final = 1024
WATCH_END_S: Final = 0.5  # before the deadline: a watch ends well, and its client goes on where it was
WHOLE_MAX: Final = 1 << 53  # what a Struct's numbers hold exactly


class AdminCalls:
    """What is for operators, and pins of one's own pages."""

    def __init__(self, store: Store, node: Node, admin: Admin) -> None:
        self._store = store
        self._node = node
        self._admin = admin

    async def stats(self, call: Call, message: bytes) -> bytes:
        """Numbers about the node."""
        parse(pb.Empty, message)
        return await self._operator(call, "stats", {})

    async def pages(self, call: Call, message: bytes) -> bytes:
        """Which pages there are."""
        request = parse(pb.PagesRequest, message)
        call.caller.check_operator()
        wish: dict[str, Any] = {"limit": request.limit or PAGES_LIMIT, "tier": request.tier or "all"}
        wish |= {name: getattr(request, name) for name in ("salt", "age_s") if request.HasField(name)}
        wish |= {name: getattr(request, name) for name in ("after", "order") if getattr(request, name)}
        if request.HasField("prompt"):
            wish |= await self._named(call, request.prompt)
        return await self._operator(call, "pages", wish)

    async def evict(self, call: Call, message: bytes) -> bytes:
        """Make pages leave."""
        request = parse(pb.EvictRequest, message)
        call.caller.check_operator()
        wish: dict[str, Any] = {
            name: getattr(request, name)
            for name in ("pages", "bytes", "percent", "age_s", "salt")
            if request.HasField(name)
        }
        wish["tier"] = request.tier or "dram"
        wish["dry_run"] = request.dry_run
        if request.HasField("prompt"):
            wish |= await self._named(call, request.prompt)
        return await self._operator(call, "evict", wish)

    async def pin(self, call: Call, message: bytes) -> bytes:
        """Keep the pages of a prompt, under salts of the caller's own; every caller may."""
        request = parse(pb.PinRequest, message)
        self._check_own(call, request.prompt)
        return await self._call(call, "pin", {**await self._named(call, request.prompt), "ttl_s": request.ttl_s})

    async def unpin(self, call: Call, message: bytes) -> bytes:
        """End a pin; by its id it takes an operator, since an id does not tell whose it is."""
        request = parse(pb.UnpinRequest, message)
        if not request.pin:
            self._check_own(call, request.prompt)
            return await self._call(call, "unpin", await self._named(call, request.prompt))
        return await self._operator(call, "unpin", {"pin": request.pin})

    async def pins(self, call: Call, message: bytes) -> bytes:
        """The pins there are."""
        parse(pb.Empty, message)
        return await self._operator(call, "pins", {})

    async def admin(self, call: Call, message: bytes) -> bytes:
        """Any call of ``node.operator.admin`` by name, with its arguments."""
        call.caller.check_operator()
        try:
            request = json_format.MessageToDict(parse(struct_pb2.Struct, message))
        except (json_format.SerializeToJsonError, ValueError) as error:  # infinite, not a number, or empty
            raise InvalidRequest("request", f"not valid JSON ({error})") from None
        name = request.pop("call", None)
        if not isinstance(name, str):
            raise InvalidRequest("call", "must name a call")
        wish = keys_in_pool(self._store, {key: _whole(value) for key, value in request.items()})
        return await self._operator(call, name, wish)

    async def verify(self, call: Call, message: bytes) -> bytes:
        """Every checksum, record and index entry, then the conservation laws; the document of ``Store.verify``."""
        parse(pb.Empty, message)
        call.caller.check_operator()
        before = await call.wait(self._ask, "scrub_status", {})
        sweep = (await call.wait(self._ask, "scrub", {}))["sweep"]
        while (now := await call.wait(self._ask, "scrub_status", {}))["sweeps"] < sweep:
            with call.waits():
                await asyncio.sleep(VERIFY_LOOK_S)
        counters = (await call.wait(self._ask, "stats", {}))["counters"]
        found = {
            "pages_verified": now["asked_pages"],
            "pages_damaged": now["pages_damaged"] - before["pages_damaged"],
            "findings": (await call.wait(self._ask, "verify", {}))["findings"],
            "damage_since_start": {name: n for name, n in counters.items() if name.startswith("damaged_")},
        }
        return document(found)

    async def watch(self, call: Call, message: bytes) -> None:
        """Events as they happen; the first document says from where on. Ends well before the call's deadline."""
        request = parse(pb.WatchRequest, message)
        call.caller.check_operator()
        log = self._node.events
        after = request.after if request.HasField("after") else log.last
        await call.send(document({"seq": after}))
        while call.left_s > WATCH_END_S:
            events, after, lost = log.since(after, WATCH_EVENTS, WATCH_PAGES)
            if lost:
                await call.send(document({"seq": after - len(events), "lost": lost}))
            if events:
                for packed in await call.quick(_packed, log, events):
                    await call.send(packed)
            else:
                call.check()
                with call.waits():
                    await asyncio.sleep(WATCH_LOOK_S)

    def _check_own(self, call: Call, prompt: pb.Pages) -> None:
        if not call.caller.operator:
            call.caller.check_salt(prompt.salt)

    async def _named(self, call: Call, pages: pb.Pages) -> dict[str, Any]:
        prompt = await call.quick(lambda: prompt_of(self._store, self._node, pages, to_match=False))
        if prompt.orphan:
            raise InvalidRequest("parent", "is not stored here")
        return keys_argument(prompt.keys)

    async def _operator(self, call: Call, name: str, wish: dict[str, Any]) -> bytes:
        call.caller.check_operator()
        return await self._call(call, name, wish)

    async def _call(self, call: Call, name: str, wish: dict[str, Any]) -> bytes:
        return await call.wait(lambda: document(self._ask(name, wish)))

    def _ask(self, name: str, wish: dict[str, Any]) -> dict[str, Any]:
        if name not in self._admin.calls:
            raise NotServed(f"this node has no call {name!r}")
        return self._admin.call({**wish, "call": name})


def _packed(log: EventLog, events: list[PageEvent]) -> list[bytes]:
    return [document(log.described(event)) for event in events]


def _whole(value: Any) -> Any:
    """Numbers of a Struct are floats; those that are whole were meant so."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= WHOLE_MAX:
        return int(value)
    return value
