"""Admin calls that explain a lookup: the state of each page of a prompt, and the layouts that clients have used.

For a page that is not stored, the answer says whether a writer has reserved it, or what its last event was. Callers
whose first page is not stored also send its tokens. ``explain`` then looks for them under the roots of other tenants,
adapters and models, because a wrong salt is the most common reason why a whole prompt misses.
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
from kvstore.node.event_log import SLOTS, PageEvent, fit_into_message
from kvstore.node.node import Node
from kvstore.node.operator.named_pages import raw_bytes, raw_keys
from kvstore.node.performer import Performer
from kvstore.shm.folder import read_secret
from kvstore.state.node_state import NodeState
from kvstore.state.tenants import Name

EXPLAIN_PAGES_MAX: Final = 500  # pages in one call; a page takes about 100 bytes of the answer
LOOK_PAGES: Final = 100  # pages examined per hold of the node's mutex
ELSEWHERE_MAX: Final = 20
LAYOUT_BYTES_MAX: Final = 4096  # the largest layout, as JSON, that the node keeps

_DEFAULTS: Final = {field.name: field.default for field in fields(Layout)}


def layout_fields(value: Any, fingerprint: bytes) -> dict[str, Any]:
    """Return the fields of a client's layout that differ from the defaults: the form in which the node keeps it.

    Raises:
        InvalidRequest: ``value`` is not a layout, or its fingerprint is not ``fingerprint``.
    """
    if not isinstance(value, dict) or not set(value) <= set(_DEFAULTS):
        raise InvalidRequest("layout", f"must have only these fields: {', '.join(_DEFAULTS)}")
    try:
        layout = Layout(**value)
    except TypeError as error:
        raise InvalidRequest("layout", str(error)) from None
    if layout.fingerprint != fingerprint:
        raise InvalidRequest("layout", "must have the fingerprint of the request")
    changed = {name: field for name, field in asdict(layout).items() if field != _DEFAULTS[name]}
    if len(json.dumps(changed)) > LAYOUT_BYTES_MAX:
        raise InvalidRequest("layout", f"must be at most {LAYOUT_BYTES_MAX} bytes of JSON")
    return changed


def _all_fields(changed: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return all fields of a layout in the form of ``layout_fields``; None if a version with other fields wrote it."""
    try:
        return asdict(Layout(**changed)) if changed is not None else None
    except (TypeError, InvalidRequest):
        return None


