"""GroupedCache: one cache for a model with several cache groups.

GroupedLease: keeps pages of several cache groups in place until a deadline, with views of them.

GroupedMatch: the result of a lookup, a get or a lease in a cache with several groups.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import (
    DeviceRows,
    Rows,
    any_rows,
    check_seconds,
    device_rows_to_fill,
    on_device,
    rows_to_fill,
)
from kvstore.client.match import ABSENT, Lease, Match
from kvstore.client.prefix_cache import PrefixCache
from kvstore.device.host_memory import empty
from kvstore.errors import InvalidRequest
from kvstore.model.groups import (
    GROUPS_MAX,
    GroupedKeys,
    Lack,
    SinglePages,
    boundary_tokens,
    is_chained,
    longest_boundary,
    pages_needed,
)
from kvstore.model.prefix import Keys, as_tokens
from kvstore.model.replica import Tier
from kvstore.model.retention import Retention, hints_of


class GroupedMatch:
    """How much of a prompt was found in every group. Immutable.

    Attributes:
        tokens: the boundary, as a number of prompt tokens.
        pages: for each group the pages that this boundary needs.
        reason: why no longer boundary was found, as in ``Match.reason``; "" if the whole request was found.
        group: number of the group that lacks a page of the next longer boundary; None if ``reason`` is "".
        data: for each group uint8 ``[len(pages[group]), page_bytes]`` if ``get`` was given no buffers, else None.
        tiers: pages of all groups by the tier they were found in.
        nodes: pages by the other node of the pool on which they were found, or from which they came.
    """

    __slots__ = ("data", "group", "nodes", "pages", "reason", "tiers", "tokens")

    def __init__(
        self,
        tokens: int,
        pages: tuple[range, ...],
        reason: str,
        group: int | None,
        data: list[npt.NDArray[np.uint8]] | None,
        tiers: Mapping[Tier, int],
        nodes: Mapping[str, int],
    ) -> None:
        self.tokens: Final = tokens
        self.pages: Final = pages
        self.reason: Final = reason
        self.group: Final = group
        self.data: Final = data
        self.tiers: Final = dict(tiers)
        self.nodes: Final = dict(nodes)

    def read(
        self, data: list[npt.NDArray[np.uint8]] | None, tiers: Mapping[Tier, int], nodes: Mapping[str, int]
    ) -> GroupedMatch:
        """Return this match with the tiers and nodes that its pages were read from."""
        return GroupedMatch(self.tokens, self.pages, self.reason, self.group, data, tiers, nodes)

    def because(self, reason: str, group: int | None) -> GroupedMatch:
        """Return this match with another reason for its length."""
        return GroupedMatch(self.tokens, self.pages, reason, group, self.data, self.tiers, self.nodes)

    def __bool__(self) -> bool:
        return self.tokens > 0

    def __repr__(self) -> str:
        return f"GroupedMatch(tokens={self.tokens}, pages={self.pages}, reason={self.reason!r})"


Find = Callable[[dict[Lack, str]], GroupedMatch]


class GroupedLease:
    """Views of what the longest boundary needs: ``with cache.lease(tokens) as lease: use(lease.pages[group][0])``.

    It lives as a ``Lease`` does. It holds one ``Lease`` per chain of pages: one per full group, and one per page of the
    other groups.

    Attributes (once entered):
        pages: for each group read-only uint8 arrays ``[page_bytes]``, one per page of ``match.pages[group]``.
        match: how much was found. The lease is empty if nothing was found.
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
            raise InvalidRequest("lease", "was taken already: make another")
        lost: dict[Lack, str] = {}
        while not self._take(self._find(lost), lost):
            pass  # try the next shorter boundary
        return self

    def _take(self, match: GroupedMatch, lost: dict[Lack, str]) -> bool:
        """Return whether all pages of the match are leased. If one cannot be, none is, and that one is added to
        ``lost``."""
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
            LeaseBroken: a page changed under the lease. If another exception is being handled, that one gets a note
                instead.
        """
        self.pages, self._leases = [[] for _ in self._groups], []
        self._held.__exit__(kind, error, trace)

    def renew(self, ttl_s: float) -> None:
        """Move the deadline to ``ttl_s`` from now. A lease that has ended is taken again.

        Raises:
            LeaseBroken: the lease had ended, and a page has changed or is gone.
            NodeUnavailable, DeadlineExceeded: the node did not answer; for some pages the old deadline still holds.
        """
        for lease in self._leases:
            lease.renew(ttl_s)

    def check(self) -> None:
        """Raise unless everything read through the views so far was right.

        Raises:
            LeaseBroken: a page changed after the lease's deadline.
        """
        for lease in self._leases:
            lease.check()

    def release(self) -> None:
        """End the lease now. Its views must not be used any more."""
        for lease in self._leases:
            lease.release()
        self.pages, self._leases = [[] for _ in self._groups], []

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("lease", "cannot be pickled: belongs to this process")


Asked = Callable[[PrefixCache, Keys], Match]


class GroupedCache:
    """Pages of several layouts, the cache groups of one model, under one tenant salt and adapter: sliding windows next
    to full attention, an indexer next to MLA, states. ``Store.cache`` makes it from a list of layouts; it lives as long
    as its store.

    A hit is the longest *boundary* that every group has: a number of tokens, a multiple of each group's
    ``page_tokens``. At a boundary, a full group needs all pages before it, a window group needs the pages that hold the
    ``window - 1`` tokens before it, and a state group needs the page that ends there. Other pages need not be stored.

    Full groups share their pages with the layout's own ``PrefixCache``. Pages of window and state groups are found one
    by one, so they have different keys: neither cache finds those pages of the other.

    ``tokens`` in every verb is a prompt, matched up to its last but one token, or ``GroupedKeys``, which name pages
    directly. ``extras`` are lists as for ``PrefixCache.keys``, one per group. Threads may share it.

    Attributes:
        groups: the cache of each layout, for verbs of one group: layer-wise writers and readers take the keys in
            ``GroupedKeys.parts``.
        layouts: as given.
        boundary_tokens: boundaries are multiples of this.
    """

    def __init__(self, groups: Sequence[PrefixCache]) -> None:
        if not 0 < len(groups) <= GROUPS_MAX:
            raise InvalidRequest("layout", f"must be one to {GROUPS_MAX} layouts (got {len(groups)})")
        self.groups: Final = tuple(groups)
        self.layouts: Final = tuple(group.layout for group in groups)
        self.boundary_tokens: Final = boundary_tokens(self.layouts)
        self._roots = tuple(group.root for group in groups)
        if len(set(self._roots)) < len(groups):
            raise InvalidRequest("layout", "must differ between groups: set Layout.group")

    # --- keys -------------------------------------------------------------------------------------------------------

    def keys(self, tokens: Any, extras: Sequence[Sequence[bytes]] | None = None) -> GroupedKeys:
        """Return the keys of all full pages of ``tokens`` in every group, for use in several calls.

        Args:
            extras: for each group, the digests of the media inside each full page (``b""`` if none), or None.

        Raises:
            InvalidRequest: tokens are empty, negative, too large or not integers; extras do not fit the pages.
        """
        array = as_tokens(tokens)
        return self._keys(array, len(array), self._extras(extras, len(array)))

    def _extras(self, extras: Sequence[Sequence[bytes]] | None, tokens: int) -> list[list[bytes] | None]:
        if extras is None:
            return [None] * len(self.groups)
        if not isinstance(extras, list | tuple) or len(extras) != len(self.groups):
            raise InvalidRequest("extras", f"must be {len(self.groups)} lists, one per group")
        for layout, each in zip(self.layouts, extras, strict=True):
            if not hasattr(each, "__len__") or len(each) != tokens // layout.page_tokens:
                raise InvalidRequest(
                    "extras", f"must be {tokens // layout.page_tokens} bytes values for {layout.group!r}"
                )
        return [list(each) for each in extras]

    def _keys(self, tokens: npt.NDArray[np.uint32], count: int, extras: list[list[bytes] | None]) -> GroupedKeys:
        """Return the keys of the first ``count`` tokens."""
        named: list[Keys | SinglePages] = []
        used = tokens[:count]
        for group, media in zip(self.groups, extras, strict=True):
            layout = group.layout
            cut = media[: count // layout.page_tokens] if media is not None else None
            if is_chained(layout):
                named.append(Keys.of(used, layout.page_tokens, group.root, cut))
            else:
                named.append(SinglePages(used, layout.page_tokens, group.root, cut))
        return GroupedKeys(count, self.layouts, self._roots, named)

    def _named(self, tokens: Any, extras: Sequence[Sequence[bytes]] | None) -> GroupedKeys:
        if type(tokens) is not GroupedKeys:
            return self.keys(tokens, extras)
        if tokens.roots != self._roots:
            raise InvalidRequest("tokens", "must be keys of this cache's layouts, salt and adapter")
        if extras is not None:
            raise InvalidRequest("extras", "are part of the keys already")
        return tokens

    def _asked(self, tokens: Any, extras: Sequence[Sequence[bytes]] | None) -> GroupedKeys:
        """Return the keys of the pages that a prompt can match: of all tokens but the last one."""
        if type(tokens) is GroupedKeys:
            return self._named(tokens, extras)
        array = as_tokens(tokens)
        return self._keys(array, len(array) - 1, self._extras(extras, len(array)))

    # --- reading ----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, extras: Sequence[Sequence[bytes]] | None = None) -> GroupedMatch:
        """Return the longest boundary that every group has. A hint: no page is read, kept or marked as used.

        Raises:
            InvalidRequest: as ``keys``, or the store is closed.
            NodeUnavailable, DeadlineExceeded: over gRPC, the node did not answer in time.
        """
        return self._found(self._asked(tokens, extras), {}, _look_up)

    def get(
        self,
        tokens: Any,
        out: Sequence[Any] | None = None,
        *,
        extras: Sequence[Sequence[bytes]] | None = None,
        verify: bool | None = None,
    ) -> GroupedMatch:
        """Copy the pages that the longest boundary needs into ``out``; every page is proven to be the one requested.

        Args:
            out: a buffer per group, as for ``PrefixCache.get``. Its row ``i`` receives page ``match.pages[group][i]``:
                for a full group page ``i``, for a window group the pages of the window in order, and for a state group
                one page. Each buffer must have rows for the longest boundary requested, ``rows(tokens)``. None
                allocates ``match.data``.
            verify: as for ``PrefixCache.get``.

        Rows after those of the match are not changed, with one exception: if a page of a longer boundary was evicted
        while it was read, or could not be proven, the next shorter boundary is tried, and rows of the longer one may
        have been written. A miss raises nothing.

        Raises:
            InvalidRequest: as ``keys``; a buffer is too small, read-only or not contiguous (nothing was copied).
            DeviceLost, DeadlineExceeded, NodeUnavailable: as ``PrefixCache.get``.
        """
        keys = self._asked(tokens, extras)
        buffers = self._to_fill(keys, out)
        lost: dict[Lack, str] = {}
        while True:
            match = self._found(keys, lost, _look_up)
            data = None if buffers else list(map(_room, match.pages, self.groups))
            tiers, nodes = Counter[Tier](), Counter[str]()
            if self._copy(keys, match, buffers or data or [], verify, lost, tiers, nodes):
                return match.read(data, tiers, nodes)

    def _copy(
        self,
        keys: GroupedKeys,
        match: GroupedMatch,
        buffers: Sequence[Any],
        verify: bool | None,
        lost: dict[Lack, str],
        tiers: Counter[Tier],
        nodes: Counter[str],
    ) -> bool:
        """Return whether all pages of the match could be read; add the one that could not to ``lost``."""
        for number, (group, needed, rows) in enumerate(zip(self.groups, match.pages, buffers, strict=True)):
            row = 0
            for part in keys.parts(number, needed):
                got = group.get(part, rows[row : row + len(part)], verify=verify)
                row += got.pages
                if got.pages < len(part):
                    lost[Lack(number, needed.start + row)] = got.reason
                    return False
                tiers.update(got.tiers)
                nodes.update(got.nodes)
        return True

    def rows(self, tokens: Any) -> tuple[int, ...]:
        """Return for each group the most rows that a ``get`` of these tokens, or keys, may fill."""
        count = tokens.tokens if type(tokens) is GroupedKeys else len(as_tokens(tokens)) - 1
        boundary = count // self.boundary_tokens * self.boundary_tokens
        return tuple(len(pages_needed(layout, boundary)) for layout in self.layouts)

    def _to_fill(self, keys: GroupedKeys, out: Sequence[Any] | None) -> list[Rows | DeviceRows] | None:
        if out is None:
            return None
        self._check_groups(out, "out")
        return [
            (device_rows_to_fill if on_device(buffer) else rows_to_fill)(buffer, group.page_bytes, rows)
            for buffer, group, rows in zip(out, self.groups, self.rows(keys), strict=True)
        ]

    def _check_groups(self, values: Any, field: str) -> None:
        if not isinstance(values, list | tuple) or len(values) != len(self.groups):
            raise InvalidRequest(field, f"must be a list of {len(self.groups)}, one per group")

    def _found(self, keys: GroupedKeys, lost: Mapping[Lack, str], ask: Asked) -> GroupedMatch:
        """Return the longest boundary whose pages ``ask`` finds, treating ``lost`` pages as absent."""
        leading, singles = [0] * len(self.groups), dict[Lack, Match]()
        chains = dict[int, Match]()
        for number, group in enumerate(self.groups):
            if is_chained(group.layout):
                parts = keys.parts(number, range(keys.pages(number)))
                chains[number] = found = ask(group, parts[0]) if parts else Match(0, 0, "")
                leading[number] = min([found.pages, *(each.page for each in lost if each.group == number)])

        def has(number: int, page: int) -> bool:
            each = Lack(number, page)
            if each in lost:
                return False
            singles[each] = match = ask(self.groups[number], keys.parts(number, range(page, page + 1))[0])
            return match.pages == 1

        boundary, lack = longest_boundary(self.layouts, leading, keys.tokens, has)
        needed = keys.needed(boundary)
        matches = [
            singles[Lack(number, page)] for number, pages in enumerate(needed) for page in pages if number not in chains
        ]
        for number, match in chains.items():
            if match.pages > len(needed[number]) > 0:
                match = ask(self.groups[number], keys.parts(number, needed[number])[0])
            matches += [match] if needed[number] else []
        tiers, nodes = Counter[Tier](), Counter[str]()
        for match in matches:
            tiers.update(match.tiers)
            nodes.update(match.nodes)
        reason = lost.get(lack, ABSENT) if lack is not None else ""
        return GroupedMatch(boundary, needed, reason, lack.group if lack is not None else None, None, tiers, nodes)

    def prefetch(
        self, tokens: Any, timeout_s: float = 5.0, extras: Sequence[Sequence[bytes]] | None = None
    ) -> GroupedMatch:
        """Ask the node to bring to DRAM what the longest stored boundary needs. Returns the longest boundary in DRAM
        afterwards.

        Raises:
            InvalidRequest: as ``keys``; ``timeout_s`` is not positive.
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """
        deadline = time.monotonic() + check_seconds(timeout_s, "timeout_s")
        keys = self._asked(tokens, extras)

        def bring(group: PrefixCache, pages: Keys) -> Match:
            return group.prefetch(pages, max(1e-3, deadline - time.monotonic()))

        match = self.lookup(keys)
        found = self._found(keys.upto(match.tokens), {}, bring) if match else match
        return found if found.reason else found.because(match.reason, match.group)

    def lease(self, tokens: Any, ttl_s: float = 30.0, extras: Sequence[Sequence[bytes]] | None = None) -> GroupedLease:
        """Return a lease with read-only views of what the longest boundary needs:
        ``with cache.lease(tokens) as lease``.

        Raises:
            InvalidRequest: as ``keys``; ``ttl_s`` is not positive.
        """
        keys = self._asked(tokens, extras)
        return GroupedLease(self.groups, keys, ttl_s, lambda lost: self._found(keys, lost, _look_up))

    # --- writing ----------------------------------------------------------------------------------------------------

    def put(
        self,
        tokens: Any,
        pages: Sequence[Any],
        extras: Sequence[Sequence[bytes]] | None = None,
        *,
        checksum: bool = False,
        wait: bool = False,
        retention: Retention | Sequence[Retention] = (),
    ) -> tuple[int, ...]:
        """Store pages of ``tokens``; returns how many were new in each group. Pages already in DRAM are skipped.

        Args:
            pages: the pages of each group: a buffer ``[full pages, page_bytes]`` with all its pages; or a pair of a
                range and a buffer, ``(range(4, 6), [2, page_bytes])``, with those pages alone; or None. Pages of a full
                group that do not begin with the first one are stored only if those before them are.
            checksum, wait, retention: as for ``PrefixCache.put``.

        Raises:
            InvalidRequest: as ``PrefixCache.put``; a range is not within the full pages. Nothing was stored.
            QuotaExceeded, NodeUnavailable, DeadlineExceeded, DeviceLost: as ``PrefixCache.put``; pages of some groups
                may be stored.
        """
        keys = self._named(tokens, extras)
        self._check_groups(pages, "pages")
        puts: list[tuple[range, list[Keys], Any, bytes]] = []
        for number, (group, given) in enumerate(zip(self.groups, pages, strict=True)):
            which, buffer = _given(given, keys.pages(number))
            rows = any_rows(buffer, group.page_bytes, len(which)) if buffer is not None else None
            hints = hints_of(retention, keys.pages(number), group.layout.page_tokens) if retention != () else b""
            puts.append((which, keys.parts(number, which), rows, hints))
        new = [0] * len(puts)
        for number, (which, parts, rows, hints) in enumerate(puts):
            row = 0
            for part in parts:
                hinted = part.hinted(hints[which.start + row : which.start + row + len(part)])
                data = rows[row : row + len(part)]
                new[number] += self.groups[number].put(hinted, data, checksum=checksum, wait=wait)
                row += len(part)
        return tuple(new)

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("store", "cannot be pickled: call kvstore.connect() in the other process")


def _look_up(group: PrefixCache, pages: Keys) -> Match:
    return group.lookup(pages)


def _room(pages: range, group: PrefixCache) -> Rows:
    return empty((len(pages), group.page_bytes))


def _given(given: Any, pages: int) -> tuple[range, Any]:
    """Return which pages of a group are given, and their buffer."""
    if given is None:
        return range(0), None
    if not isinstance(given, tuple):
        return range(pages), given
    which = given[0] if len(given) == 2 else None
    if not isinstance(which, range) or which.step != 1:
        raise InvalidRequest("pages", "must be a buffer, a pair of a range and a buffer, or None, for each group")
    if which and not 0 <= which.start < which.stop <= pages:
        raise InvalidRequest("pages", f"must be within the {pages} full pages (got {which})")
    return which, given[1]
