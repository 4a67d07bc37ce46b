"""HttpPatience: how long clients of the HTTP server may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

HEADERS_S: Final = 20.0  # for a request to begin on a new connection, and for its headers to come
KEEPALIVE_S: Final = 75.0  # longer than load balancers keep a connection, usually 60 s: they must not meet closed ones
BODY_S: Final = 30.0
STALL_S: Final = 20.0


@dataclass(frozen=True)
class HttpPatience:
    """How long a client may take, in seconds. ``keepalive_s``: between two requests on one connection."""

    headers_s: float = HEADERS_S
    keepalive_s: float = KEEPALIVE_S
    body_s: float = BODY_S
    stall_s: float = STALL_S


PATIENCE: Final = HttpPatience()
