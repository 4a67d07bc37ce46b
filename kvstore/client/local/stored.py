"""Stored: how many leading pages of a chain are there, from the index and the records; nothing is proven.

The index knows keys alone, and a key can be forged: tokens of one root that make the key of another root's page. So the
root of the last page that is found is compared with ours. Under prefix closure all pages before it have the same root,
so that one look at a record is enough; where it differs, every page is looked at.

    ours     A B C D              the index names A B C and X, a stranger's page that was given D's key:
    stored   A B C + X            X is not ours, so A, B, C are looked at, and three pages are there
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvstore.client.local.node import Mapped
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, Tier
from kvstore.tier.index import IndexDamaged

RootAt = Callable[[bytes], bytes | None]
"""The root of the page at a raw address, as its record says now; None where there is no such record."""


def named_pages(mapped: Mapped, hashes: list[bytes], closed: bool) -> tuple[int, bytes | None]:
    """How many leading keys the index names in DRAM, whoever's pages they are, and the raw address of the last one.

    ``closed``: chains are prefix-closed in the index, so that a binary search will do.
    """
    try:
        if closed:
            return mapped.index.longest(Tier.DRAM, hashes)
        found = mapped.index.find_many(Tier.DRAM, hashes)
    except IndexDamaged:
        return 0, None  # the daemon will rebuild it under a new epoch
    count = found.index(None) if None in found else len(found)
    return count, found[count - 1] if count else None


def stored_pages(mapped: Mapped, keys: Keys, closed: bool) -> tuple[int, bytes | None]:
    """How many leading pages of ``keys`` are in DRAM, and the raw address of the last one. A hint."""
    count, last = named_pages(mapped, keys.hashes, closed)
    if last is None or (closed and mapped.root_at(last) in (None, keys.root)):
        return count, last
    try:
        found = mapped.index.find_many(Tier.DRAM, keys.hashes[:count])
    except IndexDamaged:
        return 0, None
    ours = _ours(found, keys.root, mapped.root_at)
    return len(ours), ours[-1] if ours else None


def stored_beyond(mapped: Mapped, keys: Keys, dram: int, closed: bool) -> tuple[int, int]:
    """How many leading pages are in any tier, and how many of those on NVMe alone, where the first ``dram`` are in DRAM
    and the next one is not."""
    if closed:
        more = _leading_on_nvme(mapped, keys, dram)
        return dram + more, more
    on_nvme = known_on_nvme(mapped, keys, dram, closed)
    try:
        found = mapped.index.find_many(Tier.DRAM, keys.hashes[dram:]) if on_nvme else []
    except IndexDamaged:
        return dram, 0
    ours = [raw if raw is not None and mapped.root_at(raw) in (None, keys.root) else None for raw in found]
    count = next((i for i, raw in enumerate(ours) if raw is None and dram + i not in on_nvme), len(ours))
    return dram + count, ours[:count].count(None)


def known_on_nvme(mapped: Mapped, keys: Keys, start: int, closed: bool) -> Collection[int]:
    """Which pages from ``start`` on are on NVMe, whatever else has them."""
    if closed:
        return range(start, start + _leading_on_nvme(mapped, keys, start))
    try:
        found = mapped.index.find_many(Tier.NVME, keys.hashes[start:])
    except IndexDamaged:
        return ()
    root_at = mapped.nvme.root_at
    return {page for page, raw in enumerate(found, start) if raw is not None and root_at(raw) in (None, keys.root)}


def locate(mapped: Mapped, keys: Keys, closed: bool) -> list[bytes]:
    """Raw addresses of the leading pages of ``keys`` that are on NVMe. Hints too."""
    hashes = keys.hashes[: _leading_on_nvme(mapped, keys, 0)] if closed else keys.hashes
    try:
        found = mapped.index.find_many(Tier.NVME, hashes)
    except IndexDamaged:
        return []
    if not closed:
        found = list(_ours(found, keys.root, mapped.nvme.root_at))
    count = found.index(None) if None in found else len(found)
    return [raw[:ADDRESS_BYTES] for raw in found[:count] if raw is not None]


def _leading_on_nvme(mapped: Mapped, keys: Keys, start: int) -> int:
    """How many pages from ``start`` on are on NVMe, where chains are prefix-closed."""
    index, hashes = mapped.index, keys.hashes
    try:
        # The first key alone tells most often that there are none.
        if start == len(hashes) or index.find(Tier.NVME, hashes[start]) is None:
            return 0
        count, last = index.longest(Tier.NVME, hashes[start:] if start else hashes)
        if last is None or mapped.nvme.root_at(last) in (None, keys.root):
            return count
        return len(_ours(index.find_many(Tier.NVME, hashes[start : start + count]), keys.root, mapped.nvme.root_at))
    except IndexDamaged:
        return 0  # the daemon will rebuild it under a new epoch


def _ours(found: Sequence[bytes | None], root: bytes, root_at: RootAt) -> list[bytes]:
    """The leading raw addresses of pages of that root."""
    ours: list[bytes] = []
    for raw in found:
        if raw is None or root_at(raw) not in (None, root):
            break
        ours.append(raw)
    return ours
