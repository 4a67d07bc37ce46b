"""OnStop: will the memory of a node that ends be there for the next start? What ``on_stop = auto`` goes by.

Shared memory stays while the machine runs, so that a daemon that is merely started again finds its pages. It goes with
the machine, and with a container that has one of its own. ``auto`` asks, in this order::

    a pool without a name of its own                              it goes with its process
    systemd runs, and says "stopping"                             it goes
    systemd runs, and says anything else                          it stays
    a scheduled shutdown is due, or the runlevel is 0 or 6        it goes
    a container (own process ids, own IPC), of which this         it goes
        process is the first one, or a child of the first one
    else                                                          it stays

A wrong guess costs ``stop_save_s`` one way and the pages that only DRAM held the other; ``on_stop`` says it outright.
"""

from __future__ import annotations

import os
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import NodeConfig
from kvstore.shm.folder import EMBEDDED_PREFIX

SYSTEMCTL_S = 2.0
# Namespaces of the machine itself have these numbers for ever (linux/proc_ns.h).
_MACHINE_PIDS, _MACHINE_IPC = "pid:[4026531836]", "ipc:[4026531839]"
_UTMP = struct.Struct("<hxxi376x")  # type, pid: of the runlevel's record its letters
_RUN_LVL = 1
_RUNNING = ("initializing", "starting", "running", "degraded", "maintenance")


def ask_systemd() -> str:
    """What ``systemctl is-system-running`` says; "" where it cannot be asked."""
    try:
        asked = subprocess.run(
            ["systemctl", "is-system-running"], capture_output=True, text=True, timeout=SYSTEMCTL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip()


@dataclass(frozen=True)
class Surroundings:
    """Where all this is looked up."""

    systemd: Callable[[], str] = ask_systemd
    proc: Path = Path("/proc")
    run: Path = Path("/run")
    pid: int = 0
    """The process id to look up; 0: this process's."""
    parent: int = 0


def memory_goes(name: str, around: Surroundings | None = None) -> str:
    """Why the memory of the node of that name goes with this process, in words; "" where it stays."""
    around = around or Surroundings()
    if name.startswith(EMBEDDED_PREFIX):
        return "the store has no name"
    systemd = around.systemd()
    if systemd == "stopping":
        return "the machine is shutting down"
    if systemd in _RUNNING:
        return ""
    if _is_shutdown_due(around.run / "systemd/shutdown/scheduled") or _runlevel(around.run / "utmp") in "06":
        return "the machine is shutting down"
    first = 1 in (around.pid or os.getpid(), around.parent or os.getppid())
    own = _namespace(around, "pid") not in ("", _MACHINE_PIDS) and _namespace(around, "ipc") not in ("", _MACHINE_IPC)
    return "the container ends" if first and own else ""


def save_s(config: NodeConfig, name: str, around: Surroundings | None = None) -> tuple[float, str]:
    """(seconds, why) that this end of the node should take to save what only DRAM holds; 0 where it stays there."""
    if not config.nvme or config.on_stop == "keep":
        return 0.0, ""
    why = "on_stop is save" if config.on_stop == "save" else memory_goes(name, around)
    return (config.stop_save_s if why else 0.0), why


def _is_shutdown_due(path: Path) -> bool:
    """``shutdown`` wrote the time there, in microseconds since 1970; a shutdown an hour ahead is not due."""
    try:
        lines = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
        return int(lines.get("USEC", "")) <= time.time() * 1e6
    except (OSError, ValueError):
        return False


def _runlevel(path: Path) -> str:
    """The letter of the runlevel; "none" if unknown."""
    try:
        data = path.read_bytes()
    except OSError:
        return "none"
    for at in range(0, len(data) - _UTMP.size + 1, _UTMP.size):
        kind, letters = _UTMP.unpack_from(data, at)
        if kind == _RUN_LVL:
            return chr(letters & 0xFF)
    return "none"


def _namespace(around: Surroundings, kind: str) -> str:
    try:
        return os.readlink(around.proc / "self/ns" / kind)
    except OSError:
        return ""
