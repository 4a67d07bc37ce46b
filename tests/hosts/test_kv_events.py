"""vLLM's own decoder reads what a node publishes. See ``make hosts``."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.helpers.content import SMALL, chain, contents
from tests.helpers.hosts import VLLM, VLLM_ENV
from tests.helpers.kv_follower import Follower
from tests.helpers.processes import Machine, free_port

pytestmark = [pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts"), pytest.mark.timeout(300)]

READ = """
import json, sys
from msgspec.msgpack import Decoder
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
decoder = Decoder(KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(bytes.fromhex(line))
    for event in batch.events:
        hashes = [each.hex() for each in event.block_hashes] if isinstance(event, BlockStored | BlockRemoved) else []
        about = {"type": type(event).__name__, "hashes": hashes, "rank": batch.data_parallel_rank}
        if isinstance(event, BlockStored):
            about |= {"parent": event.parent_block_hash, "tokens": event.token_ids, "size": event.block_size}
        if hashes:
            about["medium"] = event.medium
        print(json.dumps(about))
"""


def read(payloads: list[bytes]) -> list[dict[str, Any]]:
    """What vLLM makes of them."""
    lines = "".join(payload.hex() + "\n" for payload in payloads)
    environment = os.environ | VLLM_ENV
    run = subprocess.run(
        [str(VLLM), "-c", READ], input=lines, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def test_vllm_reads_what_a_node_publishes(machine: Machine) -> None:
    addresses = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("kv_events", "kv_events_replay")}
    machine.serve("kv", dram="16MiB", **addresses)
    store, keys = machine.connect("kv"), chain(1, 5)
    follower = Follower(*addresses.values())
    try:
        assert store.cache(SMALL).put(keys, contents(keys)) == 5
        follower.follow_until(lambda: len(follower.held.get("CPU", ())) == 5)
        store.evict(5)
        follower.follow_until(lambda: not follower.held["CPU"])
        found = read([payload for _, payload in follower.ask(0)])
    finally:
        follower.close()
    names = [each.hex() for each in store.in_pool(keys).hashes]
    cleared, *rest = found
    stored = [each for each in rest if each["type"] == "BlockStored"]
    removed = [each for each in rest if each["type"] == "BlockRemoved"]
    assert (cleared["type"], cleared["rank"]) == ("AllBlocksCleared", 0) and len(rest) == len(stored) + len(removed)
    assert [name for each in stored for name in each["hashes"]] == names
    assert sorted(name for each in removed for name in each["hashes"]) == sorted(names)
    assert {each["medium"] for each in rest} == {"CPU"} and stored[0]["parent"] is None
    assert [token for each in stored for token in each["tokens"]] == keys.tokens.tolist()
    assert {each["size"] for each in stored} == {SMALL.page_tokens}
