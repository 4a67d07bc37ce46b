"""``kvstore demo``: both acts with few requests; what it says adds up, and nothing of it is left."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.process.harness import Machine

SIZES = ("--requests", "4", "--dram", "192MiB", "--nvme", "512MiB")


def test_pages_survive_the_kill_and_the_restart(machine: Machine, tmp_path: Path) -> None:
    result = machine.run("demo", *SIZES, "--folder", str(tmp_path), "--json", timeout_s=120.0)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    rows, kill, reboot = told["requests"], told["kill"], told["reboot"]
    assert told["bytes_right"] is True and len(rows) == 4
    assert all(row["read"]["pages"] == row["written"]["pages"] for row in rows), rows
    assert told["pages_reused_dram"] + told["pages_reused_nvme"] + told["pages_stored"] == told["pages"]
    assert kill["read"]["pages"] == sum(row["written"]["pages"] for row in rows[:2]), "all that was there"
    capacity = told["tiers"]["dram"]["capacity_bytes"] // told["page_bytes"]
    assert told["pages_stored"] > capacity >= told["tiers"]["dram"]["pages"], "more than DRAM can hold"
    assert reboot["pages_kept"] >= told["pages_stored"] - capacity, "what was not in DRAM was on NVMe"
    assert reboot["read"]["nvme_pages"] == reboot["read"]["pages"] > 0
    assert os.listdir(tmp_path) == os.listdir(machine.shm_dir) == []


def test_no_room_for_the_nvme_file_is_said_first(machine: Machine, tmp_path: Path) -> None:
    for folder, nvme, reason in ((tmp_path, "512TiB", "has"), (tmp_path / "none", "1GiB", "No such file")):
        result = machine.run("demo", "--nvme", nvme, "--folder", str(folder))
        assert result.returncode != 0 and "kvstore: folder" in result.stderr and reason in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and result.stdout == ""
    assert os.listdir(machine.shm_dir) == os.listdir(tmp_path) == []
