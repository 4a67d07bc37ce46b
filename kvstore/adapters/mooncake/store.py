"""``MooncakeDistributedStore``: Mooncake's Python interface for the objects of a node.

Values are objects under their own keys: proven, checksummed, saved to NVMe, evictable. The node owns all memory, so the
arguments of ``setup`` about segments, buffers and devices are ignored.
"""

from __future__ import annotations

import ctypes
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvstore.addresses import connect
from kvstore.client.objects import Registration
from kvstore.client.store import Store
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, OutOfSpace, QuotaExceeded

_log = logging.getLogger(__name__)

# Mooncake's own codes (``ErrorCode`` in its types.h).
OK: Final = 0
NO_AVAILABLE_HANDLE: Final = -200
INVALID_PARAMS: Final = -600
OBJECT_NOT_FOUND: Final = -704
RPC_FAIL: Final = -900
RPC_TIMEOUT: Final = -901
TENANT_QUOTA_EXCEEDED: Final = -1700

# The prefix in a regular expression: literal characters, and escaped special characters.
_PREFIX: Final = re.compile(r"\^((?:[^\\^$.|?*+()\[\]{}]|\\[^0-9A-Za-z])*)(?:\.\*\$?)?")
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)

DEFAULT_TENANT = "default"
SCHEMES = ("kv://", "kv+unix://")


@dataclass
class ReplicateConfig:
    """A host's wishes for its values. They are accepted but ignored: the node's policy decides where values stay."""

    replica_num: int = 1
    with_soft_pin: bool = False
    with_hard_pin: bool = False
    preferred_segment: str = ""
    preferred_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    group_ids: list[str] = field(default_factory=list)


class ReplicaDescriptor:
    """Says that a value has a replica, but not of which kind: a node moves values between memory and NVMe."""

    def is_memory_replica(self) -> bool:
        """Always False: unknown."""
        return False

    def is_disk_replica(self) -> bool:
        """Always False: unknown."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Always False: unknown."""
        return False


