"""Pacing: a model that computes nothing, and takes as long as a cost model says. For benchmarks of everything around
it.

Everything else is real: a step writes KV of every layer into its frames, and calls the hooks of its batch, so pages are
reserved, written, sealed and handed over layer by layer as those of any model. Between them it sleeps::

    step_s = alone_s * (1 + each * decoding) + sum over chunks of n / tokens_per_s * (1 + (c + n / 2) / context_even)

for chunks of ``n`` tokens after ``c``: the cost model that a conductor predicts with (``engine.conductor.state.cost``).

The KV of a token is its number, in every element, plus one for each layer. The next token is a hash of the KV of all
tokens before it, read from the frames: it depends only on the prompt (``paced_answer``), and a page with wrong contents
changes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.compute.paged_cache import Arenas, Batch, Slice
from engine.compute.presets import Pace

TOKENS: Final = 256  # tokens of an answer are bytes
SURE: Final = 100.0  # the logit of the token that follows; of all others it is 0
MIX: Final = 0x9E3779B97F4A7C15


class PacedRunner:
    """Replaces a ``Runner``. Several threads may run it, each with a batch of its own."""

    graphs = "none: nothing is computed"

    def __init__(self, pace: Pace, vocab_size: int, arenas: Arenas) -> None:
        self._pace = pace
        self._vocab_size = vocab_size
        (self._arena,) = arenas.groups  # no preset of this kind has windows

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``Runner.forward``."""
        assert batch.arenas.groups == (self._arena,), "a batch over another arena"
        began_s = time.monotonic()
        chunks = [(part.start, part.count) for part in batch.slices if part.count > 1]
        step_s = self._pace.step_s(chunks, len(batch.slices) - len(chunks))
        layout = self._arena.layout
        content = batch.tokens[0].to(self._arena.pages.dtype)[:, None, None].expand(-1, *layout.shape[1::2])
        for layer in range(layout.layers):
            if batch.before is not None:
                batch.before(layer)
            _sleep_until(began_s + step_s * (layer + 1) / layout.layers)
            batch.write(layer, content + layer)
            if batch.after is not None:
                batch.after(layer)
        logits = torch.zeros((len(batch.slices), self._vocab_size))
        for row, part in enumerate(batch.slices):
            logits[row, self._next(part)] = SURE
        return logits

    def _next(self, part: Slice) -> int:
        """The token after a slice, from the contents of the frames."""
        layout = self._arena.layout
        pages = part.tables[0, : -(-part.stop // layout.page_tokens)]
        held = self._arena.pages[pages, :, 0, :, 0].transpose(0, 1).reshape(layout.layers, -1)[:, : part.stop]
        own = held.to(torch.int64).numpy() - np.arange(layout.layers)[:, None]
        return paced_token(own.sum(axis=0) // layout.layers)


def paced_token(tokens: npt.NDArray[np.integer]) -> int:
    """The token that follows these."""
    with np.errstate(over="ignore"):
        places = np.arange(1, len(tokens) + 1, dtype=np.uint64) * np.uint64(MIX)
        mixed = int(((tokens.astype(np.uint64) + np.uint64(1)) * (places | np.uint64(1))).sum())
    return (mixed >> 40) % TOKENS


def paced_answer(prompt: Iterable[int], count: int) -> list[int]:
    """The first tokens of the answer to a prompt, this many."""
    tokens = list(prompt)
    start = len(tokens)
    while len(tokens) < start + count:
        tokens.append(paced_token(np.array(tokens)))
    return tokens[start:]


def _sleep_until(moment_s: float) -> None:
    left_s = moment_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
