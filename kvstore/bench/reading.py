"""Reading: what another process stored, brought into one warm buffer by the store or by plain copies of its memory.

The limit of a get is memcpy out of the same frames of the same mapping into the same buffer, in two ways of which the
faster one counts: one ``memmove`` per page, or one copy per run of consecutive frames. The buffer starts at a memory
page, as frames do, where every way to copy is at its best.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.bench.content import BenchWork, Content, Rows
from kvstore.bench.harness import BenchFailed
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.model.prefix import Keys
from kvstore.tier.host_memory import empty

MEMCPYS = ("memmove_per_page", "copy_per_run")
VERBS = ("get", *MEMCPYS)


class LocatedChain:
    """One chain: its tokens, and where its pages lie in this process's mapping of the node's memory."""

    __slots__ = ("tokens", "moves", "copies", "frames")

    def __init__(self, tokens: Any, moves: list[tuple[int, int]], copies: list[tuple[Rows, Rows]]) -> None:
        self.tokens = tokens
        self.moves = moves  # (target, source) addresses, one per page
        self.copies = copies  # (target, source) arrays, one per run of consecutive frames
        self.frames = [source for _, source in moves]


class Reading:
    """All chains of a ``BenchWork`` as one process reads them. Lives as long as its store; only it may evict them."""

    def __init__(self, store: Store, work: BenchWork) -> None:
        self.work = work
        self.cache: PrefixCache = store.cache(work.layout)
        self.content = Content(work.layout.page_bytes)
        self.out: Rows = empty((work.pages, work.layout.page_bytes))
        self.out[:] = 0
        self.batches = [self._locate(chain) for chain in range(work.chains)]

    @property
    def runs(self) -> float:
        """Runs of consecutive frames per chain, on average: 1 where every chain lies in one piece."""
        return sum(len(batch.copies) for batch in self.batches) / len(self.batches)

    def keys(self, chain: int) -> Keys:
        """New keys of a chain: no verb has prepared anything in them."""
        return self.cache.keys(self.batches[chain].tokens)

    def variants(self) -> dict[str, Callable[[tuple[LocatedChain, Keys]], object]]:
        """The verbs, each bringing one chain into ``out``."""
        get, out, page_bytes = self.cache.get, self.out, self.work.layout.page_bytes

        def ours(given: tuple[LocatedChain, Keys]) -> int:
            return get(given[1], out).pages

        def memmove_per_page(given: tuple[LocatedChain, Keys]) -> None:
            memmove = ctypes.memmove
            for target, source in given[0].moves:
                memmove(target, source, page_bytes)

        def copy_per_run(given: tuple[LocatedChain, Keys]) -> None:
            for target, source in given[0].copies:
                target[:] = source

        return {"get": ours, "memmove_per_page": memmove_per_page, "copy_per_run": copy_per_run}

    def prepare(self, chain: int) -> tuple[LocatedChain, Keys]:
        """What the variants are given."""
        return self.batches[chain], self.keys(chain)

    def check(self, variant: str, value: object) -> None:
        """Raises BenchFailed where a get found less than the whole chain."""
        if variant == "get" and value != self.work.pages:
            raise BenchFailed(f"get found {value} of {self.work.pages} pages")

    def verify(self) -> None:
        """Every chain, by every variant, byte for byte. Raises BenchFailed."""
        for name, variant in self.variants().items():
            for chain in range(self.work.chains):
                self.out[:] = 0
                given = self.prepare(chain)
                self.check(name, variant(given))
                self.content.check(self.out, given[1].hashes, f"{name} of chain {chain}")

    def _locate(self, chain: int) -> LocatedChain:
        """Find the frames through a lease. The addresses stay right after it, since nobody writes to this node."""
        tokens = self.work.tokens(chain)
        with self.cache.lease(self.cache.keys(tokens)) as lease:
            pages = list(lease.pages)
        if len(pages) != self.work.pages:
            raise BenchFailed(f"chain {chain}: {len(pages)} of {self.work.pages} pages are stored")
        page_bytes, target = self.work.layout.page_bytes, self.out.ctypes.data
        sources = [page.ctypes.data for page in pages]
        moves = [(target + i * page_bytes, source) for i, source in enumerate(sources)]
        copies, start = [], 0
        for i in range(1, len(pages) + 1):
            if i == len(pages) or sources[i] != sources[i - 1] + page_bytes:
                shape, strides = (i - start, page_bytes), (page_bytes, 1)
                run = np.lib.stride_tricks.as_strided(pages[start], shape, strides, writeable=False)
                copies.append((self.out[start:i], run))
                start = i
        return LocatedChain(tokens, moves, copies)
