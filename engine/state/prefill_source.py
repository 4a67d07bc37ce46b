"""Where the prompt of a request is computed: by another engine, or here.

Other engines are asked one by one, until one of them has computed the prompt. If all have failed, this engine computes
the rest of the prompt, from the end of the KV that has arrived.
"""

from __future__ import annotations

from engine.model.request import Role
from engine.state import events as ev
from engine.state import instructions as do
from engine.state.sequences import Attempt, Phase, Roster, Sequence
from kvstore.errors import Unavailable, VersionMismatch

AVOID_S = 5.0
BEGIN_S = 10.0  # time for the other engine to begin: limited, because each engine may wait for frames of the other
AVOIDED_MAX = 64  # addresses; limited, because clients may name any address


class Routes:
    """The hand-offs of an engine, and the engines that recently did not answer."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._avoided: dict[str, float] = {}
        self._cluster: tuple[str, ...] = ()

    def replace_engines(self, event: ev.EnginesFound) -> None:
        """Replace the engines that the cluster reports."""
        self._cluster = event.engines

    def choose(self, event: ev.Submitted, pages: int) -> list[str]:
        """Return the engines to ask for the prompt, in order; empty if the prompt is computed here.

        It is computed here if the request names no engines, and almost all of it is in the pool or in the arena, which
        has its first ``pages`` pages.
        """
        request, rules = event.engines, self._roster.rules
        addresses = request if request is not None else self._own(event.sequence) if event.role is Role.DECODE else ()
        cached = max(event.stored, pages * rules.page_tokens)
        if request is None and max(1, event.prompt - cached) <= rules.local_prefill_tokens:
            return []
        return [address for address in addresses if self._avoided.get(address, 0.0) <= event.now_s]

    def _own(self, sequence: int) -> tuple[str, ...]:
        """Return the engines that this engine was started with, or else the cluster's.

        The cluster's engines take turns in being the first.
        """
        if self._roster.rules.prefill or not self._cluster:
            return self._roster.rules.prefill
        first = sequence % len(self._cluster)
        return self._cluster[first:] + self._cluster[:first]

    def ask(self, sequence: Sequence) -> bool:
        """Ask the next engine. Returns False if there is none."""
        if not sequence.engines:
            return False
        sequence.attempts += 1
        sequence.attempt = Attempt(sequence.attempts, sequence.engines.pop(0))
        self._roster.out.append(do.AskPrefill(sequence.number, sequence.attempt.number, sequence.attempt.engine))
        return True

    def fill_rest(self, sequence: Sequence) -> None:
        """Fill the frames of a sequence that are still empty after the load from the pool.

        Another engine computes the rest and it is moved here, or it is computed here.
        """
        if sequence.attempt is None and not self.ask(sequence):
            self._roster.compute_rest(sequence)
            return
        attempt = sequence.attempt
        assert attempt is not None and not sequence.moving
        sequence.phase, sequence.moving, attempt.frames_used = Phase.MOVING, True, True
        start = max(sequence.cached, sequence.needed(sequence.prompt))
        self._roster.out.append(do.MoveIn(sequence.number, attempt.number, start))
        if attempt.first_token is not None:
            self._draw_first(sequence, attempt.first_token)

    def _draw_first(self, sequence: Sequence, token: int) -> None:
        """Draw the first token. It may arrive before the last layer."""
        sequence.phase, sequence.cached = Phase.DECODING, sequence.prompt
        self._roster.out.append(do.Draw(sequence.number, token))

    def computed(self, event: ev.Computed) -> None:
        """Record that the other engine has computed the prompt. In a lazy hand-off, wait for frames from now on."""
        sequence = self._of_attempt(event.sequence, event.attempt)
        if sequence is None or sequence.attempt is None or sequence.attempt.error is not None:
            return
        sequence.attempt.first_token = event.first_token
        if sequence.phase is Phase.WAITING:
            self._roster.waiting.append(sequence)
        elif sequence.phase is Phase.MOVING:
            self._draw_first(sequence, event.first_token)

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
        """Record that the mover has ended, and no longer writes to the frames."""
        sequence = self._roster.sequences[event.sequence]
        sequence.moving = False
        if sequence.phase is Phase.ENDED:
            self._roster.leave(sequence)
            return
        attempt = sequence.attempt
        assert attempt is not None and attempt.number == event.attempt
        attempt.tokens, attempt.moved = event.tokens, event.error is None
        attempt.error = attempt.error or event.error
        if sequence.phase is not Phase.ANSWERED:
            self.resolve(sequence, event.now_s)
            return
        if attempt.error is None:
            self.settle(sequence)
        self._roster.end_answered(sequence)

    def resolve(self, sequence: Sequence, now_s: float) -> None:
        """Settle or dismiss the sequence's attempt. Does nothing while a thread uses the frames."""
        attempt = sequence.attempt
        if attempt is None or not sequence.holds or sequence.loading or sequence.moving or sequence.in_side_step:
            return
        if attempt.error is not None:
            self._dismiss(sequence, now_s)
            if sequence.phase is Phase.ENDED:
                return
            # Another engine may still compute the prompt if no token was drawn.
            if sequence.length > sequence.prompt:
                self._roster.compute_rest(sequence)
            else:
                self.fill_rest(sequence)
        else:
            self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Complete the attempt if the first token and all of the KV are here, and store the full pages."""
        attempt = sequence.attempt
        if attempt is not None and attempt.moved and attempt.first_token is not None:
            sequence.attempt = None
            self._roster.frames.reached(sequence)
            self._roster.out.append(do.Settle(sequence.number))
            self._roster.store(sequence)

    def _dismiss(self, sequence: Sequence, now_s: float) -> None:
        """End a failed attempt. Complete pages that arrived stay; the rest is still to be computed.

        In a ring nothing stays, because an incomplete ring lacks the beginning of the window. Engines with different
        layouts or versions fail the request: that is an operator's mistake. Any other failure only costs time.
        """
        attempt = sequence.attempt
        assert attempt is not None and attempt.error is not None
        if attempt.frames_used:
            whole = 0 if sequence.has_ring else attempt.tokens - attempt.tokens % self._roster.rules.page_tokens
            # Tokens drawn since then stay: in a ring they may have overwritten the window of the prompt's last token.
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
            return None  # the sequence has ended, or is asking another engine
        return sequence
