"""Functions that count the stored leading pages of a chain, from the index and the records, without proving them.

The index has only keys, and a key can be forged: someone may construct tokens of one root that give the key of another
root's page. So the root in the record of the last page is compared with the requested root. Under prefix closure all
pages before it have the same root, so one comparison is enough. If the roots differ, every page is checked.

    requested    A B C D          the index lists A, B, C and X, a page of another tenant that has D's key
    stored       A B C X          X has another root, so A, B and C are checked, and three pages are stored

All results are hints, since a page may be evicted at any moment. A damaged index counts as empty: the daemon rebuilds
it under a new epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from kvstore.client.local.node import MappedNode
from kvstore.client.local.tier_reader import LowerReader
from kvstore.errors import InvalidRequest
from kvstore.model.objects import ObjectGroup
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, Tier
from kvstore.shm.header import Header
from kvstore.shm.index import GROUP_ENTRY, Index, IndexDamaged

_EPOCH, _INCARNATION, _MOUNTS = Header.epoch.position, Header.incarnation.position, Header.mounts.position
_LOWER_TIERS = Header.lower_tiers.position
INDEX_READS_MAX = 8  # reads of the index while the node is taking in published pages

RootAt = Callable[[bytes], bytes | None]
"""Returns the root in the record at a raw address; None if there is no such record."""

LastPage = tuple[int, bytes | None]
"""A number of leading pages, and the raw address of the last one (None if there are none)."""


def indexed_pages(mapped: MappedNode, hashes: list[bytes], closed: bool) -> LastPage:
    """Return how many leading keys the index lists in DRAM, whatever their roots are. If it does not list all of them,
    wait for published pages, and count these too.

    Args:
        closed: chains are prefix-closed in the index, so a binary search is enough.
    """
    seen = mapped.published.seen
    pages = _search_index(mapped, hashes, closed)
    if pages[0] == len(hashes) or (mapped.published.is_unchanged(seen) and mapped.words[_EPOCH] == mapped.epoch):
        return pages
    return _search_published(mapped, hashes, closed, seen, pages)


def _search_published(
    mapped: MappedNode, hashes: list[bytes], closed: bool, seen: bytes | None, pages: LastPage
) -> LastPage:
    """Continue ``indexed_pages`` with published pages, while the node takes them in.

    Args:
        seen: the positions of the log before the index was read.
        pages: the result of reading the index.
    """
    for _ in range(INDEX_READS_MAX):
        if pages[0] == len(hashes) or seen is None:
            break
        seen = _take_in(mapped, partial(_missing_keys, mapped, hashes, pages[0], closed), seen)
        if seen is not None:
            pages = _search_index(mapped, hashes, closed)
    return pages


def _take_in(mapped: MappedNode, missing_keys: Callable[[], list[bytes]], seen: bytes) -> bytes | None:
    """Call ``PutLogReader.look``, and then open the node's new index if there is one: only it may list the pages that
    the node has taken in. Return None if the misses are final."""
    positions = mapped.published.look(missing_keys, seen, mapped.channel)
    return mapped.published.seen if reopen_index(mapped) else positions


def find_published(mapped: MappedNode, hashes: list[bytes]) -> list[bytes | None]:
    """Return the raw address of each key in DRAM; None for a key that is not there. The keys need not form a chain.

    Published pages count: if the index does not list a key, the node is asked to take in published pages first.

    Raises:
        IndexDamaged: the index cannot be read.
    """
    tier = mapped.dram.tier
    return _with_published(mapped, hashes, lambda: mapped.index.find_many(tier, hashes))


def find_groups(mapped: MappedNode, hashes: list[bytes]) -> list[bytes | None]:
    """Return the index's entry of each complete group; None for a group that is not complete. Published members count,
    as in ``find_published``. Raises IndexDamaged."""
    return _with_published(mapped, hashes, lambda: mapped.index.find_groups(hashes))


Member = tuple[ObjectGroup, bytes]
"""A complete group, and its entry in the index. The entry differs if the group was incomplete in between."""


def complete_groups(mapped: MappedNode, groups: Iterable[ObjectGroup]) -> dict[ObjectGroup, bytes]:
    """Return the entry of each of these groups that is complete."""
    distinct = list(dict.fromkeys(groups))
    try:
        entries = find_groups(mapped, [group.hash for group in distinct])
    except IndexDamaged:
        return {}
    return {
        group: entry
        for group, entry in zip(distinct, entries, strict=True)
        if entry is not None and GROUP_ENTRY.unpack(entry)[0] == group.members
    }


def check_counts(mapped: MappedNode, groups: Sequence[ObjectGroup]) -> None:
    """Raise InvalidRequest if a group is complete with another count. If it is not complete, the node checks this."""
    distinct = list(dict.fromkeys(groups))
    try:
        entries = find_groups(mapped, [group.hash for group in distinct]) if distinct else []
    except IndexDamaged:
        return
    for group, entry in zip(distinct, entries, strict=True):
        members = GROUP_ENTRY.unpack(entry)[0] if entry is not None else group.members
        if members != group.members:
            raise InvalidRequest("count", f"must be {members}, as for other members of the group (got {group.members})")


def lost_members(mapped: MappedNode, members: dict[int, Member]) -> list[int]:
    """Return the positions of members whose group was incomplete at some moment since their entry was read."""
    complete = complete_groups(mapped, [group for group, _ in members.values()])
    return [position for position, (group, entry) in members.items() if complete.get(group) != entry]


def _with_published(
    mapped: MappedNode, hashes: list[bytes], find: Callable[[], list[bytes | None]]
) -> list[bytes | None]:
    """Return what ``find`` reads from the index for ``hashes``, after the node has taken in published pages whose
    records contain one that is missing."""
    published = mapped.published
    seen: bytes | None = 2 * published.drained
    raws = find()
    for _ in range(INDEX_READS_MAX):
        if None not in raws or seen is None or (published.is_unchanged(seen) and mapped.words[_EPOCH] == mapped.epoch):
            break
        missing = [key for key, raw in zip(hashes, raws, strict=True) if raw is None]
        seen = _take_in(mapped, partial(list, missing), seen)
        if seen is not None:
            raws = find()
    return raws


def _missing_keys(mapped: MappedNode, hashes: list[bytes], pages: int, closed: bool) -> list[bytes]:
    """Return the first key that is not in DRAM, and the first key that is in no tier. Published pages may begin at
    either of them. ``pages``: the number of leading pages in DRAM."""
    rest, below = hashes[pages:], 0
    with contextlib.suppress(IndexDamaged):
        if closed:
            below = max((mapped.index.longest(tier, rest)[0] for tier in mapped.lower), default=0)
        elif mapped.lower:
            entries = zip(*(mapped.index.find_many(reader.tier, rest) for reader in mapped.tiers), strict=True)
            below = next((page for page, raws in enumerate(entries) if not any(raws)), len(rest))
    return [rest[page] for page in {0, below} if page < len(rest)]


def reopen_index(mapped: MappedNode) -> bool:
    """Open the node's new index if the node has recreated it. Return True if so: keys that the old index did not list
    must be looked up again."""
    epoch = mapped.words[_EPOCH]
    if epoch == mapped.epoch or mapped.words[_INCARNATION] != mapped.incarnation:
        return False
    index = Index.open_reader(mapped.folder, epoch)
    if index is None:
        return False
    mapped.index, mapped.epoch = index, epoch
    return True


def _search_index(mapped: MappedNode, hashes: list[bytes], closed: bool, mostly_new: bool = False) -> LastPage:
    """Return how many leading keys the index lists in DRAM. ``mostly_new``: see ``Index.longest``."""
    try:
        if closed:
            return mapped.index.longest(mapped.dram.tier, hashes, mostly_new)
        raws = mapped.index.find_many(mapped.dram.tier, hashes)
    except IndexDamaged:
        return 0, None
    count = raws.index(None) if None in raws else len(raws)
    return count, raws[count - 1] if count else None


def stored_pages(mapped: MappedNode, keys: Keys, closed: bool) -> LastPage:
    """Return how many leading pages of ``keys`` are in DRAM."""
    return _check_root(mapped, keys, indexed_pages(mapped, keys.hashes, closed), closed)


def _check_root(mapped: MappedNode, keys: Keys, pages: LastPage, closed: bool) -> LastPage:
    """Reduce pages that the index lists to the leading ones that have the root of ``keys``."""
    count, last = pages
    if last is None or (closed and mapped.dram.root_at(last) in (None, keys.root)):
        return count, last
    try:
        raws = mapped.index.find_many(mapped.dram.tier, keys.hashes[:count])
    except IndexDamaged:
        return 0, None
    leading = _leading_with_root(raws, keys.root, mapped.dram.root_at)
    return len(leading), leading[-1] if leading else None


def stored_or_published(mapped: MappedNode, keys: Keys, closed: bool) -> LastPage:
    """Return how many leading pages of ``keys`` a put need not store: those in DRAM, and those that this session has
    published, even if the node has not taken them in."""
    publisher, published, hashes = mapped.channel.publisher, mapped.published, keys.hashes
    for _ in range(INDEX_READS_MAX):
        if publisher is None:
            break
        log = published.current()
        positions = log.positions() if log is not None else b""
        drained = positions[len(positions) // 2 :]
        stored, last = _search_index(mapped, hashes, closed, mostly_new=True)
        if last is not None:
            stored, last = _check_root(mapped, keys, (stored, last), closed)
        if stored == len(hashes):
            return stored, last
        own, is_other = 0, False
        if 2 * drained != positions:
            own = publisher.leading(hashes, stored)
            is_other = not own and published.is_in_other_slot(hashes[stored], publisher.slot)
        # If the node took pages in between, both the index and the log may have missed a page: try again.
        is_unchanged = log is None or log.drained() == drained
        if is_unchanged and (mapped.words[_EPOCH] == mapped.epoch or not reopen_index(mapped)):
            if not is_other:
                return stored + own, last
            break
    return stored_pages(mapped, keys, closed)


def stored_beyond(
    mapped: MappedNode, keys: Keys, dram_pages: int, closed: bool, readable: bool = False
) -> tuple[int, dict[Tier, int]]:
    """Return how many leading pages are in any tier, and how many of them each lower tier adds.

    Args:
        dram_pages: the number of leading pages in DRAM. The next page is not in DRAM.
        readable: count only tiers that this process can read.
    """
    pages = dram_pages
    below: dict[Tier, int] = {}
    readers = mapped.below if mapped.words[_MOUNTS] else mapped.lower  # avoids a call, since mounts are rare
    if closed:
        for tier, reader in readers.items():
            more = _leading_pages(mapped, reader, keys, pages)
            if more and (not readable or reader.readable()):
                pages, below[tier] = pages + more, more
        return pages, below
    pages_by_tier = {tier: _tier_pages(mapped, reader, keys, pages) for tier, reader in readers.items()}
    pages_by_tier = {
        tier: tier_pages
        for tier, tier_pages in pages_by_tier.items()
        if tier_pages and (not readable or readers[tier].readable())
    }
    try:
        raws = mapped.index.find_many(mapped.dram.tier, keys.hashes[pages:]) if pages_by_tier else []
    except IndexDamaged:
        return pages, {}
    for raw in raws:
        if raw is None or mapped.dram.root_at(raw) not in (None, keys.root):
            tiers = [tier for tier, tier_pages in pages_by_tier.items() if pages in tier_pages]
            if not tiers:
                break
            below[tiers[0]] = below.get(tiers[0], 0) + 1
        pages += 1
    return pages, below


def pages_below(mapped: MappedNode, keys: Keys, start: int, closed: bool) -> Collection[int]:
    """Return the pages starting at ``start`` that are in a lower tier of the node, whether or not other tiers have
    them."""
    if not mapped.words[_LOWER_TIERS]:
        return ()
    readers = mapped.lower.values()
    if closed:
        count = 0
        for reader in readers:
            count = max(count, _leading_pages(mapped, reader, keys, start))
        return range(start, start + count)
    return set[int]().union(*(_tier_pages(mapped, reader, keys, start) for reader in readers))


def tiers_by_page(mapped: MappedNode, keys: Keys, closed: bool) -> dict[int, Tier]:
    """Return a tier for each page that the node has, by page."""
    pages = stored_pages(mapped, keys, closed)[0]
    tiers = dict.fromkeys(range(pages), mapped.dram.tier)
    if closed:
        for tier, more in stored_beyond(mapped, keys, pages, closed)[1].items():
            tiers |= dict.fromkeys(range(len(tiers), len(tiers) + more), tier)
        return tiers
    root_at, root = mapped.dram.root_at, keys.root
    with contextlib.suppress(IndexDamaged):
        raws = mapped.index.find_many(mapped.dram.tier, keys.hashes)
        tiers |= {
            page: mapped.dram.tier for page, raw in enumerate(raws) if raw is not None and root_at(raw) in (None, root)
        }
    for tier, reader in mapped.below.items():
        tiers = dict.fromkeys(_tier_pages(mapped, reader, keys, 0), tier) | tiers
    return tiers


def first_unstored(mapped: MappedNode, keys: Keys, closed: bool) -> int:
    """Return the first page that is in no tier of the node, not counting mounted memory; ``len(keys)`` if all are
    stored."""
    start = stored_pages(mapped, keys, closed)[0]
    try:
        raws = mapped.index.find_many(mapped.dram.tier, keys.hashes[start:])
    except IndexDamaged:
        return len(keys)
    below = pages_below(mapped, keys, start, closed)
    return next((page for page, raw in enumerate(raws, start) if raw is None and page not in below), len(keys))


def locate(mapped: MappedNode, reader: LowerReader, keys: Keys, closed: bool) -> list[bytes]:
    """Return the raw addresses of the leading pages of ``keys`` in the reader's tier."""
    closed = closed and reader.closed
    hashes = keys.hashes[: _leading_pages(mapped, reader, keys, 0)] if closed else keys.hashes
    try:
        raws = mapped.index.find_many(reader.tier, hashes)
    except IndexDamaged:
        return []
    if not closed:
        raws = list(_leading_with_root(raws, keys.root, reader.root_at))
    count = raws.index(None) if None in raws else len(raws)
    return [raw[:ADDRESS_BYTES] for raw in raws[:count] if raw is not None]


