"""Which stored pages match an operator's filter, and in which order they can leave.

The node's mutex is held only while references to the tables are taken (milliseconds). The records are then read in
parallel with the node's work, extent by extent, as numpy columns, which lets other threads run. Pages may change in the
meantime. Evictions notice that, because they are decided by address, and an address never names two pages.

Keys are compared by their first 8 bytes. Two pages with the same first 8 bytes (one pair in 10^13 for a million pages)
can only leave together; no read depends on this comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.model.replica import TIERS, FrameState, RecordFormat, Tier, in_state
from kvstore.node.node import Node
from kvstore.node.performer import Performer
from kvstore.shm.records import ExtentTable, Record
from kvstore.state.node_state import NodeState

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


LEASED, PINNED, HELD, CHILDREN = "leased", "pinned", "held", "children"


@dataclass(slots=True)
class View:
    """The tables of one extent. They stay readable as long as this object exists, even if the extent is given up."""

    number: int
    tier: Tier
    page_bytes: int
    page_tokens: int
    rows: npt.NDArray[np.uint8]
    words: Words
    last_use: Words
    columns: tuple[Words, ...]  # first 8 bytes of key, root, parent; info
    fmt: RecordFormat
    children: npt.NDArray[np.uint32]

    def record(self, frame: int) -> Record:
        """Copy the record that a frame has now."""
        return Record(self.rows[frame].tobytes(), self.fmt)


@dataclass(slots=True)
class Stored:
    """Sealed pages as columns of shape ``[pages]``. ``views`` has the rest of each page's record."""

    views: list[View]
    view: Ints  # position in ``views``
    frame: Ints
    generation: Words
    key: Words
    root: Words
    parent_key: Words
    info: Words
    used_ns: Ints
    page_bytes: Ints
    holds: Ints  # children and everything else that depends on the page
    leased: Mask
    tier: Ints  # position in ``TIERS``
    pinned: Mask

    def __len__(self) -> int:
        return len(self.view)

    def key_bytes(self, i: int) -> bytes:
        """Return the full key that the record of page ``i`` has now."""
        return self.views[int(self.view[i])].record(int(self.frame[i])).key


def stored_pages(node: Node, tiers: tuple[Tier, ...], now_ns: int) -> Stored:
    """Read all sealed pages of these tiers. Pages that change during the call may be missing or out of date."""
    views, leased, pinned_keys = node.look(lambda performer, state: _views(performer, state, tiers))
    pinned = {tier: first_words(keys) for tier, keys in pinned_keys.items()}
    parts = [
        _columns(place, view, leased.get(view.number, ()), pinned[view.tier], now_ns)
        for place, view in enumerate(views)
    ]
    empty = _empty()
    columns = [np.concatenate([part[i] for part in parts]) if parts else empty[i] for i in range(len(empty))]
    return Stored(views, *columns)


def _views(
    performer: Performer, state: NodeState, tiers: tuple[Tier, ...]
) -> tuple[list[View], dict[int, list[int]], dict[Tier, list[bytes]]]:
    """Return the tables, the leased frames by extent, and the keys of pinned pages by tier."""
    views = []
    for table in performer.tables.values():
        if table.tier in tiers:
            extent = state.spaces[table.tier].segment.extents.get(table.extent)
            if extent is not None:
                views.append(_view(table, np.array(extent.children, np.uint32)))
    leased: dict[int, list[int]] = {}
    for number, frame in state.leases.frames():
        leased.setdefault(number, []).append(frame)
    pinned_keys = {tier: state.pins.pinned_keys(tier) for tier in tiers if tier in state.spaces}
    return views, leased, pinned_keys


def _view(table: ExtentTable, children: npt.NDArray[np.uint32]) -> View:
    fmt = table.fmt
    columns = [table.column(offset) for offset in (fmt.key.start, fmt.root.start, fmt.parent.start, fmt.info)]
    shape = table.frame_class
    return View(
        *(table.extent, table.tier, shape.page_bytes, shape.page_tokens, table.rows, table.words, table.last_use),
        *(tuple(columns), fmt, children),
    )


def _columns(place: int, view: View, leased: Any, pinned: Words, now_ns: int) -> tuple[Any, ...]:
    words = np.array(view.words)
    frames = np.flatnonzero(in_state(words, FrameState.SEALED))
    is_leased = np.zeros(len(words), bool)
    is_leased[list(leased)] = True
    used_ns = np.minimum(view.last_use[frames], np.uint64(now_ns)).astype(np.int64)  # no use is later than now
    count = len(frames)
    return (
        *(np.full(count, place), frames, words[frames] >> np.uint64(8)),
        *(column[frames] for column in view.columns),
        *(used_ns, np.full(count, view.page_bytes), view.children[frames].astype(np.int64), is_leased[frames]),
        np.full(count, TIERS.index(view.tier)),
        np.isin(view.columns[0][frames], pinned) if len(pinned) else np.zeros(count, bool),
    )


def _empty() -> tuple[Any, ...]:
    ints, words, mask = np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, bool)
    return ints, ints, words, words, words, words, words, ints, ints, ints, mask, ints, mask


