"""Admin: an operator's calls, by their own RPCs where they have one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.struct_pb2 import ListValue, Struct, Value

from kvstore.client.remote.node import RemoteNode
from kvstore.errors import InvalidRequest
from kvstore.pb import store_pb2 as pb

ADMIN_TIMEOUT_S: Final = 60.0
EVENTS_WAIT_S_MAX: Final = 1.0  # as of a node of this machine
EVENTS_PAUSE_S: Final = 0.05

ASKED_AGAIN: Final = ("pins", "explain", "layouts", "pages")  # where the connection was lost meanwhile
PROMPT: Final = "prompt"  # the argument that names pages: a ``pb.Pages``


class RemoteAdmin:
    """What a remote store's ``_admin`` does: arguments into a request, a ``Struct`` into a dict.

    Whole numbers are int again, which they are not in a ``Struct``; above 2**53 they are not exact.
    """

    def __init__(self, node: RemoteNode) -> None:
        self._node = node
        self._calls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "stats": lambda given: self._ask("Stats", _filled(pb.Empty, given)),
            "verify": lambda given: self._ask("Verify", _filled(pb.Empty, given)),
            "pages": lambda given: self._ask("Pages", _filled(pb.PagesRequest, given)),
            "evict": lambda given: self._ask("Evict", _filled(pb.EvictRequest, given), again=False),
            "pin": lambda given: self._ask("Pin", _filled(pb.PinRequest, given)),
            "unpin": lambda given: self._ask("Unpin", _filled(pb.UnpinRequest, _with_text(given, "pin"))),
            "events": self._events,
        }

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make one call: by an RPC of its own, or by Admin, which carries any.

        Raises:
            InvalidRequest: there is no such call, or it does not take that argument.
        """
        given = {field: value for field, value in arguments.items() if value is not None}
        by_keys = "keys" in given or isinstance(given.get(PROMPT), str)  # which RPCs of their own have no field for
        made = self._calls.get(name) if not by_keys else None
        return made(given) if made is not None else self._generic(name, given)

    def verify(self, timeout_s: float) -> dict[str, Any]:
        """A whole sweep: the node answers when it has ended."""
        return self._ask("Verify", pb.Empty(), timeout_s)

    def _ask(self, name: str, request: Any, timeout_s: float = ADMIN_TIMEOUT_S, again: bool = True) -> dict[str, Any]:
        return document(self._node.call(name, request, Struct, timeout_s, again))

    def _generic(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        request = Struct()
        try:
            request.update({"call": name, **given})
        except (TypeError, ValueError):
            raise InvalidRequest("call", f"the arguments of {name!r} cannot be said in JSON") from None
        return self._ask("Admin", request, again=name in ASKED_AGAIN)

    def _events(self, given: dict[str, Any]) -> dict[str, Any]:
        """Asked again and again for ``wait_s``: a call that waits would hold one of the node's few threads."""
        wait_s = given.pop("wait_s", 0.0)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= EVENTS_WAIT_S_MAX:
            raise InvalidRequest("wait_s", f"must be from 0 to {EVENTS_WAIT_S_MAX:g}, not {wait_s!r}")
        deadline = time.monotonic() + wait_s
        while True:
            found = self._generic("events", given)
            left_s = deadline - time.monotonic()
            if found["events"] or found["lost"] or left_s <= 0:
                return found
            given["after"] = found["next"]
            time.sleep(min(EVENTS_PAUSE_S, left_s))


def document(struct: Struct) -> dict[str, Any]:
    """A ``Struct`` as a dict; numbers without a fraction as int."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        return int(number) if number.is_integer() else number
    if kind == "struct_value":
        return document(value.struct_value)
    if kind == "list_value":
        items: ListValue = value.list_value
        return [_plain(item) for item in items.values]
    return getattr(value, kind) if kind not in (None, "null_value") else None


def _filled(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """A request of these arguments. Raises InvalidRequest for one that it has no field for, or not of that type."""
    for field in given:
        if field not in kind.DESCRIPTOR.fields_by_name:
            raise InvalidRequest(field, "cannot be said over gRPC")
    request = kind()
    for field, value in given.items():
        try:
            if field == PROMPT:
                request.prompt.CopyFrom(value)
            else:
                setattr(request, field, value)
        except (TypeError, ValueError):
            raise InvalidRequest(field, f"{value!r} is of the wrong type, or too large") from None
    return request


def _with_text(given: dict[str, Any], field: str) -> dict[str, Any]:
    return given | {field: str(given[field])} if field in given else given
