"""EngineWorld: the decisions of one engine, driven by a seed, without threads, torch or a clock.

Every instruction is performed in a model of the shell: which frames a sequence has, who touches them, how much of its
KV is really there. What threads would finish is finished in any order, fails, or is lost until its deadline. The world
knows what no decision may do: compute over KV that is not there, give frames back that somebody touches, tell two ends.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.model.request import Role
from engine.state import events as ev
from engine.state import instructions as do
from engine.state import integrity
from engine.state.engine_state import EngineState
from engine.state.rules import Rules
from kvstore.errors import KVStoreError, NodeUnavailable, VersionMismatch

PAGE = 16
LAYERS = 4
ENGINES = ("one:1", "two:1", "three:1")


@dataclass
class Known:
    """What the world knows of a request."""

    event: ev.Submitted
    length: int
    frames: list[int] = field(default_factory=list)
    kv: int = 0  # leading tokens whose KV is in the frames
    layers: int = LAYERS  # of the prompt, where it is on its way
    ahead: int = 0  # tokens behind the prompt whose KV was computed meanwhile
    touching: Counter[str] = field(default_factory=Counter)
    closed: bool = False
    ends: list[str] = field(default_factory=list)
    held: bool = False
    forgotten: int = 0
    attempt: int = 0


Task = Callable[[], None]


class EngineWorld:
    """One engine. ``step`` does something at random; ``finish`` lets everything end and checks that nothing is left."""

    def __init__(self, seed: int, **rules: Any) -> None:
        self.chance = random.Random(seed)
        settings: dict[str, Any] = {
            "frames": self.chance.choice((24, 60, 200)),
            "layers": LAYERS,
            "page_tokens": PAGE,
            "chunk_tokens": self.chance.choice((8, 16, 40, 512)),
            "batch_max": self.chance.choice((1, 3, 8)),
            "local_prefill_tokens": self.chance.choice((0, 40)),
            "prefill": ENGINES[: self.chance.randint(0, 2)],
        }
        self.rules = Rules(**{**settings, **rules})
        self.state = EngineState(self.rules)
        self.now_s = 100.0
        self.known: dict[int, Known] = {}
        self.free = set(range(self.rules.frames))
        self.tasks: list[Task] = []  # what threads are at; each ends with an event, in any order
        self.calls: set[int] = set()
        self.counts: Counter[str] = Counter()
        self._number = 0
        self._stopped = False
        self._losses = 0.3

    # --- what happens -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Something happens."""
        verbs = (self.turn, self.finish_task, self.submit, self.cancel, self.migrate, self.drain, self.pull, self.wait)
        self.chance.choices(verbs, (40, 40, 8, 2, 2, 1, 3, 3))[0]()

    def run(self, steps: int) -> None:
        """So many of that, then the end."""
        for _ in range(steps):
            self.step()
        self.finish(stop=self.chance.random() < 0.5)

    def finish(self, stop: bool) -> None:
        """Nothing new comes. Everything ends, once; every frame is free."""
        self._losses = 0.0
        if stop:
            self.handle(ev.Stop(self.now_s))
            self._stopped = True
        for _ in range(20_000):
            if not self.state.roster.sequences and not self.tasks:
                break
            self.chance.choice((self.turn, self.finish_task, self.wait))()
        assert not self.state.roster.sequences, list(self.state.roster.sequences.values())
        assert self.state.roster.frames_free == self.rules.frames == len(self.free)
        assert not self.calls, "a call was not answered"
        for number, known in self.known.items():
            assert len(known.ends) == 1 and known.forgotten == 1 and not known.frames, (number, known)
            assert not known.touching.total(), (number, known)

    def turn(self) -> None:
        """Decide what runs, and run it."""
        if self._stopped:
            return
        arriving = {}
        for number, known in self.known.items():
            sequence = self.state.roster.sequences.get(number)
            if sequence is not None and sequence.attempt is not None:
                layer_s = self.chance.choice((0.0, 0.001, 1.0))
                arriving[number] = ev.Arriving(known.layers, layer_s, self.chance.random() < 0.2)
        self.handle(ev.Turn(self.now_s, arriving))

    def wait(self) -> None:
        """Time passes: deadlines do, some of them."""
        self.now_s += self.chance.choice((0.01, 1.0, 8.0))

    def finish_task(self) -> None:
        """A thread has done what it was at."""
        if self.tasks:
            self.tasks.pop(self.chance.randrange(len(self.tasks)))()

    def submit(self, **how: Any) -> int:
        """One more request."""
        self._number += 1
        answers = self.chance.random() < 0.7
        generated = self.chance.choice((0, 0, 3))
        prompt = generated + self.chance.randint(1, 12 * PAGE)
        tokens_max = generated + self.chance.randint(1, 60)
        settings: dict[str, Any] = {
            "prompt": prompt,
            "generated": generated,
            "tokens_max": tokens_max,
            "deadline_s": self.now_s + self.chance.choice((2.0, 60.0, 600.0)),
            "role": self.chance.choice([*Role]),
            "answers": answers,
            "hold_s": 5.0,
            "engines": self.chance.choice((None, (), ENGINES[:1], ENGINES)),
            "stored": self.chance.randint(0, prompt // PAGE) * PAGE,
            "lazy": self.chance.random() < 0.5,
            "stopped": bool(generated and answers) and self.chance.random() < 0.2,
            **how,
        }
        event = ev.Submitted(self.now_s, self._number, f"request-{self._number}", **settings)
        self.known[self._number] = Known(event, event.prompt)
        self.handle(event)
        return self._number

    def cancel(self) -> None:
        """Nobody wants one of them; perhaps it has ended long ago."""
        if self.known:
            self.handle(ev.Cancelled(self.now_s, self.chance.choice([*self.known])))

    def migrate(self) -> None:
        """One of them shall go on elsewhere."""
        if self.known:
            call = 10_000 + len(self.calls) + self.counts["calls"]
            self.counts["calls"] += 1
            self.calls.add(call)
            self.handle(ev.Migrate(self.now_s, self.chance.choice([*self.known]), "other:1", call))

    def drain(self) -> None:
        """All of them shall, or no more."""
        self.handle(ev.Drain(self.now_s, self.chance.choice((None, "other:1"))))

    def pull(self) -> None:
        """Another engine begins to pull."""
        open_ones = [
            number for number, known in self.known.items() if not (known.event.answers or known.closed) and known.frames
        ]
        if open_ones:
            number = self.chance.choice(open_ones)
            self.known[number].touching["pull"] += 1
            self.tasks.append(lambda: self._pulled(number))

    # --- what is decided ----------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        """Decide, check, and perform."""
        self.counts[type(event).__name__] += 1
        instructions = self.state.handle(event)
        if not any(isinstance(it, do.Draw) for it in instructions):
            integrity.check(self.state)
        for it in instructions:
            self.counts[type(it).__name__] += 1
            getattr(self, f"_do_{type(it).__name__.lower()}")(it)
        integrity.check(self.state)
        frames = [frame for known in self.known.values() for frame in known.frames]
        assert len(frames) == len(set(frames)) and len(frames) + len(self.free) == self.rules.frames

    def _task(self, number: int, who: str, *ways: Callable[[], None]) -> None:
        """A thread touches the frames of a sequence until it has gone one of these ways."""
        known = self.known[number]
        assert known.frames and not known.touching[who], (who, known)
        known.touching[who] += 1

        def done() -> None:
            known.touching[who] -= 1
            self.chance.choice(ways)()

        self.tasks.append(done)

    def _do_load(self, it: do.Load) -> None:
        known = self.known[it.sequence]
        assert not known.frames and len(self.free) >= it.pages
        assert it.pages * PAGE >= known.event.prompt
        known.frames = [self.free.pop() for _ in range(it.pages)]

        def loaded() -> None:
            known.kv = self.chance.randint(0, known.event.prompt // PAGE) * PAGE
            self.handle(ev.Loaded(self.now_s, it.sequence, known.kv))

        self._task(it.sequence, "loader", loaded)

    def _do_ask(self, it: do.Ask) -> None:
        known = self.known[it.sequence]
        assert it.attempt > known.attempt, "an engine is asked under an old number"
        known.attempt = it.attempt

        def answer() -> None:
            if self.chance.random() < self._losses:
                self.tasks.append(answer)  # not yet
            elif self.chance.random() < 0.6:
                self.handle(ev.Computed(self.now_s, it.sequence, it.attempt, 7))
            else:
                failed = self.chance.choice([NodeUnavailable("gone"), VersionMismatch("not ours")])
                self.handle(ev.AskFailed(self.now_s, it.sequence, it.attempt, failed))

        self.tasks.append(answer)

    def _do_move(self, it: do.Move) -> None:
        known = self.known[it.sequence]
        assert it.start == known.kv and it.attempt == known.attempt
        known.layers = known.ahead = 0
        prompt = known.event.prompt

        def layer() -> None:
            known.layers = min(LAYERS, known.layers + 1)

        def came() -> None:
            known.kv, known.layers = prompt + known.ahead, LAYERS
            self.handle(ev.Moved(self.now_s, it.sequence, it.attempt, prompt))

        def failed() -> None:
            known.kv = self.chance.randint(it.start, prompt) // PAGE * PAGE
            error = NodeUnavailable("the link")
            self.handle(ev.Moved(self.now_s, it.sequence, it.attempt, known.kv, error))

        self._task(it.sequence, "mover", came, came, failed)
        self.tasks.extend([layer] * 2)

    def _do_step(self, it: do.Step) -> None:
        assert it.decoding or it.parts
        parts = [part.sequence for part in it.parts]
        assert len({*it.decoding, *parts}) == len(it.decoding) + len(parts) <= self.rules.batch_max
        ends, missed = {}, set()
        for number in it.decoding:
            known = self.known[number]
            assert not known.touching["side"] and not known.touching["loader"]
            if known.touching["mover"] and known.layers < LAYERS and self.chance.random() < 0.5:
                missed.add(number)
                continue
            self._decoded(number)
            self._drawn(number, ends)
        for part in it.parts:
            known = self.known[part.sequence]
            assert not known.touching["mover"] and not known.touching["loader"]
            whole = part.stop == known.length
            assert part.start <= known.kv and part.start < part.stop <= known.length and part.draws == whole
            assert whole or part.stop % PAGE == 0 or part.stop - part.start <= PAGE
            known.kv = part.stop
            if part.draws and known.event.answers:
                self._drawn(part.sequence, ends)
        seconds = 0.01 * self.chance.random()
        self.handle(ev.Stepped(self.now_s, ends, frozenset(missed), seconds))

    def _decoded(self, number: int) -> None:
        """The KV of the last token that is known was computed; where more was on its way, it has come by now."""
        known = self.known[number]
        if known.touching["mover"]:
            known.layers, known.ahead = LAYERS, known.ahead + 1
            assert known.event.prompt + known.ahead == known.length
        else:
            assert known.kv == known.length - 1, "decodes over what is not there"
            known.kv += 1

    def _drawn(self, number: int, ends: dict[int, str]) -> None:
        known = self.known[number]
        assert not known.ends, "draws after its end"
        known.length += 1
        if self.chance.random() < 0.01:
            ends[number] = self.chance.choice(("eos", "stop"))

    def _do_aside(self, it: do.Aside) -> None:
        known = self.known[it.sequence]

        def came() -> None:
            if known.touching["mover"] or known.kv == known.length - 1:
                self._decoded(it.sequence)
                self.handle(ev.SideStepped(self.now_s, it.sequence, 7))
            else:  # the mover has failed
                missed()

        def missed() -> None:
            self.handle(ev.SideStepped(self.now_s, it.sequence, None))

        self._task(it.sequence, "side", came, missed)

    def _do_draw(self, it: do.Draw) -> None:
        ends: dict[int, str] = {}
        self._drawn(it.sequence, ends)
        self.handle(ev.Drawn(self.now_s, it.sequence, ends.get(it.sequence, "")))

    def _do_hold(self, it: do.Hold) -> None:
        known = self.known[it.sequence]
        assert known.kv == known.event.prompt and not known.event.answers and not known.closed
        known.held = True
        known.ends.append("held")

    def _do_close(self, it: do.Close) -> None:
        known = self.known[it.sequence]
        assert not known.closed and not known.event.answers
        known.closed = True
        self.tasks.append(lambda: self._pulls_ended(it.sequence))

    def _pulled(self, number: int) -> None:
        self.known[number].touching["pull"] -= 1

    def _pulls_ended(self, number: int) -> None:
        if self.known[number].touching["pull"]:
            self.tasks.append(lambda: self._pulls_ended(number))
        else:
            self.handle(ev.PullsEnded(self.now_s, number))

    def _do_passon(self, it: do.PassOn) -> None:
        known = self.known[it.sequence]
        assert known.kv == known.length - 1 and not known.touching.total()

        def passed() -> None:
            if not known.ends:
                known.ends.append("elsewhere")
            self.handle(ev.PassedOn(self.now_s, it.sequence))

        def said() -> None:
            if self.chance.random() < self._losses:
                self.tasks.append(said)
            elif self.chance.random() < 0.5:
                self.tasks.append(passed)
                self.handle(ev.Taken(self.now_s, it.sequence))
            else:
                error: KVStoreError | None = self.chance.choice((None, NodeUnavailable("no room")))
                self.handle(ev.NotTaken(self.now_s, it.sequence, error))

        self.tasks.append(said)

    def _do_reply(self, it: do.Reply) -> None:
        if it.call:
            self.calls.remove(it.call)

    def _do_store(self, it: do.Store) -> None:
        known = self.known[it.sequence]
        assert known.frames and known.kv >= it.pages * PAGE and not known.touching["mover"]

    def _do_forget(self, it: do.Forget) -> None:
        self.known[it.sequence].forgotten += 1

    def _do_finish(self, it: do.Finish) -> None:
        known = self.known[it.sequence]
        assert known.forgotten and known.event.answers
        if it.reason == "length":
            assert known.length - known.event.prompt + known.event.generated == known.event.tokens_max
        known.ends.append(it.reason)

    def _do_fail(self, it: do.Fail) -> None:
        known = self.known[it.sequence]
        if not known.ends or known.ends == ["elsewhere"]:
            known.ends[:] = [type(it.error).__name__]
        else:
            raise AssertionError(f"{it} after {known.ends}")

    def _do_giveback(self, it: do.GiveBack) -> None:
        known = self.known[it.sequence]
        assert known.frames and not known.touching.total(), (it, known)
        self.free.update(known.frames)
        known.frames = []

    def _do_drop(self, it: do.Drop) -> None:
        known = self.known[it.sequence]
        assert not known.frames and not known.touching.total() and known.ends and known.forgotten == 1

    def _ignore(self, it: object) -> None:
        """Nothing that the world keeps."""

    _do_giveup = _do_settle = _do_dismiss = _do_recompute = _do_telladmitted = _do_tellprogress = _ignore
    _do_left = _do_cancelthere = _ignore
