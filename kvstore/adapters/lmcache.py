"""A plugin for LMCache's second level (L2)::

    --l2-adapter '{"type": "plugin", "module_path": "kvstore.adapters.lmcache", "class_name": "KVStoreL2Adapter",
                   "adapter_params": {"node": "pool"}}'

LMCache identifies its chunks by hashes of its own, so the store keeps them as opaque objects. An object's name contains
all parts of LMCache's key. The node verifies each object on every read, saves it to NVMe and evicts it like a page.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from kvstore.adapters.values import Values, connect_for
from kvstore.adapters.weights import required_digest

SETTINGS = ("node", "salt", "model")
OWNER_BYTES_MAX = 512  # model, salt and weights in an object's name; a longer text is replaced by its digest
TASKS_MAX = 256  # waiting tasks in one lane; a further task fails at once
RESULTS_MAX = 4096  # unread results in one lane; one more result drops the oldest


class TaskLane:
    """A thread that runs tasks of one kind in order, and the results that LMCache has not read yet."""

    def __init__(self, name: str) -> None:
        self._notifier = create_event_notifier()
        self._pool = ThreadPoolExecutor(1, f"kvstore-{name}")
        self._lock = threading.Lock()
        self._tasks_waiting = 0
        self._task_id_next = 0
        self._results: dict[int, Any] = {}

    @property
    def fd(self) -> int:
        """A file descriptor that becomes readable when a task ends."""
        return int(self._notifier.fileno())

    def submit(self, work: Callable[[], Any], failure: Any) -> int:
        """Queue a task and return its id. The task's result is the value that ``work`` returns. The result is
        ``failure`` if ``work`` raises, or if ``TASKS_MAX`` tasks already wait."""
        with self._lock:
            task_id, self._task_id_next = self._task_id_next, self._task_id_next + 1
            is_accepted = self._tasks_waiting < TASKS_MAX
            self._tasks_waiting += is_accepted
        if is_accepted:
            self._pool.submit(self._run, task_id, work, failure)
        else:
            self._add_result(task_id, failure)
        return task_id

    def pop(self, task_id: int) -> Any:
        """Remove and return a task's result; None if the task has not ended."""
        with self._lock:
            return self._results.pop(task_id, None)

    def pop_all(self) -> dict[int, Any]:
        """Remove and return the results of all tasks that have ended, by task id."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Drop waiting tasks, let the running task finish, and end the thread."""
        self._pool.shutdown(cancel_futures=True)
        self._notifier.close()

    def _run(self, task_id: int, work: Callable[[], Any], failure: Any) -> None:
        result = failure
        try:
            result = work()
        finally:
            with self._lock:
                self._tasks_waiting -= 1
            self._add_result(task_id, result)

    def _add_result(self, task_id: int, result: Any) -> None:
        with self._lock:
            self._results[task_id] = result
            if len(self._results) > RESULTS_MAX:
                del self._results[min(self._results)]
        self._notifier.notify()


class KVStoreL2Adapter(L2AdapterInterface):
    """LMCache's second level in a node. LMCache creates the adapter from ``adapter_params``.

    The node evicts chunks, so the adapter reports no capacity to LMCache. Lookups lock nothing: a chunk that is evicted
    between lookup and load is a miss. A key's ``cache_salt`` is part of an object's name, so users do not share chunks.

    Args:
        params: ``node``: as in ``kvstore.connect``; default: the only node on this machine. ``salt``: the tenant.
            ``model``: a folder, whose weights then identify the model of each chunk. Without it the model's name does.

    Raises:
        ValueError: a setting is unknown, or the node or folder does not exist.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        unknown = sorted(set(params) - set(SETTINGS))
        if unknown:
            raise ValueError(f"kvstore for LMCache: unknown setting {unknown[0]!r}; known are {', '.join(SETTINGS)}")
        self._salt = str(params.get("salt", "lmcache"))
        self._weights = required_digest("LMCache", folder) if (folder := str(params.get("model", ""))) else ""
        self._values = Values(connect_for("LMCache", params.get("node")))
        self._stores, self._lookups, self._loads = TaskLane("store"), TaskLane("lookup"), TaskLane("load")

    def get_store_event_fd(self) -> int:
        """Return a descriptor that is readable when a store task has ended."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return a descriptor that is readable when a lookup task has ended."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """Return a descriptor that is readable when a load task has ended."""
        return self._loads.fd

    # --- tasks ------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start storing objects and return the task's id."""
        return self._stores.submit(lambda: self._store(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Remove and return the results of store tasks that have ended, by task id."""
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Start a lookup and return the task's id. The lookup locks nothing."""
        return self._lookups.submit(lambda: self._look_up(keys), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Remove and return a lookup's result, with one bit per key; None while the lookup runs."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing, because lookups lock nothing."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Start loading objects into LMCache's memory and return the task's id."""
        return self._loads.submit(lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Remove and return a load's result, with one bit per key; None while the load runs."""
        return self._loads.pop(task_id)

    # --- deletion, status and end -----------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, and report the deleted ones to LMCache's listeners."""
        sizes = self._values.delete(self._names(keys), self._salt)
        deleted = [(key, size) for key, size in zip(keys, sizes, strict=True) if size >= 0]
        if deleted:
            self._notify_keys_deleted([key for key, _ in deleted], [size for _, size in deleted])

    def report_status(self) -> dict[str, Any]:
        """Return whether the node answers, and the settings in use."""
        return {"is_healthy": not self._values.is_away, "type": type(self).__name__, "salt": self._salt}

    def close(self) -> None:
        """Drop waiting tasks and close the connection. Stored objects stay in the node."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()
        self._values.close()

    # --- work of the lanes' threads ---------------------------------------------------------------------------------

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        are_stored = self._values.put(self._names(keys), [memory.byte_array for memory in objects], self._salt)
        stored = [
            (key, memory.get_size())
            for key, memory, is_stored in zip(keys, objects, are_stored, strict=True)
            if is_stored
        ]
        if stored:
            self._notify_keys_stored([key for key, _ in stored], [size for _, size in stored])
        return L2StoreResult(all(are_stored), sum(size for _, size in stored))

    def _look_up(self, keys: list[ObjectKey]) -> Bitmap:
        return _bitmap(self._values.contains(self._names(keys), self._salt))

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        return _bitmap(self._values.get(self._names(keys), [memory.byte_array for memory in objects], self._salt))

    def _names(self, keys: Sequence[ObjectKey]) -> list[str]:
        """Return the names of the chunks' objects. ``@`` separates the parts, since LMCache forbids it in model names
        and salts."""
        names = []
        for key in keys:
            owner = f"{key.model_name}@{key.cache_salt}" + (f"@{self._weights}" if self._weights else "")
            if len(owner.encode()) > OWNER_BYTES_MAX:
                owner = hashlib.blake2b(owner.encode(), digest_size=32).hexdigest()
            names.append(f"{owner}@{key.kv_rank:x}@{key.object_group_id:x}@{key.chunk_hash.hex()}")
        return names


def _bitmap(bits: list[bool]) -> Bitmap:
    bitmap = Bitmap(len(bits))
    for position, bit in enumerate(bits):
        if bit:
            bitmap.set(position)
    return bitmap
