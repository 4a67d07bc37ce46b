"""Row about targets that start where numpy's own arrays start: 16 bytes after a memory page, as a frame does not.

Some processors copy at a fraction of their speed then (``kvstore.tier.host_memory``). Ours is a read into such an
array, the limit the same read into one that starts at a page, in three shapes of work: one page; 32 pages that lie one
by one all over the node's memory; one layer of 32 pages, whose rows are apart in every frame.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from kvstore.bench.content import BenchWork, Content, Rows
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, result, speeds
from kvstore.bench.reading import Reading
from kvstore.bench.stage import MIB, Stage
from kvstore.client.connect import connect
from kvstore.client.prefix_cache import PrefixCache
from kvstore.model.prefix import Keys
from kvstore.tier.host_memory import PAGE_BYTES, empty

STARTS = {"unaligned": 16, "aligned": 0}  # bytes after a memory page
CHAINS = {"256k": 64, "2m": 8}
CHAINS_QUICK = {"256k": 4, "2m": 1}
STEPS, STEPS_QUICK = 512, 8  # per round


def unaligned(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """``<name>.one``: one page of 256 KiB; ``.scattered``: 32 of them; ``.layer``: 64 KiB of each of 32 pages."""
    stage.clear()
    quick = stage.settings.quick
    works = {
        geometry: BenchWork(geometry, 6, chains) for geometry, chains in (CHAINS_QUICK if quick else CHAINS).items()
    }
    with ExitStack() as scene:
        room_bytes = sum(work.total_bytes for work in works.values()) + 64 * MIB
        daemon = stage.daemon(scene, room_bytes + 2 * stage.settings.extent_bytes)
        store = scene.enter_context(connect(daemon.name))
        for work in works.values():
            _store_by_turns(store.cache(work.layout), work)
        small, large = (Reading(store, work) for work in works.values())
        if small.runs != small.work.pages:
            raise BenchFailed(f"a chain lies in {small.runs} runs of frames, not page by page")
        return [
            _compared(stage, f"{name}.one", bar, small, _one_page(small), small.work.layout.page_bytes),
            _compared(stage, f"{name}.scattered", bar, small, _batch(small), small.work.chain_bytes),
            _compared(
                stage, f"{name}.layer", bar, large, _layer(large), large.work.pages * large.work.layout.layer_bytes
            ),
        ]


def _store_by_turns(cache: PrefixCache, work: BenchWork) -> None:
    """A page of every chain, then the next page of every chain: no two pages of a chain lie together."""
    keys = [work.keys(cache, chain) for chain in range(work.chains)]
    rows = empty((1, work.layout.page_bytes))
    content = Content(work.layout.page_bytes)
    for page in range(work.pages):
        for of_chain in keys:
            one = of_chain[page : page + 1]
            content.fill(rows, one.hashes)
            if cache.put(one, rows) != 1:
                raise BenchFailed(f"page {page} of a chain was not stored")


Verb = Callable[[int, Rows], Rows]  # reads what belongs to a step into an array; the part of it that was filled


def _one_page(reading: Reading) -> Verb:
    keys = [reading.keys(chain) for chain in range(reading.work.chains)]
    get, pages = reading.cache.get, reading.work.pages

    def verb(step: int, out: Rows) -> Rows:
        one: Keys = keys[step // pages % len(keys)][step % pages : step % pages + 1]
        return out[: get(one, out).pages]

    return verb


def _batch(reading: Reading) -> Verb:
    keys = [reading.keys(chain) for chain in range(reading.work.chains)]
    get = reading.cache.get
    return lambda step, out: out[: get(keys[step % len(keys)], out).pages]


def _layer(reading: Reading) -> Verb:
    readers = [reading.cache.reader(reading.keys(chain)) for chain in range(reading.work.chains)]
    layers, layer_bytes = reading.work.layout.layers, reading.work.layout.layer_bytes

    def verb(step: int, out: Rows) -> Rows:
        rows = out.reshape(-1)[: reading.work.pages * layer_bytes].reshape(-1, layer_bytes)
        readers[step % len(readers)].read_layer(step // len(readers) % layers, rows)
        return rows

    return verb


def _compared(stage: Stage, name: str, bar: Bar, reading: Reading, verb: Verb, step_bytes: int) -> Result:
    outs = {variant: _starting_at(start, reading.out.shape) for variant, start in STARTS.items()}
    quick = stage.settings.quick
    steps = np.random.default_rng(7).integers(0, 1 << 16, STEPS_QUICK if quick else STEPS).tolist()
    for step in steps[:32]:
        found = []
        for out in outs.values():
            out[:] = 0
            found.append(verb(step, out))
        if not len(found[0]) or not found[0].any() or not np.array_equal(found[0], found[1]):
            raise BenchFailed(f"{name}: step {step} brought different bytes into the two arrays, or none")
    variants = {variant: lambda step, out=out: len(verb(step, out)) for variant, out in outs.items()}
    whole = len(verb(steps[0], outs["aligned"]))

    def check(variant: str, value: object) -> None:
        if value != whole:
            raise BenchFailed(f"{name}: {variant} brought {value} of {whole} rows")

    seconds = alternate(variants, steps, stage.settings.rounds, lambda step: step, check)
    return result(
        name,
        Kind.SPEED,
        speeds(seconds["unaligned"], step_bytes),
        speeds(seconds["aligned"], step_bytes),
        bar=bar,
        limit_is="the same into an array that starts at a memory page",
        details={
            "starts_bytes": STARTS["unaligned"],
            "step_bytes": step_bytes,
            "page_bytes": reading.work.layout.page_bytes,
        },
    )


def _starting_at(start: int, shape: tuple[int, ...]) -> Rows:
    nbytes = int(np.prod(shape))
    rows: Rows = empty(nbytes + PAGE_BYTES)[start : start + nbytes].reshape(shape)
    rows[:] = 1
    return rows
