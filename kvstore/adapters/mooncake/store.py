"""``MooncakeDistributedStore`` gives access to a node's objects through Mooncake's Python interface.

Each value is an opaque object under its own key. The node verifies it on every read, saves it to NVMe and may evict it.
The node owns all memory, so ``setup`` ignores its arguments about segments, buffers and devices.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.addresses import connect
from kvstore.client.buffers import DevicePointer
from kvstore.client.objects import Registration
from kvstore.client.store import Store
from kvstore.device.cuda import device_of
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, OutOfSpace, QuotaExceeded

_log = logging.getLogger(__name__)

# Mooncake's codes (``ErrorCode`` in its types.h).
OK: Final = 0
NO_AVAILABLE_HANDLE: Final = -200
INVALID_PARAMS: Final = -600
OBJECT_NOT_FOUND: Final = -704
RPC_FAIL: Final = -900
RPC_TIMEOUT: Final = -901
TENANT_QUOTA_EXCEEDED: Final = -1700

# A regular expression that matches a prefix. The group is the prefix: literal characters, and special ones after ``\``.
_PREFIX_REGEX: Final = re.compile(r"\^((?:[^\\^$.|?*+()\[\]{}]|\\[^0-9A-Za-z])*)(?:\.\*\$?)?")
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)

SOFT_PIN_S: Final = 30 * 60.0  # as long as Mooncake's default
HARD_PIN_S: Final = 30 * 86400.0  # the longest pin; Mooncake has no end

DEFAULT_TENANT = "default"
SCHEMES = ("kv://", "kv+unix://")


@dataclass
class ReplicateConfig:
    """A host's preferences for the values of one call.

    Attributes:
        with_soft_pin, with_hard_pin: pin the values on their node for ``SOFT_PIN_S`` or ``HARD_PIN_S``, as far as the
            node's limits of pins allow.
        group_ids: for each value, the group that it belongs to, or "". The values of one call with equal ids are found
            only while all of them are stored, and are evicted and removed together.

    The adapter ignores all others: the node decides where values are stored.
    """

    replica_num: int = 1
    with_soft_pin: bool = False
    with_hard_pin: bool = False
    preferred_segment: str = ""
    preferred_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    group_ids: list[str] = field(default_factory=list)


class ReplicaDescriptor:
    """A replica of a value. Its kind is unknown, because a node moves values between memory and NVMe at any time."""

    def is_memory_replica(self) -> bool:
        """Return False, since the kind is unknown."""
        return False

    def is_disk_replica(self) -> bool:
        """Return False, since the kind is unknown."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Return False, since the kind is unknown."""
        return False


