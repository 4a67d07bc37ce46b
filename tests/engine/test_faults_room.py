"""An engine, and a pool, with less room than is asked of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import Any

import pytest

from engine.client import EngineClient
from engine.daemon import POOL_S
from engine.model.request import Done, Request, Sampling
from kvstore import Layout
from tests.helpers.engines.cluster import Cluster, Running, made, right
from tests.helpers.engines.processes import prompt
from tests.helpers.processes import frames, wait_until

HOLD_S = 5.0  # longer than three prefills take
FRAMES = 42
REQUESTS_MAX = 32  # three quarters of them for one caller
ENGINES = {
    "small": {
        "arena": str(FRAMES * 12288),  # pages of tiny-llama, 16 tokens each
        "batch_max": "3",
        "requests_max": str(REQUESTS_MAX),
        "hold_s": str(HOLD_S),
    }
}
# The node has room for 4 MiB, and of that "poor" has room for one page, rounded up.
ROOM = {"dram": "4MiB", "quotas": "poor dram=12KiB"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from made(ENGINES, tmp_path_factory.mktemp("room"), **ROOM)


@pytest.fixture
def small(cluster: Cluster) -> Iterator[EngineClient]:
    yield cluster.client("small")
    cluster.idle_all()


def test_prefills_that_nobody_fetches_make_room(cluster: Cluster, small: EngineClient) -> None:
    layout()
    begun_s = []
    for i in range(3):
        begun_s.append(time.monotonic())
        request = Request(id=f"held-{i}", tokens=prompt(13 * 16 - 1, 100 + i), sampling=Sampling(max_tokens=4))
        *_, last = small.prefill(request, layout(), 60.0)
        assert isinstance(last, Done)
    assert small.status()["frames"]["free"] <= FRAMES - 39 and small.status()["prefills_held"] == 3
    waits = Running(small, prompt(16 * 20, 110), max_tokens=8)
    waits.ended()
    assert waits.times_s[0] > begun_s[1] + HOLD_S, "two of them have to go"
    right(cluster, "small", waits)


@cache
def layout() -> Layout:
    from engine.compute.models import load_model

    return load_model("tiny-llama").layout(16)


def test_a_full_pool_changes_no_answer(cluster: Cluster, small: EngineClient) -> None:
    """A tenant beyond its quota, and a node whose pages may none of them leave: nothing is stored, and that is all."""
    over = [Running(small, prompt(300 + i, 120 + i), max_tokens=200, salt="poor") for i in range(3)]
    right(cluster, "small", *over)
    for run in over:
        assert (gap_s := run.gap_s(cluster.heart)) < POOL_S, f"tokens waited {gap_s:.2f} s for a pool that is full"
    with cluster.store() as store:
        pages, leases, seeds = store.cache(layout(), "greedy"), list[Any](), count(1000)

        def taken() -> bool:
            keys = pages.keys(prompt(16 * 4, next(seeds)))
            # What is only published may leave, before it is leased, for the frames that its own put asks for ahead.
            if pages.put(keys, bytes(4 * pages.page_bytes), wait=True):
                leases.append(pages.lease(keys, 60.0).__enter__())
                return False
            has = frames(store)
            return has["sealed"] == sum(len(lease.pages) for lease in leases) == sum(has.values())

        wait_until("every frame is leased", taken)
        full = [Running(small, prompt(310 + i, 130 + i), max_tokens=200) for i in range(3)]
        right(cluster, "small", *full)
        for run in full:
            assert (gap_s := run.gap_s(cluster.heart)) < POOL_S, f"tokens waited {gap_s:.2f} s for a pool that is full"
        again = small.generate(full[0].prompt, max_tokens=8, ignore_eos=True)
        assert list(again.tokens) == full[0].tokens[:8] and not again.usage.cached_tokens, again.usage
        for lease in leases:
            lease.__exit__(None, None, None)
    tokens = prompt(330, 140)

    def stored() -> bool:
        small.generate(tokens, max_tokens=2, ignore_eos=True)
        return bool(small.generate(tokens, max_tokens=2, ignore_eos=True).usage.cached_tokens)

    wait_until("pages are stored again", stored)
