"""DirectoryOwner: one owner's directory, the nodes whose entries in it may be incomplete, and tombstones. No I/O.

A node sends every owner a batch at least every ``idle_s``. An owner's entries of a node are complete for a caller if
the owner received a batch recently, and has all entries for the placement by which the caller chose the owner. For
every other node, the owner's answer says for which placement its entries are complete. From that the caller knows which
spans are in doubt, and asks the spans' other owner, or the node itself::

    members a b c, the link from a to b is cut         members a b c, and d joins
    FIND at b   -> entries of b; in doubt, a: 0        FIND at b   -> in doubt, a: the placement over a b c, until a
    FIND at c   -> entries of c                                       has announced the spans that b owns since d joined

The owner keeps tombstones of objects whose spans it owns. A node that has an entry for such an object may have an older
value. So it gets the tombstone, unless it has announced the same tombstone itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from kvstore.cluster.announce_plan import idle_s, pause_s
from kvstore.cluster.directory import AGAIN, AnnounceBatch, Directory, Doubt, Placement
from kvstore.model.tombstones import Tombstone, Tombstones

LATE_S: Final = 0.5  # a node whose batch is late by this time, plus two of its pauses, might have news
SILENT_IDLES: Final = 3  # an announcing node that the catalog does not list is forgotten after this many ``idle_s``
VIEWS_MAX: Final = 4  # sets of members to remember
DOUBTS_MAX: Final = 64  # number of doubts in one answer
TOMBSTONES_LOOK_S: Final = 0.5  # between two searches for nodes that need tombstones
CACHE_S: Final = 0.1  # a list of doubts is reused for this time


class DirectoryOwner:
    """See the module. The caller passes the time as ``now_s``, always of the same clock.

    Args:
        bytes_max: see ``Directory``.

    Attributes:
        directory: the entries.
        heard_s: node -> time of its last batch.
    """

    def __init__(self, bytes_max: int) -> None:
        self.directory = Directory(bytes_max)
        self.heard_s: dict[str, float] = {}
        self._members: tuple[str, ...] = ()
        self._views: dict[int, tuple[str, ...]] = {}  # by the number of the placement, the newest last
        self._cache: dict[int, tuple[float, tuple[Doubt, ...]]] = {}
        self._tombstones = Tombstones()
        self._holders: dict[bytes, tuple[int, set[str]]] = {}  # key -> veiled fingerprint, nodes with the tombstone
        self._wanted: tuple[float, dict[str, list[Tombstone]]] = 0.0, {}  # valid until then; by node

    def look(self, names: Iterable[str], now_s: float) -> None:
        """Set the members. Forget nodes that are no longer members, and silent nodes that never were members."""
        members = tuple(sorted(names))
        present, before = set(members), set(self._members)
        silent_s = now_s - SILENT_IDLES * idle_s(len(members))
        gone = [name for name in self.directory.nodes if name not in present]
        gone = [name for name in gone if name in before or self.heard_s.get(name, 0.0) < silent_s]
        if gone:
            self.directory.forget(gone)
            self._cache.clear()
            for name in gone:
                self.heard_s.pop(name, None)
        number = Placement(members).number if members != self._members or not self._views else 0
        if number:
            self._views.pop(number, None)
            self._views[number] = members
            for old in list(self._views)[:-VIEWS_MAX]:
                del self._views[old]
            self._cache.clear()
        self._members = members

    def apply(self, batch: AnnounceBatch, now_s: float) -> int:
        """Apply a batch; see ``Directory.apply``."""
        before = self.directory.placement(batch.node)
        next_number = self.directory.apply(batch)
        if batch.number == 0:  # the daemon is new, and may have lost its tombstones
            for _, nodes in self._holders.values():
                nodes.discard(batch.node)
        if next_number != AGAIN:  # a refused node might not be a member, and ``look`` would never forget it
            self.heard_s[batch.node] = now_s
            if self.directory.placement(batch.node) != before:
                self._cache.clear()
        return next_number

    def bury(self, tombstones: Sequence[Tombstone], pages: Sequence[int], node: str) -> None:
        """Keep tombstones.

        Args:
            pages: the veiled fingerprints of their keys.
            node: the node that has sent them, and so has them; "" for none.
        """
        for tombstone, page in zip(tombstones, pages, strict=True):
            if self._tombstones.add(tombstone):
                self._holders[tombstone.key] = page, set()
                self._wanted = 0.0, {}
            if node and self._tombstones.stamp(tombstone.key) == tombstone.stamp:
                self._holders[tombstone.key][1].add(node)
        if len(self._holders) > len(self._tombstones):  # the table was full
            self._holders = {key: held for key, held in self._holders.items() if self._tombstones.stamp(key)}

    def tombstones_for(self, node: str, now_s: float) -> list[Tombstone]:
        """Return the tombstones that this node needs, because it has entries for their objects."""
        until_s, wanted = self._wanted
        if now_s >= until_s:
            for key in self._tombstones.expire(int(now_s * 1e9)):
                del self._holders[key]
            wanted = self._find_wanted() if self._tombstones else {}
            self._wanted = now_s + TOMBSTONES_LOOK_S, wanted
        return [each for each in wanted.get(node, ()) if node not in self._holders.get(each.key, (0, {node}))[1]]

    def _find_wanted(self) -> dict[str, list[Tombstone]]:
        tombstones = self._tombstones.since(0)
        pages = np.array([self._holders[each.key][0] for each in tombstones], np.uint64)
        listed = self.directory.find(pages, len(self._members) + 1)
        wanted: dict[str, list[Tombstone]] = {}
        for page, node in zip(listed.pages.tolist(), listed.nodes.tolist(), strict=True):
            if name := listed.names[node]:
                wanted.setdefault(name, []).append(tombstones[page])
        return wanted

    def doubts(self, placement: int, now_s: float) -> tuple[Doubt, ...]:
        """Return the nodes whose entries might be incomplete here, for a caller that uses the placement with this
        number."""
        until_s, doubts = self._cache.get(placement, (0.0, ()))
        if now_s >= until_s:
            doubts = self._find_doubts(placement, now_s)
            if placement in self._views:
                self._cache[placement] = now_s + CACHE_S, doubts
        return doubts

    def _find_doubts(self, placement: int, now_s: float) -> tuple[Doubt, ...]:
        members = self._views.get(placement)
        if members is None:
            return (Doubt("", 0),)  # the caller may know nodes that this owner does not
        since_s = now_s - idle_s(len(members)) - LATE_S - 2 * pause_s(len(members))
        doubts = []
        for name in members:
            complete = self.directory.placement(name) if self.heard_s.get(name, 0.0) >= since_s else 0
            if complete != placement:
                doubts.append(Doubt(name, complete))
        if len(doubts) <= DOUBTS_MAX:
            return tuple(doubts)
        numbers = sorted({each.placement for each in doubts})
        return tuple(Doubt("", number) for number in (numbers if len(numbers) <= VIEWS_MAX else [0]))