class MooncakeDistributedStore:
    """A client of one node, usable between ``setup`` and ``close``. Thread-safe.

    Like Mooncake's class, it returns codes instead of raising: 0 or a number of bytes on success, otherwise a negative
    code. Errors are logged. Each pointer that a caller passes must be in a registered buffer.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._salt = ""
        self._registrations: dict[int, Registration] = {}  # by the buffer's address
        # Starts of the registrations, and the registrations, both sorted. Replaced as a whole, so readers need no lock.
        self._sorted: tuple[list[int], list[Registration]] = [], []

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int = 0,
        local_buffer_size: int = 0,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: object = None,
        *,
        tenant_id: str = DEFAULT_TENANT,
    ) -> int:
        """Connect to a node.

        Args:
            master_server_addr: a node's name, or ``kv://HOST:PORT``. A plain ``HOST:PORT`` is the address of a Mooncake
                master and is ignored: the node is then the one in ``$KVSTORE_NODE``, or else the only one on this
                machine.
            tenant_id: the tenant. Each tenant has its own values.
        """
        is_node = master_server_addr.startswith(SCHEMES) or ":" not in master_server_addr
        try:
            self._store = connect(master_server_addr if is_node and master_server_addr else None)
        except KVStoreError as error:
            _log.error("setup: %s", error)
            return code_of(error)
        self._salt = "mooncake" if tenant_id == DEFAULT_TENANT else f"mooncake/{tenant_id}"
        return OK

    def close(self) -> int:
        """Close the connection to the node. Stored values stay in the node."""
        store, self._store = self._store, None
        self._registrations.clear()
        self._sort_registrations()
        if store is not None:
            store.close()
        return OK

    # --- buffers ----------------------------------------------------------------------------------------------------

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register host or device memory of this process."""
        registration = self._registrations.get(buffer_ptr)
        if registration is not None and registration.stop - registration.start == size:
            return OK
        buffer = _buffer_at(buffer_ptr, size)
        if buffer is None:
            _log.error("register_buffer: %d bytes at %#x are not memory of this process", size, buffer_ptr)
            return INVALID_PARAMS

        def register(store: Store) -> int:
            self._registrations[buffer_ptr] = store.register(buffer)
            self._sort_registrations()
            return OK

        return self._call("register_buffer", register)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Unregister a buffer."""
        registration = self._registrations.pop(buffer_ptr, None)
        if registration is None:
            return INVALID_PARAMS
        self._sort_registrations()
        registration.release()
        return OK

    def _sort_registrations(self) -> None:
        registrations = sorted(self._registrations.values(), key=lambda registration: registration.start)
        self._sorted = [registration.start for registration in registrations], registrations

    # --- one value --------------------------------------------------------------------------------------------------

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store bytes and return 0, or a negative code. An existing value is not replaced."""
        return self._put([key], [value], config)[0]

    def get(self, key: str) -> bytes:
        """Return the value; empty if there is none."""
        values: list[bytes] = []

        def read(store: Store) -> int:
            value = store.get(key, salt=self._salt)
            if value is not None:
                values.append(value.tobytes())
            return OK

        self._call("get", read)
        return values[0] if values else b""

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Store a value from a buffer and return 0, or a negative code."""
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Read a value into a buffer and return its size in bytes, or a negative code."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def is_exist(self, key: str) -> int:
        """Return 1 if there is a value, 0 if there is none, or a negative code."""
        return self.batch_is_exist([key])[0]

    def get_size(self, key: str) -> int:
        """Return the size of a value in bytes, or a negative code."""

        def read_size(store: Store) -> int:
            size = store.size(key, self._salt)
            return OBJECT_NOT_FOUND if size is None else size

        return self._call("get_size", read_size)

    def remove(self, key: str, force: bool = False) -> int:
        """Remove a value, even while it is read, and return 0. Return a negative code if there is no value."""
        return self._call("remove", lambda store: OK if store.delete(key, self._salt) else OBJECT_NOT_FOUND)

    def remove_all(self, force: bool = False) -> int:
        """Remove all values of this tenant and return how many there were."""
        return self._call("remove_all", lambda store: store.clear("", self._salt))

    def remove_by_regex(self, regex: str, force: bool = False) -> int:
        """Remove the values of this tenant whose keys begin with a prefix, and return how many there were.

        Args:
            regex: ``^prefix`` or ``^prefix.*``.

        Raises:
            InvalidRequest: ``regex`` is another kind of regular expression; nothing is removed.
        """
        prefix = _prefix_of(regex)
        return self._call("remove_by_regex", lambda store: store.clear(prefix, self._salt))

    # --- batches ----------------------------------------------------------------------------------------------------

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return, for each key, 1 if there is a value, 0 if there is none, or a negative code."""
        answers: list[int] = []

        def look(store: Store) -> int:
            answers.extend(int(is_stored) for is_stored in store.contains(list(keys), self._salt))
            return OK

        code = self._call("batch_is_exist", look)
        return answers if code == OK else [code] * len(keys)

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store each value from a buffer. Return, for each value, 0 or a negative code."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put(keys, list(map(self._view, buffer_ptrs, sizes)), config)

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Read each value into a buffer. Return, for each value, its size in bytes or a negative code."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get(keys, list(map(self._view, buffer_ptrs, sizes)))

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store each value from several buffers, one after the other. Return, for each value, 0 or a negative code."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put(keys, list(map(self._views, all_buffer_ptrs, all_sizes)), config)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read each value into several buffers. Return, for each value, its size in bytes or a negative code."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get(keys, list(map(self._views, all_buffer_ptrs, all_sizes)))

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return a descriptor for each key that has a value."""
        answers = self.batch_is_exist(keys)
        return {key: [ReplicaDescriptor()] for key, answer in zip(keys, answers, strict=True) if answer == 1}

    # --- calls to the store -----------------------------------------------------------------------------------------

    def _call(self, name: str, call: Callable[[Store], int]) -> int:
        """Return the result of ``call``, or the code of the error that it raises. ``name`` is for the log."""
        if self._store is None:
            _log.error("%s: setup was not called, or it failed", name)
            return RPC_FAIL
        try:
            return call(self._store)
        except KVStoreError as error:
            _log.warning("%s: %s", name, error)
            return code_of(error)

    def _view(self, pointer: int, size: int) -> Any:
        """Return the memory at a pointer as a buffer; None if it is not in a registered buffer."""
        starts, registrations = self._sorted
        position = bisect_right(starts, pointer) - 1
        if position < 0 or size <= 0 or pointer + size > registrations[position].stop or self._store is None:
            _log.error("%d bytes at %#x are not in a registered buffer", size, pointer)
            return None
        return registrations[position].part(pointer, size)

    def _views(self, pointers: Sequence[int], sizes: Sequence[int]) -> list[Any] | None:
        """Return the memory at several pointers as buffers; None if one of them is not in a registered buffer."""
        views = list(map(self._view, pointers, sizes)) if len(pointers) == len(sizes) else [None]
        return None if any(view is None for view in views) else views

    def _put(self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None) -> list[int]:
        """Store values and return a code for each. A value of None has an invalid pointer."""
        config = config or ReplicateConfig()
        group_ids = config.group_ids or ()  # None from hosts that take it for optional
        if group_ids and len(group_ids) != len(keys):
            _log.error("put: group_ids must be one per key, %d (got %d)", len(keys), len(group_ids))
            return [INVALID_PARAMS] * len(keys)
        valid = {key: value for key, value in zip(keys, values, strict=True) if value is not None}
        values_by_key = {key: valid.get(key) for key in keys}
        groups = _groups(keys, group_ids)
        codes = self._put_each({key: values_by_key[key] for key in groups.pop("")})
        members = {group_id: {key: values_by_key[key] for key in its} for group_id, its in groups.items()}
        for group_id, its in list(members.items()):
            if any(value is None for value in its.values()):  # a group is stored as a whole or not at all
                codes |= dict.fromkeys(members.pop(group_id), INVALID_PARAMS)
        codes |= self._put_groups(members) if members else {}
        if config.with_soft_pin or config.with_hard_pin:
            stored = [key for key, code in codes.items() if code == OK]
            self._pin(stored, HARD_PIN_S if config.with_hard_pin else SOFT_PIN_S)
        return [codes[key] if value is not None else INVALID_PARAMS for key, value in zip(keys, values, strict=True)]

    def _put_each(self, values: dict[str, Any]) -> dict[str, int]:
        """Store each of these values, and return their codes."""
        valid = {key: value for key, value in values.items() if value is not None}

        def put_all(store: Store) -> int:
            # Existing values stay.
            store.put_many(list(valid), list(valid.values()), self._salt, wait=False)
            return OK

        def put_one(key: str) -> int:
            def put(store: Store) -> int:
                store.put(key, valid[key], self._salt)
                return OK

            return self._call("put", put)

        code = self._call("put", put_all) if valid else OK
        codes = dict.fromkeys(values, INVALID_PARAMS) | dict.fromkeys(valid, code)
        if code == INVALID_PARAMS:  # at least one value is invalid, so the store stored none
            codes |= {key: put_one(key) for key in valid}
        elif code != OK:  # part of the batch may be stored
            answers = self.batch_is_exist(list(valid))
            codes |= {key: OK for key, answer in zip(valid, answers, strict=True) if answer == 1}
        return codes

    def _put_groups(self, groups: dict[str, dict[str, Any]]) -> dict[str, int]:
        """Store the values of these groups by key, and return their codes. A group is stored as a whole or not at all.
        Existing values stay in the groups that they have."""
        values = {key: value for members in groups.values() for key, value in members.items()}

        def put(store: Store) -> int:
            stored = dict(zip(values, store.contains(list(values), self._salt, local=True), strict=True))
            by_count: dict[int, dict[str, str]] = {}  # number of members -> key -> name of its group
            for group_id, members in groups.items():
                missing = [key for key in members if not stored[key]]
                by_count.setdefault(len(missing), {}).update(dict.fromkeys(missing, _group_name(group_id, missing)))
            by_count.pop(0, None)
            for count, names in by_count.items():
                sources, group = [values[key] for key in names], list(names.values())
                store.put_many(list(names), sources, self._salt, group=group, count=count, wait=False)
            return OK

        code = self._call("put", put)
        if code == INVALID_PARAMS and len(groups) > 1:  # one of the groups has an invalid member
            parts = [self._put_groups({group_id: members}) for group_id, members in groups.items()]
            return {key: code for part in parts for key, code in part.items()}
        codes = dict.fromkeys(values, code)
        if code not in (OK, INVALID_PARAMS):  # part of the batch may be stored
            answers = self.batch_is_exist(list(values))
            codes |= {key: OK for key, answer in zip(values, answers, strict=True) if answer == 1}
        return codes

    def _pin(self, keys: Sequence[str], ttl_s: float) -> None:
        """Pin stored values. If the node refuses a pin, which is logged, the other values are not pinned either."""

        def pin(store: Store) -> int:
            for key in keys:
                pages = store.object_pages(key, self._salt)
                if pages is not None:  # else another node has the value, or it was evicted
                    store.pin(pages, ttl_s)
            return OK

        self._call("pin", pin)

    def _get(self, keys: Sequence[str], outs: Sequence[Any]) -> list[int]:
        """Read values and return, for each, its size or a code. A target of None has an invalid pointer."""
        sizes: list[int] = []

        def get_all(store: Store) -> int:
            sizes.extend(store.get_many(keys, outs, self._salt))
            return OK

        def get_one(key: str, out: Any) -> int:
            def get(store: Store) -> int:
                size = store.get(key, out, self._salt)
                return OBJECT_NOT_FOUND if size is None else int(size)

            return self._call("get", get)

        if not any(out is None for out in outs) and self._call("get", get_all) == OK:
            return [OBJECT_NOT_FOUND if size < 0 else size for size in sizes]
        return [INVALID_PARAMS if out is None else get_one(key, out) for key, out in zip(keys, outs, strict=True)]


def _groups(keys: Sequence[str], group_ids: Sequence[str]) -> dict[str, list[str]]:
    """Return the keys of each group. Keys without a group, and keys that are alone in theirs, are under "" and come
    first."""
    members: dict[str, list[str]] = {}
    for key, group_id in zip(keys, group_ids, strict=False):
        members.setdefault(group_id, []).append(key)
    groups = {group_id: list(dict.fromkeys(its)) for group_id, its in members.items() if group_id}
    groups = {group_id: its for group_id, its in groups.items() if len(its) > 1}
    grouped = {key for its in groups.values() for key in its}
    return {"": [key for key in keys if key not in grouped], **groups}


def _group_name(group_id: str, keys: Sequence[str]) -> str:
    """Return the name of the group of these members. Mooncake does not say how many members a group has in all, and
    other calls may add some under its id. So the members of one call are a group of their own."""
    text = json.dumps([group_id, *sorted(keys)])
    return "mooncake/" + hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def code_of(error: KVStoreError) -> int:
    """Return Mooncake's code for an exception of the store."""
    if isinstance(error, QuotaExceeded):
        return TENANT_QUOTA_EXCEEDED
    if isinstance(error, OutOfSpace):
        return NO_AVAILABLE_HANDLE
    if isinstance(error, InvalidRequest):
        return INVALID_PARAMS
    return RPC_TIMEOUT if isinstance(error, DeadlineExceeded) else RPC_FAIL


