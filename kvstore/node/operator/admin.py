"""Admin: calls of operators, one JSON document in, one out. The command line and ``Store`` make them.

A call is registered under its name in ``Admin.calls``. Clients of this machine send it with ``Op.ADMIN``, the
gRPC server calls ``Admin.call`` itself. Bad arguments raise InvalidRequest naming them, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.node import event_log
from kvstore.node.kv_events import Dumps
from kvstore.node.node import Node
from kvstore.node.operator import snapshot_check, tenant_calls
from kvstore.node.operator.explain_lookup import Explaining
from kvstore.node.operator.named_pages import NamedPages
from kvstore.node.operator.page_calls import PageAdmin
from kvstore.node.operator.stats import node_stats
from kvstore.node.scrubber import Scrubber

# These look at no more than the node's own tables; any other may take as long as there are pages, or wait.
QUICK = frozenset(("root", "stats", "scrub", "scrub_status", "tenants", "pins", "name_pages"))

Call = Callable[[dict[str, Any]], dict[str, Any]]


class Admin:
    """The table of calls. Lives with its dispatcher; threads may share it.

    Args:
        wake: there are pages to copy between tiers.
    """

    def __init__(self, node: Node, scrubber: Scrubber, wake: Callable[[], None]) -> None:
        self.node = node
        self.wake = wake
        self._named, explaining = NamedPages(), Explaining(node)
        self.calls: dict[str, Call] = {
            "stats": lambda _: {**node_stats(node), "scrubber": scrubber.stats()},
            "evict": PageAdmin(node, wake).evict,
            "pages": PageAdmin(node, wake).pages,
            "verify": lambda _: {"findings": snapshot_check.findings(node)},
            "scrub": lambda _: {"sweep": scrubber.request_sweep()},
            "scrub_status": lambda _: scrubber.stats(),
            **tenant_calls.calls(node),
            "name_pages": self._named.name,
            "explain": explaining.explain,
            "layouts": explaining.layouts,
            "events": lambda request: event_log.answer(node.events, request),
            "kv_dump": Dumps(node).answer,
        }

    def may_take_long(self, request: dict[str, Any]) -> bool:
        """Whether a thread that serves other callers should leave this call to another thread."""
        return str(request.get("call")) not in QUICK

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out ``request["call"]`` with the other entries as its arguments.

        Raises:
            InvalidRequest: there is no such call, or an argument makes no sense.
        """
        found = self.calls.get(str(request.get("call")))
        if found is None:
            raise InvalidRequest("call", f"{request.get('call')!r} is not one of {', '.join(self.calls)}")
        if "prompt" in request and found != self._named.name:
            request = self._named.filled(request)
        return found(request)
