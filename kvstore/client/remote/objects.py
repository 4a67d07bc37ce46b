"""RemoteObjects: opaque objects over gRPC, one stream per value."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn

import grpc
import numpy as np

from kvstore.client.local.object_parts import Scattered
from kvstore.client.objects import ObjectVerbs
from kvstore.client.remote.node import RemoteNode, end, lost
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.model.objects import encode_name
from kvstore.pb import store_pb2 as pb
from kvstore.rpc.data_messages import OBJECT_DATA_FIELD, digest_of, fields, pack_data

PUTS_AT_ONCE: Final = 8  # of one ``put_many``
KEYS_PER_CALL: Final = 1024  # of at most 1000 bytes each: a quarter of a message
_FOUND, _SIZE, _DATA, _DIGEST = 1, 2, OBJECT_DATA_FIELD, OBJECT_DATA_FIELD + 1  # fields of GetObjectReply


class RemoteObjects(ObjectVerbs):
    """What ``RemoteStore`` can do with opaque objects; every verb is as in ``ObjectVerbs``, and needs the node."""

    _remote: RemoteNode

    def put_many(self, keys: Sequence[str], values: Sequence[Any], salt: str = "", replace: bool = False) -> list[bool]:
        """See ``ObjectVerbs.put_many``; ``PUTS_AT_ONCE`` values are on their way at a time.

        Raises:
            InvalidRequest: also where a value is larger than the node takes over gRPC.
        """
        names = _names(keys, values, "values")
        if len(set(names)) != len(names):
            raise InvalidRequest("keys", "one is named twice")
        sources = [Scattered.of(value, "data", writable=False) for value in values]
        salt, most = _salt(salt), self._remote.about.object_bytes_max
        for source in sources:
            if most and source.nbytes > most:
                raise InvalidRequest("data", f"has {source.nbytes} bytes, the node takes {most} over gRPC")
        self._remote.check_open()
        stored: list[bool] = []
        under_way: deque[Any] = deque()
        try:
            for key, source in zip(keys, sources, strict=True):
                if len(under_way) == PUTS_AT_ONCE:
                    stored.append(self._stored(under_way.popleft()))
                under_way.append(self._put(key, source, salt, replace))
            while under_way:
                stored.append(self._stored(under_way.popleft()))
        finally:
            for call in under_way:  # one before has failed; the buffers are the caller's again
                call.cancel()
        return stored

    def get(self, key: str, out: Any = None, salt: str = "") -> Any:
        """See ``ObjectVerbs.get``. What is here of a value whose checksums do not hold is None."""
        encode_name(key)
        target = Scattered.of(out, "out", writable=True) if out is not None else None
        request = pb.GetObjectRequest(key=key, salt=_salt(salt)).SerializeToString()
        self._remote.check_open()
        again = True
        while True:
            try:
                return self._get(request, target)
            except grpc.RpcError as error:
                if not (again and lost(error)):
                    self._remote.refuse(error)
                again = False

    def size(self, key: str, salt: str = "") -> int | None:
        """See ``ObjectVerbs.size``."""
        encode_name(key)
        request = pb.GetObjectRequest(key=key, salt=_salt(salt)).SerializeToString()
        stream = self._remote.receive("GetObject", request, self._remote.timeout_s)
        try:
            for message in stream:
                first = pb.GetObjectReply.FromString(message)
                return first.size_bytes if first.found else None
        except grpc.RpcError as error:
            self._remote.refuse(error)
        finally:
            end(stream)
        return None

    def contains(self, keys: str | Sequence[str], salt: str = "") -> Any:
        """See ``ObjectVerbs.contains``."""
        found: list[bool] = []
        named, salt = _listed(keys), _salt(salt)
        self._remote.check_open()
        for part in _parts(named):
            found += self._remote.call("ContainsObjects", pb.ObjectKeys(keys=part, salt=salt), pb.ObjectsFound).found
        return bool(found[0]) if isinstance(keys, str) else found

    def delete(self, keys: str | Sequence[str], salt: str = "") -> int:
        """See ``ObjectVerbs.delete``."""
        named, salt, removed = _listed(keys), _salt(salt), 0
        self._remote.check_open()
        for part in _parts(list(dict.fromkeys(named))):
            request = pb.ObjectKeys(keys=part, salt=salt)
            removed += self._remote.call("DeleteObjects", request, pb.ObjectsRemoved, again=False).removed
        return removed

    def remove(self, pattern: str, salt: str = "") -> int:
        """See ``ObjectVerbs.remove``. The node looks at all keys of the salt."""
        if not isinstance(pattern, str):
            raise InvalidRequest("pattern", f"must be text, not {type(pattern).__name__}")
        request = pb.RemoveObjectsRequest(pattern=pattern, salt=_salt(salt))
        return int(self._remote.call("RemoveObjects", request, pb.ObjectsRemoved, again=False).removed)

    def object_keys(self, salt: str = "") -> NoReturn:
        """Not over gRPC: a list of all keys has no bound."""
        raise InvalidRequest("object_keys", "is for programs on the node's own machine")

    def register(self, buffer: Any) -> Any:
        """See ``ObjectVerbs.register``."""
        self._remote.check_open()
        return self._registrations.add(buffer)

    def _put(self, key: str, source: Scattered, salt: str, replace: bool) -> Any:
        """A put on its way: a future of its reply."""
        begin = pb.PutObjectBegin(key=key, salt=salt, size_bytes=source.nbytes, replace=replace)
        messages = _messages(begin, source, self._remote.data_bytes)
        return self._remote.send("PutObject", messages, self._remote.stream_s(source.nbytes))

    def _stored(self, call: Any) -> bool:
        try:
            return bool(pb.PutObjectReply.FromString(call.result()).stored)
        except grpc.RpcError as error:
            self._remote.refuse(error)
        except grpc.FutureCancelledError:
            self._remote.check_open()
            raise Unavailable(f"{self._remote.endpoint.address}: the put was cancelled") from None

    def _get(self, request: bytes, target: Scattered | None) -> Any:
        """One try. Raises grpc.RpcError."""
        node = self._remote
        into, size, position = target, -1, 0
        # How large the value is is not known yet: a deadline for the largest that fits.
        expected = target.nbytes if target is not None else 1 << 30
        stream = node.receive("GetObject", request, node.stream_s(expected))
        try:
            for message in stream:
                found = {number: view if view is not None else integer for number, integer, view in fields(message)}
                if size < 0:
                    size = int(found.get(_SIZE, 0)) if found.get(_FOUND) else -1
                    if size < 0:
                        return None
                    if target is not None and target.nbytes < size:
                        raise InvalidRequest("out", f"has {target.nbytes} bytes, the value has {size}")
                    into = target if target is not None else Scattered([np.empty(size, np.uint8)])
                data = found.get(_DATA)
                if isinstance(data, memoryview) and len(data) and into is not None:
                    if position + len(data) > size or digest_of(data) != found.get(_DIGEST):
                        return None
                    into.write(position, np.frombuffer(data, np.uint8))
                    position += len(data)
        except ValueError as error:
            node.check_open()
            if isinstance(error, InvalidRequest):
                raise
            raise Unavailable(f"{node.endpoint.address}: sent what is no reply: {error}") from None
        finally:
            end(stream)
        if into is None or position != size:
            return None
        return size if target is not None else into.parts[0]


def _messages(begin: pb.PutObjectBegin, source: Scattered, most: int) -> Iterator[bytes]:
    yield pb.PutObjectRequest(begin=begin).SerializeToString()
    for part in source.parts:
        for start in range(0, part.size, most):
            yield pack_data(part[start : start + most].data)


def _salt(salt: object) -> str:
    if not isinstance(salt, str):
        raise InvalidRequest("salt", f"must be text, not {type(salt).__name__}")
    return salt


def _listed(keys: Any) -> list[str]:
    if isinstance(keys, str):
        keys = [keys]
    if isinstance(keys, bytes | bytearray) or not hasattr(keys, "__iter__"):
        raise InvalidRequest("keys", f"must be text or a list of texts, not {type(keys).__name__}")
    return [encode_name(key).decode() for key in keys]


def _parts(keys: list[str]) -> Iterator[list[str]]:
    return (keys[start : start + KEYS_PER_CALL] for start in range(0, len(keys), KEYS_PER_CALL))


def _names(keys: Any, values: Sequence[Any], field: str) -> list[str]:
    if isinstance(keys, str) or len(list(keys)) != len(values):
        raise InvalidRequest(field, "must be as many as keys, in a list")
    return _listed(keys)
