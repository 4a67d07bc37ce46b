"""``kvstore top --catalog``: one line for each node, engine and conductor of a pool.

Members are found in the catalog anew for every frame, and all asked at once what they are doing. Who does not answer
within ``ASK_S`` is shown as such. Whoever writes into the catalog chooses names, and members say what they like: texts
are bounded and cannot steer a terminal, numbers are checked, and what makes no sense is left out.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import grpc

from kvstore.catalog.schema import ConductorEntry, EngineEntry, NodeEntry
from kvstore.cli.cluster import ASK_S, members_of
from kvstore.cli.output import bytes_text, duration_text, table_text
from kvstore.cli.top_frame import name_text, number_text
from kvstore.client.remote.admin import document
from kvstore.client.remote.endpoint import GivenCredentials, endpoint
from kvstore.client.remote.node import OPTIONS, RemoteNode
from kvstore.errors import KVStoreError
from kvstore.pb import store_pb2 as pb

MEMBERS_MAX: Final = 256  # that are asked, of all kinds together
REPLY_BYTES_MAX: Final = 4 << 20

CALLS: Final = {"node": "Store/Stats", "engine": "Engine/Status", "conductor": "Conductor/Status"}
"""What a member of each kind is asked: nothing goes along, and a document comes back."""


class _Link(RemoteNode):
    """A connection to a member."""

    service = "/kvstore.v1."
    options = (
        *(each for each in OPTIONS if "receive" not in each[0]),
        ("grpc.max_receive_message_length", REPLY_BYTES_MAX),
    )

    def ask(self, call: str, within_s: float) -> grpc.Future:
        """What that call answers, later."""
        method: Any = self._method(call, "unary_unary", pb.Empty.SerializeToString, _struct)
        asked: grpc.Future = method.future(pb.Empty(), **self._how(within_s))
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
    counts: dict[str, float] = field(default_factory=dict)  # as of its last answer but one, or of the last one

    def open(self) -> None:
        """Raises nothing: why there is no connection is what is shown."""
        if not self.entry.addresses:
            self.error = "only its own machine reaches it"
            return
        try:
            found = endpoint(f"kv://{self.entry.addresses[0]}", GivenCredentials(), os.environ)
            self.link = _Link(found, ASK_S)
        except KVStoreError as error:
            self.error = str(error)


class PoolWatch:
    """A pool's members, from frame to frame. Life: made -> ``frame``, as often as wanted -> ``close``."""

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
        """End all connections."""
        with ExitStack() as ends:
            for member in self._members.values():
                if member.link is not None:
                    ends.callback(member.link.close)
        self._members.clear()

    def frames(self) -> Iterator[dict[str, Any]]:
        """A frame each time one is asked for; with the catalog away, members that are known are asked again.

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


def _told(member: _Member, asked: grpc.Future | None) -> dict[str, Any]:
    """What is shown of a member. Its answer comes, or its deadline passes."""
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
        state = "no answer" if about["address"] else "no address"  # only its own machine reaches it
        return {**about, "state": state, "error": member.error, "heard_ago_s": heard_ago_s}
    elapsed_s = None if member.heard_s is None else now_s - member.heard_s
    rates = _Growth(said, member.counts, elapsed_s)
    shown = {"node": _node, "engine": _engine, "conductor": _conductor}[member.kind](said, rates)
    member.heard_s, member.counts, member.error = now_s, rates.now, ""
    return {**about, "state": "serving", **shown, "heard_ago_s": 0.0, "interval_s": elapsed_s}


class _Growth:
    """What grew since the last answer, per second; None where there was none, or the counter began anew."""

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
    """A number in a document; None where there is none."""
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


def lines(frame: Mapping[str, Any], when: str) -> list[str]:
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
        text += ["", "nobody is there"]
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
