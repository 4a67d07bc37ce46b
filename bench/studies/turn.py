"""Row about decisions: the time of an engine's state for one turn with a full batch: the events ``Turn`` and
``Stepped``.

The limit counts the same tokens in the same number of objects and decides nothing. The two alternate.
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

TURNS = 256  # per round: every sequence fills several pages
PAGE_TOKENS = 64
LAYERS = 32
STEP_S = 0.01


@dataclass(slots=True)
class _Counts:
    tokens: int = 0
    length: int = 0
    generated: int = 0


class TurnLoad:
    """Sequences that decode in steps without any computation."""

    def __init__(self, sequences: int, blocks: int) -> None:
        tokens = TURNS * (blocks + 1)
        pages = -(-(PAGE_TOKENS + tokens) // PAGE_TOKENS)
        rules = Rules(
            frames=sequences * pages, layers=LAYERS, page_tokens=PAGE_TOKENS, chunk_tokens=512, batch_max=sequences
        )
        self._state = EngineState(rules)
        self._decoding = sequences
        for number in range(1, sequences + 1):
            limits = {"prompt": PAGE_TOKENS, "generated": 0, "tokens_max": tokens, "deadline_s": 1e9}
            self._state.handle(ev.Submitted(0.0, number, str(number), **limits))  # type: ignore[arg-type]
        self._state.handle(ev.Turn(0.0))
        for number in range(1, sequences + 1):
            self._state.handle(ev.PrefixLoaded(0.0, number, 0))
        for turn in count():
            if self.turn() == sequences:
                break
            if turn > 2 * sequences:
                raise BenchFailed("not all sequences decode in one batch")

    def turn(self) -> int:
        """Take one turn; return the number of sequences that decoded in it."""
        self._state.handle(ev.Turn(0.0))
        step = self._state.step
        assert step is not None
        self._state.handle(ev.Stepped(0.0, {}, frozenset(), STEP_S))
        return len(step.decoding)


def turn(stage: Stage, name: str, bar: Bar | None, sequences: int) -> list[Result]:
    """Measure the seconds to decide one turn, compared with counting its tokens."""
    rounds = max(3, stage.settings.rounds)
    batch = TurnLoad(sequences, rounds)
    counters = [_Counts() for _ in range(sequences)]
    ours: list[float] = []
    limit: list[float] = []
    for _ in range(rounds):
        turns, countings = [], []
        for _ in range(TURNS):
            start = time.perf_counter()
            if batch.turn() != sequences:
                raise BenchFailed("not all sequences decoded")
            middle = time.perf_counter()
            for counts in counters:
                counts.tokens += 1
                counts.length += 1
                counts.generated += 1
            turns.append(middle - start)
            countings.append(time.perf_counter() - middle)
        ours.append(statistics.median(turns))
        limit.append(statistics.median(countings))
    limit_is = "counting the same tokens"
    return [result(name, Kind.TIME, ours, limit, bar=bar, limit_is=limit_is, details={"sequences": sequences})]
