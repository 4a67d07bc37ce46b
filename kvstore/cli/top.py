"""``kvstore top``: a live view of one node, or of all members of a pool.

One frame of ``kvstore top``: turns two answers of ``stats`` into rates, and these into lines of text.

``kvstore top --catalog``: one line for each node, engine and conductor of a pool.

For every frame the catalog is read again, and all members are asked for their state at once. Members that do not answer
within ``ASK_S`` are shown as such. Names in the catalog and answers of members are not trusted: texts are bounded and
stripped of control codes, numbers are checked, and invalid values are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import click
import grpc
from rich.console import Console
from rich.live import Live
from rich.text import Text

import kvstore
from kvstore.cli.cluster import ASK_S, members_of
from kvstore.cli.node import node_option
from kvstore.cli.output import bytes_text, duration_text, json_option, print_json, table_text
from kvstore.client.remote.admin import document
from kvstore.client.remote.endpoint import GivenCredentials, endpoint
from kvstore.client.remote.node import OPTIONS, RemoteNode
from kvstore.cluster.catalog.schema import ConductorEntry, EngineEntry, NodeEntry
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable
from kvstore.pb import store_pb2 as pb
from kvstore.shm.counters import LATENCY_BOUNDS_S

TENANTS_SHOWN = 8
PERCENTILES = (50, 90, 99)
# The name in ``stats`` of the counter of each operation that has latencies.
COUNTED_AS = {"get": "gets", "put": "puts", "put_async": "puts_async", "lookup": "lookups", "lease": "leases"}

Stats = Mapping[str, Any]


def node_document(now: Stats, before: Stats | None, elapsed_s: float) -> dict[str, Any]:
    """Return rates per second between two answers, and current values. Rates are None if there is no earlier answer, or
    if it came from an earlier daemon, since counters restart. For a node that is down only ``name`` and ``state`` are
    known."""
    about: dict[str, Any] = {"name": now.get("name", ""), "state": now.get("state", "")}
    if "clients" not in now:
        return about
    if before is not None and (before.get("pid"), before.get("incarnation")) != (now["pid"], now["incarnation"]):
        before = None
    clients = _Rates(now["clients"], before and before["clients"], elapsed_s)
    return {
        **about,
        "uptime_s": now["uptime_s"],
        "interval_s": elapsed_s if before is not None else None,
        "tiers": {tier: _tier(tier, now, before, clients, elapsed_s) for tier in now["tiers"]},
        "pages_asked_per_s": clients.per_s("pages_asked"),
        "missed_per_s": clients.group("missed_"),
        "operations": {
            name: {"per_s": clients.per_s(COUNTED_AS[name]), **_percentiles(now, before, name)}
            for name in now["latency"]
        },
        "tenants": _tenants(now),
        "tenants_left_off": now.get("tenants_left_off", 0) + max(0, len(now["tenants"]) - TENANTS_SHOWN),
        "clients": {name: now[name] for name in ("sessions_connected", "sessions", "leases", "reservations")},
        "queues": now["queues"],
    }


class _Rates:
    """Counters at two moments; a new counter starts from 0."""

    def __init__(self, now: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_s: float) -> None:
        self._now, self._before, self._elapsed_s = now, before, max(elapsed_s, 1e-9)

    def grown(self, name: str) -> float | None:
        """Return how much a counter grew; None if unknown."""
        return None if self._before is None else max(0, self._now.get(name, 0) - self._before.get(name, 0))

    def per_s(self, name: str) -> float | None:
        """Return a counter's growth per second; None if unknown."""
        grown = self.grown(name)
        return None if grown is None else grown / self._elapsed_s

    def group(self, prefix: str = "") -> dict[str, float | None]:
        """Return the growth per second of all counters with that prefix, by the rest of their names."""
        return {name.removeprefix(prefix): self.per_s(name) for name in self._now if name.startswith(prefix)}


def _tier(tier: str, now: Stats, before: Stats | None, clients: _Rates, elapsed_s: float) -> dict[str, Any]:
    about = now["tiers"][tier]
    old = before["tiers"].get(tier) if before is not None else None
    rates = _Rates(about, old, elapsed_s)
    hit, asked = clients.grown(f"hit_{tier}"), clients.grown("pages_asked")
    moved = {"promoted": "promoted_pages", "demoted": "demoted_pages"} if tier == "nvme" else {}
    return {
        "capacity_bytes": about["capacity_bytes"],
        "used_bytes": about["used_bytes"],
        "pages": about["pages"],
        "state": about.get("state", now["state"]),
        "hit_tokens_per_s": clients.per_s(tokens) if (tokens := f"hit_{tier}_tokens") in now["clients"] else None,
        "hit_ratio": hit / asked if hit is not None and asked else None,
        "in_bytes_per_s": rates.per_s("bytes_in"),
        "out_bytes_per_s": rates.per_s("bytes_out"),
        "evicted_per_s": _Rates(about["evicted"], old and old["evicted"], elapsed_s).group(),
        **{f"{name}_per_s": rates.per_s(counter) for name, counter in moved.items()},
    }


