"""``kvstore top``: a live view of one node, or of all members of a pool.

A frame is a JSON document that compares the last two replies of each member: counters become rates per second. With
``--json`` frames are printed unchanged. Otherwise rich draws them as tables. The name of a field determines the header
of its column, and the unit in the name determines the format of its values.

With ``--catalog`` every frame reads the catalog again and sends a request to all members at once. A member that does
not answer within ``ASK_S`` is marked. The catalog and the members are not trusted: values of an unexpected type are
left out, and ``name_text`` shortens names and removes control codes.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any, Final

import click
from google.protobuf.struct_pb2 import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

import kvstore
from kvstore.cli.cluster import ASK_S, members_of
from kvstore.cli.node import node_option
from kvstore.cli.output import bytes_text, duration_text, json_option, name_text, print_json
from kvstore.client.remote.admin import document
from kvstore.client.remote.endpoint import CallerCredentials, endpoint
from kvstore.client.remote.node import OPTIONS, RemoteNode
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable
from kvstore.pb import store_pb2 as pb
from kvstore.shm.counters import LATENCY_BOUNDS_S

Document = Mapping[str, Any]
Frame = dict[str, Any]

TENANTS_SHOWN: Final = 8
PERCENTILES: Final = (50, 90, 99)
MEMBERS_MAX: Final = 256  # members in a frame, of all kinds together
REPLY_BYTES_MAX: Final = 4 << 20
PIPE_COLUMNS: Final = 1000  # width of lines in a pipe or a file, which need not fit a screen
COUNTER_OF: Final = {"get": "gets", "put": "puts", "put_async": "puts_async", "lookup": "lookups", "lease": "leases"}
"""The counter of each operation that has latencies."""
CALL_OF: Final = {"node": "Store/Stats", "engine": "Engine/Status", "conductor": "Conductor/Status"}
"""The call that returns a member's document, for each kind of member."""
FROM_CATALOG: Final = ("role", "model", "node", "policy")
HIDDEN: Final = {"member", "name", "host", "address", "tiers", "error", "interval_s", "routed", "refused", "recent"}
"""Fields that only --json shows."""


@click.command()
@node_option
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.1, 3600.0),
    default=2.0,
    show_default=True,
    help="Seconds between frames.",
)
@click.option("--once", is_flag=True, help="Print one frame, with the rates of one interval, and end.")
@click.option("--catalog", metavar="URL", help="Watch a whole pool instead: file:PATH, etcd://HOST:PORT,...")
@click.option("--pool", default="default", show_default=True, help="The pool in that catalog.")
@json_option
def top(node: str | None, interval_s: float, once: bool, catalog: str | None, pool: str, as_json: bool) -> None:
    """Watch a node: capacity, hits, operations and their latencies, evictions and moves, tenants, clients, queues.

    With --catalog, watch all nodes, engines and conductors of a pool, one line each.

    Rates are those of the last interval. Press q or Ctrl-C to end. If stdout is not a terminal, frames are printed one
    after the other (with --json one document per line).
    """
    if math.isnan(interval_s):
        raise InvalidRequest("--interval", "must be seconds, not nan")
    if catalog is None:
        with kvstore.connect(node) as store:
            _show(node_frames(store.stats, store.name), node_view, interval_s, once, as_json)
        return
    if node is not None:
        raise InvalidRequest("--node", "cannot be combined with --catalog, which shows a whole pool")
    with closing(pool_frames(catalog, pool)) as frames:
        _show(frames, pool_view, interval_s, once, as_json)


def _show(
    frames: Iterator[Frame], view: Callable[[Frame], Group], interval_s: float, once: bool, as_json: bool
) -> None:
    """Show one frame with rates, or one after the other until the user ends it."""
    console, frame = new_console(), next(frames)
    if once:
        time.sleep(interval_s)
        frame = next(frames)
        print_json(frame) if as_json else console.print(view(frame))
    elif as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        while True:
            click.echo(json.dumps(frame)) if as_json else console.print(view(frame), "")
            time.sleep(interval_s)
            frame = next(frames)
    else:
        with _single_keys() as interrupted, Live(console=console, screen=True, auto_refresh=False) as live:
            while not interrupted.is_set():
                live.update(view(frame), refresh=True)
                if _quit_pressed(interval_s):
                    return
                frame = next(frames)
            raise KeyboardInterrupt


