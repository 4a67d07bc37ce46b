"""Logs of a daemon: text for people, or one JSON object per line for machines; and fields beside a message.

``event(log, logging.WARNING, "device failed", path=..., reason=...)`` reads as

    2026-11-21 12:00:00,123 kvstore.node device failed path=/dev/nvme0n1 reason="Input/output error"
    {"time": "2026-11-21T12:00:00.123Z", "level": "warning", "logger": "kvstore.node", "message": "device failed",
     "node": "default", "path": "/dev/nvme0n1", "reason": "Input/output error"}          (in one line)
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvstore.config import NodeConfig

if TYPE_CHECKING:
    from kvstore.service.node import Node

log = logging.getLogger("kvstore.watch")

QUOTA_LOOK_S, DAMAGE_LOOK_S = 10.0, 1.0  # of what happens again and again, one line in so long
_TEXT = "%(asctime)s %(name)s %(message)s"
_FIELDS = "kvstore_fields"


def configure(config: NodeConfig) -> None:
    """Log to stderr as the configuration says. Called once, by a daemon."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(config.name) if config.log_format == "json" else TextFormatter(_TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log a message with fields."""
    logger.log(level, message, extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    """A line for people; fields behind the message as ``name=value``."""

    def formatMessage(self, record: logging.LogRecord) -> str:
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
        return json.dumps({**fields, **line}, default=str)


class Watch:
    """Logs what a node refuses or drops, summed over a while, so that a flood of it is a line now and then.

    Lives with a daemon; one thread calls ``look`` again and again.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._damaged = self._damage()
        self._refused = self._refusals()
        self._damage_due_s = self._quota_due_s = 0.0

    def look(self) -> None:
        """Log what has come since the last time, where that is long enough ago."""
        now_s = time.monotonic()
        if now_s >= self._damage_due_s:
            self._damage_due_s = now_s + DAMAGE_LOOK_S
            before, self._damaged = self._damaged, self._damage()
            for reason, pages in (self._damaged - before).items():
                event(log, logging.ERROR, "damage found, the pages were dropped", reason=reason, pages=pages)
        if now_s >= self._quota_due_s:
            self._quota_due_s = now_s + QUOTA_LOOK_S
            refused, self._refused = self._refused, self._refusals()
            for (tenant, tier), pages in (self._refused - refused).items():
                event(log, logging.WARNING, "quota refused", tenant=tenant, tier=tier, pages=pages)

    def _damage(self) -> Counter[str]:
        found = self._node.look(lambda performer, state: dict(state.counters)).items()
        return Counter({name.removeprefix("damaged_"): n for name, n in found if name.startswith("damaged_")})

    def _refusals(self) -> Counter[tuple[str, str]]:
        tenants = self._node.tenants().items()
        return Counter({(salt, tier): n for salt, tiers in tenants for tier, n in _refused(tiers)})


def _refused(tiers: dict[str, Any]) -> list[tuple[str, int]]:
    return [(tier, about["refused"]) for tier, about in tiers.items() if isinstance(about, dict)]
