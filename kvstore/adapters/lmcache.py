"""LMCache: a plugin for its second level::

    --l2-adapter '{"type": "plugin", "module_path": "kvstore.adapters.lmcache", "class_name": "KVStoreL2Adapter",
                   "adapter_params": {"node": "pool"}}'

LMCache names its chunks by its own hashes, so they are opaque objects here, whose names contain all parts of LMCache's
keys. They are proven on every read, checksummed, saved to NVMe and evicted by the node.
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

from kvstore.adapters.values import Values, connected
from kvstore.adapters.weights import given_digest

SETTINGS = ("node", "salt", "model")
ABOUT_BYTES_MAX = 512  # of the text parts of a name; longer ones are replaced by digests
TASKS_MAX = 256  # waiting tasks of one kind; further ones fail at once
RESULTS_MAX = 4096  # unread results of one kind; beyond that the oldest is dropped


class TaskLane:
    """Tasks of one kind, run in order by a thread, and their unread results."""

    def __init__(self, name: str) -> None:
        self._notifier = create_event_notifier()
        self._pool = ThreadPoolExecutor(1, f"kvstore-{name}")
        self._lock = threading.Lock()
        self._waiting = 0
        self._next = 0
        self._done: dict[int, Any] = {}

    @property
    def fd(self) -> int:
        """A descriptor that is readable when a task has ended."""
        return int(self._notifier.fileno())

    def submit(self, work: Callable[[], Any], refused: Any) -> int:
        """Add a task and return its number. Its result is what ``work`` returns, or ``refused`` if too many tasks
        wait."""
        with self._lock:
            number, self._next = self._next, self._next + 1
            taken = self._waiting < TASKS_MAX
            self._waiting += taken
        if taken:
            self._pool.submit(self._run, number, work, refused)
        else:
            self._end(number, refused)
        return number

    def pop(self, number: int) -> Any:
        """Return a task's result, once; None if it has not ended."""
        with self._lock:
            return self._done.pop(number, None)

    def pop_all(self) -> dict[int, Any]:
        """Return the results of all tasks that have ended."""
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """Drop waiting tasks and end the thread."""
        self._pool.shutdown(cancel_futures=True)
        self._notifier.close()

    def _run(self, number: int, work: Callable[[], Any], failed: Any) -> None:
        result = failed
        try:
            result = work()
        finally:
            with self._lock:
                self._waiting -= 1
            self._end(number, result)

    def _end(self, number: int, result: Any) -> None:
        with self._lock:
            self._done[number] = result
            if len(self._done) > RESULTS_MAX:
                del self._done[min(self._done)]
        self._notifier.notify()


class KVStoreL2Adapter(L2AdapterInterface):
    """Made by LMCache from ``adapter_params``: ``node``, as ``kvstore.connect`` takes it (default: the only one on this
    machine), ``salt``, the tenant, and ``model``, the folder whose weights distinguish chunks (default: model names
    alone do). A key's ``cache_salt`` is part of the value's name, so each user has their own values.

    The node does the eviction, so LMCache is told no capacity. A chunk that is evicted between lookup and load is a
    miss; nothing is locked.

    Raises:
        ValueError: a setting is unknown, or there is no such node or folder.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        super().__init__()
        unknown = sorted(set(params) - set(SETTINGS))
        if unknown:
            raise ValueError(f"kvstore for LMCache: unknown setting {unknown[0]!r}; known are {', '.join(SETTINGS)}")
        self._salt = str(params.get("salt", "lmcache"))
        self._weights = given_digest("LMCache", folder) if (folder := str(params.get("model", ""))) else ""
        self._values = Values(connected("LMCache", params.get("node")))
        self._stores, self._lookups, self._loads = TaskLane("store"), TaskLane("lookup"), TaskLane("load")

    def get_store_event_fd(self) -> int:
        """See the base class."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """See the base class."""
        return self._lookups.fd

    def get_load_event_fd(self) -> int:
        """See the base class."""
        return self._loads.fd

    # --- tasks ------------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """See the base class."""
        return self._stores.submit(lambda: self._store(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """See the base class."""
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """See the base class. Nothing is locked."""
        return self._lookups.submit(lambda: self._look_up(keys), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """See the base class."""
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """See the base class. Nothing is locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """See the base class."""
        return self._loads.submit(lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """See the base class."""
        return self._loads.pop(task_id)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """See the base class."""
        sizes = self._values.delete(self._names(keys), self._salt)
        gone = [(key, size) for key, size in zip(keys, sizes, strict=True) if size >= 0]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])

    def report_status(self) -> dict[str, Any]:
        """See the base class."""
        return {"is_healthy": not self._values.away, "type": type(self).__name__, "salt": self._salt}

    def close(self) -> None:
        """See the base class."""
        for lane in (self._stores, self._lookups, self._loads):
            lane.close()
        self._values.close()

    # --- in the lanes' threads --------------------------------------------------------------------------------------

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        done = self._values.put(self._names(keys), [each.byte_array for each in objects], self._salt)
        stored = [(key, each.get_size()) for key, each, there in zip(keys, objects, done, strict=True) if there]
        if stored:
            self._notify_keys_stored([key for key, _ in stored], [size for _, size in stored])
        return L2StoreResult(all(done), sum(size for _, size in stored))

    def _look_up(self, keys: list[ObjectKey]) -> Bitmap:
        return _bitmap(self._values.contains(self._names(keys), self._salt))

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        return _bitmap(self._values.get(self._names(keys), [each.byte_array for each in objects], self._salt))

    def _names(self, keys: Sequence[ObjectKey]) -> list[str]:
        return names_of(keys, self._weights)


def names_of(keys: Sequence[ObjectKey], weights: str) -> list[str]:
    """Return the names of chunks' values, with a digest of the weights if there is one. LMCache allows no ``@`` in
    model names and salts."""
    names = []
    for key in keys:
        about = f"{key.model_name}@{key.cache_salt}" + (f"@{weights}" if weights else "")
        if len(about.encode()) > ABOUT_BYTES_MAX:
            about = hashlib.blake2b(about.encode(), digest_size=32).hexdigest()
        names.append(f"{about}@{key.kv_rank:x}@{key.object_group_id:x}@{key.chunk_hash.hex()}")
    return names


def _bitmap(ones: list[bool]) -> Bitmap:
    bitmap = Bitmap(len(ones))
    for i, one in enumerate(ones):
        if one:
            bitmap.set(i)
    return bitmap
