"""Tenants: whose pages they are, and how many bytes each tenant has in each tier.

A tenant is a salt. Pages know their root only; clients name the salt behind a root, once. Bytes are therefore counted
per root, under small numbers that every frame keeps (``Extent.owner``), and summed per tenant: naming a root moves all
its bytes at once. Pages of roots that nobody named belong to the tenant "".

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

ROOTS_MAX = 8192  # named ones; beyond, those named longest ago that have no pages are forgotten
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
    """What one tenant has in one tier. ``leaves``: heap of pages without children, some of them outdated."""

    salt: str
    quota: int | None
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
    """One tier's accounts. Root numbers start at 1; 0 is nobody."""

    def __init__(self, tier: Tier, quotas: dict[str, int | None]) -> None:
        self.tier = tier
        self.quotas = quotas
        self.limited = any(quota is not None for quota in quotas.values())
        self.shares: dict[str, Share] = {}
        self.roots: list[Held] = [Held(b"", Share("", None))]

    def share(self, salt: str) -> Share:
        """A tenant's; made on first use."""
        share = self.shares.get(salt)
        if share is None:
            quota = self.quotas.get(salt, self.quotas.get(EVERYBODY_ELSE))
            share = self.shares[salt] = Share(salt, quota)
        return share

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
        for share, sign in ((old, -1), (new, 1)):
            share.pages += sign * held.pages
            share.bytes += sign * held.bytes
            share.coming += sign * held.coming
        held.share = new
        new.complete = new.complete and not held.pages

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
        self._numbers: dict[bytes, int] = {}
        self._spare: list[int] = []
        self._tidy_at = ROOTS_KEPT_MIN

    def number(self, root: bytes) -> int:
        """The number that frames of this root's pages keep."""
        number = self._numbers.get(root)
        if number is None:
            if len(self._numbers) >= self._tidy_at:
                self._tidy()
            number = self._numbers[root] = self._spare.pop() if self._spare else len(self._numbers) + 1
            salt = self.salt(root)
            for holdings in self.holdings.values():
                held = Held(root, holdings.share(salt))
                if number < len(holdings.roots):
                    holdings.roots[number] = held
                else:
                    holdings.roots.append(held)
        return number

    def salt(self, root: bytes) -> str:
        """The tenant that a root belongs to."""
        about = self.named.get(root)
        return str(about["salt"]) if about is not None else ""

    def name(self, root: bytes, about: dict[str, Any]) -> bool:
        """A client said whose this root is. Whether that is news."""
        if self.named.get(root) == about:
            return False
        self.named.pop(root, None)
        self.named[root] = about
        number = self._numbers.get(root)
        if number is not None:
            for holdings in self.holdings.values():
                holdings.rename(number, str(about["salt"]))
        if len(self.named) > ROOTS_MAX:
            self._forget_names()
        return True

    def _bare(self, number: int) -> bool:
        return not any(h.roots[number].pages or h.roots[number].coming for h in self.holdings.values())

    def _forget_names(self) -> None:
        newest = next(reversed(self.named))
        for root in [root for root in self.named if root != newest]:
            number = self._numbers.get(root)
            if number is None or self._bare(number):
                del self.named[root]
                if number is not None:
                    self._forget(root)
                break

    def _forget(self, root: bytes) -> None:
        number = self._numbers.pop(root)
        self._spare.append(number)

    def _tidy(self) -> None:
        for root in [root for root, number in self._numbers.items() if self._bare(number)]:
            self._forget(root)
        self._tidy_at = max(ROOTS_KEPT_MIN, 2 * len(self._numbers))

    def stats(self) -> dict[str, dict[str, Any]]:
        """Per salt and tier: pages, bytes, quota_bytes (None: none), evicted_quota and refused (pages)."""
        found: dict[str, dict[str, Any]] = {}
        for tier, holdings in self.holdings.items():
            for salt, share in holdings.shares.items():
                found.setdefault(salt, {})[str(tier)] = {
                    "pages": share.pages,
                    "bytes": share.bytes,
                    "quota_bytes": share.quota,
                    "evicted_quota": share.evicted,
                    "refused": share.refused,
                }
        return found
