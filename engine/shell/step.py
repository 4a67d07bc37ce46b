"""Step: one forward of an engine, and the tokens that are drawn from it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from engine.compute.arrivals import Arrivals, Waits
from engine.compute.lost import StepFault
from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import Forward
from engine.compute.sampling import choose_many
from engine.memory.staging import Stagings
from engine.model.observer import Observer
from engine.moving.chunk import Chunk
from engine.moving.store_side import Pool
from engine.moving.work import Work
from engine.state import instructions as do
from engine.state.events import StepFailed, Stepped

STALL_S = 0.02  # for layers that were predicted to be there in time


def next_token_slice(work: Work) -> Slice:
    """The slice with the one token of an answer whose KV is missing."""
    assert work.frames is not None
    return Slice(work.frames, work.length - 1, work.tokens[work.length - 1 : work.length])


def draw(works: Sequence[Work], logits: torch.Tensor) -> list[int]:
    """Draw the next token of each of ``works``, from ``logits [n, vocab]``."""
    return choose_many(logits, [work.request.sampling for work in works], [work.generated for work in works])


class StepRunner:
    """Runs the steps that the state has put together."""

    def __init__(self, runner: Forward, stagings: Stagings, pool: Pool, eos: frozenset[int]) -> None:
        self._runner = runner
        self._stagings = stagings
        self._pool = pool
        self._eos = eos

    def run(
        self, step: do.Step, works: Mapping[int, Work], arrivals: Mapping[int, Arrivals], observer: Observer
    ) -> Stepped | StepFailed:
        """Compute, write to the pool, draw, and tell clients. ``arrivals``: KV that is on its way, by sequence.

        A step that fails seals nothing and sends no token to any client.
        """
        decoding = [works[number] for number in step.decoding]
        chunks = [Chunk(works[part.sequence], part.start, part.stop, self._pool) for part in step.parts]
        for chunk in chunks:
            chunk.before()
        awaited = {work.number: (arrivals[work.number], work.prompt) for work in decoding if work.number in arrivals}
        waits = Waits(awaited, STALL_S)

        def after(layer: int) -> None:
            self._stagings.computed(layer)
            for chunk in chunks:
                chunk.layer(layer)

        slices = [next_token_slice(work) for work in decoding] + [chunk.slice for chunk in chunks]
        start = time.monotonic()
        succeeded = False
        try:
            with StepFault() as fault:
                hooks = waits.before if awaited else None, after if chunks else None
                logits = self._runner.forward(Batch(self._stagings.arenas, slices, *hooks))
                self._stagings.finish()
                succeeded = True
            if not succeeded:
                with StepFault():  # raises if the device is lost, which a library's error does not say
                    self._stagings.finish()
        finally:
            for chunk in chunks:
                chunk.after(succeeded)
        if fault.error is not None:
            return StepFailed(time.monotonic(), fault.error)
        seconds = time.monotonic() - start
        chunk_tokens = sum(chunk.tokens for chunk in chunks)
        for chunk in chunks:
            chunk.work.spent.prefill_s += (seconds - waits.waited_s) * chunk.tokens / chunk_tokens
        observer.stepped(len(decoding), chunk_tokens, seconds)
        if waits.waited_s:
            observer.stalled(waits.waited_s)
        drawing = [(row, work) for row, work in enumerate(decoding) if work.number not in waits.missed]
        drawing += [
            (row, chunk.work)
            for row, (chunk, part) in enumerate(zip(chunks, step.parts, strict=True), len(decoding))
            if part.draws
        ]
        drawn, tokens = [work for _, work in drawing], list[int]()
        with StepFault() as fault:
            if drawn:
                tokens = draw(drawn, logits if len(drawn) == len(logits) else logits[[row for row, _ in drawing]])
        if fault.error is not None:
            return StepFailed(time.monotonic(), fault.error)
        ends, names = self._drawn(drawn, tokens)
        return Stepped(time.monotonic(), ends, frozenset(waits.missed), seconds, waits.waited_s, names)

    def _drawn(self, works: list[Work], tokens: list[int]) -> tuple[dict[int, str], dict[int, bytes]]:
        """Record their next tokens; returns how the answers that this ends have ended, and the names of pages that are
        full now."""
        ends: dict[int, str] = {}
        names: dict[int, bytes] = {}
        for work, token in zip(works, tokens, strict=True):
            if not work.answers:
                work.first_token = token
                continue
            if end := work.token(token, self._eos):
                ends[work.number] = end
            if name := work.new_page_name():
                names[work.number] = name
        return ends, names
