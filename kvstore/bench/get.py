"""Rows that read: get in batches and one page at a time, zero-copy leases, and two readers at once.

All rows read into one warm buffer. The pages were written by another process. The limit of a get is memcpy from the
same frames of the same mapping into the same buffer. It is measured in two ways, and the faster one counts: one
``memmove`` per page, or one copy per run of consecutive frames. The buffer is page-aligned, as frames are, because
every kind of copy is fastest then.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from kvstore.bench.content import BenchWork, Content, Rows
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, quickest, result, speeds
from kvstore.bench.processes import PeerProcess
from kvstore.bench.stage import Stage
from kvstore.client.match import Lease
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.device.host_memory import empty
from kvstore.model.prefix import Keys

MEMCPYS = ("memmove_per_page", "copy_per_run")
VERBS = ("get", *MEMCPYS)


class LocatedChain:
    """The tokens of a chain, and the addresses of its pages in this process's mapping of the node's memory."""

    __slots__ = ("tokens", "moves", "copies", "frames")

    def __init__(self, tokens: Any, moves: list[tuple[int, int]], copies: list[tuple[Rows, Rows]]) -> None:
        self.tokens = tokens
        self.moves = moves  # (target, source) addresses, one per page
        self.copies = copies  # (target, source) arrays, one per run of consecutive frames
        self.frames = [source for _, source in moves]


class Reading:
    """Reads all chains of a ``BenchWork``. Valid until the store is closed, and while no other process evicts pages."""

    def __init__(self, store: Store, work: BenchWork) -> None:
        self.work = work
        self.cache: PrefixCache = store.cache(work.layout)
        self.content = Content(work.layout.page_bytes)
        self.out: Rows = empty((work.pages, work.layout.page_bytes))
        self.out[:] = 0
        self.batches = [self._locate(chain) for chain in range(work.chains)]

    @property
    def runs(self) -> float:
        """Return the average number of runs of consecutive frames per chain: 1 if every chain is contiguous."""
        return sum(len(batch.copies) for batch in self.batches) / len(self.batches)

    def keys(self, chain: int) -> Keys:
        """Return new ``Keys`` of a chain that no call has used."""
        return self.cache.keys(self.batches[chain].tokens)

    def variants(self) -> dict[str, Callable[[tuple[LocatedChain, Keys]], object]]:
        """Return the variants by name. Each one reads one chain into ``out``."""
        get, out, page_bytes = self.cache.get, self.out, self.work.layout.page_bytes

        def ours(arguments: tuple[LocatedChain, Keys]) -> int:
            return get(arguments[1], out).pages

        def memmove_per_page(arguments: tuple[LocatedChain, Keys]) -> None:
            memmove = ctypes.memmove
            for target, source in arguments[0].moves:
                memmove(target, source, page_bytes)

        def copy_per_run(arguments: tuple[LocatedChain, Keys]) -> None:
            for target, source in arguments[0].copies:
                target[:] = source

        return {"get": ours, "memmove_per_page": memmove_per_page, "copy_per_run": copy_per_run}

    def prepare(self, chain: int) -> tuple[LocatedChain, Keys]:
        """Return the arguments of the variants."""
        return self.batches[chain], self.keys(chain)

    def check(self, variant: str, value: object) -> None:
        """Raise BenchFailed if a get did not find the whole chain."""
        if variant == "get" and value != self.work.pages:
            raise BenchFailed(f"get found {value} of {self.work.pages} pages")

    def verify(self) -> None:
        """Read every chain by every variant, and check every byte. Raises BenchFailed."""
        for name, variant in self.variants().items():
            for chain in range(self.work.chains):
                self.out[:] = 0
                arguments = self.prepare(chain)
                self.check(name, variant(arguments))
                self.content.check(self.out, arguments[1].hashes, f"{name} of chain {chain}")

    def _locate(self, chain: int) -> LocatedChain:
        """Return the addresses of a chain, from a lease. They stay valid after the lease, because no other process
        writes to this node."""
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


STEPS = 192  # steps per round, at least: 64 per variant
STEPS_ONE_PAGE = 6000
PHASE_S = 0.5  # two_readers: duration of one variant, in both processes at once
LEAD_NS = 30_000_000  # from the request to the start of both readers


def get(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Measure gets of 32 pages into a warm buffer. The line ``.recycled`` reads from a node after many evictions."""
    lines = [_get(stage, name, bar, geometry, recycled=False)]
    lines.append(_get(stage, f"{name}.recycled", None, geometry, recycled=True))
    return lines


def _get(stage: Stage, name: str, bar: Bar | None, geometry: str, *, recycled: bool) -> Result:
    source = stage.stored_chains(geometry, recycled=recycled)
    reading = Reading(source.store, source.work)
    reading.verify()
    steps = walk(source.work.chains, stage.settings.quick)
    seconds = alternate(reading.variants(), steps, stage.settings.rounds, reading.prepare, reading.check)
    best = quickest(seconds, MEMCPYS)
    chain_bytes = source.work.chain_bytes
    details = {
        "batch_pages": source.work.pages,
        "page_bytes": source.work.layout.page_bytes,
        "walk_bytes": source.work.total_bytes,
        "runs_per_batch": reading.runs,
        "batch_seconds": {variant: medians(times) for variant, times in seconds.items()},
    }
    return result(
        name,
        Kind.SPEED,
        speeds(seconds["get"], chain_bytes),
        speeds(seconds[best], chain_bytes),
        bar=bar,
        limit_is=f"memcpy, {best}",
        details=details,
    )


