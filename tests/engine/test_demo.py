"""``kvstore demo``: real engines of a tiny model; what it says adds up, and nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.processes import CLI, Machine, Process, wait_until

SMALL = ("--model", "tiny-llama", "--nvme", "128MiB", "--dram", "48MiB")
RUN_S = 240.0
START_S = 120.0  # two engines load torch, next to whatever else this machine does


@pytest.mark.slow
def test_what_is_reused_survives_the_kill_and_the_restart(machine: Machine, tmp_path: Path) -> None:
    result = machine.run("demo", *SMALL, "--folder", str(tmp_path), "--json", timeout_s=RUN_S)
    assert result.returncode == 0, result.stderr
    demo = json.loads(result.stdout)
    rows = demo["requests"]
    assert demo["same_answers"] is True and all(row["same"] and row["answer"] for row in rows)
    for row in rows:
        assert (
            row["hbm_tokens"] + row["dram_tokens"] + row["nvme_tokens"] + row["computed_tokens"] == row["prompt_tokens"]
        ), row
        assert row["ttft_ms"] > 0 < row["ttft_without_ms"]
        assert bool(row["loaded_bytes"]) == (row["dram_tokens"] + row["nvme_tokens"] > 0)
        assert bool(row["moved_bytes"]) == (row["computed_by"] == "prefill"), row
    phases = {phase: [row for row in rows if row["phase"] == phase] for phase in ("up", "killed", "back", "restarted")}
    assert {row["computed_by"] for row in rows} == {"prefill", "decode"}
    for phase in ("killed", "back"):
        assert all(row["dram_tokens"] + row["nvme_tokens"] > row["computed_tokens"] for row in phases[phase]), phase
    assert not any(row["hbm_tokens"] for row in rows if row["phase"] != "restarted")
    from_disk, kept = phases["restarted"][:2], phases["restarted"][2:]
    assert all(row["nvme_tokens"] > row["computed_tokens"] for row in from_disk), "what DRAM held was saved"
    assert all(row["hbm_tokens"] > row["computed_tokens"] for row in kept), "the engine kept them since"
    assert all(chat["answer"] and chat["route"]["answers"] for chat in demo["chats"])
    assert demo["chats"][1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "it begins as the first one"
    assert os.listdir(tmp_path) == os.listdir(machine.shm_dir) == []


@pytest.mark.slow
def test_sigterm_ends_everything_it_started(machine: Machine, tmp_path: Path) -> None:
    disk, work = tmp_path / "disk", tmp_path / "w"
    disk.mkdir()
    work.mkdir()
    command = [*CLI, "demo", *SMALL, "--folder", str(disk)]
    demo = machine.start(Process, "demo", command, TMPDIR=str(work))
    wait_until("the first answer", lambda: "user 1, turn 1" in demo.output(), START_S)
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
    assert len(children) == 4, "a node, two engines and a conductor"
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
