"""Content: the pages that a benchmark stores, and their sizes.

Each byte follows from its page's key and its offset, so every read can be checked. The page sizes are those of real
models: 2 MiB is Llama-3.1-8B at TP=4 with 64-token pages, 256 KiB is Llama-3.2-1B at TP=8 with 64-token pages, and
64 KiB is the same with 16-token pages. No real model has pages of 4 KiB. They have 32 layers and 64 tokens, so that the
metadata of a page has a realistic size.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.bench.harness import BenchFailed
from kvstore.client.prefix_cache import PrefixCache
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys

Rows = npt.NDArray[np.uint8]

LAYOUTS = {
    "2m": Layout(model="bench-8b-tp4", layers=32, kv_heads=2, head_dim=128, page_tokens=64),
    "256k": Layout(model="bench-1b-tp8", layers=16, kv_heads=1, head_dim=64, page_tokens=64),
    "64k": Layout(model="bench-1b-tp8", layers=16, kv_heads=1, head_dim=64, page_tokens=16),
    "4k": Layout(model="bench-tiny", layers=32, kv_heads=1, head_dim=1, dtype="uint8", page_tokens=64),
}
assert [layout.page_bytes >> 10 for layout in LAYOUTS.values()] == [2048, 256, 64, 4]

VOCABULARY = 128_256
_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, so that consecutive offsets differ in all bits
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class BenchWork:
    """Chains of pages that follow from a seed, so that one process can check what another writes.

    Attributes:
        geometry: one of ``LAYOUTS``.
        seed: the seed of the token ids.
        chains, pages: the number of chains, and of pages per chain.
    """

    geometry: str
    seed: int
    chains: int
    pages: int = 32

    @property
    def layout(self) -> Layout:
        """The layout of the pages."""
        return LAYOUTS[self.geometry]

    @property
    def chain_bytes(self) -> int:
        """The size in bytes of all pages of one chain."""
        return self.pages * self.layout.page_bytes

    @property
    def total_bytes(self) -> int:
        """The size in bytes of all pages."""
        return self.chains * self.chain_bytes

    def tokens(self, chain: int) -> npt.NDArray[np.uint32]:
        """Return the token ids of one chain."""
        return tokens_of(self.seed, chain, self.pages * self.layout.page_tokens)

    def keys(self, cache: PrefixCache, chain: int) -> Keys:
        """Return new ``Keys`` of one chain that no call has used."""
        return cache.keys(self.tokens(chain))

    def to_json(self) -> dict[str, Any]:
        """Return the arguments of an equal object in another process."""
        return asdict(self)


def tokens_of(seed: int, chain: int, count: int) -> npt.NDArray[np.uint32]:
    """Return ``count`` token ids that follow from ``seed`` and ``chain``."""
    return np.random.default_rng((seed, chain)).integers(0, VOCABULARY, count, dtype=np.uint32)


class Content:
    """Writes and checks page bytes at memory speed: a pattern of offsets, each word xor-ed with a word of the key."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes

    @cached_property
    def _pattern(self) -> npt.NDArray[np.uint64]:
        return np.arange(1, self.page_bytes // 8 + 1, dtype=np.uint64) * _STEP

    def fill(self, rows: Rows, hashes: list[bytes]) -> None:
        """Fill ``rows`` ``[pages, page_bytes]`` with the content of the pages with these keys."""
        for row, key in zip(rows.view(np.uint64), hashes, strict=True):
            np.bitwise_xor(self._pattern, _key_word(key), out=row)

    def check(self, rows: Rows, hashes: list[bytes], what: str) -> None:
        """Raise BenchFailed if a byte of ``rows`` does not follow from its page's key and its offset."""
        for i, (row, key) in enumerate(zip(rows.view(np.uint64), hashes, strict=True)):
            if not np.array_equal(row ^ _key_word(key), self._pattern):
                raise BenchFailed(f"{what}: wrong bytes in page {i} of its batch")


def _key_word(key: bytes) -> np.uint64:
    low, high = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")
    return np.uint64((low ^ (high * 0xD6E8FEB86659FD93)) & _MASK)
