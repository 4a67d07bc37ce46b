"""Migration: another engine continues a running answer, for a caller's request or because this engine is drained.

This engine keeps the frames until the other engine has begun to answer. If that does not happen, the answer continues
here.
"""

from __future__ import annotations

import math

from engine.state import events as ev
from engine.state import instructions as do
from engine.state.sequences import Passing, Phase, Roster, Sequence
from kvstore.errors import DeadlineExceeded

TAKE_S = 10.0  # time for the other engine to begin its answer


class Passes:
    """Answers that move to other engines. ``target``: where a drain sends answers; None without a drain."""

    def __init__(self, roster: Roster) -> None:
        self.target: str | None = None
        self._roster = roster

    def migrate(self, event: ev.Migrate) -> None:
        """Move an answer at a caller's request."""
        sequence = self._roster.active.get(event.sequence)
        if sequence is None or not _may_leave(sequence):
            self._roster.out.append(do.AnswerCall(event.call, False))
        else:
            self._begin(sequence, event.target, event.call, event.now_s)

    def drain(self, event: ev.Drain) -> None:
        """Begin to move all answers, one by one, or stop moving them."""
        self.target = event.target

    def move_next(self, now_s: float) -> None:
        """Move the next answer of a drain, if no answer is moving."""
        if self.target is None:
            return
        active = self._roster.active.values()
        if not any(one.phase is Phase.RELAYED for one in active):
            for sequence in active:
                if _may_leave(sequence):
                    self._begin(sequence, self.target, 0, now_s)
                    return

    def _begin(self, sequence: Sequence, target: str, call: int, now_s: float) -> None:
        """Pause a sequence here and offer its tokens to ``target``."""
        self._roster.store(sequence)
        sequence.phase, sequence.passing = Phase.RELAYED, Passing(call, now_s + TAKE_S, drained=not call)
        self._roster.out.append(do.PassOn(sequence.number, target))

    def taken(self, event: ev.PassTaken) -> None:
        """Let the other engine continue the sequence, unless it has ended in the meantime."""
        roster, sequence = self._roster, self._roster.sequences[event.sequence]
        assert sequence.passing is not None
        if sequence.phase is Phase.ENDED:
            roster.out.append(do.CancelThere(sequence.number))
            return
        sequence.passing.taken = True
        del roster.active[sequence.number]
        roster.reply(sequence, True)
        roster.out.append(do.Left(sequence.number))
        roster.leave(sequence)

    def not_taken(self, event: ev.NotTaken) -> None:
        """Continue the sequence here. A refusal ends a drain: that engine is not offered further answers."""
        roster, sequence = self._roster, self._roster.sequences[event.sequence]
        assert sequence.passing is not None
        if sequence.passing.drained:
            self.target = None
        roster.reply(sequence, event.error or False)
        sequence.passing = None
        if sequence.phase is Phase.ENDED:
            roster.leave(sequence)
        else:
            sequence.phase = Phase.DECODING

    def passed_on(self, event: ev.PassedOn) -> None:
        """Record that the client has received the end of the answer."""
        roster, sequence = self._roster, self._roster.sequences[event.sequence]
        sequence.passing = None
        if sequence.phase is not Phase.ENDED:
            sequence.phase = Phase.ENDED
            roster.out.append(do.Forget(sequence.number))
        roster.leave(sequence)

    def give_up_late(self, sequence: Sequence, now_s: float) -> None:
        """Give up on an engine that takes too long to begin; the sequence then continues here."""
        passing = sequence.passing
        if passing is not None and passing.until_s < now_s:
            passing.until_s = math.inf
            late = DeadlineExceeded(f"the other engine did not take {sequence.name} within {TAKE_S:g} s")
            self._roster.reply(sequence, late)
            self._roster.out.append(do.CancelThere(sequence.number))


def _may_leave(sequence: Sequence) -> bool:
    """Return True if the sequence decodes and all its KV is here, so that the pool has it soon."""
    return sequence.phase is Phase.DECODING and sequence.attempt is None
