"""Admin: an operator's calls, each by its own RPC."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import grpc
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from kvstore.client.remote.node import RemoteNode
from kvstore.errors import InvalidRequest
from kvstore.pb import store_pb2 as pb

ADMIN_TIMEOUT_S: Final = 60.0
EVENTS_WAIT_S_MIN: Final = 0.25  # a stream has to be opened before it can say that there is nothing

PROMPT: Final = "prompt"  # the argument that names pages: a ``pb.Pages``


class Admin:
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
            "pins": lambda given: self._ask("Pins", _filled(pb.Empty, given)),
            "events": self._events,
        }

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Make one call.

        Raises:
            InvalidRequest: gRPC has no such call, or it does not take that argument.
        """
        made = self._calls.get(name)
        if made is None:
            raise InvalidRequest("call", f"{name!r} is for programs on the node's own machine")
        return made({field: value for field, value in arguments.items() if value is not None})

    def verify(self, timeout_s: float) -> dict[str, Any]:
        """A whole sweep: the node answers when it has ended."""
        return self._ask("Verify", pb.Empty(), timeout_s)

    def _ask(self, name: str, request: Any, timeout_s: float = ADMIN_TIMEOUT_S, again: bool = True) -> dict[str, Any]:
        return document(self._node.call(name, request, Struct, timeout_s, again))

    def _events(self, given: dict[str, Any]) -> dict[str, Any]:
        """What a stream brings within ``wait_s`` and a little; ``limit`` events at most."""
        after, limit, wait_s = given.get("after"), int(given.get("limit", 1000)), float(given.get("wait_s", 0.0))
        request = pb.WatchRequest() if after is None else pb.WatchRequest(after=after)
        timeout_s = max(wait_s, EVENTS_WAIT_S_MIN)
        found: list[dict[str, Any]] = []
        lost, seq, began = 0, after, time.monotonic()
        for event in self._watched(request, timeout_s):
            lost += int(event.pop("lost", 0))
            seq = event.get("seq", seq)
            if "kind" in event:
                found.append(event)
            if len(found) >= limit or (found and time.monotonic() - began >= wait_s):
                break
        return {"events": found, "next": seq, "lost": lost}

    def _watched(self, request: pb.WatchRequest, timeout_s: float) -> Iterator[dict[str, Any]]:
        stream = self._node.receive("Watch", request.SerializeToString(), timeout_s)
        try:
            for message in stream:
                yield document(Struct.FromString(message))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:  # nothing more happened in time
                self._node.refuse(error)
        finally:
            with contextlib.suppress(ValueError):  # closed meanwhile
                stream.cancel()  # type: ignore[attr-defined]


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
