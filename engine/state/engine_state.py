"""Everything that an engine decides about its requests: ``EngineState.handle(event) -> [instruction]``.

The state knows phases, lengths and how many frames are free. The shell has the tokens, the frames, the threads and the
clients. There is one event for each call, each step, and each result of a thread, never one for each layer.

::

    Submitted ── AskPrefill? ── frames free ── LoadPrefix ── PrefixLoaded, then one of
        computed by another engine:  AskPrefill, MoveIn ── Computed ── Draw ── Moved ── Settle
        computed here:               Step(parts) ── Stepped ...
    and after either:                Step(decoding) ── Stepped ...
    the end:  Forget, Finish or Fail ── no thread uses the frames ── GiveBack, EndSequence

The shell sends ``Turn`` when it has no other event. A turn ends sequences that are late, admits sequences that get
frames, and chooses the next step.

Worked example, pages of 16 tokens, a prompt of 40 tokens of which 32 are in the pool, an answer of 2 tokens::

    Submitted(prompt=40)  -> []                        PrefixLoaded(32)  -> []
    Turn                  -> [LoadPrefix(3 frames)]    Turn              -> [Step(parts: 32 to 40, draws)]
    Stepped               -> [StorePages(2 pages)]     Turn              -> [Step(decoding)]
    Stepped               -> [StorePages, Forget, Finish("length"), GiveBack, EndSequence]

``integrity.check`` has the invariants.

A step first has the next token of every sequence that can decode. Prompt tokens fill the rest of the chunk. While the
KV of a sequence is arriving from another engine, the sequence may join the step if every layer is predicted to be there
when the step needs it. Otherwise it makes its next token in a side batch, where waiting delays no other sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.state import events as ev
from engine.state import instructions as do
from engine.state.events import Arriving
from engine.state.instructions import Instruction, Part
from engine.state.migration import Passes
from engine.state.prefill_source import Routes
from engine.state.rules import Rules
from engine.state.sequences import Phase, Roster, Sequence
from kvstore.errors import DeadlineExceeded, KVStoreError, NodeUnavailable

MARGIN = 1.2  # a layer is predicted to take this much longer than it did


def decoding(
    active: Iterable[Sequence], rules: Rules, arriving: Mapping[int, Arriving], layer_s: float, side_steps: int
) -> tuple[list[int], list[int]]:
    """Return the sequences whose next token the step makes, and the sequences for which a side batch begins."""
    batch: list[int] = []
    side: list[int] = []
    for sequence in active:
        if sequence.phase is not Phase.DECODING or sequence.in_side_step:
            continue
        attempt = sequence.attempt
        if attempt is None:
            batch.append(sequence.number)
            continue
        arrival = arriving.get(sequence.number)
        if attempt.error is not None or arrival is None:
            continue
        if arrives_in_time(arrival, rules.layers, layer_s):
            batch.append(sequence.number)
        elif arrival.layers and side_steps + len(side) < rules.side_max:
            side.append(sequence.number)
    return batch, side


def arrives_in_time(arriving: Arriving, layers: int, layer_s: float) -> bool:
    """Return True if each layer of the sequence is predicted to arrive before a step needs it.

    A step takes ``layer_s`` per layer.
    """
    present = arriving.layers
    if present == layers:
        return True
    if not present or not arriving.layer_s or arriving.late:
        return False
    # Arrivals and needs are straight lines, so it is enough to compare the first missing layer and the last one.
    each = MARGIN * arriving.layer_s
    return each <= present * layer_s and (layers - present) * each <= (layers - 1) * layer_s


def parts(active: Iterable[Sequence], budget: int, page_tokens: int) -> list[Part]:
    """Choose the prompt tokens of a step, at most ``budget`` in total.

    Each part ends at the end of a page, unless it is a prompt's last part or is too short to reach one.
    """
    chosen: list[Part] = []
    for sequence in active:
        if budget <= 0:
            break
        if sequence.phase is Phase.COMPUTING:
            chosen.append(part(sequence, budget, page_tokens))
            budget -= chosen[-1].stop - chosen[-1].start
    return chosen


def part(sequence: Sequence, budget: int, page_tokens: int) -> Part:
    """Choose the next tokens of one prompt, at most ``budget``."""
    start = sequence.cached
    stop = min(sequence.length, start + budget)
    if stop < sequence.length and stop - stop % page_tokens > start:
        stop -= stop % page_tokens
    return Part(sequence.number, start, stop, stop == sequence.length)


SMOOTH = 0.2
OUTLIER = 3.0  # a step counts as at most this many times the smoothed value
CHUNK_TOKENS_MIN = 16  # the time of a shorter chunk is mainly the fixed cost of a step


class Speeds:
    """The engine's own speeds, measured and smoothed, for predictions and ``status``. Written by the engine's thread.

    Attributes:
        step_s: seconds of a step that only decodes; 0 before the first one.
        prefill_tokens_per_s: speed of steps that only prefill; 0 before the first one.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.step_s = 0.0
        self.prefill_tokens_per_s = 0.0

    @property
    def layer_s(self) -> float:
        """Seconds for one layer of a decode step."""
        return self.step_s / self._layers

    def record(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """Record the time of a step."""
        if decoding and not chunk_tokens:
            # A suspended process has measured one step of seconds: without this limit it would get no requests again.
            self.step_s = _smoothed(self.step_s, min(seconds, OUTLIER * self.step_s or seconds))
        elif chunk_tokens >= CHUNK_TOKENS_MIN and not decoding:
            self.prefill_tokens_per_s = _smoothed(self.prefill_tokens_per_s, chunk_tokens / seconds)


def _smoothed(old: float, new: float) -> float:
    return old + SMOOTH * (new - old) if old else new


STORE_S = 10.0  # keep frames this long for KV that still arrives after the end of the answer


class EngineState:
    """Everything that an engine decides. One thread calls ``handle``, and performs the instructions of an event before
    it handles the next one.

    Attributes:
        step: the current step, until ``Stepped`` or ``StepFailed``.
        steps: the number of steps so far.
        side_steps: the number of sequences in side batches.
        stopped: the error that fails every request, present and later ones, once the engine ends or loses its device.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.roster = Roster(rules)
        self.speeds = Speeds(rules.layers)
        self.step: do.Step | None = None
        self.steps = 0
        self.side_steps = 0
        self.stopped: KVStoreError | None = None
        self._routes = Routes(self.roster)
        self._passes = Passes(self.roster)
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.EnginesFound: self._routes.replace_engines,
            ev.Submitted: self._submitted,
            ev.Cancelled: self._cancelled,
            ev.Migrate: self._passes.migrate,
            ev.Drain: self._passes.drain,
            ev.Stop: lambda it: self._end(NodeUnavailable("this engine has ended")),
            ev.DeviceFailed: self._device_failed,
            ev.PrefixLoaded: self._loaded,
            ev.Computed: self._routes.computed,
            ev.AskFailed: self._routes.ask_failed,
            ev.Moved: self._routes.moved,
            ev.SideStepped: self._side_stepped,
            ev.PullsEnded: self._pulls_ended,
            ev.PassTaken: self._passes.taken,
            ev.NotTaken: self._passes.not_taken,
            ev.PassedOn: self._passes.passed_on,
            ev.Turn: self._turn,
            ev.Stepped: self._stepped,
            ev.StepFailed: self._step_failed,
            ev.TokenDrawn: self._drawn,
        }

    def handle(self, event: ev.Event) -> list[Instruction]:
        """Change the state, and return the instructions that follow from the event, in order."""
        self.roster.out = []
        self._handlers[type(event)](event)
        return self.roster.out

    # --- until the prompt is loaded -----------------------------------------------------------------------------------

    def _submitted(self, event: ev.Submitted) -> None:
        capacity = event.prompt + (event.tokens_max - event.generated if event.answers else 0)
        (pages, *other_pages), span = self.rules.frames_for(capacity), -(-capacity // self.rules.page_tokens)
        windows = self.rules.windows_for(capacity)
        assert not any(windows) or not event.names, "frames that are overwritten cannot be shared"
        assert self.rules.holds(capacity), "requests that are too large are refused before: this one would wait forever"
        sequence = Sequence(
            number=event.sequence,
            name=event.name,
            prompt=event.prompt,
            length=event.prompt,
            generated=event.generated,
            tokens_max=event.tokens_max,
            pages=pages,
            answers=event.answers,
            started_s=event.now_s,
            deadline_s=event.deadline_s,
            hold_s=event.hold_s,
            page_tokens=self.rules.page_tokens,
            other_pages=tuple(other_pages),
            span=span,
            windows=windows,
            names=list(event.names),
            pulled=not event.answers,  # from now on other engines may pull
        )
        self.roster.sequences[event.sequence] = sequence
        if self.stopped is not None:
            self.roster.fail(sequence, self.stopped)
        elif event.stopped:  # the engine that died had sent the whole answer
            self.roster.finish(sequence, "stop")
        else:
            if event.answers:
                sequence.engines = self._routes.choose(event, self.roster.frames.match(sequence))
            if not (event.lazy and self._routes.ask(sequence)):
                self.roster.waiting.append(sequence)

    def _loaded(self, event: ev.PrefixLoaded) -> None:
        sequence = self.roster.sequences[event.sequence]
        sequence.loading = False
        if sequence.phase is Phase.ENDED:
            self.roster.leave(sequence)
            return
        sequence.cached = event.tokens
        if not sequence.answers:
            self.roster.compute_rest(sequence)
            self.roster.out.append(do.TellAdmitted(sequence.number, sequence.cached))
        else:
            self._routes.fill_rest(sequence)

    # --- turns and steps --------------------------------------------------------------------------------------------

    def _turn(self, event: ev.Turn) -> None:
        assert self.step is None
        self._end_late(event.now_s)
        self._passes.move_next(event.now_s)
        self.roster.admit()
        if not self.stopped:
            self.roster.offer()
        active = self.roster.active
        batch, side = decoding(active.values(), self.rules, event.arriving, self.speeds.layer_s, self.side_steps)
        for number in side:
            active[number].in_side_step = True
            self.side_steps += 1
            self.roster.out.append(do.SideStep(number))
        # At least a page, because prompts would starve next to a large batch.
        budget = max(self.rules.page_tokens, self.rules.chunk_tokens - len(batch))
        chunks = parts(active.values(), budget, self.rules.page_tokens)
        if batch or chunks:
            self.step = do.Step(batch, chunks)
            self.steps += 1
            self.roster.out.append(self.step)

    def _stepped(self, event: ev.Stepped) -> None:
        step, self.step = self.step, None
        assert step is not None
        tokens = sum(part.stop - part.start for part in step.parts)
        self.speeds.record(len(step.decoding), tokens, event.seconds - event.waited_s)
        for number, name in event.names.items():
            self.roster.active[number].names.append(name)
        for number in step.decoding:
            if number not in event.missed:
                sequence = self.roster.active[number]
                sequence.cached += 1
                self.roster.frames.reached(sequence)
                self._add_token(sequence, event.ends.get(number, ""), event.now_s)
        for part in step.parts:
            sequence = self.roster.active[part.sequence]
            sequence.cached = part.stop
            self.roster.frames.reached(sequence)
            if part.draws:
                self._add_token(sequence, event.ends.get(part.sequence, ""), event.now_s)
            elif not sequence.answers:
                self.roster.out.append(do.TellProgress(part.sequence, part.stop))

    def _step_failed(self, event: ev.StepFailed) -> None:
        """Fail all sequences of the step, because it is unknown which sequence was too large. Complete pages stay."""
        step, self.step = self.step, None
        assert step is not None
        for number in (*step.decoding, *(part.sequence for part in step.parts)):
            self.roster.fail(self.roster.active[number], event.error)

    def _side_stepped(self, event: ev.SideStepped) -> None:
        sequence = self.roster.sequences[event.sequence]
        sequence.in_side_step = False
        self.side_steps -= 1
        if sequence.phase is Phase.ENDED:
            self.roster.leave(sequence)
            return
        if event.error is not None:
            self.roster.fail(sequence, event.error)
        elif event.token is not None:
            sequence.cached += 1
            self.roster.out.append(do.Draw(event.sequence, event.token))
        else:
            self._routes.resolve(sequence, event.now_s)

    def _drawn(self, event: ev.TokenDrawn) -> None:
        sequence = self.roster.sequences[event.sequence]
        if event.name:
            sequence.names.append(event.name)
        self._routes.settle(sequence)
        self._add_token(sequence, event.end, event.now_s)
        self._routes.resolve(sequence, event.now_s)

    def _add_token(self, sequence: Sequence, end: str, now_s: float) -> None:
        """Record a new token. ``end`` is the reason why it is the last one, or ""."""
        if not sequence.answers:
            sequence.phase, sequence.held_until_s = Phase.HELD, now_s + sequence.hold_s
            del self.roster.active[sequence.number]
            self.roster.out.append(do.Hold(sequence.number))
            return
        sequence.phase = Phase.DECODING
        sequence.length += 1
        sequence.generated += 1
        if not end and sequence.generated >= sequence.tokens_max:
            end = "length"
        if end or sequence.cached == sequence.prompt or sequence.cached % self.rules.page_tokens == 0:
            self.roster.store(sequence)
        if end:
            sequence.deadline_s = min(sequence.deadline_s, now_s + STORE_S)
            self.roster.finish(sequence, end)

    # --- ends -------------------------------------------------------------------------------------------------------

    def _end_late(self, now_s: float) -> None:
        """End sequences whose deadline or hold time is over."""
        late = []
        for sequence in self.roster.sequences.values():
            match sequence.phase:
                case Phase.ENDED:
                    pass
                case Phase.HELD:
                    if sequence.held_until_s <= now_s:
                        late.append(sequence)
                case Phase.RELAYED:
                    if sequence.passing is not None and not sequence.passing.taken:
                        self._passes.give_up_late(sequence, now_s)
                        if sequence.deadline_s < now_s:
                            late.append(sequence)
                case _:
                    if sequence.deadline_s < now_s:
                        late.append(sequence)
        for sequence in late:
            if sequence.phase is Phase.HELD:
                self.roster.release(sequence)
            elif sequence.phase is Phase.ANSWERED:
                self.roster.end_answered(sequence)
            else:
                allowed_s = sequence.deadline_s - sequence.started_s
                late_error = DeadlineExceeded(f"request {sequence.name} was not answered within {allowed_s:g} s")
                self.roster.fail(sequence, late_error)

    def _cancelled(self, event: ev.Cancelled) -> None:
        sequence = self.roster.sequences.get(event.sequence)
        if sequence is None or sequence.phase in (Phase.ANSWERED, Phase.ENDED):
            return
        if sequence.phase is Phase.HELD:
            self.roster.release(sequence)
        elif sequence.passing is not None and sequence.passing.taken:
            self.roster.out.append(do.CancelThere(sequence.number))
        elif sequence.answers:
            self.roster.finish(sequence, "cancelled")
        else:
            self.roster.fail(sequence, NodeUnavailable(f"prefill {sequence.name} was cancelled"), cancelled=True)

    def _device_failed(self, event: ev.DeviceFailed) -> None:
        self.step = None  # no Stepped follows
        self._end(event.error)

    def _end(self, error: KVStoreError) -> None:
        self.stopped = self.stopped or error
        for sequence in list(self.roster.sequences.values()):
            if sequence.phase is Phase.HELD:
                self.roster.release(sequence)
            elif sequence.phase is Phase.ANSWERED:
                self.roster.end_answered(sequence)
            elif sequence.phase is not Phase.ENDED:
                self.roster.fail(sequence, error)

    def _pulls_ended(self, event: ev.PullsEnded) -> None:
        sequence = self.roster.sequences[event.sequence]
        sequence.pulled = False
        self.roster.out.append(do.Forget(event.sequence))
        self.roster.leave(sequence)
