"""Calls for opaque objects over gRPC. A value is stored and sent as a whole, so a call's buffer holds all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.local.store import LocalStore
from kvstore.device.host_memory import copy, empty
from kvstore.errors import InvalidRequest
from kvstore.model.objects import group_of
from kvstore.node.api import streams
from kvstore.pb import store_pb2 as pb
from kvstore.server.gate import Call, parse
from kvstore.wire.grpc import OBJECT_DATA_FIELD, check_text, pack_data

KEYS_MAX: Final = 16384  # keys in one call


class ObjectCalls:
    """Handlers for the object calls. They use an in-process client of the node.

    Args:
        buffer_bytes: the limit of all calls' buffers together.

    Attributes:
        bytes_max: the size of the largest value, which has to fit the buffers.
    """

    def __init__(self, store: LocalStore, buffer_bytes: int) -> None:
        self._store = store
        self.bytes_max = buffer_bytes - streams.BATCH_BYTES

    async def put(self, call: Call, requests: AsyncIterator[bytes]) -> bytes:
        """Receive a value, then store it."""
        first = await streams.first_of(requests, call)
        begin = parse(pb.PutObjectBegin, first.begin or b"")
        check_text("salt", begin.salt)
        call.caller.check_salt(begin.salt)
        self._check_size("size_bytes", begin.size_bytes)
        group_of(b"", begin.group or None, begin.count, 1)  # before the data is received
        is_stored = await call.quick(partial(self._store.contains, begin.key, begin.salt, local=True))
        if is_stored and not begin.replace:
            return pb.PutObjectReply(stored=False).SerializeToString()
        async with call.buffers(begin.size_bytes + streams.BATCH_BYTES):
            value = empty(begin.size_bytes)
            filled = 0
            async for batch in streams.batches(first, requests, call):
                filled = await call.run(_fill, value, filled, batch)
            if filled < len(value):
                raise InvalidRequest("data", f"must be {len(value)} bytes (got {filled}); nothing was stored")
            put = partial(self._store.put, group=begin.group or None, count=begin.count)
            stored = await call.wait(put, begin.key, value, begin.salt, begin.replace)
        return pb.PutObjectReply(stored=stored).SerializeToString()

    async def get(self, call: Call, message: bytes) -> None:
        """Send a value's size, then its bytes."""
        request = parse(pb.GetObjectRequest, message)
        check_text("salt", request.salt)
        call.caller.check_salt(request.salt)
        found = await call.wait(partial(self._store.find, request.key, request.salt, local=request.local))
        if found is None:
            await call.send(pb.GetObjectReply(found=False).SerializeToString())
            return
        size, group = found
        self._check_size("key", size)
        async with call.buffers(size + streams.BATCH_BYTES):
            value = await call.run(partial(self._store.get, request.key, salt=request.salt, local=request.local))
            if value is None:  # it was deleted or evicted since the check
                await call.send(pb.GetObjectReply(found=False).SerializeToString())
                return
            first = pb.GetObjectReply(found=True, size_bytes=len(value), grouped=group.members > 0)
            await call.send(first.SerializeToString())
            pack = partial(pack_data, field=OBJECT_DATA_FIELD)
            for start in range(0, len(value), streams.BATCH_BYTES):
                part = value[start : start + streams.BATCH_BYTES].data
                for packed in await call.run(streams.pack_pages, part, pack):
                    await call.send(packed)

    def _check_size(self, field: str, size: int) -> None:
        if size > self.bytes_max:
            raise InvalidRequest(
                field, f"the value has {size} bytes; the limit is {self.bytes_max} (setting rpc_buffers)"
            )

    async def contains(self, call: Call, message: bytes) -> bytes:
        """Return which of these keys have a value."""
        request = _keys(call, message)
        stored = await call.wait(partial(self._store.contains, list(request.keys), request.salt, local=request.local))
        return pb.ObjectsFound(found=stored).SerializeToString()

    async def delete(self, call: Call, message: bytes) -> bytes:
        """Delete the values of these keys."""
        request = _keys(call, message)
        removed = await call.wait(partial(self._store.delete, list(request.keys), request.salt, local=request.local))
        return pb.ObjectsRemoved(removed=removed).SerializeToString()

    async def clear(self, call: Call, message: bytes) -> bytes:
        """Delete the values whose key begins with a prefix. Each step waits for its turn among all callers."""
        request = parse(pb.ClearObjectsRequest, message)
        check_text("salt", request.salt)
        call.caller.check_salt(request.salt)
        removed, steps = 0, self._store.clear_in_steps(request.prefix, request.salt, request.local)
        while (count := await call.wait(next, steps, None)) is not None:
            removed += count
        return pb.ObjectsRemoved(removed=removed).SerializeToString()


def _keys(call: Call, message: bytes) -> pb.ObjectKeys:
    request = parse(pb.ObjectKeys, message)
    check_text("salt", request.salt)
    call.caller.check_salt(request.salt)
    if not 1 <= len(request.keys) <= KEYS_MAX:
        raise InvalidRequest("keys", f"must be 1 to {KEYS_MAX} keys (got {len(request.keys)})")
    return request


def _fill(value: npt.NDArray[np.uint8], filled: int, batch: list[streams.Data]) -> int:
    for message in batch:
        message.check()
        size = len(message.data)
        if size > len(value) - filled:
            raise InvalidRequest("data", f"must be {len(value)} bytes as in size_bytes (got more); nothing was stored")
        copy(value[filled : filled + size], np.frombuffer(message.data, np.uint8))
        filled += size
    return filled
