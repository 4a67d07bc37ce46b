"""Admin calls about tenants: whose a root is, pins, and what everybody has."""

from __future__ import annotations

import time
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.model.prefix import root_of
from kvstore.model.replica import KEY_BYTES
from kvstore.service.node import Node
from kvstore.state import events as ev

TEXT_BYTES_MAX = 1024  # of a salt, an adapter, a model
PIN_TTL_S_MAX = 30 * 86_400.0


def calls(node: Node) -> dict[str, Any]:
    """Admin calls by name, see ``service.admin``."""
    return {
        "root": lambda request: _root(node, request),
        "pin": lambda request: _pin(node, request),
        "unpin": lambda request: _unpin(node, request),
        "pins": lambda _: node.pins(),
        "tenants": lambda _: {"tenants": node.tenants()},
    }


def _hex(request: dict[str, Any], field: str) -> bytes:
    value = request.get(field)
    try:
        raw = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        raw = b""
    if len(raw) != KEY_BYTES:
        raise InvalidRequest(field, f"must be {2 * KEY_BYTES} hexadecimal digits, not {value!r}")
    return raw


def _root(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    root, fingerprint = _hex(request, "root"), _hex(request, "fingerprint")
    about: dict[str, str] = {"fingerprint": fingerprint.hex()}
    for field in ("salt", "adapter", "model"):
        value = request.get(field, "")
        if not isinstance(value, str) or len(value.encode(errors="replace")) > TEXT_BYTES_MAX:
            raise InvalidRequest(field, f"must be text of at most {TEXT_BYTES_MAX} bytes")
        about[field] = value
    if root_of(fingerprint, about["salt"], about["adapter"]) != root:
        raise InvalidRequest("root", "is not what fingerprint, salt and adapter make")
    node.handle(ev.NameRoot(time.monotonic_ns(), root, about))
    return {}


def _keys(request: dict[str, Any]) -> list[bytes]:
    keys = request.get("keys")
    if not isinstance(keys, list) or not keys:
        raise InvalidRequest("keys", "must be a list of at least one key")
    return [_hex({"keys": key}, "keys") for key in keys]


def _pin(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    keys, root, ttl_s = _keys(request), _hex(request, "root"), request.get("ttl_s")
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 < ttl_s <= PIN_TTL_S_MAX:
        raise InvalidRequest("ttl_s", f"must be seconds up to {PIN_TTL_S_MAX:g}, not {ttl_s!r}")
    now_ns = time.monotonic_ns()
    event = ev.Pin(now_ns, 0, keys, root, now_ns + int(ttl_s * 1e9), time.time() + ttl_s)
    detail = node.handle(event).detail
    if "refused" in detail:
        raise InvalidRequest("keys", detail["refused"])
    if not detail.get("pages"):
        raise InvalidRequest("keys", "none of these pages is stored from the start of the chain")
    return detail


def _unpin(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    pin = request.get("pin", 0)
    if isinstance(pin, str) and pin.isdecimal() and len(pin) < 20:
        pin = int(pin)
    if isinstance(pin, bool) or not isinstance(pin, int) or pin < 0:
        raise InvalidRequest("pin", f"must be the number of a pin, not {pin!r}")
    keys = [] if pin else _keys(request)
    detail = node.handle(ev.Unpin(time.monotonic_ns(), pin, keys)).detail
    if not detail.get("unpinned"):
        raise InvalidRequest("pin" if pin else "keys", "there is no such pin")
    return detail
