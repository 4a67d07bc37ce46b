"""The operators' calls: each takes one JSON document and returns one. The command line and ``Store`` make them.

``Admin.calls`` has every call under its name. Clients on this machine send it with ``Op.ADMIN``; the gRPC server calls
``Admin.call`` directly. A bad argument raises InvalidRequest, which names it, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.node import event_log
from kvstore.node.kv_events import Dumps
from kvstore.node.node import Node
from kvstore.node.operator import snapshot_check, tenant_calls
from kvstore.node.operator.explain_lookup import LookupExplainer
from kvstore.node.operator.named_pages import NamedPages
from kvstore.node.operator.page_calls import PageAdmin
from kvstore.node.operator.stats import node_stats
from kvstore.node.scrubber import Scrubber

# These calls read only small tables. Other calls may wait, or take time in proportion to the number of pages.
QUICK = frozenset(
    ("root", "stats", "scrub", "scrub_status", "tenants", "pins", "name_pages", "drain_status"),
)

Call = Callable[[dict[str, Any]], dict[str, Any]]


def _needs_pool(_: dict[str, Any]) -> dict[str, Any]:
    """Refuse a call that only a node of a pool carries out. Its daemon replaces these entries."""
    raise InvalidRequest("node", "must be in a pool (got a node without a catalog)")


class Admin:
    """The table of calls, for any number of threads.

    Args:
        wake: called when there are pages to copy between tiers.
    """

    def __init__(self, node: Node, scrubber: Scrubber, wake: Callable[[], None]) -> None:
        self.node = node
        self.wake = wake
        self._named_pages, explainer, pages = NamedPages(), LookupExplainer(node), PageAdmin(node, wake)
        self.calls: dict[str, Call] = {
            "stats": lambda _: {**node_stats(node), "scrubber": scrubber.stats()},
            "evict": pages.evict,
            "pages": pages.pages,
            "verify": lambda _: {"findings": snapshot_check.findings(node)},
            "scrub": lambda _: {"sweep": scrubber.request_sweep()},
            "scrub_status": lambda _: scrubber.stats(),
            **tenant_calls.calls(node),
            "name_pages": self._named_pages.name,
            "explain": explainer.explain,
            "layouts": explainer.layouts,
            "events": lambda request: event_log.answer(node.events, request),
            "kv_dump": Dumps(node).answer,
            "drain": _needs_pool,
            "drain_status": _needs_pool,
        }

    def may_take_long(self, request: dict[str, Any]) -> bool:
        """Return whether a thread that serves other callers should give this call to another thread."""
        return str(request.get("call")) not in QUICK

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out the call named ``request["call"]``. The other entries are its arguments.

        Raises:
            InvalidRequest: there is no such call, or an argument is not valid.
        """
        call = self.calls.get(str(request.get("call")))
        if call is None:
            raise InvalidRequest("call", f"must be one of {', '.join(self.calls)} (got {request.get('call')!r})")
        if "prompt" in request and call != self._named_pages.name:
            request = self._named_pages.expand(request)
        return call(request)
