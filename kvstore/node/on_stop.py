"""OnStop: whether a node's memory will be lost when its process ends, which decides for ``on_stop = auto``.

Shared memory stays while the machine runs, so a daemon that is started again finds its pages. The memory is lost when
the machine shuts down, or when a container with its own shared memory ends. ``auto`` applies the first row that fits::

    the pool has no name                                              lost
    systemd runs, and its state is "stopping"                         lost
    systemd runs in any other state                                   stays
    a scheduled shutdown is due, or the runlevel is 0 or 6            lost
    a container (with its own process ids and IPC) in which this      lost
        process is the first one, or a child of the first one
    otherwise                                                         stays

A wrong guess "lost" costs ``stop_save_s`` seconds. A wrong guess "stays" costs the pages that only DRAM has. Set
``on_stop`` to "save" or "keep" to avoid the guess.
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
# The host's own namespaces always have these numbers (linux/proc_ns.h).
_MACHINE_PIDS, _MACHINE_IPC = "pid:[4026531836]", "ipc:[4026531839]"
_UTMP = struct.Struct("<hxxi376x")  # type, pid; the pid of a runlevel record has the letters of the runlevel
_RUN_LVL = 1
_RUNNING = ("initializing", "starting", "running", "degraded", "maintenance")


def ask_systemd() -> str:
    """Return the output of ``systemctl is-system-running``; "" if it cannot be run or gives no answer."""
    try:
        command = subprocess.run(
            ["systemctl", "is-system-running"], capture_output=True, text=True, timeout=SYSTEMCTL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return command.stdout.strip()


@dataclass(frozen=True)
class Surroundings:
    """Sources of the facts. Tests replace them.

    Attributes:
        systemd: returns the state of systemd, see ``ask_systemd``.
        proc, run: the folders.
        pid, parent: ids of this process and its parent; 0 means that they are looked up.
    """

    systemd: Callable[[], str] = ask_systemd
    proc: Path = Path("/proc")
    run: Path = Path("/run")
    pid: int = 0
    parent: int = 0


def reason_of_loss(name: str, around: Surroundings | None = None) -> str:
    """Return why the memory of the node with this name will be lost when this process ends; "" if it stays."""
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
    is_first = 1 in (around.pid or os.getpid(), around.parent or os.getppid())
    pids, ipc = _namespace(around, "pid"), _namespace(around, "ipc")
    is_container = pids not in ("", _MACHINE_PIDS) and ipc not in ("", _MACHINE_IPC)
    return "the container ends" if is_first and is_container else ""


def save_s(config: NodeConfig, name: str, around: Surroundings | None = None) -> tuple[float, str]:
    """Return how many seconds the stop may take to save what only DRAM has, and the reason; 0 seconds if nothing has to
    be saved."""
    if not config.nvme or config.on_stop == "keep":
        return 0.0, ""
    why = "on_stop is save" if config.on_stop == "save" else reason_of_loss(name, around)
    return (config.stop_save_s if why else 0.0), why


def _is_shutdown_due(path: Path) -> bool:
    """Return True if the time in the file of ``shutdown`` has come. It is in microseconds since 1970."""
    try:
        lines = dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
        return int(lines.get("USEC", "")) <= time.time() * 1e6
    except (OSError, ValueError):
        return False


def _runlevel(path: Path) -> str:
    """Return the letter of the runlevel; "none" if it is unknown."""
    try:
        data = path.read_bytes()
    except OSError:
        return "none"
    for offset in range(0, len(data) - _UTMP.size + 1, _UTMP.size):
        kind, letters = _UTMP.unpack_from(data, offset)
        if kind == _RUN_LVL:
            return chr(letters & 0xFF)
    return "none"


def _namespace(around: Surroundings, kind: str) -> str:
    try:
        return os.readlink(around.proc / "self/ns" / kind)
    except OSError:
        return ""
