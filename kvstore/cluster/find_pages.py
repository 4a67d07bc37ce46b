"""Finds pages of a chain, or opaque objects, on other nodes, by asking the owners of their spans.

``cluster.lookup_plan`` decides whom to ask. This module sends the questions of a round, all at the same time. A result
is reused for a second. Results are not proven: the reader of a page proves it.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Final, NamedTuple

from kvstore.cluster.ask_peers import PeerRequest, ask_peers
from kvstore.cluster.directory import OWNERS, Locations, Placement
from kvstore.cluster.directory_messages import FIND_PAGES_MAX, pack_find, pack_hold, unpack_found
from kvstore.cluster.lookup_plan import Question, Search, Stretch
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolView
from kvstore.model.prefix import fingerprints, separate_spans
from kvstore.wire.data import FrameKind, Namespace, WireError

OWNER_S: Final = 0.3  # how long to wait for an owner's answer
CACHE_S: Final = 1.0
CACHE_MAX: Final = 64  # answers about chains in the cache
OBJECTS_CACHED: Final = 4096  # objects in the cache
ROUNDS_SILENT: Final = OWNERS + 1  # rounds without an answer: each owner of a span, then the node itself
OLDER_MAX: Final = 4  # earlier placements to remember


class _Scope(NamedTuple):
    """What all questions of a search have in common."""

    namespace: Namespace
    closed: bool
    placement: int

    def request(self, question: Question) -> tuple[FrameKind, bytes]:
        """Return the kind and the body of the message for ``question``."""
        if question.keys is not None:
            return FrameKind.HOLD, pack_hold(self.namespace, question.keys, self.closed)
        return FrameKind.FIND, pack_find(self.namespace, question.pages, self.placement)


class Finder:
    """Finds pages for one process. Threads may share it.

    Args:
        peers: the nodes of the pool.
        links: connections to them.
        kept_s: how long a result is reused.
    """

    def __init__(self, peers: PeersFile, links: PeerLinks, kept_s: float = CACHE_S) -> None:
        self._cache_s = kept_s
        self._peers = peers
        self._links = links
        self._turn = random.randrange(1 << 20)  # processes with the same results ask different nodes
        self._placements: tuple[PoolView | None, Placement, dict[int, Placement]] = None, Placement([]), {}
        self._cache: OrderedDict[tuple[bytes, int], tuple[float, list[Stretch]]] = OrderedDict()
        self._objects: OrderedDict[bytes, tuple[float, list[str]]] = OrderedDict()

    def find(
        self,
        namespace: Namespace,
        keys: list[bytes],
        first: int,
        deadline_s: float,
        without: Collection[str] = (),
        closed: bool = True,
    ) -> list[Stretch]:
        """Return where the pages of a chain are on other nodes, starting at page ``first``, up to the first page that
        no node has.

        Args:
            namespace: namespace of the pages. Nodes check whether this caller may read them.
            keys: keys of the chain from its root.
            deadline_s: a time of ``time.monotonic()``. Each owner of a span, and each node that is asked about its own
                pages, gets at most ``OWNER_S`` to answer.
            without: nodes to leave out.
            closed: a node that has a page also has all pages before it.
        """
        view = self._peers.look()
        if view is None or len(view.peers) < 2 or first >= len(keys):
            return []
        keys, now_s = keys[: first + FIND_PAGES_MAX] if len(keys) > FIND_PAGES_MAX else keys, time.monotonic()
        name = keys[-1], first  # a key also names all pages before it
        until_s, stretches = self._cache.get(name, (0.0, []))
        if until_s >= now_s and not without and all(each.node in view.peers for each in stretches):
            return stretches
        nodes = {name for name in view.peers if name != view.node and name not in without}
        placement, older = self._placement(view)
        search = Search(placement, keys, first, nodes, closed, self._turn, older)
        self._ask(
            _Scope(namespace, closed, placement.number), search, view, min(deadline_s, now_s + ROUNDS_SILENT * OWNER_S)
        )
        stretches = search.result()
        if not without:
            self._keep(name, now_s + self._cache_s, stretches)
        return stretches

    def find_objects(
        self,
        namespace: Namespace,
        keys: list[bytes],
        deadline_s: float,
        without: Collection[str] = (),
        fresh: bool = False,
    ) -> list[list[str]]:
        """Return, for each key of an object, the other nodes that have it, the best first.

        Only results with a node are reused, so an object is found as soon as an owner knows it.

        Args:
            namespace, deadline_s, without: as for ``find``.
            keys: at most ``FIND_PAGES_MAX``.
            fresh: do not reuse results.
        """
        view, now_s = self._peers.look(), time.monotonic()
        if view is None or len(view.peers) < 2 or not keys:
            return [[] for _ in keys]
        nodes = {name for name in view.peers if name != view.node and name not in without}
        holders: list[list[str]] = []
        for key in keys:
            until_s, names = self._objects.get(key, (0.0, []))
            holders.append([name for name in names if name in nodes] if until_s >= now_s and not fresh else [])
        unknown = [at for at, names in enumerate(holders) if not names]
        if not unknown:
            return holders
        wanted = [keys[at] for at in unknown]
        placement, older = self._placement(view)
        search = Search(placement, wanted, 0, nodes, False, self._turn, older, separate_spans(len(wanted)))
        scope = _Scope(namespace, False, placement.number)
        self._ask(scope, search, view, min(deadline_s, now_s + ROUNDS_SILENT * OWNER_S))
        for at, names in zip(unknown, search.holders(), strict=True):
            holders[at] = names
            if names and not without:
                self._objects[keys[at]] = now_s + self._cache_s, names
        while len(self._objects) > OBJECTS_CACHED:
            with contextlib.suppress(KeyError):  # another thread has done it
                self._objects.popitem(last=False)
        return holders

    def owners(self, keys: list[bytes]) -> list[list[str]]:
        """Return the owners of each object's span, except this node."""
        view = self._peers.look()
        if view is None or not keys:
            return [[] for _ in keys]
        placement, _ = self._placement(view)
        places = placement.owners(fingerprints(b"".join(keys))).tolist()
        return [[name for name in map(placement.nodes.__getitem__, row) if name != view.node] for row in places]

    def _keep(self, name: tuple[bytes, int], until_s: float, stretches: list[Stretch]) -> None:
        self._cache[name] = until_s, stretches
        while len(self._cache) > CACHE_MAX:
            with contextlib.suppress(KeyError):  # another thread has done it
                self._cache.popitem(last=False)

    def _placement(self, view: PoolView) -> tuple[Placement, dict[int, Placement]]:
        """Return the current placement, and earlier ones by their numbers."""
        last_view, placement, older = self._placements
        if view is not last_view:
            same_peers = last_view is not None and view.peers is last_view.peers
            if not same_peers and placement.nodes != tuple(sorted(view.peers)):
                older = dict([*older.items(), (placement.number, placement)][-OLDER_MAX:])
                placement = Placement(view.peers, placement)
            self._placements = view, placement, older
        return placement, older

    def _ask(self, scope: _Scope, search: Search, view: PoolView, deadline_s: float) -> None:
        silent = {name for name, peer in view.peers.items() if self._links.dead(peer)}
        while questions := search.ask(silent):
            for question, answer in zip(questions, self._round(scope, view, questions, deadline_s), strict=True):
                if answer is None:
                    silent.add(question.owner)
                else:
                    search.take_answer(question, answer)
            if time.monotonic() >= deadline_s:
                return

    def _round(
        self, scope: _Scope, view: PoolView, questions: list[Question], deadline_s: float
    ) -> list[Locations | None]:
        """Ask all questions at the same time. A question without a valid answer gets None."""
        requests = [PeerRequest(view.peers[each.owner], *scope.request(each)) for each in questions]
        bodies = ask_peers(self._links, requests, FrameKind.FOUND, min(deadline_s, time.monotonic() + OWNER_S))
        answers: list[Locations | None] = []
        for question, body in zip(questions, bodies, strict=True):
            try:
                answers.append(unpack_found(body, len(question.places)) if isinstance(body, bytearray) else None)
            except WireError:
                answers.append(None)
                self._links.mark_dead(view.peers[question.owner])
        return answers
