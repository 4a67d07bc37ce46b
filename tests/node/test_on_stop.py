"""OnStop: what a node that ends sees of whether its memory stays."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.config import NodeConfig, node_config
from kvstore.errors import InvalidRequest
from kvstore.node import on_stop
from kvstore.node.on_stop import Surroundings, reason_of_loss, save_s

PIDS, IPC = 4026531836, 4026531839  # of the machine itself
NAME = "kvstore-n"
NVME = node_config(nvme="/nowhere/kv:1GiB")


def around(
    folder: Path, systemd: str = "", pid: int = 100, parent: int = 50, pids: int = PIDS, ipc: int = IPC
) -> Surroundings:
    (folder / "proc/self/ns").mkdir(parents=True)
    (folder / "proc/self/ns/pid").symlink_to(f"pid:[{pids}]")
    (folder / "proc/self/ns/ipc").symlink_to(f"ipc:[{ipc}]")
    (folder / "run/systemd/shutdown").mkdir(parents=True)
    return Surroundings(lambda: systemd, folder / "proc", folder / "run", pid, parent)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({}, ""),
        ({"systemd": "stopping"}, "shutting down"),
        ({"systemd": "stopping", "pids": 7, "ipc": 8}, "shutting down"),
        ({"systemd": "running"}, ""),
        ({"systemd": "degraded", "pids": 7, "ipc": 8, "parent": 1}, ""),  # it starts us again
        ({"systemd": "offline", "pids": 7, "ipc": 8, "pid": 1, "parent": 0}, "container"),
        ({"pids": 7, "ipc": 8, "pid": 1, "parent": 0}, "container"),
        ({"pids": 7, "ipc": 8, "pid": 20, "parent": 1}, "container"),
        ({"pids": 7, "ipc": 8}, ""),  # somebody in there may start it again
        ({"pids": 7, "pid": 1}, ""),  # the host's shared memory
        ({"ipc": 8, "parent": 1}, ""),  # the host's processes
        ({"parent": 1}, ""),  # a daemon of the machine, whose parent is gone
    ],
)
def test_where_reason_of_loss(facts: dict[str, Any], why: str, tmp_path: Path) -> None:
    reason = reason_of_loss(NAME, around(tmp_path, **facts))
    assert why in reason and bool(reason) == bool(why)


def test_a_shutdown_that_is_due(tmp_path: Path) -> None:
    here = around(tmp_path)
    scheduled = here.run / "systemd/shutdown/scheduled"
    for text, due in (
        (f"USEC={int(time.time() * 1e6) - 1}\nWARN_WALL=1\nMODE=poweroff\n", True),
        (f"USEC={int(time.time() * 1e6) + 3600 * 10**6}\nMODE=poweroff\n", False),
        ("USEC=soon\n", False),
        ("", False),
    ):
        scheduled.write_text(text)
        assert bool(reason_of_loss(NAME, here)) == due, text


def test_what_an_end_does(tmp_path: Path) -> None:
    stays, goes = around(tmp_path / "a"), around(tmp_path / "b", systemd="stopping")
    assert save_s(NVME, NAME, stays) == (0.0, "")
    assert save_s(NVME, NAME, goes) == (20.0, "the machine is shutting down")
    assert save_s(node_config(nvme="/nowhere/kv:1GiB", on_stop="keep"), NAME, goes) == (0.0, "")
    assert save_s(node_config(nvme="/nowhere/kv:1GiB", on_stop="save", stop_save_s=3), NAME, stays)[0] == 3.0
    assert save_s(NodeConfig(on_stop="save"), NAME, goes) == (0.0, ""), "there is nowhere to save to"
    for bad in ({"on_stop": "perhaps"}, {"stop_save_s": 0}):
        with pytest.raises(InvalidRequest, match=next(iter(bad))):
            node_config(**bad)


def test_systemd_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, **how: Any) -> Any:
        raise subprocess.TimeoutExpired("systemctl", how["timeout"])

    monkeypatch.setattr(subprocess, "run", late)
    assert on_stop.ask_systemd() == ""
