"""Step: one forward of an engine, and what follows from it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.compute.decode import STALL_S, SideBatches, Waits, in_time, next_token_slice
from engine.compute.paged_cache import Batch
from engine.compute.runner import Runner
from engine.compute.sampling import choose_many
from engine.compute.speeds import Speeds
from engine.config import EngineConfig
from engine.memory.arena import Arena
from engine.model.observer import Observer
from engine.moving.store_side import Pool
from engine.shell.prefill import Chunk, Prefills
from engine.shell.sequence import Sequence, State

Next = Callable[[Sequence, int], None]


class Step:
    """Decode first: every sequence that can makes its next token; prompt tokens fill what is left of the chunk."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        arena: Arena,
        pool: Pool,
        prefills: Prefills,
        sides: SideBatches,
        speeds: Speeds,
    ) -> None:
        self._config = config
        self._runner = runner
        self._arena = arena
        self._pool = pool
        self._prefills = prefills
        self._sides = sides
        self._speeds = speeds

    def run(self, sequences: list[Sequence], next_token: Next, observer: Observer) -> bool:
        """Whether there was anything to do."""
        self._pool.between_steps()
        self._collect(next_token)
        decoding = self._decoding(sequences)
        budget = max(self._config.page_tokens, self._config.chunk_tokens - len(decoding))  # or prompts would starve
        chunks = self._chunks(sequences, budget)
        if not decoding and not chunks:
            return False
        for chunk in chunks:
            chunk.before()
        waits = Waits([one for one in decoding if one.arrivals is not None], STALL_S)

        def after(layer: int) -> None:
            for chunk in chunks:
                chunk.layer(layer)

        slices = [next_token_slice(one) for one in decoding] + [chunk.slice for chunk in chunks]
        start = time.monotonic()
        succeeded = False
        try:
            logits = self._runner.forward(Batch(self._arena, slices, waits.before, after))
            succeeded = True
        finally:
            for chunk in chunks:
                chunk.after(succeeded)
        seconds = time.monotonic() - start
        tokens = sum(chunk.tokens for chunk in chunks)
        self._speeds.measured(len(decoding), tokens, seconds - waits.waited_s)
        observer.stepped(len(decoding), tokens, seconds)
        if waits.waited_s:
            observer.stalled(waits.waited_s)
        self._draw(decoding, chunks, logits, waits, next_token)
        return True

    def _decoding(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that make their next token in this batch; others are sent aside."""
        batch = []
        layers = self._arena.layout.layers
        for sequence in sequences:
            if sequence.state is not State.DECODING or sequence in self._sides:
                continue
            if sequence.arrivals is None or in_time(sequence, layers, self._speeds.layer_s):
                batch.append(sequence)
            elif self._first_layer_there(sequence) and not self._sides.full:
                self._sides.add(sequence)
        return batch

    @staticmethod
    def _first_layer_there(sequence: Sequence) -> bool:
        arrivals = sequence.arrivals
        return arrivals is not None and arrivals.failure is None and arrivals.layers_with(sequence.prompt) > 0

    def _chunks(self, sequences: list[Sequence], budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in sequences:
            if sequence.state is State.COMPUTING and budget > 0:
                chunks.append(Chunk(sequence, budget, self._pool))
                budget -= chunks[-1].tokens
        return chunks

    def _collect(self, next_token: Next) -> None:
        """Tokens made aside."""
        for sequence, logits in self._sides.collect():
            if logits is not None and sequence.state is State.DECODING:
                sequence.cached += 1
                drawn = choose_many(logits[None], [sequence.request.sampling], [sequence.generated])
                next_token(sequence, drawn[0])

    def _draw(
        self, decoding: list[Sequence], chunks: list[Chunk], logits: torch.Tensor, waits: Waits, next_token: Next
    ) -> None:
        rows: list[int] = []
        drawing: list[Sequence] = []
        for row, sequence in enumerate(decoding):
            if sequence not in waits.missed:
                sequence.cached += 1
                rows.append(row)
                drawing.append(sequence)
        for row, chunk in enumerate(chunks, len(decoding)):
            if chunk.sequence.left == 0:
                rows.append(row)
                drawing.append(chunk.sequence)
            elif not chunk.sequence.answers:
                self._prefills.advanced(chunk.sequence, self._speeds.prefill_tokens_per_s)
        if not rows:
            return
        given = logits if len(rows) == len(logits) else logits[rows]
        samplings = [sequence.request.sampling for sequence in drawing]
        drawn = choose_many(given, samplings, [sequence.generated for sequence in drawing])
        for sequence, token in zip(drawing, drawn, strict=True):
            next_token(sequence, token)
