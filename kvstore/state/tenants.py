"""Tenants: which tenant a page belongs to, and how many bytes each tenant has in each tier.

A tenant is a salt. Pages carry only their root; clients name the salt of a root once. So bytes are counted per root,
under a small number that each frame stores (``Extent.owner``), and summed per tenant: naming a root moves all its bytes
at once. Pages of a root without a name belong to the tenant "". Names end with a reboot, pages on NVMe do not. So pages
that are found at startup under a root without a name are *unclaimed* until a client names the root: no quota counts
them.

A frame that is RESERVED for a page of a root counts as *expected* bytes until the page is sealed or given up. A quota
limits stored and expected bytes together::

    frame      RESERVED ──seal──> SEALED ──retire──> FREE
    counts as   expected           stored             nothing

A name is a line of JSON with what clients have registered for a root (salt, adapter, model, layout). Once pages are
stored under the root, its name is written to the node's book. Names of roots that are only looked up are kept in a
second, smaller table. Each table is bounded in bytes; a line counts as its length plus ``NAME_BYTES``. An account keeps
its tenant as long as it has pages, even if the name is forgotten.

When a table exceeds its bound, the tenants with the most bytes lose their oldest names, down to a common level. So no
tenant loses a name for one that has more. Worked example: of 100 bytes tenant a has 90, and b adds 30. The goal is 93
(a sixteenth is cleared at once, so that one search serves many names): the level is 63, and a loses names down to it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvstore.model.replica import Tier
from kvstore.state import events as ev
from kvstore.state import instructions as do

NAME_BYTES: Final = 512  # of a name in addition to its line: its root, its entries in two tables, its objects
CLEARED_SHARE: Final = 16  # one part in this many of the bound is cleared at once
LOOKS: Final = 8  # how many of a tenant's oldest names to check for a root without pages


@dataclass(frozen=True, slots=True)
class Name:
    """The description of a root that a client registered. ``has_layout``: it includes the layout."""

    salt: str
    line: bytes
    has_layout: bool

    @classmethod
    def of(cls, root: bytes, about: dict[str, Any]) -> Name:
        """Return the name of a root from a client's description."""
        line = json.dumps({"root": root.hex(), **about}).encode()  # ASCII without a line break
        return cls(str(about["salt"]), line, "layout" in about)

    @property
    def about(self) -> dict[str, Any]:
        """The client's description."""
        description = json.loads(self.line)
        del description["root"]
        return dict(description)

    @property
    def cost_bytes(self) -> int:
        """Bytes of memory that the name costs."""
        return len(self.line) + NAME_BYTES


