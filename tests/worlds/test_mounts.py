"""Histories of engines that mount memory: publish, take back, die, lie; of a daemon that is killed at any moment, finds
the records again, and takes in its logs from anywhere it had not marked. What is listed is what living engines have."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvstore.model.replica import Address, FrameClass, Status, Tier
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.mounts import MOUNTED_FRAMES_MAX, MOUNTS_MAX
from kvstore.state.node_state import NodeState
from tests.helpers.worlds.real_node import RealNode

SMALL, LARGE = FrameClass(4096, 2, 2), FrameClass(50_000, 2, 1)
ROOTS = [bytes([number]) * 16 for number in (1, 2, 3)]
FRAMES = 12
UNMARKED = 3  # records that a daemon has performed and not marked: the next one performs them again


def key_of(root: bytes, page: int) -> bytes:
    return root[:8] + page.to_bytes(8, "big")


@dataclass
class Held:
    """What an engine's records say of one segment."""

    frame_class: FrameClass
    pages: dict[int, tuple[int, bytes, bytes]] = field(default_factory=dict)  # frame -> generation, key, root
    generation: int = 1


@dataclass
class EngineModel:
    """An engine that lives, and what it has published that nobody has taken in."""

    segments: dict[int, Held] = field(default_factory=dict)
    log: list[ev.Event] = field(default_factory=list)
    taken: list[ev.Event] = field(default_factory=list)


