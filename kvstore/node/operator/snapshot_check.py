"""The conservation laws of a node, checked while the node keeps working.

A check compares every page with everything that refers to it, which takes a second or more for a million pages. So the
check works on a copy. The node's mutex is held only while its state is copied (arrays: some 30 ms for a million pages)
and a read transaction on the index begins. Records are copied before that; then, under the mutex, the records whose
word has changed in the meantime are copied again. As long as its word stays the same, a sealed record does not change.
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

TRIES = 3  # a rebuild of the index makes one try fail
PAUSE_EVERY = 512  # index entries, some 0.3 ms
PAUSE_S = 60e-6
ENTRY_BYTES = KEY_BYTES + ADDRESS_BYTES


class NodeCopy(NamedTuple):
    """A node's decisions, records and index as of one moment.

    ``entries`` can be read once, soon, and by the thread that called ``freeze``: see ``Index.snapshot``.
    """

    state: NodeState
    snapshots: dict[Tier, list[Snapshot]]
    entries: dict[Tier, Iterator[tuple[bytes, bytes]]]


class _RecordsCopy:
    """A copy of one extent's records. The arrays stay readable after the extent is given up."""

    def __init__(self, table: ExtentTable) -> None:
        self.extent, self.tier = table.extent, table.tier
        self._rows, self._words = table.rows, table.words
        self._columns = table.fmt.key, table.fmt.parent, table.fmt.root
        self._copy: Snapshot | None = None

    def copy(self) -> None:
        """Copy all records, words first, so that ``refresh`` notices any record that changes afterwards."""
        words = self._words.copy()
        columns = (names_in(self._rows, slice(None), where) for where in self._columns)
        self._copy = Snapshot(self.extent, words, *columns)

    def refresh(self) -> Snapshot:
        """Bring the copy up to date and return it. The caller holds the node's mutex."""
        snapshot = self._copy
        if snapshot is None:
            self.copy()
            return self.refresh()
        words = self._words.copy()
        changed = np.flatnonzero(words != snapshot.words)
        if len(changed):
            snapshot.words = words
            for column, where in zip((snapshot.keys, snapshot.parents, snapshot.roots), self._columns, strict=True):
                column[changed] = names_in(self._rows, changed, where)
        return snapshot


def findings(node: Node) -> list[str]:
    """Check a running node and return one line per violated invariant.

    Raises:
        Unavailable: the node is stopping, or its index was rebuilt during every try.
    """
    for _ in range(TRIES):
        try:
            return check(freeze(node), lambda: node.ending)
        except IndexDamaged:
            time.sleep(PAUSE_S)
    raise Unavailable("the index is being rebuilt: try again")


def freeze(node: Node) -> NodeCopy:
    """Copy a node as of one moment."""
    before = node.look(lambda performer, _: {id(table): _RecordsCopy(table) for table in performer.tables.values()})
    for records in before.values():
        records.copy()
    return node.look(lambda performer, state: _copy_node(performer, state, before))


def _copy_node(performer: Performer, state: NodeState, before: dict[int, _RecordsCopy]) -> NodeCopy:
    # If ``deepcopy`` finds an object's id in ``shared``, it uses that entry and makes no copy.
    shared: dict[int, Any] = {id(part): part for part in (performer, performer.index, *performer.stores.values())}
    shared |= state.mounts.copies()
    for space in state.spaces.values():
        shared |= {id(part): part for part in (space.pages.index, space.pages.records)}
        # ``deepcopy`` would copy number by number, which takes a second for a million free frames.
        shared |= {id(extent.free): extent.free.copy() for extent in space.segment.extents.values()}
    snapshots: dict[Tier, list[Snapshot]] = {tier: [] for tier in state.spaces}
    for table in performer.tables.values():
        records = before.get(id(table)) or _RecordsCopy(table)
        snapshots[table.tier].append(records.refresh())
    return NodeCopy(copy.deepcopy(state, shared), snapshots, performer.index.hold())


def check(node_copy: NodeCopy, is_stopping: Callable[[], bool] = lambda: False) -> list[str]:
    """Check a copy of a node and return one line per violated invariant.

    Raises:
        IndexDamaged: the index cannot be read.
        Unavailable: ``is_stopping`` returned true.
    """
    # The entries are copied first, to end the transaction soon. As long as it lasts, the index grows with every put,
    # and a full index is rebuilt.
    copies = {tier: _copy_entries(entries, is_stopping) for tier, entries in node_copy.entries.items()}
    node_copy.entries.clear()
    broken = [
        line
        for tier in node_copy.state.spaces
        for line in integrity.check(
            node_copy.state, tier, node_copy.snapshots[tier], _addresses(copies[tier], is_stopping)
        )
    ]
    if Tier.HBM not in node_copy.state.spaces:
        broken += integrity.check_mounts(node_copy.state, _addresses(copies.get(Tier.HBM, []), is_stopping))
    return broken


def _copy_entries(entries: Iterator[tuple[bytes, bytes]], is_stopping: Callable[[], bool]) -> list[bytes]:
    """Return keys and addresses, joined, ``PAUSE_EVERY`` entries per part. Pauses let other threads run."""
    parts: list[bytes] = []
    while part := b"".join(key + raw for key, raw in islice(entries, PAUSE_EVERY)):
        parts.append(part)
        _pause(is_stopping)
    return parts


def _addresses(parts: list[bytes], is_stopping: Callable[[], bool]) -> Iterator[tuple[bytes, Address]]:
    for part in parts:
        _pause(is_stopping)
        for at in range(0, len(part), ENTRY_BYTES):
            yield part[at : at + KEY_BYTES], Address(*ADDRESS.unpack_from(part, at + KEY_BYTES))


def _pause(is_stopping: Callable[[], bool]) -> None:
    if is_stopping():
        raise Unavailable("the node is stopping")
    time.sleep(PAUSE_S)
