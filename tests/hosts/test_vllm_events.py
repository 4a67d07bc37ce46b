"""What vLLM's KV events tell of the pages that its connector has in the store. See ``make hosts``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.helpers.hosts import VLLM
from tests.helpers.processes import Machine
from tests.helpers.vllm_engines import BLOCK, PAGE, VllmEngine, engine, prompts, ready, transfer

pytestmark = [
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts"),
    pytest.mark.timeout(600),
    pytest.mark.parametrize("plain", ["llama"], indirect=True),
]


class Router:
    """Follows one engine as a router does. ``blocks``: of each medium those that it has, by their hashes."""

    def __init__(self, context: zmq.Context[Any], path: Path) -> None:
        self.endpoint = f"ipc://{path}"  # vLLM binds to it
        self._sub = context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(self.endpoint)
        self.blocks: dict[str, dict[bytes, tuple[Any, ...]]] = {"GPU": {}, "CPU": {}}
        self.ever: dict[bytes, tuple[Any, ...]] = {}  # what vLLM told of blocks of its own

    def follow(self) -> None:
        """Take what is there, until nothing comes for a second."""
        while self._sub.poll(1000):
            _, _, payload = self._sub.recv_multipart()
            for event in msgpack.unpackb(payload)[1]:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks["GPU"].clear()
            return
        there = self.blocks[event["medium"]]
        if event["type"] == "BlockRemoved":
            for one in event["block_hashes"]:
                del there[one]
            return
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        hashes, extra = event["block_hashes"], event.get("extra_keys") or [None] * len(event["block_hashes"])
        assert len(tokens) == size * len(hashes) and len(extra) == len(hashes) and size == BLOCK
        for number, one in enumerate(hashes):
            about = parent, tuple(tokens[number * size : (number + 1) * size]), extra[number], event.get("group_idx", 0)
            assert event["medium"] == "GPU" or one not in there, "it was told already"
            there[one], parent = about, one
            if event["medium"] == "GPU":
                self.ever[one] = about
            else:
                assert event["ownership"] == "kvstore"


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


def test_a_router_that_follows_vllm_knows_what_the_store_has(
    plain: dict[str, Any], machine: Machine, context: zmq.Context[Any], tmp_path: Path
) -> None:
    machine.serve("pool", dram="64MiB")
    routers = [Router(context, tmp_path / name) for name in ("one", "other")]

    def start(router: Router) -> VllmEngine:
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
        return engine(machine, plain["model"], transfer("pool"), kv_events_config=events)

    one, other = (start(router) for router in routers)
    ready(one, other)
    asked, expected = prompts(), plain["tokens"]
    whole = {tuple(each[:stop]) for each in asked for stop in range(BLOCK, len(each) // PAGE * PAGE + 1, BLOCK)}
    saved: list[dict[bytes, Any]] = []
    for each, router in ((one, routers[0]), (other, routers[1])):  # one saves them, the other one finds them
        assert each.answer(asked)[0] == expected
        router.follow()
        store = router.blocks["CPU"]
        assert whole <= {_tokens(store, block) for block in store}
        assert all(router.ever[block] == about for block, about in store.items() if block in router.ever)
        assert len(store.keys() & router.ever.keys()) >= len(whole) - len(whole) // 4, "both name them alike"
        saved.append(store)
    assert saved[1].items() <= saved[0].items()
    with machine.connect("pool") as node:
        node.evict(10_000)
    elsewhere = [[token + 1 for token in each[:100]] for each in asked[:2]]
    one.answer(elsewhere)
    routers[0].follow()
    left = {_tokens(routers[0].blocks["CPU"], block) for block in routers[0].blocks["CPU"]}
    assert left == {tuple(elsewhere[0][:stop]) for stop in (BLOCK, PAGE)}, "both begin alike, and all else has gone"


def _tokens(blocks: dict[bytes, tuple[Any, ...]], block: bytes | None) -> tuple[int, ...]:
    """All tokens up to the end of a block."""
    told: list[tuple[int, ...]] = []
    while block is not None:
        block, tokens = blocks[block][:2]
        told.append(tokens)
    return tuple(token for tokens in reversed(told) for token in tokens)