@contextmanager
def _single_keys() -> Iterator[threading.Event]:
    """Let the terminal deliver single keys, and SIGTERM interrupt like Ctrl-C, until the context ends. Both signals
    also set the yielded event, since an exception that is raised inside a finalizer is lost."""
    interrupted, attributes = threading.Event(), termios.tcgetattr(sys.stdin)

    def interrupt(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        tty.setcbreak(sys.stdin)
        yield interrupted
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, attributes)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _quit_pressed(timeout_s: float) -> bool:
    """Return True as soon as q is pressed or the terminal is closed, and False after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while select.select([sys.stdin], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
        keys = os.read(sys.stdin.fileno(), 64)
        if not keys or b"q" in keys.lower():
            return True
    return False


# --- frames of one node ---------------------------------------------------------------------------------------------


def number(reply: Any, *path: str) -> float | None:
    """Return the finite number at ``path`` in a document; None if there is none."""
    for part in path:
        reply = reply.get(part) if isinstance(reply, dict) else None
    is_number = isinstance(reply, int | float) and not isinstance(reply, bool) and math.isfinite(reply)
    return reply if is_number else None


class Rates:
    """Rates per second of counters between two replies. A rate is None if there is no earlier reply, or if the counter
    was reset. A new counter starts at 0."""

    def __init__(self, reply: Document, before: Document | None, elapsed_s: float | None) -> None:
        self._reply, self._before, self._elapsed_s = reply, before, elapsed_s

    def per_s(self, *path: str) -> float | None:
        """Return the rate of one counter."""
        now, before = number(self._reply, *path), number(self._before, *path) or 0
        if self._before is None or not self._elapsed_s or now is None or now < before:
            return None
        return (now - before) / self._elapsed_s

    def group(self, *path: str, prefix: str = "") -> dict[str, float | None]:
        """Return the rates of the counters of a group that have this prefix, by the rest of their names."""
        group: Any = self._reply
        for part in path:
            group = group.get(part) if isinstance(group, dict) else None
        names = [name for name in group if name.startswith(prefix)] if isinstance(group, dict) else []
        return {name.removeprefix(prefix): self.per_s(*path, name) for name in names}


def node_frames(stats: Callable[[], Frame], name: str) -> Iterator[Frame]:
    """Yield a frame on each call. A node that stops answering after the first frame is polled again."""
    reply, before, now_s, before_s = stats(), None, time.monotonic(), 0.0
    while True:
        yield node_frame(reply, before, now_s - before_s)
        before, before_s = reply if "clients" in reply else None, now_s
        while True:
            try:
                reply, now_s = stats(), time.monotonic()
                break
            except (NodeUnavailable, DeadlineExceeded) as error:
                before = None
                yield {"name": name, "state": "no answer", "error": str(error)}


def node_frame(reply: Document, before: Document | None, elapsed_s: float) -> Frame:
    """Return rates per second between two replies, and current values. Rates are None if there is no earlier reply, or
    if it is from an earlier daemon, which resets the counters. For a node that is down there are only ``name`` and
    ``state``."""
    frame: Frame = {"name": reply.get("name", ""), "state": reply.get("state", "")}
    if "clients" not in reply:
        return frame
    if before is not None and (before.get("pid"), before.get("incarnation")) != (reply["pid"], reply["incarnation"]):
        before = None
    rates = Rates(reply, before, elapsed_s)
    return {
        **frame,
        "uptime_s": reply["uptime_s"],
        "interval_s": elapsed_s if before is not None else None,
        "tiers": {tier: _tier(tier, about, reply, rates) for tier, about in reply["tiers"].items()},
        "pages_asked_per_s": rates.per_s("clients", "pages_asked"),
        "missed_per_s": rates.group("clients", prefix="missed_"),
        "operations": {
            name: {"per_s": rates.per_s("clients", COUNTER_OF[name]), **_percentiles(name, reply, before)}
            for name in reply["latency"]
        },
        "tenants": sorted(_tenants(reply), key=lambda tenant: -tenant["bytes"])[:TENANTS_SHOWN],
        "tenants_left_off": reply.get("tenants_left_off", 0) + max(0, len(reply["tenants"]) - TENANTS_SHOWN),
        "clients": {name: reply[name] for name in ("sessions_connected", "sessions", "leases", "reservations")},
        "queues": reply["queues"],
    }


def _tier(tier: str, about: Document, reply: Document, rates: Rates) -> Frame:
    hits_per_s, asked_per_s = rates.per_s("clients", f"hit_{tier}"), rates.per_s("clients", "pages_asked")
    moves = ("promoted", "demoted") if tier == "nvme" else ()
    return {
        **{name: about[name] for name in ("capacity_bytes", "used_bytes", "pages")},
        "state": about.get("state", reply["state"]),
        "hit_tokens_per_s": rates.per_s("clients", f"hit_{tier}_tokens"),
        "hit_ratio": hits_per_s / asked_per_s if hits_per_s is not None and asked_per_s else None,
        "in_bytes_per_s": rates.per_s("tiers", tier, "bytes_in"),
        "out_bytes_per_s": rates.per_s("tiers", tier, "bytes_out"),
        "evicted_per_s": rates.group("tiers", tier, "evicted"),
        **{f"{move}_per_s": rates.per_s("tiers", tier, f"{move}_pages") for move in moves},
    }


def _percentiles(name: str, reply: Document, before: Document | None) -> dict[str, float | None]:
    """Return latencies of the operations between two replies; of all operations if there is no earlier reply."""
    counts: Counter[float] = Counter()
    for sign, stats in ((1, reply), (-1, before)):
        for end_s, count in stats["latency"][name]["buckets"] if stats is not None else ():
            counts[math.inf if end_s is None else end_s] += sign * count
    return {f"p{percent}_s": _quantile(+counts, percent / 100) for percent in PERCENTILES}


def _quantile(counts: Mapping[float, int], share: float) -> float | None:
    """Return the latency in seconds that ``share`` of the operations did not exceed; None if there were none.

    ``counts`` maps the upper bound of a bucket to its operations, which are assumed to be spread evenly inside it. The
    last bucket is open and counts as its lower bound.
    """
    rank = share * sum(counts.values())
    for end_s, count in sorted(counts.items()):
        if rank <= count:
            bucket = bisect_left(LATENCY_BOUNDS_S, end_s)
            start_s = LATENCY_BOUNDS_S[bucket - 1] if bucket else 0.0
            return start_s if end_s == math.inf else start_s + (end_s - start_s) * rank / count
        rank -= count
    return None


def _tenants(reply: Document) -> Iterator[Frame]:
    for salt, about in reply["tenants"].items():
        tiers = {tier: about[tier] for tier in reply["tiers"] if tier in about}
        yield {
            "tenant": salt,
            "bytes": sum(each["bytes"] for each in tiers.values()),
            "pages": {tier: each["pages"] for tier, each in tiers.items()},
            "quota_bytes": {tier: each["quota_bytes"] for tier, each in tiers.items()},
            "pins": about["pins"],
        }


# --- frames of a pool -----------------------------------------------------------------------------------------------


class _Link(RemoteNode):
    """A connection to a member."""

    service = "/kvstore.v1."
    options = tuple((dict(OPTIONS) | {"grpc.max_receive_message_length": REPLY_BYTES_MAX}).items())


class _Member:
    """A member of the pool, and its last reply. Life: made -> ``ask`` for each frame -> ``close``."""

    def __init__(self, kind: str, addresses: tuple[str, ...]) -> None:
        self._kind, self._address = kind, next(iter(addresses), "")
        self._link: _Link | None = None
        self._error = "reachable only from its own machine"
        self._reply: Document | None = None
        self._reply_s = 0.0
        if self._address:
            try:
                self._link = _Link(endpoint(f"kv://{self._address}", CallerCredentials(), os.environ), ASK_S)
            except KVStoreError as error:
                self._error = str(error)

    def close(self) -> None:
        """End the connection."""
        if self._link is not None:
            self._link.close()

    def ask(self, entry: Any) -> Frame:
        """Request the member's document, and return its part of a frame, after ``ASK_S`` at the latest."""
        reply = None
        try:
            if self._link is not None:
                reply = document(self._link.call(CALL_OF[self._kind], pb.Empty(), Struct, again=False))
        except KVStoreError as error:
            self._error = str(error)
        elapsed_s = time.monotonic() - self._reply_s if self._reply is not None else None
        about = {"member": self._kind, "name": entry.name, "host": entry.host, "address": self._address}
        about |= {name: getattr(entry, name) for name in FROM_CATALOG if hasattr(entry, name)}
        if reply is None:
            state = "no answer" if self._address else "no address"
            return {**about, "state": state, "error": self._error, "heard_ago_s": elapsed_s}
        facts = FACTS[self._kind](reply, Rates(reply, self._reply, elapsed_s))
        self._reply, self._reply_s = reply, time.monotonic()
        return {**about, "state": "serving", **facts, "heard_ago_s": 0.0, "interval_s": elapsed_s}


