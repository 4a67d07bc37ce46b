"""ClientSession: what a node knows of a client process."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.model.replica import Address


@dataclass(slots=True)
class ClientSession:
    """A client process: what it was granted ahead, and whether its connection is up.

    ``tail``: the last page that it published, and under which number.
    """

    granted: set[Address] = field(default_factory=set)
    connected: bool = True
    tail: tuple[int, bytes] = 0, b""
