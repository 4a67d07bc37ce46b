"""Tenants: whose pages they are, and how many bytes each tenant has in each tier.

A tenant is a salt. Pages know their root only; clients name the salt behind a root, once. Bytes are therefore counted
per root, under small numbers that every frame keeps (``Extent.owner``), and summed per tenant: naming a root moves all
its bytes at once. What is stored under a root without a name belongs to the tenant "". What a start finds of such roots
(names end with a reboot, NVMe does not) is *unclaimed* until its tenant names it: no quota counts it.

A root's name is remembered for long, and written into the node's book, when pages are stored under it: what reads and
lookups say of roots that store nothing passes. Both are bounded in bytes (``state.tenants``); an account keeps its
tenant as long as it has pages, whether its name is remembered or not.

A frame that is being written for a root (reserved, or copied into from another tier) counts as ``coming`` until its
page is sealed or given up. Bytes and what is coming together stay within a quota::

    frame      RESERVED ──seal──> SEALED ──retire──> FREE
    counts as   coming             bytes              nothing

Names: what clients said of roots (salt, adapter, model, layout), within a bound of bytes that tenants share.

What was said of a root is a line of JSON, as the node's book has it, and counts as its bytes and ``NAME_BYTES`` for the
tables around it. Where all lines together take more than ``bytes_max``, the tenants with the most give way, down to a
common level: a tenant with many names loses its oldest ones, and no tenant loses any for one that has more.

Worked example: of 100 bytes tenant a has 90 and b says 30 more. There may be 93 (a sixteenth is cleared at once, so
that the search is paid for once per batch of names): the level is 63, and a loses names until that is so.
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

NAME_BYTES: Final = 512  # of a name, in addition to its line: its root, its places in two tables, its objects
CLEARED_SHARE: Final = 16  # one part in this many is cleared at once
LOOKS: Final = 8  # of a tenant's oldest names, for one whose root has no pages


@dataclass(frozen=True, slots=True)
class Name:
    """What a client said of a root. ``whole``: its layout is among it."""

    salt: str
    line: bytes
    whole: bool

    @classmethod
    def of(cls, root: bytes, about: dict[str, Any]) -> Name:
        """The name that a client registered for a root."""
        line = json.dumps({"root": root.hex(), **about}).encode()  # in ASCII, without a line end inside
        return cls(str(about["salt"]), line, "layout" in about)

    @property
    def about(self) -> dict[str, Any]:
        """The description as the client gave it."""
        said = json.loads(self.line)
        del said["root"]
        return dict(said)

    @property
    def cost_bytes(self) -> int:
        """What remembering it takes."""
        return len(self.line) + NAME_BYTES


class Names:
    """A table of names, at most ``bytes_max`` together."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._names: dict[bytes, Name] = {}
        self._of: dict[str, OrderedDict[bytes, None]] = {}  # by salt, what was said longest ago first
        self._bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, root: bytes) -> bool:
        return root in self._names

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._names)

    def get(self, root: bytes) -> Name | None:
        """What was said of this root."""
        return self._names.get(root)

    def all(self) -> dict[bytes, Name]:
        """A copy of the table: names do not change."""
        return dict(self._names)

    def lines(self) -> list[bytes]:
        """All lines."""
        return [name.line for name in self._names.values()]

    def add(self, root: bytes, name: Name) -> None:
        """Remember this, in place of what was said before."""
        self.remove(root)
        self._names[root] = name
        self._of.setdefault(name.salt, OrderedDict())[root] = None
        self._count(name.salt, name.cost_bytes)

    def remove(self, root: bytes) -> Name | None:
        """Forget what was said of this root, and return it."""
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

    def shed(self, bare: Callable[[bytes], bool], spare: bytes) -> int:
        """Where there is more than may be, forget names; how many.

        Args:
            bare: whether a root has no pages: those go first, as far as one look tells.
            spare: the root that was said just now, which stays.
        """
        if self.bytes <= self.bytes_max:
            return 0
        before, goal = len(self._names), self.bytes_max - self.bytes_max // CLEARED_SHARE
        largest = sorted(self._bytes_of, key=self._bytes_of.__getitem__, reverse=True)
        level = _level([self._bytes_of[salt] for salt in largest], goal)
        for salt in largest:
            roots = self._of[salt]
            while self.bytes > goal and self._bytes_of.get(salt, 0) > level and (len(roots) > 1 or spare not in roots):
                self.remove(_oldest(roots, bare, spare))
            if self.bytes <= goal:
                break
        return before - len(self._names)


