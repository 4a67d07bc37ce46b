"""``Survey``: finds the stored pages of a node that no other node of its pool has.

A survey uses the node's records and the directory. Records are read in slices, so the node handles other requests
between two slices. Pages may change during a survey. If a page has been removed, or another node has just stored it,
the order to copy it has no effect.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.directory import Locations, Placement
from kvstore.cluster.directory_messages import FIND_PAGES_MAX, pack_find, unpack_found
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolNode, PoolView
from kvstore.errors import KVStoreError
from kvstore.model.objects import is_object_class
from kvstore.model.prefix import Fingerprints, fingerprints
from kvstore.model.replica import KEY_BYTES, REPLICATED_INFO, TIERS, FrameState, Tier, hint_in, in_state
from kvstore.node.node import Node
from kvstore.node.performer import Performer
from kvstore.state.eviction.base import HINT_MS, HINT_WEIGHTS
from kvstore.state.node_state import NodeState
from kvstore.wire.data import FrameKind, Namespace

SLICE_FRAMES: Final = 1 << 14  # read under the node's lock at a time
ANSWER_S: Final = 2.0
FIND_PAGES: Final = FIND_PAGES_MAX // 4  # in one question, so that the answer with several nodes fits a message

Names = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MissingRun:
    """Consecutive pages of one chain that no other node has.

    Attributes:
        parent: key of the page before, or the root.
        used_ns: the last use of the last page.
        hint: its retention hint.
    """

    parent: bytes
    keys: list[bytes]
    page_bytes: int
    used_ns: int
    hint: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pages."""
        return len(self.keys) * self.page_bytes

    def age_s(self, now_ns: int) -> float:
        """Return the time since the last use, weighted by the hint as quotas weigh it. A larger value means that the
        run is worth less."""
        age_ms = max(0, now_ns - self.used_ns) // 1_000_000 + 1
        return (age_ms / HINT_WEIGHTS[self.hint] if age_ms <= HINT_MS[self.hint] else age_ms) / 1000


class Pages(NamedTuple):
    """Stored pages as columns: keys and parents ``[pages, 16]``, spans, last uses, infos, sizes, numbers of roots."""

    keys: Names
    parents: Names
    spans: Fingerprints
    used_ns: npt.NDArray[np.uint64]
    infos: npt.NDArray[np.uint64]
    page_bytes: npt.NDArray[np.int64]
    roots: npt.NDArray[np.int64]

    def where(self, which: npt.NDArray[Any]) -> Pages:
        """Return the pages that a mask or an array of positions selects."""
        return Pages(*(column[which] for column in self))