def pool_frames(catalog: str, pool: str) -> Generator[Frame]:
    """Yield a frame on each call, until the iterator is closed. While the catalog is unavailable, the frames have the
    members that it listed last.

    Raises Unavailable if the catalog is not responding at the first call, InvalidRequest if ``catalog`` is not valid.
    """
    members: dict[tuple[str, ...], _Member] = {}
    entries, error = _entries(catalog, pool), ""
    with ThreadPoolExecutor(MEMBERS_MAX) as threads:
        try:
            while True:
                listed = dict(islice(entries.items(), MEMBERS_MAX))
                members |= {key: _Member(key[0], listed[key].addresses) for key in listed.keys() - members.keys()}
                for key in members.keys() - entries.keys():
                    members.pop(key).close()
                rows = list(threads.map(_Member.ask, map(members.__getitem__, listed), listed.values()))
                left_off = len(entries) - len(listed)
                frame = {"catalog": catalog, "pool": pool, "members": rows, "members_left_off": left_off}
                yield {**frame, "catalog_error": error}
                try:
                    entries, error = _entries(catalog, pool), ""
                except KVStoreError as failed:
                    error = str(failed)
        finally:
            for member in members.values():
                member.close()


def _entries(catalog: str, pool: str) -> dict[tuple[str, ...], Any]:
    """Return the members that the catalog lists, by kind, name, process and address."""
    nodes, engines, _, conductors = asyncio.run(members_of(catalog, pool))
    by_kind: dict[str, list[Any]] = {"conductor": conductors, "engine": engines, "node": nodes}
    pairs = ((kind, entry) for kind in by_kind for entry in sorted(by_kind[kind], key=lambda entry: entry.name))
    return {(kind, entry.name, entry.process, *entry.addresses[:1]): entry for kind, entry in pairs}


