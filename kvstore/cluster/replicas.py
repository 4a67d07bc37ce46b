"""Second copies of pages: to which node each one goes. No I/O.

A copy goes to a node on another machine, in another zone if the pool has one. Among the nodes that remain, those that
already have the page before are preferred, because a node stores a page only after its parent. Otherwise rendezvous
hashing chooses, weighted by capacity: a node with twice the capacity receives twice the pages, and a node that joins
takes its share of later pages only.

Worked example, a node of machine m1 and zone z1::

    other nodes             a (m1, z1)   b (m2, z1)   c (m3, z2)   d (m4, z2, draining)
    may have the copy                                 c

Without c, the copy goes to b. Without b and c, it goes nowhere, unless ``same_machine`` allows a.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import xxhash

from kvstore.cluster.catalog.schema import NodeEntry


def choose_target(
    mine: NodeEntry,
    others: Iterable[NodeEntry],
    anchor: bytes,
    parent_nodes: Collection[str] = (),
    same_machine: bool = False,
) -> str | None:
    """Return the node that receives the second copy of a page; None if no node may.

    Args:
        mine: the node that has the page.
        others: the nodes that are alive. ``mine`` may be among them.
        anchor: the name of the copy for rendezvous hashing, such as the page's key.
        parent_nodes: nodes that have the page before.
        same_machine: whether nodes of this machine may have the copy if there is no other machine.
    """
    places = [each for each in others if each.name != mine.name and not each.draining]
    apart = [each for each in places if not _is_same(each.machine, mine.machine)]
    places = apart or (places if same_machine else [])
    places = [each for each in places if each.zone and mine.zone and each.zone != mine.zone] or places
    places = [each for each in places if each.name in parent_nodes] or places
    return min(places, key=lambda each: _distance(anchor, each)).name if places else None


def _is_same(machine: str, other: str) -> bool:
    """Return whether two nodes may be on one machine. A node of an earlier version does not say where it is."""
    return not machine or not other or machine == other


def _distance(anchor: bytes, node: NodeEntry) -> tuple[float, str]:
    """Return the distance between an anchor and a node. The nearest node is chosen, with a probability in proportion to
    its weight (weighted rendezvous hashing: an exponential variable of rate ``weight``)."""
    digest = xxhash.xxh3_64_intdigest(anchor + node.name.encode())
    uniform = (digest + 1) / (1 << 64)  # above 0, at most 1
    weight = max(1, sum(node.capacity_bytes.values()))
    return -math.log(uniform) / weight, node.name