class Survey:
    """Surveys of one node. One thread at a time."""

    def __init__(self, node: Node, peers: PeersFile, links: PeerLinks) -> None:
        self._node = node
        self._peers = peers
        self._links = links

    def missing(
        self, counted: Collection[str], *, replicated: bool, assume_missing: bool = False
    ) -> tuple[list[MissingRun], bool]:
        """Return the pages that no node in ``counted`` has, the most valuable first, and whether every page was looked
        up. A page counts as looked up if an owner that answers lists it for one of these nodes, or if an owner that
        answers has all entries of these nodes.

        Args:
            replicated: only pages that want a second copy.
            assume_missing: return pages that were not looked up, too. By default they are left out.

        Raises:
            Unavailable: the node is stopping.
        """
        pages, roots = self._stored(replicated)
        view = self._peers.look()
        if not len(pages.keys) or view is None:
            return [], view is not None or not len(pages.keys)
        runs, is_complete = list[MissingRun](), True
        for number, root in enumerate(roots):
            some = pages.where(pages.roots == number)
            namespace = self._node.look(partial(_namespace, root=root))
            is_missing = np.ones(len(some.keys), bool)  # without a name it cannot be looked up, nor copied
            if namespace is not None and len(some.keys):
                is_missing, has_all = self._ask(namespace, view, some, counted, assume_missing)
                is_complete &= has_all
            runs += runs_of(some.where(is_missing))
        now_ns = time.monotonic_ns()
        return sorted(runs, key=lambda run: run.age_s(now_ns)), is_complete

    def nodes_of(self, key: bytes) -> set[str]:
        """Return the nodes that have this page, as far as an owner of the directory answers.

        Raises:
            Unavailable: the node is stopping.
        """
        view, place = self._peers.look(), self._node.look(partial(_span_and_namespace, key=key))
        if view is None or place is None:
            return set()
        span, namespace = place
        placement = Placement(view.peers)
        body = pack_find(namespace, fingerprints(key), placement.number)
        for owner, _ in placement.shares(np.array([span], np.uint64)):
            found = self._find(view.peers[owner], body, 1)
            if found is not None and len(found.nodes):
                return {found.names[node] for node in found.nodes.tolist()}
        return set()

    def _ask(
        self, namespace: Namespace, view: PoolView, pages: Pages, counted: Collection[str], assume_missing: bool
    ) -> tuple[Mask, bool]:
        """Return which pages no counted node has, and whether every page was looked up."""
        placement, prints = Placement(view.peers), fingerprints(pages.keys.tobytes())
        is_missing, is_known = np.zeros(len(pages.keys), bool), np.zeros(len(pages.keys), bool)
        for owner, mine in placement.shares(pages.spans):
            mine = mine[~is_known[mine]]  # each page has two owners
            for start in range(0, len(mine), FIND_PAGES):
                places = mine[start : start + FIND_PAGES]
                body = pack_find(namespace, prints[places], placement.number)
                found = self._find(view.peers[owner], body, len(places))
                if found is None:
                    continue
                has = _has(found, len(places), counted)
                is_sure = not any(not each.node or each.node in counted for each in found.doubts)
                known = places[has | is_sure]
                is_known[known], is_missing[places] = True, ~has
        is_missing = is_missing & is_known | ~is_known if assume_missing else is_missing & is_known
        return is_missing, bool(is_known.all())

    def _find(self, owner: PoolNode, body: bytes, count: int) -> Locations | None:
        deadline_s = time.monotonic() + ANSWER_S

        def ask(link: DataConnection) -> Locations:
            return unpack_found(link.call(FrameKind.FIND, body, reply=FrameKind.FOUND, deadline_s=deadline_s), count)

        try:
            return self._links.call(owner, deadline_s, ask)
        except KVStoreError:
            return None

    def _stored(self, replicated: bool) -> tuple[Pages, list[bytes]]:
        """Return the stored pages, each once, and the roots by number."""
        roots: dict[bytes, int] = {}
        parts: list[Pages] = []
        for number, frames in self._node.look(_extents):
            for first in range(0, frames, SLICE_FRAMES):
                which = slice(first, first + SLICE_FRAMES)
                read = partial(_read, number=number, frames=which, roots=roots, replicated=replicated)
                parts.append(self._node.look(read))
        columns = zip(*parts, strict=True) if parts else zip(_none(), strict=True)
        pages = Pages(*(np.concatenate(column) for column in columns))
        _, places = np.unique(fingerprints(pages.keys.tobytes()), return_index=True)  # a page may be in two tiers
        return pages.where(np.sort(places)), list(roots)


def _extents(performer: Performer, _: NodeState) -> list[tuple[int, int]]:
    """Return (number, frames) of each extent with pages of chains, those in memory first."""
    tables = sorted(performer.tables.values(), key=lambda table: table.tier is not Tier.DRAM)
    return [(table.extent, table.frames) for table in tables if not is_object_class(table.frame_class)]