def _text(reply: Document, name: str) -> str:
    return value if isinstance(value := reply.get(name), str) else ""


def _node_facts(reply: Document, rates: Rates) -> Frame:
    tiers = {
        tier: {
            **{name: number(reply, "tiers", tier, name) for name in ("capacity_bytes", "used_bytes", "pages")},
            "reused_pages_per_s": rates.per_s("clients", f"hit_{tier}"),
        }
        for tier in ("dram", "nvme")
        if number(reply, "tiers", tier, "capacity_bytes") is not None
    }
    return {"state": _text(reply, "state"), "tiers": tiers}


def _engine_facts(reply: Document, rates: Rates) -> Frame:
    page_tokens = number(reply, "layout", "page_tokens") or math.inf
    reused_tokens = sorted(rates.group("done", "cached_tokens").items())[:8]
    phases = rates.group("requests").keys() - {"decoding"}
    return {
        "state": "draining" if reply.get("draining") is True else "serving",
        "role": _text(reply, "role"),
        "model": _text(reply, "model"),
        "waiting": sum(number(reply, "requests", phase) or 0 for phase in phases),
        "running": number(reply, "requests", "decoding"),
        "prefill_tokens_per_s": rates.per_s("done", "prefill_tokens"),
        "decode_tokens_per_s": rates.per_s("done", "decode_tokens"),
        "reused_pages_per_s": {tier: None if rate is None else rate / page_tokens for tier, rate in reused_tokens},
    }


def _conductor_facts(reply: Document, rates: Rates) -> Frame:
    open_requests = [number(reply, "requests", phase) or 0 for phase in ("waiting", "kept", "sent", "decoding")]
    return {
        "policy": _text(reply, "policy"),
        "leads": reply.get("leads") is True,
        "engines": len(reply["engines"]) if isinstance(reply.get("engines"), dict) else None,
        "routed": number(reply, "routed"),
        "routed_per_s": rates.per_s("routed"),
        "refused": number(reply, "answers", "refused"),
        "refused_per_s": rates.per_s("answers", "refused"),
        "waiting": open_requests[0],
        "open": sum(open_requests),
        "ttft_error_ratio": number(reply, "ttft_error"),
        "recent": recent if isinstance(recent := reply.get("recent"), list) else [],
    }


