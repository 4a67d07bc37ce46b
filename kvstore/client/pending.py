"""PendingPut: a put whose last acknowledgements have not been read."""

from __future__ import annotations

from abc import ABC, abstractmethod


class PendingPut(ABC):
    """A put on its way. Made by ``PrefixCache.put_async``; the caller's buffer is free already.

    Ends with ``result``. After a failure some leading pages may be stored, and a later put of the same prompt continues
    where this one stopped. Threads may share it.
    """

    __slots__ = ()

    @abstractmethod
    def result(self) -> int:
        """Pages newly stored, once that is acknowledged. Fewer than were given: see ``PrefixCache.put``.

        May be called again, and gives the same answer or failure.

        Raises:
            QuotaExceeded: nothing was stored, because the tenant has all it may have.
            NodeUnavailable, DeadlineExceeded: the node did not acknowledge in time; some pages may be stored.
        """