class Names:
    """A table of names by root, at most ``bytes_max`` in all."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._names: dict[bytes, Name] = {}
        self._of: dict[str, OrderedDict[bytes, None]] = {}  # roots by salt, the oldest name first
        self._bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, root: bytes) -> bool:
        return root in self._names

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._names)

    def get(self, root: bytes) -> Name | None:
        """Return the name of this root; None if there is none."""
        return self._names.get(root)

    def all(self) -> dict[bytes, Name]:
        """Return a copy of the table."""
        return dict(self._names)

    def lines(self) -> list[bytes]:
        """Return the lines of all names."""
        return [name.line for name in self._names.values()]

    def add(self, root: bytes, name: Name) -> None:
        """Add a name, in place of an earlier one of this root."""
        self.remove(root)
        self._names[root] = name
        self._of.setdefault(name.salt, OrderedDict())[root] = None
        self._count(name.salt, name.cost_bytes)

    def remove(self, root: bytes) -> Name | None:
        """Remove the name of this root and return it."""
        name = self._names.pop(root, None)
        if name is not None:
            del self._of[name.salt][root]
            self._count(name.salt, -name.cost_bytes)
        return name

    def _count(self, salt: str, size: int) -> None:
        self.bytes += size
        self._bytes_of[salt] = self._bytes_of.get(salt, 0) + size
        if not self._bytes_of[salt]:
            del self._bytes_of[salt], self._of[salt]

    def shed(self, has_no_pages: Callable[[bytes], bool], spare: bytes) -> int:
        """Remove names until the table is within its bound. Return how many were removed.

        Args:
            has_no_pages: returns True if a root has no pages. If such roots are among the oldest, their names are
                removed first.
            spare: the root that was added last. Its name is removed only if nothing else is left.
        """
        if self.bytes <= self.bytes_max:
            return 0
        before, goal = len(self._names), self.bytes_max - self.bytes_max // CLEARED_SHARE
        largest = sorted(self._bytes_of, key=self._bytes_of.__getitem__, reverse=True)
        level = _level([self._bytes_of[salt] for salt in largest], goal)
        for salt in largest:
            roots = self._of[salt]
            while self.bytes > goal and self._bytes_of.get(salt, 0) > level and (len(roots) > 1 or spare not in roots):
                self.remove(_oldest(roots, has_no_pages, spare))
            if self.bytes <= goal:
                break
        return before - len(self._names)


def _oldest(roots: OrderedDict[bytes, None], has_no_pages: Callable[[bytes], bool], spare: bytes) -> bytes:
    """Return the root whose name to remove: the first one without pages among the oldest, or else the last one
    checked."""
    root = spare
    for _ in range(LOOKS):
        root = next(iter(roots))
        if root != spare and has_no_pages(root):
            return root
        roots.move_to_end(root)
    return root if root != spare else next(iter(roots))


def _level(sizes: list[int], goal: int) -> int:
    """Return the limit of each of ``sizes`` (largest first) that makes their sum ``goal``."""
    rest = sum(sizes)
    for count, size in enumerate(sizes, 1):
        rest -= size
        level = (goal - rest) // count
        if count == len(sizes) or level >= sizes[count]:
            return max(0, level)
    return goal


NAMES_BYTES_MAX = 8 << 20  # names of roots that have pages, or had some
SPOKEN_BYTES_MAX = 1 << 20  # names of other roots
ROOTS_KEPT = 1024  # accounts without pages; when there are more, the oldest are removed
OTHER_TENANTS = "*"


class TenantQuota(Protocol):
    """How many bytes a tenant may have in each tier; None means no limit."""

    @property
    def salt(self) -> str:
        """The tenant; ``OTHER_TENANTS`` for every tenant without a quota of its own."""
        ...

    @property
    def dram(self) -> int | None:
        """Bytes in DRAM."""
        ...

    @property
    def nvme(self) -> int | None:
        """Bytes on NVMe."""
        ...


Leaf = tuple[int, int, int, int]
"""A page without children: last use (ms), extent, frame, generation."""


@dataclass(slots=True)
class Share:
    """The pages and bytes of one tenant in one tier.

    Attributes:
        salt: the tenant; None for unclaimed pages.
        roots: number of roots that count here. The share is removed with the last one.
        evicted: number of pages that were evicted to stay within the quota.
        refused: number of pages that the quota refused.
        leaves: hint -> heap of the pages without children; some entries are outdated.
        has_all_leaves: True if ``leaves`` lists every page without children.
    """

    salt: str | None
    quota: int | None
    roots: int = 0
    pages: int = 0
    bytes: int = 0
    expected_bytes: int = 0
    evicted: int = 0
    refused: int = 0
    leaves: dict[int, list[Leaf]] = field(default_factory=dict)
    has_all_leaves: bool = True


@dataclass(slots=True)
class RootAccount:
    """The pages and bytes of one root in one tier."""

    root: bytes
    share: Share
    pages: int = 0
    bytes: int = 0
    expected_bytes: int = 0


class TierAccounts:
    """The accounts of one tier. Root numbers start at 1; 0 means none.

    Attributes:
        limited: some tenant has a quota in this tier.
        suspect: a tenant may exceed its quota for another reason than a put.
    """

    def __init__(self, tier: Tier, quotas: dict[str, int | None], empty: OrderedDict[int, None] | None = None) -> None:
        self.tier = tier
        # Numbers of roots that might no longer have anything, in the order in which they became empty.
        self._empty = empty if empty is not None else OrderedDict()
        self.quotas = quotas
        self.limited = self.suspect = any(quota is not None for quota in quotas.values())
        self.shares: dict[str | None, Share] = {}
        self.roots: list[RootAccount] = [RootAccount(b"", Share("", None))]

    def share(self, salt: str | None) -> Share:
        """Return the share of a tenant, made on first use."""
        share = self.shares.get(salt)
        if share is None:
            quota = self.quotas.get(salt, self.quotas.get(OTHER_TENANTS)) if salt is not None else None
            share = self.shares[salt] = Share(salt, quota)
        return share

    def enter(self, number: int, root: bytes, salt: str | None) -> None:
        """Open an account for a root under this number. The number is new, or its former root gave it up."""
        share = self.share(salt)
        share.roots += 1
        if number < len(self.roots):
            self.roots[number] = RootAccount(root, share)
        else:
            self.roots.append(RootAccount(root, share))

    def leave(self, number: int) -> None:
        """Close the account of a root without pages."""
        self._drop_root(self.roots[number].share)

    def _drop_root(self, share: Share) -> None:
        share.roots -= 1
        if not share.roots:
            del self.shares[share.salt]

    def arrived(self, number: int, size: int) -> None:
        """Count an expected page as sealed."""
        self.expect(number, -size)
        self.add(number, 1, size)

    def add(self, number: int, pages: int, size: int) -> None:
        """Count pages as sealed; negative numbers take them out of the count."""
        account = self.roots[number]
        account.pages += pages
        account.bytes += size
        account.share.pages += pages
        account.share.bytes += size
        if not account.pages:
            self._empty[number] = None

    def expect(self, number: int, size: int) -> None:
        """Add ``size`` to the expected bytes; a negative ``size`` takes them out."""
        account = self.roots[number]
        account.expected_bytes += size
        account.share.expected_bytes += size
        if not account.expected_bytes:
            self._empty[number] = None

    def assign(self, number: int, salt: str) -> None:
        """Move the account of a root to another tenant."""
        account = self.roots[number]
        old, new = account.share, self.share(salt)
        if new is old:
            return
        for share, sign in ((old, -1), (new, 1)):
            share.pages += sign * account.pages
            share.bytes += sign * account.bytes
            share.expected_bytes += sign * account.expected_bytes
        account.share = new
        new.roots += 1
        self._drop_root(old)
        new.has_all_leaves = new.has_all_leaves and not account.pages
        self.suspect = self.limited

    def forget_leaves(self) -> None:
        """Drop the lists of pages without children, because they no longer match: pages have lost or gained
        children."""
        for share in self.shares.values():
            share.leaves.clear()
            share.has_all_leaves = False


class Tenants:
    """All roots and tenants of a node. Part of ``NodeState``.

    Attributes:
        holdings: the accounts of each tier.
        named: names in the node's book.
        spoken: names of roots under which nothing was stored yet.
        book: changes of ``named``, which the next decision returns as instructions.
    """

    def __init__(self, tiers: Iterable[Tier], quotas: Iterable[TenantQuota] = ()) -> None:
        quotas = list(quotas)
        tiers = dict.fromkeys(tiers)
        self._shown_if_used = set() if Tier.HBM in tiers else {Tier.HBM}  # left out of statistics where empty
        tiers[Tier.HBM] = None  # memory that engines mount is counted, but not limited by quotas
        sizes = {tier: {quota.salt: getattr(quota, tier, None) for quota in quotas} for tier in tiers}
        self._empty: OrderedDict[int, None] = OrderedDict()
        self.holdings = {tier: TierAccounts(tier, sizes[tier], self._empty) for tier in tiers}
        self.named = Names(NAMES_BYTES_MAX)
        self.spoken = Names(SPOKEN_BYTES_MAX)
        self.book: list[do.Instruction] = []
        self._numbers: dict[bytes, int] = {}
        self._unclaimed: set[bytes] = set()
        self._free_numbers: list[int] = []

    def number(self, root: bytes, restored: bool = False) -> int:
        """Return the number that frames store for this root. Call this when a page is or will be stored under the root.

        ``restored``: the page was found at startup; no client is storing it.
        """
        name = self.spoken.remove(root)
        if name is not None:
            self._remember(root, name)
        number = self._numbers.get(root)
        if number is None:
            self._drop_empty()
            number = self._numbers[root] = self._free_numbers.pop() if self._free_numbers else len(self._numbers) + 1
            name = self.named.get(root)
            salt = name.salt if name is not None else None if restored else ""
            if salt is None:
                self._unclaimed.add(root)
            for holdings in self.holdings.values():
                holdings.enter(number, root, salt)
            self._empty[number] = None
        elif self._unclaimed and not restored and root in self._unclaimed:
            self._claim(root, number, "")
        return number

    def is_known(self, root: bytes) -> bool:
        """Return True if pages of this root are stored, or a client has named it."""
        return root in self._numbers or root in self.named or root in self.spoken

    def salt(self, root: bytes) -> str:
        """Return the tenant of a root."""
        name = self.named.get(root) or self.spoken.get(root)
        if name is not None:
            return name.salt
        number = self._numbers.get(root)
        if number is None:
            return ""
        return next((h.roots[number].share.salt or "" for h in self.holdings.values()), "")

    def pages(self, root: bytes) -> int:
        """Return how many pages a root has in all tiers."""
        number = self._numbers.get(root)
        return sum(holdings.roots[number].pages for holdings in self.holdings.values()) if number is not None else 0

    def name_root(self, event: ev.NameRoot) -> list[do.Instruction]:
        """Handle ``events.NameRoot``."""
        self.name(event.root, event.about)
        return [do.Reply(detail={"named": True, "limited": self.limited(event.root)})]

    def limited(self, root: bytes) -> bool:
        """Return True if the root's tenant has a quota in the first tier."""
        quotas = next(iter(self.holdings.values())).quotas
        return quotas.get(self.salt(root), quotas.get(OTHER_TENANTS)) is not None

    def name(self, root: bytes, about: dict[str, Any]) -> bool:
        """Register a client's description of a root; return False if it is not used.

        The first description counts, until one with a layout comes.
        """
        earlier = self.named.get(root) or self.spoken.get(root)
        if earlier is not None and (earlier.has_layout or "layout" not in about):
            return False
        name, number = Name.of(root, about), self._numbers.get(root)
        if root in self.named or (number is not None and not self._is_empty(number)):
            self._remember(root, name)
        else:
            self.spoken.add(root, name)
            if self.spoken.shed(self._has_no_pages, root):
                self.book.append(do.ForgetNames())
        if number is not None and earlier is None:
            self._claim(root, number, name.salt)
        return True

    def restore(self, root: bytes, about: dict[str, Any]) -> None:
        """Restore a name that an earlier daemon wrote to the book."""
        self.named.add(root, Name.of(root, about))
        if self.named.shed(lambda _: True, root):
            self.book = [do.WriteNames(self.named.lines())]

    def _remember(self, root: bytes, name: Name) -> None:
        self.named.add(root, name)
        if self.named.shed(self._has_no_pages, root):
            self.book.append(do.WriteNames(self.named.lines()))
        else:
            self.book.append(do.WriteName(name.line))

    def _claim(self, root: bytes, number: int, salt: str) -> None:
        self._unclaimed.discard(root)
        for holdings in self.holdings.values():
            holdings.assign(number, salt)

    def _is_empty(self, number: int) -> bool:
        return not any(h.roots[number].pages or h.roots[number].expected_bytes for h in self.holdings.values())

    def _has_no_pages(self, root: bytes) -> bool:
        number = self._numbers.get(root)
        return number is None or self._is_empty(number)

    def _drop_empty(self) -> None:
        """Close the accounts that have been empty for longest, if there are too many."""
        while len(self._empty) >= ROOTS_KEPT:
            number, _ = self._empty.popitem(last=False)
            if number and self._is_empty(number):
                root = next(iter(self.holdings.values())).roots[number].root
                del self._numbers[root]
                self._unclaimed.discard(root)
                self._free_numbers.append(number)
                for holdings in self.holdings.values():
                    holdings.leave(number)

    def stats(self, salts: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return pages, bytes, quota_bytes (None: no limit), evicted_quota and refused (pages), by salt and tier.

        ``salts``: the tenants to include; None means all.
        """
        stats: dict[str, dict[str, Any]] = {}
        for tier, holdings in self.holdings.items():
            for salt in holdings.shares if salts is None else salts:
                share = holdings.shares.get(salt)
                if salt is not None and share is not None and (share.pages or tier not in self._shown_if_used):
                    stats.setdefault(salt, {})[str(tier)] = {
                        "pages": share.pages,
                        "bytes": share.bytes,
                        "quota_bytes": share.quota,
                        "evicted_quota": share.evicted,
                        "refused": share.refused,
                    }
        return stats

    def unclaimed(self) -> dict[str, int]:
        """Return the unclaimed bytes of each tier."""
        return {
            str(tier): holdings.shares[None].bytes if None in holdings.shares else 0
            for tier, holdings in self.holdings.items()
            if tier not in self._shown_if_used or (None in holdings.shares and holdings.shares[None].bytes)
        }
