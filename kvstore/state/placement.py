"""Placement: which nodes own a span's part of the directory.

Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998): every pair of span
and node has a weight, and the nodes of the two largest weights own the span. So when a node comes or goes, only the
spans that it owned, or owns now, change hands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.span import Fingerprints

OWNERS: Final = 2
KNOWN_MAX: Final = 1 << 14  # spans whose owners are remembered: some 3 MB


class Placement:
    """Over one set of live nodes. It never changes: other members are another placement. Threads may share it.

    Attributes:
        nodes: names, sorted.
        number: a hash of the names, never 0: two placements over the same nodes have the same one.
    """

    def __init__(self, nodes: Iterable[str]) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        self.number = xxhash.xxh3_64_intdigest("\0".join(self.nodes).encode()) | 1
        self._seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in self.nodes], np.uint64)
        self._known: dict[int, tuple[int, ...]] = {}

    def owners(self, spans: Fingerprints) -> npt.NDArray[np.int64]:
        """Places in ``nodes`` of each span's owners, the first one first: int64 ``[spans, min(2, nodes)]``."""
        count = min(OWNERS, len(self.nodes))
        if count < OWNERS:
            return np.zeros((len(spans), count), np.int64)
        weights = _mixed(spans[:, None] ^ self._seeds)
        return weights.argpartition(-OWNERS, axis=1)[:, : -OWNERS - 1 : -1]

    def owners_of(self, spans: list[int]) -> list[tuple[int, ...]]:
        """The owners of a few spans. They are remembered: a caller that asks for a chain asks for what follows it,
        too."""
        known = self._known
        missing = [span for span in spans if span not in known]
        if missing:
            if len(known) + len(missing) > KNOWN_MAX:
                self._known = known = {}
                missing = spans
            known.update(zip(missing, map(tuple, self.owners(np.array(missing, np.uint64)).tolist()), strict=True))
        return [known[span] for span in spans]

    def shares(self, spans: Fingerprints) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Each owner of some of these spans, with the places of its spans, ascending."""
        owners = self.owners(spans)
        flat = owners.ravel()
        order = flat.argsort(kind="stable")
        edges = np.flatnonzero(np.diff(flat[order])) + 1
        for part in np.split(order, edges) if len(order) else ():
            yield self.nodes[flat[part[0]]], part // owners.shape[1]

    def owned(self, spans: Fingerprints) -> dict[str, npt.NDArray[np.bool_]]:
        """By node, which of these spans it owns."""
        owners = self.owners(spans)
        return {name: (owners == place).any(axis=1) for place, name in enumerate(self.nodes)}


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
