"""Admin calls for tenants: the names of roots, pins, and how much each tenant stores."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any, Final

from kvstore.errors import InvalidRequest
from kvstore.model.objects import OBJECTS_MODEL, object_root
from kvstore.model.prefix import root_of
from kvstore.node.event_log import fit_into_message
from kvstore.node.node import Node
from kvstore.node.operator.explain_lookup import LOOK_PAGES, layout_fields
from kvstore.node.operator.named_pages import raw_bytes, raw_keys
from kvstore.node.operator.stats import pins_stats, tenants_stats
from kvstore.node.performer import Performer
from kvstore.state import events as ev
from kvstore.state.node_state import NodeState
from kvstore.state.pins import TENANT_KEYS_MAX

TEXT_BYTES_MAX = 1024  # size of a salt, an adapter or a model
NONE_STORED: Final = "none of these pages is stored from the start of the chain"
PIN_TTL_S_MAX = 30 * 86_400.0


def calls(node: Node) -> dict[str, Any]:
    """Return the calls by name, for ``node.operator.admin``."""
    return {
        "root": lambda request: _root(node, request),
        "pin": lambda request: _pin(node, request),
        "unpin": lambda request: _unpin(node, request),
        "pins": lambda request: _pins(node, request),
        "tenants": lambda request: _tenants(node, request),
    }


def _root(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """Register the tenant, adapter, model and layout of a root. ``objects`` marks the root of a tenant's objects, which
    have no layout. Answers whether the node keeps the name."""
    root, objects = raw_bytes(request, "root"), request.get("objects", False)
    if not isinstance(objects, bool):
        raise InvalidRequest("objects", f"must be true or false (got {objects!r})")
    fingerprint = b"" if objects else raw_bytes(request, "fingerprint")
    about: dict[str, Any] = {"fingerprint": fingerprint.hex()}
    for field in ("salt", "adapter", "model"):
        value = request.get(field, "")
        if not isinstance(value, str) or len(value.encode(errors="replace")) > TEXT_BYTES_MAX:
            raise InvalidRequest(field, f"must be text of at most {TEXT_BYTES_MAX} bytes")
        about[field] = value
    if objects:
        about |= {"adapter": "", "model": OBJECTS_MODEL}
    elif request.get("layout") is not None:
        about["layout"] = layout_fields(request["layout"], fingerprint)
    if _root_of(about, objects, fingerprint) != root:
        raise InvalidRequest("root", f"must be the root of this fingerprint, salt and adapter (got {root.hex()})")
    return node.handle(ev.NameRoot(time.monotonic_ns(), root, about)).detail


def _root_of(about: dict[str, Any], objects: bool, fingerprint: bytes) -> bytes:
    try:
        return object_root(about["salt"]) if objects else root_of(fingerprint, about["salt"], about["adapter"])
    except UnicodeEncodeError:
        raise InvalidRequest("salt", "must be valid text, as must the adapter") from None


def _pin(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    keys, root, ttl_s = raw_keys(request.get("keys")), raw_bytes(request, "root"), request.get("ttl_s")
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= PIN_TTL_S_MAX:
        raise InvalidRequest(
            "ttl_s", f"must be seconds, more than zero and at most {PIN_TTL_S_MAX:.0f} (got {ttl_s!r})"
        )
    asked = keys[-1]
    keys = _stored_chain(node, keys[: TENANT_KEYS_MAX + 1], root)
    if not keys:
        raise InvalidRequest("keys", NONE_STORED)
    now_ns = time.monotonic_ns()
    until_ns, until_s = now_ns + int(ttl_s * 1e9), time.time() + ttl_s
    # Consecutive numbers would show each tenant how often other tenants pin, so the number is random.
    event = ev.Pin(now_ns, secrets.randbits(32) | 1, keys, root, until_ns, until_s, asked=asked)
    detail = node.handle(event).detail
    if "refused" in detail:
        raise InvalidRequest("keys", detail["refused"])
    if not detail.get("pages"):
        raise InvalidRequest("keys", NONE_STORED)
    return detail


def _stored_chain(node: Node, keys: list[bytes], root: bytes) -> list[bytes]:
    """Return the longest leading part of ``keys`` that is stored as a chain of this root."""
    for start in range(0, len(keys), LOOK_PAGES):
        part = keys[start : start + LOOK_PAGES]
        parent = keys[start - 1] if start else None
        length = node.look(partial(_chain_length, keys=part, root=root, parent=parent))
        if length < len(part):
            return keys[: start + length]
    return keys


def _chain_length(_: Performer, state: NodeState, keys: list[bytes], root: bytes, parent: bytes | None) -> int:
    """Return how many leading keys are stored under this root, each with the preceding key as its parent.

    ``parent`` is the parent of the first key. The caller holds the node's mutex."""
    for i, key in enumerate(keys):
        for space in state.spaces.values():
            page = space.pages.find(key)
            if page is None or space.pages.records.root(*page[:2]) != root:
                continue
            if parent is None or space.pages.records.parent(*page[:2]) == parent:
                break
        else:
            return i
        parent = key
    return len(keys)


def _unpin(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    pin = request.get("pin", 0)
    if isinstance(pin, str) and pin.isdecimal() and len(pin) < 20:
        pin = int(pin)
    if isinstance(pin, bool) or not isinstance(pin, int) or pin < 0:
        raise InvalidRequest("pin", f"must be the number of a pin (got {pin!r})")
    keys, root = ([], b"") if pin else (raw_keys(request.get("keys")), raw_bytes(request, "root"))
    detail = node.handle(ev.Unpin(time.monotonic_ns(), pin, keys, root)).detail
    if not detail.get("unpinned"):
        raise InvalidRequest("pin" if pin else "keys", "there is no such pin")
    return detail


def _pins(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """Answer {"limit", "after"} with pins in the order of their numbers: all of them if there is no limit. The answer
    has ``next`` if more pins follow."""
    limit = _limit(request)
    after = request.get("after") if request.get("after") is not None else 0
    if not isinstance(after, int) or isinstance(after, bool) or after < 0:
        raise InvalidRequest("after", f"must be a whole number, at least 0 (got {after!r})")
    stats = node.look(lambda _, state: pins_stats(state))
    if limit is None:
        return stats
    rest = sorted((pin for pin in stats["pins"] if pin["pin"] > after), key=lambda pin: int(pin["pin"]))
    listed = fit_into_message(rest[:limit])
    return {**stats, "pins": listed, **({"next": listed[-1]["pin"]} if len(listed) < len(rest) else {})}


def _tenants(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """Answer {"limit", "after"} with tenants in the order of their salts, as many as fit a message. The answer has
    ``next`` if more tenants follow."""
    limit, after = _limit(request), request.get("after")
    if after is not None and not isinstance(after, str):
        raise InvalidRequest("after", f"must be the `next` of another answer (got {after!r})")
    stats = node.look(lambda _, state: tenants_stats(state))
    rest = sorted(salt for salt in stats if after is None or salt > after)
    listed = dict(fit_into_message((salt, stats[salt]) for salt in rest[:limit]))
    return {"tenants": listed, **({"next": max(listed)} if len(listed) < len(rest) else {})}


def _limit(request: dict[str, Any]) -> int | None:
    limit = request.get("limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise InvalidRequest("limit", f"must be a whole number, at least 1 (got {limit!r})")
    return limit