FACTS: Final = {"conductor": _conductor_facts, "engine": _engine_facts, "node": _node_facts}
"""The function that returns the facts in a frame, for each kind of member."""


# --- drawing --------------------------------------------------------------------------------------------------------


def new_console() -> Console:
    """Return a console for stdout that prints names as they are, without interpreting them as markup."""
    return Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, markup=False, emoji=False, highlight=False)


def node_view(frame: Frame) -> Group:
    """Draw a frame of a node."""
    head = f"kvstore top  {frame['name']}  {frame['state']}  {time.strftime('%H:%M:%S')}"
    if "tiers" not in frame:
        return Group(head, frame.get("error", "its daemon is not running; retrying"))
    interval_s = frame["interval_s"]
    rates = "rates from the next frame on" if interval_s is None else f"rates of the last {duration_text(interval_s)}"
    requested, missed = (_cell(name, frame[name]) for name in ("pages_asked_per_s", "missed_per_s"))
    return Group(
        f"{head}  up {duration_text(frame['uptime_s'])}  {rates}",
        *("", _table("tier", frame["tiers"].items())),
        *("", f"asked     {requested} pages/s; missed/s: {missed}"),
        *("", _table("operation", frame["operations"].items())),
        *("", _table("tenant", ((tenant["tenant"], tenant) for tenant in frame["tenants"]))),
        *_more(frame["tenants_left_off"]),
        *("", f"clients   {_cell('clients', frame['clients'])}", f"queues    {_cell('queues', frame['queues'])}"),
    )


def pool_view(frame: Frame) -> Group:
    """Draw a frame of a pool."""
    parts: list[RenderableType] = [
        f"kvstore top  {name_text(frame['catalog'])}  pool {name_text(frame['pool'])}  {time.strftime('%H:%M:%S')}"
    ]
    if frame["catalog_error"]:
        parts.append(f"the catalog is not responding: {name_text(frame['catalog_error'])}")
    for kind in FACTS:
        members = [(each["name"], _by_field(each)) for each in frame["members"] if each["member"] == kind]
        parts += ["", _table(kind, members)] if members else []
    return Group(*parts, *([] if frame["members"] else ["", "no members"]), *_more(frame["members_left_off"]))


def _by_field(member: Frame) -> Frame:
    """Return a member with its facts about tiers as ``{field: {tier: value}}``: a column for each field."""
    fields: dict[str, Frame] = {}
    for tier, about in member.get("tiers", {}).items():
        for field, value in about.items():
            fields.setdefault(field, {})[tier] = value
    return {**member, **fields}


def _more(count: int) -> list[str]:
    return [f"and {count} more"] if count else []


def _table(title: str, rows: Iterable[tuple[str, Document]]) -> Table:
    """Return a table with a row for each name and its fields. Columns of numbers are right-aligned."""
    rows = list(rows)
    table = Table(title, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    fields = dict.fromkeys(name for _, row in sorted(rows, key=lambda row: -len(row[1])) for name in row)
    shown = [name for name in fields if name not in HIDDEN and name != title]
    for name in shown:
        is_number = all(isinstance(row.get(name, 0), int | float | None) for _, row in rows)
        table.add_column(_header(name), justify="right" if is_number else "left")
    for name, row in rows:
        table.add_row(name_text(name), *(_cell(field, row.get(field)) for field in shown))
    return table


def _header(field: str) -> str:
    """Return ``hit tokens/s`` for ``hit_tokens_per_s``, ``used`` for ``used_bytes``, ``p50`` for ``p50_s``."""
    return re.sub(r"_bytes|(?<!per)_s$", "", field).replace("_per_s", "/s").replace("_", " ")


def _cell(field: str, value: Any) -> str:
    """Format a value by its type, and by the unit in the name of its field."""
    if isinstance(value, dict):
        return (
            ", ".join(f"{_cell(field, part)} {name_text(_header(name))}" for name, part in value.items() if part) or "-"
        )
    if value is None or value == "":
        return "-"
    if isinstance(value, str):
        return name_text(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if "bytes" in field:
        return bytes_text(value)
    if field.endswith("_ratio"):
        return f"{value:.3f}"
    if field.endswith("_s") and not field.endswith("per_s"):
        return duration_text(value)
    is_exact = isinstance(value, int) or value >= 100 or value == 0
    return f"{value:.0f}" if is_exact else f"{value:.1f}"