def _buffer_at(start: int, size: int) -> Any:
    """Return the memory at an address as a buffer; None if it is neither a device's nor mapped for reading and
    writing."""
    if size <= 0 or start <= 0:
        return None
    if device_of(start) is not None:
        return DevicePointer(start, size)
    return (ctypes.c_ubyte * size).from_address(start) if _is_host_memory(start, size) else None


def _is_host_memory(start: int, size: int) -> bool:
    """Return whether this process can read and write a range of addresses. It cannot for addresses that a driver has
    only reserved."""
    mapped_end = start
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, *_ = line.split()
        map_start, map_end = (int(bound, 16) for bound in bounds.split("-"))
        if map_start <= mapped_end < map_end:
            if not permissions.startswith("rw"):
                return False
            mapped_end = map_end
        if mapped_end >= start + size:
            return True
    return False


def _prefix_of(regex: str) -> str:
    """Return the prefix that a regular expression matches.

    Raises:
        InvalidRequest: the expression is neither ``.*`` nor ``^`` with literal text and optionally ``.*``.
    """
    match = _PREFIX_REGEX.fullmatch(regex)
    if match is None and regex != ".*":
        raise InvalidRequest("regex", f"must be a prefix, as ^prefix or ^prefix.* (got {regex[:80]!r})")
    return _ESCAPED.sub(r"\1", match[1]) if match is not None else ""
