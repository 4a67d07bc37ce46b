"""Chunk: the next tokens of a prompt, computed in one forward and written to the pool while that goes on."""

from __future__ import annotations

from engine.compute.paged_cache import Slice
from engine.moving.store_side import ChunkWriter, Pool
from engine.moving.work import Work


class Chunk:
    """Tokens of a prompt in one forward. Its pages are written to the pool layer by layer from the forward's own hook,
    so that readers in other processes are at most one layer behind the computation.

    Life: made -> ``before`` the forward -> ``layer`` per layer from its hook -> ``after``, which seals.
    """

    __slots__ = ("work", "start", "stop", "slice", "_writers", "_pool", "_progress")

    def __init__(self, work: Work, start: int, stop: int, pool: Pool) -> None:
        assert work.frames is not None
        self.work = work
        self.start = start
        self.stop = stop
        self.slice = Slice(work.frames, start, work.tokens[start:stop])
        self._writers: dict[int, ChunkWriter] = {}  # by cache group
        self._pool = pool
        self._progress = work.progress

    @property
    def tokens(self) -> int:
        """The number of tokens that it computes."""
        return self.stop - self.start

    def before(self) -> None:
        """Reserve frames in the pool."""
        page_tokens = self.work.page_tokens
        self._writers = self._pool.chunk(self.work, self.start // page_tokens, self.stop // page_tokens)
        for writer in self._writers.values():
            writer.before()

    def layer(self, layer: int) -> None:
        """Write one layer's KV of this chunk, which is in the frames."""
        group, number = self._pool.places[layer]
        if group in self._writers:
            self._writers[group].layer(number)
        if self._progress is not None:
            self._progress.reached(layer, self.stop)

    def after(self, succeeded: bool = True) -> None:
        """End the chunk: the forward is over."""
        for writer in self._writers.values():
            writer.after(succeeded)
        if succeeded:
            prompt = self.work.prompt
            self.work.spent.computed += min(self.stop, prompt) - min(self.start, prompt)
