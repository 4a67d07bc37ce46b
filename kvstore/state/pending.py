"""The pending table: pages reserved under a key and not sealed yet.

A pending page lives from reserve until every shard has sealed (it becomes a SEALED frame) or until it is *doomed*:
revoked by a shard, past its deadline, or its writer died. A doomed page's frame is QUARANTINED while any of its
writers might still store into it, and free once each of them has spoken (sealed, revoked) or is proven dead.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.model.replica import Address

GROUP = 1 << 63  # of pages that are written into granted frames; the rest of the number is their least generation


def was_granted(group: int, address: Address) -> bool:
    """Whether a record of that group is of a page that was written into a granted frame."""
    return group >= GROUP and group ^ GROUP <= address.generation


@dataclass(slots=True)
class Pending:
    """One reserved page. ``writing`` are the shards (with their sessions) that may still store into the frame."""

    key: bytes
    parent: bytes
    at_root: bool
    address: Address
    group: int
    shards: int
    until_ns: int
    writing: dict[int, int] = field(default_factory=dict)
    sealed_mask: int = 0
    doomed: bool = False
    holds_parent: bool = False
    root: bytes = b""
    hint: int = 0  # see ``kvstore.model.retention``
    continues: bool = True  # it hangs on a page of the same request, not on what an earlier one left
    begun: bool = False  # it is being written into a frame that was granted: see ``begun``

    @property
    def complete(self) -> bool:
        """Every shard has sealed."""
        return self.sealed_mask == (1 << self.shards) - 1

    def open_to(self, shard: int, shards: int, session: int) -> bool:
        """True where the session may write the shard: it is not sealed and no other session writes it. A session that
        already writes it lost the reply and asks again: only one of its writers at a time asks for a shard
        (``Claims``)."""
        mine = self.writing.get(shard, session) == session
        return shards == self.shards and mine and not self.sealed_mask >> shard & 1


class PendingTable:
    """Pending pages by address, by key (several groups may write one key) and by parent."""

    def __init__(self) -> None:
        self.by_address: dict[Address, Pending] = {}
        self._by_key: dict[bytes, list[Pending]] = {}
        self._by_parent: dict[bytes, list[Pending]] = {}

    def __len__(self) -> int:
        return len(self.by_address)

    def add(self, page: Pending) -> None:
        """A reservation was made."""
        self.by_address[page.address] = page
        if not page.doomed:
            self._by_key.setdefault(page.key, []).append(page)
            self._by_parent.setdefault(page.parent, []).append(page)

    def find(self, root: bytes, key: bytes, group: int) -> Pending | None:
        """The live reservation of ``key`` by ``group``; a page of another root is another page."""
        return next((page for page in self._by_key.get(key, ()) if page.group == group and page.root == root), None)

    def coming(self, root: bytes, key: bytes) -> bool:
        """Whether any session has reserved that page."""
        return any(page.root == root for page in self._by_key.get(key, ()))

    def named(self, key: bytes) -> Pending | None:
        """The reservation readers are shown for ``key``: the earliest live one."""
        pages = self._by_key.get(key)
        return pages[0] if pages else None

    def children(self, key: bytes) -> list[Pending]:
        """Live reservations whose page follows ``key``."""
        return list(self._by_parent.get(key, ()))

    def doom(self, page: Pending) -> None:
        """No longer live: readers and other writers do not see it. Its frame stays until ``remove``."""
        page.doomed = True
        self._unlist(page)

    def remove(self, page: Pending) -> None:
        """Sealed, or its frame is free."""
        del self.by_address[page.address]
        if not page.doomed:
            self._unlist(page)

    def _unlist(self, page: Pending) -> None:
        for table, key in ((self._by_key, page.key), (self._by_parent, page.parent)):
            pages = table[key]
            pages.remove(page)
            if not pages:
                del table[key]
