"""Counts the stored leading pages of a chain from the index and the records, without proving them.

The index has only keys, and a key can be forged: tokens of one root that give the key of another root's page. So the
root of the last page found is compared with the requested root. Under prefix closure all pages before it have the same
root, so one check is enough; if it differs, every page is checked.

    ours     A B C D              the index names A B C and X, another tenant's page that has D's key:
    stored   A B C + X            X has another root, so A, B, C are checked, and three pages are stored
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kvstore.client.local.node import Mapped
from kvstore.client.local.tier_reader import LowerReader
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, Tier
from kvstore.shm.header import Header
from kvstore.shm.index import Index, IndexDamaged

_EPOCH, _INCARNATION, _MOUNTS = Header.epoch.position, Header.incarnation.position, Header.mounts.position
LOOKS = 8  # reads of the index while the node is taking in what was published

RootAt = Callable[[bytes], bytes | None]
"""Returns the root of the page at a raw address, as its record says now; None if there is no such record."""


def named_pages(mapped: Mapped, hashes: list[bytes], closed: bool) -> tuple[int, bytes | None]:
    """Return how many leading keys the index names in memory, regardless of their root, and the raw address of the last
    one.

    ``closed``: chains are prefix-closed in the index, so a binary search is enough.
    """
    seen = mapped.published.seen
    found = _named(mapped, hashes, closed)
    if found[0] == len(hashes) or (mapped.published.rests(seen) and mapped.words[_EPOCH] == mapped.epoch):
        return found
    return _looked_for(mapped, hashes, closed, seen, found)


def _looked_for(
    mapped: Mapped, hashes: list[bytes], closed: bool, seen: bytes | None, found: tuple[int, bytes | None]
) -> tuple[int, bytes | None]:
    """As ``named_pages``, counting published pages too, after the index did not have all. ``seen``: log positions
    before that."""
    for _ in range(LOOKS):
        if found[0] == len(hashes) or seen is None:
            break
        seen = _look(mapped, partial(_missed, mapped, hashes, found[0], closed), seen)
        if seen is not None:
            found = _named(mapped, hashes, closed)
    return found


def _look(mapped: Mapped, missed: Callable[[], list[bytes]], seen: bytes) -> bytes | None:
    """As ``Published.look``; also follow the node to a new index, which alone may have the pages taken in since."""
    now = mapped.published.look(missed, seen, mapped.channel)
    return mapped.published.seen if follow(mapped) else now


def find_published(mapped: Mapped, hashes: list[bytes]) -> list[bytes | None]:
    """Return the raw address of each of these keys in DRAM, None where it is not there; the keys are of no chain.

    Published pages count: the node is asked to take them in first. Raises IndexDamaged.
    """
    published, tier = mapped.published, mapped.dram.tier
    seen: bytes | None = 2 * published.drained
    found = mapped.index.find_many(tier, hashes)
    for _ in range(LOOKS):
        if None not in found or seen is None or (published.rests(seen) and mapped.words[_EPOCH] == mapped.epoch):
            break
        missing = [key for key, raw in zip(hashes, found, strict=True) if raw is None]
        seen = _look(mapped, partial(list, missing), seen)
        if seen is not None:
            found = mapped.index.find_many(tier, hashes)
    return found


def _missed(mapped: Mapped, hashes: list[bytes], pages: int, closed: bool) -> list[bytes]:
    """Return the first key that memory does not have, and the first that no tier has: published pages may begin at
    either. ``pages``: the number of leading pages in memory."""
    rest, more = hashes[pages:], 0
    with contextlib.suppress(IndexDamaged):  # the daemon will rebuild it under a new epoch
        if closed:
            more = max((mapped.index.longest(tier, rest)[0] for tier in mapped.lower), default=0)
        elif mapped.lower:
            found = zip(*(mapped.index.find_many(reader.tier, rest) for reader in mapped.tiers), strict=True)
            more = next((page for page, raws in enumerate(found) if not any(raws)), len(rest))
    return [rest[page] for page in {0, more} if page < len(rest)]


def follow(mapped: Mapped) -> bool:
    """Reopen the index if the node has recreated it. Returns True if so; missed keys must then be looked up again."""
    epoch = mapped.words[_EPOCH]
    if epoch == mapped.epoch or mapped.words[_INCARNATION] != mapped.incarnation:
        return False
    index = Index.open_reader(mapped.folder, epoch)
    if index is None:
        return False
    mapped.index, mapped.epoch = index, epoch
    return True


def _named(mapped: Mapped, hashes: list[bytes], closed: bool) -> tuple[int, bytes | None]:
    try:
        if closed:
            return mapped.index.longest(mapped.dram.tier, hashes)
        found = mapped.index.find_many(mapped.dram.tier, hashes)
    except IndexDamaged:
        return 0, None  # the daemon will rebuild it under a new epoch
    count = found.index(None) if None in found else len(found)
    return count, found[count - 1] if count else None


def stored_pages(mapped: Mapped, keys: Keys, closed: bool) -> tuple[int, bytes | None]:
    """Return how many leading pages of ``keys`` are in memory, and the raw address of the last one. A hint."""
    return _ours_of(mapped, keys, named_pages(mapped, keys.hashes, closed), closed)


def _ours_of(mapped: Mapped, keys: Keys, named: tuple[int, bytes | None], closed: bool) -> tuple[int, bytes | None]:
    """Return those of the pages ``named`` by the index that have the keys' root."""
    count, last = named
    if last is None or (closed and mapped.dram.root_at(last) in (None, keys.root)):
        return count, last
    try:
        found = mapped.index.find_many(mapped.dram.tier, keys.hashes[:count])
    except IndexDamaged:
        return 0, None
    ours = _ours(found, keys.root, mapped.dram.root_at)
    return len(ours), ours[-1] if ours else None


