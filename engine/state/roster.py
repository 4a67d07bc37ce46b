"""Roster: the sequences that are here, which of them have frames, and how each of them ends."""

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
    """The sequences of an engine, and the instructions (``out``) for the event that it is handling.

    Attributes:
        sequences: all that have not ended, or whose frames a thread may still use, by number.
        active: those that take part in steps, or soon will, in the order in which they got their frames.
        waiting: sequences that wait for frames: first come, first served, so that a large one is not overtaken for
            ever.
        frames: how many are free, and which sequences have which pages.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.sequences: dict[int, Sequence] = {}
        self.active: dict[int, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.frames = Frames(rules.frames, rules.kept_max, [group.frames for group in rules.beside])
        self.out: list[Instruction] = []

    def admit(self) -> None:
        """Give the next sequences frames, as far as there are any.

        A sequence whose pages are being loaded or computed for another one waits until they are complete, as it would
        for its turn to compute them, and lets others pass. But not if another engine waits for it, or computes its
        prompt.
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
        """Offer the pool the pages that will be evicted soon."""
        if pages := self.frames.to_offer():
            self.out.append(do.OfferPages(pages))

    def compute_rest(self, sequence: Sequence) -> None:
        """Compute here what is not in the frames. If all of it is there, the last token is computed again, into its own
        frame, because logits are not kept.
        """
        if sequence.cached == sequence.length:
            sequence.cached -= 1
            self.out.append(do.Recompute(sequence.number))
        sequence.phase = Phase.COMPUTING
        self.frames.reached(sequence)

    def store(self, sequence: Sequence) -> None:
        """Write its full pages to the pool, unless their KV is still arriving."""
        pages = sequence.cached // self.rules.page_tokens
        if pages and sequence.attempt is None and sequence.holds:
            self.out.append(do.StorePages(sequence.number, pages))

    # --- ends -------------------------------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End an answer. If the end was sent before all of its KV is here, its mover stays: the next turn of a
        conversation is to find the KV."""
        attempt = sequence.attempt
        if reason != "cancelled" and sequence.moving and attempt is not None and attempt.error is None:
            del self.active[sequence.number]
            sequence.phase = Phase.TOLD
        else:
            self._end(sequence)
        self.out.append(do.Forget(sequence.number))  # first: its client may use the same id again
        self.out.append(do.Finish(sequence.number, reason))
        self.leave(sequence)

    def end_told(self, sequence: Sequence) -> None:
        """End a sequence after its answer was sent: its KV is stored, or no longer awaited."""
        assert sequence.phase is Phase.TOLD
        self._end(sequence)
        self.leave(sequence)

    def fail(self, sequence: Sequence, error: KVStoreError, cancelled: bool = False) -> None:
        """End a sequence without a (complete) answer, or prefill."""
        self._end(sequence)
        if sequence.answers:
            self.out.append(do.Forget(sequence.number))
        self.out.append(do.Fail(sequence.number, error, cancelled))
        if not sequence.answers:
            self.out.append(do.Close(sequence.number))
        self.leave(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """End a complete prefill: it was fetched, or its hold time is over."""
        assert sequence.phase is Phase.HELD
        sequence.phase = Phase.ENDED
        self.out.append(do.Close(sequence.number))

    def reply(self, sequence: Sequence, result: bool | KVStoreError) -> None:
        """Reply once to the caller that asked for it to be passed on. A drain's reply is only sent for errors."""
        passing = sequence.passing
        if passing is not None and (passing.call or isinstance(result, KVStoreError)):
            self.out.append(do.AnswerCall(passing.call, result))
            passing.call = 0

    def leave(self, sequence: Sequence) -> None:
        """Release its frames: they are free once no thread may use them."""
        if sequence.touched:
            return
        if sequence.holds:
            self.out.append(do.GiveBack(sequence.number, *self.frames.give_back(sequence)))
        if sequence.phase is Phase.ENDED and sequence.passing is None:
            del self.sequences[sequence.number]
            self.out.append(do.EndSequence(sequence.number))

    def _end(self, sequence: Sequence) -> None:
        """Remove a sequence that takes no more part in anything."""
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
