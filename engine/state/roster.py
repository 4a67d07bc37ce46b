"""Roster: who is here, who has frames, and how each of them ends."""

from __future__ import annotations

from collections import deque
from itertools import islice

from engine.state import instructions as do
from engine.state.instructions import Instruction
from engine.state.rules import Rules
from engine.state.sequence import Phase, Sequence
from engine.state.sharing import Frames
from kvstore.errors import KVStoreError


class Roster:
    """The sequences of an engine, and what it has decided to do (``out``) about the event that it is handling.

    Attributes:
        sequences: all that have not ended, or whose frames somebody may still touch, by number.
        active: those of them that take part in steps, or soon will, in the order in which they got their frames.
        waiting: for frames: first come, first served, so that a large one is not overtaken for ever.
        frames: how many are free, and who has which pages.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.sequences: dict[int, Sequence] = {}
        self.active: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.frames = Frames(rules.frames, rules.kept_max, [group.frames for group in rules.beside])
        self.out: list[Instruction] = []

    def admit(self) -> None:
        """Those that come next get frames, as far as there are any.

        One whose pages are being loaded or computed for another one waits until they are whole, as it would for its
        turn to compute them, and lets others pass. But not where another engine waits for it, or computes its prompt.
        """
        for sequence in list(islice(self.waiting, self.rules.batch_max)):
            if len(self.active) >= self.rules.batch_max:
                return
            shared, coming = self.frames.look(sequence)
            if coming and sequence.answers and not sequence.engines and sequence.attempt is None:
                continue
            if not self.frames.fits(sequence, shared):
                return
            self.waiting.remove(sequence)
            if evicted := self.frames.take(sequence, shared):
                self.out.append(do.EvictPages(evicted))
            self.active[sequence.number] = sequence
            sequence.phase, sequence.loading = Phase.LOADING, True
            self.out.append(do.LoadPrefix(sequence.number, sequence.laid_out(), shared, sequence.beside_out()))

    def offer(self) -> None:
        """The pool is to have the pages that will be evicted soon."""
        if pages := self.frames.to_offer():
            self.out.append(do.OfferPages(pages))

    def compute_rest(self, sequence: Sequence) -> None:
        """What is not in the frames is computed here. Where all of it is, the last token is computed again, into its
        own frame: nobody keeps logits.
        """
        if sequence.cached == sequence.length:
            sequence.cached -= 1
            self.out.append(do.Recompute(sequence.number))
        sequence.phase = Phase.COMPUTING
        self.frames.reached(sequence)

    def store(self, sequence: Sequence) -> None:
        """Write its full pages, unless their KV is still arriving."""
        pages = sequence.cached // self.rules.page_tokens
        if pages and sequence.attempt is None and sequence.holds:
            self.out.append(do.StorePages(sequence.number, pages))

    # --- ends -------------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: str) -> None:
        """An answer is over. One that was told before all of its KV is here keeps its mover: the next turn of a
        conversation is to find it."""
        attempt = sequence.attempt
        if reason != "cancelled" and sequence.moving and attempt is not None and attempt.error is None:
            del self.active[sequence.number]
            sequence.phase = Phase.TOLD
        else:
            self._end(sequence)
        self.out.append(do.Forget(sequence.number))  # first: its client may ask again under the same id
        self.out.append(do.Finish(sequence.number, reason))
        self.leave(sequence)

    def end_told(self, sequence: Sequence) -> None:
        """The KV of an answer that was told is stored, or nobody waits for it any longer."""
        assert sequence.phase is Phase.TOLD
        self._end(sequence)
        self.leave(sequence)

    def fail(self, sequence: Sequence, error: KVStoreError, cancelled: bool = False) -> None:
        """There will be no (whole) answer, or prefill."""
        self._end(sequence)
        if sequence.answers:
            self.out.append(do.Forget(sequence.number))
        self.out.append(do.Fail(sequence.number, error, cancelled))
        if not sequence.answers:
            self.out.append(do.Close(sequence.number))
        self.leave(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """A prefill that is complete is over: it was fetched, or held for long enough."""
        assert sequence.phase is Phase.HELD
        sequence.phase = Phase.ENDED
        self.out.append(do.Close(sequence.number))

    def reply(self, sequence: Sequence, result: bool | KVStoreError) -> None:
        """Tell who asked for it to be passed on, once. Of a drain, errors alone are told."""
        passing = sequence.passing
        if passing is not None and (passing.call or isinstance(result, KVStoreError)):
            self.out.append(do.AnswerCall(passing.call, result))
            passing.call = 0

    def leave(self, sequence: Sequence) -> None:
        """It needs its frames no longer: they are free once nobody may touch them."""
        if sequence.touched:
            return
        if sequence.holds:
            self.out.append(do.GiveBack(sequence.number, *self.frames.give_back(sequence)))
        if sequence.phase is Phase.ENDED and sequence.passing is None:
            del self.sequences[sequence.number]
            self.out.append(do.EndSequence(sequence.number))

    def _end(self, sequence: Sequence) -> None:
        """It has no more part in anything."""
        if self.active.pop(sequence.number, None) is None and sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.phase = Phase.ENDED
        sequence.engines = []
        if sequence.attempt is not None:
            sequence.attempt = None
            self.out.append(do.GiveUp(sequence.number))
        if sequence.passing is not None and not sequence.passing.taken:
            self.reply(sequence, False)
            self.out.append(do.CancelThere(sequence.number))
