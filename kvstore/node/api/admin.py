"""Operators' calls over gRPC: the calls of ``node.operator.admin``, and Watch, which streams the node's events."""

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

PAGES_LIMIT: Final = 1000  # if a request has no limit
VERIFY_LOOK_S: Final = 0.05
WATCH_LOOK_S: Final = 0.02
WATCH_EVENTS: Final = 100  # per read of the log
WATCH_PAGES: Final = 1024
WATCH_END_S: Final = 0.5  # a watch ends this long before the deadline, without an error; its client starts another
WHOLE_MAX: Final = 1 << 53  # the largest integer up to which a Struct's numbers are exact


class AdminCalls:
    """Calls for operators, and pins, which every caller may set for its own pages."""

    def __init__(self, store: Store, node: Node, admin: Admin) -> None:
        self._store = store
        self._node = node
        self._admin = admin

    async def stats(self, call: Call, message: bytes) -> bytes:
        """Return the node's statistics."""
        parse(pb.Empty, message)
        return await self._operator(call, "stats", {})

    async def pages(self, call: Call, message: bytes) -> bytes:
        """List stored pages."""
        request = parse(pb.PagesRequest, message)
        call.caller.check_operator()
        arguments: dict[str, Any] = {"limit": request.limit or PAGES_LIMIT, "tier": request.tier or "all"}
        arguments |= {name: getattr(request, name) for name in ("salt", "age_s") if request.HasField(name)}
        arguments |= {name: getattr(request, name) for name in ("after", "order") if getattr(request, name)}
        if request.HasField("prompt"):
            arguments |= await self._page_names(call, request.prompt)
        return await self._operator(call, "pages", arguments)

    async def evict(self, call: Call, message: bytes) -> bytes:
        """Evict pages."""
        request = parse(pb.EvictRequest, message)
        call.caller.check_operator()
        arguments: dict[str, Any] = {
            name: getattr(request, name)
            for name in ("pages", "bytes", "percent", "age_s", "salt")
            if request.HasField(name)
        }
        arguments["tier"] = request.tier or "dram"
        arguments["dry_run"] = request.dry_run
        if request.HasField("prompt"):
            arguments |= await self._page_names(call, request.prompt)
        return await self._operator(call, "evict", arguments)

    async def pin(self, call: Call, message: bytes) -> bytes:
        """Pin the pages of a prompt. Every caller may do so under its own salts."""
        request = parse(pb.PinRequest, message)
        self._check_own(call, request.prompt)
        return await self._call(call, "pin", {**await self._page_names(call, request.prompt), "ttl_s": request.ttl_s})

    async def unpin(self, call: Call, message: bytes) -> bytes:
        """End a pin. Only operators may name it by its number, since the number does not show the owner."""
        request = parse(pb.UnpinRequest, message)
        if not request.pin:
            self._check_own(call, request.prompt)
            return await self._call(call, "unpin", await self._page_names(call, request.prompt))
        return await self._operator(call, "unpin", {"pin": request.pin})

    async def pins(self, call: Call, message: bytes) -> bytes:
        """List all pins."""
        parse(pb.Empty, message)
        return await self._operator(call, "pins", {})

    async def admin(self, call: Call, message: bytes) -> bytes:
        """Carry out any call of ``node.operator.admin`` by name."""
        call.caller.check_operator()
        try:
            request = json_format.MessageToDict(parse(struct_pb2.Struct, message))
        except (json_format.SerializeToJsonError, ValueError) as error:  # a value is infinite, NaN or empty
            raise InvalidRequest("request", f"not valid JSON ({error})") from None
        name = request.pop("call", None)
        if not isinstance(name, str):
            raise InvalidRequest("call", f"must be the name of a call (got {name!r})")
        arguments = keys_in_pool(self._store, {key: _whole(value) for key, value in request.items()})
        return await self._operator(call, name, arguments)

    async def verify(self, call: Call, message: bytes) -> bytes:
        """Verify all checksums, records and index entries, then the conservation laws. Replies as ``Store.verify``."""
        parse(pb.Empty, message)
        call.caller.check_operator()
        before = await call.wait(self._ask, "scrub_status", {})
        sweep = (await call.wait(self._ask, "scrub", {}))["sweep"]
        while (status := await call.wait(self._ask, "scrub_status", {}))["sweeps"] < sweep:
            with call.waits():
                await asyncio.sleep(VERIFY_LOOK_S)
        counters = (await call.wait(self._ask, "stats", {}))["counters"]
        report = {
            "pages_verified": status["asked_pages"],
            "pages_damaged": status["pages_damaged"] - before["pages_damaged"],
            "findings": (await call.wait(self._ask, "verify", {}))["findings"],
            "damage_since_start": {name: n for name, n in counters.items() if name.startswith("damaged_")},
        }
        return document(report)

    async def watch(self, call: Call, message: bytes) -> None:
        """Send events as they happen. The first document has the number of the event after which the stream starts.

        The stream ends before the call's deadline, without an error."""
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

    async def _page_names(self, call: Call, pages: pb.Pages) -> dict[str, Any]:
        prompt = await call.quick(lambda: prompt_of(self._store, self._node, pages, to_match=False))
        if prompt.orphan:
            raise InvalidRequest("parent", "is not stored here")
        return keys_argument(prompt.keys)

    async def _operator(self, call: Call, name: str, arguments: dict[str, Any]) -> bytes:
        call.caller.check_operator()
        return await self._call(call, name, arguments)

    async def _call(self, call: Call, name: str, arguments: dict[str, Any]) -> bytes:
        return await call.wait(lambda: document(self._ask(name, arguments)))

    def _ask(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if name not in self._admin.calls:
            raise NotServed(f"this node has no call {name!r}")
        return self._admin.call({**arguments, "call": name})


def _packed(log: EventLog, events: list[PageEvent]) -> list[bytes]:
    return [document(log.describe(event)) for event in events]


def _whole(value: Any) -> Any:
    """Return whole numbers as int: a Struct has only floats."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= WHOLE_MAX:
        return int(value)
    return value