class MountsWorld:
    """A node, some engines, and chance."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.node = RealNode(64 << 10, 4)
        self.state = self.started(1)
        self.engines: dict[int, EngineModel] = {}
        self.now_ns = 1
        self.told: set[bytes] = set()  # keys, as events of pages have it

    def send(self, event: ev.Event) -> do.Reply | None:
        self.now_ns += 1
        event.now_ns = self.now_ns
        instructions = self.state.handle(event)
        for instruction in instructions:
            if isinstance(instruction, do.ShowPages) and instruction.root:
                assert not self.told & set(instruction.keys), "told twice"
                self.told |= set(instruction.keys)
            elif isinstance(instruction, do.Unindex):
                assert self.told >= set(instruction.keys), "left, and had not come"
                self.told -= set(instruction.keys)
        return self.node.perform(instructions)

    # --- what happens -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        happens = [self.publish] * 6 + [self.retract] * 4 + [self.drain] * 8
        happens += [self.mount, self.mount, self.lie, self.die, self.unmount, self.restart]
        self.draw.choice(happens)()
        assert self.node.check(self.state) == []
        assert self.told == self.node.indexes[Tier.HBM].keys()

    def mount(self) -> None:
        session = self.draw.randrange(1, 5)
        engine = self.engines.setdefault(session, EngineModel())
        if not engine.segments:
            self.send(ev.SessionOpened(0, session))
        frame_class = self.draw.choice([SMALL, LARGE])
        reply = self.send(ev.Mount(0, session, frame_class, FRAMES))
        assert reply is not None and reply.status == Status.OK
        engine.segments[reply.detail["segment"]] = Held(frame_class)

    def any_segment(self) -> tuple[int, EngineModel, int, Held] | None:
        every = [(s, e, n, held) for s, e in self.engines.items() for n, held in e.segments.items()]
        return self.draw.choice(every) if every else None

    def publish(self) -> None:
        if (found := self.any_segment()) is None:
            return
        session, engine, number, held = found
        free = [frame for frame in range(FRAMES) if frame not in held.pages]
        frames = self.draw.sample(free, self.draw.randint(0, min(4, len(free))))
        root, first = self.draw.choice(ROOTS), self.draw.randrange(6)
        keys = [key_of(root, first + i) for i in range(len(frames))]
        addresses = [Address(number, frame, held.generation + i) for i, frame in enumerate(frames)]
        held.generation += len(frames)
        for address, key in zip(addresses, keys, strict=True):
            held.pages[address.frame] = address.generation, key, root
        engine.log.append(ev.Publish(0, session, number, root, first, 7, addresses, keys))

    def retract(self) -> None:
        if (found := self.any_segment()) is None:
            return
        session, engine, number, held = found
        frames = self.draw.sample(sorted(held.pages), self.draw.randint(0, len(held.pages)))
        addresses = [Address(number, frame, held.pages.pop(frame)[0]) for frame in frames]
        engine.log.append(ev.Retract(0, session, number, addresses))

    def lie(self) -> None:
        """Frames that are not there, old generations, segments of others, one frame twice: nothing changes."""
        if (found := self.any_segment()) is None:
            return
        session, _, number, held = found
        self.drain_all()
        before, root = dict(self.node.indexes[Tier.HBM]), ROOTS[0]
        stranger = session % 4 + 1
        old = [Address(number, frame, generation) for frame, (generation, _, _) in held.pages.items()]
        keys = [key_of(root, 90 + i) for i in range(len(old))]
        for lie in (
            ev.Publish(0, session, number, root, 0, 0, old, keys),
            ev.Publish(0, session, number, root, 0, 0, [Address(number, FRAMES, 1 << 40)], [keys_of_nobody()]),
            ev.Publish(0, stranger, number, root, 0, 0, [Address(number, 0, 1 << 40)], [keys_of_nobody()]),
            ev.Publish(0, session, number + 1000, root, 0, 0, [Address(number, 0, 1 << 40)], [keys_of_nobody()]),
            ev.Publish(0, session, number, root, 0, 0, [Address(number, 0, 1 << 40)], []),
            ev.Retract(0, stranger, number, old),
            ev.Retract(0, session, number, [Address(number, FRAMES, 0), Address(number, 1 << 31, 1)]),
            ev.Retract(0, session, number, [Address(n, f, g - 1) for n, f, g in old]),
            ev.Unmount(0, stranger, number),
        ):
            reply = self.send(lie)
            assert reply is not None and Status.OK not in reply.statuses, lie
            assert isinstance(lie, ev.Publish | ev.Retract) or reply.status == Status.STALE
        assert self.node.indexes[Tier.HBM] == before

    def drain(self) -> None:
        engines = [engine for engine in self.engines.values() if engine.log]
        if engines:
            self.take_in(self.draw.choice(engines))

    def take_in(self, engine: EngineModel) -> None:
        event = engine.log.pop(0)
        self.send(event)
        engine.taken = [*engine.taken, event][-UNMARKED:]

    def drain_all(self) -> None:
        for engine in self.engines.values():
            while engine.log:
                self.take_in(engine)

    def die(self) -> None:
        if not self.engines or self.draw.random() < 0.6:
            return
        session = self.draw.choice(sorted(self.engines))
        engine = self.engines[session]
        while engine.log:
            self.take_in(engine)
        del self.engines[session]
        self.send(ev.SessionDead(0, session))
        assert not [each for each in self.state.mounts.segments.values() if each.session == session]

    def unmount(self) -> None:
        found = self.any_segment()
        if found is None or self.draw.random() < 0.6:
            return
        session, engine, number, _ = found
        while engine.log:
            self.take_in(engine)
        reply = self.send(ev.Unmount(0, session, number))
        assert reply is not None and reply.status == Status.OK
        del engine.segments[number]

    def restart(self) -> None:
        """The daemon is killed. The next one finds the records as they are now, and what was published once more."""
        self.state = self.started(self.now_ns)
        for session, engine in self.engines.items():
            for number, held in engine.segments.items():
                self.send(self.found(session, number, held))
            engine.log = [*engine.taken[self.draw.randint(0, UNMARKED) :], *engine.log]
            engine.taken = []
        if not self.node.performer.index.agrees():
            self.node.performer.index.rebuild("start")
        self.told = set(self.node.indexes[Tier.HBM])

    def started(self, now_ns: int) -> NodeState:
        state = self.node.start(now_ns, {})
        assert state is not None
        return state

    @staticmethod
    def found(session: int, number: int, held: Held) -> ev.RestoreMount:
        pages = sorted(held.pages.items())
        addresses = [Address(number, frame, generation) for frame, (generation, _, _) in pages]
        keys, roots = [key for _, (_, key, _) in pages], [root for _, (_, _, root) in pages]
        return ev.RestoreMount(0, session, number, held.frame_class, FRAMES, addresses, keys, roots, [5] * len(pages))

    # --- what must hold ---------------------------------------------------------------------------------------------

    def settled(self) -> None:
        """With all taken in, the node lists exactly what living engines have, each where one of them has it."""
        self.drain_all()
        have: dict[bytes, set[Address]] = {}
        for engine in self.engines.values():
            for number, held in engine.segments.items():
                for frame, (generation, key, _) in held.pages.items():
                    have.setdefault(key, set()).add(Address(number, frame, generation))
        listed = self.node.indexes[Tier.HBM]
        assert listed.keys() == have.keys()
        assert all(address in have[key] for key, address in listed.items())
        assert {address for _, address, _, _ in self.state.mounts.replicas()} == set().union(*have.values())


def keys_of_nobody() -> bytes:
    return b"nobody has this."


@pytest.mark.parametrize("seed", range(30))
def test_what_is_listed_is_what_living_engines_have(seed: int) -> None:
    world = MountsWorld(seed)
    world.mount()
    for _ in range(12):
        for _ in range(15):
            world.step()
        world.settled()
        assert world.node.check(world.state) == []
    for session in list(world.engines):
        world.send(ev.SessionDead(0, session))
    assert not world.node.indexes[Tier.HBM] and not world.state.mounts.segments
    assert world.node.check(world.state) == []


def test_what_a_node_knows_is_bounded() -> None:
    world = MountsWorld(0)
    replies = [world.send(ev.Mount(0, 1, SMALL, 1)) for _ in range(MOUNTS_MAX + 1)]
    assert [reply.status for reply in replies if reply] == [Status.OK] * MOUNTS_MAX + [Status.NO_SPACE]
    world.send(ev.SessionDead(0, 1))
    for frames, status in ((MOUNTED_FRAMES_MAX - 1, Status.OK), (2, Status.NO_SPACE), (1, Status.OK)):
        reply = world.send(ev.Mount(0, 2, SMALL, frames))
        assert reply is not None and reply.status == status


def test_a_law_that_does_not_hold_is_found() -> None:
    world = MountsWorld(1)
    world.mount()
    while len(world.node.indexes[Tier.HBM]) < 2:
        world.publish()
        world.drain_all()
    listed, mounts = world.node.indexes[Tier.HBM], world.state.mounts
    (key, address), (other, _) = list(listed.items())[:2]
    segment = mounts.segments[address.extent]
    assert world.node.check(world.state) == []
    del listed[key]
    assert world.node.check(world.state), "a page is not listed"
    listed[key] = listed[other]
    assert world.node.check(world.state), "another one is listed in its place"
    listed[key] = address
    segment.pages += 1
    assert world.node.check(world.state), "pages are counted that are not there"
    segment.pages -= 1
    segment.generation[address.frame] = 0
    assert world.node.check(world.state), "a page has gone, and still counts"
