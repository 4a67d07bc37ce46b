"""Logs of a daemon: text for people, or one JSON object per line for machines; and fields in addition to a message.

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
from typing import Any

from kvstore.config.daemon import DaemonConfig

_TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_FIELDS = "kvstore_fields"


def configure(config: DaemonConfig) -> None:
    """Log to stderr as the configuration says. Called once, by a daemon."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(config.name) if config.log_format == "json" else TextFormatter(_TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    root.setLevel(max(level, logging.WARNING))  # for libraries
    logging.getLogger("kvstore").setLevel(level)
    logging.captureWarnings(True)
    if config.log_format == "json":
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's C code writes lines of its own


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Log a message with fields."""
    logger.log(level, message, extra={_FIELDS: fields})


class TextFormatter(logging.Formatter):
    """A line for people. Fields follow the message as ``name=value``."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        fields: dict[str, Any] = getattr(record, _FIELDS, {})
        return " ".join([super().formatMessage(record), *(f"{name}={_word(value)}" for name, value in fields.items())])


def _word(value: Any) -> str:
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line. Fields are added to ``time``, ``level``, ``logger``, ``message`` and ``node``, and
    cannot replace these. ``exception`` is a traceback."""

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
