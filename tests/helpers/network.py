"""Machines with addresses of their own, and links between them that can be cut: network namespaces, which need root.

Every namespace has one link, to a router in the middle, so that what is cut is lost on the way and nobody is told.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.helpers.nursery import Nursery
from tests.helpers.processes import Daemon, Machine, P

PORT = 7071
RUN = Path("/run/netns")
_NEWNET = 0x40000000  # CLONE_NEWNET
_numbers = itertools.count()


def why_not() -> str:
    """Why there can be no namespaces here; "" where there can."""
    name = f"kvt{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
    except (OSError, RuntimeError) as error:
        return f"network namespaces cannot be made here: {error}"
    try:
        _ip("-n", name, "link", "add", "x", "type", "veth", "peer", "name", "y")
        _ip("-n", name, "rule", "add", "from", "10.0.0.1", "to", "10.0.0.2", "blackhole")
    except RuntimeError as error:
        return f"links of namespaces cannot be made or cut here: {error}"
    finally:
        _ip("netns", "del", name)
    return ""


class Network:
    """A namespace per name. ``close`` takes all of them away."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"kvt{os.getpid()}-{next(_numbers)}-"
        self._router = f"{self._prefix}router"
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._made: list[str] = []
        try:
            self._make(self._router)
            subprocess.run(
                [*self._enter(self._router), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"],
                check=True,
                timeout=30,
            )
            for name, number in self._numbers.items():
                self._link(name, number)
        except BaseException:
            self.close()
            raise

    def address(self, name: str) -> str:
        """Of the machine of that name."""
        return f"10.77.{self._numbers[name]}.2"

    def enter(self, name: str) -> list[str]:
        """What goes before a command line that is to run there."""
        return self._enter(self._prefix + name)

    def inside(self, name: str) -> ThreadPoolExecutor:
        """A thread whose sockets, and those of threads that it starts, are there."""
        if name not in self._threads:
            path = RUN / (self._prefix + name)
            self._threads[name] = ThreadPoolExecutor(1, f"in {name}", _move, (path,))
        return self._threads[name]

    def cut(self, name: str) -> None:
        """Nothing comes to that machine or leaves it."""
        _ip("-n", self._router, "link", "set", f"to-{name}", "down")

    def heal(self, name: str) -> None:
        """Undo ``cut``."""
        _ip("-n", self._router, "link", "set", f"to-{name}", "up")

    def lose(self, source: str, target: str) -> None:
        """What one sends the other is lost; what the other sends is not."""
        _ip("-n", self._router, "rule", "add", "from", self.address(source), "to", self.address(target), "blackhole")

    def find(self, source: str, target: str) -> None:
        """Undo ``lose``."""
        _ip("-n", self._router, "rule", "del", "from", self.address(source), "to", self.address(target), "blackhole")

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        for name in reversed(self._made):
            _ip("netns", "del", name)

    def _make(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _link(self, name: str, number: int) -> None:
        there, near, far = self._prefix + name, f"to-{name}", "eth0"
        self._make(there)
        _ip("-n", self._router, "link", "add", near, "type", "veth", "peer", "name", far, "netns", there)
        _ip("-n", self._router, "addr", "add", f"10.77.{number}.1/24", "dev", near)
        _ip("-n", self._router, "link", "set", near, "up")
        _ip("-n", there, "addr", "add", f"10.77.{number}.2/24", "dev", far)
        _ip("-n", there, "link", "set", far, "up")
        _ip("-n", there, "route", "add", "default", "via", f"10.77.{number}.1")

    def _enter(self, name: str) -> list[str]:
        return ["nsenter", f"--net={RUN / name}"]


class FarMachine(Machine):
    """Each node's processes are on the machine of its name, and their data servers ask for TLS; what has no node's name
    runs on ``here``."""

    def __init__(self, logs: Path, network: Network, here: str, env: dict[str, str], **flags: str) -> None:
        super().__init__(logs)
        self._network = network
        self._here = here
        self._env = env
        self._common = flags

    def start(self, kind: type[P], what: str, command: Sequence[str], nursery: Nursery | None = None, **env: str) -> P:
        name = command[command.index("--name") + 1] if "--name" in command else self._here
        return super().start(kind, what, [*self._network.enter(name), *command], None, **self._env, **env)

    def spawn(self, name: str, **options: Any) -> Daemon:
        if options:
            options |= {"data": f"{self._network.address(name)}:{PORT}", **self._common}
        return super().spawn(name, **options)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _move(namespace: Path) -> None:
    """This thread is there from now on."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, _NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(fd)