def _oldest(roots: OrderedDict[bytes, None], bare: Callable[[bytes], bool], spare: bytes) -> bytes:
    """The name to forget: of the oldest few the first without pages, or the last one looked at."""
    root = spare
    for _ in range(LOOKS):
        root = next(iter(roots))
        if root != spare and bare(root):
            return root
        roots.move_to_end(root)
    return root if root != spare else next(iter(roots))


def _level(sizes: list[int], goal: int) -> int:
    """How much each may have, so that all together have ``goal``. ``sizes``: largest first."""
    rest = sum(sizes)
    for count, size in enumerate(sizes, 1):
        rest -= size
        level = (goal - rest) // count
        if count == len(sizes) or level >= sizes[count]:
            return max(0, level)
    return goal


NAMES_BYTES_MAX = 8 << 20  # of roots that have pages, or had some
SPOKEN_BYTES_MAX = 1 << 20  # of roots that may have some soon
ROOTS_KEPT = 1024  # accounts without pages: more are forgotten, longest ago first
EVERYBODY_ELSE = "*"


class TenantQuota(Protocol):
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
    """What one tenant has in one tier. ``leaves``: by hint a heap of pages without children, some of them outdated.

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
    leaves: dict[int, list[Leaf]] = field(default_factory=dict)
    complete: bool = True  # ``leaves`` has them all


@dataclass(slots=True)
class RootAccount:
    """What one root has in one tier."""

    root: bytes
    share: Share
    pages: int = 0
    bytes: int = 0
    coming: int = 0


class TierAccounts:
    """One tier's accounts. Root numbers start at 1; 0 means none.

    ``suspect``: a tenant may have more than its quota here, for other reasons than that it stored something.
    """

    def __init__(self, tier: Tier, quotas: dict[str, int | None], empty: OrderedDict[int, None] | None = None) -> None:
        self.tier = tier
        self._empty = (
            empty if empty is not None else OrderedDict()
        )  # numbers that may have nothing any more, in the order in which that came
        self.quotas = quotas
        self.limited = self.suspect = any(quota is not None for quota in quotas.values())
        self.shares: dict[str | None, Share] = {}
        self.roots: list[RootAccount] = [RootAccount(b"", Share("", None))]

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
            self.roots[number] = RootAccount(root, share)
        else:
            self.roots.append(RootAccount(root, share))

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
        if not held.pages:
            self._empty[number] = None

    def expect(self, number: int, size: int) -> None:
        """Add ``size`` to the bytes that are expected; negative: they are no longer expected."""
        held = self.roots[number]
        held.coming += size
        held.share.coming += size
        if not held.coming:
            self._empty[number] = None

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
        """Note that pages may have lost or gained children in ways that were not listed."""
        for share in self.shares.values():
            share.leaves.clear()
            share.complete = False


class Tenants:
    """All roots and tenants of a node. Part of ``NodeState``."""

    def __init__(self, tiers: Iterable[Tier], quotas: Iterable[TenantQuota] = ()) -> None:
        quotas = list(quotas)
        tiers = dict.fromkeys(tiers)
        self._counted = set() if Tier.HBM in tiers else {Tier.HBM}  # told where there is any
        tiers[Tier.HBM] = None  # what engines mount is counted, and not charged
        sizes = {tier: {quota.salt: getattr(quota, tier, None) for quota in quotas} for tier in tiers}
        self._empty: OrderedDict[int, None] = OrderedDict()
        self.holdings = {tier: TierAccounts(tier, sizes[tier], self._empty) for tier in tiers}
        self.named = Names(NAMES_BYTES_MAX)  # stand in the book
        self.spoken = Names(SPOKEN_BYTES_MAX)  # of roots under which nothing was stored yet
        self.book: list[do.Instruction] = []  # what changed in ``named``, for the next decision to carry
        self._numbers: dict[bytes, int] = {}
        self._unclaimed: set[bytes] = set()
        self._spare: list[int] = []

    def number(self, root: bytes, found: bool = False) -> int:
        """The number that frames of this root's pages keep: something is, or is about to be, stored under it.

        ``found``: by a start, and not stored by a client now.
        """
        spoken = self.spoken.remove(root)
        if spoken is not None:
            self._remember(root, spoken)
        number = self._numbers.get(root)
        if number is None:
            self._tidy()
            number = self._numbers[root] = self._spare.pop() if self._spare else len(self._numbers) + 1
            name = self.named.get(root)
            salt = name.salt if name is not None else None if found else ""
            if salt is None:
                self._unclaimed.add(root)
            for holdings in self.holdings.values():
                holdings.enter(number, root, salt)
            self._empty[number] = None
        elif self._unclaimed and not found and root in self._unclaimed:
            self._claim(root, number, "")
        return number

    def known(self, root: bytes) -> bool:
        """Pages of this root are here, or a client has spoken of it."""
        return root in self._numbers or root in self.named or root in self.spoken

    def salt(self, root: bytes) -> str:
        """The tenant that a root belongs to."""
        name = self.named.get(root) or self.spoken.get(root)
        if name is not None:
            return name.salt
        number = self._numbers.get(root)
        if number is None:
            return ""
        return next((h.roots[number].share.salt or "" for h in self.holdings.values()), "")

    def pages(self, root: bytes) -> int:
        """How many pages a root has, in all tiers together."""
        number = self._numbers.get(root)
        return sum(holdings.roots[number].pages for holdings in self.holdings.values()) if number is not None else 0

    def named_by(self, event: ev.NameRoot) -> list[do.Instruction]:
        """See ``events.NameRoot``."""
        self.name(event.root, event.about)
        return [do.Reply(detail={"named": True, "limited": self.limited(event.root)})]

    def limited(self, root: bytes) -> bool:
        """Its tenant has a quota where clients write."""
        quotas = next(iter(self.holdings.values())).quotas
        return quotas.get(self.salt(root), quotas.get(EVERYBODY_ELSE)) is not None

    def name(self, root: bytes, about: dict[str, Any]) -> bool:
        """A client said whose this root is. Whether that is news: the first word counts, until one tells the layout."""
        known = self.named.get(root) or self.spoken.get(root)
        if known is not None and (known.whole or "layout" not in about):
            return False
        name, number = Name.of(root, about), self._numbers.get(root)
        if root in self.named or (number is not None and not self._bare(number)):
            self._remember(root, name)
        else:
            self.spoken.add(root, name)
            if self.spoken.shed(self._is_bare, root):
                self.book.append(do.ForgetNames())
        if number is not None and known is None:
            self._claim(root, number, name.salt)
        return True

    def restore(self, root: bytes, about: dict[str, Any]) -> None:
        """A name of the daemon before."""
        self.named.add(root, Name.of(root, about))
        if self.named.shed(lambda _: True, root):
            self.book = [do.WriteNames(self.named.lines())]

    def _remember(self, root: bytes, name: Name) -> None:
        self.named.add(root, name)
        if self.named.shed(self._is_bare, root):
            self.book.append(do.WriteNames(self.named.lines()))
        else:
            self.book.append(do.WriteName(name.line))

    def _claim(self, root: bytes, number: int, salt: str) -> None:
        self._unclaimed.discard(root)
        for holdings in self.holdings.values():
            holdings.rename(number, salt)

    def _bare(self, number: int) -> bool:
        return not any(h.roots[number].pages or h.roots[number].coming for h in self.holdings.values())

    def _is_bare(self, root: bytes) -> bool:
        number = self._numbers.get(root)
        return number is None or self._bare(number)

    def _tidy(self) -> None:
        """Forget accounts that have had nothing for longest."""
        while len(self._empty) >= ROOTS_KEPT:
            number, _ = self._empty.popitem(last=False)
            if number and self._bare(number):
                root = next(iter(self.holdings.values())).roots[number].root
                del self._numbers[root]
                self._unclaimed.discard(root)
                self._spare.append(number)
                for holdings in self.holdings.values():
                    holdings.leave(number)

    def stats(self, salts: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Per salt (None: of all) and tier: pages, bytes, quota_bytes (None: none), evicted_quota, refused (pages)."""
        found: dict[str, dict[str, Any]] = {}
        for tier, holdings in self.holdings.items():
            for salt in holdings.shares if salts is None else salts:
                share = holdings.shares.get(salt)
                if salt is not None and share is not None and (share.pages or tier not in self._counted):
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
            if tier not in self._counted or (None in holdings.shares and holdings.shares[None].bytes)
        }
