"""Finding: which nodes of the pool have pages, as the owners of their spans tell.

``cluster.lookup_plan`` says whom to ask for what; here the questions of a round are sent, all
under way at the same time. What was found is kept for a second. Nothing of it is proven: where a page is read, it is.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Final, NamedTuple

from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.directory import OWNERS, Listed, Placement
from kvstore.cluster.directory_messages import FIND_PAGES_MAX, pack_find, pack_hold, unpack_found
from kvstore.cluster.lookup_plan import Question, Search, Stretch
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolNode, PoolView
from kvstore.errors import KVStoreError
from kvstore.wire.data import FrameKind, Whose, WireError

OWNER_S: Final = 0.3  # for an owner to answer
KEPT_S: Final = 1.0
KEPT_MAX: Final = 64  # answers
ROUNDS_SILENT: Final = OWNERS + 1  # rounds in which nodes may be silent: each owner of a span, then a node itself
OLDER_MAX: Final = 4  # placements that are remembered


class _Asked(NamedTuple):
    """What all questions of a search have in common."""

    whose: Whose
    closed: bool
    placement: int

    def request(self, question: Question) -> tuple[FrameKind, bytes]:
        """The kind and the body of its message."""
        if question.keys is not None:
            return FrameKind.HOLD, pack_hold(self.whose, question.keys, self.closed)
        return FrameKind.FIND, pack_find(self.whose, question.pages, self.placement)


class Finder:
    """Asks for one process. Threads may share it.

    Args:
        peers: who there is.
        links: how they are reached.
        kept_s: how long what was found is kept.
    """

    def __init__(self, peers: PeersFile, links: PeerLinks, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._peers = peers
        self._links = links
        self._turn = random.randrange(1 << 20)  # so that processes that find the same ask different nodes for it
        self._placed: tuple[PoolView | None, Placement, dict[int, Placement]] = None, Placement([]), {}
        self._kept: OrderedDict[tuple[bytes, int], tuple[float, list[Stretch]]] = OrderedDict()

    def find(
        self,
        whose: Whose,
        keys: list[bytes],
        first: int,
        deadline_s: float,
        without: Collection[str] = (),
        closed: bool = True,
    ) -> list[Stretch]:
        """Where the pages of a chain are, from page ``first`` on: as far as some other node has each.

        Args:
            whose: it is; owners tell who may read it.
            keys: of the chain from its root.
            deadline_s: of ``time.monotonic()``; it waits no longer than ``OWNER_S`` for each owner of a span, and for
                nodes that are asked themselves.
            without: nodes that are not to be named.
            closed: who has a page has those before it.
        """
        view = self._peers.look()
        if view is None or len(view.peers) < 2 or first >= len(keys):
            return []
        keys, now_s = keys[: first + FIND_PAGES_MAX] if len(keys) > FIND_PAGES_MAX else keys, time.monotonic()
        name = keys[-1], first  # a key names all before it, too
        until_s, found = self._kept.get(name, (0.0, []))
        if until_s >= now_s and not without and all(each.node in view.peers for each in found):
            return found
        nodes = {name for name in view.peers if name != view.node and name not in without}
        placement, older = self._placement(view)
        search = Search(placement, keys, first, nodes, closed, self._turn, older)
        self._ask(
            _Asked(whose, closed, placement.number), search, view, min(deadline_s, now_s + ROUNDS_SILENT * OWNER_S)
        )
        found = search.found()
        if not without:
            self._keep(name, now_s + self._kept_s, found)
        return found

    def _keep(self, name: tuple[bytes, int], until_s: float, found: list[Stretch]) -> None:
        self._kept[name] = until_s, found
        while len(self._kept) > KEPT_MAX:
            with contextlib.suppress(KeyError):  # another thread has done it
                self._kept.popitem(last=False)

    def _placement(self, view: PoolView) -> tuple[Placement, dict[int, Placement]]:
        """The placement now, and earlier ones by their numbers."""
        seen, placement, older = self._placed
        if view is not seen:
            if placement.nodes != tuple(sorted(view.peers)):
                older = dict([*older.items(), (placement.number, placement)][-OLDER_MAX:])
                placement = Placement(view.peers)
            self._placed = view, placement, older
        return placement, older

    def _ask(self, whose: _Asked, search: Search, view: PoolView, deadline_s: float) -> None:
        silent = {name for name, peer in view.peers.items() if self._links.dead(peer)}
        while questions := search.ask(silent):
            for question, told in zip(questions, self._round(whose, view, questions, deadline_s), strict=True):
                if told is None:
                    silent.add(question.owner)
                else:
                    search.answered(question, told)
            if time.monotonic() >= deadline_s:
                return

    def _round(
        self, whose: _Asked, view: PoolView, questions: list[Question], deadline_s: float
    ) -> list[Listed | None]:
        """Ask all of these at the same time; None: no answer. Where a connection was stale the question is asked once
        more."""
        until_s = min(deadline_s, time.monotonic() + OWNER_S)
        answers: list[Listed | None] = [None] * len(questions)
        due = list(range(len(questions)))
        for _ in range(2):
            if due:
                due = self._send(whose, view, questions, due, answers, until_s)
        return answers

    def _send(
        self,
        whose: _Asked,
        view: PoolView,
        questions: list[Question],
        due: list[int],
        answers: list[Listed | None],
        until_s: float,
    ) -> list[int]:
        """Ask those that are ``due``, and note their answers. Returns those whose connections were stale."""
        stale: list[int] = []
        with contextlib.ExitStack() as open_links:
            under_way = []
            for at in due:
                peer = view.peers[questions[at].owner]
                with contextlib.suppress(KVStoreError):
                    connection = open_links.enter_context(self._links.to(peer, until_s))
                    try:
                        number = connection.send(*whose.request(questions[at]), deadline_s=until_s)
                        under_way.append((at, connection, number))
                    except KVStoreError as error:
                        stale += [at] if self._stale(peer, connection, error) else []
            for at, connection, number in under_way:
                try:
                    head = connection.receive_head(number, FrameKind.FOUND, deadline_s=until_s)
                    body = connection.receive(head.body_bytes, deadline_s=until_s)
                    answers[at] = unpack_found(body, len(questions[at].places))
                except KVStoreError as error:
                    stale += [at] if self._stale(view.peers[questions[at].owner], connection, error) else []
        return stale

    def _stale(self, peer: PoolNode, connection: DataConnection, error: KVStoreError) -> bool:
        """Whether the peer may be asked again over another connection; where this one broke otherwise it is dead."""
        if self._links.stale(peer, connection, error):
            return True
        if connection.broken or isinstance(error, WireError):
            connection.broken = True  # also where it does not say so: we are in the middle of nonsense
            self._links.lost(peer)
        return False
