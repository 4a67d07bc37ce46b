"""Values: opaque objects for hosts that expect no exceptions. A failure is logged, and is a miss or leaves the value
unstored."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from kvstore.addresses import connect
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest, KVStoreError, OutOfSpace, Unavailable

_log = logging.getLogger(__name__)

ANSWER_S = 1.0  # how long one call waits for a node
AWAY_S = 5.0  # how long a node that did not answer is not called


def connected(host: str, node: str | None) -> Store:
    """Return a store for an adapter of ``host``.

    Raises:
        ValueError: there is no such node; the message names the host's adapter.
    """
    try:
        return connect(node, ANSWER_S)
    except KVStoreError as error:
        raise ValueError(f"kvstore for {host}: {error}") from error


class Values:
    """Values under the keys of one host, of several tenants. Threads may share it.

    A node that does not answer is not called for ``AWAY_S``: a failed write suspends writes, a failed read suspends
    reads. Reads from a node of this machine do not need its daemon.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._no_reads_until_s = 0.0
        self._no_writes_until_s = 0.0

    def contains(self, keys: Sequence[str], salt: str) -> list[bool]:
        """Return for each key whether it is stored."""
        if not keys or time.monotonic() < self._no_reads_until_s:
            return [False] * len(keys)
        try:
            return list(self._store.contains(list(keys), salt))
        except KVStoreError as error:
            self._not_read(len(keys), error)
            return [False] * len(keys)

    def put(self, keys: Sequence[str], buffers: Sequence[Any], salt: str) -> list[bool]:
        """Store values; return whether each is stored now. An existing value stays."""
        wanted = dict(zip(keys, buffers, strict=True))
        if not wanted or time.monotonic() < self._no_writes_until_s:
            return [False] * len(keys)
        try:
            self._store.put_many(list(wanted), list(wanted.values()), salt, wait=False)
            return [True] * len(keys)
        except KVStoreError as error:
            self._not_written("stored", len(keys), error)
            return self.contains(keys, salt)  # others may be stored

    def get(self, keys: Sequence[str], buffers: Sequence[Any], salt: str) -> list[bool]:
        """Read values; return for each whether its buffer has it, proven and of exactly the buffer's length. The
        contents of other buffers are undefined."""
        if not keys or time.monotonic() < self._no_reads_until_s:
            return [False] * len(keys)
        lengths = [_length(buffer) for buffer in buffers]
        try:
            found = self._store.get_many(list(keys), list(buffers), salt)
        except InvalidRequest:  # one of them is invalid, for example of another length
            found = [self._get_one(key, buffer, salt) for key, buffer in zip(keys, buffers, strict=True)]
        except KVStoreError as error:
            self._not_read(len(keys), error)
            found = [-1] * len(keys)
        return [length == wanted for length, wanted in zip(found, lengths, strict=True)]

    def delete(self, keys: Sequence[str], salt: str) -> list[int]:
        """Delete values; return the size of each, or -1 if it did not exist or could not be deleted."""
        try:
            sizes = [self._store.size(key, salt) for key in keys]
            self._store.delete(list(keys), salt)
        except KVStoreError as error:
            self._not_written("deleted", len(keys), error)
            return [-1] * len(keys)
        return [-1 if size is None else size for size in sizes]

    def clear(self, salt: str, prefix: str) -> bool:
        """Delete all values of a tenant whose keys begin with ``prefix``; return whether that was done."""
        try:
            self._store.clear(prefix, salt)
        except KVStoreError as error:
            self._not_written("all deleted", 1, error)
            return False
        return True

    @property
    def away(self) -> bool:
        """True while the node is not called."""
        return time.monotonic() < max(self._no_reads_until_s, self._no_writes_until_s)

    def close(self) -> None:
        """Close the connection to the node. Values stay."""
        self._store.close()

    def _get_one(self, key: str, buffer: Any, salt: str) -> int:
        try:
            length = self._store.get(key, buffer, salt)
        except KVStoreError as error:
            self._not_read(1, error)
            return -1
        return -1 if length is None else int(length)

    def _not_read(self, count: int, error: KVStoreError) -> None:
        if _is_away(error):
            self._no_reads_until_s = time.monotonic() + AWAY_S
        _log.warning("kvstore: %d values were not read: %s", count, error)

    def _not_written(self, what: str, count: int, error: KVStoreError) -> None:
        if _is_away(error):
            self._no_writes_until_s = time.monotonic() + AWAY_S
        _log.warning("kvstore: %d values were not %s: %s", count, what, error)


def _is_away(error: KVStoreError) -> bool:
    """Return whether an error means that the node did not answer."""
    return isinstance(error, Unavailable) and not isinstance(error, OutOfSpace)


def _length(buffer: Any) -> int:
    """Return the bytes of a buffer, or of several buffers of one value."""
    return sum(map(_length, buffer)) if isinstance(buffer, list) else memoryview(buffer).nbytes
