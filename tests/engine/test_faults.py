"""Prefill engines and nodes that are killed, stopped and started again while a decode engine answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.errors import DeadlineExceeded
from tests.helpers.engines.cluster import Cluster, Running, holds_of, made, right, wait_no_more
from tests.helpers.engines.processes import prompt
from tests.helpers.processes import wait_until

# Chunks of two pages and a slow link, so that a fault comes into the middle of a prefill, and of a transfer.
ENGINES = {
    "decode": {
        "role": "decode",
        "prefill": "one,two",
        "local_prefill_tokens": "64",
        "link": "4MB/s",
        "keep_pages": "0",  # what the others left in the pool is looked for from here
    },
    "one": {"role": "prefill", "chunk_tokens": "32", "hold_s": "5"},
    "two": {"role": "prefill", "chunk_tokens": "32", "hold_s": "5", "node": "{cluster.remote_node}"},
}
LONG_TOKENS = 1700  # of an answer that goes on while the node dies, is away for 3 s, and comes back
NODE_STALL_S = 2.0  # of the tokens of a running answer when the node dies or stands still


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    yield from made(ENGINES, tmp_path_factory.mktemp("faults"))


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    shared.ready(*ENGINES)
    wait_until("no engine is avoided", lambda: handed_off(shared), 30.0)
    yield shared
    for name in ENGINES:
        shared[name].resume()
    shared.ready(*ENGINES)
    shared.idle_all()


def handed_off(cluster: Cluster) -> bool:
    """Whether the decode engine has both others compute prompts: those that failed lately are not asked."""
    decode, fresh = cluster.client("decode"), time.monotonic_ns() % (1 << 32)
    engines = [cluster.address("one"), cluster.address("two")]
    by = [
        decode.generate(prompt(200, fresh + i), max_tokens=2, prefill=[engine], ignore_eos=True).usage.prefill_engine
        for i, engine in enumerate(engines)
    ]
    return by == engines


# --- prefill engines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "fetched", "midway"),
    [
        ("one", {"handoff": "lazy", "source": "arena"}, {"handoff": "eager", "source": "dram"}),
        ("two", {"handoff": "lazy", "source": "dram"}, {"handoff": "eager", "source": "arena"}),
    ],
)
def test_a_killed_prefill_engine_costs_time_only(
    cluster: Cluster, victim: str, fetched: dict[str, Any], midway: dict[str, Any]
) -> None:
    """Killed with one prompt computed but not fetched, one in the middle, and one that waits."""
    decode = cluster.client("decode")
    other = next(cluster.address(name) for name in ("one", "two") if name != victim)
    dead = cluster.address(victim)
    before = holds_of(cluster["decode"])
    seed = 10 if victim == "one" else 20
    computed = Running(decode, prompt(4007, seed), max_tokens=24, prefill=[dead], **fetched)
    cluster.computed(victim, computed)
    half = Running(decode, prompt(7003, seed + 1), max_tokens=24, prefill=[dead, other], **midway)
    cluster.state(victim, lambda status: status["requests"]["computing"])
    waits = Running(decode, prompt(1500, seed + 2), max_tokens=24, prefill=[dead], handoff="lazy")
    cluster.state("decode", lambda status: sum(status["requests"].values()) == 3)
    cluster.kill(victim)
    right(cluster, "decode", computed, half, waits)
    assert half.usage is not None and half.usage.prefill_engine == other
    assert waits.usage is not None and waits.usage.prefill_engine == "" and waits.usage.computed_tokens > 0
    for run in (computed, half, waits):  # what it left in the pool is whole pages, and right
        again = decode.generate(run.prompt, max_tokens=24, prefill=[], ignore_eos=True)
        assert list(again.tokens) == run.tokens and again.usage.cached_tokens, again.usage
    cluster.idle("decode")
    wait_no_more(cluster["decode"], before)


def test_a_prefill_engine_that_stands_still_is_given_up(cluster: Cluster) -> None:
    decode, one = cluster.client("decode"), cluster.address("one")
    cluster.ready("one")
    long = prompt(7001, 30)
    cluster.reference("decode", long, 24)
    first = Running(decode, long, max_tokens=24, prefill=[one])
    cluster.state("one", lambda status: status["requests"]["computing"])
    lazy = Running(decode, prompt(1000, 31), max_tokens=24, prefill=[one], handoff="lazy", source="dram")
    short = Running(decode, prompt(1001, 32), max_tokens=24, prefill=[one], deadline_s=3.0)
    gone = Running(decode, prompt(1002, 33), max_tokens=24, prefill=[one], id="gone")
    cluster.state("decode", lambda status: sum(status["requests"].values()) == 4)
    try:
        cluster["one"].stop()
        quick = decode.generate(prompt(40, 34), max_tokens=24, ignore_eos=True)
        assert len(quick.tokens) == 24
        assert decode.cancel("gone") and gone.ended().reason == "cancelled"
        assert isinstance(short.ended().error, DeadlineExceeded), short.error
        assert not first.done, "these waited for the engine to be given up"
        right(cluster, "decode", first, lazy)  # while it stands still: they were computed elsewhere
        assert first.usage is not None and first.usage.prefill_engine == ""
        cluster.idle("decode")  # also those of the request that ran out of time while it was transferred
    finally:
        cluster["one"].resume()
    cluster.idle("one")


# --- the node -------------------------------------------------------------------------------------------------------


def stores(cluster: Cluster, seed: int) -> bool:
    """Whether a new prompt is stored by a prefill engine, and found again."""
    decode, tokens = cluster.client("decode"), prompt(330, seed + time.monotonic_ns() % (1 << 32))
    first = decode.generate(tokens, max_tokens=4, ignore_eos=True)
    again = decode.generate(tokens, max_tokens=4, ignore_eos=True)
    assert again.tokens == first.tokens
    return bool(again.usage.cached_tokens.get("dram", 0) >= 320)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_node_that_is_away_is_missed_by_nobody(cluster: Cluster, how: str) -> None:
    decode = cluster.client("decode")
    one, two = cluster.address("one"), cluster.address("two")
    seed = 41 if how == "killed" else 51
    long = prompt(100, 40)  # both times, since what it should give takes as long as the answer
    cluster.reference("decode", long, LONG_TOKENS)
    answer = Running(decode, long, max_tokens=LONG_TOKENS).drawn(300)
    handed = [
        Running(decode, prompt(2001, seed + 1), max_tokens=24, prefill=[one], source="dram"),
        Running(decode, prompt(2002, seed + 2), max_tokens=24, prefill=[two], source="arena"),
    ]
    cluster.state("one", lambda status: status["requests"]["computing"])
    if how == "killed":
        cluster.node.kill()
    else:
        cluster.node.stop()
    away_s = time.monotonic()
    handed += [
        Running(decode, prompt(1003, seed + 3), max_tokens=24, prefill=[one], source="dram", handoff="lazy"),
        Running(decode, prompt(1004, seed + 4), max_tokens=24, prefill=[two], source="dram"),
        Running(decode, prompt(505, seed + 5), max_tokens=24, prefill=[]),
    ]
    right(cluster, "decode", *handed)
    time.sleep(max(0.0, 3.0 - (time.monotonic() - away_s)))
    if how == "killed":
        cluster.restart_node()
    else:
        cluster.node.resume()
    wait_until("the pool is used again", lambda: stores(cluster, seed + 6))
    right(cluster, "decode", answer)
    assert (gap_s := answer.gap_s(cluster.heart)) < NODE_STALL_S, f"tokens stood still for {gap_s:.2f} s"
