"""Rows: the table of measurements with their bars, and the loop that runs them.

Other packages add rows through entry points ``module:ROWS`` of the group ``kvstore.bench_rows``; each is a sequence of
``Row``. They are loaded only if all rows are requested, or a name that is not in this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore import about
from kvstore.bench import evict, find, get, hbm, lookup, memory, nvme, objects, put, remote, replicas
from kvstore.bench.harness import Bar, Result
from kvstore.bench.stage import RunSettings, Stage
from kvstore.errors import InvalidRequest, KVStoreError

ENTRY_POINT_GROUP = "kvstore.bench_rows"


@dataclass(frozen=True)
class Row:
    """One row of the report.

    ``measure(stage, name, bar)`` returns its line, and lines named ``<name>.<variant>``. ``bar`` is None if there is
    none.
    """

    name: str
    about: str
    bar: Bar | None
    measure: Callable[[Stage, str, Any], list[Result]]

    @property
    def bar_text(self) -> str:
        """The bar as text: ``>= 0.94``; "" if there is none."""
        return self.bar.text if self.bar is not None else ""


def _at_most(value: float) -> Bar:
    return Bar(value, at_least=False)


SIZES = {"2m": "2 MiB", "256k": "256 KiB", "64k": "64 KiB"}  # sizes of pages and values
IN_2_S = Bar(2, at_least=False, of_ratio=False, unit="s")
BYTES_400 = Bar(400, at_least=False, of_ratio=False, unit="B")


def _sized(name: str, about: str, bars: Sequence[float | None], measure: Callable[..., list[Result]]) -> list[Row]:
    """Return a row for each of ``SIZES``, with its bar."""
    return [
        Row(
            f"{name}_{size}",
            about.format(text),
            Bar(bar) if bar is not None else None,
            partial(measure, geometry=size),
        )
        for (size, text), bar in zip(SIZES.items(), bars, strict=True)
    ]


# Rows that use the same stored pages follow each other.
_ROWS = (
    Row("keys_128k", "keys of a 128k-token prompt / hashing alone", _at_most(3), lookup.keys),
    Row("lookup_512", "lookup of a chain of 512 pages / 512 LMDB gets", _at_most(0.25), lookup.lookup),
    Row("lease_2m", "memcpy of 32 pages of 2 MiB / lease of them", Bar(20), partial(get.lease, geometry="2m")),
    Row("two_readers", "two processes: get / memcpy, 2 MiB", Bar(0.85), partial(get.two_readers, geometry="2m")),
    *_sized("get", "get, 32 pages of {} / memcpy", (0.94, 0.90, 0.75), get.get),
    Row("get_one_256k", "get of one page of 256 KiB / memcpy", _at_most(2), partial(get.get_one, geometry="256k")),
    *_sized("put", "put, 32 pages of {} / memcpy", (0.9, 0.8, 0.65), put.put),
    Row("put_one_256k", "put of one page of 256 KiB / memcpy", _at_most(4), partial(put.put_one, geometry="256k")),
    Row(
        "put_twice_2m",
        "put of 32 pages of 2 MiB that two nodes have sealed / that one has",
        None,
        partial(replicas.put_twice, geometry="2m"),
    ),
    Row("put_calls", "calls of Python functions for an embedded put of 12 pages", None, put.put_calls),
    *_sized("objects_put", "put, 32 objects of {} by one call / memcpy", (0.9, 0.7, 0.5), objects.put),
    *_sized("objects_put_wait", "put, 32 objects of {}, sealed / memcpy", (0.8, 0.5, 0.3), objects.put_wait),
    *_sized("objects_get", "get, 32 objects of {} by one call / memcpy", (0.9, 0.85, 0.6), objects.get),
    Row("evict_1m", "a page that evicts one: node of a million / of 10 k pages", _at_most(1.5), evict.evict),
    Row("memory_1m", "bytes per page in addition to data and token ids", BYTES_400, memory.memory),
    Row("restart_8g", "kill -9 to serving again, under reads", IN_2_S, evict.restart),
    *_sized("get_nvme", "cold get from NVMe, 32 pages of {} / O_DIRECT reads", (0.85,) * 3, nvme.get),
    *_sized("demotion", "saving pages of {} to NVMe / O_DIRECT writes", (0.8,) * 3, nvme.demotion),
    Row(
        "get_while_demoting_2m",
        "get from DRAM while pages are saved / in quiet",
        Bar(0.7),
        partial(nvme.get_while_demoting, geometry="2m"),
    ),
    *_sized("remote_get", "get over TCP, 32 pages of {} / plain sockets", (0.8, 0.8, 0.6), remote.get),
    Row(
        "remote_objects_256k",
        "get over TCP, 32 objects of 256 KiB / plain sockets",
        None,
        partial(remote.get_objects, geometry="256k"),
    ),
    Row("find_512", "lookup of 512 pages over three nodes / one bare round trip", _at_most(2.5), find.find),
    *(
        Row(f"hbm_{verb}_{size}", f"{way}, frames of {SIZES[size]} / one plain pinned copy", Bar(bar), measure)
        for size, length, bar in (("2m", 2 << 20, 0.9), ("64k", 64 << 10, 0.7))
        for verb, way, measure in (
            ("read", "DRAM to HBM", partial(hbm.one_way, length=length, back=False)),
            ("write", "HBM to DRAM", partial(hbm.one_way, length=length, back=True)),
            ("both", "both ways at once", partial(hbm.both_ways, length=length)),
        )
    ),
)
ROWS = {row.name: row for row in _ROWS}


def added_rows() -> list[Row]:
    """Return the rows of other packages. They cannot replace built-in rows."""
    rows = {}
    for _, entry in sorted(about.entry_points(ENTRY_POINT_GROUP).items()):
        for row in entry.load():
            assert isinstance(row, Row), f"{entry.value} has a {type(row).__name__}"
            rows[row.name] = row
    return [row for name, row in rows.items() if name not in ROWS]


def select_rows(names: Sequence[str]) -> list[Row]:
    """Return the named rows in the best order to run them; all rows if no name is given.

    Raises:
        InvalidRequest: there is no row of that name.
    """
    rows = list(_ROWS)
    if not names or any(name not in ROWS for name in names):
        rows += added_rows()
    known = {row.name for row in rows}
    for name in names:
        if name not in known:
            raise InvalidRequest("names", f"unknown row, see --list (got {name!r})")
    return [row for row in rows if not names or row.name in names]


def run(rows: Sequence[Row], settings: RunSettings) -> Iterator[tuple[Row, list[Result] | KVStoreError]]:
    """Measure the rows, and yield each row with its lines, or with its error.

    A row that fails does not prevent the others. At the end all processes and nodes are removed.
    """
    with Stage(settings) as stage:
        for row in rows:
            try:
                outcome: list[Result] | KVStoreError = row.measure(stage, row.name, row.bar)
            except KVStoreError as failed:
                stage.clear()
                outcome = failed
            yield row, outcome
