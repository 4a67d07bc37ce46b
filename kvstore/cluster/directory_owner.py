"""DirectoryOwner: one owner's directory, and the nodes whose entries in it may be incomplete. No I/O.

A node sends every owner at least one batch per second. An owner's entries of a node are complete for a caller if the
owner received a batch recently, and has all entries for the placement by which the caller chose the owner. For every
other node, the owner's answer says for which placement its entries are complete. From that the caller knows which spans
are in doubt, and asks the spans' other owner, or the node itself::

    members a b c, the link from a to b is cut         members a b c, and d joins
    FIND at b   -> entries of b; unsure of a: 0        FIND at b   -> unsure of a: the placement over a b c, until a
    FIND at c   -> entries of c                                       has announced the spans that b owns since d joined
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvstore.cluster.announce_plan import pause_s
from kvstore.cluster.directory import AGAIN, AnnounceBatch, Directory, Placement, Unsure

IDLE_S: Final = 1.0  # a node without news for an owner sends an empty batch after this time
LATE_S: Final = 1.5  # a node that has sent nothing for this time, plus two of its pauses, may have news
SILENT_S: Final = 3.0  # an announcing node that the catalog does not list is forgotten after this time of silence
VIEWS_MAX: Final = 4  # sets of members to remember
UNSURE_MAX: Final = 64  # unsure nodes in one answer
KEPT_S: Final = 0.1  # the list of unsure nodes is reused for this time


class DirectoryOwner:
    """See the module. Time arrives as ``now_s``, of one clock.

    Args:
        bytes_max: see ``Directory``.

    Attributes:
        directory: the entries.
        heard_s: when each node last sent a batch.
    """

    def __init__(self, bytes_max: int) -> None:
        self.directory = Directory(bytes_max)
        self.heard_s: dict[str, float] = {}
        self._members: tuple[str, ...] = ()
        self._views: dict[int, tuple[str, ...]] = {}  # by the number of the placement, the newest last
        self._kept: dict[int, tuple[float, tuple[Unsure, ...]]] = {}

    def look(self, names: Iterable[str], now_s: float) -> None:
        """Set the members. Forgets nodes that have left, and silent nodes that never were members."""
        members = tuple(sorted(names))
        present, before = set(members), set(self._members)
        for name in self.directory.nodes:
            silent = now_s > self.heard_s.get(name, 0.0) + SILENT_S
            if name not in present and (silent or name in before):
                self.directory.forget(name)
                self.heard_s.pop(name, None)
                self._kept.clear()
        number = Placement(members).number if members != self._members or not self._views else 0
        if number:
            self._views.pop(number, None)
            self._views[number] = members
            for old in list(self._views)[:-VIEWS_MAX]:
                del self._views[old]
            self._kept.clear()
        self._members = members

    def told(self, batch: AnnounceBatch, now_s: float) -> int:
        """Apply a batch; see ``Directory.told``."""
        before = self.directory.placed(batch.node)
        wanted = self.directory.told(batch)
        if wanted != AGAIN:  # a refused node may not be a member, and ``look`` would never forget it
            self.heard_s[batch.node] = now_s
            if self.directory.placed(batch.node) != before:
                self._kept.clear()
        return wanted

    def unsure(self, placement: int, now_s: float) -> tuple[Unsure, ...]:
        """Nodes whose entries may be incomplete here, for a caller that uses the placement with this number."""
        until_s, found = self._kept.get(placement, (0.0, ()))
        if now_s >= until_s:
            found = self._unsure(placement, now_s)
            if placement in self._views:
                self._kept[placement] = now_s + KEPT_S, found
        return found

    def _unsure(self, placement: int, now_s: float) -> tuple[Unsure, ...]:
        members = self._views.get(placement)
        if members is None:
            return (Unsure("", 0),)  # the caller may know nodes that this owner does not
        since_s = now_s - LATE_S - 2 * pause_s(len(members))
        found = []
        for name in members:
            placed = self.directory.placed(name) if self.heard_s.get(name, 0.0) >= since_s else 0
            if placed != placement:
                found.append(Unsure(name, placed))
        if len(found) <= UNSURE_MAX:
            return tuple(found)
        numbers = sorted({each.placed for each in found})
        return tuple(Unsure("", placed) for placed in (numbers if len(numbers) <= VIEWS_MAX else [0]))