def stored_or_published(mapped: Mapped, keys: Keys, closed: bool) -> tuple[int, bytes | None]:
    """As ``stored_pages``, for a put: pages that this session has published count even if the node has not taken them
    in."""
    publisher, published, hashes = mapped.channel.publisher, mapped.published, keys.hashes
    for _ in range(LOOKS):
        if publisher is None:
            break
        before = published.drained
        stored, last = _ours_of(mapped, keys, _named(mapped, hashes, closed), closed)
        if stored == len(hashes):
            return stored, last
        more = publisher.leading(hashes, stored)
        others = not more and published.elsewhere(hashes[stored], publisher.slot)
        if published.drained == before and not follow(mapped):  # else some pages may have been in neither
            if not others:
                return stored + more, last
            break
    return stored_pages(mapped, keys, closed)


def stored_beyond(
    mapped: Mapped, keys: Keys, mapped_pages: int, closed: bool, readable: bool = False
) -> tuple[int, dict[Tier, int]]:
    """Return how many leading pages are in any tier, and how many of them only in each lower tier, given that the first
    ``mapped_pages`` are in memory and the next is not. ``readable``: count only tiers that this process may read.
    """
    pages = mapped_pages
    below: dict[Tier, int] = {}
    readers = mapped.below if mapped.words[_MOUNTS] else mapped.lower  # usually nothing is mounted, which saves a call
    if closed:
        for tier, reader in readers.items():
            more = _leading(mapped, reader, keys, pages)
            if more and (not readable or reader.readable()):
                pages, below[tier] = pages + more, more
        return pages, below
    known = {tier: _known(mapped, reader, keys, pages) for tier, reader in readers.items()}
    known = {tier: them for tier, them in known.items() if them and (not readable or readers[tier].readable())}
    try:
        found = mapped.index.find_many(mapped.dram.tier, keys.hashes[pages:]) if known else []
    except IndexDamaged:
        return pages, {}
    for raw in found:
        if raw is None or mapped.dram.root_at(raw) not in (None, keys.root):
            having = [tier for tier, them in known.items() if pages in them]
            if not having:
                break
            below[having[0]] = below.get(having[0], 0) + 1
        pages += 1
    return pages, below


