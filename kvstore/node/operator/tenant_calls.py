"""Admin calls about tenants: names of roots, pins, and all accounts."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import Any, Final

from kvstore.errors import InvalidRequest
from kvstore.model.objects import OBJECTS_MODEL, object_root
from kvstore.model.prefix import root_of
from kvstore.model.replica import KEY_BYTES
from kvstore.node.event_log import fitted
from kvstore.node.node import Node
from kvstore.node.operator.explain_lookup import layout_said
from kvstore.node.operator.stats import pins_stats, tenants_stats
from kvstore.node.performer import Performer
from kvstore.state import events as ev
from kvstore.state.node_state import NodeState
from kvstore.state.pins import TENANT_KEYS_MAX

TEXT_BYTES_MAX = 1024  # of a salt, an adapter, a model
LOOK_PAGES: Final = 100  # looked at while the node holds still
NONE_STORED: Final = "none of these pages is stored from the start of the chain"
PIN_TTL_S_MAX = 30 * 86_400.0


def calls(node: Node) -> dict[str, Any]:
    """Admin calls by name, see ``node.operator.admin``."""
    return {
        "root": lambda request: _root(node, request),
        "pin": lambda request: _pin(node, request),
        "unpin": lambda request: _unpin(node, request),
        "pins": lambda request: _pins(node, request),
        "tenants": lambda request: _tenants(node, request),
    }


def _hex(request: dict[str, Any], field: str) -> bytes:
    value = request.get(field)
    try:
        raw = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        raw = b""
    if len(raw) != KEY_BYTES:
        raise InvalidRequest(field, f"must be {2 * KEY_BYTES} hexadecimal digits (got {value!r})")
    return raw


def _root(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """Whose a root is; ``objects``: it is that of a tenant's objects, which have no layout. -> whether that is kept."""
    root, objects = _hex(request, "root"), request.get("objects", False)
    if not isinstance(objects, bool):
        raise InvalidRequest("objects", f"must be true or false (got {objects!r})")
    fingerprint = b"" if objects else _hex(request, "fingerprint")
    about: dict[str, Any] = {"fingerprint": fingerprint.hex()}
    for field in ("salt", "adapter", "model"):
        value = request.get(field, "")
        if not isinstance(value, str) or len(value.encode(errors="replace")) > TEXT_BYTES_MAX:
            raise InvalidRequest(field, f"must be text of at most {TEXT_BYTES_MAX} bytes")
        about[field] = value
    if objects:
        about |= {"adapter": "", "model": OBJECTS_MODEL}
    elif request.get("layout") is not None:
        about["layout"] = layout_said(request["layout"], fingerprint)
    if _made(about, objects, fingerprint) != root:
        raise InvalidRequest("root", "is not what fingerprint, salt and adapter make")
    return node.handle(ev.NameRoot(time.monotonic_ns(), root, about)).detail


def _made(about: dict[str, Any], objects: bool, fingerprint: bytes) -> bytes:
    """The root that these make."""
    try:
        return object_root(about["salt"]) if objects else root_of(fingerprint, about["salt"], about["adapter"])
    except UnicodeEncodeError:
        raise InvalidRequest("salt", "and adapter must be valid text") from None


def _keys(request: dict[str, Any]) -> list[bytes]:
    keys = request.get("keys")
    if not isinstance(keys, list) or not keys:
        raise InvalidRequest("keys", "must be a list of at least one key")
    return [_hex({"keys": key}, "keys") for key in keys]


def _pin(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    keys, root, ttl_s = _keys(request), _hex(request, "root"), request.get("ttl_s")
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= PIN_TTL_S_MAX:
        raise InvalidRequest(
            "ttl_s", f"must be seconds, more than zero and at most {PIN_TTL_S_MAX:.0f} (got {ttl_s!r})"
        )
    keys = _stored(node, keys[: TENANT_KEYS_MAX + 1], root)
    if not keys:
        raise InvalidRequest("keys", NONE_STORED)
    asked = bytes.fromhex(request["keys"][-1])
    now_ns = time.monotonic_ns()
    # The number is drawn: numbers in order would tell each tenant how often others pin.
    until_ns, until_s = now_ns + int(ttl_s * 1e9), time.time() + ttl_s
    event = ev.Pin(now_ns, secrets.randbits(32) | 1, keys, root, until_ns, until_s, asked=asked)
    detail = node.handle(event).detail
    if "refused" in detail:
        raise InvalidRequest("keys", detail["refused"])
    if not detail.get("pages"):
        raise InvalidRequest("keys", NONE_STORED)
    return detail


def _stored(node: Node, keys: list[bytes], root: bytes) -> list[bytes]:
    """The longest leading part of ``keys`` of which some tier has each page, of this root and after the one before."""
    for start in range(0, len(keys), LOOK_PAGES):
        part = keys[start : start + LOOK_PAGES]
        before = keys[start - 1] if start else None
        fits = node.look(partial(_linked, keys=part, root=root, before=before))
        if fits < len(part):
            return keys[: start + fits]
    return keys


def _linked(_: Performer, state: NodeState, keys: list[bytes], root: bytes, before: bytes | None) -> int:
    """How many leading ones of these are stored under this root, each after the one before it. The node holds still."""
    for i, key in enumerate(keys):
        for space in state.spaces.values():
            page = space.pages.find(key)
            if page is None or space.pages.records.root(*page[:2]) != root:
                continue
            if before is None or space.pages.records.parent(*page[:2]) == before:
                break
        else:
            return i
        before = key
    return len(keys)


def _unpin(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    pin = request.get("pin", 0)
    if isinstance(pin, str) and pin.isdecimal() and len(pin) < 20:
        pin = int(pin)
    if isinstance(pin, bool) or not isinstance(pin, int) or pin < 0:
        raise InvalidRequest("pin", f"must be the number of a pin (got {pin!r})")
    keys, root = ([], b"") if pin else (_keys(request), _hex(request, "root"))
    detail = node.handle(ev.Unpin(time.monotonic_ns(), pin, keys, root)).detail
    if not detail.get("unpinned"):
        raise InvalidRequest("pin" if pin else "keys", "there is no such pin")
    return detail


def _pins(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """{"limit", "after"}: pins by number, all where no limit is said; ``next`` where there are more."""
    limit = _limit(request)
    after = request.get("after") if request.get("after") is not None else 0
    if not isinstance(after, int) or isinstance(after, bool) or after < 0:
        raise InvalidRequest("after", f"must be a whole number from 0 on (got {after!r})")
    found = node.look(lambda _, state: pins_stats(state))
    if limit is None:
        return found
    left = sorted((pin for pin in found["pins"] if pin["pin"] > after), key=lambda pin: int(pin["pin"]))
    told = fitted(left[:limit])
    return {**found, "pins": told, **({"next": told[-1]["pin"]} if len(told) < len(left) else {})}


def _tenants(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    """{"limit", "after"}: tenants in the order of their salts, as many as fit; ``next`` where there are more."""
    limit, after = _limit(request), request.get("after")
    if after is not None and not isinstance(after, str):
        raise InvalidRequest("after", f"must be the `next` of another answer (got {after!r})")
    found = node.look(lambda _, state: tenants_stats(state))
    left = sorted(salt for salt in found if after is None or salt > after)
    told = dict(fitted((salt, found[salt]) for salt in left[:limit]))
    return {"tenants": told, **({"next": max(told)} if len(told) < len(left) else {})}


def _limit(request: dict[str, Any]) -> int | None:
    limit = request.get("limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise InvalidRequest("limit", f"must be a whole number from 1 on (got {limit!r})")
    return limit
