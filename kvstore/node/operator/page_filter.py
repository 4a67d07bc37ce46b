"""Selection: which stored pages fit a description, and in which order they may leave. For operators' calls.

The node is held still only while references to its tables are taken (milliseconds); the records themselves are read in
parallel with its work, extent by extent, as columns of numpy arrays, which lets other threads run. Changes in the
meantime are noticed when they matter: an eviction is decided by address, and an address never names two pages.

Keys are handled by their first 8 bytes. Two pages that share them (one pair in 10^13 of a million pages) would at most
leave together; nothing that is read depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.model.replica import FrameState, RecordFormat, Tier
from kvstore.node.node import Node
from kvstore.node.performer import Performer
from kvstore.shm.records import ExtentTable, Record
from kvstore.state.node_state import NodeState

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

TIERS = tuple(Tier)

LEASED, PINNED, HELD, CHILDREN = "leased", "pinned", "held", "children"


@dataclass(slots=True)
class View:
    """One extent's tables, referenced while the node held still; valid for as long as it is kept."""

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
        """A copy of what is written there now."""
        return Record(self.rows[frame].tobytes(), self.fmt)


@dataclass(slots=True)
class Stored:
    """Sealed pages as columns, all ``[pages]``; ``views`` say where the rest of a page's record is."""

    views: list[View]
    view: Ints  # place in ``views``
    frame: Ints
    generation: Words
    key: Words
    root: Words
    parent_key: Words
    info: Words
    used_ns: Ints
    page_bytes: Ints
    holds: Ints  # children and whatever else hangs on the page
    leased: Mask
    tier: Ints  # place in ``TIERS``
    pinned: Mask

    def __len__(self) -> int:
        return len(self.view)

    def key_bytes(self, i: int) -> bytes:
        """The whole key of page ``i``, as its record says now."""
        return self.views[int(self.view[i])].record(int(self.frame[i])).key


def stored(node: Node, tiers: tuple[Tier, ...], now_ns: int) -> Stored:
    """All sealed pages of these tiers, as they are about now."""
    views, leased, kept = node.look(lambda performer, state: _views(performer, state, tiers))
    pinned = {tier: first_words(keys) for tier, keys in kept.items()}
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
    """Tables, leased frames by extent, and the keys of pinned pages by tier."""
    views = []
    for table in performer.tables.values():
        if table.tier in tiers:
            extent = state.spaces[table.tier].segment.extents.get(table.extent)
            if extent is not None:
                views.append(_view(table, np.array(extent.children, np.uint32)))
    leased: dict[int, list[int]] = {}
    for number, frame in state.leases.frames():
        leased.setdefault(number, []).append(frame)
    kept = {tier: state.pins.kept(tier) for tier in tiers if tier in state.spaces}
    return views, leased, kept


def _view(table: ExtentTable, children: npt.NDArray[np.uint32]) -> View:
    fmt = table.fmt
    columns = [table.column(offset) for offset in (fmt.key.start, fmt.root.start, fmt.parent.start, fmt.info)]
    about = table.frame_class
    return View(
        *(table.extent, table.tier, about.page_bytes, about.page_tokens, table.rows, table.words, table.last_use),
        *(tuple(columns), fmt, children),
    )


def _columns(place: int, view: View, leased: Any, pinned: Words, now_ns: int) -> tuple[Any, ...]:
    words = np.array(view.words)
    frames = np.flatnonzero((words & np.uint64(0xFF)) == FrameState.SEALED)
    held = np.zeros(len(words), bool)
    held[list(leased)] = True
    used_ns = np.minimum(view.last_use[frames], np.uint64(now_ns)).astype(np.int64)  # a mark from the future is now
    count = len(frames)
    return (
        *(np.full(count, place), frames, words[frames] >> np.uint64(8)),
        *(column[frames] for column in view.columns),
        *(used_ns, np.full(count, view.page_bytes), view.children[frames].astype(np.int64), held[frames]),
        np.full(count, TIERS.index(view.tier)),
        np.isin(view.columns[0][frames], pinned) if len(pinned) else np.zeros(count, bool),
    )


def _empty() -> tuple[Any, ...]:
    ints, words, mask = np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, bool)
    return ints, ints, words, words, words, words, words, ints, ints, ints, mask, ints, mask


