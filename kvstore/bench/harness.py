"""Harness: runs two variants alternately in one loop, and compares their times.

The speed of a machine drifts by a tenth from minute to minute, so a limit that is measured now cannot be compared with
a value of the store that is measured later. Therefore each step of a round belongs to one variant, and in the next
round to the next variant. All variants run with the same data, caches and load. The value of a round is the median of
its steps, and the value of a row is the median of its rounds. The ratio is computed inside each round; the report has
its median, minimum and maximum.

Worked example: limit 10, 11, 30 us and ours 12, 12, 33 us in three rounds give ratios 1.2, 1.09, 1.1. The machine was
slow in the third round, which does not affect the ratio of that round.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from kvstore import about
from kvstore.device import cuda
from kvstore.errors import KVStoreError

T = TypeVar("T")
Seconds = list[list[float]]  # [rounds][steps]


class BenchFailed(KVStoreError):
    """A row could not be measured, or found wrong bytes or missing pages. A missed bar is not a failure."""


class NotMeasured(KVStoreError):
    """This machine cannot measure a row, because something optional is missing. Not a failure."""


class Kind(StrEnum):
    """The unit of a row's numbers, and the direction of its ratio."""

    SPEED = "speed"  # bytes/s; ratio = ours / limit, more is better
    TIME = "time"  # s; ratio = ours / limit, less is better
    GAIN = "gain"  # s; ratio = limit / ours: how many times faster, more is better
    COUNT = "count"  # bytes per page; no limit, less is better
    TIMES = "times"  # a count or a fraction; no limit


@dataclass(frozen=True)
class Bar:
    """The value that a row has to reach: for its ratio, or for the store's own value (``of_ratio=False``)."""

    value: float
    at_least: bool = True
    of_ratio: bool = True
    unit: str = ""

    @property
    def text(self) -> str:
        """The bar as text: ``>= 0.94``, ``<= 2 s``."""
        return f"{'>=' if self.at_least else '<='} {self.value:g}{self.unit and ' ' + self.unit}"

    def met(self, value: float) -> bool:
        """Return True if ``value`` (the ratio, or the store's own value) reaches the bar."""
        return value >= self.value if self.at_least else value <= self.value


@dataclass(frozen=True)
class Result:
    """One line of the report. Speeds in bytes/s, times in seconds; ``ratio`` and ``limit`` are None without a limit."""

    name: str
    kind: Kind
    limit_is: str
    limit: float | None
    ours: float
    ratio: float | None
    ratio_min: float | None
    ratio_max: float | None
    bar: str
    met: bool | None  # None if the row has no bar
    rounds: dict[str, list[float]]  # limit, ours, ratio: one value per round
    details: dict[str, Any] = field(default_factory=dict)


def result(
    name: str,
    kind: Kind,
    ours: Sequence[float],
    limit: Sequence[float] = (),
    *,
    bar: Bar | None = None,
    limit_is: str = "",
    details: Mapping[str, Any] | None = None,
    sound: bool = True,
) -> Result:
    """Return a line of the report, from one value per round.

    Args:
        ours, limit: values of the store and of the limit; ``limit`` is optional.
        sound: False if the bar is missed regardless of the numbers.
    """
    if not ours or (limit and len(limit) != len(ours)):
        raise BenchFailed(f"{name}: the store has {len(ours)} rounds, and the limit {len(limit)}")
    inverse = kind is Kind.GAIN
    ratios = [(them / us) if inverse else (us / them) for us, them in zip(ours, limit, strict=True)] if limit else []
    ratio = statistics.median(ratios) if ratios else None
    ours_median = statistics.median(ours)
    met = None
    if bar is not None:
        value = ratio if bar.of_ratio else ours_median
        if value is None:
            raise BenchFailed(f"{name}: its bar is a ratio, but it has no limit")
        met = bar.met(value) and sound
    return Result(
        name,
        kind,
        limit_is,
        statistics.median(limit) if limit else None,
        ours_median,
        ratio,
        min(ratios, default=None),
        max(ratios, default=None),
        bar.text if bar is not None else "",
        met,
        {"limit": list(limit), "ours": list(ours), "ratio": ratios},
        dict(details or {}),
    )


def alternate(
    variants: Mapping[str, Callable[[T], object]],
    steps: Sequence[int],
    rounds: int,
    prepare: Callable[[int], T],
    check: Callable[[str, object], None],
    before_round: Callable[[], None] = lambda: None,
) -> dict[str, Seconds]:
    """Run the variants alternately, and return the seconds of every step of each one, ``[rounds][steps]``.

    Args:
        variants: the timed functions, called with the result of ``prepare``.
        steps: arguments for ``prepare``, in order; at least one per variant.
        prepare: returns the argument of a variant; not timed.
        check: called with the variant's name and result, not timed; raises if the result is wrong.
        before_round: called before each round; not timed.
    """
    names = list(variants)
    if len(steps) < len(names):
        raise BenchFailed(f"{len(names)} variants need at least as many steps (got {len(steps)})")
    seconds: dict[str, Seconds] = {name: [] for name in names}
    clock = time.perf_counter_ns
    for turn in range(rounds):
        before_round()
        times: dict[str, list[float]] = {name: [] for name in names}
        for i, step in enumerate(steps):
            name = names[(i + turn) % len(names)]
            variant, argument = variants[name], prepare(step)
            start = clock()
            value = variant(argument)
            stop = clock()
            times[name].append((stop - start) / 1e9)
            check(name, value)
        for name in names:
            seconds[name].append(times[name])
    return seconds


def medians(seconds: Seconds) -> list[float]:
    """Return the median step of every round, in seconds."""
    return [statistics.median(steps) for steps in seconds]


def quickest(seconds: Mapping[str, Seconds], names: Sequence[str]) -> str:
    """Return the name of the fastest of several ways to reach a limit in this run."""
    return min(names, key=lambda name: statistics.median(medians(seconds[name])))


def speeds(seconds: Seconds, step_bytes: int) -> list[float]:
    """Return the bytes per second of every round."""
    return [step_bytes / median for median in medians(seconds)]


def machine() -> dict[str, Any]:
    """Return facts about this machine and the software, to be stored with the numbers."""
    versions = {"kvstore": about.version()}
    for package in ("numpy", "lmdb", "xxhash"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "unknown"
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "l3_bytes": l3_bytes(),
        "devices": {device.name: device.model for device in cuda.find().devices},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1m": os.getloadavg()[0],
        "kernel": platform.release(),
        "tmpfs_large_pages": _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "python": platform.python_version(),
        "versions": versions,
    }


def l3_bytes() -> int:
    """Return the size of the last-level cache; 0 if the kernel does not report it."""
    text = _read("/sys/devices/system/cpu/cpu0/cache/index3/size")
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
    return int(text[:-1]) * unit if text[:-1].isdecimal() else 0


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
