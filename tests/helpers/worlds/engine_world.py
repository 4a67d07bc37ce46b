"""EngineWorld: several engines, their clients and what happens to them, under one seed and one clock.

What threads and other engines are at is a list of tasks, run in any order. Engines are killed and started again,
drained, stopped; connections break; clients go away, come back under the same id, and have an answer go on elsewhere
where its engine was lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from engine.model.request import Role
from engine.state import events as ev
from engine.state.events import Submitted
from engine.state.rules import GroupRules, Rules
from kvstore.errors import KVStoreError, NodeUnavailable
from tests.helpers.worlds.engine_links import Fetch, Link
from tests.helpers.worlds.engine_machine import LAYERS, PAGE, EngineMachine

WINDOW = 20  # tokens, of a second cache group
NOWHERE = "nowhere:1"
ROUNDS_MAX = 5000
QUIET = 8  # rounds of all tasks and engines that change nothing: nothing will


class Client:
    """Who wants an answer, or a prefill: what it was told so far, in order, until ``end``."""

    def __init__(self, name: str, prompt: int, tokens_max: int, stops_at: int, deadline_s: float) -> None:
        self.name = name
        self.prompt = prompt
        self.tokens_max = tokens_max
        self.stops_at = stops_at
        self.deadline_s = deadline_s
        self.told = 0
        self.end = ""

    def admitted(self) -> None:
        """A prefill has begun."""
        assert not self.end

    def token(self, index: int) -> None:
        """The next one; what comes after an end is dropped on the way."""
        if not self.end:
            assert index == self.told, ("a token is missing, or told twice", index, self.told)
            self.told += 1
            assert not self.stops_at or self.told <= self.stops_at, "an answer goes on behind its end"
            assert self.told <= self.tokens_max

    def held(self, first_token: int) -> None:
        """A prefill is held."""
        self.finished("held")

    def finished(self, reason: str) -> None:
        """The end."""
        assert reason not in ("eos", "stop") or self.told == self.stops_at or self.end
        assert reason != "length" or self.told == self.tokens_max or self.end
        self.end = self.end or reason

    def failed(self, error: KVStoreError) -> None:
        """The other end."""
        self.end = self.end or type(error).__name__


class EngineWorld:
    """``step`` does something at random; ``finish`` lets everything end and checks that nothing is left."""

    def __init__(self, seed: int, engines: int | None = None) -> None:
        self.chance = random.Random(seed)
        self.now_s = 100.0
        self.counts: Counter[str] = Counter()
        self.links: list[Link] = []
        self.clients: list[Client] = []
        self.engines: dict[str, EngineMachine] = {}
        self.addresses = [f"engine-{i}:1" for i in range(engines or self.chance.choice((1, 2, 2, 3, 3)))]
        self._losses = 0.1
        self._alike: dict[str, list[str]] = {}
        self._tasks: list[tuple[EngineMachine, Callable[[], None]]] = []
        for address in self.addresses:
            self.begin(address)

    # --- for the engines ----------------------------------------------------------------------------------------------

    def task(self, engine: EngineMachine, run: Callable[[], None]) -> None:
        """Something that a thread of that engine is at: it ends, sooner or later, unless the engine does."""
        self._tasks.append((engine, run))

    def page_name(self, request: str, page: int) -> bytes:
        """Of a page of that request, prompt or answer: prompts begin alike, some as an earlier request went on."""
        alike = self._alike.get(request)
        if alike is None:
            chance, pages = self.chance, self.chance.choice((0, 3, 12))
            trunk = f"trunk-{chance.randint(0, 2)}"
            if self._alike and chance.random() < 0.4:
                trunk = chance.choice(list(self._alike))
            alike = (
                [self.page_name(trunk, index).decode() for index in range(pages)]
                if trunk in self._alike
                else [f"{trunk}.{index}" for index in range(pages)]
            )
            self._alike[request] = alike
        return (alike[page] if page < len(alike) else f"{request}.{page}").encode()

    def count(self, what: str) -> int:
        """One more of them."""
        self.counts[what] += 1
        return self.counts[what]

    def lost(self, part: float = 1.0) -> bool:
        """Whether a connection breaks now; ``part`` of the chance that it has when it is made."""
        return self.chance.random() < part * self._losses

    # --- what happens -------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """So many things, then the end."""
        verbs: tuple[tuple[Callable[[], object], float], ...] = (
            (self.turn, 40),
            (self.run_task, 60),
            (self.submit, 5),
            (self.cancel, 0.8),
            (self.migrate, 2),
            (self.drain, 0.2),
            (self.undrain, 2),
            (self.find, 0.5),
            (self.wait, 1),
            (self.kill, 0.1),
        )
        for _ in range(steps):
            self.chance.choices([verb for verb, _ in verbs], [weight for _, weight in verbs])[0]()
        self.finish(stop=self.chance.random() < 0.3)

    def begin(self, address: str) -> None:
        """An engine starts there."""
        rules = Rules(
            frames=(frames := self.chance.choice((14, 30, 90))),
            kept_max=self.chance.choice((0, 3, frames, frames)),
            layers=LAYERS,
            page_tokens=PAGE,
            chunk_tokens=self.chance.choice((6, 16, 40, 512)),
            batch_max=self.chance.choice((1, 3, 8)),
            local_prefill_tokens=self.chance.choice((0, 40)),
            prefill=self._others(address) if self.chance.random() < 0.7 else (),
            side_max=self.chance.choice((1, 4)),
            other_groups=self.chance.choice(((), (GroupRules(self.chance.choice((5, 9, frames)), WINDOW),))),
        )
        own = Role.DECODE if address == self.addresses[0] else Role.PREFILL
        role = self.chance.choice((Role.BOTH, Role.BOTH, own))
        self.engines[address] = EngineMachine(self, address, rules, role, self.chance.choice((12, 64)))

    def turn(self) -> bool:
        """An engine decides what runs, and runs it."""
        return self.chance.choice(list(self.engines.values())).turn()

    def run_task(self) -> None:
        """A thread has done what it was at."""
        if self._tasks:
            engine, run = self._tasks.pop(self.chance.randrange(len(self._tasks)))
            if not engine.dead:
                run()

    def wait(self) -> None:
        """Time passes: deadlines do, some of them."""
        self.now_s += self.chance.choice((0.01, 0.5, 4.0))

    def submit(self) -> None:
        """One more client, or one that comes back under its old id."""
        prompt, tokens_max = self.chance.randint(1, 12 * PAGE), self.chance.randint(1, 60)
        stops_at = self.chance.randint(1, 2 * tokens_max)
        deadline_s = self.now_s + self.chance.choice((2.0, 30.0, 600.0))
        name = f"request-{self.count('names')}"
        if self.clients and self.chance.random() < 0.2:
            name = self.chance.choice(self.clients).name
        client = Client(name, prompt, tokens_max, stops_at if stops_at <= tokens_max else 0, deadline_s)
        if self._ask(client, answers=self.chance.random() < 0.8):
            self.clients.append(client)

    def _ask(self, client: Client, answers: bool = True) -> bool:
        """Have some engine answer what it was not told yet; whether one does."""
        engine = self.chance.choice(list(self.engines.values()))
        prompt = client.prompt + client.told
        how: dict[str, Any] = {
            "prompt": prompt,
            "generated": client.told,
            "tokens_max": client.tokens_max,
            "deadline_s": client.deadline_s,
            "answers": answers,
            "hold_s": 5.0,
            "engines": self.chance.choice((None, (), self._others(engine.address), self._others(engine.address))),
            "stored": self.chance.randint(0, prompt // PAGE) * PAGE,
            "lazy": self.chance.random() < 0.5,
            "stopped": answers and 0 < client.stops_at == client.told,
        }
        try:
            engine.submit(client.name, client, client.stops_at, **how)
        except KVStoreError as error:
            self.counts[f"refused: {type(error).__name__}"] += 1
            return False
        known = engine.known.get(engine.admission.numbers.get(client.name, 0))
        assert known is None or not how["stopped"], "all was told, and it goes on"
        return True

    def cancel(self) -> None:
        """Nobody wants one of them."""
        engine = self.chance.choice(list(self.engines.values()))
        if engine.admission.numbers:
            engine.cancel(self.chance.choice(list(engine.admission.numbers)))

    def migrate(self) -> None:
        """One of them shall go on elsewhere."""
        engine = self.chance.choice(list(self.engines.values()))
        if engine.admission.numbers:
            engine.migrate(self.chance.choice(list(engine.admission.numbers)), self._target(engine))

    def drain(self) -> None:
        """All of one engine shall."""
        engine = self.chance.choice(list(self.engines.values()))
        engine.drain(self._target(engine))

    def undrain(self) -> None:
        """No more of them."""
        engine = self.chance.choice(list(self.engines.values()))
        if engine.admission.draining:
            engine.drain(None)

    def find(self) -> None:
        """The cluster tells an engine of others, or that there are none."""
        engine = self.chance.choice(list(self.engines.values()))
        engine.handle(ev.EnginesFound(self.now_s, self.chance.choice(((), self._others(engine.address)))))

    def _target(self, engine: EngineMachine) -> str:
        return self.chance.choice(self._others(engine.address) or (NOWHERE,))

    def _others(self, own: str) -> tuple[str, ...]:
        """Some engines beside one, perhaps one that never was."""
        others = [address for address in self.addresses if address != own]
        if self.chance.random() < 0.15:
            others.append(NOWHERE)
        return tuple(self.chance.sample(others, self.chance.randint(min(1, len(others)), len(others))))

    def kill(self) -> None:
        """An engine is gone; another one starts in its place. Clients have their answers go on elsewhere, some do."""
        self.count("kills")
        engine = self.chance.choice(list(self.engines.values()))
        engine.dead = True
        for link in [link for link in self.links if engine in (link.here, link.there)]:
            self.links.remove(link)
            if link.there is engine:
                link.failed(NodeUnavailable(f"{engine.address} is gone"))
            elif isinstance(link, Fetch):
                link.let_go()
            if link.here is engine and link.there is not None:
                self.task(link.there, link.cancel_there)
        self.begin(engine.address)
        for known in engine.known.values():
            client = known.listener
            if isinstance(client, Client) and not client.end:
                again = known.event.answers and client.deadline_s > self.now_s and self.chance.random() < 0.7
                if not (again and self._ask(client)):
                    client.end = "lost"

    # --- the end ------------------------------------------------------------------------------------------------------

    def finish(self, stop: bool) -> None:
        """Nothing new comes, and no connection breaks. Everything ends, once; every frame is free."""
        self._losses = 0.0
        for engine in self.engines.values() if stop else ():
            late = self._late(engine)
            (engine.lose_device if self.chance.random() < 0.3 else engine.stop)()
            if late is not None:
                engine.handle(late)
            assert all(known.end or known.closed for known in engine.known.values()), (
                "it goes on in an engine that ends"
            )
        for _ in range(200):
            self._settle()
            for engine in self.engines.values():
                assert engine.stopped or not engine.stuck(), engine.stuck()
            if not any(engine.known for engine in self.engines.values()):
                break
            self.now_s += 1.0
        for engine in self.engines.values():
            engine.check_empty()
        for client in self.clients:
            assert client.end, (client.name, "was not told the end")

    def _late(self, engine: EngineMachine) -> Submitted | None:
        """A call that was admitted when the engine ends."""
        client = Client("late", PAGE, 2, 0, self.now_s + 600.0)
        how = {"prompt": PAGE, "generated": 0, "tokens_max": 2, "deadline_s": client.deadline_s, "answers": True}
        try:
            event = engine.enter(client.name, client, 0, **how)
        except KVStoreError:
            return None
        self.clients.append(client)
        return event

    def _settle(self) -> None:
        """Until nothing happens any more, though no time passes."""
        quiet = rounds = 0
        while quiet < QUIET:
            rounds += 1
            assert rounds < ROUNDS_MAX, "something goes on for ever"
            before = self._events()
            for _ in range(len(self._tasks)):
                self.run_task()
            stepped = [engine.turn() for engine in self.engines.values()]
            quiet = 0 if any(stepped) or self._events() > before else quiet + 1

    def _events(self) -> int:
        return self.counts.total() - self.counts["Turn"]