@dataclass(frozen=True, slots=True)
class PageFilter:
    """Which pages: all conditions hold. ``roots`` and ``keys`` by their first 8 bytes; None: any."""

    tiers: tuple[Tier, ...]
    age_s: float | None = None
    roots: Words | None = None
    keys: Words | None = None

    def fits(self, pages: Stored, now_ns: int) -> Mask:
        """``[pages]``: those the wish names."""
        fits = np.ones(len(pages), bool)
        if self.age_s is not None:
            fits &= pages.used_ns <= now_ns - int(self.age_s * 1e9)
        if self.roots is not None:
            fits &= np.isin(pages.root, self.roots)
        if self.keys is not None:
            fits &= np.isin(pages.key, self.keys)
        return fits


def first_words(names: list[bytes]) -> Words:
    """The first 8 bytes of each key or root."""
    return np.frombuffer(b"".join(name[:8] for name in names), "<u8")


def parents(pages: Stored) -> Ints:
    """``[pages]``: place of each page's parent in the same tier, -1 where it has none."""
    parent = np.full(len(pages), -1, np.int64)
    for tier in np.unique(pages.tier):
        mine = np.flatnonzero(pages.tier == tier)
        keys = pages.key[mine]
        order = np.argsort(keys)
        keys = keys[order]
        wanted = pages.parent_key[mine]
        places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        found = (keys[places] == wanted) & (wanted != pages.root[mine])
        parent[mine[found]] = mine[order[places[found]]]
    return parent


def leaving(pages: Stored, fits: Mask) -> tuple[Ints, dict[str, int]]:
    """Places of the pages that fit and may leave, in the order in which the coldest leaf leaves first, and how many
    that fit may not, by reason.

    A page leaves after everything that hangs on it, so it is as warm as the warmest of those; of equally warm ones
    the later in the chain goes first.
    """
    parent = parents(pages)
    has_parent = parent >= 0
    children = np.bincount(parent[has_parent], minlength=len(pages))
    held = pages.holds > children
    stays = ~fits | pages.leased | pages.pinned | held
    reasons, seen = {}, ~fits
    for reason, mask in ((LEASED, pages.leased), (PINNED, pages.pinned), (HELD, held)):
        reasons[reason] = int((mask & ~seen).sum())
        seen = seen | mask
    kept, frontier = stays.copy(), np.flatnonzero(stays)
    while len(frontier):
        above = parent[frontier]
        above = np.unique(above[above >= 0])
        frontier = above[~kept[above]]
        kept[frontier] = True
    reasons[CHILDREN] = int((kept & ~stays).sum())
    warmth, height = _subtrees(parent, children, pages.used_ns)
    chosen = np.flatnonzero(~kept & (height >= 0))
    order = np.lexsort((height[chosen], warmth[chosen]))
    return chosen[order], {reason: count for reason, count in reasons.items() if count}


def _subtrees(parent: Ints, children: Ints, used_ns: Ints) -> tuple[Ints, Ints]:
    """The latest use in each page's subtree, and its height; -1 in what hangs on itself (a damaged record may)."""
    warmth, left = used_ns.copy(), children.copy()
    height = np.full(len(parent), -1, np.int64)
    frontier, level = np.flatnonzero(left == 0), 0
    while len(frontier):
        height[frontier] = level
        above = parent[frontier]
        some = above >= 0
        above, below = above[some], frontier[some]
        np.maximum.at(warmth, above, warmth[below])
        np.subtract.at(left, above, 1)
        frontier = np.unique(above[left[above] == 0])
        level += 1
    return warmth, height


def enough(pages: Stored, chosen: Ints, want: tuple[str, float] | None, fits: Mask) -> Ints:
    """The first of ``chosen`` that add up to ``("pages"|"bytes"|"percent", n)``; percent of the bytes of ``fits``."""
    if want is None:
        return chosen
    unit, amount = want
    if unit == "pages":
        return chosen[: int(amount)]
    size = amount if unit == "bytes" else amount / 100 * int(pages.page_bytes[fits].sum())
    sums = np.cumsum(pages.page_bytes[chosen])
    return chosen[: int(np.searchsorted(sums, size)) + 1] if size > 0 else chosen[:0]


def parse_tiers(value: object) -> tuple[Tier, ...]:
    """``dram``, ``nvme`` or ``all``. Raises InvalidRequest."""
    tiers = {"dram": (Tier.DRAM,), "nvme": (Tier.NVME,), "all": (Tier.DRAM, Tier.NVME)}
    if not isinstance(value, str) or value not in tiers:
        raise InvalidRequest("tier", f"must be one of {', '.join(tiers)} (got {value!r})")
    return tiers[value]
