"""Counts of HTTP requests since the start, for ``/metrics``."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Final

from kvstore.server.call_counts import Durations
from kvstore.server.metrics import Families, metric_info

PREFIX: Final = "kvstore_conductor"

_about = partial(metric_info, PREFIX)

METRICS: Final = (
    _about("counter", "http_requests", "HTTP requests that ended; 499: the client had gone.", "path", "code"),
    _about("histogram", "http_first_token_seconds", "Time from a request's arrival to the first part of its answer."),
    _about("gauge", "http_requests_here", "HTTP requests under way."),
    _about("gauge", "http_connections", "HTTP connections that are open."),
    _about("counter", "http_sent_bytes", "Bytes of replies over HTTP."),
)
GONE: Final = 499


class DoorTally:
    """Written by the server's event loop, read by any thread. Paths are those that are served, and "other"."""

    def __init__(self) -> None:
        self.ended: Counter[tuple[str, int]] = Counter()
        self.first_token = Durations()
        self.requests_here = 0
        self.connections = 0
        self.sent_bytes = 0

    def add_samples(self, add: Families) -> None:
        """Add a sample of each of ``METRICS``."""
        for (path, code), count in dict(self.ended).items():
            add("http_requests", count, path, str(code))
        add.durations("http_first_token_seconds", self.first_token)
        add("http_requests_here", self.requests_here)
        add("http_connections", self.connections)
        add("http_sent_bytes", self.sent_bytes)