def _read(
    performer: Performer, state: NodeState, number: int, frames: slice, roots: dict[bytes, int], replicated: bool
) -> Pages:
    """Return the stored pages in these frames of an extent. Adds their roots to ``roots``."""
    table = performer.tables.get(number)
    space = state.spaces.get(table.tier) if table is not None else None
    extent = space.segment.extents.get(number) if space is not None else None
    if table is None or space is None or extent is None:
        return _none()
    is_wanted = in_state(table.words[frames], FrameState.SEALED)
    if replicated:
        is_wanted &= table.column(table.fmt.info)[frames] & np.uint64(REPLICATED_INFO) != 0
    at = np.flatnonzero(is_wanted) + (frames.start or 0)
    owners = np.frombuffer(extent.owner, extent.owner.typecode)[at]
    numbers = np.zeros(len(at), np.int64)
    for owner in np.unique(owners).tolist():
        root = space.pages.holdings.roots[owner].root
        numbers[owners == owner] = roots.setdefault(root, len(roots))
    spans = np.frombuffer(extent.span, np.uint64)[at]
    page_bytes = np.full(len(at), table.frame_class.page_bytes)
    keys, parents = table.rows[at, table.fmt.key], table.rows[at, table.fmt.parent]
    infos = table.column(table.fmt.info)[at].astype(np.uint64)
    return Pages(keys, parents, spans, table.last_use[at].astype(np.uint64), infos, page_bytes, numbers)


def _none() -> Pages:
    names, words, ints = np.zeros((0, KEY_BYTES), np.uint8), np.zeros(0, np.uint64), np.zeros(0, np.int64)
    return Pages(names, names, words, words, words, ints, ints)


def _namespace(_: Performer, state: NodeState, root: bytes) -> Namespace | None:
    """Return what the root was computed from; None if no client has named it."""
    name = state.tenants.named.get(root)
    about = name.about if name is not None else {}
    if "fingerprint" not in about:
        return None
    return Namespace(bytes.fromhex(about["fingerprint"]), about["salt"], about["adapter"])


def _span_and_namespace(performer: Performer, state: NodeState, key: bytes) -> tuple[int, Namespace] | None:
    """Return the span of a stored page, and its namespace."""
    for tier, space in state.spaces.items():
        address = performer.index.find(tier, key)
        if address is not None:
            root = performer.root(address.extent, address.frame)
            namespace = _namespace(performer, state, root)
            span = space.segment.extents[address.extent].span[address.frame]
            return (span, namespace) if namespace is not None else None
    return None


def _has(found: Locations, count: int, counted: Collection[str]) -> Mask:
    """Return which of ``count`` pages a counted node has in memory or on NVMe."""
    has = np.zeros(count, bool)
    if len(found.pages):
        is_counted = np.array([name in counted for name in found.names], bool)
        has[found.pages[is_counted[found.nodes] & (found.tiers != TIERS.index(Tier.HBM))]] = True
    return has


def runs_of(pages: Pages) -> list[MissingRun]:
    """Return pages of one root as runs. A run continues with the first child of each page; other children begin runs of
    their own."""
    keys, parents = split(pages.keys.tobytes()), split(pages.parents.tobytes())
    place_of = {key: place for place, key in enumerate(keys)}
    children: dict[bytes, list[int]] = {}
    starts = []
    for place, parent in enumerate(parents):
        if parent in place_of and parent != keys[place]:
            children.setdefault(parent, []).append(place)
        else:
            starts.append(place)
    runs = []
    while starts:
        run = [starts.pop()]
        while following := children.pop(keys[run[-1]], None):
            run.append(following[0])
            starts += following[1:]
        last = run[-1]
        used_ns, page_bytes, hint = (
            int(pages.used_ns[last]),
            int(pages.page_bytes[last]),
            hint_in(int(pages.infos[last])),
        )
        runs.append(MissingRun(parents[run[0]], [keys[place] for place in run], page_bytes, used_ns, hint))
    return runs


def split(names: bytes) -> list[bytes]:
    """Return concatenated keys as a list."""
    return [names[at : at + KEY_BYTES] for at in range(0, len(names), KEY_BYTES)]
