"""The verbs of every store for opaque objects: values under string keys. ``model.objects`` has their format."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.client.buffers import DevicePart, Rows, check_text, part_of
from kvstore.client.device_link import link_of, pin
from kvstore.client.value_buffers import Part, Scattered
from kvstore.errors import InvalidRequest
from kvstore.model.objects import encode_names, object_root
from kvstore.model.prefix import Keys


class Registration:
    """A registered buffer, from ``Store.register`` until ``release``, the end of ``with``, or the end of the store.
    Keeps the buffer alive.

    Attributes:
        start, stop: the addresses of the buffer.
    """

    def __init__(self, owner: Registrations, buffer: Any) -> None:
        self._memory = part_of(buffer, "buffer", writable=True)
        if not self._memory.size:
            raise InvalidRequest("buffer", "must not be empty")
        self.start = self._memory.address if isinstance(self._memory, DevicePart) else self._memory.ctypes.data
        self.stop = self.start + self._memory.size
        self._owner = owner
        self._unpin: weakref.finalize[[], Registration] | None = None

    def part(self, address: int, nbytes: int) -> Part:
        """Return the ``nbytes`` of the buffer that begin at ``address``, as a value for ``put`` and a target for
        ``get``. Device memory is returned without a stream: the caller has waited for all work on it.

        Raises:
            InvalidRequest: they are not inside the buffer.
        """
        if not self.start <= address <= address + nbytes <= self.stop:
            raise InvalidRequest("address", f"must be inside the buffer (got {nbytes} bytes at {address:#x})")
        if isinstance(self._memory, DevicePart):
            return DevicePart(self._memory.device, address, nbytes, None, self._memory.owner)
        return self._memory[address - self.start : address - self.start + nbytes]

    def release(self) -> None:
        """End the registration. May be called twice."""
        self._owner.remove(self)
        if self._unpin is not None:
            self._unpin()

    def prepare(self) -> None:
        """Prepare copies by DMA: open the device of device memory, or pin host memory. Raises DeviceLost."""
        if isinstance(self._memory, DevicePart):
            link_of(self._memory.device)
        elif (unpin := pin(self._memory)) is not None:
            self._unpin = weakref.finalize(self, unpin)
            self._unpin.atexit = False

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Registrations:
    """All buffers registered with one store, for any number of threads."""

    def __init__(self) -> None:
        self._registrations: list[Registration] = []
        self._lock = threading.Lock()

    def add(self, buffer: Any) -> Registration:
        """Register a buffer, as ``Store.register`` does."""
        new = Registration(self, buffer)
        with self._lock:
            if any(new.start < each.stop and each.start < new.stop for each in self._registrations):
                raise InvalidRequest("buffer", "must not overlap a registered buffer")
            self._registrations.append(new)
        try:
            new.prepare()
        except BaseException:
            new.release()
            raise
        return new

    def remove(self, registration: Registration) -> None:
        """Remove a registration. Does nothing if it was removed before."""
        with self._lock:
            self._registrations = [each for each in self._registrations if each is not registration]

    def close(self) -> None:
        """End all registrations."""
        for registration in list(self._registrations):
            registration.release()

    def covers(self, buffer: Any) -> bool:
        """Return whether all of this buffer is inside a registered one."""
        part = part_of(buffer, "buffer", writable=False)
        start = part.address if isinstance(part, DevicePart) else part.ctypes.data
        with self._lock:
            return any(each.start <= start and start + part.size <= each.stop for each in self._registrations)


_U8 = np.dtype(np.uint8)


class ObjectVerbs(ABC):
    """The verbs of a store for opaque objects. Keys are text of 1 to 1000 bytes in UTF-8; salts separate tenants.

    A read returns a whole value, as one put wrote it, or nothing. If the node is in a pool, verbs that read look on the
    node first, and then on the other nodes; with ``local``, only on the node. A fault of another node is a miss.

    A buffer is any C-contiguous memory of the host or of a device (torch CUDA, ``__cuda_array_interface__``, DLPack,
    ``DevicePointer``); a value may have buffers of both. A device copies after the work that is queued in the buffer's
    stream, and each verb returns when its copies have ended. Through shared memory they go directly from and to frames
    of this node; all others go through host memory.

    Each verb raises NodeUnavailable or DeadlineExceeded if the node does not answer in time; through shared memory,
    only verbs that write do. An invalid argument raises InvalidRequest, and nothing was changed.
    """

    def __init__(self) -> None:
        self._registrations = Registrations()

    def put(
        self,
        key: str,
        data: Any,
        salt: str = "",
        replace: bool = False,
        *,
        group: str | None = None,
        count: int = 0,
        wait: bool = True,
    ) -> bool:
        """Store ``data`` under ``key``, as ``put_many`` does. Return whether it was stored."""
        return self.put_many([key], [data], salt, replace, group=group, count=count, wait=wait)[0]

    @abstractmethod
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
        """Store values, and return for each whether it was stored. A value is a buffer, or a list of buffers that are
        concatenated.

        False means that the key exists and ``replace`` is false, or that another writer was faster. With ``replace``,
        readers get the old value, nothing for a moment, or the new one, but never a mixture. Stored values survive the
        end of the daemon.

        Args:
            group: a name for objects that belong together, text like a key; or a list with a name or None for each key.
                Every read finds a member of a group only while ``count`` members are stored, and the members are
                evicted and deleted together. Other calls and processes may put the other members. If a key is stored as
                a member of another group that is not complete, the stored value is replaced.
            count: the number of members of each group, 1 to 4096; 0 without a group.
            wait: False returns as soon as new values are *published* in shared memory, which is faster. Every later
                call in any process sees them, and they survive the end of the daemon and of this process. But if two
                writers put one new key at the same moment, both calls may return True, and one of the two values is
                stored. The call waits in any case with ``replace``, for values of more than 16 MiB, if the log is full,
                in an embedded store, and over gRPC.

        Raises:
            InvalidRequest: a key, value or salt is invalid, a key is given twice, or a value is larger than all DRAM,
                or than the node accepts over gRPC. Nothing was stored. Or other members of the group were put with
                another ``count``, or the group has all its members: some values may be stored. With ``wait=False``, the
                node may notice this after the call has returned, and does not store the values.
            QuotaExceeded: a value exceeds its tenant's quota; other values may be stored.
            OutOfSpace: no space could be freed for a value; other values may be stored.
            NodeUnavailable, DeadlineExceeded: the node, or the device of a value, did not answer in time; some values
                may be stored.
            DeviceLost: the device of a value has failed; other values may be stored.
        """

    @abstractmethod
    def get(self, key: str, out: Any = None, salt: str = "", *, local: bool = False) -> Any:
        """Return the value under ``key`` as a new uint8 array, or copy it into ``out`` (a buffer or a list of buffers)
        and return its number of bytes.

        Returns None if there is no such value, or if it cannot be proven to be the requested one.

        Raises:
            InvalidRequest: as ``put``; ``out`` is too small or not writable.
            DeviceLost: the device of ``out`` has failed.
            DeadlineExceeded: the device did not copy in time, and may still write into ``out``.
        """

    def get_many(self, keys: Sequence[str], outs: Sequence[Any], salt: str = "", *, local: bool = False) -> list[int]:
        """Copy each value into its entry of ``outs``, a buffer or a list of buffers. Return the values' lengths; -1 for
        a missing value. Buffers in device memory must not overlap.

        If a member of a group is missing, the other members of the group in ``keys`` are missing too: what was copied
        into their buffers is not valid.

        Raises what ``get`` does; values before the failing one may have been copied.
        """
        names_of(keys, outs, "outs")
        lengths = [self.get(key, out, salt, local=local) for key, out in zip(keys, outs, strict=True)]
        return [-1 if length is None else int(length) for length in lengths]

    @abstractmethod
    def size(self, key: str, salt: str = "", *, local: bool = False) -> int | None:
        """Return the number of bytes of the value under ``key``; None if there is none."""

    @abstractmethod
    def contains(self, keys: str | Sequence[str], salt: str = "", *, local: bool = False) -> Any:
        """Return whether there is a value under this key, or for a list of keys a list of booleans."""

    @abstractmethod
    def delete(self, keys: str | Sequence[str], salt: str = "", *, local: bool = False) -> int:
        """Delete the values under these keys in every tier, and return the number of keys that had a value. A deleted
        value does not come back. All other members of a value's group are deleted with it, and are not counted.

        In a pool, the values are deleted on every node; with ``local``, only on this one. A node that does not answer
        deletes its values within seconds once it is back.

        Raises:
            InvalidRequest: as ``put``.
            NodeUnavailable, DeadlineExceeded: the node did not answer in time; some values may be deleted.
        """

    @abstractmethod
    def clear(self, prefix: str, salt: str = "", *, local: bool = False) -> int:
        """Delete all objects of this salt whose key begins with ``prefix`` ("" for all), and return their number.

        The node examines all its objects, in short steps so that other requests do not wait long. Objects that are put
        during the call may stay. Leased objects are deleted, as by ``delete``. In a pool, the objects of all nodes are
        deleted; with ``local``, only those of this node.

        Raises:
            InvalidRequest: ``prefix`` or ``salt`` is not text, or too long; nothing is deleted.
            NodeUnavailable, DeadlineExceeded: the node, or another node of the pool, did not answer in time; some
                objects may be deleted.
        """

    @abstractmethod
    def object_keys(self, salt: str = "") -> list[str]:
        """Return the sorted keys of all objects of a salt. The call examines every object of the node.

        Not available over gRPC, because the list has no limit.
        """

    @abstractmethod
    def object_pages(self, key: str, salt: str = "") -> Keys | None:
        """Return the keys of the pages on this node that hold the value under ``key``, for ``pin``, ``unpin`` and
        ``explain``; None if there is no such value. A value that is put with ``replace`` has other pages.

        Not available over gRPC.
        """

    def register(self, buffer: Any) -> Registration:
        """Register a buffer that is often the source or target of objects, for DMA: ``with store.register(b):``.

        Device memory is identified once, and its device is opened; ``Registration.part`` then returns any part of it by
        its address. Host memory is registered with the driver if this process uses a device, so that devices copy from
        and to it by DMA. Copies between host memory and frames do not change. Closing the store ends the registration.

        Raises:
            InvalidRequest: the buffer is not writable, not contiguous or empty, or it overlaps a registered one.
            DeviceLost: the device of the buffer has failed.
        """
        self._check_open()
        return self._registrations.add(buffer)

    def registered(self, buffer: Any) -> bool:
        """Return whether all of this buffer is inside a registered one."""
        return self._registrations.covers(buffer)

    @abstractmethod
    def _check_open(self) -> None:
        """Raise InvalidRequest if the store is closed, or if this is a forked child."""


# --- arguments, checked in the same way by every store --------------------------------------------------------------


def sources_of(keys: Sequence[str], values: Sequence[Any]) -> tuple[list[bytes], list[Scattered]]:
    """Return the names and values of a put. Raises InvalidRequest as ``put_many``."""
    names = names_of(keys, values, "values")
    if len(set(names)) != len(names):
        raise InvalidRequest("keys", "must not name a key twice")
    return names, [Scattered.of(value, "data", writable=False) for value in values]


def target_of(out: Any) -> Rows | Scattered:
    """Return the target of a value: one flat array, or several. Raises InvalidRequest as ``get``."""
    if type(out) is np.ndarray and out.dtype is _U8 and out.ndim == 1 and out.flags.carray:
        return out
    target = Scattered.of(out, "out", writable=True)
    only = target.parts[0] if len(target.parts) == 1 else None
    return only if isinstance(only, np.ndarray) else target


def as_scattered(target: Rows | Scattered) -> Scattered:
    """Return a target of ``target_of`` as a ``Scattered``."""
    return target if isinstance(target, Scattered) else Scattered([target])


def root_of_salt(salt: str) -> bytes:
    """Return the root of a salt's objects. Raises InvalidRequest if the salt is not text."""
    check_text(salt, "salt")
    return object_root(salt)


def listed(keys: Any, field: str = "keys") -> list[Any]:
    """Return one or several keys as a list. Raises InvalidRequest for anything else."""
    if isinstance(keys, str):
        return [keys]
    if isinstance(keys, bytes | bytearray) or not hasattr(keys, "__iter__"):
        raise InvalidRequest(field, f"must be text or a list of texts (got {type(keys).__name__})")
    return list(keys)


def names_of(keys: Sequence[str], others: Sequence[Any], field: str) -> list[bytes]:
    """Return keys as bytes. Raises InvalidRequest if a key is invalid, or if there is not one entry of ``others`` per
    key."""
    if isinstance(keys, str) or len(listed(keys)) != len(others):
        raise InvalidRequest(field, "must be a list with one entry per key")
    return encode_names(keys)
