"""What else vLLM asks of a connector: its name, its metrics, a reset, what proxies pass, and that nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.hosts import VLLM
from tests.helpers.processes import Machine, wait_until
from tests.helpers.vllm_engines import PAGE, TOKENS, by_hand, engine, model, prompts, ready, transfer

pytestmark = [
    pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not there: make hosts"),
    pytest.mark.timeout(900),
]


def test_what_was_moved_is_counted_and_a_reset_forgets_it(machine: Machine, tmp_path: Path) -> None:
    """By its name alone, as the entry point of the installed package registers it."""
    told = json.loads(transfer("pool"))
    del told["kv_connector_module_path"]
    machine.serve("pool", dram="64MiB")
    one = engine(machine, model(tmp_path, "llama"), json.dumps(told))
    ready(one)
    asked = prompts()[-1:]
    found, page_bytes = by_hand(asked)[0], 3 * 2 * 2 * 32 * 4 * PAGE
    expected, cached = one.answer(asked)
    assert cached == [0]
    one.ask(asked, params={"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "another"})
    again = one.answered()
    assert (again["tokens"], again["cached"]) == (expected, [found]), "what proxies pass changes nothing"
    saved = (len(asked[0]) + TOKENS - 1) // PAGE
    counted = {name.removeprefix("vllm:kvstore_").removesuffix("_total"): n for name, n in again["metrics"].items()}
    assert counted["found_tokens"] == found and counted["loaded_pages"] == found // PAGE
    assert counted["saved_pages"] == saved and counted["failed_pages"] == counted["failed_saves"] == 0
    assert counted["saved_bytes"] == saved * page_bytes and counted["loaded_bytes"] == found // PAGE * page_bytes
    assert counted["load_seconds"] > 0 and counted["save_seconds"] > 0
    one.ask(asked, reset=True)
    assert one.answered()["reset"] is True
    assert one.answer(asked) == (expected, [0]), "weights may have been changed"
    assert one.answer(asked) == (expected, [found]), "what it has saved since"


def test_engines_that_slept_answer_the_same(machine: Machine, tmp_path: Path) -> None:
    """Paused only, an engine finds what it found before. Sleep of level 1 resets the connector, as it clears caches."""
    path = model(tmp_path, "llama")
    machine.serve("pool", dram="64MiB")
    one, other = (engine(machine, path, transfer("pool")) for _ in range(2))
    ready(one, other)
    asked = prompts()[-1:]
    found = by_hand(asked)
    one.ask(asked, sleep=0)
    expected = one.answered()["tokens"]
    one.ask(asked, sleep=1)
    assert (one.answered()["tokens"], one.answered()["cached"]) == (expected, found)
    assert one.answer(asked) == (expected, [0])
    assert one.answer(asked) == (expected, found), "what it has saved since"
    assert other.answer(asked) == (expected, found), "the pool kept its pages"


def test_preempted_requests_are_answered_the_same(machine: Machine, tmp_path: Path) -> None:
    """33 blocks, of which four requests want 10 each."""
    path = model(tmp_path, "llama")
    machine.serve("pool", dram="64MiB")
    plain = engine(machine, path)
    one = engine(machine, path, transfer("pool"), num_gpu_blocks_override=34)
    ready(plain, one)
    random = np.random.default_rng(3)
    asked = [random.integers(3, 900, 300).tolist() for _ in range(4)]
    expected, _ = plain.answer(asked)
    assert one.answer(asked)[0] == expected
    assert one.answer(asked) == (expected, by_hand(asked))


def test_aborted_requests_give_everything_back(machine: Machine, tmp_path: Path) -> None:
    """Aborted before they run, while their pages are loaded, and in the middle: where the cache has room for three."""
    machine.serve("pool", dram="64MiB")
    one = engine(machine, model(tmp_path, "llama"), transfer("pool"), num_gpu_blocks_override=34)
    ready(one)
    asked = prompts()
    expected, _ = one.answer(asked)
    for round_ in range(24):
        one.tell(asked, abort=round_ % 6)
    one.wait_for("aborted", 24, 120)
    assert one.answer(asked) == (expected, by_hand(asked))
    pool = machine.connect("pool")
    one.kill()
    wait_until("nothing is reserved", lambda: pool.stats()["reservations"] == 0)
    assert pool.verify()["findings"] == []


def test_thousands_of_requests_leave_nothing_behind(machine: Machine, tmp_path: Path) -> None:
    """Ten thousand, of a page or two, each with a prefix and an end of its own or another's."""
    machine.serve("pool", dram="8MiB")
    one = engine(machine, model(tmp_path, "llama"), transfer("pool"))
    ready(one)
    random = np.random.default_rng(4)
    rss = []
    for _ in range(10):
        asked = [random.integers(3, 900, 64 + int(more)).tolist() for more in random.integers(1, 80, 1000)]
        one.ask(asked, tokens=1)
        assert len(one.answered(400)["tokens"]) == 1000
        status = Path(f"/proc/{one.pid}/status").read_text()
        rss.append(int(status.split("VmRSS:")[1].split()[0]) << 10)
    assert rss[-1] - rss[4] < 48 << 20, rss
    pool = machine.connect("pool")
    assert pool.stats()["clients"]["pages_put"] > 10_000
    one.kill()
    wait_until("nothing is reserved", lambda: pool.stats()["reservations"] == 0)
    assert pool.verify()["findings"] == []
