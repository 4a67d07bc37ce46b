"""Opaque objects for hosts that expect no exceptions: a failed read is a miss, a failed write stores nothing, and both
are logged."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from kvstore.addresses import connect
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest, KVStoreError, OutOfSpace, Unavailable

_log = logging.getLogger(__name__)

ANSWER_S = 1.0  # how long one call waits for the node
AWAY_S = 5.0  # pause before a node that did not answer is called again


def connect_for(host: str, node: str | None) -> Store:
    """Connect an adapter of ``host`` to a node.

    Raises:
        ValueError: there is no such node. The message names the host.
    """
    try:
        return connect(node, ANSWER_S)
    except KVStoreError as error:
        raise ValueError(f"kvstore for {host}: {error}") from error


class Values:
    """The values of one host, in a store, for one or more tenants. Thread-safe.

    If the node does not answer a read, further reads are misses for ``AWAY_S`` without a call; the same holds for
    writes. Reads and writes are suspended separately, because reads from a node on this machine work without its
    daemon.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._no_reads_until_s = 0.0
        self._no_writes_until_s = 0.0

    def contains(self, keys: Sequence[str], salt: str) -> list[bool]:
        """Return, for each key, whether a value is stored."""
        if not keys or time.monotonic() < self._no_reads_until_s:
            return [False] * len(keys)
        try:
            return list(self._store.contains(list(keys), salt))
        except KVStoreError as error:
            self._log_failed_read(len(keys), error)
            return [False] * len(keys)

    def put(
        self,
        keys: Sequence[str],
        buffers: Sequence[Any],
        salt: str,
        groups: Sequence[str | None] | None = None,
        count: int = 0,
    ) -> list[bool]:
        """Store values and return, for each key, whether a value is stored now. Existing values are not replaced.

        ``groups`` are the groups of the values, each with ``count`` members.
        """
        buffers_by_key = dict(zip(keys, buffers, strict=True))
        group_by_key = dict(zip(keys, groups, strict=True)) if groups is not None else {}
        if not buffers_by_key or time.monotonic() < self._no_writes_until_s:
            return [False] * len(keys)
        try:
            names, values = list(buffers_by_key), list(buffers_by_key.values())
            group = list(group_by_key.values()) or None
            self._store.put_many(names, values, salt, group=group, count=count, wait=False)
            return [True] * len(keys)
        except KVStoreError as error:
            self._log_failed_write("stored", len(keys), error)
            return self.contains(keys, salt)  # part of the batch may be stored

    def get(self, keys: Sequence[str], buffers: Sequence[Any], salt: str) -> list[bool]:
        """Read values into buffers and return, for each, whether it was read.

        A value that cannot be proven, or that has another length than its buffer, is a miss. The contents of the buffer
        of a miss are undefined.
        """
        if not keys or time.monotonic() < self._no_reads_until_s:
            return [False] * len(keys)
        try:
            sizes = self._store.get_many(list(keys), list(buffers), salt)
        except InvalidRequest:  # one value or buffer is invalid, for example a buffer that is too short
            sizes = [self._get_one(key, buffer, salt) for key, buffer in zip(keys, buffers, strict=True)]
        except KVStoreError as error:
            self._log_failed_read(len(keys), error)
            sizes = [-1] * len(keys)
        return [size == _buffer_bytes(buffer) for size, buffer in zip(sizes, buffers, strict=True)]

    def delete(self, keys: Sequence[str], salt: str) -> list[int]:
        """Delete values and return the size in bytes of each. The size is -1 if there was no value, or if the node
        could not delete the values."""
        try:
            sizes = [self._store.size(key, salt) for key in keys]
            self._store.delete(list(keys), salt)
        except KVStoreError as error:
            self._log_failed_write("deleted", len(keys), error)
            return [-1] * len(keys)
        return [-1 if size is None else size for size in sizes]

    def clear(self, salt: str, prefix: str) -> bool:
        """Delete all values of a tenant whose keys begin with ``prefix``. Return False if the node could not."""
        try:
            self._store.clear(prefix, salt)
        except KVStoreError as error:
            self._log_failed_write("all deleted", 1, error)
            return False
        return True

    @property
    def is_away(self) -> bool:
        """True while reads or writes are suspended because the node did not answer."""
        return time.monotonic() < max(self._no_reads_until_s, self._no_writes_until_s)

    def close(self) -> None:
        """Close the connection to the node. Stored values stay in the node."""
        self._store.close()

    def _get_one(self, key: str, buffer: Any, salt: str) -> int:
        try:
            size = self._store.get(key, buffer, salt)
        except KVStoreError as error:
            self._log_failed_read(1, error)
            return -1
        return -1 if size is None else int(size)

    def _log_failed_read(self, count: int, error: KVStoreError) -> None:
        if _is_unanswered(error):
            self._no_reads_until_s = time.monotonic() + AWAY_S
        _log.warning("kvstore: %d values were not read: %s", count, error)

    def _log_failed_write(self, action: str, count: int, error: KVStoreError) -> None:
        if _is_unanswered(error):
            self._no_writes_until_s = time.monotonic() + AWAY_S
        _log.warning("kvstore: %d values were not %s: %s", count, action, error)


def _is_unanswered(error: KVStoreError) -> bool:
    """Return whether the error means that the node did not answer. ``OutOfSpace`` is an answer."""
    return isinstance(error, Unavailable) and not isinstance(error, OutOfSpace)


def _buffer_bytes(buffer: Any) -> int:
    """Return the size of a value's buffer, or the total size if the value has a list of buffers."""
    return sum(map(_buffer_bytes, buffer)) if isinstance(buffer, list) else memoryview(buffer).nbytes
