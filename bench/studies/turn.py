"""Row about decisions: what an engine's state takes for a turn with a full batch, ``Turn`` and ``Stepped`` together.

The limit counts the same tokens in the same number of objects and decides nothing. Both take turns.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import count

from engine.state import events as ev
from engine.state.engine_state import EngineState
from engine.state.rules import Rules
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage

TURNS = 256  # of a round: pages of every sequence become full in it, several times
PAGE_TOKENS = 64
LAYERS = 32
STEP_S = 0.01


@dataclass(slots=True)
class _Counted:
    tokens: int = 0
    length: int = 0
    generated: int = 0


class TurnLoad:
    """Sequences that decode in steps that take no time."""

    def __init__(self, sequences: int, blocks: int) -> None:
        tokens = TURNS * (blocks + 1)
        pages = -(-(PAGE_TOKENS + tokens) // PAGE_TOKENS)
        rules = Rules(
            frames=sequences * pages, layers=LAYERS, page_tokens=PAGE_TOKENS, chunk_tokens=512, batch_max=sequences
        )
        self._state = EngineState(rules)
        self._decoding = sequences
        for number in range(1, sequences + 1):
            how = {"prompt": PAGE_TOKENS, "generated": 0, "tokens_max": tokens, "deadline_s": 1e9}
            self._state.handle(ev.Submitted(0.0, number, str(number), **how))  # type: ignore[arg-type]
        self._state.handle(ev.Turn(0.0))
        for number in range(1, sequences + 1):
            self._state.handle(ev.PrefixLoaded(0.0, number, 0))
        for turn in count():
            if self.turn() == sequences:
                break
            if turn > 2 * sequences:
                raise BenchFailed("the batch does not fill")

    def turn(self) -> int:
        """One turn; how many decoded in it."""
        self._state.handle(ev.Turn(0.0))
        step = self._state.step
        assert step is not None
        self._state.handle(ev.Stepped(0.0, {}, frozenset(), STEP_S))
        return len(step.decoding)


def turn(stage: Stage, name: str, bar: Bar | None, sequences: int) -> list[Result]:
    """``<name>``: seconds to decide one turn, against counting its tokens."""
    rounds = max(3, stage.settings.rounds)
    batch = TurnLoad(sequences, rounds)
    counted = [_Counted() for _ in range(sequences)]
    ours: list[float] = []
    limit: list[float] = []
    for _ in range(rounds):
        turns, counts = [], []
        for _ in range(TURNS):
            start = time.perf_counter()
            if batch.turn() != sequences:
                raise BenchFailed("not all of the sequences decoded")
            middle = time.perf_counter()
            for one in counted:
                one.tokens += 1
                one.length += 1
                one.generated += 1
            turns.append(middle - start)
            counts.append(time.perf_counter() - middle)
        ours.append(statistics.median(turns))
        limit.append(statistics.median(counts))
    what = "counting the same tokens"
    return [result(name, Kind.TIME, ours, limit, bar=bar, limit_is=what, details={"sequences": sequences})]
