"""EngineMachine: the decisions of one engine, performed in a model of its shell: no threads, no torch, no clock.

The model knows which frames a request has, who touches them, how many tokens of KV are really there, and what its
client was told. It asserts what no decision may do: compute over KV that is not there, free frames that somebody
touches, tell two ends, miss a deadline, wait for nothing. ``EngineWorld`` says when what happens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine.model.request import Role
from engine.state import events as ev
from engine.state import instructions as do
from engine.state import integrity
from engine.state.admission import Admission
from engine.state.engine_state import STORE_S, EngineState
from engine.state.migration import TAKE_S
from engine.state.rules import Rules
from engine.state.sequences import Phase
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, OutOfSpace
from tests.helpers.worlds.engine_links import Fetch, Passing

if TYPE_CHECKING:
    from tests.helpers.worlds.engine_world import EngineWorld

PAGE = 16
LAYERS = 4
SIDE_TOKEN = 7
FAILS = 0.01  # share of the steps that cannot be computed


class Listener(Protocol):
    """Who asked for a request: a client, or another engine."""

    def admitted(self) -> None: ...

    def token(self, index: int) -> None: ...

    def held(self, first_token: int) -> None: ...

    def finished(self, reason: str) -> None: ...

    def failed(self, error: KVStoreError) -> None: ...


@dataclass(eq=False)
class Known:
    """What the model knows of a request.

    Attributes:
        length, kv: tokens that are known; leading ones whose KV is in the frames.
        frames: numbers of the pages in them; ``shares``: whether others may have them, too;
            ``ring``: whether another cache group has fewer frames for it.
        ahead: tokens behind the prompt whose KV was computed while the prompt's was still arriving.
        stops_at: the number of the token that ends the answer; 0: its length does.
        pulls: hand-offs of other engines that read its frames.
    """

    event: ev.Submitted
    listener: Listener
    stops_at: int
    length: int
    kv: int = 0
    ahead: int = 0
    frames: list[int] = field(default_factory=list)
    touching: Counter[str] = field(default_factory=Counter)
    pulls: set[Fetch] = field(default_factory=set)
    fetch: Fetch | None = None
    passing: Passing | None = None
    shares: bool = True
    ring: bool = False
    shared: int = 0
    stored: int = 0
    progress: int = 0
    admitted: bool = False
    recomputed: bool = False
    held_s: float | None = None
    closed: bool = False
    cancelled: bool = False
    forgotten: bool = False
    given_up: bool = False
    failed: bool = False  # a step of it
    ended_s: float = math.inf
    end: str = ""

    @property
    def taken(self) -> bool:
        """Whether another engine goes on with it."""
        return self.passing is not None and self.passing.taken

    @property
    def whole(self) -> int:
        """Leading pages that are complete, and that nobody writes to."""
        arriving = self.touching["mover"] or self.touching["loader"]
        return self.shared if arriving else (self.kv - self.recomputed) // PAGE

    @property
    def generated(self) -> int:
        """Tokens of the answer that are known."""
        return self.event.generated + self.length - self.event.prompt


class EngineMachine:
    """One engine until it is killed (``dead``). Its frames, its requests, and its admission."""

    def __init__(self, world: EngineWorld, address: str, rules: Rules, role: Role, requests_max: int) -> None:
        self.world = world
        self.address = address
        self.rules = rules
        self.state = EngineState(rules)
        self.admission = Admission(role, requests_max)
        self.known: dict[int, Known] = {}
        self.prefills: dict[str, int] = {}  # what others may pull
        self.taken: set[int] = set()  # numbers of the pages that frames are taken for
        self.kept: dict[int, bytes] = {}  # of those, the names of pages that nobody has
        self.calls: set[int] = set()
        self.dead = self.stopped = False
        self._target: str | None = None
        self._numbers = 0

    # --- calls --------------------------------------------------------------------------------------------------------

    def submit(self, name: str, listener: Listener, stops_at: int, **how: Any) -> int:
        """As ``Engine.submit`` and ``prefill``; raises what they raise."""
        event = self.enter(name, listener, stops_at, **how)
        self.handle(event)
        return event.sequence

    def enter(self, name: str, listener: Listener, stops_at: int, *, answers: bool, **how: Any) -> ev.Submitted:
        """Its half that threads of the service do: the event is in the inbox then."""
        self.admission.check(answers)
        tokens = how["prompt"] + (how["tokens_max"] - how["generated"] if answers else 0)
        if not self.rules.holds(tokens) or (answers and how["generated"] >= how["tokens_max"]):
            raise InvalidRequest("tokens", "see engine.shell.engine")
        self._numbers += 1
        self.admission.enter(name, self._numbers)
        ring = any(self.rules.windows_for(tokens))
        shares = self.world.chance.random() < 0.9 and not ring
        how["names"] = tuple(self.world.page_name(name, i) for i in range(how["prompt"] // PAGE if shares else 0))
        event = ev.Submitted(self.world.now_s, self._numbers, name, role=self.admission.role, answers=answers, **how)
        self.known[event.sequence] = Known(event, listener, stops_at, event.prompt, shares=shares, ring=ring)
        if not answers:
            self.prefills[name] = event.sequence
        return event

    def cancel(self, name: str) -> bool:
        """As ``Engine.cancel``, and ``release``; whether there is one."""
        number = self.admission.numbers.get(name)
        if number is None:
            return False
        known = self.known[number]
        over, taken = known.end not in ("", "held") or known.closed, known.taken
        cancels = known.passing.cancels if known.passing is not None else 0
        known.cancelled = known.cancelled or not taken
        self.handle(ev.Cancelled(self.world.now_s, number))
        if taken and not known.end:
            assert known.passing is not None and known.passing.cancels > cancels, "nobody told the other engine"
        assert over or taken or known.end not in ("", "held") or known.closed, "cancelled, and goes on"
        return True

    def migrate(self, name: str, target: str) -> None:
        """As ``Engine.migrate``."""
        call = self.world.count("calls")
        self.calls.add(call)
        self.handle(ev.Migrate(self.world.now_s, self.admission.numbers[name], target, call))

    def drain(self, target: str | None) -> None:
        """As ``Engine.drain``, or the end of one."""
        self.admission.draining = target is not None
        self._target = target
        self.handle(ev.Drain(self.world.now_s, target))

    def stop(self) -> None:
        """As ``Engine.stop``."""
        self.stopped = self.admission.draining = True
        self.handle(ev.Stop(self.world.now_s))

    def lose_device(self) -> None:
        """Its device is lost, and with it everything that runs."""
        self.stopped = self.admission.draining = True
        self.handle(ev.DeviceFailed(self.world.now_s, NodeUnavailable("the device is lost")))

    def not_taken(self, number: int, error: KVStoreError | None) -> None:
        """The other engine did not take it."""
        self.known[number].passing = None
        self.handle(ev.NotTaken(self.world.now_s, number, error))

    # --- turns --------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Decide what runs, and run it; whether there was anything."""
        if self.stopped:
            return False
        chance, arriving = self.world.chance, {}
        for number, known in self.known.items():
            if known.fetch is not None and self.state.roster.sequences[number].phase is Phase.DECODING:
                layer_s = chance.choice((0.0, 0.001, 1.0))
                arriving[number] = ev.Arriving(known.fetch.layers, layer_s, chance.random() < 0.2)
        steps = self.state.steps
        out = self.handle(ev.Turn(self.world.now_s, arriving))
        if any(isinstance(it, do.PassOn) for it in out):
            untaken = [known for known in self.known.values() if known.passing and not known.taken and not known.end]
            assert self._target is not None and len(untaken) == 1, "a drain sends one after the other"
        self._check_time()
        return self.state.steps > steps

    def _check_time(self) -> None:
        """Nobody was forgotten by the clock."""
        now_s = self.world.now_s
        for known in self.known.values():
            if known.held_s is not None:
                assert known.closed or now_s < known.held_s + known.event.hold_s, ("held too long", known)
            elif not known.end and not known.taken:
                assert now_s <= known.event.deadline_s, ("a deadline was missed", known)
                if known.passing is not None and known.passing.begun_s + TAKE_S < now_s:
                    assert known.passing.cancels, ("an engine that does not take it has for ever", known)

    def stuck(self) -> list[Known]:
        """Where nothing happens any more though no time passes: those that have no reason to wait."""
        roster = self.state.roster
        waits = []
        for number, sequence in roster.sequences.items():
            known = self.known[number]
            reasons = {
                "held": known.held_s is not None,
                "asks": known.fetch is not None and known.fetch.goes_on,
                "elsewhere": known.passing is not None,
                "frames": sequence.phase is Phase.WAITING
                and (bool(roster.active) or any(one.frames for one in self.known.values())),
                "pulled": known.closed and bool(known.pulls),
            }
            if not any(reasons.values()):
                waits.append(known)
        return waits

    def check_empty(self) -> None:
        """Nothing is left of what ran here."""
        assert not self.known and not self.admission.numbers and not self.prefills, (self.known, self.admission.numbers)
        assert not self.calls, "a call was not answered"
        assert self.state.roster.frames.free == self.rules.frames and self.taken == self.kept.keys()
        assert not self.state.roster.frames.shared

    # --- what is decided ----------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> list[do.Instruction]:
        """Decide, check, and perform."""
        self.world.counts[type(event).__name__] += 1
        instructions = self.state.handle(event)
        if not any(isinstance(it, do.Draw) for it in instructions):
            integrity.check(self.state)
        for it in instructions:
            self.world.counts[type(it).__name__] += 1
            getattr(self, f"_do_{type(it).__name__.lower()}")(it)
        integrity.check(self.state)
        users = Counter(frame for known in self.known.values() for frame in known.frames)
        assert self.taken == {*users, *self.kept} and self.kept.keys().isdisjoint(users)
        assert len(self.taken) + self.state.roster.frames.unused == self.rules.frames
        assert sum(count > 1 for count in users.values()) == self.state.roster.frames.shared
        return instructions

    def _thread(self, number: int, who: str, way: Callable[[], None]) -> None:
        """Somebody touches the frames of a request until it has gone that way."""
        known = self.known[number]
        assert known.frames and not known.touching[who], (who, known)
        known.touching[who] += 1

        def done() -> None:
            known.touching[who] -= 1
            way()

        self.world.task(self, done)

    def _do_loadprefix(self, it: do.LoadPrefix) -> None:
        known = self.known[it.sequence]
        event = known.event
        answer = event.tokens_max - event.generated if event.answers else 0
        assert not known.frames and len(it.table) * PAGE >= event.prompt + answer
        assert it.shared * PAGE < event.prompt
        for index, number in enumerate(it.table[: it.shared]):
            self.world.counts["found" if number in self.kept else "shared"] += 1
            self._check_page(number, index, event.names[index])
            self.kept.pop(number, None)
        wanted, beside = self.rules.frames_for(event.prompt + answer), [it.table, *it.other_tables]
        assert tuple(len(set(table)) for table in beside) == wanted and all(len(t) == len(it.table) for t in beside)
        assert known.ring == (min(wanted) < len(it.table)) and not (known.ring and it.shared)
        own = it.table[it.shared :]
        assert self.taken.isdisjoint(own) and len(self.taken) + len(own) <= self.rules.frames
        self.taken.update(own)
        known.frames, known.shared = it.table, it.shared

        def loaded() -> None:
            known.kv = self.world.chance.randint(it.shared, event.prompt // PAGE) * PAGE  # what is shared, and more
            self.handle(ev.PrefixLoaded(self.world.now_s, it.sequence, known.kv))

        self._thread(it.sequence, "loader", loaded)

    def _check_page(self, number: int, index: int, name: bytes) -> None:
        """It is in the arena, whole: kept under that name, or of sequences of which it is that page."""
        if number in self.kept:
            assert self.kept[number] == name
            return
        users = [one for one in self.known.values() if number in one.frames]
        assert users and number in self.taken, "shares what is not there"
        for user in users:
            assert user.frames.index(number) == index and user.shares
            assert self.world.page_name(user.event.name, index) == name, "shares another page"
        assert any(user.whole > index for user in users), "shares what is not computed"

    def _do_evictpages(self, it: do.EvictPages) -> None:
        for number in it.pages:
            del self.kept[number]
        self.taken.difference_update(it.pages)

    def _do_offerpages(self, it: do.OfferPages) -> None:
        assert it.pages and self.taken.issuperset(it.pages) and it.pages[-1] in self.kept

    def _check_writes(self, known: Known, token: int) -> None:
        """Nobody else reads the page that a token is in."""
        page = known.frames[token // PAGE]
        others = [one for one in self.known.values() if one is not known and page in one.frames]
        assert not others and page not in self.kept, "writes into a frame that others read"

    def _do_askprefill(self, it: do.AskPrefill) -> None:
        known = self.known[it.sequence]
        assert known.fetch is None, "two engines are asked"
        known.fetch = Fetch(self, it.sequence, it.attempt, it.engine)
        self.world.task(self, known.fetch.arrive)

    def _do_movein(self, it: do.MoveIn) -> None:
        known = self.known[it.sequence]
        assert known.fetch is not None and (it.start, it.attempt) == (known.kv, known.fetch.attempt)
        assert not known.touching.total()
        known.touching["mover"] += 1
        known.ahead = 0
        known.fetch.move(it.start)

    def _do_giveup(self, it: do.GiveUp) -> None:
        known = self.known[it.sequence]
        assert known.fetch is not None
        until_s = min(known.event.deadline_s, known.ended_s + STORE_S)
        wanted = not (known.cancelled or known.failed or self.stopped) and known.fetch.error is None
        assert not wanted or until_s < self.world.now_s, "what was to be stored was given up"
        known.fetch.give_up()
        known.fetch, known.given_up = None, True

    def _do_settle(self, it: do.Settle) -> None:
        known = self.known[it.sequence]
        fetch, known.fetch = known.fetch, None
        assert fetch is not None and fetch.computed and fetch.arrived == known.event.prompt
        assert not known.touching.total(), known

    def _do_dismiss(self, it: do.Dismiss) -> None:
        known = self.known[it.sequence]
        fetch, known.fetch = known.fetch, None
        assert fetch is not None and fetch.error is not None and not known.touching.total(), known
        if fetch.moves and fetch.arrived < known.event.prompt:  # whole pages stay; else all of it
            known.kv = 0 if known.ring else fetch.arrived // PAGE * PAGE

    def _do_step(self, it: do.Step) -> None:
        chance, active = self.world.chance, self.state.roster.active
        parts = [part.sequence for part in it.parts]
        assert len({*it.decoding, *parts}) == len(it.decoding) + len(parts) <= self.rules.batch_max
        total = sum(part.stop - part.start for part in it.parts)
        assert total <= max(PAGE, self.rules.chunk_tokens - len(it.decoding))
        assert it.parts or all(one.phase is not Phase.COMPUTING for one in active.values()), "prompts starve"
        ready = {n for n, one in active.items() if one.phase is Phase.DECODING and self.known[n].fetch is None}
        assert ready <= {*it.decoding}, "an answer starves"
        if chance.random() < FAILS:
            for number in (*it.decoding, *parts):
                self.known[number].failed = True
            self.handle(ev.StepFailed(self.world.now_s, OutOfSpace("there is no memory for this step")))
            assert all(self.known[n].end for n in (*it.decoding, *parts) if n in self.known), "goes on after its step"
            return
        ends: dict[int, str] = {}
        names: dict[int, bytes] = {}
        missed = set()
        for number in it.decoding:
            known = self.known[number]
            assert not known.touching["side"] and not known.touching["loader"]
            if known.fetch is not None and known.touching["mover"] and not known.fetch.hurry():
                missed.add(number)
            else:
                self._decoded(known)
                self._drawn(number, ends, names)
        for part in it.parts:
            known = self.known[part.sequence]
            assert not known.touching["mover"] and not known.touching["loader"] and not known.touching["side"]
            whole = part.stop == known.length
            again = known.recomputed and part.start == known.kv - 1
            assert (part.start == known.kv or again) and part.stop <= known.length and part.draws == whole, (
                part,
                known,
            )
            self._check_writes(known, part.start)
            assert whole or part.stop % PAGE == 0 or part.stop - part.start <= PAGE
            known.kv, known.recomputed = part.stop, False
            if part.draws and known.event.answers:
                self._drawn(part.sequence, ends, names)
        seconds = 0.01 + 0.01 * chance.random()
        self.handle(ev.Stepped(self.world.now_s, ends, frozenset(missed), seconds, names=names))
        for part in it.parts:
            known = self.known.get(part.sequence, known)
            assert part.draws or known.event.answers or known.progress == part.stop, "nobody heard of it"

    def _decoded(self, known: Known) -> None:
        """The KV of the last token that is known was computed; where more was on its way, it has come by now."""
        self._check_writes(known, known.length - 1)
        if known.touching["mover"]:
            known.ahead += 1
            assert known.event.prompt + known.ahead == known.length
        else:
            assert known.kv == known.length - 1, ("decodes over what is not there", known)
            known.kv += 1

    def moved(self, number: int, fetch: Fetch) -> None:
        """The mover of a hand-off has ended."""
        known = self.known[number]
        known.touching["mover"] -= 1
        known.kv = fetch.arrived + (known.ahead if fetch.arrived == known.event.prompt else 0)
        self.handle(ev.Moved(self.world.now_s, number, fetch.attempt, fetch.arrived, fetch.error))

    def _drawn(self, number: int, ends: dict[int, str], names: dict[int, bytes]) -> None:
        known = self.known[number]
        assert not known.end, "draws after its end"
        known.listener.token(known.generated)
        known.length += 1
        if known.shares and known.length % PAGE == 0:
            names[number] = self.world.page_name(known.event.name, known.length // PAGE - 1)
        if known.generated == known.stops_at:
            ends[number] = "eos"

    def _do_sidestep(self, it: do.SideStep) -> None:
        known = self.known[it.sequence]
        assert known.fetch is not None and not known.touching["side"]
        known.touching["side"] += 1
        assert sum(one.touching["side"] for one in self.known.values()) <= self.rules.side_max
        fetch = known.fetch

        def look() -> None:
            there = fetch.hurry() if known.touching["mover"] else known.kv == known.length - 1
            late = self.world.now_s > known.event.deadline_s or fetch.error is not None
            if not there and not late and known.touching["mover"]:
                self.world.task(self, look)
                return
            known.touching["side"] -= 1
            if self.world.chance.random() < FAILS:
                known.failed = True
                self.handle(ev.SideStepped(self.world.now_s, it.sequence, None, OutOfSpace("there is no memory")))
                return
            if there:
                self._decoded(known)
            self.handle(ev.SideStepped(self.world.now_s, it.sequence, SIDE_TOKEN if there else None))

        self.world.task(self, look)

    def _do_draw(self, it: do.Draw) -> None:
        known = self.known[it.sequence]
        if known.length == known.event.prompt:
            assert known.fetch is not None and it.token == known.fetch.first_token, "a token of another engine"
        else:
            assert it.token == SIDE_TOKEN
        ends: dict[int, str] = {}
        names: dict[int, bytes] = {}
        self._drawn(it.sequence, ends, names)
        end, name = ends.get(it.sequence, ""), names.get(it.sequence, b"")
        self.handle(ev.TokenDrawn(self.world.now_s, it.sequence, end, name))

    def _do_recompute(self, it: do.Recompute) -> None:
        known = self.known[it.sequence]
        assert known.kv == known.length
        known.recomputed = True

    def _do_storepages(self, it: do.StorePages) -> None:
        known = self.known[it.sequence]
        assert known.frames and known.kv >= it.pages * PAGE and not known.touching["mover"]
        known.stored = it.pages

    # --- for other engines --------------------------------------------------------------------------------------------

    def _do_telladmitted(self, it: do.TellAdmitted) -> None:
        known = self.known[it.sequence]
        assert it.cached == known.kv - known.recomputed and not known.admitted
        known.admitted = True
        known.listener.admitted()

    def _do_tellprogress(self, it: do.TellProgress) -> None:
        known = self.known[it.sequence]
        assert known.progress < it.tokens == known.kv
        known.progress = it.tokens

    def _do_hold(self, it: do.Hold) -> None:
        known = self.known[it.sequence]
        assert known.kv == known.event.prompt and not known.event.answers and not known.closed and known.admitted
        known.held_s = self.world.now_s
        known.end = "held"
        known.listener.held(1000 * it.sequence)

    def _do_close(self, it: do.Close) -> None:
        known = self.known[it.sequence]
        assert not known.closed and not known.event.answers
        expired = known.held_s is not None and known.held_s + known.event.hold_s <= self.world.now_s
        assert expired or known.cancelled or self.stopped or known.end not in ("", "held"), "closed without a reason"
        known.closed = True
        self.look_at_pulls(it.sequence)

    def look_at_pulls(self, number: int) -> None:
        """After a ``Close``, and after a pull: nobody pulls any more, or somebody does."""
        known = self.known.get(number)
        if known is not None and known.closed and not known.pulls and self.prefills.pop(known.event.name, None):

            def ended() -> None:
                self.handle(ev.PullsEnded(self.world.now_s, number))

            self.world.task(self, ended)

    def _do_passon(self, it: do.PassOn) -> None:
        known = self.known[it.sequence]
        assert known.kv == known.length - 1 and not known.touching.total() and known.fetch is None
        assert known.stored == known.kv // PAGE, "what moves is not in the pool"
        known.passing = Passing(self, it.sequence, it.target)
        self.world.task(self, known.passing.arrive)

    def _do_left(self, it: do.Left) -> None:
        assert self.known[it.sequence].taken

    def _do_cancelthere(self, it: do.CancelThere) -> None:
        passing = self.known[it.sequence].passing
        assert passing is not None
        passing.cancel()

    def _do_answercall(self, it: do.AnswerCall) -> None:
        if it.call:
            self.calls.remove(it.call)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _do_forget(self, it: do.Forget) -> None:
        known = self.known[it.sequence]
        assert not known.forgotten and (known.fetch is None or known.touching["mover"])
        assert known.passing is None or known.taken or known.passing.cancels, "another engine may still take it"
        known.forgotten = True
        self.admission.leave(known.event.name)

    def _do_finish(self, it: do.Finish) -> None:
        known = self.known[it.sequence]
        event = known.event
        assert known.forgotten and event.answers and not known.end
        expected = {
            "length": known.generated == event.tokens_max,
            "eos": known.generated == known.stops_at,
            "stop": event.stopped and not known.frames,
            "cancelled": known.cancelled,
        }
        assert expected[it.reason], (it, known)
        assert known.fetch is None or it.reason != "cancelled", "nobody wants it"
        if not known.touching["mover"]:
            self._check_stored(known)
        known.end, known.ended_s = it.reason, self.world.now_s
        known.listener.finished(it.reason)

    def _check_stored(self, known: Known) -> None:
        """All full pages of an answer that was told to its end."""
        if known.frames and not known.cancelled and not known.given_up:
            assert known.stored == known.kv // PAGE, "full pages were not stored"

    def _do_fail(self, it: do.Fail) -> None:
        known = self.known[it.sequence]
        assert not known.end, (it, known)
        assert not isinstance(it.error, DeadlineExceeded) or known.event.deadline_s < self.world.now_s
        assert not isinstance(it.error, NodeUnavailable) or self.stopped or (it.cancelled and known.cancelled)
        known.end = type(it.error).__name__
        known.listener.failed(it.error)

    def _do_giveback(self, it: do.GiveBack) -> None:
        known = self.known[it.sequence]
        assert known.frames and not known.touching.total() and not known.pulls, (it, known)
        if known.end in ("length", "eos"):
            self._check_stored(known)
        others = {page for one in self.known.values() if one is not known for page in one.frames}
        for index, page in enumerate(it.stay):
            name = self.world.page_name(known.event.name, index)
            if page not in self.kept and page in known.frames:
                assert known.shares and known.whole > index and page == known.frames[index], "keeps what is not whole"
                if page not in others:
                    self.kept[page] = name
            self._check_page(page, index, name)
        own = {page for page in known.frames if page not in others and page not in it.stay}
        evicted = [page for page in it.freed if page not in own]
        assert own <= {*it.freed} and not {*it.freed} & {*it.stay}
        self._do_evictpages(do.EvictPages(evicted))
        self.taken -= own
        known.frames = []

    def _do_endsequence(self, it: do.EndSequence) -> None:
        known = self.known.pop(it.sequence)
        assert not known.frames and not known.touching.total() and not known.pulls and known.forgotten, known
        assert known.end or known.taken, known
        assert known.passing is None or known.passing.over, known
