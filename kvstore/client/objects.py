"""ObjectVerbs: opaque objects, values under string keys, as every store has them. Their shape: ``model.objects``.

Registration: buffers that a store's caller moves bytes through often, remembered for DMA.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.client.buffers import Rows, Scattered, check_text, flat_bytes
from kvstore.errors import InvalidRequest
from kvstore.model.objects import encode_names, object_root


class Registration:
    """A registered buffer: from ``Store.register`` until ``release`` or the end of ``with``. Keeps the buffer alive."""

    def __init__(self, owner: Registrations, buffer: Any) -> None:
        self.bytes = flat_bytes(buffer, "buffer")
        self.start = self.bytes.ctypes.data
        self.stop = self.start + self.bytes.size
        self._owner = owner

    def release(self) -> None:
        """Forget the buffer. Twice is fine."""
        self._owner.remove(self)

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Registrations:
    """All buffers registered with one store. Threads may share it."""

    def __init__(self) -> None:
        self._held: list[Registration] = []
        self._lock = threading.Lock()

    def add(self, buffer: Any) -> Registration:
        """See ``Store.register``."""
        new = Registration(self, buffer)
        if not new.bytes.flags.writeable:
            raise InvalidRequest("buffer", "must be writable")
        if not new.bytes.size:
            raise InvalidRequest("buffer", "must not be empty")
        with self._lock:
            if any(new.start < held.stop and held.start < new.stop for held in self._held):
                raise InvalidRequest("buffer", "overlaps one that is registered")
            self._held.append(new)
        return new

    def remove(self, registration: Registration) -> None:
        """See ``Registration.release``."""
        with self._lock:
            self._held = [held for held in self._held if held is not registration]

    def covers(self, buffer: Any) -> bool:
        """See ``Store.registered``."""
        flat = flat_bytes(buffer, "buffer")
        start, stop = flat.ctypes.data, flat.ctypes.data + flat.size
        with self._lock:
            return any(held.start <= start and stop <= held.stop for held in self._held)


_U8 = np.dtype(np.uint8)


class ObjectVerbs(ABC):
    """What a store can do with opaque objects. Keys are text of 1 to 1000 bytes as UTF-8; salts keep tenants apart.

    A value is found whole, as one put wrote it, or not at all. Buffers are any C-contiguous host memory. Each verb
    raises NodeUnavailable or DeadlineExceeded where the node does not answer in time; through shared memory only those
    that write do. A bad argument raises InvalidRequest, and nothing was changed.
    """

    def __init__(self) -> None:
        self._registrations = Registrations()

    def put(self, key: str, data: Any, salt: str = "", replace: bool = False) -> bool:
        """Store ``data`` under ``key``; whether that was done. See ``put_many``."""
        return self.put_many([key], [data], salt, replace)[0]

    @abstractmethod
    def put_many(self, keys: Sequence[str], values: Sequence[Any], salt: str = "", replace: bool = False) -> list[bool]:
        """Store values, each a buffer or a list of buffers that are laid end to end; per value whether that was done.

        False: there is one of that key and ``replace`` is not given, or another writer was faster. With ``replace``
        readers find the old value, nothing for a moment, or the new one, never a mixture. True: it survives the daemon.

        Raises:
            InvalidRequest: a key, value or salt makes no sense, a key is named twice, or a value is larger than all
                DRAM, or than the node takes over gRPC. Nothing was stored.
            QuotaExceeded: of one value, because its tenant has all it may have; others may be stored.
            OutOfSpace: of one value, because no room could be made; others may be stored.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time; some may be stored.
        """

    @abstractmethod
    def get(self, key: str, out: Any = None, salt: str = "") -> Any:
        """The value under ``key`` as a new uint8 array, or copied into ``out`` (a buffer or a list of them): its bytes.

        None: there is none, or it cannot be proven to be the one asked for.

        Raises:
            InvalidRequest: as ``put``; ``out`` is too small or not writable.
        """

    def get_many(self, keys: Sequence[str], outs: Sequence[Any], salt: str = "") -> list[int]:
        """``get`` into each of ``outs`` (a buffer, or a list of buffers to scatter one value over): lengths, -1: none.

        Raises what ``get`` does; values before the one that it names may have been copied.
        """
        names_of(keys, outs, "outs")
        lengths = [self.get(key, out, salt) for key, out in zip(keys, outs, strict=True)]
        return [-1 if length is None else int(length) for length in lengths]

    @abstractmethod
    def size(self, key: str, salt: str = "") -> int | None:
        """Bytes of the value under ``key``; None: there is none."""

    @abstractmethod
    def contains(self, keys: str | Sequence[str], salt: str = "") -> Any:
        """Whether there is a value under this key; a list of that where a list of keys is given."""

    @abstractmethod
    def delete(self, keys: str | Sequence[str], salt: str = "") -> int:
        """Delete the values under these keys, on every tier; how many there were. They do not come back.

        Raises:
            InvalidRequest: as ``put``.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time; some may be deleted.
        """

    @abstractmethod
    def clear(self, prefix: str, salt: str = "") -> int:
        """Delete all objects of this salt whose key begins with ``prefix``; how many there were. "": all objects.

        Looks at every object of the node, in steps that keep nobody waiting for long. Objects that are put in the
        meantime may stay. Those under a lease are deleted as ``delete`` does.

        Raises:
            InvalidRequest: ``prefix`` or ``salt`` is not text, or too long; nothing is deleted.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time; some may be deleted.
        """

    @abstractmethod
    def object_keys(self, salt: str = "") -> list[str]:
        """Keys of all objects of a salt, in order. Looks at every object there is. Refused over gRPC, where a list of
        all keys has no bound."""

    def register(self, buffer: Any) -> Registration:
        """Remember a buffer that objects will often be put from and got into, for DMA: ``with store.register(b):``.

        Only ``registered`` depends on it today: copies in host memory go the same way without.

        Raises:
            InvalidRequest: not writable, not contiguous, empty, or it overlaps one that is registered.
        """
        self._check_open()
        return self._registrations.add(buffer)

    def registered(self, buffer: Any) -> bool:
        """Whether all of this buffer is inside a registered one."""
        return self._registrations.covers(buffer)

    @abstractmethod
    def _check_open(self) -> None:
        """Raises InvalidRequest where the store is closed, or this is a forked child."""


# --- arguments, checked alike in every store ------------------------------------------------------------------------


def sources_of(keys: Sequence[str], values: Sequence[Any]) -> tuple[list[bytes], list[Scattered]]:
    """Names and values to be put. Raises InvalidRequest as ``put_many``."""
    names = names_of(keys, values, "values")
    if len(set(names)) != len(names):
        raise InvalidRequest("keys", "one is named twice")
    return names, [Scattered.of(value, "data", writable=False) for value in values]


def target_of(out: Any) -> Rows | Scattered:
    """Where a value is to go: one flat array, or several. Raises InvalidRequest as ``get``."""
    if type(out) is np.ndarray and out.dtype is _U8 and out.ndim == 1 and out.flags.carray:
        return out
    target = Scattered.of(out, "out", writable=True)
    return target.parts[0] if len(target.parts) == 1 else target


def root_of_salt(salt: str) -> bytes:
    """The root of a salt's objects. Raises InvalidRequest where it is no text."""
    check_text(salt, "salt")
    return object_root(salt)


def listed(keys: Any, field: str = "keys") -> list[Any]:
    """One key or several, as a list. Raises InvalidRequest where it is neither."""
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, bytes | bytearray) or not hasattr(keys, "__iter__"):
        raise InvalidRequest(field, f"must be text or a list of texts, not {type(keys).__name__}")
    return list(keys)


def names_of(keys: Sequence[str], others: Sequence[Any], field: str) -> list[bytes]:
    """Keys as bytes. Raises InvalidRequest where one makes no sense, or they are not as many as ``others``."""
    if isinstance(keys, str) or len(listed(keys)) != len(others):
        raise InvalidRequest(field, "must be as many as keys, in a list")
    return encode_names(keys)
