"""GroupedLease: pages of several cache groups kept where they are until a deadline, and views of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from kvstore.client.arguments import check_seconds
from kvstore.client.grouped_match import GroupedMatch
from kvstore.client.lease import Lease
from kvstore.client.prefix_cache import PrefixCache
from kvstore.errors import InvalidRequest
from kvstore.model.groups import GroupedKeys, Lack

Find = Callable[[dict[Lack, str]], GroupedMatch]


class GroupedLease:
    """Views of what the longest boundary needs: ``with cache.lease(tokens) as lease: use(lease.pages[group][0])``.

    Life as that of a ``Lease``, one of which it holds for each chain of pages: one per full group, and one per page of
    the others.

    Attributes (once entered):
        pages: of each group read-only uint8 arrays ``[page_bytes]``, those of ``match.pages[group]``.
        match: how much was found. Nothing found is an empty lease.
    """

    def __init__(self, groups: Sequence[PrefixCache], keys: GroupedKeys, ttl_s: float, find: Find) -> None:
        self.pages: list[list[npt.NDArray[np.uint8]]] = [[] for _ in groups]
        self.match: GroupedMatch | None = None
        self._groups, self._keys, self._find = groups, keys, find
        self._ttl_s = check_seconds(ttl_s, "ttl_s")
        self._leases: list[Lease] = []
        self._held = ExitStack()

    def __enter__(self) -> Self:
        """Take the lease.

        Raises:
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """
        if self.match is not None:
            raise InvalidRequest("lease", "is taken already: make another")
        lost: dict[Lack, str] = {}
        while not self._take(self._find(lost), lost):
            pass  # the next shorter boundary
        return self

    def _take(self, match: GroupedMatch, lost: dict[Lack, str]) -> bool:
        """Whether all pages of the match are leased; nothing is where one of them is not, which is ``lost`` then."""
        leases, views = list[Lease](), [list[npt.NDArray[np.uint8]]() for _ in self._groups]
        with ExitStack() as held:
            for number, (group, needed) in enumerate(zip(self._groups, match.pages, strict=True)):
                for part in self._keys.parts(number, needed):
                    lease = held.enter_context(group.lease(part, self._ttl_s))
                    leases.append(lease)
                    views[number] += lease.pages
                    if lease.match.pages < len(part):
                        lost[Lack(number, needed.start + len(views[number]))] = lease.match.reason
                        return False
            self.match, self.pages, self._leases, self._held = match, views, leases, held.pop_all()
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it.

        Raises:
            LeaseBroken: a page changed meanwhile. Inside the handling of another exception that one gets a note.
        """
        self.pages, self._leases = [[] for _ in self._groups], []
        self._held.__exit__(kind, error, trace)

    def renew(self, ttl_s: float) -> None:
        """Move the deadline to ``ttl_s`` from now. A lease that had ended is taken again.

        Raises:
            LeaseBroken: it had ended, and a page has changed or is gone.
            NodeUnavailable, DeadlineExceeded: the node did not answer; of some pages the old deadline holds.
        """
        for lease in self._leases:
            lease.renew(ttl_s)

    def check(self) -> None:
        """Whether everything read through the views up to now was right.

        Raises:
            LeaseBroken: a page changed; the lease was overstayed.
        """
        for lease in self._leases:
            lease.check()

    def release(self) -> None:
        """End it now. Views must not be used any more."""
        for lease in self._leases:
            lease.release()
        self.pages, self._leases = [[] for _ in self._groups], []

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("lease", "cannot be pickled: it belongs to this process")
