"""What modelled engines do with each other: prompts that another one computes, answers that go on at another one.

Messages between two engines arrive in their order, and late, or the connection breaks; nothing else is certain. Both
ends may be killed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.state import events as ev
from engine.state.prefill_source import BEGIN_S
from kvstore.errors import DeadlineExceeded, KVStoreError, NodeUnavailable

if TYPE_CHECKING:
    from tests.helpers.worlds.engine_machine import EngineMachine, Known

LAYERS = 4


class Link:
    """One call of engine ``here`` to the engine at ``address``. What that says is delivered by tasks of ``here``."""

    def __init__(self, here: EngineMachine, number: int, address: str) -> None:
        self.here = here
        self.world = here.world
        self.number = number
        self.address = address
        self.there: EngineMachine | None = None
        self.wire = f"wire-{self.world.count('wires')}"
        self._said: list[tuple[str, Any]] = []
        self._closed = False  # the last word was said

    def reach(self) -> EngineMachine:
        """The other engine. Raises KVStoreError where there is none."""
        there = self.world.engines.get(self.address)
        if there is None or there.dead or self.world.lost():
            raise NodeUnavailable(f"{self.address} is not there")
        return there

    def reached(self, there: EngineMachine) -> None:
        """It has taken the call."""
        self.there = there
        self.world.links.append(self)

    def cancel_there(self) -> None:
        """Nobody wants it. It may not be there yet, or no more."""
        if self.there is not None and not self.there.dead:
            self.there.cancel(self.wire)

    # --- what the other engine says -----------------------------------------------------------------------------------

    def admitted(self) -> None:
        """It has begun."""
        self._say("admitted")

    def token(self, index: int) -> None:
        """One more."""
        self._say("token", index)

    def held(self, first_token: int) -> None:
        """The prompt is computed."""
        self._say("held", first_token)

    def finished(self, reason: str) -> None:
        """The end."""
        self._say("finished", reason)

    def failed(self, error: KVStoreError) -> None:
        """The other end; also that of the connection."""
        self._say("failed", error)

    def _say(self, what: str, value: object = None) -> None:
        if not self._closed:
            self._closed = what in ("held", "finished", "failed")
            self._said.append((what, value))
            self.world.task(self.here, self._deliver)

    def _deliver(self) -> None:
        if self._said:
            what, value = self._said.pop(0)
            getattr(self, f"_on_{what}")(value)


class Fetch(Link):
    """A prompt that another engine computes, as ``engine.transfer.remote_prefill.Fetch`` has it.

    Attributes:
        arrived: leading tokens that are there in every layer; ``layers``: those that have all of the prompt.
        done, computed: the other engine has; the state was told.
    """

    def __init__(self, here: EngineMachine, number: int, attempt: int, address: str) -> None:
        super().__init__(here, number, address)
        self.attempt = attempt
        self.arrived = self.layers = 0
        self.first_token = -1
        self.begun = self.done = self.computed = self.moves = self.over = False
        self._moves_s = 0.0
        self.error: KVStoreError | None = None
        self._prefill = 0
        known = here.known[number]
        self._prompt, self._deadline_s = known.event.prompt, known.event.deadline_s

    @property
    def goes_on(self) -> bool:
        """Whether the other engine is still at it."""
        return (
            self.there is not None
            and not self.there.dead
            and self.wire in self.there.admission.numbers
            and not self.over
        )

    def arrive(self) -> None:
        """The other engine hears of it."""
        how: dict[str, Any] = {"prompt": self._prompt, "generated": 0, "tokens_max": 1, "answers": False, "hold_s": 5.0}
        try:
            if self.error is not None:
                return
            there = self.reach()
            self._prefill = there.submit(self.wire, self, 0, deadline_s=self._deadline_s, engines=(), **how)
            self.reached(there)
        except KVStoreError as error:
            self._on_failed(error)

    def move(self, start: int) -> None:
        """Bring it here, from ``start`` on."""
        self.moves, self.arrived, self._moves_s = True, start, self.world.now_s
        self.layers = LAYERS if start == self._prompt else 0
        self.world.task(self.here, self._move_on)

    def give_up(self) -> None:
        """Nobody wants it."""
        self._fail(NodeUnavailable("given up"))
        self.world.task(self.here, self.cancel_there)

    def hurry(self) -> bool:
        """A step waits for layers: whether they come in time."""
        if self.layers < LAYERS and self._held() and self.error is None and self.world.chance.random() < 0.3:
            self.layers, self.arrived = LAYERS, self._prompt
        return self.layers == LAYERS

    def _held(self) -> bool:
        """Whether the other engine has all of it, and lets us pull."""
        known = self._source()
        return known is not None and known.kv == self._prompt

    def _source(self) -> Known | None:
        there = self.there
        if there is None or there.dead or not self._prefill:
            return None
        known = there.known.get(self._prefill)
        if known is None or (self not in known.pulls and (known.closed or known.cancelled)):
            return None
        return known

    def _move_on(self) -> None:
        """The mover does a little more."""
        if self.error is None and self.world.now_s > self._deadline_s:
            self._fail(DeadlineExceeded("the mover waited for too long"))
        if self.error is None and not self.begun and self._moves_s + BEGIN_S < self.world.now_s:
            self._fail(DeadlineExceeded("it did not begin"))
        if self.error is None and self.world.lost(0.05):
            self._fail(NodeUnavailable("the link"))
        if self.error is None and self.layers < LAYERS and self._prefill:
            known = self._source()
            if known is None:
                self._fail(NodeUnavailable("it is not held"))
            else:
                known.pulls.add(self)
                if known.kv < self._prompt:
                    self.arrived = max(self.arrived, known.kv)  # not only whole pages
                elif self.world.chance.random() < 0.3:
                    self.layers += 1
                    self.arrived = self._prompt if self.layers == LAYERS else self.arrived
        if self.error is None and not (self.layers == LAYERS and self.done):
            self.world.task(self.here, self._move_on)
            return
        self.over = True
        self.let_go()
        self.world.task(self.here, self.cancel_there)
        self.here.moved(self.number, self)

    def let_go(self) -> None:
        """Pull no more."""
        there = self.there
        if there is not None and not there.dead and (known := there.known.get(self._prefill)) is not None:
            known.pulls.discard(self)
            there.look_at_pulls(self._prefill)

    def _fail(self, error: KVStoreError) -> None:
        self.error = self.error or error

    def _on_admitted(self, _: object) -> None:
        self.begun = True
        if self.error is not None:
            self.cancel_there()

    def _on_held(self, first_token: int) -> None:
        if self.error is not None:
            self.cancel_there()
            return
        self.done, self.first_token = True, first_token

        def tell() -> None:
            self.computed = True
            self.here.handle(ev.Computed(self.world.now_s, self.number, self.attempt, first_token))

        self.world.task(self.here, tell)

    def _on_failed(self, error: KVStoreError) -> None:
        self._fail(error)
        self.here.handle(ev.AskFailed(self.world.now_s, self.number, self.attempt, error))


class Passing(Link):
    """An answer that goes on at another engine, as ``engine.shell.migration.Migration`` has it."""

    def __init__(self, here: EngineMachine, number: int, address: str) -> None:
        super().__init__(here, number, address)
        self.begun_s = self.world.now_s
        self.cancels = 0
        self.taken = self.over = False

    def arrive(self) -> None:
        """The other engine hears of it."""
        known = self.here.known[self.number]
        event = known.event
        how: dict[str, Any] = {"prompt": known.length, "generated": known.generated, "tokens_max": event.tokens_max}
        try:
            there = self.reach()
            there.submit(self.wire, self, known.stops_at, answers=True, deadline_s=event.deadline_s, engines=(), **how)
            self.reached(there)
        except KVStoreError as error:
            self._on_failed(error)

    def cancel(self) -> None:
        """End it there."""
        self.cancels += 1
        self.world.task(self.here, self.cancel_there)

    def _take(self) -> None:
        if not self.taken:
            self.taken = True
            ended, cancels = self.here.known[self.number].end, self.cancels
            self.here.handle(ev.PassTaken(self.world.now_s, self.number))
            assert not ended or self.cancels > cancels, "it goes on there, for nobody"

    def _on_token(self, index: int) -> None:
        if not self.over:
            self._take()
            self.here.known[self.number].listener.token(index)

    def _on_finished(self, reason: str) -> None:
        if self.over:
            return
        if not self.taken and reason == "cancelled":
            self._not_taken(None)
            return
        self._take()
        self.here.known[self.number].listener.finished(reason)
        self._passed_on()

    def _on_failed(self, error: KVStoreError) -> None:
        if self.over:
            return
        if self.taken:
            self.here.known[self.number].listener.failed(error)
            self._passed_on()
        else:
            self._not_taken(error)

    def _not_taken(self, error: KVStoreError | None) -> None:
        self.over = True
        self.here.not_taken(self.number, error)

    def _passed_on(self) -> None:
        self.over = True
        self.here.handle(ev.PassedOn(self.world.now_s, self.number))
