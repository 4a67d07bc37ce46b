"""Rows about opaque objects: one call that puts or gets 32 values, compared with copying their bytes."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.addresses import connect
from kvstore.bench.content import LAYOUTS, Content
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, quickest, result, speeds
from kvstore.bench.put import SharedArea
from kvstore.bench.stage import Stage
from kvstore.client.store import Store
from kvstore.device.host_memory import empty
from kvstore.model.objects import key_hash, object_root

Bytes = npt.NDArray[np.uint8]

BATCH: Final = 32
VALUE_BYTES: Final = {size: layout.page_bytes for size, layout in LAYOUTS.items()}
BATCHES_MAX, BATCHES_QUICK = 96, 3
LIMITS: Final = ("memmove", "copy")


class _Batches:
    """Batches of values of one size under numbered keys, and a warm array for one batch."""

    def __init__(self, store: Store, value_bytes: int, count: int) -> None:
        self.store = store
        self.keys = [[f"batch/{step}/{i}" for i in range(BATCH)] for step in range(count)]
        self.rows: Bytes = empty((BATCH, value_bytes))
        self.rows[:] = 1
        self.values = list(self.rows)
        self._content = Content(value_bytes)

    def fill(self, step: int) -> None:
        """Fill ``rows`` with the values of a batch."""
        self._content.fill(self.rows, self._hashes(step))

    def put(self, step: int) -> list[bool]:
        """Put the values in ``rows`` as that batch; return when they are published."""
        return self.store.put_many(self.keys[step], self.values, wait=False)

    def put_wait(self, step: int) -> list[bool]:
        """Put the values in ``rows`` as that batch; return when they are sealed."""
        return self.store.put_many(self.keys[step], self.values)

    def get(self, step: int) -> list[int]:
        """Get that batch into ``rows``."""
        return self.store.get_many(self.keys[step], self.values)

    def verify(self, step: int) -> None:
        """Read a batch and check every byte. Raises BenchFailed."""
        self.rows[:] = 0
        if self.get(step) != [self.rows.shape[1]] * BATCH:
            raise BenchFailed(f"batch {step} is not stored")
        self._content.check(self.rows, self._hashes(step), f"batch {step}")

    def _hashes(self, step: int) -> list[bytes]:
        return [key_hash(object_root(""), key.encode()) for key in self.keys[step]]


def put(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """Measure puts of 32 new objects into free frames, until they are published."""
    return [_measure(stage, name, bar, "put", VALUE_BYTES[geometry])]


def put_wait(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """Measure puts of 32 new objects into free frames, until they are sealed."""
    return [_measure(stage, name, bar, "put_wait", VALUE_BYTES[geometry])]


def get(stage: Stage, name: str, bar: Bar | None, geometry: str) -> list[Result]:
    """Measure gets of 32 objects into warm buffers, with all checks. Every batch of the node is one step."""
    return [_measure(stage, name, bar, "get", VALUE_BYTES[geometry])]


def _measure(stage: Stage, name: str, bar: Bar | None, verb: str, value_bytes: int) -> Result:
    stage.clear()
    batch_bytes = BATCH * value_bytes
    pool_bytes = max(stage.settings.walk_bytes, 4 * batch_bytes)
    count = min(BATCHES_QUICK if stage.settings.quick else BATCHES_MAX, pool_bytes * 3 // (4 * batch_bytes))
    with ExitStack() as scene:
        daemon = stage.daemon(scene, pool_bytes)
        batches = _Batches(scene.enter_context(connect(daemon.name)), value_bytes, count)
        area = scene.enter_context(SharedArea(stage.settings.shm_dir, count * batch_bytes))
        places = area.data.reshape(count, BATCH, value_bytes)
        _touch(batches, count)
        steps = [int(step) for step in np.random.default_rng(5).permutation(count)]

        def prepare(step: int) -> int:
            if verb != "get":
                batches.fill(step)
            return step

        def check(variant: str, value: object) -> None:
            if variant.startswith("put") and value != [True] * BATCH:
                raise BenchFailed("an object was not stored")
            if variant == "get" and value != [value_bytes] * BATCH:
                raise BenchFailed(f"get returned {value}")

        def before_round() -> None:
            if verb != "get":
                for keys in batches.keys:
                    batches.store.delete(keys)

        seconds = alternate(
            {verb: getattr(batches, verb), **_limits(batches.values, places, verb)},
            steps,
            stage.settings.rounds,
            prepare,
            check,
            before_round,
        )
        for step in [step for step in steps if all(batches.store.contains(batches.keys[step]))][:8]:
            batches.verify(step)
    best = quickest(seconds, LIMITS)
    details: dict[str, Any] = {"value_bytes": value_bytes, "batch": BATCH}
    details["batch_seconds"] = {variant: medians(times) for variant, times in seconds.items()}
    ours, limit = speeds(seconds[verb], batch_bytes), speeds(seconds[best], batch_bytes)
    return result(name, Kind.SPEED, ours, limit, bar=bar, limit_is=f"memcpy, {best}", details=details)


def _touch(batches: _Batches, count: int) -> None:
    """Put and get all batches, so that this process has mapped all memory of the pool that they use."""
    for step in range(count):
        batches.fill(step)
        if batches.put(step) != [True] * BATCH:
            raise BenchFailed("an object was not stored")
        batches.get(step)


def _limits(values: list[Bytes], places: Bytes, verb: str) -> dict[str, Any]:
    """Return variants that copy a batch, value by value, between the caller's buffers and plain shared memory."""
    addresses, size = [value.ctypes.data for value in values], values[0].size
    start = places.ctypes.data

    def memmove(step: int) -> None:
        for i, address in enumerate(addresses):
            place = start + (step * BATCH + i) * size
            ctypes.memmove(*((address, place) if verb == "get" else (place, address)), size)

    def copy(step: int) -> None:
        for value, place in zip(values, places[step], strict=True):
            np.copyto(*((value, place) if verb == "get" else (place, value)))

    return {"memmove": memmove, "copy": copy}