def known_below(mapped: Mapped, keys: Keys, start: int, closed: bool) -> Collection[int]:
    """Return which pages from ``start`` on are in a lower tier of the node, even if others have them too."""
    readers = mapped.lower.values()
    if closed:
        return range(start, start + max((_leading(mapped, reader, keys, start) for reader in readers), default=0))
    return set[int]().union(*(_known(mapped, reader, keys, start) for reader in readers))


def tiers_by_page(mapped: Mapped, keys: Keys, closed: bool) -> dict[int, Tier]:
    """Return a tier for each page that the node has. A hint."""
    pages = stored_pages(mapped, keys, closed)[0]
    found = dict.fromkeys(range(pages), mapped.dram.tier)
    if closed:
        for tier, more in stored_beyond(mapped, keys, pages, closed)[1].items():
            found |= dict.fromkeys(range(len(found), len(found) + more), tier)
        return found
    root_at, root = mapped.dram.root_at, keys.root
    with contextlib.suppress(IndexDamaged):
        raws = mapped.index.find_many(mapped.dram.tier, keys.hashes)
        found |= {
            page: mapped.dram.tier for page, raw in enumerate(raws) if raw is not None and root_at(raw) in (None, root)
        }
    for tier, reader in mapped.below.items():
        found = dict.fromkeys(_known(mapped, reader, keys, 0), tier) | found
    return found


def first_unstored(mapped: Mapped, keys: Keys, closed: bool) -> int:
    """Return the first page that no tier of the node has, ignoring mounted memory; ``len(keys)`` if all are stored."""
    start = stored_pages(mapped, keys, closed)[0]
    try:
        found = mapped.index.find_many(mapped.dram.tier, keys.hashes[start:])
    except IndexDamaged:
        return len(keys)
    below = known_below(mapped, keys, start, closed)
    return next((page for page, raw in enumerate(found, start) if raw is None and page not in below), len(keys))


def locate(mapped: Mapped, reader: LowerReader, keys: Keys, closed: bool) -> list[bytes]:
    """Return the raw addresses of the leading pages of ``keys`` in that tier. Hints."""
    closed = closed and reader.closed
    hashes = keys.hashes[: _leading(mapped, reader, keys, 0)] if closed else keys.hashes
    try:
        found = mapped.index.find_many(reader.tier, hashes)
    except IndexDamaged:
        return []
    if not closed:
        found = list(_ours(found, keys.root, reader.root_at))
    count = found.index(None) if None in found else len(found)
    return [raw[:ADDRESS_BYTES] for raw in found[:count] if raw is not None]


def _known(mapped: Mapped, reader: LowerReader, keys: Keys, start: int) -> set[int]:
    """Return which pages from ``start`` on are in that tier, in any order."""
    try:
        found = mapped.index.find_many(reader.tier, keys.hashes[start:])
    except IndexDamaged:
        return set()
    root_at, root = reader.root_at, keys.root
    return {page for page, raw in enumerate(found, start) if raw is not None and root_at(raw) in (None, root)}


def _leading(mapped: Mapped, reader: LowerReader, keys: Keys, start: int) -> int:
    """Return how many pages from ``start`` on are in that tier, if chains are prefix-closed."""
    index, tier, hashes = mapped.index, reader.tier, keys.hashes
    try:
        # The first key alone usually shows that there are none.
        if start == len(hashes) or index.find(tier, hashes[start]) is None:
            return 0
        if not reader.closed:
            return len(_ours(index.find_many(tier, hashes[start:]), keys.root, reader.root_at))
        count, last = index.longest(tier, hashes[start:] if start else hashes)
        if last is None or reader.root_at(last) in (None, keys.root):
            return count
        return len(_ours(index.find_many(tier, hashes[start : start + count]), keys.root, reader.root_at))
    except IndexDamaged:
        return 0  # the daemon will rebuild it under a new epoch


def _ours(found: Sequence[bytes | None], root: bytes, root_at: RootAt) -> list[bytes]:
    """Return the leading raw addresses whose pages have that root."""
    ours: list[bytes] = []
    for raw in found:
        if raw is None or root_at(raw) not in (None, root):
            break
        ours.append(raw)
    return ours
