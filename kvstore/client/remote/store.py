"""The store of a node reached over gRPC, with opaque objects as one stream per value."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn

import grpc
import numpy as np

from kvstore.client.admin import KEYS_MAX
from kvstore.client.buffers import Rows, check_text
from kvstore.client.objects import ObjectVerbs, listed, names_of, sources_of
from kvstore.client.remote.admin import PROMPT, RemoteAdmin
from kvstore.client.remote.cache import RemoteCache
from kvstore.client.remote.endpoint import Endpoint
from kvstore.client.remote.node import OVERHEAD_BYTES, RemoteNode, end, is_connection_lost
from kvstore.client.store import Store, check_cache
from kvstore.client.value_buffers import Scattered
from kvstore.device.host_memory import empty
from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.objects import encode_name, encode_prefix, groups_for
from kvstore.model.prefix import Keys
from kvstore.pb import store_pb2 as pb
from kvstore.wire.grpc import OBJECT_DATA_FIELD, digest_of, fields, pack_data

PUTS_AT_ONCE: Final = 8  # streams of one ``put_many`` at the same time
KEYS_PER_CALL: Final = 1024  # each has at most 1000 bytes, so all take at most a quarter of a message
# Fields of GetObjectReply.
_FOUND, _SIZE, _DATA, _DIGEST, _GROUPED = 1, 2, OBJECT_DATA_FIELD, OBJECT_DATA_FIELD + 1, 5


class RemoteObjects(ObjectVerbs):
    """Objects over one stream each. Every verb calls the node."""

    _node: RemoteNode

    def put_many(
        self,
        keys: Sequence[str],
        values: Sequence[Any],
        salt: str = "",
        replace: bool = False,
        *,
        group: str | Sequence[str | None] | None = None,
        count: int = 0,
        wait: bool = True,
    ) -> list[bool]:
        """Store values as ``ObjectVerbs.put_many`` does, up to ``PUTS_AT_ONCE`` at the same time.

        Raises:
            InvalidRequest: a value is larger than the node accepts over gRPC, or as ``ObjectVerbs.put_many``.
        """
        sources = sources_of(keys, values)[1]
        salt, bytes_max = check_text(salt, "salt"), self._node.about.object_bytes_max
        groups_for(b"", group, count, len(keys))
        groups = [group] * len(keys) if group is None or isinstance(group, str) else group
        for source in sources:
            if bytes_max and source.nbytes > bytes_max:
                raise InvalidRequest("data", f"must be at most {bytes_max} bytes over gRPC (got {source.nbytes})")
        self._node.check_open()
        stored: list[bool] = []
        puts: deque[Any] = deque()
        try:
            for key, source, name in zip(keys, sources, groups, strict=True):
                if len(puts) == PUTS_AT_ONCE:
                    stored.append(self._result(puts.popleft()))
                begin = pb.PutObjectBegin(key=key, salt=salt, size_bytes=source.nbytes, replace=replace)
                begin.group, begin.count = name or "", count if name else 0
                puts.append(self._put(begin, source.host_parts()))
            while puts:
                stored.append(self._result(puts.popleft()))
        finally:
            for call in puts:  # an earlier put has failed; the caller may use its buffers again
                call.cancel()
        return stored

    def get(self, key: str, out: Any = None, salt: str = "", *, local: bool = False) -> Any:
        """Return a value, or copy it into ``out``. A value with wrong checksums counts as missing."""
        return self._value(key, out, salt, local)[0]

    def get_many(self, keys: Sequence[str], outs: Sequence[Any], salt: str = "", *, local: bool = False) -> list[int]:
        """Copy each value into its entry of ``outs``, as ``ObjectVerbs.get_many`` does, one call after another."""
        names_of(keys, outs, "outs")
        lengths: list[int] = []
        members: list[int] = []
        for number, (key, out) in enumerate(zip(keys, outs, strict=True)):
            length, is_member = self._value(key, out, salt, local)
            lengths.append(-1 if length is None else int(length))
            if is_member:
                members.append(number)
        if members and -1 in lengths:  # a group that left during the calls: none of its members is returned
            found = self.contains([keys[number] for number in members], salt, local=local)
            for number, is_found in zip(members, found, strict=True):
                lengths[number] = lengths[number] if is_found else -1
        return lengths

    def _value(self, key: str, out: Any, salt: str, local: bool) -> tuple[Any, bool]:
        """Do what ``get`` does, and also return whether the value is a member of a group."""
        encode_name(key)
        target = Scattered.of(out, "out", writable=True) if out is not None else None
        request = pb.GetObjectRequest(key=key, salt=check_text(salt, "salt"), local=local).SerializeToString()
        self._node.check_open()
        again = True
        while True:
            try:
                return self._get(request, target)
            except grpc.RpcError as error:
                if not (again and is_connection_lost(error)):
                    self._node.refuse(error)
                again = False

    def size(self, key: str, salt: str = "", *, local: bool = False) -> int | None:
        """Return the number of bytes of the value under ``key``; None if there is none."""
        encode_name(key)
        request = pb.GetObjectRequest(key=key, salt=check_text(salt, "salt"), local=local).SerializeToString()
        stream = self._node.receive("GetObject", request, self._node.timeout_s)
        try:
            for message in stream:
                first = pb.GetObjectReply.FromString(message)
                return first.size_bytes if first.found else None
        except grpc.RpcError as error:
            self._node.refuse(error)
        finally:
            end(stream)
        return None

    def contains(self, keys: str | Sequence[str], salt: str = "", *, local: bool = False) -> Any:
        """Return whether there is a value under this key, or for a list of keys a list of booleans."""
        stored: list[bool] = []
        names, salt = _checked_keys(keys), check_text(salt, "salt")
        self._node.check_open()
        for part in _parts(names):
            request = pb.ObjectKeys(keys=part, salt=salt, local=local)
            stored += self._node.call("ContainsObjects", request, pb.ObjectsFound).found
        return bool(stored[0]) if isinstance(keys, str) else stored

    def delete(self, keys: str | Sequence[str], salt: str = "", *, local: bool = False) -> int:
        """Delete the values under these keys, and return the number of values deleted."""
        names, salt, removed = _checked_keys(keys), check_text(salt, "salt"), 0
        self._node.check_open()
        for part in _parts(list(dict.fromkeys(names))):
            request = pb.ObjectKeys(keys=part, salt=salt, local=local)
            removed += self._node.call("DeleteObjects", request, pb.ObjectsRemoved, again=False).removed
        return removed

    def clear(self, prefix: str, salt: str = "", *, local: bool = False) -> int:
        """Delete all objects of this salt whose key begins with ``prefix``, and return their number."""
        encode_prefix(prefix)
        request = pb.ClearObjectsRequest(prefix=prefix, salt=check_text(salt, "salt"), local=local)
        return int(self._node.call("ClearObjects", request, pb.ObjectsRemoved, again=False).removed)

    def object_keys(self, salt: str = "") -> NoReturn:
        """Raise InvalidRequest: the list of all keys has no limit, so it is not available over gRPC."""
        raise InvalidRequest("object_keys", "is available only on the node's own machine")

    def object_pages(self, key: str, salt: str = "") -> NoReturn:
        """Raise InvalidRequest: operators' verbs over gRPC take only pages of prompts."""
        raise InvalidRequest("object_pages", "is available only on the node's own machine")

    def _check_open(self) -> None:
        self._node.check_open()

    def _put(self, begin: pb.PutObjectBegin, parts: list[Rows]) -> Any:
        """Start a put, and return a future of its reply."""
        messages = _messages(begin, parts, self._node.data_bytes)
        return self._node.send("PutObject", messages, self._node.stream_s(begin.size_bytes))

    def _result(self, call: Any) -> bool:
        try:
            return bool(pb.PutObjectReply.FromString(call.result()).stored)
        except grpc.RpcError as error:
            self._node.refuse(error)
        except grpc.FutureCancelledError:
            self._node.check_open()
            raise Unavailable(f"{self._node.endpoint.address}: the put was cancelled") from None

    def _get(self, request: bytes, target: Scattered | None) -> tuple[Any, bool]:
        """Try once to do what ``_value`` does. Raises grpc.RpcError."""
        node = self._node
        into, size, position, is_member = target, -1, 0, False
        # The size is unknown until the reply arrives, so the deadline allows for the largest value that fits.
        expected = target.nbytes if target is not None else 1 << 30
        stream = node.receive("GetObject", request, node.stream_s(expected))
        try:
            for message in stream:
                reply = {number: view if view is not None else integer for number, integer, view in fields(message)}
                if size < 0:
                    size = int(reply.get(_SIZE, 0)) if reply.get(_FOUND) else -1
                    if size < 0:
                        return None, False
                    is_member = bool(reply.get(_GROUPED))
                    if target is not None and target.nbytes < size:
                        raise InvalidRequest(
                            "out", f"must have at least {size} bytes for the value (got {target.nbytes})"
                        )
                    into = target if target is not None else Scattered([empty(size)])
                data = reply.get(_DATA)
                if isinstance(data, memoryview) and len(data) and into is not None:
                    if position + len(data) > size or digest_of(data) != reply.get(_DIGEST):
                        return None, False
                    into.write(position, np.frombuffer(data, np.uint8))
                    position += len(data)
        except ValueError as error:
            node.check_open()
            if isinstance(error, InvalidRequest):
                raise
            raise Unavailable(f"{node.endpoint.address}: sent an invalid reply: {error}") from None
        finally:
            end(stream)
        if into is None or position != size:
            return None, False
        return size if target is not None else into.parts[0], is_member


