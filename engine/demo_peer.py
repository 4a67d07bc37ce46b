"""The demo's two other processes: a writer that puts KV-shaped pages, a reader that gets and checks them.

``python -m engine.demo_peer writer|reader NODE TRACE MODEL``: one request number per line in, one JSON object out. A
later issue replaces them by real prefill and decode engines; the store calls stay as they are here.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

import kvstore
from engine.simulator.trace import Request, read_trace

# Real geometries: layers, KV heads, head size of the models' published configurations.
MODELS = {
    "qwen2.5-0.5b": {"model": "Qwen/Qwen2.5-0.5B", "layers": 24, "kv_heads": 2, "head_dim": 64},
    "llama-3.2-1b": {"model": "meta-llama/Llama-3.2-1B", "layers": 16, "kv_heads": 8, "head_dim": 64},
    "llama-3.1-8b": {"model": "meta-llama/Llama-3.1-8B", "layers": 32, "kv_heads": 8, "head_dim": 128},
}
PATTERN_BYTES = 4096


def layout_of(model: str) -> kvstore.Layout:
    """The layout of one of ``MODELS``, in bfloat16 pages of 64 tokens."""
    fields: dict[str, Any] = MODELS[model]
    return kvstore.Layout(dtype="bfloat16", page_tokens=64, **fields)


def fill(pages: npt.NDArray[np.uint8], keys: kvstore.Keys) -> None:
    """Fill pages ``[n, page_bytes]`` with bytes that only the page's key and the offset decide."""
    for page, key in zip(pages, keys, strict=True):
        page.reshape(-1, PATTERN_BYTES)[:] = pattern(key)
        page.view(np.uint64)[:: PATTERN_BYTES // 8] = np.arange(len(page) // PATTERN_BYTES, dtype=np.uint64)


def sound(pages: npt.NDArray[np.uint8], keys: kvstore.Keys) -> bool:
    """Whether every byte is what ``fill`` wrote."""
    expected = np.empty((1, pages.shape[1]), np.uint8)
    for i in range(len(pages)):
        fill(expected, keys[i : i + 1])
        if not np.array_equal(pages[i], expected[0]):
            return False
    return True


def pattern(key: bytes) -> npt.NDArray[np.uint8]:
    """4 KiB that only ``key`` decides."""
    words = np.frombuffer(key, np.uint64)
    odd = np.arange(1, PATTERN_BYTES // 4, 2, dtype=np.uint64)
    return ((words[0] * odd) ^ words[1]).view(np.uint8)


class Writer:
    """Stands in for a prefill engine: loads what is stored of a prompt, makes up the rest, puts it."""

    def __init__(self, cache: kvstore.PrefixCache) -> None:
        self._cache = cache
        self._buffer = np.zeros((0, cache.page_bytes), np.uint8)

    def answer(self, request: Request) -> dict[str, Any]:
        """Load and put one prompt's pages."""
        tokens = request.tokens()
        keys = self._cache.keys(tokens)
        pages = self._buffer = touched(self._buffer, len(keys))
        started = time.perf_counter()
        match = self._cache.get(tokens, out=pages)
        load_s = time.perf_counter() - started
        right = sound(pages[: match.pages], keys[: match.pages])
        fill(pages[match.pages : len(keys)], keys[match.pages :])
        started = time.perf_counter()
        # All pages: those that are in DRAM are skipped, those that were only on NVMe are in DRAM from here on.
        stored = self._cache.put(keys, pages[: len(keys)])
        return {
            "tokens": len(tokens),
            "pages": len(keys),
            **tiers_of(match),
            "load_seconds": load_s,
            "stored_pages": stored,
            "put_seconds": time.perf_counter() - started,
            "right": right,
        }


class Reader:
    """Stands in for a decode engine: gets the prompt's pages into its own memory and checks every byte."""

    def __init__(self, cache: kvstore.PrefixCache) -> None:
        self._cache = cache
        self._buffer = np.zeros((0, cache.page_bytes), np.uint8)

    def answer(self, request: Request) -> dict[str, Any]:
        """Get one prompt's pages."""
        keys = self._cache.keys(request.tokens())
        self._buffer = touched(self._buffer, len(keys))
        started = time.perf_counter()
        match = self._cache.get(keys, out=self._buffer)
        return {
            "pages": match.pages,
            **tiers_of(match),
            "reason": match.reason,
            "seconds": time.perf_counter() - started,
            "right": sound(self._buffer[: match.pages], keys[: match.pages]),
        }


def tiers_of(match: kvstore.Match) -> dict[str, int]:
    """Pages of a match by the tier they came from."""
    return {f"{tier.name.lower()}_pages": match.tiers.get(tier, 0) for tier in (kvstore.Tier.DRAM, kvstore.Tier.NVME)}


def touched(buffer: npt.NDArray[np.uint8], pages: int) -> npt.NDArray[np.uint8]:
    """``buffer``, or a larger one: mapped already, so that this is not timed."""
    return buffer if len(buffer) >= pages else np.ones((pages, buffer.shape[1]), np.uint8)


def main(role: str, node: str, trace: str, model: str, *, lines: TextIO, out: TextIO) -> None:
    """Answer request numbers until the input ends."""
    requests = list(read_trace(trace))
    with kvstore.connect(node) as store:
        cache = store.cache(layout_of(model), salt="demo")
        peer = Writer(cache) if role == "writer" else Reader(cache)
        for line in lines:
            out.write(json.dumps(peer.answer(requests[int(line)])) + "\n")
            out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:], lines=sys.stdin, out=sys.stdout)