def walk(chains: int, quick: bool) -> list[int]:
    """Return the numbers of all chains in random order, repeated until there are enough for a round.

    No prefetcher can predict this order.
    """
    random = np.random.default_rng(3)
    passes = max(1, -(-(6 if quick else STEPS) // chains))
    return [int(chain) for _ in range(passes) for chain in random.permutation(chains)]


def get_one(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Measure gets of one page, p50. Every page of the pool is one step."""
    source = stage.stored_chains(geometry)
    reading = Reading(source.store, source.work)
    per_chain, page_bytes = source.work.pages, source.work.layout.page_bytes
    keys = [reading.keys(chain) for chain in range(source.work.chains)]

    def prepare(step: int) -> tuple[LocatedChain, Keys]:
        chain, page = divmod(step, per_chain)
        batch = reading.batches[chain]
        move = (reading.out.ctypes.data, batch.frames[page])
        one = LocatedChain(None, [move], [(reading.out[:1], _frame(batch, page, page_bytes))])
        return one, keys[chain][page : page + 1]

    def check(variant: str, value: object) -> None:
        if variant == "get" and value != 1:
            raise BenchFailed(f"get found {value} of 1 page")

    pages = source.work.chains * per_chain
    count = min(pages, 300) if stage.settings.quick else max(pages, STEPS_ONE_PAGE)
    random = np.random.default_rng(4)
    steps = [int(page) for _ in range(-(-count // pages)) for page in random.permutation(pages)][:count]
    seconds = alternate(reading.variants(), steps, stage.settings.rounds, prepare, check)
    for step in steps[:64]:
        arguments = prepare(step)
        reading.out[0] = 0
        check("get", reading.variants()["get"](arguments))
        reading.content.check(reading.out[:1], arguments[1].hashes, name)
    best = quickest(seconds, MEMCPYS)
    return [
        result(
            name,
            Kind.TIME,
            medians(seconds["get"]),
            medians(seconds[best]),
            bar=bar,
            limit_is=f"memcpy, {best}",
            details={"page_bytes": page_bytes, "steps_per_round": len(steps)},
        )
    ]


def _frame(batch: LocatedChain, page: int, page_bytes: int) -> Any:
    """Return one frame ``[1, page_bytes]`` as a view of its run."""
    for _, run in batch.copies:
        if page < len(run):
            return run[page : page + 1]
        page -= len(run)
    raise AssertionError("every page is in a run")


def lease(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Measure a zero-copy lease of 32 pages, with every page touched, compared with copying them."""
    source = stage.stored_chains(geometry)
    reading = Reading(source.store, source.work)
    cache, pages = reading.cache, source.work.pages

    def lease_and_touch(arguments: tuple[LocatedChain, Keys]) -> int:
        touched = 0
        with cache.lease(arguments[1]) as lease:
            for page in lease.pages:
                touched += int(page[0]) >= 0
        return touched

    def check(variant: str, value: object) -> None:
        if variant == "lease" and value != pages:
            raise BenchFailed(f"the lease has {value} of {pages} pages")

    for chain in range(source.work.chains):
        _check_views(reading, cache.lease(reading.keys(chain)), chain)
    copies = reading.variants()
    variants = {"lease": lease_and_touch, **{limit: copies[limit] for limit in MEMCPYS}}
    steps = walk(source.work.chains, stage.settings.quick)
    seconds = alternate(variants, steps, stage.settings.rounds, reading.prepare, check)
    best = quickest(seconds, MEMCPYS)
    return [
        result(
            name,
            Kind.GAIN,
            medians(seconds["lease"]),
            medians(seconds[best]),
            bar=bar,
            limit_is=f"memcpy, {best}",
            details={"pages": pages, "page_bytes": source.work.layout.page_bytes},
        )
    ]


def _check_views(reading: Reading, lease: Lease, chain: int) -> None:
    with lease:
        for i, page in enumerate(lease.pages):
            reading.out[i] = page
    reading.content.check(reading.out, reading.keys(chain).hashes, f"lease of chain {chain}")


def two_readers(stage: Stage, name: str, bar: Bar, geometry: str) -> list[Result]:
    """Measure the sum of the speeds of two processes that get at the same time, compared with two that copy."""
    source = stage.stored_chains(geometry)
    settings = stage.settings
    rounds: dict[str, list[float]] = {variant: [] for variant in VERBS}
    with ExitStack() as scene:
        peers = [scene.enter_context(PeerProcess(source.daemon.name, settings.shm_dir)) for _ in range(2)]
        for peer in peers:
            peer.send("locate", work=source.work.to_json())
        for peer in peers:
            peer.answer()
        read = partial(read_at_once, peers, source.work.chains, 0.05 if settings.quick else PHASE_S)
        for turn in range(settings.rounds):
            for i in range(len(VERBS)):
                variant = VERBS[(i + turn) % len(VERBS)]
                rounds[variant].append(speed_of(read(variant)))
    best = max(MEMCPYS, key=lambda variant: float(np.median(rounds[variant])))
    return [
        result(
            name,
            Kind.SPEED,
            rounds["get"],
            rounds[best],
            bar=bar,
            limit_is=f"memcpy in two processes, {best}",
            details={"page_bytes": source.work.layout.page_bytes, "batch_pages": source.work.pages},
        )
    ]


def read_at_once(peers: list[PeerProcess], chains: int, duration_s: float, variant: str) -> list[dict[str, Any]]:
    """Let both processes read at the same time; return their answers."""
    start_ns = time.monotonic_ns() + LEAD_NS
    for i, peer in enumerate(peers):  # half the pool apart, so that neither warms the caches for the other
        peer.send("read", variant=variant, start_ns=start_ns, duration_s=duration_s, first=i * chains // 2)
    return [peer.answer() for peer in peers]


def speed_of(answers: list[dict[str, Any]]) -> float:
    """Return the sum of the readers' speeds, in bytes/s."""
    return float(sum(answer["bytes"] / answer["seconds"] for answer in answers))
