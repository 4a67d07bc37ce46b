"""A real vLLM with LMCache's connector, LMCache's server, and our plugin as its second level. See ``make hosts``."""

from __future__ import annotations

import json
import mmap
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvstore
from tests.helpers.hosts import LMCACHE, LMCACHE_ENV, LMCACHE_LIB, VLLM
from tests.helpers.processes import Machine, Process, free_port, wait_until
from tests.helpers.vllm_engines import PAGE, SHAPE, Tokens, VllmEngine, by_hand, engine, prompts, ready

pytestmark = [
    pytest.mark.skipif(not (VLLM.exists() and LMCACHE.exists()), reason="vLLM or LMCache is not there: make hosts"),
    pytest.mark.timeout(900),
    pytest.mark.parametrize("plain", ["llama"], indirect=True),
]
START_S = 120.0
CHUNK_BYTES = PAGE * 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4

Start = Callable[[], VllmEngine]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class LmcacheServer:
    """LMCache's server with a first level of memory, and the node "pool" below it. It may ``start`` again."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._process: Process | None = None
        self.port = free_port()

    def start(self) -> None:
        plugin = {
            "type": "plugin",
            "module_path": "kvstore.adapters.lmcache",
            "class_name": "KVStoreL2Adapter",
            "adapter_params": {"node": "pool"},
        }
        told: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "http-host": "127.0.0.1"}
        told |= {"http-port": free_port(), "chunk-size": PAGE, "l2-adapter": json.dumps(plugin)}
        told |= {"l1-size-gb": 1, "l1-init-size-gb": 1, "eviction-policy": "LRU"}
        told |= {"supported-transfer-mode": "engine_driven"}
        words = [word for name, value in told.items() for word in (f"--{name}", str(value))]
        command = [str(LMCACHE), "-m", "lmcache.cli.main", "server", *words]
        one = self._process = self._machine.start(Process, "lmcache", command, None, **LMCACHE_ENV)
        wait_until("LMCache listens", lambda: listens(self.port) or not one.alive, START_S)
        assert one.alive, one.errors.read_text(errors="replace")[-3000:]

    def begin_anew(self) -> None:
        """Nothing is left of its memory."""
        assert self._process is not None
        self._process.kill()
        self.start()


@pytest.fixture
def server(machine: Machine) -> LmcacheServer:
    return LmcacheServer(machine)


@pytest.fixture
def start(plain: dict[str, Any], machine: Machine, server: LmcacheServer) -> Callable[[], VllmEngine]:
    """Starts an engine with LMCache's connector, as LMCache's documents say."""
    told = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port},
    }
    environment = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "WORKER_PACKAGES": str(LMCACHE_LIB)}
    return lambda: engine(machine, plain["model"], json.dumps(told), environment)


def is_stored(asked: list[Tokens]) -> None:
    """Wait until the node has every chunk of these prompts: LMCache puts them in the background."""
    chunks = {tuple(each[:stop]) for each in asked for stop in range(PAGE, len(each) + 1, PAGE)}
    with kvstore.connect("pool") as store:
        nbytes = len(chunks) * CHUNK_BYTES
        wait_until("all is stored", lambda: store.stats()["tiers"]["dram"]["used_bytes"] >= nbytes, 60.0)


def test_answers_are_those_without_a_connector_wherever_the_chunks_are(
    plain: dict[str, Any], server: LmcacheServer, start: Start, machine: Machine, tmp_path: Path
) -> None:
    """Found again by a server whose memory is empty: without a daemon, with a new one, after a reboot, from NVMe."""
    asked, expected = prompts(), plain["tokens"]
    config = tmp_path / "node.toml"
    config.write_text('[node]\nnvme_extent = "4MiB"\non_stop = "save"\n')
    node = machine.serve("pool", dram="64MiB", nvme=f"{tmp_path / 'nvme'}:64MiB", config=str(config))
    server.start()
    ready(one := start())
    first, cached = one.answer(asked)
    assert first == expected and cached != by_hand(asked)
    is_stored(asked)
    one.kill()
    for what in ("with the same daemon", "without a daemon", "with a new daemon", "after a reboot"):
        if what == "without a daemon":
            node.kill()
        elif what == "with a new daemon":
            node = machine.serve("pool")
        elif what == "after a reboot":
            assert node.terminate() == 0
            shutil.rmtree(machine.folder("pool"))
            machine.serve("pool")
        server.begin_anew()
        ready(one := start())
        # One after the other: LMCache looks for prompts that come together, and begin alike, or does not.
        found = [one.answer([each]) for each in asked]
        assert [tokens for answers, _ in found for tokens in answers] == expected, what
        assert [cached for _, counts in found for cached in counts] == by_hand(asked), what
        one.kill()


def test_a_chunk_of_zeros_changes_the_answer(
    plain: dict[str, Any], server: LmcacheServer, start: Start, machine: Machine, tmp_path: Path
) -> None:
    """So equal answers tell that the chunks were right. The node's scrubber, which would find the zeros, is off."""
    config = tmp_path / "node.toml"
    config.write_text("[node]\nscrub_bytes_per_s = 0\n")
    machine.serve("pool", dram="64MiB", config=str(config))
    server.start()
    ready(one := start())
    asked, expected = prompts(), plain["tokens"]
    assert one.answer(asked)[0] == expected
    is_stored(asked)
    one.kill()
    server.begin_anew()
    ready(one := start())
    for path in machine.folder("pool").glob("segment*"):
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            data[:] = bytes(len(data))
    assert one.answer(asked)[0] != expected


def test_a_node_that_dies_costs_a_recompute(
    plain: dict[str, Any], server: LmcacheServer, start: Start, machine: Machine
) -> None:
    """kill -9, and its memory is gone as well, while prompts are being answered."""
    asked, expected = prompts(), plain["tokens"]
    node = machine.serve("pool", dram="64MiB")
    server.start()
    ready(one := start())
    assert one.answer(asked)[0] == expected
    is_stored(asked)
    one.kill()
    server.begin_anew()
    ready(one := start())
    one.ask(asked)
    node.kill()
    shutil.rmtree(machine.folder("pool"))
    assert one.answered()["tokens"] == expected
    assert one.answer(prompts())[0] == expected