def _percentiles(now: Stats, before: Stats | None, name: str) -> dict[str, float | None]:
    """Return latencies of the operations between the two answers; of all operations if there is no earlier answer."""
    buckets: dict[float | None, int] = dict(map(tuple, now["latency"][name]["buckets"]))
    for end, count in before["latency"][name]["buckets"] if before is not None else ():
        buckets[end] = buckets.get(end, 0) - count
    return {f"p{share}_s": quantile(buckets, share / 100) for share in PERCENTILES}


def quantile(buckets: Mapping[float | None, int], share: float) -> float | None:
    """Return the latency in seconds that ``share`` of the operations did not exceed; None if there were none.

    Operations are assumed to be spread evenly inside a bucket; the last, open bucket counts as its lower bound.
    """
    ordered = sorted((end if end is not None else float("inf"), count) for end, count in buckets.items() if count > 0)
    left = share * sum(count for _, count in ordered)
    for end, count in ordered:
        if left <= count:
            at = bisect_left(LATENCY_BOUNDS_S, end)
            start = LATENCY_BOUNDS_S[at - 1] if at else 0.0
            return start + (end - start) * left / count if end != float("inf") else start
        left -= count
    return None


def _tenants(now: Stats) -> list[dict[str, Any]]:
    """Return the largest tenants."""
    found = [
        {
            "tenant": salt,
            "bytes": sum(about[tier]["bytes"] for tier in now["tiers"] if tier in about),
            "pages": {tier: about[tier]["pages"] for tier in now["tiers"] if tier in about},
            "quota_bytes": {tier: about[tier]["quota_bytes"] for tier in now["tiers"] if tier in about},
            "pins": about["pins"],
        }
        for salt, about in now["tenants"].items()
    ]
    return sorted(found, key=lambda tenant: -tenant["bytes"])[:TENANTS_SHOWN]


# --- text -----------------------------------------------------------------------------------------------------------


def node_lines(frame: Mapping[str, Any], when: str) -> list[str]:
    """Format the frame for people."""
    head = f"kvstore top  {frame['name']}  {frame['state']}"
    if "tiers" not in frame:
        return [f"{head}  {when}", frame.get("error", "its daemon is not running; retrying")]
    interval_s = frame["interval_s"]
    over = (
        f"rates of the last {duration_text(interval_s)}" if interval_s is not None else "rates from the next frame on"
    )
    text = [f"{head}, up {duration_text(frame['uptime_s'])}  {when}  {over}", ""]
    text += [*_tier_table(frame["tiers"]), ""]
    text += [
        f"asked     {number_text(frame['pages_asked_per_s'])} pages/s; missed: {_rates_text(frame['missed_per_s'])}"
    ]
    text += [*_flow(frame["tiers"]), ""]
    text += [*_operation_table(frame["operations"]), ""]
    text += [*_tenant_table(frame["tenants"], frame["tenants_left_off"]), ""]
    clients = frame["clients"]
    text += [
        f"clients   {clients['sessions_connected']} connected, {clients['sessions']} known, "
        f"{clients['leases']} leases, {clients['reservations']} reservations",
        f"queues    {', '.join(f'{count} {name}' for name, count in frame['queues'].items())}",
    ]
    return text


def _tier_table(tiers: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            tier,
            bytes_text(about["capacity_bytes"]),
            bytes_text(about["used_bytes"]),
            f"{100 * about['used_bytes'] / about['capacity_bytes']:.0f} %" if about["capacity_bytes"] else "-",
            about["pages"],
            number_text(about["hit_tokens_per_s"]),
            "-" if about["hit_ratio"] is None else f"{about['hit_ratio']:.3f}",
            _size(about["in_bytes_per_s"]),
            _size(about["out_bytes_per_s"]),
            about["state"],
        )
        for tier, about in tiers.items()
    ]
    headers = "tier", "capacity", "used", "full", "pages", "hit tokens/s", "hit ratio", "in/s", "out/s", "state"
    return table_text(headers, rows).splitlines()


