"""Rows about keys: the computation of keys, and the lookup of the longest stored prefix."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

import kvstore
from kvstore.addresses import connect
from kvstore.bench.content import LAYOUTS, BenchWork, tokens_of
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, result
from kvstore.bench.stage import Stage, settle
from kvstore.client.prefix_cache import PrefixCache
from kvstore.model.prefix import Keys
from kvstore.model.replica import Tier
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.index import Index

CHAIN_PAGES = 512
CHAINS = 64
STEPS_LOOKUP = 2000
STEPS_KEYS = 60
PROMPT_TOKENS = 128 * 1024

# The number of pages that each variant finds.
EXPECTED = {"full": CHAIN_PAGES, "half": CHAIN_PAGES // 2, "miss": 0, "lmdb": CHAIN_PAGES}

Prompt = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64], list[bytes]]


class Lookups:
    """Lookups of chains that are fully stored, half stored or not stored, and gets from the index itself."""

    def __init__(self, cache: PrefixCache, index: Index, work: BenchWork) -> None:
        self._cache = cache
        self._index = index
        full = [work.tokens(chain) for chain in range(work.chains)]
        middle = len(full[0]) // 2
        other_tokens = [tokens_of(7, chain, middle) for chain in range(work.chains)]
        pairs = list(zip(full, other_tokens, strict=True))
        half = [np.concatenate([stored[:middle], other]) for stored, other in pairs]
        miss = [np.concatenate([other, stored[middle:]]) for stored, other in pairs]
        self._tokens = {"full": full, "half": half, "miss": miss, "lmdb": full}

    def prepare(self, chain: int) -> dict[str, Keys]:
        """Return new keys for every variant."""
        return {variant: self._cache.keys(tokens[chain]) for variant, tokens in self._tokens.items()}

    def full(self, keys: dict[str, Keys]) -> int:
        """Look up a chain that is fully stored."""
        return self._cache.lookup(keys["full"]).pages

    def half(self, keys: dict[str, Keys]) -> int:
        """Look up a chain whose first half is stored."""
        return self._cache.lookup(keys["half"]).pages

    def miss(self, keys: dict[str, Keys]) -> int:
        """Look up a chain of which no page is stored."""
        return self._cache.lookup(keys["miss"]).pages

    def lmdb(self, keys: dict[str, Keys]) -> int:
        """Get every key from the index in one read transaction: the limit."""
        addresses = self._index.find_many(Tier.DRAM, keys["lmdb"].hashes)
        return len(addresses) - addresses.count(None)

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if a variant did not find the expected number of pages."""
        if value != EXPECTED[variant]:
            raise BenchFailed(f"{variant}: found {value} of {EXPECTED[variant]} pages")


def lookup(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """Measure lookups of 512 pages that are fully stored, half stored or absent, compared with 512 gets from LMDB."""
    stage.clear()
    settings = stage.settings
    work = BenchWork("4k", seed=6, chains=8 if settings.quick else CHAINS, pages=CHAIN_PAGES)
    with ExitStack() as scene:
        daemon = stage.daemon(scene, work.total_bytes + settings.extent_bytes)
        stage.write(daemon, work)
        store = scene.enter_context(connect(daemon.name))
        settle(store)
        lookups = Lookups(store.cache(work.layout), _index(scene, daemon.folder), work)
        variants = {variant: getattr(lookups, variant) for variant in EXPECTED}
        steps = [chain % work.chains for chain in range(40 if settings.quick else STEPS_LOOKUP)]
        seconds = alternate(variants, steps, settings.rounds, lookups.prepare, lookups.check)
    limit = medians(seconds["lmdb"])
    return [
        result(
            line,
            Kind.TIME,
            medians(seconds[variant]),
            limit,
            bar=bar,
            limit_is="512 LMDB gets in one read transaction",
            details={"pages_stored": work.chains * work.pages, "pages_found": EXPECTED[variant]},
        )
        for variant, line in (("full", name), ("half", f"{name}.half"), ("miss", f"{name}.miss"))
    ]


def _index(scene: ExitStack, folder: Path) -> Index:
    """Open the node's index for plain gets in this process. It is closed with ``scene``."""
    node = NodeFolder.at(folder)
    header = Header.open(node)
    if header is None:
        raise BenchFailed(f"{node.name}: its header cannot be read")
    scene.callback(header.close)
    index = Index.open_reader(node, header.epoch)
    if index is None:
        raise BenchFailed(f"{node.name}: its index cannot be read")
    scene.callback(index.close)
    return index


class Prompts:
    """Prompts of 128k tokens. For the limit, they are also split into the tokens of each page, as bytes."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._expected = b""

    def prepare(self, step: int) -> Prompt:
        """Return a prompt as uint32, as int64, and as bytes per page."""
        tokens = tokens_of(8, step, PROMPT_TOKENS)
        data, width = tokens.tobytes(), 4 * self._cache.layout.page_tokens
        self._expected = self._cache.keys(tokens).links[-1]
        return tokens, tokens.astype(np.int64), [data[i : i + width] for i in range(0, len(data), width)]

    def keys(self, prompt: Prompt) -> bytes:
        """Compute the keys from uint32 tokens."""
        return self._cache.keys(prompt[0]).links[-1]

    def int64(self, prompt: Prompt) -> bytes:
        """Compute the keys from int64 tokens, the type of most tokenizers' arrays."""
        return self._cache.keys(prompt[1]).links[-1]

    def hashing(self, prompt: Prompt) -> bytes:
        """Compute only the chained hash: the limit."""
        key, digest = self._cache.root, xxhash.xxh3_128_digest
        for part in prompt[2]:
            key = digest(key + part)
        return key

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if a variant computes another last key."""
        if value != self._expected:
            raise BenchFailed(f"{variant}: the last key differs")


def keys(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """Measure the keys of a prompt of 128k tokens in pages of 64, from an ndarray, compared with only hashing its
    pages."""
    settings = stage.settings
    with kvstore.open(dram="16MiB", shm_dir=settings.shm_dir) as store:
        prompts = Prompts(store.cache(LAYOUTS["4k"]))
        variants = {variant: getattr(prompts, variant) for variant in ("keys", "int64", "hashing")}
        steps = list(range(9 if settings.quick else STEPS_KEYS))
        seconds = alternate(variants, steps, settings.rounds, prompts.prepare, prompts.check)
    limit = medians(seconds["hashing"])
    return [
        result(
            line,
            Kind.TIME,
            medians(seconds[variant]),
            limit,
            bar=bar if variant == "keys" else None,
            limit_is="chained xxh3_128 over pages already split into bytes",
            details={"tokens": PROMPT_TOKENS, "dtype": dtype},
        )
        for variant, line, dtype in (("keys", name, "uint32"), ("int64", f"{name}.int64", "int64"))
    ]
