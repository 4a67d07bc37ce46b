"""The operators' calls over gRPC, each through its own RPC if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from google.protobuf.struct_pb2 import ListValue, Struct, Value

from kvstore.client.remote.node import RemoteNode
from kvstore.errors import InvalidRequest
from kvstore.pb import store_pb2 as pb

ADMIN_TIMEOUT_S: Final = 60.0
EVENTS_WAIT_S_MAX: Final = 1.0  # local nodes have the same limit
EVENTS_PAUSE_S: Final = 0.05

REPEATABLE: Final = (
    "pins",
    "explain",
    "layouts",
    "pages",
    "drain_status",
)  # calls that are repeated after the connection was lost
PROMPT: Final = "prompt"  # the argument that names pages: a ``pb.Pages``


class RemoteAdmin:
    """The admin calls of a remote store: arguments become a request, and the ``Struct`` of the reply becomes a dict.

    A ``Struct`` has only floats. Whole numbers are converted to int; above 2**53 they are not exact.
    """

    def __init__(self, node: RemoteNode) -> None:
        self._node = node
        self._calls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "stats": lambda arguments: self._ask("Stats", _request(pb.Empty, arguments)),
            "verify": lambda arguments: self._ask("Verify", _request(pb.Empty, arguments)),
            "pages": lambda arguments: self._ask("Pages", _request(pb.PagesRequest, arguments)),
            "evict": lambda arguments: self._ask("Evict", _request(pb.EvictRequest, arguments), again=False),
            "pin": lambda arguments: self._ask("Pin", _request(pb.PinRequest, arguments)),
            "unpin": lambda arguments: self._ask("Unpin", _request(pb.UnpinRequest, _with_text(arguments, "pin"))),
            "events": self._events,
        }

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make one call, through its own RPC or through Admin, which accepts all calls.

        Raises:
            InvalidRequest: there is no such call, or it does not take an argument.
        """
        present = {field: value for field, value in arguments.items() if value is not None}
        by_keys = "keys" in present or isinstance(present.get(PROMPT), str)  # the calls' own RPCs have no such fields
        rpc = self._calls.get(name) if not by_keys else None
        return rpc(present) if rpc is not None else self._generic(name, present)

    def verify(self, timeout_s: float) -> dict[str, Any]:
        """Run a whole sweep. The node answers when the sweep has ended."""
        return self._ask("Verify", pb.Empty(), timeout_s)

    def _ask(self, name: str, request: Any, timeout_s: float = ADMIN_TIMEOUT_S, again: bool = True) -> dict[str, Any]:
        return document(self._node.call(name, request, Struct, timeout_s, again))

    def _generic(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        request = Struct()
        try:
            request.update({"call": name, **arguments})
        except (TypeError, ValueError):
            raise InvalidRequest("call", f"the arguments of {name!r} cannot be encoded in JSON") from None
        return self._ask("Admin", request, again=name in REPEATABLE)

    def _events(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Poll for ``wait_s``, because a waiting call would occupy one of the node's few threads."""
        wait_s = arguments.pop("wait_s", 0.0)
        if not isinstance(wait_s, int | float) or not 0 <= wait_s <= EVENTS_WAIT_S_MAX:
            raise InvalidRequest("wait_s", f"must be from 0 to {EVENTS_WAIT_S_MAX:g} (got {wait_s!r})")
        deadline = time.monotonic() + wait_s
        while True:
            answer = self._generic("events", arguments)
            remaining_s = deadline - time.monotonic()
            if answer["events"] or answer["lost"] or remaining_s <= 0:
                return answer
            arguments["after"] = answer["next"]
            time.sleep(min(EVENTS_PAUSE_S, remaining_s))


def document(struct: Struct) -> dict[str, Any]:
    """Convert a ``Struct`` to a dict, with int for whole numbers."""
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


def _request(kind: type[Any], arguments: Mapping[str, Any]) -> Any:
    """Make a request. Raises InvalidRequest for an argument without a field, or of the wrong type."""
    for field in arguments:
        if field not in kind.DESCRIPTOR.fields_by_name:
            raise InvalidRequest(field, "is not supported over gRPC")
    request = kind()
    for field, value in arguments.items():
        try:
            if field == PROMPT:
                request.prompt.CopyFrom(value)
            else:
                setattr(request, field, value)
        except (TypeError, ValueError):
            raise InvalidRequest(field, f"has the wrong type or is too large (got {value!r})") from None
    return request


def _with_text(arguments: dict[str, Any], field: str) -> dict[str, Any]:
    return arguments | {field: str(arguments[field])} if field in arguments else arguments