def _messages(begin: pb.PutObjectBegin, parts: list[Rows], data_bytes: int) -> Iterator[bytes]:
    yield pb.PutObjectRequest(begin=begin).SerializeToString()
    for part in parts:
        for start in range(0, part.size, data_bytes):
            yield pack_data(part[start : start + data_bytes].data)


def _checked_keys(keys: str | Sequence[str]) -> list[str]:
    return [encode_name(key).decode() for key in listed(keys)]


def _parts(keys: list[str]) -> Iterator[list[str]]:
    return (keys[start : start + KEYS_PER_CALL] for start in range(0, len(keys), KEYS_PER_CALL))


ROOTS_MAX = 4096  # caches kept by their root, so that operators' verbs can name pages by keys
_RETRY_S = 0.05


class RemoteStore(Store, RemoteObjects):
    """A store over a gRPC connection. The next call reconnects after a loss.

    Leases and reservations that are not released end at their deadlines.
    """

    def __init__(self, node: RemoteNode) -> None:
        super().__init__()
        self._node = node
        self._calls = RemoteAdmin(node)
        self._caches: OrderedDict[bytes, RemoteCache] = OrderedDict()

    @property
    def name(self) -> str:
        """The node's name."""
        return str(self._node.about.name)

    def _cache(self, layout: Layout, salt: str, adapter: str, replicas: int | None) -> RemoteCache:
        self._node.check_open()
        check_cache(layout, salt, adapter, self._node.about.extent_bytes)
        cache = RemoteCache(self._node, layout, salt, adapter, replicas)
        self._caches[cache.root] = cache
        if len(self._caches) > ROOTS_MAX:
            self._caches.popitem(last=False)
        return cache

    def stats(self) -> dict[str, Any]:
        """Return the node's statistics, with ``client.misses`` of this store. Needs an operator's token."""
        stats = self._admin("stats")
        stats["client"] = {"misses": dict(self._node.misses)}
        return stats

    def verify(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """Verify the node, as ``AdminVerbs.verify`` does. The node may end the call earlier, at its own limit."""
        return self._calls.verify(timeout_s)

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the node accepts requests. Raises DeadlineExceeded."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._node.ask_about(min(self._node.timeout_s, max(0.01, deadline - time.monotonic())))
                return
            except Unavailable as error:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise DeadlineExceeded(f"{self._node.endpoint.address}: not ready after {timeout_s:g} s") from error
                time.sleep(_RETRY_S)

    def replace_session(self) -> None:
        """Check that the store is open: over gRPC there is no session to replace."""
        self._node.check_open()

    def close(self) -> None:
        """End the connection. May be called twice."""
        self._registrations.close()
        self._node.close()

    def __repr__(self) -> str:
        return f"<kvstore.Store {self.name!r} at {self._node.endpoint.address}>"

    def in_pool(self, keys: Keys) -> Keys:
        """Return keys without the pool's suffix, which only its nodes can compute."""
        return keys.with_tag(b"")

    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        return self._calls.call(call, arguments)

    def _encode_pages(self, keys: Keys) -> dict[str, Any]:
        cache = self._caches.get(keys.root)
        if cache is None:
            raise InvalidRequest("keys", "must be made with store.cache(...).keys(tokens) of this store")
        pages = cache.page_message(keys)
        bytes_max = self._node.about.message_bytes_max
        if len(keys) > KEYS_MAX or (bytes_max and pages.ByteSize() + OVERHEAD_BYTES > bytes_max):
            return super()._encode_pages(keys)  # keys are shorter, and are sent in parts; this needs an operator
        return {PROMPT: pages}


def connect_remote(endpoint: Endpoint, timeout_s: float) -> RemoteStore:
    """Connect to a node, which has to answer with its description, and return a store. Raises as ``connect``."""
    node = RemoteNode(endpoint, timeout_s)
    try:
        node.ask_about()
    except BaseException:
        node.close()
        raise
    return RemoteStore(node)
