"""One node of the pool in ``cluster_world``: its pages, its announcer, its part of the directory, and its clients."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.model.replica import Tier
from kvstore.model.span import fingerprints
from kvstore.state.announcing import Announcing, Entries
from kvstore.state.directory import GONE, TIERS, Directory, Told
from kvstore.state.placement import Placement
from kvstore.state.searching import Search
from kvstore.transfer.find_messages import (
    pack_announce,
    pack_announced,
    pack_find,
    pack_found,
    unpack_announce,
    unpack_announced,
    unpack_find,
    unpack_found,
)
from kvstore.transfer.reading import Whose

if TYPE_CHECKING:
    from tests.helpers.worlds.cluster_world import ClusterWorld

TICK_S: Final = 0.2  # between two turns of an announcer
TTL_S: Final = 1.5  # of a session in the catalog
SILENT_S: Final = 3.0  # see ``directory_shell``
LOG_EVENTS: Final = 4  # that a node keeps for its announcer
DIRECTORY_BYTES: Final = 1 << 16
WHOSE: Final = Whose(bytes(16), "", "")

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
        self.stalled = False
        self.start_daemon(keep=False)
        self.start_server()

    # --- starts -------------------------------------------------------------------------------------------------------

    def start_daemon(self, keep: bool) -> None:
        """The daemon starts anew, with its pages or (another incarnation) without."""
        if not keep:
            self.lengths, self.has = {}, {}
        self.announcing = Announcing(self.name, self.world.number)
        self.log: list[tuple[int, Entries]] = []
        self.seq, self.after = 0, 0
        self.told_s: dict[str, float] = {}
        self.daemon = self.world.number()
        self.world.task(self.name, self.follow(self.daemon))

    def start_server(self) -> None:
        """The data server starts anew: it knows nothing."""
        self.process = self.world.number()
        self.directory = Directory(DIRECTORY_BYTES)
        self.heard_s: dict[str, float] = {}
        self.members: set[str] = set()
        self.world.publish(self)
        self.world.at(TTL_S, lambda: self.world.end_sessions(self.name))

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
        """As ``service.cluster.announcer`` does."""
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
            its.lost()
            self.world.counts["lost events"] += 1
        for seq, changed in self.log:
            if seq > self.after:
                its.changed(changed)
        self.after = self.seq
        if its.wants_pages:
            its.dumped(entries([(page, 0) for page in self.has], self.has))
            self.world.counts["dumps"] += 1

    def tell(self, daemon: int) -> Task:
        """One batch to each owner, all at the same time."""
        world, sent = self.world, list[tuple[str, Told]]()
        for owner in self.announcing.owners:
            idle = world.now_s - self.told_s.get(owner, -9.0) > 1.0
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
                wanted = unpack_announced(answer)
                world.counts["again"] += wanted == -1
                world.counts["entries"] += len(batch.marks)
                self.announcing.answered(owner, batch, wanted)
                self.told_s[owner] = world.now_s

    # --- the owner ----------------------------------------------------------------------------------------------------

    def hear(self, body: bytes) -> bytes:
        """Answer ANNOUNCE."""
        self.look()
        told, _ = unpack_announce(body)
        self.heard_s[told.node] = self.world.now_s
        wanted = self.directory.told(told)
        assert self.directory.nbytes <= DIRECTORY_BYTES, "an owner's memory is bounded"
        return pack_announced(wanted)

    def find(self, body: bytes) -> bytes:
        """Answer FIND."""
        self.look()
        return pack_found(self.directory.find(unpack_find(body)[1]))

    def look(self) -> None:
        """As ``DirectoryShell`` does."""
        for name in self.directory.nodes:
            silent = self.world.now_s > self.heard_s.get(name, 0.0) + SILENT_S
            if name not in self.view and (silent or name in self.members):
                self.directory.forget(name)
        self.members = set(self.view)

    @property
    def alive(self) -> bool:
        """Whether it is one of the world's."""
        return self.world.nodes.get(self.name) is self

    # --- its clients --------------------------------------------------------------------------------------------------

    def get(self, chain: int, then: Callable[[int], None]) -> Task:
        """Read a chain as ``client.local.elsewhere`` does: ``then`` is told how many pages came."""
        keys, failed = self.world.chains[chain], set[str]()
        pages = self.leading(keys)
        while pages < len(keys):
            nodes = set(self.view) - failed - {self.name}
            search = Search(Placement(self.view), keys, pages, nodes, True, self.world.draw.randrange(9))
            silent = set[str]()
            while questions := search.ask(silent):
                bodies = [pack_find(WHOSE, each.pages) for each in questions]
                answers = yield [
                    (each.owner, self.view.get(each.owner, 0), lambda node, body=body: node.find(body))
                    for each, body in zip(questions, bodies, strict=True)
                ]
                for question, answer in zip(questions, answers, strict=True):
                    if answer is None:
                        silent.add(question.owner)
                    else:
                        search.answered(question, unpack_found(answer, len(question.pages)))
            found = search.found()
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
