"""``MooncakeDistributedStore``: Mooncake's Python interface, over the objects of a node.

Values are objects under their own keys: proven, checksummed, evictable, on NVMe. The node has all memory, so what
``setup`` is told about segments, buffers and devices has no meaning here.
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

# What a key begins with: letters that mean themselves, and escaped signs.
_PREFIX: Final = re.compile(r"\^((?:[^\\^$.|?*+()\[\]{}]|\\[^0-9A-Za-z])*)(?:\.\*\$?)?")
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)

DEFAULT_TENANT = "default"
SCHEMES = ("kv://", "kv+unix://")


@dataclass
class ReplicateConfig:
    """How hosts wish their values to be kept. Taken and not followed: the node's policy decides what stays where."""

    replica_num: int = 1
    with_soft_pin: bool = False
    with_hard_pin: bool = False
    preferred_segment: str = ""
    preferred_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    group_ids: list[str] = field(default_factory=list)


class ReplicaDescriptor:
    """That there is a replica. It does not say of which kind: a node moves values between memory and NVMe."""

    def is_memory_replica(self) -> bool:
        """Not known."""
        return False

    def is_disk_replica(self) -> bool:
        """Not known."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Not known."""
        return False


class MooncakeDistributedStore:
    """A client of one node. Made -> ``setup`` -> used -> ``close``. Threads may share it.

    As Mooncake's, it answers with codes and raises nothing of its own: 0 or a number of bytes where all is well, a
    negative code else. What went wrong is logged. A pointer has to lie in a registered buffer.
    """

    def __init__(self) -> None:
        self._store: Store | None = None
        self._salt = ""
        self._registered: dict[int, Registration] = {}
        self._regions: tuple[list[int], list[Registration]] = [], []  # the same in order; replaced as a whole

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
            master_server_addr: a node's name, or ``kv://HOST:PORT``. A plain ``HOST:PORT`` is a Mooncake master's:
                then it is the node of ``$KVSTORE_NODE``, else the only one on this machine.
            tenant_id: has values of its own.
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
        """Let go of the node. Values stay."""
        store, self._store = self._store, None
        self._registered.clear()
        self._in_order()
        if store is not None:
            store.close()
        return OK

    # --- buffers ----------------------------------------------------------------------------------------------------

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Make memory of this process known. Memory of a device is refused."""
        known = self._registered.get(buffer_ptr)
        if known is not None and known.stop - known.start == size:
            return OK
        if size <= 0 or not is_host_memory(buffer_ptr, size):
            _log.error("register_buffer: %d bytes at %#x are no host memory of this process", size, buffer_ptr)
            return INVALID_PARAMS

        def register(store: Store) -> int:
            self._registered[buffer_ptr] = store.register((ctypes.c_ubyte * size).from_address(buffer_ptr))
            self._in_order()
            return OK

        return self._do("register_buffer", register)

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Forget it."""
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
        """Store bytes. A value that is stored under this key stays, which is no error."""
        return self._put([key], [value])[0]

    def get(self, key: str) -> bytes:
        """The bytes; none where there is no such value."""
        found: list[bytes] = []

        def read(store: Store) -> int:
            value = store.get(key, salt=self._salt)
            if value is not None:
                found.append(value.tobytes())
            return OK

        self._do("get", read)
        return found[0] if found else b""

    def put_from(self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None) -> int:
        """0, or a negative code."""
        return self.batch_put_from([key], [buffer_ptr], [size])[0]

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Bytes read, or a negative code."""
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def is_exist(self, key: str) -> int:
        """1, 0, or a negative code."""
        return self.batch_is_exist([key])[0]

    def get_size(self, key: str) -> int:
        """Bytes, or a negative code."""

        def size(store: Store) -> int:
            found = store.size(key, self._salt)
            return OBJECT_NOT_FOUND if found is None else found

        return self._do("get_size", size)

    def remove(self, key: str, force: bool = False) -> int:
        """0, or a negative code: there is no such value. A value that is being read goes, too."""
        return self._do("remove", lambda store: OK if store.delete(key, self._salt) else OBJECT_NOT_FOUND)

    def remove_all(self, force: bool = False) -> int:
        """Remove all values of this tenant; how many there were."""
        return self._do("remove_all", lambda store: store.clear("", self._salt))

    def remove_by_regex(self, regex: str, force: bool = False) -> int:
        """Remove the values of this tenant whose keys begin with a prefix, given as ``^prefix`` or ``^prefix.*``; how
        many there were.

        Raises:
            InvalidRequest: it is another regular expression; nothing is removed.
        """
        prefix = _prefix_of(regex)
        return self._do("remove_by_regex", lambda store: store.clear(prefix, self._salt))

    # --- batches ----------------------------------------------------------------------------------------------------

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """For each 1, 0, or a negative code."""
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
        """For each 0, or a negative code."""
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._put(keys, list(map(self._part, buffer_ptrs, sizes)))

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """For each bytes read, or a negative code."""
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
        """Each value from several buffers, laid end to end. For each 0, or a negative code."""
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
        """Each value over several buffers. For each bytes read, or a negative code."""
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes):
            return [INVALID_PARAMS] * len(keys)
        return self._get(keys, list(map(self._parts, all_buffer_ptrs, all_sizes)))

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Of those that are stored, that they are."""
        found = self.batch_is_exist(keys)
        return {key: [ReplicaDescriptor()] for key, there in zip(keys, found, strict=True) if there == 1}

    # --- all of them ------------------------------------------------------------------------------------------------

    def _do(self, what: str, act: Callable[[Store], int]) -> int:
        """What ``act`` says, or the code of what it raises."""
        if self._store is None:
            _log.error("%s: setup was not called, or failed", what)
            return RPC_FAIL
        try:
            return act(self._store)
        except KVStoreError as error:
            _log.warning("%s: %s", what, error)
            return code_of(error)

    def _part(self, pointer: int, size: int) -> Any:
        """The memory there; None where it is in no registered buffer."""
        starts, held = self._regions
        place = bisect_right(starts, pointer) - 1
        if place < 0 or size <= 0 or pointer + size > held[place].stop or self._store is None:
            _log.error("%d bytes at %#x are not in a registered buffer", size, pointer)
            return None
        first = pointer - starts[place]
        return held[place].bytes[first : first + size]

    def _parts(self, pointers: Sequence[int], sizes: Sequence[int]) -> list[Any] | None:
        """The same of several places; None where one of them is not."""
        parts = list(map(self._part, pointers, sizes)) if len(pointers) == len(sizes) else [None]
        return None if any(part is None for part in parts) else parts

    def _put(self, keys: Sequence[str], values: Sequence[Any]) -> list[int]:
        """None among the values: its pointer was refused."""
        wanted = {key: value for key, value in zip(keys, values, strict=True) if value is not None}

        def store_all(store: Store) -> int:
            store.put_many(list(wanted), list(wanted.values()), self._salt)  # a key that is there already is well
            return OK

        def store_one(key: str) -> int:
            def store_it(store: Store) -> int:
                store.put(key, wanted[key], self._salt)
                return OK

            return self._do("put", store_it)

        code = self._do("put", store_all) if wanted else OK
        codes = dict.fromkeys(wanted, code)
        if code == INVALID_PARAMS:  # of one of them, and nothing was stored
            codes = {key: store_one(key) for key in wanted}
        elif code != OK:  # others may be stored
            there = self.batch_is_exist(list(wanted))
            codes = {key: OK if found == 1 else code for key, found in zip(wanted, there, strict=True)}
        return [codes[key] if value is not None else INVALID_PARAMS for key, value in zip(keys, values, strict=True)]

    def _get(self, keys: Sequence[str], outs: Sequence[Any]) -> list[int]:
        """None among the targets: its pointer was refused."""
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
    """Mooncake's code for what a store raises."""
    if isinstance(error, QuotaExceeded):
        return TENANT_QUOTA_EXCEEDED
    if isinstance(error, OutOfSpace):
        return NO_AVAILABLE_HANDLE
    if isinstance(error, InvalidRequest):
        return INVALID_PARAMS
    return RPC_TIMEOUT if isinstance(error, DeadlineExceeded) else RPC_FAIL


def is_host_memory(start: int, size: int) -> bool:
    """Whether all of it is mapped here to be read and written. A device's memory is not, although it has addresses."""
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
    """The prefix that a regular expression asks for. Raises InvalidRequest where it is not one that begins with ``^``,
    goes on with plain text, and ends there or with ``.*``."""
    found = _PREFIX.fullmatch(regex)
    if found is None and regex != ".*":
        raise InvalidRequest("regex", f"must be a prefix, as ^prefix or ^prefix.* (got {regex[:80]!r})")
    return _ESCAPED.sub(r"\1", found[1]) if found is not None else ""