class LookupExplainer:
    """The calls ``explain`` and ``layouts``, for any number of threads."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def layouts(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer {"model": name or absent} with {"layouts": [{"fingerprint", "layout", "tenants", "pages"}],
        "left_off": n}.

        The list has the layouts of all pages stored since the node's memory was created, the one with most pages
        first. ``layout`` is None if no client has sent all fields of it.
        """
        model = request.get("model")
        if model is not None and not isinstance(model, str):
            raise InvalidRequest("model", f"must be text (got {model!r})")
        entries: dict[str, dict[str, Any]] = {}
        tenants: dict[str, set[str]] = {}
        for name, pages in self._node.look(_named_roots).values():
            about = name.about
            fingerprint = str(about.get("fingerprint", ""))
            if fingerprint and model in (None, about.get("model")):  # objects have no fingerprint
                entry = entries.setdefault(fingerprint, {"fingerprint": fingerprint, "layout": None, "pages": 0})
                entry["layout"] = entry["layout"] or _all_fields(about.get("layout"))
                entry["pages"] += pages
                tenants.setdefault(fingerprint, set()).add(str(about["salt"]))
        ordered = sorted(entries.values(), key=lambda entry: -entry["pages"])
        counted = ({**entry, "tenants": len(tenants[entry["fingerprint"]])} for entry in ordered)
        listed = fit_into_message(counted) if ordered else []
        return {"layouts": listed, "left_off": len(ordered) - len(listed)}

    def explain(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer {"keys": [at most 500], "root", "tokens": of the first pages} with {"pages", "elsewhere", "events_s",
        "scanning"}.

        Each entry of ``pages`` has ``tiers``, the tiers that store the page. If they apply, it also has ``leased``,
        ``pinned``, ``identity`` (another page has the same key), ``writing`` (the page is reserved) and ``event`` (the
        last known event of a page that no tier stores). ``elsewhere`` lists other roots that store a page of the same
        first tokens; it needs ``tokens`` (uint32, base64). ``events_s`` is the age of the oldest known event.
        ``scanning`` is true while a scan of NVMe may still find pages.
        """
        keys = raw_keys(request.get("keys"))
        if len(keys) > EXPLAIN_PAGES_MAX:
            raise InvalidRequest("keys", f"must be at most {EXPLAIN_PAGES_MAX} keys (got {len(keys)})")
        root = raw_bytes(request, "root")
        tokens = _tokens(request.get("tokens"))
        now_ns = time.monotonic_ns()
        pages: list[dict[str, Any]] = []
        for start in range(0, len(keys), LOOK_PAGES):
            part = keys[start : start + LOOK_PAGES]
            pages += self._node.look(partial(_page_entries, keys=part, root=root, now_ns=now_ns))
        missing_keys = {key for key, page in zip(keys, pages, strict=True) if page == {"tiers": []}}
        events, history_s = self._last_events(missing_keys) if missing_keys else ({}, 0.0)
        for key, page in zip(keys, pages, strict=True):
            if key in events:
                page["event"] = events[key]
        return {
            "pages": pages,
            "elsewhere": self._elsewhere(tokens, root) if tokens is not None else [],
            "events_s": round(history_s, 3),
            "scanning": self._node.scan.under_way,
        }

    def _last_events(self, keys: set[bytes]) -> tuple[dict[bytes, dict[str, Any]], float]:
        """Return the last event of each page that has one, and the age in seconds of the oldest event in the log."""
        last: dict[bytes, PageEvent] = {}
        events, _, _ = self._node.events.since(0, SLOTS)
        for event in events:
            for key in keys.intersection(event.keys):
                last[key] = event
        now_ns = time.time_ns()
        entries = {
            key: {
                "kind": event.kind,
                "tier": str(event.tier),
                "reason": event.reason,
                "ago_s": round((now_ns - event.time_ns) / 1e9, 3),
            }
            for key, event in last.items()
        }
        return entries, (now_ns - events[0].time_ns) / 1e9 if events else 0.0

    def _elsewhere(self, tokens: Any, root: bytes) -> list[dict[str, Any]]:
        """Return the other named roots that store a page with the first of these tokens."""
        firsts: list[tuple[bytes, bytes, dict[str, Any]]] = []
        secret = self._node.look(lambda performer, _: read_secret(performer.folder, performer.header.incarnation))
        for other, (name, pages) in self._node.look(_named_roots).items():
            about = name.about
            page_tokens = int((about.get("layout") or {}).get("page_tokens", _DEFAULTS["page_tokens"]))
            if secret and other != root and pages and about.get("layout") and len(tokens) >= page_tokens:
                keys = Keys.of(tokens[:page_tokens], page_tokens, other, tag=tag_of(secret, other))
                firsts.append((keys.hashes[0], other, about))
        matches: list[dict[str, Any]] = []
        for start in range(0, len(firsts), LOOK_PAGES):
            matches += self._node.look(partial(_stored_roots, firsts=firsts[start : start + LOOK_PAGES]))
        shown = ("salt", "adapter", "model", "fingerprint")
        entries = [{name: str(about.get(name, "")) for name in shown} for about in matches[:ELSEWHERE_MAX]]
        return fit_into_message(entries, 32 * 1024) if entries else []


def _named_roots(_: Performer, state: NodeState) -> dict[bytes, tuple[Name, int]]:
    """Return, for each named root, its name and the number of its pages."""
    tenants = state.tenants
    return {root: (name, tenants.pages(root)) for root, name in tenants.named.all().items()}


def _stored_roots(
    performer: Performer, _: NodeState, firsts: list[tuple[bytes, bytes, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the descriptions of the roots whose first page some tier stores.

    ``firsts`` has the key of a first page, its root and the root's description."""
    index = performer.index
    return [
        about
        for key, root, about in firsts
        if any(
            address is not None and _identity(performer, address) == key + root
            for address in (index.find(tier, key) for tier in index.tiers)
        )
    ]


def _page_entries(
    performer: Performer, state: NodeState, keys: list[bytes], root: bytes, now_ns: int
) -> list[dict[str, Any]]:
    """Return the entries of ``explain`` for these pages, without events. The caller holds the node's mutex."""
    return [_page_entry(performer, state, key, root, now_ns) for key in keys]


def _page_entry(performer: Performer, state: NodeState, key: bytes, root: bytes, now_ns: int) -> dict[str, Any]:
    page: dict[str, Any] = {"tiers": [str(Tier.HBM)] if state.mounts.root_of(key) == root else []}
    for tier in state.spaces:
        address = performer.index.find(tier, key)
        if address is None:
            continue
        if _identity(performer, address) == key + root:
            page["tiers"].append(str(tier))
            if state.leases.holds(address.extent, address.frame):
                page["leased"] = True
            if state.pins.is_pinned(tier, key):
                page["pinned"] = True
        else:
            page["identity"] = True
    pending = state.writing.pending.first(key) if not page["tiers"] else None
    if pending is not None:
        remaining_s = max(0.0, (pending.until_ns - now_ns) / 1e9)
        sealed = pending.sealed_mask.bit_count()
        page["writing"] = {"shards": pending.shards, "sealed": sealed, "left_s": round(remaining_s, 3)}
    return page


def _identity(performer: Performer, address: Address) -> bytes:
    """Return the key and the root in the record at this address; empty if there is no record."""
    table = performer.tables.get(address.extent)
    if table is None or address.frame >= len(table.rows):
        return b""
    return table.key(address.frame) + table.root(address.frame)


def _tokens(value: Any) -> Any:
    if value is None:
        return None
    try:
        raw = base64.b64decode(value, validate=True) if isinstance(value, str) else b"?"
    except ValueError:  # from binascii, or because of characters beyond ASCII
        raw = b"?"
    if not raw or len(raw) % 4:
        raise InvalidRequest("tokens", "must be uint32 in little-endian order, as base64")
    return np.frombuffer(raw, "<u4")
