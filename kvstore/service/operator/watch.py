"""Watch: the daemon's log tells what its node refuses or drops, in a line now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from kvstore.service.node.node import Node
from kvstore.service.operator.stats import tenant_rows
from kvstore.serving.logs import event

log = logging.getLogger("kvstore.watch")

LOOK_S = 1.0
SILENT_S = 10.0  # at most one line per kind of refusal in this time


class Watch:
    """Logs what a node refuses or drops, summed over a while: a flood of it is a line now and then.

    Lives with a daemon; one thread calls ``look`` again and again, and at the end ``look(last=True)``.

    Args:
        refused: where gRPC calls are counted that were refused: status code -> (calls, address of the last caller).
    """

    def __init__(self, node: Node, refused: Mapping[str, tuple[int, str]]) -> None:
        self._node = node
        self._refused = refused
        self._due_s = 0.0
        self._told: dict[tuple[str, ...], tuple[int, float]] = {}  # what -> how many, when that was said
        self._news(float("inf"), self._counts())  # what was before is not news

    def look(self, *, last: bool = False) -> None:
        """Log what has come since it was last said, where that is long enough ago, or this is the ``last`` look."""
        now_s = time.monotonic()
        if now_s < self._due_s and not last:
            return
        self._due_s = now_s + LOOK_S
        for what, count in self._news(now_s if not last else float("inf"), self._counts()):
            match what:
                case ("damage", reason):
                    event(log, logging.ERROR, "damage found, the pages were dropped", reason=reason, pages=count)
                case ("quota", tenant, tier):
                    event(log, logging.WARNING, "quota refused", tenant=tenant, tier=tier, pages=count)
                case ("grpc", code):
                    last_from = self._refused[code][1]
                    event(log, logging.WARNING, "gRPC calls refused", code=code, calls=count, last_from=last_from)

    def _news(self, now_s: float, counts: dict[tuple[str, ...], int]) -> list[tuple[tuple[str, ...], int]]:
        news = []
        for what, count in counts.items():
            before, said_s = self._told.get(what, (0, -SILENT_S))
            if count > before and now_s >= said_s + (0 if what[0] == "damage" else SILENT_S):
                news.append((what, count - before))
                self._told[what] = count, min(now_s, time.monotonic())
        for what in self._told.keys() - counts.keys():  # a tenant that the node has forgotten begins anew
            del self._told[what]
        return news

    def _counts(self) -> dict[tuple[str, ...], int]:
        found: dict[tuple[str, ...], int] = {}
        counters, rows = self._node.look(lambda _, state: (dict(state.counters), tenant_rows(state)))
        for name, count in counters.items():
            if name.startswith("damaged_"):
                found["damage", name.removeprefix("damaged_")] = count
        for salt, tier, _, _, refused, _ in rows:
            if refused:
                found["quota", salt, tier] = refused
        for code, (count, _) in dict(self._refused).items():
            found["grpc", code] = count
        return found
