"""``kvstore demo``: real engines of a tiny model, few requests; what it says adds up, and nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from engine.demo.script import Script, encoder, read_documents, turns
from engine.simulator.trace import TraceRequest
from tests.helpers.processes import CLI, Machine, Process, wait_until

SMALL = ("--model", "tiny-llama", "--requests", "6", "--nvme", "128MiB", "--dram", "48MiB")
RUN_S = 240.0
START_S = 120.0  # two engines load torch, beside whatever else this machine does


@pytest.mark.slow
def test_what_is_reused_survives_the_kill_and_the_restart(machine: Machine, tmp_path: Path) -> None:
    result = machine.run("demo", *SMALL, "--folder", str(tmp_path), "--json", timeout_s=RUN_S)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    rows = told["requests"]
    assert told["same_answers"] is True and all(row["same"] and row["answer_tokens"] for row in rows)
    for row in rows:
        assert (
            row["hbm_tokens"] + row["dram_tokens"] + row["nvme_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
        ), row
        assert row["ttft_ms"] > 0 < row["ttft_without_ms"]
        assert bool(row["loaded_bytes"]) == (row["dram_tokens"] + row["nvme_tokens"] > 0)
        assert bool(row["moved_bytes"]) == (row["computed_by"] == "prefill"), row
    assert [row["phase"] for row in rows] == ["up"] * 3 + ["down"] + ["again"] * 2 + ["restarted"] * 4
    assert {row["computed_by"] for row in rows} == {"prefill", "decode"}
    assert len({row["user"] for row in rows}) < len(rows), "conversations go on"
    before = [row for row in rows if row["phase"] != "restarted"]
    assert sum(row["dram_tokens"] for row in before) > 0 and any(row["dram_tokens"] for row in before[4:])
    assert not any(row["hbm_tokens"] for row in before)
    assert all(row["nvme_tokens"] > row["computed_tokens"] for row in rows[6:8]), "what DRAM held was saved"
    assert all(row["hbm_tokens"] > row["computed_tokens"] for row in rows[8:]), "the engine kept them since"
    assert len(told["chats"]) == 4 and all(chat["answer"] and chat["route"]["answers"] for chat in told["chats"])
    assert told["chats"][1]["cached_tokens"] > 0, "the second chat begins as the first one"
    totals, tiers = told["totals"], told["tiers"]
    assert totals["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows) and 0 < totals["reused_ratio"] < 1
    assert tiers["dram"]["pages"] > 0 < tiers["nvme"]["pages"]
    assert os.listdir(tmp_path) == os.listdir(machine.shm_dir) == []


@pytest.mark.slow
def test_a_pool_of_nodes_and_what_its_faults_cost(machine: Machine, tmp_path: Path) -> None:
    result = machine.run(
        "demo", "--nodes", "3", "--model", "tiny-llama", "--folder", str(tmp_path), "--json", timeout_s=RUN_S
    )
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    quiet, no_daemon, nothing, again = told["acts"]
    assert told["same_answers"] is True and all(act["same"] for act in told["acts"])
    for act in (quiet, no_daemon, again):
        assert act["elsewhere_tokens"] > act["computed_tokens"] > 0, act
        assert act["prompt_tokens"] == act["here_tokens"] + act["elsewhere_tokens"] + act["computed_tokens"], act
    assert nothing["computed_tokens"] == nothing["prompt_tokens"] - nothing["here_tokens"]
    assert os.listdir(tmp_path) == os.listdir(machine.shm_dir) == []


@pytest.mark.slow
def test_sigterm_ends_everything_it_started(machine: Machine, tmp_path: Path) -> None:
    disk, work = tmp_path / "disk", tmp_path / "w"
    disk.mkdir()
    work.mkdir()
    command = [*CLI, "demo", *SMALL, "--folder", str(disk)]
    demo = machine.start(Process, "demo", command, TMPDIR=str(work))
    wait_until("the first answer", lambda: "user 1.1" in demo.output(), START_S)
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    assert len(children) == 3, "a node and two engines"
    demo.signal(signal.SIGTERM)
    try:
        assert demo.wait(60.0) == 130, demo.trace()
        left = [child for child in children if Path(f"/proc/{child}").exists()]
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
    assert left == []
    assert os.listdir(disk) == os.listdir(work) == os.listdir(machine.shm_dir) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--nvme", "512TiB"), "folder: the NVMe file needs"),
        (("--folder", "/none"), "folder: /none: No such file"),
        (("--model", "no-such"), "model: 'no-such' is no preset"),
        (("--documents", "/none"), "documents: /none has no documents"),
        (("--trace", "/none"), "/none: No such file"),
    ],
)
def test_what_cannot_be_is_said_first(
    machine: Machine, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    result = machine.run("demo", "--folder", str(tmp_path), *arguments)
    assert result.returncode != 0 and reason in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert os.listdir(machine.shm_dir) == os.listdir(tmp_path) == []


def test_conversations_follow_a_trace() -> None:

    opening = TraceRequest(0, 1200, 300, (0, 1, 2))
    other = TraceRequest(1000, 2000, 300, (0, 3, 4, 5))
    later = TraceRequest(2000, 1800, 300, (0, 1, 6, 7))  # goes on with the first
    asked = turns([opening, other, later])
    assert [(turn.conversation, turn.number) for turn in asked] == [(0, 1), (1, 1), (0, 2)]
    assert asked[0].text_tokens < asked[1].text_tokens and asked[2].text_tokens > 0
    script = Script(read_documents(None), encoder(None))
    first = list(script.prompt(asked[0]).tokens)
    script.answered(asked[0], [1, 2, 3])
    script.prompt(asked[1])
    assert script.prompt(asked[2]).tokens[: len(first) + 3] == [*first, 1, 2, 3]