def _flow(tiers: Mapping[str, Any]) -> list[str]:
    found = [f"left {tier} {_rates_text(about['evicted_per_s'])} pages/s" for tier, about in tiers.items()]
    for about in tiers.values():
        if "demoted_per_s" in about:
            demoted, promoted = number_text(about["demoted_per_s"]), number_text(about["promoted_per_s"])
            found.append(f"moved     {demoted} demoted, {promoted} promoted pages/s")
    return found


def _rates_text(rates: Mapping[str, float | None]) -> str:
    """Return ``12.5 space, 3 request``, without zero rates."""
    return ", ".join(f"{number_text(rate)} {name}" for name, rate in sorted(rates.items()) if rate) or "0"


def _operation_table(operations: Mapping[str, Any]) -> list[str]:
    rows = [
        (name, number_text(about["per_s"]), *(_time(about[f"p{share}_s"]) for share in PERCENTILES))
        for name, about in operations.items()
    ]
    return table_text(("operation", "per s", *(f"p{share}" for share in PERCENTILES)), rows).splitlines()


def _tenant_table(tenants: Sequence[Mapping[str, Any]], left_off: int) -> list[str]:
    rows = [
        (
            name_text(about["tenant"]),
            bytes_text(about["bytes"]),
            ", ".join(f"{pages} {tier}" for tier, pages in about["pages"].items()),
            ", ".join(f"{bytes_text(size)} {tier}" for tier, size in about["quota_bytes"].items() if size) or "none",
            about["pins"],
        )
        for about in tenants
    ]
    more = [f"and {left_off} more"] if left_off else []
    return [*table_text(("tenant", "bytes", "pages", "quota", "pins"), rows).splitlines(), *more]


def name_text(tenant: str) -> str:
    """Return a tenant's name for a terminal: a salt is any text, and must not contain control codes."""
    shown = "".join(c if c.isprintable() else "?" for c in tenant[:40])
    return shown if shown else "(none)"


def number_text(rate: float | None) -> str:
    """Format a rate for people."""
    if rate is None:
        return "-"
    return f"{rate:.0f}" if rate >= 100 or rate == 0 else f"{rate:.1f}"


def _size(rate: float | None) -> str:
    return "-" if rate is None else bytes_text(rate)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else duration_text(seconds)


Lines = Callable[[dict[str, Any], str], list[str]]
"""Formats a frame for people; the text is the time of day."""

INTERVAL_S = 2.0
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0


@click.command()
@node_option
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(INTERVAL_S_MIN, INTERVAL_S_MAX),
    default=INTERVAL_S,
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
    if catalog is not None:
        if node is not None:
            raise InvalidRequest("--node", "cannot be combined with --catalog, which shows a whole pool")
        # only here: it loads gRPC

        with PoolWatch(catalog, pool) as watch:
            _show(watch.frames(), pool_lines, interval_s, once, as_json)
        return
    with kvstore.connect(node) as store:
        _show(_frames(store.stats, store.name), node_lines, interval_s, once, as_json)


