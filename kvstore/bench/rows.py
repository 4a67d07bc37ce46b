"""Rows: what can be measured, by name, with the bar each has to reach; and the loop that runs them.

Other packages add rows by entry points ``module:ROWS`` of the group ``kvstore.bench_rows``, each a sequence of ``Row``.
They are loaded only where a name is asked for that is none of ours, or all are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore import about
from kvstore.bench import (
    evict,
    find,
    flatness,
    get,
    grpc,
    hbm,
    hostile,
    lookup,
    memory,
    metrics,
    nixl,
    nvme,
    nvme_restart,
    nvme_write,
    object_batches,
    objects,
    overload,
    put,
    remote,
    restart,
    unaligned,
)
from kvstore.bench.harness import Bar, Result
from kvstore.bench.stage import RunSettings, Stage
from kvstore.errors import InvalidRequest, KVStoreError

ENTRY_POINT_GROUP = "kvstore.bench_rows"


@dataclass(frozen=True)
class Row:
    """One row: ``measure(stage, name, bar)`` gives its line, and lines named ``<name>.<what>`` for variants of it.

    ``bar`` is None where there is nothing to reach.
    """

    name: str
    about: str
    bar: Bar | None
    measure: Callable[[Stage, str, Any], list[Result]]

    @property
    def bar_text(self) -> str:
        """``>= 0.94``; "" where there is no bar."""
        return self.bar.text if self.bar is not None else ""


def _at_most(value: float) -> Bar:
    return Bar(value, at_least=False)


# In this order, so that rows over the same stored pages follow each other.
_ROWS = (
    Row("keys_128k", "keys of a 128k-token prompt / hashing alone", _at_most(3), lookup.keys),
    Row("lookup_512", "lookup of a chain of 512 pages / 512 LMDB gets", _at_most(0.25), lookup.lookup),
    Row("get_2m", "get, 32 pages of 2 MiB / memcpy", Bar(0.94), partial(get.get, geometry="2m")),
    Row("lease_2m", "memcpy of 32 pages of 2 MiB / lease of them", Bar(20), partial(get.lease, geometry="2m")),
    Row("two_readers", "two processes: get / memcpy, 2 MiB", Bar(0.85), partial(get.two_readers, geometry="2m")),
    Row("get_256k", "get, 32 pages of 256 KiB / memcpy", Bar(0.90), partial(get.get, geometry="256k")),
    Row("get_one_256k", "get of one page of 256 KiB / memcpy", _at_most(2), partial(get.get_one, geometry="256k")),
    Row("get_64k", "get, 32 pages of 64 KiB / memcpy", Bar(0.75), partial(get.get, geometry="64k")),
    Row("get_unaligned", "reads into arrays as numpy makes them / that start at a page", Bar(0.8), unaligned.unaligned),
    Row(
        "metrics_cost",
        "get of 64 KiB pages, counted / not counted",
        _at_most(1.02),
        partial(metrics.cost, geometry="64k"),
    ),
    Row("put_2m", "put, 32 pages of 2 MiB / memcpy", Bar(0.9), partial(put.put, geometry="2m")),
    Row("put_256k", "put, 32 pages of 256 KiB / memcpy", Bar(0.75), partial(put.put, geometry="256k")),
    Row("put_64k", "put, 32 pages of 64 KiB / memcpy", Bar(0.6), partial(put.put, geometry="64k")),
    Row("put_one_256k", "put of one page of 256 KiB / memcpy", _at_most(4), partial(put.put_one, geometry="256k")),
    Row("object_put_256k", "put of one object of 256 KiB / memcpy", None, objects.put),
    Row("object_get_256k", "get of one object of 256 KiB / memcpy", None, objects.get),
    *(
        Row(
            f"objects_{verb}_{size}",
            f"{verb}, 32 objects of {said} by one call / memcpy",
            None,
            partial(measure, value_bytes=value_bytes),
        )
        for size, said, value_bytes in (
            ("64k", "64 KiB", 64 << 10),
            ("256k", "256 KiB", 256 << 10),
            ("2m", "2 MiB", 2 << 20),
        )
        for verb, measure in (("put", object_batches.put), ("get", object_batches.get))
    ),
    Row("evict_1m", "a page that evicts one: node of a million / of 10 k pages", _at_most(1.5), evict.evict),
    Row(
        "metrics_1m",
        "GET /metrics of a node of a million pages; .stats: a frame of top",
        Bar(0.2, at_least=False, of_ratio=False, unit="s"),
        metrics.scrape,
    ),
    Row(
        "memory_1m",
        "bytes per page beside data and token ids",
        Bar(400, at_least=False, of_ratio=False, unit="B"),
        memory.memory,
    ),
    Row(
        "restart_8g",
        "kill -9 to serving again, under reads",
        Bar(2, at_least=False, of_ratio=False, unit="s"),
        restart.restart,
    ),
    *(
        Row(
            f"get_nvme_{size}",
            f"cold get from NVMe, 32 pages of {text} / O_DIRECT reads",
            Bar(0.85),
            partial(nvme.get, geometry=size),
        )
        for size, text in (("2m", "2 MiB"), ("256k", "256 KiB"), ("64k", "64 KiB"))
    ),
    *(
        Row(
            f"demotion_{size}",
            f"saving pages of {text} to NVMe / O_DIRECT writes",
            Bar(0.8),
            partial(nvme_write.demotion, geometry=size),
        )
        for size, text in (("2m", "2 MiB"), ("256k", "256 KiB"), ("64k", "64 KiB"))
    ),
    Row(
        "get_while_demoting_2m",
        "get from DRAM while pages are saved / in quiet",
        Bar(0.7),
        partial(nvme_write.get_while_demoting, geometry="2m"),
    ),
    *(
        Row(
            f"remote_get_{size}",
            f"get over TCP from another node, 32 pages of {text} / plain sockets",
            Bar(bar),
            partial(remote.get, geometry=size),
        )
        for size, text, bar in (("2m", "2 MiB", 0.8), ("256k", "256 KiB", 0.8), ("64k", "64 KiB", 0.6))
    ),
    Row(
        "remote_nixl_2m",
        "get by NIXL from another node, 32 pages of 2 MiB / plain sockets",
        None,
        partial(nixl.get, geometry="2m"),
    ),
    Row(
        "remote_two_readers",
        "two processes: get over TCP from one node, 2 MiB / plain sockets",
        None,
        partial(remote.two_readers, geometry="2m"),
    ),
    *(
        Row(
            f"remote_get_nvme_{size}",
            f"get over TCP from another node's NVMe, 32 pages of {text} / plain sockets",
            None,
            partial(remote.get_nvme, geometry=size),
        )
        for size, text in (("2m", "2 MiB"), ("256k", "256 KiB"), ("64k", "64 KiB"))
    ),
    Row("find_512", "lookup of 512 pages over three nodes / one bare round trip", _at_most(2.5), find.find),
    Row(
        "directory_bytes",
        "bytes per entry of an owner who was told of a million pages",
        Bar(32, at_least=False, of_ratio=False, unit="B"),
        find.directory,
    ),
    Row("announce_1m", "entries per second that an owner is told over TCP", None, find.announce),
    Row(
        "flatness_64",
        "messages of the directory per get, 64 nodes / 2; .get_bytes, .put_bytes",
        _at_most(2),
        flatness.flatness,
    ),
    Row(
        "converge_100k",
        "a node dies: until 100,000 pages have two owners again",
        Bar(10, at_least=False, of_ratio=False, unit="s"),
        find.converge,
    ),
    Row(
        "join_empty",
        "an empty node joins 100,000 pages: until it finds them; .share, of the directory",
        None,
        find.join,
    ),
    Row("cluster_cost", "local get, put and lookup in a cluster / in none", _at_most(1.05), find.cost),
    Row("grpc_unary", "lookup of 32 pages over gRPC / a unary echo", None, grpc.unary),
    Row("grpc_read_2m", "get over gRPC, 32 pages of 2 MiB / a gRPC stream", None, partial(grpc.read, geometry="2m")),
    Row(
        "grpc_read_256k",
        "get over gRPC, 32 pages of 256 KiB / a gRPC stream",
        None,
        partial(grpc.read, geometry="256k"),
    ),
    Row("grpc_write_2m", "put over gRPC, 32 pages of 2 MiB / a gRPC stream", None, partial(grpc.write, geometry="2m")),
    Row("hostile_names", "longest put beside a tenant who says 18,500 names / in quiet", None, hostile.names),
    Row("overload", "calls answered in time at four times the load / at one time", Bar(0.8), overload.overload),
    *(
        Row(f"hbm_{verb}_{size}", f"{way}, frames of {text} / one plain pinned copy", Bar(bar), measure)
        for size, text, length, bar in (("2m", "2 MiB", 2 << 20, 0.9), ("64k", "64 KiB", 64 << 10, 0.7))
        for verb, way, measure in (
            ("read", "DRAM to HBM", partial(hbm.one_way, length=length, back=False)),
            ("write", "HBM to DRAM", partial(hbm.one_way, length=length, back=True)),
            ("both", "both ways at once", partial(hbm.both_ways, length=length)),
        )
    ),
    Row("hbm_read_sweep", "DRAM to HBM, frames of 4 KiB to 2 MiB / plain", None, partial(hbm.sweep, back=False)),
    Row("hbm_write_sweep", "HBM to DRAM, frames of 4 KiB to 2 MiB / plain", None, partial(hbm.sweep, back=True)),
    Row("restart_nvme", "kill -9, reboot, and scan of NVMe, to serving again", None, nvme_restart.restart),
)
ROWS = {row.name: row for row in _ROWS}


def added() -> list[Row]:
    """Rows of other packages. A name of ours stays ours."""
    found = {}
    for _, entry in sorted(about.entry_points(ENTRY_POINT_GROUP).items()):
        for row in entry.load():
            assert isinstance(row, Row), f"{entry.value} holds a {type(row).__name__}"
            found[row.name] = row
    return [row for name, row in found.items() if name not in ROWS]


def chosen(names: Sequence[str]) -> list[Row]:
    """The rows of these names in the order they are best run; all where none is named.

    Raises:
        InvalidRequest: there is no row of that name.
    """
    rows = list(_ROWS)
    if not names or any(name not in ROWS for name in names):
        rows += added()
    known = {row.name for row in rows}
    for name in names:
        if name not in known:
            raise InvalidRequest("names", f"there is no row {name!r}; --list shows them")
    return [row for row in rows if not names or row.name in names]


def run(rows: Sequence[Row], settings: RunSettings) -> Iterator[tuple[Row, list[Result] | KVStoreError]]:
    """Measure row by row: each row with its lines, or with why it could not be measured, as soon as it is known.

    One row that fails does not keep the others from being measured. Every process and node is gone at the end.
    """
    with Stage(settings) as stage:
        for row in rows:
            try:
                outcome: list[Result] | KVStoreError = row.measure(stage, row.name, row.bar)
            except KVStoreError as failed:
                stage.clear()
                outcome = failed
            yield row, outcome
