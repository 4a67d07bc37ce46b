"""LoggedWorld: clients that publish what they put in a log, and a node that takes that in before it decides.

A record is taken in as the event that it is. Some are performed together, and marked then: a crash in between, or
anywhere in what was decided, has the next daemon take them in once more. What the model holds the node to: of a page
that was published behind a page in DRAM, or behind one published before, nothing is lost, whoever is killed, and its
frame, where another writer was first, is free. Layer-wise writers publish what they begin as well, and seal it, or give
it up, some time later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kvstore.model.replica import Address, FrameClass, Status
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.interfaces import Rows
from tests.helpers.worlds.simulation import Simulation
from tests.helpers.worlds.world import Chain, World, root_of

TOGETHER = 4  # records that are taken in at once


@dataclass(frozen=True)
class Record:
    """One put, published; or, with ``ttl_ns``, what a layer-wise writer begins."""

    frame_class: FrameClass
    keys: list[bytes]
    parent: bytes
    addresses: list[Address]
    rows: Rows
    number: int
    ttl_ns: int = 0


class LoggedWorld(World):
    """``logs``: what each session, living or dead, has published and no daemon has marked."""

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self.logs: dict[int, list[Record]] = {}
        self.taken_in = self.refused = self.again = self.together = self.shown = 0
        self.writing: dict[int, tuple[Chain, int, list[Address]]] = {}  # by session: begun, neither sealed nor given up
        self._number = 0
        self._tails: dict[int, Record] = {}  # what each session published last, if this daemon has it, or will
        self._found: list[int] = []  # sessions that have a log, found by a daemon that has just started

    def published(self, session: int, chain: Chain, stored: int) -> int:
        """How many pages after ``stored`` the session has published itself."""
        here = {key for record in self.logs.get(session, ()) if not record.ttl_ns for key in record.keys}
        return next((i for i, key in enumerate(chain.keys[stored:]) if key not in here), len(chain.path) - stored)

    def publish(self, session: int, chain: Chain, start: int) -> bool:
        """Publish pages ``start ..``, as far as granted frames reach; False where they hang on nothing that stays."""
        if not self._stays(session, chain, start):
            return False
        addresses = self._taken(session, chain, start)
        if addresses:
            self.begin(session, chain, start, addresses)
            self._publish(session, chain, start, addresses)
        return True

    def write(self, session: int, chain: Chain, start: int) -> None:
        """Begin pages ``start ..`` in granted frames; ``end_write`` ends that."""
        addresses = self._taken(session, chain, start)
        if addresses and self._stays(session, chain, start):
            self.begin(session, chain, start, addresses)
            self.writing[session] = chain, start, addresses
        elif addresses:
            self.revoke(session, addresses)

    def end_write(self, session: int, *, seals: bool) -> None:
        """Publish what is begun, or give it up, as a writer does whose deadline has passed."""
        chain, start, addresses = self.writing.pop(session)
        if seals and self._stays(session, chain, start):
            self._publish(session, chain, start, addresses)
        else:
            self.revoke(session, addresses)

    def begin(self, session: int, chain: Chain, start: int, addresses: list[Address]) -> None:
        """As ``World.begin``; it is published. Some say nothing: where there is no room in the log."""
        ttl_ns, stop = (0, 10**15, 10**15, 10**7)[sum(chain.path) % 4], start + len(addresses)
        if ttl_ns:
            parts = chain.keys[start:stop], chain.parents[start], addresses, chain.rows[start:stop]
            self.logs.setdefault(session, []).append(Record(chain.frame_class, *parts, 0, ttl_ns))

    def _stays(self, session: int, chain: Chain, start: int) -> bool:
        parent = chain.parents[start]
        stays = parent == root_of(chain.frame_class) or parent in self.node.index
        return stays or bool(self.published(session, Chain(chain.frame_class, chain.path[:start]), start - 1))

    def _taken(self, session: int, chain: Chain, start: int) -> list[Address]:
        frames = self.clients[session].granted.get(chain.frame_class, [])
        addresses = sorted(frames[: len(chain.path) - start])
        del frames[: len(addresses)]
        return addresses

    def _publish(self, session: int, chain: Chain, start: int, addresses: list[Address]) -> None:
        stop = start + len(addresses)
        keys = chain.keys[start:stop]
        self.tried.update(keys)
        self._unclaim(session, addresses)
        for address, key in zip(addresses, keys, strict=True):
            self.node.write(address, key)
        self._number += 1
        parts = keys, chain.parents[start], addresses, chain.rows[start:stop]
        record = Record(chain.frame_class, *parts, self._number)
        self._tails[session] = record
        self.logs.setdefault(session, []).append(record)

    def tail(self, session: int) -> tuple[int, bytes]:
        """See ``World.tail``; every other put goes on, as long as its last page is there."""
        self.take_in()
        record = self._tails.get(session)
        if record is None or record.number % 2 or record.keys[-1] not in self.node.index:
            return 0, b""
        return record.number, record.keys[-1]

    def kill(self, session: int, *, noticed: bool = True) -> None:
        """See ``World.kill``."""
        self._tails.pop(session, None)
        self.writing.pop(session, None)
        super().kill(session, noticed=noticed)

    def send(self, event: ev.Event) -> do.Reply | None:
        """The node takes in all logs, and then handles the event."""
        self.take_in()
        return super().send(event)

    def take_in(self) -> None:
        """As the node does, some together; killed in between, the next one begins with what is not marked."""
        while any(self.logs.values()):
            records = [(session, record) for session, log in self.logs.items() for record in log][:TOGETHER]
            puts = list(takewhile(lambda each: not each[1].ttl_ns, records))
            self._take_in(puts or records[:1])
        while self._found:
            session = self._found.pop()
            super().send(ev.SessionOpened(self.now_ns, session))
            super().send(ev.ConnectionLost(self.now_ns, session))

    def _take_in(self, records: list[tuple[int, Record]]) -> None:
        self.node.now_ns = self.now_ns
        replies, together = [], list[do.Instruction]()
        for session, record in records:
            about = record.parent, record.addresses, record.rows
            event: ev.Event = ev.Begin(self.now_ns, session, record.frame_class, record.ttl_ns, *about)
            if not record.ttl_ns:
                shape, joins = record.frame_class, bool(together)
                event = ev.SealGranted(self.now_ns, session, shape, *about, number=record.number, joins=joins)
            *decided, reply = self.state.handle(event)
            self._account(event, decided)
            together += decided
            replies.append(reply)
        if self.crash_at:
            self._crash(together)
            self.again += 1
            return
        self.node.perform(together)
        for (session, record), reply in zip(records, replies, strict=True):
            assert type(reply) is do.Reply
            assert self.logs[session].pop(0) is record
            if record.ttl_ns:
                self.shown += 1
                continue
            for key in record.keys:
                assert key in self.node.index, "a page is lost that a put returned for"
            granted = self.state.sessions[session].granted
            assert granted.isdisjoint(record.addresses), "a frame is kept for nobody"
            self.stored.update(record.keys)
            self.taken_in += 1
            self.together += len(records) > 1
            self.refused += len(reply.statuses) - reply.statuses.count(Status.OK)

    def restart(self) -> None:
        """The next daemon finds the logs as they were."""
        super().restart()
        self._found = list(self.logs)
        waiting = {session for session, log in self.logs.items() if any(not record.ttl_ns for record in log)}
        self._tails = {session: self._tails[session] for session in waiting if session in self._tails}


class LoggedSimulation(Simulation):
    """The same clients; most of their puts are published."""

    make_world = LoggedWorld
    world: LoggedWorld

    def _send_pages(self, session: int, chain: Chain, stored: int) -> None:
        world, start = self.world, stored + self.world.published(session, chain, stored)
        if session in world.writing and self.random.random() < 0.5:
            world.end_write(session, seals=self.random.random() < 0.8)
        if start == len(chain.path):
            return
        if session not in world.writing and self.random.random() < 0.2:
            world.write(session, chain, start)
        elif self.random.random() < 0.2 or not self.world.publish(session, chain, start):
            super()._send_pages(session, chain, stored)
        else:
            self.sealed[chain.frame_class] += len(chain.path) - start

    def _lease(self) -> None:
        self._taken_in(super()._lease)

    def _pin(self) -> None:
        self._taken_in(super()._pin)

    def _trouble(self) -> None:
        self._taken_in(super()._trouble)

    def _taken_in(self, verb: Callable[[], None]) -> None:
        """Verbs of the model that look at the node before they ask it."""
        self.world.take_in()
        verb()
