"""Rows about opaque objects: put and get of one value, acknowledged, against copying its bytes."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.bench.content import Content
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, quickest, result
from kvstore.bench.put import SharedArea
from kvstore.bench.stage import MIB, Stage
from kvstore.client.connect import connect
from kvstore.client.local.object_parts import find_head
from kvstore.client.local.store import LocalStore
from kvstore.client.store import Store
from kvstore.model.objects import key_hash, object_root

Bytes = npt.NDArray[np.uint8]

VALUE_BYTES = 256 << 10
STEPS, STEPS_QUICK = 3000, 150
LIMITS = ("memmove", "copy")
ROOT = object_root("")


class _Objects:
    """Values under numbered keys in one node; every one is another's bytes."""

    def __init__(self, store: Store, count: int) -> None:
        self.store = store
        self.keys = [f"bench/{i}" for i in range(count)]
        self.content = Content(VALUE_BYTES)
        self.buffer: Bytes = np.zeros((1, VALUE_BYTES), np.uint8)

    def fill(self, step: int) -> str:
        """The value of a step in ``buffer``; its key."""
        key = self.keys[step]
        self.content.fill(self.buffer, [key_hash(ROOT, key.encode())])
        return key

    def verify(self, step: int) -> None:
        """What is stored is what was put."""
        self.buffer[:] = 0
        if self.store.get(self.keys[step], out=self.buffer) != VALUE_BYTES:
            raise BenchFailed(f"{self.keys[step]} is not there")
        self.content.check(self.buffer, [key_hash(ROOT, self.keys[step].encode())], self.keys[step])

    def frame(self, step: int) -> Bytes:
        """Where a value lies."""
        assert isinstance(self.store, LocalStore)
        found = find_head(self.store._node.writable(), ROOT, self.keys[step].encode())
        if found is None or found.extent is None or found.about.pieces:
            raise BenchFailed(f"{self.keys[step]} is not in one frame of DRAM")
        frame: Bytes = found.extent.views[found.frame : found.frame + 1]
        return frame


def put(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """One new object, p50, with free frames."""
    with ExitStack() as scene:
        steps, objects = _start(stage, scene)
        area = scene.enter_context(SharedArea(stage.settings.shm_dir, 64 * MIB))
        places = area.data.reshape(-1, 1, VALUE_BYTES)

        def prepare(step: int) -> tuple[str, Bytes]:
            return objects.fill(step), places[step % len(places)]

        def stored(given: tuple[str, Bytes]) -> bool:
            return objects.store.put(given[0], objects.buffer)

        def check(variant: str, value: object) -> None:
            if variant == "put" and value is not True:
                raise BenchFailed("an object was not stored")

        def empty() -> None:
            objects.store.delete(objects.keys)

        source = objects.buffer
        variants = {
            "put": stored,
            "memmove": lambda given: ctypes.memmove(given[1].ctypes.data, source.ctypes.data, VALUE_BYTES),
            "copy": lambda given: np.copyto(given[1], source),
        }
        seconds = alternate(variants, steps, stage.settings.rounds, prepare, check, empty)
        last = next(step for step in reversed(steps) if objects.store.contains(objects.keys[step]))
        objects.verify(last)
    return [_line(name, bar, "put", seconds)]


def get(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """One object into a warm buffer, p50; every object of the node is another step."""
    with ExitStack() as scene:
        steps, objects = _start(stage, scene)
        for step in steps:
            if not objects.store.put(objects.fill(step), objects.buffer):
                raise BenchFailed("an object was not stored")
        frames = [objects.frame(step) for step in range(len(objects.keys))]
        out = objects.buffer

        def prepare(step: int) -> tuple[str, Bytes]:
            return objects.keys[step], frames[step]

        def check(variant: str, value: object) -> None:
            if variant == "get" and value != VALUE_BYTES:
                raise BenchFailed(f"get found {value} of {VALUE_BYTES} bytes")

        variants = {
            "get": lambda given: objects.store.get(given[0], out=out),
            "memmove": lambda given: ctypes.memmove(out.ctypes.data, given[1].ctypes.data, VALUE_BYTES),
            "copy": lambda given: np.copyto(out, given[1]),
        }
        seconds = alternate(variants, steps, stage.settings.rounds, prepare, check)
        for step in steps[:64]:
            objects.verify(step)
    return [_line(name, bar, "get", seconds)]


def _start(stage: Stage, scene: ExitStack) -> tuple[list[int], _Objects]:
    """Steps in an order that no prefetcher knows, and a node with room for all of them."""
    stage.clear()
    pool_bytes = max(stage.settings.walk_bytes, 128 * MIB)
    count = min(STEPS_QUICK if stage.settings.quick else STEPS, pool_bytes // VALUE_BYTES - 80)
    daemon = stage.daemon(scene, pool_bytes)
    store = scene.enter_context(connect(daemon.name))
    steps = [int(step) for step in np.random.default_rng(5).permutation(count)]
    return steps, _Objects(store, count)


def _line(name: str, bar: Bar | None, ours: str, seconds: dict[str, Any]) -> Result:
    best = quickest(seconds, LIMITS)
    details = {"value_bytes": VALUE_BYTES, "step_seconds": {variant: medians(t) for variant, t in seconds.items()}}
    limit_is = f"memcpy of the value, {best}"
    return result(
        name, Kind.TIME, medians(seconds[ours]), medians(seconds[best]), bar=bar, limit_is=limit_is, details=details
    )
