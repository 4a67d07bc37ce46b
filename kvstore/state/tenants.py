"""Tenants: whose pages they are, and how many bytes each tenant has in each tier.

A tenant is a salt. Pages know their root only; clients name the salt behind a root, once. Bytes are therefore counted
per root, under small numbers that every frame keeps (``Extent.owner``), and summed per tenant: naming a root moves all
its bytes at once. What is stored under a root without a name belongs to the tenant "". What a start finds of such roots
(names end with a reboot, NVMe does not) is *unclaimed* until its tenant speaks: nobody's quota counts it.

A frame that is being written for a root (reserved, or copied into from another tier) counts as ``coming`` until its
page is sealed or given up. Bytes and what is coming together stay within a quota::

    frame      RESERVED ──seal──> SEALED ──retire──> FREE
    counts as   coming             bytes              nothing
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstore.model.replica import Tier

ROOTS_MAX = 16384  # that keep names; beyond, those without pages are forgotten, longest ago first
FORGET_AT_ONCE = ROOTS_MAX // 16  # so that the search for them is paid for once in so many names
ROOTS_KEPT_MIN = 1024  # so many roots are counted before those without pages are looked for
EVERYBODY_ELSE = "*"


class Quota(Protocol):
    """How many bytes a tenant may have in each tier; None: as many as fit."""

    @property
    def salt(self) -> str:
        """Whose; ``EVERYBODY_ELSE``: every other tenant's."""
        ...

    @property
    def dram(self) -> int | None:
        """In DRAM."""
        ...

    @property
    def nvme(self) -> int | None:
        """On NVMe."""
        ...


Leaf = tuple[int, int, int, int]
"""A page that may leave first: last use (ms), extent, frame, generation."""


@dataclass(slots=True)
class Share:
    """What one tenant has in one tier. ``leaves``: heap of pages without children, some of them outdated.

    ``salt`` None: what is unclaimed. ``roots``: how many count here; with the last one the share is forgotten.
    """

    salt: str | None
    quota: int | None
    roots: int = 0
    pages: int = 0
    bytes: int = 0
    coming: int = 0
    evicted: int = 0  # pages, to stay within the quota
    refused: int = 0
    leaves: list[Leaf] = field(default_factory=list)
    complete: bool = True  # ``leaves`` has them all


@dataclass(slots=True)
class Held:
    """What one root has in one tier."""

    root: bytes
    share: Share
    pages: int = 0
    bytes: int = 0
    coming: int = 0


class Holdings:
    """One tier's accounts. Root numbers start at 1; 0 is nobody.

    ``suspect``: a tenant may have more than its quota here, for other reasons than that it stored something.
    """

    def __init__(self, tier: Tier, quotas: dict[str, int | None]) -> None:
        self.tier = tier
        self.quotas = quotas
        self.limited = self.suspect = any(quota is not None for quota in quotas.values())
        self.shares: dict[str | None, Share] = {}
        self.roots: list[Held] = [Held(b"", Share("", None))]

    def share(self, salt: str | None) -> Share:
        """A tenant's; made on first use."""
        share = self.shares.get(salt)
        if share is None:
            quota = self.quotas.get(salt, self.quotas.get(EVERYBODY_ELSE)) if salt is not None else None
            share = self.shares[salt] = Share(salt, quota)
        return share

    def enter(self, number: int, root: bytes, salt: str | None) -> None:
        """Count a root's pages under this number, which is new or was given up."""
        share = self.share(salt)
        share.roots += 1
        if number < len(self.roots):
            self.roots[number] = Held(root, share)
        else:
            self.roots.append(Held(root, share))

    def leave(self, number: int) -> None:
        """This number's root has no pages and is forgotten."""
        self._without(self.roots[number].share)

    def _without(self, share: Share) -> None:
        share.roots -= 1
        if not share.roots:
            del self.shares[share.salt]

    def arrived(self, number: int, size: int) -> None:
        """A page that was coming is sealed."""
        self.expect(number, -size)
        self.add(number, 1, size)

    def add(self, number: int, pages: int, size: int) -> None:
        """These pages are sealed now; negative: they are gone."""
        held = self.roots[number]
        held.pages += pages
        held.bytes += size
        held.share.pages += pages
        held.share.bytes += size

    def expect(self, number: int, size: int) -> None:
        """So many bytes are coming; negative: not any more."""
        held = self.roots[number]
        held.coming += size
        held.share.coming += size

    def rename(self, number: int, salt: str) -> None:
        """This root's pages are that tenant's."""
        held = self.roots[number]
        old, new = held.share, self.share(salt)
        if new is old:
            return
        for share, sign in ((old, -1), (new, 1)):
            share.pages += sign * held.pages
            share.bytes += sign * held.bytes
            share.coming += sign * held.coming
        held.share = new
        new.roots += 1
        self._without(old)
        new.complete = new.complete and not held.pages
        self.suspect = self.limited

    def recount(self) -> None:
        """Which pages have no children has changed in ways nobody listed."""
        for share in self.shares.values():
            share.leaves.clear()
            share.complete = False


