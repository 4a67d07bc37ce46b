"""One cache for a model with several cache groups: its matches, leases and verbs."""

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
    """How much of a prompt every group stores. Immutable.

    Attributes:
        tokens: the boundary, as a number of prompt tokens.
        pages: for each group, the pages that this boundary needs.
        reason: why no longer boundary matches, as in ``Match.reason``; "" if the whole request matches.
        group: number of the group without a page that the next longer boundary needs; None if ``reason`` is "".
        data: for each group uint8 ``[len(pages[group]), page_bytes]`` if ``get`` was called without buffers, else None.
        tiers: for each tier, the number of pages of all groups that it stores.
        nodes: for each other node of the pool, the number of pages that it stores or has sent.
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
        """Return this match with the tiers and nodes from which its pages were read."""
        return GroupedMatch(self.tokens, self.pages, self.reason, self.group, data, tiers, nodes)

    def with_reason(self, reason: str, group: int | None) -> GroupedMatch:
        """Return this match with another reason for its length."""
        return GroupedMatch(self.tokens, self.pages, reason, group, self.data, self.tiers, self.nodes)

    def __bool__(self) -> bool:
        return self.tokens > 0

    def __repr__(self) -> str:
        return f"GroupedMatch(tokens={self.tokens}, pages={self.pages}, reason={self.reason!r})"


FindMatch = Callable[[dict[Lack, str]], GroupedMatch]


class GroupedLease:
    """Views of the pages of the longest boundary: ``with cache.lease(tokens) as lease: use(lease.pages[group][0])``.

    It begins and ends as a ``Lease`` does. It has one ``Lease`` per chain of pages: one per full group, and one per
    page of the other groups.

    Attributes (once entered):
        pages: for each group read-only uint8 arrays ``[page_bytes]``, one per page of ``match.pages[group]``.
        match: how much is stored. If nothing is, the lease is empty.
    """

    def __init__(self, groups: Sequence[PrefixCache], keys: GroupedKeys, ttl_s: float, find: FindMatch) -> None:
        self.pages: list[list[npt.NDArray[np.uint8]]] = [[] for _ in groups]
        self.match: GroupedMatch | None = None
        self._groups, self._keys, self._find = groups, keys, find
        self._ttl_s = check_seconds(ttl_s, "ttl_s")
        self._leases: list[Lease] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Take the lease.

        Raises:
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """
        if self.match is not None:
            raise InvalidRequest("lease", "was taken already: make a new one")
        lost: dict[Lack, str] = {}
        while not self._take(self._find(lost), lost):
            pass  # try the next shorter boundary
        return self

    def _take(self, match: GroupedMatch, lost: dict[Lack, str]) -> bool:
        """Lease all pages of the match and return True. If a page cannot be leased, release the others, add it to
        ``lost`` and return False."""
        leases, views = list[Lease](), [list[npt.NDArray[np.uint8]]() for _ in self._groups]
        with ExitStack() as stack:
            for number, (group, needed) in enumerate(zip(self._groups, match.pages, strict=True)):
                for part in self._keys.parts(number, needed):
                    lease = stack.enter_context(group.lease(part, self._ttl_s))
                    leases.append(lease)
                    views[number] += lease.pages
                    if lease.match.pages < len(part):
                        lost[Lack(number, needed.start + len(views[number]))] = lease.match.reason
                        return False
            self.match, self.pages, self._leases, self._stack = match, views, leases, stack.pop_all()
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lease.

        Raises:
            LeaseBroken: a page changed under the lease. If another exception is being handled, that one gets a note
                instead.
        """
        self.pages, self._leases = [[] for _ in self._groups], []
        self._stack.__exit__(kind, error, trace)

    def renew(self, ttl_s: float) -> None:
        """Move the deadline to ``ttl_s`` from now. A lease that has ended is taken again.

        Raises:
            LeaseBroken: the lease had ended, and a page has changed or is gone.
            NodeUnavailable, DeadlineExceeded: the node did not answer; for some pages the old deadline still holds.
        """
        for lease in self._leases:
            lease.renew(ttl_s)

    def check(self) -> None:
        """Check that all data read through the views so far was right.

        Raises:
            LeaseBroken: a page changed, after the lease's deadline.
        """
        for lease in self._leases:
            lease.check()

    def release(self) -> None:
        """End the lease now. Its views must no longer be used."""
        for lease in self._leases:
            lease.release()
        self.pages, self._leases = [[] for _ in self._groups], []

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("lease", "cannot be pickled: belongs to this process")


FindPages = Callable[[PrefixCache, Keys], Match]


class GroupedCache:
    """The pages of several layouts, the cache groups of one model, under one tenant salt and adapter. Made by
    ``Store.cache`` from a list of layouts, and valid as long as its store.

    Examples are sliding windows next to full attention, an indexer next to MLA, and states. A match is the longest
    *boundary* that every group has: a number of tokens, a multiple of each group's ``page_tokens``. At a boundary, a
    full group needs all pages before it, a window group needs the pages with the ``window - 1`` tokens before it, and a
    state group needs the page that ends there. Other pages need not be stored.

    Full groups share their pages with the layout's own ``PrefixCache``. Pages of window and state groups are looked up
    one by one, so they have keys of another kind. Neither this cache nor the layout's ``PrefixCache`` finds such a page
    of the other.

    ``tokens`` in every verb is a prompt, which matches at most all tokens but the last one, or ``GroupedKeys``, which
    name pages directly. ``extras`` are lists as for ``PrefixCache.keys``, one per group. Any thread may use the cache.

    Attributes:
        groups: the cache of each layout, for verbs of one group: writers and readers take the keys of
            ``GroupedKeys.parts``.
        layouts: the layouts of the groups.
        boundary_tokens: a number of tokens; all boundaries are multiples of it.
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
        """Return the keys of all full pages of ``tokens`` in every group, for several calls.

        Args:
            extras: for each group and each full page, the digest of the media inside it (``b""`` if none); or None.

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
        """Return the keys of the full pages in the first ``count`` tokens."""
        keys: list[Keys | SinglePages] = []
        used = tokens[:count]
        for group, media in zip(self.groups, extras, strict=True):
            layout = group.layout
            cut = media[: count // layout.page_tokens] if media is not None else None
            if is_chained(layout):
                keys.append(Keys.of(used, layout.page_tokens, group.root, cut))
            else:
                keys.append(SinglePages(used, layout.page_tokens, group.root, cut))
        return GroupedKeys(count, self.layouts, self._roots, keys)

    def _page_keys(self, tokens: Any, extras: Sequence[Sequence[bytes]] | None) -> GroupedKeys:
        if type(tokens) is not GroupedKeys:
            return self.keys(tokens, extras)
        if tokens.roots != self._roots:
            raise InvalidRequest("tokens", "must be keys of this cache's layouts, salt and adapter")
        if extras is not None:
            raise InvalidRequest("extras", "must be absent: the keys contain them")
        return tokens

    def _matchable_keys(self, tokens: Any, extras: Sequence[Sequence[bytes]] | None) -> GroupedKeys:
        """Return the keys of the pages that a prompt can match: the pages of all tokens but the last one."""
        if type(tokens) is GroupedKeys:
            return self._page_keys(tokens, extras)
        array = as_tokens(tokens)
        return self._keys(array, len(array) - 1, self._extras(extras, len(array)))

    # --- reading ----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, extras: Sequence[Sequence[bytes]] | None = None) -> GroupedMatch:
        """Return the longest boundary that every group has, as a hint: no page is read, kept or marked as used.

        Raises:
            InvalidRequest: as ``keys``, or the store is closed.
            NodeUnavailable, DeadlineExceeded: over gRPC, the node did not answer in time.
        """
        return self._find(self._matchable_keys(tokens, extras), {}, _lookup)

    def get(
        self,
        tokens: Any,
        out: Sequence[Any] | None = None,
        *,
        extras: Sequence[Sequence[bytes]] | None = None,
        verify: bool | None = None,
    ) -> GroupedMatch:
        """Copy the pages that the longest boundary needs into ``out``. Every page is proven to be the requested one.

        Args:
            out: one buffer per group, as for ``PrefixCache.get``. Row ``i`` receives page ``match.pages[group][i]``:
                page ``i`` in a full group, the pages of the window in order in a window group, and one page in a state
                group. Each buffer must have rows for the longest boundary of the request, see ``rows``. If None,
                ``match.data`` is allocated.
            verify: as for ``PrefixCache.get``.

        Rows after those of the match are unchanged, with one exception. If a page of a longer boundary was evicted
        while it was read, or could not be proven, the next shorter boundary is tried; rows of the longer one may then
        have data. A miss raises nothing.

        Raises:
            InvalidRequest: as ``keys``; a buffer is too small, read-only or not contiguous, and nothing was copied.
            DeviceLost, DeadlineExceeded, NodeUnavailable: as ``PrefixCache.get``.
        """
        keys = self._matchable_keys(tokens, extras)
        buffers = self._to_fill(keys, out)
        lost: dict[Lack, str] = {}
        while True:
            match = self._find(keys, lost, _lookup)
            data = None if buffers else list(map(_empty_rows, match.pages, self.groups))
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
        """Copy all pages of the match and return True. If one page cannot be read, add it to ``lost`` and return
        False."""
        for number, (group, needed, rows) in enumerate(zip(self.groups, match.pages, buffers, strict=True)):
            row = 0
            for part in keys.parts(number, needed):
                copied = group.get(part, rows[row : row + len(part)], verify=verify)
                row += copied.pages
                if copied.pages < len(part):
                    lost[Lack(number, needed.start + row)] = copied.reason
                    return False
                tiers.update(copied.tiers)
                nodes.update(copied.nodes)
        return True

    def rows(self, tokens: Any) -> tuple[int, ...]:
        """Return, for each group, the largest number of rows that a ``get`` of these tokens or keys fills."""
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

    def _find(self, keys: GroupedKeys, lost: Mapping[Lack, str], find_pages: FindPages) -> GroupedMatch:
        """Return the longest boundary whose pages ``find_pages`` finds. Pages in ``lost`` count as absent."""
        leading, singles = [0] * len(self.groups), dict[Lack, Match]()
        chains = dict[int, Match]()
        for number, group in enumerate(self.groups):
            if is_chained(group.layout):
                parts = keys.parts(number, range(keys.pages(number)))
                chains[number] = match = find_pages(group, parts[0]) if parts else Match(0, 0, "")
                leading[number] = min([match.pages, *(each.page for each in lost if each.group == number)])

        def has(number: int, page: int) -> bool:
            lack = Lack(number, page)
            if lack in lost:
                return False
            part = keys.parts(number, range(page, page + 1))[0]
            singles[lack] = match = find_pages(self.groups[number], part)
            return match.pages == 1

        boundary, lack = longest_boundary(self.layouts, leading, keys.tokens, has)
        needed = keys.needed(boundary)
        matches = [
            singles[Lack(number, page)] for number, pages in enumerate(needed) for page in pages if number not in chains
        ]
        for number, match in chains.items():
            if match.pages > len(needed[number]) > 0:
                match = find_pages(self.groups[number], keys.parts(number, needed[number])[0])
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
        """Ask the node to copy the pages of the longest stored boundary to DRAM. Return the longest boundary in DRAM
        afterwards.

        Raises:
            InvalidRequest: as ``keys``; ``timeout_s`` is not positive.
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """
        deadline = time.monotonic() + check_seconds(timeout_s, "timeout_s")
        keys = self._matchable_keys(tokens, extras)

        def prefetch(group: PrefixCache, pages: Keys) -> Match:
            return group.prefetch(pages, max(1e-3, deadline - time.monotonic()))

        match = self.lookup(keys)
        loaded = self._find(keys.upto(match.tokens), {}, prefetch) if match else match
        return loaded if loaded.reason else loaded.with_reason(match.reason, match.group)

    def lease(self, tokens: Any, ttl_s: float = 30.0, extras: Sequence[Sequence[bytes]] | None = None) -> GroupedLease:
        """Return a lease with read-only views of the pages that the longest boundary needs:
        ``with cache.lease(tokens) as lease``.

        Raises:
            InvalidRequest: as ``keys``; ``ttl_s`` is not positive.
        """
        keys = self._matchable_keys(tokens, extras)
        return GroupedLease(self.groups, keys, ttl_s, lambda lost: self._find(keys, lost, _lookup))

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
        replicas: int | None = None,
    ) -> tuple[int, ...]:
        """Store pages of ``tokens``, and return the number of new ones per group. Pages already in DRAM are skipped.

        Args:
            pages: for each group a buffer ``[full pages, page_bytes]`` with all its pages; or a pair of a range and a
                buffer with only those pages, such as ``(range(4, 6), [2, page_bytes])``; or None. In a full group, a
                range that does not begin with the first page is stored only if the pages before it are.
            checksum, wait, retention, replicas: as for ``PrefixCache.put``.

        Raises:
            InvalidRequest: as ``PrefixCache.put``; a range is not within the full pages. Nothing was stored.
            QuotaExceeded, NodeUnavailable, DeadlineExceeded, DeviceLost: as ``PrefixCache.put``; pages of some groups
                may be stored.
        """
        keys = self._page_keys(tokens, extras)
        self._check_groups(pages, "pages")
        puts: list[tuple[range, list[Keys], Any, bytes]] = []
        for number, (group, value) in enumerate(zip(self.groups, pages, strict=True)):
            which, buffer = _range_and_buffer(value, keys.pages(number))
            rows = any_rows(buffer, group.page_bytes, len(which)) if buffer is not None else None
            hints = hints_of(retention, keys.pages(number), group.layout.page_tokens) if retention != () else b""
            puts.append((which, keys.parts(number, which), rows, hints))
        new = [0] * len(puts)
        for number, (which, parts, rows, hints) in enumerate(puts):
            row = 0
            for part in parts:
                hinted = part.hinted(hints[which.start + row : which.start + row + len(part)])
                data = rows[row : row + len(part)]
                new[number] += self.groups[number].put(hinted, data, checksum=checksum, wait=wait, replicas=replicas)
                row += len(part)
        return tuple(new)

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("store", "cannot be pickled: call kvstore.connect() in the other process")


def _lookup(group: PrefixCache, pages: Keys) -> Match:
    return group.lookup(pages)


def _empty_rows(pages: range, group: PrefixCache) -> Rows:
    return empty((len(pages), group.page_bytes))


def _range_and_buffer(value: Any, pages: int) -> tuple[range, Any]:
    """Return the pages of a group for which ``put`` received data, and the buffer with them."""
    if value is None:
        return range(0), None
    if not isinstance(value, tuple):
        return range(pages), value
    which = value[0] if len(value) == 2 else None
    if not isinstance(which, range) or which.step != 1:
        raise InvalidRequest("pages", "must be a buffer, a pair of a range and a buffer, or None, for each group")
    if which and not 0 <= which.start < which.stop <= pages:
        raise InvalidRequest("pages", f"must be within the {pages} full pages (got {which})")
    return which, value[1]
