"""Frozen: a node's decisions, records and index of one moment, to be checked while the node goes on.

The conservation laws compare every page with everything that knows of it: a second or more of a million pages. So the
node is held still only while its state is copied (arrays: some 30 ms of a million pages) and a read transaction on the
index begins. Records are copied before, and of those whose word changed since then, again: what a word says is sealed
does not change under that word.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from kvstore.errors import Unavailable
from kvstore.model.replica import ADDRESS, ADDRESS_BYTES, KEY_BYTES, Address, Tier
from kvstore.node.index_keeper import names_in
from kvstore.node.node import Node
from kvstore.node.performer import Performer
from kvstore.shm.index import IndexDamaged
from kvstore.shm.records import ExtentTable
from kvstore.state import integrity
from kvstore.state.interfaces import Snapshot
from kvstore.state.node_state import NodeState

TRIES = 3  # a rebuild of the index in the meantime voids one
BREATHE_EVERY = 512  # index entries, some 0.3 ms
BREATHE_S = 60e-6
ENTRY_BYTES = KEY_BYTES + ADDRESS_BYTES


class Frozen(NamedTuple):
    """All of it as of one moment. ``entries`` can be read once, by the thread that made it, and soon."""

    state: NodeState
    snapshots: dict[Tier, list[Snapshot]]
    entries: dict[Tier, Iterator[tuple[bytes, bytes]]]


class _Records:
    """One extent's records, copied while they change. The arrays stay readable where the extent is given up."""

    def __init__(self, table: ExtentTable) -> None:
        self.extent, self.tier = table.extent, table.tier
        self._rows, self._words = table.rows, table.words
        self._columns = table.fmt.key, table.fmt.parent, table.fmt.root
        self._copy: Snapshot | None = None

    def copy(self) -> None:
        """Copy what is there, word first."""
        words = self._words.copy()
        columns = (names_in(self._rows, slice(None), where) for where in self._columns)
        self._copy = Snapshot(self.extent, words, *columns)

    def settled(self) -> Snapshot:
        """The current copy; the node makes no decision during that time."""
        found = self._copy
        if found is None:
            self.copy()
            return self.settled()
        words = self._words.copy()
        changed = np.flatnonzero(words != found.words)
        if len(changed):
            found.words = words
            for column, where in zip((found.keys, found.parents, found.roots), self._columns, strict=True):
                column[changed] = names_in(self._rows, changed, where)
        return found


def findings(node: Node) -> list[str]:
    """The conservation laws over a node that goes on, one line per finding.

    Raises:
        Unavailable: it stopped, or its index was rebuilt all the time.
    """
    for _ in range(TRIES):
        try:
            return check(freeze(node), lambda: node.ending)
        except IndexDamaged:
            time.sleep(BREATHE_S)
    raise Unavailable("the index is being rebuilt: try again")


def freeze(node: Node) -> Frozen:
    """All of a node as of one moment."""
    before = node.look(lambda performer, _: {id(table): _Records(table) for table in performer.tables.values()})
    for records in before.values():
        records.copy()
    return node.look(lambda performer, state: _frozen(performer, state, before))


def _frozen(performer: Performer, state: NodeState, before: dict[int, _Records]) -> Frozen:
    shared: dict[int, Any] = {id(kept): kept for kept in (performer, performer.index, *performer.stores.values())}
    shared |= state.mounts.copies()
    for space in state.spaces.values():
        shared |= {id(kept): kept for kept in (space.pages.index, space.pages.records)}
        # Number by number ``deepcopy`` would take a second for a million free frames.
        shared |= {id(extent.free): extent.free.copy() for extent in space.segment.extents.values()}
    snapshots: dict[Tier, list[Snapshot]] = {tier: [] for tier in state.spaces}
    for table in performer.tables.values():
        records = before.get(id(table)) or _Records(table)
        snapshots[table.tier].append(records.settled())
    return Frozen(copy.deepcopy(state, shared), snapshots, performer.index.hold())


def check(frozen: Frozen, ended: Callable[[], bool] = lambda: False) -> list[str]:
    """The conservation laws over what was frozen.

    Raises:
        IndexDamaged: the index cannot be read.
        Unavailable: ``ended`` said so.
    """
    # First: while the transaction lasts the index grows with every put, and a full one is rebuilt.
    copies = {tier: _copied(entries, ended) for tier, entries in frozen.entries.items()}
    frozen.entries.clear()
    found = [
        finding
        for tier in frozen.state.spaces
        for finding in integrity.check(frozen.state, tier, frozen.snapshots[tier], _addresses(copies[tier], ended))
    ]
    if Tier.HBM not in frozen.state.spaces:
        found += integrity.check_mounts(frozen.state, _addresses(copies.get(Tier.HBM, []), ended))
    return found


def _copied(entries: Iterator[tuple[bytes, bytes]], ended: Callable[[], bool]) -> list[bytes]:
    """Keys and addresses, end to end, ``BREATHE_EVERY`` entries each. Lets other threads have the interpreter."""
    parts: list[bytes] = []
    while part := b"".join(key + raw for key, raw in islice(entries, BREATHE_EVERY)):
        parts.append(part)
        _breathe(ended)
    return parts


def _addresses(parts: list[bytes], ended: Callable[[], bool]) -> Iterator[tuple[bytes, Address]]:
    for part in parts:
        _breathe(ended)
        for at in range(0, len(part), ENTRY_BYTES):
            yield part[at : at + KEY_BYTES], Address(*ADDRESS.unpack_from(part, at + KEY_BYTES))


def _breathe(ended: Callable[[], bool]) -> None:
    if ended():
        raise Unavailable("the node is stopping")
    time.sleep(BREATHE_S)
