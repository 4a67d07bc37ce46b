"""Routes: where the prompt of a request is computed, here or by another engine, and how that ends.

Engines are asked one by one, until one has computed the prompt or none is left; then it is computed here, from the end
of the KV that has arrived.
"""

from __future__ import annotations

from engine.model.request import Role
from engine.state import events as ev
from engine.state import instructions as do
from engine.state.sequences import Attempt, Phase, Roster, Sequence
from kvstore.errors import Unavailable, VersionMismatch

AVOID_S = 5.0
BEGIN_S = 10.0  # for the other engine to begin: a mover's wait is limited, since each may wait for the other's frames
AVOIDED_MAX = 64  # addresses; clients may name any


class Routes:
    """The hand-offs, and which engines recently did not answer."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._avoided: dict[str, float] = {}
        self._found: tuple[str, ...] = ()

    def found(self, event: ev.EnginesFound) -> None:
        """Replace the engines that the cluster reports."""
        self._found = event.engines

    def choose(self, event: ev.Submitted, pages: int) -> list[str]:
        """The engines to ask; empty if the prompt is computed here, which it is if the pool or the arena, which has
        ``pages`` of it, has almost all of it."""
        asked, rules = event.engines, self._roster.rules
        addresses = asked if asked is not None else self._ours(event.sequence) if event.role is Role.DECODE else ()
        there = max(event.stored, pages * rules.page_tokens)
        if asked is None and max(1, event.prompt - there) <= rules.local_prefill_tokens:
            return []
        return [address for address in addresses if self._avoided.get(address, 0.0) <= event.now_s]

    def _ours(self, sequence: int) -> tuple[str, ...]:
        """Engines given at the start, in their order; otherwise those found, each the first for its share of
        requests.
        """
        if self._roster.rules.prefill or not self._found:
            return self._roster.rules.prefill
        first = sequence % len(self._found)
        return self._found[first:] + self._found[:first]

    def ask(self, sequence: Sequence) -> bool:
        """Ask the next engine. Returns whether there is one."""
        if not sequence.engines:
            return False
        sequence.attempts += 1
        sequence.attempt = Attempt(sequence.attempts, sequence.engines.pop(0))
        self._roster.out.append(do.AskPrefill(sequence.number, sequence.attempt.number, sequence.attempt.engine))
        return True

    def go(self, sequence: Sequence) -> None:
        """Begin with a sequence's frames, which contain what the pool had: the rest is brought from where it is
        computed, or computed here.
        """
        if sequence.attempt is None and not self.ask(sequence):
            self._roster.compute_rest(sequence)
            return
        attempt = sequence.attempt
        assert attempt is not None and not sequence.moving
        sequence.phase, sequence.moving, attempt.begun = Phase.MOVING, True, True
        start = max(sequence.cached, sequence.needed(sequence.prompt))
        self._roster.out.append(do.MoveIn(sequence.number, attempt.number, start))
        if attempt.first_token is not None:
            self._first(sequence, attempt.first_token)

    def _first(self, sequence: Sequence, token: int) -> None:
        """Draw the first token, which may come before the last layer."""
        sequence.phase, sequence.cached = Phase.DECODING, sequence.prompt
        self._roster.out.append(do.Draw(sequence.number, token))

    def computed(self, event: ev.Computed) -> None:
        """Record that the other engine has done its part; in a lazy hand-off the KV waits there for frames here."""
        sequence = self._of_attempt(event.sequence, event.attempt)
        if sequence is None or sequence.attempt is None or sequence.attempt.error is not None:
            return
        sequence.attempt.first_token = event.first_token
        if sequence.phase is Phase.WAITING:
            self._roster.waiting.append(sequence)
        elif sequence.phase is Phase.MOVING:
            self._first(sequence, event.first_token)

    def ask_failed(self, event: ev.AskFailed) -> None:
        """Record that the other engine has failed."""
        sequence = self._of_attempt(event.sequence, event.attempt)
        if sequence is None or sequence.attempt is None:
            return
        sequence.attempt.error = sequence.attempt.error or event.error
        if sequence.phase is Phase.WAITING and sequence.attempt.first_token is None:
            self._dismiss(sequence, event.now_s)
            if sequence.phase is Phase.WAITING:
                self._roster.waiting.append(sequence)
        else:
            self.resolve(sequence, event.now_s)

    def moved(self, event: ev.Moved) -> None:
        """Record that its frames are no longer written to."""
        sequence = self._roster.sequences[event.sequence]
        sequence.moving = False
        if sequence.phase is Phase.ENDED:
            self._roster.leave(sequence)
            return
        attempt = sequence.attempt
        assert attempt is not None and attempt.number == event.attempt
        attempt.tokens, attempt.moved = event.tokens, event.error is None
        attempt.error = attempt.error or event.error
        if sequence.phase is not Phase.TOLD:
            self.resolve(sequence, event.now_s)
            return
        if attempt.error is None:
            self.settle(sequence)
        self._roster.end_told(sequence)

    def resolve(self, sequence: Sequence, now_s: float) -> None:
        """Decide how its attempt ended, once its frames are no longer in use."""
        attempt = sequence.attempt
        if attempt is None or not sequence.holds or sequence.loading or sequence.moving or sequence.aside:
            return
        if attempt.error is not None:
            self._dismiss(sequence, now_s)
            if sequence.phase is Phase.ENDED:
                return
            # If no token was drawn another engine may still do all of it.
            if sequence.length > sequence.prompt:
                self._roster.compute_rest(sequence)
            else:
                self.go(sequence)
        else:
            self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Complete the attempt if all of it is here: the pages may be stored, also those of an answer that ends."""
        attempt = sequence.attempt
        if attempt is not None and attempt.moved and attempt.first_token is not None:
            sequence.attempt = None
            self._roster.frames.reached(sequence)
            self._roster.out.append(do.Settle(sequence.number))
            self._roster.store(sequence)

    def _dismiss(self, sequence: Sequence, now_s: float) -> None:
        """End the attempt. What it did not bring is still to be computed; complete pages that came stay. Engines that
        do not fit each other are a mistake to report; any other failure only costs time. An incomplete ring has no
        beginning: then all is computed again.
        """
        attempt = sequence.attempt
        assert attempt is not None and attempt.error is not None
        if attempt.begun:
            whole = 0 if sequence.has_ring else attempt.tokens - attempt.tokens % self._roster.rules.page_tokens
            # Not from the prompt's end: what was computed behind it may have overwritten the window before it.
            sequence.cached = max(sequence.cached, sequence.prompt) if attempt.tokens >= sequence.prompt else whole
        sequence.attempt = None
        self._roster.out.append(do.Dismiss(sequence.number, attempt.engine, attempt.error))
        if isinstance(attempt.error, Unavailable):
            if len(self._avoided) >= AVOIDED_MAX:
                del self._avoided[next(iter(self._avoided))]
            self._avoided[attempt.engine] = now_s + AVOID_S
        elif isinstance(attempt.error, VersionMismatch):
            self._roster.fail(sequence, attempt.error)

    def _of_attempt(self, number: int, attempt: int) -> Sequence | None:
        sequence = self._roster.sequences.get(number)
        if sequence is None or sequence.attempt is None or sequence.attempt.number != attempt:
            return None  # it has ended, or another engine is being asked now
        return sequence
