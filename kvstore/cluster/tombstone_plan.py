"""``TombstonePlan``: which tombstones a node sends to the owners of the directory. No I/O.

A tombstone belongs to the owners of its object's span, as the entries of the object do. An owner that is a new process
has forgotten all of them, and after a change of the members a span may have other owners. Then the node sends every
tombstone again that belongs to the owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.cluster.directory import Placement
from kvstore.model.prefix import fingerprints
from kvstore.model.tombstones import Tombstone


class TombstonePlan:
    """The plan of one node."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[str, int, int]] = {}  # owner -> its process, the placement, the last number

    def start(self, owner: str, process: str, placement: Placement) -> int:
        """Return the number of the last tombstone that the owner has got; 0 if it needs all of them."""
        known_process, number, last = self._sent.get(owner, ("", 0, 0))
        return last if (known_process, number) == (process, placement.number) else 0

    def for_owner(self, owner: str, placement: Placement, tombstones: Sequence[Tombstone]) -> list[Tombstone]:
        """Return the tombstones that belong to this owner."""
        if not tombstones or owner not in placement.nodes:
            return []
        owners = placement.owners(fingerprints(b"".join([each.key for each in tombstones])))
        is_theirs = (owners == placement.nodes.index(owner)).any(axis=1).tolist()
        return [each for each, belongs in zip(tombstones, is_theirs, strict=True) if belongs]

    def note_sent(self, owner: str, process: str, placement: Placement, last: int) -> None:
        """Note that the owner has got its tombstones up to this number."""
        self._sent[owner] = process, placement.number, last
        for name in self._sent.keys() - set(placement.nodes):
            del self._sent[name]
