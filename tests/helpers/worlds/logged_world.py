"""LoggedWorld: clients that publish what they put in a log, and a node that takes that in before it decides.

A record is taken in as the event that it is. Some are performed together, and marked then: a crash in between, or
anywhere in what was decided, has the next daemon take them in once more. What the model holds the node to: of a page
that was published behind a page in DRAM, or behind one published before, nothing is lost, whoever is killed, and its
frame, where another writer was first, is free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvstore.model.replica import Address, FrameClass, Status
from kvstore.state import events as ev
from kvstore.state.views import Rows
from tests.helpers.worlds.simulation import Simulation
from tests.helpers.worlds.world import Chain, World, root_of

TOGETHER = 4  # records that are taken in at once


@dataclass(frozen=True)
class Record:
    """One put, published."""

    frame_class: FrameClass
    keys: list[bytes]
    parent: bytes
    addresses: list[Address]
    rows: Rows
    number: int


class LoggedWorld(World):
    """``logs``: what each session, living or dead, has published and no daemon has marked."""

    def __init__(self, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self.logs: dict[int, list[Record]] = {}
        self.taken_in = self.refused = self.again = self.together = 0
        self._number = 0
        self._tails: dict[int, Record] = {}  # what each session published last, if this daemon has it, or will
        self._found: list[int] = []  # sessions that have a log, found by a daemon that has just started

    def published(self, session: int, chain: Chain, stored: int) -> int:
        """How many pages after ``stored`` the session has published itself."""
        here = {key for record in self.logs.get(session, ()) for key in record.keys}
        return next((i for i, key in enumerate(chain.keys[stored:]) if key not in here), len(chain.path) - stored)

    def publish(self, session: int, chain: Chain, start: int) -> bool:
        """Publish pages ``start ..``, as far as granted frames reach; False where they hang on nothing that stays."""
        client = self.clients[session]
        frames = client.granted.get(chain.frame_class, [])
        parent = chain.parents[start]
        stays = parent == root_of(chain.frame_class) or parent in self.shell.index
        if not stays and not self.published(session, Chain(chain.frame_class, chain.path[:start]), start - 1):
            return False
        addresses = sorted(frames[: len(chain.path) - start])
        del frames[: len(addresses)]
        if addresses:
            stop = start + len(addresses)
            keys = chain.keys[start:stop]
            self.tried.update(keys)
            self.begin(session, chain, start, addresses)
            self._unclaim(session, addresses)
            self.shell.content.update({address[:2]: key for address, key in zip(addresses, keys, strict=True)})
            self._number += 1
            record = Record(chain.frame_class, keys, parent, addresses, chain.rows[start:stop], self._number)
            self._tails[session] = record
            self.logs.setdefault(session, []).append(record)
        return True

    def tail(self, session: int) -> tuple[int, bytes]:
        """See ``World.tail``; every other put goes on, as long as its last page is there."""
        self.take_in()
        record = self._tails.get(session)
        if record is None or record.number % 2 or record.keys[-1] not in self.shell.index:
            return 0, b""
        return record.number, record.keys[-1]

    def kill(self, session: int, *, noticed: bool = True) -> None:
        """See ``World.kill``."""
        self._tails.pop(session, None)
        super().kill(session, noticed=noticed)

    def send(self, event: ev.Event) -> ev.Reply | None:
        """The node takes in all logs, and then handles the event."""
        self.take_in()
        return super().send(event)

    def take_in(self) -> None:
        """As the node does, some together; killed in between, the next one begins with what is not marked."""
        while any(self.logs.values()):
            self._take_in([(session, record) for session, log in self.logs.items() for record in log][:TOGETHER])
        while self._found:
            session = self._found.pop()
            super().send(ev.SessionOpened(self.now_ns, session))
            super().send(ev.ConnectionLost(self.now_ns, session))

    def _take_in(self, records: list[tuple[int, Record]]) -> None:
        self.shell.now_ns = self.now_ns
        replies, together = [], list[ev.Instruction]()
        for session, record in records:
            about = session, record.frame_class, record.parent, record.addresses, record.rows
            event = ev.SealGranted(self.now_ns, *about, number=record.number, joins=bool(together))
            *decided, reply = self.state.handle(event)
            self._account(event, decided)
            together += decided
            replies.append(reply)
        if self.crash_at:
            self._crash(together)
            self.again += 1
            return
        self.shell.perform(together)
        for (session, record), reply in zip(records, replies, strict=True):
            assert type(reply) is ev.Reply
            for key in record.keys:
                assert key in self.shell.index, "a page is lost that a put returned for"
            granted = self.state.sessions[session].granted
            assert granted.isdisjoint(record.addresses), "a frame is kept for nobody"
            self.stored.update(record.keys)
            self.taken_in += 1
            self.together += len(records) > 1
            self.refused += len(reply.statuses) - reply.statuses.count(Status.OK)
            assert self.logs[session].pop(0) is record

    def restart(self) -> None:
        """The next daemon finds the logs as they were."""
        super().restart()
        self._found = list(self.logs)
        waiting = {session: log[-1] for session, log in self.logs.items() if log}
        self._tails = {session: self._tails[session] for session in waiting if session in self._tails}


class LoggedSimulation(Simulation):
    """The same clients; most of their puts are published."""

    make_world = LoggedWorld
    world: LoggedWorld

    def _send_pages(self, session: int, chain: Chain, stored: int) -> None:
        start = stored + self.world.published(session, chain, stored)
        if start == len(chain.path):
            return
        if self.random.random() < 0.2 or not self.world.publish(session, chain, start):
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
