"""Match: what a lookup, a get or a lease found.

Lease: pages kept where they are until a deadline, and views of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType, TracebackType
from typing import Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import check_seconds
from kvstore.errors import InvalidRequest, LeaseBroken
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import Tier

ABSENT, GENERATION, IDENTITY = "absent", "generation", "identity"
CHECKSUM, EXTENT, IO = "checksum", "extent", "io"
ELSEWHERE: Final = (ABSENT, GENERATION, EXTENT)  # what a page may say that is in another tier (now)

NONE_BELOW: Final[Mapping[Tier, int]] = MappingProxyType({})
HERE_ALONE: Final[Mapping[str, int]] = MappingProxyType({})


class Match:
    """How much of a prompt was found. A value: it does not change.

    Attributes:
        tokens: prompt tokens covered, a multiple of the layout's ``page_tokens``.
        pages: pages covered, from the first one on.
        reason: why no more pages: "" where all asked for were found, else "absent", "generation" (it changed while it
            was read), "identity" (another page has that key), "checksum", "extent" (its frames are gone), or "io" (the
            device it is on cannot be read, or did not answer in time).
        data: uint8 ``[pages, page_bytes]`` where ``get`` was given no buffer, else None.
        nodes: pages by the other node of the pool that they were found on, or came from; those of the node that was
            asked are not among them.
    """

    __slots__ = ("tokens", "pages", "reason", "data", "nodes", "_below")

    def __init__(
        self,
        tokens: int,
        pages: int,
        reason: str,
        data: npt.NDArray[np.uint8] | None = None,
        below: Mapping[Tier, int] = NONE_BELOW,
        nodes: Mapping[str, int] = HERE_ALONE,
    ) -> None:
        self.tokens: Final = tokens
        self.pages: Final = pages
        self.reason: Final = reason
        self.data: Final = data
        self.nodes: Final = nodes
        self._below: Final = below

    @property
    def tiers(self) -> dict[Tier, int]:
        """Pages by the tier they were found in; of a page that is in several the fastest counts."""
        found = {Tier.DRAM: self.pages - sum(self._below.values()), **self._below}
        return {tier: pages for tier, pages in found.items() if pages}

    def __bool__(self) -> bool:
        return self.pages > 0

    def __repr__(self) -> str:
        return f"Match(tokens={self.tokens}, pages={self.pages}, reason={self.reason!r})"


class Lease(ABC):
    """Views of the longest stored prefix: ``with cache.lease(tokens) as lease: use(lease.pages[0])``.

    Life: made -> entered (looked up, leased, proven) -> left, which releases it. One more end: its deadline ``ttl_s``
    after it was taken or renewed; then the node may give the frames to other pages. What the views show from then on
    depends on the kind of store; leaving raises ``LeaseBroken`` where they may have shown something wrong.

    Attributes (once entered):
        pages: read-only uint8 arrays ``[page_bytes]``, one per matched page.
        match: how much was found. Nothing found is an empty lease.
    """

    def __init__(self, layout: Layout, keys: Keys, ttl_s: float) -> None:
        self.pages: list[npt.NDArray[np.uint8]] = []
        self.match = Match(0, 0, ABSENT)
        self._layout = layout
        self._keys = keys
        self._ttl_ms = _milliseconds(ttl_s)
        self._entered = False

    def __enter__(self) -> Self:
        """Take the lease.

        Raises:
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """
        if self._entered:
            raise InvalidRequest("lease", "is taken already: make another")
        self._entered = True
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it.

        Raises:
            LeaseBroken: a page changed meanwhile. Inside the handling of another exception that one gets a note.
        """
        try:
            self.check()
        except LeaseBroken as broken:
            if error is None:
                raise
            error.add_note(str(broken))
        finally:
            self.release()

    def renew(self, ttl_s: float) -> None:
        """Move the deadline to ``ttl_s`` from now. A lease that had ended is taken again.

        Raises:
            LeaseBroken: it had ended, and a page has changed or is gone.
            NodeUnavailable, DeadlineExceeded: the node did not answer; the old deadline holds.
        """
        self._ttl_ms = _milliseconds(ttl_s)
        self._renew()

    @abstractmethod
    def check(self) -> None:
        """Whether everything read through the views up to now was right.

        Raises:
            LeaseBroken: a page changed; the lease was overstayed.
        """

    @abstractmethod
    def release(self) -> None:
        """End it now. Views must not be used any more."""

    def forget_views(self) -> None:
        """For who only renews and releases: what was asked, and the views, take no memory any more."""
        self.pages = []
        self._keys = Keys.of(np.empty(0, np.uint32), self._layout.page_tokens, self._keys.root)

    @abstractmethod
    def _take(self) -> None:
        """Look up, lease, prove; set ``pages`` and ``match``. Nothing is leased where this raises."""

    @abstractmethod
    def _renew(self) -> None:
        """Move the deadline to ``_ttl_ms`` from now."""

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("lease", "cannot be pickled: it belongs to this process")


def _milliseconds(ttl_s: float) -> int:
    return max(1, int(check_seconds(ttl_s, "ttl_s") * 1000))
