"""Opaque objects over gRPC. A value is stored or sent whole, so its bytes are the buffer of its call."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.local.store import LocalStore
from kvstore.device.host_memory import copy, empty
from kvstore.errors import InvalidRequest
from kvstore.node.api import streams
from kvstore.pb import store_pb2 as pb
from kvstore.server.gate import Call, parse
from kvstore.wire.grpc import OBJECT_DATA_FIELD, check_text, pack_data

KEYS_MAX: Final = 16384  # of one call


class ObjectCalls:
    """The calls about objects, through a client of the node in this process.

    Args:
        buffer_bytes: of all calls together.

    Attributes:
        bytes_max: a value passes through the buffers as a whole, so none is larger.
    """

    def __init__(self, store: LocalStore, buffer_bytes: int) -> None:
        self._store = store
        self.bytes_max = buffer_bytes - streams.BATCH_BYTES

    async def put(self, call: Call, requests: AsyncIterator[bytes]) -> bytes:
        """Take a value in, then store it."""
        first = await streams.first_of(requests, call)
        begin = parse(pb.PutObjectBegin, first.begin or b"")
        check_text("salt", begin.salt)
        call.caller.check_salt(begin.salt)
        self._check_size("size_bytes", begin.size_bytes)
        there = await call.quick(self._store.contains, begin.key, begin.salt)
        if there and not begin.replace:
            return pb.PutObjectReply(stored=False).SerializeToString()
        async with call.buffers(begin.size_bytes + streams.BATCH_BYTES):
            value = empty(begin.size_bytes)
            filled = 0
            async for batch in streams.batches(first, requests, call):
                filled = await call.run(_fill, value, filled, batch)
            if filled < len(value):
                raise InvalidRequest("data", f"ended after {filled} of {len(value)} bytes; nothing was stored")
            stored = await call.wait(self._store.put, begin.key, value, begin.salt, begin.replace)
        return pb.PutObjectReply(stored=stored).SerializeToString()

    async def get(self, call: Call, message: bytes) -> None:
        """A value's size, then its bytes."""
        request = parse(pb.GetObjectRequest, message)
        check_text("salt", request.salt)
        call.caller.check_salt(request.salt)
        size = await call.quick(self._store.size, request.key, request.salt)
        if size is None:
            await call.send(pb.GetObjectReply(found=False).SerializeToString())
            return
        self._check_size("key", size)
        async with call.buffers(size + streams.BATCH_BYTES):
            value = await call.run(partial(self._store.get, request.key, salt=request.salt))
            if value is None:  # it has left
                await call.send(pb.GetObjectReply(found=False).SerializeToString())
                return
            await call.send(pb.GetObjectReply(found=True, size_bytes=len(value)).SerializeToString())
            pack = partial(pack_data, field=OBJECT_DATA_FIELD)
            for start in range(0, len(value), streams.BATCH_BYTES):
                part = value[start : start + streams.BATCH_BYTES].data
                for packed in await call.run(streams.pack_pages, part, pack):
                    await call.send(packed)

    def _check_size(self, field: str, size: int) -> None:
        if size > self.bytes_max:
            reason = f"a value of {size} bytes: over gRPC there may be {self.bytes_max}, see rpc_buffers"
            raise InvalidRequest(field, reason)

    async def contains(self, call: Call, message: bytes) -> bytes:
        """Which of these keys have a value."""
        request = _keys(call, message)
        found = await call.quick(self._store.contains, list(request.keys), request.salt)
        return pb.ObjectsFound(found=found).SerializeToString()

    async def delete(self, call: Call, message: bytes) -> bytes:
        """Delete these."""
        request = _keys(call, message)
        removed = await call.wait(self._store.delete, list(request.keys), request.salt)
        return pb.ObjectsRemoved(removed=removed).SerializeToString()

    async def clear(self, call: Call, message: bytes) -> bytes:
        """Delete those whose key begins with a prefix. Each step waits for its turn among all callers."""
        request = parse(pb.ClearObjectsRequest, message)
        check_text("salt", request.salt)
        call.caller.check_salt(request.salt)
        removed, steps = 0, self._store.clearing(request.prefix, request.salt)
        while (gone := await call.wait(next, steps, None)) is not None:
            removed += gone
        return pb.ObjectsRemoved(removed=removed).SerializeToString()


def _keys(call: Call, message: bytes) -> pb.ObjectKeys:
    request = parse(pb.ObjectKeys, message)
    check_text("salt", request.salt)
    call.caller.check_salt(request.salt)
    if not 1 <= len(request.keys) <= KEYS_MAX:
        raise InvalidRequest("keys", f"must be from 1 to {KEYS_MAX} (got {len(request.keys)})")
    return request


def _fill(value: npt.NDArray[np.uint8], filled: int, batch: list[streams.Data]) -> int:
    for message in batch:
        message.check()
        size = len(message.data)
        if size > len(value) - filled:
            raise InvalidRequest("data", f"is more than the {len(value)} bytes of size_bytes; nothing was stored")
        copy(value[filled : filled + size], np.frombuffer(message.data, np.uint8))
        filled += size
    return filled
