"""Admin calls that explain a lookup: what the node knows of each page of a prompt, and which layouts it has met.

For a page that is not stored the answer has what is still known: that it is being written, or its last event in the
event log. Where a prompt's first page is nowhere, the same tokens are looked for under the roots of other tenants,
adapters and models: a forgotten salt is the most common reason for a prompt that misses as a whole.
"""

from __future__ import annotations

import base64
import json
import time
from dataclasses import asdict, fields
from functools import partial
from typing import Any, Final

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, tag_of
from kvstore.model.replica import Address, Tier
from kvstore.node.event_log import SLOTS, PageEvent, fitted
from kvstore.node.node import Node
from kvstore.node.operator.named_pages import raw_keys, raw_root
from kvstore.node.performer import Performer
from kvstore.shm.folder import read_secret
from kvstore.state.node_state import NodeState
from kvstore.state.tenants import Name

EXPLAIN_PAGES_MAX: Final = 500  # of one call: about 100 bytes each in its answer
LOOK_PAGES: Final = 100  # looked at while the node holds still
ELSEWHERE_MAX: Final = 20
LAYOUT_BYTES_MAX: Final = 4096  # of a layout as JSON, for it to be remembered

_DEFAULTS: Final = {field.name: field.default for field in fields(Layout)}


def layout_said(given: Any, fingerprint: bytes) -> dict[str, Any]:
    """What to remember of a layout that a client sent: the fields that are not as by default.

    Raises InvalidRequest where it is not a layout, or not the one of that fingerprint."""
    if not isinstance(given, dict) or not set(given) <= set(_DEFAULTS):
        raise InvalidRequest("layout", f"must have fields of a layout: {', '.join(_DEFAULTS)}")
    try:
        layout = Layout(**given)
    except TypeError as error:
        raise InvalidRequest("layout", str(error)) from None
    if layout.fingerprint != fingerprint:
        raise InvalidRequest("layout", "is not that of the fingerprint")
    said = {name: value for name, value in asdict(layout).items() if value != _DEFAULTS[name]}
    if len(json.dumps(said)) > LAYOUT_BYTES_MAX:
        raise InvalidRequest("layout", f"takes more than {LAYOUT_BYTES_MAX} bytes")
    return said


def _whole(said: dict[str, Any] | None) -> dict[str, Any] | None:
    """All fields of a layout of which that was said; None of one that another version wrote down."""
    try:
        return asdict(Layout(**said)) if said is not None else None
    except (TypeError, InvalidRequest):
        return None