class Tenants:
    """All roots and tenants of a node. Part of ``NodeState``."""

    def __init__(self, tiers: Iterable[Tier], quotas: Iterable[Quota] = ()) -> None:
        quotas = list(quotas)
        sizes = {
            Tier.DRAM: {quota.salt: quota.dram for quota in quotas},
            Tier.NVME: {quota.salt: quota.nvme for quota in quotas},
        }
        self.holdings = {tier: Holdings(tier, sizes[tier]) for tier in tiers}
        self.named: dict[bytes, dict[str, Any]] = {}  # root -> what its clients said of it; "salt" among it
        self.unnamed = 0  # times that a name was not kept, see ``name``
        self.forgotten = 0  # names
        self._numbers: dict[bytes, int] = {}
        self._unclaimed: set[bytes] = set()
        self._spare: list[int] = []
        self._tidy_at = ROOTS_KEPT_MIN
        self._patience = 0

    def number(self, root: bytes, found: bool = False) -> int:
        """The number that frames of this root's pages keep. ``found``: by a start, and not stored by a client now."""
        number = self._numbers.get(root)
        if number is None:
            if len(self._numbers) >= self._tidy_at:
                self._tidy()
            number = self._numbers[root] = self._spare.pop() if self._spare else len(self._numbers) + 1
            about = self.named.get(root)
            salt = about["salt"] if about is not None else None if found else ""
            if salt is None:
                self._unclaimed.add(root)
            for holdings in self.holdings.values():
                holdings.enter(number, root, salt)
        elif self._unclaimed and not found and root in self._unclaimed:
            self._claim(root, number, "")
        return number

    def known(self, root: bytes) -> bool:
        """Pages of this root are here, or a client has spoken of it."""
        return root in self._numbers or root in self.named

    def salt(self, root: bytes) -> str:
        """The tenant that a root belongs to."""
        about = self.named.get(root)
        return str(about["salt"]) if about is not None else ""

    def pages(self, root: bytes) -> int:
        """How many pages a root has, in all tiers together."""
        number = self._numbers.get(root)
        return sum(holdings.roots[number].pages for holdings in self.holdings.values()) if number is not None else 0

    def name(self, root: bytes, about: dict[str, Any]) -> bool:
        """A client said whose this root is. Whether that is news: the first word counts, until one tells the layout.

        Where ``ROOTS_MAX`` roots have names and pages no more names are kept: its pages are the tenant "" 's.
        """
        known = self.named.get(root)
        if known is not None:
            news = "layout" in about and "layout" not in known
            if news:
                self.named[root] = about
            return news
        if len(self.named) >= ROOTS_MAX:
            self._forget_names()
        kept = len(self.named) < ROOTS_MAX
        if kept:
            self.named[root] = about
        else:
            self.unnamed += 1
        number = self._numbers.get(root)
        if number is not None:
            self._claim(root, number, str(about["salt"]) if kept else "")
        return kept

    def _claim(self, root: bytes, number: int, salt: str) -> None:
        self._unclaimed.discard(root)
        for holdings in self.holdings.values():
            holdings.rename(number, salt)

    def _bare(self, number: int) -> bool:
        return not any(h.roots[number].pages or h.roots[number].coming for h in self.holdings.values())

    def _forget_names(self) -> None:
        """Of roots without pages, some. Where there are few, they are looked for again when as many have asked."""
        self._patience = max(0, self._patience - 1)
        if self._patience:
            return
        bare = [root for root in self.named if (n := self._numbers.get(root)) is None or self._bare(n)]
        for root in bare[:FORGET_AT_ONCE]:
            del self.named[root]
            if root in self._numbers:
                self._forget(root)
        self.forgotten += len(bare[:FORGET_AT_ONCE])
        self._patience = 0 if len(bare) >= FORGET_AT_ONCE else FORGET_AT_ONCE

    def _forget(self, root: bytes) -> None:
        number = self._numbers.pop(root)
        self._unclaimed.discard(root)
        self._spare.append(number)
        for holdings in self.holdings.values():
            holdings.leave(number)

    def _tidy(self) -> None:
        for root in [root for root, number in self._numbers.items() if self._bare(number)]:
            self._forget(root)
        self._tidy_at = max(ROOTS_KEPT_MIN, 2 * len(self._numbers))

    def stats(self, salts: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Per salt (None: of all) and tier: pages, bytes, quota_bytes (None: none), evicted_quota, refused (pages)."""
        found: dict[str, dict[str, Any]] = {}
        for tier, holdings in self.holdings.items():
            for salt in holdings.shares if salts is None else salts:
                share = holdings.shares.get(salt)
                if salt is not None and share is not None:
                    found.setdefault(salt, {})[str(tier)] = {
                        "pages": share.pages,
                        "bytes": share.bytes,
                        "quota_bytes": share.quota,
                        "evicted_quota": share.evicted,
                        "refused": share.refused,
                    }
        return found

    def unclaimed(self) -> dict[str, int]:
        """Bytes per tier whose tenant has not spoken since the start."""
        return {
            str(tier): holdings.shares[None].bytes if None in holdings.shares else 0
            for tier, holdings in self.holdings.items()
        }