def _frames(stats: Callable[[], dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """Yield a frame on each request. A node that stops answering is polled again."""
    before, then = stats(), time.monotonic()
    yield node_document(before, None, 0.0)
    last = before if "clients" in before else None
    while True:
        try:
            now, when = stats(), time.monotonic()
        except (NodeUnavailable, DeadlineExceeded) as error:
            last = None
            yield {"name": name, "state": "no answer", "error": str(error)}
            continue
        yield node_document(now, last, when - then)
        last, then = now if "clients" in now else None, when


def _show(frames: Iterator[dict[str, Any]], lines: Lines, interval_s: float, once: bool, as_json: bool) -> None:
    """Show one frame with rates, or one after the other until the user ends it."""
    if once:
        next(frames)
        time.sleep(interval_s)
        frame = next(frames)
        print_json(frame) if as_json else click.echo("\n".join(lines(frame, _clock())))
    elif as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        for frame in frames:
            click.echo(json.dumps(frame) if as_json else "\n".join([*lines(frame, _clock()), ""]))
            sys.stdout.flush()
            time.sleep(interval_s)
    else:
        first = next(frames)  # before the screen changes, so that an error is shown on the normal terminal
        with _keys() as interrupted, Live(console=Console(), screen=True, auto_refresh=False) as live:
            _draw(first, frames, lines, interval_s, live, interrupted)


def _draw(
    frame: dict[str, Any],
    frames: Iterator[dict[str, Any]],
    lines: Lines,
    interval_s: float,
    live: Live,
    interrupted: threading.Event,
) -> None:
    """Redraw in place until q is pressed, or until the terminal is gone."""
    due = time.monotonic()
    while not interrupted.is_set():
        live.update(Text("\n".join(lines(frame, _clock())), no_wrap=True, overflow="crop"), refresh=True)
        due = max(due + interval_s, time.monotonic())
        while (remaining_s := due - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], remaining_s)[0]:
                typed = os.read(sys.stdin.fileno(), 64)
                if not typed or b"q" in typed.lower():
                    return
        frame = next(frames)
    raise KeyboardInterrupt


@contextlib.contextmanager
def _keys() -> Iterator[threading.Event]:
    """Inside, the terminal delivers single keys, and SIGTERM interrupts like Ctrl-C. Both also set the yielded event,
    since an exception that is raised inside a finalizer is lost."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    interrupted = threading.Event()

    def end(*_: object) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        tty.setcbreak(fd)
        yield interrupted
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _clock() -> str:
    return time.strftime("%H:%M:%S")


MEMBERS_MAX: Final = 256  # members asked, of all kinds together
REPLY_BYTES_MAX: Final = 4 << 20

CALLS: Final = {"node": "Store/Stats", "engine": "Engine/Status", "conductor": "Conductor/Status"}
"""The call for each kind of member: it takes no arguments, and returns a document."""


class _Link(RemoteNode):
    """A connection to a member."""

    service = "/kvstore.v1."
    options = (
        *(each for each in OPTIONS if "receive" not in each[0]),
        ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    )

    def ask(self, call: str, within_s: float) -> grpc.Future[dict[str, Any]]:
        """Start a call; return a future of its answer."""
        method: Any = self._method(call, "unary_unary", pb.Empty.SerializeToString, _struct)
        asked: grpc.Future[dict[str, Any]] = method.future(pb.Empty(), **self._how(within_s))
        return asked


def _struct(reply: bytes) -> dict[str, Any]:
    from google.protobuf.struct_pb2 import Struct

    return document(Struct.FromString(reply))


@dataclass
class _Member:
    """One member, for as long as the catalog lists it."""

    kind: str
    entry: NodeEntry | EngineEntry | ConductorEntry
    link: _Link | None = None
    error: str = ""
    heard_s: float | None = None
    counts: dict[str, float] = field(default_factory=dict)  # counters of the last answer, or of the one before

    def open(self) -> None:
        """Connect. Raises nothing: the reason for a failure is shown instead."""
        if not self.entry.addresses:
            self.error = "reachable only from its own machine"
            return
        try:
            found = endpoint(f"kv://{self.entry.addresses[0]}", GivenCredentials(), os.environ)
            self.link = _Link(found, ASK_S)
        except KVStoreError as error:
            self.error = str(error)


class PoolWatch:
    """A pool's members, from frame to frame. Life: made -> ``frames`` -> ``close``."""

    def __init__(self, catalog: str, pool: str) -> None:
        self._catalog, self._pool = catalog, pool
        self._members: dict[tuple[str, str, str], _Member] = {}  # by kind, name and process
        self._left_off = 0

    def __enter__(self) -> PoolWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        with ExitStack() as ends:
            for member in self._members.values():
                if member.link is not None:
                    ends.callback(member.link.close)
        self._members.clear()

    def frames(self) -> Iterator[dict[str, Any]]:
        """Yield a frame on each request; while the catalog is unavailable, known members are asked again.

        Raises Unavailable if the catalog does not answer at first, InvalidRequest if it is not one.
        """
        self._look()
        yield {**self._frame(), "catalog_error": ""}
        while True:
            error = ""
            try:
                self._look()
            except KVStoreError as failed:
                error = str(failed)
            yield {**self._frame(), "catalog_error": error}

    def _look(self) -> None:
        nodes, engines, _, conductors = asyncio.run(members_of(self._catalog, self._pool))
        listed: list[tuple[str, NodeEntry | EngineEntry | ConductorEntry]] = []
        listed += [("conductor", each) for each in conductors]
        listed += [("engine", each) for each in engines]
        listed += [("node", each) for each in nodes]
        listed.sort(key=lambda member: (member[0], member[1].name))
        self._left_off = max(0, len(listed) - MEMBERS_MAX)
        wanted = {(kind, each.name, each.process): each for kind, each in listed[:MEMBERS_MAX]}
        for key in self._members.keys() - wanted.keys():
            gone = self._members.pop(key)
            if gone.link is not None:
                gone.link.close()
        before, self._members = self._members, {}
        for key, entry in wanted.items():
            known = before.pop(key, None)
            if known is None or known.entry.addresses != entry.addresses:
                if known is not None and known.link is not None:
                    known.link.close()
                known = _Member(key[0], entry)
                known.open()
            known.entry = entry
            self._members[key] = known

    def _frame(self) -> dict[str, Any]:
        members = list(self._members.values())
        asked = [each.link.ask(CALLS[each.kind], ASK_S) if each.link is not None else None for each in members]
        told = [_told(member, future) for member, future in zip(members, asked, strict=True)]
        return {"catalog": self._catalog, "pool": self._pool, "members": told, "members_left_off": self._left_off}


def _told(member: _Member, asked: grpc.Future[dict[str, Any]] | None) -> dict[str, Any]:
    """Return what is shown of a member, after its answer or its deadline."""
    entry, now_s, said = member.entry, time.monotonic(), None
    if asked is not None and member.link is not None:
        try:
            said = asked.result()
        except grpc.RpcError as error:
            member.error = str(member.link.meaning(error))
        now_s = time.monotonic()
    about: dict[str, Any] = {"member": member.kind, "name": entry.name, "host": entry.host}
    about["address"] = entry.addresses[0] if entry.addresses else ""
    if isinstance(entry, EngineEntry):
        about |= {"role": entry.role, "model": entry.model, "node": entry.node}
    if isinstance(entry, ConductorEntry):
        about |= {"policy": entry.policy}
    if said is None:
        heard_ago_s = None if member.heard_s is None else now_s - member.heard_s
        state = "no answer" if about["address"] else "no address"  # reachable only from its own machine
        return {**about, "state": state, "error": member.error, "heard_ago_s": heard_ago_s}
    elapsed_s = None if member.heard_s is None else now_s - member.heard_s
    rates = _Growth(said, member.counts, elapsed_s)
    shown = {"node": _node, "engine": _engine, "conductor": _conductor}[member.kind](said, rates)
    member.heard_s, member.counts, member.error = now_s, rates.now, ""
    return {**about, "state": "serving", **shown, "heard_ago_s": 0.0, "interval_s": elapsed_s}


class _Growth:
    """Growth per second since the last answer; None if there was none, or if the counter restarted."""

    def __init__(self, said: Mapping[str, Any], before: Mapping[str, float], elapsed_s: float | None) -> None:
        self.now: dict[str, float] = {}
        self._said, self._before, self._elapsed_s = said, before, elapsed_s

    def __call__(self, *path: str) -> float | None:
        now, name = _number(self._said, *path), ".".join(path)
        if now is None:
            return None
        self.now[name] = now
        before = self._before.get(name)
        if before is None or before > now or not self._elapsed_s:
            return None
        return (now - before) / self._elapsed_s


def _number(said: Any, *path: str) -> float | None:
    """Return a number in a document; None if there is none."""
    for part in path:
        said = said.get(part) if isinstance(said, dict) else None
    right = isinstance(said, int | float) and not isinstance(said, bool) and math.isfinite(said)
    return said if right else None


def _text(said: Any, name: str) -> str:
    found = said.get(name)
    return found if isinstance(found, str) else ""


def _node(said: Mapping[str, Any], rates: _Growth) -> dict[str, Any]:
    tiers = {}
    for tier in ("dram", "nvme"):
        if (capacity := _number(said, "tiers", tier, "capacity_bytes")) is not None:
            tiers[tier] = {
                "capacity_bytes": capacity,
                "used_bytes": _number(said, "tiers", tier, "used_bytes"),
                "pages": _number(said, "tiers", tier, "pages"),
                "reused_pages_per_s": rates("clients", f"hit_{tier}"),
            }
    return {"state": _text(said, "state"), "tiers": tiers}


def _engine(said: Mapping[str, Any], rates: _Growth) -> dict[str, Any]:
    page_tokens = _number(said, "layout", "page_tokens") or math.inf
    cached = said.get("done", {}).get("cached_tokens") if isinstance(said.get("done"), dict) else None
    tiers = sorted(cached)[:8] if isinstance(cached, dict) else []
    tokens = {tier: rates("done", "cached_tokens", tier) for tier in tiers}
    requests = said.get("requests")
    phases = [phase for phase in requests if phase != "decoding"] if isinstance(requests, dict) else []
    return {
        "state": "draining" if said.get("draining") is True else "serving",
        "role": _text(said, "role"),
        "model": _text(said, "model"),
        "waiting": sum(_number(said, "requests", phase) or 0 for phase in phases),
        "running": _number(said, "requests", "decoding"),
        "prefill_tokens_per_s": rates("done", "prefill_tokens"),
        "decode_tokens_per_s": rates("done", "decode_tokens"),
        "reused_pages_per_s": {tier: None if rate is None else rate / page_tokens for tier, rate in tokens.items()},
    }


def _conductor(said: Mapping[str, Any], rates: _Growth) -> dict[str, Any]:
    phases = {phase: _number(said, "requests", phase) or 0 for phase in ("waiting", "kept", "sent", "decoding")}
    return {
        "policy": _text(said, "policy"),
        "leads": said.get("leads") is True,
        "engines": len(said["engines"]) if isinstance(said.get("engines"), dict) else None,
        "routed": _number(said, "routed"),
        "routed_per_s": rates("routed"),
        "refused": _number(said, "answers", "refused"),
        "refused_per_s": rates("answers", "refused"),
        "waiting": phases["waiting"],
        "open": sum(phases.values()),
    }


# --- text -----------------------------------------------------------------------------------------------------------


def pool_lines(frame: Mapping[str, Any], when: str) -> list[str]:
    """The frame for people."""
    members = frame["members"]
    text = [f"kvstore top  {name_text(frame['catalog'])}  pool {name_text(frame['pool'])}  {when}"]
    if frame["catalog_error"]:
        text += [f"the catalog does not answer: {_shown(frame['catalog_error'])}"]
    for kind, headers, cells in TABLES:
        rows = [
            (name_text(each["name"]), *_cells(each, len(headers), cells)) for each in members if each["member"] == kind
        ]
        if rows:
            text += ["", *table_text((kind, *headers, "heard"), rows).splitlines()]
    if not members:
        text += ["", "no members"]
    if frame["members_left_off"]:
        text += ["", f"and {frame['members_left_off']} more"]
    return text


def _cells(about: Mapping[str, Any], columns: int, cells: Any) -> tuple[str, ...]:
    heard_ago_s = about["heard_ago_s"]
    heard = "never" if heard_ago_s is None else "now" if not heard_ago_s else f"{duration_text(heard_ago_s)} ago"
    if "interval_s" in about:
        return *cells(about), heard
    return about["state"], *("-" for _ in range(columns - 1)), heard


def _of_node(about: Mapping[str, Any]) -> Sequence[str]:
    full = [
        f"{bytes_text(each['used_bytes'] or 0)} of {bytes_text(each['capacity_bytes'])} {tier}"
        for tier, each in about["tiers"].items()
    ]
    reused = {tier: each["reused_pages_per_s"] for tier, each in about["tiers"].items()}
    return _shown(about["state"]), " + ".join(full) or "-", _by_tier(reused)


def _of_engine(about: Mapping[str, Any]) -> Sequence[str]:
    rates = (number_text(about[name]) for name in ("prefill_tokens_per_s", "decode_tokens_per_s"))
    counts = (_count(about[name]) for name in ("waiting", "running"))
    where = (_shown(about[name]) or "-" for name in ("state", "role", "model", "node"))
    return *where, *counts, *rates, _by_tier(about["reused_pages_per_s"])


def _of_conductor(about: Mapping[str, Any]) -> Sequence[str]:
    counts = (_count(about[name]) for name in ("engines", "open", "waiting"))
    rates = (number_text(about[name]) for name in ("routed_per_s", "refused_per_s"))
    leads = "yes" if about["leads"] else "no"
    return _shown(about["state"]), _shown(about["policy"]) or "-", leads, *counts, *rates


TABLES: Final = (
    ("conductor", ("state", "policy", "leads", "engines", "open", "waiting", "routed/s", "refused/s"), _of_conductor),
    (
        "engine",
        ("state", "role", "model", "node", "waiting", "running", "prefill tok/s", "decode tok/s", "pages reused/s"),
        _of_engine,
    ),
    ("node", ("state", "full", "pages reused/s"), _of_node),
)


def _by_tier(rates: Mapping[str, float | None]) -> str:
    return ", ".join(f"{number_text(rate)} {_shown(tier)}" for tier, rate in rates.items()) or "-"


def _shown(text: str) -> str:
    return name_text(text) if text else ""


def _count(count: float | None) -> str:
    return "-" if count is None else f"{count:.0f}"