def _tier_pages(mapped: MappedNode, reader: LowerReader, keys: Keys, start: int) -> set[int]:
    """Return all pages starting at ``start`` that are in the reader's tier."""
    try:
        raws = mapped.index.find_many(reader.tier, keys.hashes[start:])
    except IndexDamaged:
        return set()
    root_at, root = reader.root_at, keys.root
    return {page for page, raw in enumerate(raws, start) if raw is not None and root_at(raw) in (None, root)}


def _leading_pages(mapped: MappedNode, reader: LowerReader, keys: Keys, start: int) -> int:
    """Return how many consecutive pages starting at ``start`` are in the reader's tier, for prefix-closed chains."""
    index, tier, hashes = mapped.index, reader.tier, keys.hashes
    try:
        # The first key alone usually shows that there are none.
        if index.find_many(tier, hashes[start : start + 1]) in ([], [None]):
            return 0
        if not reader.closed:
            return len(_leading_with_root(index.find_many(tier, hashes[start:]), keys.root, reader.root_at))
        count, last = index.longest(tier, hashes[start:] if start else hashes)
        if last is None or reader.root_at(last) in (None, keys.root):
            return count
        raws = index.find_many(tier, hashes[start : start + count])
        return len(_leading_with_root(raws, keys.root, reader.root_at))
    except IndexDamaged:
        return 0


def _leading_with_root(raws: Sequence[bytes | None], root: bytes, root_at: RootAt) -> list[bytes]:
    """Return the leading raw addresses whose pages have this root, or no record."""
    leading: list[bytes] = []
    for raw in raws:
        if raw is None or root_at(raw) not in (None, root):
            break
        leading.append(raw)
    return leading
