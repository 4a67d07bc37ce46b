"""One node of the pool in ``cluster_world``: its pages, its announcer, its part of the directory, and its clients."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.cluster.announce_plan import IDLE_S, AnnouncePlan, Entries
from kvstore.cluster.directory import GONE, AnnounceBatch, Locations, Placement
from kvstore.cluster.directory_messages import (
    pack_announce,
    pack_announced,
    pack_find,
    pack_found,
    pack_hold,
    unpack_announce,
    unpack_announced,
    unpack_find,
    unpack_found,
    unpack_hold,
)
from kvstore.cluster.directory_owner import DirectoryOwner
from kvstore.cluster.lookup_plan import Question, Search, Stretch
from kvstore.model.prefix import fingerprints
from kvstore.model.replica import TIERS, Tier
from kvstore.wire.data import Namespace

if TYPE_CHECKING:
    from tests.helpers.worlds.cluster_world import ClusterWorld

TICK_S: Final = 0.2  # between two turns of an announcer
TTL_S: Final = 1.5  # of a session in the catalog
LOG_EVENTS: Final = 3  # that a node keeps for its announcer
DIRECTORY_BYTES: Final = 1 << 16
WHOSE: Final = Namespace(bytes(16), "", "")

Call = tuple[str, int, Callable[["SimNode"], Any]]
"""To a node, as long as its data server is this process: what it does, and so what it answers."""
Task = Generator[list[Call] | float, list[Any], None]
"""Waits for answers to calls, or for so many seconds."""


class SimNode:
    """One node: its pages, its daemon with the announcer, its data server with a part of the directory."""

    def __init__(self, world: ClusterWorld, name: str) -> None:
        self.world, self.name = world, name
        self.lengths: dict[tuple[int, Tier], int] = {}  # leading pages of each chain
        self.has: dict[tuple[bytes, Tier], int] = {}  # page -> its span
        self.view: dict[str, int] = {}
        self.placement = Placement([])
        self.older: dict[int, Placement] = {}
        self.stalled = False
        self.start_daemon(keep=False)
        self.start_server()

    # --- starts -------------------------------------------------------------------------------------------------------

    def start_daemon(self, keep: bool) -> None:
        """The daemon starts anew, with its pages or (another incarnation) without."""
        if not keep:
            self.lengths, self.has = {}, {}
        self.announcing = AnnouncePlan(self.name, self.world.number)
        self.log: list[tuple[int, Entries]] = []
        self.seq, self.after = 0, 0
        self.told_s: dict[str, float] = {}
        self.offered: dict[str, int] = {}  # tombstones that an owner has for this node
        self.daemon = self.world.number()
        self.world.task(self.name, self.follow(self.daemon))

    def start_server(self) -> None:
        """The data server starts anew: it knows nothing."""
        self.process = self.world.number()
        self.owner = DirectoryOwner(DIRECTORY_BYTES)
        self.world.publish(self)
        self.world.at(TTL_S, lambda: self.world.end_sessions(self.name))

    def see(self, view: dict[str, int]) -> None:
        """What the catalog has."""
        if view.keys() != self.view.keys():
            self.older[self.placement.number] = self.placement
            self.placement = Placement(view, self.placement)
        self.view = view

    # --- pages --------------------------------------------------------------------------------------------------------

    def change(self, chain: int, tier: Tier, length: int) -> None:
        """From now on it has so many leading pages of a chain in that tier."""
        before = self.has
        self.lengths[chain, tier] = length
        self.has = {}
        for (each, its), pages in self.lengths.items():
            for key, span in zip(self.world.chains[each][:pages], self.world.spans[each], strict=False):
                self.has[key, its] = span
        came = [(page, 0) for page in self.has if page not in before]
        went = [(page, GONE) for page in before if page not in self.has]
        if came or went:
            self.seq += 1
            self.log = [*self.log, (self.seq, entries([*went, *came], {**before, **self.has}))][-LOG_EVENTS:]

    def leading(self, keys: list[bytes]) -> int:
        """How many of these it has, from the first one on."""
        return next(
            (at for at, key in enumerate(keys) if not any((key, tier) in self.has for tier in TIERS)), len(keys)
        )

    def read(self, keys: list[bytes]) -> list[bytes]:
        """What it sends for these: of each leading page that it has the content, which here is its key."""
        return keys[: self.leading(keys)]

    # --- the announcer ------------------------------------------------------------------------------------------------

    def follow(self, daemon: int) -> Task:
        """As ``node.cluster.announcer`` does."""
        while self.daemon == daemon:
            if not self.stalled and self.alive:
                self.take_in()
                yield from self.tell(daemon)
            yield TICK_S * self.world.draw.uniform(0.9, 1.1)

    def take_in(self) -> None:
        """The log, and all pages where that is not enough."""
        its = self.announcing
        its.members(self.view if self.view.get(self.name) == self.process else ())
        if self.log and self.log[0][0] > self.after + 1:
            its.restart()
            self.world.counts["lost events"] += 1
        for seq, changed in self.log:
            if seq > self.after:
                its.apply(changed)
        self.after = self.seq
        wanted = its.wanted()
        if wanted is not None:
            its.add_pages(wanted, entries([(page, 0) for page in self.has], self.has))
            self.world.counts["dumps"] += 1

    def tell(self, daemon: int) -> Task:
        """One batch to each owner, all at the same time."""
        world, sent = self.world, list[tuple[str, AnnounceBatch]]()
        for owner in self.announcing.owners:
            idle = world.now_s - self.told_s.get(owner, -9.0) > IDLE_S
            batch = self.announcing.batch(owner, idle=idle)
            if batch is not None and owner in self.view:
                sent.append((owner, batch))
        bodies = [pack_announce(batch, 0) for _, batch in sent]
        calls = [
            (owner, self.view[owner], lambda node, body=body: node.hear(body))
            for (owner, _), body in zip(sent, bodies, strict=True)
        ]
        answers = yield calls
        for (owner, batch), answer in zip(sent, answers, strict=True):
            if answer is not None and self.daemon == daemon:
                wanted, self.offered[owner] = unpack_announced(answer)
                world.counts["again"] += wanted == -1
                world.counts["entries"] += len(batch.marks)
                self.announcing.take_answer(owner, batch, wanted)
                self.told_s[owner] = world.now_s

    # --- the owner ----------------------------------------------------------------------------------------------------

    def hear(self, body: bytes) -> bytes:
        """Answer ANNOUNCE."""
        self.owner.look(self.view, self.world.now_s)
        told, _ = unpack_announce(body)
        wanted = self.owner.apply(told, self.world.now_s)
        assert self.owner.directory.nbytes <= DIRECTORY_BYTES, "an owner's memory is bounded"
        return pack_announced(wanted, len(self.owner.tombstones_for(told.node, self.world.now_s)))

    def find(self, body: bytes) -> bytes:
        """Answer FIND."""
        self.owner.look(self.view, self.world.now_s)
        _, pages, placement = unpack_find(body)
        unsure = self.owner.doubts(placement, self.world.now_s)
        return pack_found(replace(self.owner.directory.find(pages), doubts=unsure))

    def hold(self, body: bytes) -> bytes:
        """Answer HOLD, as ``HoldHandler`` does."""
        _, keys, _ = unpack_hold(body)
        pages = self.leading(keys)
        tiers = [min(TIERS.index(tier) for tier in TIERS if (key, tier) in self.has) for key in keys[:pages]]
        return pack_found(
            Locations(np.arange(pages), np.zeros(pages, np.int64), np.array(tiers, np.uint8), [self.name])
        )

    @property
    def alive(self) -> bool:
        """Whether it is one of the world's."""
        return self.world.nodes.get(self.name) is self

    # --- its clients --------------------------------------------------------------------------------------------------

    def search(self, keys: list[bytes], first: int, without: set[str]) -> Generator[Any, Any, list[Stretch]]:
        """As ``cluster.find_pages`` does."""
        placement, silent = self.placement, set[str]()
        nodes = set(self.view) - without - {self.name}
        turn = self.world.draw.randrange(9)
        search = Search(placement, keys, first, nodes, True, turn, self.older)

        def call(question: Question) -> Call:
            holds = question.keys
            body = pack_hold(WHOSE, holds, True) if holds else pack_find(WHOSE, question.pages, placement.number)
            ask = SimNode.hold if holds else SimNode.find
            return question.owner, self.view.get(question.owner, 0), lambda node: ask(node, body)

        while questions := search.ask(silent):
            self.world.counts["questions"] += len(questions)
            answers = yield [call(each) for each in questions]
            for question, answer in zip(questions, answers, strict=True):
                if answer is None:
                    silent.add(question.owner)
                else:
                    search.take_answer(question, unpack_found(answer, len(question.places)))
        return search.result()

    def lookup(self, chain: int, then: Callable[[int], None]) -> Task:
        """Look for all of a chain on other nodes: ``then`` is told how many pages were found."""
        found = yield from self.search(self.world.chains[chain], 0, set())
        then(found[0].stop if found else 0)

    def get(self, chain: int, then: Callable[[int], None]) -> Task:
        """Read a chain as ``client.local.peer_reads`` does: ``then`` is told how many pages came."""
        keys, failed = self.world.chains[chain], set[str]()
        pages = self.leading(keys)
        while pages < len(keys):
            found = yield from self.search(keys, pages, failed)
            if not found:
                break
            stop, who = pages + found[0].stop, found[0].node
            wanted = keys[pages:stop]
            (came,) = yield [(who, self.view.get(who, 0), lambda node, wanted=wanted: node.read(wanted))]
            assert came is None or came == wanted[: len(came)], "wrong pages were served"
            self.world.counts["misled"] += came is not None and len(came) < len(wanted)
            pages += len(came or ())
            if len(came or ()) < len(wanted):
                failed.add(who)
        then(pages)


def entries(pages: list[tuple[tuple[bytes, Tier], int]], spans: dict[tuple[bytes, Tier], int]) -> Entries:
    """Pages that came (0) or went (``GONE``), as the announcer makes them of events."""
    marks = [TIERS.index(tier) | gone for (_, tier), gone in pages]
    named = np.array([spans[page] for page, _ in pages], np.uint64)
    return Entries(named, fingerprints(b"".join(key for (key, _), _ in pages)), np.array(marks, np.uint8))
