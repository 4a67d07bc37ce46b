"""Batching: what runs in the next step.

Decoding comes first: every sequence that can makes its next token, and prompt tokens fill the rest of the chunk. A
sequence whose first layer is there may join the batch if the other layers are predicted to arrive in time: layer ``l``
is needed ``l`` layers' time into the step. Otherwise it makes its next token in a side batch, where waiting delays no
other sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.state.events import Arriving
from engine.state.instructions import Part
from engine.state.rules import Rules
from engine.state.sequence import Phase, Sequence

MARGIN = 1.2  # a layer is predicted to take this much longer than it did


def decoding(
    active: Iterable[Sequence], rules: Rules, arriving: Mapping[int, Arriving], layer_s: float, aside_now: int
) -> tuple[list[int], list[int]]:
    """Numbers of the sequences that make their next token together, and of those that begin to do so aside."""
    batch: list[int] = []
    aside: list[int] = []
    for sequence in active:
        if sequence.phase is not Phase.DECODING or sequence.aside:
            continue
        attempt = sequence.attempt
        if attempt is None:
            batch.append(sequence.number)
            continue
        there = arriving.get(sequence.number)
        if attempt.error is not None or there is None:
            continue
        if in_time(there, rules.layers, layer_s):
            batch.append(sequence.number)
        elif there.layers and aside_now + len(aside) < rules.side_max:
            aside.append(sequence.number)
    return batch, aside


def in_time(arriving: Arriving, layers: int, layer_s: float) -> bool:
    """True if a step whose layers take ``layer_s`` finds every layer of the sequence there when it needs it."""
    there = arriving.layers
    if there == layers:
        return True
    if not there or not arriving.layer_s or arriving.late:
        return False
    # Both ends of a straight line: the first layer that is missing, and the last one.
    each = MARGIN * arriving.layer_s
    return each <= there * layer_s and (layers - there) * each <= (layers - 1) * layer_s


def parts(active: Iterable[Sequence], budget: int, page_tokens: int) -> list[Part]:
    """The next tokens of prompts, ``budget`` together. Each part ends at the end of a page, unless it is a prompt's
    last.
    """
    found: list[Part] = []
    for sequence in active:
        if budget <= 0:
            break
        if sequence.phase is Phase.COMPUTING:
            found.append(part(sequence, budget, page_tokens))
            budget -= found[-1].stop - found[-1].start
    return found


def part(sequence: Sequence, budget: int, page_tokens: int) -> Part:
    """The next tokens of one prompt."""
    start = sequence.cached
    stop = min(sequence.length, start + budget)
    if stop < sequence.length and stop - stop % page_tokens > start:
        stop -= stop % page_tokens
    return Part(sequence.number, start, stop, stop == sequence.length)
