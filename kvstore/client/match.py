"""The results of lookups, gets and leases: how much of a prompt is stored, and leases with views of the pages."""

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
ELSEWHERE: Final = (ABSENT, GENERATION, EXTENT)  # with these reasons, another tier may have the page

NONE_BELOW: Final[Mapping[Tier, int]] = MappingProxyType({})
HERE_ALONE: Final[Mapping[str, int]] = MappingProxyType({})


class Match:
    """How much of a prompt is stored. Immutable.

    Attributes:
        tokens: prompt tokens covered, a multiple of the layout's ``page_tokens``.
        pages: number of leading pages covered.
        reason: why the match ended: "" if all pages match, otherwise what is wrong with the next one: "absent",
            "generation" (it changed during the read), "identity" (another page has that key), "checksum", "extent" (its
            frames are gone), or "io" (its device failed, or did not answer in time).
        data: uint8 ``[pages, page_bytes]`` if ``get`` was called without a buffer, else None.
        nodes: for each other node of the pool, the number of pages that it stores or has sent. Pages of the called node
            are not included.
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
        """Number of pages by tier. A page in several tiers counts in the fastest one."""
        counts = {Tier.DRAM: self.pages - sum(self._below.values()), **self._below}
        return {tier: pages for tier, pages in counts.items() if pages}

    def __bool__(self) -> bool:
        return self.pages > 0

    def __repr__(self) -> str:
        return f"Match(tokens={self.tokens}, pages={self.pages}, reason={self.reason!r})"


class Lease(ABC):
    """Views of the longest stored prefix: ``with cache.lease(tokens) as lease: use(lease.pages[0])``.

    Entering the lease looks up the pages, leases them and proves them; leaving releases them. The lease also ends at
    its deadline, ``ttl_s`` after it was taken or renewed; then the node may give the frames to other pages. What the
    views contain from then on depends on the kind of store. Leaving raises ``LeaseBroken`` if they may have contained
    wrong data.

    Attributes (once entered):
        pages: read-only uint8 arrays ``[page_bytes]``, one per matched page.
        match: how much is stored. If nothing is, the lease is empty.
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
            raise InvalidRequest("lease", "was taken already: make a new one")
        self._entered = True
        self._take()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lease.

        Raises:
            LeaseBroken: a page changed under the lease. If another exception is being handled, that one gets a note
                instead.
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
        """Move the deadline to ``ttl_s`` from now. A lease that has ended is taken again.

        Raises:
            LeaseBroken: the lease had ended, and a page has changed or is gone.
            NodeUnavailable, DeadlineExceeded: the node did not answer; the old deadline holds.
        """
        self._ttl_ms = _milliseconds(ttl_s)
        self._renew()

    @abstractmethod
    def check(self) -> None:
        """Check that all data read through the views so far was right.

        Raises:
            LeaseBroken: a page changed, after the lease's deadline.
        """

    @abstractmethod
    def release(self) -> None:
        """End the lease now. Its views must no longer be used."""

    def forget_views(self) -> None:
        """Drop the request and the views, for callers that only renew and release the lease."""
        self.pages = []
        self._keys = Keys.of(np.empty(0, np.uint32), self._layout.page_tokens, self._keys.root)

    @abstractmethod
    def _take(self) -> None:
        """Look up, lease and prove the pages; set ``pages`` and ``match``. Leases nothing if it raises."""

    @abstractmethod
    def _renew(self) -> None:
        """Move the deadline to ``_ttl_ms`` from now."""

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("lease", "cannot be pickled: belongs to this process")


def _milliseconds(ttl_s: float) -> int:
    return max(1, int(check_seconds(ttl_s, "ttl_s") * 1000))