class Explaining:
    """Lives with ``Admin``; threads may share it."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def layouts(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"model": name or absent} -> {"layouts": [{"fingerprint", "layout", "tenants", "pages"}], "left_off": n}.

        Layouts that clients put pages in since the node's memory was made, those of most pages first; of one that
        which no client has told the whole, ``layout`` is None.
        """
        model = request.get("model")
        if model is not None and not isinstance(model, str):
            raise InvalidRequest("model", f"must be text (got {model!r})")
        named = self._node.look(_named_roots)
        found: dict[str, dict[str, Any]] = {}
        tenants: dict[str, set[str]] = {}
        for name, pages in named.values():
            about = name.about
            fingerprint = str(about.get("fingerprint", ""))
            if fingerprint and model in (None, about.get("model")):  # objects have none
                entry = found.setdefault(fingerprint, {"fingerprint": fingerprint, "layout": None, "pages": 0})
                entry["layout"] = entry["layout"] or _whole(about.get("layout"))
                entry["pages"] += pages
                tenants.setdefault(fingerprint, set()).add(str(about["salt"]))
        ordered = sorted(found.values(), key=lambda entry: -entry["pages"])
        told = fitted({**entry, "tenants": len(tenants[entry["fingerprint"]])} for entry in ordered) if ordered else []
        return {"layouts": told, "left_off": len(ordered) - len(told)}

    def explain(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"keys": [at most 500], "root", "tokens": of the first pages} -> {"pages", "elsewhere", "events_s",
        "scanning"}.

        For each page: ``tiers`` that have it, ``leased`` and ``pinned`` where it is, ``identity`` where another page
        has its key; ``writing`` where it is reserved; ``event``, the last one known of a page that no tier has.
        ``elsewhere``: other roots under which a page of the same first tokens is stored, where ``tokens`` (uint32,
        base64) are given. ``events_s``: how far back events are known. ``scanning``: NVMe is not all known yet.
        """
        keys = raw_keys(request.get("keys"))
        if len(keys) > EXPLAIN_PAGES_MAX:
            raise InvalidRequest("keys", f"{len(keys)} pages, one call explains {EXPLAIN_PAGES_MAX} at most")
        root = raw_root(request.get("root"))
        tokens = _tokens(request.get("tokens"))
        now_ns = time.monotonic_ns()
        pages: list[dict[str, Any]] = []
        for start in range(0, len(keys), LOOK_PAGES):
            part = keys[start : start + LOOK_PAGES]
            pages += self._node.look(partial(_facts, keys=part, root=root, now_ns=now_ns))
        missing = {key for key, page in zip(keys, pages, strict=True) if page == {"tiers": []}}
        events, known_s = self._events(missing) if missing else ({}, 0.0)
        for key, page in zip(keys, pages, strict=True):
            if key in events:
                page["event"] = events[key]
        return {
            "pages": pages,
            "elsewhere": self._elsewhere(tokens, root) if tokens is not None else [],
            "events_s": round(known_s, 3),
            "scanning": self._node.scan.under_way,
        }

    def _events(self, keys: set[bytes]) -> tuple[dict[bytes, dict[str, Any]], float]:
        """The last event of each of these pages, where there is one, and how long ago the oldest event known was."""
        found: dict[bytes, PageEvent] = {}
        events, _, _ = self._node.events.since(0, SLOTS)
        for event in events:
            for key in keys.intersection(event.keys):
                found[key] = event
        now_ns = time.time_ns()
        told = {
            key: {
                "kind": event.kind,
                "tier": str(event.tier),
                "reason": event.reason,
                "ago_s": round((now_ns - event.time_ns) / 1e9, 3),
            }
            for key, event in found.items()
        }
        return told, (now_ns - events[0].time_ns) / 1e9 if events else 0.0

    def _elsewhere(self, tokens: Any, root: bytes) -> list[dict[str, Any]]:
        """Other roots that the node knows under which a first page of these tokens is stored."""
        firsts: list[tuple[bytes, bytes, dict[str, Any]]] = []
        secret = self._node.look(lambda performer, _: read_secret(performer.folder, performer.header.incarnation))
        for other, (name, pages) in self._node.look(_named_roots).items():
            about = name.about
            page_tokens = int((about.get("layout") or {}).get("page_tokens", _DEFAULTS["page_tokens"]))
            if secret and other != root and pages and about.get("layout") and len(tokens) >= page_tokens:
                keys = Keys.of(tokens[:page_tokens], page_tokens, other, tag=tag_of(secret, other))
                firsts.append((keys.hashes[0], other, about))
        found: list[dict[str, Any]] = []
        for start in range(0, len(firsts), LOOK_PAGES):
            found += self._node.look(partial(_stored, firsts=firsts[start : start + LOOK_PAGES]))
        fields_told = ("salt", "adapter", "model", "fingerprint")
        told = [{name: str(about.get(name, "")) for name in fields_told} for about in found[:ELSEWHERE_MAX]]
        return fitted(told, 32 * 1024) if told else []


def _named_roots(_: Performer, state: NodeState) -> dict[bytes, tuple[Name, int]]:
    """Root -> what was said of it, and how many pages it has."""
    tenants = state.tenants
    return {root: (name, tenants.pages(root)) for root, name in tenants.named.all().items()}


def _stored(
    performer: Performer, _: NodeState, firsts: list[tuple[bytes, bytes, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What was said of those roots whose page some tier has."""
    index = performer.index
    return [
        about
        for key, root, about in firsts
        if any(
            address is not None and _identity(performer, address) == key + root
            for address in (index.find(tier, key) for tier in index.tiers)
        )
    ]


def _facts(performer: Performer, state: NodeState, keys: list[bytes], root: bytes, now_ns: int) -> list[dict[str, Any]]:
    """What ``explain`` tells of these pages but for events. The node holds still."""
    return [_fact(performer, state, key, root, now_ns) for key in keys]


def _fact(performer: Performer, state: NodeState, key: bytes, root: bytes, now_ns: int) -> dict[str, Any]:
    page: dict[str, Any] = {"tiers": [str(Tier.HBM)] if state.mounts.root_of(key) == root else []}
    for tier in state.spaces:
        address = performer.index.find(tier, key)
        if address is None:
            continue
        if _identity(performer, address) == key + root:
            page["tiers"].append(str(tier))
            if state.leases.holds(address.extent, address.frame):
                page["leased"] = True
            if state.pins.keeps(tier, key):
                page["pinned"] = True
        else:
            page["identity"] = True
    pending = state.writing.pending.named(key) if not page["tiers"] else None
    if pending is not None:
        left_s = max(0.0, (pending.until_ns - now_ns) / 1e9)
        sealed = pending.sealed_mask.bit_count()
        page["writing"] = {"shards": pending.shards, "sealed": sealed, "left_s": round(left_s, 3)}
    return page


def _identity(performer: Performer, address: Address) -> bytes:
    """Key and root as the record says; nothing where there is none."""
    table = performer.tables.get(address.extent)
    if table is None or address.frame >= len(table.rows):
        return b""
    return table.key(address.frame) + table.root(address.frame)


def _tokens(value: Any) -> Any:
    if value is None:
        return None
    try:
        raw = base64.b64decode(value, validate=True) if isinstance(value, str) else b"?"
    except ValueError:  # binascii's, and of text beyond ASCII
        raw = b"?"
    if not raw or len(raw) % 4:
        raise InvalidRequest("tokens", "must be uint32 in little-endian order, in base64")
    return np.frombuffer(raw, "<u4")
