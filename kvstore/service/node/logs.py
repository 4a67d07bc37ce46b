"""Logs of a daemon: text for people, or one JSON object per line for machines; and fields beside a message.

``event(log, logging.ERROR, "device failed", path=..., reason=...)`` reads as

    2026-11-21 12:00:00,123 ERROR kvstore.node device failed path=/dev/nvme0n1 reason="Input/output error"
    {"time": "2026-11-21T12:00:00.123Z", "level": "error", "logger": "kvstore.node", "message": "device failed",
     "node": "default", "path": "/dev/nvme0n1", "reason": "Input/output error"}          (in one line)
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.service.node.stats import tenant_rows

if TYPE_CHECKING:
    from kvstore.service.node.node import Node

log = logging.getLogger("kvstore.watch")

LOOK_S = 1.0
SILENT_S = 10.0  # of refusals of one kind, one line in so long
_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_FIELDS = "kvstore_fields"


class Logging(Protocol):
    """What a daemon's configuration says about its logs."""

    @property
    def name(self) -> str:
        """Of the daemon."""

    @property
    def log_level(self) -> str:
        """debug, info, warning or error."""

    @property
    def log_format(self) -> str:
        """text or json."""


def configure(config: Logging) -> None:
    """Log to stderr as the configuration says. Called once, by a daemon."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(config.name) if config.log_format == "json" else TextFormatter(_TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    root.setLevel(max(level, logging.WARNING))  # what libraries have to tell
    logging.getLogger("kvstore").setLevel(level)
    logging.captureWarnings(True)
    if config.log_format == "json":
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C code writes lines of its own


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log a message with fields."""
    logger.log(level, message, extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    """A line for people; fields behind the message as ``name=value``."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        return " ".join([super().formatMessage(record), *(f"{name}={_word(value)}" for name, value in fields.items())])


def _word(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line. Fields stand beside ``time``, ``level``, ``logger``, ``message`` and ``node``, which
    no field replaces; ``exception`` is a traceback."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``; one line."""
        seconds, fraction = divmod(record.created, 1)
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
        line: dict[str, Any] = {
            "time": f"{at}.{int(fraction * 1000):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "node": self._node,
        }
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({**line, **fields, **line}, default=str)


class Refusals(Protocol):
    """Where gRPC calls are counted that were refused: status code -> (calls, the last caller's address)."""

    refused: dict[str, tuple[int, str]]


class Watch:
    """Logs what a node refuses or drops, summed over a while: a flood of it is a line now and then.

    Lives with a daemon; one thread calls ``look`` again and again, and at the end ``look(last=True)``.
    """

    def __init__(self, node: Node, calls: Refusals | None = None) -> None:
        self._node = node
        self._calls = calls
        self._due_s = 0.0
        self._told: dict[tuple[str, ...], tuple[int, float]] = {}  # what -> how many, when that was said
        self._news(float("inf"), self._counts())  # what was before is no news

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
                    peer = self._calls.refused[code][1] if self._calls is not None else ""
                    event(log, logging.WARNING, "gRPC calls refused", code=code, calls=count, last_from=peer)

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
        for code, (count, _) in dict(self._calls.refused).items() if self._calls is not None else ():
            found["grpc", code] = count
        return found
