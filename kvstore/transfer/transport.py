"""Transport: a way in which pages come from another node. One class each; a process has a table of them.

What a node offers stands in the catalog by the names of that table, so that a transport more is a class and a row
(``client.local.transports``). Which one a pull takes is decided by ``plan``, and done by ``mover``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvstore.errors import Unavailable
from kvstore.transfer.links import PeerLinks
from kvstore.transfer.peers import PoolNode
from kvstore.transfer.pulling import Places, Pulled, pull
from kvstore.transfer.reading import ReadRequest


class LateBytes(Unavailable):
    """Pages did not come in time, and their bytes may still land where they were to go: that memory may not be used
    again."""


class HeldPlaces(Protocol):
    """Holds the places: frames that no other writer gets, even where bytes land late."""

    def leave(self) -> Callable[[], None]:
        """Bytes may still land there. The frames stay held until what this returns was called, or this process and the
        reservation have ended."""
        ...


class Transport(Protocol):
    """One for a process; its threads share it. Life: made (nothing is opened) -> ``read``, at any time -> ``close``."""

    def read(
        self,
        peer: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        held: HeldPlaces | None = None,
    ) -> Pulled:
        """Bring the pages of one READ from a node to their places. The leading ones that count are verified, and were
        unchanged at their source when they had been sent.

        Args:
            silence_s: for how long nothing may come, at the beginning and later.
            held: who holds the places; None: nothing may be written there once this has returned.

        Raises:
            LateBytes: only where ``held`` was told to leave the places.
            KVStoreError: it brought nothing that counts. The places may hold anything, and keep it.
        """
        ...

    def close(self) -> None:
        """End its connections."""
        ...


class TransportKind(NamedTuple):
    """A row of the table.

    Attributes:
        make: the transport, for a process that reaches data servers by these links.
        missing: why this machine has it not; "" where it has.
        guarded: whether pages travel as a data connection lets them: encrypted where it is, to whom it answers. One
            that is not has to be named in the settings of a node.
        bytes_per_s: what it is taken for until it was measured; 0: it has to be measured first. See ``TransportPlan``.
    """

    make: Callable[[PeerLinks], Transport]
    missing: Callable[[], str]
    guarded: bool = True
    bytes_per_s: float = 0.0


class TcpTransport:
    """See ``Transport``: a data connection, plain or encrypted. Every node has it."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links

    def read(
        self,
        peer: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        held: HeldPlaces | None = None,
    ) -> Pulled:
        """See ``Transport``. A connection that fails is closed before the error leaves: nothing can arrive later."""
        return self._links.call(
            peer, deadline_s, lambda connection: pull(connection, request, places, deadline_s), silence_s
        )

    def close(self) -> None:
        """See ``Transport``. The links are others' as well, who close them."""
