"""Invariants of an engine after every event. Checked when the engine is idle, and by the tests' simulated engines."""

from __future__ import annotations

from engine.state.engine_state import EngineState
from engine.state.sequences import Phase, Sequence

ACTIVE = frozenset((Phase.LOADING, Phase.MOVING, Phase.COMPUTING, Phase.DECODING))


def check(state: EngineState) -> None:
    """Check that frames add up, and that each sequence is in the collections of its phase and can continue."""
    roster = state.roster
    sequences = roster.sequences.values()
    roster.frames.check(list(sequences), state.rules.frames, [group.frames for group in state.rules.other_groups])
    assert len(roster.active) <= state.rules.batch_max
    assert state.side_steps == sum(sequence.in_side_step for sequence in sequences)
    assert len({one.number for one in roster.waiting}) == len(roster.waiting)
    for sequence in sequences:
        _check(state, sequence)
    for number, sequence in roster.active.items():
        assert roster.sequences[number] is sequence and sequence.holds, sequence


def _check(state: EngineState, sequence: Sequence) -> None:
    roster = state.roster
    phase, attempt = sequence.phase, sequence.attempt
    active, waiting = sequence.number in roster.active, sequence in roster.waiting
    assert sequence.cached <= sequence.length and sequence.generated <= sequence.tokens_max, sequence
    assert not sequence.touched or sequence.holds or not sequence.answers, sequence
    assert not (sequence.moving or sequence.in_side_step) or attempt is not None or phase is Phase.ENDED, sequence
    match phase:
        case Phase.WAITING:
            asked = attempt is not None and attempt.first_token is None
            assert waiting != asked and not active and not sequence.holds, sequence
        case Phase.LOADING:
            assert active and sequence.loading, sequence
        case Phase.MOVING:
            assert active and attempt is not None and attempt.first_token is None, sequence
        case Phase.COMPUTING:
            assert active and attempt is None and sequence.cached < sequence.length, sequence
        case Phase.DECODING:
            first = sequence.cached == sequence.length == sequence.prompt  # the first token of a hand-off, being drawn
            assert active and sequence.answers and (first or sequence.cached == sequence.length - 1), sequence
        case Phase.HELD:
            assert not active and sequence.holds and sequence.pulled and not sequence.answers, sequence
        case Phase.RELAYED:
            assert sequence.passing is not None and active == sequence.holds != sequence.passing.taken, sequence
        case Phase.ANSWERED:
            arriving = attempt is not None and attempt.first_token is not None and attempt.error is None
            assert not active and not waiting and sequence.holds and sequence.moving and arriving, sequence
        case Phase.ENDED:
            assert not active and not waiting and attempt is None, sequence
            assert sequence.touched or sequence.passing is not None, sequence
