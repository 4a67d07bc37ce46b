"""What else vLLM asks of a connector: its name, its metrics, a reset, and what proxies pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.hosts import VLLM
from tests.helpers.processes import Machine
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