class MooncakeDistributedStore:
    """A client of one node. Life: made -> ``setup`` -> used -> ``close``. Threads may share it.

    Like Mooncake's, it returns codes and raises no exceptions of its own: 0 or a number of bytes on success, otherwise
    a negative code. Errors are logged. A pointer must be in a registered buffer.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._salt = ""
        self._registered: dict[int, Registration] = {}
        self._regions: tuple[list[int], list[Registration]] = [], []  # sorted starts, and registrations; replaced whole

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
            tenant_id: the tenant, which has its own values.
        """
        named = master_server_addr.startswith(SCHEMES) or ":" not in master_server_addr
        try:
            self._store = connect(master_server_addr if named and master_server_addr else None)
        except KVStoreError as error:
            _log.error("setup: %s", error)
            return code_of(error)
        self._salt = "mooncake" if tenant_id == DEFAULT_TENANT else f"mooncake/{tenant_id}"
        return OK

    def close(self) -> int:
        """Close the connection to the node. Values stay."""
        store, self._store = self._store, None
        self._registered.clear()
        self._in_order()
        if store is not None:
            store.close()
        return OK

    # --- buffers ----------------------------------------------------------------------------------------------------

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register memory of this process. Device memory is refused."""
        known = self._registered.get(buffer_ptr)
        if known is not None and known.stop - known.start == size:
            return OK
        if size <= 0 or not is_host_memory(buffer_ptr, size):
            _log.error("register_buffer: %d bytes at %#x are not host memory of this process", size, buffer_ptr)
            return INVALID_PARAMS

        def register(store: Store) -> int:
            self._registered[buffer_ptr] = store.register((ctypes.c_ubyte * size).from_address(buffer_ptr))
            self._in_order()
            return OK

        return self._do("register_buffer", register)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Unregister a buffer."""
        known = self._registered.pop(buffer_ptr, None)
        if known is None:
            return INVALID_PARAMS
        self._in_order()
        known.release()
        return OK

    def _in_order(self) -> None:
        held = sorted(self._registered.values(), key=lambda registration: registration.start)
        self._regions = [registration.start for registration in held], held

    # --- one value --------------------------------------------------------------------------------------------------

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store bytes. If the key has a value already, that value stays, and 0 is returned."""
        return self._put([key], [value])[0]

    def get(self, key: str) -> bytes:
        """Return the bytes; empty if there is no such value."""
        found: list[bytes] = []

        def read(store: Store) -> int:
            value = store.get(key, salt=self._salt)
            if value is not None:
                found.append(value.tobytes())
            return OK

        self._do("get", read)
        return found[0] if found else b""

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """Return 0, or a negative code."""
        return self.batch_put_from([key], [buffer_ptr], [size])[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Return the number of bytes read, or a negative code."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def is_exist(self, key: str) -> int:
        """Return 1, 0, or a negative code."""
        return self.batch_is_exist([key])[0]

    def get_size(self, key: str) -> int:
        """Return the size in bytes, or a negative code."""

        def size(store: Store) -> int:
            found = store.size(key, self._salt)
            return OBJECT_NOT_FOUND if found is None else found

        return self._do("get_size", size)

    def remove(self, key: str, force: bool = False) -> int:
        """Return 0, or a negative code if there is no such value. A value that is being read is removed too."""
        return self._do("remove", lambda store: OK if store.delete(key, self._salt) else OBJECT_NOT_FOUND)

    def remove_all(self, force: bool = False) -> int:
        """Remove all values of this tenant; return how many there were."""
        return self._do("remove_all", lambda store: store.clear("", self._salt))

    def remove_by_regex(self, regex: str, force: bool = False) -> int:
        """Remove the values of this tenant whose keys begin with a prefix, given as ``^prefix`` or ``^prefix.*``;
        return how many there were.

        Raises:
            InvalidRequest: any other regular expression; nothing is removed.
        """
        prefix = _prefix_of(regex)
        return self._do("remove_by_regex", lambda store: store.clear(prefix, self._salt))

    # --- batches ----------------------------------------------------------------------------------------------------

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Return for each key 1, 0, or a negative code."""
        found: list[int] = []

        def look(store: Store) -> int:
            found.extend(int(there) for there in store.contains(list(keys), self._salt))
            return OK

        code = self._do("batch_is_exist", look)
        return found if code == OK else [code] * len(keys)

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Return for each value 0, or a negative code."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put(keys, list(map(self._part, buffer_ptrs, sizes)))

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Return for each value the number of bytes read, or a negative code."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get(keys, list(map(self._part, buffer_ptrs, sizes)))

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store each value from several buffers, which are concatenated. Return for each 0, or a negative code."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put(keys, list(map(self._parts, all_buffer_ptrs, all_sizes)))

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Read each value into several buffers. Return for each the number of bytes read, or a negative code."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get(keys, list(map(self._parts, all_buffer_ptrs, all_sizes)))

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return a descriptor for each key that is stored."""
        found = self.batch_is_exist(keys)
        return {key: [ReplicaDescriptor()] for key, there in zip(keys, found, strict=True) if there == 1}

    # --- all of them ------------------------------------------------------------------------------------------------

    def _do(self, what: str, act: Callable[[Store], int]) -> int:
        """Return the result of ``act``, or the code of what it raises."""
        if self._store is None:
            _log.error("%s: setup was not called, or it failed", what)
            return RPC_FAIL
        try:
            return act(self._store)
        except KVStoreError as error:
            _log.warning("%s: %s", what, error)
            return code_of(error)

    def _part(self, pointer: int, size: int) -> Any:
        """Return the memory at a pointer; None if it is not in a registered buffer."""
        starts, held = self._regions
        place = bisect_right(starts, pointer) - 1
        if place < 0 or size <= 0 or pointer + size > held[place].stop or self._store is None:
            _log.error("%d bytes at %#x are not in a registered buffer", size, pointer)
            return None
        first = pointer - starts[place]
        return held[place].bytes[first : first + size]

    def _parts(self, pointers: Sequence[int], sizes: Sequence[int]) -> list[Any] | None:
        """Return the memory at several pointers; None if one of them is not in a registered buffer."""
        parts = list(map(self._part, pointers, sizes)) if len(pointers) == len(sizes) else [None]
        return None if any(part is None for part in parts) else parts

    def _put(self, keys: Sequence[str], values: Sequence[Any]) -> list[int]:
        """Store values. None among them stands for a refused pointer."""
        wanted = {key: value for key, value in zip(keys, values, strict=True) if value is not None}

        def store_all(store: Store) -> int:
            store.put_many(
                list(wanted), list(wanted.values()), self._salt, wait=False
            )  # an existing key is not an error
            return OK

        def store_one(key: str) -> int:
            def store_it(store: Store) -> int:
                store.put(key, wanted[key], self._salt)
                return OK

            return self._do("put", store_it)

        code = self._do("put", store_all) if wanted else OK
        codes = dict.fromkeys(wanted, code)
        if code == INVALID_PARAMS:  # one of them is invalid, and nothing was stored
            codes = {key: store_one(key) for key in wanted}
        elif code != OK:  # others may be stored
            there = self.batch_is_exist(list(wanted))
            codes = {key: OK if found == 1 else code for key, found in zip(wanted, there, strict=True)}
        return [codes[key] if value is not None else INVALID_PARAMS for key, value in zip(keys, values, strict=True)]

    def _get(self, keys: Sequence[str], outs: Sequence[Any]) -> list[int]:
        """Read into targets. None among them stands for a refused pointer."""
        lengths: list[int] = []

        def read_all(store: Store) -> int:
            lengths.extend(store.get_many(keys, outs, self._salt))
            return OK

        def read_one(key: str, out: Any) -> int:
            def read(store: Store) -> int:
                length = store.get(key, out, self._salt)
                return OBJECT_NOT_FOUND if length is None else int(length)

            return self._do("get", read)

        if not any(out is None for out in outs) and self._do("get", read_all) == OK:
            return [OBJECT_NOT_FOUND if length < 0 else length for length in lengths]
        return [INVALID_PARAMS if out is None else read_one(key, out) for key, out in zip(keys, outs, strict=True)]


def code_of(error: KVStoreError) -> int:
    """Return Mooncake's code for an exception of the store."""
    if isinstance(error, QuotaExceeded):
        return TENANT_QUOTA_EXCEEDED
    if isinstance(error, OutOfSpace):
        return NO_AVAILABLE_HANDLE
    if isinstance(error, InvalidRequest):
        return INVALID_PARAMS
    return RPC_TIMEOUT if isinstance(error, DeadlineExceeded) else RPC_FAIL


def is_host_memory(start: int, size: int) -> bool:
    """Return whether a range is mapped here for reading and writing. Device memory has addresses, but is not mapped."""
    reached = start
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, permissions, *_ = line.split()
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        if first <= reached < last:
            if not permissions.startswith("rw"):
                return False
            reached = last
        if reached >= start + size:
            return True
    return False


def _prefix_of(regex: str) -> str:
    """Return the prefix in a regular expression. Raises InvalidRequest unless it is ``^``, literal text, and optionally
    ``.*``."""
    found = _PREFIX.fullmatch(regex)
    if found is None and regex != ".*":
        raise InvalidRequest("regex", f"must be a prefix, as ^prefix or ^prefix.* (got {regex[:80]!r})")
    return _ESCAPED.sub(r"\1", found[1]) if found is not None else ""