@dataclass(frozen=True, slots=True)
class PageFilter:
    """Conditions on a page, all of which must hold. None means no condition. ``roots`` and ``keys`` have first 8
    bytes."""

    tiers: tuple[Tier, ...]
    age_s: float | None = None
    roots: Words | None = None
    keys: Words | None = None

    def matches(self, pages: Stored, now_ns: int) -> Mask:
        """Return a mask of shape ``[pages]``: true for pages that match."""
        matching = np.ones(len(pages), bool)
        if self.age_s is not None:
            matching &= pages.used_ns <= now_ns - int(self.age_s * 1e9)
        if self.roots is not None:
            matching &= np.isin(pages.root, self.roots)
        if self.keys is not None:
            matching &= np.isin(pages.key, self.keys)
        return matching


def first_words(names: list[bytes]) -> Words:
    """Return the first 8 bytes of each key or root."""
    return np.frombuffer(b"".join(name[:8] for name in names), "<u8")


def parents(pages: Stored) -> Ints:
    """Return, for each page, the position of its parent in the same tier, or -1 if it has none. Shape ``[pages]``."""
    parent = np.full(len(pages), -1, np.int64)
    for tier in np.unique(pages.tier):
        mine = np.flatnonzero(pages.tier == tier)
        keys = pages.key[mine]
        order = np.argsort(keys)
        keys = keys[order]
        parent_keys = pages.parent_key[mine]
        places = np.minimum(np.searchsorted(keys, parent_keys), len(keys) - 1)
        is_match = (keys[places] == parent_keys) & (parent_keys != pages.root[mine])
        parent[mine[is_match]] = mine[order[places[is_match]]]
    return parent


def evictable(pages: Stored, matching: Mask) -> tuple[Ints, dict[str, int]]:
    """Return the positions of the matching pages that may leave, in the order of leaving, and the number of matching
    pages that must stay, by reason.

    The coldest leaf leaves first. A page leaves after all its descendants, so its last use is the latest one in its
    subtree. If two pages have the same last use, the one later in the chain leaves first.
    """
    parent = parents(pages)
    has_parent = parent >= 0
    children = np.bincount(parent[has_parent], minlength=len(pages))
    held = pages.holds > children  # something other than children depends on the page
    stays = ~matching | pages.leased | pages.pinned | held
    reasons, counted = {}, ~matching
    for reason, mask in ((LEASED, pages.leased), (PINNED, pages.pinned), (HELD, held)):
        reasons[reason] = int((mask & ~counted).sum())
        counted = counted | mask
    stays_too, frontier = stays.copy(), np.flatnonzero(stays)  # with all ancestors
    while len(frontier):
        above = parent[frontier]
        above = np.unique(above[above >= 0])
        frontier = above[~stays_too[above]]
        stays_too[frontier] = True
    reasons[CHILDREN] = int((stays_too & ~stays).sum())
    last_use_ns, height = _subtrees(parent, children, pages.used_ns)
    chosen = np.flatnonzero(~stays_too & (height >= 0))
    order = np.lexsort((height[chosen], last_use_ns[chosen]))
    return chosen[order], {reason: count for reason, count in reasons.items() if count}


def _subtrees(parent: Ints, children: Ints, used_ns: Ints) -> tuple[Ints, Ints]:
    """Return, for each page, the latest use in its subtree, and the subtree's height.

    The height is -1 for pages that are their own ancestors, which a damaged record can cause."""
    last_use_ns, children_left = used_ns.copy(), children.copy()
    height = np.full(len(parent), -1, np.int64)
    frontier, level = np.flatnonzero(children_left == 0), 0
    while len(frontier):
        height[frontier] = level
        above = parent[frontier]
        has_parent = above >= 0
        above, below = above[has_parent], frontier[has_parent]
        np.maximum.at(last_use_ns, above, last_use_ns[below])
        np.subtract.at(children_left, above, 1)
        frontier = np.unique(above[children_left[above] == 0])
        level += 1
    return last_use_ns, height


def first_of(pages: Stored, chosen: Ints, amount: tuple[str, float] | None, matching: Mask) -> Ints:
    """Return the shortest leading part of ``chosen`` that has the requested amount, or all of it if ``amount`` is None.

    ``amount`` is ("pages" | "bytes" | "percent", number). Percent refers to the bytes of the pages in ``matching``."""
    if amount is None:
        return chosen
    unit, number = amount
    if unit == "pages":
        return chosen[: int(number)]
    size = number if unit == "bytes" else number / 100 * int(pages.page_bytes[matching].sum())
    sums = np.cumsum(pages.page_bytes[chosen])
    return chosen[: int(np.searchsorted(sums, size)) + 1] if size > 0 else chosen[:0]


def parse_tiers(value: object) -> tuple[Tier, ...]:
    """Parse ``dram``, ``nvme`` or ``all``. Raises InvalidRequest."""
    tiers = {"dram": (Tier.DRAM,), "nvme": (Tier.NVME,), "all": (Tier.DRAM, Tier.NVME)}
    if not isinstance(value, str) or value not in tiers:
        raise InvalidRequest("tier", f"must be one of {', '.join(tiers)} (got {value!r})")
    return tiers[value]
